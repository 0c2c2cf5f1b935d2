// The types and functions of the CUDA language and runtime that our kernels use, with CUDA's names.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "device.h"

// A vector checks its alignment where it is copied from and to. It is trivially made, so that shared arrays and unions can hold
// it.
template <class T>
struct alignas(16) hpo_quadruple {
  T x, y, z, w;
  hpo_quadruple() = default;
  hpo_quadruple(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}
  hpo_quadruple(const hpo_quadruple& other, hpo::emulation::Site site = hpo::emulation::Site()) {
    hpo::emulation::check_load(&other, 16, site);
    x = other.x, y = other.y, z = other.z, w = other.w;
  }
  hpo_quadruple& operator=(const hpo_quadruple& other) {
    hpo::emulation::check_store(this, 16);
    x = other.x, y = other.y, z = other.z, w = other.w;
    return *this;
  }
};
using float4 = hpo_quadruple<float>;
using uint4 = hpo_quadruple<unsigned>;

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// The bits of one type as another of the same size.
template <class To, class From>
To hpo_bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline int __float_as_int(float x) { return hpo_bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return hpo_bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return hpo_bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return hpo_bit_cast<float>(x); }

// The type is trivial, so that shared arrays and unions can hold it.
struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16(float x) {
  const unsigned bits = __float_as_uint(x);
  return {uint16_t(x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};  // to nearest, ties to even
}

struct __half {
  uint16_t bits;
};
inline float __half2float(__half x) { return float(hpo_bit_cast<_Float16>(x)); }
inline __half __float2half(float x) { return hpo_bit_cast<__half>(_Float16(x)); }

// Pairs. If one of two numbers is NaN, __hmax2 returns the other, and __hmin2_nan returns NaN.
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
struct __half2 {
  __half x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16(x), __float2bfloat16(y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half(x), __float2half(y)}; }
inline float __low2float(__half2 pair) { return __half2float(pair.x); }
inline float __high2float(__half2 pair) { return __half2float(pair.y); }
inline float hpo_min_nan(float x, float y) { return x != x || y != y ? NAN : std::fmin(x, y); }
inline __nv_bfloat162 __hmin2_nan(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn(hpo_min_nan(__bfloat162float(a.x), __bfloat162float(b.x)),
                               hpo_min_nan(__bfloat162float(a.y), __bfloat162float(b.y)));
}
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn(std::fmax(__bfloat162float(a.x), __bfloat162float(b.x)),
                               std::fmax(__bfloat162float(a.y), __bfloat162float(b.y)));
}
inline __half2 __hmin2_nan(__half2 a, __half2 b) {
  return __floats2half2_rn(hpo_min_nan(__half2float(a.x), __half2float(b.x)),
                           hpo_min_nan(__half2float(a.y), __half2float(b.y)));
}
inline __half2 __hmax2(__half2 a, __half2 b) {
  return __floats2half2_rn(std::fmax(__half2float(a.x), __half2float(b.x)), std::fmax(__half2float(a.y), __half2float(b.y)));
}

template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }

// Loads and stores with a cache hint. A kernel must not write memory that it reads through the read-only path.
template <class T>
T __ldg(const T* address, hpo::emulation::Site site = hpo::emulation::Site()) {
  hpo::emulation::check_load(address, sizeof(T), site);
  hpo::emulation::read_only(address, sizeof(T), site);
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
void __stwb(T* address, T value) {
  *address = value;
}
template <class T>
void __stcs(T* address, T value) {
  *address = value;
}

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorLaunchFailure = 719 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16, cudaDevAttrL2CacheSize = 38 };

// A launch that fails by itself throws.
inline cudaError_t cudaPeekAtLastError() { return hpo::emulation::has_refused_launch() ? cudaErrorLaunchFailure : cudaSuccess; }
inline cudaError_t cudaGetLastError() {
  const cudaError_t error = cudaPeekAtLastError();
  hpo::emulation::end_call();
  return error;
}
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "HPO_EMULATION_REFUSED refuses this launch";
}
inline cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t = nullptr) {
  std::memset(address, value, bytes);
  return cudaSuccess;
}
