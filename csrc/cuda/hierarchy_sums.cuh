// The sums of segments of hierarchy.cu.
#pragma once
#include "hierarchy_call.cuh"

namespace hpo {

// Clears tables, checks leaves, and waits for the other blocks to have done so. Returns the leaves that count.
__device__ __forceinline__ Leaves prepare(const Call& call) {
  const PolicyLossArgs& args = call.gate.args;
  const Hierarchy& hierarchy = call.hierarchy;
  const Workspace& workspace = call.workspace;
  const int64_t segments = hierarchy.depth * hierarchy.leaves;
  const int64_t with_grads = call.carries || hierarchy.stage != Stage::whole ? segments : 0;  // in stages the caller reads them
  clear(workspace.segments, segments * kWords);
  clear(workspace.largest, with_grads * 2);
  clear(workspace.aggregate_grad, with_grads * 2);
  clear(workspace.seen, args.rows);
  if (blockIdx.x == 0 && threadIdx.x == 0) *workspace.ticket = 0;
  return call.leaves(check_leaves(hierarchy, args, workspace.counted));
}

static_assert(kTile * double(kSaturation) * 65536.0 < 2147483648.0, "a ShortSum over a tile fits its integers");

__device__ __forceinline__ int64_t warp_total(const ShortSum& sum) {
  return ShortSum{warp_sum(sum.high), warp_sum(sum.low)}.total();
}
__device__ __forceinline__ int64_t warp_total(const LongSum& sum) { return warp_sum(sum.sum); }

template <int ENTERING>
__device__ __forceinline__ LogRatios sum_tile(const Call& call, const Unit& tile) {
  constexpr bool PRE_GATED = ENTERING == kPreGated;
  const RowTerms row = PRE_GATED ? call.gate.row_terms(tile.row) : RowTerms{};
  constexpr bool IS_SHORT = ENTERING == kLogRatio || ENTERING == kParts;
  const bool split = ENTERING == kParts || (!IS_SHORT && call.hierarchy.split);
  int valid = 0;
  std::conditional_t<IS_SHORT, ShortSum, LongSum> up = {}, down = {};
  for_each_window(tile, call.gate.wide, [&](const Vector<4>& vector) {
    const Inputs<4> inputs = read_inputs<true, PRE_GATED>(call.gate.args, vector);
    for_each_valid<PRE_GATED>(call.gate, row, inputs, [&](const Token& token, int) {
      const float x = call.aggregated<ENTERING>(token), rising = rising_part(split, x);
      ++valid;
      up.add(rising);
      if (split) down.add(rising - x);
    });
  });
  return {warp_sum(valid), {warp_total(up), warp_total(down)}};
}

template <int ENTERING, bool BALANCED>
__device__ __forceinline__ void sum_leaves(const Call& call, const Leaves& leaves) {
  const int level = lane() / kWords, word = lane() % kWords;
  RunAccumulator accumulator = {};
  for_each_unit(leaves, [&](int, const LeafUnit& unit) {
    const LogRatios sums = sum_tile<ENTERING>(call, unit.tile);
    if (level >= call.hierarchy.depth || sums.valid == 0) return;
    if (BALANCED && call.hierarchy.levels[level].aggregate == Aggregate::balanced) return;
    const int64_t mine = word == 0 ? sums.valid : (word == 1 ? sums.fixed[0] : sums.fixed[1]);
    accumulator.add(call.workspace.segments + call.segment_of(level, unit.leaf) * kWords + word, mine);
  });
  accumulator.flush();
}

// The sums of the segments of a balanced level: over the finer segments that have tokens.
__device__ __forceinline__ void add_children(const Call& call, int k) {
  const int64_t leaves = call.hierarchy.leaves;
#pragma unroll 1
  for (int64_t s = int64_t(blockIdx.x) * kThreads + threadIdx.x; s < leaves; s += int64_t(gridDim.x) * kThreads) {
    const Child child = child_at(call.hierarchy, k, s, call.segment((k - 1) * leaves + s));
    if (child.parent < 0) continue;
    int64_t* const to = call.workspace.segments + (k * leaves + child.parent) * kWords;
    atomicAdd(to, child.sums.valid);
    atomicAdd(to + 1, child.sums.fixed[0]);
    atomicAdd(to + 2, child.sums.fixed[1]);
  }
}

// A pre-gate and children need more registers than four blocks leave.
constexpr int blocks_that_prepare(int entering, bool balanced) { return entering == kPreGated || balanced ? 3 : 4; }

template <int ENTERING, bool BALANCED>
__device__ __forceinline__ void sum_segments(const Call& call) {
  const Leaves leaves = prepare(call);
  if (call.hierarchy.depth > 0) sum_leaves<ENTERING, BALANCED>(call, leaves);
  if constexpr (BALANCED) {
#pragma unroll 1
    for (int k = 1; k < call.hierarchy.depth; ++k) {
      if (call.hierarchy.levels[k].aggregate != Aggregate::balanced) continue;
      sync_grid();
      add_children(call, k);
    }
  }
}

template <int ENTERING, bool BALANCED>
__global__ void __launch_bounds__(kThreads, blocks_that_prepare(ENTERING, BALANCED)) prepare_leaves(const Call call) {
  sum_segments<ENTERING, BALANCED>(call);
}

// The sums of a tile under a settled gate.
struct SettledSums {
  int64_t valid, fixed;
  double coefficient[2];  // the sum of a over the selected tokens, by sign of the advantage
};

// WIDTH 4 where the sums are integers, which have no order; WIDTH 1 where coefficients are added in the order of the leaf.
template <int WIDTH, int EXTRAS>
__device__ __forceinline__ SettledSums sum_settled_tile(const Gate& gate, const Unit& tile) {
  const RowTerms row = gate.row_terms(tile.row);
  ShortSum sum = {};
  int valid = 0, selected = 0;
  double coefficient[2] = {};
  const auto add = [&](const Token& token, int) {
    sum.add(token.x);
    ++valid;
    selected += token.selected;
    if (WIDTH == 4) return;
    coefficient[0] += token.negative ? 0.0 : double(token.a);
    coefficient[1] += token.negative ? double(token.a) : 0.0;
  };
  for_each_vector<WIDTH>(gate.pack(), tile, gate.wide, false, [&](const Vector<WIDTH>& vector) {
    for_each_valid<EXTRAS>(gate, row, read_inputs<true, EXTRAS>(gate.args, vector), add);
  });
  if (WIDTH == 4) {
    // n equal float32 terms have the exact sum n a: a constant a comes back from the mean to the bit.
    selected = warp_sum(selected);
    const double total = selected > 0 ? double(row.a) * selected : 0.0;
    coefficient[0] = row.advantage < 0.0f ? 0.0 : total;
    coefficient[1] = row.advantage < 0.0f ? total : 0.0;
  } else {
    coefficient[0] = warp_sum(coefficient[0]);
    coefficient[1] = warp_sum(coefficient[1]);
  }
  return {warp_sum(valid), warp_total(sum), {coefficient[0], coefficient[1]}};
}

// The coefficients of tiles, added over segments. Lanes 0 and 1 each take a sign of the advantage, which is the channel here.
__device__ __forceinline__ void add_coefficients(const Call& call, const Leaves& leaves) {
  add_over_segments(call, leaves, lane() < 2, [&](int leaf) { return call.segment_of(0, leaf) * 2 + lane(); });
}

// The sums under a settled gate. Lanes 0 and 1 have a word of the segment's log-ratios each, and a sign.
template <int WIDTH, int EXTRAS>
__device__ __forceinline__ void sum_settled(const Call& call) {
  const Workspace& workspace = call.workspace;
  const Leaves leaves = prepare(call);
  RunAccumulator accumulator = {};
  for_each_unit(leaves, [&](int index, const LeafUnit& unit) {
    const SettledSums sums = sum_settled_tile<WIDTH, EXTRAS>(call.gate, unit.tile);
    if (lane() >= 2) return;
    const int64_t segment = call.segment_of(0, unit.leaf);
    accumulator.add(workspace.segments + segment * kWords + lane(), lane() == 0 ? sums.valid : sums.fixed);
    const double mine = lane() == 0 ? sums.coefficient[0] : sums.coefficient[1];
    workspace.tile_grads[int64_t(index) * kLevelChannels + lane()] = mine;
    raise(workspace.largest + segment * 2 + lane(), uint64_t(magnitude_of(mine)));
  });
  accumulator.flush();
  if (call.hierarchy.stage != Stage::whole) return;  // an exchange sees the largest first
  sync_grid();
  add_coefficients(call, leaves);
}

template <int EXTRAS>
__device__ __forceinline__ void sum_settled(const Call& call) {
  if (EXTRAS == kExtras && !call.gate.coefficient_varies) return sum_settled<4, kExtras>(call);
  sum_settled<EXTRAS == kNoExtras ? 4 : 1, EXTRAS>(call);
}

// Vectors of many inputs need more registers than three blocks leave.
constexpr int blocks_that_settle(int width, int extras) { return extras == kNoExtras ? 4 : (width == 4 ? 2 : 3); }

template <int WIDTH, int EXTRAS>
__global__ void __launch_bounds__(kThreads, blocks_that_settle(WIDTH, EXTRAS)) prepare_settled(const Call call) {
  sum_settled<WIDTH, EXTRAS>(call);
}

}  // namespace hpo
