// The arithmetic of corrections, token by token: C++ and CUDA call these, neither repeats them. The definition is
// hpo_core/reference/corrections.py.
#pragma once
#include "terms.h"

namespace hpo {

constexpr float kExponentBound = 20.0f;
constexpr float kBinaryGuard = 1e-8f;  // keeps the logarithm of a binary KL finite

// A log-probability for exp: rounding may lift it above 0, and below e^-87 nothing is left of a probability.
template <class F>
HPO_INLINE F bounded_logp(F logp) {
  return clamp(logp, all<F>(-87.0f), F{});
}

// f - log(1 + f) without cancellation; `x` is 1 + f with all its digits, where f may have lost them.
template <class F>
HPO_INLINE F log_shortfall(F f, F x) {
  const LogParts<F> parts = log_parts(x);
  const F k = parts.exponent, t = k == F{} ? f : parts.mantissa - 1.0f;  // 1 + f = (1 + t) 2^k
  const F near = (t * t) * Number<F>::fused(-t, log_tail(t), all<F>(0.5f));  // t - log(1 + t)
  const F far = Number<F>::fused(k, all<F>(-0.693359375f), f - t);           // exactly 0 where k is
  return near + Number<F>::fused(k, all<F>(2.12194440e-4f), far);
}

// p - q of p = e^first and q = e^second; ratio_of(u): e^u. As both go to 1, no difference of exponentials leaves digits.
template <class F, class RatioOf>
HPO_INLINE F probability_difference(F first, F second, const RatioOf& ratio_of) {
  const F bounded_second = bounded_logp(second), step = bounded_logp(first) - bounded_second;
  return -(exp(bounded_second) * k3_slope(-step, ratio_of(step)));
}

// The KL divergence of (q, 1 - q) from (p, 1 - p) with the sign of d = p - q. It goes to 0 with the square of d, while the
// terms of its definition go with d itself and cancel: with c = 1 - q + guard and u = first - second it is
//   q (e^u - 1 - u) + (1 - q) (-d / c - log(1 - d / c)) - d guard / c
template <class F, class RatioOf>
HPO_INLINE F signed_binary_kl(F first, F second, F u, const RatioOf& ratio_of) {
  const F zero = {}, half = all<F>(0.5f), guard = all<F>(kBinaryGuard);
  const F bounded_first = bounded_logp(first), bounded_second = bounded_logp(second), step = bounded_first - bounded_second;
  const F q = exp(bounded_second), ratio = ratio_of(step), d = -(q * k3_slope(-step, ratio));
  const F other_p = k3_slope(-bounded_first, q * ratio), other_q = k3_slope(-bounded_second, q);
  const F reciprocal = all<F>(1.0f) / (other_q + guard), share = d * reciprocal;
  const F near = q * (k3(-step, zero) + (step - u)), far = d - q * u;  // k3 takes no exponential where it is near
  const F of_token = ((step > -half) & (step < half)) ? near : far;
  const F of_others = other_q * log_shortfall(-share, (other_p + guard) * reciprocal);
  const F kl = of_token + of_others - guard * share;
  return d > zero ? kl : (d < zero ? -kl : zero);
}

// The statistic of one token; NaN where it has none, because its log-ratio is NaN or infinite. The log-ratio saturates, not the
// statistic. ratio_of(u): e^u of |u| <= 87.
template <class F, class RatioOf>
HPO_INLINE F statistic_of(Statistic statistic, F first, F second, const RatioOf& ratio_of) {
  const F difference = first - second, u = clamp(difference, all<F>(-kSaturation), all<F>(kSaturation));
  F value = u;
  if (statistic == Statistic::k2) value = all<F>(0.5f) * u * u;
  if (statistic == Statistic::k3) value = k3(-clamp(u, all<F>(-kExponentBound), all<F>(kExponentBound)));
  if (statistic == Statistic::probability) value = probability_difference(first, second, ratio_of);
  if (statistic == Statistic::binary_kl) value = signed_binary_kl(first, second, u, ratio_of);
  const F zero_or_nan = difference - difference;
  return zero_or_nan == F{} ? value : zero_or_nan;
}

template <class F>
HPO_INLINE F statistic_of(Statistic statistic, F first, F second) {
  return statistic_of(statistic, first, second, Exponential{});
}

// The exponent of the factor that a clamp makes of a statistic v.
template <class F>
HPO_INLINE F clamped_exponent(F low, F high, F v) {
  return clamp(clamp(v, low, high), all<F>(-kExponentBound), all<F>(kExponentBound));
}

// The factor for a statistic v between the bounds of one sign of the advantage.
template <class F>
HPO_INLINE F factor_of(Action action, bool strict, F low, F high, F v) {
  const F zero = {}, one = all<F>(1.0f), least = all<F>(-kExponentBound), most = all<F>(kExponentBound);
  if (action == Action::clamp) return exp(clamped_exponent(low, high, v));
  const F inside = action == Action::mask ? one : exp(clamp(v, least, most));
  if (strict) return ((low < v) & (v < high)) ? inside : zero;
  return ((low <= v) & (v <= high)) ? inside : zero;
}

// A rule in floats, as tokens need it.
struct RuleNumbers {
  Statistic statistic;
  Action action;
  bool strict;
  float low[2], high[2];

  HPO_INLINE explicit RuleNumbers(const CorrectionRule& rule)
      : statistic(rule.statistic), action(rule.action), strict(rule.strict != 0) {
    for (int sign = 0; sign < 2; ++sign) low[sign] = float(rule.low[sign]), high[sign] = float(rule.high[sign]);
  }

  // The factor of a token by its own statistic, NaN where it has none; ratio_of as in statistic_of.
  template <class F, class RatioOf>
  HPO_INLINE F factor(typename Number<F>::Int negative, F first, F second, const RatioOf& ratio_of) const {
    const F v = statistic_of(statistic, first, second, ratio_of);
    const F factor = factor_of(action, strict, by_sign<F>(negative, low), by_sign<F>(negative, high), v);
    return v != v ? v : factor;
  }
};

HPO_INLINE float factor_of(const CorrectionRule& rule, int sign, float v) {
  return factor_of(rule.action, rule.strict, float(rule.low[sign]), float(rule.high[sign]), v);
}

}  // namespace hpo
