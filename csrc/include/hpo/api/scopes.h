// order_statistics.
#pragma once
#include "entropy.h"

namespace hpo {

// Order statistics of scopes: a scope is a list of segments, which are ranges of tokens.
struct OrderStatisticsArgs {
  int64_t tokens, segments, scopes;
  const float* values;     // [tokens]; the population are the finite ones. -inf is undefined, all others are errors.
  const uint8_t* mask;     // [tokens] or null
  const int64_t* offsets;  // [segments + 1]: segment n holds the tokens offsets[n] .. offsets[n + 1]
  // both null: scope c is segment c. Else scope c has the segments order[begin[c] .. begin[c + 1])
  const int64_t* order;    // [segments]
  const int64_t* begin;    // [scopes + 1]
  int64_t numerator, denominator;
  OrderRule rule;
  const int64_t* k;   // [scopes] or null: the k largest are selected, ties in the order of the list; no quantile then
  float* thresholds;  // [scopes] or null; NaN for an empty population
  int64_t* counts;    // [scopes][2] or null: population, errors
  uint8_t* selected;  // [tokens], null without k; zeros, as tokens outside of the scopes are not written
  void* workspace;    // order_statistics_workspace(tokens, segments) bytes, any content
};

}  // namespace hpo

extern "C" {
int64_t hpo_order_statistics_workspace(int64_t tokens, int64_t segments);
int hpo_order_statistics(const hpo::OrderStatisticsArgs* args, int64_t context);
}
