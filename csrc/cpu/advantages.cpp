// group_normalise: statistics per group, then one affine map per unit. The definition is hpo_core/reference/advantages.py.
#include "hpo/advantages.h"

#include "hpo/entropy.h"
#include "kernels.h"
#include "parallel.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

constexpr int kLanes = 8;
constexpr int64_t kNoGroup = -1;

// A group is first a sum, then a map, in the same place.
union Group {
  GroupSums sums;
  GroupMap map;
};

int64_t dense_limit(int64_t units) { return 2 * units + 64; }

int hash_bits(int64_t units) {
  int bits = 6;
  while ((int64_t(1) << bits) < 2 * units) ++bits;
  return bits;
}

struct Workspace {
  Arena arena;
  Group* groups;     // [dense_limit(units)]
  int64_t* keys;     // [1 << hash_bits(units)], the id that owns a place in the hash table
  int64_t* owned;    // [1 << hash_bits(units)], the number of its group
  int64_t* numbers;  // [units], each unit's group as the hash table numbers it
  int64_t* codes;    // [units], see encode
  int64_t bytes;

  Workspace(void* base, int64_t units) : arena(base) {
    groups = arena.take<Group>(dense_limit(units));
    keys = arena.take<int64_t>(int64_t(1) << hash_bits(units));
    owned = arena.take<int64_t>(int64_t(1) << hash_bits(units));
    numbers = arena.take<int64_t>(units);
    codes = arena.take<int64_t>(units);
    bytes = arena.bytes();
  }
};

// Which group each unit is in.
struct Numbering {
  const int64_t* numbers;  // [units], < 0: in none; null: all in group 0
  int64_t smallest;        // what to subtract from a number
  int64_t groups;
};

// Numbers the groups in the order of their first unit; returns how many there are.
int64_t number_by_hash(const int64_t* ids, int64_t count, const Workspace& space) {
  const int bits = hash_bits(count);
  const int64_t places = int64_t(1) << bits;
  int64_t *keys = space.keys, *owned = space.owned, *numbers = space.numbers;
  for (int64_t place = 0; place < places; ++place) keys[place] = kNoGroup;
  int64_t groups = 0;
  for (int64_t unit = 0; unit < count; ++unit) {
    const int64_t id = ids[unit];
    numbers[unit] = kNoGroup;
    if (id < 0) continue;
    uint64_t place = (uint64_t(id) * 0x9E3779B97F4A7C15u) >> (64 - bits);
    while (keys[place] != id && keys[place] != kNoGroup) place = (place + 1) & uint64_t(places - 1);
    if (keys[place] == kNoGroup) {
      keys[place] = id;
      owned[place] = groups++;
    }
    numbers[unit] = owned[place];
  }
  return groups;
}

