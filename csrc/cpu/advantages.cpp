// group_normalise: per term the statistics of each group, then one affine map per unit; group_statistics returns the
// statistics. The definitions are hpo_core/reference/advantages.py and segments.py.
#include "hpo/advantages.h"

#include "hpo/entropy.h"
#include "kernels.h"
#include "parallel.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

constexpr int kLanes = 8;
constexpr int64_t kNoGroup = -1;

struct GroupTotals {
  GroupSums sums;
  double absolute;  // the sum of w |x - mean|, for Scale::absolute
};

// The map of a group overwrites its sums.
union Group {
  GroupTotals totals;
  GroupMap map;
};

int64_t dense_limit(int64_t units) { return 2 * units + 64; }

int hash_bits(int64_t units) {
  int bits = 6;
  while ((int64_t(1) << bits) < 2 * units) ++bits;
  return bits;
}

struct Extremes {
  float least = INFINITY, greatest = -INFINITY;

  void add(float x) {
    least = x < least ? x : least;
    greatest = x > greatest ? x : greatest;
  }
};

struct Workspace {
  Arena arena;
  Group* groups;  // [dense_limit(units)]
  int64_t* keys;  // [1 << hash_bits(units)], the id at a place of the hash table
  int64_t* group_of_key;  // [1 << hash_bits(units)], the number of the group of that id
  int64_t* numbers;  // [units], the number of each unit's group by the hash table
  int64_t* codes;  // [units], see encode
  Shares* shares;  // [units], sums over the terms so far; empty with one term
  Extremes* extremes;  // [dense_limit(units)], for statistics
  int64_t bytes;

  // terms: the number of terms of group_normalise; 0 for group_statistics.
  Workspace(void* base, int64_t units, int32_t terms) : arena(base) {
    groups = arena.take<Group>(dense_limit(units));
    keys = arena.take<int64_t>(int64_t(1) << hash_bits(units));
    group_of_key = arena.take<int64_t>(int64_t(1) << hash_bits(units));
    numbers = arena.take<int64_t>(units);
    codes = arena.take<int64_t>(units);
    shares = arena.take<Shares>(terms > 1 ? units : 0);
    extremes = arena.take<Extremes>(terms == 0 ? dense_limit(units) : 0);
    bytes = arena.bytes();
  }
};

// The group of each unit.
struct Numbering {
  const int64_t* numbers;  // [units], < 0: no group; null: every unit is in group 0
  int64_t smallest;  // subtracted from a number
  int64_t groups;
};

// Ids are data: ids chosen to collide would make every search as long as the table. The hash therefore depends on an address
// of this process; the result of a search does not.
uint64_t scattered(int64_t id) {
  static const char anchor = 0;
  uint64_t x = uint64_t(id) ^ (uint64_t(reinterpret_cast<uintptr_t>(&anchor)) * 0xD6E8FEB86659FD93u);
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93u;
  return (x ^ (x >> 32)) * 0x9E3779B97F4A7C15u;
}

// Numbers the groups in the order of their first unit; returns the number of groups.
int64_t number_by_hash(const int64_t* ids, int64_t count, const Workspace& space) {
  const int bits = hash_bits(count);
  const int64_t places = int64_t(1) << bits;
  int64_t *keys = space.keys, *group_of_key = space.group_of_key, *numbers = space.numbers;
  for (int64_t place = 0; place < places; ++place) keys[place] = kNoGroup;
  int64_t groups = 0;
  for (int64_t unit = 0; unit < count; ++unit) {
    const int64_t id = ids[unit];
    numbers[unit] = kNoGroup;
    if (id < 0) continue;
    uint64_t place = scattered(id) >> (64 - bits);
    while (keys[place] != id && keys[place] != kNoGroup) place = (place + 1) & uint64_t(places - 1);
    if (keys[place] == kNoGroup) {
      keys[place] = id;
      group_of_key[place] = groups++;
    }
    numbers[unit] = group_of_key[place];
  }
  return groups;
}

// Ids in a narrow range are numbers already; others need the hash table.
Numbering number_groups(const int64_t* ids, int64_t count, const Workspace& space) {
  if (!ids) return {nullptr, 0, 1};
  uint64_t smallest = UINT64_MAX;  // unsigned: ids < 0 are the largest
  int64_t largest = kNoGroup;
  for (int64_t unit = 0; unit < count; ++unit) {
    smallest = uint64_t(ids[unit]) < smallest ? uint64_t(ids[unit]) : smallest;
    largest = ids[unit] > largest ? ids[unit] : largest;
  }
  if (largest < 0) return {ids, 0, 0};
  if (largest - int64_t(smallest) < dense_limit(count)) return {ids, int64_t(smallest), largest - int64_t(smallest) + 1};
  return {space.numbers, 0, number_by_hash(ids, count, space)};
}

