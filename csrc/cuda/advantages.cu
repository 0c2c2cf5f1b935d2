// group_normalise. Up to kFewUnits in one launch: every block looks through all ids for the groups of its own units. Beyond,
// in five: a hash table of groups, and sums as integers, which have no order. The definition is
// hpo_core/reference/advantages.py.
#include "hpo/advantages.h"

#include "hpo/entropy.h"
#include "warp.cuh"

namespace hpo {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int64_t kFewUnits = 4096;

__device__ __forceinline__ bool is_grouped(const GroupNormaliseArgs& args, int64_t unit) {
  return (!args.ids || args.ids[unit] >= 0) && is_finite(args.values[unit]);
}

__device__ __forceinline__ bool is_member(const GroupNormaliseArgs& args, int64_t unit) {
  return is_grouped(args, unit) && (!args.mask || args.mask[unit]);
}

__device__ __forceinline__ bool receives(const GroupNormaliseArgs& args, int64_t unit) {
  return args.apply_mask ? is_grouped(args, unit) && args.apply_mask[unit] : is_member(args, unit);
}

__device__ __forceinline__ float advantage_of(const GroupNormaliseArgs& args, int64_t unit, const GroupMap& map) {
  return receives(args, unit) ? advantage(map, args.values[unit], is_member(args, unit)) : 0.0f;
}

// ------------------------------------------------------------------------------------------------------------ few units

constexpr int kBlockUnits = kWarp;

// Sums over the members with this id, or over all members, by the whole block; the result in thread 0.
__device__ __forceinline__ GroupSums sum_members(const GroupNormaliseArgs& args, bool everybody, int64_t id) {
  HPO_SHARED(int, first, );
  HPO_SHARED(GroupSums, of_warp, [kWarps]);
  const int units = int(args.units);
  const auto counts = [&](int unit) { return is_member(args, unit) && (everybody || !args.ids || args.ids[unit] == id); };

  if (threadIdx.x == 0) first = units;
  __syncthreads();
  for (int unit = int(threadIdx.x); unit < units; unit += kThreads) {
    if (!counts(unit)) continue;
    atomicMin(&first, unit);
    break;
  }
  __syncthreads();
  const int pivot_unit = first;
  __syncthreads();  // before the next call writes `first`
  if (pivot_unit == units) return {};

  GroupSums sums = {double(args.values[pivot_unit]), 0, 0.0, 0.0};
  for (int unit = pivot_unit / kThreads * kThreads + int(threadIdx.x); unit < units; unit += kThreads) {
    const double offset = counts(unit) ? double(args.values[unit]) - sums.pivot : 0.0;
    sums.count += counts(unit);
    sums.sum += offset;
    sums.squares += offset * offset;
  }
  sums.count = warp_sum(sums.count);
  sums.sum = warp_sum(sums.sum);
  sums.squares = warp_sum(sums.squares);
  if (lane() == 0) of_warp[warp_in_block()] = sums;
  __syncthreads();
  GroupSums total = of_warp[0];
  for (int warp = 1; warp < kWarps; ++warp) {
    const GroupSums more = of_warp[warp];
    total.count += more.count;
    total.sum += more.sum;
    total.squares += more.squares;
  }
  __syncthreads();
  return total;
}

__global__ void __launch_bounds__(kThreads) normalise_few(const GroupNormaliseArgs args) {
  HPO_SHARED(int64_t, ids, [kBlockUnits]);
  HPO_SHARED(int, leader, [kBlockUnits]);  // the first unit of the block with the same id; -1: the unit receives nothing
  HPO_SHARED(GroupMap, maps, [kBlockUnits]);
  const int base = int(blockIdx.x) * kBlockUnits;
  if (threadIdx.x < kBlockUnits) {
    const int unit = base + lane();
    const bool wanted = unit < int(args.units) && receives(args, unit);
    const int64_t id = wanted && args.ids ? args.ids[unit] : 0;
    int same = wanted ? lane() : -1;
    for (int other = kBlockUnits - 1; other >= 0; --other) {
      const bool other_wanted = __shfl_sync(kFullWarp, int(wanted), other);
      const bool equal = __shfl_sync(kFullWarp, id, other) == id;
      if (wanted && other_wanted && equal && other < same) same = other;
    }
    ids[lane()] = id;
    leader[lane()] = same;
  }
  double batch_deviation = 0.0;
  if (args.scale == Scale::batch) batch_deviation = deviation(sum_members(args, true, 0), args.ddof);
  __syncthreads();
  for (int i = 0; i < kBlockUnits; ++i) {
    if (leader[i] != i) continue;
    const GroupSums sums = sum_members(args, false, ids[i]);
    if (threadIdx.x == 0) maps[i] = group_map(sums, batch_deviation, args);
  }
  __syncthreads();
  if (threadIdx.x < kBlockUnits && base + lane() < int(args.units)) {
    const int same = leader[lane()];
    args.advantages[base + lane()] = same < 0 ? 0.0f : advantage_of(args, base + lane(), maps[same]);
  }
}

// ----------------------------------------------------------------------------------------------------------- many units
//
// A float32 offset from the pivot is written as a fixed-point number whose unit depends on the largest offset of its group,
// so that the sum of all fits into 62 bits: for 10^5 members that keeps 2^-44 of the largest.

constexpr int64_t kNoGroup = -1;
constexpr int kSumBits = 61;

struct Table {
  int64_t capacity;  // a power of two; entry [capacity] is the whole batch
  int64_t* keys;     // [capacity], the id that owns the entry
  int64_t* first;    // [capacity + 1], the first member
  int64_t* count;    // members
  int* exponent;     // biased exponent of the largest offset from the first member
  int64_t* sum;      // of the offsets, and of their squares, in units of the fixed point
  int64_t* squares;
  int64_t* entry;    // [units], the entry of each unit's group

