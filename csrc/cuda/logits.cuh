// Logits in memory: their types, and the words of 4 bytes that a thread reads and writes four at a time. A word holds one
// float, or two 16-bit numbers, which are compared both at once.
#pragma once
#include <type_traits>

#include "grid.cuh"
#include "hpo/logprobs.h"

namespace hpo {

// A type of logits has: `lesser`, which is NaN where its second argument is; `greater`, which is never NaN; `exp`, which is
// e^(delta / temperature) to the precision of a stored gradient.
struct Float32 {
  using Element = uint32_t;
  static constexpr int kPerWord = 1;
  static constexpr unsigned kNothing = 0xFF800000u;  // -inf in each lane

  static __device__ __forceinline__ float lane(unsigned word, int) { return bits_as<float>(word); }
  static __device__ __forceinline__ unsigned lesser(unsigned number, unsigned word) {
    const float x = bits_as<float>(number), y = bits_as<float>(word);
    return x < y ? number : word;
  }
  static __device__ __forceinline__ unsigned greater(unsigned x, unsigned y) {
    return bits_as<unsigned>(fmaxf(bits_as<float>(x), bits_as<float>(y)));
  }
  static __device__ __forceinline__ float greatest(unsigned word) { return bits_as<float>(word); }
  static __device__ __forceinline__ unsigned pack(const float (&lanes)[1]) { return bits_as<unsigned>(lanes[0]); }
  static __device__ __forceinline__ float exp(const Exponent& exponent, float delta) { return exp_of(exponent, delta); }
};

template <class Pair>
struct Pairs {
  using Element = uint16_t;
  static constexpr int kPerWord = 2;

  static __device__ __forceinline__ unsigned lesser(unsigned number, unsigned word) {
    return bits_as<unsigned>(__hmin2_nan(bits_as<Pair>(number), bits_as<Pair>(word)));
  }
  static __device__ __forceinline__ unsigned greater(unsigned x, unsigned y) {
    return bits_as<unsigned>(__hmax2(bits_as<Pair>(x), bits_as<Pair>(y)));
  }
  static __device__ __forceinline__ float exp(const Exponent& exponent, float delta) {
    return fast_exp2(delta * exponent.high);
  }
};

struct Bfloat16 : Pairs<__nv_bfloat162> {
  static constexpr unsigned kNothing = 0xFF80FF80u;

  static __device__ __forceinline__ float lane(unsigned word, int lane) {
    return bits_as<float>(lane == 0 ? word << 16 : word & 0xFFFF0000u);
  }
  static __device__ __forceinline__ float greatest(unsigned word) { return fmaxf(lane(word, 0), lane(word, 1)); }
  static __device__ __forceinline__ unsigned pack(const float (&lanes)[2]) {
    return bits_as<unsigned>(__floats2bfloat162_rn(lanes[0], lanes[1]));
  }
};

struct Float16 : Pairs<__half2> {
  static constexpr unsigned kNothing = 0xFC00FC00u;

