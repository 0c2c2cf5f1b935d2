// window_score in one launch (more for windows wider than a block's shared memory), order_statistic in three (one more for
// tokens), and select in one. The definition is hpo_core/reference/entropy.py.
#include "hpo/entropy.h"

#include "units.cuh"

namespace hpo {
namespace {

// ------------------------------------------------------------------------------------------------------------- windows
//
// Sums are built by doubling: P_1 = values, P_2k[t] = P_k[t] + P_k[t + k]. A window is the sum of the P_k of the binary
// digits of its length, from the lowest. No sum is ever subtracted from, and the order of the additions depends only on the
// offset inside the window. The P_k of a window never leave its row, so the sums themselves need no rows.

constexpr int kWindowThreads = 1024;    // and tokens of a block
constexpr int64_t kSharedWidth = 2048;  // 2 * (kWindowThreads + kSharedWidth) sums and counts are 48 KiB

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
    return {args.tokens, args.rows, args.values, args.mask, args.cu_seqlens, 0, 0, full, Invalid::skip, score, nullptr};
  }

  explicit WindowPack(const WindowArgs& args) : args(args), rule(window_rule(args)) {
    first = std::max(-args.tokens, std::min(rule.first, args.tokens));
    last = std::max(-args.tokens, std::min(rule.last, args.tokens));
  }

  HPO_INLINE int64_t width() const { return last - first + 1; }
  HPO_INLINE Pack pack() const { return {args.cu_seqlens, args.tokens, int(args.rows)}; }

  HPO_INLINE bool usable(int64_t token) const { return (!args.mask || args.mask[token]) && is_finite(args.values[token]); }

  HPO_INLINE void write_score(int64_t token, const Window& window, float sum, int32_t usable_terms) const {
    const bool whole = window.length == rule.width;
    const float mean = window_mean(sum, usable_terms, int32_t(window.length), whole, rule);
    args.score[token] = score(token, window, mean);
  }

  HPO_INLINE float score(int64_t token, const Window& window, float mean) const {
    const bool valid = window.exists && (!args.mask || args.mask[token]);
    return valid ? (is_finite(args.values[token]) ? mean : NAN) : -INFINITY;
  }
};

// Rows of the tokens [begin, end) that a block works on.
struct RowsOfBlock {
  int first, last;
  bool ascending;
};

__device__ __forceinline__ RowsOfBlock rows_of_block(const Pack& pack, int64_t begin, int64_t end) {
  RowsOfBlock rows = {0, 0, true};
  rows.first = find_row(pack, begin, rows.ascending);
  rows.last = find_row(pack, end - 1, rows.ascending);
  return rows;
}

__device__ __forceinline__ Window window_of(const WindowPack& windows, const RowsOfBlock& rows, int64_t token) {
  const Pack pack = windows.pack();
  if (token >= pack.tokens || pack.rows == 0) return {};
  int low = rows.first, high = rows.last + 1;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (pack.cu_seqlens[middle] <= token) low = middle;
    else high = middle;
  }
  Range range = row_range(pack.cu_seqlens, low, pack.tokens);
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

// Shared memory holds two copies of [kWindowThreads + width - 1] sums and counts, for every position in a window of the block.
__global__ void __launch_bounds__(kWindowThreads) score_windows(const WindowPack windows) {
  const int thread = int(threadIdx.x), width = int(windows.width()), reach = kWindowThreads + width - 1;
  HPO_DYN_SHARED(float, sums);
  HPO_DYN_SHARED_AT(int, counts, 2 * reach * sizeof(float));
  const int64_t begin = int64_t(blockIdx.x) * kWindowThreads, end = min(begin + kWindowThreads, windows.args.tokens);
  const int64_t start = begin + windows.first;

  bool hole = false;
  for (int i = thread; i < reach; i += kWindowThreads) {
    const int64_t token = start + i;
    const bool inside = token >= 0 && token < windows.args.tokens, usable = inside && windows.usable(token);
    sums[i] = usable ? windows.args.values[token] : 0.0f;
    counts[i] = usable;
    hole |= inside && !usable;
  }
  const Window window = window_of(windows, rows_of_block(windows.pack(), begin, end), begin + thread);
  const bool counting = __syncthreads_or(hole);

  int from = 0, at = int(window.low - start), count = 0;
  float sum = 0.0f;
#pragma unroll 1
  for (int span = 1; span <= width; span *= 2) {
    if (window.length & span) {
      sum += sums[from + at];
      if (counting) count += counts[from + at];
      at += span;
    }
    if (2 * span > width) break;
    const int to = reach - from;
    for (int i = thread; i < reach; i += kWindowThreads) {
      const bool further = i + span < reach;
      sums[to + i] = sums[from + i] + (further ? sums[from + i + span] : 0.0f);
      if (counting) counts[to + i] = counts[from + i] + (further ? counts[from + i + span] : 0);
    }
    from = to;
    __syncthreads();
  }
  if (begin + thread < end) windows.write_score(begin + thread, window, sum, counting ? count : int(window.length));
}

