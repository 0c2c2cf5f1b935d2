// policy_loss: loss, metrics and gradient of one pack. The definition is hpo_core/reference/gates.py.
//
//   gates_sums.h     sums in a fixed order
//   lanes.h          vectors of floats
//   gates_tile.h     row, masks, log-ratio and coefficient of each token
//   gates_fast_path.h    the same in one pass, where nothing is extraordinary
//   gates_penalty.h  the penalty on the distance from the reference policy
//   gates_call.h     the parts of a call that no gate changes
//   gates_levels.h   gates on trajectories
//   hierarchy.cpp    gates on several levels at once, hierarchy_tokens.h their tokens
//   here             gates on tokens, and one call from begin to end
#include <type_traits>

#include "gates_call.h"
#include "gates_fast_path.h"
#include "gates_levels.h"
#include "kernels.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

// ------------------------------------------------------------------------------------------------------- token gates

// In ratio space, by sign of the advantage. Where a bound is driven, the token's own takes its place.
struct Bounds {
  float low[2], high[2];
  int32_t low_driven[2], high_driven[2];
  const float *token_low, *token_high;  // [tile]
};

// Which of the bounds a loop reads.
enum class BoundsKind { none, common, by_sign, by_token };

Bounds tile_bounds(const Call& call, int64_t first) {
  const PolicyLossArgs& args = call.args;
  const bool clips = call.structure.token == TokenGate::clip;
  Bounds bounds = {};
  for (int sign = 0; sign < 2; ++sign) {
    bounds.low[sign] = clips ? float(call.numbers.token_low[sign]) : 0.0f;
    bounds.high[sign] = clips ? float(call.numbers.token_high[sign]) : INFINITY;
    bounds.low_driven[sign] = args.low && call.structure.low_driven[sign];
    bounds.high_driven[sign] = args.high && call.structure.high_driven[sign];
  }
  bounds.token_low = (args.low ? args.low : args.logp) + first;  // if not driven, anything readable
  bounds.token_high = (args.high ? args.high : args.logp) + first;
  return bounds;
}

using TokenGateLoop = GateCounts (*)(const Bounds&, const Tile&, const float* coefficient, const float* logp, float* loss,
                                     float* grad, int n);

template <bool kScoreHead, BoundsKind kBounds>
GateCounts token_gate_loop(const Bounds& bounds, const Tile& tile, const float* __restrict coefficient,
                           const float* __restrict logp, float* __restrict loss, float* __restrict grad, int n) {
  const Bounds b = bounds;
  const int32_t* __restrict chosen = tile.chosen;
  const float* __restrict token_low = b.token_low, * __restrict token_high = b.token_high;
  GateCounts counts;
  for (int i = 0; i < n; ++i) {
    const int32_t kind = chosen[i];
    float low = b.low[0], high = b.high[0];
    if (kBounds == BoundsKind::by_sign || kBounds == BoundsKind::by_token) {
      low = kind == kNegative ? b.low[1] : low;
      high = kind == kNegative ? b.high[1] : high;
    }
    if (kBounds == BoundsKind::by_token) {
      const float own_low = token_low[i], own_high = token_high[i];
      low = (kind == kNegative ? b.low_driven[1] : b.low_driven[0]) ? own_low : low;
      high = (kind == kNegative ? b.high_driven[1] : b.high_driven[0]) ? own_high : high;
    }
    const float ratio = tile.ratio[i];
    const Gated gated = kBounds == BoundsKind::none ? Gated{1.0f, 0} : clip_ratio(ratio, low, high);
    const Term term = policy_term(kScoreHead, coefficient[i], gated, kScoreHead ? logp[i] : 0.0f);
    loss[i] = keep_if(kind != kAbsent, term.loss);
    grad[i] = keep_if(kind != kAbsent, term.grad);
    counts.chosen += kind;
    if (kBounds != BoundsKind::none) {
      counts.below += kind & mask_of(ratio < low);
      counts.above += kind & mask_of(ratio > high);
    }
  }
  return counts;
}

