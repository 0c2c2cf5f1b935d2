// policy_loss under a hierarchy of gates: z = g_0(x - a_1) + g_1(a_1 - a_2) + ... + g_K(a_K), any depth in two sweeps over the
// tokens. A third one only touches pieces to which a saturated gate hands gradient through an aggregate. The definition is
// hpo_core/reference/gates.py.
//
// What happens above the tokens depends on a token only through its piece and the sign of its advantage, so it is arithmetic on
// pieces: sums of log-ratios up, gates, sums of gradients up, and what flows back down.
#include <algorithm>

#include "gates_plain.h"
#include "hierarchy_pieces.h"
#include "hierarchy_plain.h"
#include "kernels.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

// --------------------------------------------------------------------------------------------------- what pieces add up

// A gate with what belongs to one sign of the advantage in the place of the other's too.
PieceGate of_sign(const PieceGate& piece, int sign) {
  PieceGate one = piece;
  one.z[0] = piece.z[sign], one.below[0] = piece.below[sign], one.above[0] = piece.above[sign];
  for (int channel = 0; channel < 2; ++channel) {
    one.slope[channel][0] = piece.slope[channel][sign], one.own[channel][0] = piece.own[channel][sign];
  }
  return one;
}

struct Workspace {
  Arena arena;
  Partial* partials;  // [tasks]
  uint8_t* seen;  // [rows]
  uint8_t* plain;  // [tasks], 1 where the later sweeps may take every tile for plain
  int64_t* start;  // [pieces + 1]
  LogRatios *log_ratios, *log_ratios_of_blocks;  // [pieces], [tasks]: the rest of a piece that other tasks began
  SegmentTables tables;
  Flow *flows, *flows_of_blocks;  // [pieces], [tasks]
  PieceGate* gates;  // [pieces]
  LevelSlopes* slopes;  // [pieces]
  float (*delivered)[2];  // [pieces]: the gradient that arrives through aggregates, by channel
  int64_t bytes;

  Workspace(void* base, int64_t tokens, int64_t rows, int64_t count) : arena(base) {
    const int64_t tasks = tokens / kChunk + 1;
    partials = arena.take<Partial>(tasks);
    seen = arena.take<uint8_t>(rows);
    plain = arena.take<uint8_t>(tasks);
    start = arena.take<int64_t>(count + 1);
    log_ratios = arena.take<LogRatios>(count);
    log_ratios_of_blocks = arena.take<LogRatios>(tasks);
    tables.sums = arena.take<int64_t>(3 * kMostLevels * count);
    tables.largest = arena.take<int64_t>(2 * kMostLevels * count);
    tables.arriving = arena.take<int64_t>(2 * kMostLevels * count);
    flows = arena.take<Flow>(count);
    flows_of_blocks = arena.take<Flow>(tasks);
    gates = arena.take<PieceGate>(count);
    slopes = arena.take<LevelSlopes>(count);
    delivered = arena.take<float[2]>(count);
    bytes = arena.bytes();
  }

  // Of segment s at level k at [k * pieces + s].
  LogRatios* segments() const {
    static_assert(sizeof(LogRatios) == 3 * sizeof(int64_t), "the layout of SegmentTables::sums");
    return reinterpret_cast<LogRatios*>(tables.sums);
  }
};

void add_log_ratios(const Tile& tile, const float* entering, int n, bool split, LogRatios& sums) {
  int32_t kinds = 0;
  int64_t rising = 0, total = 0;
  for (int i = 0; i < n; ++i) kinds += tile.kind[i];
  for (int i = 0; i < n; ++i) {
    const float x = entering[i];
    const int64_t fixed = to_fixed(x);
    total += fixed;
    rising += x < 0.0f ? 0 : fixed;
  }
  sums.valid += positives(kinds) + negatives(kinds);
  sums.fixed[0] += split ? rising : total;
  sums.fixed[1] += split ? rising - total : 0;
}

// ---------------------------------------------------------------------------------------------------------------- gates

