// Vectors of floats as wide as the instruction set, for loops that the compiler would not vectorise by itself. A pack of
// kLanes numbers is kParts vectors, so that sums by lane have the same bits on every instruction set.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstring>
#include <type_traits>

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
typedef uint32_t Unsigned __attribute__((vector_size(4 * kWidth)));  // arithmetic that may wrap around

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

// Selects by bits: a masked element may be NaN and must not enter arithmetic.
HPO_INLINE Floats keep_if(Ints condition, Floats x) { return Floats(Ints(x) & condition); }

// The nearest integers, ties to even; undefined where they do not fit.
HPO_INLINE Ints rounded(Floats x) {
#if defined(__AVX512F__)
  return Ints(_mm512_maskz_cvtps_epi32(0xFFFF, __m512(x)));
#elif defined(__AVX2__)
  return Ints(_mm256_cvtps_epi32(__m256(x)));
#else
  Ints nearest;
  for (int lane = 0; lane < kWidth; ++lane) nearest[lane] = int32_t(__builtin_llrintf(x[lane]));
  return nearest;
#endif
}

// A number minus the nearest integer, ties to even; exact.
HPO_INLINE Floats beyond_integer(Floats x) {
#if defined(__AVX512DQ__)
  return Floats(_mm512_maskz_reduce_ps(0xFFFF, __m512(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__)
  return x - Floats(_mm256_round_ps(__m256(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  for (int lane = 0; lane < kWidth; ++lane) x[lane] -= __builtin_nearbyintf(x[lane]);
  return x;
#endif
}

// The lanes of a condition, in the form that selects most cheaply: GCC does not use mask registers by itself for a
// conjunction of conditions.
#if defined(__AVX512F__)
using Mask = __mmask16;
HPO_INLINE Mask present_bytes(const uint8_t* bytes) {
  const __m128i mask = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  return _mm_test_epi8_mask(mask, mask);
}
HPO_INLINE Mask present_lanes(Ints kind) { return _mm512_test_epi32_mask(__m512i(kind), __m512i(kind)); }
HPO_INLINE Mask all_lanes() { return Mask(-1); }
HPO_INLINE Mask leading_lanes(int count) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(count));
}
HPO_INLINE Mask both(Mask a, Mask b) { return a & b; }
HPO_INLINE Mask but_not(Mask a, Mask b) { return a & ~b; }
HPO_INLINE Floats blend(Mask mask, Floats x, Floats otherwise) {
  return Floats(_mm512_mask_blend_ps(mask, __m512(otherwise), __m512(x)));
}
HPO_INLINE Mask less(Floats x, Floats y) { return _mm512_cmp_ps_mask(__m512(x), __m512(y), _CMP_LT_OQ); }
HPO_INLINE Mask at_least(Floats x, Floats y) { return _mm512_cmp_ps_mask(__m512(x), __m512(y), _CMP_GE_OQ); }
HPO_INLINE Mask either(Mask a, Mask b) { return a | b; }
HPO_INLINE Mask is_nan(Floats x) { return _mm512_cmp_ps_mask(__m512(x), __m512(x), _CMP_UNORD_Q); }
HPO_INLINE bool any(Mask mask) { return mask != 0; }
HPO_INLINE Floats keep_if(Mask mask, Floats x) { return Floats(_mm512_maskz_mov_ps(mask, __m512(x))); }
HPO_INLINE Ints keep_if(Mask mask, Ints x) { return Ints(_mm512_maskz_mov_epi32(mask, __m512i(x))); }
HPO_INLINE Floats difference(Mask mask, Floats x, Floats y) { return Floats(_mm512_maskz_sub_ps(mask, __m512(x), __m512(y))); }
HPO_INLINE Ints add_where(Mask mask, Ints value, Ints sum) {
  return Ints(_mm512_mask_add_epi32(__m512i(sum), mask, __m512i(sum), __m512i(value)));
}
HPO_INLINE Unsigned add_where(Mask mask, Unsigned value, Unsigned sum) {
  return Unsigned(_mm512_mask_add_epi32(__m512i(sum), mask, __m512i(sum), __m512i(value)));
}
HPO_INLINE Floats add_where(Mask mask, Floats value, Floats sum) {
  return Floats(_mm512_mask_add_ps(__m512(sum), mask, __m512(sum), __m512(value)));
}
HPO_INLINE Floats smaller_where(Mask mask, Floats x, Floats least) {
  return Floats(_mm512_mask_min_ps(__m512(least), mask, __m512(x), __m512(least)));
}
HPO_INLINE Floats larger_where(Mask mask, Floats x, Floats most) {
  return Floats(_mm512_mask_max_ps(__m512(most), mask, __m512(x), __m512(most)));
}
#else
using Mask = Ints;  // -1 or 0
HPO_INLINE Mask present_bytes(const uint8_t* bytes) {  // GCC converts vectors of bytes one by one
#if defined(__AVX2__)
  return Ints(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)))) != 0;
#else
  return Ints{bytes[0], bytes[1], bytes[2], bytes[3]} != 0;
#endif
}
HPO_INLINE Mask present_lanes(Ints kind) { return kind != 0; }
HPO_INLINE Mask all_lanes() { return Ints{} - 1; }
HPO_INLINE Mask leading_lanes(int count) {
  Ints lane = {};
  for (int i = 0; i < kWidth; ++i) lane[i] = i;
  return lane < count;
}
HPO_INLINE Mask both(Mask a, Mask b) { return a & b; }
HPO_INLINE Mask but_not(Mask a, Mask b) { return a & ~b; }
HPO_INLINE Floats blend(Mask mask, Floats x, Floats otherwise) { return mask ? x : otherwise; }
HPO_INLINE Mask less(Floats x, Floats y) { return x < y; }
HPO_INLINE Mask at_least(Floats x, Floats y) { return x >= y; }
HPO_INLINE Mask either(Mask a, Mask b) { return a | b; }
HPO_INLINE Mask is_nan(Floats x) { return x != x; }
HPO_INLINE bool any(Mask mask) {
  int32_t bits = 0;
  for (int lane = 0; lane < kWidth; ++lane) bits |= mask[lane];
  return bits != 0;
}
HPO_INLINE Ints keep_if(Mask mask, Ints x) { return x & mask; }
HPO_INLINE Floats difference(Mask mask, Floats x, Floats y) { return keep_if(mask, x - y); }
HPO_INLINE Floats add_where(Mask mask, Floats value, Floats sum) { return mask ? sum + value : sum; }
HPO_INLINE Floats smaller_where(Mask mask, Floats x, Floats least) { return mask ? (x < least ? x : least) : least; }
HPO_INLINE Floats larger_where(Mask mask, Floats x, Floats most) { return mask ? (x > most ? x : most) : most; }
#endif

