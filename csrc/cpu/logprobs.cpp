// token_logprobs: log-probability and entropy from logits, and back. The definition is hpo_core/reference/logprobs.py.
//
// A row is read once. Each lane keeps the greatest element that it has met, and sums e^(...) of whatever is not: of two
// elements it keeps one and sums the other. Nothing has to be known beforehand, and the greatest of the row is never summed.
// The sums are relative to a reference, which the greatest element of a block of the row moves where it lies above it by more
// than a factor of 2; the block is then read again, from the cache.
#include "hpo/logprobs.h"

#include <cstring>
#include <limits>

#include "kernels.h"
#include "lanes.h"
#include "parallel.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

constexpr int kChains = 4;                // of additions that do not wait for each other
constexpr int kStep = kChains * kLanes;   // elements
constexpr int64_t kBlock = 32 * kStep;    // so many are summed in float, blocks in double
constexpr float kInfinity = std::numeric_limits<float>::infinity();

HPO_INLINE Mask not_less(Floats x, Floats y) {  // true for NaN
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(__m512(x), __m512(y), _CMP_NLT_UQ);
#else
  return ~Mask(x < y);
#endif
}

// The second where one is NaN. GCC makes a comparison and two selections of what are one instruction each.
HPO_INLINE Floats smaller(Floats x, Floats y) {
#if defined(__AVX512F__)
  return Floats(_mm512_maskz_min_ps(0xFFFF, __m512(x), __m512(y)));
#else
  return x < y ? x : y;
#endif
}
HPO_INLINE Floats larger(Floats x, Floats y) {
#if defined(__AVX512F__)
  return Floats(_mm512_maskz_max_ps(0xFFFF, __m512(x), __m512(y)));
#else
  return x > y ? x : y;
#endif
}

// x y where the mask holds, else 0.
HPO_INLINE Floats product_where(Mask mask, Floats x, Floats y) {
#if defined(__AVX512F__)
  return Floats(_mm512_maskz_mul_ps(mask, __m512(x), __m512(y)));
#else
  return keep_if(mask, x * y);
#endif
}

// sum - x y where the mask holds: x may be infinite elsewhere.
HPO_INLINE Floats less_product_where(Mask mask, Floats x, Floats y, Floats sum) {
#if defined(__AVX512F__)
  return Floats(_mm512_mask3_fnmadd_ps(__m512(x), __m512(y), __m512(sum), mask));
#else
  return Number<Floats>::fused(-keep_if(mask, x), y, sum);
#endif
}

// e^(delta / temperature) where the mask holds, else 0. NaN stays NaN.
HPO_INLINE Floats exp_where(Mask mask, Floats delta, Floats high, Floats low) {
  return exp2_by(delta, high, low, [&](Floats value, Floats shifted) {
#if defined(__AVX512F__)
    return Floats(_mm512_maskz_scalef_ps(mask, __m512(value), __m512(shifted - all<Floats>(12582912.0f))));
#else
    return keep_if(mask, value * Number<Floats>::power_of_two(Ints(shifted)));
#endif
  });
}

// ------------------------------------------------------------------------------------------------ how logits are stored

// Two packs of numbers come from 32 elements; `part`: which lanes of the packs.
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

