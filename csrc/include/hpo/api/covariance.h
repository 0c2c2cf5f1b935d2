// covariance.
#pragma once
#include <cstdint>

namespace hpo {

// The draw of tokens by their terms of the covariance.
struct CovarianceDraw {
  const float* old_logp;    // [tokens]; null: nothing is drawn
  double low, high;         // of terms, which lie between them
  double least, most;       // of the log-ratios of tokens with an advantage below 0, and above 0
  uint32_t factor, offset;  // of the pseudo-random numbers of places
};

// The terms of the covariance of log-probability and advantage, over the members: unmasked tokens where both are finite.
struct CovarianceArgs {
  int64_t tokens, rows;
  const float* logp;          // [tokens]
  const float* advantages;    // [rows], without rows [tokens]
  const int64_t* cu_seqlens;  // [rows + 1], or null: there are no rows. A token in no row is no member
  const uint8_t* mask;        // [tokens] or null
  CovarianceDraw draw;
  float* keys;       // [tokens]: the terms, or the numbers of the tokens that may be drawn; -inf elsewhere
  int64_t* members;  // [1], the number of them
  void* workspace;   // covariance_workspace(tokens) bytes, any content
};

}  // namespace hpo

extern "C" {
int64_t hpo_covariance_workspace(int64_t tokens);
int hpo_covariance(const hpo::CovarianceArgs* args, int64_t context);
}
