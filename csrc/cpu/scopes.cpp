// order_statistics, which also selects the k largest values of a scope. The definition is hpo_core/reference/scopes.py.
#include "hpo/api/scopes.h"

#include <algorithm>

#include "hpo/entropy.h"
#include "kernels.h"
#include "order_keys.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

constexpr int64_t kLeastSampled = 32, kMostSampled = 256;
constexpr int64_t kMostParts = 64;  // of a scope that all threads share; results do not depend on their number

// Some of the segments of a scope: the places [first, end) of the list, and counts of their values.
struct Part {
  int64_t first, end;
  int64_t finite = 0, errors = 0, below = 0, kept = 0, greater = 0, ties = 0;
};

struct Space {
  Arena arena;
  Part* parts;        // [kMostParts]
  int64_t* starts;    // [segments + 1]: tokens before each place of the list
  uint32_t* keys;     // [tokens]
  int64_t bytes;

  Space(void* base, int64_t tokens, int64_t segments) : arena(base) {
    parts = arena.take<Part>(kMostParts);
    starts = arena.take<int64_t>(segments + 1);
    keys = arena.take<uint32_t>(tokens);
    bytes = arena.bytes();
  }

  // Where the keys of a place of the list begin. Segments that overlap may have more keys than there are tokens.
  int64_t start(int64_t place, int64_t tokens) const { return smaller(starts[place], tokens); }
};

Range segment_at(const OrderStatisticsArgs& args, int64_t place) {
  return row_range(args.offsets, args.order ? args.order[place] : place, args.tokens);
}

// The range that probably contains the sought key of the places [first, end), from a sample of their values, which has no
// period that segments might share. The sample determines the time, never the result: a bracket that missed is noticed by the
// number of keys below it.
KeyRange bracket(const OrderStatisticsArgs& args, const Space& space, int64_t scope, int64_t first, int64_t end) {
  const KeyRange finite_range = finite_keys();
  const int64_t *starts = space.starts + first, *last = space.starts + end, tokens = *last - *starts;
  const int64_t size = smaller(tokens / 16, kMostSampled);
  if (size < kLeastSampled) return finite_range;
  uint32_t sample[kMostSampled];
  int64_t drawn = 0;
  for (int64_t i = 0; i < size; ++i) {
    const int64_t at = *starts + int64_t(uint64_t(uint32_t(i) * 0x9E3779B9u) * uint64_t(tokens) >> 32);
    const int64_t* start = std::upper_bound(starts, last, at) - 1;
    const int64_t token = segment_at(args, start - space.starts).begin + at - *start;
    sample[drawn] = order_key(args.values[token]);
    drawn += finite_range.holds(sample[drawn]) && (!args.mask || args.mask[token]);
  }
  if (drawn < kLeastSampled) return finite_range;
  const double above = args.k ? double(args.k[scope]) * double(size) / double(tokens) / double(drawn) : 0.0;
  const double quantile = args.k ? 1.0 - above : double(args.numerator) / double(larger(1, args.denominator));
  const double share = clamp(quantile, 0.0, 1.0), margin = 1 + 2.5 * std::sqrt(double(drawn) * share * (1 - share));
  const int64_t low = int64_t(double(drawn) * share - margin), high = int64_t(double(drawn) * share + margin);
  uint32_t ends[] = {finite_range.low, finite_range.end()};
  if (low >= 0) std::nth_element(sample, sample + low, sample + drawn), ends[0] = sample[low];
  if (high < drawn) std::nth_element(sample + larger(low, 0), sample + high, sample + drawn), ends[1] = sample[high];
  return {ends[0], ends[1] - ends[0]};
}

// Keeps those keys of at most kPart values that are in the range, and counts the finite values, those below the range, and the
// errors.
void keep_keys(const float* __restrict values, const uint8_t* __restrict mask, int64_t n, KeyRange range, uint32_t* kept,
               Part& part) {
  const KeyRange finite_range = finite_keys();
  uint32_t keys[kPart];
  int32_t finite = 0, below = 0, errors = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t key = order_key(values[i]);
    const bool valid = !mask || mask[i], counts = finite_range.holds(key) & valid;
    keys[i] = counts ? key : 0;  // 0 is the key of no finite value
    finite += counts;
    below += counts & (key < range.low);
    errors += valid & !counts & (values[i] != -INFINITY);
  }
  part.finite += finite, part.below += below, part.errors += errors;
  part.kept += keep(keys, keys, n, range, kept);
}

// Keeps the keys of a part that are in the range, from the beginning of its slice of the keys of all tokens.
void gather(const OrderStatisticsArgs& args, const Space& space, KeyRange range, Part& part) {
  const int64_t start = space.start(part.first, args.tokens);
  int64_t room = space.start(part.end, args.tokens) - start;
  part.finite = part.errors = part.below = part.kept = 0;
  for (int64_t place = part.first; place < part.end; ++place) {
    const Range tokens = segment_at(args, place);
    for (int64_t first = tokens.begin; first < tokens.end && room > 0; first += kPart) {
      const int64_t n = smaller(smaller(kPart, tokens.end - first), room);
      const uint8_t* mask = args.mask ? args.mask + first : nullptr;
      keep_keys(args.values + first, mask, n, range, space.keys + start + part.kept, part);
      room -= n;
    }
  }
}

