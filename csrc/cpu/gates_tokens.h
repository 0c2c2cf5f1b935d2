// Gates on tokens: any tile in several passes, and fast-path tiles in one.
#pragma once
#include <type_traits>

#include "gates_token_inputs.h"

namespace hpo::HPO_ISA {

// The bounds in ratio space, by sign of the advantage. Where a bound is driven, the token's own takes its place.
struct Bounds {
  float low[2], high[2];
  int32_t low_driven[2], high_driven[2];
  const float *token_low, *token_high;  // [tile]
};

// The bounds that a loop reads.
enum class BoundsKind { none, by_sign, by_token };

inline Bounds tile_bounds(const Call& call, int64_t first) {
  const PolicyLossArgs& args = call.args;
  const bool clips = call.structure.token == TokenGate::clip;
  Bounds bounds = {};
  for (int sign = 0; sign < 2; ++sign) {
    bounds.low[sign] = clips ? float(call.numbers.token_low[sign]) : 0.0f;
    bounds.high[sign] = clips ? float(call.numbers.token_high[sign]) : INFINITY;
    bounds.low_driven[sign] = args.low && call.structure.low_driven[sign];
    bounds.high_driven[sign] = args.high && call.structure.high_driven[sign];
  }
  bounds.token_low = (args.low ? args.low : args.logp) + first;  // if not driven, anything readable
  bounds.token_high = (args.high ? args.high : args.logp) + first;
  return bounds;
}

inline BoundsKind bounds_kind(const Call& call) {
  if (call.structure.token == TokenGate::drop) return BoundsKind::none;
  const Bounds bounds = tile_bounds(call, 0);
  const bool driven = bounds.low_driven[0] || bounds.low_driven[1] || bounds.high_driven[0] || bounds.high_driven[1];
  return driven ? BoundsKind::by_token : BoundsKind::by_sign;
}

// The gate, vector by vector. The head is a branch that always goes the same way.
template <BoundsKind kBounds>
struct VectorGate {
  static constexpr Penalty penalty = Penalty::none;
  static constexpr float penalty_coefficient = 0.0f;
  static constexpr bool weighs = false;
  const bool score_head;
  const Bounds& bounds;
  const float* logp;
  Ints below[kParts] = {}, above[kParts] = {};

  HPO_INLINE Mask defined(const TermInputs&) const { return all_lanes(); }

  template <class Vector>
  HPO_INLINE TermNumber<Floats> term(const Vector& vector, const TermInputs& inputs) {
    return term(vector, inputs.kind, inputs.coefficient);
  }

  template <class Vector>
  HPO_INLINE TermNumber<Floats> term(const Vector& vector, Ints kind, Floats coefficient) {
    const Floats ratio = vector.ratio;
    Floats low = kind == kNegative ? all<Floats>(bounds.low[1]) : all<Floats>(bounds.low[0]);
    Floats high = kind == kNegative ? all<Floats>(bounds.high[1]) : all<Floats>(bounds.high[0]);
    if (kBounds == BoundsKind::by_token) {
      const auto driven = [&](const int32_t by_sign[2]) {
        return (kind == kNegative ? Ints{} + by_sign[1] : Ints{} + by_sign[0]) != 0;
      };
      low = driven(bounds.low_driven) ? vector.load(bounds.token_low) : low;
      high = driven(bounds.high_driven) ? vector.load(bounds.token_high) : high;
    }
    Mask inside = {};
    Floats clipped = all<Floats>(1.0f);
    if (kBounds != BoundsKind::none) {
      const Mask enough = at_least(ratio, low), little = at_least(high, ratio);
      clipped = blend(little, blend(enough, ratio, low), high);
      inside = both(vector.present, both(enough, little));
      below[vector.part] = add_where(but_not(vector.present, enough), kind, below[vector.part]);
      above[vector.part] = add_where(but_not(vector.present, little), kind, above[vector.part]);
    }
    return fast_term(score_head, vector, inside, policy_value(coefficient, clipped), logp);
  }

