// Tokens of a gate that asks for more than a clip and A e^z (see TokenTerm): any head, a pre-gate, slopes and weights beyond
// the bounds, a penalty on the token's own log-ratio. One loop for all of it.
#pragma once
#include "gates_token_inputs.h"
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
  bool to_self;  // some level adds to the slope of a token's own path

  TermPlan(const Call& call, const Hierarchy& hierarchy)
      : term(hierarchy.term),
        numbers(hierarchy.term),
        head(call.structure.head),
        split(hierarchy.split),
        drop(call.structure.token == TokenGate::drop),
        keep(hierarchy.depth > 0 && hierarchy.levels[0].routing == Routing::self ? 0.0f : 1.0f),
        pre_gated(pre_gates(hierarchy.term, head)),
        mean_exp(adds_exponentials(hierarchy)),
        to_self() {
    for (int k = 0; k < hierarchy.depth; ++k) to_self |= hierarchy.levels[k].routing == Routing::self;
  }

  // The pre-gate is a clip.
  bool clips() const { return pre_gated && head != Head::censored && !mean_exp; }

  // The pre-gate is the deviation of the ratio from 1.
  bool deviates() const { return pre_gated && head == Head::censored && !mean_exp; }

  PreClip clip() const {
    if (!clips()) return {{-INFINITY, -INFINITY}, {INFINITY, INFINITY}};
    return {{numbers.pre_low[0], numbers.pre_low[1]}, {numbers.pre_high[0], numbers.pre_high[1]}};
  }

  // Without a gate of their own, tokens under the same levels have the same term.
  bool one_for_all() const {
    bool alike = head == Head::linear && !mean_exp && (!term.present || term.penalty == Penalty::none);
    for (int sign = 0; sign < 2; ++sign) {
      alike &= !term.present || (numbers.weight_low[sign] == 1.0f && numbers.weight_high[sign] == 1.0f);
    }
    return alike;
  }

  // Whether the loops of gates without a term take these tokens: where they drop their residual, a pre-gate changes nothing
  // but the aggregates.
  bool is_plain() const { return !term.present || (one_for_all() && drop && !to_self); }

  // Whether a token under no level keeps its log-ratio, whatever it is.
  bool passes(const float (&low)[2], const float (&high)[2]) const {
    bool all_open = !drop && !split && !pre_gated;
    for (int sign = 0; sign < 2; ++sign) all_open &= low[sign] == -INFINITY && high[sign] == INFINITY;
    return all_open;
  }

  // The gradient of the token's log-ratio from that of the number that it adds to its segments.
  HPO_INLINE Floats through_pre_gate(Ints negative, Floats x, Floats flow) const {
    if (mean_exp) return flow * mean_exp_slope(split, x);
    if (!pre_gated) return flow;
    const Floats slope = pre_gate_slope<Floats>(numbers, head, negative, x);
    return keep_if(slope != 0.0f, slope * flow);
  }
};

// The log-ratios as they enter the gates, in whole vectors.
inline const float* load_entering(const TermPlan& plan, const Tile& tile, int n, TokenTerms& terms) {
  if (!plan.pre_gated) return tile.x;
  for (int i = 0; i < n; i += kWidth) {
    const Ints negative = load_lanes<Ints>(tile.kind + i) == kNegative;
    store_lanes(pre_gate<Floats>(plan.numbers, plan.head, negative, load_lanes<Floats>(tile.x + i)), terms.entering + i);
  }
  return terms.entering;
}

// The numbers that tokens add to their segments.
inline const float* load_aggregated(const TermPlan& plan, const Tile& tile, int n, TokenTerms& terms) {
  if (!plan.mean_exp) return load_entering(plan, tile, n, terms);
  for (int i = 0; i < n; i += kWidth) {
    store_lanes(mean_exp_part(plan.split, load_lanes<Floats>(tile.x + i)), terms.entering + i);
  }
  return terms.entering;
}

// Loads the inputs that are not in the tile; tokens behind its n are absent.
inline void load_terms(const Call& call, int64_t first, int n, int64_t row, float weight, Tile& tile, TokenTerms& terms) {
  const PolicyLossArgs& args = call.args;
  const float* weights = token_weights(args, first, tile);
  if (weights) {  // decided here, because a vector's load from null is slow even where it loads no lane
    for (int i = 0; i < n; ++i) terms.kept[i] = weight * weights[i];
  } else {
    std::fill_n(terms.kept, n, weight);
  }
  for (int i = 0; i < n; ++i) terms.logp[i] = keep_if(tile.infinite[i] == 0, args.logp[first + i]);
  if (args.target) {
    for (int i = 0; i < n; ++i) terms.target[i] = args.target_per_token ? args.target[first + i] : args.target[row];
  }
  if (n % kLanes == 0) return;
  for (int i = n; i < n + kLanes; ++i) {
    tile.chosen[i] = kAbsent;
    tile.x[i] = terms.entering[i] = terms.kept[i] = terms.logp[i] = terms.target[i] = terms.low[i] = terms.high[i] = 0.0f;
  }
}

