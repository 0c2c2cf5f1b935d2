// policy_loss in two launches: one that prepares (for a gate on trajectories: sums of every tile), one sweep over the tokens
// that writes the gradient and whose last block adds up loss and metrics. The definition is hpo_core/reference/gates.py.
//
// A warp takes a tile (units.cuh) and keeps its sums in registers; nothing but a block's total reaches memory. The grid
// depends on the sizes only, so that the order of every sum does too.
#include "gates_ratio.cuh"

namespace hpo {
namespace {

// The sums of a tile for its trajectory.
struct TileSums {
  int64_t fixed, valid;   // sum of the log-ratios (see to_fixed), tokens
  double coefficient[2];  // sum of a over the selected tokens, by sign of the advantage
};

struct Workspace {
  TileSums* tiles;    // [units]
  double* partials;   // [blocks][kMetrics]
  int* seen;          // [rows]: 1 where a valid token was met
  int* broken;        // [blocks of the first launch]: whether it met a broken row
  unsigned* ticket;   // blocks of the sweep that are done

  // Places the arrays and returns their size in bytes.
  int64_t place(void* base, int64_t tokens, int64_t rows) {
    Placement placement(base);
    placement.take(tiles, units_of(tokens, rows));
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

// One thread of the first launch checks row s.
__device__ __forceinline__ void prepare_rows(const Call& call) {
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

__global__ void __launch_bounds__(kThreads) prepare(const Call call) { prepare_rows(call); }

// Sums over the warp of the unit's first tile.
template <int WIDTH, int EXTRAS>
__device__ __forceinline__ TileSums sum_tile(const Gate& gate, const Unit& unit, bool broken) {
  const RowTerms row = gate.row_terms(unit.row);
  int64_t fixed = 0;
  int valid = 0, selected = 0;
  double coefficient[2] = {};
  for_each_group<WIDTH>(gate.pack(), unit, gate.groupable, broken, [&](const Group<WIDTH>& group) {
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
  return {warp_sum(fixed), warp_sum(valid), {coefficient[0], coefficient[1]}};
}

// WIDTH 4 where the sums are integers, which have no order; WIDTH 1 where float64 coefficients are added in the row's order.
template <int WIDTH, int EXTRAS>
__global__ void __launch_bounds__(kThreads) sum_tiles(const Call call) {
  prepare_rows(call);
  for_each_unit(call.gate, [&](int index) {
    const Unit unit = get_unit(call.gate.pack(), index);
    if (unit.length == 0) return;
    const TileSums sums = sum_tile<WIDTH, EXTRAS>(call.gate, unit, false);
    if (lane() == 0) call.workspace.tiles[index] = sums;
  });
}

// ----------------------------------------------------------------------------------------------------------- trajectory

struct Rows {
  const int64_t* list;  // null: the one row `only`
  int only, count;

  __device__ __forceinline__ int64_t operator[](int i) const { return list ? list[i] : only; }
};

// The rows of the trajectory of a row; where the indices are broken, the row alone.
__device__ __forceinline__ Rows trajectory_of(const PolicyLossArgs& args, int row) {
  if (!args.row_trajectory) return {nullptr, row, 1};
  const int64_t trajectory = args.row_trajectory[row];
  if (trajectory < 0 || trajectory >= args.rows) return {nullptr, row, 1};
  const int64_t begin = args.trajectory_start[trajectory], end = args.trajectory_start[trajectory + 1];
  if (begin < 0 || end < begin || end > args.rows) return {nullptr, row, 1};
  return {args.trajectory_rows + begin, 0, int(end - begin)};
}

__device__ __forceinline__ void add(TileSums& sums, const TileSums& more) {
  sums.fixed += more.fixed;
  sums.valid += more.valid;
  sums.coefficient[0] += more.coefficient[0];
  sums.coefficient[1] += more.coefficient[1];
}

// Adds up the tiles of a trajectory: a lane takes a row's first tile, all lanes together the further tiles of a long row.
__device__ __forceinline__ TileSums sum_trajectory(const Call& call, const Rows& rows) {
  const Pack pack = call.gate.pack();
  TileSums sums = {};
  for (int base = 0; base < rows.count; base += kWarp) {
    const int64_t row = base + lane() < rows.count ? rows[base + lane()] : -1;
    Range range = {};
    if (row >= 0 && row < pack.rows) range = row_range(pack.cu_seqlens, row, pack.tokens);
    const int tiles = int(tiles_of(range.end - range.begin)), further = further_unit(pack, range.begin);
    if (tiles > 0) add(sums, call.workspace.tiles[row]);
    for (unsigned left = __ballot_sync(kFullWarp, tiles > 1); left != 0; left &= left - 1) {
      const int source = __ffs(int(left)) - 1;
      const int count = __shfl_sync(kFullWarp, tiles, source) - 1, first = __shfl_sync(kFullWarp, further, source);
      for (int i = lane(); i < count; i += kWarp) add(sums, call.workspace.tiles[first + i]);
    }
  }
  return {warp_sum(sums.fixed), warp_sum(sums.valid), {warp_sum(sums.coefficient[0]), warp_sum(sums.coefficient[1])}};
}

// The same sums from the tokens, for broken offsets.
template <int EXTRAS>
__device__ __forceinline__ TileSums sum_trajectory_unordered(const Gate& gate, const Rows& rows) {
  const Pack pack = gate.pack();
  TileSums sums = {};
  for (int i = 0; i < rows.count; ++i) {
    const int64_t row = rows[i];
    if (row < 0 || row >= pack.rows) continue;
    for (Unit unit = get_unit_unordered(pack, int(row)); unit.length > 0; unit.begin += kTile, unit.length -= kTile) {
      add(sums, sum_tile<1, EXTRAS>(gate, unit, true));
    }
  }
  return sums;
}

__device__ __forceinline__ Level make_level(const Gate& gate, const TileSums& sums) {
  const double n = double(sums.valid > 0 ? sums.valid : 1), mean = from_fixed(sums.fixed) / n;
  Level level = {};
  double flow = 0.0;
  for (int sign = 0; sign < 2; ++sign) {
    const LevelGate one = level_gate(mean, gate.structure.level_clips, gate.level_log_low[sign], gate.level_log_high[sign]);
    level.ratio[sign] = one.ratio;
    level.inside[sign] = one.inside;
    level.below[sign] = !one.inside && mean < gate.level_log_low[sign];
    level.above[sign] = !one.inside && !level.below[sign];
    if (one.inside) flow += double(one.ratio) * (sums.coefficient[sign] / n);
  }
  level.shared_grad = -float(flow);
  return level;
}

// ---------------------------------------------------------------------------------------------------------------- sweep

template <bool LEVEL, bool REFERENCE, int EXTRAS>
__device__ __forceinline__ void sweep_tile(const Call& call, const Unit& unit, bool broken, const Level& level, Totals& totals,
                                           HPO_SHARED_POINTER(double) slots, HPO_SHARED_POINTER(int) events) {
  constexpr int WIDTH = 4;
  const Gate& gate = call.gate;
  const RowTerms row = gate.row_terms(unit.row);
  TileTotals tile = {};
  for_each_group<WIDTH>(gate.pack(), unit, gate.groupable, broken, [&](const Group<WIDTH>& group) {
    const Inputs<WIDTH> inputs = read_inputs<REFERENCE, EXTRAS>(gate.args, group);
    float grad[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      grad[i] = sweep_token<LEVEL, REFERENCE, EXTRAS>(gate, row, level, inputs, i, tile, totals);
    }
    if (gate.args.grad) write(gate.args.grad, group, grad);
  });
  count_row(tile, call.workspace.seen + unit.row, events);
  Totals::merge(tile, slots);
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

__device__ __forceinline__ int broken_indices(const Gate& gate, int row) {
  const Pack pack = gate.pack();
  const int64_t trajectory = gate.args.row_trajectory ? gate.args.row_trajectory[row] : 0;
  return row_range(pack.cu_seqlens, row, pack.tokens).bad + (trajectory < 0 || trajectory >= pack.rows);
}

template <bool LEVEL, bool REFERENCE, int EXTRAS>
__global__ void __launch_bounds__(kThreads, 2) sweep(const Call call) {
  HPO_SHARED(double, warps, [kWarps * kMetrics]);
  HPO_SHARED(int, events, [kMetrics]);
  const Gate& gate = call.gate;
  const Pack pack = gate.pack();
  if (threadIdx.x < kMetrics) events[threadIdx.x] = 0;
  const bool broken = any_of(call.workspace.broken, call.first_blocks);

  const auto slots = warps + warp_in_block() * kMetrics;
  Totals totals = Totals::empty(slots);
  for_each_unit(gate, [&](int index) {
    if (index >= pack.rows) clear_tile(gate, index - pack.rows, broken);
    else if (lane() == 0 && broken_indices(gate, index) > 0) atomicAdd(&events[kBadOffsets], broken_indices(gate, index));
    Unit unit = broken ? get_unit_unordered(pack, index) : get_unit(pack, index);
    if (unit.length == 0) return;
    Level level = {};
    if constexpr (LEVEL) {
      const Rows rows = trajectory_of(gate.args, unit.row);
      level = make_level(gate, broken ? sum_trajectory_unordered<EXTRAS == kCorrected ? kCorrected : kExtras>(gate, rows)
                                      : sum_trajectory(call, rows));
    }
#pragma unroll 1
    for (; unit.length > 0; unit.begin += kTile, unit.length -= kTile) {
      sweep_tile<LEVEL, REFERENCE, EXTRAS>(call, unit, broken, level, totals, slots, events);
    }
  });
  finish_block(gate, totals, warps, events, call.workspace.partials, call.workspace.ticket);
}

// ----------------------------------------------------------------------------------------------------------------- host

template <bool LEVEL, bool REFERENCE>
void launch_sweep(const Call& call, int blocks, cudaStream_t stream) {
  const int extras = call.gate.extras();
  if (extras == kCorrected) {
    HPO_LAUNCH((sweep<LEVEL, REFERENCE, kCorrected>), dim3(blocks), dim3(kThreads), 0, stream, call);
  } else if (extras == kExtras) {
    HPO_LAUNCH((sweep<LEVEL, REFERENCE, kExtras>), dim3(blocks), dim3(kThreads), 0, stream, call);
  } else {
    HPO_LAUNCH((sweep<LEVEL, REFERENCE, kNoExtras>), dim3(blocks), dim3(kThreads), 0, stream, call);
  }
}

template <int EXTRAS>
void launch_sums(const Call& call, cudaStream_t stream) {
  const dim3 blocks(call.first_blocks), block(kThreads);
  if (call.gate.coefficient_varies) {
    HPO_LAUNCH((sum_tiles<1, EXTRAS>), blocks, block, 0, stream, call);
  } else {
    HPO_LAUNCH((sum_tiles<4, EXTRAS>), blocks, block, 0, stream, call);
  }
}

}  // namespace
}  // namespace hpo

extern "C" int64_t hpo_policy_loss_workspace(int64_t tokens, int64_t rows) {
  return hpo::Workspace().place(nullptr, tokens, rows);
}

extern "C" int hpo_policy_loss(const hpo::PolicyLossArgs* args, const hpo::GateStructure* structure,
                               const hpo::GateNumbers* numbers, int64_t context) {
  using namespace hpo;
  const cudaStream_t stream = reinterpret_cast<cudaStream_t>(context);
  Call call = {Gate(*args, *structure, *numbers), {}, 0};
  call.workspace.place(args->workspace, args->tokens, args->rows);
  const int sweep_blocks = blocks_for(kWarp * units_of(args->tokens, args->rows));
  call.first_blocks = structure->has_level ? sweep_blocks : blocks_for(args->rows);
  if (!structure->has_level) {
    HPO_LAUNCH(prepare, dim3(call.first_blocks), dim3(kThreads), 0, stream, call);
  } else {
    call.gate.extras() == kCorrected ? launch_sums<kCorrected>(call, stream) : launch_sums<kExtras>(call, stream);
  }
  if (structure->has_level) {
    args->ref_logp ? launch_sweep<true, true>(call, sweep_blocks, stream)
                   : launch_sweep<true, false>(call, sweep_blocks, stream);
  } else {
    args->ref_logp ? launch_sweep<false, true>(call, sweep_blocks, stream)
                   : launch_sweep<false, false>(call, sweep_blocks, stream);
  }
  return int(cudaGetLastError());
}
