// What a call under a hierarchy keeps between its sweeps.
#pragma once
#include "hierarchy_leaves.h"
#include "hierarchy_tokens.h"
#include "row_advantages.h"

namespace hpo::HPO_ISA {

// One of each block.
template <class T>
struct OfBlocks {
  T* first;  // [leaves]
  T* later;  // [tasks], of a block that does not begin its leaf

  T& at(int64_t task, const Block& block) const { return block.begins ? first[block.leaf] : later[task]; }
};

// What the sweeps over a block leave to those that follow.
struct BlockResult {
  const LogRatios& log_ratios;
  const bool fast;  // later sweeps may take the fast path in all tiles
  Flow& flow;
  float& own_gradient;  // of each token, where they have one term
};

struct HierarchyWorkspace {
  Arena arena;
  Partial* partials;  // [tasks]
  uint8_t* seen;  // [rows]
  int64_t* start;  // [leaves + 1]
  OfBlocks<LogRatios> log_ratios;
  OfBlocks<bool> fast;
  OfBlocks<Flow> flows;
  OfBlocks<float> own_gradients;
  SegmentTables tables;
  LevelSlopes* slopes;  // [leaves]
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
    flows = {arena.take<Flow>(count), arena.take<Flow>(tasks)};
    own_gradients = {arena.take<float>(count), arena.take<float>(tasks)};
    tables.sums = arena.take<int64_t>(3 * kMostLevels * count);
    tables.largest = arena.take<int64_t>(2 * kMostLevels * count);
    tables.aggregate_grad = arena.take<int64_t>(2 * kMostLevels * count);
    slopes = arena.take<LevelSlopes>(count);
    bytes = arena.bytes();
  }

  BlockResult result_at(int64_t task, const Block& block) const {
    return {log_ratios.at(task, block), fast.at(task, block), flows.at(task, block), own_gradients.at(task, block)};
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
