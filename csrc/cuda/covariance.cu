// covariance in two launches: the sums of members, and the keys. The definition is hpo_core/reference/covariance.py.
#include "hpo/covariance.h"

#include "grid.cuh"
#include "hpo/entropy.h"
#include "units.cuh"

namespace hpo {
namespace {

constexpr int kSums = 4;  // of a block: members, log-probabilities, advantages, and 1 if any row is broken
constexpr int kOfLane = 4, kOfWarp = kOfLane * kWarp;  // tokens, among whose rows each token looks for its own

struct Member {
  float logp, advantage;
  bool is_member;
};

// The rows of a pack, whose offsets may be broken.
struct Rows {
  Pack pack;
  bool broken;

  // The row that owns the token, -1 if none does. `near`: the rows of tokens around it.
  __device__ __forceinline__ int owner(const RowSpan& near, int64_t token) const {
    if (broken) return find_owner(pack, token);
    if (pack.rows == 0) return -1;
    const int row = row_in(pack, near, token);
    const Range range = row_range(pack.cu_seqlens, row, pack.tokens);
    return range.begin <= token && token < range.end ? row : -1;
  }
};

__device__ __forceinline__ Pack pack_of(const CovarianceArgs& args) { return {args.cu_seqlens, args.tokens, int(args.rows)}; }

// Among broken rows a search may miss the one that owns a token, so each block looks at all of them first. The call is a
// block barrier.
__device__ __forceinline__ bool any_broken(const Pack& pack) {
  bool any = false;
#pragma unroll 1
  for (int row = int(threadIdx.x); row < pack.rows; row += kThreads) any |= row_range(pack.cu_seqlens, row, pack.tokens).bad;
  return __syncthreads_or(any);
}

__device__ __forceinline__ Member member_at(const CovarianceArgs& args, int64_t place, int64_t token) {
  const bool inside = place >= 0 && (!args.mask || __ldg(args.mask + token));
  const float logp = __ldg(args.logp + token), advantage = inside ? __ldg(args.advantages + place) : NAN;
  return {logp, advantage, is_finite(logp) && is_finite(advantage)};
}

// Calls visit(token, member) for the tokens of this thread. The number of blocks depends on the number of tokens alone, and so
// does the order of every sum.
template <class Visit>
__device__ __forceinline__ void for_each_token(const CovarianceArgs& args, const Rows& rows, Visit visit) {
  const int64_t warp = int64_t(blockIdx.x) * kWarps + warp_in_block(), warps = int64_t(gridDim.x) * kWarps;
#pragma unroll 1
  for (int64_t first = warp * kOfWarp; first < args.tokens; first += warps * kOfWarp) {
    const RowSpan near = span_of(rows.pack, first, min(first + kOfWarp, args.tokens));
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int64_t token = first + i * kWarp + lane();
      if (token < args.tokens) visit(token, member_at(args, args.cu_seqlens ? rows.owner(near, token) : token, token));
    }
  }
}

__global__ void __launch_bounds__(kThreads) sum_members(const CovarianceArgs args, double* sums) {
  const Pack pack = pack_of(args);
  const bool broken = any_broken(pack);
  double own[kSums] = {};
  for_each_token(args, {pack, broken}, [&](int64_t, const Member& member) {
    own[0] += member.is_member ? 1.0 : 0.0;
    own[1] += member.is_member ? double(member.logp) : 0.0;
    own[2] += member.is_member ? double(member.advantage) : 0.0;
  });
  block_sums(own);
  if (threadIdx.x == 0) {
    own[kSums - 1] = broken ? 1.0 : 0.0;
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
  for_each_token(args, {pack_of(args), all[kSums - 1] > 0.0}, [&](int64_t token, const Member& member) {
    const double term = covariance_term<double>(means, member.logp, member.advantage);
    float key = finite_key(float(term));
    bool has_key = member.is_member;
    if (args.draw.old_logp) {
      has_key &= may_be_drawn<double>(args.draw, term, member.logp, __ldg(args.draw.old_logp + token), member.advantage);
      key = draw_of_place(args.draw, uint32_t(token));
    }
    args.keys[token] = has_key ? key : -INFINITY;
  });
}

int blocks_of_tokens(int64_t tokens) { return blocks_for(tokens, kWarps * kOfWarp); }

}  // namespace
}  // namespace hpo

extern "C" int64_t hpo_covariance_workspace(int64_t tokens) {
  return hpo::blocks_of_tokens(tokens) * hpo::kSums * int64_t(sizeof(double));
}

extern "C" int hpo_covariance(const hpo::CovarianceArgs* args, int64_t context) {
  using namespace hpo;
  const auto stream = reinterpret_cast<cudaStream_t>(context);
  const dim3 blocks(unsigned(blocks_of_tokens(args->tokens)));
  double* const sums = static_cast<double*>(args->workspace);
  HPO_LAUNCH(sum_members, blocks, dim3(kThreads), 0, stream, *args, sums);
  HPO_LAUNCH(write_keys, blocks, dim3(kThreads), 0, stream, *args, sums);
  return int(cudaGetLastError());
}
