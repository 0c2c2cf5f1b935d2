// Planted bugs in the use of global memory: unfenced reads, the read-only path, alignment, blocks that interleave.
#include "hpo/cuda.h"
#include "selftest.h"

namespace hpo::selftest {
namespace {

// The last of several blocks adds up the numbers that all have written: right with a fence on both sides of the ticket.
template <bool BEFORE, bool BEHIND>
__device__ __forceinline__ void add_up_in_the_last_block(float* out) {
  HPO_SHARED(bool, last, );
  if (threadIdx.x == 0) {
    out[blockIdx.x] = 1.0f;
    if (BEFORE) __threadfence();
    last = atomicAdd(reinterpret_cast<unsigned*>(out + 60), 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (BEHIND) __threadfence();
  if (!last || threadIdx.x != 0) return;
  for (unsigned block = 0; block < gridDim.x; ++block) out[32] += out[block];
}
__global__ void fences_around_a_ticket(float* out) { add_up_in_the_last_block<true, true>(out); }
__global__ void missing_fence_before(float* out) { add_up_in_the_last_block<false, true>(out); }
__global__ void missing_fence_behind(float* out) { add_up_in_the_last_block<true, false>(out); }

__global__ void missing_barrier_before_a_ticket(float* out) {
  HPO_SHARED(bool, last, );
  out[4 * threadIdx.x % 64 + blockIdx.x] = 1.0f;
  __threadfence();
  if (threadIdx.x == 0) last = atomicAdd(reinterpret_cast<unsigned*>(out + 63), 1u) == gridDim.x - 1;
  __syncthreads();
  __threadfence();
  if (last) out[threadIdx.x / 4 * 4 + 3] = out[threadIdx.x / 4 * 4] + out[threadIdx.x / 4 * 4 + 1];
}

// The last block reads the numbers that all threads have written: right with both fences in the thread that takes the ticket.
template <bool BEFORE, bool BEHIND>
__device__ __forceinline__ void read_in_the_last_block(float* out) {
  HPO_SHARED(bool, last, );
  out[4 * threadIdx.x % 64 + blockIdx.x] = 1.0f;
  if (!BEFORE) __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    if (BEFORE) __threadfence();
    last = atomicAdd(reinterpret_cast<unsigned*>(out + 63), 1u) == gridDim.x - 1;
    if (BEHIND) __threadfence();
  }
  __syncthreads();
  if (!BEHIND) __threadfence();
  if (last && threadIdx.x < 60) out[threadIdx.x / 4 * 4 + 2] = out[threadIdx.x / 4 * 4] + out[threadIdx.x / 4 * 4 + 1];
}
__global__ void fences_of_the_ticket(float* out) { read_in_the_last_block<true, true>(out); }
__global__ void fences_of_others_before(float* out) { read_in_the_last_block<false, true>(out); }
__global__ void fences_of_others_behind(float* out) { read_in_the_last_block<true, false>(out); }

__global__ void read_only_of_written(float* out) {
  if (threadIdx.x == 0) out[0] = 1.0f;
  __syncthreads();
  out[1 + threadIdx.x % 32] = __ldg(out);
}

__global__ void written_of_read_only(float* out) {
  const float value = __ldg(out + threadIdx.x);
  __syncthreads();
  out[63 - threadIdx.x] = value;
}

__global__ void lost_update(float* out) {
  int* const count = reinterpret_cast<int*>(out);
  if (threadIdx.x != 0) return;
  const int seen = hpo::load_relaxed(count);
  __threadfence();
  atomicExch(count, seen + 1);
}

__global__ void misaligned_vector(float* out) {
  const float4 four = *reinterpret_cast<const float4*>(out + 2);
  out[threadIdx.x] = four.x;
}

__global__ void misaligned_read_only(float* out) { out[threadIdx.x] = __ldg(reinterpret_cast<const float4*>(out + 2)).x; }

__global__ void misaligned_store(float* out) {
  if (threadIdx.x == 0) *reinterpret_cast<float4*>(out + 2) = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
}

__global__ void misaligned_scalar(float* out) { *reinterpret_cast<int64_t*>(out + 2 * threadIdx.x % 32 + 1) = 1; }

#define PLANT(kernel, grid, block) {#kernel, [](float* out) { HPO_LAUNCH(kernel, grid, block, 0, nullptr, out); }}

}  // namespace

const Plants& planted_in_memory() {
  static const Plants table{
      PLANT(fences_around_a_ticket, 3, 64),  PLANT(missing_fence_before, 3, 64),
      PLANT(missing_fence_behind, 3, 64),    PLANT(missing_barrier_before_a_ticket, 2, 64),
      PLANT(fences_of_the_ticket, 2, 64),    PLANT(fences_of_others_before, 2, 64),
      PLANT(fences_of_others_behind, 2, 64), PLANT(read_only_of_written, 1, 64),
      PLANT(written_of_read_only, 1, 64),    PLANT(lost_update, 3, 32),
      PLANT(misaligned_vector, 1, 64),       PLANT(misaligned_read_only, 1, 64),
      PLANT(misaligned_store, 1, 64),        PLANT(misaligned_scalar, 1, 64),
  };
  return table;
}
#undef PLANT

}  // namespace hpo::selftest