// The levels above the tokens of one piece, which has some. segment(k): the sums of its segment at level k.
template <class SegmentAt>
void gate_piece(const Pieces& pieces, int64_t p, const SegmentAt& segment, PieceGate& gate, LevelSlopes& slopes) {
  // Advantages of rows have one sign here.
  const PolicyLossArgs& args = pieces.args;
  const int negative = !args.advantage_per_token && args.advantages[pieces.row(p)] < 0.0f;
  const int first_sign = args.advantage_per_token ? 0 : negative, last_sign = args.advantage_per_token ? 1 : negative;
  for (int channel = 0; channel <= pieces.hierarchy.split; ++channel) {
    for (int sign = first_sign; sign <= last_sign; ++sign) {
      const auto put_slope = [&](int k, double slope) { slopes.slope[k][channel][sign] = slope; };
      const GateColumn column = gate_column(pieces.hierarchy, channel, sign, segment, put_slope);
      gate.z[sign] += column.z;
      gate.mean[channel] = column.mean;
      gate.slope[channel][sign] = column.slope;
      gate.own[channel][sign] = column.own;
      gate.below[sign] |= column.below;
      gate.above[sign] |= column.above;
    }
  }
}

struct TokenBounds {
  float low[2], high[2];  // by sign of the advantage
};

// The gates of the tokens of one piece, vector by vector.
template <bool kScoreHead, bool kSplit, bool kDrop, bool kOneSign>
struct TokenGates {
  const PieceGate piece;
  const float keep;
  TokenTerms& terms;
  float *loss, *grad;
  Ints chosen = {}, below_sum = {}, above_sum = {}, flows = {};

  TokenGates(const PieceGate& piece, float keep, TokenTerms& terms, float* loss, float* grad)
      : piece(piece), keep(keep), terms(terms), loss(loss), grad(grad) {}

  HPO_INLINE void step(int i, Ints kind, Floats x, Floats coefficient, Floats low, Floats high, const float* logp) {
    const Ints present = kind != kAbsent, negative = kOneSign ? Ints{} : Ints(kind == kNegative);
    const GatedTokenNumber<Floats> token = gate_token<Floats>(piece, kSplit, kDrop, keep, negative, x, low, high);
    const Floats value = keep_if(present, token_value(coefficient, token.z));
    if (kScoreHead) {
      store_lanes(keep_if(present, value * load_lanes<Floats>(logp + i)), loss + i);
      store_lanes(value, grad + i);
    } else {
      store_lanes(value, loss + i);
      store_lanes(keep_if(present, value * token.slope), grad + i);
      const Floats rising = value * token.rising_step, falling = value * token.falling_step;
      store_lanes(rising, terms.past_token[0] + i);
      if (kSplit) store_lanes(falling, terms.past_token[1] + i);
      flows |= (rising != 0.0f) | (falling != 0.0f);
    }
    chosen += kind;
    below_sum = add_where(token.below, kind, below_sum);
    above_sum = add_where(token.above, kind, above_sum);
  }

  GateCounts counts() const {
    GateCounts found;
    int32_t some_flow = 0;
    found.chosen = sum_lanes(chosen), found.below = sum_lanes(below_sum), found.above = sum_lanes(above_sum);
    for (int lane = 0; lane < kWidth; ++lane) some_flow |= flows[lane];
    terms.flows = some_flow != 0;
    return found;
  }
};

// Whole vectors; what lies beyond the tile is absent.
using TokenLoop = GateCounts (*)(const PieceGate&, float keep, const TokenBounds&, const Tile&, const float* coefficient,
                                 const float* logp, TokenTerms&, float* loss, float* grad, int n);

template <bool kScoreHead, bool kSplit, bool kDrop, bool kDriven>
GateCounts token_loop(const PieceGate& piece, float keep, const TokenBounds& bounds, const Tile& tile, const float* coefficient,
                      const float* logp, TokenTerms& terms, float* loss, float* grad, int n) {
  TokenGates<kScoreHead, kSplit, kDrop, false> gates(piece, keep, terms, loss, grad);
  for (int i = 0; i < n; i += kWidth) {
    const Ints kind = load_lanes<Ints>(tile.chosen + i);
    const Ints negative = kind == kNegative;
    const Floats low = kDriven ? load_lanes<Floats>(terms.low + i) : by_sign<Floats>(negative, bounds.low);
    const Floats high = kDriven ? load_lanes<Floats>(terms.high + i) : by_sign<Floats>(negative, bounds.high);
    gates.step(i, kind, load_lanes<Floats>(tile.x + i), load_lanes<Floats>(coefficient + i), low, high, logp);
  }
  return gates.counts();
}

