// token_logprobs: log-probability and entropy from logits, and back. The definition is hpo_core/reference/logprobs.py.
//
// A row is read once. Each lane keeps the greatest element that it has met: of two elements it keeps the greater and adds
// e^(...) of the smaller to its sum. So the greatest element of the row need not be known beforehand, and is never summed.
// The sums are relative to a reference. When an element of a block exceeds the reference by more than a factor of 2, the
// reference moves up and the block is read again, from the cache.
#include "hpo/logprobs.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels.h"
#include "lanes.h"
#include "logit_types.h"
#include "parallel.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

constexpr int kChains = 4;                // independent chains of additions
constexpr int kStep = kChains * kLanes;   // elements of an iteration
constexpr int64_t kBlock = 32 * kStep;    // elements summed in float; blocks are summed in double

HPO_INLINE Mask not_less(Floats x, Floats y) {  // true for NaN
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(__m512(x), __m512(y), _CMP_NLT_UQ);
#else
  return ~Mask(x < y);
#endif
}

// NaN in either argument gives the second one. Intrinsics, because GCC turns the conditional expression into a comparison and
// two selections instead of one instruction.
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

// sum - x y where the mask holds, else sum; x may be infinite where the mask does not hold.
HPO_INLINE Floats less_product_where(Mask mask, Floats x, Floats y, Floats sum) {
#if defined(__AVX512F__)
  return Floats(_mm512_mask3_fnmadd_ps(__m512(x), __m512(y), __m512(sum), mask));
#else
  return Number<Floats>::fused(-keep_if(mask, x), y, sum);
#endif
}

// e^(delta / temperature) where the mask holds, else 0. A NaN delta gives NaN.
HPO_INLINE Floats exp_where(Mask mask, Floats delta, Floats high, Floats low) {
  return exp2_by(delta, high, low, [&](Floats value, Floats shifted) {
#if defined(__AVX512F__)
    return Floats(_mm512_maskz_scalef_ps(mask, __m512(value), __m512(shifted - all<Floats>(12582912.0f))));
#else
    return keep_if(mask, value * Number<Floats>::power_of_two(Ints(shifted)));
#endif
  });
}

// Elements below the floor become -inf.
template <class Type>
HPO_INLINE void copy_above(const typename Type::Element* from, int64_t count, float floor, typename Type::Element* to) {
  for (int64_t at = 0; at < count; ++at) to[at] = is_below(Type::widened(from[at]), &floor) ? Type::kNothing : from[at];
}

// -------------------------------------------------------------------------------------------------------------- forward

struct alignas(kLine) Lanes {
  float of[kStep];

  HPO_INLINE void fill(float value) {
    for (float& lane : of) lane = value;
  }
  HPO_INLINE bool any_above(float limit) const {
    Mask above = {};
    for (int at = 0; at < kStep; at += kWidth) above = either(above, less(all<Floats>(limit), load_lanes<Floats>(of + at)));
    return any(above);
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
  float others[kLanes], spread[kLanes], squares[kLanes];
};

// Sums the elements that the lanes do not keep, relative to the reference. kKept: see LogprobsArgs.
template <class Type, int kKept>
void sum_block(const typename Type::Element* from, int64_t count, float reference, const Exponent& exponent, Lanes& kept,
               BlockSums& sums) {
  const Floats origin = all<Floats>(reference), least = all<Floats>(exponent.least);
  const Floats high = all<Floats>(exponent.high), low = all<Floats>(exponent.low);
  for (int part = 0; part < kParts; ++part) {
    Floats top[kChains], others[kChains] = {}, spread[kChains] = {}, squares[kChains] = {};
    for (int chain = 0; chain < kChains; ++chain) {
      top[chain] = load_lanes<Floats>(kept.of + chain * kLanes + part * kWidth);
    }
    for (int64_t at = 0; at < count; at += kStep) {
      Floats x[kChains];
      for (int chain = 0; chain < kChains; chain += 2) Type::load(from + at + chain * kLanes, part, x[chain], x[chain + 1]);
      for (int chain = 0; chain < kChains; ++chain) {
        const Floats loser = smaller(top[chain], x[chain]);  // NaN loses, so that it reaches the sum
        top[chain] = larger(x[chain], top[chain]);
        const Floats delta = loser - origin;
        const Mask counts = not_less(delta, least);
        const Floats e = exp_where(counts, delta, high, low);
        others[chain] += e;
        if (kKept > 2) spread[chain] = less_product_where(counts, delta, e, spread[chain]);
        if (kKept > 3) squares[chain] = Number<Floats>::fused(e, e, squares[chain]);
      }
    }
    for (int chain = 0; chain < kChains; ++chain) store_lanes(top[chain], kept.of + chain * kLanes + part * kWidth);
    store_lanes((others[0] + others[1]) + (others[2] + others[3]), sums.others + part * kWidth);
    if (kKept > 2) store_lanes((spread[0] + spread[1]) + (spread[2] + spread[3]), sums.spread + part * kWidth);
    if (kKept > 3) store_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]), sums.squares + part * kWidth);
  }
}