// Ids that lie close together are numbers already.
Numbering number_groups(const GroupNormaliseArgs& args, const Workspace& space) {
  if (!args.ids) return {nullptr, 0, 1};
  const int64_t *ids = args.ids, count = args.units;
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

// One number per unit for the loops that cannot be vectorised: twice its group, plus 1 if it is not a member of the group;
// kNoGroup where it is left out. Either all members, or all who receive an advantage.
void encode(const GroupNormaliseArgs& args, const Numbering& numbering, bool receivers, int threads, int64_t* all_codes) {
  const uint8_t* mask = receivers ? args.apply_mask : args.mask;
  const bool mark_members = receivers && args.mask;
  for_each_piece(args.units, threads, [&](int64_t first, int64_t end) {
    const float* __restrict values = args.values;
    const int64_t* __restrict numbers = numbering.numbers;
    int64_t* __restrict codes = all_codes;
    const int64_t smallest = numbering.smallest;
    for (int64_t unit = first; unit < end; ++unit) {
      const int64_t number = numbers ? numbers[unit] : 0;
      codes[unit] = number >= 0 && is_finite(values[unit]) ? 2 * (number - smallest) : kNoGroup;
    }
    if (mark_members) {
      for (int64_t unit = first; unit < end; ++unit) codes[unit] |= args.mask[unit] ? 0 : 1;  // kNoGroup stays
    }
    if (mask) {
      for (int64_t unit = first; unit < end; ++unit) codes[unit] = mask[unit] ? codes[unit] : kNoGroup;
    }
  });
}

// All members as one group, in lanes.
GroupSums sum_everybody(const float* __restrict values, const int64_t* __restrict codes, int64_t count) {
  int64_t unit = 0;
  while (unit < count && codes[unit] < 0) ++unit;
  if (unit == count) return {};
  const double pivot = double(values[unit]);
  double sum[kLanes] = {}, squares[kLanes] = {};
  int64_t members[kLanes] = {};
  const auto add = [&](int64_t each, int lane) {
    const bool member = codes[each] >= 0;
    const double offset = member ? double(values[each]) - pivot : 0.0;
    sum[lane] += offset;
    squares[lane] += offset * offset;
    members[lane] += member ? 1 : 0;
  };
  for (; unit + kLanes <= count; unit += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) add(unit + lane, lane);
  }
  for (int lane = 0; unit < count; ++unit, ++lane) add(unit, lane);
  GroupSums total = {pivot, 0, 0.0, 0.0};
  for (int lane = 0; lane < kLanes; ++lane) {
    total.sum += sum[lane];
    total.squares += squares[lane];
    total.count += members[lane];
  }
  return total;
}

// In index order, whatever the number of threads. Units of one group mostly follow each other: their sums stay in registers.
void sum_groups(const float* __restrict values, const int64_t* __restrict codes, int64_t count, Group* __restrict groups) {
  int64_t current = kNoGroup;
  GroupSums sums = {};
  for (int64_t unit = 0; unit < count; ++unit) {
    if (codes[unit] < 0) continue;
    if (codes[unit] != current) {
      if (current >= 0) groups[current >> 1].sums = sums;
      current = codes[unit];
      sums = groups[current >> 1].sums;
    }
    add_member(sums, values[unit]);
  }
  if (current >= 0) groups[current >> 1].sums = sums;
}

}  // namespace

int64_t group_normalise_workspace(int64_t units) { return Workspace(nullptr, units).bytes; }

void group_normalise(const GroupNormaliseArgs& args, int threads) {
  const Workspace space(args.workspace, args.units);
  Group* groups = space.groups;
  int64_t* codes = space.codes;
  threads = worthwhile(threads, args.units);

  const Numbering numbering = number_groups(args, space);
  encode(args, numbering, false, threads, codes);
  const bool batch_scale = args.scale == Scale::batch;
  const GroupSums everybody = batch_scale || !args.ids ? sum_everybody(args.values, codes, args.units) : GroupSums{};
  const double batch_deviation = batch_scale ? deviation(everybody, args.ddof) : 0.0;
  for (int64_t group = 0; group < numbering.groups; ++group) groups[group].sums = {};
  if (args.ids) sum_groups(args.values, codes, args.units, groups);
  else groups[0].sums = everybody;

  const GroupNormaliseArgs rule = args;
  for_each_piece(numbering.groups, threads, [&](int64_t first, int64_t end) {
    for (int64_t group = first; group < end; ++group) {
      groups[group].map = group_map(groups[group].sums, batch_deviation, rule);
    }
  });
  if (args.apply_mask) encode(args, numbering, true, threads, codes);
  for_each_piece(args.units, threads, [&](int64_t first, int64_t end) {
    const float* __restrict values = args.values;
    float* __restrict advantages = args.advantages;
    for (int64_t unit = first; unit < end; ++unit) {
      const int64_t code = codes[unit];
      advantages[unit] = code < 0 ? 0.0f : advantage(groups[code >> 1].map, values[unit], !(code & 1));
    }
  });
}

}  // namespace hpo::HPO_ISA