// A plain tile: its tokens have one advantage, and are read where they are; what lies behind them is absent.
using PlainLoop = GateCounts (*)(const PieceGate&, float keep, const TokenBounds&, const PolicyLossArgs&, int64_t first,
                                 float coefficient, int32_t kind, TokenTerms&, float* loss, float* grad, int n);

template <bool kScoreHead, bool kSplit, bool kDrop>
GateCounts plain_loop(const PieceGate& piece, float keep, const TokenBounds& bounds, const PolicyLossArgs& args, int64_t first,
                      float coefficient, int32_t kind, TokenTerms& terms, float* loss, float* grad, int n) {
  const int sign = kind == kNegative;
  TokenGates<kScoreHead, kSplit, kDrop, true> gates(of_sign(piece, sign), keep, terms, loss, grad);
  const float* logp = args.logp + first;
  const float* old_logp = args.old_logp ? args.old_logp + first : logp;
  const Floats low = all<Floats>(bounds.low[sign]), high = all<Floats>(bounds.high[sign]), a = all<Floats>(coefficient);
  for (int i = 0; i < n; i += kWidth) {
    const Ints given = first_lanes(n - i) & (Ints{} + kind);
    const Ints here = args.mask ? keep_where(args.mask + first + i, given) : given;
    const Floats x = keep_if(here != kAbsent, load_lanes<Floats>(logp + i) - load_lanes<Floats>(old_logp + i));
    gates.step(i, here, x, a, low, high, logp);
  }
  return gates.counts();
}

template <bool kScoreHead, bool kSplit>
TokenLoop pick_token_loop(bool drop, bool driven) {
  if (drop) return token_loop<kScoreHead, kSplit, true, false>;
  return driven ? token_loop<kScoreHead, kSplit, false, true> : token_loop<kScoreHead, kSplit, false, false>;
}

template <bool kScoreHead, bool kSplit>
PlainLoop pick_plain_loop(bool drop) {
  return drop ? plain_loop<kScoreHead, kSplit, true> : plain_loop<kScoreHead, kSplit, false>;
}

PlainLoop pick_plain_loop(const GateStructure& structure, bool split) {
  const bool drop = structure.token == TokenGate::drop;
  if (structure.head == Head::score) return split ? pick_plain_loop<true, true>(drop) : pick_plain_loop<true, false>(drop);
  return split ? pick_plain_loop<false, true>(drop) : pick_plain_loop<false, false>(drop);
}

TokenLoop pick_token_loop(const GateStructure& structure, bool split, bool driven) {
  const bool drop = structure.token == TokenGate::drop;
  if (structure.head == Head::score)
    return split ? pick_token_loop<true, true>(drop, driven) : pick_token_loop<true, false>(drop, driven);
  return split ? pick_token_loop<false, true>(drop, driven) : pick_token_loop<false, false>(drop, driven);
}

// Which loss and gradient every call computes, and what its loops need.
struct TokenPlan {
  const Hierarchy& hierarchy;
  TokenLoop loop;
  PlainLoop plain_loop;
  TokenBounds bounds;
  float keep;  // 0 where the finest level takes the place of the token's own slope
  bool driven;  // tokens have bounds of their own
  bool carries;  // some level hands gradient through its aggregate
  bool by_sign;  // and it is not the finest
  OpenLoop open_loop;  // of plain tiles where it can be used; null: this gate is none that it knows
  TermPlan term;
  TermLoop term_loop;  // null: the gate asks for no more than the loops above

  TokenPlan(const Call& call, const Hierarchy& hierarchy)
      : hierarchy(hierarchy), open_loop(nullptr), term(call, hierarchy), term_loop(nullptr) {
    const GateStructure& structure = call.structure;
    if (hierarchy.term.present) term_loop = pick_term_loop(structure.head);
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
    keep = term.keep;
    carries = through && structure.head != Head::score && call.args.grad;
    by_sign &= carries;
    loop = pick_token_loop(structure, hierarchy.split, driven);
    plain_loop = pick_plain_loop(structure, hierarchy.split);
    if (clips && keep != 0.0f && structure.head == Head::linear) open_loop = pick_open_loop(hierarchy.split, call.args.mask);
  }
};

