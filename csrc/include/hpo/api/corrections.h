// correction: factors on tokens that compare two log-probabilities.
#pragma once
#include <cstdint>

namespace hpo {

enum class Statistic : int32_t { log_ratio = 0, k2 = 1, k3 = 2, probability = 3, binary_kl = 4 };
enum class Reduction : int32_t { mean = 0, sum = 1, min = 2, max = 3 };
enum class Action : int32_t { mask = 0, band = 1, clamp = 2 };

// How the statistic of two log-probabilities becomes a factor.
struct CorrectionRule {
  Statistic statistic;
  Action action;
  int32_t strict;  // a statistic on a bound is outside
  double low[2], high[2];  // of the statistic, [advantage >= 0, < 0]
};

// The factor of corrections on the tokens of a row.
struct RowFactor {
  float by_sign[2];  // of the advantage
  bool complete;     // each of its tokens has a statistic
  bool unmasked;     // each token with a statistic passes the rule of tokens, which is a mask
};

// A correction of rows, by the statistic of their tokens.
struct RowCorrection {
  CorrectionRule rule;
  Reduction reduction;
};

constexpr int kMostRowCorrections = 2;

// Factors of the sweep's own on the weight of every token, all over one pair of log-probabilities.
struct TokenCorrection {
  const float* first;   // [tokens]; null: logp
  const float* second;  // [tokens]; null: no correction
  CorrectionRule rule;  // by the statistic of the token
  // Read on the CPU alone: elsewhere a correction has a rule of tokens, and none of rows.
  int32_t of_tokens, of_rows;                // whether there is a rule of tokens; the number of those of rows
  RowCorrection rows[kMostRowCorrections];
  RowFactor* factors;                        // [rows], of all corrections of rows; workspace of the call, which writes it
};

struct PolicyLossArgs;
struct Hierarchy;

// A factor on tokens from u = logp - old_logp of PolicyLossArgs, whose mask, cu_seqlens, advantages and token_weight count too.
// PolicyLossArgs::correction, where given, has the two log-probabilities; a token whose log-ratios to old_logp and ref_logp are
// not both numbers is masked then.
//
// leaves and their segments are those of a Hierarchy of depth 1, or 0 where the statistic is the token's own.
struct Correction {
  CorrectionRule rule;
  Reduction reduction;
  float* factor;  // [tokens]: times token_weight; NaN where the statistic is; 1 times it where masked or in no leaf
};

}  // namespace hpo

extern "C" {
int64_t hpo_correction_workspace(int64_t tokens, int64_t leaves);
int hpo_correction(const hpo::PolicyLossArgs* args, const hpo::Hierarchy* hierarchy, const hpo::Correction* correction,
                   int64_t context);
}
