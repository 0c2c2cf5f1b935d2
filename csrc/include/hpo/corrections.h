// The sums over the tokens of a segment, for corrections over segments.
#pragma once
#include "correction_rules.h"
#include "entropy.h"

namespace hpo {

// A K3 may be e^20, and sums in fixed point (see to_fixed) hold few such numbers: whole multiples of kCoarse are counted apart.
constexpr float kCoarse = 2048.0f;

// The sums of a leaf or a segment over its valid tokens, in any order: sums are integers.
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

// The integers of a segment: valid tokens, and two sums; where an extremum is sought, the largest key of its tokens and 0. Keys
// are above 0.
constexpr int kReducedWords = 3;

HPO_INLINE bool is_extremum(Reduction reduction) { return reduction == Reduction::min || reduction == Reduction::max; }

HPO_INLINE int64_t word_of(const Reduced& reduced, int word, Reduction reduction) {
  if (word == 0) return reduced.valid;
  if (!is_extremum(reduction)) return word == 1 ? reduced.fixed : reduced.coarse;
  return word == 2 || reduced.valid == 0 ? 0 : order_key(reduction == Reduction::min ? -reduced.smallest : reduced.largest);
}

HPO_INLINE float from_words(const int64_t* words, Reduction reduction) {
  const float most = from_order_key(uint32_t(words[1]));
  return Reduced{words[0], words[1], words[2], -most, most}.as(reduction);
}

}  // namespace hpo