// The bounds of the token gate, token by token.
void load_bounds(const Call& call, const TokenBounds& bounds, int64_t first, int n, const Tile& tile, TokenTerms& terms) {
  for (int i = 0; i < n; ++i) {
    const int sign = tile.chosen[i] == kNegative;
    const bool own_low = call.args.low && call.structure.low_driven[sign] && tile.chosen[i] != kAbsent;
    const bool own_high = call.args.high && call.structure.high_driven[sign] && tile.chosen[i] != kAbsent;
    terms.low[i] = own_low ? log_bound(call.args.low[first + i]) : bounds.low[sign];
    terms.high[i] = own_high ? log_bound(call.args.high[first + i]) : bounds.high[sign];
  }
}

// Lanes by the position inside the piece.
struct FlowLanes {
  double by_sign[2][kLanes] = {}, past_token[2][kLanes] = {};

  Flow total() {
    Flow flow = {};
    for (int i = 0; i < 2; ++i) flow.by_sign[i] = total(by_sign[i]), flow.past_token[i] = total(past_token[i]);
    return flow;
  }

 private:
  static double total(double* lanes) {
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    return lanes[0];
  }
};

// Loss and gradient of the tiles of one block, as finish_tile asks for them.
struct BlockGate {
  const TokenPlan& plan;
  const PieceGate& piece;
  int64_t row;
  TokenTerms& terms;
  FlowLanes& lanes;
  static constexpr bool values_by_row = false;

  GateCounts operator()(const Call& call, int64_t first, int n, const Segments&, Tile& tile, const float* coefficient,
                        float* loss, float* grad) const {
    const bool weighted = loss == tile.loss;  // else this is the loss of each token, whose gradient nobody wants
    if (plan.driven || plan.term_loop) load_bounds(call, plan.bounds, first, n, tile, terms);
    const GateCounts counts = plan.term_loop ? run_terms(call, first, n, weighted, tile, coefficient, loss, grad)
                                             : run_loop(tile, coefficient, call.args.logp + first, loss, grad, n);
    if (plan.carries && weighted) add_flows(tile, plan.term_loop ? terms.slope : loss, n);
    drop_infinite(call, n, tile, loss, grad);
    return counts;
  }

  // The same of a plain tile, from begin to end.
  void finish_plain(const Call& call, int64_t first, int n, Tile& tile, Partial& partial) const {
    const float advantage = call.args.advantages[row], coefficient = call.args.weights[row] * advantage;
    // The loop goes on to the end of a vector, where the next row's gradient lies, perhaps written by another thread.
    float* grad = call.args.grad && n % kLanes == 0 ? call.args.grad + first : tile.grad;
    const int32_t kind = advantage < 0.0f ? kNegative : kPositive;
    const int sign = kind == kNegative;
    const OpenLevels levels(piece, sign, plan.hierarchy.split, plan.bounds.low[sign], plan.bounds.high[sign]);
    const GateCounts counts =
        plan.open_loop && levels.open
            ? plan.open_loop(levels, call.args, first, coefficient, kind, terms, tile.loss, grad, n)
            : plan.plain_loop(piece, plan.keep, plan.bounds, call.args, first, coefficient, kind, terms, tile.loss, grad, n);
    counts.add_to(partial.slots);
    if (call.args.grad && n % kLanes != 0) std::memcpy(call.args.grad + first, tile.grad, size_t(n) * sizeof(float));
    add_pairs(tile.loss, n, partial.sums[kLossSum]);
    if (!plan.carries) return;
    if (terms.flows) add_past_token(n);
    if (plan.by_sign) add_terms(tile.loss, n, lanes.by_sign[kind == kNegative]);
  }

