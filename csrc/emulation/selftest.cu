#include "hpo/cuda.h"
#include "planted_bugs.h"
#include "selftest.h"

namespace hpo::selftest {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

// ---- correct kernels ----

__device__ __forceinline__ float warp_sum(float value) {
  for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(kAll, value, distance);
  return value;
}

__global__ void __launch_bounds__(kThreads)
    segmented_sum_kernel(const float* __restrict__ values, const int64_t* __restrict__ offsets, float* sums) {
  HPO_SHARED(float, partial, [kWarps]);
  const int64_t begin = __ldg(offsets + blockIdx.x), end = __ldg(offsets + blockIdx.x + 1);
  const int64_t head = min((begin + 3) / 4 * 4, end), tail = max(head, end / 4 * 4);
  float sum = 0.0f;
  for (int64_t i = begin + threadIdx.x; i < head; i += kThreads) sum += values[i];
  for (int64_t i = head + 4 * threadIdx.x; i < tail; i += 4 * kThreads) {
    const float4 four = *reinterpret_cast<const float4*>(values + i);
    sum += (four.x + four.y) + (four.z + four.w);
  }
  for (int64_t i = tail + threadIdx.x; i < end; i += kThreads) sum += values[i];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    sum = warp_sum(threadIdx.x < kWarps ? partial[threadIdx.x] : 0.0f);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
  }
}

struct ExpSum {
  float max, sum;  // of exp(x - max)
};

__device__ __forceinline__ ExpSum merge(ExpSum a, ExpSum b) {
  const float max = fmaxf(a.max, b.max);
  if (max == -INFINITY) return {max, 0.0f};
  return {max, a.sum * expf(a.max - max) + b.sum * expf(b.max - max)};
}

__device__ __forceinline__ ExpSum warp_merge(ExpSum state) {
  for (int distance = 16; distance; distance /= 2) {
    state = merge(state, {__shfl_xor_sync(kAll, state.max, distance), __shfl_xor_sync(kAll, state.sum, distance)});
  }
  return state;
}

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
__global__ void __launch_bounds__(kThreads) logsumexp_kernel(const T* __restrict__ values, float* out, int columns) {
  HPO_SHARED(ExpSum, partial, [kWarps]);
  const T* row = values + int64_t(blockIdx.x) * columns;
  ExpSum state{-INFINITY, 0.0f};
  for (int i = threadIdx.x; i < columns; i += kThreads) state = merge(state, {to_float(row[i]), 1.0f});
  state = warp_merge(state);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = state;
  __syncthreads();
  if (threadIdx.x < 32) {
    state = warp_merge(threadIdx.x < kWarps ? partial[threadIdx.x] : ExpSum{-INFINITY, 0.0f});
    if (threadIdx.x == 0) out[blockIdx.x] = state.max + logf(state.sum);
  }
}

