// policy_loss under a hierarchy of gates in two launches: one that prepares and sums the log-ratios of every segment, one sweep
// that gates tokens, writes their gradient and whose last block adds up loss and metrics. A third follows where gradient flows
// through the aggregate of a level: the gradients of tiles are added over segments, and the tokens of leaves get their shares.
// The first and the third are in two parts with a grid barrier between them, and the first has one more of each for a level
// that is balanced; a call in stages has a launch for each part of the third. The sweep stands alone, since it needs registers
// that would leave the others too few blocks. The definition is hpo_core/reference/hierarchy.py.
//
// Under one level whose residual tokens drop, as in a gate on sequences, the gradient that flows is a sum of the coefficients
// of tokens times a number of their segment. The first launch adds up the coefficients, the sweep knows the gradient of every
// token, and there is no third.
//
// A warp takes a tile of a leaf (leaves.cuh). Sums over the tiles of a segment are sums of integers, so they have no order;
// inside a tile the order depends on positions in the leaf. So the place and the neighbours of a leaf change no bit of its
// gradient.
#include "hierarchy_tokens.cuh"
#include "leaves.cuh"

namespace hpo {
namespace {

constexpr int kWords = 3;  // of a segment's LogRatios: valid, fixed[2]
constexpr int kLevelChannels = 2 * kMostLevels;  // of the gradients of a tile in aggregates: [level][channel]

struct Workspace {
  // Of segment s at level k at [k * leaves + s], 0 before the first grid barrier. In the caller's tables, if there are any.
  int64_t* segments;  // [..][kWords]
  uint64_t* largest;  // [..][channel]: the largest magnitude of a tile's gradient in the aggregate, the bits of a double
  int64_t* aggregate_grad;  // [..][channel]: the sum of the gradients of tiles, in steps that `largest` fixes
  double* aggregate_grads;  // [units][kLevelChannels]
  double* partials;  // [blocks][kMetrics]
  int* seen;  // [rows]: 1 where a valid token was met
  unsigned* ticket;  // blocks of the sweep that are done
  Counted counted;

  int64_t place(void* base, int64_t tokens, int64_t rows, int64_t leaves) {
    Placement placement(base);
    placement.take(segments, kMostLevels * leaves * kWords);
    placement.take(largest, kMostLevels * leaves * 2);
    placement.take(aggregate_grad, kMostLevels * leaves * 2);
    placement.take(aggregate_grads, units_of(tokens, leaves) * kLevelChannels);
    placement.take(partials, kMaxBlocks * kMetrics);
    placement.take(seen, rows);
    placement.take(ticket, 1);
    counted.take(placement, leaves);
    return placement.bytes();
  }
};

// Which function of log-ratios is aggregated. Kernels are compiled for each, and for gates with a balanced level, because
// registers are short.
enum Entering { kLogRatio, kPreGated, kMeanExp };

struct Call : TokenCall {
  Workspace workspace;
  bool carries;  // gradient flows through the aggregate of some level
  bool settled;  // it is known before the sweep, see above
  int first_blocks;  // blocks of the first launch

  Call(const PolicyLossArgs& args, const GateStructure& structure, const GateNumbers& numbers, const Hierarchy& hierarchy)
      : TokenCall(args, structure, numbers, hierarchy), workspace(), first_blocks(0) {
    bool through = false;
    for (int k = 0; k < hierarchy.depth; ++k) through |= hierarchy.levels[k].routing == Routing::through;
    carries = through && structure.head != Head::score && args.grad;
    const bool simple = hierarchy.stage == Stage::whole && !hierarchy.split && !hierarchy.term.present;
    settled = carries && simple && hierarchy.depth == 1 && structure.token == TokenGate::drop;
    workspace.place(args.workspace, args.tokens, args.rows, hierarchy.leaves);
    const SegmentTables& tables = hierarchy.tables;
    if (tables.sums) workspace.segments = tables.sums;
    if (tables.largest) workspace.largest = reinterpret_cast<uint64_t*>(tables.largest);
    if (tables.aggregate_grad) workspace.aggregate_grad = tables.aggregate_grad;
  }

  HPO_INLINE bool does(Stage stage) const { return hierarchy.stage == Stage::whole || hierarchy.stage == stage; }

