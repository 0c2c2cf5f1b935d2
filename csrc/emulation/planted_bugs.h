// Kernels with a bug each, which the emulated device has to report.
#pragma once
#include "hpo/cuda.h"

namespace hpo::selftest {
namespace {

constexpr unsigned kAll = 0xffffffffu;

__global__ void missing_barrier(float* out) {
  HPO_SHARED(float, values, [64]);
  values[threadIdx.x] = float(threadIdx.x);
  out[threadIdx.x] = values[63 - threadIdx.x];
}

__global__ void write_after_read(float* out) {
  HPO_SHARED(float, values, [64]);
  values[threadIdx.x] = float(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = values[63 - threadIdx.x];
  values[threadIdx.x] = -1.0f;
}

__global__ void missing_syncwarp(float* out) {
  HPO_SHARED(float, values, [64]);
  values[threadIdx.x] = float(threadIdx.x);
  __syncwarp();
  const float neighbour = values[threadIdx.x ^ 1];
  values[threadIdx.x] = 2 * neighbour;
  out[threadIdx.x] = neighbour;
}

__global__ void same_address(float* out) { out[0] = float(threadIdx.x); }

__global__ void racing_blocks(float* out) { out[threadIdx.x] = float(blockIdx.x); }

__global__ void order_of_arrival(float* out) {
  HPO_SHARED(int, arrived, );
  if (threadIdx.x == 0) arrived = 0;
  __syncthreads();
  out[threadIdx.x] = float(atomicAdd(&arrived, 1));
}

__global__ void missing_grid_barrier(float* out) {
  out[blockIdx.x] = 1.0f;
  out[32 + blockIdx.x] = out[1 - blockIdx.x];
}

__global__ void missing_second_grid_barrier(float* out) {
  out[blockIdx.x] = float(blockIdx.x);
  sync_grid();
  out[32 + blockIdx.x] = out[1 - blockIdx.x];
  out[blockIdx.x] = -1.0f;
}

__global__ void early_return(float* out) {
  if (threadIdx.x == 5) return;
  __syncthreads();
  out[threadIdx.x] = 1.0f;
}

__global__ void late_return(float* out) {
  if (threadIdx.x == 63) return;
  __syncthreads();
  out[threadIdx.x] = 1.0f;
}

__global__ void divergent_barrier(float* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
    out[threadIdx.x] = 1.0f;
  } else {
    __syncthreads();
    out[threadIdx.x] = 2.0f;
  }
}

__global__ void deadlock(float* out) {
  if (threadIdx.x % 2) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1.0f;
}

__global__ void absent_block(float* out) {
  if (blockIdx.x == 1) return;
  sync_grid();
  out[threadIdx.x] = 1.0f;
}

__global__ void absent_thread(float* out) {
  if (threadIdx.x == 5) return;
  sync_grid();
  out[threadIdx.x] = 1.0f;
}

__global__ void divergent_grid_barrier(float* out) {
  if (blockIdx.x == 0) {
    sync_grid();
    out[threadIdx.x] = 1.0f;
  } else {
    sync_grid();
    out[threadIdx.x] = 2.0f;
  }
}

__global__ void barriers_of_both_kinds(float* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    sync_grid();
  }
  out[threadIdx.x] = 1.0f;
}

__global__ void grid_barrier_of_no_grid(float* out) {
  sync_grid();
  out[threadIdx.x] = 1.0f;
}

__global__ void lane_outside_mask(float* out) { out[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 0); }

__global__ void source_outside_mask(float* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 20);
}

__global__ void different_masks(float* out) { out[threadIdx.x] = __shfl_sync(threadIdx.x == 0 ? 1u : kAll, 1.0f, 0); }

__global__ void different_operations(float* out) {
  if (threadIdx.x < 16) {
    out[threadIdx.x] = __shfl_sync(kAll, 1.0f, 0);
  } else {
    out[threadIdx.x] = float(__ballot_sync(kAll, 1));
  }
}

__global__ void returned_lane(float* out) {
  if (threadIdx.x == 7) return;
  out[threadIdx.x] = __shfl_sync(kAll, 1.0f, 0);
}

__global__ void static_overflow(float* out) {
  HPO_SHARED(float, values, [64]);
  values[threadIdx.x + 1] = 1.0f;
  out[threadIdx.x] = values[threadIdx.x];
}

__global__ void static_underflow(float* out) {
  HPO_SHARED(float, values, [64]);
  out[threadIdx.x] = values[int(threadIdx.x) - 1];
}

__global__ void inner_overflow(float* out) {
  HPO_SHARED(float, values, [2][32]);
  values[0][threadIdx.x] = 1.0f;
  out[threadIdx.x] = values[0][threadIdx.x % 32];
}

__global__ void dynamic_overflow(float* out) {
  HPO_DYN_SHARED(float, values);
  values[threadIdx.x + 1] = 1.0f;
  out[threadIdx.x] = 1.0f;
}

__global__ void misaligned_dynamic(float* out) {
  HPO_DYN_SHARED_AT(double, values, 4);
  out[threadIdx.x] = float(values[0]);
}

__global__ void raw_overflow(float* out) {
  HPO_SHARED(float, values, [62]);
  if (threadIdx.x == 0) *reinterpret_cast<float4*>(&values[60]) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  out[threadIdx.x] = values[60];
}

__global__ void uninitialised_shared(float* out) {
  HPO_SHARED(float, values, [64]);
  out[threadIdx.x] = values[threadIdx.x];
}

__global__ void too_much_with_static(float* out) {
  HPO_DYN_SHARED(float, rest);
  HPO_SHARED(float, values, [1]);
  out[threadIdx.x] = values[0] + rest[0];
}

__global__ void nothing(float* out) { out[threadIdx.x] = 1.0f; }

}  // namespace
}  // namespace hpo::selftest
