// window_score, order_statistic and select. The definition is hpo_core/reference/entropy.py.
#include "hpo/entropy.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "kernels.h"
#include "lanes.h"
#include "rows.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

constexpr int64_t kMostWorkers = 64;  // each with scratch of its own; results do not depend on how many there are

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

template <class T>
inline void swap(T& a, T& b) {
  const T was = a;
  a = b;
  b = was;
}

// Calls body(row, first position, end) for the part of every row inside [begin, end).
template <class Body>
void for_each_row_in(const Rows& rows, int64_t begin, int64_t end, const Body& body) {
  RowWalk walk(rows, begin);
  Segments segments;
  int64_t row = -1, row_begin = begin, row_end = begin;
  for (int64_t tile = begin; tile < end; tile += kTile) {
    walk.segments(tile, smaller(tile + kTile, end), segments);
    for (const Segment& segment : segments) {
      if (segment.row != row || tile + segment.begin != row_end) {
        if (row_begin < row_end) body(row, row_begin, row_end);
        row = segment.row;
        row_begin = tile + segment.begin;
      }
      row_end = tile + segment.end;
    }
  }
  if (row_begin < row_end) body(row, row_begin, row_end);
}

// ------------------------------------------------------------------------------------------------------------- windows
//
// Whole windows are summed by doubling: P_1 = values, P_2k[t] = P_k[t] + P_k[t + k], and a window is the sum of the P_k of the
// binary digits of its width. Nothing is ever subtracted, and the order of the additions depends on the offset inside the
// window only, never on the packing. Windows that their row cuts are few; they are running sums in float64 from that end.

struct Windows {
  int64_t block;  // tokens of one task
  int64_t reach;  // positions that the windows of a block cover at most
  int64_t blocks;

  Windows(int64_t tokens, int64_t width) {
    const int64_t cut_width = larger(1, smaller(width, 2 * tokens));
    block = larger(1, smaller(tokens, larger(2 * kTile, 4 * cut_width)));
    reach = block + cut_width;
    blocks = pieces(tokens, block);
  }

  int64_t workers() const { return smaller(blocks, kMostWorkers); }
};

enum State : int32_t { kOutside = 0, kCut = 1, kWhole = 2 };  // of a token: in no row; its window leaves the row; or not

// Index 0 of what is [reach] is where the window of the block's first token begins; index 0 of `state` is that token.
struct WindowScratch {
  float *sum, *next_sum, *window_sum;             // [reach]
  int32_t *usable, *next_usable, *window_usable;  // [reach], how many terms are in the sums
  int32_t* state;                                 // [block]

  WindowScratch(Arena& arena, const Windows& windows) {
    const int64_t reach = windows.reach;
    sum = arena.take<float>(reach), next_sum = arena.take<float>(reach), window_sum = arena.take<float>(reach);
    usable = arena.take<int32_t>(reach), next_usable = arena.take<int32_t>(reach), window_usable = arena.take<int32_t>(reach);
    state = arena.take<int32_t>(windows.block);
  }
};

// out[j] = sum[j] + further[j + distance]; nothing lies beyond `length`.
template <class T>
void add_further(const T* __restrict sum, const T* __restrict further, int64_t distance, int64_t length, T* __restrict out) {
  const int64_t both = larger(0, length - distance);
  for (int64_t j = 0; j < both; ++j) out[j] = sum[j] + further[j + distance];
  for (int64_t j = both; j < length; ++j) out[j] = sum[j];
}

// From P_1 in `sum` to the sums of whole windows in `window_sum`.
template <class T>
void sum_windows(T*& sum, T*& next, T*& window_sum, int64_t width, int64_t length) {
  int64_t done = 0;  // how much of the window the digits so far cover
  for (int64_t span = 1;; span *= 2) {
    if (width & span) {
      if (done == 0 && 2 * span > width) return swap(window_sum, sum);
      if (done == 0) {
        for (int64_t j = 0; j < length; ++j) window_sum[j] = sum[j];
      } else {
        add_further(window_sum, sum, done, length, next);
        swap(window_sum, next);
      }
      done += span;
    }
    if (2 * span > width) return;
    add_further(sum, sum, span, length, next);
    swap(sum, next);
  }
}

