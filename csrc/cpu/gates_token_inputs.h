// A fast-path tile whose tokens have inputs of their own (weights, advantages, bounds, selections, a reference policy, an
// entropy) or heads of any kind, in one pass. An input that a call lacks costs a branch for every vector that always goes the
// same way.
#pragma once
#include "gates_fast_path.h"

namespace hpo::HPO_ISA {

// Squares of log-ratios to the reference policy add up to this at most in one lane of a fast-path tile.
constexpr float kMostSquares = kStatisticSaturation * kStatisticSaturation;

// The inputs of a tile's tokens: local copies of pointers, because stores may alias the arguments of the call.
struct TokenInputs {
  const float *logp, *ref_logp, *entropy, *score, *weight, *kl_weight, *advantages, *target, *low, *high;
  const uint8_t *mask, *token_mask, *penalty_mask;
  Floats threshold;

  // corrected: where the weights of tokens are written if the call has a correction.
  TokenInputs(const PolicyLossArgs& args, int64_t begin, const float* corrected) {
    const auto from = [=](const auto* tokens) { return tokens ? tokens + begin : nullptr; };
    logp = from(args.logp), ref_logp = from(args.ref_logp), entropy = from(args.entropy), score = from(args.score);
    weight = args.correction.second ? corrected : from(args.token_weight);
    advantages = from(args.advantage_per_token ? args.advantages : nullptr);
    target = from(args.target_per_token ? args.target : nullptr), kl_weight = from(args.kl_weight);
    low = from(args.low), high = from(args.high);
    mask = from(args.mask), token_mask = from(args.token_mask), penalty_mask = from(args.penalty_mask);
    threshold = all<Floats>(args.score ? *args.threshold : 0.0f);
  }

  // The tokens that count in the policy term; those with a score of NaN are exceptions.
  template <class Vector>
  HPO_INLINE Mask chosen(const Vector& vector, bool strict, Mask& exceptions) const {
    Mask selected = vector.present;
    if (token_mask) selected = both(selected, present_own<Vector::whole>(vector.own, token_mask + vector.i));
    if (score) {
      const Floats here = vector.load(score);
      exceptions = either(exceptions, both(vector.present, is_nan(here)));
      selected = both(selected, strict ? less(threshold, here) : at_least(here, threshold));
    }
    return selected;
  }
};

HPO_INLINE Floats size_of(Floats x) { return Floats(Ints(x) & 0x7FFFFFFF); }

// Numbers that have to be finite, by the sum of them: it is not if one is not, or if they are huge.
struct FiniteSum {
  Floats sum[kParts] = {};

  HPO_INLINE void add(int part, Mask present, Floats x) { sum[part] = add_where(present, x, sum[part]); }

  bool finite() const {
    Mask good = all_lanes();
    for (const Floats& each : sum) good = both(good, less(each - each, all<Floats>(1.0f)));  // NaN is not less
    return !any(but_not(all_lanes(), good));
  }
};

inline bool finite_lanes(const double* lanes) {
  double rest = 0.0;
  for (int lane = 0; lane < kLanes; ++lane) rest += lanes[lane] - lanes[lane];
  return rest == 0.0;
}

// Statistics of the log-ratio s to the reference policy, and the penalty on it.
struct FastReference {
  const KLEstimator estimator;
  const KLGradient gradient;
  const Floats beta;
  Floats sum[kParts] = {}, square[kParts] = {}, k3_sum[kParts] = {};

  explicit FastReference(const Call& call)
      : estimator(call.structure.kl), gradient(call.structure.kl_gradient), beta(all<Floats>(float(call.numbers.kl_beta))) {}

  HPO_INLINE TermNumber<Floats> add(int part, Floats weight, Floats s, Floats x) {
    const Floats size = size_of(s), e = any(at_least(size, all<Floats>(kNearReference))) ? exp(-s) : Floats{};
    sum[part] += s;
    square[part] += s * s;
    k3_sum[part] += k3(s, e);
    if (estimator == KLEstimator::none) return {Floats{}, Floats{}};
    const TermNumber<Floats> term = kl_term<Floats>(estimator, gradient, s, e, x, Ints{} - 1, Ints{} - 1);
    return {weight * (beta * term.loss), weight * (beta * term.grad)};
  }