// The tokens of a vector under the gates of their leaf.
struct GatedTokens {
  GatedTokenNumber<Floats> token;
  Floats factor;  // the weight of a token beyond a bound, else 1

  HPO_INLINE GatedTokens(const TermPlan& plan, const LeafGate& leaf, Ints negative, Floats entering, Floats low, Floats high) {
    const TermNumbers& numbers = plan.numbers;
    token = gate_token<Floats>(leaf, plan.split, plan.drop, plan.keep, negative, entering, low, high,
                               by_sign<Floats>(negative, numbers.slope_low), by_sign<Floats>(negative, numbers.slope_high));
    const Floats outside_low = by_sign<Floats>(negative, numbers.weight_low);
    const Floats outside_high = by_sign<Floats>(negative, numbers.weight_high);
    factor = token.above ? outside_high : (token.below ? outside_low : all<Floats>(1.0f));
  }

  // The same, to the bit, where TermPlan::passes holds.
  HPO_INLINE explicit GatedTokens(Floats x)
      : token{x, all<Floats>(1.0f), Floats{}, Floats{}, Ints{}, Ints{}}, factor(all<Floats>(1.0f)) {}
};

// The term of the tokens of a vector.
struct TermOfTokens {
  const GatedTokenNumber<Floats> token;
  HeadTerm<Floats> term;

  template <class RatioOf>
  HPO_INLINE TermOfTokens(Head head, const TermPlan& plan, const GatedTokens& gated, Ints negative, Floats x,
                          Floats coefficient, Floats kept, Floats logp, Floats target, const RatioOf& ratio_of)
      : token(gated.token) {
    const Floats most = all<Floats>(saturation_of(head)), number = by_sign<Floats>(negative, plan.numbers.head);
    term = head_term<Floats>(head, negative, number, clamp(token.z, -most, most), x, coefficient * gated.factor,
                             kept * gated.factor, logp, target, ratio_of);
  }

  // The gradient of the token's own path; `slope`: term.slope where it is present.
  HPO_INLINE Floats gradient(Floats slope, Floats entering, Floats x) const {
    return keep_if(entering == x, slope * token.slope) + term.direct;
  }
};

// Sums of kinds over the vectors of one leaf, and whether any of its tokens has a flow past its gate.
struct LeafCounts {
  Ints chosen = {}, below = {}, above = {}, flows = {};

  HPO_INLINE void add(Ints kind, const GatedTokenNumber<Floats>& token) {
    chosen += kind;
    below = add_where(token.below, kind, below);
    above = add_where(token.above, kind, above);
  }

  GateCounts finish(TokenTerms& terms) const {
    terms.flows = any(present_lanes(flows));
    return {sum_lanes(chosen), sum_lanes(below), sum_lanes(above)};
  }
};

// The terms of the tokens of one leaf, vector by vector.
struct LeafTerms {
  const TermPlan& plan;
  const LeafGate& leaf;
  TokenTerms& terms;
  float *loss, *grad;
  LeafCounts counts = {};

  template <bool kWhole, class RatioOf>
  HPO_INLINE void step(Head head, int i, Mask own, Ints kind, Floats entering, Floats x, Floats low, Floats high,
                       Floats coefficient, Floats kept, Floats logp, Floats target, const RatioOf& ratio_of) {
    const Ints present = kind != kAbsent, negative = kind == kNegative;
    const GatedTokens gated(plan, leaf, negative, entering, low, high);
    const TermOfTokens tokens(head, plan, gated, negative, x, coefficient, kept, logp, target, ratio_of);
    const GatedTokenNumber<Floats>& token = tokens.token;
    const Floats slope = keep_if(present, tokens.term.slope);
    store_lanes(keep_if(present, tokens.term.loss), loss + i);
    store_own<kWhole>(own, keep_if(present, tokens.gradient(slope, entering, x)), grad + i);
    store_lanes(slope, terms.slope + i);
    const Floats rising = slope * token.rising_step, falling = slope * token.falling_step;
    store_lanes(rising, terms.past_token[0] + i);
    store_lanes(falling, terms.past_token[1] + i);
    counts.flows |= (rising != 0.0f) | (falling != 0.0f);
    counts.add(kind, token);
  }
};

