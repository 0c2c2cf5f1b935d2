// order_statistic in three launches (one more for tokens), and select in one. The definition is hpo_core/reference/entropy.py.
#include "bins.cuh"
#include "windows.cuh"

namespace hpo {
namespace {

// ---------------------------------------------------------------------------------------------------- order statistics
//
// Radix selection on order_key: 9 bits (sign and exponent), 12 and 11, a launch each. Sums of integer counts do not depend on
// the order. The first launch keeps one histogram per block, because no earlier launch zeroed shared memory for them; it
// zeroes the shared histograms of the other two.

constexpr int kThreads = kBinThreads, kWarps = kThreads / kWarp;
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
