// What a call under a hierarchy keeps between its sweeps.
#pragma once
#include "hierarchy_leaves.h"
#include "hierarchy_tokens.h"
#include "row_advantages.h"

namespace hpo::HPO_ISA {

struct HierarchyWorkspace {
  Arena arena;
  Partial* partials;  // [tasks]
  uint8_t* seen;  // [rows]
  int64_t* start;  // [leaves + 1]
  LogRatios *log_ratios, *log_ratios_of_blocks;  // [leaves], [tasks]: the rest of a leaf that other tasks began
  uint8_t *fast, *fast_blocks;  // [leaves], [tasks], 1 where later sweeps may take the fast path in all tiles of a block
  SegmentTables tables;
  Flow *flows, *flows_of_blocks;  // [leaves], [tasks]
  LeafGate* gates;  // [leaves]
  LevelSlopes* slopes;  // [leaves]
  float (*token_grad)[2];  // [leaves]: of each token through aggregates, by channel
  RowAdvantages row_advantages;
  RowFactors row_factors;
  int64_t bytes;

  HierarchyWorkspace(void* base, int64_t tokens, int64_t rows, int64_t count)
      : arena(base), row_advantages(arena, rows), row_factors(arena, tokens, rows) {
    const int64_t tasks = tokens / kChunk + 1;
    partials = arena.take<Partial>(tasks);
    seen = arena.take<uint8_t>(rows);
    start = arena.take<int64_t>(count + 1);
    log_ratios = arena.take<LogRatios>(count);
    log_ratios_of_blocks = arena.take<LogRatios>(tasks);
    fast = arena.take<uint8_t>(count);
    fast_blocks = arena.take<uint8_t>(tasks);
    tables.sums = arena.take<int64_t>(3 * kMostLevels * count);
    tables.largest = arena.take<int64_t>(2 * kMostLevels * count);
    tables.aggregate_grad = arena.take<int64_t>(2 * kMostLevels * count);
    flows = arena.take<Flow>(count);
    flows_of_blocks = arena.take<Flow>(tasks);
    gates = arena.take<LeafGate>(count);
    slopes = arena.take<LevelSlopes>(count);
    token_grad = arena.take<float[2]>(count);
    bytes = arena.bytes();
  }

  uint8_t& fast_at(int64_t task, const Block& block) const { return block.begins ? fast[block.leaf] : fast_blocks[task]; }

  // The log-ratios of segment s at level k stand at [k * leaves + s].
  LogRatios* segments() const {
    static_assert(sizeof(LogRatios) == 3 * sizeof(int64_t), "the layout of SegmentTables::sums");
    return reinterpret_cast<LogRatios*>(tables.sums);
  }
};

}  // namespace hpo::HPO_ISA
