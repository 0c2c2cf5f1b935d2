// The arithmetic of a hierarchy of gates, above the tokens and at a token: C++ and CUDA call these, neither repeats them. The
// definition is hpo_core/reference/hierarchy.py.
#pragma once
#include "gates.h"
#include "rows.h"

namespace hpo {

HPO_INLINE int64_t row_of_leaf(const Hierarchy& hierarchy, int64_t p) { return hierarchy.leaf_row ? hierarchy.leaf_row[p] : p; }

// Whether a call does this stage.
HPO_INLINE bool does(const Hierarchy& hierarchy, Stage stage) {
  return hierarchy.stage == Stage::whole || hierarchy.stage == stage;
}

// The segment of a leaf at level k.
HPO_INLINE int64_t ancestor_of(const Hierarchy& hierarchy, int k, int64_t p) {
  return hierarchy.ancestors ? hierarchy.ancestors[k * hierarchy.leaves + p] : p;
}

// A leaf by itself: bad unless it lies in its row and all its ancestors exist. Whether it overlaps earlier leaves is up to the
// caller to check.
HPO_INLINE Range leaf_range(const Hierarchy& hierarchy, const PolicyLossArgs& args, int64_t p) {
  const int64_t begin = hierarchy.leaf_begin[p], end = hierarchy.leaf_end[p], row = row_of_leaf(hierarchy, p);
  bool good = row >= 0 && row < args.rows;
  if (good) {
    const Range range = row_range(args.cu_seqlens, row, args.tokens);
    good = !range.bad && range.begin <= begin && begin <= end && end <= range.end;
  }
  for (int k = 0; good && k < hierarchy.depth; ++k) {
    const int64_t ancestor = ancestor_of(hierarchy, k, p);
    good = ancestor >= 0 && ancestor < hierarchy.leaves;
  }
  return {good ? begin : 0, good ? end : 0, !good};
}

// ------------------------------------------------------------------------------------------------------ above the tokens

// The part of a log-ratio for the first channel; the second gets this minus the log-ratio. +0 and -0 rise: one channel has
// the whole derivative at 0.
HPO_INLINE float rising_part(bool split, float x) { return split && x < 0.0f ? 0.0f : x; }

// Sums of log-ratios over a leaf or a segment, by channel, see to_fixed. Aggregates other than mean and sum add up other
// numbers, see SegmentTables.
struct LogRatios {
  int64_t valid, fixed[2];

