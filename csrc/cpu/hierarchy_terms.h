// Tokens of a gate that asks for more than a clip and A e^z (see TokenTerm): any head, a pre-gate, slopes and weights beyond
// the bounds, a penalty on the token's own log-ratio. One loop for all of it.
#pragma once
#include "gates_call.h"
#include "hpo/hierarchy.h"
#include "hpo/terms.h"

namespace hpo::HPO_ISA {

// Tokens of one tile, all in one leaf.
struct TokenTerms {
  alignas(64) float low[kPadded];  // bounds of the token gate, log space, where tokens have their own
  alignas(64) float high[kPadded];
  alignas(64) float past_token[2][kPadded];
  alignas(64) float by_sign[2][kPadded];
  alignas(64) float entering[kPadded];  // log-ratios behind the pre-gate, or the part of them that is aggregated
  alignas(64) float kept[kPadded];      // weight * token weight
  alignas(64) float target[kPadded];
  alignas(64) float logp[kPadded];      // 0 where the log-ratio is infinite
  alignas(64) float slope[kPadded];     // d loss / d z
  bool flows;  // past_token is not 0 everywhere
};

struct TermPlan {
  const TokenTerm& term;
  const TermNumbers numbers;
  Head head;
  bool split, drop;
  float keep;  // 0 where the finest level takes the place of the token's own slope
  bool pre_gated, mean_exp;

  TermPlan(const Call& call, const Hierarchy& hierarchy)
      : term(hierarchy.term),
        numbers(hierarchy.term),
        head(call.structure.head),
        split(hierarchy.split),
        drop(call.structure.token == TokenGate::drop),
        keep(hierarchy.depth > 0 && hierarchy.levels[0].routing == Routing::self ? 0.0f : 1.0f),
        pre_gated(pre_gates(hierarchy.term, head)),
        mean_exp(adds_exponentials(hierarchy)) {}

