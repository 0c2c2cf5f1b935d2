// The arithmetic of entropy windows and of order statistics, shared by all backends in C++ and CUDA. The definition is
// hpo_core/reference/entropy.py.
#pragma once
#include "api/entropy.h"
#include "math.h"

namespace hpo {

HPO_INLINE bool is_finite(float x) { return (to_bits(x) & 0x7F800000) != 0x7F800000; }

// ------------------------------------------------------------------------------------------------------------- windows

// The part of WindowArgs that every token needs. Offsets are data, so they are bounded: no index arithmetic can overflow.
struct WindowRule {
  int64_t first, last;
  int64_t width;
  float divisor;  // of Boundary::zero
  Boundary boundary;  // never carry: its windows are full ones, and the scores that they leave undefined follow later
  Invalid invalid;
  WindowAggregate aggregate;
};

HPO_INLINE WindowRule window_rule(const WindowArgs& args) {
  const int64_t bound = int64_t(1) << 40;
  const int64_t first = args.first < -bound ? -bound : (args.first > bound ? bound : args.first);
  const int64_t last = args.last < first ? first : (args.last > bound ? bound : args.last);
  const Boundary boundary = args.boundary == Boundary::carry ? Boundary::full : args.boundary;
  return {first, last, last - first + 1, float(last - first + 1), boundary, args.invalid, args.aggregate};
}

// How two parts of a window become one. `empty()` is the part without usable values.
struct Sum {
  static HPO_INLINE float empty() { return 0.0f; }
  template <class T>
  HPO_INLINE T operator()(T a, T b) const {
    return a + b;
  }
};

struct Greatest {
  static HPO_INLINE float empty() { return -INFINITY; }
  template <class T>
  HPO_INLINE T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

struct Least {
  static HPO_INLINE float empty() { return INFINITY; }
  template <class T>
  HPO_INLINE T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};

// The score of a token from its window cut by its row: `inside` positions remain, `usable` of them enter `folded`, and the
// window is `whole` if all positions remain.
HPO_INLINE float window_score_of(float folded, int32_t usable, int32_t inside, bool whole, const WindowRule& rule) {
  const bool defined =
      (usable > 0) & (whole | (rule.boundary != Boundary::full)) & ((usable == inside) | (rule.invalid != Invalid::stop));
  const float terms = rule.boundary == Boundary::zero ? rule.divisor : float(usable);
  const float score = folded / (rule.aggregate == WindowAggregate::mean ? terms : 1.0f);
  return defined ? score : -INFINITY;
}

// ---------------------------------------------------------------------------------------------------- order statistics

// Unsigned order of the keys = order of the floats; -0 and +0 have one key.
HPO_INLINE uint32_t order_key(float x) {
  const uint32_t bits = uint32_t(to_bits(x + 0.0f));
  return bits ^ ((bits >> 31) ? 0xFFFFFFFFu : 0x80000000u);
}

HPO_INLINE float from_order_key(uint32_t key) {
  const uint32_t bits = key ^ ((key >> 31) ? 0x80000000u : 0xFFFFFFFFu);
  return from_bits(int32_t(bits));
}

// rule(numerator * (n - 1) / denominator) for 0 <= numerator <= denominator <= 2^61 (anything else is clamped) and n > 0. The
// product may not fit into 64 bits, so it is divided as it grows: binary digits of n - 1 from the top.
HPO_INLINE int64_t order_index(int64_t numerator, int64_t denominator, OrderRule rule, int64_t n) {
  const int64_t largest = int64_t(1) << 61;
  denominator = denominator < 1 ? 1 : (denominator > largest ? largest : denominator);
  numerator = numerator < 0 ? 0 : (numerator > denominator ? denominator : numerator);
  int64_t quotient = 0, remainder = 0;
  for (int bit = 62; bit >= 0; --bit) {
    quotient *= 2;
    remainder = 2 * remainder + (((n - 1) >> bit) & 1 ? numerator : 0);
    for (; remainder >= denominator; remainder -= denominator) ++quotient;  // at most twice
  }
  const int64_t twice = 2 * remainder;
  const bool nearest_up = twice > denominator || (twice == denominator && quotient % 2 == 1);
  const bool up = rule == OrderRule::ceil ? remainder > 0 : (rule == OrderRule::nearest && nearest_up);
  return quotient + up;
}

}  // namespace hpo
