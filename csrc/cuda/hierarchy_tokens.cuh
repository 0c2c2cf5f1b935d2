// A token under the gates of hierarchy.cu, whose levels have made a LeafGate for it.
#pragma once
#include "gates_sweep.cuh"
#include "hpo/hierarchy.h"
#include "hpo/terms.h"

namespace hpo {

// The inputs of the tokens of a call.
struct TokenCall {
  Gate gate;
  Hierarchy hierarchy;
  TermNumbers term;
  float token_low[2], token_high[2];  // of the token gate, log space
  const float *low, *high;  // per token, where a clip has them
  float keep;  // 0: the finest level takes the place of the token's own slope

  TokenCall(const PolicyLossArgs& args, const GateStructure& structure, const GateNumbers& numbers, const Hierarchy& hierarchy)
      : gate(args, structure, numbers), hierarchy(hierarchy), term(hierarchy.term) {
    const bool clips = structure.token == TokenGate::clip;
    for (int sign = 0; sign < 2; ++sign) {
      token_low[sign] = clips ? float(hierarchy.token_low[sign]) : -INFINITY;
      token_high[sign] = clips ? float(hierarchy.token_high[sign]) : INFINITY;
    }
    low = clips ? args.low : nullptr;
    high = clips ? args.high : nullptr;
    keep = hierarchy.depth > 0 && hierarchy.levels[0].routing == Routing::self ? 0.0f : 1.0f;
  }

