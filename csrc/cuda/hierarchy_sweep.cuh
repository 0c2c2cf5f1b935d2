// The sweep of hierarchy.cu over the tokens of all leaves.
#pragma once
#include "hierarchy_delivery.cuh"
#include "hierarchy_sums.cuh"

namespace hpo {

// Zeros for the tokens outside every leaf.
__device__ __forceinline__ void clear_gaps(const PolicyLossArgs& args, const Leaves& leaves) {
  const auto inside = [&](int64_t token) { return min(max(token, int64_t(0)), leaves.tokens); };
#pragma unroll 1
  for (int base = (int(blockIdx.x) * kWarps + warp_in_block()) * kWarp; base <= leaves.count;
       base += int(gridDim.x) * kThreads) {
    const int at = base + lane();
    int64_t from = 0, to = 0;
    if (at <= leaves.count) {
      if (at > 0) from = inside(leaves.end[leaves.list ? leaves.list[at - 1] : at - 1]);
      to = at < leaves.count ? inside(leaves.begin[at]) : leaves.tokens;
    }
    for (unsigned left = __ballot_sync(kFullWarp, from < to); left != 0; left &= left - 1) {
      const int source = __ffs(int(left)) - 1;
      const int64_t begin = __shfl_sync(kFullWarp, from, source), end = __shfl_sync(kFullWarp, to, source);
#pragma unroll 1
      for (int64_t token = begin + lane(); token < end; token += kWarp) {
        clear_token(args, token);
      }
    }
  }
}

// The gradients of a window's tokens in aggregates, by place: [kind][column][lane]. Columns and kinds are so far apart that
// neither writes by lane nor reads by position have many bank conflicts.
enum Kind { kRisingFlow, kFallingFlow, kPositiveFlow, kNegativeFlow, kKinds };
constexpr int kColumnStride = kWarp + 8, kKindStride = 4 * kColumnStride + 2, kStageSize = kKinds * kKindStride;
constexpr int kAdders = kWarp / kKinds;  // lanes for each kind

__device__ __forceinline__ int stage_at(int kind, int column, int staging_lane) {
  return kind * kKindStride + column * kColumnStride + staging_lane;
}

// The work of a warp, in shared memory even where all lanes agree, because tokens need the registers.
struct Work {
  LeafUnit unit;
  LeafGate gate;
  LevelSlopes slopes;
  float settled;  // the gradient of each token through the aggregate, under a settled gate
  bool slopes_differ;  // the slopes of two levels differ, so that every token has a gradient in an aggregate
};

// Work::settled; lanes 0 and 1 have a sign of the advantage each.
__device__ __forceinline__ float settled_gradient(const Call& call, int leaf, float z, double slope) {
  double mine = 0.0;
  if (lane() < 2 && slope != 0.0) {
    const int64_t segment = call.segment_of(0, leaf), at = segment * 2 + lane();
    const double sum = from_steps(call.workspace.aggregate_grad[at], int64_t(call.workspace.largest[at]));
    const double share = sum / divisor(call.hierarchy.levels[0], call.segment(segment).valid);
    mine = double(token_value(1.0f, z)) * slope * share;
  }
  return float(mine + __shfl_down_sync(kFullWarp, mine, 1));
}

// Four lanes gate a channel and a sign each.
template <int GATE>
__device__ __forceinline__ void begin_work(const Call& call, const LeafUnit& unit, Work& work) {
  const int sign = lane() % 2, channel = lane() / 2 % 2;
  const bool writes = lane() < 4;
  __syncwarp();  // the tile before is done
  if (lane() == 0) work.unit = unit;
  double finest_slope = 0.0, finer_slope = 0.0;
  bool slopes_differ = false;
  GateColumn column = {};
  if (channel <= call.hierarchy.split && call.hierarchy.depth > 0) {
    column = gate_column<GATE == kTermGate>(
        call.hierarchy, channel, sign, [&](int k) { return call.log_ratios(k, unit.leaf); },
        [&](int k, double slope) {
          if (GATE == kSettledGate) finest_slope = slope;
          else if (writes) work.slopes.slope[k][channel][sign] = slope;
          slopes_differ |= k > 0 && slope != finer_slope;
          finer_slope = slope;
        });
  }
  const float z = column.z + __shfl_down_sync(kFullWarp, column.z, 2);
  const int32_t below = column.below | __shfl_down_sync(kFullWarp, column.below, 2);
  const int32_t above = column.above | __shfl_down_sync(kFullWarp, column.above, 2);
  if (writes) {
    work.gate.slope[channel][sign] = column.slope;
    work.gate.own[channel][sign] = column.own;
    if (sign == 0) work.gate.mean[channel] = column.mean;
    if (channel == 0) work.gate.z[sign] = z, work.gate.below[sign] = below, work.gate.above[sign] = above;
  }
  if (GATE == kSettledGate) {
    const float settled =
        call.settled && call.does(Stage::broadcast_grad) ? settled_gradient(call, unit.leaf, z, finest_slope) : 0.0f;
    if (lane() == 0) work.settled = settled;
  } else {
    slopes_differ = __any_sync(kFullWarp, slopes_differ);
    if (lane() == 0) work.slopes_differ = slopes_differ;
  }
  __syncwarp();
}

// Each of a kind's eight lanes adds every eighth token of the tile, in order. Tokens that add 0 are left out: while nothing
// saturates, all do. The place of the tile in the pack turns the lanes by up to three places; which tokens are added together,
// and in what order, does not depend on it. `staged`: bit i is set if this lane has staged its token i.
__device__ __forceinline__ void add_window(HPO_SHARED_POINTER(float) stage, unsigned staged, double& share) {
  if (!__any_sync(kFullWarp, staged != 0)) return;
  const int kind = lane() / kAdders, first = lane() % kAdders, column = first % 4;
  unsigned lanes = 0;  // bit l: lane l has staged its token of this column
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned of_column = __ballot_sync(kFullWarp, staged >> i & 1);
    lanes = column == i ? of_column : lanes;
  }
  double sum = share;
  __syncwarp();
#pragma unroll 1
  for (lanes &= 0x55555555u << (first / 4); lanes != 0; lanes &= lanes - 1) {
    sum += double(stage[stage_at(kind, column, __ffs(int(lanes)) - 1)]);
  }
  share = sum;
  __syncwarp();
}

