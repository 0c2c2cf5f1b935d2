// The one header of every .cu file. nvcc sees CUDA; g++ with -DHPO_EMULATE sees an emulation of it that runs the same
// source on the CPU, for tests. Four things are written the same way for both:
//
//   HPO_LAUNCH(kernel, grid, block, dynamic_shared_bytes, stream, arguments...);   // templates: (kernel<float, 256>)
//   HPO_LAUNCH_TOGETHER(the same);   // a cooperative launch: inside, hpo::sync_grid() is a barrier of all its blocks
//   HPO_SHARED(float, partial, [WARPS]);        HPO_SHARED(bool, last, );
//   HPO_DYN_SHARED(float, tile);                HPO_DYN_SHARED_AT(int, counts, byte_offset);
//
// hpo::fast_exp2(x) is a GPU instruction for which CUDA has no function. hpo::load_evicted_first(address) is __ldcs, which the
// compiler would move to where its result is used. hpo::load_relaxed(address) reads a word that other blocks change by atomic
// operations meanwhile: it returns one of the word's values, and orders nothing.
//
// The emulation checks the bounds of shared arrays, so they are indexed, not decayed: `&tile[i]` is a plain pointer to one
// element, HPO_SHARED_POINTER(float) is the parameter type of a device function for a shared array. `tile + n` works for
// both.
#pragma once
#include "hpo/launches.h"

#if defined(HPO_EMULATE)
#include "cuda_emulation.h"
#else
// Without it the header of the grid barrier includes CUDA's atomics, which take a second of every compilation.
#define _CG_LIMIT_INCLUDED_DEPENDENCIES
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <utility>

namespace hpo {

template <class... Parameters, class... Arguments>
void launch_together(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t dynamic_shared_bytes, cudaStream_t stream,
                     Arguments&&... arguments) {
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = dynamic_shared_bytes;
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

// The driver sets up the state of the barrier for each launch: no workspace has to be cleared first.
__device__ __forceinline__ void sync_grid() { cooperative_groups::this_grid().sync(); }

// 2^x within two units in the last place, 0 for results below 2^-126: one instruction. exp2f would keep subnormal results.
__device__ __forceinline__ float fast_exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

__device__ __forceinline__ uint4 load_evicted_first(const uint4* address) {
  uint4 v;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}

template <class T>
__device__ __forceinline__ T load_relaxed(const T* address) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  T value;
  if constexpr (sizeof(T) == 4) {
    unsigned word;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(address) : "memory");
    memcpy(&value, &word, sizeof value);
  } else {
    unsigned long long word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
    memcpy(&value, &word, sizeof value);
  }
  return value;
}

}  // namespace hpo

#define HPO_LAUNCH(kernel, grid, block, dynamic_shared_bytes, stream, ...)      \
  do {                                                                          \
    if (!::hpo::all_launched()) break;                                          \
    static ::hpo::LaunchCounter hpo_launch_counter(#kernel);                    \
    hpo_launch_counter.add();                                                   \
    kernel<<<(grid), (block), (dynamic_shared_bytes), (stream)>>>(__VA_ARGS__); \
  } while (0)
#define HPO_LAUNCH_TOGETHER(kernel, grid, block, dynamic_shared_bytes, stream, ...)           \
  do {                                                                                        \
    if (!::hpo::all_launched()) break;                                                        \
    static ::hpo::LaunchCounter hpo_launch_counter(#kernel);                                  \
    hpo_launch_counter.add();                                                                 \
    ::hpo::launch_together(kernel, grid, block, dynamic_shared_bytes, stream, ##__VA_ARGS__); \
  } while (0)

#define HPO_SHARED(type, name, dimensions) __shared__ type name dimensions
#define HPO_SHARED_POINTER(type) type*
#define HPO_DYN_SHARED_AT(type, name, byte_offset)                    \
  extern __shared__ __align__(16) unsigned char hpo_dynamic_shared[]; \
  type* const name = reinterpret_cast<type*>(hpo_dynamic_shared + (byte_offset))
#define HPO_DYN_SHARED(type, name) HPO_DYN_SHARED_AT(type, name, 0)

// CUDA declares its 64-bit atomics for `long long`, but int64_t and uint64_t may be other types.
#define HPO_ATOMIC_64(operation, type, native)                                                           \
  __device__ __forceinline__ type operation(type* address, type value) {                                 \
    return static_cast<type>(operation(reinterpret_cast<native*>(address), static_cast<native>(value))); \
  }
HPO_ATOMIC_64(atomicAdd, long long, unsigned long long)
HPO_ATOMIC_64(atomicAdd, long, unsigned long long)
HPO_ATOMIC_64(atomicAdd, unsigned long, unsigned long long)
HPO_ATOMIC_64(atomicMin, long, long long)
HPO_ATOMIC_64(atomicMax, long, long long)
HPO_ATOMIC_64(atomicMax, unsigned long, unsigned long long)
#undef HPO_ATOMIC_64
#endif

namespace hpo {

// Whether every launch of the call so far was taken. Behind one that failed no other starts: it would follow indices that
// nothing has written. The call's cudaGetLastError reports the failure.
inline bool all_launched() { return cudaPeekAtLastError() == cudaSuccess; }

}  // namespace hpo