  void count(GateCounts& counts) const {
    for (int part = 0; part < kParts; ++part) counts.below += sum_lanes(below[part]), counts.above += sum_lanes(above[part]);
  }
};

// Loss and gradient of a tile that is loaded, in one of several passes.
using TokenGateLoop = GateCounts (*)(const Call&, int64_t first, int n, const Tile&, const float* coefficient, float* loss,
                                     float* grad);

template <BoundsKind kBounds>
GateCounts token_gate_loop(const Call& call, int64_t first, int n, const Tile& tile, const float* coefficient, float* loss,
                           float* grad) {
  const Bounds bounds = tile_bounds(call, first);
  VectorGate<kBounds> gate = {call.structure.head == Head::score, bounds, call.args.logp + first};
  Ints chosen = {};
  const auto step = [&](int i, int part, Mask own, auto whole) HPO_INSIDE {
    constexpr bool kWhole = decltype(whole)::value;
    const Ints kind = keep_if(own, load_lanes<Ints>(tile.chosen + i));
    const FastVector<kWhole> vector = {i, part, own, present_lanes(kind), Floats{}, load_lanes<Floats>(tile.ratio + i)};
    const TermNumber<Floats> term = gate.term(vector, kind, load_lanes<Floats>(coefficient + i));
    vector.store(keep_if(vector.present, term.loss), loss);
    vector.store(term.grad, grad);
    chosen += kind;
  };
  for_each_vector(0, n, step, [] {});
  GateCounts counts;
  counts.chosen = sum_lanes(chosen);
  gate.count(counts);
  return counts;
}

inline TokenGateLoop pick_token_gate(BoundsKind kind) {
  switch (kind) {
    case BoundsKind::none: return token_gate_loop<BoundsKind::none>;
    case BoundsKind::by_sign: return token_gate_loop<BoundsKind::by_sign>;
    default: return token_gate_loop<BoundsKind::by_token>;
  }
}

// The gate with loss and gradient of a fast-path tile, where coefficients belong to rows.
template <BoundsKind kBounds>
struct FastManyRows {
  VectorGate<kBounds> gate;
  const GradientOut grad;
  RunSum loss;

  template <class Vector>
  HPO_INLINE void operator()(const Vector& vector, Ints kind, Floats coefficient) {
    put_term(vector, gate.term(vector, kind, coefficient), loss, grad);
  }
  HPO_INLINE void end_run() { loss.end(); }
};

// A tile of few rows: the tokens of a row have one sign of the advantage, and under most gates one bound. Tokens beyond it have
// the same loss, unless they have weights, so counting them is enough.
template <bool kScoreHead, bool kRatio, bool kLow, bool kHigh, bool kWeighted>
struct FastRowGate {
  static constexpr bool kCounts = kRatio && !kScoreHead && !kWeighted;
  const Floats of_row, low, high;
  const float *logp, *weight;
  const GradientOut grad;
  RunSum loss;
  FiniteSum coefficients;  // of tokens with weights
  LaneCount inside_count = {}, not_below_count = {};

  template <class Vector>
  HPO_INLINE void operator()(const Vector& vector) {
    const Floats ratio = kRatio ? vector.ratio : all<Floats>(1.0f);
    const Mask enough = kLow ? at_least(ratio, low) : all_lanes(), little = kHigh ? at_least(high, ratio) : all_lanes();
    const Mask not_below = both(vector.present, enough), inside = kRatio ? both(not_below, little) : Mask{};
    if (kLow || kHigh) inside_count.add(inside);
    if (kLow && kHigh) not_below_count.add(not_below);
    Floats coefficient = of_row;
    if (kWeighted) {
      coefficient *= vector.load(weight);
      coefficients.add(vector.part, vector.present, coefficient);
    }
    if constexpr (kCounts) {
      const Floats value = keep_if(inside, policy_value(coefficient, ratio));
      loss.add(vector.part, all_lanes(), value);
      grad.store(vector, value);
    } else {
      const Floats raised = kLow ? blend(enough, ratio, low) : ratio, clipped = kHigh ? blend(little, raised, high) : raised;
      put_term(vector, fast_term(kScoreHead, vector, inside, policy_value(coefficient, clipped), logp), loss, grad);
    }
  }
  HPO_INLINE void end_run() { loss.end(); }

