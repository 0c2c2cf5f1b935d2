// The arithmetic of corrections: C++ and CUDA call these, neither repeats them. The definition is
// hpo_core/reference/corrections.py.
#pragma once
#include "gates.h"

namespace hpo {

constexpr float kExponentBound = 20.0f;
constexpr double kBinaryGuard = 1e-8;  // keeps the logarithm of a binary KL finite

// Of one token; NaN where it has none. What saturates is the log-ratio.
HPO_INLINE float statistic_of(Statistic statistic, float first, float second) {
  const float u = clamp(first - second, -kSaturation, kSaturation);
  if (u != u) return u;
  float value = u;
  if (statistic == Statistic::k2) value = 0.5f * u * u;
  if (statistic == Statistic::k3) value = k3(-clamp(u, -kExponentBound, kExponentBound));
  if (statistic == Statistic::probability || statistic == Statistic::binary_kl) {
    // Rounding may lift a log-probability above 0.
    const double p = first < 0.0f ? ::exp(double(first)) : 1.0, q = second < 0.0f ? ::exp(double(second)) : 1.0;
    if (statistic == Statistic::probability) {
      value = float(p - q);
    } else {
      const double other = ::log((1.0 - q + kBinaryGuard) / (1.0 - p + kBinaryGuard));
      const double kl = (1.0 - q) * other - q * double(u);
      value = float(p > q ? kl : (p < q ? -kl : 0.0));
    }
  }
  return value;
}

// A K3 may be e^20, of which sums in fixed point (see to_fixed) would hold few: whole multiples of this are counted apart.
constexpr float kCoarse = 2048.0f;

// Of the valid tokens of a leaf or a segment, in any order: sums are integers.
struct Reduced {
  int64_t valid = 0, fixed = 0, coarse = 0;
  float smallest = INFINITY, largest = -INFINITY;

  HPO_INLINE void add(const Reduced& other) {
    valid += other.valid, fixed += other.fixed, coarse += other.coarse;
    smallest = other.smallest < smallest ? other.smallest : smallest;
    largest = other.largest > largest ? other.largest : largest;
  }

  HPO_INLINE void add(float v) {
    const int32_t multiples = int32_t(v / kCoarse);
    add(Reduced{1, to_fixed(v - float(multiples) * kCoarse), multiples, v, v});
  }

  HPO_INLINE float as(Reduction reduction) const {
    if (valid == 0) return 0.0f;
    if (reduction == Reduction::min) return smallest;
    if (reduction == Reduction::max) return largest;
    const double sum = from_fixed(fixed) + double(coarse) * double(kCoarse);
    return float(reduction == Reduction::mean ? sum / double(valid) : sum);
  }
};

// Floats as integers in the same order, all above 0, and back.
HPO_INLINE int64_t ordered(float v) {
  const int32_t bits = to_bits(v);
  return uint32_t(bits < 0 ? ~bits : bits ^ INT32_MIN);
}

HPO_INLINE float from_ordered(int64_t word) {
  const int32_t bits = int32_t(uint32_t(word));
  return from_bits(bits < 0 ? bits ^ INT32_MIN : ~bits);
}

// A segment in integers, of which the sums count, or the maxima where an extremum is sought: valid tokens, and these.
constexpr int kWords = 3;

HPO_INLINE bool is_extremum(Reduction reduction) { return reduction == Reduction::min || reduction == Reduction::max; }

HPO_INLINE int64_t word_of(const Reduced& found, int word, Reduction reduction) {
  if (word == 0) return found.valid;
  if (!is_extremum(reduction)) return word == 1 ? found.fixed : found.coarse;
  return word == 2 || found.valid == 0 ? 0 : ordered(reduction == Reduction::min ? -found.smallest : found.largest);
}

HPO_INLINE float from_words(const int64_t* words, Reduction reduction) {
  const float most = from_ordered(words[1]);
  return Reduced{words[0], words[1], words[2], -most, most}.as(reduction);
}

// The factor for a statistic v under one sign of the advantage.
HPO_INLINE float factor_of(const Correction& correction, int sign, float v) {
  const float low = float(correction.low[sign]), high = float(correction.high[sign]);
  const bool inside = correction.strict ? low < v && v < high : low <= v && v <= high;
  if (correction.action == Action::mask) return inside ? 1.0f : 0.0f;
  if (correction.action == Action::clamp) return exp(clamp(clamp(v, low, high), -kExponentBound, kExponentBound));
  return inside ? exp(clamp(v, -kExponentBound, kExponentBound)) : 0.0f;
}

}  // namespace hpo
