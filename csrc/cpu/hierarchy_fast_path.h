// Fast-path tiles under open gates: every level above their tokens passes its residual on as it is, and the token gate is a
// clip. Most tiles are of this kind. A clipped token has the value of its bound, so counting it is enough; the others keep the
// ratio that the first sweep left. One loop counts and marks them, the counts give the gradient through aggregates, and a
// second loop writes the whole gradient once.
#pragma once
#include "gates_fast_path.h"
#include "hierarchy_terms.h"
#include "hierarchy_weights.h"
#include "hpo/hierarchy.h"

namespace hpo::HPO_ISA {

// The levels of one leaf, for the sign of its advantage. Those that are open for both signs are the same for both.
struct OpenLevels {
  bool open = false;
  float z, mean[2], low, high;

  OpenLevels() = default;
  OpenLevels(const LeafGate& leaf, int sign, bool split, float low, float high)
      : z(leaf.z[sign]), mean{leaf.mean[0], leaf.mean[1]}, low(low), high(high) {
    const auto passes = [&](int channel) { return leaf.slope[channel][sign] == 1.0f && leaf.own[channel][sign] == 0.0f; };
    if (leaf.bent[sign] || !passes(0)) return;
    // Nothing here may saturate, neither the channel that a token is not in nor the exponent, or overflow in a RunSum.
    const float most = __builtin_fabsf(low) > __builtin_fabsf(high) ? __builtin_fabsf(low) : __builtin_fabsf(high);
    if (split && !(passes(1) && low == -high && __builtin_fabsf(mean[0]) <= high && __builtin_fabsf(mean[1]) <= high)) return;
    open = __builtin_fabsf(z) + (split ? 3.0f : 1.0f) * most <= kStatisticSaturation;
  }
};

// The tokens of a block that pass their own gate, and those that fall, by vector.
struct OpenTokens {
  MaskPair inside_and_falling[(kChunk + 2 * kLanes) / kWidth];
};

// Counts over the tokens of a block.
struct OpenCounts {
  int32_t present = 0, above = 0, below = 0;
  double above_weight = 0.0, below_weight = 0.0;  // the numbers of these where tokens weigh 1

  // kind: that of all of them, or kPositive where `above` and `below` are sums of kinds.
  void add_to(double* slots, int32_t kind) const { GateCounts{present * kind, below * kind, above * kind}.add_to(slots); }
};

// The bounds of tokens under open levels. Under a split a rising token is never below those of its channel, and a falling one
// never above.
template <bool kSplit>
struct OpenBounds {
  const Floats low, high, rising_mean, falling_mean;

  explicit OpenBounds(const OpenLevels& levels)
      : low(all<Floats>(levels.low)),
        high(all<Floats>(levels.high)),
        rising_mean(all<Floats>(levels.mean[0])),
        falling_mean(kSplit ? all<Floats>(-levels.mean[1]) : rising_mean) {}

