// Groups of units with the same id, and sums over their members. With few units every block reads all units for the groups of
// its own units. With many units a table of groups is made, in parts with grid barriers between them, and sums are integers,
// so that they do not depend on the order.
#pragma once
#include "grid.cuh"
#include "hpo/advantages.h"
#include "hpo/entropy.h"

namespace hpo {

constexpr int64_t kFewUnits = 4096;

// The members of the groups of a term.
struct Members {
  int64_t units;
  const float* values;
  const int64_t* ids;
  const float* weights;
  const uint8_t* mask;

  __device__ __forceinline__ bool in_group(int64_t unit) const { return !ids || ids[unit] >= 0; }

  // Whether a unit in a group is a member.
  __device__ __forceinline__ bool enters(int64_t unit) const {
    return is_finite(values[unit]) && (!mask || mask[unit]) && (!weights || counts(weights[unit]));
  }

  __device__ __forceinline__ bool has(int64_t unit) const { return in_group(unit) && enters(unit); }

  __device__ __forceinline__ double weight(int64_t unit) const { return weights ? double(weights[unit]) : 1.0; }
};

// ------------------------------------------------------------------------------------------------------------ few units

constexpr int kBlockUnits = kWarp;  // one per thread of the first warp
constexpr int64_t kAllMembers = -1;  // the id of all groups together

__device__ __forceinline__ bool belongs(const Members& members, int unit, int64_t id) {
  const bool in_group = id == kAllMembers ? members.in_group(unit) : !members.ids || members.ids[unit] == id;
  return in_group && members.enters(unit);  // for most units only the id is read
}

// The first member of a group; `units` without members.
__device__ __forceinline__ int first_member(const Members& members, int64_t id) {
  HPO_SHARED(int, first, );
  const int units = int(members.units);
  if (threadIdx.x == 0) first = units;
  __syncthreads();
  for (int unit = int(threadIdx.x); unit < units; unit += kThreads) {
    if (!belongs(members, unit, id)) continue;
    atomicMin(&first, unit);
    break;
  }
  __syncthreads();
  const int result = first;
  __syncthreads();  // before the next call writes `first`
  return result;
}

// The whole block calls this and the functions below.
__device__ __forceinline__ GroupSums sum_members(const Members& members, int64_t id) {
  const int first = first_member(members, id);
  if (first == int(members.units)) return {};
  const double pivot = double(members.values[first]);
  double sums[4] = {};
  for (int unit = first / kThreads * kThreads + int(threadIdx.x); unit < int(members.units); unit += kThreads) {
    if (!belongs(members, unit, id)) continue;
    const double weight = members.weight(unit), offset = double(members.values[unit]) - pivot;
    sums[0] += 1.0;
    sums[1] += weight;
    sums[2] += weight * offset;
    sums[3] += weight * offset * offset;
  }
  block_sums(sums);
  return {pivot, int64_t(sums[0]), sums[1], sums[2], sums[3]};
}

// The sum of w |x - mean| over the members of a group.
__device__ __forceinline__ double sum_absolute(const Members& members, int64_t id, const GroupSums& sums) {
  double absolute[1] = {};
  for (int unit = int(threadIdx.x); unit < int(members.units); unit += kThreads) {
    if (!belongs(members, unit, id)) continue;
    absolute[0] += members.weight(unit) * fabs((double(members.values[unit]) - sums.pivot) - sums.center());
  }
  block_sums(absolute);
  return absolute[0];
}

struct Extremes {
  float least, greatest;
};

// The extremes of a group with members.
__device__ __forceinline__ Extremes find_extremes(const Members& members, int64_t id) {
  HPO_SHARED(uint32_t, least, );
  HPO_SHARED(uint32_t, greatest, );
  if (threadIdx.x == 0) least = UINT32_MAX, greatest = 0;
  __syncthreads();
  for (int unit = int(threadIdx.x); unit < int(members.units); unit += kThreads) {
    if (!belongs(members, unit, id)) continue;
    const uint32_t key = order_key(members.values[unit]);
    if (key < least) atomicMin(&least, key);
    if (key > greatest) atomicMax(&greatest, key);
  }
  __syncthreads();
  const Extremes result = {from_order_key(least), from_order_key(greatest)};
  __syncthreads();  // before the next call writes them
  return result;
}

// Calls `visit(place, id)`, between barriers, for every group of a wanted unit of the first warp. Returns the place of the
// group of the thread's own unit; -1 if it is not wanted.
template <class Visit>
__device__ __forceinline__ int for_each_group(const Members& members, int unit, bool wanted, Visit visit) {
  HPO_SHARED(int64_t, ids, [kBlockUnits]);
  HPO_SHARED(int, places, [kBlockUnits]);
  int own = -1;
  if (warp_in_block() == 0) {
    const int64_t id = wanted && members.ids ? members.ids[unit] : 0;
    own = wanted ? lane() : -1;
    for (int other = kBlockUnits - 1; other >= 0; --other) {
      const bool other_wanted = __shfl_sync(kFullWarp, int(wanted), other);
      const bool equal = __shfl_sync(kFullWarp, id, other) == id;
      if (wanted && other_wanted && equal && other < own) own = other;
    }
    ids[lane()] = id;
    places[lane()] = own;
  }
  __syncthreads();
  for (int place = 0; place < kBlockUnits; ++place) {
    if (places[place] == place) visit(place, ids[place]);
  }
  __syncthreads();
  return own;
}

// ----------------------------------------------------------------------------------------------------------- many units
//
// The terms of a sum are fixed-point numbers whose unit depends on the largest term, so that the sum fits into 62 bits: with
// 10^5 members the unit is 2^-44 of the largest term.

constexpr int kSumBits = 61;

// The exponent bits of a positive number, which is below 2^(exponent - 1022).
__device__ __forceinline__ int exponent_of(double x) { return int(to_bits(x) >> 52); }

// x times 2 to this power, in two steps: the exponent of 0 leads to 2^1083, which no double holds.
__device__ __forceinline__ double scaled(double x, int power) {
  const int first = power / 2, second = power - first;
  return x * from_bits(int64_t(first + 1023) << 52) * from_bits(int64_t(second + 1023) << 52);
}

__device__ __forceinline__ int64_t fixed(double x, int power) { return int64_t(rint(scaled(x, power))); }

// All 0 at first.
struct Group {
  int64_t count;  // members
  int64_t weight, sum, squares, absolute;  // as in GroupSums, and the sum of w |x - mean|, in fixed point
  int weight_exponent, sum_exponent, squares_exponent;  // of the largest terms
  uint32_t not_least, greatest;  // order keys of the extremes; the least is complemented, so that atomicMax updates both