 private:
  // The loop goes on to the end of a vector; tensors may not.
  GateCounts run_loop(Tile& tile, const float* coefficient, const float* logp, float* loss, float* grad, int n) const {
    if (n % kLanes == 0) return plan.loop(piece, plan.keep, plan.bounds, tile, coefficient, logp, terms, loss, grad, n);
    alignas(64) float own_logp[kPadded], own_loss[kPadded], own_grad[kPadded];
    for (int i = n; i < n + kLanes; ++i)
      tile.chosen[i] = kAbsent, tile.x[i] = own_logp[i] = terms.low[i] = terms.high[i] = 0.0f;
    std::memcpy(own_logp, logp, size_t(n) * sizeof(float));
    const GateCounts counts =
        plan.loop(piece, plan.keep, plan.bounds, tile, coefficient, own_logp, terms, own_loss, own_grad, n);
    std::memcpy(loss, own_loss, size_t(n) * sizeof(float));
    std::memcpy(grad, own_grad, size_t(n) * sizeof(float));
    return counts;
  }

  GateCounts run_terms(const Call& call, int64_t first, int n, bool weighted, Tile& tile, const float* coefficient, float* loss,
                       float* grad) const {
    const float* entering = load_entering(plan.term, tile, n, terms);
    load_terms(call, first, n, row, weighted ? call.args.weights[row] : 1.0f, tile, terms);
    alignas(64) float own_loss[kPadded], own_grad[kPadded];
    const GateCounts counts = plan.term_loop(plan.term, piece, tile, entering, coefficient, terms, own_loss, own_grad, n);
    std::memcpy(loss, own_loss, size_t(n) * sizeof(float));
    std::memcpy(grad, own_grad, size_t(n) * sizeof(float));
    return counts;
  }

  void add_past_token(int n) const {
    for (int i = 0; i <= plan.hierarchy.split; ++i) add_pairs(terms.past_token[i], n, lanes.past_token[i]);
  }

  // slope: d loss / d z of each token.
  void add_flows(const Tile& tile, const float* slope, int n) const {
    if (terms.flows) add_past_token(n);
    if (!plan.by_sign) return;
    for (int i = 0; i < n; ++i) terms.by_sign[0][i] = keep_if(tile.chosen[i] == kPositive, slope[i]);
    for (int i = 0; i < n; ++i) terms.by_sign[1][i] = keep_if(tile.chosen[i] == kNegative, slope[i]);
    for (int i = 0; i < 2; ++i) add_terms(terms.by_sign[i], n, lanes.by_sign[i]);
  }
};

// ----------------------------------------------------------------------------------------------------------- one call

void sum_segments(const Pieces& pieces, const Workspace& space) {
  for (int k = 0; k < pieces.hierarchy.depth; ++k) {
    LogRatios* segments = space.segments() + k * pieces.count();
    std::fill_n(segments, pieces.count(), LogRatios{});
    for (int64_t p = 0; p < pieces.count(); ++p) {
      if (pieces.length(p) > 0) segments[pieces.ancestor(k, p)].add(space.log_ratios[p]);
    }
  }
}

// Tokens outside every piece are masked.
void clear_gaps(const Pieces& pieces) {
  const PolicyLossArgs& args = pieces.args;
  const auto clear = [&](int64_t first, int64_t end) {
    if (first >= end) return;
    if (args.grad) std::memset(args.grad + first, 0, size_t(end - first) * sizeof(float));
    if (args.token_loss) std::memset(args.token_loss + first, 0, size_t(end - first) * sizeof(float));
  };
  int64_t covered = 0;
  for (int64_t p = 0; p < pieces.count(); ++p) {
    if (pieces.length(p) == 0) continue;
    clear(covered, pieces.hierarchy.piece_begin[p]);
    covered = pieces.hierarchy.piece_begin[p] + pieces.length(p);
  }
  clear(covered, args.tokens);
}

