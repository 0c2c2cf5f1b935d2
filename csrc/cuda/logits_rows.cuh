// A row of logits in a block: its log-probability and entropy, and the gradient of its logits. The definition is
// hpo_core/reference/logprobs.py.
//
// A block reads a row once for the sums. Each thread keeps the greatest element that it has met: of two elements it keeps the
// greater and adds e^(...) of the smaller to its sums. The sums are relative to the greatest summed element, not to the
// greatest of the row: so the exponents of the elements that count are small, and one multiplication and one fast exponential
// are exact enough even where a single token has nearly all the probability. One exact factor at the end refers the sums to
// the greatest of the row.
#pragma once
#include "hpo/entropy.h"
#include "logits.cuh"

namespace hpo {

// -------------------------------------------------------------------------------------------------------------- forward

// The arguments of a row, shared by the threads of its block.
struct Row {
  int64_t offset;
  Exponent exponent;
  float floor, logit;  // logit: the target's, -inf where it lies in another part or outside the support
  int64_t column;  // the target's, -1 there
  bool is_read, is_ignored, wide;
};

template <class Type>
__device__ __forceinline__ float logit_at(const void* logits, int64_t offset) {
  return Type::lane(unsigned(static_cast<const typename Type::Element*>(logits)[offset]), 0);
}

// One thread of a block calls this: it divides doubles, and some devices have few units for them. In place it reads the
// target's logit before another thread writes the gradient there.
template <class Type>
__device__ __forceinline__ Row get_row(const LogprobsArgs& args, int64_t index) {
  Row row{};
  row.is_ignored = is_ignored(args, index);
  if (row.is_ignored) return row;
  row.exponent = exponent_of(args, index);
  row.is_read = is_defined(args, index, row.exponent);
  if (!row.is_read) return row;
  row.offset = offset_of_row(args, index);
  row.wide = is_aligned<Type>(args.logits, row.offset);
  const float* const floor = args.floors ? args.floors + index : nullptr;
  row.floor = !floor ? -HUGE_VALF : *floor == *floor ? *floor : HUGE_VALF;
  row.column = target_column(args, index);
  row.logit = row.column < 0 ? -HUGE_VALF : logit_at<Type>(args.logits, row.offset + row.column);
  if (is_below(row.logit, floor)) row.logit = -HUGE_VALF;
  if (row.logit == -HUGE_VALF) row.column = -1;
  return row;
}

// The elements of a row that a thread has met. kKept: see LogprobsArgs.
template <class Type, int kKept, bool kFloored>
class ThreadSums {
 public:
  __device__ __forceinline__ ThreadSums(const Exponent& exponent, float floor)
      : high_(exponent.high), least_(exponent.least), floor_(floor) {}