// The sums of a row so far.
template <int kKept>
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
    sum_block<Type, kKept>(from, count, reference_, exponent_, kept_, sums);
    if (kept_.any_above(limit_)) {
      move_to(kept_.greatest());
      kept_ = before;
      sum_block<Type, kKept>(from, count, reference_, exponent_, kept_, sums);
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
    Lanes infinite;  // every element loses against infinity, so that all kept elements are summed
    infinite.fill(kInfinity);
    BlockSums sums;
    sum_block<Float32, kKept>(kept_.of, kStep, reference_, exponent_, infinite, sums);
    add(sums);
    const double spread = kKept > 2 ? sum_halves(spread_) : 0.0;
    return {top, sum_halves(others_), spread > 0.0 ? spread : 0.0, kKept > 3 ? sum_halves(squares_) : 0.0};
  }

 private:
  void add(const BlockSums& sums) {
    for (int lane = 0; lane < kLanes; lane += kWidth) {
      add_as_doubles(load_lanes<Floats>(sums.others + lane), others_ + lane);
      if (kKept > 2) add_as_doubles(load_lanes<Floats>(sums.spread + lane), spread_ + lane);
      if (kKept > 3) add_as_doubles(load_lanes<Floats>(sums.squares + lane), squares_ + lane);
    }
  }

  void move_to(float reference) {
    if (!(reference > reference_)) return;  // -inf is no reference
    const double factor = double(exp_of(exponent_, reference_ - reference)), distance = double(reference) - double(reference_);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (kKept > 2) spread_[lane] = factor == 0.0 ? 0.0 : factor * (spread_[lane] + distance * others_[lane]);
      if (kKept > 3) squares_[lane] *= factor * factor;
      others_[lane] *= factor;
    }
    reference_ = reference;
    limit_ = reference + 1.0f / exponent_.high;
  }

  const Exponent exponent_;
  Lanes kept_;
  alignas(kLine) double others_[kLanes] = {}, spread_[kLanes] = {}, squares_[kLanes] = {};
  float reference_ = -FLT_MAX, limit_ = -FLT_MAX;
  bool begins_ = true;
};

// Calls body(at, count, elements) for the blocks of a row, in order; only the last count may be no multiple of kStep. Logits
// below the floor, and the elements that pad the last block, are -inf.
template <class Type, class Body>
HPO_INLINE void for_each_block(const typename Type::Element* from, int64_t columns, const float* floor, const Body& body) {
  const int64_t whole = columns / kStep * kStep;
  alignas(kLine) typename Type::Element copy[kBlock];
  for (int64_t at = 0; at < whole; at += kBlock) {
    const int64_t count = whole - at < kBlock ? whole - at : kBlock;
    if (floor) copy_above<Type>(from + at, count, *floor, copy);
    body(at, count, floor ? copy : from + at);
  }
  if (whole == columns) return;
  std::fill(copy, copy + kStep, Type::kNothing);
  copy_above<Type>(from + whole, columns - whole, floor ? *floor : -kInfinity, copy);
  body(whole, columns - whole, copy);
}

template <class Type, int kKept>
RowSums sums_of_row(const typename Type::Element* from, int64_t columns, const float* floor, const Exponent& exponent) {
  Row<kKept> row(exponent);
  for_each_block<Type>(from, columns, floor, [&](int64_t, int64_t count, const typename Type::Element* block) {
    row.template add<Type>(block, count < kStep ? kStep : count);
  });
  return row.finish();
}

