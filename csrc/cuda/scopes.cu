// order_statistics in one launch: a block for a scope. The definition is hpo_core/reference/scopes.py.
//
// Radix selection on order_key, 11, 11 and 10 bits, with a histogram in shared memory. Counts are integers, so results do not
// depend on the order.
#include <algorithm>

#include "bins.cuh"
#include "hpo/entropy.h"
#include "hpo/gates.h"

namespace hpo {
namespace {

constexpr int kBins = 2048;

// The number of threads before this one in its block with `flag`, and that of all; the call is a block barrier.
struct Count {
  int before, all;
};

__device__ __forceinline__ Count count_flags(bool flag) {
  HPO_SHARED(int, of_warp, [kBinThreads / kWarp]);
  const unsigned flags = __ballot_sync(kFullWarp, flag);
  if (lane() == 0) of_warp[warp_in_block()] = __popc(flags);
  __syncthreads();
  Count count = {__popc(flags & ((1u << lane()) - 1u)), 0};
  for (int warp = 0; warp < kBinThreads / kWarp; ++warp) {
    if (warp < warp_in_block()) count.before += of_warp[warp];
    count.all += of_warp[warp];
  }
  __syncthreads();
  return count;
}

// Calls visit(token, exists, value) for the segments of a scope in the order of the list, all threads of the block together.
// One thread reads the offsets: threads that disagreed would wait for each other.
template <class Visit>
__device__ __forceinline__ void for_each_value(const OrderStatisticsArgs& args, int64_t scope, Visit visit) {
  HPO_SHARED(int64_t, range, [2]);
  const int64_t first = args.begin ? args.begin[scope] : scope, end = args.begin ? args.begin[scope + 1] : scope + 1;
#pragma unroll 1
  for (int64_t place = first; place < end; ++place) {
    if (threadIdx.x == 0) {
      const Range read = row_range(args.offsets, args.order ? args.order[place] : place, args.tokens);
      range[0] = read.begin, range[1] = read.end;
    }
    __syncthreads();
    const int64_t segment_end = range[1];
#pragma unroll 1
    for (int64_t base = range[0]; base < segment_end; base += kBinThreads) {
      const int64_t token = base + threadIdx.x;
      const bool exists = token < segment_end && (!args.mask || args.mask[token]);
      visit(token, exists, exists ? args.values[token] : 0.0f);
    }
    __syncthreads();
  }
}

// Counts one digit of the keys that continue `prefix`; `shift` bits follow the digit. Returns the errors that this thread saw.
template <int BITS>
__device__ __forceinline__ int64_t count_digit(const OrderStatisticsArgs& args, int64_t scope, unsigned prefix, int shift,
                                               HPO_SHARED_POINTER(unsigned) histogram) {
  for (int i = int(threadIdx.x); i < kBins; i += kBinThreads) histogram[i] = 0;
  __syncthreads();
  int64_t errors = 0;
  for_each_value(args, scope, [&](int64_t, bool exists, float value) {
    errors += exists && !is_finite(value) && value != -INFINITY;
    const unsigned key = order_key(value + 0.0f);
    const bool continues = shift + BITS == 32 || key >> (shift + BITS) % 32 == prefix;
    count_bin(histogram, exists && is_finite(value) && continues, key >> shift & ((1u << BITS) - 1u));
  });
  __syncthreads();
  return errors;
}

__device__ __forceinline__ void scan_scope(const OrderStatisticsArgs& args, int64_t scope) {
  HPO_SHARED(unsigned, histogram, [kBins]);
  HPO_SHARED(unsigned long long, totals, [2]);
  const auto count_of = [&](int bin) { return int64_t(histogram[bin]); };
  int64_t own = 0, errors = count_digit<11>(args, scope, 0, 21, histogram);
  if (threadIdx.x == 0) totals[0] = totals[1] = 0;
  __syncthreads();
  for (int i = int(threadIdx.x); i < kBins; i += kBinThreads) own += histogram[i];
  own = warp_sum(own), errors = warp_sum(errors);
  if (lane() == 0) {
    atomicAdd(&totals[0], static_cast<unsigned long long>(own));
    atomicAdd(&totals[1], static_cast<unsigned long long>(errors));
  }
  __syncthreads();
  const int64_t population = int64_t(totals[0]);
  if (threadIdx.x == 0) {
    if (args.counts) args.counts[2 * scope] = population, args.counts[2 * scope + 1] = int64_t(totals[1]);
    if (args.thresholds) args.thresholds[scope] = NAN;
  }
  __syncthreads();
  const int64_t wanted = args.k ? max(int64_t(0), min(args.k[scope], population)) : 1;
  if (population == 0 || wanted == 0) return;
  const int64_t index = args.k ? population - wanted : order_index(args.numerator, args.denominator, args.rule, population);
  const Bin top = find_bin<kBins>(index, count_of);
  count_digit<11>(args, scope, unsigned(top.bin), 10, histogram);
  const Bin middle = find_bin<kBins>(top.index, count_of);
  const unsigned prefix = unsigned(top.bin) << 11 | unsigned(middle.bin);
  count_digit<10>(args, scope, prefix, 0, histogram);
  const Bin low = find_bin<kBins>(middle.index, count_of);
  const unsigned least = prefix << 10 | unsigned(low.bin);
  if (threadIdx.x == 0 && args.thresholds) args.thresholds[scope] = from_order_key(least);
  if (!args.k) return;

  // The selected scores of the least key are the first ones in the order of the list.
  int64_t needed = int64_t(histogram[low.bin]) - low.index;
  for_each_value(args, scope, [&](int64_t token, bool exists, float value) {
    const bool counts = exists && is_finite(value);
    const unsigned key = order_key(value + 0.0f);
    const Count ties = count_flags(counts && key == least);
    if (counts) args.selected[token] = key > least || (key == least && ties.before < needed);
    needed = max(needed - ties.all, int64_t(0));
  });
}

__global__ void __launch_bounds__(kBinThreads) scan_scopes(const OrderStatisticsArgs args) {
  for (int64_t scope = blockIdx.x; scope < args.scopes; scope += gridDim.x) {
    scan_scope(args, scope);
    __syncthreads();  // before the next scope's histogram
  }
}

}  // namespace
}  // namespace hpo

extern "C" int64_t hpo_order_statistics_workspace(int64_t, int64_t) { return 0; }

extern "C" int hpo_order_statistics(const hpo::OrderStatisticsArgs* args, int64_t context) {
  using namespace hpo;
  if (args->scopes == 0) return 0;
  const dim3 blocks(unsigned(std::min(args->scopes, int64_t(1) << 16))), threads(kBinThreads);
  HPO_LAUNCH(scan_scopes, blocks, threads, 0, reinterpret_cast<cudaStream_t>(context), *args);
  return int(cudaGetLastError());
}