// The same in global memory, a launch for each binary digit of the width.
struct WideWindows {
  Window* window;           // [tokens]
  float *sum, *level[2];    // [tokens]
  int *count, *counts[2];   // [tokens]

  int64_t place(void* base, int64_t tokens) {
    char* at = static_cast<char*>(base);
    const auto take = [&](auto*& array) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(at);
      at += (tokens * int64_t(sizeof *array) + 15) / 16 * 16;
    };
    take(window), take(sum), take(level[0]), take(level[1]), take(count), take(counts[0]), take(counts[1]);
    return at - static_cast<char*>(base);
  }
};

__device__ __forceinline__ int64_t token_of_thread() { return int64_t(blockIdx.x) * kWindowThreads + threadIdx.x; }

__global__ void __launch_bounds__(kWindowThreads) begin_wide_windows(const WindowPack windows, const WideWindows wide) {
  const int64_t begin = int64_t(blockIdx.x) * kWindowThreads, token = token_of_thread();
  const RowsOfBlock rows = rows_of_block(windows.pack(), begin, min(begin + kWindowThreads, windows.args.tokens));
  if (token >= windows.args.tokens) return;
  wide.window[token] = window_of(windows, rows, token);
  wide.sum[token] = 0.0f;
  wide.count[token] = 0;
  wide.level[0][token] = windows.usable(token) ? windows.args.values[token] : 0.0f;
  wide.counts[0][token] = windows.usable(token);
}

__global__ void __launch_bounds__(kWindowThreads) add_wide_digit(const WindowPack windows, const WideWindows wide, int digit) {
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
    wide.sum[token] += level[at];
    wide.count[token] += counts[at];
  }
  const bool further = token + span < windows.args.tokens;
  next[token] = level[token] + (further ? level[token + span] : 0.0f);
  next_counts[token] = counts[token] + (further ? counts[token + span] : 0);
}

__global__ void __launch_bounds__(kWindowThreads) finish_wide_windows(const WindowPack windows, const WideWindows wide) {
  const int64_t token = token_of_thread();
  if (token < windows.args.tokens) windows.write_score(token, wide.window[token], wide.sum[token], wide.count[token]);
}

// ---------------------------------------------------------------------------------------------------- order statistics
//
// Radix selection on order_key: 9 bits (sign and exponent), 12 and 11, a launch each. Sums of integer counts do not depend on
// the order. The first launch keeps one histogram per block, because no earlier launch zeroed shared memory for them; it
// zeroes the shared histograms of the other two.

constexpr int kThreads = 1024, kWarps = kThreads / kWarp;
constexpr int64_t kMaxBlocks = 64;
constexpr int kTopBins = 512, kMiddleBins = 4096, kLowBins = 2048;
constexpr int kCopies = 16;  // of the first histogram in a block: scores share few exponents, and atomics would collide

struct Selection {
  unsigned* top;                // [blocks][kTopBins]
  int64_t* nan;                 // [blocks]
  unsigned long long* middle;   // [kMiddleBins]
  unsigned long long* low;      // [kLowBins]
  unsigned* tickets;            // [2]
  int64_t* index;               // the rest of the index after two digits; -1: no score is finite
  unsigned* prefix;             // the two digits
  float* score;                 // [tokens], scores of tokens

  int64_t place(void* base, int64_t tokens) {
    char* at = static_cast<char*>(base);
    const auto take = [&](auto*& array, int64_t count) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(at);
      at += (count * int64_t(sizeof *array) + 15) / 16 * 16;
    };
    take(top, kMaxBlocks * kTopBins), take(nan, kMaxBlocks), take(middle, kMiddleBins), take(low, kLowBins);
    take(tickets, 2), take(index, 1), take(prefix, 1), take(score, tokens);
    return at - static_cast<char*>(base);
  }
};