__global__ void __launch_bounds__(kThreads) histogram_kernel(const int* __restrict__ values, int count, unsigned* counts,
                                                             unsigned* below, unsigned* finished, int bins) {
  HPO_DYN_SHARED(unsigned, own);
  HPO_DYN_SHARED_AT(unsigned, warp_totals, bins * sizeof(unsigned));
  HPO_SHARED(bool, last, );
  for (int i = threadIdx.x; i < bins; i += kThreads) own[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) atomicAdd(&own[values[i]], 1u);
  __syncthreads();
  for (int i = threadIdx.x; i < bins; i += kThreads) atomicAdd(&counts[i], own[i]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(finished, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;

  __threadfence();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned before = 0;
  for (int first = 0; first < bins; first += kThreads) {
    const int bin = first + threadIdx.x;
    const unsigned mine = bin < bins ? __ldcg(&counts[bin]) : 0;
    unsigned inclusive = mine;
    for (int distance = 1; distance < 32; distance *= 2) {
      const unsigned other = __shfl_up_sync(kAll, inclusive, distance);
      if (lane >= distance) inclusive += other;
    }
    if (lane == 31) warp_totals[warp] = inclusive;
    __syncthreads();
    unsigned total = 0, earlier = 0;
    for (int i = 0; i < kWarps; ++i) {
      if (i == warp) earlier = total;
      total += warp_totals[i];
    }
    if (bin < bins) below[bin] = before + earlier + inclusive - mine;
    before += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) *finished = 0;
}

__device__ __forceinline__ float sum_of(HPO_SHARED_POINTER(float) values, int count) {
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) sum += values[i];
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    sliding_mean_kernel(const float* __restrict__ values, float* means, int count, int radius) {
  HPO_DYN_SHARED(float, tile);
  const int first = blockIdx.x * kThreads - radius;
  for (int i = threadIdx.x; i < kThreads + 2 * radius; i += kThreads) {
    tile[i] = first + i >= 0 && first + i < count ? values[first + i] : 0.0f;
  }
  __syncthreads();
  const int at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= count) return;
  const int width = min(at + radius, count - 1) - max(at - radius, 0) + 1;
  means[at] = sum_of(tile + threadIdx.x, 2 * radius + 1) / float(width);
}

__global__ void primitives_kernel(double* out, int64_t* atomics) {
  const int thread = threadIdx.x, lane = thread % 32;
  double* mine = out + 17 * thread;
  mine[0] = __shfl_sync(kAll, float(thread), 3);
  mine[1] = __shfl_sync(kAll, double(thread), lane + 1, 8);
  mine[2] = double(__shfl_up_sync(kAll, int64_t(thread), 2));
  mine[3] = __shfl_up_sync(kAll, thread, 1, 4);
  mine[4] = __shfl_down_sync(kAll, unsigned(thread), 5);
  mine[5] = __shfl_down_sync(kAll, thread, 1, 16);
  mine[6] = double(__shfl_xor_sync(kAll, uint64_t(thread), 7));
  mine[7] = lane < 16 ? __shfl_sync(0xffffu, thread, 15) : __shfl_sync(0xffff0000u, thread, 16);
  mine[8] = __ballot_sync(kAll, lane % 3 == 0);
  mine[9] = __any_sync(kAll, lane == 31) + 2 * __any_sync(kAll, lane == 32);
  mine[9] += 4.0 * (lane < 16 ? __ballot_sync(0xffffu, 1) : __ballot_sync(0xffff0000u, 1));
  mine[10] = __all_sync(kAll, lane < 32) + 2 * __all_sync(kAll, lane < 31);
  mine[11] = __syncthreads_or(thread == 1) + 2 * __syncthreads_or(thread < 0);
  mine[12] = __popc(0xf0fu) + 100 * __ffs(8) + 10000 * __clz(1);
  mine[13] = __float_as_int(1.0f) + double(__bfloat162float(__float2bfloat16(1.00390625f)));
  const __nv_bfloat162 brains = __floats2bfloat162_rn(NAN, 2.0f), others = __floats2bfloat162_rn(1.0f, -3.0f);
  mine[14] = __bfloat162float(__hmax2(brains, others).x) + 10.0f * __bfloat162float(__hmin2_nan(others, brains).y);
  mine[14] += 100.0f * float(std::isnan(__bfloat162float(__hmin2_nan(others, brains).x)));
  const __half2 halves = __floats2half2_rn(2.0f, NAN), smaller = __floats2half2_rn(-3.0f, 1.0f);
  mine[15] = __high2float(__hmax2(halves, smaller)) + 10.0f * __low2float(__hmin2_nan(smaller, halves));
  mine[15] += 100.0f * float(std::isnan(__high2float(__hmin2_nan(smaller, halves))));
  const float power = hpo::fast_exp2(0.5f), exact = 1.41421356f;
  mine[16] = double(fabsf(power - exact) <= 3e-7f) + 10.0 * hpo::fast_exp2(-INFINITY) + 100.0 * hpo::fast_exp2(-127.0f) +
             1000.0 * hpo::fast_exp2(3.0f) + 10000.0 * std::isnan(hpo::fast_exp2(NAN));

  atomicAdd(reinterpret_cast<int*>(atomics), -1);
  atomicAdd(reinterpret_cast<unsigned*>(atomics + 1), 2u);
  atomicAdd(atomics + 2, -(int64_t(1) << 32));
  atomicAdd(reinterpret_cast<uint64_t*>(atomics + 3), uint64_t(1) << 40);
  atomicMin(atomics + 4, int64_t(-thread));
  atomicMax(reinterpret_cast<unsigned*>(atomics + 5), unsigned(thread));
  int* const counter = reinterpret_cast<int*>(atomics + 6);
  for (int seen = 0, old; (old = atomicCAS(counter, seen, seen + 1)) != seen; seen = old) {
  }
  if (thread == 0) atomicExch(counter + 1, 7);
}

// Every block adds up the values of its threads, then the sums of all blocks, `rounds` times.
__global__ void rounds_kernel(int* sums, int* out, int rounds) {
  HPO_SHARED(int, mine, );
  const int block = int(blockIdx.x), blocks = int(gridDim.x);
  int value = block * int(blockDim.x) + int(threadIdx.x);
  for (int round = 0; round < rounds; ++round) {
    if (threadIdx.x == 0) mine = 0;
    __syncthreads();
    atomicAdd(&mine, value);
    sync_grid();
    if (threadIdx.x == 0) sums[block] = mine;
    sync_grid();
    value = int(threadIdx.x);
    for (int other = 0; other < blocks; ++other) value += (other + 1) * sums[other];
    value %= 1000;
  }
  out[block * int(blockDim.x) + int(threadIdx.x)] = value;
}

#define PLANT(kernel, grid, block, bytes) {#kernel, [](float* out) { HPO_LAUNCH(kernel, grid, block, bytes, nullptr, out); }}
#define PLANT_TOGETHER(kernel, grid) {#kernel, [](float* out) { HPO_LAUNCH_TOGETHER(kernel, grid, 64, 0, nullptr, out); }}
const Plants& planted() {
  static const Plants table{
      PLANT(missing_barrier, 1, 64, 0),
      PLANT(write_after_read, 1, 64, 0),
      PLANT(missing_syncwarp, 1, 64, 0),
      PLANT(same_address, 1, 64, 0),
      PLANT(racing_blocks, 4, 64, 0),
      PLANT(order_of_arrival, 1, 64, 0),
      PLANT_TOGETHER(missing_grid_barrier, 2),
      PLANT_TOGETHER(missing_second_grid_barrier, 2),
      PLANT_TOGETHER(absent_block, 2),
      PLANT_TOGETHER(absent_thread, 1),
      PLANT_TOGETHER(divergent_grid_barrier, 2),
      PLANT_TOGETHER(barriers_of_both_kinds, 1),
      PLANT(grid_barrier_of_no_grid, 1, 64, 0),
      PLANT(early_return, 1, 64, 0),
      PLANT(late_return, 1, 64, 0),
      PLANT(divergent_barrier, 1, 64, 0),
      PLANT(deadlock, 1, 64, 0),
      PLANT(lane_outside_mask, 1, 64, 0),
      PLANT(source_outside_mask, 1, 64, 0),
      PLANT(different_masks, 1, 64, 0),
      PLANT(different_operations, 1, 64, 0),
      PLANT(returned_lane, 1, 64, 0),
      PLANT(static_overflow, 1, 64, 0),
      PLANT(static_underflow, 1, 64, 0),
      PLANT(inner_overflow, 1, 64, 0),
      PLANT(dynamic_overflow, 1, 64, 64 * sizeof(float)),
      PLANT(misaligned_dynamic, 1, 64, 64),
      PLANT(raw_overflow, 1, 64, 0),
      PLANT(uninitialised_shared, 1, 64, 0),
      {"no_blocks", [](float* out) { HPO_LAUNCH(nothing, 0, 64, 0, nullptr, out); }},
      {"no_threads", [](float* out) { HPO_LAUNCH(nothing, 1, 0, 0, nullptr, out); }},
      {"too_many_threads", [](float* out) { HPO_LAUNCH(nothing, 1, dim3(64, 32), 0, nullptr, out); }},
      {"too_many_blocks", [](float* out) { HPO_LAUNCH(nothing, dim3(1, 65536), 64, 0, nullptr, out); }},
      {"too_many_together", [](float* out) { HPO_LAUNCH_TOGETHER(nothing, 4, 64, 0, nullptr, out); }},
      {"too_much_shared", [](float* out) { HPO_LAUNCH(nothing, 1, 64, 49 << 10, nullptr, out); }},
      PLANT(too_much_with_static, 1, 64, 48 << 10),
  };
  return table;
}
#undef PLANT_TOGETHER
#undef PLANT

}  // namespace