  // The terms of a sum are multiplied by 2 to this power.
  __device__ __forceinline__ int power(int exponent) const { return kSumBits - (64 - __clzll(count)) - (exponent - 1022); }

  __device__ __forceinline__ GroupSums sums(double pivot) const {
    return {pivot, count, scaled(double(weight), -power(weight_exponent)), scaled(double(sum), -power(sum_exponent)),
            scaled(double(squares), -power(squares_exponent))};
  }

  __device__ __forceinline__ Extremes extremes() const { return {from_order_key(~not_least), from_order_key(greatest)}; }

  // w |x - mean| is at most w |x - pivot| and the largest w times |mean - pivot|.
  __device__ __forceinline__ int absolute_power(const GroupSums& sums) const {
    return power(max(sum_exponent, weight_exponent + exponent_of(fabs(sums.center())) - 1022) + 1);
  }

  __device__ __forceinline__ double absolute_sum(const GroupSums& sums) const {
    return scaled(double(absolute), -absolute_power(sums));
  }
};

struct Entry {
  unsigned long long key;  // 1 + the id of the entry; 0: a free entry
  int64_t from_end;  // units - the first member; 0: no member
};

struct Table {
  int64_t units, capacity;  // a power of two
  Entry* entries;  // [capacity + 1], by hash; the last one is for all members as one group
  int64_t* leaders;  // [units], the entry of each unit's group, then the first member of the group; -1: none
  Group* groups;  // [units + 1], by first member; the last one is for all members as one group