// Adds to the gradient of a plain tile what arrives at its tokens through aggregates.
void add_flow_to_plain(const PolicyLossArgs& args, int64_t first, int n, float rising, float falling) {
  const float* logp = args.logp + first;
  const float* old_logp = args.old_logp ? args.old_logp + first : logp;
  float* grad = args.grad + first;
  if (n % kLanes != 0) {
    for (int i = 0; i < n; ++i) {
      const bool valid = !args.mask || args.mask[first + i] != 0;
      grad[i] += keep_if(valid, logp[i] - old_logp[i] < 0.0f ? falling : rising);
    }
    return;
  }
  for (int i = 0; i < n; i += kWidth) {
    const Floats x = load_lanes<Floats>(logp + i) - load_lanes<Floats>(old_logp + i);
    const Floats flow = x < 0.0f ? all<Floats>(falling) : all<Floats>(rising);
    const Ints valid = args.mask ? Ints(keep_where(args.mask + first + i, Ints{} + 1) != 0) : Ints{} - 1;
    store_lanes(load_lanes<Floats>(grad + i) + keep_if(valid, flow), grad + i);
  }
}

// Calls body(place, gradient) for all that pieces hand up to their segments, unless it is 0; the place is that of the segment
// and the channel in SegmentTables.
template <class Body>
void for_each_handed_up(const Pieces& pieces, const Workspace& space, const Body& body) {
  const Hierarchy& hierarchy = pieces.hierarchy;
  for (int k = 0; k < hierarchy.depth; ++k) {
    if (hierarchy.levels[k].routing != Routing::through) continue;
    for (int64_t p = 0; p < pieces.count(); ++p) {
      if (pieces.length(p) == 0) continue;
      const int64_t segment = k * pieces.count() + pieces.ancestor(k, p);
      for (int channel = 0; channel <= hierarchy.split; ++channel) {
        const double handed = handed_up(space.slopes[p], k, channel, space.flows[p]);
        if (handed != 0.0) body(2 * segment + channel, handed);
      }
    }
  }
}

int64_t* clear_by_channel(const Pieces& pieces, int64_t* table) {
  std::fill_n(table, 2 * pieces.hierarchy.depth * pieces.count(), int64_t{0});  // of a caller without pieces: null
  return table;
}

void find_largest(const Pieces& pieces, const Workspace& space) {
  int64_t* largest = clear_by_channel(pieces, space.tables.largest);
  for_each_handed_up(pieces, space, [&](int64_t at, double handed) {
    const int64_t magnitude = magnitude_of(handed);
    if (largest[at] < magnitude) largest[at] = magnitude;
  });
}

void add_arriving(const Pieces& pieces, const Workspace& space) {
  int64_t* arriving = clear_by_channel(pieces, space.tables.arriving);
  for_each_handed_up(pieces, space,
                     [&](int64_t at, double handed) { arriving[at] += in_steps(handed, space.tables.largest[at]); });
}

// From what arrives at segments to the gradient that each token of a piece receives.
void deliver(const Pieces& pieces, const Workspace& space, int threads) {
  const Hierarchy& hierarchy = pieces.hierarchy;
  for_each_piece(pieces.count(), threads, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      if (pieces.length(p) == 0) continue;
      for (int channel = 0; channel <= hierarchy.split; ++channel) {
        double sum = 0.0;
        for (int k = 0; k < hierarchy.depth; ++k) {
          if (hierarchy.levels[k].routing != Routing::through) continue;
          const int64_t segment = k * pieces.count() + pieces.ancestor(k, p), at = 2 * segment + channel;
          sum += arrived(space.tables.arriving[at], space.tables.largest[at]) /
                 divisor(hierarchy.levels[k], space.segments()[segment].valid);
        }
        space.delivered[p][channel] = float(sum);
      }
      if (!hierarchy.split) space.delivered[p][1] = space.delivered[p][0];
    }
  });
}

void gate_pieces(const Pieces& pieces, const Workspace& space, int threads) {
  for_each_piece(pieces.count(), threads, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      if (pieces.length(p) == 0 || pieces.stands_alone(p)) continue;
      space.gates[p] = {}, space.slopes[p] = {};
      const auto segment = [&](int k) { return space.segments()[k * pieces.count() + pieces.ancestor(k, p)]; };
      if (space.log_ratios[p].valid > 0) gate_piece(pieces, p, segment, space.gates[p], space.slopes[p]);
    }
  });
}

struct Scratch {
  Tile tile;
  Segments whole;
  TokenTerms terms;
  Partial counted;  // what later sweeps count once more
};