  static __device__ __forceinline__ float lane(unsigned word, int lane) {
    return lane == 0 ? __low2float(bits_as<__half2>(word)) : __high2float(bits_as<__half2>(word));
  }
  static __device__ __forceinline__ float greatest(unsigned word) { return fmaxf(lane(word, 0), lane(word, 1)); }
  static __device__ __forceinline__ unsigned pack(const float (&lanes)[2]) {
    return bits_as<unsigned>(__floats2half2_rn(lanes[0], lanes[1]));
  }
};

// Calls use(type) with the type of logits of a call.
template <class Use>
void with_type(LogitType type, const Use& use) {
  switch (type) {
    case LogitType::float32: return use(Float32());
    case LogitType::bfloat16: return use(Bfloat16());
    case LogitType::float16: return use(Float16());
  }
}

// ------------------------------------------------------------------------------------------------------------ rows in steps

constexpr int kVectors = 4, kWords = 4 * kVectors;  // per thread and step of its block

template <class Type>
constexpr int kPerVector = 4 * Type::kPerWord;  // elements of 16 bytes
template <class Type>
constexpr int kPerStep = kThreads * kVectors * kPerVector<Type>;

// The first column of a vector of this thread, within a step. It depends on no address, so that a thread sums the same columns
// in the same order wherever in memory the row lies.
template <class Type>
__device__ __forceinline__ int first_column(int vector) {
  return (vector * kThreads + int(threadIdx.x)) * kPerVector<Type>;
}

// Only one thread of a block may call this: if every thread used the pointer of its loads as a number, nvcc for sm_100 would
// no longer know that the pointer is to global memory.
template <class Type>
__device__ __forceinline__ int elements_before_vector(const void* array, int64_t offset) {
  const uint64_t place = reinterpret_cast<uintptr_t>(array) / sizeof(typename Type::Element) + uint64_t(offset);
  return int((0 - place) % kPerVector<Type>);
}

template <class Type>
__device__ __forceinline__ bool is_aligned(const void* array, int64_t offset) {
  return elements_before_vector<Type>(array, offset) == 0;
}

// Whether the cache may soon forget a vector. evicted_first: nothing reads the vector again, and other rows are to stay.
enum class Cached { normal, evicted_first };

template <Cached kCached>
__device__ __forceinline__ void load_vector(const void* from, unsigned* words) {
  const uint4* const vectors = static_cast<const uint4*>(from);
  const uint4 vector = kCached == Cached::evicted_first ? load_evicted_first(vectors) : *vectors;
  words[0] = vector.x, words[1] = vector.y, words[2] = vector.z, words[3] = vector.w;
}

template <Cached kCached>
__device__ __forceinline__ void store_vector(const unsigned* words, void* to) {
  uint4* const vectors = static_cast<uint4*>(to);
  const uint4 vector = make_uint4(words[0], words[1], words[2], words[3]);
  if (kCached == Cached::evicted_first) __stcs(vectors, vector);
  else *vectors = vector;
}

// Reads the first `count` elements of a vector; the others become -inf.
template <class Type>
__device__ __forceinline__ void load_elements(const typename Type::Element* from, int count, unsigned* words) {
#pragma unroll
  for (int word = 0; word < 4; ++word) words[word] = Type::kNothing;
#pragma unroll
  for (int i = 0; i < kPerVector<Type>; ++i) {
    if (i >= count) continue;
    const int word = i / Type::kPerWord, shift = i % Type::kPerWord * 16;
    const unsigned others = Type::kPerWord == 1 ? 0u : words[word] & ~(0xFFFFu << shift);
    words[word] = others | unsigned(from[i]) << shift;
  }
}

template <class Type>
__device__ __forceinline__ void store_elements(const unsigned* words, int count, typename Type::Element* to) {
#pragma unroll
  for (int i = 0; i < kPerVector<Type>; ++i) {
    if (i < count) to[i] = typename Type::Element(words[i / Type::kPerWord] >> i % Type::kPerWord * 16);
  }
}

// Reads this thread's words of the step that begins at column `step`. kWhole: the row is aligned and reaches the end of the
// step.
template <class Type, bool kWhole, Cached kCached = Cached::normal>
__device__ __forceinline__ void load_step(const typename Type::Element* from, int64_t columns, bool wide, int64_t step,
                                          unsigned (&words)[kWords]) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = step + first_column<Type>(v);
    if (kWhole || (wide && at + kPerVector<Type> <= columns)) load_vector<kCached>(from + at, words + 4 * v);
    else load_elements<Type>(from + at, int(min(columns - at, int64_t(kPerVector<Type>))), words + 4 * v);
  }
}

template <class Type, bool kWhole, Cached kCached = Cached::normal>
__device__ __forceinline__ void store_step(const unsigned (&words)[kWords], typename Type::Element* to, int64_t columns,
                                           bool wide, int64_t step) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = step + first_column<Type>(v);
    if (kWhole || (wide && at + kPerVector<Type> <= columns)) store_vector<kCached>(words + 4 * v, to + at);
    else store_elements<Type>(words + 4 * v, int(min(columns - at, int64_t(kPerVector<Type>))), to + at);
  }
}

// Calls body(kWhole, step) for every step of a row.
template <class Type, class Body>
__device__ __forceinline__ void for_each_step(int64_t columns, bool wide, const Body& body) {
  int64_t step = 0;
#pragma unroll 1
  for (const int64_t whole = wide ? columns / kPerStep<Type> : 0; step < whole * kPerStep<Type>; step += kPerStep<Type>) {
    body(std::true_type(), step);
  }
#pragma unroll 1
  for (; step < columns; step += kPerStep<Type>) body(std::false_type(), step);
}

// Calls load(kWhole, step, words) and then use(kWhole, step, words) for every step of a row. Whole steps are loaded one ahead,
// which keeps memory busy where few blocks are. There is no branch, because the compiler would move the loads past it.
template <class Type, class Load, class Use>
__device__ __forceinline__ void for_each_step_ahead(int64_t columns, bool wide, const Load& load, const Use& use) {
  unsigned words[kWords];
  int64_t step = 0;
  const int64_t end = wide ? columns / kPerStep<Type> * kPerStep<Type> : 0;
  bool loaded = end > 0;
  if (loaded) load(std::true_type(), step, words);
#pragma unroll 1
  for (; step + kPerStep<Type> < end; step += kPerStep<Type>) {
    unsigned next[kWords];
    load(std::true_type(), step + kPerStep<Type>, next);
    use(std::true_type(), step, words);
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = next[i];
  }
#pragma unroll 1
  for (; step < columns; step += kPerStep<Type>) {
    if (!loaded) load(std::false_type(), step, words);
    loaded = false;
    use(std::false_type(), step, words);
  }
}

}  // namespace hpo