// Fills state; returns whether some window of the block is whole.
bool load_states(const WindowArgs& args, const Rows& rows, const WindowRule& rule, int64_t begin, int64_t end, int32_t* state) {
  int64_t covered = begin;
  bool some_whole = false;
  const auto fill = [&](int64_t until, State value) {
    const int64_t count = until - covered;
    int32_t* out = state + (covered - begin);
    for (int64_t i = 0; i < count; ++i) out[i] = value;
    covered = larger(covered, until);
    return count > 0;
  };
  for_each_row_in(rows, begin, end, [&](int64_t row, int64_t first, int64_t row_end) {
    const int64_t first_whole = larger(args.cu_seqlens[row], args.cu_seqlens[row] - rule.first);
    const int64_t end_whole = smaller(args.cu_seqlens[row + 1], args.cu_seqlens[row + 1] - rule.last);
    fill(first, kOutside);
    fill(smaller(row_end, first_whole), kCut);
    some_whole |= fill(smaller(row_end, end_whole), kWhole);
    fill(row_end, kCut);
  });
  fill(end, kOutside);
  return some_whole;
}

// Fills P_1 for the positions [start, start + length), and if some of them are not usable, which ones are; returns whether all
// of them are usable.
bool load_values(const WindowArgs& args, int64_t start, int64_t length, const WindowScratch& scratch) {
  const int64_t first = smaller(length, larger(0, -start)), end = larger(first, smaller(length, args.tokens - start));
  float* __restrict sum = scratch.sum;
  int32_t* __restrict usable = scratch.usable;
  int32_t holes = 0;
  if (args.mask) {
    for (int64_t j = first; j < end; ++j) usable[j] = args.mask[start + j] ? -1 : 0;
    for (int64_t j = first; j < end; ++j) {
      const float value = args.values[start + j];
      usable[j] &= is_finite(value) ? -1 : 0;
      sum[j] = from_bits(to_bits(value) & usable[j]);
      holes |= ~usable[j];
    }
  } else {
    for (int64_t j = first; j < end; ++j) {
      const float value = args.values[start + j];
      const int32_t finite = is_finite(value) ? -1 : 0;
      sum[j] = from_bits(to_bits(value) & finite);
      holes |= ~finite;
    }
  }
  for (int64_t j = 0; j < first; ++j) sum[j] = 0.0f;
  for (int64_t j = end; j < length; ++j) sum[j] = 0.0f;
  if (!holes && first == 0 && end == length) return true;
  if (!args.mask) {
    for (int64_t j = first; j < end; ++j) usable[j] = is_finite(args.values[start + j]) ? -1 : 0;
  }
  for (int64_t j = first; j < end; ++j) usable[j] = -usable[j];
  for (int64_t j = 0; j < first; ++j) usable[j] = 0;
  for (int64_t j = end; j < length; ++j) usable[j] = 0;
  return false;
}

// Windows cut at the begin of their row, from the row's first token on; then those cut at its end only, from its last one back.
void score_cut_windows(const WindowArgs& args, const Rows& rows, const WindowRule& rule, int64_t begin, int64_t end) {
  const auto is_usable = [&](int64_t t) { return (!args.mask || args.mask[t]) && is_finite(args.values[t]); };
  for_each_row_in(rows, begin, end, [&](int64_t row, int64_t segment_begin, int64_t segment_end) {
    const int64_t row_begin = args.cu_seqlens[row], row_end = args.cu_seqlens[row + 1];
    double sum = 0.0;
    int32_t usable = 0;
    int64_t next = row_begin;
    int64_t t = segment_begin;
    for (; t < smaller(segment_end, row_begin - rule.first); ++t) {
      for (const int64_t window_end = smaller(t + rule.last + 1, row_end); next < window_end; ++next) {
        if (is_usable(next)) sum += double(args.values[next]), ++usable;
      }
      if (is_usable(t)) args.score[t] = window_mean(float(sum), usable, int32_t(next - row_begin), false, rule);
    }
    sum = 0.0;
    usable = 0;
    next = row_end;
    const int64_t last_heads = t;
    for (t = segment_end - 1; t >= larger(last_heads, row_end - rule.last); --t) {
      for (const int64_t window_begin = smaller(row_end, t + rule.first); next > window_begin; --next) {
        if (is_usable(next - 1)) sum += double(args.values[next - 1]), ++usable;
      }
      if (is_usable(t)) args.score[t] = window_mean(float(sum), usable, int32_t(row_end - next), false, rule);
    }
  });
}