  // No log-ratio is NaN, or so large that exponentials saturate.
  bool within_range() const {
    Mask good = all_lanes();
    for (const Floats& each : square) good = both(good, at_least(all<Floats>(kMostSquares), each));
    return !any(but_not(all_lanes(), good));
  }

  void add_to(Partial& partial) const {
    for (int part = 0; part < kParts; ++part) {
      add_as_doubles(sum[part], partial.sums[kS] + part * kWidth);
      add_as_doubles(square[part], partial.sums[kSSquare] + part * kWidth);
      add_as_doubles(k3_sum[part], partial.sums[kK3] + part * kWidth);
    }
  }
};

// The numbers of rows for the tokens of a vector.
struct RowNumbers {
  Ints kind;  // of the sign that all tokens of a row have, if they have one
  Floats coefficient, weight;
  Floats target;  // if tokens have none of their own

  static float weight_of(const PolicyLossArgs& args, int64_t row) {
    return hpo::HPO_ISA::finite(args.weights[row]) ? args.weights[row] : 0.0f;
  }
  static float target_of(const PolicyLossArgs& args, int64_t row) {
    return args.target && !args.target_per_token ? args.target[row] : 0.0f;
  }
};

// The inputs of the policy term of a token, see head_term.
struct TermInputs {
  Ints kind;
  Floats coefficient, kept, target;
};

// The optional inputs of a call: any of them, or as in the most common calls none, a reference policy alone, weights alone, or
// targets alone.
enum class OptionalInputs { anything, nothing, reference, weights, targets };

inline OptionalInputs optional_inputs(const PolicyLossArgs& args) {
  const bool others =
      args.advantage_per_token || args.token_mask || args.score || args.entropy || args.kl_weight || args.low || args.high;
  const bool reference = args.ref_logp, weights = weighs_tokens(args);
  const int some = reference + weights + (args.target != nullptr);
  if (others || some > 1) return OptionalInputs::anything;
  if (args.target) return OptionalInputs::targets;
  return reference ? OptionalInputs::reference : (weights ? OptionalInputs::weights : OptionalInputs::nothing);
}

// Sums of a tile by lane.
struct LaneSums {
  double loss[kLanes] = {}, penalty[kLanes] = {}, entropy[kLanes] = {};
};

// The sweep over one tile. gate.term(vector, TermInputs) is the policy term of a vector whose present tokens are the chosen
// ones; gate.penalty the one on their own log-ratios, times gate.penalty_coefficient.
template <class Gate, OptionalInputs kOptional>
struct TokenInputsSweep {
  static constexpr bool kAnything = kOptional == OptionalInputs::anything;
  static constexpr bool kReference = kOptional == OptionalInputs::reference, kWeights = kOptional == OptionalInputs::weights;
  static constexpr bool kTargets = kOptional == OptionalInputs::targets;
  const Call& call;
  const int64_t first;
  const FastSource source;
  const TokenInputs inputs;
  const GradientOut grad;
  Gate gate;
  const bool penalised;
  LaneSums& lanes;  // an object of their own, so that the compiler keeps the sums below in registers
  RunSum loss, penalty, entropy;
  FastReference reference;
  FastSums sums;
  FiniteSum coefficients;
  Mask exceptions = {};
  LaneCount present_count, chosen_count;

  TokenInputsSweep(const Call& call, int64_t first, Tile& tile, const Gate& gate, LaneSums& lanes)
      : call(call),
        first(first),
        source(call.args, first),
        inputs(call.args, first, tile.corrected),
        grad(call.args, first, tile.grad),
        gate(gate),
        penalised(call.structure.kl != KLEstimator::none || gate.penalty != Penalty::none),
        lanes(lanes),
        loss(lanes.loss),
        penalty(lanes.penalty),
        entropy(lanes.entropy),
        reference(call) {}
  TokenInputsSweep(const TokenInputsSweep&) = delete;

