// The windows of tokens, cut by their rows, for window_score and select.
#pragma once
#include <algorithm>

#include "hpo/entropy.h"
#include "units.cuh"

namespace hpo {

constexpr int kWindowThreads = 1024;  // of a block, each with a token

// The window of one token, cut by its row to `length` positions from `low`. `exists`: the token is in a row.
struct Window {
  bool exists;
  int64_t low, length;
};

struct WindowPack {
  WindowArgs args;
  WindowRule rule;
  int64_t first, last;  // of the rule, bounded by the pack, which changes no window's content

  // Every token is its own window: its score is its value.
  template <class Args>
  static WindowArgs of_tokens(const Args& args, float* score) {
    const auto full = Boundary::full;
    const auto mean = WindowAggregate::mean;
    return {args.tokens, args.rows, args.values, args.mask, args.cu_seqlens, 0, 0, full, Invalid::skip, mean, score, nullptr};
  }

  explicit WindowPack(const WindowArgs& args) : args(args), rule(window_rule(args)) {
    first = std::max(-args.tokens, std::min(rule.first, args.tokens));
    last = std::max(-args.tokens, std::min(rule.last, args.tokens));
  }

  HPO_INLINE int64_t width() const { return last - first + 1; }
  HPO_INLINE Pack pack() const { return {args.cu_seqlens, args.tokens, int(args.rows)}; }

  HPO_INLINE bool usable(int64_t token) const { return (!args.mask || args.mask[token]) && is_finite(args.values[token]); }

  HPO_INLINE void write_score(int64_t token, const Window& window, float folded, int32_t usable_terms) const {
    const bool whole = window.length == rule.width;
    const float of_window = window_score_of(folded, usable_terms, int32_t(window.length), whole, rule);
    args.score[token] = score(token, window, of_window);
  }

  HPO_INLINE float score(int64_t token, const Window& window, float of_window) const {
    const bool valid = window.exists && (!args.mask || args.mask[token]);
    return valid ? (is_finite(args.values[token]) ? of_window : NAN) : -INFINITY;
  }
};

__device__ __forceinline__ Window window_of(const WindowPack& windows, const RowSpan& rows, int64_t token) {
  const Pack pack = windows.pack();
  if (token >= pack.tokens || pack.rows == 0) return {};
  Range range = row_range(pack.cu_seqlens, row_in(pack, rows, token), pack.tokens);
  bool exists = range.begin <= token && token < range.end;
  const bool outside = token < pack.cu_seqlens[0] || token >= pack.cu_seqlens[pack.rows];
  if (!rows.ascending || (!exists && !outside)) {
    const int owner = find_owner(pack, token);
    exists = owner >= 0;
    if (exists) range = row_range(pack.cu_seqlens, owner, pack.tokens);
  }
  if (!exists) return {};
  const int64_t from = max(token + windows.first, range.begin), to = min(token + windows.last, range.end - 1);
  return {true, from, max(to - from + 1, int64_t(0))};
}

__device__ __forceinline__ int64_t token_of_thread() { return int64_t(blockIdx.x) * kWindowThreads + threadIdx.x; }

}  // namespace hpo