// The tile's flow from the shares of its lanes: first of those four apart, then two, then one, which is the same sum however
// the lanes are turned.
__device__ __forceinline__ Flow sum_flow(double share) {
  for (int step = kAdders / 2; step > 0; step /= 2) share += __shfl_xor_sync(kFullWarp, share, step);
  const auto of_kind = [&](Kind kind) { return __shfl_sync(kFullWarp, share, kind * kAdders); };
  const double rising = of_kind(kRisingFlow), falling = of_kind(kFallingFlow);
  return {{of_kind(kPositiveFlow), of_kind(kNegativeFlow)}, {rising, falling}};
}

// Sweeps the tokens of a tile. This lane's share of the tile's flow stays in shared memory, to free registers.
template <bool REFERENCE, int EXTRAS, int GATE>
__device__ __forceinline__ void sweep_tile(const Call& call, const Work& work, HPO_SHARED_POINTER(float) stage,
                                           HPO_SHARED_POINTER(double) places, HPO_SHARED_POINTER(int) events, Totals& totals,
                                           double& share) {
  const Gate& gate = call.gate;
  const RowTerms row = gate.row_terms(work.unit.tile.row);
  constexpr bool TERMS = GATE == kTermGate, PENALTIES = REFERENCE || TERMS;
  TileTotals tile(events);
  share = 0.0;
  for_each_window(work.unit.tile, gate.wide, [&](const Vector<4>& vector) {
    const Inputs<4> inputs = read_inputs<REFERENCE, EXTRAS>(gate.args, vector);
    float grad[4];
    unsigned staged = 0;
    const auto sweep_token = [&](auto sound, const auto& inputs, int i, int column, auto& shares) {
      const auto put_flow = [&](const Token& token, const GatedToken& gated, const PolicyTerm& term) {
        if (GATE == kSettledGate || !call.carries || !token.selected) return;
        if (gated.rising_step == 0.0f && gated.falling_step == 0.0f && !work.slopes_differ) return;
        stage[stage_at(kRisingFlow, column, lane())] = term.slope * gated.rising_step;
        stage[stage_at(kFallingFlow, column, lane())] = term.slope * gated.falling_step;
        stage[stage_at(kPositiveFlow, column, lane())] = token.negative ? 0.0f : term.slope;
        stage[stage_at(kNegativeFlow, column, lane())] = token.negative ? term.slope : 0.0f;
        staged |= 1u << column;
      };
      return sweep_token_of_leaf<decltype(sound)::value, REFERENCE, EXTRAS, GATE>(
          call, work.gate, work.settled, work.unit.tile.row, row, inputs, i, put_flow, shares, tile, totals);
    };
    if (sweeps_at_once<REFERENCE, EXTRAS>(gate, row, inputs)) {
      Shares<4> shares = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) grad[i] = sweep_token(std::true_type(), inputs, i, i, shares);
      if (!TERMS) score(gate, inputs, shares);
      totals.add<PENALTIES>(shares);
    } else {
      for_each_exception<PENALTIES>(gate.args, inputs, grad, totals,
                                    [&](const Inputs<1>& token, int column, Shares<1>& shares) {
                                      return sweep_token(std::false_type(), token, 0, column, shares);
                                    });
    }
    if (gate.args.grad) write(gate.args.grad, vector, grad);
    if (GATE != kSettledGate && call.carries) add_window(stage, staged, share);
  });
  // A row of several tiles is counted by the first that meets a valid token.
  if (tile.has_valid() && lane() == 0 && atomicExch(call.workspace.seen + work.unit.tile.row, 1) == 0) {
    atomicAdd(&events[kRows], 1);
  }
  Totals::merge(tile, places);
}