BoundsKind bounds_kind(const Call& call) {
  if (call.structure.token == TokenGate::drop) return BoundsKind::none;
  const Bounds bounds = tile_bounds(call, 0);
  if (bounds.low_driven[0] || bounds.low_driven[1] || bounds.high_driven[0] || bounds.high_driven[1]) {
    return BoundsKind::by_token;
  }
  const bool common = bounds.low[0] == bounds.low[1] && bounds.high[0] == bounds.high[1];
  return common ? BoundsKind::common : BoundsKind::by_sign;
}

template <bool kScoreHead>
TokenGateLoop pick_token_gate(BoundsKind kind) {
  switch (kind) {
    case BoundsKind::none: return token_gate_loop<kScoreHead, BoundsKind::none>;
    case BoundsKind::common: return token_gate_loop<kScoreHead, BoundsKind::common>;
    case BoundsKind::by_sign: return token_gate_loop<kScoreHead, BoundsKind::by_sign>;
    default: return token_gate_loop<kScoreHead, BoundsKind::by_token>;
  }
}

// ---------------------------------------------------------------------------------------------------------- one call

struct Workspace {
  Arena arena;
  Partial* partials;             // [chunks]
  uint8_t* reload;               // [chunks], 1 where the second sweep needs the log-ratios again
  Masked* masked;                // [tiles], from the first sweep for the second
  uint8_t* seen;                 // [rows], 1 where a row has a valid token
  RowSums *rows, *trajectories;  // [rows]
  Level* levels;                 // [rows], of rows or of trajectories
  double* losses;                // [ranges of rows]
  int64_t bytes;

  Workspace(void* base, int64_t tokens, int64_t row_count) : arena(base) {
    partials = arena.take<Partial>(ceil_divide(tokens, kChunk));
    reload = arena.take<uint8_t>(ceil_divide(tokens, kChunk));
    masked = arena.take<Masked>(ceil_divide(tokens, kTile));
    seen = arena.take<uint8_t>(row_count);
    rows = arena.take<RowSums>(row_count);
    trajectories = arena.take<RowSums>(row_count);
    levels = arena.take<Level>(row_count);
    losses = arena.take<double>(ceil_divide(row_count, kRange));
    bytes = arena.bytes();
  }
};

// loss and grad of one tile under either kind of gate.
struct Gate {
  TokenGateLoop token_loop;
  LevelGateLoop level_loop;
  const Level* levels;  // null: the gate is on tokens
  bool values_by_row;   // the loss is known without the tokens, see settle_rows

  GateCounts operator()(const Call& call, int64_t first, int n, const Segments& segments, Tile& tile, const float* coefficient,
                        float* loss, float* grad) const {
    const float* logp = call.args.logp + first;
    GateCounts counts;
    if (levels) level_loop(spread_levels(call, segments, levels, tile), tile, coefficient, logp, loss, grad, n);
    else counts = token_loop(tile_bounds(call, first), tile, coefficient, logp, loss, grad, n);
    drop_infinite(call, n, tile, loss, grad);
    return counts;
  }
};

// A fast-path tile of many rows under a gate on tokens, gradient and all.
template <bool kScoreHead, BoundsKind kBounds>
struct FastTokenGate {
  const Bounds& bounds;
  const float* logp;
  float* grad;
  GroupSum loss;
  Ints below[kParts] = {}, above[kParts] = {};

  template <class Vector>
  HPO_INLINE void operator()(const Vector& vector, Ints kind, Floats coefficient) {
    const Floats ratio = vector.ratio;
    Floats low = all<Floats>(bounds.low[0]), high = all<Floats>(bounds.high[0]);
    if (kBounds == BoundsKind::by_sign) {
      low = kind == kNegative ? all<Floats>(bounds.low[1]) : low;
      high = kind == kNegative ? all<Floats>(bounds.high[1]) : high;
    }
    Mask inside = {};
    Floats clipped = all<Floats>(1.0f);
    if (kBounds != BoundsKind::none) {
      const Mask enough = at_least(ratio, low), little = at_least(high, ratio);
      clipped = blend(little, blend(enough, ratio, low), high);
      inside = both(vector.present, both(enough, little));
      below[vector.part] = add_where(but_not(vector.present, enough), kind, below[vector.part]);
      above[vector.part] = add_where(but_not(vector.present, little), kind, above[vector.part]);
    }
    put_term<kScoreHead>(vector, inside, policy_value(coefficient, clipped), logp, loss, grad);
  }
  HPO_INLINE void end_group() { loss.end(); }

