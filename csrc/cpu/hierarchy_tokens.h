// The tokens of one leaf, given the gates of the levels above them: loss, gradient of the token's own path, and the gradients
// into aggregates and back from them.
#pragma once
#include "gates_fast_path.h"
#include "hierarchy_fast_path.h"

namespace hpo::HPO_ISA {

// The gates of the tokens of one leaf, vector by vector.
template <bool kScoreHead, bool kSplit, bool kDrop>
struct TokenGates {
  const LeafGate leaf;
  const float keep;
  TokenTerms& terms;
  float *loss, *grad;
  const float ratio[2];  // of all tokens with an advantage of this sign, where they drop their residual
  LeafCounts counts = {};

  TokenGates(const LeafGate& leaf, float keep, TokenTerms& terms, float* loss, float* grad)
      : leaf(leaf),
        keep(keep),
        terms(terms),
        loss(loss),
        grad(grad),
        ratio{-token_value(1.0f, leaf.z[0]), -token_value(1.0f, leaf.z[1])} {}

  template <bool kWhole>
  HPO_INLINE void step(int i, Mask own, Ints kind, Ints negative, Floats x, Floats coefficient, Floats low, Floats high,
                       Floats logp) {
    const Ints present = kind != kAbsent;
    const GatedTokenNumber<Floats> token = gate_token<Floats>(leaf, kSplit, kDrop, keep, negative, x, low, high);
    const Floats value = keep_if(
        present, kDrop ? policy_value(coefficient, by_sign<Floats>(negative, ratio)) : token_value(coefficient, token.z));
    if (kScoreHead) {
      store_lanes(keep_if(present, scored(value * logp)), loss + i);
      store_own<kWhole>(own, value, grad + i);
    } else {
      store_lanes(value, loss + i);
      store_own<kWhole>(own, keep_if(present & (token.slope != 0.0f), value * token.slope), grad + i);  // never -0
      const Floats rising = value * token.rising_step, falling = value * token.falling_step;
      store_lanes(rising, terms.past_token[0] + i);
      if (kSplit) store_lanes(falling, terms.past_token[1] + i);
      counts.flows |= (rising != 0.0f) | (falling != 0.0f);
    }
    counts.add(kind, token);
  }
};

// Whole vectors; tokens beyond the tile are absent.
using TokenLoop = GateCounts (*)(const LeafGate&, float keep, const TokenBounds&, const Tile&, const float* coefficient,
                                 const float* logp, TokenTerms&, float* loss, float* grad, int n);

template <bool kScoreHead, bool kSplit, bool kDrop, bool kDriven>
GateCounts token_loop(const LeafGate& leaf, float keep, const TokenBounds& bounds, const Tile& tile, const float* coefficient,
                      const float* logp, TokenTerms& terms, float* loss, float* grad, int n) {
  TokenGates<kScoreHead, kSplit, kDrop> gates(leaf, keep, terms, loss, grad);
  for (int i = 0; i < n; i += kWidth) {
    const Ints kind = load_lanes<Ints>(tile.chosen + i), negative = kind == kNegative;
    const Floats low = kDriven ? load_lanes<Floats>(terms.low + i) : by_sign<Floats>(negative, bounds.low);
    const Floats high = kDriven ? load_lanes<Floats>(terms.high + i) : by_sign<Floats>(negative, bounds.high);
    gates.template step<true>(i, all_lanes(), kind, negative, load_lanes<Floats>(tile.x + i),
                              load_lanes<Floats>(coefficient + i), low, high,
                              kScoreHead ? load_lanes<Floats>(logp + i) : Floats{});
  }
  return gates.counts.finish(terms);
}

// A fast-path tile, whose tokens are read where they are.
template <bool kScoreHead, bool kSplit, bool kDrop, bool kOfTokens>
GateCounts fast_loop(const TermPlan& plan, const LeafGate& leaf, const TokenBounds& bounds, const PolicyLossArgs& args,
                     int64_t first, int64_t row, const float* weights, TokenTerms& terms, float* loss, float* grad, int n) {
  const FastSource source(args, first);
  const FastAdvantages<kOfTokens> advantages(args, first, row, bounds);
  const Floats of_row = all<Floats>(args.weights[row]);
  TokenGates<kScoreHead, kSplit, kDrop> gates(leaf, plan.keep, terms, loss, grad);
  for_each_vector(0, n, [&](int i, Mask own, auto whole) HPO_INSIDE {
    constexpr bool kWhole = decltype(whole)::value;
    Mask chosen = args.mask ? present_own<kWhole>(own, args.mask + first + i) : own;
    const SignedTokens tokens = advantages.template at<kWhole>(i, own);
    Floats a = of_row * tokens.advantage;
    if (weights) {
      const Floats weight = load_own<kWhole>(own, weights + i);
      chosen = but_not(own, is_nan(weight)), a *= weight;
    }
    const Floats logp = load_own<kWhole>(own, source.logp + i);
    const Floats x = difference(chosen, logp, load_own<kWhole>(own, source.old_logp + i));
    gates.template step<kWhole>(i, own, keep_if(chosen, tokens.kind), tokens.negative, x, a, tokens.low, tokens.high, logp);
  });
  return gates.counts.finish(terms);
}

template <bool kScoreHead, bool kSplit>
TokenLoop pick_token_loop(bool drop, bool driven) {
  if (drop) return token_loop<kScoreHead, kSplit, true, false>;
  return driven ? token_loop<kScoreHead, kSplit, false, true> : token_loop<kScoreHead, kSplit, false, false>;
}

template <bool kScoreHead, bool kSplit, bool kOfTokens>
FastLoop pick_fast_loop(bool drop) {
  return drop ? fast_loop<kScoreHead, kSplit, true, kOfTokens> : fast_loop<kScoreHead, kSplit, false, kOfTokens>;
}

template <bool kOfTokens>
FastLoop pick_fast_loop(const GateStructure& structure, const TermPlan& term) {
  if (!term.is_plain()) return pick_fast_term_loop<kOfTokens>(term);
  if (structure.head == Head::score)
    return term.split ? pick_fast_loop<true, true, kOfTokens>(term.drop) : pick_fast_loop<true, false, kOfTokens>(term.drop);
  return term.split ? pick_fast_loop<false, true, kOfTokens>(term.drop) : pick_fast_loop<false, false, kOfTokens>(term.drop);
}

inline TokenLoop pick_token_loop(const GateStructure& structure, bool split, bool driven) {
  const bool drop = structure.token == TokenGate::drop;
  if (structure.head == Head::score)
    return split ? pick_token_loop<true, true>(drop, driven) : pick_token_loop<true, false>(drop, driven);
  return split ? pick_token_loop<false, true>(drop, driven) : pick_token_loop<false, false>(drop, driven);
}

// Whether the bounds of the token gate do not ask for the sign of the advantage.
inline bool has_bounds_of_both_signs(const Hierarchy& hierarchy) {
  return hierarchy.token_low[0] == hierarchy.token_low[1] && hierarchy.token_high[0] == hierarchy.token_high[1];
}

// The loss and gradient that a call computes, and the needs of its loops.
struct TokenPlan {
  const Hierarchy& hierarchy;
  TermPlan term;
  bool has_term;  // the gate asks for more than the loops below
  TokenLoop loop;
  FastLoop fast_loop;
  bool may_be_fast;  // a reference policy has a sweep of its own, see hierarchy_reference.h
  bool as_they_are;  // log-ratios enter the gates
  PreClip clip;  // else this clip of them does, where `measures_fast`
  bool measures_fast;  // the first sweep may take the fast path
  bool pays;  // tokens pay a penalty on their own log-ratios
  bool opens;  // a fast-path tile may be under open gates: the token gate is a clip, and the loss A e^z
  bool weighs;  // tokens of fast-path blocks have weights or no policy term, see hierarchy_weights.h
  bool drops;  // the tokens of a leaf have one term
  bool fills;  // and of a token nothing but its mask is read after the first sweep
  bool fills_last;  // the gradient of such tokens is written when that through aggregates is known
  bool keeps_ratios;  // the first sweep leaves e^x in the memory of the gradient, for tiles under open gates
  OpenLoops open_loops;
  MeasureFast measure_fast;
  TokenBounds bounds;
  bool driven;  // tokens have bounds of their own
  bool carries;  // gradient flows through the aggregate of some level
  bool by_sign;  // gradient flows through the aggregate of a level that is not the finest

