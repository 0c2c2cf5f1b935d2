// Kernels keep subnormal numbers whatever the state of their thread. torch.set_flush_denormal(True) sets the control
// register of the calling thread and of threads that it starts later, so a flush would depend on the thread of a token.
#pragma once
#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {  // one copy for each file: they are compiled for different instruction sets

class WithDenormals {
 public:
  WithDenormals() : before_(read()) {
    if (before_ & kFlush) write(before_ & ~kFlush);
  }
  ~WithDenormals() {
    if (before_ & kFlush) write(before_);
  }
  WithDenormals(const WithDenormals&) = delete;
  WithDenormals& operator=(const WithDenormals&) = delete;

 private:
#if defined(__x86_64__)
  using Register = uint32_t;
  static constexpr Register kFlush = 0x8040;  // flush to zero, denormals are zero
  static Register read() { return _mm_getcsr(); }
  static void write(Register value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Register = uint64_t;
  static constexpr Register kFlush = Register(1) << 24;  // FZ
  static Register read() {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(Register value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#else
  using Register = uint32_t;
  static constexpr Register kFlush = 0;
  static Register read() { return 0; }
  static void write(Register) {}
#endif

  const Register before_;
};

}  // namespace