  template <bool kWhole>
  HPO_INLINE void step(int i, int part, Mask own, Mask present, const RowNumbers& row) {
    present_count.add(present);
    auto vector = source.vector<false, kWhole>(i, part, own, present, sums);
    TermInputs own_inputs = {row.kind, row.coefficient, row.weight, row.target};
    Mask chosen = present;
    if (kAnything) {
      take_own_inputs(vector, own_inputs);
      chosen = inputs.chosen(vector, call.structure.strict, exceptions);
      chosen_count.add(chosen);
    }
    if (kWeights) {
      own_inputs.coefficient *= vector.load(inputs.weight);
      coefficients.add(part, present, own_inputs.coefficient);
    }
    if (kTargets) exceptions = either(exceptions, but_not(present, has_target(vector, own_inputs)));
    vector.present = chosen;
    const TermNumber<Floats> term = gate.term(vector, own_inputs);
    loss.add(part, chosen, term.loss);
    Floats gradient = term.grad;
    if (kReference || (kAnything && inputs.ref_logp)) {
      const Floats s = difference(present, vector.load(inputs.logp), vector.load(inputs.ref_logp));
      const bool weighs = kAnything && inputs.kl_weight;
      const Floats factor = weighs ? vector.load(inputs.kl_weight) : Floats{};
      TermNumber<Floats> of_reference = reference.add(part, weighs ? row.weight * factor : row.weight, s, vector.x);
      if (weighs) of_reference = {keep_if(factor != 0.0f, of_reference.loss), keep_if(factor != 0.0f, of_reference.grad)};
      penalty.add(part, present, of_reference.loss);
      gradient = keep_if(present, gradient + of_reference.grad);
    }
    if (gate.penalty != Penalty::none) {
      const Mask pays = inputs.penalty_mask ? both(present, present_own<kWhole>(own, inputs.penalty_mask + i)) : present;
      const OwnPenalty<Floats> of_token = own_penalty<Floats>(gate.penalty, vector.x, [&](Floats) { return vector.ratio; });
      const Floats factor = all<Floats>(gate.penalty_coefficient);
      penalty.add(part, pays, row.weight * (factor * of_token.value));
      gradient += keep_if(pays, row.weight * (factor * of_token.slope));
    }
    if (kAnything && inputs.entropy) entropy.add(part, present, vector.load(inputs.entropy));
    grad.store(vector, gradient);
  }

  template <class Vector>
  HPO_INLINE void take_own_inputs(const Vector& vector, TermInputs& own_inputs) {
    if (inputs.advantages) {
      const Floats advantage = vector.load(inputs.advantages);
      own_inputs.coefficient *= advantage;
      own_inputs.kind = keep_if(vector.present, advantage < 0.0f ? Ints{} + kNegative : Ints{} + kPositive);
    }
    if (inputs.weight) {
      const Floats own = vector.load(inputs.weight);
      own_inputs.coefficient *= own, own_inputs.kept *= own;
    }
    coefficients.add(vector.part, vector.present, own_inputs.coefficient);
    Mask meant = has_target(vector, own_inputs);
    if (inputs.low) {
      const Floats low = vector.load(inputs.low);
      meant = both(meant, both(at_least(low, all<Floats>(kLowest)), at_least(all<Floats>(kHighestLow), low)));
    }
    if (inputs.high) meant = both(meant, at_least(vector.load(inputs.high), all<Floats>(kLowestHigh)));
    exceptions = either(exceptions, but_not(vector.present, meant));
  }

  // Takes targets of tokens, and tells whether they have a meaning.
  template <class Vector>
  HPO_INLINE Mask has_target(const Vector& vector, TermInputs& own_inputs) {
    if (inputs.target) own_inputs.target = vector.load(inputs.target);
    return gate.defined(own_inputs);
  }

  HPO_INLINE void end_run() {
    loss.end();
    if (penalised) penalty.end();
    if (kAnything && inputs.entropy) entropy.end();
  }

  // Rows by themselves.
  HPO_INLINE void few_rows(const Segments& segments, PresentTokens& present_tokens, Tile& tile) {
    const PolicyLossArgs& args = call.args;
    for (int index = 0; index < segments.count; ++index) {
      const Segment& segment = segments.list[index];
      const bool negative = !args.advantage_per_token && args.advantages[segment.row] < 0.0f;
      const RowNumbers row = {Ints{} + (negative ? kNegative : kPositive), all<Floats>(row_coefficient(args, segment.row)),
                              all<Floats>(RowNumbers::weight_of(args, segment.row)),
                              all<Floats>(RowNumbers::target_of(args, segment.row))};
      if (args.correction.second) {
        const Signs signs = {inputs.advantages, nullptr, negative};
        write_weights(args, first, segment.begin, segment.end, &segment, 1, signs, tile.corrected);
      }
      const int32_t before = present_count.total();
      const auto each = [&](int i, int part, Mask own, auto whole) HPO_INSIDE {
        constexpr bool kWhole = decltype(whole)::value;
        step<kWhole>(i, part, own, inputs.mask ? present_own<kWhole>(own, inputs.mask + i) : own, row);
      };
      for_each_vector(segment.begin, segment.end, each, [&]() HPO_INSIDE { end_run(); });
      present_tokens.set(index, present_count.total() - before);
    }
    end_run();
  }