// One code per unit for the loops that cannot be vectorised: twice its group, plus 1 if it is not a member of the group, or
// kNoGroup. The codes are those of all members, or, with `receivers`, of all units that receive an advantage.
void encode(const GroupNormaliseArgs& args, const GroupTerm& term, const Numbering& numbering, bool receivers, int threads,
            int64_t* all_codes) {
  const uint8_t* mask = receivers && args.apply_mask ? args.apply_mask : args.mask;
  for_each_range(args.units, threads, [&](int64_t first, int64_t end) {
    const float* __restrict values = term.values;
    const float* __restrict weights = term.weights;
    const int64_t* __restrict numbers = numbering.numbers;
    int64_t* __restrict codes = all_codes;
    const int64_t smallest = numbering.smallest;
    // The numbers may be the caller's ids, which may have changed since the groups were counted.
    for (int64_t unit = first; unit < end; ++unit) {
      const int64_t number = numbers ? numbers[unit] : 0;
      const bool grouped = number >= smallest && number - smallest < numbering.groups;
      codes[unit] = grouped && is_finite(values[unit]) ? 2 * (number - smallest) : kNoGroup;
    }
    if (weights) {
      const int64_t otherwise = receivers ? 1 : kNoGroup;
      for (int64_t unit = first; unit < end; ++unit) codes[unit] |= counts(weights[unit]) ? 0 : otherwise;
    }
    if (receivers && args.apply_mask && args.mask) {
      for (int64_t unit = first; unit < end; ++unit) codes[unit] |= args.mask[unit] ? 0 : 1;  // kNoGroup stays
    }
    if (mask) {
      for (int64_t unit = first; unit < end; ++unit) codes[unit] = mask[unit] ? codes[unit] : kNoGroup;
    }
  });
}

// All members as one group, in lanes.
GroupSums sum_all_members(const GroupTerm& term, const int64_t* __restrict codes, int64_t count) {
  const float* __restrict values = term.values, * __restrict weights = term.weights;
  int64_t unit = 0;
  while (unit < count && codes[unit] < 0) ++unit;
  if (unit == count) return {};
  const double pivot = double(values[unit]);
  double weight[kLanes] = {}, sum[kLanes] = {}, squares[kLanes] = {};
  int64_t members[kLanes] = {};
  const auto add = [&](int64_t each, int lane) {
    const bool member = codes[each] >= 0;
    const double w = member ? (weights ? double(weights[each]) : 1.0) : 0.0;
    const double offset = member ? double(values[each]) - pivot : 0.0;
    weight[lane] += w;
    sum[lane] += w * offset;
    squares[lane] += w * offset * offset;
    members[lane] += member ? 1 : 0;
  };
  for (; unit + kLanes <= count; unit += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) add(unit + lane, lane);
  }
  for (int lane = 0; unit < count; ++unit, ++lane) add(unit, lane);
  GroupSums total = {pivot, 0, 0.0, 0.0, 0.0};
  for (int lane = 0; lane < kLanes; ++lane) {
    total.weight += weight[lane];
    total.sum += sum[lane];
    total.squares += squares[lane];
    total.count += members[lane];
  }
  return total;
}

// Sums in index order, whatever the number of threads. Units of one group mostly follow each other: their sums stay in
// registers.
template <bool kWeighted>
void sum_groups(const GroupTerm& term, const int64_t* __restrict codes, int64_t count, Group* __restrict groups) {
  const float* __restrict values = term.values, * __restrict weights = term.weights;
  int64_t current = kNoGroup;
  GroupSums sums = {};
  for (int64_t unit = 0; unit < count; ++unit) {
    if (codes[unit] < 0) continue;
    if (codes[unit] != current) {
      if (current >= 0) groups[current >> 1].totals.sums = sums;
      current = codes[unit];
      sums = groups[current >> 1].totals.sums;
    }
    sums.add(values[unit], kWeighted ? double(weights[unit]) : 1.0);
  }
  if (current >= 0) groups[current >> 1].totals.sums = sums;
}

void sum_groups(const GroupTerm& term, const int64_t* codes, int64_t count, Group* groups) {
  (term.weights ? sum_groups<true> : sum_groups<false>)(term, codes, count, groups);
}

void sum_absolute(const GroupTerm& term, const int64_t* codes, int64_t count, Group* groups) {
  for (int64_t unit = 0; unit < count; ++unit) {
    if (codes[unit] < 0) continue;
    GroupTotals& group = groups[codes[unit] >> 1].totals;
    const double offset = (double(term.values[unit]) - group.sums.pivot) - group.sums.center();
    group.absolute += (term.weights ? double(term.weights[unit]) : 1.0) * (offset < 0.0 ? -offset : offset);
  }
}

