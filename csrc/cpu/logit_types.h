// How logits are stored.
#pragma once
#include <limits>

#include "lanes.h"

namespace hpo::HPO_ISA {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// `load` makes two packs of floats of 32 elements; `part` selects the lanes of the packs.
struct Float32 {
  using Element = float;
  static constexpr Element kNothing = -kInfinity;
  static HPO_INLINE void load(const float* from, int part, Floats& first, Floats& second) {
    first = load_lanes<Floats>(from + part * kWidth);
    second = load_lanes<Floats>(from + kLanes + part * kWidth);
  }
  static HPO_INLINE void store(Floats first, Floats second, int part, float* to) {
    store_lanes(first, to + part * kWidth);
    store_lanes(second, to + kLanes + part * kWidth);
  }
  static HPO_INLINE float widened(float x) { return x; }
  static HPO_INLINE float narrowed(float x) { return x; }
};

// One pack holds the even elements and the other the odd ones: a shift and a mask widen them without a shuffle.
struct Bfloat16 {
  using Element = uint16_t;
  static constexpr Element kNothing = 0xFF80;
  static HPO_INLINE void load(const uint16_t* from, int part, Floats& first, Floats& second) {
    const Unsigned both = load_lanes<Unsigned>(from + 2 * part * kWidth);
    first = Floats(both << 16);
    second = Floats(both & 0xFFFF0000u);
  }
  static HPO_INLINE Unsigned rounded(Floats x) {  // to the nearest, ties to even; NaN must have no bits in the lower half
    const Unsigned bits = Unsigned(x);
    return bits + 0x7FFFu + ((bits >> 16) & 1u);
  }
  static HPO_INLINE void store(Floats first, Floats second, int part, uint16_t* to) {
    store_lanes((rounded(first) >> 16) | (rounded(second) & 0xFFFF0000u), to + 2 * part * kWidth);
  }
  static HPO_INLINE float widened(uint16_t x) { return from_bits(int32_t(uint32_t(x) << 16)); }
  static HPO_INLINE uint16_t narrowed(float x) {
    const uint32_t bits = uint32_t(to_bits(x));
    return uint16_t((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
  }
};

struct Float16 {
  using Element = uint16_t;
  static constexpr Element kNothing = 0xFC00;
  static HPO_INLINE float widened(uint16_t x) {
    const uint32_t sign = uint32_t(x & 0x8000) << 16, magnitude = uint32_t(x & 0x7FFF) << 13;
    // 2^112 puts the exponent right, of subnormal numbers too; infinities and NaN get the greatest one.
    const float value = from_bits(int32_t(magnitude)) * 5.192296858534828e33f;
    const uint32_t bits = magnitude >= 0x0F800000u ? magnitude | 0x7F800000u : uint32_t(to_bits(value));
    return from_bits(int32_t(bits | sign));
  }
  static HPO_INLINE uint16_t narrowed(float x) {  // to the nearest, ties to even
    const uint32_t bits = uint32_t(to_bits(x)), magnitude = bits & 0x7FFFFFFFu;
    uint32_t half;
    if (magnitude >= 0x47800000u) half = magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u;
    else if (magnitude < 0x38800000u) half = uint32_t(to_bits(from_bits(int32_t(magnitude)) + 0.5f)) - 0x3F000000u;
    else half = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    return uint16_t(half | ((bits >> 16) & 0x8000u));
  }
  static HPO_INLINE Floats load_half(const uint16_t* from) {
#if defined(__AVX512F__)
    return Floats(_mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
    return Floats(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
    Floats wide;
    for (int lane = 0; lane < kWidth; ++lane) wide[lane] = widened(from[lane]);
    return wide;
#endif
  }
  static HPO_INLINE void store_half(Floats x, uint16_t* to) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_maskz_cvtps_ph(0xFFFF, __m512(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(__m256(x), _MM_FROUND_TO_NEAREST_INT));
#else
    for (int lane = 0; lane < kWidth; ++lane) to[lane] = narrowed(x[lane]);
#endif
  }
  static HPO_INLINE void load(const uint16_t* from, int part, Floats& first, Floats& second) {
    first = load_half(from + part * kWidth);
    second = load_half(from + kLanes + part * kWidth);
  }
  static HPO_INLINE void store(Floats first, Floats second, int part, uint16_t* to) {
    store_half(first, to + part * kWidth);
    store_half(second, to + kLanes + part * kWidth);
  }
};

}  // namespace hpo::HPO_ISA
