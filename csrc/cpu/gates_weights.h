// The weights of tokens: their own, and the factors of a correction by their own statistic or by that of their row.
#pragma once
#include "gates_binary_kl.h"
#include "hpo/api.h"
#include "rows.h"

namespace hpo::HPO_ISA {

// Whether tokens have weights that are not 1.
inline bool weighs_tokens(const PolicyLossArgs& args) { return args.token_weight || args.correction.second; }

// The signs of advantages: by token, from the first of these arrays that is not null, or one for all tokens.
struct Signs {
  const float* advantages;
  const int32_t* kinds;
  bool negative;

  HPO_INLINE Ints at(int i, Floats advantage) const {
    if (advantages) return advantage < 0.0f;
    return kinds ? Ints(load_lanes<Ints>(kinds + i) == kNegative) : Ints{} - int32_t(negative);
  }
};

// The weights of the tokens of a call that has a correction.
struct CorrectedWeights {
  const float *first, *second, *token_weight;
  const RuleNumbers rule;

  explicit CorrectedWeights(const PolicyLossArgs& args)
      : first(args.correction.first ? args.correction.first : args.logp),
        second(args.correction.second),
        token_weight(args.token_weight),
        rule(args.correction.rule) {}

  HPO_INLINE Floats factor(Mask own, Ints negative, Floats from, Floats to) const {
    if (rule.statistic == Statistic::binary_kl && rule.action == Action::mask) {  // bounds on it decide in less time
      const Floats zero = {}, least = all<Floats>(-87.0f), u = from - to;
      const Mask not_above = both(at_least(zero, from), at_least(zero, to));
      const Mask ordinary = both(not_above, both(at_least(from, least), at_least(to, least)));
      const Decided decided =
          decide_binary_kl(to, u, exp_of_number(u), by_sign<Floats>(negative, rule.low), by_sign<Floats>(negative, rule.high));
      if (!any(but_not(own, both(ordinary, either(decided.inside, decided.outside))))) {
        return keep_if(decided.inside, all<Floats>(1.0f));
      }
    }
    return rule.factor(negative, from, to, Exponential{});
  }
};

// Writes the weights of the tokens [from, to) behind `begin`. The function is not inline, so that the loops of gates keep their
// numbers in registers.
__attribute__((noinline)) inline void write_weights_of_tokens(const CorrectedWeights& of, int64_t begin, int from, int to,
                                                              const Signs& signs, float* weights) {
  const CorrectedWeights local = of;  // stores may alias
  for_each_vector(from, to, [&](int i, Mask own, auto whole) __attribute__((always_inline)) {
    constexpr bool kWhole = decltype(whole)::value;
    const int64_t at = begin + i;
    const auto load = [&](const float* tokens) __attribute__((always_inline)) { return load_own<kWhole>(own, tokens + at); };
    const Ints negative = signs.at(i, signs.advantages ? load_own<kWhole>(own, signs.advantages + i) : Floats{});
    const Floats factor = local.factor(own, negative, load(local.first), load(local.second));
    store_lanes(local.token_weight ? factor * load(local.token_weight) : factor, weights + i);
  });
}

// The same where the tokens are of one row and have its factor, but for those without a statistic, which only a row that is not
// complete has.
__attribute__((noinline)) inline void write_weights_of_row(const CorrectedWeights& of, const RowFactor& row, int64_t begin,
                                                           int from, int to, const Signs& signs, float* weights) {
  const CorrectedWeights local = of;
  const RowFactor factors = row;
  for_each_vector(from, to, [&](int i, Mask own, auto whole) __attribute__((always_inline)) {
    constexpr bool kWhole = decltype(whole)::value;
    const int64_t at = begin + i;
    const auto load = [&](const float* tokens) __attribute__((always_inline)) { return load_own<kWhole>(own, tokens + at); };
    const Ints negative = signs.at(i, signs.advantages ? load_own<kWhole>(own, signs.advantages + i) : Floats{});
    Floats factor = by_sign<Floats>(negative, factors.by_sign);
    if (!factors.complete) {
      const Floats v = statistic_of(local.rule.statistic, load(local.first), load(local.second));
      factor = v != v ? v : factor;
    }
    // Of the own tokens alone: a vector may begin before them.
    store_own<kWhole>(own, local.token_weight ? factor * load(local.token_weight) : factor, weights + i);
  });
}

// The weights of n tokens behind `begin`, whose rows are the segments.
inline void write_weights(const PolicyLossArgs& args, int64_t begin, int n, const Segments& segments, const Signs& signs,
                          float* weights) {
  const CorrectedWeights of(args);
  if (!args.correction.of_rows) return write_weights_of_tokens(of, begin, 0, n, signs, weights);
  for (const Segment& segment : segments) {
    const RowFactor& row = args.correction.rows[segment.row];
    write_weights_of_row(of, row, begin, segment.begin, segment.end, signs, weights);
  }
}

// The weights of the tokens [from, to) behind `begin`, which are of one row.
inline void write_weights(const PolicyLossArgs& args, int64_t row, int64_t begin, int from, int to, const Signs& signs,
                          float* weights) {
  const CorrectedWeights of(args);
  if (!args.correction.of_rows) write_weights_of_tokens(of, begin, from, to, signs, weights);
  else write_weights_of_row(of, args.correction.rows[row], begin, from, to, signs, weights);
}

// The factors of a correction over rows. A sweep computes those of a row that lies in one chunk right before it reads its
// tokens again; those of other rows are computed before. Functions of corrections.cpp.
struct RowFactors {
  RowFactor* factors;  // [rows]
  uint8_t* workspace;

  RowFactors(Arena& arena, int64_t tokens, int64_t rows);

  // The arguments with room for factors, and with those of rows in several chunks if this is the first sweep.
  PolicyLossArgs added_to(PolicyLossArgs args, bool first_sweep, int threads) const;
};

inline bool corrects_rows(const PolicyLossArgs& args) { return args.correction.second && args.correction.of_rows; }
void correct_row(const PolicyLossArgs& args, const Rows& rows, int64_t row);
void correct_rows(const PolicyLossArgs& args, const Rows& rows, int64_t chunk);

}  // namespace hpo::HPO_ISA