  void take(Placement& placement, int64_t of_units) {
    units = of_units, capacity = 64;
    while (capacity < 2 * units) capacity *= 2;
    placement.take(entries, capacity + 1);
    placement.take(leaders, units);
    placement.take(groups, units + 1);
  }

  __device__ __forceinline__ void clear_entries() const { clear(entries, capacity + 1); }

  __device__ __forceinline__ int64_t first_member(int64_t entry) const {
    const int64_t from_end = entries[entry].from_end;
    return from_end ? units - from_end : -1;
  }
};

// A thread gets the same units in every part of a launch. Warps stay together, so some lanes get units beyond `units`.
template <class Visit>
__device__ __forceinline__ void for_each_unit(int64_t units, Visit visit) {
  const int64_t begin = int64_t(blockIdx.x) * kThreads + threadIdx.x - lane();
#pragma unroll 1
  for (int64_t base = begin; base < units; base += int64_t(gridDim.x) * kThreads) visit(base + lane());
}

// The entry of an id, made if there is none. The table is never full: it has twice as many entries as there are units.
__device__ __forceinline__ int64_t find_entry(const Table& table, int64_t id) {
  const uint64_t mixed = uint64_t(id) * 0x9E3779B97F4A7C15u;
  const unsigned long long key = uint64_t(id) + 1;
  for (int64_t entry = int64_t((mixed ^ mixed >> 32) & uint64_t(table.capacity - 1));;
       entry = (entry + 1) & (table.capacity - 1)) {
    unsigned long long* const owned = &table.entries[entry].key;
    if (load_relaxed(owned) == key) return entry;  // a key never changes, so few threads need the atomic
    const unsigned long long owner = atomicCAS(owned, 0ull, key);
    if (owner == 0 || owner == key) return entry;
  }
}

// Warp-aggregated atomics: neighbours are mostly of one group, and if all lanes target one record, they reduce first and one
// lane issues the atomic. A lane with a null record passes 0.
template <class Record>
class WarpAtomic {
 public:
  __device__ __forceinline__ explicit WarpAtomic(Record* to) : to_(to) {
    const unsigned giving = __ballot_sync(kFullWarp, to != nullptr);
    const int first = max(__ffs(int(giving)) - 1, 0);
    const int64_t common = __shfl_sync(kFullWarp, int64_t(to), first);
    alike_ = __all_sync(kFullWarp, !to || int64_t(to) == common);
    gives_ = to && (!alike_ || lane() == first);
  }

  __device__ __forceinline__ void add(int64_t Record::* field, int64_t value) const {
    if (alike_) value = warp_sum(value);
    if (gives_ && value != 0) atomicAdd(&(to_->*field), value);
  }

  template <class T>
  __device__ __forceinline__ void raise(T Record::* field, T value) const {
    for (int step = kWarp / 2; alike_ && step > 0; step /= 2) value = max(value, __shfl_xor_sync(kFullWarp, value, step));
    if (gives_) hpo::raise(&(to_->*field), value);
  }

