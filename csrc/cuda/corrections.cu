// correction in one launch, in parts with a grid barrier between them: one that prepares, one that writes the factor of every
// token, and between them, where the statistic is a segment's, one that reduces it. Tiles give integers to segments, so that
// their sum has no order. The definition is hpo_core/reference/corrections.py.
#include "hpo/corrections.h"

#include "gates_tokens.cuh"
#include "leaves.cuh"

namespace hpo {
namespace {

struct Workspace {
  int64_t* segments;  // [leaves][kReducedWords], 0 before the first grid barrier; the caller's table in a call in stages
  Counted counted;

  int64_t place(void* base, int64_t leaves) {
    Placement placement(base);
    placement.take(segments, leaves * kReducedWords);
    counted.take(placement, leaves);
    return placement.bytes();
  }
};

struct Call {
  PolicyLossArgs args;
  Hierarchy hierarchy;
  Correction correction;
  Workspace workspace;
  Compared from;  // its first two are the log-probabilities of `args`
  bool wide;  // vectors of four tokens may be read at once from every array

  Call(const PolicyLossArgs& args, const Hierarchy& hierarchy, const Correction& correction)
      : args(args),
        hierarchy(hierarchy),
        correction(correction),
        workspace(),
        from(compared(args)),
        wide(allows_wide(args.mask, 4)) {
    this->args.logp = from.first, this->args.old_logp = from.second ? from.second : from.first;
    // No factor depends on these arrays, and read_inputs would read those that are given.
    this->args.entropy = this->args.score = this->args.low = this->args.high = nullptr;
    this->args.token_mask = nullptr;
    const float* advantages = args.advantage_per_token ? args.advantages : nullptr;
    const float* arrays[] = {from.first, from.second, advantages, args.token_weight};
    for (const float* array : arrays) wide &= allows_wide(array, 16);
    workspace.place(args.workspace, hierarchy.leaves);
    if (hierarchy.stage != Stage::whole) workspace.segments = hierarchy.tables.sums;
  }

  __device__ __forceinline__ bool reaches(Stage stage) const { return does(hierarchy, stage); }

  __device__ __forceinline__ int64_t* words_of(int leaf) const {
    return workspace.segments + ancestor_of(hierarchy, 0, leaf) * kReducedWords;
  }

  __device__ __forceinline__ bool valid(const Inputs<4>& inputs, int i) const {
    if (!inputs.vector.has(i) || (args.mask && !byte_of(inputs.mask, i))) return false;
    if (!from.logp) return true;
    const float logp = inputs.one(from.logp, i), x = logp - inputs.one(from.old_logp, i);
    const float s = from.ref_logp ? logp - inputs.one(from.ref_logp, i) : 0.0f;
    return x == x && s == s;
  }

