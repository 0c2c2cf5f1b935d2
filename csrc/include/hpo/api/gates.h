// policy_loss.
#pragma once
#include "corrections.h"

namespace hpo {

enum class TokenGate : int32_t { identity = 0, drop = 1, clip = 2 };
enum class Routing : int32_t { through = 0, self = 1, stopped = 2 };
enum class Head : int32_t {
  linear = 0,
  score = 1,
  log = 2,
  mirror = 3,
  sigmoid = 4,
  simple = 5,
  target = 6,
  negative_aware = 7,
  flipped = 8,
  censored = 9
};
enum class Penalty : int32_t { none = 0, k1 = 1, k2 = 2, k3 = 3, absolute = 4 };
enum class KLEstimator : int32_t { none = 0, k1 = 1, k2 = 2, k3 = 3 };
enum class KLGradient : int32_t { value = 0, straight_through = 1, importance = 2 };

// The structure of a ratio gate: the choices that may specialise a kernel. Everything else is a run-time number.
struct GateStructure {
  TokenGate token;
  Head head;
  KLEstimator kl;
  KLGradient kl_gradient;
  int32_t strict;          // window selection: 1 `score > threshold`, 0 `score >= threshold`
  int32_t low_driven[2];   // 1: `low` replaces this bound per token; index 0: advantage >= 0, 1: advantage < 0
  int32_t high_driven[2];
};

struct GateNumbers {
  double token_low[2], token_high[2];  // ratio space; 0 and +inf are "no bound"; [advantage >= 0, < 0]
  double kl_beta;
};

struct PolicyLossArgs {
  int64_t tokens, rows;
  // [tokens]
  const float* logp;
  const float* old_logp;      // null: on-policy, the log-ratio is 0
  const float* ref_logp;
  const float* entropy;       // metrics only
  const float* score;         // window score: -inf undefined, NaN in error
  const float* token_weight;
  const float* low;           // per-token ratio bounds
  const float* high;
  const uint8_t* mask;        // null: every token of every row is valid
  const uint8_t* token_mask;
  // [rows + 1], [rows]
  const int64_t* cu_seqlens;
  const float* weights;
  const float* advantages;    // [rows], or [tokens] if advantage_per_token
  int32_t advantage_per_token;
  const float* threshold;     // [1], with score
  // with a term: the targets that some heads compare with the ratio, [rows], or [tokens] if target_per_token; and the tokens
  // that pay its penalty
  const float* target;
  int32_t target_per_token;
  const uint8_t* penalty_mask;  // [tokens]; null: every valid token
  const float* kl_weight;       // [tokens], with ref_logp: a factor on the penalty on it; not finite: 0
  TokenCorrection correction;
  // outputs
  float* loss;                // [1]
  double* metrics;            // [kMetrics], see metrics.h
  float* grad;                // [tokens]; null: not wanted
  float* token_loss;          // [tokens]; null: not wanted
  void* workspace;            // policy_loss_workspace(tokens, rows) bytes, 16-byte aligned, any content
};

// The log-probabilities that a correction compares, and those of the loss, null where these are the same tensors.
struct Compared {
  const float *first, *second;
  const float *logp, *old_logp, *ref_logp;
};

inline Compared compared(const PolicyLossArgs& args) {
  const TokenCorrection& own = args.correction;
  if (!own.second) return {args.logp, args.old_logp, nullptr, nullptr, nullptr};
  const float* old_logp = args.old_logp ? args.old_logp : args.logp;
  return {own.first ? own.first : args.logp, own.second, args.logp, old_logp, args.ref_logp};
}

}  // namespace hpo

extern "C" {
int64_t hpo_policy_loss_workspace(int64_t tokens, int64_t rows);
int hpo_policy_loss(const hpo::PolicyLossArgs* args, const hpo::GateStructure* structure, const hpo::GateNumbers* numbers,
                    int64_t context);
}