template <class Type>
const typename Type::Element* row_of(const LogprobsArgs& args, int64_t row) {
  const auto* logits = static_cast<const typename Type::Element*>(args.logits);
  return logits + offset_of_row(args, row);
}

// The target's logit; -inf where the target lies in another part of the vocabulary or outside the support.
template <class Type>
float logit_of_target(const typename Type::Element* from, int64_t column, const float* floor) {
  const float logit = column < 0 ? -kInfinity : Type::widened(from[column]);
  return is_below(logit, floor) ? -kInfinity : logit;
}

template <class Type, int kKept>
void forward(const LogprobsArgs& args, int threads) {
  parallel_for(args.rows, worthwhile(threads, args.rows * args.columns), [&](int64_t row) {
    RowResult result{};
    if (!is_ignored(args, row)) {
      const Exponent exponent = exponent_of(args, row);
      if (is_defined(args, row, exponent)) {
        const auto* from = row_of<Type>(args, row);
        const float* floor = args.floors ? args.floors + row : nullptr;
        const RowSums sums = sums_of_row<Type, kKept>(from, args.columns, floor, exponent);
        const float logit = logit_of_target<Type>(from, target_column(args, row), floor);
        result = result_of(sums, exponent, logit, args.columns == args.vocabulary);
      } else {
        result = undefined_result();
      }
    }
    write_result(args, row, result);
  });
}

template <class Type>
void forward(const LogprobsArgs& args, int threads) {
  if (args.kept == 2) forward<Type, 2>(args, threads);
  else if (args.kept == 3) forward<Type, 3>(args, threads);
  else forward<Type, 4>(args, threads);
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
void gradients_of_row(const typename Type::Element* from, int64_t columns, const float* floor, float top,
                      const Exponent& exponent, const RowGradient& gradient, typename Type::Element* to) {
  for_each_block<Type>(from, columns, floor, [&](int64_t at, int64_t count, const typename Type::Element* block) {
    const int64_t whole = count / kStep * kStep;
    for (int64_t step = 0; step < whole; step += kStep) {
      gradients_of_step<Type, kSlope>(block + step, top, exponent, gradient, to + at + step);
    }
    if (whole == count) return;
    alignas(kLine) typename Type::Element rest[kStep];
    gradients_of_step<Type, kSlope>(block, top, exponent, gradient, rest);
    std::memcpy(to + at, rest, size_t(count) * sizeof rest[0]);
  });
}

// Every NaN becomes NAN: rounding to bfloat16 would turn 0x7FFFFFFF, the NaN that arithmetic on a GPU gives, into -0.
HPO_INLINE float with_plain_nan(float x) { return x == x ? x : NAN; }

template <class Type>
void backward(const LogprobsBackwardArgs& args, int threads) {
  const LogprobsArgs& given = args.given;
  const int64_t rows = given.rows, columns = given.columns;
  parallel_for(rows, worthwhile(threads, rows * columns), [&](int64_t row) {
    auto* to = static_cast<typename Type::Element*>(args.grad) + offset_of_gradient(args, row);
    const RowUpstream upstream(args, row);
    if (is_ignored(given, row) || upstream.is_zero()) {
      std::memset(static_cast<void*>(to), 0, size_t(columns) * sizeof *to);
      return;
    }
    const Exponent exponent = exponent_of(given, row);
    if (!upstream.is_defined() || !is_defined(given, row, exponent)) {
      std::fill(to, to + columns, Type::narrowed(NAN));
      return;
    }
    const auto* from = row_of<Type>(given, row);
    const float* floor = given.floors ? given.floors + row : nullptr;
    const int64_t column = target_column(given, row);
    const float logit = logit_of_target<Type>(from, column, floor);
    RowGradient gradient = gradient_of(exponent, upstream, logit);
    gradient.constant = with_plain_nan(gradient.constant), gradient.target = with_plain_nan(gradient.target);
    const bool has_slope = upstream.entropy != 0.0f;
    if (has_slope) gradients_of_row<Type, true>(from, columns, floor, upstream.top, exponent, gradient, to);
    else gradients_of_row<Type, false>(from, columns, floor, upstream.top, exponent, gradient, to);
    if (logit > -kInfinity) to[column] = Type::narrowed(gradient.target);
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
