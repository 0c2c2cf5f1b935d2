// The first sweep over the leaves of a task, and the other sweeps over leaves that share no segment.
#pragma once
#include "hierarchy_blocks.h"

namespace hpo::HPO_ISA {

// The results of the steps for one leaf.
struct SettledLeaf {
  LeafGate gate;
  Flow flow;
  float own_gradient;
};

// Settles leaves of one block each. Within a leaf the divisions of a gate and the exponential of tokens that share one term
// depend on each other, so each of these steps runs over all leaves.
inline void settle(const Sweeps& sweeps, const Block* blocks, int count, const LogRatios* sums, bool fast, Scratch& scratch,
                   Partial& partial) {
  const TokenPlan& plan = sweeps.plan;
  const PolicyLossArgs& args = sweeps.call.args;
  SettledLeaf leaves[kFewRows];
  const auto result = [&](int i) { return BlockResult{sums[i], fast, leaves[i].own_gradient}; };
  const auto aggregate_grad = [&](int i) { return sweeps.own_aggregate_grad(sums[i], leaves[i].flow); };

  for (int i = 0; i < count; ++i) {
    leaves[i].gate = {}, leaves[i].flow = {}, leaves[i].own_gradient = 0.0f;
    if (plan.hierarchy.depth == 0 || sums[i].valid == 0) continue;
    const auto segment = [&](int) { return sums[i]; };
    gate_leaf(args, sweeps.leaves, blocks[i].leaf, segment, leaves[i].gate, [](int, int, int, double) {});
  }
  if (fast && args.ref_logp) {  // one order of additions on every path
    for (int i = 0; i < count; ++i) {
      sweeps.finish(blocks[i], leaves[i].gate, scratch, partial, result(i), leaves[i].flow);
      sweeps.receive(blocks[i], result(i), aggregate_grad(i), scratch);
    }
    return;
  }
  for (int i = 0; fast && args.entropy && i < count; ++i) add_entropies(args, blocks[i], partial);
  if (fast && plan.drops) {
    GatedToken tokens[kFewRows];
    float coefficients[kFewRows] = {}, z[kFewRows] = {}, values[kFewRows];
    for (int i = 0; i < count; ++i) {
      tokens[i] = sweeps.token_alike(blocks[i], leaves[i].gate);
      coefficients[i] = row_coefficient(args, blocks[i].row), z[i] = tokens[i].z;
    }
    for (int i = 0; i < count; i += kWidth)
      store_lanes(token_value(load_lanes<Floats>(coefficients + i), load_lanes<Floats>(z + i)), values + i);
    static_assert(2 * kChunk <= kNegative / 2, "the kinds of a task's tokens, fewer than 2 kChunk, have a sum");
    GateCounts counts;
    float aggregate_grads[kFewRows];
    for (int i = 0; i < count; ++i) {
      counts.add(sweeps.count_alike(blocks[i], tokens[i], values[i], scratch, partial, result(i), leaves[i].flow));
      aggregate_grads[i] = aggregate_grad(i).rising;
    }
    counts.add_to(partial.slots);
    Masked of_waiting[kTilesOfBlock];  // scratch.masked is that of blocks measured since
    for (int i = 0; i < count; ++i) {
      if (plan.fills) sweeps.classify_masks(blocks[i], of_waiting);
      const Masked* masked = plan.fills ? of_waiting : scratch.masked;
      sweeps.write_alike(blocks[i], leaves[i].own_gradient, aggregate_grads[i], masked, scratch.weights);
      sweeps.write_token_losses(blocks[i], leaves[i].gate, scratch);
    }
    return;
  }
  for (int i = 0; i < count; ++i) {
    SettledLeaf& leaf = leaves[i];
    const OpenLevels levels = sweeps.open_levels(blocks[i], leaf.gate, fast);
    if (levels.open) {
      sweeps.count(blocks[i], levels, scratch, partial, leaf.flow);
      sweeps.write(blocks[i], leaf.gate, aggregate_grad(i), scratch, partial);
    } else {
      sweeps.finish_closed(blocks[i], leaf.gate, fast, scratch, partial, leaf.flow);
      sweeps.receive(blocks[i], result(i), aggregate_grad(i), scratch);
    }
  }
}

// Settles blocks as they come. Blocks whose tokens are not read again are collected: the steps for one leaf alone take twice as
// long.
class Settling {
 public:
  Settling(Scratch& scratch, Partial& partial) : scratch_(scratch), partial_(partial) {}
  Settling(const Settling&) = delete;

