// policy_loss under a hierarchy of gates: z = g_0(x - a_1) + g_1(a_1 - a_2) + ... + g_K(a_K), any depth in two sweeps over the
// tokens. A third one only touches leaves whose tokens receive a gradient through an aggregate, which takes a saturated gate;
// under open levels it is part of the second, see hierarchy_fast_path.h. The definition is hpo_core/reference/hierarchy.py.
//
// The levels above a token see no more of it than its leaf and the sign of its advantage, so their work is arithmetic on
// leaves: log-ratios are summed into segments, gates follow, gradients are summed into segments, and leaves get their shares.
#include <algorithm>

#include "hierarchy_settle.h"
#include "kernels.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

using Workspace = HierarchyWorkspace;

void add_children(const Leaves& leaves, const Workspace& space, int k) {
  LogRatios *segments = space.segments() + k * leaves.count(), *finer = segments - leaves.count();
  for (int64_t s = 0; s < leaves.count(); ++s) {
    const Child child = child_at(leaves.hierarchy, k, s, finer[s]);
    if (child.parent >= 0) segments[child.parent].add(child.sums);
  }
}

// One thread adds up a level, in the order of its leaves.
void sum_segments(const Leaves& leaves, const Workspace& space, int threads) {
  const auto is_balanced = [&](int64_t k) { return leaves.hierarchy.levels[k].aggregate == Aggregate::balanced; };
  parallel_for(leaves.hierarchy.depth, threads, [&](int64_t k) {
    LogRatios* segments = space.segments() + k * leaves.count();
    std::fill_n(segments, leaves.count(), LogRatios{});
    if (is_balanced(k)) return;
    for (int64_t p = 0; p < leaves.count(); ++p) {
      if (leaves.length(p) == 0) continue;
      LogRatios& segment = segments[leaves.ancestor(int(k), p)];
      segment.add(space.log_ratios.first[p]);
      leaves.for_each_later_task(p, [&](int64_t task) { segment.add(space.log_ratios.later[task]); });
    }
  });
  for (int k = 0; k < leaves.hierarchy.depth; ++k) {
    if (is_balanced(k)) add_children(leaves, space, k);
  }
}

// Tokens outside every leaf are masked.
void clear_gaps(const Leaves& leaves) {
  const PolicyLossArgs& args = leaves.args;
  leaves.for_each_gap([&](int64_t first, int64_t end) {
    if (args.grad) std::memset(args.grad + first, 0, size_t(end - first) * sizeof(float));
    if (args.token_loss) std::memset(args.token_loss + first, 0, size_t(end - first) * sizeof(float));
  });
}

// Clears a table of segments by channel and calls body(place, gradient) for the gradient of each leaf in the aggregate of each
// of its segments, unless it is 0. The place is that of segment and channel in the table. One thread adds up a level.
template <class Body>
void for_each_aggregate_grad(const Leaves& leaves, const Workspace& space, int threads, int64_t* table, const Body& body) {
  const Hierarchy& hierarchy = leaves.hierarchy;
  parallel_for(hierarchy.depth, threads, [&](int64_t k) {
    std::fill_n(table + 2 * k * leaves.count(), 2 * leaves.count(), int64_t{0});  // null for a caller without leaves
    if (hierarchy.levels[k].routing != Routing::through) return;
    for (int64_t p = 0; p < leaves.count(); ++p) {
      if (leaves.length(p) == 0) continue;
      const int64_t segment = k * leaves.count() + leaves.ancestor(int(k), p);
      LevelGrads grads = space.grads[k].first[p];
      leaves.for_each_later_task(p, [&](int64_t task) { grads.add(space.grads[k].later[task]); });
      for (int channel = 0; channel <= hierarchy.split; ++channel) {
        if (grads.by_channel[channel] != 0.0) body(2 * segment + channel, grads.by_channel[channel]);
      }
    }
  });
}

void find_largest(const Leaves& leaves, const Workspace& space, int threads) {
  int64_t* largest = space.tables.largest;
  for_each_aggregate_grad(leaves, space, threads, largest, [=](int64_t at, double grad) {
    const int64_t magnitude = magnitude_of(grad);
    if (largest[at] < magnitude) largest[at] = magnitude;
  });
}

