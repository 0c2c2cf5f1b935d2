// What is the same for a token under every gate once its own term is known: the penalty, its loss by itself, the metrics.
#pragma once
#include "gates_totals.cuh"

namespace hpo {

// What a gate makes of a token, whether that counts or not: its share of the loss, d loss / d logp, and the side on which a
// gate clipped it.
struct Outcome {
  float loss, grad;
  bool below, above;
};

// Counts a token and returns its whole gradient. `unweighted()` is its loss without the weight of the row.
template <bool REFERENCE, int EXTRAS, int WIDTH, class Unweighted>
__device__ __forceinline__ float complete_token(const Gate& gate, const RowTerms& row, const Inputs<WIDTH>& inputs, int i,
                                                const Token& token, float ratio, const Outcome& outcome,
                                                const Unweighted& unweighted, TileTotals& tile, Totals& totals) {
  float grad = outcome.grad;
  totals.loss += double(token.selected ? outcome.loss : 0.0f);

  Term penalty = {};
  if constexpr (REFERENCE) {
    if (gate.structure.kl != KLEstimator::none) {
      const Term k = kl_term(gate.structure.kl, gate.structure.kl_gradient, token.s, exp(-token.s), token.x,
                             !token.reference_infinite, !token.infinite);
      float weight = row.penalty_weight(), factor = 1.0f;
      bool pays = token.valid;
      if constexpr (EXTRAS) {
        if (gate.args.kl_weight) {
          factor = inputs.one(gate.args.kl_weight, i);
          pays = pays && pays_penalty(factor);
          factor = pays ? factor : 0.0f;
          weight = penalty_share(weight, factor);
        }
      }
      penalty = {pays ? gate.kl_beta * k.loss : 0.0f, pays ? gate.kl_beta * k.grad : 0.0f};
      grad += weight * penalty.grad;
      totals.penalty += double(weight * penalty.loss);
      penalty.loss *= factor;
    }
    tile.sums[kS] += token.s;
    tile.sums[kSSquare] += token.s * token.s;
    tile.sums[kK3] += k3(token.s);
  }
  if (gate.args.token_loss && inputs.group.has(i)) {
    gate.args.token_loss[inputs.group.token + i] = (token.selected ? unweighted() : 0.0f) + penalty.loss;
  }

  const float deviation = fminf(ratio, exp(kStatisticSaturation)) - 1.0f;  // centred: what is summed stays small
  tile.sums[kX] += token.x;
  tile.sums[kXSquare] += token.x * token.x;
  tile.sums[kDeviation] += deviation;
  tile.sums[kDeviationSquare] += deviation * deviation;
  totals.smallest = token.valid ? fminf(totals.smallest, token.x) : totals.smallest;
  totals.largest = token.valid ? fmaxf(totals.largest, token.x) : totals.largest;
  const bool below = outcome.below && token.selected, above = outcome.above && token.selected;
  tile.count(kValid, token.valid);
  tile.count(kChosen, token.selected);
  tile.count(kHighPositive, above && !token.negative);
  tile.count(kLowPositive, below && !token.negative);
  tile.count(kLowNegative, below && token.negative);
  tile.count(kHighNegative, above && token.negative);
  tile.count(kNan, token.nan);
  tile.count(kInfinite, token.infinite || token.reference_infinite);
  tile.count(kBad, token.bad);
  if constexpr (EXTRAS) {
    const bool counted = token.valid && gate.args.entropy && fabsf(inputs.entropy[i]) <= FLT_MAX;
    tile.sums[kEntropySum] += counted ? inputs.entropy[i] : 0.0f;
    tile.count(kWithEntropy, counted);
  }
  return grad;
}

// A row of several tiles is counted by the first that meets a valid token.
__device__ __forceinline__ void count_row(const TileTotals& tile, int* seen, HPO_SHARED_POINTER(int) events) {
  if (__any_sync(kFullWarp, tile.counts[0] != 0) && lane() == 0) {
    if (atomicExch(seen, 1) == 0) atomicAdd(&events[kRows], 1);
  }
}

// One block's share of loss and metrics, and, by the block that is done last, the whole.
__device__ __forceinline__ void finish_block(const Gate& gate, const Totals& totals, HPO_SHARED_POINTER(double) warps,
                                             HPO_SHARED_POINTER(int) events, double* partials, unsigned* ticket) {
  totals.store(warps + warp_in_block() * kMetrics);
  __syncthreads();
  if (threadIdx.x < kMetrics) {
    const int slot = int(threadIdx.x);
    partials[int64_t(blockIdx.x) * kMetrics + slot] = block_total(slot, warps, events);
  }
  if (last_block(ticket)) finish(partials, gate.args.loss, gate.args.metrics);
}

}  // namespace hpo
