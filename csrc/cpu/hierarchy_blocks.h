// The sweeps over the tokens of one block of a leaf: they are measured, gated, and given their share of the gradients of
// aggregates.
#pragma once
#include "hierarchy_leaves.h"
#include "hierarchy_reference.h"
#include "hierarchy_workspace.h"

namespace hpo::HPO_ISA {

inline void add_log_ratios(const Tile& tile, const float* entering, int n, bool split, LogRatios& sums) {
  int32_t kinds = 0;
  int64_t rising = 0, total = 0;
  for (int i = 0; i < n; ++i) kinds += tile.kind[i];
  for (int i = 0; i < n; ++i) {
    const float x = entering[i];
    const int64_t fixed = to_fixed(x);
    total += fixed;
    rising += x < 0.0f ? 0 : fixed;
  }
  sums.valid += positives(kinds) + negatives(kinds);
  sums.fixed[0] += split ? rising : total;
  sums.fixed[1] += split ? rising - total : 0;
}

// The levels above the tokens of one leaf, which has tokens. segment(k): the sums of its segment at level k.
// put_slope(k, channel, sign, slope) takes each level's slope.
template <class SegmentAt, class PutSlope>
HPO_INLINE void gate_leaf(const PolicyLossArgs& args, const Leaves& leaves, int64_t p, const SegmentAt& segment, LeafGate& gate,
                          const PutSlope& put_slope) {
  // Advantages of rows have one sign here.
  const int negative = !args.advantage_per_token && args.advantages[leaves.row(p)] < 0.0f;
  const int first_sign = args.advantage_per_token ? 0 : negative, last_sign = args.advantage_per_token ? 1 : negative;
  for (int channel = 0; channel <= leaves.hierarchy.split; ++channel) {
    for (int sign = first_sign; sign <= last_sign; ++sign) {
      const auto put = [&](int k, double slope) { put_slope(k, channel, sign, slope); };
      const GateColumn column = gate_column<true>(leaves.hierarchy, channel, sign, segment, put);
      gate.z[sign] += column.z;
      gate.mean[channel] = column.mean;
      gate.slope[channel][sign] = column.slope;
      gate.own[channel][sign] = column.own;
      gate.below[sign] |= column.below;
      gate.above[sign] |= column.above;
      gate.bent[sign] |= column.bent;
    }
  }
}

struct Scratch {
  Tile tile;
  Segments whole;
  TokenTerms terms;
  Masked masked[kTilesOfBlock];  // on the grid of lines
  OpenTokens open;
  BlockWeights weights;
  Partial counted;  // for tokens that an earlier sweep has counted: nothing reads these counts
};

// The sweeps over the tokens of one block.
struct Sweeps {
  const Calls& calls;
  const Leaves& leaves;
  const HierarchyWorkspace& space;
  const TokenPlan& plan;
  const Call& call = calls.masked;

  void gather_weights(const Block& block, Scratch& scratch) const {
    if (plan.weighs) scratch.weights.gather(call, block);
    else scratch.weights.usual = true;  // the last block may have had another plan
  }

  // A short block takes longer to classify than to read.
  bool classifies(const Block& block) const { return call.args.mask && block.tokens >= 2 * kWorthwhileRow; }

  // How many of n tokens of a block are masked; a short block counts as one in which some are.
  Masked masked_tokens_of(const Block& block, int64_t first, int n) const {
    if (classifies(block)) return masked_tokens(call.args.mask, first, n);
    return call.args.mask ? Masked::some : Masked::none;
  }

  // masked: [kTilesOfBlock]
  void classify_masks(const Block& block, Masked* masked) const {
    masked[0] = Masked::some;
    if (!classifies(block)) return;
    for_each_tile_of(block, kGridOfLines, [&](int64_t at, int begin, int end) {
      *masked++ = masked_tokens(call.args.mask, at + begin, end - begin);
    });
  }

