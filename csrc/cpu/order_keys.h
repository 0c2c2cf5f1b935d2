// Order-preserving keys of floats, and the search for the key of a rank among them.
#pragma once
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "entropy_scores.h"

namespace hpo::HPO_ISA {

// The keys low, ..., low + span.
struct KeyRange {
  uint32_t low, span;

  uint32_t end() const { return low + span; }
  uint32_t middle() const { return low + span / 2; }
  bool holds(uint32_t key) const { return key - low <= span; }
};

inline KeyRange finite_keys() {
  const uint32_t low = order_key(-INFINITY) + 1;
  return {low, order_key(INFINITY) - 1 - low};
}

// Keys while they are searched.
struct Search {
  const uint32_t* keys;
  uint32_t* rest;  // receives the keys that remain; may be the array of the keys
  int64_t count;
  int64_t in_lower_half = 0;
  uint32_t least = 0, most = 0;
};

// Keeps the elements of `paired` whose keys are in the range, in place or elsewhere, and returns their number. With the keys
// as `paired` it keeps keys. A branch would be taken at random, so every element is written, and overwritten unless it
// belongs. Compilers do not make a compressing loop of this.
inline int64_t keep(const uint32_t* keys, const uint32_t* paired, int64_t n, KeyRange range, uint32_t* kept) {
  int64_t i = 0, count = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) {
    const __m512i some = _mm512_loadu_si512(keys + i), above = _mm512_sub_epi32(some, _mm512_set1_epi32(int32_t(range.low)));
    const __mmask16 belong = _mm512_cmple_epu32_mask(above, _mm512_set1_epi32(int32_t(range.span)));
    _mm512_storeu_si512(kept + count, _mm512_maskz_compress_epi32(belong, _mm512_loadu_si512(paired + i)));
    count += __builtin_popcount(belong);
  }
#endif
#pragma GCC unroll 8
  for (; i < n; ++i) {
    const bool belongs = range.holds(keys[i]);
    kept[count] = paired[i];
    count += belongs;
  }
  return count;
}

// Keeps the keys in the range and finds their extremes and the number in its lower half.
inline void halve(KeyRange range, Search& search) {
  const uint32_t middle = range.middle();
  const int64_t n = search.count;
  search.count = search.in_lower_half = 0;
  search.least = UINT32_MAX, search.most = 0;
  for (int64_t first = 0; first < n; first += kPart) {
    uint32_t* kept = search.rest + search.count;
    const int count = int(keep(search.keys + first, search.keys + first, smaller(kPart, n - first), range, kept));
    int32_t in_lower_half = 0;
    uint32_t least = UINT32_MAX, most = 0;
    for (int i = 0; i < count; ++i) {
      in_lower_half += kept[i] <= middle;
      least = kept[i] < least ? kept[i] : least;
      most = kept[i] > most ? kept[i] : most;
    }
    search.count += count, search.in_lower_half += in_lower_half;
    search.least = least < search.least ? least : search.least;
    search.most = most > search.most ? most : search.most;
  }
  search.keys = search.rest;
}

// The index-th key, in ascending order, of all searches; the range holds it.
inline uint32_t find_key(Search* searches, int64_t count, KeyRange range, int64_t index, int threads) {
  while (range.span > 0) {
    int64_t keys = 0, in_lower_half = 0;
    uint32_t least = UINT32_MAX, most = 0;
    for (int64_t s = 0; s < count; ++s) keys += searches[s].count;
    parallel_for(count, worthwhile(threads, keys), [&](int64_t s) { halve(range, searches[s]); });
    for (int64_t s = 0; s < count; ++s) {
      in_lower_half += searches[s].in_lower_half;
      least = searches[s].least < least ? searches[s].least : least;
      most = searches[s].most > most ? searches[s].most : most;
    }
    const uint32_t middle = range.middle();
    if (index < in_lower_half) {
      range = {least, (most < middle ? most : middle) - least};
    } else {
      const uint32_t low = least > middle ? least : middle + 1;
      range = {low, most - low};
      index -= in_lower_half;
    }
  }
  return range.low;
}

}  // namespace hpo::HPO_ISA