// Two masks in memory, a bit for each lane.
struct MaskPair {
  uint16_t first, second;
};

HPO_INLINE uint16_t bits_of(Mask mask) {
#if defined(__AVX512F__)
  return mask;
#elif defined(__AVX2__)
  return uint16_t(_mm256_movemask_ps(__m256(mask)));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < kWidth; ++lane) bits |= uint32_t(mask[lane]) & (1u << lane);
  return uint16_t(bits);
#endif
}

// One load gives both masks.
HPO_INLINE void load_masks(const MaskPair* from, Mask& first, Mask& second) {
  uint32_t bits;
  std::memcpy(&bits, from, sizeof bits);
#if defined(__AVX512F__)
  first = Mask(bits), second = Mask(_kshiftri_mask32(bits, 16));
#else
  Ints bit_of_lane = {};
  for (int lane = 0; lane < kWidth; ++lane) bit_of_lane[lane] = 1 << lane;
  first = (bit_of_lane & int32_t(bits)) != 0, second = ((bit_of_lane << 16) & int32_t(bits)) != 0;
#endif
}

typedef double HalfDoubles __attribute__((vector_size(4 * kWidth)));

// The lanes in double, in two vectors.
struct Doubles {
  HalfDoubles low, high;
};

// GCC would convert vectors lane by lane. The intrinsics are the masked ones, because GCC warns of undefined values in the
// others.
HPO_INLINE Doubles as_doubles(Floats values) {
#if defined(__AVX512F__)
  const __m512d pairs = _mm512_castps_pd(__m512(values));
  const __m256 low = _mm256_castpd_ps(_mm512_maskz_extractf64x4_pd(0xF, pairs, 0));
  const __m256 high = _mm256_castpd_ps(_mm512_maskz_extractf64x4_pd(0xF, pairs, 1));
  return {HalfDoubles(_mm512_maskz_cvtps_pd(0xFF, low)), HalfDoubles(_mm512_maskz_cvtps_pd(0xFF, high))};
#elif defined(__AVX2__)
  const __m128 low = _mm256_castps256_ps128(__m256(values)), high = _mm256_extractf128_ps(__m256(values), 1);
  return {HalfDoubles(_mm256_cvtps_pd(low)), HalfDoubles(_mm256_cvtps_pd(high))};
#else
  return {HalfDoubles{double(values[0]), double(values[1])}, HalfDoubles{double(values[2]), double(values[3])}};
#endif
}

