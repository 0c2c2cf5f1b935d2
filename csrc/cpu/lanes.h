// Vectors of floats as wide as the instruction set, for loops that the compiler would not vectorise by itself. A pack of
// kLanes numbers is kParts of them, so that whatever is summed by lane has the same bits on every instruction set.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "hpo/math.h"

namespace hpo::HPO_ISA {

constexpr int kLanes = 16;
#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kParts = kLanes / kWidth;

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));

template <class Vector, class T>
HPO_INLINE Vector load_lanes(const T* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class Vector, class T>
HPO_INLINE void store_lanes(Vector vector, T* to) {
  std::memcpy(to, &vector, sizeof vector);
}

// Selects by bits: what is masked may be NaN and must reach no arithmetic that is kept.
HPO_INLINE Floats keep_if(Ints condition, Floats x) { return Floats(Ints(x) & condition); }

// `value` where the byte is not 0. GCC converts vectors of bytes one by one.
HPO_INLINE Ints keep_where(const uint8_t* bytes, Ints value) {
#if defined(__AVX512F__)
  const __m128i mask = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  return Ints(_mm512_maskz_mov_epi32(_mm_test_epi8_mask(mask, mask), __m512i(value)));
#elif defined(__AVX2__)
  const Ints mask = Ints(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))));
  return value & (mask != 0);
#else
  return value & (Ints{bytes[0], bytes[1], bytes[2], bytes[3]} != 0);
#endif
}

// -1 in the first `count` lanes, else 0.
HPO_INLINE Ints first_lanes(int count) {
  Ints lane = {};
  for (int i = 0; i < kWidth; ++i) lane[i] = i;
  return lane < count;
}

// sum + value, and the smaller and larger of two, where the condition holds; elsewhere the last argument.
HPO_INLINE Ints add_where(Ints condition, Ints value, Ints sum) { return condition ? sum + value : sum; }
HPO_INLINE Floats smaller_where(Ints condition, Floats x, Floats least) { return condition ? (x < least ? x : least) : least; }
HPO_INLINE Floats larger_where(Ints condition, Floats x, Floats most) { return condition ? (x > most ? x : most) : most; }

}  // namespace hpo::HPO_ISA

template <>
struct hpo::Number<hpo::HPO_ISA::Floats> {
  using F = hpo::HPO_ISA::Floats;
  using Int = hpo::HPO_ISA::Ints;
  static HPO_INLINE F fused(F a, F b, F c) {
#if defined(__AVX512F__)
    return F(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif defined(__FMA__)
    return F(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#else
    for (int lane = 0; lane < hpo::HPO_ISA::kWidth; ++lane) c[lane] = hpo::fused(a[lane], b[lane], c[lane]);
    return c;
#endif
  }
  static HPO_INLINE Int mask(Int condition) { return condition; }
  static HPO_INLINE Int to_bits(F x) { return Int(x); }
  static HPO_INLINE F from_bits(Int bits) { return F(bits); }
};