using FinishLoop = void (*)(const WindowRule&, const WindowScratch&, const float* values, float* score, int n);

// Scores from the sums of whole windows. What the loop would branch on is a constant.
template <Boundary kBoundary, Invalid kInvalid, bool kAllUsable>
void finish_scores(const WindowRule& any_rule, const WindowScratch& scratch, const float* __restrict values,
                   float* __restrict score, int n) {
  WindowRule rule = any_rule;
  rule.boundary = kBoundary;
  rule.invalid = kInvalid;
  const float* __restrict sum = scratch.window_sum;
  const int32_t* __restrict usable = scratch.window_usable, * __restrict state = scratch.state;
  const int32_t width = int32_t(smaller(rule.width, INT32_MAX));
  for (int i = 0; i < n; ++i) {
    const float mean = window_mean(sum[i], kAllUsable ? width : usable[i], width, true, rule);
    const float of_window = state[i] == kWhole ? mean : -INFINITY;
    const float of_token = is_finite(values[i]) ? of_window : NAN;
    score[i] = state[i] == kOutside ? -INFINITY : of_token;
  }
}

FinishLoop pick_finish(const WindowRule& rule, bool all_usable) {
  if (all_usable) return finish_scores<Boundary::full, Invalid::skip, true>;  // then these make no difference
  const bool stop = rule.invalid == Invalid::stop;
  if (rule.boundary == Boundary::zero) {
    return stop ? finish_scores<Boundary::zero, Invalid::stop, false> : finish_scores<Boundary::zero, Invalid::skip, false>;
  }
  return stop ? finish_scores<Boundary::full, Invalid::stop, false> : finish_scores<Boundary::full, Invalid::skip, false>;
}

void drop_masked(const uint8_t* mask, float* score, int64_t n) {
  if (!mask) return;
  for (int64_t i = 0; i < n; ++i) score[i] = mask[i] ? score[i] : -INFINITY;
}

// The window of a token alone: its score is its value. For the tokens [begin, end).
void score_tokens(const float* values, const uint8_t* mask, const Rows& rows, int64_t begin, int64_t end, float* score) {
  for (int64_t t = begin; t < end; ++t) score[t - begin] = -INFINITY;
  for_each_row_in(rows, begin, end, [&](int64_t, int64_t first, int64_t row_end) {
    for (int64_t t = first; t < row_end; ++t) score[t - begin] = is_finite(values[t]) ? values[t] : NAN;
  });
  drop_masked(mask ? mask + begin : nullptr, score, end - begin);
}

void score_block(const WindowArgs& args, const Rows& rows, const WindowRule& rule, const Windows& windows, int64_t block,
                 WindowScratch scratch) {
  const int64_t begin = block * windows.block, end = smaller(begin + windows.block, args.tokens);
  const int n = int(end - begin);
  bool all_usable = true;
  if (rule.first == 0 && rule.last == 0) {
    return score_tokens(args.values, args.mask, rows, begin, end, args.score + begin);
  }
  if (load_states(args, rows, rule, begin, end, scratch.state)) {
    const int64_t length = n + rule.width - 1;  // with a whole window, the width is at most the number of tokens
    all_usable = load_values(args, begin + rule.first, length, scratch);
    sum_windows(scratch.sum, scratch.next_sum, scratch.window_sum, rule.width, length);
    if (!all_usable) sum_windows(scratch.usable, scratch.next_usable, scratch.window_usable, rule.width, length);
  }
  pick_finish(rule, all_usable)(rule, scratch, args.values + begin, args.score + begin, n);
  drop_masked(args.mask ? args.mask + begin : nullptr, args.score + begin, n);
  if (rule.boundary != Boundary::full) score_cut_windows(args, rows, rule, begin, end);
}