  // Returns the loss of the counted tokens.
  double count(int32_t present, int32_t kind, GateCounts& counts) const {
    if (!(kLow || kHigh)) return 0.0;
    const int32_t outside = present - inside_count.total();
    const int32_t under = !kHigh ? outside : (kLow ? present - not_below_count.total() : 0), over = outside - under;
    counts.below += under * kind, counts.above += over * kind;
    const auto loss_of = [&](int32_t tokens, float bound) {
      return tokens == 0 ? 0.0 : double(tokens) * double(policy_value(of_row[0], bound));
    };
    return kCounts ? loss_of(under, low[0]) + loss_of(over, high[0]) : 0.0;
  }
};

// A fast-path tile. False: the fast path does not hold, and nothing is counted.
using FastTile = bool (*)(const Call&, int64_t first, int n, const Segments&, Tile&, uint8_t* seen, Partial&);

// The fast tile of a call whose tokens have inputs of their own.
template <BoundsKind kBounds, OptionalInputs kOptional>
bool run_token_inputs(const Call& call, int64_t first, int n, const Segments& segments, Tile& tile, uint8_t* seen,
                      Partial& partial) {
  const Bounds bounds = tile_bounds(call, first);
  const VectorGate<kBounds> gate = {call.structure.head == Head::score, bounds, call.args.logp + first};
  return sweep_token_inputs<kOptional>(call, first, n, segments, tile, seen, partial, gate);
}

template <OptionalInputs kOptional>
FastTile pick_token_inputs(BoundsKind kind) {
  switch (kind) {
    case BoundsKind::none: return run_token_inputs<BoundsKind::none, kOptional>;
    case BoundsKind::by_sign: return run_token_inputs<BoundsKind::by_sign, kOptional>;
    default: return run_token_inputs<BoundsKind::by_token, OptionalInputs::anything>;
  }
}

// The fast tiles of any other call, each in its cheapest form. kWeighted: tokens have weights.
template <bool kMasked, bool kWeighted>
struct FastTiles {
  template <BoundsKind kBounds>
  static bool run(const Call& call, int64_t first, int n, const Segments& segments, Tile& tile, uint8_t* seen,
                  Partial& partial) {
    const PolicyLossArgs& args = call.args;
    const bool few = segments.few(n);
    if (kWeighted) {
      if (!few || n % kLanes != 0)
        return run_token_inputs<kBounds, OptionalInputs::weights>(call, first, n, segments, tile, seen, partial);
      write_weights_of_rows(args, first, segments, tile);
    } else if (n % kLanes != 0 ||
               (few ? !finite_coefficients(args, first, segments) : load_rows(args, first, n, segments, tile))) {
      return false;
    }
    const Bounds bounds = tile_bounds(call, first);
    const GradientOut grad(args, first, tile.grad);
    return guess_near(tile.near, [&](auto near) {
      constexpr bool kTakenForNear = decltype(near)::value;
      double loss[kLanes] = {};
      GateCounts counts;
      const double before = partial.slots[kTokens];
      if (kWeighted || few) {
        if (!few_rows<kTakenForNear, kBounds != BoundsKind::none>(call, first, segments, bounds, grad, tile, seen, partial,
                                                                  loss, counts))
          return false;
      } else {
        FastManyRows<kBounds> each = {{call.structure.head == Head::score, bounds, args.logp + first}, grad, RunSum(loss)};
        if (!sweep_many_rows<kTakenForNear, kMasked>(args, first, n, partial, each, tile)) return false;
        each.loss.end();
        each.gate.count(counts);
        mark_rows(segments, tile.kind, seen);
      }
      counts.add_to(partial.slots);
      partial.slots[kSelected] += partial.slots[kTokens] - before;
      add_to_lanes(loss, partial.sums[kLossSum]);
      return true;
    });
  }

