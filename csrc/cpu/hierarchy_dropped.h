// Gates that drop the residual of their tokens, under the linear and the score head: the ratio of a token is that of the levels
// above its piece, for each sign of the advantage. So one sweep measures pieces, all between is arithmetic on pieces, and the
// gradient is a fill: one number for each piece, unless a split or something that belongs to tokens makes it two or more.
#pragma once
#include "gates_plain.h"
#include "hierarchy_pieces.h"

namespace hpo::HPO_ISA {

inline bool drops_residual(const GateStructure& structure, const Hierarchy& hierarchy) {
  return structure.token == TokenGate::drop && !hierarchy.term.present && hierarchy.depth > 0;
}

// What a piece adds up. Pairs are (advantage >= 0, advantage < 0).
struct PieceSums {
  LogRatios log_ratios;
  int64_t both_chosen;  // chosen tokens, one count above the other

  int64_t chosen(int sign) const { return sign ? both_chosen >> 32 : both_chosen & 0xFFFFFFFF; }
};

// What the levels above a piece make of its tokens.
struct PieceGain {
  float ratio[2];  // e^z by sign of the advantage
  float own[2][2];  // derivative of z in the token's own log-ratio, [channel][sign]
  float slope[2][2];  // of the finest level
};

// Where a varies inside a piece: its sums by sign, in lanes that depend on the position inside the piece only.
struct CoefficientSums {
  double lanes[2][kLanes] = {};

  // The next tokens of the piece, from `first` on in a tile that is split by sign; all but the last call pass whole lanes.
  void add(const float by_sign[2][kPadded], int first, int n) {
    for (int sign = 0; sign < 2; ++sign) {
      const float* __restrict a = by_sign[sign] + first;
      double* __restrict sums = lanes[sign];
      int i = 0;
      for (; i + kLanes <= n; i += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) sums[lane] += double(a[i + lane]);
      }
      for (int lane = 0; i + lane < n; ++lane) sums[lane] += double(a[i + lane]);
    }
  }

  void store(double sums[2]) const {
    for (int sign = 0; sign < 2; ++sign) {
      sums[sign] = 0.0;
      for (int lane = 0; lane < kLanes; ++lane) sums[sign] += lanes[sign][lane];
    }
  }
};

// Writes the coefficients of chosen tokens into two arrays, 0 where the other sign or nothing is.
inline void split_by_sign(const Tile& tile, int n, float by_sign[2][kPadded]) {
  const int32_t* __restrict chosen = tile.chosen;
  for (int i = 0; i < n; ++i) by_sign[0][i] = keep_if(chosen[i] == kPositive, tile.coefficient[i]);
  for (int i = 0; i < n; ++i) by_sign[1][i] = keep_if(chosen[i] == kNegative, tile.coefficient[i]);
}

// Tokens and those of them beyond a gate, by sign of the advantage.
struct SideCounts {
  int64_t chosen = 0, below[2] = {}, above[2] = {};

  void add_to(double* slots) const {
    slots[kSelected] += double(chosen);
    slots[kClippedLowPositive] += double(below[0]);
    slots[kClippedLowNegative] += double(below[1]);
    slots[kClippedHighPositive] += double(above[0]);
    slots[kClippedHighNegative] += double(above[1]);
  }
};

// Loss and gradient of the tokens [begin, end) of a tile, all of one piece.
using DroppedLoop = void (*)(const PieceGain&, const float arriving[2], const Tile&, int begin, int end,
                             const float* coefficient, const float* logp, float* loss, float* grad);