// Stores a tile's gradients in the aggregates above it, and raises the largest magnitudes of these.
__device__ __forceinline__ void store_tile_grads(const Call& call, const LevelChannel& level_channel, int index,
                                                 const Work& work, double share) {
  const Flow flow = sum_flow(share);
  if (!level_channel.open) return;
  const double mine = grad_into_aggregate(work.slopes, level_channel.level, level_channel.channel, flow);
  call.workspace.tile_grads[int64_t(index) * kLevelChannels + lane()] = mine;
  raise(call.workspace.largest + level_channel.at(call, work.unit.leaf), uint64_t(magnitude_of(mine)));
}

// Blocks on a multiprocessor at which no register spills.
constexpr int blocks_that_sweep(bool reference, int extras, int gate) {
  return !reference && extras == kNoExtras && gate != kTermGate ? 3 : 2;
}

template <bool REFERENCE, int EXTRAS, int GATE>
__global__ void __launch_bounds__(kThreads, blocks_that_sweep(REFERENCE, EXTRAS, GATE)) sweep_leaves(const Call call) {
  HPO_SHARED(double, warps, [kWarps * kPlaces]);
  HPO_SHARED(int, events, [kMetrics]);
  HPO_SHARED(Leaves, leaves, );
  HPO_SHARED(Work, works, [kWarps]);
  HPO_SHARED(float, stage, [GATE == kSettledGate ? 1 : kWarps * kStageSize]);
  HPO_SHARED(double, shares, [kThreads]);
  HPO_SHARED(Totals, shared_totals, [EXTRAS != kNoExtras ? kThreads : 1]);  // because tokens with all inputs leave no registers
  const PolicyLossArgs& args = call.gate.args;
  if (threadIdx.x < kMetrics) events[threadIdx.x] = 0;
  if constexpr (GATE == kSettledGate) {
    if (call.together) {
      if (call.settled) sum_settled<EXTRAS>(call);
      else sum_segments<kLogRatio, false>(call);
      sync_grid();
    }
  } else if constexpr (GATE == kTermGate) {
    if (call.together && call.hierarchy.depth == 0) prepare(call);
  }
  const bool broken = call.broken();
  if (threadIdx.x == 0) {
    leaves = call.leaves(broken);  // for the whole block: registers are short here
    // Without a table of rows a leaf is a row, which counts as one.
    if (blockIdx.x == 0 && leaves.row) atomicAdd(&events[kBadOffsets], leaves.leaves - leaves.count);
  }
  __syncthreads();
#pragma unroll 1
  for (int row = int(blockIdx.x * kThreads + threadIdx.x); row < args.rows; row += int(gridDim.x) * kThreads) {
    if (row_range(args.cu_seqlens, row, args.tokens).bad) atomicAdd(&events[kBadOffsets], 1);
  }
  clear_gaps(args, leaves);
  const auto places = warps + warp_in_block() * kPlaces;
  Totals local_totals;
  Totals& totals = EXTRAS != kNoExtras ? shared_totals[threadIdx.x] : local_totals;
  totals = Totals::empty(places);
  for_each_unit(leaves, [&](int index, const LeafUnit& unit) {
    Work& work = works[warp_in_block()];
    double& share = shares[threadIdx.x];
    begin_work<GATE>(call, unit, work);
    sweep_tile<REFERENCE, EXTRAS, GATE>(call, work, stage + (GATE == kSettledGate ? 0 : warp_in_block() * kStageSize), places,
                                        events, totals, share);
    if (GATE != kSettledGate && call.carries) store_tile_grads(call, LevelChannel(call), index, work, share);
  });
  double* const partials = call.workspace.partials;
  store_block(totals, warps, events, partials + int64_t(blockIdx.x) * kMetrics);
  if constexpr (GATE != kSettledGate) {
    if (call.together && call.carries) {
      sync_grid();
      add_aggregate_grads(call, leaves);
      sync_grid();
      deliver_leaves<GATE == kTermGate ? kTerm : kLogRatio>(call, leaves);
    }
  }
  if (last_block(call.workspace.ticket)) finish(partials, int(gridDim.x), call.gate.args.loss, call.gate.args.metrics);
}

}  // namespace hpo
