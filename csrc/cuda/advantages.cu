// group_normalise and group_statistics, each in one launch. Up to kFewUnits units need no workspace; more units go through
// one table of groups, term by term, with grid barriers between the parts. The definitions are
// hpo_core/reference/advantages.py and segments.py.
#include "hpo/advantages.h"

#include "groups.cuh"

namespace hpo {
namespace {

__device__ __forceinline__ Members members_of(const GroupNormaliseArgs& args, const GroupTerm& term) {
  return {args.units, term.values, term.ids, term.weights, args.mask};
}

__device__ __forceinline__ bool receives(const GroupNormaliseArgs& args, const Members& members, int64_t unit) {
  const uint8_t* const mask = args.apply_mask ? args.apply_mask : args.mask;
  return members.in_group(unit) && is_finite(members.values[unit]) && (!mask || mask[unit]);
}

__device__ __forceinline__ void add_term(Shares& shares, const GroupMap& map, const GroupTerm& term, Share share,
                                         const Members& members, int64_t unit) {
  const double own = members.has(unit) ? members.weight(unit) : 0.0;
  shares.add(map, term, share, amount(map, members.values[unit], own));
}

struct Statistics {
  double numbers[6];
};

__device__ __forceinline__ Statistics statistics_of(const GroupSums& sums, const Extremes& extremes) {
  Statistics statistics = {};
  put_statistics(sums, extremes.least, extremes.greatest, statistics.numbers);
  return statistics;
}

__device__ __forceinline__ void write_statistics(const GroupStatisticsArgs& args, int64_t unit, const Statistics& statistics) {
#pragma unroll
  for (int i = 0; i < 6; ++i) args.statistics[i * args.units + unit] = statistics.numbers[i];
}

// ------------------------------------------------------------------------------------------------------------ few units

// A large GPU puts one or two of the at most 128 blocks on each multiprocessor, so registers up to those of two cost nothing.
__global__ void __launch_bounds__(kThreads, 2) normalise_few(const GroupNormaliseArgs args) {
  HPO_SHARED(GroupMap, maps, [kBlockUnits]);
  const int unit = int(blockIdx.x) * kBlockUnits + int(threadIdx.x);
  const bool owns = threadIdx.x < kBlockUnits && unit < int(args.units);
  Shares shares = {};
#pragma unroll 1
  for (int index = 0; index < args.count; ++index) {
    const GroupTerm& term = args.terms[index];
    const Members members = members_of(args, term);
    const double batch_deviation = term.scale == Scale::batch ? deviation(sum_members(members, kAllMembers), term.ddof) : 0.0;
    const bool wanted = owns && receives(args, members, unit);
    const int own = for_each_group(members, unit, wanted, [&](int place, int64_t id) {
      const GroupSums sums = sum_members(members, id);
      const double absolute = term.scale == Scale::absolute ? sum_absolute(members, id, sums) : 0.0;
      if (threadIdx.x == 0) maps[place] = group_map(sums, absolute, batch_deviation, term, args.share);
    });
    if (own >= 0) add_term(shares, maps[own], term, args.share, members, unit);
  }
  if (owns) args.advantages[unit] = shares.advantage(args);
}

__global__ void __launch_bounds__(kThreads, 2) statistics_few(const GroupStatisticsArgs args) {
  HPO_SHARED(Statistics, statistics, [kBlockUnits]);
  const Members members = {args.units, args.values, args.ids, args.weights, args.mask};
  const int unit = int(blockIdx.x) * kBlockUnits + int(threadIdx.x);
  const bool owns = threadIdx.x < kBlockUnits && unit < int(args.units);
  const int own = for_each_group(members, unit, owns && members.in_group(unit), [&](int place, int64_t id) {
    const GroupSums sums = sum_members(members, id);
    const Extremes extremes = find_extremes(members, id);
    if (threadIdx.x == 0) statistics[place] = statistics_of(sums, extremes);
  });
  if (owns) write_statistics(args, unit, own >= 0 ? statistics[own] : Statistics{});
}

// ----------------------------------------------------------------------------------------------------------- many units

struct Workspace {
  Table table;
  Shares* shares;  // [units], sums over the terms so far; empty with one term
  int64_t bytes;