  // From the gradient of what is aggregated to that of the token's log-ratio.
  float through_pre_gate(const Tile& tile, int i, float flow) const {
    if (mean_exp) return flow * mean_exp_slope(split, tile.x[i]);
    if (!pre_gated) return flow;
    const float slope = pre_gate_slope(numbers, head, tile.kind[i] == kNegative, tile.x[i]);
    return keep_if(slope != 0.0f, slope * flow);
  }
};

// The log-ratios as they enter the gates.
inline const float* load_entering(const TermPlan& plan, const Tile& tile, int n, TokenTerms& terms) {
  if (!plan.pre_gated) return tile.x;
  for (int i = 0; i < n; ++i) terms.entering[i] = pre_gate(plan.numbers, plan.head, tile.kind[i] == kNegative, tile.x[i]);
  return terms.entering;
}

// The part of them that is aggregated.
inline const float* load_aggregated(const TermPlan& plan, const Tile& tile, int n, TokenTerms& terms) {
  if (!plan.mean_exp) return load_entering(plan, tile, n, terms);
  for (int i = 0; i < n; ++i) terms.entering[i] = mean_exp_part(plan.split, tile.x[i]);
  return terms.entering;
}

// Loads the inputs that are not in the tile; tokens behind its n are absent.
inline void load_terms(const Call& call, int64_t first, int n, int64_t row, float weight, Tile& tile, TokenTerms& terms) {
  const PolicyLossArgs& args = call.args;
  for (int i = 0; i < n; ++i) terms.kept[i] = args.token_weight ? weight * args.token_weight[first + i] : weight;
  for (int i = 0; i < n; ++i) terms.logp[i] = tile.infinite[i] ? 0.0f : args.logp[first + i];
  if (args.target) {
    for (int i = 0; i < n; ++i) terms.target[i] = args.target_per_token ? args.target[first + i] : args.target[row];
  }
  if (n % kLanes == 0) return;
  for (int i = n; i < n + kLanes; ++i) {
    tile.chosen[i] = kAbsent;
    tile.x[i] = terms.entering[i] = terms.kept[i] = terms.logp[i] = terms.target[i] = terms.low[i] = terms.high[i] = 0.0f;
  }
}

using TermLoop = GateCounts (*)(const TermPlan&, const LeafGate&, const Tile&, const float* entering, const float* coefficient,
                                TokenTerms&, float* loss, float* grad, int n);

// Whole vectors: loss and grad have room behind n.
template <Head kHead>
GateCounts term_loop(const TermPlan& plan, const LeafGate& leaf, const Tile& tile, const float* entering_logs,
                     const float* coefficient, TokenTerms& terms, float* loss, float* grad, int n) {
  const TermNumbers& numbers = plan.numbers;
  const Floats most = all<Floats>(saturation_of(kHead));
  Ints chosen = {}, below = {}, above = {}, flows = {};
  for (int i = 0; i < n; i += kWidth) {
    const Ints kind = load_lanes<Ints>(tile.chosen + i), present = kind != kAbsent, negative = kind == kNegative;
    const Floats entering = load_lanes<Floats>(entering_logs + i), x = load_lanes<Floats>(tile.x + i);
    const GatedTokenNumber<Floats> token =
        gate_token<Floats>(leaf, plan.split, plan.drop, plan.keep, negative, entering, load_lanes<Floats>(terms.low + i),
                           load_lanes<Floats>(terms.high + i), by_sign<Floats>(negative, numbers.slope_low),
                           by_sign<Floats>(negative, numbers.slope_high));
    const Floats one = all<Floats>(1.0f);
    const Floats outside_low = by_sign<Floats>(negative, numbers.weight_low);
    const Floats outside_high = by_sign<Floats>(negative, numbers.weight_high);
    const Floats factor = token.above ? outside_high : (token.below ? outside_low : one);
    const HeadTerm<Floats> term =
        head_term<Floats>(kHead, negative, by_sign<Floats>(negative, numbers.head), clamp(token.z, -most, most), x,
                          load_lanes<Floats>(coefficient + i) * factor, load_lanes<Floats>(terms.kept + i) * factor,
                          load_lanes<Floats>(terms.logp + i), load_lanes<Floats>(terms.target + i));
    const Floats slope = keep_if(present, term.slope);
    const Floats through = keep_if(entering == x, slope * token.slope);
    store_lanes(keep_if(present, term.loss), loss + i);
    store_lanes(keep_if(present, through + term.direct), grad + i);
    store_lanes(slope, terms.slope + i);
    const Floats rising = slope * token.rising_step, falling = slope * token.falling_step;
    store_lanes(rising, terms.past_token[0] + i);
    store_lanes(falling, terms.past_token[1] + i);
    flows |= (rising != 0.0f) | (falling != 0.0f);
    chosen += kind;
    below = add_where(token.below, kind, below);
    above = add_where(token.above, kind, above);
  }
  GateCounts found;
  int32_t some_flow = 0;
  for (int lane = 0; lane < kWidth; ++lane) {
    found.chosen += chosen[lane], found.below += below[lane], found.above += above[lane];
    some_flow |= flows[lane];
  }
  terms.flows = some_flow != 0;
  return found;
}

inline TermLoop pick_term_loop(Head head) {
  switch (head) {
    case Head::score: return term_loop<Head::score>;
    case Head::log: return term_loop<Head::log>;
    case Head::mirror: return term_loop<Head::mirror>;
    case Head::sigmoid: return term_loop<Head::sigmoid>;
    case Head::simple: return term_loop<Head::simple>;
    case Head::target: return term_loop<Head::target>;
    case Head::negative_aware: return term_loop<Head::negative_aware>;
    case Head::flipped: return term_loop<Head::flipped>;
    case Head::censored: return term_loop<Head::censored>;
    default: return term_loop<Head::linear>;
  }
}

// The penalty on the token's own log-ratio, which every valid token pays that is not left out.
inline void add_own_penalty(const Call& call, const TermPlan& plan, int64_t first, int n, int64_t row, const Tile& tile,
                            float* grad, float* token_loss, Partial& partial) {
  const PolicyLossArgs& args = call.args;
  const float coefficient = plan.numbers.penalty_coefficient;
  const float weight = finite(args.weights[row]) ? args.weights[row] : 0.0f;
  alignas(64) float value[kPadded];
  for (int i = 0; i < n; ++i) {
    const bool pays = tile.kind[i] != kAbsent && (!args.penalty_mask || args.penalty_mask[first + i] != 0);
    const OwnPenalty penalty = own_penalty(plan.term.penalty, tile.x[i]);
    if (token_loss) token_loss[i] += keep_if(pays, coefficient * penalty.value);
    value[i] = keep_if(pays, weight * (coefficient * penalty.value));
    grad[i] += keep_if(pays && tile.infinite[i] == 0, weight * (coefficient * penalty.slope));
  }
  add_terms(value, n, partial.sums[kPenaltySum]);
}

}  // namespace hpo::HPO_ISA