  // The first sweep. Returns whether later ones may take the fast path in every tile.
  bool measure(const Block& block, Scratch& scratch, Partial& partial, LogRatios& sums) const {
    classify_masks(block, scratch.masked);
    if (corrects_rows(call.args)) correct_row(call.args, call.rows, block.row);
    gather_weights(block, scratch);
    const bool may = plan.may_be_fast;
    bool fast = plan.stays_fast() && scratch.weights.usual;
    for_each_stretch_of(block, call.args.mask ? scratch.masked : nullptr, [&](Masked masked, int64_t at, int begin, int end) {
      if (may && masked == Masked::all) return;
      const Call& here = calls.of(masked);
      for_each_part(begin, end, kLongTile, [&](int from, int to) {
        if (measure_fast_part(here, block.row, at, from, to, scratch, partial, sums)) return;
        for_each_part(from, to, kTile, [&](int first, int stop) {
          if (stop - first < to - from && measure_fast_part(here, block.row, at, first, stop, scratch, partial, sums)) return;
          const int tile = first / kTile * kTile;
          fast &= measure_tile(here, block.row, at + tile, first - tile, stop - tile, scratch, partial, sums);
        });
      });
    });
    return fast;
  }

  // The tokens [begin, end) behind the first at once, if the fast path holds for them.
  bool measure_fast_part(const Call& here, int64_t row, int64_t first, int begin, int end, Scratch& scratch, Partial& partial,
                         LogRatios& sums) const {
    if (!plan.measures_fast || !scratch.weights.usual || !has_ordinary_inputs(here, row, first, begin, end)) return false;
    RowLogRatios log_ratios;
    scratch.whole.set(row, begin, end);
    if (!plan.measure_fast(here.args, first, scratch.whole, plan.clip, scratch.tile, space.seen, partial, &log_ratios))
      return false;
    sums.add(by_channel(log_ratios));
    return true;
  }

  // Several blocks at once, if the fast path holds for all of them. All count as masked alike.
  bool measure_together(const Block* blocks, int count, Scratch& scratch, Partial& partial, LogRatios* sums) const {
    const int64_t first = line_of(blocks[0]), end = blocks[count - 1].first + blocks[count - 1].tokens;
    const bool whole = masked_tokens(call.args.mask, blocks[0].first, int(end - blocks[0].first)) == Masked::none;
    const Masked masked = whole ? Masked::none : Masked::some;
    std::fill_n(scratch.masked, 2, masked);  // a block lies in two tiles at most
    const Call& here = calls.of(masked);
    Segments& segments = scratch.whole;
    segments.count = count;
    for (int i = 0; i < count; ++i) {
      const int begin = int(blocks[i].first - first);
      segments.list[i] = {blocks[i].row, begin, begin + int(blocks[i].tokens)};
    }
    for (int i = 0; i < count; ++i) {
      const Segment& segment = segments.list[i];
      if (!has_ordinary_inputs(here, segment.row, first, segment.begin, segment.end)) return false;
    }
    RowLogRatios log_ratios[kFewRows];
    if (!plan.measure_fast(here.args, first, segments, plan.clip, scratch.tile, space.seen, partial, log_ratios)) return false;
    for (int i = 0; i < count; ++i) sums[i] = by_channel(log_ratios[i]);
    return true;
  }

  // Where tokens have weights, BlockWeights has looked at their advantages.
  bool has_ordinary_inputs(const Call& here, int64_t row, int64_t first, int begin, int end) const {
    const PolicyLossArgs& args = here.args;
    if (args.advantage_per_token && !plan.weighs && !has_finite_advantages(args, row, first, begin, end)) return false;
    return !args.ref_logp || is_ordinary_reference(here, first, begin, end, args.weights[row]);
  }

  // The penalty on the reference policy, which the loops of fast-path blocks leave out.
  void pay_reference(const Block& block, Scratch& scratch, Partial& partial) const {
    if (!call.args.ref_logp) return;
    classify_masks(block, scratch.masked);
    for_each_stretch_of(block, call.args.mask ? scratch.masked : nullptr, [&](Masked masked, int64_t at, int begin, int end) {
      if (masked == Masked::all) return;
      for_each_part(begin, end, kTile, [&](int from, int to) {
        HPO_ISA::pay_reference(calls.of(masked), at, from, to, call.args.weights[block.row], partial);
      });
    });
  }

  LogRatios by_channel(const RowLogRatios& log_ratios) const {
    if (!plan.hierarchy.split) return {log_ratios.valid, {log_ratios.fixed, 0}};
    return {log_ratios.valid, {log_ratios.rising, log_ratios.rising - log_ratios.fixed}};
  }

