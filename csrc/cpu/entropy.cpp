// window_score. The definition is hpo_core/reference/entropy.py.
#include "hpo/entropy.h"

#include <utility>

#include "entropy_scores.h"
#include "kernels.h"
#include "rows.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

constexpr int64_t kMostWorkers = 64;  // each has its own scratch; results do not depend on their number

// Whole windows are folded (summed, or reduced to an extremum) by doubling: P_1 = values, P_2k[t] = P_k[t] + P_k[t + k], and
// a window is the sum of the P_k of the binary digits of its width. No sum is ever subtracted from, and the order of the
// additions depends only on the offset inside the window, never on the packing. The few windows that their row cuts are
// running sums in float64 from the cut end.

struct Windows {
  int64_t block;  // tokens of one task
  int64_t reach;  // positions that the windows of a block cover at most
  int64_t blocks;

  Windows(int64_t tokens, int64_t width) {
    const int64_t cut_width = larger(1, smaller(width, 2 * tokens));
    block = larger(1, smaller(tokens, larger(2 * kTile, 4 * cut_width)));
    reach = block + cut_width;
    blocks = ceil_divide(tokens, block);
  }

  int64_t workers() const { return smaller(blocks, kMostWorkers); }
};

// The state of a token: it is in no row; its row cuts its window; or its window is whole.
enum State : int32_t { kOutside = 0, kCut = 1, kWhole = 2 };

// Index 0 of an array [reach] is the beginning of the window of the block's first token; index 0 of `state` is that token.
struct WindowScratch {
  float *folded, *next_folded, *window_folded;    // [reach]
  int32_t *usable, *next_usable, *window_usable;  // [reach], the number of folded values
  int32_t* state;                                 // [block]

  WindowScratch(Arena& arena, const Windows& windows) {
    const int64_t reach = windows.reach;
    folded = arena.take<float>(reach), next_folded = arena.take<float>(reach), window_folded = arena.take<float>(reach);
    usable = arena.take<int32_t>(reach), next_usable = arena.take<int32_t>(reach), window_usable = arena.take<int32_t>(reach);
    state = arena.take<int32_t>(windows.block);
  }
};

// out[j] = part[j] + further[j + distance]; elements beyond `length` are empty.
template <class T, class Fold>
void add_further(const T* __restrict part, const T* __restrict further, int64_t distance, int64_t length, T* __restrict out,
                 Fold fold) {
  const int64_t both = larger(0, length - distance);
  for (int64_t j = 0; j < both; ++j) out[j] = fold(part[j], further[j + distance]);
  for (int64_t j = both; j < length; ++j) out[j] = part[j];
}

// Folds P_1 in `part` into whole windows in `window`.
template <class T, class Fold>
void fold_windows(T*& part, T*& next, T*& window, int64_t width, int64_t length, Fold fold) {
  int64_t done = 0;  // the part of the window that the digits so far cover
  for (int64_t span = 1;; span *= 2) {
    if (width & span) {
      if (done == 0 && 2 * span > width) return std::swap(window, part);
      if (done == 0) {
        for (int64_t j = 0; j < length; ++j) window[j] = part[j];
      } else {
        add_further(window, part, done, length, next, fold);
        std::swap(window, next);
      }
      done += span;
    }
    if (2 * span > width) return;
    add_further(part, part, span, length, next, fold);
    std::swap(part, next);
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
    const int64_t first_whole = args.cu_seqlens[row] - rule.first, end_whole = args.cu_seqlens[row + 1] - rule.last;
    fill(first, kOutside);
    fill(smaller(row_end, first_whole), kCut);
    some_whole |= fill(smaller(row_end, end_whole), kWhole);
    fill(row_end, kCut);
  });
  fill(end, kOutside);
  return some_whole;
}

