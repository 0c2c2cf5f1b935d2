// Log-probabilities and entropies from logits: the arithmetic of one row, shared by the CPU and CUDA kernels. The definition
// is hpo_core/reference/logprobs.py.
//
// All exponents are relative to the greatest logit m, delta = x - m, so a common offset costs no digits. The greatest element
// itself stays out of the sums: where it has nearly all the probability, 1 + 1e-20 would round to 1.
#pragma once
#include <cfloat>
#include <cmath>

#include "api/logprobs.h"
#include "math.h"

namespace hpo {

// e^(delta / temperature) = 2^(delta c). The constant c is kept in two floats, so that only delta is rounded.
struct Exponent {
  double inverse;   // 1 / temperature
  float high, low;  // c
  float least;      // the least delta that counts: below it e^(...) < 2^-125 is taken as 0, as it is for -inf

  Exponent() = default;
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

// 2^(delta c) = scale(2^r, shifted) with delta c = r + k and k an integer: `shifted` is 1.5 * 2^23 + k.
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
  const float e = exp2_by(delta, exponent.high, exponent.low,
                          [](float value, float shifted) { return value * Number<float>::power_of_two(to_bits(shifted)); });
  return delta < exponent.least ? 0.0f : e;
}

// The sums of a row, over all elements but the greatest. Sums of parts of a row can be merged in any order; kernels keep one
// fixed order, because the bits depend on it.
struct RowSums {
  float top;       // the logit that delta is relative to; in the end the greatest of the row
  double others;   // sum of e^(delta / temperature)
  double spread;   // sum of -delta e^(delta / temperature)
  double squares;  // sum of e^(2 delta / temperature)
};

// The same sums relative to `top`, which must not lie below sums.top unless the sums are empty.
HPO_INLINE RowSums moved(const RowSums& sums, float top, const Exponent& exponent) {
  const double factor = sums.top < top ? double(exp_of(exponent, sums.top - top)) : 1.0;
  const double distance = sums.top < top ? double(top) - double(sums.top) : 0.0;
  return {top, factor * sums.others, factor * (sums.spread + distance * sums.others), factor * factor * sums.squares};
}

struct RowResult {
  float logp, entropy;
  // The statistics; the backward reads the first three. distance: the mean of -delta / temperature under the softmax.
  float top, others, distance, squares;
};

HPO_INLINE RowResult undefined_result() { return {NAN, NAN, NAN, NAN, NAN, NAN}; }

// `logit`: the target's, or -inf where the target lies in another part of the vocabulary. A row whose logits are all -inf has
// no distribution; neither has a row with +inf or NaN, which shows in its sums. A part of a row may be all -inf.
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

// ------------------------------------------------------------------------------------------------------- arguments of a row

HPO_INLINE int64_t offset_of_row(const LogprobsArgs& args, int64_t row) {
  return row / args.inner * args.outer_stride + row % args.inner * args.inner_stride;
}

HPO_INLINE int64_t offset_of_gradient(const LogprobsBackwardArgs& args, int64_t row) {
  return row / args.given.inner * args.grad_outer_stride + row % args.given.inner * args.grad_inner_stride;
}

HPO_INLINE Exponent exponent_of(const LogprobsArgs& args, int64_t row) {
  return Exponent(args.temperatures ? double(args.temperatures[row]) : args.temperature);
}

HPO_INLINE bool is_ignored(const LogprobsArgs& args, int64_t row) { return args.targets[row] == args.ignore_index; }

// Whether a row has a target and a temperature, a normal number of float32 above 0.
HPO_INLINE bool is_defined(const LogprobsArgs& args, int64_t row, const Exponent& exponent) {
  const int64_t target = args.targets[row];
  return target >= 0 && target < args.vocabulary && exponent.inverse > 0.0 && exponent.inverse <= 1.0 / double(FLT_MIN);
}

// The column of the target, or -1 where it is in another part of the vocabulary.
HPO_INLINE int64_t target_column(const LogprobsArgs& args, int64_t row) {
  const int64_t column = args.targets[row] - args.first;
  return column >= 0 && column < args.columns ? column : -1;
}

// Whether the floor of a row, null for none, puts a logit outside the support.
HPO_INLINE bool is_below(float logit, const float* floor) { return floor && !(logit >= *floor) && logit == logit; }

HPO_INLINE void write_result(const LogprobsArgs& args, int64_t row, const RowResult& result) {
  args.logp[row] = result.logp;
  args.statistics[row] = result.top;
  args.statistics[args.rows + row] = result.others;
  if (args.kept > 2) args.entropy[row] = result.entropy;
  if (args.kept > 2) args.statistics[2 * args.rows + row] = result.distance;
  if (args.kept > 3) args.statistics[3 * args.rows + row] = result.squares;
}

// ------------------------------------------------------------------------------------------------------------- gradients

// The upstream gradients of a row and the statistics that its forward kept.
struct RowUpstream {
  float logp, entropy, top, others, distance;

  HPO_INLINE RowUpstream(const LogprobsBackwardArgs& args, int64_t row)
      : logp(args.logp_gradient ? args.logp_gradient[row] : 0.0f),
        entropy(args.entropy_gradient ? args.entropy_gradient[row] : 0.0f),
        top(args.statistics[row]),
        others(args.statistics[args.given.rows + row]),
        distance(args.entropy_gradient ? args.statistics[2 * args.given.rows + row] : 0.0f) {}

  // Upstream of a row whose result is at hand, from the gradient of its log-probability alone.
  HPO_INLINE RowUpstream(const RowResult& result, float logp)
      : logp(logp), entropy(0.0f), top(result.top), others(result.others), distance(0.0f) {}

  HPO_INLINE bool is_defined() const { return top == top; }
  HPO_INLINE bool is_zero() const { return logp == 0.0f && entropy == 0.0f && is_defined(); }
};

// The gradient of every logit but the target's is e^(delta / temperature) (constant + slope delta). The slope holds
// 1 / temperature twice. It ends at the largest float, because infinity times the greatest logit's delta of 0 would be NaN; of
// such temperatures only a delta of less than 1e-17 counts, which logits of a usual size do not have.
struct RowGradient {
  float constant, slope, target;
};

// a, b: the gradients of logp and entropy. With p = e^(delta / temperature) / (1 + s) and the mean distance R, log p + H is
// delta / temperature + R.
HPO_INLINE RowGradient gradient_of(const Exponent& exponent, const RowUpstream& row, float logit) {
  const double a = double(row.logp), b = double(row.entropy), others = double(row.others), distance = double(row.distance);
  const double p = 1.0 / (1.0 + others);
  const double delta = double(logit) - double(row.top);
  // 1 - p of the target. Where the target is the greatest it equals the others' share: a subtraction would lose its digits.
  const double own = double(exp_of(exponent, logit - row.top)) * p;
  const double rest = delta == 0.0 ? others * p : 1.0 - own;
  const double along = own == 0.0 ? 0.0 : own * (delta * exponent.inverse + distance);
  RowGradient gradient;
  gradient.constant = float(-(a + b * distance) * exponent.inverse * p);
  const float slope = float(-b * exponent.inverse * exponent.inverse * p);
  gradient.slope = fminf(fmaxf(slope, -FLT_MAX), FLT_MAX);
  gradient.target = float((a * rest - b * along) * exponent.inverse);
  return gradient;
}

}  // namespace hpo
