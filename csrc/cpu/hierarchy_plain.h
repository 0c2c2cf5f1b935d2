// Plain tiles under open gates: every level above their tokens passes its residual on as it is, and the token gate is a clip.
// That is most of a batch most of the time. One channel of a split is then the same for all tokens of a sign of x, so that each
// token has one residual to clip; what the loops of hierarchy_tokens.h compute has the same bits.
#pragma once
#include "gates_call.h"
#include "hierarchy_terms.h"
#include "hpo/hierarchy.h"

namespace hpo::HPO_ISA {

// The levels of one piece, for the sign of its advantage.
struct OpenLevels {
  bool open;
  bool near;  // and no token's exponent needs a power of two
  float z, mean[2], low, high;

  OpenLevels(const PieceGate& piece, int sign, bool split, float low, float high)
      : open(false), near(false), z(piece.z[sign]), mean{piece.mean[0], piece.mean[1]}, low(low), high(high) {
    const auto passes = [&](int channel) { return piece.slope[channel][sign] == 1.0f && piece.own[channel][sign] == 0.0f; };
    if (piece.below[sign] || piece.above[sign] || !passes(0)) return;
    // Nothing here may saturate, neither the channel that a token is not in nor the exponent, or overflow in a GroupSum.
    const float most = __builtin_fabsf(low) > __builtin_fabsf(high) ? __builtin_fabsf(low) : __builtin_fabsf(high);
    if (split && !(passes(1) && low == -high && __builtin_fabsf(mean[0]) <= high && __builtin_fabsf(mean[1]) <= high)) return;
    open = __builtin_fabsf(z) + (split ? 3.0f : 1.0f) * most <= kStatisticSaturation;
    const float rising = __builtin_fabsf(z + (split ? mean[1] : 0.0f)), falling = __builtin_fabsf(z - (split ? mean[0] : 0.0f));
    near = rising + most <= kNear && falling + most <= kNear;
  }
};

// What the tokens of a tile add up to; the loss is what flows into levels above them, too.
struct OpenSums {
  double loss[kLanes] = {}, past_token[2][kLanes] = {};
};

template <bool kSplit, bool kMasked, bool kAllNear>
GateCounts open_loop(const OpenLevels& levels, const PolicyLossArgs& args, int64_t first, float coefficient, int32_t kind,
                     OpenSums& sums, float* grad, int n) {
  const float* logp = args.logp + first;
  const float* old_logp = args.old_logp ? args.old_logp + first : logp;
  const uint8_t* mask = kMasked ? args.mask + first : nullptr;
  const Floats a = all<Floats>(coefficient), low = all<Floats>(levels.low), high = all<Floats>(levels.high);
  const Floats rising_mean = all<Floats>(levels.mean[0]), falling_mean = all<Floats>(-levels.mean[1]);
  const Floats rising_z = all<Floats>(levels.z), falling_z = all<Floats>(levels.z - levels.mean[0]);
  const Floats other = all<Floats>(levels.mean[1]);
  GroupSum loss(sums.loss), rising(sums.past_token[0]), falling(sums.past_token[1]);
  LaneCount present_count, inside_count, below_count;
  const auto step = [&](int i, int part, Mask own, auto whole) __attribute__((always_inline)) {
    const Mask given = kMasked ? present_bytes(mask + i) : all_lanes(), present = whole ? given : both(given, own);
    const Floats x = difference(present, load_lanes<Floats>(logp + i), load_lanes<Floats>(old_logp + i));
    const Mask falls = kSplit ? less(x, Floats{}) : Mask{}, rises = but_not(all_lanes(), falls);
    const Floats u = x - (kSplit ? blend(falls, falling_mean, rising_mean) : rising_mean);
    const Mask enough = at_least(u, low), little = at_least(high, u);
    const Floats v = blend(little, blend(enough, u, low), high);
    const Mask inside = both(present, both(enough, little)), past = but_not(present, inside);
    Floats z = (kSplit ? blend(falls, falling_z, rising_z) : rising_z) + v;
    if (kSplit) z = add_where(rises, other, z);
    const Floats value = policy_value(a, kAllNear ? exp_near_0(z) : exp_of_number(z));
    loss.add(part, present, value);
    rising.add(part, kSplit ? both(past, rises) : past, value);
    if (kSplit) falling.add(part, both(past, falls), value);
    if (kMasked) present_count.add(present);
    inside_count.add(inside);
    below_count.add(but_not(present, enough));
    if (whole) store_lanes(keep_if(inside, value), grad + i);
    else store_where(own, keep_if(inside, value), grad + i);
  };
  const auto end_group = [&]() __attribute__((always_inline)) {
    loss.end(), rising.end();
    if (kSplit) falling.end();
  };
  for_each_vector(0, n, step, end_group);
  end_group();
  const int32_t chosen = kMasked ? present_count.total() : n, inside = inside_count.total(), below = below_count.total();
  GateCounts found;
  found.chosen = chosen * kind, found.below = below * kind, found.above = (chosen - inside - below) * kind;
  return found;
}

using OpenLoop = GateCounts (*)(const OpenLevels&, const PolicyLossArgs&, int64_t first, float coefficient, int32_t kind,
                                OpenSums&, float* grad, int n);

template <bool kSplit>
OpenLoop pick_open_loop(bool masked, bool near) {
  if (masked) return near ? open_loop<kSplit, true, true> : open_loop<kSplit, true, false>;
  return near ? open_loop<kSplit, false, true> : open_loop<kSplit, false, false>;
}

inline OpenLoop pick_open_loop(bool split, bool masked, bool near) {
  return split ? pick_open_loop<true>(masked, near) : pick_open_loop<false>(masked, near);
}

}  // namespace hpo::HPO_ISA