  void count(GateCounts& counts) const {
    for (int part = 0; part < kParts; ++part) counts.below += sum_lanes(below[part]), counts.above += sum_lanes(above[part]);
  }
};

// A tile of few rows: the tokens of a row have one sign of the advantage, and under most gates one bound. Tokens beyond it have
// the same loss, so counting them is enough.
template <bool kScoreHead, bool kRatio, bool kLow, bool kHigh>
struct FastRowGate {
  static constexpr bool kCounts = kRatio && !kScoreHead;
  const Floats coefficient, low, high;
  const float* logp;
  float* grad;
  GroupSum loss;
  LaneCount inside_count = {}, not_below_count = {};

  template <class Vector>
  HPO_INLINE void operator()(const Vector& vector) {
    const Floats ratio = kRatio ? vector.ratio : all<Floats>(1.0f);
    const Mask enough = kLow ? at_least(ratio, low) : all_lanes(), little = kHigh ? at_least(high, ratio) : all_lanes();
    const Mask not_below = both(vector.present, enough), inside = kRatio ? both(not_below, little) : Mask{};
    if (kLow || kHigh) inside_count.add(inside);
    if (kLow && kHigh) not_below_count.add(not_below);
    if constexpr (kCounts) {
      const Floats value = keep_if(inside, policy_value(coefficient, ratio));
      loss.add(vector.part, all_lanes(), value);
      vector.store(value, grad);
    } else {
      const Floats raised = kLow ? blend(enough, ratio, low) : ratio, clipped = kHigh ? blend(little, raised, high) : raised;
      put_term<kScoreHead>(vector, inside, policy_value(coefficient, clipped), logp, loss, grad);
    }
  }
  HPO_INLINE void end_group() { loss.end(); }

  // Returns the loss of the counted tokens.
  double count(int32_t present, int32_t kind, GateCounts& counts) const {
    if (!(kLow || kHigh)) return 0.0;
    const int32_t outside = present - inside_count.total();
    const int32_t under = !kHigh ? outside : (kLow ? present - not_below_count.total() : 0), over = outside - under;
    counts.below += under * kind, counts.above += over * kind;
    const auto loss_of = [&](int32_t tokens, float bound) {
      return tokens == 0 ? 0.0 : double(tokens) * double(policy_value(coefficient[0], bound));
    };
    return kCounts ? loss_of(under, low[0]) + loss_of(over, high[0]) : 0.0;
  }
};

// Fast-path tiles of one call, each in its cheapest form. False: the fast path does not hold, and nothing is counted.
template <bool kScoreHead, bool kMasked>
struct FastTiles {
  using Run = bool (*)(const Call&, int64_t first, int n, const Segments&, Tile&, uint8_t* seen, Partial&);

  template <BoundsKind kBounds>
  static bool run(const Call& call, int64_t first, int n, const Segments& segments, Tile& tile, uint8_t* seen,
                  Partial& partial) {
    if (n % kLanes != 0) return false;
    const PolicyLossArgs& args = call.args;
    const bool few = segments.few(n);
    if (few ? !finite_coefficients(args, segments) : load_rows(args, first, n, segments, tile)) return false;
    const Bounds bounds = tile_bounds(call, first);
    float* grad = args.grad ? args.grad + first : tile.grad;
    return guess_near(tile.near, [&](auto near) {
      constexpr bool kTakenForNear = decltype(near)::value;
      double loss[kLanes] = {};
      GateCounts counts;
      const double before = partial.slots[kTokens];
      if (few) {
        if (!few_rows<kTakenForNear, kBounds != BoundsKind::none>(args, first, segments, bounds, grad, tile, seen, partial,
                                                                  loss, counts))
          return false;
      } else {
        FastTokenGate<kScoreHead, kBounds> gate = {bounds, args.logp + first, grad, GroupSum(loss)};
        if (!sweep_many_rows<kTakenForNear, kMasked>(args, first, n, partial, gate, tile)) return false;
        gate.loss.end();
        gate.count(counts);
        mark_rows(segments, tile.kind, seen);
      }
      counts.add_to(partial.slots);
      partial.slots[kSelected] += partial.slots[kTokens] - before;
      add_to_lanes(loss, partial.sums[kLossSum]);
      return true;
    });
  }