// Calls `visit(score)` for every score, all lanes of a warp together; a lane without a score passes -INFINITY, which is none.
template <class Visit>
__device__ __forceinline__ void for_each_score(const OrderStatisticArgs& args, Visit visit) {
  const int before = int(reinterpret_cast<uintptr_t>(args.values) / sizeof(float) % 4);  // floats since a 16-byte boundary
  const int64_t groups = (before + args.tokens + 3) / 4, warps = int64_t(gridDim.x) * kWarps;
#pragma unroll 1
  for (int64_t base = (int64_t(blockIdx.x) * kWarps + warp_in_block()) * kWarp; base < groups; base += warps * kWarp) {
    const int64_t first = (base + lane()) * 4 - before;
    float scores[4];
    if (first >= 0 && first + 4 <= args.tokens) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(args.values + first));
      scores[0] = four.x, scores[1] = four.y, scores[2] = four.z, scores[3] = four.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[i] = first + i >= 0 && first + i < args.tokens ? __ldg(args.values + first + i) : -INFINITY;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) visit(scores[i]);
  }
}

struct Bin {
  int bin;
  int64_t index;  // of the sought key among those of the bin
};

// The bin of the index-th key in ascending order, in every thread. `count_of(bin)` is called by one thread for each bin.
template <int BINS, class CountOf>
__device__ __forceinline__ Bin find_bin(int64_t index, CountOf count_of) {
  constexpr int kEach = (BINS + kThreads - 1) / kThreads;
  HPO_SHARED(int64_t, warp_totals, [kWarps]);
  HPO_SHARED(int64_t, found, [2]);
  int64_t counts[kEach], own = 0;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int bin = int(threadIdx.x) * kEach + k;
    counts[k] = bin < BINS ? count_of(bin) : 0;
    own += counts[k];
  }
  int64_t through = own;  // inclusive sum over the threads so far
  for (int step = 1; step < kWarp; step *= 2) {
    const int64_t before = __shfl_up_sync(kFullWarp, through, step);
    if (lane() >= step) through += before;
  }
  if (lane() == kWarp - 1) warp_totals[warp_in_block()] = through;
  __syncthreads();
  int64_t left = index - (through - own);
  for (int warp = 0; warp < warp_in_block(); ++warp) left -= warp_totals[warp];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    if (left >= 0 && left < counts[k]) {
      found[0] = int(threadIdx.x) * kEach + k;
      found[1] = left;
    }
    left -= counts[k];
  }
  __syncthreads();
  const Bin bin = {int(found[0]), found[1]};
  __syncthreads();
  return bin;
}

// Adds one to the bin of every lane with `counts`. One atomic adds equal scores, which are frequent with ties.
__device__ __forceinline__ void count_bin(HPO_SHARED_POINTER(unsigned) histogram, bool counts, unsigned bin) {
  const unsigned counting = __ballot_sync(kFullWarp, counts);
  if (counting == 0) return;
  const int leader = __ffs(int(counting)) - 1;
  const unsigned bin_of_leader = __shfl_sync(kFullWarp, bin, leader);
  const bool same = counts && bin == bin_of_leader;
  const unsigned together = __ballot_sync(kFullWarp, same);
  if (lane() == leader) atomicAdd(&histogram[bin], unsigned(__popc(together)));
  else if (counts && !same) atomicAdd(&histogram[bin], 1u);
}

__global__ void __launch_bounds__(kThreads) count_top(const OrderStatisticArgs args, const Selection selection) {
  HPO_SHARED(unsigned, histogram, [kTopBins * kCopies]);
  HPO_SHARED(int64_t, nan_of_warp, [kWarps]);
  const int thread_in_grid = int(blockIdx.x) * kThreads + int(threadIdx.x), threads = int(gridDim.x) * kThreads;
  for (int i = thread_in_grid; i < kMiddleBins; i += threads) selection.middle[i] = 0;
  for (int i = thread_in_grid; i < kLowBins; i += threads) selection.low[i] = 0;
  if (thread_in_grid < 2) selection.tickets[thread_in_grid] = 0;

  for (int i = int(threadIdx.x); i < kTopBins * kCopies; i += kThreads) histogram[i] = 0;
  __syncthreads();
  int64_t nan = 0;
  for_each_score(args, [&](float score) {
    nan += score != score;
    if (is_finite(score)) atomicAdd(&histogram[(order_key(score) >> 23) * kCopies + lane() % kCopies], 1u);
  });
  nan = warp_sum(nan);
  if (lane() == 0) nan_of_warp[warp_in_block()] = nan;
  __syncthreads();
  if (threadIdx.x < kTopBins) {
    unsigned count = 0;
    for (int copy = 0; copy < kCopies; ++copy) count += histogram[int(threadIdx.x) * kCopies + (copy + lane()) % kCopies];
    selection.top[blockIdx.x * kTopBins + threadIdx.x] = count;
  }
  if (threadIdx.x == 0) {
    int64_t total = 0;
    for (int warp = 0; warp < kWarps; ++warp) total += nan_of_warp[warp];
    selection.nan[blockIdx.x] = total;
  }
}