// -------------------------------------------------------------------------------------------------------------- scores

constexpr int64_t kPart = 4096;  // scores that are looked at several times while they are in the first-level cache
constexpr int64_t kAhead = 1024;  // how far what is read next is fetched ahead

inline bool all_finite(const float* values, int64_t n) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t magnitude = to_bits(values[i]) & INT32_MAX;
    largest = magnitude > largest ? magnitude : largest;
  }
  return is_finite(from_bits(largest));
}

// Scores as they are given, or those of tokens by themselves. Few of these differ from the values, so they are not written.
class Scores {
 public:
  template <class Args>
  explicit Scores(const Args& args)
      : given(!args.cu_seqlens), values(args.values), mask_(args.mask), rows_(args.cu_seqlens, args.rows, args.tokens) {
    if (given) end_ = args.tokens;
    else if (!rows_.broken && args.rows > 0) begin_ = args.cu_seqlens[0], end_ = args.cu_seqlens[args.rows];
  }

  const bool given;
  const float* const values;

  // Whether the finite ones of n values are scores.
  bool are_values(int64_t first, int64_t n) const {
    bool masked = false;
    for (int64_t t = first; mask_ && t < first + n; ++t) masked |= mask_[t] == 0;
    return begin_ <= first && first + n <= end_ && !masked;
  }

  void write(int64_t first, int64_t n, float* score) const {
    if (given) std::memcpy(score, values + first, size_t(n) * sizeof(float));
    else score_tokens(values, mask_, rows_, first, first + n, score);
  }

  // That of one token; or NaN where it would take long to find out.
  float sample(int64_t t) const { return begin_ <= t && t < end_ && (!mask_ || mask_[t]) ? values[t] : NAN; }

 private:
  const uint8_t* mask_;
  Rows rows_;
  int64_t begin_ = 0, end_ = 0;  // all tokens in between have a row; empty if broken rows make that uncertain
};

// ---------------------------------------------------------------------------------------------------- order statistics
//
// On order_key. A sample of the scores brackets the one wanted; a pass over all of them keeps the keys inside the bracket, and
// only those are searched, by halving the range they lie in. The pass counts what it leaves out, so that a bracket that missed
// is noticed: then it is opened for every finite score. The sample decides how long this takes, never what comes out.

constexpr int64_t kSample = 2048;
constexpr double kDeviations = 3.5;  // of the sample's rank, on each side of the one wanted: one bracket in 2,000 misses

// The keys low, ..., low + span.
struct KeyRange {
  uint32_t low, span;

  uint32_t end() const { return low + span; }
  bool holds(uint32_t key) const { return key - low <= span; }
};

// -0 and +0 are one key: then the order of the keys is that of the floats.
inline uint32_t key_of(float x) { return order_key(x + 0.0f); }

#if defined(__AVX512F__)
constexpr int kNotFinite = 0x99;  // the classes of _mm512_fpclass_ps_mask: both kinds of NaN and both infinities
#endif

inline KeyRange finite_keys() {
  const uint32_t low = order_key(-INFINITY) + 1;
  return {low, order_key(INFINITY) - 1 - low};
}

// What one worker found in its own part of the scores.
struct Worker {
  uint32_t* keys;
  int64_t kept;  // how many keys there are
  int64_t finite, nan, below;
  int64_t in_lower_half;  // of the keys
  uint32_t least, most;
};

struct Selection {
  Arena arena;
  int64_t most_workers;
  Worker* workers;
  uint32_t* keys;  // [tokens], those of a worker from the begin of its part on
  int64_t bytes;

  Selection(void* base, int64_t tokens) : arena(base), most_workers(larger(1, smaller(pieces(tokens, 1 << 14), kMostWorkers))) {
    workers = arena.take<Worker>(most_workers);
    keys = arena.take<uint32_t>(tokens);
    bytes = arena.bytes();
  }
};

