// The gradient of hierarchy.cu that goes through aggregates, from the sweep's sums of tiles to tokens.
#pragma once
#include "hierarchy_call.cuh"

namespace hpo {

// A lane has a level and a channel, as in Workspace::tile_grads.
struct LevelChannel {
  int level, channel;
  bool open;  // gradient goes through the aggregate there

  __device__ __forceinline__ explicit LevelChannel(const Call& call) : level(lane() / 2), channel(lane() % 2), open(false) {
    if (level < call.hierarchy.depth && channel <= call.hierarchy.split) {
      open = call.hierarchy.levels[level].routing == Routing::through;
    }
  }

  __device__ __forceinline__ int64_t at(const Call& call, int leaf) const { return call.segment_of(level, leaf) * 2 + channel; }
};

// Adds the gradients of tiles in aggregates over the segments.
__device__ __forceinline__ void add_aggregate_grads(const Call& call, const Leaves& leaves) {
  const LevelChannel level_channel(call);
  add_over_segments(call, leaves, level_channel.open, [&](int leaf) { return level_channel.at(call, leaf); });
}

// shares() for the level and channel of each lane, which takes those of the finer level from its neighbour. The loop of
// shares() over finer levels would cost the sweep registers that it does not have.
__device__ __forceinline__ double shares_of_lane(const Call& call, const LevelChannel& level_channel, int leaf) {
  const int level = min(level_channel.level, call.hierarchy.depth - 1);
  const bool balanced = call.hierarchy.levels[level].aggregate == Aggregate::balanced;
  double mine = shares_of_segment(call.hierarchy.levels[level], call.log_ratios(level, leaf), level_channel.channel);
#pragma unroll 1
  for (int k = 1; k < call.hierarchy.depth; ++k) {
    const double finer = __shfl_up_sync(kFullWarp, mine, 2);
    if (level == k && balanced) mine *= finer;
  }
  return mine;
}

// The gradient of each token of the leaf through the aggregate of one level and channel.
__device__ __forceinline__ double aggregate_grad(const Call& call, const LevelChannel& level_channel, int leaf) {
  const double shares = shares_of_lane(call, level_channel, leaf);
  if (!level_channel.open) return 0.0;
  const int64_t at = level_channel.at(call, leaf);
  return from_steps(call.workspace.aggregate_grad[at], int64_t(call.workspace.largest[at])) / shares;
}

template <int ENTERING>
__device__ __forceinline__ void deliver_tile(const Call& call, const Unit& tile, float rising, float falling) {
  constexpr bool PRE_GATED = ENTERING == kPreGated || ENTERING == kTerm;
  const RowTerms row = PRE_GATED ? call.gate.row_terms(tile.row) : RowTerms{};
  for_each_window(tile, call.gate.wide, [&](const Vector<4>& vector) {
    const Inputs<4> inputs = read_inputs<true, PRE_GATED>(call.gate.args, vector);
    float* const to = call.gate.args.grad + vector.token;
    float grad[4] = {};
    const bool at_once = vector.at_once(call.gate.args.grad);
    if (at_once) {
      const float4 four = *reinterpret_cast<const float4*>(to);
      grad[0] = four.x, grad[1] = four.y, grad[2] = four.z, grad[3] = four.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (vector.has(i)) grad[i] = to[i];
      }
    }
    for_each_valid<PRE_GATED>(call.gate, row, inputs, [&](const Token& token, int i) {
      if (token.infinite) return;
      put(grad, i, pick(grad, i) + call.template through_pre_gate<ENTERING>(token, token.x < 0.0f ? falling : rising));
    });
    write(call.gate.args.grad, vector, grad);
  });
}

// Behind a sweep in the same launch each thread reads the gradients that it has written itself: both take the same tiles and
// windows. No fence is needed for them.
template <int ENTERING>
__device__ __forceinline__ void deliver_leaves(const Call& call, const Leaves& leaves) {
  const LevelChannel level_channel(call);
  for_each_unit(leaves, [&](int, const LeafUnit& unit) {
    const double mine = aggregate_grad(call, level_channel, unit.leaf);
    double sums[2] = {};
#pragma unroll
    for (int k = 0; k < kMostLevels; ++k) {
      sums[0] += __shfl_sync(kFullWarp, mine, 2 * k);
      sums[1] += __shfl_sync(kFullWarp, mine, 2 * k + 1);
    }
    const float rising = float(sums[0]), falling = call.hierarchy.split ? float(sums[1]) : rising;
    if (rising == 0.0f && falling == 0.0f) return;  // nothing saturates: the written gradient stands, to the bit
    deliver_tile<ENTERING>(call, unit.tile, rising, falling);
  });
}

}  // namespace hpo
