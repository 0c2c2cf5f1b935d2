// How the CPU kernels split their work: into pieces whose number depends on the sizes only, never on the threads.
#pragma once
#include <cstdint>

namespace hpo::HPO_ISA {

inline int64_t pieces(int64_t size, int64_t piece) { return (size + piece - 1) / piece; }

// Waking a second thread can cost more than the work (milliseconds where the cores are busy), so small inputs stay on one.
inline int worthwhile(int threads, int64_t tokens) { return tokens < 16384 ? 1 : threads; }

template <class Body>
inline void parallel_for(int64_t count, int threads, const Body& body) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; ++i) body(i);
}

constexpr int64_t kPiece = 1024;

// Calls body(first, end) for pieces of [0, count).
template <class Body>
inline void for_each_piece(int64_t count, int threads, const Body& body) {
  parallel_for(pieces(count, kPiece), threads,
               [&](int64_t piece) { body(piece * kPiece, (piece + 1) * kPiece < count ? (piece + 1) * kPiece : count); });
}

// Hands out consecutive parts of a workspace, aligned to cache lines; from nullptr it only measures.
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
  static constexpr uintptr_t kLine = 64;
  uintptr_t base_, next_;
};

}  // namespace hpo::HPO_ISA
