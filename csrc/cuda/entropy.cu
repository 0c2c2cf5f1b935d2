// window_score in one launch: more for windows wider than a block's shared memory, one more to carry. The definition is
// hpo_core/reference/entropy.py.
#include "grid.cuh"
#include "windows.cuh"

namespace hpo {
namespace {

// Windows are folded (summed, or reduced to an extremum) by doubling: P_1 = values, P_2k[t] = P_k[t] + P_k[t + k]. A window is
// the sum of the P_k of the binary digits of its length, from the lowest. No sum is ever subtracted from, and the order of the
// additions depends only on the offset inside the window. The P_k of a window never leave its row, so they need no rows.

constexpr int64_t kSharedWidth = 2048;  // 2 * (kWindowThreads + kSharedWidth) parts and counts are 48 KiB

// Shared memory holds two copies of [kWindowThreads + width - 1] parts and counts, for every position in a window of the block.
template <class Fold>
__global__ void __launch_bounds__(kWindowThreads) score_windows(const WindowPack windows) {
  const Fold fold;
  const int thread = int(threadIdx.x), width = int(windows.width()), reach = kWindowThreads + width - 1;
  HPO_DYN_SHARED(float, parts);
  HPO_DYN_SHARED_AT(int, counts, 2 * reach * sizeof(float));
  const int64_t begin = int64_t(blockIdx.x) * kWindowThreads, end = min(begin + kWindowThreads, windows.args.tokens);
  const int64_t start = begin + windows.first;

  bool hole = false;
  for (int i = thread; i < reach; i += kWindowThreads) {
    const int64_t token = start + i;
    const bool inside = token >= 0 && token < windows.args.tokens, usable = inside && windows.usable(token);
    parts[i] = usable ? windows.args.values[token] : Fold::empty();
    counts[i] = usable;
    hole |= inside && !usable;
  }
  const Window window = window_of(windows, span_of(windows.pack(), begin, end), begin + thread);
  const bool counting = __syncthreads_or(hole);

  int from = 0, at = int(window.low - start), count = 0;
  float folded = Fold::empty();
#pragma unroll 1
  for (int span = 1; span <= width; span *= 2) {
    if (window.length & span) {
      folded = fold(folded, parts[from + at]);
      if (counting) count += counts[from + at];
      at += span;
    }
    if (2 * span > width) break;
    const int to = reach - from;
    for (int i = thread; i < reach; i += kWindowThreads) {
      const bool further = i + span < reach;
      parts[to + i] = fold(parts[from + i], further ? parts[from + i + span] : Fold::empty());
      if (counting) counts[to + i] = counts[from + i] + (further ? counts[from + i + span] : 0);
    }
    from = to;
    __syncthreads();
  }
  if (begin + thread < end) windows.write_score(begin + thread, window, folded, counting ? count : int(window.length));
}

// The same in global memory, a launch for each binary digit of the width.
struct WideWindows {
  Window* window;  // [tokens]
  float *folded, *level[2];  // [tokens]
  int *count, *counts[2];  // [tokens]