// Marks the finite values of a part above the threshold, and counts them and those equal to it.
void mark_above(const OrderStatisticsArgs& args, float threshold, Part& part) {
  part.greater = part.ties = 0;
  for (int64_t place = part.first; place < part.end; ++place) {
    const Range range = segment_at(args, place);
    for (int64_t first = range.begin; first < range.end; first += kPart) {
      const int n = int(smaller(kPart, range.end - first));
      const float* __restrict values = args.values + first;
      const uint8_t* __restrict mask = args.mask ? args.mask + first : nullptr;
      uint8_t* __restrict selected = args.selected + first;
      int32_t above[kPart], greater = 0, ties = 0;  // bytes would not become vectors beside floats
      for (int i = 0; i < n; ++i) {
        const int32_t valid = mask ? mask[i] != 0 : 1;
        above[i] = int32_t(values[i] > threshold) & int32_t(values[i] < INFINITY) & valid;
        greater += above[i];
        ties += int32_t(values[i] == threshold) & valid;
      }
      for (int i = 0; i < n; ++i) selected[i] = uint8_t(above[i]);
      part.greater += greater, part.ties += ties;
    }
  }
}

// Marks the first `left` values of a part that are equal to the threshold.
void mark_ties(const OrderStatisticsArgs& args, float threshold, const Part& part, int64_t left) {
  for (int64_t place = part.first; place < part.end && left > 0; ++place) {
    const Range range = segment_at(args, place);
    for (int64_t t = range.begin; t < range.end && left > 0; ++t) {
      const bool ties = args.values[t] == threshold && (!args.mask || args.mask[t]);
      if (ties) args.selected[t] = 1;
      left -= ties;
    }
  }
}

// Selects the `wanted` largest of a scope; among those equal to the least of them, the first in the order of the list. The
// `ties` of a part are at first all of its values that are equal to it, then as many of these as the part selects.
void select_largest(const OrderStatisticsArgs& args, Part* parts, int64_t count, uint32_t least, int64_t wanted, int threads) {
  const float threshold = from_order_key(least);
  parallel_for(count, threads, [&](int64_t p) { mark_above(args, threshold, parts[p]); });
  int64_t needed = wanted;
  for (int64_t p = 0; p < count; ++p) needed -= parts[p].greater;
  for (int64_t p = 0; p < count; ++p) {
    const int64_t here = smaller(needed, parts[p].ties);
    needed -= here;
    parts[p].ties = here;
  }
  parallel_for(count, threads, [&](int64_t p) { mark_ties(args, threshold, parts[p], parts[p].ties); });
}

void scan_scope(const OrderStatisticsArgs& args, const Space& space, int64_t scope, Part* parts, int64_t count, int threads) {
  KeyRange range = bracket(args, space, scope, parts[0].first, parts[count - 1].end);
  Part all;
  const auto gather_all = [&] {
    parallel_for(count, threads, [&](int64_t p) { gather(args, space, range, parts[p]); });
    all = {};
    for (int64_t p = 0; p < count; ++p) {
      all.finite += parts[p].finite, all.errors += parts[p].errors;
      all.below += parts[p].below, all.kept += parts[p].kept;
    }
  };
  gather_all();
  const int64_t population = all.finite;
  if (args.counts) args.counts[2 * scope] = population, args.counts[2 * scope + 1] = all.errors;
  if (args.thresholds) args.thresholds[scope] = NAN;
  const int64_t wanted = args.k ? larger(0, smaller(args.k[scope], population)) : 1;
  if (population == 0 || wanted == 0) return;
  const int64_t index = args.k ? population - wanted : order_index(args.numerator, args.denominator, args.rule, population);
  if (index < all.below || index >= all.below + all.kept) {
    range = finite_keys();
    gather_all();
  }
  Search searches[kMostParts];
  for (int64_t p = 0; p < count; ++p) {
    uint32_t* keys = space.keys + space.start(parts[p].first, args.tokens);
    searches[p] = {keys, keys, parts[p].kept};
  }
  const uint32_t key = find_key(searches, count, range, index - all.below, threads);
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
      Part part = {first(scope), first(scope + 1)};
      scan_scope(args, space, scope, &part, 1, 1);
    });
  }
  // All threads share the parts of the only scope.
  const int64_t segments = args.scopes == 1 ? first(1) - first(0) : 0, count = larger(1, smaller(segments, kMostParts));
  for (int64_t p = 0; p < count; ++p) {
    space.parts[p] = {first(0) + segments * p / count, first(0) + segments * (p + 1) / count};
  }
  if (args.scopes == 1) scan_scope(args, space, 0, space.parts, count, threads);
}

}  // namespace hpo::HPO_ISA