HPO_INLINE Floats as_floats(Doubles values) {
#if defined(__AVX512F__)
  const __m256d low = _mm256_castps_pd(_mm512_maskz_cvtpd_ps(0xFF, __m512d(values.low)));
  const __m256d high = _mm256_castps_pd(_mm512_maskz_cvtpd_ps(0xFF, __m512d(values.high)));
  return Floats(_mm512_maskz_insertf64x4(0xFF, _mm512_castpd256_pd512(low), high, 1));
#elif defined(__AVX2__)
  return Floats(_mm256_set_m128(_mm256_cvtpd_ps(__m256d(values.high)), _mm256_cvtpd_ps(__m256d(values.low))));
#else
  return Floats{float(values.low[0]), float(values.low[1]), float(values.high[0]), float(values.high[1])};
#endif
}

// sums[lane] += values[lane], in double.
HPO_INLINE void add_as_doubles(Floats values, double* sums) {
  const Doubles own = as_doubles(values);
  store_lanes(load_lanes<HalfDoubles>(sums) + own.low, sums);
  store_lanes(load_lanes<HalfDoubles>(sums + kWidth / 2) + own.high, sums + kWidth / 2);
}

// 0 in the other lanes, which may be another row's.
HPO_INLINE Floats load_where(Mask mask, const float* from) {
#if defined(__AVX512F__)
  return Floats(_mm512_maskz_loadu_ps(mask, from));
#elif defined(__AVX2__)
  return Floats(_mm256_maskload_ps(from, __m256i(mask)));
#else
  Floats vector = {};
  for (int lane = 0; lane < kWidth; ++lane) {
    if (mask[lane]) vector[lane] = from[lane];
  }
  return vector;
#endif
}

// Writes no other lane, because another thread may write there.
HPO_INLINE void store_where(Mask mask, Floats vector, float* to) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, mask, __m512(vector));
#elif defined(__AVX2__)
  _mm256_maskstore_ps(to, __m256i(mask), __m256(vector));
#else
  for (int lane = 0; lane < kWidth; ++lane) {
    if (mask[lane]) to[lane] = vector[lane];
  }
#endif
}

// The lanes of `mask` with a byte that is not 0. Bytes of other lanes are not read: they may be past the end of the tensor.
HPO_INLINE Mask present_where(Mask mask, const uint8_t* bytes) {
#if defined(__AVX512F__)
  const __m128i own = _mm_maskz_loadu_epi8(mask, bytes);
  return _mm_test_epi8_mask(own, own);
#else
  Mask present = {};
  for (int lane = 0; lane < kWidth; ++lane) {
    if (mask[lane] && bytes[lane]) present[lane] = -1;
  }
  return present;
#endif
}

// load_where, or with kWhole, where every lane is in range, a plain load.
template <bool kWhole>
HPO_INLINE Floats load_own(Mask own, const float* from) {
  return kWhole ? load_lanes<Floats>(from) : load_where(own, from);
}

template <bool kWhole>
HPO_INLINE Mask present_own(Mask own, const uint8_t* bytes) {
  return kWhole ? present_bytes(bytes) : present_where(own, bytes);
}

template <bool kWhole>
HPO_INLINE void store_own(Mask own, Floats vector, float* to) {
  if (kWhole) store_lanes(vector, to);
  else store_where(own, vector, to);
}