// Fills P_1 for the positions [start, start + length), and returns whether all of them that are in the pack are usable; no
// whole window reaches the others. If not, it also fills `usable`. Positions that are not usable are `empty`.
bool load_values(const WindowArgs& args, int64_t start, int64_t length, float empty, const WindowScratch& scratch) {
  const int64_t first = smaller(length, larger(0, -start)), end = larger(first, smaller(length, args.tokens - start));
  float* __restrict folded = scratch.folded;
  int32_t* __restrict usable = scratch.usable;
  const int32_t empty_bits = to_bits(empty);
  int32_t holes = 0;
  if (args.mask) {
    for (int64_t j = first; j < end; ++j) usable[j] = args.mask[start + j] ? -1 : 0;
    for (int64_t j = first; j < end; ++j) {
      const float value = args.values[start + j];
      usable[j] &= is_finite(value) ? -1 : 0;
      folded[j] = from_bits((to_bits(value) & usable[j]) | (empty_bits & ~usable[j]));
      holes |= ~usable[j];
    }
  } else {
    for (int64_t j = first; j < end; ++j) {
      const float value = args.values[start + j];
      const int32_t finite = is_finite(value) ? -1 : 0;
      folded[j] = from_bits((to_bits(value) & finite) | (empty_bits & ~finite));
      holes |= ~finite;
    }
  }
  for (int64_t j = 0; j < first; ++j) folded[j] = empty;
  for (int64_t j = end; j < length; ++j) folded[j] = empty;
  if (!holes) return true;
  if (!args.mask) {
    for (int64_t j = first; j < end; ++j) usable[j] = is_finite(args.values[start + j]) ? -1 : 0;
  }
  for (int64_t j = first; j < end; ++j) usable[j] = -usable[j];
  for (int64_t j = 0; j < first; ++j) usable[j] = 0;
  for (int64_t j = end; j < length; ++j) usable[j] = 0;
  return false;
}

// Windows cut at the beginning of their row, from its first token on; then windows cut only at its end, from its last token
// back.
template <class Fold>
void score_cut_windows(const WindowArgs& args, const Rows& rows, const WindowRule& rule, int64_t begin, int64_t end,
                       Fold fold) {
  const auto is_usable = [&](int64_t t) { return (!args.mask || args.mask[t]) && is_finite(args.values[t]); };
  for_each_row_in(rows, begin, end, [&](int64_t row, int64_t segment_begin, int64_t segment_end) {
    const int64_t row_begin = args.cu_seqlens[row], row_end = args.cu_seqlens[row + 1];
    double folded = double(Fold::empty());
    int32_t usable = 0;
    int64_t next = row_begin;
    int64_t t = segment_begin;
    for (; t < smaller(segment_end, row_begin - rule.first); ++t) {
      for (const int64_t window_end = smaller(t + rule.last + 1, row_end); next < window_end; ++next) {
        if (is_usable(next)) folded = fold(folded, double(args.values[next])), ++usable;
      }
      if (is_usable(t)) args.score[t] = window_score_of(float(folded), usable, int32_t(next - row_begin), false, rule);
    }
    folded = double(Fold::empty());
    usable = 0;
    next = row_end;
    const int64_t first_uncut = t;  // at the beginning of the row
    for (t = segment_end - 1; t >= larger(first_uncut, row_end - rule.last); --t) {
      for (const int64_t window_begin = smaller(row_end, t + rule.first); next > window_begin; --next) {
        if (is_usable(next - 1)) folded = fold(folded, double(args.values[next - 1])), ++usable;
      }
      if (is_usable(t)) args.score[t] = window_score_of(float(folded), usable, int32_t(row_end - next), false, rule);
    }
  });
}

using FinishLoop = void (*)(const WindowRule&, const WindowScratch&, const float* values, float* score, int64_t n);

// Scores from whole windows. Template parameters keep branches out of the loop.
template <Boundary kBoundary, Invalid kInvalid, bool kAllUsable>
void finish_scores(const WindowRule& any_rule, const WindowScratch& scratch, const float* __restrict values,
                   float* __restrict score, int64_t n) {
  WindowRule rule = any_rule;
  rule.boundary = kBoundary;
  rule.invalid = kInvalid;
  const float* __restrict folded = scratch.window_folded;
  const int32_t* __restrict usable = scratch.window_usable, * __restrict state = scratch.state;
  const int32_t width = int32_t(smaller(rule.width, INT32_MAX));
  for (int64_t i = 0; i < n; ++i) {
    const float score_of_window = window_score_of(folded[i], kAllUsable ? width : usable[i], width, true, rule);
    const float of_window = state[i] == kWhole ? score_of_window : -INFINITY;
    const float of_token = is_finite(values[i]) ? of_window : NAN;
    score[i] = state[i] == kOutside ? -INFINITY : of_token;
  }
}

