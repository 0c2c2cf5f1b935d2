// order_statistics. The definition is hpo_core/reference/scopes.py.
#include "hpo/entropy.h"

#include "kernels.h"
#include "order_keys.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

constexpr int64_t kMostParts = 64;  // of a scope that all threads share; results do not depend on their number

// Some of the segments of a scope: the places [first, end) of the list, and their counts.
struct Part {
  int64_t first, end;
  int64_t finite, errors, greater, ties;
};

struct Space {
  Arena arena;
  Part* parts;        // [kMostParts]
  Search* searches;   // [kMostParts]
  int64_t* starts;    // [segments + 1]: tokens before each place of the list
  uint32_t* keys;     // [tokens]
  int64_t bytes;

  Space(void* base, int64_t tokens, int64_t segments) : arena(base) {
    parts = arena.take<Part>(kMostParts);
    searches = arena.take<Search>(kMostParts);
    starts = arena.take<int64_t>(segments + 1);
    keys = arena.take<uint32_t>(tokens);
    bytes = arena.bytes();
  }
};

Range segment_at(const OrderStatisticsArgs& args, int64_t place) {
  return row_range(args.offsets, args.order ? args.order[place] : place, args.tokens);
}

// Calls visit(token, value) for the valid tokens of a part, in the order of the list.
template <class Visit>
void for_each_value(const OrderStatisticsArgs& args, const Part& part, const Visit& visit) {
  for (int64_t place = part.first; place < part.end; ++place) {
    const Range range = segment_at(args, place);
    for (int64_t t = range.begin; t < range.end; ++t) {
      if (!args.mask || args.mask[t]) visit(t, args.values[t]);
    }
  }
}

// The keys of a part, in its own slice of the keys of all tokens. Segments that overlap may have more than their slice holds.
Search gather(const OrderStatisticsArgs& args, const Space& space, Part& part) {
  const int64_t start = smaller(space.starts[part.first], args.tokens);
  const int64_t room = smaller(space.starts[part.end], args.tokens) - start;
  uint32_t* keys = space.keys + start;
  int64_t finite = 0, errors = 0;
  for_each_value(args, part, [&](int64_t, float value) {
    const bool counts = is_finite(value);
    errors += !counts && value != -INFINITY;
    if (finite == room) return;
    keys[finite] = key_of(value);
    finite += counts;
  });
  part.finite = finite, part.errors = errors;
  return {keys, keys, finite};
}

// Selects the `wanted` largest of a scope; among those equal to the least of them, the first in the order of the list.
void select_largest(const OrderStatisticsArgs& args, Part* parts, int64_t count, uint32_t least, int64_t wanted, int threads) {
  parallel_for(count, threads, [&](int64_t p) {
    Part& part = parts[p];
    part.greater = part.ties = 0;
    for_each_value(args, part, [&](int64_t t, float value) {
      if (!is_finite(value)) return;
      const uint32_t key = key_of(value);
      part.ties += key == least;
      part.greater += key > least;
      args.selected[t] = key > least;
    });
  });
  int64_t needed = wanted;
  for (int64_t p = 0; p < count; ++p) needed -= parts[p].greater;
  for (int64_t p = 0; p < count; ++p) {
    const int64_t here = smaller(needed, parts[p].ties);
    needed -= here;
    parts[p].ties = here;
  }
  parallel_for(count, threads, [&](int64_t p) {
    int64_t left = parts[p].ties;
    if (left == 0) return;
    for_each_value(args, parts[p], [&](int64_t t, float value) {
      if (left == 0 || !is_finite(value) || key_of(value) != least) return;
      args.selected[t] = 1;
      --left;
    });
  });
}

void scan_scope(const OrderStatisticsArgs& args, const Space& space, int64_t scope, Part* parts, Search* searches,
                int64_t count, int threads) {
  parallel_for(count, threads, [&](int64_t p) { searches[p] = gather(args, space, parts[p]); });
  int64_t population = 0, errors = 0;
  for (int64_t p = 0; p < count; ++p) population += parts[p].finite, errors += parts[p].errors;
  if (args.counts) args.counts[2 * scope] = population, args.counts[2 * scope + 1] = errors;
  if (args.thresholds) args.thresholds[scope] = NAN;
  const int64_t wanted = args.k ? larger(0, smaller(args.k[scope], population)) : 1;
  if (population == 0 || wanted == 0) return;
  const int64_t index = args.k ? population - wanted : order_index(args.numerator, args.denominator, args.rule, population);
  const uint32_t key = find_key(searches, count, finite_keys(), index);
  if (args.thresholds) args.thresholds[scope] = from_order_key(key);
  if (args.k) select_largest(args, parts, count, key, wanted, threads);
}

}  // namespace

int64_t order_statistics_workspace(int64_t tokens, int64_t segments) { return Space(nullptr, tokens, segments).bytes; }

void order_statistics(const OrderStatisticsArgs& args, int threads) {
  const Space space(args.workspace, args.tokens, args.segments);
  threads = worthwhile(threads, args.tokens);
  int64_t before = 0;
  for (int64_t place = 0; place < args.segments; ++place) {
    const Range range = segment_at(args, place);
    space.starts[place] = before;
    before += range.end - range.begin;
  }
  space.starts[args.segments] = before;

  const auto first = [&](int64_t scope) { return args.begin ? args.begin[scope] : scope; };
  if (args.scopes > 1) {
    return parallel_for(args.scopes, threads, [&](int64_t scope) {
      Part part = {first(scope), first(scope + 1), 0, 0, 0, 0};
      Search search;
      scan_scope(args, space, scope, &part, &search, 1, 1);
    });
  }
  // All threads share the only scope.
  const int64_t segments = args.scopes == 1 ? first(1) - first(0) : 0, count = smaller(segments, kMostParts);
  for (int64_t p = 0; p < count; ++p) {
    space.parts[p] = {first(0) + segments * p / count, first(0) + segments * (p + 1) / count, 0, 0, 0, 0};
  }
  if (args.scopes == 1) scan_scope(args, space, 0, space.parts, space.searches, count, threads);
}

}  // namespace hpo::HPO_ISA
