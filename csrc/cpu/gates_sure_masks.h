// Masks that a bound on their statistic decides, which needs no exponential and no logarithm: in most vectors it decides all
// tokens. Nothing but time depends on whether it decides a token.
#pragma once
#include "gates_sums.h"
#include "hpo/correction_rules.h"

namespace hpo::HPO_ISA {

// The bound decides no token within this of a limit, which is more than all roundings together, and none under a limit so
// small that kBinaryGuard, which keeps the logarithms of a binary KL finite, would count beside it.
constexpr float kUndecided = 0.02f, kLeastLimit = 1e-3f;

// Whether a bound decides tokens: the rule is a mask, its statistic has a bound, and its limits enclose 0.
inline bool has_sure_tokens(const RuleNumbers& rule) {
  const bool bounded = rule.statistic == Statistic::probability || rule.statistic == Statistic::binary_kl;
  bool around_zero = true;
  for (int sign = 0; sign < 2; ++sign) around_zero &= rule.low[sign] < 0.0f && 0.0f < rule.high[sign];
  return bounded && around_zero && rule.action == Action::mask;
}

// A bound between e^x and 1.062 e^x, for x in [-87, 0]: between whole exponents, 2^f lies below its chord.
HPO_INLINE Floats bound_of_exp(Floats x) {
  return Floats(
      rounded(Number<Floats>::fused(x, all<Floats>(12102203.0f), all<Floats>(1065353216.0f))));  // 2^23 / ln 2, 127 2^23
}

// The tokens that the mask certainly keeps; of the others it may keep some. With u = first - second and m the larger of the
// probabilities p = e^first and q = e^second,
//   |p - q| = m (1 - e^-|u|) <= m |u|,
//   KL of (q, 1 - q) from (p, 1 - p) <= m u^2 / (2 (1 - m)), and y / (1 + y) <= 1 - m for y = -log m.
HPO_INLINE Mask surely_inside(Statistic statistic, Floats first, Floats second, Floats low, Floats high) {
  const Floats zero = {}, one = all<Floats>(1.0f), least = all<Floats>(-87.0f), most = all<Floats>(1e30f);
  const Floats u = first - second, larger = u > zero ? first : second, m = bound_of_exp(larger);
  const Floats limit = u > zero ? high : -low, bounded = limit < most ? limit : most, under = bounded * (1.0f - kUndecided);
  const Mask ordinary = both(both(at_least(zero, larger), at_least(first, least)), at_least(second, least));
  const Mask known = both(ordinary, at_least(bounded, all<Floats>(kLeastLimit)));
  if (statistic == Statistic::probability) return both(known, at_least(under, m * (u > zero ? u : -u)));
  return both(known, at_least(-2.0f * larger * under, m * u * u * (one - larger)));
}

}  // namespace hpo::HPO_ISA
