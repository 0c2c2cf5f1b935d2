// Helpers of the launches of one call: their grid, communication within a block, and workspace that an earlier launch leaves
// to a later one.
#pragma once
#include <algorithm>
#include <map>

#include "warp.cuh"

namespace hpo {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int64_t kMaxBlocks = 512;

// The most blocks of a sweep of which `held` fit on a multiprocessor: one wave on 132 multiprocessors, because more would run
// by themselves behind it, for as long. The number does not depend on the device: sums are added up block by block.
constexpr int blocks_at_once(int held) { return std::min(int(kMaxBlocks), 132 * held); }

// A block for each of `count` > 0, or 2^16 that take several.
inline dim3 blocks_of(int64_t count) { return dim3(unsigned(std::min(count, int64_t(1) << 16))); }

inline int blocks_for(int64_t threads, int of_block = kThreads) {
  return int(std::min(kMaxBlocks, std::max(int64_t(1), (threads + of_block - 1) / of_block)));
}

// The blocks of a cooperative launch, which must all be on the device at once. A quarter of the device stays free: a
// collective operation on another stream may hold its multiprocessors until other devices have come to it, and a launch of the
// whole device would wait for that. Results do not depend on the number of blocks.
template <auto kernel, int OF_BLOCK = kThreads>
int blocks_together(int64_t threads) {
  static thread_local std::map<int, int> per_processor;  // by device: the query is slow and its result constant
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  int& resident = per_processor[device];
  if (resident == 0) cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, OF_BLOCK, 0);
  return std::max(1, std::min(blocks_for(threads, OF_BLOCK), resident * processors * 3 / 4));
}

// Places arrays one after the other in a workspace; with nullptr it only measures.
class Placement {
 public:
  explicit Placement(void* base) : base_(static_cast<char*>(base)), at_(base_) {}

  template <class T>
  void take(T*& array, int64_t count) {
    array = reinterpret_cast<T*>(at_);
    at_ += (count * int64_t(sizeof *array) + 15) / 16 * 16;
  }

  int64_t bytes() const { return at_ - base_; }

 private:
  char *base_, *at_;
};

// Whether any block raised its flag, in an earlier launch or before a grid barrier of this one. The call is a block barrier.
__device__ __forceinline__ bool any_of(const int* flags, int count) {
  int any = 0;
#pragma unroll 1
  for (int i = int(threadIdx.x); i < count; i += kThreads) any |= flags[i];
  return __syncthreads_or(any);
}

// Sums over the block, COUNT a power of two, in every thread.
template <int COUNT>
__device__ __forceinline__ void block_sums(double (&values)[COUNT]) {
  HPO_SHARED(double, of_warp, [COUNT][kWarps]);
  constexpr int kLanes = kWarp / COUNT;
  const double sum = warp_sums(values);
  if (lane() % kLanes == 0) of_warp[lane() / kLanes][warp_in_block()] = sum;
  __syncthreads();
  for (int i = 0; i < COUNT; ++i) {
    values[i] = of_warp[i][0];
    for (int warp = 1; warp < kWarps; ++warp) values[i] += of_warp[i][warp];
  }
  __syncthreads();  // before the next call writes `of_warp`
}

// The maximum over the block, in every thread.
template <class T>
__device__ __forceinline__ T block_max(T value) {
  HPO_SHARED(T, of_warp, [kWarps]);
  for (int step = kWarp / 2; step > 0; step /= 2) value = max(value, __shfl_xor_sync(kFullWarp, value, step));
  if (lane() == 0) of_warp[warp_in_block()] = value;
  __syncthreads();
  for (int warp = 0; warp < kWarps; ++warp) value = max(value, of_warp[warp]);
  __syncthreads();  // before the next call writes `of_warp`
  return value;
}

// Raises a number in memory that only grows, for which most calls need no atomic.
template <class T>
__device__ __forceinline__ void raise(T* largest, T value) {
  if (load_relaxed(largest) < value) atomicMax(largest, value);
}

template <class T>
__device__ __forceinline__ void fill(T* array, int64_t count, T value) {
#pragma unroll 1
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += int64_t(gridDim.x) * kThreads)
    array[i] = value;
}

template <class T>
__device__ __forceinline__ void clear(T* array, int64_t count) {
  fill(array, count, T{});
}

__device__ __forceinline__ void copy(float* to, const float* from, int64_t count) {
#pragma unroll 1
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += int64_t(gridDim.x) * kThreads) to[i] = from[i];
}

// Tokens outside every leaf get `value`: it is written for all tokens, which is cheaper than a search for these.
__device__ __forceinline__ void fill_tokens(float* array, int64_t tokens, bool wide, float value) {
  if (!array) return;
  const int64_t vectors = wide ? tokens / 4 : 0;
  fill(reinterpret_cast<float4*>(array), vectors, make_float4(value, value, value, value));
  fill(array + vectors * 4, tokens - vectors * 4, value);
}

}  // namespace hpo
