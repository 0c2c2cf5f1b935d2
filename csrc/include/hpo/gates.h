// The arithmetic of one token and of one trajectory under a ratio gate: every backend in C++ and CUDA calls these, none
// repeats them. The definition is hpo_core/reference/gates.py.
#pragma once
#include <cfloat>

#include "api/hierarchy.h"
#include "math.h"

namespace hpo {

template <class F>
HPO_INLINE F by_sign(typename Number<F>::Int negative, const float values[2]) {
  return negative ? all<F>(values[1]) : all<F>(values[0]);
}

// x = logp - old_logp with its three kinds of exception: NaN masks the token, an infinity saturates with derivative 0,
// a finite x beyond the saturation keeps its derivative.
struct LogRatio {
  float x;
  int32_t nan, infinite;  // not bool: GCC keeps the bools of a struct in memory, and such a loop is not vectorised
};

HPO_INLINE LogRatio log_ratio(float logp, float old_logp) {
  const float x = logp - old_logp;
  const bool infinite = x == INFINITY || x == -INFINITY;
  return {clamp(x, -kSaturation, kSaturation), x != x, infinite};
}

// Bounds of tokens outside these limits are no ratios: they are epsilons, or computed from a broken entropy. A bound that is
// meant to be 1 may be rounded.
constexpr float kLowest = 0.0f, kHighestLow = 1.0f + 1e-6f, kLowestHigh = 1.0f - 1e-6f;

HPO_INLINE bool is_low_bound(float low) { return low >= kLowest && low <= kHighestLow; }
HPO_INLINE bool is_high_bound(float high) { return high >= kLowestHigh; }

// A clip of numbers between bounds that may cross by a rounding: then the upper one wins, and nothing is inside.
template <class F>
HPO_INLINE F clip(F u, F low, F high) {
#if defined(__CUDA_ARCH__)
  const F raised = fmaxf(u, low);  // one instruction, see clamp_number
#else
  const F raised = u < low ? low : u;
#endif
  return u > high ? high : raised;
}

// The policy part of one token: `a` = weight * advantage * token weight, exactly 0 where the token is not selected.
template <class F>
struct TermNumber {
  F loss;  // its share of the loss
  F grad;  // d loss / d logp through the token's own path
};
using Term = TermNumber<float>;

template <class F>
HPO_INLINE F policy_value(F a, F ratio) {
  return -a * ratio;  // at ratio 1 this is -a to the bit: the on-policy promise
}

// A log-probability may be as low as numbers go: the loss of a token under a head that multiplies by it saturates here, so that
// eight of them fit a float. The derivative is kept.
constexpr float kScoreSaturation = 2e37f;

template <class F>
HPO_INLINE F scored(F loss) {
  return clamp(loss, all<F>(-kScoreSaturation), all<F>(kScoreSaturation));
}

// k3 and its derivative take no exponential where s is within this of 0.
constexpr float kNearReference = 0.5f;

// The reference penalty beta * k(s), s = logp - ref_logp, and its derivative in logp; x is the policy's own log-ratio. A
// log-ratio that was infinite carries no derivative. e: exp(-s), or anything where s is within kNearReference of 0.
template <class F>
HPO_INLINE TermNumber<F> kl_term(KLEstimator estimator, KLGradient gradient, F s, F e, F x, typename Number<F>::Int s_finite,
                                 typename Number<F>::Int x_finite) {
  using N = Number<F>;
  const F zero = {}, one = all<F>(1.0f);
  const F k = estimator == KLEstimator::k1 ? s : (estimator == KLEstimator::k2 ? all<F>(0.5f) * s * s : k3(s, e));
  // 1 - e^-s of k3: near 0 it is s less a small number.
  const F border = all<F>(kNearReference), of_k3 = ((s < border) & (s > -border)) ? s - k : one - e;
  const F slope = estimator == KLEstimator::k1 ? one : (estimator == KLEstimator::k2 ? s : of_k3);
  if (gradient == KLGradient::straight_through) return {k, s_finite ? s : zero};
  if (gradient == KLGradient::value) return {k, s_finite ? slope : zero};
  // r k(s) with the gradient through r as well.
  const F r = exp(x);
  if (estimator != KLEstimator::k3) return {r * k, (x_finite ? r * k : zero) + (s_finite ? r * slope : zero)};
  // r e^-s is one exponential so that it saturates as one. r (k3 + k3') = r s.
  const F rise = r - exp(clamp(x - s, all<F>(-kSaturation), all<F>(kSaturation)));
  const F value = N::fused(s, r, -rise);
  return {value, x_finite ? (s_finite ? r * s : value) : (s_finite ? rise : zero)};
}

// Whether a token with this factor on its penalty pays any.
template <class F>
HPO_INLINE typename Number<F>::Int pays_penalty(F kl_weight) {
  return Number<F>::mask((kl_weight != F{}) & (kl_weight - kl_weight == F{}));
}

// The weight of a row times the factor of a token that pays.
template <class F>
HPO_INLINE F penalty_share(F weight, F kl_weight) {
  return clamp(weight * kl_weight, all<F>(-FLT_MAX), all<F>(FLT_MAX));
}

// The bound of u in a gamma gate, which is far below -kSaturation there. An infinite gate would be 0 * inf = NaN where no
// gradient flows.
constexpr double kGammaSaturation = 80.0;

// The gate of a level on the residual u of a segment with n tokens.
struct Residual {
  double value, slope;
  int32_t side;  // -1: below its lower bound, 1: above the upper one
};

// 1 between the bounds, else 0; on the host without a branch, because half of the leaves may take one.
HPO_INLINE double slope_within(int32_t side) {
#if defined(__CUDA_ARCH__)
  return side == 0 ? 1.0 : 0.0;
#else
  return 1.0 - double(side * side);
#endif
}

HPO_INLINE Residual gate_residual(const HierarchyLevel& level, int channel, int sign, double u, double n) {
  const double low = level.low[channel][sign], high = level.high[channel][sign];
  if (level.gate == LevelKind::clip) {
    const int32_t side = int32_t(u > high) - int32_t(u < low);
    return {clamp(u, low, high), slope_within(side), side};
  }
  if (level.gate == LevelKind::rollback) {
    const double size = ::fabs(u);
    if (size <= high) return {u, 1.0, 0};
    const double towards = u < 0.0 ? -1.0 : 1.0;
    const double most = -level.slope, slope = most > 0.0 ? (n < most ? n : most) : level.slope;
    if (slope == 0.0) return {towards * high, 0.0, int32_t(towards)};
    const double back = slope > DBL_MAX ? -1.0 : (slope + 1.0) * high - slope * size;
    return {back > 0.0 ? towards * back : 0.0, back > 0.0 ? -slope : 0.0, int32_t(towards)};
  }
  if (level.gate == LevelKind::tanh) {
    const double bent = ::tanh(u / high);
    return {high * bent, 1.0 - bent * bent, 0};
  }
  if (level.gate == LevelKind::gamma) {
    const double rise = high * ::exp(u < kGammaSaturation ? u : kGammaSaturation);
    return {high + low * u - rise, low - rise, 0};
  }
  if (level.gate == LevelKind::excess) {
    const double excess = u - n * high;
    return {excess > 0.0 ? -excess : 0.0, excess > 0.0 ? -1.0 : 0.0, excess > 0.0 ? 1 : 0};
  }
  return {u, 1.0, 0};
}

// Sums of log-ratios are integers: fixed point with 32 binary digits. Integer addition has no order, so a trajectory's mean
// is bitwise the same in any tiling, on any number of threads and beside any neighbour. 60 * 2^32 leaves room for 2^25 tokens.
constexpr double kFixedPoint = 4294967296.0;

// Adding 1.5 * 2^52 rounds to an integer without a conversion instruction that AVX2 lacks; its own bits are taken off.
HPO_INLINE int64_t to_fixed(float x) {
  const double shifter = 6755399441055744.0;
#if defined(__FMA__) || defined(__CUDA_ARCH__)
  const double shifted = ::fma(double(x), kFixedPoint, shifter);  // the product is exact, so this changes no bit
#else
  const double shifted = double(x) * kFixedPoint + shifter;
#endif
  return to_bits(shifted) - 0x4338000000000000;
}

HPO_INLINE int64_t to_fixed(double x) { return int64_t(::rint(x * kFixedPoint)); }

// The sum of to_fixed(x) over the tokens of a tile, without float64, which some GPUs have few units for: a number within
// kSaturation in steps of 2^-16, and the rest in steps of 2^-32, each rounded by a shifter of floats. The first is a multiple
// of two of the second's steps, so that ties go the same way. 512 tokens of either fit.
struct ShortSum {
  int32_t high, low;

  HPO_INLINE void add(float x) {
    const float shifter = 12582912.0f;  // 1.5 * 2^23
    const float coarse = fused(x, 65536.0f, shifter), rest = fused(coarse - shifter, -1.0f / 65536.0f, x);
    high += to_bits(coarse) - to_bits(shifter);
    low += to_bits(fused(rest, float(kFixedPoint), shifter)) - to_bits(shifter);
  }

  HPO_INLINE int64_t total() const { return int64_t(high) * 65536 + low; }
};

// The same sum of larger numbers, in 64 bits.
struct LongSum {
  int64_t sum;

  HPO_INLINE void add(float x) { sum += to_fixed(x); }
  HPO_INLINE int64_t total() const { return sum; }
};

HPO_INLINE double from_fixed(int64_t sum) { return double(sum) / kFixedPoint; }

}  // namespace hpo