// The totals of the first launch's histograms in shared memory, and their sum.
__device__ __forceinline__ int64_t add_up_top(const Selection& selection, HPO_SHARED_POINTER(unsigned long long) totals) {
  constexpr int kColumns = kTopBins / 4, kParts = kThreads / kColumns;
  HPO_SHARED(int64_t, warp_totals, [kWarps]);
  for (int i = int(threadIdx.x); i < kTopBins; i += kThreads) totals[i] = 0;
  __syncthreads();
  const int column = int(threadIdx.x) % kColumns;
  int64_t sums[4] = {};
#pragma unroll 8
  for (int block = int(threadIdx.x) / kColumns; block < int(gridDim.x); block += kParts) {
    const uint4 four = *reinterpret_cast<const uint4*>(selection.top + block * kTopBins + column * 4);
    sums[0] += four.x, sums[1] += four.y, sums[2] += four.z, sums[3] += four.w;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (sums[i] > 0) atomicAdd(&totals[column * 4 + i], static_cast<unsigned long long>(sums[i]));
  }
  const int64_t of_warp = warp_sum(sums[0] + sums[1] + sums[2] + sums[3]);
  if (lane() == 0) warp_totals[warp_in_block()] = of_warp;
  __syncthreads();
  int64_t population = 0;
  for (int warp = 0; warp < kWarps; ++warp) population += warp_totals[warp];
  return population;
}

// Adds a block's histogram to the shared histogram of all blocks.
__device__ __forceinline__ void add_to_all(HPO_SHARED_POINTER(unsigned) histogram, int bins, unsigned long long* all) {
  __syncthreads();
  for (int i = int(threadIdx.x); i < bins; i += kThreads) {
    if (histogram[i] > 0) atomicAdd(&all[i], static_cast<unsigned long long>(histogram[i]));
  }
}

__global__ void __launch_bounds__(kThreads, 1) count_middle(const OrderStatisticArgs args, const Selection selection) {
  HPO_SHARED(unsigned long long, totals, [kTopBins]);
  HPO_SHARED(unsigned, histogram, [kMiddleBins]);
  for (int i = int(threadIdx.x); i < kMiddleBins; i += kThreads) histogram[i] = 0;
  const int64_t population = add_up_top(selection, totals);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    int64_t nan = 0;
    for (int block = 0; block < int(gridDim.x); ++block) nan += selection.nan[block];
    args.counts[0] = population;
    args.counts[1] = nan;
    *selection.index = -1;
  }
  if (population == 0) return;
  const int64_t index = order_index(args.numerator, args.denominator, args.rule, population);
  const Bin top = find_bin<kTopBins>(index, [&](int bin) { return int64_t(totals[bin]); });
  for_each_score(args, [&](float score) {
    const unsigned key = order_key(score);
    count_bin(histogram, is_finite(score) && key >> 23 == unsigned(top.bin), key >> 11 & (kMiddleBins - 1));
  });
  add_to_all(histogram, kMiddleBins, selection.middle);
  if (!last_block(selection.tickets)) return;
  const Bin middle = find_bin<kMiddleBins>(top.index, [&](int bin) { return int64_t(__ldcg(selection.middle + bin)); });
  if (threadIdx.x == 0) {
    *selection.index = middle.index;
    *selection.prefix = unsigned(top.bin) << 12 | unsigned(middle.bin);
  }
}