  HPO_INLINE Mask not_above(Mask among, Floats x) const { return both(among, at_least(high, x - rising_mean)); }
  HPO_INLINE Mask not_below(Mask among, Floats x) const { return both(among, at_least(x - falling_mean, low)); }
};

// Counts the tokens [begin, end) behind the first, and marks which are inside and which fall.
using CountOpen = void (*)(const OpenLevels&, const PolicyLossArgs&, int64_t first, int begin, int end,
                           MaskPair* inside_and_falling, OpenCounts&);

using CountOpenWeighted = void (*)(const OpenLevels&, const PolicyLossArgs&, const Block&, const BlockWeights&,
                                   MaskPair* inside_and_falling, OpenCounts&);

template <bool kSplit, bool kMasked>
void count_open(const OpenLevels& levels, const PolicyLossArgs& args, int64_t first, int begin, int end,
                MaskPair* inside_and_falling, OpenCounts& counts) {
  const FastSource source(args, first);
  const uint8_t* mask = kMasked ? args.mask + first : nullptr;
  const OpenBounds<kSplit> bounds(levels);
  LaneCount present_count;
  Ints not_above_sum = {}, inside_sum = {};  // fewer instructions than a LaneCount
  for_each_vector(begin, end, [&](int i, Mask own, auto whole) HPO_INSIDE {
    constexpr bool kWhole = decltype(whole)::value;
    const Mask present = kMasked ? present_own<kWhole>(own, mask + i) : own;
    const Floats x = source.log_ratio<kWhole>(i, own);
    const Mask not_above = bounds.not_above(present, x), inside = bounds.not_below(not_above, x);
    if (kMasked) present_count.add(present);
    not_above_sum = add_where(not_above, Ints{} + 1, not_above_sum);
    inside_sum = add_where(inside, Ints{} + 1, inside_sum);
    inside_and_falling[unsigned(i) / kWidth] = {bits_of(inside), bits_of(less(x, Floats{}))};
  });
  const int32_t present = kMasked ? present_count.total() : end - begin, not_above = sum_lanes(not_above_sum);
  const int32_t above = present - not_above, below = not_above - sum_lanes(inside_sum);
  counts.present += present, counts.above += above, counts.below += below;
  counts.above_weight += above, counts.below_weight += below;
}

// The same for a block whose tokens have weights. Where tokens have advantages, too, `above` and `below` are sums of kinds, and
// above_weight and below_weight those of coefficients.
template <bool kSplit>
void count_open_weighted(const OpenLevels& levels, const PolicyLossArgs& args, const Block& block, const BlockWeights& weights,
                         MaskPair* inside_and_falling, OpenCounts& counts) {
  const FastSource source(args, block.first);
  const OpenBounds<kSplit> bounds(levels);
  const float* advantages = args.advantage_per_token ? args.advantages + block.first : nullptr;
  const Floats of_row = all<Floats>(args.weights[block.row]);
  double above_lanes[kLanes] = {}, below_lanes[kLanes] = {};
  RunSum above_weight(above_lanes), below_weight(below_lanes);
  Ints above_sum = {}, below_sum = {};
  const auto end_run = [&]() HPO_INSIDE { above_weight.end(), below_weight.end(); };
  for_each_vector(
      0, int(block.tokens),
      [&](int i, int part, Mask own, auto whole) HPO_INSIDE {
        constexpr bool kWhole = decltype(whole)::value;
        Floats weight = load_own<kWhole>(own, weights.of_token + i);
        Ints kind = Ints{} + kPositive;
        if (advantages) {
          const Floats advantage = load_own<kWhole>(own, advantages + i);
          weight *= of_row * advantage;
          kind = advantage < 0.0f ? Ints{} + kNegative : kind;
        }
        const Floats x = source.log_ratio<kWhole>(i, own);
        const Mask chosen = but_not(own, is_nan(weight));
        const Mask not_above = bounds.not_above(chosen, x), inside = bounds.not_below(not_above, x);
        const Mask above = but_not(chosen, not_above), below = but_not(not_above, inside);
        above_sum = add_where(above, kind, above_sum), below_sum = add_where(below, kind, below_sum);
        above_weight.add(part, above, weight), below_weight.add(part, below, weight);
        inside_and_falling[unsigned(i) / kWidth] = {bits_of(inside), bits_of(less(x, Floats{}))};
      },
      end_run);
  end_run();
  counts = {weights.chosen, sum_lanes(above_sum), sum_lanes(below_sum), sum_halves(above_lanes), sum_halves(below_lanes)};
}

// The loss of a clipped token, by bound.
struct ClippedLoss {
  float above, below;

  ClippedLoss(const OpenLevels& levels, bool split, float coefficient) {
    Floats z = {};
    z[0] = levels.z + levels.high + (split ? levels.mean[1] : 0.0f);
    z[1] = (split ? levels.z - levels.mean[0] : levels.z) + levels.low;
    const Floats ratio = exp(z);
    above = policy_value(coefficient, ratio[0]), below = policy_value(coefficient, ratio[1]);
  }

  // Nothing is clipped at a bound that is infinite.
  double of_above(const OpenCounts& counts) const { return counts.above == 0 ? 0.0 : counts.above_weight * double(above); }
  double of_below(const OpenCounts& counts) const { return counts.below == 0 ? 0.0 : counts.below_weight * double(below); }
};

// The gradient of each token of a leaf through aggregates.
struct AggregateGrad {
  float rising = 0.0f, falling = 0.0f;

