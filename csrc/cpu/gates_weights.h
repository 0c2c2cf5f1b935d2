// The weights of tokens: their own, and the factors of a correction by their own statistic.
#pragma once
#include "gates_binary_kl.h"
#include "hpo/api.h"

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
__attribute__((noinline)) inline void write_weights(const CorrectedWeights& of, int64_t begin, int from, int to,
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

}  // namespace hpo::HPO_ISA