  template <bool kTakenForNear, bool kRatio>
  static bool few_rows(const PolicyLossArgs& args, int64_t first, const Segments& segments, const Bounds& bounds, float* grad,
                       Tile& tile, uint8_t* seen, Partial& partial, double* loss, GateCounts& counts) {
    FastSums sums;
    PresentTokens present;
    GroupSum group(loss);
    for (int index = 0; index < segments.count; ++index) {
      const Segment& segment = segments.list[index];
      const float advantage = args.advantages[segment.row], coefficient = args.weights[segment.row] * advantage;
      const int sign = advantage < 0.0f;
      const float low = bounds.low[sign], high = bounds.high[sign];
      const auto sweep = [&](auto has_low, auto has_high) {
        FastRowGate<kScoreHead, kRatio, decltype(has_low)::value, decltype(has_high)::value> gate = {
            all<Floats>(coefficient), all<Floats>(low), all<Floats>(high), args.logp + first, grad, group};
        const int32_t count = sweep_row<kTakenForNear, kMasked>(args, first, segment, sums, gate);
        present.set(index, count);
        loss[0] += gate.count(count, sign ? kNegative : kPositive, counts);
        group = gate.loss;
      };
      const std::true_type yes;
      const std::false_type no;
      if constexpr (kRatio) {
        const bool has_low = low > 0.0f, has_high = high < INFINITY;
        has_low ? (has_high ? sweep(yes, yes) : sweep(yes, no)) : (has_high ? sweep(no, yes) : sweep(no, no));
      } else {
        sweep(no, no);
      }
    }
    group.end();
    if (!settle_fast<kTakenForNear>(sums, present.all, partial, tile.near)) return false;
    present.mark(segments, seen);
    return true;
  }

  static Run pick(BoundsKind kind) {
    switch (kind) {
      case BoundsKind::none: return run<BoundsKind::none>;
      case BoundsKind::common: return run<BoundsKind::common>;
      case BoundsKind::by_sign: return run<BoundsKind::by_sign>;
      default: return nullptr;
    }
  }
};

void run_token_gate(const Call& call, int threads, const Workspace& space) {
  const bool score = call.structure.head == Head::score;
  const BoundsKind kind = bounds_kind(call);
  const Gate gate = {score ? pick_token_gate<true>(kind) : pick_token_gate<false>(kind), nullptr, nullptr, false};
  const Calls calls(call);
  const auto fast_masked = score ? FastTiles<true, true>::pick(kind) : FastTiles<false, true>::pick(kind);
  const auto fast_open = score ? FastTiles<true, false>::pick(kind) : FastTiles<false, false>::pick(kind);
  const bool may = fast_open && may_be_fast(call.args);
  parallel_for(ceil_divide(call.args.tokens, kChunk), threads, [&](int64_t chunk) {
    Tile tile;
    Partial partial, counted;
    for_each_tile(call.rows, chunk, [&](int64_t first, int n, const Segments& segments) {
      const Masked masked = masked_tokens(call.args.mask, first, n);
      const Call& here = calls.of(masked);
      const auto fast = here.args.mask ? fast_masked : fast_open;
      const bool done = may && (masked == Masked::all || fast(here, first, n, segments, tile, space.seen, partial));
      if (may && masked == Masked::all) clear_gradient(call.args, first, n);
      if (done && !call.args.token_loss) return;
      if (done) {  // losses of tokens are computed apart, so that asking for them changes no other bit
        measure(here, first, n, segments, tile, space.seen, counted);
        return write_token_loss(here, gate, first, n, segments, tile);
      }
      measure(here, first, n, segments, tile, space.seen, partial);
      finish_tile(here, gate, first, n, segments, tile, partial);
    });
    space.partials[chunk] = partial;
  });
}

