// order_statistic and its mask in one launch (one more for tokens), and select in one. The definition is
// hpo_core/reference/entropy.py.
#include "bins.cuh"
#include "grid.cuh"
#include "windows.cuh"

namespace hpo {
namespace {

// ---------------------------------------------------------------------------------------------------- order statistics
//
// Radix selection on order_key: 9 bits (sign and exponent), 12 and 11, and a barrier of all blocks after each. Sums of
// integer counts do not depend on the order. Counts of other blocks are read past the first-level cache.

constexpr int kTopBins = 512, kMiddleBins = 4096, kLowBins = 2048;
constexpr int kCopies = 16;  // of the first histogram in a block: scores share few exponents, and atomics would collide

struct Selection {
  unsigned long long *top, *middle, *low;  // [kTopBins], [kMiddleBins], [kLowBins]: histograms of all blocks
  unsigned long long* nan;                 // [1]
  float* score;                            // [tokens], scores of tokens

  int64_t place(void* base, int64_t tokens) {
    Placement placement(base);
    placement.take(top, kTopBins), placement.take(middle, kMiddleBins), placement.take(low, kLowBins);
    placement.take(nan, 1), placement.take(score, tokens);
    return placement.bytes();
  }
};

__device__ __forceinline__ int thread_in_grid() { return int(blockIdx.x) * kBinThreads + int(threadIdx.x); }
__device__ __forceinline__ int threads_of_grid() { return int(gridDim.x) * kBinThreads; }

// Calls `visit(score)` for every score, all lanes of a warp together; a lane without a score passes -INFINITY, which is none.
template <class Visit>
__device__ __forceinline__ void for_each_score(const OrderStatisticArgs& args, Visit visit) {
  constexpr int kWarpsOfBlock = kBinThreads / kWarp;
  const int misalignment = int(reinterpret_cast<uintptr_t>(args.values) / sizeof(float) % 4);  // floats past 16 bytes
  const int64_t groups = (misalignment + args.tokens + 3) / 4, warps = int64_t(gridDim.x) * kWarpsOfBlock;
#pragma unroll 1
  for (int64_t base = (int64_t(blockIdx.x) * kWarpsOfBlock + warp_in_block()) * kWarp; base < groups; base += warps * kWarp) {
    const int64_t first = (base + lane()) * 4 - misalignment;
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

// Adds a block's histogram to that of all blocks, and waits for theirs.
__device__ __forceinline__ void add_to_all(HPO_SHARED_POINTER(unsigned) histogram, int bins, unsigned long long* all) {
  __syncthreads();
  for (int i = int(threadIdx.x); i < bins; i += kBinThreads) {
    if (histogram[i] > 0) atomicAdd(&all[i], static_cast<unsigned long long>(histogram[i]));
  }
  sync_grid();
}

// Counts the first digit of the finite scores, and the scores that are NaN.
__device__ __forceinline__ void count_top(const OrderStatisticArgs& args, const Selection& selection,
                                          HPO_SHARED_POINTER(unsigned) histogram) {
  clear_histogram(histogram, kTopBins * kCopies);
  int64_t nan = 0;
  for_each_score(args, [&](float score) {
    nan += score != score;
    if (is_finite(score)) atomicAdd(&histogram[(order_key(score) >> 23) * kCopies + lane() % kCopies], 1u);
  });
  nan = warp_sum(nan);
  if (lane() == 0 && nan > 0) atomicAdd(selection.nan, static_cast<unsigned long long>(nan));
  __syncthreads();
  unsigned count = 0;
  if (threadIdx.x < kTopBins) {
    for (int copy = 0; copy < kCopies; ++copy) count += histogram[int(threadIdx.x) * kCopies + (copy + lane()) % kCopies];
  }
  __syncthreads();
  if (threadIdx.x < kTopBins) histogram[threadIdx.x] = count;
  add_to_all(histogram, kTopBins, selection.top);
}

// The sum of the first histogram, in every thread.
__device__ __forceinline__ int64_t population_of(const Selection& selection) {
  HPO_SHARED(unsigned long long, total, );
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  const int64_t own = threadIdx.x < kTopBins ? int64_t(__ldcg(selection.top + threadIdx.x)) : 0, of_warp = warp_sum(own);
  if (lane() == 0 && of_warp > 0) atomicAdd(&total, static_cast<unsigned long long>(of_warp));
  __syncthreads();
  return int64_t(total);
}

// The threshold, in every thread; NaN for an empty population.
__device__ __forceinline__ float find_threshold(const OrderStatisticArgs& args, const Selection& selection) {
  HPO_SHARED(unsigned, histogram, [kTopBins * kCopies]);
  count_top(args, selection, histogram);
  const int64_t population = population_of(selection);
  if (thread_in_grid() == 0) args.counts[0] = population, args.counts[1] = int64_t(__ldcg(selection.nan));
  if (population == 0) return NAN;  // for all blocks alike, so that none waits for another
  const auto counts_of = [](const unsigned long long* all) { return [=](int bin) { return int64_t(__ldcg(all + bin)); }; };
  const int64_t index = order_index(args.numerator, args.denominator, args.rule, population);
  const Bin top = find_bin<kTopBins>(index, counts_of(selection.top));
  clear_histogram(histogram, kMiddleBins);
  for_each_score(args, [&](float score) {
    const unsigned key = order_key(score);
    count_bin(histogram, is_finite(score) && key >> 23 == unsigned(top.bin), key >> 11 & (kMiddleBins - 1));
  });
  add_to_all(histogram, kMiddleBins, selection.middle);
  const Bin middle = find_bin<kMiddleBins>(top.index, counts_of(selection.middle));
  const unsigned prefix = unsigned(top.bin) << 12 | unsigned(middle.bin);
  clear_histogram(histogram, kLowBins);
  for_each_score(args, [&](float score) {
    const unsigned key = order_key(score);
    count_bin(histogram, is_finite(score) && key >> 11 == prefix, key & (kLowBins - 1));
  });
  add_to_all(histogram, kLowBins, selection.low);
  const Bin low = find_bin<kLowBins>(middle.index, counts_of(selection.low));
  return from_order_key(prefix << 11 | unsigned(low.bin));
}

__device__ __forceinline__ bool is_selected(bool strict, float score, float threshold) {
  return strict ? score > threshold : score >= threshold;
}

__global__ void __launch_bounds__(kBinThreads, 1) select_top(const OrderStatisticArgs args, const Selection selection) {
  for (int i = thread_in_grid(); i < kTopBins; i += threads_of_grid()) selection.top[i] = 0;
  for (int i = thread_in_grid(); i < kMiddleBins; i += threads_of_grid()) selection.middle[i] = 0;
  for (int i = thread_in_grid(); i < kLowBins; i += threads_of_grid()) selection.low[i] = 0;
  if (thread_in_grid() == 0) *selection.nan = 0;
  sync_grid();
  const float threshold = find_threshold(args, selection);
  if (thread_in_grid() == 0) *args.threshold = threshold;
  if (!args.selected) return;
#pragma unroll 1
  for (int64_t token = thread_in_grid(); token < args.tokens; token += threads_of_grid()) {
    args.selected[token] = is_selected(args.strict, __ldg(args.values + token), threshold);
  }
}

// ----------------------------------------------------------------------------------------------------------- selection

__global__ void __launch_bounds__(kWindowThreads) select_tokens(const WindowPack windows, const SelectArgs args) {
  const int64_t begin = int64_t(blockIdx.x) * kWindowThreads, token = token_of_thread();
  Window window = {};
  if (args.cu_seqlens) {
    const RowSpan rows = span_of(windows.pack(), begin, min(begin + kWindowThreads, args.tokens));
    window = window_of(windows, rows, token);
  }
  if (token >= args.tokens) return;
  const float score = args.cu_seqlens ? windows.score(token, window, args.values[token]) : args.values[token];
  args.selected[token] = is_selected(args.strict, score, *args.threshold);
}

}  // namespace
}  // namespace hpo

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
  const int blocks = blocks_together<select_top, kBinThreads>((args->tokens + 3) / 4);
  HPO_LAUNCH_TOGETHER(select_top, dim3(unsigned(blocks)), dim3(kBinThreads), 0, stream, of_scores, selection);
  return int(cudaGetLastError());
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