void segmented_sum(const float* values, const int64_t* offsets, float* sums, int segments) {
  HPO_LAUNCH(segmented_sum_kernel, segments, kThreads, 0, nullptr, values, offsets, sums);
}

void logsumexp(const float* values, float* out, int rows, int columns) {
  HPO_LAUNCH((logsumexp_kernel<float>), rows, kThreads, 0, nullptr, values, out, columns);
}

void logsumexp_bf16(const uint16_t* values, float* out, int rows, int columns) {
  HPO_LAUNCH((logsumexp_kernel<__nv_bfloat16>), rows, kThreads, 0, nullptr, reinterpret_cast<const __nv_bfloat16*>(values), out,
             columns);
}

void histogram(const int* values, int count, unsigned* counts, unsigned* below, unsigned* finished, int bins, int blocks) {
  cudaMemsetAsync(counts, 0, bins * sizeof(unsigned), nullptr);
  const size_t bytes = (bins + kWarps) * sizeof(unsigned);
  HPO_LAUNCH(histogram_kernel, blocks, kThreads, bytes, nullptr, values, count, counts, below, finished, bins);
}

void sliding_mean(const float* values, float* means, int count, int radius) {
  const int blocks = (count + kThreads - 1) / kThreads;
  HPO_LAUNCH(sliding_mean_kernel, blocks, kThreads, (kThreads + 2 * radius) * sizeof(float), nullptr, values, means, count,
             radius);
}

void primitives(double* out, int64_t* atomics, int threads) {
  HPO_LAUNCH(primitives_kernel, 1, threads, 0, nullptr, out, atomics);
}

void rounds(int* sums, int* out, int rounds, int blocks, int threads) {
  HPO_LAUNCH_TOGETHER(rounds_kernel, blocks, threads, 0, nullptr, sums, out, rounds);
}

void bug(const std::string& name, float* out) {
  const auto found = planted().find(name);
  (found == planted().end() ? planted_in_memory().at(name) : found->second)(out);
}

std::vector<std::string> bugs() {
  std::vector<std::string> names;
  for (const auto* table : {&planted(), &planted_in_memory()}) {
    for (const auto& entry : *table) names.push_back(entry.first);
  }
  return names;
}

}  // namespace hpo::selftest