  __device__ __forceinline__ float statistic(const Inputs<4>& inputs, int i) const {
    return statistic_of(correction.rule.statistic, inputs.logp[i], inputs.old_logp[i]);
  }
};

// Returns the leaves that count.
__device__ __forceinline__ Leaves prepare(const Call& call) {
  if (call.hierarchy.depth > 0 && call.reaches(Stage::sums))
    clear(call.workspace.segments, call.hierarchy.leaves * kReducedWords);
  float* const factor = call.correction.factor;
  if (call.args.token_weight) copy(factor, call.args.token_weight, call.args.tokens);
  else fill_tokens(factor, call.args.tokens, allows_wide(factor, 16), 1.0f);
  const Counted& counted = call.workspace.counted;
  return get_leaves(call.hierarchy, call.args, counted, check_leaves(call.hierarchy, call.args, counted));
}

__device__ __forceinline__ Reduced reduce_tile(const Call& call, const Unit& tile) {
  Reduced reduced;
  for_each_window(tile, call.wide, [&](const Vector<4>& vector) {
    const Inputs<4> inputs = read_inputs<false, false>(call.args, vector);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float v = call.statistic(inputs, i);
      if (call.valid(inputs, i) && v == v) reduced.add(v);
    }
  });
  return {warp_sum(reduced.valid), warp_sum(reduced.fixed), warp_sum(reduced.coarse), warp_min(reduced.smallest),
          warp_max(reduced.largest)};
}

__device__ __forceinline__ void reduce_leaves(const Call& call, const Leaves& leaves) {
  const Reduction reduction = call.correction.reduction;
  RunAccumulator accumulator = {};
  for_each_unit(leaves, [&](int, const LeafUnit& unit) {
    const Reduced reduced = reduce_tile(call, unit.tile);
    if (lane() >= kReducedWords || reduced.valid == 0) return;
    int64_t* const word = call.words_of(unit.leaf) + lane();
    const int64_t mine = word_of(reduced, lane(), reduction);
    if (lane() == 0 || !is_extremum(reduction)) return accumulator.add(word, mine);
    raise(word, mine);
  });
  accumulator.flush();
}

template <bool OF_SEGMENTS>
__device__ __forceinline__ void write_factors(const Call& call, const Leaves& leaves) {
  const PolicyLossArgs& args = call.args;
  const Correction& correction = call.correction;
  for_each_unit(leaves, [&](int, const LeafUnit& unit) {
    float of_segment[2] = {};
    if constexpr (OF_SEGMENTS) {
      const float v = from_words(call.words_of(unit.leaf), call.correction.reduction);
      for (int sign = 0; sign < 2; ++sign) of_segment[sign] = factor_of(correction.rule, sign, v);
    }
    const float advantage = args.advantage_per_token ? 0.0f : args.advantages[unit.tile.row];
    for_each_window(unit.tile, call.wide, [&](const Vector<4>& vector) {
      const Inputs<4> inputs = read_inputs<false, true>(args, vector);
      float factor[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool negative = (args.advantage_per_token ? inputs.advantage[i] : advantage) < 0.0f;
        const float v = call.statistic(inputs, i);
        factor[i] = v != v ? v : (OF_SEGMENTS ? by_sign(of_segment, negative) : factor_of(correction.rule, negative, v));
        if (!call.valid(inputs, i)) factor[i] = 1.0f;
        factor[i] *= inputs.token_weight[i];
      }
      write(correction.factor, vector, factor);
    });
  });
}

template <bool OF_SEGMENTS>
__global__ void __launch_bounds__(kThreads, OF_SEGMENTS ? 3 : 4) correct_tokens(const Call call) {
  const Leaves leaves = prepare(call);
  if constexpr (OF_SEGMENTS) {
    if (call.reaches(Stage::sums)) reduce_leaves(call, leaves);
    sync_grid();
  }
  if (call.reaches(Stage::sweep)) write_factors<OF_SEGMENTS>(call, leaves);
}

template <bool OF_SEGMENTS>
void launch(const Call& call, cudaStream_t stream) {
  const int64_t units = units_of(call.args.tokens, call.hierarchy.leaves);
  const int64_t threads = std::max({call.args.tokens / 4, call.hierarchy.leaves * kReducedWords, kWarp * units});
  const dim3 blocks(blocks_together<correct_tokens<OF_SEGMENTS>>(threads)), block(kThreads);
  HPO_LAUNCH_TOGETHER((correct_tokens<OF_SEGMENTS>), blocks, block, 0, stream, call);
}

}  // namespace
}  // namespace hpo

extern "C" int64_t hpo_correction_workspace(int64_t, int64_t leaves) { return hpo::Workspace().place(nullptr, leaves); }

extern "C" int hpo_correction(const hpo::PolicyLossArgs* args, const hpo::Hierarchy* hierarchy,
                              const hpo::Correction* correction, int64_t context) {
  using namespace hpo;
  const cudaStream_t stream = reinterpret_cast<cudaStream_t>(context);
  const Call call(*args, *hierarchy, *correction);
  hierarchy->depth > 0 ? launch<true>(call, stream) : launch<false>(call, stream);
  return int(cudaGetLastError());
}