// Fills the workspace with the maps of a term's groups and the codes of its receivers.
void map_groups(const GroupNormaliseArgs& args, const GroupTerm& term, const Numbering& numbering, const Workspace& space,
                int threads) {
  Group* groups = space.groups;
  int64_t* codes = space.codes;
  encode(args, term, numbering, false, threads, codes);
  const bool batch_scale = term.scale == Scale::batch;
  const GroupSums all_members = batch_scale || !term.ids ? sum_all_members(term, codes, args.units) : GroupSums{};
  const double batch_deviation = batch_scale ? deviation(all_members, term.ddof) : 0.0;
  for (int64_t group = 0; group < numbering.groups; ++group) groups[group].totals = {};
  if (!term.ids) groups[0].totals.sums = all_members;
  else sum_groups(term, codes, args.units, groups);
  if (term.scale == Scale::absolute) sum_absolute(term, codes, args.units, groups);

  const GroupTerm rule = term;
  for_each_range(numbering.groups, threads, [&](int64_t first, int64_t end) {
    for (int64_t group = first; group < end; ++group) {
      const GroupTotals totals = groups[group].totals;
      groups[group].map = group_map(totals.sums, totals.absolute, batch_deviation, rule, args.share);
    }
  });
  if (args.apply_mask || term.weights) encode(args, term, numbering, true, threads, codes);
}

// The common case of one term without leave-one-out: the loop has no condition that the compiler could not vectorise.
void put_alone(const GroupNormaliseArgs& args, const GroupTerm& term, const Workspace& space, int64_t first, int64_t end) {
  const float* __restrict values = term.values;
  const int64_t* __restrict codes = space.codes;
  const Group* __restrict groups = space.groups;
  float* __restrict advantages = args.advantages;
  const double coefficient = term.coefficient;
  for (int64_t unit = first; unit < end; ++unit) {
    const int64_t code = codes[unit];
    const float advantage = float(coefficient * mapped(groups[(code < 0 ? 0 : code) >> 1].map, values[unit]));
    advantages[unit] = code < 0 ? 0.0f : advantage + 0.0f;  // + 0.0f: never -0, as in Shares
  }
}

}  // namespace

int64_t group_normalise_workspace(int64_t units, int32_t terms) { return Workspace(nullptr, units, terms).bytes; }

void group_normalise(const GroupNormaliseArgs& args, int threads) {
  const Workspace space(args.workspace, args.units, args.count);
  threads = worthwhile(threads, args.units);
  Numbering numbering = {};
  for (int index = 0; index < args.count; ++index) {
    const GroupTerm term = args.terms[index];
    if (index == 0 || term.ids != args.terms[index - 1].ids) numbering = number_groups(term.ids, args.units, space);
    map_groups(args, term, numbering, space, threads);
    const bool begins = index == 0, ends = index + 1 == args.count;
    const bool alone = begins && ends && args.share == Share::sum && term.center != Center::leave_one_out;
    for_each_range(args.units, threads, [&](int64_t first, int64_t end) {
      if (alone) return put_alone(args, term, space, first, end);
      const float* __restrict values = term.values, * __restrict weights = term.weights;
      const Group* __restrict groups = space.groups;
      float* __restrict advantages = args.advantages;
      for (int64_t unit = first; unit < end; ++unit) {
        const int64_t code = space.codes[unit];
        Shares shares = begins ? Shares{} : space.shares[unit];
        if (code >= 0) {
          const GroupMap& map = groups[code >> 1].map;
          const double own = code & 1 ? 0.0 : (weights ? double(weights[unit]) : 1.0);
          shares.add(map, term, args.share, amount(map, values[unit], own));
        }
        if (ends) advantages[unit] = shares.advantage(args);
        else space.shares[unit] = shares;
      }
    });
  }
}

int64_t group_statistics_workspace(int64_t units) { return Workspace(nullptr, units, 0).bytes; }

void group_statistics(const GroupStatisticsArgs& args, int threads) {
  const Workspace space(args.workspace, args.units, 0);
  threads = worthwhile(threads, args.units);
  GroupNormaliseArgs call = {};
  call.units = args.units, call.mask = args.mask;
  GroupTerm term = {};
  term.values = args.values, term.ids = args.ids, term.weights = args.weights;

  const Numbering numbering = number_groups(term.ids, args.units, space);
  encode(call, term, numbering, false, threads, space.codes);
  Extremes* extremes = space.extremes;
  for (int64_t group = 0; group < numbering.groups; ++group) space.groups[group].totals = {}, extremes[group] = {};
  if (!term.ids) space.groups[0].totals.sums = sum_all_members(term, space.codes, args.units);
  else sum_groups(term, space.codes, args.units, space.groups);
  for (int64_t unit = 0; unit < args.units; ++unit) {
    if (space.codes[unit] >= 0) extremes[space.codes[unit] >> 1].add(args.values[unit]);
  }
  for_each_range(args.units, threads, [&](int64_t first, int64_t end) {
    for (int64_t unit = first; unit < end; ++unit) {
      const int64_t number = numbering.numbers ? numbering.numbers[unit] : 0;
      double statistics[6] = {};
      if (number >= numbering.smallest && number - numbering.smallest < numbering.groups) {  // an id < 0 may be far below
        const int64_t group = number - numbering.smallest;
        put_statistics(space.groups[group].totals.sums, extremes[group].least, extremes[group].greatest, statistics);
      }
      for (int i = 0; i < 6; ++i) args.statistics[i * args.units + unit] = statistics[i];
    }
  });
}

}  // namespace hpo::HPO_ISA
