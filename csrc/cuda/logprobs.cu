// token_logprobs: log-probability and entropy from logits, and back, each in one launch. The definition is
// hpo_core/reference/logprobs.py.
//
// A block takes a row and reads it once. Each thread keeps the greatest element that it has met: of two elements it keeps the
// greater and adds e^(...) of the smaller to its sums. The sums are relative to the greatest summed element, not to the
// greatest of the row: so the exponents of the elements that count are small, and one multiplication and one fast exponential
// are exact enough even where a single token has nearly all the probability. One exact factor at the end refers the sums to
// the greatest of the row.
#include "hpo/logprobs.h"

#include "hpo/entropy.h"
#include "logits.cuh"

namespace hpo {
namespace {

// -------------------------------------------------------------------------------------------------------------- forward

// The arguments of a row, shared by the threads of its block.
struct Row {
  int64_t offset;
  Exponent exponent;
  float floor, logit;  // logit: the target's, -inf where it lies in another part or outside the support
  bool is_read, is_ignored, wide;
};

template <class Type>
__device__ __forceinline__ float logit_at(const void* logits, int64_t offset) {
  return Type::lane(unsigned(static_cast<const typename Type::Element*>(logits)[offset]), 0);
}

// For one thread of a block: it divides doubles, and some devices have few units for them.
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
  const int64_t column = target_column(args, index);
  row.logit = column < 0 ? -HUGE_VALF : logit_at<Type>(args.logits, row.offset + column);
  if (is_below(row.logit, floor)) row.logit = -HUGE_VALF;
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
      for (int lane = 0; lane < Type::kLanes; ++lane) add_to(sums, Type::lane(words[i], lane));
    }
    add(sums);
  }

  // The sums of the block over all but the greatest element, in its first thread.
  __device__ __forceinline__ RowSums finish(const Exponent& exponent) {
    float rest[Type::kLanes], mine = -HUGE_VALF;
#pragma unroll
    for (int lane = 0; lane < Type::kLanes; ++lane) {
      rest[lane] = Type::lane(kept_, lane);
      if (kFloored && rest[lane] < floor_) rest[lane] = -HUGE_VALF;
      mine = fmaxf(mine, rest[lane]);
    }
    // Several threads may have kept the greatest value; one of them owns it and the others sum theirs.
    const uint64_t key = uint64_t(order_key(mine)) << 32 | (kThreads - 1 - threadIdx.x), greatest = block_max(key);
    bool owns = key == greatest;
    float most = -HUGE_VALF;
#pragma unroll
    for (int lane = 0; lane < Type::kLanes; ++lane) {
      if (owns && rest[lane] == mine) rest[lane] = -HUGE_VALF, owns = false;
      most = fmaxf(most, rest[lane]);
    }
    move_to(from_order_key(unsigned(block_max(uint64_t(order_key(fmaxf(most, reference_)))))));
    Sums sums{};
#pragma unroll
    for (int lane = 0; lane < Type::kLanes; ++lane) add_to(sums, rest[lane]);
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
  // As in RowSums, relative to reference_.
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

template <class Type, int kKept, bool kFloored>
__global__ void __launch_bounds__(kThreads, 4) sum_rows(const LogprobsArgs args) {
  HPO_SHARED(Row, row, );
#pragma unroll 1
  for (int64_t index = blockIdx.x; index < args.rows; index += gridDim.x) {
    if (threadIdx.x == 0) row = get_row<Type>(args, index);
    __syncthreads();
    RowResult result = row.is_ignored ? RowResult{} : undefined_result();
    if (row.is_read) {
      const auto* const from = static_cast<const typename Type::Element*>(args.logits) + row.offset;
      const bool wide = row.wide;
      ThreadSums<Type, kKept, kFloored> sums(row.exponent, row.floor);
      for_each_step<Type>(args.columns, wide, [&](auto whole, int64_t step) {
        unsigned words[kWords];
        load_step<Type, decltype(whole)::value>(from, args.columns, wide, step, words);
        sums.add(words);
      });
      const RowSums whole = sums.finish(row.exponent);
      if (threadIdx.x == 0) result = result_of(whole, row.exponent, row.logit, args.columns == args.vocabulary);
    }
    if (threadIdx.x == 0) write_result(args, index, result);
    __syncthreads();  // all threads have read `row`
  }
}

// ------------------------------------------------------------------------------------------------------------- backward

struct GradientRow {
  Row row;
  int64_t to;  // offset of the gradient
  int64_t column;  // the target's, -1 where its gradient has no rule of its own
  float top;
  RowGradient gradient;
  float fill;  // the gradient of a row whose logits are not read
  bool wide;
};

// For one thread of a block, before a barrier: it reads the target's logit before another thread may write the gradient in
// its place.
template <class Type>
__device__ __forceinline__ GradientRow get_row(const LogprobsBackwardArgs& args, int64_t index) {
  GradientRow found{};
  const RowUpstream upstream(args, index);
  found.to = offset_of_gradient(args, index);
  found.wide = is_aligned<Type>(args.grad, found.to);
  if (is_ignored(args.given, index) || upstream.is_zero()) return found;
  found.row = get_row<Type>(args.given, index);
  found.row.is_read &= upstream.is_defined();
  found.fill = NAN;
  if (!found.row.is_read) return found;
  found.wide &= found.row.wide;
  found.top = upstream.top;
  found.gradient = gradient_of(found.row.exponent, upstream, found.row.logit);
  found.column = target_column(args.given, index);
  if (found.column >= 0) {
    const float logit = logit_at<Type>(args.given.logits, found.row.offset + found.column);
    if (is_below(logit, args.given.floors ? args.given.floors + index : nullptr)) found.column = -1;
  }
  return found;
}

template <class Type>
__device__ __forceinline__ unsigned word_of(float value) {
  float lanes[Type::kLanes];
#pragma unroll
  for (float& lane : lanes) lane = value;
  return Type::pack(lanes);
}

template <class Type>
__device__ __forceinline__ void differentiate(const GradientRow& found, unsigned (&words)[kWords]) {
  const Exponent& exponent = found.row.exponent;
#pragma unroll
  for (unsigned& word : words) {
    float lanes[Type::kLanes];
#pragma unroll
    for (int lane = 0; lane < Type::kLanes; ++lane) {
      const float x = Type::lane(word, lane), delta = x - found.top;
      const float gradient = Type::exp(exponent, delta) * fused(found.gradient.slope, delta, found.gradient.constant);
      lanes[lane] = delta >= exponent.least && x >= found.row.floor ? gradient : 0.0f;
    }
    word = Type::pack(lanes);
  }
}

template <class Type>
__global__ void __launch_bounds__(kThreads, 3) differentiate_rows(const LogprobsBackwardArgs args) {
  using Element = typename Type::Element;
  HPO_SHARED(GradientRow, shared, );
#pragma unroll 1
  for (int64_t index = blockIdx.x; index < args.given.rows; index += gridDim.x) {
    if (threadIdx.x == 0) shared = get_row<Type>(args, index);
    __syncthreads();
    const GradientRow found = shared;
    const int64_t columns = args.given.columns;
    const auto* const from = static_cast<const Element*>(args.given.logits) + found.row.offset;
    auto* const to = static_cast<Element*>(args.grad) + found.to;
    const bool wide = found.wide;
    const unsigned fill = word_of<Type>(found.fill);
    for_each_step<Type>(columns, wide, [&](auto whole, int64_t step) {
      unsigned words[kWords];
#pragma unroll
      for (unsigned& word : words) word = fill;
      if (found.row.is_read) {
        load_step<Type, decltype(whole)::value>(from, columns, wide, step, words);
        differentiate<Type>(found, words);
      }
      store_step<Type, decltype(whole)::value>(words, to, columns, wide, step);
    });
    __syncthreads();  // the row is written, and all threads have read `shared`
    if (threadIdx.x == 0 && found.row.is_read && found.column >= 0) {
      const Element target = Element(word_of<Type>(found.gradient.target));
      memcpy(to + found.column, &target, sizeof target);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------- launch

inline dim3 blocks_of(int64_t rows) { return dim3(unsigned(std::min(rows, int64_t(1) << 16))); }

template <class Type, int kKept>
void forward(const LogprobsArgs& args, cudaStream_t stream) {
  const dim3 blocks = blocks_of(args.rows);
  if (args.floors) HPO_LAUNCH((sum_rows<Type, kKept, true>), blocks, dim3(kThreads), 0, stream, args);
  else HPO_LAUNCH((sum_rows<Type, kKept, false>), blocks, dim3(kThreads), 0, stream, args);
}

template <class Type>
void forward(const LogprobsArgs& args, cudaStream_t stream) {
  if (args.kept == 2) forward<Type, 2>(args, stream);
  else if (args.kept == 3) forward<Type, 3>(args, stream);
  else forward<Type, 4>(args, stream);
}

template <class Type>
void backward(const LogprobsBackwardArgs& args, cudaStream_t stream) {
  HPO_LAUNCH((differentiate_rows<Type>), blocks_of(args.given.rows), dim3(kThreads), 0, stream, args);
}

}  // namespace
}  // namespace hpo

extern "C" int hpo_token_logprobs(const hpo::LogprobsArgs* args, int64_t context) {
  using namespace hpo;
  const cudaStream_t stream = reinterpret_cast<cudaStream_t>(context);
  if (args->rows == 0) return 0;
  if (args->type == LogitType::float32) forward<Float32>(*args, stream);
  else if (args->type == LogitType::bfloat16) forward<Bfloat16>(*args, stream);
  else forward<Float16>(*args, stream);
  return int(cudaGetLastError());
}

extern "C" int hpo_token_logprobs_backward(const hpo::LogprobsBackwardArgs* args, int64_t context) {
  using namespace hpo;
  const cudaStream_t stream = reinterpret_cast<cudaStream_t>(context);
  if (args->given.rows == 0) return 0;
  if (args->given.type == LogitType::float32) backward<Float32>(*args, stream);
  else if (args->given.type == LogitType::bfloat16) backward<Bfloat16>(*args, stream);
  else backward<Float16>(*args, stream);
  return int(cudaGetLastError());
}
