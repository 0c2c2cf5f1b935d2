// covariance in two launches: the sums of members, and the keys. The definition is hpo_core/reference/covariance.py.
#include "hpo/covariance.h"

#include "grid.cuh"
#include "hpo/entropy.h"

namespace hpo {
namespace {

constexpr int kSums = 4;  // of a block: members, log-probabilities, advantages, and 0, because block_sums takes a power of two

struct Member {
  float logp, advantage;
  bool is_member;
};

__device__ __forceinline__ Member member_at(const CovarianceArgs& args, int64_t token) {
  int64_t unit = token;
  if (args.unit) unit = __ldg(args.unit + token);
  const bool inside = unit >= 0 && unit < args.units && (!args.mask || __ldg(args.mask + token));
  const float logp = __ldg(args.logp + token), advantage = inside ? __ldg(args.advantages + unit) : NAN;
  return {logp, advantage, is_finite(logp) && is_finite(advantage)};
}

// Calls visit(token) for the tokens of this thread. The number of blocks depends on the number of tokens alone, and so does
// the order of every sum.
template <class Visit>
__device__ __forceinline__ void for_each_token(const CovarianceArgs& args, Visit visit) {
#pragma unroll 4
  for (int64_t t = int64_t(blockIdx.x) * kThreads + threadIdx.x; t < args.tokens; t += int64_t(gridDim.x) * kThreads) visit(t);
}

__global__ void __launch_bounds__(kThreads) sum_members(const CovarianceArgs args, double* sums) {
  double own[kSums] = {};
  for_each_token(args, [&](int64_t token) {
    const Member member = member_at(args, token);
    own[0] += member.is_member ? 1.0 : 0.0;
    own[1] += member.is_member ? double(member.logp) : 0.0;
    own[2] += member.is_member ? double(member.advantage) : 0.0;
  });
  block_sums(own);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSums; ++i) sums[int64_t(blockIdx.x) * kSums + i] = own[i];
  }
}

__global__ void __launch_bounds__(kThreads) write_keys(const CovarianceArgs args, const double* sums) {
  double all[kSums] = {};
  for (int block = int(threadIdx.x); block < int(gridDim.x); block += kThreads) {
    for (int i = 0; i < kSums; ++i) all[i] += __ldg(sums + block * kSums + i);
  }
  block_sums(all);
  const CovarianceMeans means = means_of({all[0], all[1], all[2]});
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.members = int64_t(all[0]);
  for_each_token(args, [&](int64_t token) {
    const Member member = member_at(args, token);
    const double term = covariance_term(means, member.logp, member.advantage);
    float key = key_of_term(term);
    bool has_key = member.is_member;
    if (args.draw.old_logp) {
      has_key &= may_be_drawn(args.draw, term, member.logp, __ldg(args.draw.old_logp + token), member.advantage);
      key = draw_of_place(args.draw, uint32_t(token));
    }
    args.keys[token] = has_key ? key : -INFINITY;
  });
}

}  // namespace
}  // namespace hpo

extern "C" int64_t hpo_covariance_workspace(int64_t tokens) {
  return hpo::blocks_for(tokens) * hpo::kSums * int64_t(sizeof(double));
}

extern "C" int hpo_covariance(const hpo::CovarianceArgs* args, int64_t context) {
  using namespace hpo;
  const auto stream = reinterpret_cast<cudaStream_t>(context);
  const dim3 blocks(unsigned(blocks_for(args->tokens)));
  double* const sums = static_cast<double*>(args->workspace);
  HPO_LAUNCH(sum_members, blocks, dim3(kThreads), 0, stream, *args, sums);
  HPO_LAUNCH(write_keys, blocks, dim3(kThreads), 0, stream, *args, sums);
  return int(cudaGetLastError());
}