  void take(const Sweeps& sweeps, const Block* blocks, int count, const LogRatios* sums, bool fast) {
    if (!fast || !sweeps.plan.fills) {
      flush();
      return settle(sweeps, blocks, count, sums, fast, scratch_, partial_);
    }
    sweeps_ = &sweeps;  // at most one of the RowSweeps `fills`
    for (int i = 0; i < count; ++i) {
      if (count_ == kFewRows) flush();
      blocks_[count_] = blocks[i], sums_[count_++] = sums[i];
    }
  }

  void flush() {
    if (count_ > 0) settle(*sweeps_, blocks_, count_, sums_, true, scratch_, partial_);
    count_ = 0;
  }

 private:
  Scratch& scratch_;
  Partial& partial_;
  const Sweeps* sweeps_ = nullptr;
  int count_ = 0;
  Block blocks_[kFewRows];
  LogRatios sums_[kFewRows];
};

// A block under no level.
inline void take_alone(const Sweeps& sweeps, const Block& block, Scratch& scratch, Partial& partial) {
  LogRatios sums = {};
  const bool fast = sweeps.measure(block, scratch, partial, sums);
  settle(sweeps, &block, 1, &sums, fast, scratch, partial);
}

// Calls body(sweeps, blocks, count, sums, fast) for the measured blocks of a task, of which all stand alone or none. Blocks of
// at most a tile are measured together, up to a kLongTile of tokens: the fixed cost of a sweep is that of some hundred tokens.
template <class Body>
inline void measure_blocks(const RowSweeps& sweeps_of, int64_t task, Scratch& scratch, Partial& partial, const Body& body) {
  Block blocks[kFewRows];
  int count = 0;
  const Leaves& leaves = sweeps_of.of_any.leaves;
  const auto measure_one = [&](const Sweeps& sweeps, const Block& block) {
    LogRatios sums = {};
    const bool fast = sweeps.measure(block, scratch, partial, sums);
    body(sweeps, &block, 1, &sums, fast);
  };
  const auto flush = [&] {
    if (count == 0) return;
    const Sweeps& sweeps = sweeps_of.at(blocks[0].row);
    LogRatios sums[kFewRows];
    if (count > 1 && sweeps.measure_together(blocks, count, scratch, partial, sums)) {
      body(sweeps, blocks, count, sums, sweeps.plan.stays_fast());
    } else {
      for (int i = 0; i < count; ++i) measure_one(sweeps, blocks[i]);
    }
    count = 0;
  };
  leaves.for_each_block(task, [&](const Block& block) {
    const Sweeps& sweeps = sweeps_of.at(block.row);
    const bool ends_long_leaf = leaves.alone && !leaves.stands_alone(block.leaf);
    if (block.tokens > kTile || !sweeps.plan.measures_fast || sweeps.plan.weighs || ends_long_leaf) {
      flush();
      return measure_one(sweeps, block);
    }
    // The blocks that wait have one plan: rows whose tokens share one advantage have another one than the rest.
    if (count == kFewRows ||
        (count > 0 && (&sweeps != &sweeps_of.at(blocks[0].row) || block.first + block.tokens - line_of(blocks[0]) > kLongTile)))
      flush();
    blocks[count++] = block;
  });
  flush();
}

}  // namespace hpo::HPO_ISA