// Whole vectors: loss and grad have room behind n. The head is a branch that always goes the same way.
inline GateCounts term_loop(const TermPlan& plan, const LeafGate& leaf, const Tile& tile, const float* entering,
                            const float* coefficient, TokenTerms& terms, float* loss, float* grad, int n) {
  LeafTerms each = {plan, leaf, terms, loss, grad};
  for (int i = 0; i < n; i += kWidth) {
    const auto load = [=](const float* from) HPO_INSIDE { return load_lanes<Floats>(from + i); };
    each.step<true>(plan.head, i, all_lanes(), load_lanes<Ints>(tile.chosen + i), load(entering), load(tile.x), load(terms.low),
                    load(terms.high), load(coefficient), load(terms.kept), load(terms.logp), load(terms.target), Exponential{});
  }
  return each.counts.finish(terms);
}

struct TokenBounds {
  float low[2], high[2];  // of the token gate, by sign of the advantage
};

// The loop over a fast-path tile, whose tokens have no target and are read where they are.
using FastLoop = GateCounts (*)(const TermPlan&, const LeafGate&, const TokenBounds&, const PolicyLossArgs&, int64_t first,
                                int64_t row, const float* weights, TokenTerms&, float* loss, float* grad, int n);

// The signs of the advantages of a vector of tokens.
struct SignedTokens {
  Ints negative, kind;
  Floats advantage, low, high;
};

// The advantages of a fast-path tile; kOfTokens: each token has its own.
template <bool kOfTokens>
struct FastAdvantages {
  const float* advantages;
  const TokenBounds& bounds;
  const float of_row;

  FastAdvantages(const PolicyLossArgs& args, int64_t first, int64_t row, const TokenBounds& bounds)
      : advantages(args.advantages + first), bounds(bounds), of_row(kOfTokens ? 1.0f : args.advantages[row]) {}

  template <bool kWhole>
  HPO_INLINE SignedTokens at(int i, Mask own) const {
    const Floats advantage = kOfTokens ? load_own<kWhole>(own, advantages + i) : all<Floats>(of_row);
    const Ints negative = kOfTokens ? Ints(advantage < 0.0f) : Ints{} - int32_t(of_row < 0.0f);
    const Ints kind = negative ? Ints{} + kNegative : Ints{} + kPositive;
    return {negative, kind, advantage, by_sign<Floats>(negative, bounds.low), by_sign<Floats>(negative, bounds.high)};
  }
};

// kDeviates: TermPlan::deviates holds.
template <bool kDeviates, bool kOfTokens>
GateCounts fast_term_loop(const TermPlan& plan, const LeafGate& leaf, const TokenBounds& bounds, const PolicyLossArgs& args,
                          int64_t first, int64_t row, const float* weights, TokenTerms& terms, float* loss, float* grad,
                          int n) {
  const FastSource source(args, first);
  const FastAdvantages<kOfTokens> advantages(args, first, row, bounds);
  const Floats weight = all<Floats>(args.weights[row]);
  LeafTerms each = {plan, leaf, terms, loss, grad};
  for_each_vector(0, n, [&](int i, Mask own, auto whole) HPO_INSIDE {
    constexpr bool kWhole = decltype(whole)::value;
    Mask chosen = args.mask ? present_own<kWhole>(own, args.mask + first + i) : own;
    const SignedTokens tokens = advantages.template at<kWhole>(i, own);
    Floats coefficient = weight * tokens.advantage, kept = weight;
    if (weights) {
      const Floats factor = load_own<kWhole>(own, weights + i);
      chosen = but_not(own, is_nan(factor)), coefficient *= factor, kept *= factor;
    }
    const Floats logp = load_own<kWhole>(own, source.logp + i);
    const Floats x = difference(chosen, logp, load_own<kWhole>(own, source.old_logp + i));
    const auto step = [&](Head head, Floats entering, const auto& ratio_of) HPO_INSIDE {
      each.template step<kWhole>(head, i, own, keep_if(chosen, tokens.kind), entering, x, tokens.low, tokens.high, coefficient,
                                 kept, logp, Floats{}, ratio_of);
    };
    if constexpr (kDeviates) {
      const Floats ratio = exp_of_number(x);
      step(Head::censored, deviation_of(x, ratio).size, [=](Floats) HPO_INSIDE { return ratio; });
    } else {
      step(plan.head, plan.pre_gated ? pre_gate<Floats>(plan.numbers, plan.head, tokens.negative, x) : x, Exponential{});
    }
  });
  return each.counts.finish(terms);
}

template <bool kOfTokens>
FastLoop pick_fast_term_loop(const TermPlan& plan) {
  return plan.deviates() ? fast_term_loop<true, kOfTokens> : fast_term_loop<false, kOfTokens>;
}

// The gate of a fast-path tile under no level, for sweep_token_inputs. kPasses: TermPlan::passes holds.
template <bool kPasses>
struct FastTermGate {
  static constexpr bool weighs = true;
  const Head head;
  const TermPlan& plan;
  const float* logp;
  const float (&low)[2], (&high)[2];  // by sign of the advantage
  const Penalty penalty = plan.term.penalty;
  const float penalty_coefficient = plan.numbers.penalty_coefficient;
  Ints below[kParts] = {}, above[kParts] = {};