  static void write_weights_of_rows(const PolicyLossArgs& args, int64_t first, const Segments& segments, Tile& tile) {
    if (!args.correction.second) return;
    for (const Segment& each : segments) {
      const Signs signs = {nullptr, nullptr, args.advantages[each.row] < 0.0f};
      write_weights(args, first, each.begin, each.end, &each, 1, signs, tile.corrected);
    }
  }

  template <bool kTakenForNear, bool kRatio>
  static bool few_rows(const Call& call, int64_t first, const Segments& segments, const Bounds& bounds, const GradientOut& grad,
                       Tile& tile, uint8_t* seen, Partial& partial, double* loss, GateCounts& counts) {
    const PolicyLossArgs& args = call.args;
    const bool score = call.structure.head == Head::score;
    FastSums sums;
    PresentTokens present;
    RunSum run(loss);
    FiniteSum coefficients;
    const float* weight = kWeighted ? token_weights(args, first, tile) : nullptr;
    for (int index = 0; index < segments.count; ++index) {
      const Segment& segment = segments.list[index];
      const float advantage = args.advantages[segment.row], coefficient = args.weights[segment.row] * advantage;
      const int sign = advantage < 0.0f;
      const float low = bounds.low[sign], high = bounds.high[sign];
      const auto sweep = [&](auto score_head, auto has_low, auto has_high) {
        FastRowGate<decltype(score_head)::value, kRatio, decltype(has_low)::value, decltype(has_high)::value, kWeighted> gate =
            {all<Floats>(coefficient), all<Floats>(low), all<Floats>(high), args.logp + first, weight, grad, run, coefficients};
        const int32_t count = sweep_row<kTakenForNear, kMasked>(args, first, segment, sums, gate);
        present.set(index, count);
        loss[0] += gate.count(count, sign ? kNegative : kPositive, counts);
        run = gate.loss, coefficients = gate.coefficients;
      };
      const std::true_type yes;
      const std::false_type no;
      if constexpr (kRatio) {
        const bool has_low = low > 0.0f, has_high = high < INFINITY;
        if (score) has_low ? sweep(yes, yes, yes) : sweep(yes, no, yes);
        else if (has_low) has_high ? sweep(no, yes, yes) : sweep(no, yes, no);
        else has_high ? sweep(no, no, yes) : sweep(no, no, no);
      } else {
        score ? sweep(yes, no, no) : sweep(no, no, no);
      }
    }
    run.end();
    if (kWeighted && !(coefficients.finite() && finite_lanes(loss))) return false;
    if (!settle_fast<kTakenForNear>(sums, present.all, partial, tile.near)) return false;
    present.mark(segments, seen);
    return true;
  }

  static FastTile pick(BoundsKind kind) { return kind == BoundsKind::none ? run<BoundsKind::none> : run<BoundsKind::by_sign>; }
};

inline FastTile pick_fast_tile(const PolicyLossArgs& args, BoundsKind kind, bool masked) {
  switch (optional_inputs(args)) {
    case OptionalInputs::nothing: return masked ? FastTiles<true, false>::pick(kind) : FastTiles<false, false>::pick(kind);
    case OptionalInputs::reference: return pick_token_inputs<OptionalInputs::reference>(kind);
    case OptionalInputs::weights: return masked ? FastTiles<true, true>::pick(kind) : FastTiles<false, true>::pick(kind);
    default: return pick_token_inputs<OptionalInputs::anything>(kind);
  }
}

}  // namespace hpo::HPO_ISA