// The even elements and the odd ones: what is shifted and masked needs no shuffle.
struct Bfloat16 {
  using Element = uint16_t;
  static constexpr Element kNothing = 0xFF80;
  static HPO_INLINE void load(const uint16_t* from, int part, Floats& first, Floats& second) {
    const Unsigned both = load_lanes<Unsigned>(from + 2 * part * kWidth);
    first = Floats(both << 16);
    second = Floats(both & 0xFFFF0000u);
  }
  static HPO_INLINE Unsigned rounded(Floats x) {  // to the nearest, ties to even; NaN has its payload in the upper half
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

// The rest of a row, filled up with elements that count nothing.
template <class Type>
HPO_INLINE void copy_rest(const typename Type::Element* from, int64_t count, typename Type::Element (&rest)[kStep]) {
  for (auto& element : rest) element = Type::kNothing;
  std::memcpy(rest, from, size_t(count) * sizeof rest[0]);
}

// -------------------------------------------------------------------------------------------------------------- forward

struct alignas(kLine) Lanes {
  float of[kStep];

  HPO_INLINE void fill(float value) {
    for (float& lane : of) lane = value;
  }
  HPO_INLINE bool any_above(float limit) const {
    Mask found = {};
    for (int at = 0; at < kStep; at += kWidth) found = either(found, less(all<Floats>(limit), load_lanes<Floats>(of + at)));
    return any(found);
  }
  HPO_INLINE float greatest() const {
    float most = of[0];
    for (float lane : of) most = lane > most ? lane : most;
    return most;
  }
};

template <class Type>
float greatest_of(const typename Type::Element* from, int64_t count) {
  Lanes most;
  for (int part = 0; part < kParts; ++part) {
    Floats first = all<Floats>(-kInfinity), second = first;
    for (int64_t at = 0; at < count; at += 2 * kLanes) {
      Floats x, y;
      Type::load(from + at, part, x, y);
      first = larger(x, first);
      second = larger(y, second);
    }
    store_lanes(larger(first, second), most.of + part * kWidth);
  }
  float greatest = most.of[0];
  for (int lane = 1; lane < kLanes; ++lane) greatest = most.of[lane] > greatest ? most.of[lane] : greatest;
  return greatest;
}

struct alignas(kLine) BlockSums {
  float others[kLanes], spread[kLanes];
};

// Sums what the lanes do not keep, relative to the reference.
template <class Type, bool kSpread>
void sum_block(const typename Type::Element* from, int64_t count, float reference, const Exponent& exponent, Lanes& kept,
               BlockSums& sums) {
  const Floats origin = all<Floats>(reference), least = all<Floats>(exponent.least);
  const Floats high = all<Floats>(exponent.high), low = all<Floats>(exponent.low);
  for (int part = 0; part < kParts; ++part) {
    Floats top[kChains], others[kChains] = {}, spread[kChains] = {};
    for (int chain = 0; chain < kChains; ++chain) {
      top[chain] = load_lanes<Floats>(kept.of + chain * kLanes + part * kWidth);
    }
    for (int64_t at = 0; at < count; at += kStep) {
      Floats x[kChains];
      for (int chain = 0; chain < kChains; chain += 2) Type::load(from + at + chain * kLanes, part, x[chain], x[chain + 1]);
      for (int chain = 0; chain < kChains; ++chain) {
        const Floats loser = smaller(top[chain], x[chain]);  // NaN loses, and is summed
        top[chain] = larger(x[chain], top[chain]);
        const Floats delta = loser - origin;
        const Mask counts = not_less(delta, least);
        const Floats e = exp_where(counts, delta, high, low);
        others[chain] += e;
        if (kSpread) spread[chain] = less_product_where(counts, delta, e, spread[chain]);
      }
    }
    for (int chain = 0; chain < kChains; ++chain) store_lanes(top[chain], kept.of + chain * kLanes + part * kWidth);
    store_lanes((others[0] + others[1]) + (others[2] + others[3]), sums.others + part * kWidth);
    if (kSpread) store_lanes((spread[0] + spread[1]) + (spread[2] + spread[3]), sums.spread + part * kWidth);
  }
}

// The sums of a row so far.
template <bool kSpread>
class Row {
 public:
  explicit Row(const Exponent& exponent) : exponent_(exponent) { kept_.fill(-kInfinity); }

  template <class Type>
  void add(const typename Type::Element* from, int64_t count) {
    if (begins_) {
      move_to(greatest_of<Type>(from, count));
      begins_ = false;
    }
    const Lanes before = kept_;
    BlockSums sums;
    sum_block<Type, kSpread>(from, count, reference_, exponent_, kept_, sums);
    if (kept_.any_above(limit_)) {
      move_to(kept_.greatest());
      kept_ = before;
      sum_block<Type, kSpread>(from, count, reference_, exponent_, kept_, sums);
    }
    add(sums);
  }

  RowSums finish() {
    const float top = kept_.greatest();
    move_to(top);
    for (float& lane : kept_.of) {
      if (lane == top) {
        lane = -kInfinity;
        break;
      }
    }
    Lanes nobody;  // keeps what the lanes have kept
    nobody.fill(kInfinity);
    BlockSums sums;
    sum_block<Float32, kSpread>(kept_.of, kStep, reference_, exponent_, nobody, sums);
    add(sums);
    const double spread = kSpread ? sum_halves(spread_) : 0.0;
    return {top, sum_halves(others_), spread > 0.0 ? spread : 0.0};
  }

 private:
  void add(const BlockSums& sums) {
    for (int lane = 0; lane < kLanes; lane += kWidth) {
      add_as_doubles(load_lanes<Floats>(sums.others + lane), others_ + lane);
      if (kSpread) add_as_doubles(load_lanes<Floats>(sums.spread + lane), spread_ + lane);
    }
  }

  void move_to(float reference) {
    if (!(reference > reference_)) return;  // -inf is none
    const double factor = double(exp_of(exponent_, reference_ - reference)), distance = double(reference) - double(reference_);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (kSpread) spread_[lane] = factor == 0.0 ? 0.0 : factor * (spread_[lane] + distance * others_[lane]);
      others_[lane] *= factor;
    }
    reference_ = reference;
    limit_ = reference + 1.0f / exponent_.high;
  }

  const Exponent exponent_;
  Lanes kept_;
  alignas(kLine) double others_[kLanes] = {}, spread_[kLanes] = {};
  float reference_ = -FLT_MAX, limit_ = -FLT_MAX;
  bool begins_ = true;
};

template <class Type, bool kSpread>
RowSums sums_of_row(const typename Type::Element* from, int64_t vocabulary, const Exponent& exponent) {
  Row<kSpread> row(exponent);
  const int64_t whole = vocabulary / kStep * kStep;
  for (int64_t at = 0; at < whole; at += kBlock) row.template add<Type>(from + at, whole - at < kBlock ? whole - at : kBlock);
  if (whole < vocabulary) {
    alignas(kLine) typename Type::Element rest[kStep];
    copy_rest<Type>(from + whole, vocabulary - whole, rest);
    row.template add<Type>(rest, kStep);
  }
  return row.finish();
}

template <class Type>
const typename Type::Element* row_of(const LogprobsArgs& args, int64_t row) {
  const auto* logits = static_cast<const typename Type::Element*>(args.logits);
  return logits + row / args.inner * args.outer_stride + row % args.inner * args.inner_stride;
}

Exponent exponent_of(const LogprobsArgs& args, int64_t row) {
  return Exponent(args.temperatures ? double(args.temperatures[row]) : args.temperature);
}

// Whether there are such a target and such a temperature. A target is read once: what somebody writes meanwhile was not
// checked.
bool is_defined(const LogprobsArgs& args, int64_t target, const Exponent& exponent) {
  return target >= 0 && target < args.vocabulary && exponent.inverse > 0.0 && exponent.inverse <= double(FLT_MAX);
}

template <class Type>
void forward(const LogprobsArgs& args, int threads) {
  parallel_for(args.rows, worthwhile(threads, args.rows * args.vocabulary), [&](int64_t row) {
    RowResult result{};
    const int64_t target = args.targets[row];
    if (target != args.ignore_index) {
      const Exponent exponent = exponent_of(args, row);
      if (is_defined(args, target, exponent)) {
        const auto* from = row_of<Type>(args, row);
        const RowSums sums = args.entropy ? sums_of_row<Type, true>(from, args.vocabulary, exponent)
                                          : sums_of_row<Type, false>(from, args.vocabulary, exponent);
        result = result_of(sums, exponent, Type::widened(from[target]));
      } else {
        result = undefined_result();
      }
    }
    args.logp[row] = result.logp;
    args.statistics[row] = result.top;
    args.statistics[args.rows + row] = result.others;
    if (args.entropy) {
      args.entropy[row] = result.entropy;
      args.statistics[2 * args.rows + row] = result.distance;
    }
  });
}

// ------------------------------------------------------------------------------------------------------------- backward

template <class Type, bool kSlope>
HPO_INLINE void gradients_of_step(const typename Type::Element* from, float top, const Exponent& exponent,
                                  const RowGradient& gradient, typename Type::Element* to) {
  const Floats origin = all<Floats>(top), least = all<Floats>(exponent.least);
  const Floats high = all<Floats>(exponent.high), low = all<Floats>(exponent.low);
  const Floats constant = all<Floats>(gradient.constant), slope = all<Floats>(gradient.slope);
  for (int chain = 0; chain < kChains; chain += 2) {
    for (int part = 0; part < kParts; ++part) {
      Floats x[2];
      Type::load(from + chain * kLanes, part, x[0], x[1]);
      for (Floats& each : x) {
        const Floats delta = each - origin;
        const Mask counts = not_less(delta, least);
        const Floats e = exp_where(counts, delta, high, low);
        each = product_where(counts, e, kSlope ? Number<Floats>::fused(slope, delta, constant) : constant);
      }
      Type::store(x[0], x[1], part, to + chain * kLanes);
    }
  }
}

template <class Type, bool kSlope>
void gradients_of_row(const typename Type::Element* from, int64_t vocabulary, float top, const Exponent& exponent,
                      const RowGradient& gradient, typename Type::Element* to) {
  const int64_t whole = vocabulary / kStep * kStep;
  for (int64_t at = 0; at < whole; at += kStep) {
    gradients_of_step<Type, kSlope>(from + at, top, exponent, gradient, to + at);
  }
  if (whole < vocabulary) {
    alignas(kLine) typename Type::Element rest[kStep];
    copy_rest<Type>(from + whole, vocabulary - whole, rest);
    gradients_of_step<Type, kSlope>(rest, top, exponent, gradient, rest);
    std::memcpy(to + whole, rest, size_t(vocabulary - whole) * sizeof rest[0]);
  }
}

template <class Type>
void backward(const LogprobsBackwardArgs& args, int threads) {
  const LogprobsArgs& given = args.given;
  const int64_t rows = given.rows, vocabulary = given.vocabulary;
  auto* grad = static_cast<typename Type::Element*>(args.grad);
  parallel_for(rows, worthwhile(threads, rows * vocabulary), [&](int64_t row) {
    auto* to = grad + row * vocabulary;
    const int64_t target = given.targets[row];
    const float top = args.statistics[row], others = args.statistics[rows + row];
    const float a = args.logp_gradient ? args.logp_gradient[row] : 0.0f;
    const float b = args.entropy_gradient ? args.entropy_gradient[row] : 0.0f;
    if (target == given.ignore_index || (a == 0.0f && b == 0.0f && top == top)) {
      std::memset(static_cast<void*>(to), 0, size_t(vocabulary) * sizeof *to);
      return;
    }
    const Exponent exponent = exponent_of(given, row);
    if (top != top || !is_defined(given, target, exponent)) {
      for (int64_t at = 0; at < vocabulary; ++at) to[at] = Type::narrowed(NAN);
      return;
    }
    const auto* from = row_of<Type>(given, row);
    const float distance = args.entropy_gradient ? args.statistics[2 * rows + row] : 0.0f;
    const RowGradient gradient =
        gradient_of(exponent, top, others, distance, Type::widened(from[target]), double(a), double(b));
    if (b != 0.0f) gradients_of_row<Type, true>(from, vocabulary, top, exponent, gradient, to);
    else gradients_of_row<Type, false>(from, vocabulary, top, exponent, gradient, to);
    to[target] = Type::narrowed(gradient.target);
  });
}

}  // namespace

void token_logprobs(const LogprobsArgs& args, int threads) {
  if (args.type == LogitType::float32) forward<Float32>(args, threads);
  else if (args.type == LogitType::bfloat16) forward<Bfloat16>(args, threads);
  else forward<Float16>(args, threads);
}

void token_logprobs_backward(const LogprobsBackwardArgs& args, int threads) {
  if (args.given.type == LogitType::float32) backward<Float32>(args, threads);
  else if (args.given.type == LogitType::bfloat16) backward<Bfloat16>(args, threads);
  else backward<Float16>(args, threads);
}

}  // namespace hpo::HPO_ISA
