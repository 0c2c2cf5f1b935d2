// token_logprobs.
#pragma once
#include <cstdint>

namespace hpo {

enum class LogitType : int32_t { float32 = 0, bfloat16 = 1, float16 = 2 };

// Log-probability of a target and entropy of its distribution, for rows of logits over a vocabulary.
struct LogprobsArgs {
  int64_t rows, columns;      // columns >= 1: the part of the vocabulary that the logits are of
  int64_t first, vocabulary;  // id of the first column; size of the whole
  // row r begins at element (r / inner) * outer_stride + (r % inner) * inner_stride
  int64_t inner, outer_stride, inner_stride;
  const void* logits;
  LogitType type;
  const int64_t* targets;     // [rows]; outside [0, vocabulary): the row is undefined, NaN
  const float* temperatures;  // [rows]; null: that number for all. Where it is not above 0 the row is undefined.
  double temperature;
  int64_t ignore_index;  // rows with this target are not read and get 0
  const float* floors;   // [rows] or null; a logit that is not at least that counts as -inf
  int32_t kept;          // 2, 3 or 4 statistics of each row
  float* logp;           // [rows]; -inf where the target is not in this part
  float* entropy;        // [rows]; null if kept == 2
  // [kept][rows]: greatest logit, sum of the others, mean distance, sum of squared probabilities. A part in which all logits
  // are -inf has -inf and zeros, which change nothing when merged; a row of such parts alone is undefined.
  float* statistics;
};

struct LogprobsBackwardArgs {
  LogprobsArgs given;            // without outputs
  const float* statistics;        // of the whole vocabulary: the first two, and the third for an entropy_gradient
  const float* logp_gradient;     // [rows]; null: 0
  const float* entropy_gradient;  // [rows]; null: 0
  // The gradient has the type of the logits, and strides of its own. The logits themselves, at their strides: in place.
  void* grad;
  int64_t grad_outer_stride, grad_inner_stride;
};

}  // namespace hpo

extern "C" {
int hpo_token_logprobs(const hpo::LogprobsArgs* args, int64_t context);
int hpo_token_logprobs_backward(const hpo::LogprobsBackwardArgs* args, int64_t context);
}
