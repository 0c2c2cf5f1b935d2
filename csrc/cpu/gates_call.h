// The parts of a call that no gate changes: tiles are measured, loss and gradient completed, sums added up.
#pragma once
#include "gates_penalty.h"

namespace hpo::HPO_ISA {

// Sums of kinds: of all chosen tokens, of those below their lower bound and of those above their upper one.
struct GateCounts {
  int32_t chosen = 0, below = 0, above = 0;

  void add(const GateCounts& other) { chosen += other.chosen, below += other.below, above += other.above; }
  void add_to(double* slots) const {
    slots[kSelected] += positives(chosen) + negatives(chosen);
    slots[kClippedLowPositive] += positives(below);
    slots[kClippedLowNegative] += negatives(below);
    slots[kClippedHighPositive] += positives(above);
    slots[kClippedHighNegative] += negatives(above);
  }
};

inline void fill_tile_ratios(int n, Tile& tile, Partial& partial) {
  if (!tile.exceptional) return fill_ratios(tile.x, n, tile.ratio, partial);
  float* bounded = tile.spread[0];
  for (int i = 0; i < n; ++i) bounded[i] = clamp(tile.x[i], -kStatisticSaturation, kStatisticSaturation);
  fill_ratios(bounded, n, tile.ratio, partial);
  for (int i = 0; i < n; ++i) tile.ratio[i] = exp(tile.x[i]);
}

// Notes that a row has a valid token. Several threads may do so for one row at the same time.
inline void mark_row(int64_t row, uint8_t* seen) { __atomic_store_n(&seen[row], uint8_t(1), __ATOMIC_RELAXED); }

inline void mark_rows(const Segments& segments, const int32_t* kind, uint8_t* seen) {
  for (const Segment& segment : segments) {
    int i = segment.begin;
    while (i < segment.end && kind[i] == kAbsent) ++i;
    if (i < segment.end) mark_row(segment.row, seen);
  }
}

inline void add_entropy(const float* __restrict entropy, int n, Tile& tile, Partial& partial) {
  int counted = 0;
  for (int i = 0; i < n; ++i) {
    const int32_t counts = mask_of(tile.kind[i] != kAbsent) & mask_of(finite(entropy[i]));
    tile.loss[i] = from_bits(to_bits(entropy[i]) & counts);
    counted -= counts;
  }
  add_terms(tile.loss, n, partial.sums[kEntropySum]);
  partial.slots[kEntropyTokens] += counted;
}

// Everything about a tile that is the same under every gate.
inline void measure(const Call& call, int64_t first, int n, const Segments& segments, Tile& tile, uint8_t* seen,
                    Partial& partial) {
  load(call, first, n, segments, tile, partial);
  mark_rows(segments, tile.kind, seen);
  fill_tile_ratios(n, tile, partial);
}

// Clears the gradient of masked tokens.
inline void clear_gradient(const PolicyLossArgs& args, int64_t first, int n) {
  if (args.grad) std::memset(args.grad + first, 0, size_t(n) * sizeof(float));
}

// An infinite log-ratio has no derivative and, under the score head, no value that logp would enter.
inline void drop_infinite(const Call& call, int n, const Tile& tile, float* loss, float* grad) {
  if (!tile.has_infinite) return;
  const bool without_value = call.structure.head == Head::score;
  for (int i = 0; i < n; ++i) grad[i] = tile.infinite[i] ? 0.0f : grad[i];
  for (int i = 0; i < n; ++i) loss[i] = tile.infinite[i] && without_value ? 0.0f : loss[i];
}

// The loss of each token of a tile that is loaded: the same gate without the weight of the row.
template <class Gate>
void write_token_loss(const Call& call, const Gate& gate, int64_t first, int n, const Segments& segments, Tile& tile) {
  const PolicyLossArgs& args = call.args;
  float* coefficient = tile.coefficient;
  spread_rows(segments, coefficient, [&](int64_t row) { return args.advantage_per_token ? 1.0f : args.advantages[row]; });
  multiply_token_factors(args, first, n, tile, coefficient);
  gate(call, first, n, segments, tile, coefficient, args.token_loss + first, tile.grad);
}

// Loss and gradient of a tile that is loaded.
template <class Gate>
void finish_tile(const Call& call, const Gate& gate, int64_t first, int n, const Segments& segments, Tile& tile,
                 Partial& partial) {
  const PolicyLossArgs& args = call.args;
  float* grad = args.grad ? args.grad + first : tile.grad;
  float* token_loss = args.token_loss ? args.token_loss + first : nullptr;
  gate(call, first, n, segments, tile, tile.coefficient, tile.loss, grad).add_to(partial.slots);
  add_runs(tile.loss, n, partial.sums[kLossSum]);
  if (token_loss) write_token_loss(call, gate, first, n, segments, tile);
  if (args.ref_logp) {
    add_reference_statistics(args.logp + first, args.ref_logp + first, n, tile, partial);
    if (call.structure.kl != KLEstimator::none) add_penalty(call, first, n, segments, tile, grad, token_loss, partial);
  }
  if (args.entropy) add_entropy(args.entropy + first, n, tile, partial);
}

// Losses of tokens are computed apart from the sums and gradients of the fast path: asking for them changes no other bit.
inline PolicyLossArgs without_gradient(PolicyLossArgs args) {
  args.grad = nullptr;
  return args;
}

// Loss and metrics from the partials of all tasks; seen: [rows], 1 where a row has a valid token.
inline void finish(const Call& call, const Partial* partials, int64_t tasks, const uint8_t* seen, int64_t broken) {
  Partial total;
  for (int64_t task = 0; task < tasks; ++task) total.add(partials[task]);
  int64_t rows_seen = 0;
  for (int64_t row = 0; row < call.args.rows; ++row) rows_seen += seen[row];
  const double sum = total.total(kLossSum) + total.total(kPenaltySum);
  const double loss = sum < -FLT_MAX ? -FLT_MAX : (sum > FLT_MAX ? FLT_MAX : sum);
  float smallest = INFINITY, largest = -INFINITY;
  for (int lane = 0; lane < kLanes; ++lane) {
    smallest = total.smallest[lane] < smallest ? total.smallest[lane] : smallest;
    largest = total.largest[lane] > largest ? total.largest[lane] : largest;
  }
  double* slots = call.args.metrics;
  for (int slot = 0; slot < kMetrics; ++slot) slots[slot] = total.slots[slot];
  slots[kRows] = double(rows_seen);
  slots[kLoss] = loss;
  slots[kLogRatioSum] = total.total(kX);
  slots[kLogRatioSquare] = total.total(kXSquare);
  slots[kRatioDeviation] = total.total(kDeviation);
  slots[kRatioDeviationSquare] = total.total(kDeviationSquare);
  slots[kLogRatioMin] = smallest;
  slots[kLogRatioMax] = largest;
  slots[kReferenceLogRatio] = total.total(kS);
  slots[kReferenceLogRatioSquare] = total.total(kSSquare);
  slots[kReferenceK3] = total.total(kK3);
  slots[kPenalty] = total.total(kPenaltySum);
  slots[kEntropy] = total.total(kEntropySum);
  slots[kBadOffsets] = double(broken);
  *call.args.loss = float(loss);
}

}  // namespace hpo::HPO_ISA
