// The arithmetic of a token's term where a gate asks for more than a clip and A e^z: the heads, the pre-gate, factors beyond
// the bounds, the penalty. C++ and CUDA call these, neither repeats them. The definition is hpo_core/reference/terms.py.
#pragma once
#include "gates.h"

namespace hpo {

// TokenTerm in floats, as tokens need it.
struct TermNumbers {
  float head[2], slope_low[2], slope_high[2], weight_low[2], weight_high[2], pre_low[2], pre_high[2];
  float penalty_coefficient;

  explicit TermNumbers(const TokenTerm& term) : penalty_coefficient(float(term.penalty_coefficient)) {
    for (int sign = 0; sign < 2; ++sign) {
      head[sign] = float(term.head[sign]);
      slope_low[sign] = float(term.slope_low[sign]), slope_high[sign] = float(term.slope_high[sign]);
      weight_low[sign] = float(term.weight_low[sign]), weight_high[sign] = float(term.weight_high[sign]);
      pre_low[sign] = float(term.pre_low[sign]), pre_high[sign] = float(term.pre_high[sign]);
    }
  }
};

// Whether something else than the log-ratio is aggregated.
HPO_INLINE bool pre_gates(const TokenTerm& term, Head head) {
  bool bounded = head == Head::censored;
  for (int sign = 0; sign < 2; ++sign) bounded |= term.pre_low[sign] > -INFINITY || term.pre_high[sign] < INFINITY;
  return term.present && bounded;
}

// Sums of deviations have the range of sums of log-ratios, see to_fixed; this leaves room for 2^20 tokens.
constexpr float kDeviationSaturation = 2048.0f;

// The deviation of the ratio e^x from 1, and its sign, that of x.
template <class F>
struct Deviation {
  F size, sign;
};

template <class F>
HPO_INLINE Deviation<F> deviation_of(F x, F ratio) {
  const F zero = {}, one = all<F>(1.0f), most = all<F>(1.0f + kDeviationSaturation);
  const F sign = x > zero ? one : (x < zero ? -one : zero);
  return {sign * ((ratio < most ? ratio : most) - one), sign};
}

// The function of the log-ratio that is aggregated.
template <class F>
HPO_INLINE F pre_gate(const TermNumbers& numbers, Head head, typename Number<F>::Int negative, F x) {
  if (head == Head::censored) return deviation_of(x, exp(x)).size;
  return clamp(x, by_sign<F>(negative, numbers.pre_low), by_sign<F>(negative, numbers.pre_high));
}

// Its derivative in the log-ratio.
template <class F>
HPO_INLINE F pre_gate_slope(const TermNumbers& numbers, Head head, typename Number<F>::Int negative, F x) {
  const F zero = {}, one = all<F>(1.0f);
  if (head != Head::censored) return pre_gate<F>(numbers, head, negative, x) == x ? one : zero;
  const F ratio = exp(x);
  return deviation_of(x, ratio).sign * ratio;
}

// The bound of log-ratios whose exponentials are added up: no token outweighs a sum, and e^7.5 < 2048 leaves as much room as
// deviations have.
constexpr float kExponentSaturation = 7.5f;

// The log-ratio as it enters its channel: the channel of falling log-ratios takes it with its sign turned.
template <class F>
HPO_INLINE F exponent(bool split, F x) {
  const F saturated = clamp(x, all<F>(-kExponentSaturation), all<F>(kExponentSaturation));
  return split ? (x < F{} ? -saturated : saturated) : saturated;
}

// e^x - 1, with the sign that rising_part separates channels by.
template <class F>
HPO_INLINE F mean_exp_part(bool split, F x) {
  const F up = exponent(split, x), part = -k3_slope(-up, exp(up));
  return split ? (x < F{} ? -part : part) : part;
}

// Its derivative in the log-ratio.
template <class F>
HPO_INLINE F mean_exp_slope(bool split, F x) {
  return exp(exponent(split, x));
}

// Heads that multiply the ratio by another large number, or by itself, saturate earlier than e^60.
constexpr float kSquareSaturation = 25.0f;
// The head without a ratio takes all numbers that sums in fixed point hold.
constexpr float kSumSaturation = 2147483648.0f;

HPO_INLINE float saturation_of(Head head) {
  if (head == Head::censored) return 2.0f * kDeviationSaturation;  // an excess above it leaves no deviation
  if (head == Head::log) return kSumSaturation;
  return head == Head::simple || head == Head::mirror ? kSquareSaturation : kSaturation;
}

// The implied policy of a negative-aware head divides the ratio by 1 - target, which may be 2^-24.
constexpr float kImpliedSaturation = 68719476736.0f;

// Whether a ratio can be compared with the target. The target of a negative-aware head is a success rate: where it is 1 no
// answer is wrong.
HPO_INLINE bool is_target(Head head, bool negative, float target) {
  if (head == Head::negative_aware && negative) return target >= 0.0f && target < 1.0f;
  return target >= -FLT_MAX && target <= FLT_MAX;
}

template <class F>
struct HeadTerm {
  F loss;
  F slope;   // d loss / d z
  F direct;  // d loss / d logp, past z
};

// e^z, for the functions below.
struct Exponential {
  template <class F>
  HPO_INLINE F operator()(F z) const {
    return exp(z);
  }
};

// `a`: weight * advantage * token weight, and `kept`: weight * token weight, both 0 where the token is not selected; z within
// saturation_of(head), x the token's own log-ratio; `number` is the head's for the sign of the advantage; ratio_of(z): e^z.
// On-policy, z = 0, slope + direct is -a to the bit under every head that promises it.
template <class F, class RatioOf>
HPO_INLINE HeadTerm<F> head_term(Head head, typename Number<F>::Int negative, F number, F z, F x, F a, F kept, F logp, F target,
                                 const RatioOf& ratio_of) {
  using N = Number<F>;
  const F zero = {}, one = all<F>(1.0f), half = all<F>(0.5f);
  const F size = negative ? -a : a;  // weight * |advantage|
  if (head == Head::censored) {
    const F own = ratio_of(x);
    const Deviation<F> deviation = deviation_of(x, own);
    const F left = deviation.size + z;
    const auto some = N::mask(left >= zero);  // a rest of 0 adds nothing to the loss, but has a derivative
    return {-(a * (one + deviation.sign * (some ? left : zero))), some ? -(a * deviation.sign) : zero,
            some ? -(a * own) : zero};
  }
  if (head == Head::log) return {scored(N::fused(half * kept * number, z * z, -(a * logp))), kept * number * z, -a};
  const F ratio = ratio_of(z);
  const F linear = -(a * ratio);
  if (head == Head::score) return {scored(linear * logp), zero, linear};
  if (head == Head::mirror) {
    const F pull = kept * number, bracket = N::fused(z, ratio, one - ratio);
    return {N::fused(pull, bracket, linear), ratio * N::fused(pull, z, -a), zero};
  }
  if (head == Head::sigmoid) {
    const F t = clamp(number * (ratio - one), all<F>(-87.0f), all<F>(87.0f)), down = t < zero ? t : -t;
    const F e = down > all<F>(-87.0f) ? exp(down) : zero, sum = one + e;  // 0 for a huge ratio
    const F p = (t < zero ? e : one) / sum;
    return {-(a * (4.0f / number) * p), linear * (4.0f * e / (sum * sum)), zero};
  }
  if (head == Head::simple) {
    const F step = ratio - one, pull = size / number;
    return {N::fused(half * pull, step * step, linear), -(ratio * N::fused(-pull, step, a)), zero};
  }
  if (head == Head::target) {
    const F gap = ratio - target;
    const F sign = gap > zero ? one : (gap < zero ? -one : zero);
    return {size * (gap * sign), size * sign * ratio, zero};
  }
  if (head == Head::negative_aware) {
    const F left = one - target, most = all<F>(kImpliedSaturation), weighed = target * (ratio < most ? ratio : most);
    const F implied = negative ? (one - weighed) / left : ratio;
    const F bounded = implied < number ? number : implied;
    const F rise = negative ? -(weighed / left) : ratio;
    return {-(size * log(bounded)), -(size * (rise / bounded)), zero};
  }
  if (head == Head::flipped) {
    const F factor = negative ? ratio : exp(-z);
    const auto beyond = N::mask(factor > number);
    const F value = -(a * factor), fixed = -(a * number);
    return {beyond ? scored(fixed * logp) : value, beyond ? zero : value, beyond ? fixed : zero};
  }
  return {linear, linear, zero};
}

// The penalty on the token's own log-ratio x and its derivative.
template <class F>
struct OwnPenalty {
  F value, slope;
};

template <class F, class RatioOf>
HPO_INLINE OwnPenalty<F> own_penalty(Penalty penalty, F x, const RatioOf& ratio_of) {
  const F zero = {}, one = all<F>(1.0f);
  if (penalty == Penalty::k1) return {-x, -one};
  if (penalty == Penalty::k2) return {all<F>(0.5f) * x * x, x};
  if (penalty == Penalty::absolute) return {x < zero ? -x : x, x > zero ? one : (x < zero ? -one : zero)};
  const F e = ratio_of(x);  // e^-s - 1 + s of s = -x
  return {k3(-x, e), -k3_slope(-x, e)};
}

}  // namespace hpo
