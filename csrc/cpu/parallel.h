// The CPU kernels split their work into ranges whose number depends only on the sizes, never on the threads.
#pragma once
#include <omp.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "arithmetic.h"

namespace hpo::HPO_ISA {

constexpr size_t kLine = 64;  // bytes of a cache line

inline int64_t ceil_divide(int64_t size, int64_t part) { return (size + part - 1) / part; }

// Waking a second thread can cost more than the work (milliseconds where the cores are busy), so small inputs stay on one.
inline int worthwhile(int threads, int64_t tokens) { return tokens < 16384 ? 1 : threads; }

// The part of a thread's portion that has not begun.
struct alignas(kLine) Portion {
  std::atomic<int64_t> next;
  int64_t end;
};

// Calls body(i) for all i below count. body(i) writes only data of i, so results do not depend on the calling thread. A
// thread works through its own portion, which is the same in every call because its caches hold it, and then through the
// portions of others, because cores, least of all shared ones, are not equally fast.
template <class Body>
inline void parallel_for(int64_t count, int threads, const Body& body) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  constexpr int kMost = 64;
  Portion portions[kMost];
  const int used = threads < kMost ? threads : kMost;
  for (int i = 0; i < used; ++i) {
    portions[i].next.store(count * i / used, std::memory_order_relaxed);
    portions[i].end = count * (i + 1) / used;
  }
#pragma omp parallel num_threads(threads)
  {
    const StandardArithmetic standard;
    const int own = omp_get_thread_num() % used;
    for (int other = 0; other < used; ++other) {
      Portion& portion = portions[(own + other) % used];
      for (int64_t i; (i = portion.next.fetch_add(1, std::memory_order_relaxed)) < portion.end;) body(i);
    }
  }
}

constexpr int64_t kRange = 1024;

// Calls body(first, end) for ranges of [0, count).
template <class Body>
inline void for_each_range(int64_t count, int threads, const Body& body) {
  parallel_for(ceil_divide(count, kRange), threads,
               [&](int64_t range) { body(range * kRange, (range + 1) * kRange < count ? (range + 1) * kRange : count); });
}

// Places arrays one after the other in a workspace, aligned to cache lines; with nullptr it only measures.
class Arena {
 public:
  explicit Arena(void* base) : base_(reinterpret_cast<uintptr_t>(base)), next_((base_ + kLine - 1) / kLine * kLine) {}

  template <class T>
  T* take(int64_t count) {
    T* part = reinterpret_cast<T*>(next_);
    next_ += (uintptr_t(count) * sizeof(T) + kLine - 1) / kLine * kLine;
    return part;
  }

  int64_t bytes() const { return int64_t(next_ - base_ + kLine); }

 private:
  uintptr_t base_, next_;
};

}  // namespace hpo::HPO_ISA