void add_aggregate_grads(const Leaves& leaves, const Workspace& space, int threads) {
  int64_t *aggregate_grad = space.tables.aggregate_grad, *largest = space.tables.largest;
  for_each_aggregate_grad(leaves, space, threads, aggregate_grad,
                          [=](int64_t at, double grad) { aggregate_grad[at] += in_steps(grad, largest[at]); });
}

// The gates of the levels above a leaf, and the slope of each level.
void gate_leaf(const Sweeps& sweeps, int64_t p, LeafGate& gate, LevelSlopes& slopes) {
  const Leaves& leaves = sweeps.leaves;
  const Workspace& space = sweeps.space;
  slopes = {};
  if (leaves.hierarchy.depth == 0 || space.segment_of(leaves, 0, p).valid == 0) return;
  const auto segment = [&](int k) { return space.segment_of(leaves, k, p); };
  gate_leaf(sweeps.call.args, leaves, p, segment, gate,
            [&](int k, int channel, int sign, double slope) { slopes.slope[k][channel][sign] = slope; });
}

// The gradient of each token of a leaf through the aggregates above it.
AggregateGrad aggregate_grad_of(const Leaves& leaves, const Workspace& space, int64_t p) {
  const Hierarchy& hierarchy = leaves.hierarchy;
  const auto of_channel = [&](int channel) {
    double sum = 0.0;
    for (int k = 0; k < hierarchy.depth; ++k) {
      if (hierarchy.levels[k].routing != Routing::through) continue;
      const int64_t at = 2 * (k * leaves.count() + leaves.ancestor(k, p)) + channel;
      if (space.tables.largest[at] == 0) continue;  // no leaf of the segment has a gradient in its aggregate
      const auto segment = [&](int level) { return space.segment_of(leaves, level, p); };
      sum += from_steps(space.tables.aggregate_grad[at], space.tables.largest[at]) / shares(hierarchy, k, channel, segment);
    }
    return float(sum);
  };
  const float rising = of_channel(0);
  return {rising, hierarchy.split ? of_channel(1) : rising};
}

// Rows under no level, tile by tile: tiles that the fast path does not take go row by row.
void run_rows(const Sweeps& sweeps, int threads) {
  const Call& call = sweeps.call;
  const TokenPlan& plan = sweeps.plan;
  const PolicyLossArgs without = without_gradient(call.args);
  const Call losses = {without, call.structure, call.numbers, call.rows};
  const Calls calls_of_losses(losses);
  const Sweeps apart = {calls_of_losses, sweeps.leaves, sweeps.space, plan};
  parallel_for(ceil_divide(call.args.tokens, kChunk), threads, [&](int64_t chunk) {
    Scratch scratch;
    Partial partial;
    if (corrects_rows(call.args)) correct_rows(call.args, call.rows, chunk);
    for_each_tile(call.rows, chunk, [&](int64_t first, int n, const Segments& segments) {
      const Masked masked = masked_tokens(call.args.mask, first, n);
      if (masked == Masked::all) clear_gradient(call.args, first, n);
      const bool done = masked == Masked::all ||
                        (!plan.driven && run_terms(sweeps.calls.of(masked), plan.term, plan.bounds.low, plan.bounds.high, first,
                                                   n, segments, scratch.tile, sweeps.space.seen, partial));
      if (done && !call.args.token_loss) return;
      for (const Segment& segment : segments) {
        const Block block = {segment.row, segment.row, first + segment.begin, segment.end - segment.begin, true};
        take_alone(done ? apart : sweeps, block, scratch, done ? scratch.counted : partial);
      }
    });
    end_stores_past_caches();
    sweeps.space.partials[chunk] = partial;
  });
}

}  // namespace

int64_t hierarchy_workspace(int64_t tokens, int64_t rows, int64_t leaves) {
  return Workspace(nullptr, tokens, rows, leaves).bytes;
}