  __device__ __forceinline__ int64_t segment_of(int k, int leaf) const {
    return k * hierarchy.leaves + ancestor_of(hierarchy, k, leaf);
  }

  __device__ __forceinline__ LogRatios log_ratios(int k, int leaf) const { return segment(segment_of(k, leaf)); }

  __device__ __forceinline__ LogRatios segment(int64_t at) const {
    const int64_t* words = workspace.segments + at * kWords;
    return {words[0], {words[1], words[2]}};
  }

  __device__ __forceinline__ bool broken() const { return any_of(workspace.counted.broken, first_blocks); }

  __device__ __forceinline__ Leaves leaves(bool broken, int blocks) const {
    return get_leaves(hierarchy, gate.args, workspace.counted, broken, blocks);
  }

  // The part of it that is aggregated.
  template <int ENTERING>
  __device__ __forceinline__ float aggregated(const Token& token) const {
    if (ENTERING == kMeanExp) return mean_exp_part(hierarchy.split, token.x);
    return entering<ENTERING == kPreGated>(token);
  }

  // From the gradient of what is aggregated to that of the token's log-ratio.
  template <int ENTERING>
  __device__ __forceinline__ float through_pre_gate(const Token& token, float flow) const {
    if (ENTERING == kLogRatio) return flow;
    if (ENTERING == kMeanExp) return flow * mean_exp_slope(hierarchy.split, token.x);
    const float slope = pre_gate_slope(term, gate.structure.head, token.negative, token.x);
    return slope == 0.0f ? 0.0f : slope * flow;
  }
};

// ------------------------------------------------------------------------------------------------------- first launch

__device__ __forceinline__ void prepare(const Call& call) {
  const PolicyLossArgs& args = call.gate.args;
  const Hierarchy& hierarchy = call.hierarchy;
  const Workspace& workspace = call.workspace;
  const int64_t segments = hierarchy.depth * hierarchy.leaves;
  const int64_t coupled = call.carries || hierarchy.stage != Stage::whole ? segments : 0;  // in stages the caller reads them
  clear(workspace.segments, segments * kWords);
  clear(workspace.largest, coupled * 2);
  clear(workspace.aggregate_grad, coupled * 2);
  clear(workspace.seen, args.rows);
  check_leaves(hierarchy, args, workspace.counted);
  if (blockIdx.x == 0 && threadIdx.x == 0) *workspace.ticket = 0;
}

template <int ENTERING>
__device__ __forceinline__ LogRatios sum_tile(const Call& call, const Unit& tile) {
  constexpr bool PRE_GATED = ENTERING == kPreGated;
  const RowTerms row = PRE_GATED ? call.gate.row_terms(tile.row) : RowTerms{};
  const bool split = call.hierarchy.split;
  int valid = 0;
  int64_t fixed[2] = {};
  for_each_window(tile, call.gate.groupable, [&](const Group<4>& group) {
    const Inputs<4> inputs = read_inputs<true, PRE_GATED>(call.gate.args, group);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Token token = classify<true, PRE_GATED, false>(call.gate, row, inputs, i);
      const float x = call.aggregated<ENTERING>(token), up = rising_part(split, x);
      valid += token.valid;
      fixed[0] += to_fixed(up);
      fixed[1] += to_fixed(up - x);
    }
  });
  return {warp_sum(valid), {warp_sum(fixed[0]), warp_sum(fixed[1])}};
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
__global__ void __launch_bounds__(kThreads, blocks_that_prepare(ENTERING, BALANCED)) prepare_leaves(const Call call) {
  prepare(call);
  sync_grid();
  const bool broken = call.broken(), idle = broken && blockIdx.x != 0;
  if (!BALANCED && idle) return;
  if (broken && !idle) list_broken(call.hierarchy, call.gate.args, call.workspace.counted);
  if (call.hierarchy.depth > 0 && !idle) {
    sum_leaves<ENTERING, BALANCED>(call, call.leaves(broken, broken ? 1 : int(gridDim.x)));
  }
  if constexpr (BALANCED) {
#pragma unroll 1
    for (int k = 1; k < call.hierarchy.depth; ++k) {
      if (call.hierarchy.levels[k].aggregate != Aggregate::balanced) continue;
      sync_grid();
      add_children(call, k);
    }
  }
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
  int64_t fixed = 0;
  int valid = 0, selected = 0;
  double coefficient[2] = {};
  for_each_group<WIDTH>(gate.pack(), tile, gate.groupable, false, [&](const Group<WIDTH>& group) {
    const Inputs<WIDTH> inputs = read_inputs<true, EXTRAS>(gate.args, group);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const Token token = classify<true, EXTRAS, false>(gate, row, inputs, i);
      fixed += token.valid ? to_fixed(token.x) : 0;
      valid += token.valid;
      selected += token.selected;
      if (gate.coefficient_varies) {
        coefficient[0] += token.negative ? 0.0 : double(token.a);
        coefficient[1] += token.negative ? double(token.a) : 0.0;
      }
    }
  });
  if (gate.coefficient_varies) {
    coefficient[0] = warp_sum(coefficient[0]);
    coefficient[1] = warp_sum(coefficient[1]);
  } else {
    // n equal float32 terms have the exact sum n a: a constant a comes back from the mean to the bit.
    selected = warp_sum(selected);
    const double total = selected > 0 ? double(row.a) * selected : 0.0;
    coefficient[0] = row.advantage < 0.0f ? 0.0 : total;
    coefficient[1] = row.advantage < 0.0f ? total : 0.0;
  }
  return {warp_sum(valid), warp_sum(fixed), {coefficient[0], coefficient[1]}};
}

// Raises the largest magnitude, which only grows: few get past the question.
__device__ __forceinline__ void raise(uint64_t* largest, double value) {
  const uint64_t magnitude = uint64_t(magnitude_of(value));
  if (load_relaxed(largest) < magnitude) atomicMax(largest, magnitude);
}

// The first launch under a settled gate. Lanes 0 and 1 have a word of the segment's log-ratios each, and a sign of the
// advantage, in the place of a channel elsewhere.
template <int WIDTH, int EXTRAS>
__global__ void __launch_bounds__(kThreads, 3) prepare_settled(const Call call) {
  prepare(call);
  sync_grid();
  const Workspace& workspace = call.workspace;
  const bool broken = call.broken(), idle = broken && blockIdx.x != 0;
  if (broken && !idle) list_broken(call.hierarchy, call.gate.args, workspace.counted);
  const bool adds = lane() < 2;
  if (!idle) {
    RunAccumulator accumulator = {};
    for_each_unit(call.leaves(broken, broken ? 1 : int(gridDim.x)), [&](int index, const LeafUnit& unit) {
      const SettledSums sums = sum_settled_tile<WIDTH, EXTRAS>(call.gate, unit.tile);
      if (!adds) return;
      const int64_t segment = call.segment_of(0, unit.leaf);
      accumulator.add(workspace.segments + segment * kWords + lane(), lane() == 0 ? sums.valid : sums.fixed);
      const double mine = lane() == 0 ? sums.coefficient[0] : sums.coefficient[1];
      workspace.aggregate_grads[int64_t(index) * kLevelChannels + lane()] = mine;
      raise(workspace.largest + segment * 2 + lane(), mine);
    });
    accumulator.flush();
  }
  sync_grid();
  if (idle) return;
  RunAccumulator accumulator = {};
  for_each_unit(call.leaves(broken, broken ? 1 : int(gridDim.x)), [&](int index, const LeafUnit& unit) {
    if (!adds) return;
    const int64_t at = call.segment_of(0, unit.leaf) * 2 + lane();
    const double mine = workspace.aggregate_grads[int64_t(index) * kLevelChannels + lane()];
    accumulator.add(workspace.aggregate_grad + at, in_steps(mine, int64_t(workspace.largest[at])));
  });
  accumulator.flush();
}

// ---------------------------------------------------------------------------------------------------------------- sweep

// Zeros for what lies outside every leaf.
__device__ __forceinline__ void clear_gaps(const PolicyLossArgs& args, const Leaves& leaves) {
  const auto inside = [&](int64_t token) { return min(max(token, int64_t(0)), leaves.tokens); };
#pragma unroll 1
  for (int base = (int(blockIdx.x) * kWarps + warp_in_block()) * kWarp; base <= leaves.count;
       base += leaves.blocks * kThreads) {
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
        if (args.grad) args.grad[token] = 0.0f;
        if (args.token_loss) args.token_loss[token] = 0.0f;
      }
    }
  }
}