// What is done to the tokens of one block.
struct Sweeps {
  const Call& call;
  const Pieces& pieces;
  const Workspace& space;
  const TokenPlan& plan;

  // The first sweep; returns whether the others may take every tile for plain.
  bool measure(const Block& block, Scratch& scratch, Partial& partial, LogRatios& sums) const {
    const bool may = may_be_plain(call.args) && !call.args.target;
    Tile& tile = scratch.tile;
    bool plain = may && !plan.term_loop && !plan.driven;
    const bool as_they_are = may && !plan.term.pre_gated, split = plan.hierarchy.split;
    for_each_tile_of(block, scratch.whole, [&](int64_t at, int n) {
      RowLogRatios row;
      const auto measure_row = split ? measure_plain_row<true> : measure_plain_row<false>;
      if (as_they_are && measure_row(call.args, at, n, block.row, tile, space.seen, partial, row)) {
        return sums.add({row.valid, {split ? row.rising : row.fixed, split ? row.rising - row.fixed : 0}});
      }
      if (!may || !measure_plain(call, at, n, scratch.whole, tile, space.seen, partial)) {
        hpo::HPO_ISA::measure(call, at, n, scratch.whole, tile, space.seen, partial);
        plain &= !tile.exceptional && tile.chosen == tile.kind;
      }
      if (plan.hierarchy.depth == 0) return;
      add_log_ratios(tile, load_entering(plan.term, tile, n, scratch.terms), n, split, sums);
    });
    return plain;
  }

  // The second: loss, gradient of the token's own path, and the flow into aggregates.
  void finish(const Block& block, const PieceGate& piece, bool plain, Scratch& scratch, Partial& partial, Flow& flow) const {
    FlowLanes lanes;
    const BlockGate gate = {plan, piece, block.row, scratch.terms, lanes};
    for_each_tile_of(block, scratch.whole, [&](int64_t at, int n) {
      if (plain && has_whole_vectors(call.args, at, n)) return gate.finish_plain(call, at, n, scratch.tile, partial);
      load(call, at, n, scratch.whole, true, scratch.tile, scratch.counted);
      finish_tile(call, gate, at, n, scratch.whole, scratch.tile, partial);
      if (plan.term_loop && plan.term.term.penalty != Penalty::none) {
        float* grad = call.args.grad ? call.args.grad + at : scratch.tile.grad;
        float* token_loss = call.args.token_loss ? call.args.token_loss + at : nullptr;
        add_own_penalty(call, plan.term, at, n, block.row, scratch.tile, grad, token_loss, partial);
      }
    });
    if (plan.carries) flow = lanes.total();
  }

  // The third, where something saturated: the gradient that arrives through aggregates. Elsewhere what is written stands.
  void receive(const Block& block, float rising, float falling, bool plain, Scratch& scratch) const {
    if (rising == 0.0f && falling == 0.0f) return;
    Tile& tile = scratch.tile;
    for_each_tile_of(block, scratch.whole, [&](int64_t at, int n) {
      if (plain) return add_flow_to_plain(call.args, at, n, rising, falling);
      load(call, at, n, scratch.whole, true, tile, scratch.counted);
      float* __restrict grad = call.args.grad + at;
      for (int i = 0; i < n; ++i) {
        const bool receives = tile.kind[i] != kAbsent && tile.infinite[i] == 0;
        grad[i] += keep_if(receives, plan.term.through_pre_gate(tile, i, tile.x[i] < 0.0f ? falling : rising));
      }
    });
  }

  // All that is left for a piece that shares its one level with no other, while its tokens are in the cache.
  void settle(const Block& block, const LogRatios& sums, bool plain, Scratch& scratch, Partial& partial) const {
    PieceGate gate = {};
    LevelSlopes slopes = {};
    if (plan.hierarchy.depth > 0 && sums.valid > 0) {
      gate_piece(pieces, block.piece, [&](int) { return sums; }, gate, slopes);
    }
    Flow flow = {};
    finish(block, gate, plain, scratch, partial, flow);
    if (!plan.carries || plan.hierarchy.levels[0].routing != Routing::through) return;
    const double tokens = divisor(plan.hierarchy.levels[0], sums.valid);
    const auto arriving = [&](double handed) {  // as if in tables
      const int64_t largest = magnitude_of(handed);
      return float(arrived(in_steps(handed, largest), largest) / tokens);
    };
    const float rising = arriving(flow.past_token[0]), falling = arriving(flow.past_token[1]);
    receive(block, rising, plan.hierarchy.split ? falling : rising, plain, scratch);
  }
};

}  // namespace