  // terms: the number of terms of group_normalise; 0 for group_statistics.
  Workspace(void* base, int64_t units, int32_t terms) {
    Placement placement(base);
    table.take(placement, units);
    placement.take(shares, terms > 1 ? units : 0);
    bytes = placement.bytes();
  }
};

__global__ void __launch_bounds__(kThreads, 2) normalise_many(const GroupNormaliseArgs args, const Workspace workspace) {
  const Table& table = workspace.table;
  table.clear_entries();
  sync_grid();
#pragma unroll 1
  for (int index = 0; index < args.count; ++index) {
    const GroupTerm& term = args.terms[index];
    const Members members = members_of(args, term);
    const bool scales_by_batch = term.scale == Scale::batch, scales_by_absolute = term.scale == Scale::absolute;
    const bool begins = index == 0, ends = index + 1 == args.count;
    sum_groups(table, members, scales_by_batch, false);
    if (scales_by_absolute) {
      sum_absolutes(table, members);
      sync_grid();
    }
    // A deviation needs no pivot.
    const double batch_deviation = scales_by_batch ? deviation(table.groups[table.units].sums(0.0), term.ddof) : 0.0;
    for_each_unit(args.units, [&](int64_t unit) {
      if (unit >= args.units) return;
      Shares shares = begins ? Shares{} : workspace.shares[unit];
      const int64_t leader = table.leaders[unit];
      if (leader >= 0 && receives(args, members, unit)) {
        const Group& group = table.groups[leader];
        const GroupSums sums = group.sums(double(term.values[leader]));
        const double absolute = scales_by_absolute ? group.absolute_sum(sums) : 0.0;
        const GroupMap map = group_map(sums, absolute, batch_deviation, term, args.share);
        add_term(shares, map, term, args.share, members, unit);
      }
      if (ends) args.advantages[unit] = shares.advantage(args);
      else workspace.shares[unit] = shares;
    });
    if (ends) return;
    table.clear_entries();
    sync_grid();
  }
}

__global__ void __launch_bounds__(kThreads) statistics_many(const GroupStatisticsArgs args, const Table table) {
  const Members members = {args.units, args.values, args.ids, args.weights, args.mask};
  table.clear_entries();
  sync_grid();
  sum_groups(table, members, false, true);
  for_each_unit(args.units, [&](int64_t unit) {
    if (unit >= args.units) return;
    const int64_t leader = table.leaders[unit];
    Statistics statistics = {};
    if (leader >= 0) {
      const Group& group = table.groups[leader];
      statistics = statistics_of(group.sums(double(args.values[leader])), group.extremes());
    }
    write_statistics(args, unit, statistics);
  });
}

int64_t workspace_bytes(int64_t units, int32_t terms) {
  return units <= kFewUnits ? 0 : Workspace(nullptr, units, terms).bytes;
}

dim3 few_blocks(int64_t units) { return dim3(unsigned((units + kBlockUnits - 1) / kBlockUnits)); }

}  // namespace
}  // namespace hpo

extern "C" int64_t hpo_group_normalise_workspace(int64_t units, int32_t terms) { return hpo::workspace_bytes(units, terms); }

extern "C" int hpo_group_normalise(const hpo::GroupNormaliseArgs* args, int64_t context) {
  using namespace hpo;
  if (args->units == 0) return 0;
  const cudaStream_t stream = reinterpret_cast<cudaStream_t>(context);
  const dim3 block(kThreads);
  if (args->units <= kFewUnits) {
    HPO_LAUNCH(normalise_few, few_blocks(args->units), block, 0, stream, *args);
  } else {
    const Workspace workspace(args->workspace, args->units, args->count);
    const dim3 grid(unsigned(blocks_together<normalise_many>(args->units)));
    HPO_LAUNCH_TOGETHER(normalise_many, grid, block, 0, stream, *args, workspace);
  }
  return int(cudaGetLastError());
}

extern "C" int64_t hpo_group_statistics_workspace(int64_t units) { return hpo::workspace_bytes(units, 0); }

extern "C" int hpo_group_statistics(const hpo::GroupStatisticsArgs* args, int64_t context) {
  using namespace hpo;
  if (args->units == 0) return 0;
  const cudaStream_t stream = reinterpret_cast<cudaStream_t>(context);
  const dim3 block(kThreads);
  if (args->units <= kFewUnits) {
    HPO_LAUNCH(statistics_few, few_blocks(args->units), block, 0, stream, *args);
  } else {
    const Workspace workspace(args->workspace, args->units, 0);
    const dim3 grid(unsigned(blocks_together<statistics_many>(args->units)));
    HPO_LAUNCH_TOGETHER(statistics_many, grid, block, 0, stream, *args, workspace.table);
  }
  return int(cudaGetLastError());
}