  __device__ __forceinline__ void add(unsigned (&words)[kWords]) {
    unsigned most = Type::kNothing;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const unsigned loser = Type::lesser(kept_, words[i]);  // NaN loses, so that it reaches the sums
      kept_ = Type::greater(kept_, words[i]);
      most = Type::greater(most, loser);
      words[i] = loser;
    }
    move_to(Type::greatest(most));
    Sums sums{};
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
#pragma unroll
      for (int lane = 0; lane < Type::kPerWord; ++lane) add_to(sums, Type::lane(words[i], lane));
    }
    add(sums);
  }

  // The sums of the block over all but the greatest element, in its first thread.
  __device__ __forceinline__ RowSums finish(const Exponent& exponent) {
    float rest[Type::kPerWord], mine = -HUGE_VALF;
#pragma unroll
    for (int lane = 0; lane < Type::kPerWord; ++lane) {
      rest[lane] = Type::lane(kept_, lane);
      if (kFloored && rest[lane] < floor_) rest[lane] = -HUGE_VALF;
      mine = fmaxf(mine, rest[lane]);
    }
    // Several threads may have kept the greatest value; one of them owns it and the others sum theirs.
    const uint64_t key = uint64_t(order_key(mine)) << 32 | (kThreads - 1 - threadIdx.x), greatest = block_max(key);
    bool owns = key == greatest;
    float most = -HUGE_VALF;
#pragma unroll
    for (int lane = 0; lane < Type::kPerWord; ++lane) {
      if (owns && rest[lane] == mine) rest[lane] = -HUGE_VALF, owns = false;
      most = fmaxf(most, rest[lane]);
    }
    move_to(from_order_key(unsigned(block_max(uint64_t(order_key(fmaxf(most, reference_)))))));
    Sums sums{};
#pragma unroll
    for (int lane = 0; lane < Type::kPerWord; ++lane) add_to(sums, rest[lane]);
    add(sums);
    double all[kKept == 4 ? 4 : kKept - 1] = {};
    all[0] = double(sums_.others);
    if constexpr (kKept > 2) all[1] = double(sums_.spread);
    if constexpr (kKept > 3) all[2] = double(sums_.squares);
    block_sums(all);
    const RowSums whole = {reference_, all[0], kKept > 2 ? all[1 % (kKept - 1)] : 0.0, kKept > 3 ? all[2 % (kKept - 1)] : 0.0};
    return moved(whole, from_order_key(unsigned(greatest >> 32)), exponent);
  }

 private:
  // The sums of RowSums, relative to reference_.
  struct Sums {
    float others, spread, squares;
  };

  __device__ __forceinline__ void add_to(Sums& sums, float x) const {
    const float delta = x - reference_;
    float e = fast_exp2(delta * high_);
    if (kFloored && x < floor_) e = 0.0f;
    sums.others += e;
    if (kKept > 2) sums.spread = fused(-fmaxf(delta, least_), e, sums.spread);  // 0 times -inf is NaN
    if (kKept > 3) sums.squares = fused(e, e, sums.squares);
  }

  __device__ __forceinline__ void add(const Sums& sums) {
    sums_.others += sums.others;
    sums_.spread += sums.spread;
    sums_.squares += sums.squares;
  }

  __device__ __forceinline__ void move_to(float most) {
    const float before = reference_;
    reference_ = fmaxf(before, most);
    const float delta = before - reference_, factor = fast_exp2(delta * high_);
    if (kKept > 2) sums_.spread = factor * fused(-fmaxf(delta, least_), sums_.others, sums_.spread);
    if (kKept > 3) sums_.squares *= factor * factor;
    sums_.others *= factor;
  }

  const float high_, least_, floor_;
  unsigned kept_ = Type::kNothing;
  float reference_ = -FLT_MAX;  // the greatest element that is summed
  Sums sums_{};
};

// The sums of a row, in the first thread of its block.
template <class Type, int kKept, bool kFloored, bool kAhead = false>
__device__ __forceinline__ RowSums sum_row(const LogprobsArgs& args, const Row& row) {
  const auto* const from = static_cast<const typename Type::Element*>(args.logits) + row.offset;
  const bool wide = row.wide;
  ThreadSums<Type, kKept, kFloored> sums(row.exponent, row.floor);
  const auto load = [&](auto whole, int64_t step, unsigned (&words)[kWords]) {
    load_step<Type, decltype(whole)::value>(from, args.columns, wide, step, words);
  };
  if constexpr (kAhead) {
    for_each_step_ahead<Type>(args.columns, wide, load, [&](auto, int64_t, unsigned (&words)[kWords]) { sums.add(words); });
  } else {
    for_each_step<Type>(args.columns, wide, [&](auto whole, int64_t step) {
      unsigned words[kWords];
      load(whole, step, words);
      sums.add(words);
    });
  }
  return sums.finish(row.exponent);
}

// ------------------------------------------------------------------------------------------------------------- backward

// nvcc splits the 128-bit stores of a loop over float32 that begins behind a head.
template <class Type>
constexpr bool kHasHead = Type::kPerWord > 1;

struct GradientRow {
  Row row;
  int64_t to;  // offset of the gradient
  float top;
  RowGradient gradient;
  float fill;  // the gradient of a row whose logits are not read
  int head;  // columns before the first vector, if rows of logits and of gradients lie alike; else 0
  bool wide;
};

