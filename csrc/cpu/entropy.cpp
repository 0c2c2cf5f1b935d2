// window_score and order_statistic. The definition is hpo_core/reference/entropy.py.
#include "hpo/entropy.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "kernels.h"
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

void drop_masked(const WindowArgs& args, int64_t begin, int64_t end) {
  if (!args.mask) return;
  for (int64_t t = begin; t < end; ++t) args.score[t] = args.mask[t] ? args.score[t] : -INFINITY;
}

// The window of a token alone: its score is its value.
void score_tokens(const WindowArgs& args, const Rows& rows, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) args.score[t] = -INFINITY;
  for_each_row_in(rows, begin, end, [&](int64_t, int64_t first, int64_t row_end) {
    for (int64_t t = first; t < row_end; ++t) args.score[t] = is_finite(args.values[t]) ? args.values[t] : NAN;
  });
  drop_masked(args, begin, end);
}

void score_block(const WindowArgs& args, const Rows& rows, const WindowRule& rule, const Windows& windows, int64_t block,
                 WindowScratch scratch) {
  const int64_t begin = block * windows.block, end = smaller(begin + windows.block, args.tokens);
  const int n = int(end - begin);
  bool all_usable = true;
  if (rule.first == 0 && rule.last == 0) return score_tokens(args, rows, begin, end);
  if (load_states(args, rows, rule, begin, end, scratch.state)) {
    const int64_t length = n + rule.width - 1;  // with a whole window, the width is at most the number of tokens
    all_usable = load_values(args, begin + rule.first, length, scratch);
    sum_windows(scratch.sum, scratch.next_sum, scratch.window_sum, rule.width, length);
    if (!all_usable) sum_windows(scratch.usable, scratch.next_usable, scratch.window_usable, rule.width, length);
  }
  pick_finish(rule, all_usable)(rule, scratch, args.values + begin, args.score + begin, n);
  drop_masked(args, begin, end);
  if (rule.boundary != Boundary::full) score_cut_windows(args, rows, rule, begin, end);
}

// ---------------------------------------------------------------------------------------------------- order statistics
//
// On order_key. A sample of the scores brackets the one wanted; a pass over all of them keeps the keys inside the bracket, and
// only those are searched, 11 bits at a time. The pass counts what it leaves out, so that a bracket that missed is noticed:
// then it is opened for every finite score. The sample decides how long this takes, never what comes out.

constexpr int kDigit = 11, kBins = 1 << kDigit;
constexpr int kCounters = 2;  // side by side, because equal keys in a row would wait for each other's increment
constexpr int64_t kKeys = 1024;
constexpr int64_t kSample = 2048;
constexpr int64_t kMargin = 96;  // ranks of the sample on each side of the one wanted: four standard deviations

// The keys low, ..., low + span.
struct KeyRange {
  uint32_t low, span;

  bool holds(uint32_t key) const { return key - low <= span; }
};

inline KeyRange finite_keys() {
  const uint32_t low = order_key(-INFINITY) + 1;
  return {low, order_key(INFINITY) - 1 - low};
}

