// policy_loss under a hierarchy of gates in two launches: one that prepares and sums the log-ratios of every segment, one sweep
// that gates tokens, writes their gradient and whose last block adds up loss and metrics. Where gradient flows through the
// aggregate of a level a delivery follows: the gradients of tiles are added over segments, and the tokens of leaves get their
// shares. The definition is hpo_core/reference/hierarchy.py.
//
// Under one level whose residual tokens drop, as in a gate on sequences, the gradient that flows is a sum of the
// coefficients of tokens times a number of their segment: the sums add up the coefficients, the sweep knows the gradient of
// every token, and nothing is delivered.
//
// The launch of the sweep holds the delivery too, and the sums where tokens drop their residual or are under no level, if the
// device holds all its blocks at once, so that grid barriers may stand between them. For many tokens these are launches of
// their own, because the registers of the sweep would leave them too few blocks. No bit depends on it. A call in stages has a
// launch for each part of the delivery.
//
// A warp takes a tile of a leaf (leaves.cuh). Sums over the tiles of a segment are sums of integers, so they have no order;
// inside a tile the order depends on positions in the leaf. So the place and the neighbours of a leaf change no bit of its
// gradient.
//
//   hierarchy_call.cuh      a call and its workspace
//   hierarchy_sums.cuh      the sums
//   hierarchy_sweep.cuh     the sweep, hierarchy_tokens.cuh its tokens
//   hierarchy_delivery.cuh  the delivery
//   here                    the delivery's launches, and the host
#include "hierarchy_sweep.cuh"