// The gradients of a window's tokens in aggregates, by place: [kind][column][lane]. Columns and kinds are so far apart that
// neither writes by lane nor reads by position have many bank conflicts.
enum Kind { kRisingFlow, kFallingFlow, kPositiveFlow, kNegativeFlow, kKinds };
constexpr int kColumn = kWarp + 8, kOfKind = 4 * kColumn + 2, kStage = kKinds * kOfKind;
constexpr int kAdders = kWarp / kKinds;  // lanes for each kind

__device__ __forceinline__ int stage_at(int kind, int column, int of_lane) {
  return kind * kOfKind + column * kColumn + of_lane;
}

// The work of a warp. In shared memory even where all lanes agree, because tokens need the registers.
struct Work {
  LeafUnit unit;
  LeafGate gate;
  LevelSlopes slopes;
  float settled;  // the gradient of each token through the aggregate, under a settled gate
};

// That gradient; lanes 0 and 1 have a sign of the advantage each.
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
  double finest = 0.0;  // slope
  GateColumn column = {};
  if (channel <= call.hierarchy.split && call.hierarchy.depth > 0) {
    column = gate_column<GATE == kMeanExpGate>(
        call.hierarchy, channel, sign, [&](int k) { return call.log_ratios(k, unit.leaf); },
        [&](int k, double slope) {
          if (GATE == kSettledGate) finest = slope;
          else if (writes) work.slopes.slope[k][channel][sign] = slope;
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
    const float settled = call.settled ? settled_gradient(call, unit.leaf, z, finest) : 0.0f;
    if (lane() == 0) work.settled = settled;
  }
  __syncwarp();
}

// Each of a kind's eight lanes adds every eighth token of the tile, in order. The place of the tile in the pack turns the lanes
// by up to three places; which tokens are added together, and in what order, does not depend on it.
__device__ __forceinline__ void add_window(HPO_SHARED_POINTER(float) stage, double& share) {
  __syncwarp();
  const int kind = lane() / kAdders;
  double sum = share;
#pragma unroll 4
  for (unsigned token = unsigned(lane()) % kAdders; token < kWindow; token += kAdders) {
    sum += double(stage[stage_at(kind, token % 4, token / 4)]);
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

// Leaves this lane's share of the tile's flow in shared memory, to free registers.
template <int EXTRAS, int GATE>
__device__ __forceinline__ void sweep_tile(const Call& call, const Work& work, HPO_SHARED_POINTER(float) stage,
                                           HPO_SHARED_POINTER(double) slots, HPO_SHARED_POINTER(int) events, Totals& totals,
                                           double& share) {
  const Gate& gate = call.gate;
  const RowTerms row = gate.row_terms(work.unit.tile.row);
  TileTotals tile = {};
  share = 0.0;
  for_each_window(work.unit.tile, gate.groupable, [&](const Group<4>& group) {
    const Inputs<4> inputs = read_inputs<EXTRAS != kNoExtras, EXTRAS>(gate.args, group);
    float grad[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto put_flow = [&](const Token& token, const GatedToken& gated, const PolicyTerm& term) {
        if (GATE == kSettledGate || !call.carries) return;
        stage[stage_at(kRisingFlow, i, lane())] = token.selected ? term.slope * gated.rising_step : 0.0f;
        stage[stage_at(kFallingFlow, i, lane())] = token.selected ? term.slope * gated.falling_step : 0.0f;
        stage[stage_at(kPositiveFlow, i, lane())] = token.selected && !token.negative ? term.slope : 0.0f;
        stage[stage_at(kNegativeFlow, i, lane())] = token.selected && token.negative ? term.slope : 0.0f;
      };
      grad[i] = sweep_token_of_leaf<EXTRAS, GATE>(call, work.gate, work.settled, work.unit.tile.row, row, inputs, i, put_flow,
                                                  tile, totals);
    }
    if (gate.args.grad) write(gate.args.grad, group, grad);
    if (GATE != kSettledGate && call.carries) add_window(stage, share);
  });
  count_row(tile, call.workspace.seen + work.unit.tile.row, events);
  Totals::merge(tile, slots);
}

// A lane has a level and a channel, as in Workspace::aggregate_grads.
struct LevelChannel {
  int level, channel;
  bool open;  // gradient goes through the aggregate there

  __device__ __forceinline__ explicit LevelChannel(const Call& call) : level(lane() / 2), channel(lane() % 2), open(false) {
    if (level < call.hierarchy.depth && channel <= call.hierarchy.split) {
      open = call.hierarchy.levels[level].routing == Routing::through;
    }
  }

  __device__ __forceinline__ int64_t at(const Call& call, int leaf) const { return call.segment_of(level, leaf) * 2 + channel; }
};

// Keeps the gradients of a tile in the aggregates above it, and raises their largest magnitudes.
__device__ __forceinline__ void add_aggregate_grad(const Call& call, const LevelChannel& level_channel, int index,
                                                   const Work& work, double share) {
  const Flow flow = sum_flow(share);
  if (!level_channel.open) return;
  const double mine = grad_into_aggregate(work.slopes, level_channel.level, level_channel.channel, flow);
  call.workspace.aggregate_grads[int64_t(index) * kLevelChannels + lane()] = mine;
  raise(call.workspace.largest + level_channel.at(call, work.unit.leaf), mine);
}

template <int EXTRAS, int GATE>
__global__ void __launch_bounds__(kThreads, 2) sweep_leaves(const Call call) {
  HPO_SHARED(double, warps, [kWarps * kMetrics]);
  HPO_SHARED(int, events, [kMetrics]);
  HPO_SHARED(Leaves, leaves, );
  HPO_SHARED(Work, works, [kWarps]);
  HPO_SHARED(float, stage, [GATE == kSettledGate ? 1 : kWarps * kStage]);
  HPO_SHARED(double, shares, [kThreads]);
  HPO_SHARED(Totals, waiting, [EXTRAS != kNoExtras ? kThreads : 1]);  // because tokens with all inputs leave no registers
  const PolicyLossArgs& args = call.gate.args;
  if (threadIdx.x < kMetrics) events[threadIdx.x] = 0;
  const bool broken = call.broken();
  if (threadIdx.x == 0) {
    leaves = call.leaves(broken, int(gridDim.x));  // for the whole block: registers are short here
    // Without a table of rows a leaf is a row, which counts as one.
    if (blockIdx.x == 0 && leaves.row) atomicAdd(&events[kBadOffsets], leaves.leaves - leaves.count);
  }
  __syncthreads();
#pragma unroll 1
  for (int row = int(blockIdx.x * kThreads + threadIdx.x); row < args.rows; row += int(gridDim.x) * kThreads) {
    if (row_range(args.cu_seqlens, row, args.tokens).bad) atomicAdd(&events[kBadOffsets], 1);
  }
  clear_gaps(args, leaves);
  const auto slots = warps + warp_in_block() * kMetrics;
  Totals own;
  Totals& totals = EXTRAS != kNoExtras ? waiting[threadIdx.x] : own;
  totals = Totals::empty(slots);
  for_each_unit(leaves, [&](int index, const LeafUnit& unit) {
    Work& work = works[warp_in_block()];
    double& share = shares[threadIdx.x];
    begin_work<GATE>(call, unit, work);
    sweep_tile<EXTRAS, GATE>(call, work, stage + (GATE == kSettledGate ? 0 : warp_in_block() * kStage), slots, events, totals,
                             share);
    if (GATE != kSettledGate && call.carries) add_aggregate_grad(call, LevelChannel(call), index, work, share);
  });
  finish_block(call.gate, totals, warps, events, call.workspace.partials, call.workspace.ticket);
}

// ------------------------------------------------------------------------------------- gradient through aggregates

__device__ __forceinline__ void couple_segments(const Call& call, bool broken) {
  const LevelChannel level_channel(call);
  RunAccumulator accumulator = {};
  for_each_unit(call.leaves(broken, int(gridDim.x)), [&](int index, const LeafUnit& unit) {
    if (!level_channel.open) return;
    const int64_t at = level_channel.at(call, unit.leaf);
    const double mine = call.workspace.aggregate_grads[int64_t(index) * kLevelChannels + lane()];
    accumulator.add(call.workspace.aggregate_grad + at, in_steps(mine, int64_t(call.workspace.largest[at])));
  });
  accumulator.flush();
}

// The gradient of each token of the leaf through the aggregate of one level and channel. SIMPLE: no level is a log mean exp or
// balanced.
template <bool SIMPLE>
__device__ __forceinline__ double aggregate_grad(const Call& call, const LevelChannel& level_channel, int leaf) {
  if (!level_channel.open) return 0.0;
  const int64_t at = level_channel.at(call, leaf);
  const auto segment = [&](int k) { return call.log_ratios(k, leaf); };
  const double sum = from_steps(call.workspace.aggregate_grad[at], int64_t(call.workspace.largest[at]));
  return sum / (SIMPLE ? divisor(call.hierarchy.levels[level_channel.level], segment(level_channel.level).valid)
                       : shares(call.hierarchy, level_channel.level, level_channel.channel, segment));
}

template <int ENTERING>
__device__ __forceinline__ void deliver_tile(const Call& call, const Unit& tile, float rising, float falling) {
  constexpr bool PRE_GATED = ENTERING == kPreGated;
  const RowTerms row = PRE_GATED ? call.gate.row_terms(tile.row) : RowTerms{};
  for_each_window(tile, call.gate.groupable, [&](const Group<4>& group) {
    const Inputs<4> inputs = read_inputs<true, PRE_GATED>(call.gate.args, group);
    float* const to = call.gate.args.grad + group.token;
    float grad[4] = {};
    if (group.whole) {
      const float4 four = *reinterpret_cast<const float4*>(to);
      grad[0] = four.x, grad[1] = four.y, grad[2] = four.z, grad[3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Token token = classify<true, PRE_GATED, false>(call.gate, row, inputs, i);
      if (!group.whole && group.has(i)) grad[i] = to[i];
      if (token.valid && !token.infinite) grad[i] += call.through_pre_gate<ENTERING>(token, token.x < 0.0f ? falling : rising);
    }
    write(call.gate.args.grad, group, grad);
  });
}

template <int ENTERING, bool SIMPLE>
__global__ void __launch_bounds__(kThreads, 4) deliver_gradient(const Call call) {
  const bool broken = call.broken();
  if (call.does(Stage::reduce_grad)) couple_segments(call, broken);
  if (!call.does(Stage::broadcast_grad)) return;
  if (call.hierarchy.stage == Stage::whole) sync_grid();
  const LevelChannel level_channel(call);
  for_each_unit(call.leaves(broken, int(gridDim.x)), [&](int, const LeafUnit& unit) {
    const double mine = aggregate_grad<SIMPLE>(call, level_channel, unit.leaf);
    double sums[2] = {};
#pragma unroll
    for (int k = 0; k < kMostLevels; ++k) {
      sums[0] += __shfl_sync(kFullWarp, mine, 2 * k);
      sums[1] += __shfl_sync(kFullWarp, mine, 2 * k + 1);
    }
    const float rising = float(sums[0]), falling = call.hierarchy.split ? float(sums[1]) : rising;
    if (rising == 0.0f && falling == 0.0f) return;  // nothing saturates: the written gradient stands, to the bit
    deliver_tile<ENTERING>(call, unit.tile, rising, falling);
  });
}

// ----------------------------------------------------------------------------------------------------------------- host

template <int GATE>
void launch_sweep(const Call& call, int extras, int blocks, cudaStream_t stream) {
  const dim3 grid(blocks), block(kThreads);
  if (extras == kCorrected) HPO_LAUNCH((sweep_leaves<kCorrected, GATE>), grid, block, 0, stream, call);
  else if (extras == kExtras || GATE == kTermGate || GATE == kMeanExpGate)  // few of their calls have no inputs of tokens
    HPO_LAUNCH((sweep_leaves<kExtras, GATE>), grid, block, 0, stream, call);
  else HPO_LAUNCH((sweep_leaves<kNoExtras, GATE>), grid, block, 0, stream, call);
}

void launch_sweep(const Call& call, int64_t threads, cudaStream_t stream) {
  const int extras = call.gate.args.ref_logp ? std::max(call.gate.extras(), kExtras) : call.gate.extras();
  const int blocks = blocks_for(threads);
  if (adds_exponentials(call.hierarchy)) launch_sweep<kMeanExpGate>(call, extras, blocks, stream);
  else if (call.hierarchy.term.present) launch_sweep<kTermGate>(call, extras, blocks, stream);
  else if (call.gate.structure.token == TokenGate::drop && (call.settled || !call.carries))
    launch_sweep<kSettledGate>(call, extras, blocks, stream);
  else launch_sweep<kPlainGate>(call, extras, blocks, stream);
}

template <int WIDTH, int EXTRAS>
void launch_settled(Call& call, int64_t threads, cudaStream_t stream) {
  call.first_blocks = blocks_together<prepare_settled<WIDTH, EXTRAS>>(threads);
  HPO_LAUNCH_TOGETHER((prepare_settled<WIDTH, EXTRAS>), dim3(call.first_blocks), dim3(kThreads), 0, stream, call);
}

void launch_settled(Call& call, int64_t threads, cudaStream_t stream) {
  const bool corrected = call.gate.extras() == kCorrected;
  if (call.gate.coefficient_varies) {
    corrected ? launch_settled<1, kCorrected>(call, threads, stream) : launch_settled<1, kExtras>(call, threads, stream);
  } else {
    launch_settled<4, kExtras>(call, threads, stream);
  }
}

template <int ENTERING, bool BALANCED>
void launch(Call& call, cudaStream_t stream) {
  const PolicyLossArgs& args = call.gate.args;
  const Hierarchy& hierarchy = call.hierarchy;
  const int64_t swept = kWarp * units_of(args.tokens, hierarchy.leaves);
  const int64_t prepared = std::max({args.rows, hierarchy.depth * hierarchy.leaves * kWords, swept});
  if (ENTERING == kLogRatio && !BALANCED && call.settled) {
    launch_settled(call, prepared, stream);
    return launch_sweep(call, swept, stream);
  }
  call.first_blocks = blocks_together<prepare_leaves<ENTERING, BALANCED>>(prepared);
  const dim3 first(call.first_blocks), block(kThreads);
  if (call.does(Stage::sums)) HPO_LAUNCH_TOGETHER((prepare_leaves<ENTERING, BALANCED>), first, block, 0, stream, call);
  if (call.does(Stage::sweep)) launch_sweep(call, swept, stream);
  if (call.carries && (call.does(Stage::reduce_grad) || call.does(Stage::broadcast_grad))) {
    constexpr bool SIMPLE = ENTERING != kMeanExp && !BALANCED;
    const dim3 last(blocks_together<deliver_gradient<ENTERING, SIMPLE>>(swept));
    HPO_LAUNCH_TOGETHER((deliver_gradient<ENTERING, SIMPLE>), last, block, 0, stream, call);
  }
}

template <bool BALANCED>
void launch(Call& call, cudaStream_t stream) {
  if (adds_exponentials(call.hierarchy)) return launch<kMeanExp, BALANCED>(call, stream);
  const bool pre_gated = pre_gates(call.hierarchy.term, call.gate.structure.head);
  pre_gated ? launch<kPreGated, BALANCED>(call, stream) : launch<kLogRatio, BALANCED>(call, stream);
}

}  // namespace
}  // namespace hpo

extern "C" int64_t hpo_hierarchy_workspace(int64_t tokens, int64_t rows, int64_t leaves) {
  return hpo::Workspace().place(nullptr, tokens, rows, leaves);
}

extern "C" int hpo_hierarchy(const hpo::PolicyLossArgs* args, const hpo::GateStructure* structure,
                             const hpo::GateNumbers* numbers, const hpo::Hierarchy* hierarchy, int64_t context) {
  using namespace hpo;
  const cudaStream_t stream = reinterpret_cast<cudaStream_t>(context);
  Call call(*args, *structure, *numbers, *hierarchy);
  bool balanced = false;
  for (int k = 0; k < hierarchy->depth; ++k) balanced |= hierarchy->levels[k].aggregate == Aggregate::balanced;
  balanced ? launch<true>(call, stream) : launch<false>(call, stream);
  return int(cudaGetLastError());
}