 private:
  Record* to_;
  bool alike_, gives_;
};

// Makes the entries of all groups, and clears the groups.
__device__ __forceinline__ void number_groups(const Table& table, const Members& members, bool all_members) {
  clear(table.groups, table.units + 1);
  for_each_unit(table.units, [&](int64_t unit) {
    int64_t entry = -1;
    if (unit < table.units) {
      if (members.in_group(unit)) entry = members.ids ? find_entry(table, members.ids[unit]) : table.capacity;
      table.leaders[unit] = entry;
    }
    const bool member = entry >= 0 && members.has(unit);
    const int64_t from_end = member ? table.units - unit : 0;
    WarpAtomic<Entry>(member ? table.entries + entry : nullptr).raise(&Entry::from_end, from_end);
    if (all_members) WarpAtomic<Entry>(member ? table.entries + table.capacity : nullptr).raise(&Entry::from_end, from_end);
  });
}

// Calls `visit(group, atomic, unit, weight, offset)`; units that are no members get null and 0. With `all_members` it does so
// for all members as one group, too.
template <class Visit>
__device__ __forceinline__ void for_each_membership(const Table& table, const Members& members, bool all_members, Visit visit) {
  for_each_unit(table.units, [&](int64_t unit) {
    const int64_t leader = unit < table.units && members.has(unit) ? table.leaders[unit] : -1;
    const bool member = leader >= 0;  // no leader: a concurrent write made it a member after number_groups
    const double weight = member ? members.weight(unit) : 0.0;
    const auto visit_group = [&](int64_t at, int64_t pivot) {
      const double offset = member ? double(members.values[unit]) - double(members.values[pivot]) : 0.0;
      Group* const group = member ? table.groups + at : nullptr;
      visit(group, WarpAtomic<Group>(group), unit, weight, offset);
    };
    visit_group(leader, leader);
    if (all_members) visit_group(table.units, table.first_member(table.capacity));
  });
}

__device__ __forceinline__ void find_spread(const Table& table, const Members& members, bool all_members, bool extremes) {
  for_each_unit(table.units, [&](int64_t unit) {
    if (unit < table.units && table.leaders[unit] >= 0) table.leaders[unit] = table.first_member(table.leaders[unit]);
  });
  const auto give = [&](const Group* group, const WarpAtomic<Group>& atomic, int64_t unit, double weight, double offset) {
    atomic.add(&Group::count, group != nullptr);
    atomic.raise(&Group::weight_exponent, exponent_of(weight));
    atomic.raise(&Group::sum_exponent, exponent_of(weight * fabs(offset)));
    atomic.raise(&Group::squares_exponent, exponent_of(weight * offset * offset));
    if (!extremes) return;
    const uint32_t key = group ? order_key(members.values[unit]) : 0;
    atomic.raise(&Group::greatest, key);
    atomic.raise(&Group::not_least, group ? ~key : 0);
  };
  for_each_membership(table, members, all_members, give);
}

__device__ __forceinline__ void sum_offsets(const Table& table, const Members& members, bool all_members) {
  const auto give = [&](const Group* group, const WarpAtomic<Group>& atomic, int64_t, double weight, double offset) {
    int64_t of_weight = 0, of_sum = 0, of_squares = 0;
    if (group) {
      of_weight = fixed(weight, group->power(group->weight_exponent));
      of_sum = fixed(weight * offset, group->power(group->sum_exponent));
      of_squares = fixed(weight * offset * offset, group->power(group->squares_exponent));
    }
    atomic.add(&Group::weight, of_weight);
    atomic.add(&Group::sum, of_sum);
    atomic.add(&Group::squares, of_squares);
  };
  for_each_membership(table, members, all_members, give);
}

// The sums of all groups and, with `all_members`, of all members as one group. Entries must be cleared before. The call has
// three grid barriers; no thread reads entries after the last.
__device__ __forceinline__ void sum_groups(const Table& table, const Members& members, bool all_members, bool extremes) {
  number_groups(table, members, all_members);
  sync_grid();
  find_spread(table, members, all_members, extremes);
  sync_grid();
  sum_offsets(table, members, all_members);
  sync_grid();
}

__device__ __forceinline__ void sum_absolutes(const Table& table, const Members& members) {
  const auto give = [&](const Group* group, const WarpAtomic<Group>& atomic, int64_t, double weight, double offset) {
    int64_t of_absolute = 0;
    if (group) {
      const GroupSums sums = group->sums(0.0);
      of_absolute = fixed(weight * fabs(offset - sums.center()), group->absolute_power(sums));
    }
    atomic.add(&Group::absolute, of_absolute);
  };
  for_each_membership(table, members, false, give);
}

}  // namespace hpo