  HPO_INLINE void add(const LogRatios& other) {
    valid += other.valid;
    for (int c = 0; c < 2; ++c) fixed[c] += other.fixed[c];
  }
};

// Whether segments add up exponentials of log-ratios, see mean_exp_part.
HPO_INLINE bool adds_exponentials(const Hierarchy& hierarchy) {
  return hierarchy.depth > 0 && hierarchy.levels[0].aggregate == Aggregate::log_mean_exp;
}

// The divisor of sums over a segment.
HPO_INLINE double divisor(const HierarchyLevel& level, int64_t valid) {
  return level.aggregate != Aggregate::sum && valid > 0 ? double(valid) : 1.0;
}

HPO_INLINE double sum_of(const LogRatios& sums, int channel) {
  return from_fixed(channel == 0 ? sums.fixed[0] : sums.fixed[1]);  // an index would put the sums into memory
}

// kMeanExp: whether the level may be a log mean exp, whose logarithm would cost the others registers.
template <bool kMeanExp>
HPO_INLINE double aggregate(const HierarchyLevel& level, const LogRatios& sums, int channel) {
  const double mean = sum_of(sums, channel) / divisor(level, sums.valid);
  if (kMeanExp && level.aggregate == Aggregate::log_mean_exp) return ::log1p(mean);
  return mean;
}

// A segment at level k - 1 as part of its balanced segment at level k.
struct Child {
  int64_t parent;  // -1: it has no tokens
  LogRatios sums;  // 1 for itself, and its aggregates
};

// The child that segment s is. A segment's number is that of its first leaf, whose ancestor at level k is the parent.
HPO_INLINE Child child_at(const Hierarchy& hierarchy, int k, int64_t s, const LogRatios& sums) {
  const int64_t parent = ancestor_of(hierarchy, k, s);
  if (sums.valid == 0 || parent < 0 || parent >= hierarchy.leaves) return {-1, {}};
  const HierarchyLevel& level = hierarchy.levels[k - 1];
  return {parent, {1, {to_fixed(aggregate<true>(level, sums, 0)), to_fixed(aggregate<true>(level, sums, 1))}}};
}

// How many shares a segment makes of the gradient in its aggregate: one for each token, or under a balanced level one for each
// child.
HPO_INLINE double shares_of_segment(const HierarchyLevel& level, const LogRatios& sums, int channel) {
  const double ones = divisor(level, sums.valid);
  return level.aggregate == Aggregate::log_mean_exp ? ones + sum_of(sums, channel) : ones;
}

// The divisor of an aggregate's gradient at level k on its way to a token; in a log mean exp each token has the factor e^x
// besides. segment(k): the sums of the token's segment at level k.
template <class SegmentAt>
HPO_INLINE double shares(const Hierarchy& hierarchy, int k, int channel, const SegmentAt& segment) {
  double children = 1.0;
  for (; hierarchy.levels[k].aggregate == Aggregate::balanced; --k) {
    children *= shares_of_segment(hierarchy.levels[k], segment(k), channel);
  }
  return children * shares_of_segment(hierarchy.levels[k], segment(k), channel);
}

// The gates of all levels above a leaf, as its tokens need them. [channel][sign of the advantage]
struct LeafGate {
  float z[2];         // the gated residuals of all levels
  float mean[2];      // of the finest level, by channel
  float slope[2][2];  // of the finest level
  float own[2][2];    // added to the slope of a token's own path by Routing::self
  int32_t below[2], above[2];  // -1: some level is beyond its bound
  int32_t bent[2];  // -1: some level does not pass its residual on as it is; on the CPU
};

struct LevelSlopes {
  double slope[kMostLevels][2][2];
};

// One channel and one sign of the advantage of a LeafGate. The caller joins z, below, above and bent of both channels.
struct GateColumn {
  float z, mean, slope, own;
  int32_t below, above, bent;
};

// segment(k): the sums of the leaf's segment at level k; the leaf has tokens. put_slope(k, slope) takes each level's slope.
template <bool kMeanExp, class SegmentAt, class PutSlope>
HPO_INLINE GateColumn gate_column(const Hierarchy& hierarchy, int channel, int sign, const SegmentAt& segment,
                                  const PutSlope& put_slope) {
  GateColumn column = {};
  LogRatios sums = segment(0);
  double here = aggregate<kMeanExp>(hierarchy.levels[0], sums, channel), z = 0.0, finer_slope = 0.0;
  column.mean = float(here);
  for (int k = 0; k < hierarchy.depth; ++k) {
    const HierarchyLevel& level = hierarchy.levels[k];
    const bool top = k + 1 == hierarchy.depth;
    const LogRatios coarser = top ? LogRatios{} : segment(k + 1);
    const double above = top ? 0.0 : aggregate<kMeanExp>(hierarchy.levels[k + 1], coarser, channel);
    const Residual gated = gate_residual(level, channel, sign, here - above, double(sums.valid));
    z += gated.value;
    put_slope(k, gated.slope);
    // At the finest level the token subtracts its own slope.
    if (level.routing == Routing::self) column.own += float(gated.slope - finer_slope);
    if (k == 0) column.slope = float(gated.slope);
    const int32_t side = channel == 0 ? gated.side : -gated.side;
    column.below |= -int32_t(side < 0);
    column.above |= -int32_t(side > 0);
    column.bent |= -int32_t((gated.value != here - above) | (gated.slope != 1.0));
    finer_slope = gated.slope;
    here = above;
    sums = coarser;
  }
  column.z = float(channel == 0 ? z : -z);
  return column;
}

// -------------------------------------------------------------------------------------------------------------- a token

// Bounds per token are ratios.
HPO_INLINE float log_bound(float ratio) { return float(::log(double(ratio))); }

template <class F>
struct GatedTokenNumber {
  F z;
  F slope;                               // of z in the token's own log-ratio
  F rising_step, falling_step;           // slope of the finest level - slope of the token gate, by channel
  typename Number<F>::Int below, above;  // -1: some gate is beyond its bound
};

using GatedToken = GatedTokenNumber<float>;

// `keep`: 0 where the finest level takes the place of the token's own slope, else 1. slope_low and slope_high: the derivative
// beyond the bounds, of one channel.
template <class F>
HPO_INLINE GatedTokenNumber<F> gate_token(const LeafGate& gate, bool split, bool drop, float keep,
                                          typename Number<F>::Int negative, F x, F low, F high, F slope_low = F{},
                                          F slope_high = F{}) {
  using N = Number<F>;
  using Int = typename N::Int;
  const F zero = {}, one = all<F>(1.0f);
  const Int none = {}, falls = split ? N::mask(x < zero) : none;
  const F up = falls ? zero : x, u = up - gate.mean[0], v = drop ? zero : clip(u, low, high);
  F inside = drop ? zero : (N::mask(v == u) ? one : (N::mask(u > high) ? slope_high : slope_low));
  GatedTokenNumber<F> token;
  token.z = by_sign<F>(negative, gate.z) + v;
  token.below = negative ? none + gate.below[1] : none + gate.below[0];
  token.above = negative ? none + gate.above[1] : none + gate.above[0];
  if (!drop) token.below |= N::mask(u < low), token.above |= N::mask(u > high);
  token.rising_step = by_sign<F>(negative, gate.slope[0]) - inside;
  token.falling_step = zero;
  F own = by_sign<F>(negative, gate.own[0]);
  if (split) {
    const F u_down = (up - x) - gate.mean[1], v_down = drop ? zero : clip(u_down, low, high);
    const Int over = drop ? none : N::mask(u_down > high), under = drop ? none : N::mask(u_down < low);
    const F inside_down = drop ? zero : (over | under ? zero : one);
    token.z = token.z - v_down;
    token.below |= over, token.above |= under;
    token.falling_step = by_sign<F>(negative, gate.slope[1]) - inside_down;
    own = falls ? by_sign<F>(negative, gate.own[1]) : own;
    inside = falls ? inside_down : inside;
  }
  token.slope = keep * inside + own;
  return token;
}

// -(a e^z): the loss of a token and d loss / d z under the linear head. At z = 0 this is -a to the bit.
template <class F>
HPO_INLINE F token_value(F a, F z) {
  return -(a * exp(clamp_number(z, all<F>(-kSaturation), all<F>(kSaturation))));
}

// ------------------------------------------------------------------------------------------- gradient through aggregates

// d loss / d z of the chosen tokens of a leaf: by sign of the advantage, and by channel times (slope of the finest level -
// slope of the token gate). The second is summed as it is: where nothing saturates, it is 0 to the bit.
struct Flow {
  double by_sign[2], past_token[2];

