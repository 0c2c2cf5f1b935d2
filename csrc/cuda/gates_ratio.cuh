// A token under the gates of gates.cu: a clip of its own ratio.
#pragma once
#include "gates_sweep.cuh"

namespace hpo {

struct RatioGate {
  float ratio;      // e^g(x)
  bool inside;      // the derivative of g is 1, as on a bound; else it is 0
  bool below, above;
};

template <int EXTRAS, int WIDTH>
__device__ __forceinline__ RatioGate gate_ratio(const Gate& gate, const Inputs<WIDTH>& inputs, const Token& token, float ratio,
                                                int i) {
  float low = by_sign(gate.token_low, token.negative), high = by_sign(gate.token_high, token.negative);
  if constexpr (EXTRAS) {
    low = by_sign(gate.low_driven, token.negative) ? inputs.low[i] : low;
    high = by_sign(gate.high_driven, token.negative) ? inputs.high[i] : high;
  }
  const bool drop = gate.structure.token == TokenGate::drop;  // the bounds are 1 then
  const float clipped = EXTRAS ? clip(ratio, low, high) : clamp_number(ratio, low, high);  // common bounds do not cross
  return {clipped, clipped == ratio && !drop, ratio < low && !drop, ratio > high && !drop};
}

// `finite`: whether the log-ratio is. Without it the derivative is 0, and so is the value of a score head, a multiple of logp.
__device__ __forceinline__ Term policy_term(bool score_head, float a, const RatioGate& gated, float logp, bool finite) {
  const float value = policy_value(a, gated.ratio);
  if (score_head) return {finite ? scored(value * logp) : 0.0f, finite ? value : 0.0f};
  return {value, finite && gated.inside ? value : 0.0f};
}

// One token: its gradient, its loss, and its share of the metrics.
template <bool SOUND, bool REFERENCE, int EXTRAS, int WIDTH>
__device__ __forceinline__ float sweep_token(const Gate& gate, const RowTerms& row, const Inputs<WIDTH>& inputs, int i,
                                             Shares<WIDTH>& shares, TileTotals& tile, Totals& totals) {
  const Token token = classify<SOUND, REFERENCE, EXTRAS>(gate, row, inputs, i);
  const bool score_head = gate.structure.head == Head::score, finite = token.valid && !token.infinite;
  const float ratio = SOUND ? exp_of_number(token.x) : exp(token.x);
  const RatioGate gated = gate_ratio<EXTRAS>(gate, inputs, token, ratio, i);
  Term term;
  if constexpr (SOUND) {
    const float value = policy_value(token.a, gated.ratio);
    term = {value, gated.inside | score_head ? value : 0.0f};  // score() does the rest
  } else {
    term = policy_term(score_head, token.a, gated, inputs.logp[i], finite);
  }
  const Outcome outcome = {term.loss, token.selected ? term.grad : 0.0f, gated.below, gated.above};
  const auto unweighted = [&] { return policy_term(score_head, token.unweighted, gated, inputs.logp[i], finite).loss; };
  return complete_token<SOUND, REFERENCE, EXTRAS>(gate, row, inputs, i, token, ratio, outcome, unweighted, shares, tile,
                                                  totals);
}

// The gradients of a vector's tokens.
template <bool REFERENCE, int EXTRAS>
__device__ __forceinline__ void sweep_tokens(const Gate& gate, const RowTerms& row, const Inputs<4>& inputs, float (&grad)[4],
                                             TileTotals& tile, Totals& totals) {
  if (sweeps_at_once<REFERENCE, EXTRAS>(gate, row, inputs)) {
    Shares<4> shares = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) grad[i] = sweep_token<true, REFERENCE, EXTRAS>(gate, row, inputs, i, shares, tile, totals);
    score(gate, inputs, shares);
    totals.add<REFERENCE>(shares);
  } else {
    for_each_exception<REFERENCE>(gate.args, inputs, grad, totals, [&](const Inputs<1>& token, int, Shares<1>& shares) {
      return sweep_token<false, REFERENCE, EXTRAS>(gate, row, token, 0, shares, tile, totals);
    });
  }
}

// The same for a vector of one.
template <bool REFERENCE, int EXTRAS>
__device__ __forceinline__ void sweep_tokens(const Gate& gate, const RowTerms& row, const Inputs<1>& inputs, float (&grad)[1],
                                             TileTotals& tile, Totals& totals) {
  Shares<1> shares = {};
  Quarters quarters = {};
  grad[0] = sweep_token<false, REFERENCE, EXTRAS>(gate, row, inputs, 0, shares, tile, totals);
  quarters.add<REFERENCE>(shares);
  totals.add<REFERENCE>(quarters);
}

}  // namespace hpo
