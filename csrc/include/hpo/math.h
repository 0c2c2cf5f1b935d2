// Elementary functions whose bits agree between every ISA of the CPU and CUDA: plain float operations in a fixed order,
// every fused multiply-add written out, contraction switched off in the build. Branch-free, so that compilers vectorise them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

// The functions of a loop are inside it, whatever a compiler thinks of its length. Where kernels are only tested, the
// compiler decides, in a third of the time.
#if defined(HPO_EMULATE) || defined(HPO_QUICK_TO_COMPILE)
#define HPO_INSIDE
#else
#define HPO_INSIDE __attribute__((always_inline))
#endif
#if defined(__CUDACC__)
#define HPO_INLINE __host__ __device__ __forceinline__
#else
#define HPO_INLINE inline HPO_INSIDE
#endif

namespace hpo {

// Every exponentiated log-ratio saturates here, so that |w A| <= 1e12 times e^60 stays finite in float.
constexpr float kSaturation = 60.0f;
// Ratio statistics (not the loss) saturate earlier: their squares are summed in float.
constexpr float kStatisticSaturation = 40.0f;

// The same bits as another type.
template <class To, class From>
HPO_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "all bits");
  To to;
  memcpy(&to, &from, sizeof to);  // on a GPU a move between registers
  return to;
}

HPO_INLINE float from_bits(int32_t bits) { return bits_as<float>(bits); }
HPO_INLINE double from_bits(int64_t bits) { return bits_as<double>(bits); }
HPO_INLINE int32_t to_bits(float value) { return bits_as<int32_t>(value); }
HPO_INLINE int64_t to_bits(double value) { return bits_as<int64_t>(value); }

HPO_INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// The number type of the functions below: a float here, a vector of floats in csrc/cpu/lanes.h.
template <class F>
struct Number;

template <>
struct Number<float> {
  using Int = int32_t;
  static HPO_INLINE float fused(float a, float b, float c) { return hpo::fused(a, b, c); }
  static HPO_INLINE int32_t mask(bool condition) { return condition ? -1 : 0; }
  static HPO_INLINE int32_t to_bits(float x) { return hpo::to_bits(x); }
  static HPO_INLINE float from_bits(int32_t bits) { return hpo::from_bits(bits); }
  static HPO_INLINE float power_of_two(int32_t bits) { return hpo::from_bits(int32_t((uint32_t(bits) << 23) + 0x3F800000u)); }
  static HPO_INLINE float scaled(float x, int32_t bits) {
    return hpo::from_bits(int32_t(uint32_t(hpo::to_bits(x)) + (uint32_t(bits) << 23)));
  }
};

template <class F>
HPO_INLINE F all(float x) {
  return x - F{};  // -0 plus 0 would be 0
}

// Each step is one instruction (a nested choice is not); NaN stays NaN.
template <class F>
HPO_INLINE F clamp(F x, F low, F high) {
  const F raised = x < low ? low : x;
  return raised > high ? high : raised;
}

// The same of numbers; it is undefined for NaN.
template <class F>
HPO_INLINE F clamp_number(F x, F low, F high) {
#if defined(__CUDA_ARCH__)
  return fminf(fmaxf(x, low), high);  // an instruction each: a choice that keeps NaN takes two
#else
  return clamp(x, low, high);
#endif
}

// e^r for |r| <= ln 2 / 2.
template <class F>
HPO_INLINE F exp_near_0(F r) {
  using N = Number<F>;
  const F one = all<F>(1.0f);
  F p = all<F>(1.3814327850e-3f);                          // minimax polynomial of (e^r - 1 - r) / r^2
  p = N::fused(p, r, all<F>(8.3688531769e-3f));
  p = N::fused(p, r, all<F>(4.1668401138e-2f));
  p = N::fused(p, r, all<F>(1.6666519507e-1f));
  p = N::fused(p, r, all<F>(4.9999993372e-1f));
  return N::fused(N::fused(p, r, one), r, one);
}

// e^x = scale(e^r, bits) for x = r + k ln 2: the low bits of `bits` are the integer k, and scale multiplies by 2^k. It has to
// shift the higher bits out.
template <class F, class Scale>
HPO_INLINE F exp_by(F x, const Scale& scale) {
  using N = Number<F>;
  const F shifter = all<F>(12582912.0f);                   // 1.5 * 2^23: adding it rounds to an integer
  const F shifted = N::fused(x, all<F>(1.44269504f), shifter);
  const F k = shifted - shifter;
  F r = N::fused(k, all<F>(-0.693359375f), x);             // ln 2 in two parts: r = x - k ln 2
  r = N::fused(k, all<F>(2.12194440e-4f), r);
  return scale(exp_near_0(r), N::to_bits(shifted));
}

