// The one device of an emulated extension, and the hooks that -fsanitize=thread puts before every access to memory of a kernel.
#include <cstdlib>

#include "machine.h"

namespace hpo::emulation {

namespace {
Machine machine;
int launches_of_call = 0;  // counted where HPO_EMULATION_REFUSED is set
bool refused = false;
}  // namespace

void Machine::run_threads() {
  for (;;) {
    try {
      machine.call_(machine.closure_);
      machine.finish_thread();
    } catch (...) {
      machine.error_ = std::current_exception();
    }
    // The switch is outside the handler, because the runtime ties the state of a handled exception to its stack.
    if (machine.error_) machine.current_->fiber->switch_to(machine.host_);
  }
}

void run_kernel(const char* name, dim3 grid, dim3 block, size_t dynamic_bytes, bool together, void (*call)(void*),
                void* closure) {
  try {
    machine.launch(name, grid, block, dynamic_bytes, together, call, closure);
  } catch (...) {
    end_call();  // which no cudaGetLastError does
    throw;
  }
}
bool refuses_launch() {
  const char* place = std::getenv("HPO_EMULATION_REFUSED");
  const bool refuses = place && launches_of_call++ == std::atoi(place);
  refused |= refuses;
  return refuses;
}
bool has_refused_launch() { return refused; }
void end_call() { launches_of_call = 0, refused = false; }

int processors() {
  const char* variable = std::getenv("HPO_EMULATION_PROCESSORS");
  return variable ? std::atoi(variable) : 4;
}

void fail(const std::string& what, Site site) { machine.fail(what, site); }
void fail(const std::string& what) { machine.fail(what); }

bool barrier(bool predicate, Site site) { return machine.barrier(predicate, site); }
void grid_barrier(Site site) { machine.grid_barrier(site); }
uint64_t meet(WarpOperation operation, unsigned mask, uint64_t value, unsigned source, Site site) {
  return machine.meet(operation, mask, value, source, site);
}
unsigned lane() { return machine.lane(); }

void fence() { machine.fence(); }
void perhaps_yield() { machine.perhaps_yield(); }
void before_atomic(const void* address) { machine.before_atomic(reinterpret_cast<uintptr_t>(address)); }
void read_only(const void* address, size_t bytes, Site site) {
  machine.read_only(reinterpret_cast<uintptr_t>(address), bytes, site);
}

char* find_shared(SharedSlot& slot, const char* name, size_t bytes, Site site) {
  return machine.shared().find(slot, name, bytes, site);
}
char* dynamic_memory() { return machine.shared().dynamic(); }
size_t dynamic_memory_bytes() { return machine.shared().dynamic_bytes(); }

}  // namespace hpo::emulation

#define HPO_HOOK(name) extern "C" __attribute__((visibility("hidden"))) void name
#define HPO_ACCESS_HOOKS(bytes)                                                                              \
  HPO_HOOK(__tsan_read##bytes)(uintptr_t at) { hpo::emulation::machine.access(at, bytes, false); }           \
  HPO_HOOK(__tsan_write##bytes)(uintptr_t at) { hpo::emulation::machine.access(at, bytes, true); }           \
  HPO_HOOK(__tsan_unaligned_read##bytes)(uintptr_t at) { hpo::emulation::machine.access(at, bytes, false); } \
  HPO_HOOK(__tsan_unaligned_write##bytes)(uintptr_t at) { hpo::emulation::machine.access(at, bytes, true); }
HPO_ACCESS_HOOKS(1)
HPO_ACCESS_HOOKS(2)
HPO_ACCESS_HOOKS(4)
HPO_ACCESS_HOOKS(8)
HPO_ACCESS_HOOKS(16)

// A struct that is copied as a whole: word by word.
HPO_HOOK(__tsan_read_range)(uintptr_t at, size_t bytes) {
  for (size_t i = 0; i + 4 <= bytes; i += 4) hpo::emulation::machine.access(at + i, 4, false);
}
HPO_HOOK(__tsan_write_range)(uintptr_t at, size_t bytes) {
  for (size_t i = 0; i + 4 <= bytes; i += 4) hpo::emulation::machine.access(at + i, 4, true);
}
HPO_HOOK(__tsan_init)() {}
HPO_HOOK(__tsan_vptr_update)(void**, void*) {}
HPO_HOOK(__tsan_func_entry)(void*) {}
HPO_HOOK(__tsan_func_exit)() {}

// The atomic operations of the launch counter. ThreadSanitizer's memory orders have the numbers of C++.
extern "C" {
__attribute__((visibility("hidden"))) uint8_t __tsan_atomic8_load(const volatile uint8_t* at, int) {
  return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}
__attribute__((visibility("hidden"))) uint64_t __tsan_atomic64_load(const volatile uint64_t* at, int) {
  return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}
__attribute__((visibility("hidden"))) uint64_t __tsan_atomic64_fetch_add(volatile uint64_t* at, uint64_t value, int) {
  return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}
__attribute__((visibility("hidden"))) int __tsan_atomic64_compare_exchange_weak(volatile uint64_t* at, uint64_t* expected,
                                                                                uint64_t value, int, int) {
  return __atomic_compare_exchange_n(at, expected, value, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
}