  int64_t place(void* base, int64_t units) {
    capacity = 64;
    while (capacity < 2 * units) capacity *= 2;
    char* at = static_cast<char*>(base);
    const auto take = [&](auto*& array, int64_t entries) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(at);
      at += (entries * int64_t(sizeof *array) + 15) / 16 * 16;
    };
    take(keys, capacity), take(first, capacity + 1), take(count, capacity + 1), take(exponent, capacity + 1);
    take(sum, capacity + 1), take(squares, capacity + 1), take(entry, units);
    return at - static_cast<char*>(base);
  }
};

__device__ __forceinline__ int64_t thread_in_grid() { return int64_t(blockIdx.x) * kThreads + threadIdx.x; }
__device__ __forceinline__ int64_t threads_in_grid() { return int64_t(gridDim.x) * kThreads; }

__global__ void __launch_bounds__(kThreads) clear_table(const Table table) {
  for (int64_t entry = thread_in_grid(); entry <= table.capacity; entry += threads_in_grid()) {
    if (entry < table.capacity) table.keys[entry] = kNoGroup;
    table.first[entry] = INT64_MAX;
    table.count[entry] = table.sum[entry] = table.squares[entry] = 0;
    table.exponent[entry] = 0;
  }
}

// The entry of an id, made if there is none. The table is never full: it has twice as many entries as there are units.
__device__ __forceinline__ int64_t find_entry(const Table& table, int64_t id) {
  const uint64_t mixed = uint64_t(id) * 0x9E3779B97F4A7C15u;
  for (int64_t entry = int64_t((mixed ^ mixed >> 32) & uint64_t(table.capacity - 1));;
       entry = (entry + 1) & (table.capacity - 1)) {
    auto* const key = reinterpret_cast<unsigned long long*>(table.keys + entry);
    const int64_t owner =
        int64_t(atomicCAS(key, static_cast<unsigned long long>(kNoGroup), static_cast<unsigned long long>(id)));
    if (owner == kNoGroup || owner == id) return entry;
  }
}

// Calls `visit(entry, unit, ...)` for the group of every member; for the whole batch too where its statistics are wanted.
template <class Visit>
__device__ __forceinline__ void for_each_membership(const GroupNormaliseArgs& args, const Table& table, Visit visit) {
  for (int64_t unit = thread_in_grid(); unit < args.units; unit += threads_in_grid()) {
    if (!is_member(args, unit)) continue;
    visit(table.entry[unit], unit);
    if (args.scale == Scale::batch && args.ids) visit(table.capacity, unit);
  }
}

