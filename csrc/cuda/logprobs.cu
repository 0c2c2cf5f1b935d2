// token_logprobs: log-probability and entropy from logits, and back, each in one launch; a block takes a row. The definition is
// hpo_core/reference/logprobs.py.
#include "logits_rows.cuh"

namespace hpo {
namespace {

template <class Type, int kKept, bool kFloored>
__global__ void __launch_bounds__(kThreads, 4) sum_rows(const LogprobsArgs args) {
  HPO_SHARED(Row, row, );
#pragma unroll 1
  for (int64_t index = blockIdx.x; index < args.rows; index += gridDim.x) {
    if (threadIdx.x == 0) row = get_row<Type>(args, index);
    __syncthreads();
    RowResult result = row.is_ignored ? RowResult{} : undefined_result();
    if (row.is_read) {
      const RowSums sums = sum_row<Type, kKept, kFloored>(args, row);
      if (threadIdx.x == 0) result = result_of(sums, row.exponent, row.logit, args.columns == args.vocabulary);
    }
    if (threadIdx.x == 0) write_result(args, index, result);
    __syncthreads();  // all threads have read `row`
  }
}

template <class Type>
__global__ void __launch_bounds__(kThreads, 3) differentiate_rows(const LogprobsBackwardArgs args) {
  HPO_SHARED(GradientRow, row, );
#pragma unroll 1
  for (int64_t index = blockIdx.x; index < args.given.rows; index += gridDim.x) {
    if (threadIdx.x == 0) {
      const RowUpstream upstream(args, index);
      row = gradient_row<Type>(args, index, upstream.is_zero() ? Row{} : get_row<Type>(args.given, index), upstream);
    }
    __syncthreads();
    differentiate_row<Type, true, Cached::normal>(args, row);
  }
}

// ---------------------------------------------------------------------------------------------------------------- launch

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

}  // namespace
}  // namespace hpo

extern "C" int hpo_token_logprobs(const hpo::LogprobsArgs* args, int64_t context) {
  using namespace hpo;
  if (args->rows == 0) return 0;
  with_type(args->type, [&](auto type) { forward<decltype(type)>(*args, reinterpret_cast<cudaStream_t>(context)); });
  return int(cudaGetLastError());
}

extern "C" int hpo_token_logprobs_backward(const hpo::LogprobsBackwardArgs* args, int64_t context) {
  using namespace hpo;
  const cudaStream_t stream = reinterpret_cast<cudaStream_t>(context);
  if (args->given.rows == 0) return 0;
  const dim3 blocks = blocks_of(args->given.rows);
  with_type(args->given.type,
            [&](auto type) { HPO_LAUNCH((differentiate_rows<decltype(type)>), blocks, dim3(kThreads), 0, stream, *args); });
  return int(cudaGetLastError());
}
