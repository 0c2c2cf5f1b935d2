// A call of hierarchy.cu: its workspace, and the functions by which its kernels read both.
#pragma once
#include "hierarchy_tokens.cuh"
#include "leaves.cuh"

namespace hpo {

constexpr int kWords = 3;  // of a segment's LogRatios: valid, fixed[2]
constexpr int kLevelChannels = 2 * kMostLevels;  // of the gradients of a tile in aggregates: [level][channel]

struct Workspace {
  // Entries of segment s at level k stand at [k * leaves + s], 0 before the first grid barrier; in the caller's tables, if any.
  int64_t* segments;  // [..][kWords]
  uint64_t* largest;  // [..][channel]: the largest magnitude of a tile's gradient in the aggregate, the bits of a double
  int64_t* aggregate_grad;  // [..][channel]: the sum of the gradients of tiles, in steps that `largest` fixes
  double* tile_grads;  // [units][kLevelChannels]: the gradient of a tile in each aggregate
  double* partials;  // [blocks][kMetrics]
  int* seen;  // [rows]: 1 where a valid token was met
  unsigned* ticket;  // blocks of the sweep that are done
  Counted counted;

  int64_t place(void* base, int64_t tokens, int64_t rows, int64_t leaves) {
    Placement placement(base);
    placement.take(segments, kMostLevels * leaves * kWords);
    placement.take(largest, kMostLevels * leaves * 2);
    placement.take(aggregate_grad, kMostLevels * leaves * 2);
    placement.take(tile_grads, units_of(tokens, leaves) * kLevelChannels);
    placement.take(partials, kMaxBlocks * kMetrics);
    placement.take(seen, rows);
    placement.take(ticket, 1);
    counted.take(placement, leaves);
    return placement.bytes();
  }
};

// The function of log-ratios that is aggregated. Kernels are compiled for each, and for gates with a balanced level, because
// registers are short. kParts: log-ratios, in two channels; kTerm: one of the others, as the call says.
enum Entering { kLogRatio, kPreGated, kMeanExp, kParts, kTerm };

struct Call : TokenCall {
  Workspace workspace;
  bool carries;  // gradient flows through the aggregate of some level
  bool settled;  // this gradient is known before the sweep, see hierarchy.cu
  Entering summed;
  bool balanced;  // some level is balanced
  bool together;  // the launch of the sweep holds the delivery, and the sums where it may
  int first_blocks;  // blocks of the first launch

  Call(const PolicyLossArgs& args, const GateStructure& structure, const GateNumbers& numbers, const Hierarchy& hierarchy)
      : TokenCall(args, structure, numbers, hierarchy), workspace(), balanced(false), together(false), first_blocks(0) {
    bool through = false;
    for (int k = 0; k < hierarchy.depth; ++k) {
      through |= hierarchy.levels[k].routing == Routing::through;
      balanced |= hierarchy.levels[k].aggregate == Aggregate::balanced;
    }
    summed = hierarchy.split ? kParts : kLogRatio;
    if (pre_gates(hierarchy.term, structure.head)) summed = kPreGated;
    if (adds_exponentials(hierarchy)) summed = kMeanExp;
    carries = through && structure.head != Head::score && args.grad;
    const bool simple = hierarchy.depth == 1 && !hierarchy.split && !hierarchy.term.present;
    settled = carries && simple && structure.token == TokenGate::drop;
    workspace.place(args.workspace, args.tokens, args.rows, hierarchy.leaves);
    const SegmentTables& tables = hierarchy.tables;
    if (tables.sums) workspace.segments = tables.sums;
    if (tables.largest) workspace.largest = reinterpret_cast<uint64_t*>(tables.largest);
    if (tables.aggregate_grad) workspace.aggregate_grad = tables.aggregate_grad;
  }

  HPO_INLINE bool does(Stage stage) const { return hpo::does(hierarchy, stage); }

  __device__ __forceinline__ int64_t segment_of(int k, int leaf) const {
    return k * hierarchy.leaves + ancestor_of(hierarchy, k, leaf);
  }

  __device__ __forceinline__ LogRatios log_ratios(int k, int leaf) const { return segment(segment_of(k, leaf)); }

  __device__ __forceinline__ LogRatios segment(int64_t at) const {
    const int64_t* words = workspace.segments + at * kWords;
    return {words[0], {words[1], words[2]}};
  }

  __device__ __forceinline__ bool broken() const { return any_of(workspace.counted.broken, first_blocks); }

  __device__ __forceinline__ Leaves leaves(bool broken) const {
    return get_leaves(hierarchy, gate.args, workspace.counted, broken);
  }

  // The number that a token adds to its segments.
  template <int ENTERING>
  __device__ __forceinline__ float aggregated(const Token& token) const {
    if (ENTERING == kMeanExp) return mean_exp_part(hierarchy.split, token.x);
    return entering<ENTERING == kPreGated>(token);
  }

  // The gradient of the token's log-ratio from that of this number.
  template <int ENTERING>
  __device__ __forceinline__ float through_pre_gate(const Token& token, float flow) const {
    if (ENTERING == kLogRatio) return flow;
    const bool adds = ENTERING == kMeanExp || (ENTERING == kTerm && adds_exponentials(hierarchy));
    if (adds) return flow * mean_exp_slope(hierarchy.split, token.x);
    const float slope = pre_gate_slope(term, gate.structure.head, token.negative, token.x);
    return slope == 0.0f ? 0.0f : slope * flow;
  }
};

// Adds the gradients of tiles in aggregates over the segments. The place of a lane that adds is `place_of(leaf)`.
template <class PlaceOf>
__device__ __forceinline__ void add_over_segments(const Call& call, const Leaves& leaves, bool adds, PlaceOf place_of) {
  RunAccumulator accumulator = {};
  for_each_unit(leaves, [&](int index, const LeafUnit& unit) {
    if (!adds) return;
    const int64_t place = place_of(unit.leaf);
    const double mine = call.workspace.tile_grads[int64_t(index) * kLevelChannels + lane()];
    accumulator.add(call.workspace.aggregate_grad + place, in_steps(mine, int64_t(call.workspace.largest[place])));
  });
  accumulator.flush();
}

}  // namespace hpo