template <bool kScoreHead, bool kSplit>
void dropped_loop(const PieceGain& piece, const float arriving[2], const Tile& tile, int begin, int end,
                  const float* __restrict coefficient, const float* __restrict logp, float* __restrict loss,
                  float* __restrict grad) {
  const int32_t* __restrict kind = tile.kind, * __restrict chosen = tile.chosen;
  const float* __restrict x = tile.x;
  const float ratio[2] = {piece.ratio[0], piece.ratio[1]}, rise = arriving[0], fall = arriving[1];
  const float own[2][2] = {{piece.own[0][0], piece.own[0][1]}, {piece.own[1][0], piece.own[1][1]}};
  for (int i = begin; i < end; ++i) {
    const bool counts = chosen[i] != kAbsent, negative = chosen[i] == kNegative, falls = kSplit && x[i] < 0.0f;
    const float value = policy_value(coefficient[i], negative ? ratio[1] : ratio[0]);
    loss[i] = keep_if(counts, kScoreHead ? scored(value * logp[i]) : value);
    if (kScoreHead) {
      grad[i] = keep_if(counts, value);
    } else {
      const float rising = negative ? own[0][1] : own[0][0], falling = negative ? own[1][1] : own[1][0];
      const float slope = falls ? falling : rising;
      grad[i] = keep_if(counts && slope != 0.0f, value * slope) + keep_if(kind[i] != kAbsent, falls ? fall : rise);
    }
  }
}

inline DroppedLoop pick_dropped_loop(bool score, bool split) {
  if (score) return dropped_loop<true, false>;
  return split ? dropped_loop<false, true> : dropped_loop<false, false>;
}

// Loss and gradient of a tile, as finish_tile asks for them.
struct DroppedGate {
  DroppedLoop loop;
  const PieceGain* gains;  // [pieces]
  const float (*arriving)[2];  // [pieces], by channel
  bool values_by_row;  // the loss is known without the tokens

  GateCounts operator()(const Call& call, int64_t first, int n, const Segments& segments, Tile& tile, const float* coefficient,
                        float* loss, float* grad) const {
    for_each_gap(segments, n, [&](int begin, int end) {
      for (int i = begin; i < end; ++i) loss[i] = grad[i] = 0.0f;
    });
    for (const Segment& segment : segments) {
      loop(gains[segment.piece], arriving[segment.piece], tile, segment.begin, segment.end, coefficient, call.args.logp + first,
           loss, grad);
    }
    drop_infinite(call, n, tile, loss, grad);
    return {};  // whoever measured pieces has counted
  }
};

// The sweeps over tokens of one call.
struct DroppedSweeps {
  const Calls& calls;
  const Pieces& pieces;
  int threads;
  PieceSums* sums;  // [pieces]
  double (*coefficients)[2];  // [pieces]: sum of a over the chosen tokens, where a varies inside of pieces
  Masked* masked;  // [tiles], what the first sweep saw, for the second
  uint8_t* reload;  // [chunks], 1 where the second sweep needs the log-ratios again
  uint8_t* seen;  // [rows]
  Partial* partials;  // [chunks]
  const Call& call = calls.masked;
  const PolicyLossArgs& args = call.args;
  bool split = pieces.hierarchy.split, linear = call.structure.head == Head::linear;
  bool varies = args.advantage_per_token || args.token_weight;  // a, inside a row
  bool may_be_plain = HPO_ISA::may_be_plain(args) && !args.token_loss;
  bool carries = args.grad && linear && goes_through(pieces.hierarchy);  // some level hands gradient through its aggregate
  bool fills = may_be_plain && linear && !split;  // the second sweep needs nothing but pieces and the mask

  int64_t chunks() const { return HPO_ISA::pieces(args.tokens, kChunk); }

  // ---------------------------------------------------------------------------------------------------- first sweep

