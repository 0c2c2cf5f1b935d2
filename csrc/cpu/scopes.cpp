// order_statistics. The definition is hpo_core/reference/scopes.py.
#include <algorithm>

#include "hpo/entropy.h"
#include "kernels.h"
#include "order_keys.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

constexpr int64_t kLeastSampled = 32, kMostSampled = 256;
constexpr int64_t kMostParts = 64;  // of a scope that all threads share; results do not depend on their number

// Some of the segments of a scope: the places [first, end) of the list, and their counts.
struct Part {
  int64_t first, end;
  int64_t finite, errors, greater, ties;
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

// Writes the keys of the finite ones of at most kPart values that the mask (null: none) leaves, counts them, and adds the
// errors. There is room for n keys.
int64_t write_keys(const float* __restrict values, const uint8_t* __restrict mask, int64_t n, uint32_t* __restrict keys,
                   int64_t& errors) {
  if (!mask && all_finite(values, n)) {
    for (int64_t i = 0; i < n; ++i) keys[i] = order_key(values[i]);
    return n;
  }
  uint32_t every[kPart];
  int32_t wrong = 0;
  for (int64_t i = 0; i < n; ++i) {
    const bool valid = !mask || mask[i];
    every[i] = valid ? order_key(values[i]) : 0;  // which is the key of no finite value
    wrong += valid & !is_finite(values[i]) & (values[i] != -INFINITY);
  }
  errors += wrong;
  return keep(every, every, n, finite_keys(), keys);
}

// Writes the keys of a part, from the beginning of its slice of the keys of all tokens.
void gather(const OrderStatisticsArgs& args, const Space& space, Part& part) {
  const int64_t start = space.start(part.first, args.tokens), room = space.start(part.end, args.tokens) - start;
  uint32_t* keys = space.keys + start;
  int64_t finite = 0, errors = 0;
  for (int64_t place = part.first; place < part.end; ++place) {
    const Range range = segment_at(args, place);
    for (int64_t first = range.begin; first < range.end; first += kPart) {
      const int64_t n = smaller(kPart, range.end - first);
      const uint8_t* mask = args.mask ? args.mask + first : nullptr;
      uint32_t written[kPart];
      const bool fits = room - finite >= n;
      const int64_t found = write_keys(args.values + first, mask, n, fits ? keys + finite : written, errors);
      const int64_t kept = fits ? found : smaller(found, room - finite);
      for (int64_t i = 0; !fits && i < kept; ++i) keys[finite + i] = written[i];
      finite += kept;
    }
  }
  part.finite = finite, part.errors = errors;
}

// Takes the keys outside a bracket away, which a sample puts around the sought key; returns what is left to search. The
// sample determines the time, never the result: a bracket that missed is noticed by the number of keys below it.
KeyRange narrow(Search* searches, int64_t count, int64_t& index, int threads) {
  const KeyRange finite_range = finite_keys();
  int64_t n = 0, below[kMostParts], inside[kMostParts];
  for (int64_t p = 0; p < count; ++p) n += searches[p].count;
  const int64_t size = smaller(n / 16, kMostSampled);
  if (size < kLeastSampled) return finite_range;
  uint32_t sample[kMostSampled];
  for (int64_t i = 0; i < size; ++i) {
    int64_t place = int64_t(uint64_t(uint32_t(i) * 0x9E3779B9u) * uint64_t(n) >> 32), p = 0;
    while (place >= searches[p].count) place -= searches[p++].count;
    sample[i] = searches[p].keys[place];
  }
  const double share = double(index) / double(n), margin = 1 + 2.5 * std::sqrt(double(size) * share * (1 - share));
  const int64_t first = int64_t(double(size) * share - margin), last = int64_t(double(size) * share + margin);
  uint32_t low = finite_range.low, end = finite_range.end();
  if (first >= 0) std::nth_element(sample, sample + first, sample + size), low = sample[first];
  if (last < size) std::nth_element(sample + larger(first, 0), sample + last, sample + size), end = sample[last];
  const KeyRange range = {low, end - low};
  parallel_for(count, threads, [&](int64_t p) {
    const uint32_t* keys = searches[p].keys;
    int64_t less = 0, held = 0;
    for (int64_t at = 0; at < searches[p].count; ++at) less += keys[at] < low, held += range.holds(keys[at]);
    below[p] = less, inside[p] = held;
  });
  int64_t all_below = 0, all_inside = 0;
  for (int64_t p = 0; p < count; ++p) all_below += below[p], all_inside += inside[p];
  if (index < all_below || index >= all_below + all_inside) return finite_range;
  parallel_for(count, threads, [&](int64_t p) {
    Search& search = searches[p];
    search.count = keep(search.keys, search.keys, search.count, range, search.rest);
  });
  index -= all_below;
  return range;
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

// Selects the `wanted` largest of a scope; among those equal to the least of them, the first in the order of the list.
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
  parallel_for(count, threads, [&](int64_t p) { gather(args, space, parts[p]); });
  int64_t population = 0, errors = 0;
  for (int64_t p = 0; p < count; ++p) population += parts[p].finite, errors += parts[p].errors;
  if (args.counts) args.counts[2 * scope] = population, args.counts[2 * scope + 1] = errors;
  if (args.thresholds) args.thresholds[scope] = NAN;
  const int64_t wanted = args.k ? larger(0, smaller(args.k[scope], population)) : 1;
  if (population == 0 || wanted == 0) return;
  int64_t index = args.k ? population - wanted : order_index(args.numerator, args.denominator, args.rule, population);
  Search searches[kMostParts];
  for (int64_t p = 0; p < count; ++p) {
    uint32_t* keys = space.keys + space.start(parts[p].first, args.tokens);
    searches[p] = {keys, keys, parts[p].finite};
  }
  const KeyRange range = narrow(searches, count, index, threads);
  const uint32_t key = find_key(searches, count, range, index, threads);
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
      scan_scope(args, space, scope, &part, 1, 1);
    });
  }
  // All threads share the parts of the only scope.
  const int64_t segments = args.scopes == 1 ? first(1) - first(0) : 0, count = smaller(segments, kMostParts);
  for (int64_t p = 0; p < count; ++p) {
    space.parts[p] = {first(0) + segments * p / count, first(0) + segments * (p + 1) / count, 0, 0, 0, 0};
  }
  if (args.scopes == 1) scan_scope(args, space, 0, space.parts, count, threads);
}

}  // namespace hpo::HPO_ISA