__global__ void __launch_bounds__(kThreads) number_groups(const GroupNormaliseArgs args, const Table table) {
  for (int64_t unit = thread_in_grid(); unit < args.units; unit += threads_in_grid()) {
    if (is_grouped(args, unit)) table.entry[unit] = args.ids ? find_entry(table, args.ids[unit]) : table.capacity;
  }
  for_each_membership(args, table, [&](int64_t entry, int64_t unit) {
    atomicMin(table.first + entry, unit);
    atomicAdd(table.count + entry, int64_t(1));
  });
}

__device__ __forceinline__ double pivot_of(const GroupNormaliseArgs& args, const Table& table, int64_t entry) {
  return double(args.values[table.first[entry]]);
}

__global__ void __launch_bounds__(kThreads) find_spread(const GroupNormaliseArgs args, const Table table) {
  for_each_membership(args, table, [&](int64_t entry, int64_t unit) {
    const double offset = fabs(double(args.values[unit]) - pivot_of(args, table, entry));
    atomicMax(table.exponent + entry, int(__double_as_longlong(offset) >> 52));
  });
}

// What an offset, and a square, is multiplied by: 2 to this power.
struct FixedPoint {
  int offset, square;
};

__device__ __forceinline__ FixedPoint fixed_point(const Table& table, int64_t entry) {
  const int bits = kSumBits - (64 - __clzll(table.count[entry])), bound = table.exponent[entry] - 1022;
  return {bits - bound, bits - 2 * bound};
}

__global__ void __launch_bounds__(kThreads) sum_offsets(const GroupNormaliseArgs args, const Table table) {
  for_each_membership(args, table, [&](int64_t entry, int64_t unit) {
    const double offset = double(args.values[unit]) - pivot_of(args, table, entry);
    const FixedPoint power = fixed_point(table, entry);
    atomicAdd(table.sum + entry, int64_t(rint(ldexp(offset, power.offset))));
    atomicAdd(table.squares + entry, int64_t(rint(ldexp(offset * offset, power.square))));
  });
}

__device__ __forceinline__ GroupSums sums_of(const GroupNormaliseArgs& args, const Table& table, int64_t entry) {
  if (table.count[entry] == 0) return {};
  const FixedPoint power = fixed_point(table, entry);
  return {pivot_of(args, table, entry), table.count[entry], ldexp(double(table.sum[entry]), -power.offset),
          ldexp(double(table.squares[entry]), -power.square)};
}

__global__ void __launch_bounds__(kThreads) normalise_many(const GroupNormaliseArgs args, const Table table) {
  const double batch_deviation = args.scale == Scale::batch ? deviation(sums_of(args, table, table.capacity), args.ddof) : 0.0;
  for (int64_t unit = thread_in_grid(); unit < args.units; unit += threads_in_grid()) {
    GroupMap map = {};
    if (receives(args, unit)) map = group_map(sums_of(args, table, table.entry[unit]), batch_deviation, args);
    args.advantages[unit] = advantage_of(args, unit, map);
  }
}

}  // namespace
}  // namespace hpo

extern "C" int64_t hpo_group_normalise_workspace(int64_t units) {
  return units <= hpo::kFewUnits ? 0 : hpo::Table().place(nullptr, units);
}

extern "C" int hpo_group_normalise(const hpo::GroupNormaliseArgs* args, int64_t context) {
  using namespace hpo;
  if (args->units == 0) return 0;
  const cudaStream_t stream = reinterpret_cast<cudaStream_t>(context);
  const dim3 block(kThreads);
  if (args->units <= kFewUnits) {
    HPO_LAUNCH(normalise_few, dim3(unsigned((args->units + kBlockUnits - 1) / kBlockUnits)), block, 0, stream, *args);
    return int(cudaGetLastError());
  }
  Table table;
  table.place(args->workspace, args->units);
  const dim3 grid(unsigned(std::min((args->units + kThreads - 1) / kThreads, int64_t(2048))));
  HPO_LAUNCH(clear_table, grid, block, 0, stream, table);
  HPO_LAUNCH(number_groups, grid, block, 0, stream, *args, table);
  HPO_LAUNCH(find_spread, grid, block, 0, stream, *args, table);
  HPO_LAUNCH(sum_offsets, grid, block, 0, stream, *args, table);
  HPO_LAUNCH(normalise_many, grid, block, 0, stream, *args, table);
  return int(cudaGetLastError());
}
