// The part of a token's work that is the same under every gate: the penalty, its loss by itself, the metrics.
#pragma once
#include "gates_totals.cuh"

namespace hpo {

// The output of a gate for a token, whether the token counts or not: its share of the loss, d loss / d logp, and the side on
// which the gate clipped it.
struct Outcome {
  float loss, grad;
  bool below, above;
};

// Counts a token and returns its whole gradient. `unweighted()` is its loss without the weight of the row.
template <bool SOUND, bool REFERENCE, int EXTRAS, int WIDTH, class Unweighted>
__device__ __forceinline__ float complete_token(const Gate& gate, const RowTerms& row, const Inputs<WIDTH>& inputs, int i,
                                                const Token& token, float ratio, const Outcome& outcome,
                                                const Unweighted& unweighted, Shares<WIDTH>& shares, TileTotals& tile,
                                                Totals& totals) {
  float grad = outcome.grad;
  shares.loss[i] = token.selected ? outcome.loss : 0.0f;

  Term penalty = {};
  if constexpr (REFERENCE) {
    const float e = SOUND ? exp_of_number(-token.s) : exp(-token.s);
    if (gate.structure.kl != KLEstimator::none) {
      const Term k = kl_term(gate.structure.kl, gate.structure.kl_gradient, token.s, e, token.x, !token.reference_infinite,
                             !token.infinite);
      float weight = row.penalty_weight(), factor = 1.0f;
      bool pays = token.valid;
      if constexpr (EXTRAS) {
        if (gate.args.kl_weight) {
          factor = inputs.template one<SOUND>(gate.args.kl_weight, i);
          pays = pays && pays_penalty(factor);
          factor = pays ? factor : 0.0f;
          weight = penalty_share(weight, factor);
        }
      }
      penalty = {pays ? gate.kl_beta * k.loss : 0.0f, pays ? gate.kl_beta * k.grad : 0.0f};
      grad += weight * penalty.grad;
      shares.penalty[i] = weight * penalty.loss;
      penalty.loss *= factor;
    }
    tile.sums[kS] += token.s;
    tile.sums[kSSquare] = fused(token.s, token.s, tile.sums[kSSquare]);
    tile.sums[kK3] += k3(token.s, e);
  }
  if (!SOUND && gate.args.token_loss && inputs.vector.has(i)) {
    gate.args.token_loss[inputs.vector.token + i] = (token.selected ? unweighted() : 0.0f) + penalty.loss;
  }

  const float deviation = (SOUND ? ratio : fminf(ratio, exp(kStatisticSaturation))) - 1.0f;  // centred: sums stay small
  tile.sums[kX] += token.x;
  tile.sums[kXSquare] = fused(token.x, token.x, tile.sums[kXSquare]);
  tile.sums[kDeviation] += deviation;
  tile.sums[kDeviationSquare] = fused(deviation, deviation, tile.sums[kDeviationSquare]);
  totals.smallest = token.valid ? fminf(totals.smallest, token.x) : totals.smallest;
  totals.largest = token.valid ? fmaxf(totals.largest, token.x) : totals.largest;
  const bool below = outcome.below && token.selected, above = outcome.above && token.selected;
  tile.count(kValid, token.valid);
  tile.count(kChosen, token.selected);
  tile.count_clipped(token.negative, below, above);
  tile.count_event(kNanTokens, token.nan);
  tile.count_event(kInfiniteTokens, token.infinite || token.reference_infinite);
  tile.count_event(kBadAdvantages, token.bad);
  if constexpr (EXTRAS) {
    const bool counted = token.valid & (fabsf(inputs.entropy[i]) <= FLT_MAX);
    tile.sums[kEntropySum] += counted ? inputs.entropy[i] : 0.0f;
    tile.count(kWithEntropy, counted);
  }
  return grad;
}

// Whether a sweep takes the vector at once, without the checks of is_sound for each token. It writes no losses of tokens then.
template <bool REFERENCE, int EXTRAS>
__device__ __forceinline__ bool sweeps_at_once(const Gate& gate, const RowTerms& row, const Inputs<4>& inputs) {
  return !gate.args.token_loss & is_sound<REFERENCE, EXTRAS>(gate, row, inputs);
}

// Multiplies the losses of a vector by logp, under the score head.
__device__ __forceinline__ void score(const Gate& gate, const Inputs<4>& inputs, Shares<4>& shares) {
  if (gate.structure.head != Head::score) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) shares.loss[i] = scored(shares.loss[i] * inputs.logp[i]);
}

// The tokens of any other vector, one after the other: `sweep` returns the gradient of one. A masked one has a loss to write.
template <bool PENALTIES, class Sweep>
__device__ __forceinline__ void for_each_exception(const PolicyLossArgs& args, const Inputs<4>& inputs, float (&grad)[4],
                                                   Totals& totals, const Sweep& sweep) {
  Quarters quarters = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) grad[i] = 0.0f;
#pragma unroll 1
  for (unsigned left = args.token_loss ? inputs.vector.inside() : inputs.unmasked(); left != 0; left &= left - 1) {
    const int i = __ffs(int(left)) - 1;
    Shares<1> shares = {};
    put(grad, i, sweep(inputs.only(i), i, shares));
    quarters.add<PENALTIES>(shares);
  }
  totals.add<PENALTIES>(quarters);
}

// Calls `visit(token, i)` with the valid tokens of a vector.
template <int EXTRAS, class Visit>
__device__ __forceinline__ void for_each_valid(const Gate& gate, const RowTerms& row, const Inputs<4>& inputs,
                                               const Visit& visit) {
  if (is_sound<true, EXTRAS>(gate, row, inputs)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) visit(classify<true, true, EXTRAS, false>(gate, row, inputs, i), i);
  } else {
#pragma unroll 1
    for (unsigned left = inputs.unmasked(); left != 0; left &= left - 1) {
      const int i = __ffs(int(left)) - 1;
      const Token token = classify<false, true, EXTRAS, false>(gate, row, inputs.only(i), 0);
      if (token.valid) visit(token, i);
    }
  }
}

// The same for a vector of one.
template <int EXTRAS, class Visit>
__device__ __forceinline__ void for_each_valid(const Gate& gate, const RowTerms& row, const Inputs<1>& inputs,
                                               const Visit& visit) {
  const Token token = classify<false, true, EXTRAS, false>(gate, row, inputs, 0);
  if (token.valid) visit(token, 0);
}

}  // namespace hpo