  // The tokens of one tile, on any path. Returns whether the fast path holds for them.
  bool measure_tile(const Call& here, int64_t row, int64_t first, int begin, int end, Scratch& scratch, Partial& partial,
                    LogRatios& sums) const {
    Tile& tile = scratch.tile;
    scratch.whole.set(row, begin, end);
    hpo::HPO_ISA::measure(here, first, end, scratch.whole, tile, space.seen, partial);
    if (plan.hierarchy.depth > 0) {  // log-ratios are added up as integers
      add_log_ratios(tile, load_aggregated(plan.term, tile, end, scratch.terms), end, plan.hierarchy.split, sums);
    }
    return !tile.exceptional && tile.chosen == tile.kind && !here.args.ref_logp;  // which measure_fast_part has refused
  }

  // The second sweep: loss, gradient of the token's own path, and the flow into aggregates. The caller has gathered the
  // weights.
  void finish(const Block& block, const LeafGate& leaf, Scratch& scratch, Partial& partial, const BlockResult& result,
              Flow& flow) const {
    const bool fast = result.fast;
    if (fast && call.args.entropy) add_entropies(call.args, block, partial);
    if (fast && plan.drops) {
      const GatedToken token = token_alike(block, leaf);
      count_alike(block, token, token_value(row_coefficient(call.args, block.row), token.z), scratch, partial, result, flow)
          .add_to(partial.slots);
      if (!plan.fills_last) {
        classify_masks(block, scratch.masked);
        write_alike(block, result.own_gradient, 0.0f, scratch.masked, scratch.weights);
      }
      write_token_losses(block, leaf, scratch);
      return pay_reference(block, scratch, partial);
    }
    const OpenLevels levels = open_levels(block, leaf, fast);
    if (levels.open) {
      classify_masks(block, scratch.masked);
      count(block, levels, scratch, partial, flow);
      write(block, leaf, AggregateGrad{}, scratch, partial);
    } else {
      finish_closed(block, leaf, fast, scratch, partial, flow);
    }
    if (fast) pay_reference(block, scratch, partial);
  }

  void finish_closed(const Block& block, const LeafGate& leaf, bool fast, Scratch& scratch, Partial& partial,
                     Flow& flow) const {
    FlowLanes lanes(plan);
    const BlockGate gate = {plan, leaf, block.row, scratch.terms, lanes};
    if (fast) write_token_losses(block, leaf, scratch);
    for_each_tile_of(block, kGridOfBlock, [&](int64_t at, int, int n) {
      if (fast) {
        const Masked masked = masked_tokens_of(block, at, n);
        if (masked == Masked::all) return clear_gradient(call.args, at, n);
        const float* weights = plan.weighs ? scratch.weights.of_token + (at - block.first) : nullptr;
        return gate.finish_fast(calls.of(masked), at, n, weights, scratch.tile, partial);
      }
      scratch.whole.set(block.row, 0, n);
      load(call, at, n, scratch.whole, scratch.tile, scratch.counted);
      finish_tile(call, gate, at, n, scratch.whole, scratch.tile, partial);
      if (plan.pays) {
        float* grad = call.args.grad ? call.args.grad + at : scratch.tile.grad;
        float* token_loss = call.args.token_loss ? call.args.token_loss + at : nullptr;
        add_own_penalty(call, plan.term, at, n, block.row, scratch.tile, grad, token_loss, partial);
      }
    });
    lanes.put_into(flow);
  }

  // The losses of a fast-path block's tokens, in a pass of their own that changes no bit of the sums and the gradient.
  void write_token_losses(const Block& block, const LeafGate& leaf, Scratch& scratch) const {
    if (!call.args.token_loss) return;
    FlowLanes lanes(plan);  // not read
    const BlockGate gate = {plan, leaf, block.row, scratch.terms, lanes};
    for_each_tile_of(block, kGridOfBlock, [&](int64_t at, int, int n) {
      scratch.whole.set(block.row, 0, n);
      load(call, at, n, scratch.whole, scratch.tile, scratch.counted);
      write_token_loss(call, gate, at, n, scratch.whole, scratch.tile);
    });
  }

