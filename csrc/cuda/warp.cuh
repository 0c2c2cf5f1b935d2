// Communication between the lanes of a warp and the blocks of a grid. Every order of addition here is a function of the lane
// and block numbers alone, and so the same on every device and in every run.
#pragma once
#include "hpo/cuda.h"

namespace hpo {

constexpr unsigned kFullWarp = 0xFFFFFFFFu;
constexpr int kWarp = 32;

__device__ __forceinline__ int lane() { return int(threadIdx.x) % kWarp; }
__device__ __forceinline__ int warp_in_block() { return int(threadIdx.x) / kWarp; }

// The sum over the warp, in every lane.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kFullWarp, value, step);
  return value;
}

__device__ __forceinline__ float warp_min(float value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value = fminf(value, __shfl_xor_sync(kFullWarp, value, step));
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, step));
  return value;
}

// COUNT sums over the warp at once, COUNT a power of two: lane l gets the sum of values[l / (32 / COUNT)]. Each step halves
// the number of values that a lane holds: 9 shuffles for eight sums instead of 40. The recursion makes every index a
// constant, so that values stay in registers.
template <class T, int COUNT, int HELD = COUNT, int STEP = kWarp / 2>
__device__ __forceinline__ T warp_sums(T (&values)[COUNT]) {
  if constexpr (HELD > 1) {
    const bool upper = lane() & STEP;
#pragma unroll
    for (int i = 0; i < HELD / 2; ++i) {
      const T keep = upper ? values[i + HELD / 2] : values[i], give = upper ? values[i] : values[i + HELD / 2];
      values[i] = keep + __shfl_xor_sync(kFullWarp, give, STEP);
    }
  } else {
    values[0] += __shfl_xor_sync(kFullWarp, values[0], STEP);
  }
  if constexpr (STEP > 1) return warp_sums<T, COUNT, (HELD > 1 ? HELD / 2 : 1), STEP / 2>(values);
  return values[0];
}

// True in every thread of the block that finishes last; it then sees all earlier writes of the other blocks. `ticket` is 0
// before the launch, and again after it.
__device__ __forceinline__ bool last_block(unsigned* ticket) {
  HPO_SHARED(bool, last, );
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // releases, in the thread of the atomic operation, the writes of the block before the barrier
    last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();  // acquires, for the whole block behind the next barrier, the writes that other blocks have released
  }
  __syncthreads();
  return last;
}

}  // namespace hpo