  TokenPlan(const Call& call, const Hierarchy& hierarchy)
      : hierarchy(hierarchy),
        term(call, hierarchy),
        has_term(hierarchy.term.present),
        loop(),
        fast_loop(call.args.advantage_per_token ? pick_fast_loop<true>(call.structure, term)
                                                : pick_fast_loop<false>(call.structure, term)),
        may_be_fast(!call.args.low && !call.args.high && !call.args.kl_weight && !call.args.target),
        as_they_are(!term.pre_gated && !term.mean_exp),
        clip(term.clip()),
        measures_fast(may_be_fast && (as_they_are || term.deviates() || (term.clips() && clip.narrows()))),
        pays(hierarchy.term.present && hierarchy.term.penalty != Penalty::none),
        opens(!has_term && call.structure.token == TokenGate::clip && term.keep != 0.0f &&
              call.structure.head == Head::linear && (!call.args.advantage_per_token || has_bounds_of_both_signs(hierarchy))),
        weighs(may_be_fast && (weighs_terms(call.args) || (opens && call.args.advantage_per_token))),
        drops(measures_fast && !call.args.advantage_per_token && term.drop && !term.split && term.one_for_all()),
        fills(drops && as_they_are && !weighs && !call.args.ref_logp && !call.args.token_loss && !call.args.entropy),
        keeps_ratios(opens && call.args.grad && hierarchy.depth > 0 && as_they_are),
        open_loops(hierarchy.split, keeps_ratios, weighs),
        measure_fast() {
    const GateStructure& structure = call.structure;
    const bool clips = structure.token == TokenGate::clip;
    bool through = false;
    by_sign = false;
    driven = false;
    for (int k = 0; k < hierarchy.depth; ++k) {
      through |= hierarchy.levels[k].routing == Routing::through;
      by_sign |= k > 0 && hierarchy.levels[k].routing == Routing::through;
    }
    for (int sign = 0; sign < 2; ++sign) {
      bounds.low[sign] = clips ? float(hierarchy.token_low[sign]) : -INFINITY;
      bounds.high[sign] = clips ? float(hierarchy.token_high[sign]) : INFINITY;
      driven |= clips && ((call.args.low && structure.low_driven[sign]) || (call.args.high && structure.high_driven[sign]));
    }
    carries = through && structure.head != Head::score && call.args.grad;
    by_sign &= carries;
    fills_last = drops && carries && !(weighs && term.to_self) && !call.args.ref_logp;  // else each token has one of its own
    loop = pick_token_loop(structure, hierarchy.split, driven);
    FirstSweep sweep = keeps_ratios ? FirstSweep::keeps_ratios : FirstSweep::plain;
    if (!as_they_are) sweep = term.deviates() ? FirstSweep::deviates : FirstSweep::clips;
    measure_fast = hierarchy.split ? pick_measure_fast<true>(sweep) : pick_measure_fast<false>(sweep);
  }

