// Kernels round to the nearest number and keep subnormal ones whatever the state of their thread. fesetround() and
// torch.set_flush_denormal(True) set the control register of the calling thread and of threads that it starts later, so
// results would depend on the thread of a token.
#pragma once
#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {  // one copy for each file: they are compiled for different instruction sets

class StandardArithmetic {
 public:
  StandardArithmetic() : before_(read()) {
    if (before_ & kModes) write(before_ & ~kModes);
  }
  ~StandardArithmetic() {
    if (before_ & kModes) write(before_);
  }
  StandardArithmetic(const StandardArithmetic&) = delete;
  StandardArithmetic& operator=(const StandardArithmetic&) = delete;

 private:
#if defined(__x86_64__)
  using Register = uint32_t;
  static constexpr Register kModes = 0xe040;  // flush to zero, two bits of rounding, denormals are zero
  static Register read() { return _mm_getcsr(); }
  static void write(Register value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Register = uint64_t;
  static constexpr Register kModes = Register(7) << 22;  // FZ, two bits of RMode
  static Register read() {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(Register value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#else
  using Register = uint32_t;
  static constexpr Register kModes = 0;
  static Register read() { return 0; }
  static void write(Register) {}
#endif

  const Register before_;
};

}  // namespace