namespace hpo {
namespace {

template <int ENTERING>
__global__ void __launch_bounds__(kThreads, 4) deliver_gradient(const Call call) {
  const Leaves leaves = call.leaves(call.broken());
  if (call.does(Stage::reduce_grad)) add_aggregate_grads(call, leaves);
  if (!call.does(Stage::broadcast_grad)) return;
  if (call.hierarchy.stage == Stage::whole) sync_grid();
  deliver_leaves<ENTERING>(call, leaves);
}

// The delivery under a settled gate, for a call in stages: in a whole call the sweep has written everything.
__global__ void __launch_bounds__(kThreads, 3) deliver_settled(const Call call) {
  HPO_SHARED(Work, works, [kWarps]);
  const Leaves leaves = call.leaves(call.broken());
  if (call.does(Stage::reduce_grad)) return add_coefficients(call, leaves);
  for_each_unit(leaves, [&](int, const LeafUnit& unit) {
    Work& work = works[warp_in_block()];
    begin_work<kSettledGate>(call, unit, work);
    if (work.settled != 0.0f) deliver_tile<kLogRatio>(call, unit.tile, work.settled, work.settled);
  });
}

// ----------------------------------------------------------------------------------------------------------------- host

// Threads that launches can use, and the launch of the sums, unless the gate is settled.
struct LaunchPlan {
  int64_t prepared, swept;
  void (*launch_sums)(Call&, int64_t threads, cudaStream_t);
};

template <int ENTERING, bool BALANCED>
void launch_sums(Call& call, int64_t threads, cudaStream_t stream) {
  call.first_blocks = blocks_together<prepare_leaves<ENTERING, BALANCED>>(threads);
  const dim3 blocks(call.first_blocks), block(kThreads);
  if (call.does(Stage::sums)) HPO_LAUNCH_TOGETHER((prepare_leaves<ENTERING, BALANCED>), blocks, block, 0, stream, call);
}

template <int WIDTH, int EXTRAS>
void launch_sums_of_settled(Call& call, int64_t threads, cudaStream_t stream) {
  call.first_blocks = blocks_together<prepare_settled<WIDTH, EXTRAS>>(threads);
  const dim3 blocks(call.first_blocks), block(kThreads);
  if (call.does(Stage::sums)) HPO_LAUNCH_TOGETHER((prepare_settled<WIDTH, EXTRAS>), blocks, block, 0, stream, call);
}

template <int EXTRAS>
void launch_sums_of_settled(Call& call, int64_t threads, cudaStream_t stream) {
  if (EXTRAS == kExtras && !call.gate.coefficient_varies) return launch_sums_of_settled<4, kExtras>(call, threads, stream);
  launch_sums_of_settled<EXTRAS == kNoExtras ? 4 : 1, EXTRAS>(call, threads, stream);
}

// The blocks of the sweep are the same whether it is a launch by itself or not, and so is the order of its sums.
template <bool REFERENCE, int EXTRAS, int GATE>
void launch_sweep(Call& call, const LaunchPlan& plan, cudaStream_t stream) {
  const int blocks = std::min(blocks_for(plan.swept), blocks_at_once(blocks_that_sweep(REFERENCE, EXTRAS, GATE)));
  const bool may_hold_sums =
      GATE == kSettledGate ? call.summed == kLogRatio && !call.balanced : GATE == kTermGate && call.hierarchy.depth == 0;
  call.together = (may_hold_sums || (call.carries && GATE != kSettledGate)) && call.hierarchy.stage == Stage::whole &&
                  blocks == blocks_together<sweep_leaves<REFERENCE, EXTRAS, GATE>>(int64_t(blocks) * kThreads);
  if (call.together && may_hold_sums) call.first_blocks = blocks;
  else if (GATE == kSettledGate && call.settled) launch_sums_of_settled<EXTRAS>(call, plan.prepared, stream);
  else plan.launch_sums(call, plan.prepared, stream);
  const dim3 grid(blocks), block(kThreads);
  if (call.together) {
    HPO_LAUNCH_TOGETHER((sweep_leaves<REFERENCE, EXTRAS, GATE>), grid, block, 0, stream, call);
  } else if (call.does(Stage::sweep)) {
    HPO_LAUNCH((sweep_leaves<REFERENCE, EXTRAS, GATE>), grid, block, 0, stream, call);
  }
}

template <int GATE>
void launch_sweep(Call& call, const LaunchPlan& plan, cudaStream_t stream) {
  const int extras = call.gate.extras();
  if (extras == kCorrected) return launch_sweep<true, kCorrected, GATE>(call, plan, stream);
  if (extras == kExtras) return launch_sweep<true, kExtras, GATE>(call, plan, stream);
  call.gate.args.ref_logp ? launch_sweep<true, kNoExtras, GATE>(call, plan, stream)
                          : launch_sweep<false, kNoExtras, GATE>(call, plan, stream);
}

void launch_sweep(Call& call, const LaunchPlan& plan, cudaStream_t stream) {
  const bool drops = call.gate.structure.token == TokenGate::drop;
  if (call.hierarchy.term.present || adds_exponentials(call.hierarchy)) {
    launch_sweep<kTermGate>(call, plan, stream);
  } else if (drops && (call.settled || !call.carries)) {
    launch_sweep<kSettledGate>(call, plan, stream);
  } else if (call.hierarchy.split) {
    launch_sweep<kSplitGate>(call, plan, stream);
  } else {
    launch_sweep<kPlainGate>(call, plan, stream);
  }
}

template <int ENTERING, bool BALANCED>
void launch(Call& call, cudaStream_t stream) {
  const PolicyLossArgs& args = call.gate.args;
  const Hierarchy& hierarchy = call.hierarchy;
  const int64_t swept = kWarp * units_of(args.tokens, hierarchy.leaves);
  const int64_t prepared = std::max({args.rows, hierarchy.depth * hierarchy.leaves * kWords, swept});
  launch_sweep(call, {prepared, swept, launch_sums<ENTERING, BALANCED>}, stream);
  if (!call.carries || call.together || !(call.does(Stage::reduce_grad) || call.does(Stage::broadcast_grad))) return;
  const dim3 block(kThreads);
  if (ENTERING == kLogRatio && !BALANCED && call.settled) {
    if (hierarchy.stage != Stage::whole) HPO_LAUNCH(deliver_settled, dim3(blocks_for(swept)), block, 0, stream, call);
    return;
  }
  constexpr int OF_TOKENS = ENTERING == kParts ? kLogRatio : ENTERING;
  const dim3 blocks(blocks_together<deliver_gradient<OF_TOKENS>>(swept));
  HPO_LAUNCH_TOGETHER(deliver_gradient<OF_TOKENS>, blocks, block, 0, stream, call);
}

template <bool BALANCED>
void launch(Call& call, cudaStream_t stream) {
  if (call.summed == kMeanExp) return launch<kMeanExp, BALANCED>(call, stream);
  if (call.summed == kPreGated) return launch<kPreGated, BALANCED>(call, stream);
  call.summed == kParts ? launch<kParts, BALANCED>(call, stream) : launch<kLogRatio, BALANCED>(call, stream);
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
  call.balanced ? launch<true>(call, stream) : launch<false>(call, stream);
  return int(cudaGetLastError());
}