// Two sweeps, the levels between them; returns how many rows name a trajectory that does not exist.
int64_t run_level_gate(const Call& call, int threads, const Workspace& space, Partial& total) {
  const PolicyLossArgs& args = call.args;
  const GateStructure& structure = call.structure;
  const int64_t chunks = ceil_divide(args.tokens, kChunk);
  const Calls calls(call);
  const bool may = may_be_fast(args) && !args.token_loss, linear = structure.head == Head::linear;
  std::memset(space.rows, 0, size_t(args.rows) * sizeof(RowSums));
  parallel_for(chunks, threads, [&](int64_t chunk) {
    Tile tile;
    Partial partial;
    bool reload = args.ref_logp != nullptr;
    for_each_tile(call.rows, chunk, [&](int64_t first, int n, const Segments& segments) {
      const Masked masked = space.masked[first / kTile] = masked_tokens(args.mask, first, n);
      if (may && masked == Masked::all) return;
      const Call& here = calls.of(masked);
      const bool few = segments.few(n);
      RowLogRatios of_rows[kFewRows];
      if (few && may && measure_fast_rows<false, false>(here.args, first, segments, tile, space.seen, partial, of_rows)) {
        return add_row_sums(here, chunk, segments, of_rows, space.rows);
      }
      if (few || !may || !measure_fast(here, first, n, segments, tile, space.seen, partial)) {
        measure(here, first, n, segments, tile, space.seen, partial);
      }
      add_row_sums(here, chunk, n, segments, tile, space.rows);
      reload |= tile.exceptional;
    });
    space.partials[chunk] = partial;
    space.reload[chunk] = reload;
  });

  sum_advantages(call, threads, space.rows);
  const RowSums* owners = args.row_trajectory ? space.trajectories : space.rows;
  const int64_t broken = args.row_trajectory ? gather_trajectories(args, space.rows, space.trajectories) : 0;
  for_each_range(args.rows, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) space.levels[i] = make_level(owners[i], structure, call.numbers);
  });
  settle_rows(call, threads, space.rows, space.levels, space.losses).add_to(total.slots);
  if (linear) {
    for (int64_t range = 0; range < ceil_divide(args.rows, kRange); ++range) total.sums[kLossSum][0] += space.losses[range];
  }
  const bool by_row = may && linear;
  if (by_row && !args.grad) return broken;

  const Gate gate = {nullptr, pick_level_gate(structure), space.levels, linear};
  parallel_for(chunks, threads, [&](int64_t chunk) {
    Tile tile;
    Partial counted;
    for_each_tile(call.rows, chunk, [&](int64_t first, int n, const Segments& segments) {
      if (by_row && !space.reload[chunk]) {
        const Masked masked = space.masked[first / kTile];
        if (masked == Masked::all) return clear_gradient(args, first, n);
        const Call& here = calls.of(masked);
        return spread_gradient(here, first, n, segments, space.levels, tile, args.grad + first);
      }
      load(call, first, n, segments, space.reload[chunk], tile, counted);
      finish_tile(call, gate, first, n, segments, tile, space.partials[chunk]);
    });
  });
  return broken;
}

}  // namespace

int64_t policy_loss_workspace(int64_t tokens, int64_t rows) { return Workspace(nullptr, tokens, rows).bytes; }

void policy_loss(const PolicyLossArgs& args, const GateStructure& structure, const GateNumbers& numbers, int threads) {
  const Call call = {args, structure, numbers, Rows(args.cu_seqlens, args.rows, args.tokens)};
  const Workspace space(args.workspace, args.tokens, args.rows);
  threads = worthwhile(threads, args.tokens + args.rows);
  std::memset(space.seen, 0, size_t(args.rows));

  int64_t broken = call.rows.broken;
  Partial total;
  if (structure.has_level) broken += run_level_gate(call, threads, space, total);
  else run_token_gate(call, threads, space);

  for (int64_t chunk = 0; chunk < ceil_divide(args.tokens, kChunk); ++chunk) total.add(space.partials[chunk]);
  int64_t seen = 0;
  const int64_t rows = args.rows;
  for (int64_t row = 0; row < rows; ++row) seen += space.seen[row];
  finish(call, total, seen, broken);
}

}  // namespace hpo::HPO_ISA
