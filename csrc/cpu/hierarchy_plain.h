// Plain tiles under open gates: every level above their tokens passes its residual on as it is, and the token gate is a clip.
// That is most of a batch most of the time. What is clipped nowhere keeps its ratio, which the first sweep left, and what is
// clipped has one value for each bound: there are no exponentials here. What the loops of hierarchy_tokens.h compute has the
// same bits.
#pragma once
#include "gates_call.h"
#include "hierarchy_terms.h"
#include "hpo/hierarchy.h"

namespace hpo::HPO_ISA {

// The levels of one piece, for the sign of its advantage.
struct OpenLevels {
  bool open;
  float z, mean[2], low, high;

  OpenLevels(const PieceGate& piece, int sign, bool split, float low, float high)
      : open(false), z(piece.z[sign]), mean{piece.mean[0], piece.mean[1]}, low(low), high(high) {
    const auto passes = [&](int channel) { return piece.slope[channel][sign] == 1.0f && piece.own[channel][sign] == 0.0f; };
    if (piece.bent[sign] || !passes(0)) return;
    // Nothing here may saturate, neither the channel that a token is not in nor the exponent, or overflow in a GroupSum.
    const float most = __builtin_fabsf(low) > __builtin_fabsf(high) ? __builtin_fabsf(low) : __builtin_fabsf(high);
    if (split && !(passes(1) && low == -high && __builtin_fabsf(mean[0]) <= high && __builtin_fabsf(mean[1]) <= high)) return;
    open = __builtin_fabsf(z) + (split ? 3.0f : 1.0f) * most <= kStatisticSaturation;
  }
};

// What the tokens of a tile add up to; the loss is what flows into levels above them, too.
struct OpenSums {
  double loss[kLanes] = {}, past_token[2][kLanes] = {};
};

// kKept: e^x stands in the place of the gradient.
template <bool kSplit, bool kMasked, bool kKept>
GateCounts open_loop(const OpenLevels& levels, const PolicyLossArgs& args, int64_t first, float coefficient, int32_t kind,
                     OpenSums& sums, float* grad, int n) {
  const float* logp = args.logp + first;
  const float* old_logp = args.old_logp ? args.old_logp + first : logp;
  const uint8_t* mask = kMasked ? args.mask + first : nullptr;
  const Floats a = all<Floats>(coefficient), low = all<Floats>(levels.low), high = all<Floats>(levels.high);
  // Under a split what rises is never below a bound of its channel, and what falls never above.
  const Floats rising_mean = all<Floats>(levels.mean[0]), falling_mean = kSplit ? all<Floats>(-levels.mean[1]) : rising_mean;
  const Floats rising_z = all<Floats>(levels.z), falling_z = kSplit ? all<Floats>(levels.z - levels.mean[0]) : rising_z;
  const Floats other = kSplit ? all<Floats>(levels.mean[1]) : Floats{};
  const Floats value_above = policy_value(a, exp_of_number(kSplit ? rising_z + high + other : rising_z + high));
  const Floats value_below = policy_value(a, exp_of_number(falling_z + low));
  GroupSum loss(sums.loss), rising(sums.past_token[0]), falling(sums.past_token[1]);
  LaneCount present_count, above_count, below_count;
  const auto step = [&](int i, int part, Mask own, auto whole) __attribute__((always_inline)) {
    constexpr bool kWhole = decltype(whole)::value;
    const Mask given = kMasked ? present_bytes(mask + i) : all_lanes(), present = kWhole ? given : both(given, own);
    const Floats x = difference(present, load_lanes<Floats>(logp + i), load_lanes<Floats>(old_logp + i));
    const Mask above = both(present, less(high, x - rising_mean)), below = both(present, less(x - falling_mean, low));
    const Floats inside = policy_value(a, kKept ? load_own<kWhole>(own, grad + i) : exp_of_number(x));
    const Floats value = blend(below, value_below, blend(above, value_above, inside));
    loss.add(part, present, value);
    rising.add(part, kSplit ? above : either(above, below), value);
    if (kSplit) falling.add(part, below, value);
    if (kMasked) present_count.add(present);
    above_count.add(above);
    below_count.add(below);
    store_own<kWhole>(own, keep_if(but_not(present, either(above, below)), value), grad + i);
  };
  const auto end_group = [&]() __attribute__((always_inline)) {
    loss.end(), rising.end();
    if (kSplit) falling.end();
  };
  for_each_vector(0, n, step, end_group);
  end_group();
  GateCounts found;
  found.chosen = (kMasked ? present_count.total() : n) * kind;
  found.below = below_count.total() * kind, found.above = above_count.total() * kind;
  return found;
}

using OpenLoop = GateCounts (*)(const OpenLevels&, const PolicyLossArgs&, int64_t first, float coefficient, int32_t kind,
                                OpenSums&, float* grad, int n);

template <bool kSplit>
OpenLoop pick_open_loop(bool masked, bool kept) {
  if (masked) return kept ? open_loop<kSplit, true, true> : open_loop<kSplit, true, false>;
  return kept ? open_loop<kSplit, false, true> : open_loop<kSplit, false, false>;
}

inline OpenLoop pick_open_loop(bool split, bool masked, bool kept) {
  return split ? pick_open_loop<true>(masked, kept) : pick_open_loop<false>(masked, kept);
}

}  // namespace hpo::HPO_ISA