__global__ void __launch_bounds__(kThreads) count_low(const OrderStatisticArgs args, const Selection selection) {
  HPO_SHARED(unsigned, histogram, [kLowBins]);
  const int64_t index = *selection.index;
  if (index < 0) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *args.threshold = NAN;
    return;
  }
  const unsigned prefix = *selection.prefix;
  for (int i = int(threadIdx.x); i < kLowBins; i += kThreads) histogram[i] = 0;
  __syncthreads();
  for_each_score(args, [&](float score) {
    const unsigned key = order_key(score);
    count_bin(histogram, is_finite(score) && key >> 11 == prefix, key & (kLowBins - 1));
  });
  add_to_all(histogram, kLowBins, selection.low);
  if (!last_block(selection.tickets + 1)) return;
  const Bin low = find_bin<kLowBins>(index, [&](int bin) { return int64_t(__ldcg(selection.low + bin)); });
  if (threadIdx.x == 0) *args.threshold = from_order_key(prefix << 11 | unsigned(low.bin));
}

// ----------------------------------------------------------------------------------------------------------- selection

__global__ void __launch_bounds__(kWindowThreads) select_tokens(const WindowPack windows, const SelectArgs args) {
  const int64_t begin = int64_t(blockIdx.x) * kWindowThreads, token = token_of_thread();
  Window window = {};
  if (args.cu_seqlens) {
    const RowsOfBlock rows = rows_of_block(windows.pack(), begin, min(begin + kWindowThreads, args.tokens));
    window = window_of(windows, rows, token);
  }
  if (token >= args.tokens) return;
  const float score = args.cu_seqlens ? windows.score(token, window, args.values[token]) : args.values[token];
  args.selected[token] = args.strict ? score > *args.threshold : score >= *args.threshold;
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
  if (windows.width() <= kSharedWidth) {
    const int64_t blocks = (args->tokens + kWindowThreads - 1) / kWindowThreads;
    const size_t bytes = 2 * size_t(kWindowThreads + windows.width() - 1) * (sizeof(float) + sizeof(int));
    HPO_LAUNCH(score_windows, dim3(unsigned(blocks)), dim3(kWindowThreads), bytes, stream, windows);
    return int(cudaGetLastError());
  }
  WideWindows wide;
  wide.place(args->workspace, args->tokens);
  const dim3 grid(unsigned((args->tokens + kWindowThreads - 1) / kWindowThreads)), block(kWindowThreads);
  HPO_LAUNCH(begin_wide_windows, grid, block, 0, stream, windows, wide);
  for (int digit = 0; int64_t(1) << digit <= std::min(windows.width(), args->tokens); ++digit) {
    HPO_LAUNCH(add_wide_digit, grid, block, 0, stream, windows, wide, digit);
  }
  HPO_LAUNCH(finish_wide_windows, grid, block, 0, stream, windows, wide);
  return int(cudaGetLastError());
}

extern "C" int64_t hpo_order_statistic_workspace(int64_t tokens) { return hpo::Selection().place(nullptr, tokens); }

extern "C" int hpo_order_statistic(const hpo::OrderStatisticArgs* args, int64_t context) {
  using namespace hpo;
  const cudaStream_t stream = reinterpret_cast<cudaStream_t>(context);
  Selection selection;
  selection.place(args->workspace, args->tokens);
  OrderStatisticArgs of_scores = *args;
  if (args->cu_seqlens) {
    const WindowArgs tokens = WindowPack::of_tokens(*args, selection.score);
    if (const int status = hpo_window_score(&tokens, context)) return status;
    of_scores.values = selection.score;
  }
  const int64_t wanted = (args->tokens + 4 * kThreads - 1) / (4 * kThreads);
  const dim3 grid(unsigned(std::max(int64_t(1), std::min(wanted, kMaxBlocks)))), block(kThreads);
  HPO_LAUNCH(count_top, grid, block, 0, stream, of_scores, selection);
  HPO_LAUNCH(count_middle, grid, block, 0, stream, of_scores, selection);
  HPO_LAUNCH(count_low, grid, block, 0, stream, of_scores, selection);
  if (const int status = int(cudaGetLastError())) return status;
  if (!args->selected) return 0;
  const SelectArgs tokens = selection_of(*args);
  return hpo_select(&tokens, context);
}

extern "C" int hpo_select(const hpo::SelectArgs* args, int64_t context) {
  using namespace hpo;
  if (args->tokens == 0) return 0;
  const cudaStream_t stream = reinterpret_cast<cudaStream_t>(context);
  const WindowPack windows(WindowPack::of_tokens(*args, nullptr));
  const dim3 grid(unsigned((args->tokens + kWindowThreads - 1) / kWindowThreads)), block(kWindowThreads);
  HPO_LAUNCH(select_tokens, grid, block, 0, stream, windows, *args);
  return int(cudaGetLastError());
}