// What one worker found in its own part of the scores.
struct Worker {
  int64_t bins[kCounters][kBins];
  uint32_t* keys;
  int64_t kept;  // how many keys there are
  int64_t finite, nan, below;
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

// Fetches the next tile from memory while this one is looked at.
inline void prefetch(const float* scores, int64_t n) {
  for (int64_t i = 0; i < smaller(n, kKeys); i += 16) __builtin_prefetch(scores + i);
}

// Counts all scores and keeps the keys of those in the range.
void keep_range(const float* scores, int64_t n, KeyRange range, Worker& worker) {
  const KeyRange finite_range = finite_keys();
  uint32_t keys[kKeys];
  int64_t kept = 0, finite = 0, nan = 0, below = 0;
  for (int64_t first = 0; first < n; first += kKeys) {
    const int count = int(smaller(kKeys, n - first));
    int32_t finite_here = 0, nan_here = 0, below_here = 0;
    for (int i = 0; i < count; ++i) {
      const float score = scores[first + i];
      keys[i] = order_key(score);
      finite_here += finite_range.holds(keys[i]);
      nan_here += score != score;
      below_here += finite_range.holds(keys[i]) & (keys[i] < range.low);
    }
    finite += finite_here, nan += nan_here, below += below_here;
    prefetch(scores + first + count, n - first - count);
    kept += keep(keys, count, range, worker.keys + kept);
  }
  worker.kept = kept, worker.finite = finite, worker.nan = nan, worker.below = below;
}

// Keeps the keys in the range and counts their digits.
void count_digits(KeyRange range, int shift, Worker& worker) {
  worker.kept = keep(worker.keys, worker.kept, range, worker.keys);
  for (auto& bins : worker.bins) {
    for (int64_t& bin : bins) bin = 0;
  }
  for (int64_t i = 0; i < worker.kept; ++i) ++worker.bins[i % kCounters][(worker.keys[i] - range.low) >> shift];
}

// The index-th in ascending order of the workers' keys, all of them in the range. They are used up.
uint32_t find_key(Worker* workers, int64_t count, KeyRange range, int64_t index) {
  int shift = 32;
  while (range.span > 0) {
    while (shift > 0 && range.span >> (shift - 1) == 0) --shift;  // no more bits than the span has
    shift = int(larger(0, shift - kDigit));
    parallel_for(count, int(count), [&](int64_t w) { count_digits(range, shift, workers[w]); });
    uint32_t digit = 0;
    for (;; ++digit) {
      int64_t here = 0;
      for (int64_t w = 0; w < count; ++w) {
        for (const auto& bins : workers[w].bins) here += bins[digit];
      }
      if (index < here || digit == range.span >> shift) break;
      index -= here;
    }
    const uint32_t rest = range.span - (digit << shift), widest = (1u << shift) - 1;
    range = {range.low + (digit << shift), rest < widest ? rest : widest};
  }
  return range.low;
}

// Where the key wanted probably is. The places of the sample have no period that could be one of the rows as well.
KeyRange bracket(const OrderStatisticArgs& args, Worker& worker) {
  const KeyRange finite_range = finite_keys();
  const auto draw = [&] {
    worker.kept = 0;
    for (uint32_t i = 0; i < kSample; ++i) {
      const uint64_t place = uint64_t(i * 0x9E3779B9u) * uint64_t(args.tokens) >> 32;
      worker.keys[worker.kept] = order_key(args.score[place]);
      worker.kept += finite_range.holds(worker.keys[worker.kept]);
    }
    return worker.kept;
  };
  const int64_t drawn = args.tokens < 4 * kSample ? 0 : draw();
  if (drawn == 0) return finite_range;
  const int64_t index = order_index(args.numerator, args.denominator, args.rule, drawn);
  uint32_t low = finite_range.low, end = low + finite_range.span;
  if (index >= kMargin) low = find_key(&worker, 1, finite_range, index - kMargin);
  draw();
  if (index + kMargin < drawn) end = find_key(&worker, 1, finite_range, index + kMargin);
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
  const Selection selection(args.workspace, args.tokens);
  const int64_t workers = smaller(worthwhile(threads, args.tokens), selection.most_workers);
  const auto begin = [&](int64_t worker) { return worker * args.tokens / workers; };
  for (int64_t w = 0; w < workers; ++w) selection.workers[w].keys = selection.keys + begin(w);

  KeyRange range = bracket(args, selection.workers[0]);
  int64_t population, nan, below, kept;
  const auto keep_in_part = [&](int64_t w) {
    keep_range(args.score + begin(w), begin(w + 1) - begin(w), range, selection.workers[w]);
  };
  const auto keep_all = [&] {
    parallel_for(workers, int(workers), keep_in_part);
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

}  // namespace hpo::HPO_ISA