  void measure() const {
    std::memset(static_cast<void*>(sums), 0, size_t(pieces.count()) * sizeof(PieceSums));
    parallel_for(chunks(), threads, [&](int64_t chunk) {
      Tile tile;
      Partial partial;
      bool again = args.ref_logp != nullptr || split;
      for_each_tile(pieces, chunk, [&](int64_t first, int n, const Segments& segments) {
        again |= measure_tile(chunk, first, n, segments, tile, partial);
      });
      partials[chunk] = partial;
      reload[chunk] = again;
    });
    if (!varies) return;
    for_each_piece(pieces.count(), threads, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        if (sums[p].both_chosen > 0 && !pieces.lies_in_one_tile(p)) sum_coefficients(p);
      }
    });
  }

  // Returns whether its log-ratios are exceptional.
  bool measure_tile(int64_t chunk, int64_t first, int n, const Segments& segments, Tile& tile, Partial& partial) const {
    const Masked which = masked[first / kTile] = masked_tokens(args.mask, first, n);
    if (may_be_plain && which == Masked::all) return false;
    const Call& here = calls.of(which);
    const bool few = segments.few(n);
    if (few && may_be_plain) {
      RowLogRatios found[kFewRows];
      const auto measure_plain = split ? measure_plain_rows<true, false> : measure_plain_rows<false, false>;
      if (measure_plain(here.args, first, segments, tile, seen, partial, found)) {
        for (int i = 0; i < segments.count; ++i) {
          add(chunk, segments.list[i], found[i].valid, int32_t(found[i].valid) * kind_of(segments.list[i].row), found[i].fixed,
              found[i].rising);
        }
        return false;
      }
    }
    if (few || !may_be_plain || !HPO_ISA::measure_plain(here, first, n, segments, tile, seen, partial)) {
      HPO_ISA::measure(here, first, n, segments, tile, seen, partial);
    }
    add_tile(here, chunk, n, segments, tile);
    return tile.exceptional;
  }

  int32_t kind_of(int64_t row) const { return args.advantages[row] < 0.0f ? kNegative : kPositive; }

  // valid and kinds: how many tokens are valid, and the sum of the kinds of the chosen ones.
  void add(int64_t chunk, const Segment& segment, int64_t valid, int32_t kinds, int64_t fixed, int64_t rising) const {
    PieceSums& piece = sums[segment.piece];
    const bool shared = pieces.continues_elsewhere(segment.piece, chunk);
    add_to_row(piece.log_ratios.valid, valid, shared);
    add_to_row(piece.log_ratios.fixed[0], split ? rising : fixed, shared);
    if (split) add_to_row(piece.log_ratios.fixed[1], rising - fixed, shared);
    add_to_row(piece.both_chosen, positives(kinds) | int64_t(negatives(kinds)) << 32, shared);
  }

  void add_tile(const Call& here, int64_t chunk, int n, const Segments& segments, Tile& tile) const {
    if (varies) split_by_sign(tile, n, tile.spread);
    const bool alike = !(here.args.mask || args.advantage_per_token || tile.exceptional);  // all tokens of a piece
    int64_t fixed[kTile];  // converted all together: pieces may be shorter than a vector
    for (int i = 0; i < n; ++i) fixed[i] = to_fixed(tile.x[i]);
    for (const Segment& segment : segments) {
      int64_t sum = 0, rising = 0;
      int32_t valid = 0, chosen = 0;
      for (int i = segment.begin; i < segment.end; ++i) sum += fixed[i];
      for (int i = segment.begin; split && i < segment.end; ++i) rising += fixed[i] > 0 ? fixed[i] : 0;
      if (alike) valid = tile.kind[segment.begin] * (segment.end - segment.begin);
      else
        for (int i = segment.begin; i < segment.end; ++i) valid += tile.kind[i];
      if (tile.chosen == tile.kind) chosen = valid;
      else
        for (int i = segment.begin; i < segment.end; ++i) chosen += tile.chosen[i];
      add(chunk, segment, positives(valid) + negatives(valid), chosen, sum, rising);
      if (varies && pieces.lies_in_one_tile(segment.piece)) {
        CoefficientSums of_tile;
        of_tile.add(tile.spread, segment.begin, segment.end - segment.begin);
        of_tile.store(coefficients[segment.piece]);
      }
    }
  }

  // The coefficients of a piece that does not lie in one tile: tiles of its own, from its first token on.
  void sum_coefficients(int64_t p) const {
    CoefficientSums lanes;
    Tile tile;
    Partial uncounted;
    Segments whole;
    const int64_t end = pieces.end(p);
    for (int64_t first = pieces.begin(p); first < end; first += kTile) {
      const int n = int(end - first < kTile ? end - first : kTile);
      whole.set(pieces.row(p), 0, n);
      load(call, first, n, whole, true, tile, uncounted);
      split_by_sign(tile, n, tile.spread);
      lanes.add(tile.spread, 0, n);
    }
    lanes.store(coefficients[p]);
  }

  // ---------------------------------------------------------------------------------------------------------- pieces

  // Sum of a over the chosen tokens of a piece. n equal float32 terms sum to n a exactly, so that a constant a comes back to
  // the bit: the on-policy promise.
  double coefficient(int64_t p, int sign, int64_t chosen) const {
    if (chosen == 0) return 0.0;  // a may be anything
    return varies ? coefficients[p][sign] : double(of_row(pieces.row(p))) * double(chosen);
  }

  float of_row(int64_t row) const { return args.weights[row] * args.advantages[row]; }

  // What a plain token of a piece gets as its gradient: it does not depend on the token.
  float gradient(int64_t p, int sign, const PieceGain& piece, float arriving) const {
    const float slope = piece.own[0][sign];
    if (slope == 0.0f) return arriving;
    const float a = of_row(pieces.row(p));
    return (finite(a) ? policy_value(a, piece.ratio[sign]) * slope : 0.0f) + arriving;
  }

  void combine(const PieceGain* gains, const float (*arriving)[2], float* gradients) const {
    for_each_piece(pieces.count(), threads, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        if (pieces.length(p) == 0) continue;
        gradients[p] = gradient(p, Signs(args, pieces.row(p)).first, gains[p], arriving[p][0]);
      }
    });
  }

  // ----------------------------------------------------------------------------------------------------- second sweep

  // Completes loss and gradient; `all` takes what it counts, null: nothing is to be counted.
  void finish(const PieceGain* gains, const float (*arriving)[2], Partial* all) const {
    const DroppedGate gate = {pick_dropped_loop(!linear, split), gains, arriving, linear};
    parallel_for(chunks(), threads, [&](int64_t chunk) {
      Tile tile;
      Partial counted;
      for_each_tile(pieces, chunk, [&](int64_t first, int n, const Segments& segments) {
        load(call, first, n, segments, reload[chunk], tile, counted);
        finish_tile(call, gate, first, n, segments, tile, all ? all[chunk] : counted);
      });
    });
  }

  // Completes the gradient, which is all that is left; gradients [pieces].
  void fill(const float* gradients) const {
    if (!args.grad) return;
    parallel_for(chunks(), threads, [&](int64_t chunk) {
      Tile tile;
      Partial counted;
      for_each_tile(pieces, chunk, [&](int64_t first, int n, const Segments& segments) {
        const Masked which = masked[first / kTile];
        if (which == Masked::all) return clear_gradient(args, first, n);
        const uint8_t* mask = which == Masked::some ? args.mask + first : nullptr;
        float* grad = args.grad + first;
        if (reload[chunk]) {  // some token has no gradient
          load(call, first, n, segments, true, tile, counted);
          spread(n, segments, gradients, tile.spread[0]);
          for (int i = 0; i < n; ++i) grad[i] = keep_if(tile.kind[i] != kAbsent && tile.infinite[i] == 0, tile.spread[0][i]);
        } else if (segments.few(n)) {
          fill_few(segments, gradients, mask, grad);
        } else if (mask) {
          spread(n, segments, gradients, tile.spread[0]);
          for (int i = 0; i < n; ++i) grad[i] = keep_if(mask[i] != 0, tile.spread[0][i]);
        } else {
          spread(n, segments, gradients, tile.spread[0]);
          std::memcpy(grad, tile.spread[0], size_t(n) * sizeof(float));
        }
      });
    });
  }

  static void fill_few(const Segments& segments, const float* gradients, const uint8_t* mask, float* grad) {
    for (const Segment& segment : segments) {
      const Floats each = all<Floats>(gradients[segment.piece]);
      for_each_vector(segment.begin, segment.end, [&](int i, Mask own, auto whole) __attribute__((always_inline)) {
        constexpr bool kWhole = decltype(whole)::value;
        store_own<kWhole>(own, mask ? keep_if(present_own<kWhole>(own, mask + i), each) : each, grad + i);
      });
    }
  }

  // Writes the gradients of pieces to their tokens, whole vectors at a time, and 0 between.
  static void spread(int n, const Segments& segments, const float* gradients, float* __restrict each) {
    int covered = 0;
    for (const Segment& segment : segments) {
      for (; covered < segment.begin; ++covered) each[covered] = 0.0f;
      covered = segment.end;
      const float here = gradients[segment.piece];
      for (int i = segment.begin; i < segment.end; i += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) each[i + lane] = here;
      }
    }
    for (; covered < n; ++covered) each[covered] = 0.0f;
  }
};

}  // namespace hpo::HPO_ISA
