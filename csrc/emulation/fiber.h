// Fibers: call stacks of one operating-system thread that are switched by hand. A switch on x86-64 is a dozen
// instructions; elsewhere ucontext does it, ten times slower because of a system call for the signal mask.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if !defined(__x86_64__) || defined(HPO_EMULATION_UCONTEXT)
#include <ucontext.h>
#define HPO_FIBER_UCONTEXT
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace hpo::emulation {

#if !defined(HPO_FIBER_UCONTEXT)
#if defined(__clang__)
#define HPO_OPAQUE __attribute__((naked, noinline, used))
#else
// noipa: the compiler must not conclude from the few registers named below that the others survive the call.
#define HPO_OPAQUE __attribute__((naked, noinline, noipa, used))
#endif
// Stores the stack pointer of the caller and continues on another stack, at a stack pointer that an earlier call stored.
HPO_OPAQUE inline void swap_stack(void** /* rdi: where to store */, void* /* rsi: where to go on */) {
  asm volatile(
      "pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n\t"
      "movq %rsp, (%rdi); movq %rsi, %rsp\n\t"
      "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
}
#undef HPO_OPAQUE
#endif

class Fiber {
  static constexpr size_t kStack = 256 << 10;

 public:
  // The stack of the host.
  Fiber() = default;

  // A new stack, on which `entry` starts at the first switch. `entry` never returns.
  explicit Fiber(void (*entry)(), size_t number) : entry_(entry) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    void* memory =
        mmap(nullptr, kStack + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory, page, PROT_NONE);  // an overflow faults instead of writing to the neighbour
    mapping_ = static_cast<char*>(memory);
    mapping_size_ = kStack + page;
    bottom_ = mapping_ + page;
    // Stacks whose tops lie a power of two apart would compete for the same few cache lines.
    size_ = kStack - number % 32 * 256;
    restart();
  }

  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() {
    if (mapping_) munmap(mapping_, mapping_size_);
  }

  // Abandons all calls on the stack; the next switch starts `entry` again.
  void restart() {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(bottom_, size_);
    fake_stack_ = nullptr;
#endif
#if defined(HPO_FIBER_UCONTEXT)
    getcontext(&context_);
    context_.uc_stack.ss_sp = bottom_;
    context_.uc_stack.ss_size = size_;
    context_.uc_link = nullptr;
    makecontext(&context_, &Fiber::start, 0);
#else
    // The frame that swap_stack pops: six registers, the return address, and a null caller, so that the stack pointer in
    // `start` is aligned as after a call and unwinders stop there.
    void** frame = reinterpret_cast<void**>(bottom_ + size_) - 8;
    for (int i = 0; i < 8; ++i) frame[i] = nullptr;
    frame[6] = reinterpret_cast<void*>(&Fiber::start);
    stack_pointer_ = frame;
#endif
  }

  struct Stack {
    uintptr_t bottom;
    bool holds(uintptr_t address) const { return address - bottom < kStack; }
  };
  Stack stack() const { return {reinterpret_cast<uintptr_t>(bottom_)}; }

  // Switches from this fiber, which must be the running one, to another; returns when a fiber switches back.
  void switch_to(Fiber& other) {
    left_ = this;
    entered_ = &other;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&fake_stack_, other.bottom_, other.size_);
#endif
#if defined(HPO_FIBER_UCONTEXT)
    swapcontext(&context_, &other.context_);
#else
    swap_stack(&stack_pointer_, other.stack_pointer_);
#endif
    arrive();
  }

 private:
  static void start() {
    arrive();
    entered_->entry_();
  }

  static void arrive() {
#if defined(__SANITIZE_ADDRESS__)
    // The call also returns the bounds of the stack just left, the only way to know the host's.
    const void* bottom = nullptr;
    __sanitizer_finish_switch_fiber(entered_->fake_stack_, &bottom, &left_->size_);
    left_->bottom_ = static_cast<char*>(const_cast<void*>(bottom));
#endif
  }

  inline static Fiber *left_ = nullptr, *entered_ = nullptr;

  void (*entry_)() = nullptr;
  char *mapping_ = nullptr, *bottom_ = nullptr;
  size_t mapping_size_ = 0, size_ = 0;
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack_ = nullptr;
#endif
#if defined(HPO_FIBER_UCONTEXT)
  ucontext_t context_;
#else
  void* stack_pointer_ = nullptr;
#endif
};

}  // namespace hpo::emulation