  int64_t place(void* base, int64_t tokens) {
    Placement placement(base);
    placement.take(window, tokens), placement.take(folded, tokens), placement.take(count, tokens);
    for (int i = 0; i < 2; ++i) placement.take(level[i], tokens), placement.take(counts[i], tokens);
    return placement.bytes();
  }
};

template <class Fold>
__global__ void __launch_bounds__(kWindowThreads) begin_wide_windows(const WindowPack windows, const WideWindows wide) {
  const int64_t begin = int64_t(blockIdx.x) * kWindowThreads, token = token_of_thread();
  const RowSpan rows = span_of(windows.pack(), begin, min(begin + kWindowThreads, windows.args.tokens));
  if (token >= windows.args.tokens) return;
  wide.window[token] = window_of(windows, rows, token);
  wide.folded[token] = Fold::empty();
  wide.count[token] = 0;
  wide.level[0][token] = windows.usable(token) ? windows.args.values[token] : Fold::empty();
  wide.counts[0][token] = windows.usable(token);
}

template <class Fold>
__global__ void __launch_bounds__(kWindowThreads) add_wide_digit(const WindowPack windows, const WideWindows wide, int digit) {
  const Fold fold;
  const int64_t token = token_of_thread(), span = int64_t(1) << digit;
  if (token >= windows.args.tokens) return;
  const bool odd = digit % 2;
  const float* const level = odd ? wide.level[1] : wide.level[0];
  const int* const counts = odd ? wide.counts[1] : wide.counts[0];
  float* const next = odd ? wide.level[0] : wide.level[1];
  int* const next_counts = odd ? wide.counts[0] : wide.counts[1];
  const Window window = wide.window[token];
  if (window.length & span) {
    const int64_t at = window.low + (window.length & (span - 1));
    wide.folded[token] = fold(wide.folded[token], level[at]);
    wide.count[token] += counts[at];
  }
  const bool further = token + span < windows.args.tokens;
  next[token] = fold(level[token], further ? level[token + span] : Fold::empty());
  next_counts[token] = counts[token] + (further ? counts[token + span] : 0);
}

__global__ void __launch_bounds__(kWindowThreads) finish_wide_windows(const WindowPack windows, const WideWindows wide) {
  const int64_t token = token_of_thread();
  if (token < windows.args.tokens) windows.write_score(token, wide.window[token], wide.folded[token], wide.count[token]);
}

// Boundary::carry, a block for a row: the valid tokens whose full window is undefined get the mean of those of their row that
// are defined, or the row's first value if none is. The order of the sum depends only on the place in the row.
__global__ void __launch_bounds__(kThreads) carry_rows(const WindowPack windows) {
  const WindowArgs& args = windows.args;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const Range range = row_range(args.cu_seqlens, row, args.tokens);
    double sums[2] = {};  // of defined scores, and their number
    int64_t first = INT64_MAX;
    for (int64_t token = range.begin + threadIdx.x; token < range.end; token += kThreads) {
      if (!windows.usable(token)) continue;
      first = min(first, token);
      const float score = load_relaxed(args.score + token);  // rows of broken offsets overlap: one writes scores of another
      if (is_finite(score)) sums[0] += double(score), sums[1] += 1.0;
    }
    block_sums(sums);
    first = -block_max(-first);
    if (first == INT64_MAX) continue;
    const float carried = sums[1] > 0.0 ? float(sums[0] / sums[1]) : args.values[first];
    for (int64_t token = range.begin + threadIdx.x; token < range.end; token += kThreads) {
      if (load_relaxed(args.score + token) == -INFINITY && windows.usable(token)) args.score[token] = carried;
    }
  }
}

template <class Fold>
void launch_windows(const WindowPack& windows, cudaStream_t stream) {
  const int64_t tokens = windows.args.tokens;
  const dim3 grid(unsigned((tokens + kWindowThreads - 1) / kWindowThreads)), block(kWindowThreads);
  if (windows.width() <= kSharedWidth) {
    const size_t bytes = 2 * size_t(kWindowThreads + windows.width() - 1) * (sizeof(float) + sizeof(int));
    HPO_LAUNCH(score_windows<Fold>, grid, block, bytes, stream, windows);
    return;
  }
  WideWindows wide;
  wide.place(windows.args.workspace, tokens);
  HPO_LAUNCH(begin_wide_windows<Fold>, grid, block, 0, stream, windows, wide);
  for (int digit = 0; int64_t(1) << digit <= std::min(windows.width(), tokens); ++digit) {
    HPO_LAUNCH(add_wide_digit<Fold>, grid, block, 0, stream, windows, wide, digit);
  }
  HPO_LAUNCH(finish_wide_windows, grid, block, 0, stream, windows, wide);
}

}  // namespace
}  // namespace hpo

extern "C" int64_t hpo_window_score_workspace(int64_t tokens, int64_t width) {
  return width > hpo::kSharedWidth ? hpo::WideWindows().place(nullptr, tokens) : 0;
}

extern "C" int hpo_window_score(const hpo::WindowArgs* args, int64_t context) {
  using namespace hpo;
  if (args->tokens == 0) return 0;
  const cudaStream_t stream = reinterpret_cast<cudaStream_t>(context);
  const WindowPack windows(*args);
  if (args->aggregate == WindowAggregate::max) launch_windows<Greatest>(windows, stream);
  else if (args->aggregate == WindowAggregate::min) launch_windows<Least>(windows, stream);
  else launch_windows<Sum>(windows, stream);
  if (args->boundary == Boundary::carry && args->rows > 0) {
    HPO_LAUNCH(carry_rows, blocks_of(args->rows), dim3(kThreads), 0, stream, windows);
  }
  return int(cudaGetLastError());
}