void hierarchy(const PolicyLossArgs& caller_args, const GateStructure& structure, const GateNumbers& numbers,
               const Hierarchy& hierarchy, int threads) {
  Workspace space(caller_args.workspace, caller_args.tokens, caller_args.rows, hierarchy.leaves);
  const bool whole = hierarchy.stage == Stage::whole;
  const auto reaches = [&](Stage stage) { return does(hierarchy, stage); };
  const PolicyLossArgs args = space.row_factors.added_to(caller_args, reaches(Stage::sums), threads);
  const Rows rows(args.cu_seqlens, args.rows, args.tokens);
  const PolicyLossArgs args_of_alike = space.row_advantages.put_into(args);
  const Call call = {args, structure, numbers, rows}, call_of_alike = {args_of_alike, structure, numbers, rows};
  const Leaves leaves(hierarchy, args, space.start, threads);
  const TokenPlan plan(call, hierarchy), plan_of_alike(call_of_alike, hierarchy);
  const Calls calls(call), calls_of_alike(call_of_alike);
  const Sweeps sweeps_of_any = {calls, leaves, space, plan}, sweeps_of_alike = {calls_of_alike, leaves, space, plan_of_alike};
  const RowSweeps sweeps = {sweeps_of_any, sweeps_of_alike};
  if (args.advantage_per_token && reaches(Stage::sums)) {
    const auto leaf = [&](int64_t p) { return Stretch{leaves.row(p), hierarchy.leaf_begin[p], leaves.length(p)}; };
    space.row_advantages.find(args, leaves.count(), leaf, leaves.tasks(), threads, [&](int64_t task, const auto& body) {
      leaves.for_each_block(task, [&](const Block& block) { body({block.row, block.first, block.tokens}); });
    });
  }
  if (!whole) space.tables = hierarchy.tables;
  const bool by_tiles = hierarchy.depth == 0 && plan.has_term && leaves.are_rows;
  const bool some_together = !by_tiles && (leaves.any_together() || !whole);  // a process without tokens fills its tables too
  threads = worthwhile(threads, args.tokens + hierarchy.leaves);
  const auto for_each_block_together = [&](const auto& body) {
    parallel_for(leaves.tasks(), threads, [&](int64_t task) {
      Scratch scratch;
      leaves.for_each_block(task, [&](const Block& block) {
        if (!leaves.stands_alone(block.leaf)) body(sweeps.at(block.row), task, block, scratch);
      });
      end_stores_past_caches();
    });
  };

  if (reaches(Stage::sums)) {
    std::memset(space.seen, 0, size_t(args.rows));
    clear_gaps(leaves);
    if (by_tiles) run_rows(space.row_advantages.all_alike(args) ? sweeps_of_alike : sweeps_of_any, threads);
    else
      parallel_for(leaves.tasks(), threads, [&](int64_t task) {
        Scratch scratch;
        Partial partial;
        Settling settling(scratch, partial);
        measure_blocks(sweeps, task, scratch, partial,
                       [&](const Sweeps& of_row, const Block* blocks, int count, const LogRatios* sums, bool fast) {
                         if (leaves.stands_alone(blocks[0].leaf)) return settling.take(of_row, blocks, count, sums, fast);
                         for (int i = 0; i < count; ++i) {
                           space.log_ratios.at(task, blocks[i]) = sums[i];
                           space.fast.at(task, blocks[i]) = fast;
                         }
                       });
        settling.flush();
        end_stores_past_caches();
        space.partials[task] = partial;
      });
    if (some_together) sum_segments(leaves, space, threads);
  }

  if (reaches(Stage::sweep)) {
    if (some_together) {
      for_each_block_together([&](const Sweeps& of_row, int64_t task, const Block& block, Scratch& scratch) {
        LeafGate gate = {};
        LevelSlopes slopes;
        Flow flow = {};
        gate_leaf(of_row, block.leaf, gate, slopes);
        of_row.gather_weights(block, scratch);
        of_row.finish(block, gate, scratch, space.partials[task], space.result_at(task, block), flow);
        for (int k = 0; plan.carries && k < hierarchy.depth; ++k) {
          LevelGrads& grads = space.grads[k].at(task, block);
          for (int c = 0; c <= hierarchy.split; ++c) grads.by_channel[c] = grad_into_aggregate(slopes, k, c, flow);
        }
      });
    }
    if (some_together && plan.carries) find_largest(leaves, space, threads);
    const int64_t tasks = by_tiles ? ceil_divide(args.tokens, kChunk) : leaves.tasks();
    finish(call, space.partials, tasks, space.seen, call.rows.broken + leaves.broken);
  }

  if (!some_together || !plan.carries) return;
  if (reaches(Stage::reduce_grad)) add_aggregate_grads(leaves, space, threads);
  if (reaches(Stage::broadcast_grad)) {
    for_each_block_together([&](const Sweeps& of_row, int64_t task, const Block& block, Scratch& scratch) {
      of_row.receive(block, space.result_at(task, block), aggregate_grad_of(leaves, space, block.leaf), scratch);
    });
  }
}

}  // namespace hpo::HPO_ISA