  // Rows at their tokens in arrays.
  HPO_INLINE void many_rows(int n, const Segments& segments, Tile& tile) {
    const PolicyLossArgs& args = call.args;
    load_row_numbers(args, n, segments, tile);
    if (args.correction.second) {
      const Signs signs = {inputs.advantages, tile.kind, false};
      write_weights(args, first, 0, n, segments.list, segments.count, signs, tile.corrected);
    }
    float *weight = tile.spread[1], *target = tile.spread[2];
    const bool weighs = gate.weighs || penalised, compares = args.target && !inputs.target;
    if (weighs) spread_rows(segments, weight, [&](int64_t row) { return RowNumbers::weight_of(args, row); });
    if (compares) spread_rows(segments, target, [&](int64_t row) { return RowNumbers::target_of(args, row); });
    const auto each = [&](int i, int part, Mask own, auto whole) HPO_INSIDE {
      constexpr bool kWhole = decltype(whole)::value;
      Ints kind = load_lanes<Ints>(tile.kind + i);
      if (!kWhole || inputs.mask) {
        kind = keep_if(inputs.mask ? present_own<kWhole>(own, inputs.mask + i) : own, kind);
        store_lanes(kind, tile.kind + i);
      }
      const RowNumbers row = {kind, load_lanes<Floats>(tile.coefficient + i),
                              weighs ? load_lanes<Floats>(weight + i) : Floats{},
                              compares ? load_lanes<Floats>(target + i) : Floats{}};
      step<kWhole>(i, part, own, present_lanes(kind), row);
    };
    for_each_vector(0, n, each, [&]() HPO_INSIDE { end_run(); });
    end_run();
  }

  // False: the fast path does not hold, and nothing is counted.
  HPO_INLINE bool settle(Tile& tile, Partial& partial) {
    const bool holds = coefficients.finite() && reference.within_range() && !any(exceptions) && finite_lanes(lanes.loss) &&
                       finite_lanes(lanes.penalty) && finite_lanes(lanes.entropy);
    const int64_t tokens = present_count.total();
    if (!holds || !settle_fast<false>(sums, tokens, partial, tile.near)) return false;
    GateCounts counts;
    gate.count(counts);
    counts.add_to(partial.slots);
    partial.slots[kSelected] += double(kAnything ? chosen_count.total() : tokens);
    add_to_lanes(lanes.loss, partial.sums[kLossSum]);
    if (inputs.ref_logp) reference.add_to(partial);
    if (penalised) add_to_lanes(lanes.penalty, partial.sums[kPenaltySum]);
    if (inputs.entropy) {
      add_to_lanes(lanes.entropy, partial.sums[kEntropySum]);
      partial.slots[kEntropyTokens] += double(tokens);
    }
    return true;
  }
};

// Loss and gradient of a tile. False: the fast path does not hold, and nothing is counted.
template <OptionalInputs kOptional, class Gate>
bool sweep_token_inputs(const Call& call, int64_t first, int n, const Segments& segments, Tile& tile, uint8_t* seen,
                        Partial& partial, const Gate& gate) {
  const bool of_rows = kOptional != OptionalInputs::anything && kOptional != OptionalInputs::weights;
  if (of_rows && !finite_coefficients(call.args, first, segments)) return false;
  LaneSums lanes;
  TokenInputsSweep<Gate, kOptional> sweep(call, first, tile, gate, lanes);
  if (segments.few(n)) {
    PresentTokens present;
    sweep.few_rows(segments, present, tile);
    if (!sweep.settle(tile, partial)) return false;
    present.mark(segments, seen);
  } else {
    sweep.many_rows(n, segments, tile);
    if (!sweep.settle(tile, partial)) return false;
    mark_rows(segments, tile.kind, seen);
  }
  return true;
}

}  // namespace hpo::HPO_ISA