// Keeps those of the keys that belong, in place or elsewhere, and returns how many. No branch, which would be taken at random:
// every key is written, and overwritten unless it belongs. No compiler makes a compressing loop of it by itself.
inline int64_t keep(const uint32_t* keys, int64_t n, KeyRange range, uint32_t* kept) {
  int64_t i = 0, count = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) {
    const __m512i some = _mm512_loadu_si512(keys + i), above = _mm512_sub_epi32(some, _mm512_set1_epi32(int32_t(range.low)));
    const __mmask16 belong = _mm512_cmple_epu32_mask(above, _mm512_set1_epi32(int32_t(range.span)));
    _mm512_storeu_si512(kept + count, _mm512_maskz_compress_epi32(belong, some));
    count += __builtin_popcount(belong);
  }
#endif
#pragma GCC unroll 8
  for (; i < n; ++i) {
    const uint32_t key = keys[i];
    kept[count] = key;
    count += range.holds(key);
  }
  return count;
}

struct Found {
  int64_t kept, below;
  bool all_finite;
};

// Keeps the keys of those of at most kPart scores that belong, and counts those below the range.
inline Found keep_scores(const float* scores, int64_t n, KeyRange range, uint32_t* kept) {
  Found found = {0, 0, true};
  int64_t i = 0;
#if defined(__AVX512F__)
  const __m512 low = _mm512_set1_ps(from_order_key(range.low)), end = _mm512_set1_ps(from_order_key(range.end()));
  __m512i not_below = {};  // counts
  __mmask16 not_finite = 0;
  for (; i + 16 <= n; i += 16) {
    __builtin_prefetch(scores + i + kAhead);
    const __m512 some = _mm512_loadu_ps(scores + i);
    not_finite |= _mm512_fpclass_ps_mask(some, kNotFinite);
    const __mmask16 from_low = _mm512_cmp_ps_mask(some, low, _CMP_GE_OQ);
    const __mmask16 belong = _mm512_mask_cmp_ps_mask(from_low, some, end, _CMP_LE_OQ);
    not_below = _mm512_mask_sub_epi32(not_below, from_low, not_below, _mm512_set1_epi32(-1));
    _mm512_storeu_si512(kept + found.kept, _mm512_maskz_compress_epi32(belong, _mm512_castps_si512(some)));
    found.kept += __builtin_popcount(uint32_t(belong));
  }
  found.below = i;
  for (int lane = 0; lane < 16; ++lane) found.below -= Ints(not_below)[lane];
  found.all_finite = not_finite == 0;
  for (int64_t k = 0; k < found.kept; ++k) kept[k] = key_of(from_bits(int32_t(kept[k])));
#endif
  uint32_t keys[kPart];
  int32_t below = 0;
  for (int64_t j = i; j < n; ++j) {
    keys[j - i] = key_of(scores[j]);
    below += keys[j - i] < range.low;
  }
  found.kept += keep(keys, n - i, range, kept + found.kept);
  found.below += below;
  found.all_finite &= all_finite(scores + i, n - i);
  return found;
}

// Counts the scores [begin, end) and keeps the keys of those in the range.
void keep_range(const Scores& scores, int64_t begin, int64_t end, KeyRange range, Worker& worker) {
  worker.kept = worker.finite = worker.nan = worker.below = 0;
  for (int64_t first = begin; first < end; first += kPart) {
    const int64_t n = smaller(kPart, end - first);
    uint32_t* kept = worker.keys + worker.kept;
    Found found = {};
    if (scores.are_values(first, n)) found = keep_scores(scores.values + first, n, range, kept);
    int32_t left_out = 0, nan = 0;
    if (!found.all_finite) {
      float score[kPart];
      scores.write(first, n, score);
      for (int64_t i = 0; i < n; ++i) {
        const bool counts = is_finite(score[i]);
        left_out += !counts;
        nan += score[i] != score[i];
        score[i] = counts ? score[i] : INFINITY;  // not in the range, nor below it
      }
      found = keep_scores(score, n, range, kept);
    }
    worker.kept += found.kept, worker.below += found.below, worker.nan += nan, worker.finite += n - left_out;
  }
}