FinishLoop pick_finish(const WindowRule& rule, bool all_usable) {
  if (all_usable) return finish_scores<Boundary::full, Invalid::skip, true>;  // boundary and invalid then make no difference
  const bool stop = rule.invalid == Invalid::stop;
  if (rule.boundary == Boundary::zero) {
    return stop ? finish_scores<Boundary::zero, Invalid::stop, false> : finish_scores<Boundary::zero, Invalid::skip, false>;
  }
  return stop ? finish_scores<Boundary::full, Invalid::stop, false> : finish_scores<Boundary::full, Invalid::skip, false>;
}

template <class Fold>
void score_block(const WindowArgs& args, const Rows& rows, const WindowRule& rule, const Windows& windows, int64_t block,
                 WindowScratch scratch, Fold fold) {
  const int64_t begin = block * windows.block, end = smaller(begin + windows.block, args.tokens);
  if (rule.first == 0 && rule.last == 0) {
    return score_tokens(args.values, args.mask, rows, begin, end, args.score + begin);
  }
  const int64_t n = end - begin;
  bool all_usable = true;
  if (load_states(args, rows, rule, begin, end, scratch.state)) {
    const int64_t length = n + rule.width - 1;  // with a whole window, the width is at most the number of tokens
    all_usable = load_values(args, begin + rule.first, length, Fold::empty(), scratch);
    fold_windows(scratch.folded, scratch.next_folded, scratch.window_folded, rule.width, length, fold);
    if (!all_usable) fold_windows(scratch.usable, scratch.next_usable, scratch.window_usable, rule.width, length, Sum{});
  }
  pick_finish(rule, all_usable)(rule, scratch, args.values + begin, args.score + begin, n);
  drop_masked(args.mask ? args.mask + begin : nullptr, args.score + begin, n);
  if (rule.boundary != Boundary::full) score_cut_windows(args, rows, rule, begin, end, fold);
}

template <class Fold>
void score_all(const WindowArgs& args, const Rows& rows, int threads, Fold fold) {
  const WindowRule rule = window_rule(args);
  const Windows windows(args.tokens, rule.width);
  const int64_t workers = smaller(worthwhile(threads, args.tokens), windows.workers());
  parallel_for(workers, int(workers), [&](int64_t worker) {
    Arena arena(args.workspace);
    for (int64_t before = 0; before < worker; ++before) WindowScratch(arena, windows);
    const WindowScratch scratch(arena, windows);
    for (int64_t block = worker * windows.blocks / workers; block < (worker + 1) * windows.blocks / workers; ++block) {
      score_block(args, rows, rule, windows, block, scratch, fold);
    }
  });
}

// Boundary::carry: the valid tokens whose full window is undefined get the mean of those of their row that are defined, or
// the row's first value if none is.
void carry(const WindowArgs& args, int64_t begin, int64_t end) {
  const auto is_valid = [&](int64_t t) { return !args.mask || args.mask[t]; };
  double sum = 0.0;
  int64_t defined = 0, first = end;
  for (int64_t t = begin; t < end; ++t) {
    if (!is_valid(t) || !is_finite(args.values[t])) continue;
    first = smaller(first, t);
    if (is_finite(args.score[t])) sum += double(args.score[t]), ++defined;
  }
  if (first == end) return;
  const float carried = defined > 0 ? float(sum / double(defined)) : args.values[first];
  for (int64_t t = first; t < end; ++t) {
    if (args.score[t] == -INFINITY && is_valid(t)) args.score[t] = carried;
  }
}

void carry_rows(const WindowArgs& args, const Rows& rows, int threads) {
  if (rows.broken)
    return for_each_row_in(rows, 0, args.tokens, [&](int64_t, int64_t begin, int64_t end) { carry(args, begin, end); });
  parallel_for(args.rows, worthwhile(threads, args.tokens),
               [&](int64_t row) { carry(args, args.cu_seqlens[row], args.cu_seqlens[row + 1]); });
}

}  // namespace

int64_t window_score_workspace(int64_t tokens, int64_t width) {
  const Windows windows(tokens, width);
  Arena arena(nullptr);
  for (int64_t worker = 0; worker < windows.workers(); ++worker) WindowScratch(arena, windows);
  return arena.bytes();
}

void window_score(const WindowArgs& args, int threads) {
  const Rows rows(args.cu_seqlens, args.rows, args.tokens);
  if (args.aggregate == WindowAggregate::max) score_all(args, rows, threads, Greatest{});
  else if (args.aggregate == WindowAggregate::min) score_all(args, rows, threads, Least{});
  else score_all(args, rows, threads, Sum{});
  if (args.boundary == Boundary::carry) carry_rows(args, rows, threads);
}

}  // namespace hpo::HPO_ISA