int64_t hierarchy_workspace(int64_t tokens, int64_t rows, int64_t pieces) {
  return Workspace(nullptr, tokens, rows, pieces).bytes;
}

void hierarchy(const PolicyLossArgs& args, const GateStructure& structure, const GateNumbers& numbers,
               const Hierarchy& hierarchy, int threads) {
  const Call call = {args, structure, numbers, Rows(args.cu_seqlens, args.rows, args.tokens)};
  Workspace space(args.workspace, args.tokens, args.rows, hierarchy.pieces);
  const Pieces pieces(hierarchy, args, space.start);
  const TokenPlan plan(call, hierarchy);
  const Sweeps sweeps = {call, pieces, space, plan};
  const bool whole = hierarchy.stage == Stage::whole;
  if (!whole) space.tables = hierarchy.tables;
  const auto reaches = [&](Stage stage) { return whole || hierarchy.stage == stage; };
  const bool some_together = pieces.together > 0 || !whole;  // a process without tokens fills its tables too
  threads = worthwhile(threads, args.tokens + hierarchy.pieces);
  const auto for_each_block_together = [&](const auto& body) {
    parallel_for(pieces.tasks(), threads, [&](int64_t task) {
      Scratch scratch;
      pieces.for_each_block(task, [&](const Block& block) {
        if (!pieces.stands_alone(block.piece)) body(task, block, scratch);
      });
    });
  };

  if (reaches(Stage::sums)) {
    std::memset(space.seen, 0, size_t(args.rows));
    clear_gaps(pieces);
    parallel_for(pieces.tasks(), threads, [&](int64_t task) {
      Scratch scratch;
      Partial partial;
      bool all_plain = true;
      pieces.for_each_block(task, [&](const Block& block) {
        LogRatios sums = {};
        const bool plain = sweeps.measure(block, scratch, partial, sums);
        if (pieces.stands_alone(block.piece)) return sweeps.settle(block, sums, plain, scratch, partial);
        (block.begins ? space.log_ratios[block.piece] : space.log_ratios_of_blocks[task]) = sums;
        all_plain &= plain;
      });
      space.partials[task] = partial;
      space.plain[task] = all_plain;
    });
    if (some_together) {
      gather_blocks(pieces, space.log_ratios_of_blocks, space.log_ratios);
      sum_segments(pieces, space);
    }
  }

  if (reaches(Stage::sweep)) {
    if (some_together) {
      gate_pieces(pieces, space, threads);
      for_each_block_together([&](int64_t task, const Block& block, Scratch& scratch) {
        Flow flow = {};
        sweeps.finish(block, space.gates[block.piece], space.plain[task], scratch, space.partials[task], flow);
        (block.begins ? space.flows[block.piece] : space.flows_of_blocks[task]) = flow;
      });
    }
    if (some_together && plan.carries) {
      gather_blocks(pieces, space.flows_of_blocks, space.flows);
      find_largest(pieces, space);
    }
    Partial total;
    for (int64_t task = 0; task < pieces.tasks(); ++task) total.add(space.partials[task]);
    int64_t seen = 0;
    for (int64_t row = 0; row < args.rows; ++row) seen += space.seen[row];
    finish(call, total, seen, call.rows.broken + pieces.broken);
  }

  if (!some_together || !plan.carries) return;
  if (reaches(Stage::couple)) add_arriving(pieces, space);
  if (reaches(Stage::deliver)) {
    deliver(pieces, space, threads);
    for_each_block_together([&](int64_t task, const Block& block, Scratch& scratch) {
      const auto& delivered = space.delivered[block.piece];
      sweeps.receive(block, delivered[0], delivered[1], space.plain[task], scratch);
    });
  }
}

}  // namespace hpo::HPO_ISA