  // Whether later sweeps may take the fast path where the first did.
  bool stays_fast() const { return drops || (may_be_fast && !pays && !driven); }
};

// The bounds of the token gate, token by token.
inline void load_bounds(const Call& call, const TokenBounds& bounds, int64_t first, int n, const Tile& tile,
                        TokenTerms& terms) {
  for (int i = 0; i < n; i += kWidth) {  // the bounds of the gate, in whole vectors
    const Ints negative = load_lanes<Ints>(tile.chosen + i) == kNegative;
    store_lanes(by_sign<Floats>(negative, bounds.low), terms.low + i);
    store_lanes(by_sign<Floats>(negative, bounds.high), terms.high + i);
  }
  if (!call.args.low && !call.args.high) return;
  for (int i = 0; i < n; ++i) {
    const int sign = tile.chosen[i] == kNegative;
    const bool own_low = call.args.low && call.structure.low_driven[sign] && tile.chosen[i] != kAbsent;
    const bool own_high = call.args.high && call.structure.high_driven[sign] && tile.chosen[i] != kAbsent;
    terms.low[i] = own_low ? log_bound(call.args.low[first + i]) : bounds.low[sign];
    terms.high[i] = own_high ? log_bound(call.args.high[first + i]) : bounds.high[sign];
  }
}

// Lanes by the position inside the leaf, by channel and by sign. Those that the plan does not use are neither cleared nor added
// up, which would take as long as the tokens of a short leaf.
struct FlowLanes {
  const int channels, signs;  // in use
  double past_token[2][kLanes], by_sign[2][kLanes];