  HPO_INLINE void add(const Flow& other) {
    for (int i = 0; i < 2; ++i) by_sign[i] += other.by_sign[i], past_token[i] += other.past_token[i];
  }
};

// The gradient of a leaf's loss in the aggregate of its segment at level k.
HPO_INLINE double grad_into_aggregate(const LevelSlopes& slopes, int k, int channel, const Flow& flow) {
  if (k == 0) return channel == 0 ? flow.past_token[0] : flow.past_token[1];
  const auto& here = slopes.slope[k][channel];
  const auto& finer = slopes.slope[k - 1][channel];
  return (here[0] - finer[0]) * flow.by_sign[0] + (here[1] - finer[1]) * flow.by_sign[1];
}

// The gradients in an aggregate are added as integers, so that their sum has no order. Gradients have no fixed range, so the
// step of a segment follows the largest magnitude among its terms, whose bits order as it does: 2^37 steps reach the next power
// of two, and fewer than 2^25 leaves or tiles have a term (see to_fixed).

constexpr int kSmallest = 100, kOverflow = 2047;  // exponents of doubles: below the first, steps stay as they are

HPO_INLINE int64_t magnitude_of(double value) { return to_bits(::fabs(value)); }
HPO_INLINE int exponent_of(int64_t largest) { return int(largest >> 52) > kSmallest ? int(largest >> 52) : kSmallest; }
HPO_INLINE double power_of_two(int exponent) { return from_bits(int64_t(exponent) << 52); }
HPO_INLINE double step_of(int exponent) { return power_of_two(exponent - 36); }
HPO_INLINE double steps_in_one(int exponent) { return power_of_two(2082 - exponent); }

// A gradient in steps.
HPO_INLINE int64_t in_steps(double grad, int64_t largest) {
  const int exponent = exponent_of(largest);
  return exponent == kOverflow ? 0 : int64_t(::rint(grad * steps_in_one(exponent)));
}

// The sum of gradients from its steps. Infinity and NaN stay as they are.
HPO_INLINE double from_steps(int64_t steps, int64_t largest) {
  const int exponent = exponent_of(largest);
  return exponent == kOverflow ? from_bits(largest) : double(steps) * step_of(exponent);
}

}  // namespace hpo
