// The tables that a call under a hierarchy keeps between its sweeps.
#pragma once
#include "hierarchy_leaves.h"
#include "hierarchy_tokens.h"
#include "row_advantages.h"

namespace hpo::HPO_ISA {

// A table with an entry for each block.
template <class T>
struct OfBlocks {
  T* first;  // [leaves]
  T* later;  // [tasks], of a block that does not begin its leaf

  T& at(int64_t task, const Block& block) const { return block.begins ? first[block.leaf] : later[task]; }
};

// The gradients of a block in the aggregates of its segments at one level.
struct LevelGrads {
  double by_channel[2];

  void add(const LevelGrads& other) {
    for (int c = 0; c < 2; ++c) by_channel[c] += other.by_channel[c];
  }
};

// The results of a sweep over a block that later sweeps read.
struct BlockResult {
  const LogRatios& log_ratios;
  const bool fast;  // later sweeps may take the fast path in all tiles
  float& own_gradient;  // of each token, where they have one term
};

struct HierarchyWorkspace {
  Arena arena;
  Partial* partials;  // [tasks]
  uint8_t* seen;  // [rows]
  int64_t* start;  // [leaves + 1]
  OfBlocks<LogRatios> log_ratios;
  OfBlocks<bool> fast;
  OfBlocks<float> own_gradients;
  OfBlocks<LevelGrads> grads[kMostLevels];  // apart, because a pass over a level reads those of no other
  SegmentTables tables;
  RowAdvantages row_advantages;
  RowFactors row_factors;
  int64_t bytes;

  HierarchyWorkspace(void* base, int64_t tokens, int64_t rows, int64_t count)
      : arena(base), row_advantages(arena, rows), row_factors(arena, tokens, rows) {
    const int64_t tasks = tokens / kChunk + 1;
    partials = arena.take<Partial>(tasks);
    seen = arena.take<uint8_t>(rows);
    start = arena.take<int64_t>(count + 1);
    log_ratios = {arena.take<LogRatios>(count), arena.take<LogRatios>(tasks)};
    fast = {arena.take<bool>(count), arena.take<bool>(tasks)};
    own_gradients = {arena.take<float>(count), arena.take<float>(tasks)};
    for (OfBlocks<LevelGrads>& level : grads) level = {arena.take<LevelGrads>(count), arena.take<LevelGrads>(tasks)};
    tables.sums = arena.take<int64_t>(3 * kMostLevels * count);
    tables.largest = arena.take<int64_t>(2 * kMostLevels * count);
    tables.aggregate_grad = arena.take<int64_t>(2 * kMostLevels * count);
    bytes = arena.bytes();
  }

  BlockResult result_at(int64_t task, const Block& block) const {
    return {log_ratios.at(task, block), fast.at(task, block), own_gradients.at(task, block)};
  }

  // The log-ratios of segment s at level k stand at [k * leaves + s].
  LogRatios* segments() const {
    static_assert(sizeof(LogRatios) == 3 * sizeof(int64_t), "the layout of SegmentTables::sums");
    return reinterpret_cast<LogRatios*>(tables.sums);
  }

  const LogRatios& segment_of(const Leaves& leaves, int k, int64_t p) const {
    return segments()[k * leaves.count() + leaves.ancestor(k, p)];
  }
};

}  // namespace hpo::HPO_ISA
