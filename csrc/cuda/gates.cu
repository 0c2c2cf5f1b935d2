// policy_loss in two launches: one that prepares, one sweep over the tokens that writes the gradient and whose last block adds
// up loss and metrics. The definition is hpo_core/reference/gates.py.
//
// A warp takes a tile (units.cuh) and keeps its sums in registers; nothing but a block's total reaches memory. The grid
// depends on the sizes only, so that the order of every sum does too.
#include "gates_ratio.cuh"

namespace hpo {
namespace {

struct Workspace {
  double* partials;  // [blocks][kMetrics]
  int* seen;         // [rows]: 1 where a valid token was met
  int* broken;       // [blocks of the first launch]: whether it met a broken row
  unsigned* ticket;  // blocks of the sweep that are done

  // Places the arrays and returns their size in bytes.
  int64_t place(void* base, int64_t rows) {
    Placement placement(base);
    placement.take(partials, kMaxBlocks * kMetrics);
    placement.take(seen, rows);
    placement.take(broken, kMaxBlocks);
    placement.take(ticket, 1);
    return placement.bytes();
  }
};

struct Call {
  Gate gate;
  Workspace workspace;
  int first_blocks;  // blocks of the first launch
};

// Calls `visit` with the units of this warp.
template <class Visit>
__device__ __forceinline__ void for_each_unit(const Gate& gate, Visit visit) {
  const int units = int(units_of(gate.args.tokens, gate.args.rows)), warps = int(gridDim.x) * kWarps;
#pragma unroll 1
  for (int index = int(blockIdx.x) * kWarps + warp_in_block(); index < units; index += warps) visit(index);
}

// ------------------------------------------------------------------------------------------------------- first launch

// One thread checks row s.
__global__ void __launch_bounds__(kThreads) prepare(const Call call) {
  const Pack pack = call.gate.pack();
  bool bad = false;
  for (int row = int(blockIdx.x * kThreads + threadIdx.x); row < pack.rows; row += int(gridDim.x) * kThreads) {
    bad |= row_range(pack.cu_seqlens, row, pack.tokens).bad;
    call.workspace.seen[row] = 0;
  }
  const bool any = __syncthreads_or(bad);
  if (threadIdx.x == 0) call.workspace.broken[blockIdx.x] = any;
  if (blockIdx.x == 0 && threadIdx.x == 0) *call.workspace.ticket = 0;
}

// ---------------------------------------------------------------------------------------------------------------- sweep

template <bool REFERENCE, int EXTRAS>
__device__ __forceinline__ void sweep_tile(const Call& call, const Unit& unit, bool broken, Totals& totals,
                                           HPO_SHARED_POINTER(double) places, HPO_SHARED_POINTER(int) events) {
  constexpr int WIDTH = 4;
  const Gate& gate = call.gate;
  const RowTerms row = gate.row_terms(unit.row);
  TileTotals tile(events);
  for_each_group<WIDTH>(gate.pack(), unit, gate.groupable, broken, [&](const Group<WIDTH>& group) {
    const Inputs<WIDTH> inputs = read_inputs<REFERENCE, EXTRAS>(gate.args, group);
    float grad[WIDTH];
    sweep_tokens<REFERENCE, EXTRAS>(gate, row, inputs, grad, tile, totals);
    if (gate.args.grad) write(gate.args.grad, group, grad);
  });
  count_row(tile, call.workspace.seen + unit.row, events);
  Totals::merge(tile, places);
}

// Gradient 0 for tokens of no row among kTile tokens, counted from the first of the pack.
__device__ __forceinline__ void clear_tile(const Gate& gate, int tile, bool broken) {
  const Pack pack = gate.pack();
  const int64_t first = pack.cu_seqlens[0], last = pack.cu_seqlens[pack.rows];
  const int64_t begin = int64_t(tile) * kTile, end = min(begin + kTile, pack.tokens);
  for (int64_t token = begin + lane(); token < end; token += kWarp) {
    if (broken ? find_owner(pack, token) >= 0 : first <= token && token < last) continue;
    if (gate.args.grad) gate.args.grad[token] = 0.0f;
    if (gate.args.token_loss) gate.args.token_loss[token] = 0.0f;
  }
}

// Blocks that a multiprocessor holds with as many registers as spill nothing. All 512 run at once where four fit into each of
// 132 multiprocessors.
constexpr int blocks_that_sweep(bool reference, int extras) { return extras != kNoExtras ? 2 : (reference ? 3 : 4); }

template <bool REFERENCE, int EXTRAS>
__global__ void __launch_bounds__(kThreads, blocks_that_sweep(REFERENCE, EXTRAS)) sweep(const Call call) {
  HPO_SHARED(double, warps, [kWarps * kPlaces]);
  HPO_SHARED(int, events, [kMetrics]);
  const Gate& gate = call.gate;
  const Pack pack = gate.pack();
  if (threadIdx.x < kMetrics) events[threadIdx.x] = 0;
  const bool broken = any_of(call.workspace.broken, call.first_blocks);

  const auto places = warps + warp_in_block() * kPlaces;
  Totals totals = Totals::empty(places);
  for_each_unit(gate, [&](int index) {
    if (index >= pack.rows) clear_tile(gate, index - pack.rows, broken);
    else if (lane() == 0 && row_range(pack.cu_seqlens, index, pack.tokens).bad) atomicAdd(&events[kBadOffsets], 1);
#pragma unroll 1
    for (int tile = 0; tile == 0 || broken; ++tile) {
      const Unit unit = broken ? get_unit_unordered(pack, index, tile) : get_unit(pack, index);
      if (unit.length == 0) return;
      sweep_tile<REFERENCE, EXTRAS>(call, unit, broken, totals, places, events);
    }
  });
  finish_block(gate, totals, warps, events, call.workspace.partials, call.workspace.ticket);
}

// ----------------------------------------------------------------------------------------------------------------- host

template <bool REFERENCE>
void launch_sweep(const Call& call, int blocks, cudaStream_t stream) {
  constexpr bool THREE = blocks_that_sweep(REFERENCE, kNoExtras) == 3;
  const int extras = call.gate.extras();
  if (extras == kCorrected) {
    HPO_LAUNCH((sweep<REFERENCE, kCorrected>), dim3(blocks), dim3(kThreads), 0, stream, call);
  } else if (extras == kExtras) {
    HPO_LAUNCH((sweep<REFERENCE, kExtras>), dim3(blocks), dim3(kThreads), 0, stream, call);
  } else {
    HPO_LAUNCH((sweep<REFERENCE, kNoExtras>), dim3(THREE ? std::min(blocks, kBlocksOfThree) : blocks), dim3(kThreads), 0,
               stream, call);
  }
}

}  // namespace
}  // namespace hpo

extern "C" int64_t hpo_policy_loss_workspace(int64_t, int64_t rows) { return hpo::Workspace().place(nullptr, rows); }

extern "C" int hpo_policy_loss(const hpo::PolicyLossArgs* args, const hpo::GateStructure* structure,
                               const hpo::GateNumbers* numbers, int64_t context) {
  using namespace hpo;
  const cudaStream_t stream = reinterpret_cast<cudaStream_t>(context);
  Call call = {Gate(*args, *structure, *numbers), {}, 0};
  call.workspace.place(args->workspace, args->rows);
  const int sweep_blocks = blocks_for(kWarp * units_of(args->tokens, args->rows));
  call.first_blocks = blocks_for(args->rows);
  HPO_LAUNCH(prepare, dim3(call.first_blocks), dim3(kThreads), 0, stream, call);
  args->ref_logp ? launch_sweep<true>(call, sweep_blocks, stream) : launch_sweep<false>(call, sweep_blocks, stream);
  return int(cudaGetLastError());
}
