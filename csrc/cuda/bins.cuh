// Histograms of the digits of keys, and the bin of the key of a rank.
#pragma once
#include "warp.cuh"

namespace hpo {

constexpr int kBinThreads = 1024;  // of a block that looks for a bin

struct Bin {
  int bin;
  int64_t index;  // of the sought key among those of the bin
};

// The bin of the index-th key in ascending order, in every thread. `count_of(bin)` is called by one thread for each bin.
template <int BINS, class CountOf>
__device__ __forceinline__ Bin find_bin(int64_t index, CountOf count_of) {
  constexpr int kEach = (BINS + kBinThreads - 1) / kBinThreads;
  HPO_SHARED(int64_t, warp_totals, [kBinThreads / kWarp]);
  HPO_SHARED(Bin, result, );
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
    if (left >= 0 && left < counts[k]) result = Bin{int(threadIdx.x) * kEach + k, left};
    left -= counts[k];
  }
  __syncthreads();
  const Bin bin = result;
  __syncthreads();
  return bin;
}

__device__ __forceinline__ void clear_histogram(HPO_SHARED_POINTER(unsigned) histogram, int bins) {
  for (int i = int(threadIdx.x); i < bins; i += kBinThreads) histogram[i] = 0;
  __syncthreads();
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

}  // namespace hpo