// One thread of a block calls this.
template <class Type>
__device__ __forceinline__ GradientRow gradient_row(const LogprobsBackwardArgs& args, int64_t index, const Row& row,
                                                    const RowUpstream& upstream) {
  GradientRow result{};
  result.to = offset_of_gradient(args, index);
  const int before = elements_before_vector<Type>(args.grad, result.to);
  result.head = kHasHead<Type> ? before : 0;
  result.wide = before == result.head;
  if (row.is_ignored || upstream.is_zero()) return result;
  result.row = row;
  result.row.is_read &= upstream.is_defined();
  result.fill = NAN;
  if (!result.row.is_read) return result;
  result.wide &= before == elements_before_vector<Type>(args.given.logits, row.offset);
  if (!result.wide) result.head = 0;
  result.top = upstream.top;
  result.gradient = gradient_of(row.exponent, upstream, row.logit);
  return result;
}

template <class Type>
__device__ __forceinline__ unsigned word_of(float value) {
  float lanes[Type::kPerWord];
#pragma unroll
  for (float& lane : lanes) lane = value;
  return Type::pack(lanes);
}

template <class Type, bool kFloored, int kCount>
__device__ __forceinline__ void differentiate(const GradientRow& gradient_row, unsigned (&words)[kCount]) {
  const Exponent& exponent = gradient_row.row.exponent;
#pragma unroll
  for (unsigned& word : words) {
    float lanes[Type::kPerWord];
#pragma unroll
    for (int lane = 0; lane < Type::kPerWord; ++lane) {
      const float x = Type::lane(word, lane), delta = x - gradient_row.top;
      const float gradient =
          Type::exp(exponent, delta) * fused(gradient_row.gradient.slope, delta, gradient_row.gradient.constant);
      lanes[lane] = delta >= exponent.least && (!kFloored || x >= gradient_row.row.floor) ? gradient : 0.0f;
    }
    word = Type::pack(lanes);
  }
}

// Writes the gradient of a row. The call begins a barrier after `shared` was written and holds another one, after which
// `shared` is free.
template <class Type, bool kFloored, Cached kCached, bool kAhead = false>
__device__ __forceinline__ void differentiate_row(const LogprobsBackwardArgs& args, const GradientRow& shared) {
  using Element = typename Type::Element;
  const GradientRow gradient_row = shared;
  const int64_t head = kHasHead<Type> ? min(int64_t(gradient_row.head), args.given.columns) : 0,
                columns = args.given.columns - head;
  const auto* const from = static_cast<const Element*>(args.given.logits) + gradient_row.row.offset + head;
  auto* const to = static_cast<Element*>(args.grad) + gradient_row.to + head;
  const bool wide = gradient_row.wide;
  const unsigned fill = word_of<Type>(gradient_row.fill);
  if (int64_t(threadIdx.x) < head) {
    const int64_t at = int64_t(threadIdx.x) - head;
    unsigned word[1] = {fill};
    if (gradient_row.row.is_read) {
      word[0] = from[at];
      differentiate<Type, kFloored>(gradient_row, word);
    }
    to[at] = Element(word[0]);
  }
  const auto load = [&](auto whole, int64_t step, unsigned (&words)[kWords]) {
    load_step<Type, decltype(whole)::value, kCached>(from, columns, wide, step, words);
  };
  const auto store = [&](auto whole, int64_t step, unsigned (&words)[kWords]) {
    store_step<Type, decltype(whole)::value, kCached>(words, to, columns, wide, step);
  };
  if (kAhead && gradient_row.row.is_read) {
    for_each_step_ahead<Type>(columns, wide, load, [&](auto whole, int64_t step, unsigned (&words)[kWords]) {
      differentiate<Type, kFloored>(gradient_row, words);
      store(whole, step, words);
    });
  } else
    for_each_step<Type>(columns, wide, [&](auto whole, int64_t step) {
      unsigned words[kWords];
#pragma unroll
      for (unsigned& word : words) word = fill;
      if (!kAhead && gradient_row.row.is_read) {
        load(whole, step, words);
        differentiate<Type, kFloored>(gradient_row, words);
      }
      store(whole, step, words);
    });
  __syncthreads();  // the row is written, and all threads have read `shared`
  if (threadIdx.x == 0 && gradient_row.row.is_read && gradient_row.row.column >= 0) {
    const Element target = Element(word_of<Type>(gradient_row.gradient.target));
    memcpy(to + gradient_row.row.column - head, &target, sizeof target);
  }
}

}  // namespace hpo
