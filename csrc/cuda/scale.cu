// values *= factor, in place and in one launch. A plain backward() sends the factor 1: then each thread reads it and nothing
// else, so that a gradient computed in the forward costs no pass over memory in the backward.
#include "logits.cuh"

namespace hpo {
namespace {

template <class Type>
__device__ __forceinline__ unsigned scaled(unsigned word, float factor) {
  float lanes[Type::kPerWord];
#pragma unroll
  for (int i = 0; i < Type::kPerWord; ++i) lanes[i] = Type::lane(word, i) * factor;
  return Type::pack(lanes);
}

template <class Type>
__global__ void __launch_bounds__(kThreads) scale(void* values, int64_t count, bool aligned, const float* factor) {
  const float by = *factor;
  if (by == 1.0f) return;
  using Element = typename Type::Element;
  Element* const elements = static_cast<Element*>(values);
  const int64_t vectors = aligned ? count / kPerVector<Type> : 0;
  uint4* const groups = static_cast<uint4*>(values);
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x, step = int64_t(gridDim.x) * kThreads;
#pragma unroll 4
  for (int64_t i = first; i < vectors; i += step) {
    const uint4 v = groups[i];
    groups[i] = make_uint4(scaled<Type>(v.x, by), scaled<Type>(v.y, by), scaled<Type>(v.z, by), scaled<Type>(v.w, by));
  }
#pragma unroll 1
  for (int64_t i = vectors * kPerVector<Type> + first; i < count; i += step)
    elements[i] = Element(scaled<Type>(elements[i], by));
}

}  // namespace
}  // namespace hpo

extern "C" int hpo_scale(void* values, int64_t count, hpo::LogitType type, const float* factor, int64_t context) {
  using namespace hpo;
  if (count == 0) return 0;
  const dim3 blocks(unsigned(blocks_for(count / 4))), threads(kThreads);
  const cudaStream_t stream = reinterpret_cast<cudaStream_t>(context);
  const bool aligned = reinterpret_cast<uintptr_t>(values) % 16 == 0;
  with_type(type,
            [&](auto of) { HPO_LAUNCH(scale<decltype(of)>, blocks, threads, 0, stream, values, count, aligned, factor); });
  return int(cudaGetLastError());
}
