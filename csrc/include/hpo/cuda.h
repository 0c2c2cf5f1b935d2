// The one header of every .cu file. nvcc sees CUDA; g++ with -DHPO_EMULATE sees an emulation of it that runs the same
// source on the CPU, for tests. Three things are written the same way for both:
//
//   HPO_LAUNCH(kernel, grid, block, dynamic_shared_bytes, stream, arguments...);   // templates: (kernel<float, 256>)
//   HPO_SHARED(float, partial, [WARPS]);        HPO_SHARED(bool, last, );
//   HPO_DYN_SHARED(float, tile);                HPO_DYN_SHARED_AT(int, counts, byte_offset);
//
// Shared arrays are checked when emulated, so they are indexed, not decayed: `&tile[i]` is a plain pointer to one
// element, HPO_SHARED_POINTER(float) the type under which a device function takes a shared array. `tile + n` works for
// both.
#pragma once
#include "hpo/launches.h"

#if defined(HPO_EMULATE)
#include "cuda_emulation.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define HPO_LAUNCH(kernel, grid, block, dynamic_shared_bytes, stream, ...)      \
  do {                                                                          \
    static ::hpo::LaunchCounter hpo_launch_counter(#kernel);                    \
    hpo_launch_counter.add();                                                   \
    kernel<<<(grid), (block), (dynamic_shared_bytes), (stream)>>>(__VA_ARGS__); \
  } while (0)

#define HPO_SHARED(type, name, dimensions) __shared__ type name dimensions
#define HPO_SHARED_POINTER(type) type*
#define HPO_DYN_SHARED_AT(type, name, byte_offset)                    \
  extern __shared__ __align__(16) unsigned char hpo_dynamic_shared[]; \
  type* const name = reinterpret_cast<type*>(hpo_dynamic_shared + (byte_offset))
#define HPO_DYN_SHARED(type, name) HPO_DYN_SHARED_AT(type, name, 0)

// CUDA spells its 64-bit atomics with `long long`, which int64_t and uint64_t need not be.
#define HPO_ATOMIC_64(operation, type, native)                                                           \
  __device__ __forceinline__ type operation(type* address, type value) {                                 \
    return static_cast<type>(operation(reinterpret_cast<native*>(address), static_cast<native>(value))); \
  }
HPO_ATOMIC_64(atomicAdd, long long, unsigned long long)
HPO_ATOMIC_64(atomicAdd, long, unsigned long long)
HPO_ATOMIC_64(atomicAdd, unsigned long, unsigned long long)
HPO_ATOMIC_64(atomicMin, long, long long)
HPO_ATOMIC_64(atomicMin, unsigned long, unsigned long long)
HPO_ATOMIC_64(atomicMax, long, long long)
HPO_ATOMIC_64(atomicMax, unsigned long, unsigned long long)
HPO_ATOMIC_64(atomicOr, long, unsigned long long)
HPO_ATOMIC_64(atomicOr, unsigned long, unsigned long long)
HPO_ATOMIC_64(atomicAnd, long, unsigned long long)
HPO_ATOMIC_64(atomicAnd, unsigned long, unsigned long long)
HPO_ATOMIC_64(atomicExch, long, unsigned long long)
HPO_ATOMIC_64(atomicExch, unsigned long, unsigned long long)
#undef HPO_ATOMIC_64
#endif
