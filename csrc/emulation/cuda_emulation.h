// CUDA for g++: runs unchanged .cu files on the CPU, to test them. Included by hpo/cuda.h under -DHPO_EMULATE.
//
// HPO_EMULATION_ORDER=forward|reverse|random:SEED, read at each launch, is the order of blocks and threads: a data race
// shows as a difference. A divergent or unreachable barrier, a warp operation outside its mask, a shared index out of
// bounds, a deadlock or an impossible launch throws an exception that names the kernel, block, thread and line; shared
// memory starts as NaN. A cooperative launch holds three quarters of HPO_EMULATION_PROCESSORS blocks (4), because other
// kernels may run beside it. A misaligned access fails, and so does a read of a word that another block writes in the launch,
// unless fences or a grid barrier make the value visible (memory_model.h). HPO_EMULATION_REFUSED=n: the launch with n others
// before it in its call does nothing and leaves an error, as one for which a GPU lacks resources. Not emulated: the memory
// model inside a block.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "device_types.h"

namespace hpo::emulation {

// An index together with its source location: operator[] has no default arguments, but a converting constructor has.
struct Index {
  int64_t value;
  Site site;
  template <class Integer, class = std::enable_if_t<std::is_integral_v<Integer> || std::is_enum_v<Integer>>>
  Index(Integer value, const char* file = __builtin_FILE(), int line = __builtin_LINE()) : value(value), site(file, line) {}
};

// A pointer into a shared array that knows the array's bounds.
template <class T>
class SharedPointer {
 public:
  SharedPointer(T* begin, int64_t size, const char* name) : begin_(begin), size_(size), name_(name) {}

  decltype(auto) operator[](Index index) const {
    const int64_t at = offset_ + index.value;
    if (at < 0 || at >= size_) fail(at, index.site);
    if constexpr (std::is_array_v<T>) {
      return SharedPointer<std::remove_extent_t<T>>(begin_[at], std::extent_v<T>, name_);
    } else {
      return (begin_[at]);
    }
  }

  SharedPointer operator+(int64_t elements) const {
    SharedPointer moved = *this;
    moved.offset_ += elements;
    return moved;
  }

 private:
  [[noreturn, gnu::cold, gnu::noinline]] void fail(int64_t at, Site site) const {
    emulation::fail("index " + std::to_string(at) + " of shared " + name_ + ", which has " + std::to_string(size_), site);
  }

  T* begin_;
  int64_t size_;
  const char* name_;
  int64_t offset_ = 0;
};

template <class T>
decltype(auto) shared_array(SharedSlot& slot, const char* name, Site site) {
  static_assert(std::is_trivially_default_constructible_v<T>, "CUDA runs no constructors in shared memory");
  T* address = reinterpret_cast<T*>(find_shared(slot, name, sizeof(T), site));
  if (!address) fail(std::string("no room for shared ") + name + ": 48 KiB with the dynamic", site);
  if constexpr (std::is_array_v<T>) {
    return SharedPointer<std::remove_extent_t<T>>(*address, std::extent_v<T>, name);
  } else {
    return (*address);
  }
}

template <class T>
SharedPointer<T> dynamic_shared(const char* name, size_t byte_offset, Site site) {
  const size_t bytes = dynamic_memory_bytes();
  if (byte_offset % alignof(T)) fail(std::string("misaligned shared ") + name, site);
  const size_t size = byte_offset < bytes ? (bytes - byte_offset) / sizeof(T) : 0;
  return {reinterpret_cast<T*>(dynamic_memory() + byte_offset), int64_t(size), name};
}

// The name of a kernel with the values of its template's parameters, among other text.
template <auto KERNEL>
const char* instance() {
  return __PRETTY_FUNCTION__;
}

template <class... Parameters, class... Arguments>
void launch(const char* name, bool together, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t dynamic_bytes,
            cudaStream_t, Arguments&&... arguments) {
  if (refuses_launch()) return;
  std::tuple<Parameters...> values(std::forward<Arguments>(arguments)...);
  auto call = [&] { std::apply(kernel, values); };
  run_kernel(
      name, grid, block, dynamic_bytes, together, [](void* closure) { (*static_cast<decltype(call)*>(closure))(); }, &call);
}

template <class T>
T shuffle(unsigned mask, T value, unsigned source, Site site) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "CUDA shuffles 4 and 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = meet(WarpOperation::kShuffle, mask, bits, source, site);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

inline unsigned ballot(unsigned mask, bool predicate, Site site) {
  return unsigned(meet(WarpOperation::kBallot, mask, predicate, 0, site));
}

}  // namespace hpo::emulation