// Stores past the caches, to a multiple of the vector's size: the line is not read before, and evicts no other.
HPO_INLINE void store_past_caches(Floats vector, float* to) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, __m512(vector));
#elif defined(__AVX2__)
  _mm256_stream_ps(to, __m256(vector));
#else
  store_lanes(vector, to);
#endif
}

// Other threads see stores past the caches.
HPO_INLINE void end_stores_past_caches() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

template <int kCount, class T>
HPO_INLINE T sum_halves(const T (&lanes)[kCount]) {
  if constexpr (kCount == 1) return lanes[0];
  else {
    T sums[kCount / 2];
    for (int lane = 0; lane < kCount / 2; ++lane) sums[lane] = lanes[lane] + lanes[lane + kCount / 2];
    return sum_halves(sums);
  }
}

#if defined(__AVX512F__)
HPO_INLINE double sum_halves(const double (&lanes)[kLanes]) {
  const __m512d eight = load_lanes<__m512d>(lanes) + load_lanes<__m512d>(lanes + 8);
  const __m256d four = _mm512_maskz_extractf64x4_pd(0xF, eight, 0) + _mm512_maskz_extractf64x4_pd(0xF, eight, 1);
  const __m128d two = _mm256_castpd256_pd128(four) + _mm256_extractf128_pd(four, 1);
  return two[0] + two[1];
}

// sum_halves, half by half.
template <class Vector>
HPO_INLINE auto sum_lanes(Vector values) {
  using T = std::remove_reference_t<decltype(values[0])>;
  typedef T Eight __attribute__((vector_size(32)));
  typedef T Four __attribute__((vector_size(16)));
  const __m512d all = __m512d(values);
  const __m256d eight =
      __m256d(Eight(_mm512_maskz_extractf64x4_pd(0xF, all, 0)) + Eight(_mm512_maskz_extractf64x4_pd(0xF, all, 1)));
  const Four four = Four(_mm256_castpd256_pd128(eight)) + Four(_mm256_extractf128_pd(eight, 1));
  return T((four[0] + four[2]) + (four[1] + four[3]));
}
#else
template <class Vector>
HPO_INLINE auto sum_lanes(Vector values) {
  std::remove_reference_t<decltype(values[0])> lanes[kWidth];
  for (int lane = 0; lane < kWidth; ++lane) lanes[lane] = values[lane];  // GCC misaligns whole vectors here under ASan
  return sum_halves(lanes);
}
#endif

// sum + value where the condition holds.
HPO_INLINE Ints add_where(Ints condition, Ints value, Ints sum) { return condition ? sum + value : sum; }
#if !defined(__AVX512F__)
HPO_INLINE Unsigned add_where(Ints condition, Unsigned value, Unsigned sum) { return condition ? sum + value : sum; }
#endif

// The number of lanes in which conditions held, over all vectors.
class LaneCount {
 public:
#if defined(__AVX512F__)
  HPO_INLINE void add(Mask mask) { count_ += __builtin_popcount(mask); }
  int32_t total() const { return count_; }

 private:
  int32_t count_ = 0;
#else
  HPO_INLINE void add(Mask mask) { lanes_ -= mask; }
  int32_t total() const { return sum_lanes(lanes_); }

 private:
  Ints lanes_ = {};
#endif
};

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
  static HPO_INLINE F power_of_two(Int bits) { return F((hpo::HPO_ISA::Unsigned(bits) << 23) + 0x3F800000u); }
  static HPO_INLINE F scaled(F x, Int bits) { return F(hpo::HPO_ISA::Unsigned(x) + (hpo::HPO_ISA::Unsigned(bits) << 23)); }
};

#if defined(__AVX2__)
// An instruction for each bound, which GCC does not make of a choice between vectors; NaN stays NaN here, too.
template <>
HPO_INLINE hpo::HPO_ISA::Floats hpo::clamp(HPO_ISA::Floats x, HPO_ISA::Floats low, HPO_ISA::Floats high) {
#if defined(__AVX512F__)
  return HPO_ISA::Floats(_mm512_maskz_min_ps(0xFFFF, __m512(high), _mm512_maskz_max_ps(0xFFFF, __m512(low), __m512(x))));
#else
  return HPO_ISA::Floats(_mm256_min_ps(__m256(high), _mm256_max_ps(__m256(low), __m256(x))));
#endif
}
#endif
