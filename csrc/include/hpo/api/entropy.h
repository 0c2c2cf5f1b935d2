// window_score, order_statistic and select.
#pragma once
#include <cstdint>

namespace hpo {

enum class Boundary : int32_t { full = 0, shrink = 1, zero = 2, carry = 3 };
enum class Invalid : int32_t { skip = 0, stop = 1 };  // "break" in Python
enum class WindowAggregate : int32_t { mean = 0, sum = 1, max = 2, min = 3 };

struct WindowArgs {
  int64_t tokens, rows;
  const float* values;          // [tokens]
  const uint8_t* mask;          // [tokens] or null
  const int64_t* cu_seqlens;    // [rows + 1]
  int64_t first, last;          // the window of token t is {t + first, ..., t + last}, cut by its row; first <= last
  Boundary boundary;
  Invalid invalid;
  WindowAggregate aggregate;
  float* score;  // [tokens]: the aggregate; -inf where undefined or masked; NaN where the token's own value is not finite
  void* workspace;  // window_score_workspace(tokens, last - first + 1) bytes, any content
};

// index = rule(numerator * (n - 1) / denominator); linear interpolates between two of them, outside of kernels
enum class OrderRule : int32_t { ceil = 0, floor = 1, nearest = 2, linear = 3 };

struct OrderStatisticArgs {
  int64_t tokens, rows;
  const float* values;  // [tokens]; the population: the finite ones of their scores
  // both null: the values are scores. Else the score of a token is its value; -inf outside rows and where masked; NaN where
  // the value is not finite
  const uint8_t* mask;        // [tokens] or null
  const int64_t* cu_seqlens;  // [rows + 1]
  int64_t numerator, denominator;
  OrderRule rule;
  float* threshold;  // [1]; NaN for an empty population
  int64_t* counts;  // [2]: population, NaN scores
  int32_t strict;     // these two as in SelectArgs, with this threshold
  uint8_t* selected;  // [tokens] or null: then only the threshold is wanted
  void* workspace;  // order_statistic_workspace(tokens) bytes, any content
};

struct SelectArgs {
  int64_t tokens, rows;
  const float* values;        // as in OrderStatisticArgs
  const uint8_t* mask;
  const int64_t* cu_seqlens;
  const float* threshold;     // [1]
  int32_t strict;             // 1: score > threshold, 0: score >= threshold
  uint8_t* selected;          // [tokens]: 0 or 1
};

// The arguments of select after order_statistic.
inline SelectArgs selection_of(const OrderStatisticArgs& args) {
  return {args.tokens, args.rows, args.values, args.mask, args.cu_seqlens, args.threshold, args.strict, args.selected};
}

}  // namespace hpo

extern "C" {
int64_t hpo_window_score_workspace(int64_t tokens, int64_t width);
int hpo_window_score(const hpo::WindowArgs* args, int64_t context);
int64_t hpo_order_statistic_workspace(int64_t tokens);
int hpo_order_statistic(const hpo::OrderStatisticArgs* args, int64_t context);
int hpo_select(const hpo::SelectArgs* args, int64_t context);
}
