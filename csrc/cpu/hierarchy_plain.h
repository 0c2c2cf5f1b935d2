// Plain tiles under open gates: every level above their tokens passes its residual on as it is, and the token gate is a clip.
// That is most of a batch most of the time. What is clipped nowhere keeps its ratio, which the first sweep left, and what is
// clipped has one value for each bound, so that it need only be counted.
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

// What the tokens of a tile are and add up to.
struct OpenTile {
  int32_t present, above, below;
  double loss_above, loss_below, loss_inside[kLanes];  // what is lost flows into levels above the tokens, too

  GateCounts counts(int32_t kind) const {
    GateCounts found;
    found.chosen = present * kind, found.above = above * kind, found.below = below * kind;
    return found;
  }

  void add_loss_to(double* sums) const {
    add_to_lanes(loss_inside, sums);
    sums[0] += loss_above + loss_below;
  }
};

// kKept: e^x stands in the place of the gradient.
template <bool kSplit, bool kMasked, bool kKept>
OpenTile open_loop(const OpenLevels& levels, const PolicyLossArgs& args, int64_t first, int begin, int end, float coefficient,
                   float* grad) {
  const float* logp = args.logp + first;
  const float* old_logp = args.old_logp ? args.old_logp + first : logp;
  const uint8_t* mask = kMasked ? args.mask + first : nullptr;
  const Floats a = all<Floats>(coefficient), low = all<Floats>(levels.low), high = all<Floats>(levels.high);
  // Under a split what rises is never below a bound of its channel, and what falls never above.
  const Floats rising_mean = all<Floats>(levels.mean[0]), falling_mean = kSplit ? all<Floats>(-levels.mean[1]) : rising_mean;
  OpenTile found = {};
  GroupSum loss(found.loss_inside);
  LaneCount present_count, not_above_count, inside_count;
  const auto step = [&](int i, int part, Mask own, auto whole) __attribute__((always_inline)) {
    constexpr bool kWhole = decltype(whole)::value;
    const Mask present = kMasked ? present_own<kWhole>(own, mask + i) : own;
    const Floats x = load_own<kWhole>(own, logp + i) - load_own<kWhole>(own, old_logp + i);
    const Mask not_above = both(present, at_least(high, x - rising_mean));
    const Mask inside = both(not_above, at_least(x - falling_mean, low));
    const Floats ratio = kKept ? load_own<kWhole>(own, grad + i) : exp_of_number(x);
    const Floats value = keep_if(inside, policy_value(a, ratio));
    loss.add(part, all_lanes(), value);
    if (kMasked) present_count.add(present);
    not_above_count.add(not_above), inside_count.add(inside);
    store_own<kWhole>(own, value, grad + i);
  };
  for_each_vector(begin, end, step, [&]() __attribute__((always_inline)) { loss.end(); });
  loss.end();
  found.present = kMasked ? present_count.total() : end - begin;
  found.above = found.present - not_above_count.total(), found.below = not_above_count.total() - inside_count.total();
  const auto clipped = [&](int32_t count, float z) {
    return count == 0 ? 0.0 : double(count) * double(policy_value(coefficient, exp(z)));
  };
  found.loss_above = clipped(found.above, levels.z + levels.high + (kSplit ? levels.mean[1] : 0.0f));
  found.loss_below = clipped(found.below, (kSplit ? levels.z - levels.mean[0] : levels.z) + levels.low);
  return found;
}

// The tokens [begin, end) behind the first, whose gradient is `grad`.
using OpenLoop = OpenTile (*)(const OpenLevels&, const PolicyLossArgs&, int64_t first, int begin, int end, float coefficient,
                              float* grad);

template <bool kSplit>
OpenLoop pick_open_loop(bool masked, bool kept) {
  if (masked) return kept ? open_loop<kSplit, true, true> : open_loop<kSplit, true, false>;
  return kept ? open_loop<kSplit, false, true> : open_loop<kSplit, false, false>;
}

inline OpenLoop pick_open_loop(bool split, bool masked, bool kept) {
  return split ? pick_open_loop<true>(masked, kept) : pick_open_loop<false>(masked, kept);
}

}  // namespace hpo::HPO_ISA