// e^x for |x| <= 87, within 1 ulp, NaN for NaN. exp(0) is exactly 1: the on-policy promise depends on it.
template <class F>
HPO_INLINE F exp(F x) {
  return exp_by(x, [](F value, typename Number<F>::Int bits) { return value * Number<F>::power_of_two(bits); });
}

// The same bits in less time, but undefined for NaN: k is added to the exponent, and the result stays a normal number.
template <class F>
HPO_INLINE F exp_of_number(F x) {
  return exp_by(x, [](F value, typename Number<F>::Int bits) { return Number<F>::scaled(value, bits); });
}

// The parts of a normal x > 0: x = mantissa 2^exponent, the mantissa between sqrt(1/2) and sqrt(2).
template <class F>
struct LogParts {
  F mantissa, exponent;
};

template <class F>
HPO_INLINE LogParts<F> log_parts(F x) {
  using N = Number<F>;
  const auto bits = N::to_bits(x);
  const F mantissa = N::from_bits((bits & 0x007FFFFF) | 0x3F800000);  // in [1, 2)
  const auto large = N::mask(mantissa > 1.41421356f);
  const auto exponent = (bits >> 23) - 127 - large;
  // The integer as a float is exact: it is the low bits of the float 1.5 * 2^23 + exponent.
  return {large ? mantissa * 0.5f : mantissa, N::from_bits(exponent + 0x4B400000) - 12582912.0f};
}

// (log(1 + f) - f + f^2 / 2) / f^3 of such a mantissa 1 + f.
template <class F>
HPO_INLINE F log_tail(F f) {
  using N = Number<F>;
  F p = all<F>(7.0376836292e-2f);  // minimax polynomial
  p = N::fused(p, f, all<F>(-1.1514610310e-1f));
  p = N::fused(p, f, all<F>(1.1676998740e-1f));
  p = N::fused(p, f, all<F>(-1.2420140846e-1f));
  p = N::fused(p, f, all<F>(1.4249322787e-1f));
  p = N::fused(p, f, all<F>(-1.6668057665e-1f));
  p = N::fused(p, f, all<F>(2.0000714765e-1f));
  p = N::fused(p, f, all<F>(-2.4999993993e-1f));
  return N::fused(p, f, all<F>(3.3333331174e-1f));
}

// Natural logarithm of a normal x > 0, within 2 ulp; log(1) is exactly 0.
template <class F>
HPO_INLINE F log(F x) {
  using N = Number<F>;
  const LogParts<F> parts = log_parts(x);
  const F f = parts.mantissa - 1.0f, k = parts.exponent, square = f * f;
  F value = N::fused(log_tail(f) * f, square, k * -2.12194440e-4f);
  value = N::fused(square, all<F>(-0.5f), value);
  return N::fused(k, all<F>(0.693359375f), f + value);
}

// 1 - e^-s, the derivative of k3, without cancellation at small s; `e` is exp(-s).
template <class F>
HPO_INLINE F k3_slope(F s, F e) {
  using N = Number<F>;
  const F border = all<F>(0.25f);
  F p = all<F>(-1.9841270e-4f);                            // Taylor of (e^-s - 1 + s) / s^2 on |s| <= 0.25, to the last bit
  p = N::fused(p, s, all<F>(1.3888889e-3f));
  p = N::fused(p, s, all<F>(-8.3333333e-3f));
  p = N::fused(p, s, all<F>(4.1666667e-2f));
  p = N::fused(p, s, all<F>(-1.6666667e-1f));
  p = N::fused(p, s, all<F>(0.5f));
  return ((s < border) & (s > -border)) ? N::fused(-p * s, s, s) : all<F>(1.0f) - e;
}

// e^-s - 1 + s, the k3 estimator, without cancellation at small s; `e` is exp(-s).
template <class F>
HPO_INLINE F k3(F s, F e) {
  using N = Number<F>;
  const F border = all<F>(0.5f);
  F p = all<F>(2.4801587e-5f);                             // Taylor of (e^-s - 1 + s) / s^2 on |s| <= 0.5
  p = N::fused(p, s, all<F>(-1.9841270e-4f));
  p = N::fused(p, s, all<F>(1.3888889e-3f));
  p = N::fused(p, s, all<F>(-8.3333333e-3f));
  p = N::fused(p, s, all<F>(4.1666667e-2f));
  p = N::fused(p, s, all<F>(-1.6666667e-1f));
  p = N::fused(p, s, all<F>(0.5f));
  return ((s < border) & (s > -border)) ? p * (s * s) : (e - all<F>(1.0f)) + s;
}

template <class F>
HPO_INLINE F k3(F s) {
  return k3(s, exp(-clamp(s, all<F>(-kSaturation), all<F>(kSaturation))));
}

}  // namespace hpo