  explicit FlowLanes(const TokenPlan& plan)
      : channels(plan.carries ? 1 + plan.hierarchy.split : 0), signs(plan.by_sign ? 2 : 0) {
    for (int i = 0; i < channels; ++i) std::fill_n(past_token[i], kLanes, 0.0);
    for (int i = 0; i < signs; ++i) std::fill_n(by_sign[i], kLanes, 0.0);
  }

  // A Flow as the result would be copied as one vector right behind its numbers, which waits for all of them.
  void put_into(Flow& flow) const {
    for (int i = 0; i < channels; ++i) flow.past_token[i] = sum_halves(past_token[i]);
    for (int i = 0; i < signs; ++i) flow.by_sign[i] = sum_halves(by_sign[i]);
  }
};

// Loss and gradient of the tiles of one block, for finish_tile.
struct BlockGate {
  const TokenPlan& plan;
  const LeafGate& leaf;
  int64_t row;
  TokenTerms& terms;
  FlowLanes& lanes;

  GateCounts operator()(const Call& call, int64_t first, int n, const Segments&, Tile& tile, const float* coefficient,
                        float* loss, float* grad) const {
    const bool weighted = loss == tile.loss;  // else only the loss of each token is wanted
    if (plan.driven || plan.has_term) load_bounds(call, plan.bounds, first, n, tile, terms);
    const GateCounts counts = plan.has_term ? run_terms(call, first, n, weighted, tile, coefficient, loss, grad)
                                            : run_loop(tile, coefficient, call.args.logp + first, loss, grad, n);
    if (weighted) add_flows(call.args, first, plan.has_term ? terms.slope : loss, n);
    drop_infinite(call, n, tile, loss, grad);
    return counts;
  }

  // The same for a fast-path tile, from begin to end.
  void finish_fast(const Call& call, int64_t first, int n, const float* weights, Tile& tile, Partial& partial) const {
    // The loop stores the lanes of this row alone: the next row's gradient may be another thread's.
    float* grad = call.args.grad ? call.args.grad + first : tile.grad;
    plan.fast_loop(plan.term, leaf, plan.bounds, call.args, first, row, weights, terms, tile.loss, grad, n)
        .add_to(partial.slots);
    add_runs(tile.loss, n, partial.sums[kLossSum]);
    add_flows(call.args, first, plan.term.is_plain() ? tile.loss : terms.slope, n);
  }

