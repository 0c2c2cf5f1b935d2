// policy_loss in one launch: a sweep over the tokens that writes the gradient and whose last block adds up loss and metrics.
// The definition is hpo_core/reference/gates.py.
//
// A warp takes a tile (units.cuh) and keeps its sums in registers; nothing but a block's total reaches memory. The grid depends
// on the sizes and on which inputs there are, never on the device, and so does the order of every sum.
//
// The sweep assumes ascending offsets. If some do not, rows may overlap, and the results of the blocks count for
// nothing: the last block, which reads the number of bad offsets, does everything again by itself.
#include "gates_ratio.cuh"
#include "tickets.cuh"

namespace hpo {
namespace {

struct Workspace {
  double* partials;  // [blocks][kMetrics]
  unsigned* ticket;  // of a launch without one of its own

  // Places the arrays and returns their size in bytes.
  int64_t place(void* base) {
    Placement placement(base);
    placement.take(partials, kMaxBlocks * kMetrics);
    placement.take(ticket, 1);
    return placement.bytes();
  }
};

struct Call {
  Gate gate;
  double* partials;  // [blocks][kMetrics]
  Ticket ticket;
};

// Sweeps the tokens of a tile, and tells whether one of them is valid. BROKEN: one by one, because a second loop over vectors
// of four would take more registers than there are.
template <bool REFERENCE, int EXTRAS, bool BROKEN>
__device__ __forceinline__ bool sweep_tile(const Call& call, const Unit& unit, Totals& totals,
                                           HPO_SHARED_POINTER(double) places, HPO_SHARED_POINTER(int) events) {
  constexpr int WIDTH = BROKEN ? 1 : 4;
  const Gate& gate = call.gate;
  const RowTerms row = gate.row_terms(unit.row);
  TileTotals tile(events);
  const bool shared = BROKEN && is_shared(gate.pack(), unit);
  for_each_vector<WIDTH>(gate.pack(), unit, gate.wide, shared, [&](const Vector<WIDTH>& vector) {
    const Inputs<WIDTH> inputs = read_inputs<REFERENCE, EXTRAS>(gate.args, vector);
    float grad[WIDTH];
    sweep_tokens<REFERENCE, EXTRAS>(gate, row, inputs, grad, tile, totals);
    if (gate.args.grad) write(gate.args.grad, vector, grad);
  });
  Totals::merge(tile, places);
  return tile.has_valid();
}

// Gradient and loss 0 for tokens of no row among kTile tokens, counted from the first of the pack.
__device__ __forceinline__ void clear_tile(const Gate& gate, int tile) {
  const Pack pack = gate.pack();
  const int64_t first = pack.cu_seqlens[0], last = pack.cu_seqlens[pack.rows];
  const int64_t begin = int64_t(tile) * kTile, end = min(begin + kTile, pack.tokens);
  for (int64_t token = begin + lane(); token < end; token += kWarp) {
    if (token < first || last <= token) clear_token(gate.args, token);
  }
}

// Gradient and loss 0 for all tokens, by one block.
__device__ __forceinline__ void clear_all(const PolicyLossArgs& args) {
  for (int64_t token = threadIdx.x; token < args.tokens; token += kThreads) clear_token(args, token);
  __syncthreads();
}

// Whether a row has a valid token in [begin, end). Only rows without one in their first tile ask, such as those that begin with
// a long prompt, so masks are read many at once.
template <bool REFERENCE>
__device__ __forceinline__ bool has_valid(const PolicyLossArgs& args, int64_t begin, int64_t end) {
  constexpr int kAtOnce = 32;
#pragma unroll 1
  for (int64_t first = begin + lane(); __any_sync(kFullWarp, first < end); first += kAtOnce * kWarp) {
    unsigned open = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t token = first + i * kWarp;
      open |= unsigned(token < end && (!args.mask || __ldg(args.mask + token))) << i;
    }
    bool valid = false;
#pragma unroll 1
    for (; open != 0 && !valid; open &= open - 1) {
      const int64_t token = first + (__ffs(int(open)) - 1) * kWarp;
      const float logp = __ldg(args.logp + token);
      valid = !log_ratio(logp, __ldg(args.old_logp + token)).nan;
      if (REFERENCE) valid &= !log_ratio(logp, __ldg(args.ref_logp + token)).nan;
    }
    if (__any_sync(kFullWarp, valid)) return true;
  }
  return false;
}

// The tokens of one block of `blocks`, and their part of loss and metrics.
template <bool REFERENCE, int EXTRAS, bool BROKEN>
__device__ __forceinline__ void sweep_block(const Call& call, int block, int blocks, HPO_SHARED_POINTER(double) warps,
                                            HPO_SHARED_POINTER(int) events) {
  const Gate& gate = call.gate;
  const Pack pack = gate.pack();
  const auto places = warps + warp_in_block() * kPlaces;
  if (threadIdx.x < kMetrics) events[threadIdx.x] = 0;
  __syncthreads();
  Totals totals = Totals::empty(places);
  const int units = BROKEN ? pack.rows : int(units_of(pack.tokens, pack.rows));
#pragma unroll 1
  for (int index = block * kWarps + warp_in_block(); index < units; index += blocks * kWarps) {
    if (index >= pack.rows) clear_tile(gate, index - pack.rows);
    else if (lane() == 0 && row_range(pack.cu_seqlens, index, pack.tokens).bad) atomicAdd(&events[kBadOffsets], 1);
    bool has_valid_token = false;
#pragma unroll 1
    for (int tile = 0; tile == 0 || BROKEN; ++tile) {
      const Unit unit = BROKEN ? get_unit_unordered(pack, index, tile) : get_unit(pack, index);
      if (unit.length == 0) break;
      has_valid_token |= sweep_tile<REFERENCE, EXTRAS, BROKEN>(call, unit, totals, places, events);
    }
    if (index >= pack.rows) continue;
    if (!has_valid_token && !BROKEN) {
      const Range row = range_of_warp(pack, index);
      has_valid_token = has_valid<REFERENCE>(gate.args, row.begin + kTile, row.end);
    }
    if (has_valid_token && lane() == 0) atomicAdd(&events[kRows], 1);
  }
  store_block(totals, warps, events, call.partials + block * kMetrics);
}

// Blocks on a multiprocessor at which no register spills.
constexpr int blocks_that_sweep(bool reference, int extras) { return extras != kNoExtras ? 2 : (reference ? 3 : 4); }

template <bool REFERENCE, int EXTRAS>
__global__ void __launch_bounds__(kThreads, blocks_that_sweep(REFERENCE, EXTRAS)) sweep(const Call call) {
  HPO_SHARED(double, warps, [kWarps * kPlaces]);
  HPO_SHARED(int, events, [kMetrics]);
  const PolicyLossArgs& args = call.gate.args;
  sweep_block<REFERENCE, EXTRAS, false>(call, int(blockIdx.x), int(gridDim.x), warps, events);
  if (!last_block(call.ticket.get())) return;
  finish(call.partials, int(gridDim.x), args.loss, args.metrics);
  if (!__syncthreads_or(threadIdx.x == kBadOffsets && args.metrics[kBadOffsets] > 0.0)) return;
  clear_all(args);
  sweep_block<REFERENCE, EXTRAS, true>(call, 0, 1, warps, events);
  __syncthreads();
  finish(call.partials, 1, args.loss, args.metrics);
}

// ----------------------------------------------------------------------------------------------------------------- host

template <bool REFERENCE, int EXTRAS>
void launch_sweep(const Call& call, int blocks, cudaStream_t stream) {
  constexpr int MOST = blocks_at_once(blocks_that_sweep(REFERENCE, EXTRAS));
  HPO_LAUNCH((sweep<REFERENCE, EXTRAS>), dim3(std::min(blocks, MOST)), dim3(kThreads), 0, stream, call);
}

template <bool REFERENCE>
void launch_sweep(const Call& call, int blocks, cudaStream_t stream) {
  switch (call.gate.extras()) {
    case kCorrected: return launch_sweep<REFERENCE, kCorrected>(call, blocks, stream);
    case kExtras: return launch_sweep<REFERENCE, kExtras>(call, blocks, stream);
    default: return launch_sweep<REFERENCE, kNoExtras>(call, blocks, stream);
  }
}

}  // namespace
}  // namespace hpo

extern "C" int64_t hpo_policy_loss_workspace(int64_t, int64_t) { return hpo::Workspace().place(nullptr); }

extern "C" int hpo_policy_loss(const hpo::PolicyLossArgs* args, const hpo::GateStructure* structure,
                               const hpo::GateNumbers* numbers, int64_t context) {
  using namespace hpo;
  const cudaStream_t stream = reinterpret_cast<cudaStream_t>(context);
  Workspace workspace;
  workspace.place(args->workspace);
  const Call call = {Gate(*args, *structure, *numbers), workspace.partials, take_ticket(stream, workspace.ticket)};
  const int blocks = blocks_for(kWarp * units_of(args->tokens, args->rows));
  args->ref_logp ? launch_sweep<true>(call, blocks, stream) : launch_sweep<false>(call, blocks, stream);
  return int(cudaGetLastError());
}