// Keeps the keys in the range and looks where in it they are.
void halve(KeyRange range, Worker& worker) {
  const uint32_t middle = range.low + range.span / 2;
  const int64_t n = worker.kept;
  worker.kept = worker.in_lower_half = 0;
  worker.least = UINT32_MAX, worker.most = 0;
  for (int64_t first = 0; first < n; first += kPart) {
    const uint32_t* kept = worker.keys + worker.kept;
    const int count = int(keep(worker.keys + first, smaller(kPart, n - first), range, worker.keys + worker.kept));
    int32_t in_lower_half = 0;
    uint32_t least = UINT32_MAX, most = 0;
    for (int i = 0; i < count; ++i) {
      in_lower_half += kept[i] <= middle;
      least = kept[i] < least ? kept[i] : least;
      most = kept[i] > most ? kept[i] : most;
    }
    worker.kept += count, worker.in_lower_half += in_lower_half;
    worker.least = least < worker.least ? least : worker.least;
    worker.most = most > worker.most ? most : worker.most;
  }
}

// The index-th in ascending order of the workers' keys, which are used up. It is in the range.
uint32_t find_key(Worker* workers, int64_t count, KeyRange range, int64_t index) {
  while (range.span > 0) {
    int64_t kept = 0, in_lower_half = 0;
    uint32_t least = UINT32_MAX, most = 0;
    for (int64_t w = 0; w < count; ++w) kept += workers[w].kept;
    parallel_for(count, worthwhile(int(count), kept), [&](int64_t w) { halve(range, workers[w]); });
    for (int64_t w = 0; w < count; ++w) {
      in_lower_half += workers[w].in_lower_half;
      least = workers[w].least < least ? workers[w].least : least;
      most = workers[w].most > most ? workers[w].most : most;
    }
    const uint32_t middle = range.low + range.span / 2;
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

// Where the key wanted probably is. The places of the sample have no period that could be one of the rows as well.
KeyRange bracket(const OrderStatisticArgs& args, const Scores& scores, uint32_t* scratch) {
  const KeyRange finite_range = finite_keys();
  if (args.tokens < 4 * kSample) return finite_range;
  Worker sample = {}, copy = {};
  sample.keys = scratch, copy.keys = scratch + kSample;
  for (uint32_t i = 0; i < kSample; ++i) {
    const uint64_t place = uint64_t(i * 0x9E3779B9u) * uint64_t(args.tokens) >> 32;
    sample.keys[sample.kept] = key_of(scores.sample(int64_t(place)));
    sample.kept += finite_range.holds(sample.keys[sample.kept]);
  }
  const int64_t drawn = copy.kept = sample.kept;
  if (drawn == 0) return finite_range;
  for (int64_t i = 0; i < drawn; ++i) copy.keys[i] = sample.keys[i];

  const int64_t index = order_index(args.numerator, args.denominator, args.rule, drawn);
  const double variance = double(index) * double(drawn - index) / double(drawn);
  const int64_t margin = 2 + int64_t(kDeviations * std::sqrt(variance));
  uint32_t low = finite_range.low, end = low + finite_range.span;
  if (index >= margin) low = find_key(&sample, 1, finite_range, index - margin);
  if (index + margin < drawn) end = find_key(&copy, 1, finite_range, index + margin);
  return {low, end - low};
}

}  // namespace

int64_t window_score_workspace(int64_t tokens, int64_t width) {
  const Windows windows(tokens, width);
  Arena arena(nullptr);
  for (int64_t worker = 0; worker < windows.workers(); ++worker) WindowScratch(arena, windows);
  return arena.bytes();
}

void window_score(const WindowArgs& args, int threads) {
  const WindowRule rule = window_rule(args);
  const Windows windows(args.tokens, rule.width);
  const Rows rows(args.cu_seqlens, args.rows, args.tokens);
  const int64_t workers = smaller(worthwhile(threads, args.tokens), windows.workers());
  parallel_for(workers, int(workers), [&](int64_t worker) {
    Arena arena(args.workspace);
    for (int64_t before = 0; before < worker; ++before) WindowScratch(arena, windows);
    const WindowScratch scratch(arena, windows);
    for (int64_t block = worker * windows.blocks / workers; block < (worker + 1) * windows.blocks / workers; ++block) {
      score_block(args, rows, rule, windows, block, scratch);
    }
  });
}

int64_t order_statistic_workspace(int64_t tokens) { return Selection(nullptr, tokens).bytes; }

void order_statistic(const OrderStatisticArgs& args, int threads) {
  const Scores scores(args);
  const Selection selection(args.workspace, args.tokens);
  const int64_t workers = smaller(worthwhile(threads, args.tokens), selection.most_workers);
  const auto begin = [&](int64_t worker) { return worker * args.tokens / workers; };
  for (int64_t w = 0; w < workers; ++w) selection.workers[w].keys = selection.keys + begin(w);

  KeyRange range = bracket(args, scores, selection.keys);
  int64_t population, nan, below, kept;
  const auto keep_all = [&] {
    parallel_for(workers, int(workers),
                 [&](int64_t w) { keep_range(scores, begin(w), begin(w + 1), range, selection.workers[w]); });
    population = nan = below = kept = 0;
    for (int64_t w = 0; w < workers; ++w) {
      const Worker& worker = selection.workers[w];
      population += worker.finite, nan += worker.nan, below += worker.below, kept += worker.kept;
    }
  };
  keep_all();
  args.counts[0] = population;
  args.counts[1] = nan;
  *args.threshold = NAN;
  if (population == 0) return;

  const int64_t index = order_index(args.numerator, args.denominator, args.rule, population);
  if (index < below || index >= below + kept) {
    range = finite_keys();
    keep_all();
  }
  *args.threshold = from_order_key(find_key(selection.workers, workers, range, index - below));
}

// ----------------------------------------------------------------------------------------------------------- selection

// Writes which of at most kPart scores are at or above the threshold, and returns whether all of them are finite.
template <bool kStrict>
bool compare(const float* __restrict score, int64_t n, float threshold, uint8_t* __restrict selected) {
  bool finite = true;
  int64_t i = 0;
#if defined(__AVX512F__)
  __mmask16 not_finite = 0;
  for (; i + 16 <= n; i += 16) {
    __builtin_prefetch(score + i + kAhead);
    const __m512 some = _mm512_loadu_ps(score + i);
    not_finite |= _mm512_fpclass_ps_mask(some, kNotFinite);
    const __mmask16 above = _mm512_cmp_ps_mask(some, _mm512_set1_ps(threshold), kStrict ? _CMP_GT_OQ : _CMP_GE_OQ);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(selected + i), _mm_maskz_set1_epi8(above, 1));
  }
  finite = not_finite == 0;
#endif
  int32_t above[kPart];  // compilers vectorise a comparison of floats into as many bits, and into bytes only from there
  for (int64_t j = i; j < n; ++j) above[j - i] = kStrict ? score[j] > threshold : score[j] >= threshold;
  for (int64_t j = i; j < n; ++j) selected[j] = uint8_t(above[j - i]);
  return finite & all_finite(score + i, n - i);
}

void select(const SelectArgs& args, int threads) {
  const Scores scores(args);
  const float threshold = *args.threshold;
  const auto compare_with = args.strict ? compare<true> : compare<false>;
  parallel_for(pieces(args.tokens, kPart), worthwhile(threads, args.tokens), [&](int64_t part) {
    const int64_t first = part * kPart, n = smaller(kPart, args.tokens - first);
    uint8_t* selected = args.selected + first;
    if (scores.are_values(first, n) && (compare_with(scores.values + first, n, threshold, selected) || scores.given)) return;
    float score[kPart];
    scores.write(first, n, score);
    compare_with(score, n, threshold, selected);
  });
}

}  // namespace hpo::HPO_ISA
