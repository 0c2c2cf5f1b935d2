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
//
//   hierarchy_call.cuh    a call and its workspace
//   hierarchy_sums.cuh    the first launch
//   hierarchy_sweep.cuh   the sweep, hierarchy_tokens.cuh its tokens
//   here                  the third launch, and the host
#include "hierarchy_sums.cuh"
#include "hierarchy_sweep.cuh"

namespace hpo {
namespace {

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
      if (!group.whole && group.has(i)) grad[i] = to[i];
    }
    for_each_valid<PRE_GATED>(call.gate, row, inputs, [&](const Token& token, int i) {
      if (token.infinite) return;
      put(grad, i, pick(grad, i) + call.template through_pre_gate<ENTERING>(token, token.x < 0.0f ? falling : rising));
    });
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

// The third launch under a settled gate, of a call in stages: of one that is whole the sweep has written everything.
__global__ void __launch_bounds__(kThreads, 3) deliver_settled(const Call call) {
  HPO_SHARED(Work, works, [kWarps]);
  const Leaves leaves = call.leaves(call.broken(), int(gridDim.x));
  if (call.does(Stage::reduce_grad)) return add_coefficients(call, leaves);
  for_each_unit(leaves, [&](int, const LeafUnit& unit) {
    Work& work = works[warp_in_block()];
    begin_work<kSettledGate>(call, unit, work);
    if (work.settled != 0.0f) deliver_tile<kLogRatio>(call, unit.tile, work.settled, work.settled);
  });
}

// ----------------------------------------------------------------------------------------------------------------- host

template <int GATE>
void launch_sweep(const Call& call, int blocks, cudaStream_t stream) {
  const dim3 grid(blocks), block(kThreads);
  const int extras = call.gate.extras();
  if (extras == kCorrected) {
    HPO_LAUNCH((sweep_leaves<true, kCorrected, GATE>), grid, block, 0, stream, call);
  } else if (extras == kExtras) {
    HPO_LAUNCH((sweep_leaves<true, kExtras, GATE>), grid, block, 0, stream, call);
  } else if (call.gate.args.ref_logp) {
    HPO_LAUNCH((sweep_leaves<true, kNoExtras, GATE>), grid, block, 0, stream, call);
  } else {
    const dim3 light(is_light(false, kNoExtras, GATE) ? std::min(blocks, kBlocksOfThree) : blocks);
    HPO_LAUNCH((sweep_leaves<false, kNoExtras, GATE>), light, block, 0, stream, call);
  }
}

void launch_sweep(const Call& call, int64_t threads, cudaStream_t stream) {
  const int blocks = blocks_for(threads);
  const bool drops = call.gate.structure.token == TokenGate::drop;
  if (call.hierarchy.term.present || adds_exponentials(call.hierarchy)) {
    launch_sweep<kTermGate>(call, blocks, stream);
  } else if (drops && (call.settled || !call.carries)) {
    launch_sweep<kSettledGate>(call, blocks, stream);
  } else if (call.hierarchy.split) {
    launch_sweep<kSplitGate>(call, blocks, stream);
  } else {
    launch_sweep<kPlainGate>(call, blocks, stream);
  }
}

template <int WIDTH, int EXTRAS>
void launch_sums_of_settled(Call& call, int64_t threads, cudaStream_t stream) {
  call.first_blocks = blocks_together<prepare_settled<WIDTH, EXTRAS>>(threads);
  const dim3 blocks(call.first_blocks), block(kThreads);
  if (call.does(Stage::sums)) HPO_LAUNCH_TOGETHER((prepare_settled<WIDTH, EXTRAS>), blocks, block, 0, stream, call);
}

void launch_settled(Call& call, int64_t prepared, int64_t swept, cudaStream_t stream) {
  if (!call.gate.coefficient_varies) {
    call.gate.extras() ? launch_sums_of_settled<4, kExtras>(call, prepared, stream)
                       : launch_sums_of_settled<4, kNoExtras>(call, prepared, stream);
  } else if (call.gate.extras() == kCorrected) {
    launch_sums_of_settled<1, kCorrected>(call, prepared, stream);
  } else {
    launch_sums_of_settled<1, kExtras>(call, prepared, stream);
  }
  if (call.does(Stage::sweep)) launch_sweep(call, swept, stream);
  const Stage stage = call.hierarchy.stage;
  if (stage == Stage::reduce_grad || stage == Stage::broadcast_grad) {
    HPO_LAUNCH(deliver_settled, dim3(blocks_for(swept)), dim3(kThreads), 0, stream, call);
  }
}

template <int ENTERING, bool BALANCED>
void launch(Call& call, cudaStream_t stream) {
  const PolicyLossArgs& args = call.gate.args;
  const Hierarchy& hierarchy = call.hierarchy;
  const int64_t swept = kWarp * units_of(args.tokens, hierarchy.leaves);
  const int64_t prepared = std::max({args.rows, hierarchy.depth * hierarchy.leaves * kWords, swept});
  if (ENTERING == kLogRatio && !BALANCED && call.settled) return launch_settled(call, prepared, swept, stream);
  call.first_blocks = blocks_together<prepare_leaves<ENTERING, BALANCED>>(prepared);
  const dim3 first(call.first_blocks), block(kThreads);
  if (call.does(Stage::sums)) HPO_LAUNCH_TOGETHER((prepare_leaves<ENTERING, BALANCED>), first, block, 0, stream, call);
  if (call.does(Stage::sweep)) launch_sweep(call, swept, stream);
  if (call.carries && (call.does(Stage::reduce_grad) || call.does(Stage::broadcast_grad))) {
    constexpr bool SIMPLE = ENTERING != kMeanExp && !BALANCED;
    constexpr int OF_TOKENS = ENTERING == kParts ? kLogRatio : ENTERING;
    const dim3 last(blocks_together<deliver_gradient<OF_TOKENS, SIMPLE>>(swept));
    HPO_LAUNCH_TOGETHER((deliver_gradient<OF_TOKENS, SIMPLE>), last, block, 0, stream, call);
  }
}

template <bool BALANCED>
void launch(Call& call, cudaStream_t stream) {
  if (adds_exponentials(call.hierarchy)) return launch<kMeanExp, BALANCED>(call, stream);
  const bool pre_gated = pre_gates(call.hierarchy.term, call.gate.structure.head);
  if (pre_gated) return launch<kPreGated, BALANCED>(call, stream);
  call.hierarchy.split ? launch<kParts, BALANCED>(call, stream) : launch<kLogRatio, BALANCED>(call, stream);
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
