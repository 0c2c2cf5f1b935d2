// Plain tiles under open gates: every level above their tokens passes its residual on as it is, and the token gate is a clip.
// That is most of a batch most of the time. One channel of a split is then the same for all tokens of a sign of x, so that each
// token has one residual to clip; what the loops of hierarchy.cpp compute has the same bits.
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
    if (piece.below[sign] || piece.above[sign] || !passes(0)) return;
    // Nothing here may saturate: neither the channel that a token is not in, nor the exponent.
    const float most = __builtin_fabsf(low) > __builtin_fabsf(high) ? __builtin_fabsf(low) : __builtin_fabsf(high);
    if (split && !(passes(1) && low == -high && __builtin_fabsf(mean[0]) <= high && __builtin_fabsf(mean[1]) <= high)) return;
    open = __builtin_fabsf(z) + (split ? 3.0f : 1.0f) * most <= kSaturation;
  }
};

template <bool kSplit, bool kMasked>
GateCounts open_loop(const OpenLevels& levels, const PolicyLossArgs& args, int64_t first, float coefficient, int32_t kind,
                     TokenTerms& terms, float* loss, float* grad, int n) {
  const float* logp = args.logp + first;
  const float* old_logp = args.old_logp ? args.old_logp + first : logp;
  const uint8_t* mask = kMasked ? args.mask + first : nullptr;
  const Floats a = all<Floats>(coefficient), low = all<Floats>(levels.low), high = all<Floats>(levels.high);
  const Floats rising_mean = all<Floats>(levels.mean[0]), falling_mean = all<Floats>(-levels.mean[1]);
  const Floats rising_z = all<Floats>(levels.z), falling_z = all<Floats>(levels.z - levels.mean[0]);
  const Floats other = all<Floats>(levels.mean[1]), one = all<Floats>(1.0f);
  const Ints each = Ints{} + 1;
  Ints chosen = {}, inside_sum = {}, below_sum = {};
  const auto step = [&](int i, Mask present) __attribute__((always_inline)) {
    const Floats x = difference(present, load_lanes<Floats>(logp + i), load_lanes<Floats>(old_logp + i));
    const Mask falls = kSplit ? less(x, Floats{}) : Mask{};
    const Floats u = x - (kSplit ? blend(falls, falling_mean, rising_mean) : rising_mean);
    const Floats raised = u < low ? low : u, v = raised > high ? high : raised;
    const Mask inside = both(present, equal(u, v));
    Floats z = (kSplit ? blend(falls, falling_z, rising_z) : rising_z) + v;
    if (kSplit) z = blend(falls, z, z + other);
    const Floats value = keep_if(present, policy_value(a, exp(z)));
    store_lanes(value, loss + i);
    store_lanes(value * keep_if(inside, one), grad + i);
    const Floats past = keep_if(but_not(present, inside), value);
    store_lanes(kSplit ? keep_if(but_not(all_lanes(), falls), past) : past, terms.past_token[0] + i);
    if (kSplit) store_lanes(keep_if(falls, past), terms.past_token[1] + i);
    chosen = add_where(present, each, chosen);
    inside_sum = add_where(inside, each, inside_sum);
    below_sum = add_where(both(present, less(u, low)), each, below_sum);
  };
  const auto present = [&](int i) __attribute__((always_inline)) { return kMasked ? present_bytes(mask + i) : all_lanes(); };
  const int whole = n / kWidth * kWidth;
  for (int i = 0; i < whole; i += kWidth) step(i, present(i));
  for (int i = whole; i < n; i += kWidth) step(i, both(present(i), leading_lanes(n - i)));
  const int32_t all_chosen = sum_lanes(chosen), inside = sum_lanes(inside_sum), below = sum_lanes(below_sum);
  terms.flows = inside != all_chosen;
  GateCounts found;
  found.chosen = all_chosen * kind, found.below = below * kind, found.above = (all_chosen - inside - below) * kind;
  return found;
}

using OpenLoop = GateCounts (*)(const OpenLevels&, const PolicyLossArgs&, int64_t first, float coefficient, int32_t kind,
                                TokenTerms&, float* loss, float* grad, int n);

inline OpenLoop pick_open_loop(bool split, bool masked) {
  if (split) return masked ? open_loop<true, true> : open_loop<true, false>;
  return masked ? open_loop<false, true> : open_loop<false, false>;
}

}  // namespace hpo::HPO_ISA
