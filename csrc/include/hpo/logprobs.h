// Log-probabilities and entropies from logits: the arithmetic of a row, whoever sums it. The definition is
// hpo_core/reference/logprobs.py.
//
// Everything is relative to the greatest logit m, delta = x - m: a common offset costs no digits. The element that m is of
// stays out of the sums: where it has nearly all the probability, 1 + 1e-20 would be 1.
#pragma once
#include <cfloat>
#include <cmath>

#include "hpo/api.h"
#include "hpo/math.h"

namespace hpo {

// e^(delta / temperature) = 2^(delta c), c in two parts: only delta is rounded.
struct Exponent {
  double inverse;   // 1 / temperature
  float high, low;  // c
  float least;      // of the deltas that count: below, e^(...) < 2^-125 is 0, as it is for -inf

  explicit HPO_INLINE Exponent(double temperature) : inverse(1.0 / temperature) {
    const double c = inverse * 1.4426950408889634074;
    high = float(c);
    low = float(c - double(high));
    const double cut = -125.0 / c;
    least = cut > -double(FLT_MAX) ? float(cut) : -FLT_MAX;
  }
};

// 2^r for |r| <= 1/2, within 1 ulp; 2^0 is exactly 1.
template <class F>
HPO_INLINE F exp2_near_0(F r) {
  using N = Number<F>;
  F p = all<F>(1.53533605e-4f);  // minimax polynomial of (2^r - 1) / r
  p = N::fused(p, r, all<F>(1.33988750e-3f));
  p = N::fused(p, r, all<F>(9.61843692e-3f));
  p = N::fused(p, r, all<F>(5.55033237e-2f));
  p = N::fused(p, r, all<F>(2.40226477e-1f));
  p = N::fused(p, r, all<F>(6.93147182e-1f));
  return N::fused(p, r, all<F>(1.0f));
}

// 2^(delta c) = scale(2^r, shifted) for delta c = r + k: `shifted` is 1.5 * 2^23 + k.
template <class F, class Scale>
HPO_INLINE F exp2_by(F delta, F high, F low, const Scale& scale) {
  using N = Number<F>;
  const F shifter = all<F>(12582912.0f);
  const F shifted = N::fused(delta, high, shifter);
  F r = N::fused(delta, high, -(shifted - shifter));
  r = N::fused(delta, low, r);
  return scale(exp2_near_0(r), shifted);
}

// e^(delta / temperature) for delta <= 0.
HPO_INLINE float exp_of(const Exponent& exponent, float delta) {
  if (delta < exponent.least) return 0.0f;
  return exp2_by(delta, exponent.high, exponent.low,
                 [](float value, float shifted) { return value * Number<float>::power_of_two(to_bits(shifted)); });
}

// What the elements of a row amount to: the greatest, the sum of e^(delta / temperature) over all others, and that of
// -delta e^(delta / temperature); that of e^(2 delta / temperature). Parts of a row can be merged in any order but have one
// order wherever bits count.
struct RowSums {
  float top;
  double others, spread, squares;
};

struct RowResult {
  float logp, entropy;
  // The statistics, of which the backward reads the first three. distance: the mean of -delta / temperature.
  float top, others, distance, squares;
};

HPO_INLINE RowResult undefined_result() { return {NAN, NAN, NAN, NAN, NAN, NAN}; }

// `logit`: that of the target, or -inf where the target is in another part of the vocabulary. A row of -inf only has no
// distribution, and neither has one with +inf or NaN, which the sums have met; a part may consist of -inf.
HPO_INLINE RowResult result_of(const RowSums& sums, const Exponent& exponent, float logit, bool is_whole) {
  if (!is_whole && sums.top == -HUGE_VALF && sums.others == sums.others) return {sums.top, 0.0f, sums.top, 0.0f, 0.0f, 0.0f};
  if (!(sums.top >= -FLT_MAX && sums.top <= FLT_MAX && sums.others == sums.others)) return undefined_result();
  RowResult result;
  const double normaliser = log1p(sums.others);
  const double distance = sums.spread * exponent.inverse / (1.0 + sums.others);
  result.logp = float((double(logit) - double(sums.top)) * exponent.inverse - normaliser);
  result.entropy = float(normaliser + distance);
  result.top = sums.top;
  result.others = float(sums.others);
  result.distance = float(distance);
  result.squares = float((1.0 + sums.squares) / ((1.0 + sums.others) * (1.0 + sums.others)));
  return result;
}

// The gradient of a logit is e^(delta / temperature) (constant + slope delta), but for the target's.
struct RowGradient {
  float constant, slope, target;
};

// a, b: the gradients of logp and entropy. With p = e^(delta / temperature) / (1 + s) and the mean distance R, log p + H is
// delta / temperature + R.
HPO_INLINE RowGradient gradient_of(const Exponent& exponent, float top, float others, float distance, float logit, double a,
                                   double b) {
  const double p = 1.0 / (1.0 + double(others));
  const double delta = double(logit) - double(top);
  // 1 - p of the target: where it is the greatest, the others' share, which a subtraction would lose.
  const double own = double(exp_of(exponent, logit - top)) * p;
  const double rest = delta == 0.0 ? double(others) * p : 1.0 - own;
  const double along = own == 0.0 ? 0.0 : own * (delta * exponent.inverse + double(distance));
  RowGradient gradient;
  gradient.constant = float(-(a + b * double(distance)) * exponent.inverse * p);
  gradient.slope = float(-b * exponent.inverse * exponent.inverse * p);
  gradient.target = float((a * rest - b * along) * exponent.inverse);
  return gradient;
}

}  // namespace hpo