  OpenLevels open_levels(const Block& block, const LeafGate& leaf, bool fast) const {
    if (!fast || !plan.opens) return {};
    const auto of_sign = [&](int sign) {
      return OpenLevels(leaf, sign, plan.hierarchy.split, plan.bounds.low[sign], plan.bounds.high[sign]);
    };
    if (!call.args.advantage_per_token) return of_sign(call.args.advantages[block.row] < 0.0f);
    return of_sign(0).open ? of_sign(1) : OpenLevels{};
  }

  // Counts the clipped tokens of a fast-path block under open levels, marks the others, and sets the flow into aggregates.
  void count(const Block& block, const OpenLevels& levels, Scratch& scratch, Partial& partial, Flow& flow) const {
    const bool split = plan.hierarchy.split, of_tokens = call.args.advantage_per_token;
    // The loss of a clipped token comes first: it is ready by the time that it is needed.
    const ClippedLoss clipped(levels, split, of_tokens ? 1.0f : row_coefficient(call.args, block.row));
    MaskPair* marks = scratch.open.inside_and_falling;
    OpenCounts counts;
    if (plan.weighs) plan.open_loops.count_weighted(levels, call.args, block, scratch.weights, marks, counts);
    else
      for_each_stretch_of(block, call.args.mask ? scratch.masked : nullptr, [&](Masked masked, int64_t at, int begin, int end) {
        if (masked == Masked::all) return;
        plan.open_loops.count[masked == Masked::some](levels, call.args, at, begin, end, marks, counts);
      });
    counts.add_to(partial.slots, kind_of(!of_tokens && call.args.advantages[block.row] < 0.0f));
    const double above = clipped.of_above(counts), below = clipped.of_below(counts);
    partial.sums[kLossSum][0] += above + below;
    if (!plan.carries) return;
    // Multiples of one number, so that their sum has no order. The factors of flow.by_sign are differences of slopes, and
    // levels that are open have one slope.
    flow.past_token[0] = split ? above : above + below;
    flow.past_token[1] = split ? below : 0.0;
  }

  // The gates of each token of a fast-path block that drops residuals: those of its leaf, as from gate_token.
  GatedToken token_alike(const Block& block, const LeafGate& leaf) const {
    const int sign = call.args.advantages[block.row] < 0.0f;
    return {leaf.z[sign], leaf.own[0][sign], leaf.slope[0][sign], 0.0f, leaf.below[sign], leaf.above[sign]};
  }

  // Adds the loss of such a block, sets the gradient of a token's own path, and returns the counts. value: the token_value of
  // each.
  GateCounts count_alike(const Block& block, const GatedToken& token, float value, const Scratch& scratch, Partial& partial,
                         const BlockResult& result, Flow& flow) const {
    const bool negative = call.args.advantages[block.row] < 0.0f;
    const int32_t present = plan.weighs ? scratch.weights.chosen : int32_t(result.log_ratios.valid);
    // Without weights the flows are multiples of one number, so that their sum has no order.
    const double tokens = plan.weighs ? scratch.weights.total() : double(present);
    if (present > 0) {  // else the coefficient has not been checked, and may be NaN
      partial.sums[kLossSum][0] += tokens * double(value);
      if (plan.carries) flow.past_token[0] = tokens * double(value * token.rising_step);
      if (plan.by_sign) flow.by_sign[negative] = tokens * double(value);
    }
    result.own_gradient = token.slope != 0.0f ? value * token.slope : 0.0f;
    const int32_t chosen = present * kind_of(negative);
    return {chosen, token.below & chosen, token.above & chosen};
  }

  // The gradient of the tokens of such a block. Tokens that no pre-gate clips share one, unless weights multiply the gradient
  // of their own path.
  void write_alike(const Block& block, float own_gradient, float aggregate_grad, const Masked* masked_tiles,
                   const BlockWeights& block_weights) const {
    const PolicyLossArgs& args = call.args;
    const bool negative = args.advantages[block.row] < 0.0f, weighted = plan.weighs && own_gradient != 0.0f;
    if (!args.grad) return;
    for_each_stretch_of(block, args.mask ? masked_tiles : nullptr, [&](Masked masked, int64_t at, int begin, int end) {
      if (masked == Masked::all) return clear_gradient(args, at + begin, end - begin);
      const float* weights = weighted ? block_weights.of_token - (block.first - at) : nullptr;
      write_where_free(calls.of(masked).args, at, begin, end, plan.clip, negative, own_gradient, aggregate_grad, weights);
    });
  }