#define HPO_LAUNCH_AS(together, kernel, grid, block, dynamic_shared_bytes, stream, ...)                            \
  do {                                                                                                             \
    if (!::hpo::all_launched()) break;                                                                             \
    static ::hpo::LaunchCounter hpo_launch_counter(#kernel, ::hpo::emulation::instance<kernel>());                 \
    hpo_launch_counter.add();                                                                                      \
    ::hpo::emulation::launch(#kernel, together, kernel, grid, block, dynamic_shared_bytes, stream, ##__VA_ARGS__); \
  } while (0)
#define HPO_LAUNCH(...) HPO_LAUNCH_AS(false, __VA_ARGS__)
#define HPO_LAUNCH_TOGETHER(...) HPO_LAUNCH_AS(true, __VA_ARGS__)

#define HPO_SHARED(type, name, dimensions)         \
  typedef type name##_declared dimensions;         \
  static ::hpo::emulation::SharedSlot name##_slot; \
  auto&& name = ::hpo::emulation::shared_array<name##_declared>(name##_slot, #name, ::hpo::emulation::Site())
#define HPO_SHARED_POINTER(type) ::hpo::emulation::SharedPointer<type>
#define HPO_DYN_SHARED_AT(type, name, byte_offset) \
  const auto name = ::hpo::emulation::dynamic_shared<type>(#name, byte_offset, ::hpo::emulation::Site())
#define HPO_DYN_SHARED(type, name) HPO_DYN_SHARED_AT(type, name, 0)

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))

// CUDA's own names. A Site as last parameter is the line of the call.
#define HPO_SITE ::hpo::emulation::Site site = ::hpo::emulation::Site()

inline void __syncthreads(HPO_SITE) { hpo::emulation::barrier(false, site); }
inline int __syncthreads_or(int predicate, HPO_SITE) { return hpo::emulation::barrier(predicate != 0, site); }
inline void __syncwarp(unsigned mask = ~0u, HPO_SITE) {
  hpo::emulation::meet(hpo::emulation::WarpOperation::kSync, mask, 0, 0, site);
}
namespace hpo {
inline void sync_grid(HPO_SITE) { emulation::grid_barrier(site); }

inline uint4 load_evicted_first(const uint4* address) { return *address; }

// The result has the largest error of the instruction, up or down, so that tests cover it.
inline float fast_exp2(float x) {
  const float power = std::exp2(x);
  if (!(power >= 1.17549435e-38f)) return x != x ? x : 0.0f;
  if (power == std::floor(power) || std::isinf(power)) return power;
  return __int_as_float(__float_as_int(power) + (__float_as_int(x) & 1 ? 2 : -2));
}
}  // namespace hpo
inline void __threadfence() { hpo::emulation::fence(); }

inline unsigned __ballot_sync(unsigned mask, int predicate, HPO_SITE) {
  return hpo::emulation::ballot(mask, predicate != 0, site);
}
inline int __any_sync(unsigned mask, int predicate, HPO_SITE) { return __ballot_sync(mask, predicate, site) != 0; }
inline int __all_sync(unsigned mask, int predicate, HPO_SITE) { return __ballot_sync(mask, !predicate, site) == 0; }

// A shuffle that would read outside its segment of `width` lanes returns the lane's own value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, HPO_SITE) {
  const int lane = int(hpo::emulation::lane()), first = lane & -width;
  return hpo::emulation::shuffle(mask, value, unsigned(first + (source & (width - 1))), site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, HPO_SITE) {
  const int lane = int(hpo::emulation::lane()), from = lane - int(delta);
  return hpo::emulation::shuffle(mask, value, unsigned(from < (lane & -width) ? lane : from), site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, HPO_SITE) {
  const int lane = int(hpo::emulation::lane()), from = lane + int(delta);
  return hpo::emulation::shuffle(mask, value, unsigned(from >= (lane & -width) + width ? lane : from), site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize, HPO_SITE) {
  const int lane = int(hpo::emulation::lane()), from = lane ^ lane_mask;
  return hpo::emulation::shuffle(mask, value, unsigned(from >= (lane & -width) + width ? lane : from), site);
}
#undef HPO_SITE

// Atomics exist for integers only: a float sum in a random order would not be deterministic.
#define HPO_ATOMIC(operation, expression)                                                 \
  template <class T, class = std::enable_if_t<std::is_integral_v<T> && (sizeof(T) >= 4)>> \
  HPO_UNHOOKED T operation(T* address, std::common_type_t<T> value) {                     \
    hpo::emulation::before_atomic(address);                                               \
    const T old = *address;                                                               \
    *address = T(expression);                                                             \
    return old;                                                                           \
  }
HPO_ATOMIC(atomicAdd, std::make_unsigned_t<T>(old) + std::make_unsigned_t<T>(value))  // wraps, as CUDA's does
HPO_ATOMIC(atomicInc, T(old) >= T(value) ? T(0) : old + 1)
HPO_ATOMIC(atomicMin, value < old ? value : old)
HPO_ATOMIC(atomicMax, old < value ? value : old)
HPO_ATOMIC(atomicExch, value)
#undef HPO_ATOMIC
template <class T, class = std::enable_if_t<std::is_integral_v<T> && (sizeof(T) >= 4)>>
HPO_UNHOOKED T atomicCAS(T* address, std::common_type_t<T> compare, std::common_type_t<T> value) {
  hpo::emulation::before_atomic(address);
  const T old = *address;
  if (old == compare) *address = value;
  return old;
}

namespace hpo {
template <class T>
HPO_UNHOOKED T load_relaxed(const T* address) {
  emulation::perhaps_yield();
  return *address;
}
}  // namespace hpo

inline const cudaStream_t cudaStreamPerThread = reinterpret_cast<cudaStream_t>(-1);
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = reinterpret_cast<uintptr_t>(stream);
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  constexpr int kCache = 1 << 20;  // so small that tests have rows of which it holds few
  *value = attribute == cudaDevAttrL2CacheSize ? kCache : hpo::emulation::processors();
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}
