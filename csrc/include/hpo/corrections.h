// The arithmetic of corrections: C++ and CUDA call these, neither repeats them. The definition is
// hpo_core/reference/corrections.py.
#pragma once
#include "gates.h"

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
  using N = Number<F>;
  const F s = f / (all<F>(2.0f) + f), square = s * s;      // log(1 + f) = 2 artanh s, and f - 2 s = f s
  F p = all<F>(6.6666667e-2f);                             // Taylor of (artanh s - s) / s^3 on |s| <= 1 / 3
  p = N::fused(p, square, all<F>(7.6923077e-2f));
  p = N::fused(p, square, all<F>(9.0909091e-2f));
  p = N::fused(p, square, all<F>(1.1111111e-1f));
  p = N::fused(p, square, all<F>(1.4285714e-1f));
  p = N::fused(p, square, all<F>(0.2f));
  p = N::fused(p, square, all<F>(3.3333333e-1f));
  const F near = s * N::fused(all<F>(-2.0f) * square, p, f), far = f - log(x);
  return ((f > all<F>(-0.5f)) & (f < all<F>(1.0f))) ? near : far;
}

// p - q of p = e^first and q = e^second, the larger of which is given. As both go to 1, no difference of exponentials leaves
// digits.
template <class F>
HPO_INLINE F difference_from(F larger, F step) {
  const F zero = {}, size = step < zero ? -step : step, fall = larger * k3_slope(size, exp(-size));
  return step < zero ? -fall : fall;
}

template <class F>
HPO_INLINE F probability_difference(F first, F second) {
  const F zero = {}, bounded_first = bounded_logp(first), bounded_second = bounded_logp(second);
  const F step = bounded_first - bounded_second;
  return difference_from(exp(step < zero ? bounded_second : bounded_first), step);
}

// The KL divergence of (q, 1 - q) from (p, 1 - p) with the sign of d = p - q. It goes to 0 with the square of d, while the
// terms of its definition go with d itself and cancel: with c = 1 - q + guard and u = first - second it is
//   q (e^u - 1 - u) + (1 - q) (-d / c - log(1 - d / c)) - d guard / c
template <class F>
HPO_INLINE F signed_binary_kl(F first, F second, F u) {
  const F zero = {}, half = all<F>(0.5f), guard = all<F>(kBinaryGuard);
  const F bounded_first = bounded_logp(first), bounded_second = bounded_logp(second), step = bounded_first - bounded_second;
  const F p = exp(bounded_first), q = exp(bounded_second), d = difference_from(step < zero ? q : p, step);
  const F other_p = k3_slope(-bounded_first, p), other_q = k3_slope(-bounded_second, q);
  const F guarded = other_q + guard, share = d / guarded;
  const F near = q * (k3(-step, zero) + (step - u)), far = d - q * u;  // k3 takes no exponential where it is near
  const F of_token = ((step > -half) & (step < half)) ? near : far;
  const F of_others = other_q * log_shortfall(-share, (other_p + guard) / guarded);
  const F kl = of_token + of_others - guard * share;
  return d > zero ? kl : (d < zero ? -kl : zero);
}

// Of one token; NaN where it has none. What saturates is the log-ratio.
template <class F>
HPO_INLINE F statistic_of(Statistic statistic, F first, F second) {
  const F u = clamp(first - second, all<F>(-kSaturation), all<F>(kSaturation));
  F value = u;
  if (statistic == Statistic::k2) value = all<F>(0.5f) * u * u;
  if (statistic == Statistic::k3) value = k3(-clamp(u, all<F>(-kExponentBound), all<F>(kExponentBound)));
  if (statistic == Statistic::probability) value = probability_difference(first, second);
  if (statistic == Statistic::binary_kl) value = signed_binary_kl(first, second, u);
  return u != u ? u : value;
}

// A K3 may be e^20, of which sums in fixed point (see to_fixed) would hold few: whole multiples of this are counted apart.
constexpr float kCoarse = 2048.0f;

// Of the valid tokens of a leaf or a segment, in any order: sums are integers.
struct Reduced {
  int64_t valid = 0, fixed = 0, coarse = 0;
  float smallest = INFINITY, largest = -INFINITY;

  HPO_INLINE void add(const Reduced& other) {
    valid += other.valid, fixed += other.fixed, coarse += other.coarse;
    smallest = other.smallest < smallest ? other.smallest : smallest;
    largest = other.largest > largest ? other.largest : largest;
  }

  HPO_INLINE void add(float v) {
    const int32_t multiples = int32_t(v / kCoarse);
    add(Reduced{1, to_fixed(v - float(multiples) * kCoarse), multiples, v, v});
  }

  HPO_INLINE float as(Reduction reduction) const {
    if (valid == 0) return 0.0f;
    if (reduction == Reduction::min) return smallest;
    if (reduction == Reduction::max) return largest;
    const double sum = from_fixed(fixed) + double(coarse) * double(kCoarse);
    return float(reduction == Reduction::mean ? sum / double(valid) : sum);
  }
};

// Floats as integers in the same order, all above 0, and back.
HPO_INLINE int64_t ordered(float v) {
  const int32_t bits = to_bits(v);
  return uint32_t(bits < 0 ? ~bits : bits ^ INT32_MIN);
}

HPO_INLINE float from_ordered(int64_t word) {
  const int32_t bits = int32_t(uint32_t(word));
  return from_bits(bits < 0 ? bits ^ INT32_MIN : ~bits);
}

// A segment in integers, of which the sums count, or the maxima where an extremum is sought: valid tokens, and these.
constexpr int kWords = 3;

HPO_INLINE bool is_extremum(Reduction reduction) { return reduction == Reduction::min || reduction == Reduction::max; }

HPO_INLINE int64_t word_of(const Reduced& found, int word, Reduction reduction) {
  if (word == 0) return found.valid;
  if (!is_extremum(reduction)) return word == 1 ? found.fixed : found.coarse;
  return word == 2 || found.valid == 0 ? 0 : ordered(reduction == Reduction::min ? -found.smallest : found.largest);
}

HPO_INLINE float from_words(const int64_t* words, Reduction reduction) {
  const float most = from_ordered(words[1]);
  return Reduced{words[0], words[1], words[2], -most, most}.as(reduction);
}

// The factor for a statistic v between the bounds of one sign of the advantage.
template <class F>
HPO_INLINE F factor_of(Action action, bool strict, F low, F high, F v) {
  const F zero = {}, one = all<F>(1.0f), least = all<F>(-kExponentBound), most = all<F>(kExponentBound);
  if (action == Action::clamp) return exp(clamp(clamp(v, low, high), least, most));
  const F inside = action == Action::mask ? one : exp(clamp(v, least, most));
  if (strict) return ((low < v) & (v < high)) ? inside : zero;
  return ((low <= v) & (v <= high)) ? inside : zero;
}

HPO_INLINE float factor_of(const Correction& correction, int sign, float v) {
  return factor_of(correction.action, correction.strict, float(correction.low[sign]), float(correction.high[sign]), v);
}

}  // namespace hpo
