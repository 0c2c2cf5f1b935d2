// The part of the emulated device that kernels see: indices, waiting, shared memory and launches. The rest, machine.h, is
// compiled once and without the hooks at every memory access that kernels have (memory_model.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
constexpr int warpSize = 32;

#define HPO_UNHOOKED __attribute__((noinline, no_sanitize("thread")))

namespace hpo::emulation {

// A source location. As a last parameter with these defaults it is the location of the call.
struct Site {
  const char* file;
  int line;
  Site(const char* file = __builtin_FILE(), int line = __builtin_LINE()) : file(file), line(line) {}
  bool operator!=(const Site& other) const {
    return line != other.line || (file != other.file && std::strcmp(file, other.file) != 0);
  }
  std::string text() const { return std::string(file) + ":" + std::to_string(line); }
};

// One per HPO_SHARED in the source: the address of the array in the last block that used it.
struct SharedSlot {
  uint64_t block = 0;
  char* address = nullptr;
};

enum class WarpOperation { kSync, kShuffle, kBallot };

// Runs `call(closure)` as every thread of the grid, all blocks `together` or one by one. Throws if the kernel does something
// wrong; the next launch starts afresh.
void run_kernel(const char* name, dim3 grid, dim3 block, size_t dynamic_bytes, bool together, void (*call)(void*),
                void* closure);
// Whether HPO_EMULATION_REFUSED names the place of this launch in its call.
bool refuses_launch();
bool has_refused_launch();  // in the call so far
void end_call();  // the next launch is the first of a call
// Multiprocessors of the device. Each holds one block of a cooperative launch, but a quarter are taken by other kernels.
int processors();

// Throws an exception that names the kernel, block, thread and line.
[[noreturn, gnu::cold]] void fail(const std::string& what, Site site);
// The same where the line is unknown: the text names the last barrier or warp operation before it.
[[noreturn, gnu::cold]] void fail(const std::string& what);

// __syncthreads: waits for every thread of the block; returns whether any predicate is true.
bool barrier(bool predicate, Site site);
// Waits for every thread of every block.
void grid_barrier(Site site);
// Waits for the lanes of `mask`. A shuffle returns the value of lane `source`, a ballot the lanes with a value.
uint64_t meet(WarpOperation operation, unsigned mask, uint64_t value, unsigned source, Site site);
unsigned lane();

void fence();  // of the device
void perhaps_yield();
void before_atomic(const void* address);
void read_only(const void* address, size_t bytes, Site site);  // before a read through the read-only path

// The array of this slot in this block. The first thread that uses it places it; null if there is no room.
char* find_shared(SharedSlot& slot, const char* name, size_t bytes, Site site);
char* dynamic_memory();
size_t dynamic_memory_bytes();

// A vector of 8 or 16 bytes is loaded and stored at multiples of its size.
inline bool is_aligned(const void* address, size_t bytes) {
  uintptr_t at = reinterpret_cast<uintptr_t>(address);
  asm("" : "+r"(at));  // or the compiler concludes from the type that the address is aligned
  return at % bytes == 0;
}
inline void check_load(const void* address, size_t bytes, Site site) {
  if (!is_aligned(address, bytes)) fail("a misaligned load of " + std::to_string(bytes) + " bytes", site);
}
inline void check_store(const void* address, size_t bytes) {  // an assignment knows no line
  if (!is_aligned(address, bytes)) fail("a misaligned store of " + std::to_string(bytes) + " bytes");
}

}  // namespace hpo::emulation
