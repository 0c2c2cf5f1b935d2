// A token under the gates of gates.cu: a clip of its own ratio.
#pragma once
#include "gates_sweep.cuh"

namespace hpo {

struct RatioGate {
  Gated value;
  bool below, above;
};

template <int EXTRAS, int WIDTH>
__device__ __forceinline__ RatioGate gate_ratio(const Gate& gate, const Inputs<WIDTH>& inputs, const Token& token, float ratio,
                                                int i) {
  float low = by_sign(gate.token_low, token.negative), high = by_sign(gate.token_high, token.negative);
  if constexpr (EXTRAS) {
    low = gate.args.low && by_sign(gate.structure.low_driven, token.negative) ? inputs.one(gate.args.low, i) : low;
    high = gate.args.high && by_sign(gate.structure.high_driven, token.negative) ? inputs.one(gate.args.high, i) : high;
  }
  const bool drop = gate.structure.token == TokenGate::drop;
  Gated value = clip_ratio(drop ? 1.0f : ratio, low, high);
  value.inside = value.inside && !drop;
  return {value, ratio < low, high < ratio};
}

// One token: its gradient, its loss, and what it adds to the metrics.
template <bool REFERENCE, int EXTRAS, int WIDTH>
__device__ __forceinline__ float sweep_token(const Gate& gate, const RowTerms& row, const Inputs<WIDTH>& inputs, int i,
                                             TileTotals& tile, Totals& totals) {
  const Token token = classify<REFERENCE, EXTRAS>(gate, row, inputs, i);
  const bool score_head = gate.structure.head == Head::score, finite = token.valid && !token.infinite;
  const float ratio = exp(token.x);
  const RatioGate gated = gate_ratio<EXTRAS>(gate, inputs, token, ratio, i);
  const Term term = policy_term(score_head, token.a, gated.value, inputs.logp[i], finite);
  const float grad = token.selected ? term.grad : 0.0f;
  const Outcome outcome = {term.loss, grad, gated.below, gated.above};
  const auto unweighted = [&] { return policy_term(score_head, token.unweighted, gated.value, inputs.logp[i], finite).loss; };
  return complete_token<REFERENCE, EXTRAS>(gate, row, inputs, i, token, ratio, outcome, unweighted, tile, totals);
}

}  // namespace hpo