 private:
  // The loop goes on to the end of a vector; tensors may not.
  GateCounts run_loop(Tile& tile, const float* coefficient, const float* logp, float* loss, float* grad, int n) const {
    if (n % kLanes == 0) return plan.loop(leaf, plan.term.keep, plan.bounds, tile, coefficient, logp, terms, loss, grad, n);
    alignas(64) float own_logp[kPadded], own_loss[kPadded], own_grad[kPadded];
    for (int i = n; i < n + kLanes; ++i)
      tile.chosen[i] = kAbsent, tile.x[i] = own_logp[i] = terms.low[i] = terms.high[i] = 0.0f;
    std::memcpy(own_logp, logp, size_t(n) * sizeof(float));
    const GateCounts counts =
        plan.loop(leaf, plan.term.keep, plan.bounds, tile, coefficient, own_logp, terms, own_loss, own_grad, n);
    std::memcpy(loss, own_loss, size_t(n) * sizeof(float));
    std::memcpy(grad, own_grad, size_t(n) * sizeof(float));
    return counts;
  }

  GateCounts run_terms(const Call& call, int64_t first, int n, bool weighted, Tile& tile, const float* coefficient, float* loss,
                       float* grad) const {
    const float* entering = load_entering(plan.term, tile, n, terms);
    load_terms(call, first, n, row, weighted ? call.args.weights[row] : 1.0f, tile, terms);
    if (n % kLanes == 0) return term_loop(plan.term, leaf, tile, entering, coefficient, terms, loss, grad, n);
    alignas(64) float own_loss[kPadded], own_grad[kPadded];
    const GateCounts counts = term_loop(plan.term, leaf, tile, entering, coefficient, terms, own_loss, own_grad, n);
    std::memcpy(loss, own_loss, size_t(n) * sizeof(float));
    std::memcpy(grad, own_grad, size_t(n) * sizeof(float));
    return counts;
  }

  void add_past_token(int n) const {
    for (int i = 0; i < lanes.channels; ++i) add(terms.past_token[i], n, lanes.past_token[i]);
  }

  // n equal floats sum to n a exactly in doubles: where tokens drop their residual, a constant a comes back from the mean to
  // the bit, which is the on-policy promise.
  void add(float* each, int n, double* sums) const { plan.term.drop ? add_terms(each, n, sums) : add_runs(each, n, sums); }

  // slope: d loss / d z of each token, 0 where it has no term.
  void add_flows(const PolicyLossArgs& args, int64_t first, float* slope, int n) const {
    if (!plan.carries) return;
    if (terms.flows) add_past_token(n);
    if (!plan.by_sign) return;
    if (!args.advantage_per_token) return add(slope, n, lanes.by_sign[args.advantages[row] < 0.0f]);
    const float* advantages = args.advantages + first;
    for (int i = 0; i < n; ++i) terms.by_sign[0][i] = keep_if(!(advantages[i] < 0.0f), slope[i]);
    for (int i = 0; i < n; ++i) terms.by_sign[1][i] = keep_if(advantages[i] < 0.0f, slope[i]);
    for (int i = 0; i < 2; ++i) add(terms.by_sign[i], n, lanes.by_sign[i]);
  }
};

// Adds the gradient through aggregates to that of a fast-path tile.
inline void add_to_fast(const TermPlan& plan, const PolicyLossArgs& args, int64_t first, int64_t row, int begin, int end,
                        const AggregateGrad& aggregate_grad) {
  const Signs signs = Signs::of_row(args, row, first);
  const FastSource source(args, first);
  float* grad = args.grad + first;
  for_each_vector(begin, end, [&](int i, Mask own, auto whole) HPO_INSIDE {
    constexpr bool kWhole = decltype(whole)::value;
    const Floats x = source.log_ratio<kWhole>(i, own);
    Floats flow = blend(less(x, Floats{}), all<Floats>(aggregate_grad.falling), all<Floats>(aggregate_grad.rising));
    flow = plan.through_pre_gate(signs.at<kWhole>(i, own), x, flow);
    const Floats here = args.mask ? keep_if(present_own<kWhole>(own, args.mask + first + i), flow) : flow;
    store_own<kWhole>(own, load_own<kWhole>(own, grad + i) + here, grad + i);
  });
}

}  // namespace hpo::HPO_ISA