  // The log-ratio of a token as it enters the gates.
  template <bool PRE_GATED>
  __device__ __forceinline__ float entering(const Token& token) const {
    return PRE_GATED ? pre_gate(term, gate.structure.head, token.negative, token.x) : token.x;
  }
};

// The kind of the gate of a call, for which the sweep is compiled.
enum GateKind {
  kPlainGate,    // levels of one channel, a clip of the residual of tokens
  kSettledGate,  // tokens drop their residual, and their gradient through aggregates is known before the sweep
  kTermGate,     // with a term, or a log mean exp
  kSplitGate,    // as kPlainGate, of two channels
};

// The gated token, whether it is selected or not.
struct PolicyTerm {
  float loss;  // 0 for an infinite log-ratio under the score head
  float slope;  // d loss / d z
  float grad;  // d loss / d logp, if the log-ratio is finite
};

template <bool SOUND>
__device__ __forceinline__ PolicyTerm plain_term(const Gate& gate, const GatedToken& gated, const Token& token, float a,
                                                 float logp) {
  const float value = token_value(a, gated.z);
  if (SOUND) return {value, value, value * (gate.structure.head == Head::score ? 1.0f : gated.slope)};  // score() does the rest
  if (gate.structure.head == Head::score) return {token.infinite ? 0.0f : scored(value * logp), value, value};
  return {value, value, value * gated.slope};
}

// `passes`: the pre-gate did not clip the token.
__device__ __forceinline__ PolicyTerm general_term(const TokenCall& call, const GatedToken& gated, const Token& token,
                                                   bool passes, float a, float kept, float logp, float target) {
  const TermNumbers& numbers = call.term;
  const Head head = call.gate.structure.head;
  const bool negative = token.negative;
  const float most = saturation_of(head);
  const float factor = gated.above   ? by_sign(numbers.weight_high, negative)
                       : gated.below ? by_sign(numbers.weight_low, negative)
                                     : 1.0f;
  const HeadTerm<float> term = head_term(head, negative, by_sign(numbers.head, negative), clamp(gated.z, -most, most), token.x,
                                         a * factor, kept * factor, token.infinite ? 0.0f : logp, target, Exponential{});
  return {token.infinite && head == Head::score ? 0.0f : term.loss, term.slope,
          (passes ? term.slope * gated.slope : 0.0f) + term.direct};
}

// An input without a meaning counts as an advantage that is not finite.
__device__ __forceinline__ void leave_out(Token& token) {
  token.bad = token.valid;
  token.selected = false;
  token.a = token.unweighted = 0.0f;
}

// The target of a token; a target without a meaning leaves the token out.
template <int WIDTH>
__device__ __forceinline__ float classify_target(const Gate& gate, int row, const Inputs<WIDTH>& inputs, int i, Token& token) {
  const PolicyLossArgs& args = gate.args;
  if (!args.target) return 0.0f;
  const float target = args.target_per_token ? inputs.one(args.target, i) : args.target[row];
  if (is_target(gate.structure.head, token.negative, target)) return target;
  leave_out(token);
  return 0.0f;
}

// The penalty on the token's own log-ratio: counts it and returns its gradient.
template <int WIDTH>
__device__ __forceinline__ float pay_own_penalty(const TokenCall& call, const RowTerms& row, const Inputs<WIDTH>& inputs, int i,
                                                 const Token& token, Shares<WIDTH>& shares) {
  const PolicyLossArgs& args = call.gate.args;
  const Penalty penalty = call.hierarchy.term.penalty;
  if (penalty == Penalty::none || !token.valid) return 0.0f;
  const int64_t at = inputs.vector.token + i;
  if (args.penalty_mask && !args.penalty_mask[at]) return 0.0f;
  const OwnPenalty<float> own = own_penalty(penalty, token.x, Exponential{});
  const float coefficient = call.term.penalty_coefficient, value = coefficient * own.value;
  shares.penalty[i] += row.penalty_weight() * value;
  if (args.token_loss) args.token_loss[at] += value;
  return token.infinite ? 0.0f : row.penalty_weight() * (coefficient * own.slope);
}

// One token of a leaf: its gradient. `put_flow` takes the token's gradients in aggregates; `settled`: its gradient through
// them, where that is known.
template <bool SOUND, bool REFERENCE, int EXTRAS, int GATE, int WIDTH, class PutFlow>
__device__ __forceinline__ float sweep_token_of_leaf(const TokenCall& call, const LeafGate& leaf, float settled, int row_index,
                                                     const RowTerms& row, const Inputs<WIDTH>& inputs, int i,
                                                     const PutFlow& put_flow, Shares<WIDTH>& shares, TileTotals& tile,
                                                     Totals& totals) {
  constexpr bool TERMS = GATE == kTermGate;
  const Gate& gate = call.gate;
  Token token = classify<SOUND, REFERENCE, EXTRAS, false>(gate, row, inputs, i);
  const float target = TERMS ? classify_target(gate, row_index, inputs, i, token) : 0.0f;
  const bool drop = GATE == kSettledGate || gate.structure.token == TokenGate::drop;
  const bool split = GATE == kSplitGate || (GATE != kPlainGate && call.hierarchy.split);
  float low = by_sign(call.token_low, token.negative), high = by_sign(call.token_high, token.negative);
  if constexpr (EXTRAS != kNoExtras && GATE != kSettledGate) {
    if (call.low) {
      const float own = inputs.low[i];
      if (!is_low_bound(own)) leave_out(token);
      if (by_sign(gate.structure.low_driven, token.negative)) low = log_bound(own);
    }
    if (call.high) {
      const float own = inputs.high[i];
      if (!is_high_bound(own)) leave_out(token);
      if (by_sign(gate.structure.high_driven, token.negative)) high = log_bound(own);
    }
  }
  const float entering = call.entering<TERMS>(token);
  const float slope_low = TERMS ? by_sign(call.term.slope_low, token.negative) : 0.0f;
  const float slope_high = TERMS ? by_sign(call.term.slope_high, token.negative) : 0.0f;
  const GatedToken gated = gate_token(leaf, split, drop, call.keep, token.negative, entering, low, high, slope_low, slope_high);
  const auto term_of = [&](float a, float weight) {
    if constexpr (TERMS) {
      const float kept = EXTRAS ? weight * token.token_weight : weight;
      return general_term(call, gated, token, entering == token.x, a, kept, inputs.logp[i], target);
    } else {
      return plain_term<SOUND>(gate, gated, token, a, inputs.logp[i]);
    }
  };
  const PolicyTerm term = term_of(token.a, row.weight);
  put_flow(token, gated, term);
  float own_grad = token.selected && !token.infinite ? term.grad : 0.0f;
  if (GATE == kSettledGate && settled != 0.0f && token.valid && !token.infinite) own_grad += settled;
  const Outcome outcome = {term.loss, own_grad, gated.below != 0, gated.above != 0};
  const auto unweighted = [&] { return term_of(token.unweighted, 1.0f).loss; };
  const float ratio = SOUND ? exp_of_number(token.x) : exp(token.x);
  const float grad =
      complete_token<SOUND, REFERENCE, EXTRAS>(gate, row, inputs, i, token, ratio, outcome, unweighted, shares, tile, totals);
  return TERMS ? grad + pay_own_penalty(call, row, inputs, i, token, shares) : grad;
}

}  // namespace hpo