  // Whether targets have a meaning.
  HPO_INLINE Mask defined(const TermInputs& inputs) const {
    if (head != Head::target && head != Head::negative_aware) return all_lanes();
    const Floats target = inputs.target;
    const Mask number = both(at_least(target, all<Floats>(-FLT_MAX)), at_least(all<Floats>(FLT_MAX), target));
    if (head == Head::target) return number;
    const Mask rate = both(at_least(target, Floats{}), less(target, all<Floats>(1.0f)));
    return either(both(number, present_lanes(inputs.kind ^ kNegative)), rate);
  }

  template <class Vector>
  HPO_INLINE TermNumber<Floats> term(const Vector& vector, const TermInputs& inputs) {
    const Ints negative = inputs.kind == kNegative;
    const Floats x = vector.x;
    const Floats entering = !kPasses && plan.pre_gated ? pre_gate<Floats>(plan.numbers, head, negative, x) : x;
    const auto ratio_of = [&](Floats z) HPO_INSIDE {  // mostly nothing has changed x
      return any(both(vector.present, present_lanes(Ints(z != x)))) ? exp(z) : vector.ratio;
    };
    const GatedTokens gated = kPasses ? GatedTokens(x)
                                      : GatedTokens(plan, LeafGate{}, negative, entering, by_sign<Floats>(negative, low),
                                                    by_sign<Floats>(negative, high));
    const TermOfTokens tokens(head, plan, gated, negative, x, inputs.coefficient, inputs.kept, vector.load(logp), inputs.target,
                              ratio_of);
    const Mask chosen = vector.present;
    if (!kPasses) {
      below[vector.part] = add_where(chosen, inputs.kind & gated.token.below, below[vector.part]);
      above[vector.part] = add_where(chosen, inputs.kind & gated.token.above, above[vector.part]);
    }
    const Floats slope = keep_if(chosen, tokens.term.slope);
    return {tokens.term.loss, keep_if(chosen, tokens.gradient(slope, entering, x))};
  }

  void count(GateCounts& counts) const {
    for (int part = 0; part < kParts; ++part) counts.below += sum_lanes(below[part]), counts.above += sum_lanes(above[part]);
  }
};

// A fast-path tile of rows under no level. False: the fast path does not hold, and nothing is counted.
inline bool run_terms(const Call& call, const TermPlan& plan, const float (&low)[2], const float (&high)[2], int64_t first,
                      int n, const Segments& segments, Tile& tile, uint8_t* seen, Partial& partial) {
  const FastTermGate<true> open = {call.structure.head, plan, call.args.logp + first, low, high};
  const FastTermGate<false> gate = {call.structure.head, plan, call.args.logp + first, low, high};
  const OptionalInputs optional = optional_inputs(call.args);
  if (plan.passes(low, high)) {
    if (optional == OptionalInputs::nothing)
      return sweep_token_inputs<OptionalInputs::nothing>(call, first, n, segments, tile, seen, partial, open);
    if (optional == OptionalInputs::targets)
      return sweep_token_inputs<OptionalInputs::targets>(call, first, n, segments, tile, seen, partial, open);
  }
  return optional == OptionalInputs::nothing
             ? sweep_token_inputs<OptionalInputs::nothing>(call, first, n, segments, tile, seen, partial, gate)
             : sweep_token_inputs<OptionalInputs::anything>(call, first, n, segments, tile, seen, partial, gate);
}

// The penalty on the token's own log-ratio. Every valid token pays it that the penalty mask does not leave out.
inline void add_own_penalty(const Call& call, const TermPlan& plan, int64_t first, int n, int64_t row, const Tile& tile,
                            float* grad, float* token_loss, Partial& partial) {
  const PolicyLossArgs& args = call.args;
  const float coefficient = plan.numbers.penalty_coefficient;
  const float weight = finite(args.weights[row]) ? args.weights[row] : 0.0f;
  alignas(64) float value[kPadded];
  for (int i = 0; i < n; ++i) {
    const bool pays = tile.kind[i] != kAbsent && (!args.penalty_mask || args.penalty_mask[first + i] != 0);
    const OwnPenalty<float> penalty = own_penalty(plan.term.penalty, tile.x[i], Exponential{});
    if (token_loss) token_loss[i] += keep_if(pays, coefficient * penalty.value);
    value[i] = keep_if(pays, weight * (coefficient * penalty.value));
    grad[i] += keep_if(pays && tile.infinite[i] == 0, weight * (coefficient * penalty.slope));
  }
  add_terms(value, n, partial.sums[kPenaltySum]);
}

}  // namespace hpo::HPO_ISA