  bool nothing() const { return rising == 0.0f && falling == 0.0f; }
};

// Writes the gradient of these tokens, if it is wanted, and adds the losses of those inside to the lanes of the loss.
using WriteOpen = void (*)(const PolicyLossArgs&, int64_t first, int begin, int end, float coefficient, const float* weights,
                           const MaskPair* inside_and_falling, const AggregateGrad&, double* lost);

// kKept: e^x stands in the memory of the gradient. kFlows: there is a gradient through aggregates. kWeighted: tokens have
// weights, and perhaps advantages.
template <bool kMasked, bool kKept, bool kFlows, bool kWeighted>
void write_open(const PolicyLossArgs& args, int64_t first, int begin, int end, float coefficient, const float* weights,
                const MaskPair* inside_and_falling, const AggregateGrad& aggregate_grad, double* lost) {
  float* grad = args.grad ? args.grad + first : nullptr;
  const FastSource source(args, first);
  const uint8_t* mask = kMasked ? args.mask + first : nullptr;
  const float* advantages = kWeighted && args.advantage_per_token ? args.advantages + first : nullptr;
  const Floats of_row = all<Floats>(coefficient), rise = all<Floats>(aggregate_grad.rising),
               fall = all<Floats>(aggregate_grad.falling);
  RunSum loss(lost);
  const auto step = [&](int i, int part, Mask own, auto whole) HPO_INSIDE {
    constexpr bool kWhole = decltype(whole)::value;
    const Floats ratio = kKept ? load_own<kWhole>(own, grad + i) : exp_of_number(source.log_ratio<kWhole>(i, own));
    Mask inside, falls;
    load_masks(inside_and_falling + unsigned(i) / kWidth, inside, falls);
    if (!kWhole) inside = both(own, inside);  // a vector without a token of the block holds masks of another block
    Floats a = of_row;
    if (advantages) a *= load_own<kWhole>(own, advantages + i);
    if (kWeighted) a *= load_own<kWhole>(own, weights + i);
    Floats value = keep_if(inside, policy_value(a, ratio));
    loss.add(part, all_lanes(), value);
    if (kFlows) {
      const Floats flow = blend(falls, fall, rise);
      value += kMasked ? keep_if(present_own<kWhole>(own, mask + i), flow) : flow;
    }
    if (kKept || grad) store_own<kWhole>(own, value, grad + i);
  };
  for_each_vector(begin, end, step, [&]() HPO_INSIDE { loss.end(); });
  loss.end();
}

// Writes own_gradient + aggregate_grad to the gradient of the tokens that a clip before all gates leaves as they are, and 0 to
// the others. Weights, which may be null, multiply own_gradient.
inline void write_where_free(const PolicyLossArgs& args, int64_t first, int begin, int end, const PreClip& clip, int sign,
                             float own_gradient, float aggregate_grad, const float* weights) {
  const FastSource source(args, first);
  const GradientOut grad(args, first, nullptr, args.ref_logp != nullptr);  // whose penalty is added behind
  const bool clips = clip.low[sign] > -INFINITY || clip.high[sign] < INFINITY;  // else log-ratios need not be read again
  const Floats low = all<Floats>(clip.low[sign]), high = all<Floats>(clip.high[sign]);
  const Floats each = all<Floats>(own_gradient + aggregate_grad);
  for_each_vector(begin, end, [&](int i, Mask own, auto whole) HPO_INSIDE {
    constexpr bool kWhole = decltype(whole)::value;
    Mask present = args.mask ? present_own<kWhole>(own, args.mask + first + i) : own;
    if (clips) {
      const Floats x = source.log_ratio<kWhole>(i, own);
      present = both(present, both(at_least(x, low), at_least(high, x)));
    }
    Floats here = each;
    if (weights) {
      const Floats weight = load_own<kWhole>(own, weights + i);
      here = aggregate_grad + keep_if(but_not(own, is_nan(weight)), own_gradient * weight);
    }
    grad.store<kWhole>(i, own, keep_if(present, here));
  });
}

// The loops of one call, [masked] and [masked][with a gradient through aggregates].
struct OpenLoops {
  CountOpen count[2];
  CountOpenWeighted count_weighted;
  WriteOpen write[2][2];

  OpenLoops(bool split, bool kept, bool weighted)
      : count{split ? count_open<true, false> : count_open<false, false>,
              split ? count_open<true, true> : count_open<false, true>},
        count_weighted(split ? count_open_weighted<true> : count_open_weighted<false>) {
    for (int masked = 0; masked < 2; ++masked) {
      const auto pick = [&](auto is_weighted) {
        constexpr bool kWeighted = decltype(is_weighted)::value;
        write[masked][0] = kept ? pick_write<true, false, kWeighted>(masked) : pick_write<false, false, kWeighted>(masked);
        write[masked][1] = pick_write<true, true, kWeighted>(masked);
      };
      weighted ? pick(std::true_type{}) : pick(std::false_type{});
    }
  }

 private:
  // Weights hold the mask of their tokens: besides, it only tells which of them receive gradient through aggregates.
  template <bool kKept, bool kFlows, bool kWeighted>
  static WriteOpen pick_write(bool masked) {
    constexpr bool kMatters = kFlows || !kWeighted;
    return kMatters && masked ? write_open<kMatters, kKept, kFlows, kWeighted> : write_open<false, kKept, kFlows, kWeighted>;
  }
};

}  // namespace hpo::HPO_ISA