  // Loss and gradient of a block that is counted.
  void write(const Block& block, const LeafGate& leaf, const AggregateGrad& aggregate_grad, Scratch& scratch,
             Partial& partial) const {
    const PolicyLossArgs& args = call.args;
    const float coefficient = row_coefficient(args, block.row);
    const auto write = [&](Masked masked, int64_t at, int begin, int end, const float* weights) {
      plan.open_loops.write[masked == Masked::some][!aggregate_grad.nothing()](
          args, at, begin, end, coefficient, weights, scratch.open.inside_and_falling, aggregate_grad, partial.sums[kLossSum]);
    };
    if (plan.weighs) {
      write(args.mask ? Masked::some : Masked::none, block.first, 0, int(block.tokens), scratch.weights.of_token);
    } else {
      for_each_stretch_of(block, args.mask ? scratch.masked : nullptr, [&](Masked masked, int64_t at, int begin, int end) {
        if (masked == Masked::all) return clear_gradient(args, at + begin, end - begin);
        write(masked, at, begin, end, nullptr);
      });
    }
    write_token_losses(block, leaf, scratch);
  }

  // The third sweep: the gradient that arrives through aggregates. Where nothing saturated, the gradient written before stands;
  // tokens of `fills_last` get their whole gradient here.
  void receive(const Block& block, const BlockResult& result, const AggregateGrad& aggregate_grad, Scratch& scratch) const {
    if (result.fast && plan.fills_last) {
      classify_masks(block, scratch.masked);
      return write_alike(block, result.own_gradient, aggregate_grad.rising, scratch.masked, scratch.weights);
    }
    if (aggregate_grad.nothing()) return;
    Tile& tile = scratch.tile;
    for_each_tile_of(block, kGridOfLines, [&](int64_t at, int begin, int n) {
      if (result.fast) {
        const Masked masked = masked_tokens_of(block, at + begin, n - begin);
        if (masked == Masked::all) return;
        return add_to_fast(plan.term, calls.of(masked).args, at, block.row, begin, n, aggregate_grad);
      }
      scratch.whole.set(block.row, begin, n);
      load(call, at, n, scratch.whole, tile, scratch.counted);
      float* grad = call.args.grad + at;
      for_each_vector(begin, n, [&](int i, Mask own, auto whole) HPO_INSIDE {
        constexpr bool kWhole = decltype(whole)::value;
        const Ints kind = load_lanes<Ints>(tile.kind + i), finite = load_lanes<Ints>(tile.infinite + i) == 0;
        const Floats x = load_lanes<Floats>(tile.x + i);
        const Floats flow = x < 0.0f ? all<Floats>(aggregate_grad.falling) : all<Floats>(aggregate_grad.rising);
        const Floats here = keep_if((kind != kAbsent) & finite, plan.term.through_pre_gate(kind == kNegative, x, flow));
        store_own<kWhole>(own, load_own<kWhole>(own, grad + i) + here, grad + i);
      });
    });
  }

  // A leaf that stands alone gets its own gradient back, with the rounding of the tables.
  AggregateGrad own_aggregate_grad(const LogRatios& sums, const Flow& flow) const {
    if (!plan.carries || plan.hierarchy.levels[0].routing != Routing::through) return {};
    const auto aggregate_grad = [&](int channel) {
      const double grad = flow.past_token[channel];
      const int64_t largest = magnitude_of(grad);
      const double share =
          from_steps(in_steps(grad, largest), largest) / shares(plan.hierarchy, 0, channel, [&](int) { return sums; });
      return keep_if(grad != 0.0, float(share));
    };
    const float rising = aggregate_grad(0), falling = aggregate_grad(1);
    return {rising, plan.hierarchy.split ? falling : rising};
  }
};

// The sweeps of each row. Where tokens have advantages, `of_alike` is for the rows whose tokens have the same one.
struct RowSweeps {
  const Sweeps &of_any, &of_alike;

  const Sweeps& at(int64_t row) const {
    return of_any.call.args.advantage_per_token && of_any.space.row_advantages.alike[row] ? of_alike : of_any;
  }
};

}  // namespace hpo::HPO_ISA
