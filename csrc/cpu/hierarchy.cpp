// policy_loss under a hierarchy of gates: z = g_0(x - a_1) + g_1(a_1 - a_2) + ... + g_K(a_K), any depth in two sweeps over the
// tokens. A third one only touches pieces to which a saturated gate hands gradient through an aggregate. The definition is
// hpo_core/reference/gates.py.
//
// What happens above the tokens depends on a token only through its piece and the sign of its advantage, so it is arithmetic on
// pieces: sums of log-ratios up, gates, sums of gradients up, and what flows back down.
#include "hpo/hierarchy.h"
#include "gates_call.h"
#include "kernels.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

// ------------------------------------------------------------------------------------------------------ pieces and tasks
//
// Pieces are cut into blocks of kChunk tokens from their own first token on, so that the bits of what is summed over a piece
// depend on nothing but the piece. Block j of piece p belongs to the task that holds token start[p] + j kChunk when the pieces
// lie end to end: short pieces share a task, long ones spread over many, and a task has at most one block that begins neither
// in it nor in its piece.

struct Pieces {
  const Hierarchy& hierarchy;
  const PolicyLossArgs& args;
  int64_t* start;  // [pieces + 1], tokens of the pieces before
  int64_t broken = 0;

  Pieces(const Hierarchy& hierarchy, const PolicyLossArgs& args, int64_t* start)
      : hierarchy(hierarchy), args(args), start(start) {
    int64_t covered = 0;
    start[0] = 0;
    for (int64_t p = 0; p < hierarchy.pieces; ++p) {
      const Range range = piece_range(hierarchy, args, p);
      const bool good = !range.bad && range.begin >= covered;
      broken += !good;
      covered = good ? range.end : covered;
      start[p + 1] = start[p] + (good ? range.end - range.begin : 0);
    }
  }

  int64_t count() const { return hierarchy.pieces; }
  int64_t length(int64_t p) const { return start[p + 1] - start[p]; }
  int64_t blocks(int64_t p) const { return pieces(length(p), kChunk); }
  int64_t task(int64_t p) const { return start[p] / kChunk; }  // of its first block
  int64_t tasks() const { return start[count()] / kChunk + 1; }
  int64_t row(int64_t p) const { return hierarchy.piece_row[p]; }
  int64_t ancestor(int k, int64_t p) const { return hierarchy.ancestors[k * count() + p]; }

  // The first piece that starts at or behind this token.
  int64_t starting_at(int64_t token) const {
    int64_t low = 0, high = count();
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (start[middle] < token) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // Calls body(piece, first token, tokens, whether the block begins its piece) for the blocks of a task.
  template <class Body>
  void for_each_block(int64_t task, const Body& body) const {
    const int64_t next = starting_at(task * kChunk);
    int64_t before = next - 1;  // the piece that comes in from the left
    while (before >= 0 && length(before) == 0) --before;
    if (before >= 0) {
      const int64_t block = task - this->task(before);
      if (block > 0 && block < blocks(before)) visit(before, block, body);
    }
    for (int64_t p = next; p < count() && this->task(p) == task; ++p) {
      if (length(p) > 0) visit(p, 0, body);
    }
  }

 private:
  template <class Body>
  void visit(int64_t p, int64_t block, const Body& body) const {
    const int64_t skipped = block * kChunk, rest = length(p) - skipped;
    body(p, hierarchy.piece_begin[p] + skipped, rest < kChunk ? rest : kChunk, block == 0);
  }
};

// Calls body(first token, number of tokens, the tile as one segment) for the tiles of a block.
template <class Body>
void for_each_tile_of(int64_t row, int64_t first, int64_t tokens, Segments& whole, const Body& body) {
  for (int64_t tile = first; tile < first + tokens; tile += kTile) {
    const int n = int(first + tokens - tile < kTile ? first + tokens - tile : kTile);
    whole.count = 1;
    whole.list[0] = {row, 0, n};
    body(tile, n);
  }
}

// --------------------------------------------------------------------------------------------------- what pieces add up

struct Workspace {
  Arena arena;
  Partial* partials;  // [tasks]
  uint8_t* seen;  // [rows]
  int64_t* start;  // [pieces + 1]
  LogRatios *log_ratios, *log_ratios_of_blocks;  // [pieces], [tasks]: the rest of a piece that other tasks began
  LogRatios* segments;  // [levels][pieces]
  Flow *flows, *flows_of_blocks;  // [pieces], [tasks]
  double (*arriving)[2];  // [levels][pieces]
  PieceGate* gates;  // [pieces]
  LevelSlopes* slopes;  // [pieces]
  float (*delivered)[2];  // [pieces]: the gradient that arrives through aggregates, by channel
  int64_t bytes;

  Workspace(void* base, int64_t tokens, int64_t rows, int64_t count) : arena(base) {
    const int64_t tasks = tokens / kChunk + 1;
    partials = arena.take<Partial>(tasks);
    seen = arena.take<uint8_t>(rows);
    start = arena.take<int64_t>(count + 1);
    log_ratios = arena.take<LogRatios>(count);
    log_ratios_of_blocks = arena.take<LogRatios>(tasks);
    segments = arena.take<LogRatios>(kMostLevels * count);
    flows = arena.take<Flow>(count);
    flows_of_blocks = arena.take<Flow>(tasks);
    arriving = arena.take<double[2]>(kMostLevels * count);
    gates = arena.take<PieceGate>(count);
    slopes = arena.take<LevelSlopes>(count);
    delivered = arena.take<float[2]>(count);
    bytes = arena.bytes();
  }
};

// Adds to pieces what the tasks behind their first one found.
template <class Sums>
void gather_blocks(const Pieces& pieces, const Sums* of_blocks, Sums* of_pieces) {
  for (int64_t p = 0; p < pieces.count(); ++p) {
    for (int64_t block = 1; block < pieces.blocks(p); ++block) of_pieces[p].add(of_blocks[pieces.task(p) + block]);
  }
}

void add_log_ratios(const Tile& tile, int n, bool split, LogRatios& sums) {
  int32_t kinds = 0;
  int64_t rising = 0, falling = 0;
  for (int i = 0; i < n; ++i) kinds += tile.kind[i];
  for (int i = 0; i < n; ++i) {
    const float x = tile.x[i], up = rising_part(split, x);
    rising += to_fixed(up);
    falling += to_fixed(up - x);
  }
  sums.valid += positives(kinds) + negatives(kinds);
  sums.fixed[0] += rising;
  sums.fixed[1] += falling;
}

// ---------------------------------------------------------------------------------------------------------------- gates

// The levels above the tokens of one piece that has some.
void gate_piece(const Pieces& pieces, const Workspace& space, int64_t p, PieceGate& gate, LevelSlopes& slopes) {
  const auto segment = [&](int k) { return space.segments[k * pieces.count() + pieces.ancestor(k, p)]; };
  gate = {};
  for (int channel = 0; channel <= pieces.hierarchy.split; ++channel) {
    for (int sign = 0; sign < 2; ++sign) {
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

// Tokens of one tile, all in one piece. Bounds of the token gate are in log space.
struct TokenTerms {
  float low[kPadded], high[kPadded];
  float by_sign[2][kPadded], past_token[2][kPadded];
};

using TokenLoop = GateCounts (*)(const PieceGate&, float keep, const Tile&, const float* coefficient, const float* logp,
                                 TokenTerms&, float* loss, float* grad, int n);

template <bool kScoreHead, bool kSplit, bool kDrop>
GateCounts token_loop(const PieceGate& piece, float keep, const Tile& tile, const float* __restrict coefficient,
                      const float* __restrict logp, TokenTerms& terms, float* __restrict loss, float* __restrict grad, int n) {
  const PieceGate gate = piece;
  const int32_t* __restrict chosen = tile.chosen;
  const float* __restrict x_of = tile.x;
  const float* __restrict low_of = terms.low, * __restrict high_of = terms.high;
  float* __restrict rising_flow = terms.past_token[0], * __restrict falling_flow = terms.past_token[1];
  GateCounts counts;
  for (int i = 0; i < n; ++i) {
    const int32_t kind = chosen[i];
    const bool present = kind != kAbsent, negative = kind == kNegative;
    const GatedToken token = gate_token(gate, kSplit, kDrop, keep, negative, x_of[i], low_of[i], high_of[i]);
    const float value = token_value(coefficient[i], token.z);
    loss[i] = keep_if(present, kScoreHead ? value * logp[i] : value);
    grad[i] = keep_if(present, kScoreHead ? value : value * token.slope);
    if (!kScoreHead) {
      rising_flow[i] = keep_if(present, value * token.rising_step);
      falling_flow[i] = keep_if(present, value * token.falling_step);
    }
    counts.chosen += kind;
    counts.below += kind & token.below;
    counts.above += kind & token.above;
  }
  return counts;
}

TokenLoop pick_token_loop(bool score, bool split, bool drop) {
  if (score) {
    if (split) return drop ? token_loop<true, true, true> : token_loop<true, true, false>;
    return drop ? token_loop<true, false, true> : token_loop<true, false, false>;
  }
  if (split) return drop ? token_loop<false, true, true> : token_loop<false, true, false>;
  return drop ? token_loop<false, false, true> : token_loop<false, false, false>;
}

// The bounds of the token gate, token by token.
void load_bounds(const Call& call, const Hierarchy& hierarchy, int64_t first, int n, const Tile& tile, TokenTerms& terms) {
  const bool clips = call.structure.token == TokenGate::clip;
  float low[2], high[2];
  for (int sign = 0; sign < 2; ++sign) {
    low[sign] = clips ? float(hierarchy.token_low[sign]) : -INFINITY;
    high[sign] = clips ? float(hierarchy.token_high[sign]) : INFINITY;
  }
  for (int i = 0; i < n; ++i) {
    const bool negative = tile.chosen[i] == kNegative;
    terms.low[i] = negative ? low[1] : low[0];
    terms.high[i] = negative ? high[1] : high[0];
  }
  const auto drive = [&](const float* bounds, const int32_t* driven, float* out) {
    if (!clips || !bounds) return;
    for (int i = 0; i < n; ++i) {
      const bool own = tile.chosen[i] != kAbsent && driven[tile.chosen[i] == kNegative];
      if (own) out[i] = log_bound(bounds[first + i]);
    }
  };
  drive(call.args.low, call.structure.low_driven, terms.low);
  drive(call.args.high, call.structure.high_driven, terms.high);
}

// Lanes by the position inside the piece.
struct FlowLanes {
  double by_sign[2][kLanes] = {}, past_token[2][kLanes] = {};

  void add(TokenTerms& terms, int n) {
    for (int i = 0; i < 2; ++i) add_terms(terms.by_sign[i], n, by_sign[i]);
    for (int i = 0; i < 2; ++i) add_terms(terms.past_token[i], n, past_token[i]);
  }

  Flow total() const {
    Flow flow = {};
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < 2; ++i) flow.by_sign[i] += by_sign[i][lane], flow.past_token[i] += past_token[i][lane];
    }
    return flow;
  }
};

// Loss and gradient of the tiles of one block, as finish_tile asks for them.
struct BlockGate {
  const Hierarchy& hierarchy;
  TokenLoop loop;
  const PieceGate& piece;
  float keep;  // 0 where the finest level takes the place of the token's own slope
  bool carries;  // some level hands gradient through its aggregate
  TokenTerms& terms;
  FlowLanes& lanes;
  static constexpr bool values_by_row = false;

  GateCounts operator()(const Call& call, int64_t first, int n, const Segments&, Tile& tile, const float* coefficient,
                        float* loss, float* grad) const {
    load_bounds(call, hierarchy, first, n, tile, terms);
    const GateCounts counts = loop(piece, keep, tile, coefficient, call.args.logp + first, terms, loss, grad, n);
    if (carries && grad != tile.grad) {  // there goes a gradient that nobody wants
      for (int i = 0; i < n; ++i) terms.by_sign[0][i] = keep_if(tile.chosen[i] == kPositive, loss[i]);
      for (int i = 0; i < n; ++i) terms.by_sign[1][i] = keep_if(tile.chosen[i] == kNegative, loss[i]);
      lanes.add(terms, n);
    }
    drop_infinite(call, n, tile, loss, grad);
    return counts;
  }
};

// ----------------------------------------------------------------------------------------------------------- one call

void sum_segments(const Pieces& pieces, const Workspace& space) {
  for (int k = 0; k < pieces.hierarchy.depth; ++k) {
    LogRatios* segments = space.segments + k * pieces.count();
    std::memset(segments, 0, size_t(pieces.count()) * sizeof *segments);
    for (int64_t p = 0; p < pieces.count(); ++p) {
      if (pieces.length(p) > 0) segments[pieces.ancestor(k, p)].add(space.log_ratios[p]);
    }
  }
}

// From the flows of pieces to the gradient that each of their tokens receives through aggregates.
void couple(const Pieces& pieces, const Workspace& space, int threads) {
  const Hierarchy& hierarchy = pieces.hierarchy;
  for (int k = 0; k < hierarchy.depth; ++k) {
    double (*arriving)[2] = space.arriving + k * pieces.count();
    std::memset(arriving, 0, size_t(pieces.count()) * sizeof *arriving);
    if (hierarchy.levels[k].routing != Routing::through) continue;
    for (int64_t p = 0; p < pieces.count(); ++p) {
      if (pieces.length(p) == 0) continue;
      double* here = arriving[pieces.ancestor(k, p)];
      for (int channel = 0; channel <= hierarchy.split; ++channel) {
        here[channel] += handed_up(space.slopes[p], k, channel, space.flows[p]);
      }
    }
  }
  for_each_piece(pieces.count(), threads, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      if (pieces.length(p) == 0) continue;
      for (int channel = 0; channel <= hierarchy.split; ++channel) {
        double sum = 0.0;
        for (int k = 0; k < hierarchy.depth; ++k) {
          const int64_t at = k * pieces.count() + pieces.ancestor(k, p);
          sum += space.arriving[at][channel] / divisor(hierarchy.levels[k], space.segments[at].valid);
        }
        space.delivered[p][channel] = float(sum);
      }
      if (!hierarchy.split) space.delivered[p][1] = space.delivered[p][0];
    }
  });
}

}  // namespace

int64_t hierarchy_workspace(int64_t tokens, int64_t rows, int64_t pieces) {
  return Workspace(nullptr, tokens, rows, pieces).bytes;
}

void hierarchy(const PolicyLossArgs& args, const GateStructure& structure, const GateNumbers& numbers,
               const Hierarchy& hierarchy, int threads) {
  const Call call = {args, structure, numbers, Rows(args.cu_seqlens, args.rows, args.tokens)};
  const Workspace space(args.workspace, args.tokens, args.rows, hierarchy.pieces);
  const Pieces pieces(hierarchy, args, space.start);
  const bool score = structure.head == Head::score, drop = structure.token == TokenGate::drop;
  threads = worthwhile(threads, args.tokens + hierarchy.pieces);
  std::memset(space.seen, 0, size_t(args.rows));

  // Tokens outside every piece are masked.
  parallel_for(HPO_ISA::pieces(args.tokens, kChunk), threads, [&](int64_t chunk) {
    const int64_t first = chunk * kChunk, rest = args.tokens - first;
    const size_t bytes = size_t(rest < kChunk ? rest : kChunk) * sizeof(float);
    if (args.grad) std::memset(args.grad + first, 0, bytes);
    if (args.token_loss) std::memset(args.token_loss + first, 0, bytes);
  });

  parallel_for(pieces.tasks(), threads, [&](int64_t task) {
    Tile tile;
    Partial partial;
    Segments whole;
    pieces.for_each_block(task, [&](int64_t p, int64_t first, int64_t tokens, bool begins) {
      LogRatios sums = {};
      for_each_tile_of(pieces.row(p), first, tokens, whole, [&](int64_t at, int n) {
        measure(call, at, n, whole, tile, space.seen, partial);
        add_log_ratios(tile, n, hierarchy.split, sums);
      });
      (begins ? space.log_ratios[p] : space.log_ratios_of_blocks[task]) = sums;
    });
    space.partials[task] = partial;
  });

  gather_blocks(pieces, space.log_ratios_of_blocks, space.log_ratios);
  sum_segments(pieces, space);
  for_each_piece(pieces.count(), threads, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      if (pieces.length(p) > 0 && space.log_ratios[p].valid > 0) gate_piece(pieces, space, p, space.gates[p], space.slopes[p]);
      else space.gates[p] = {}, space.slopes[p] = {};
    }
  });

  bool through = false;
  for (int k = 0; k < hierarchy.depth; ++k) through |= hierarchy.levels[k].routing == Routing::through;
  const bool carries = through && !score && args.grad;
  const float keep = hierarchy.levels[0].routing == Routing::self ? 0.0f : 1.0f;
  const TokenLoop loop = pick_token_loop(score, hierarchy.split, drop);
  parallel_for(pieces.tasks(), threads, [&](int64_t task) {
    Tile tile;
    Partial counted;
    Segments whole;
    TokenTerms terms;
    pieces.for_each_block(task, [&](int64_t p, int64_t first, int64_t tokens, bool begins) {
      FlowLanes lanes;
      const BlockGate gate = {hierarchy, loop, space.gates[p], keep, carries, terms, lanes};
      for_each_tile_of(pieces.row(p), first, tokens, whole, [&](int64_t at, int n) {
        load(call, at, n, whole, true, tile, counted);
        finish_tile(call, gate, at, n, whole, tile, space.partials[task]);
      });
      (begins ? space.flows[p] : space.flows_of_blocks[task]) = lanes.total();
    });
  });

  if (carries) {
    gather_blocks(pieces, space.flows_of_blocks, space.flows);
    couple(pieces, space, threads);
    parallel_for(pieces.tasks(), threads, [&](int64_t task) {
      Tile tile;
      Partial counted;
      Segments whole;
      pieces.for_each_block(task, [&](int64_t p, int64_t first, int64_t tokens, bool) {
        const float rising = space.delivered[p][0], falling = space.delivered[p][1];
        if (rising == 0.0f && falling == 0.0f) return;  // nothing saturated: what is written stands, to the bit
        for_each_tile_of(pieces.row(p), first, tokens, whole, [&](int64_t at, int n) {
          load(call, at, n, whole, true, tile, counted);
          float* __restrict grad = args.grad + at;
          for (int i = 0; i < n; ++i) {
            const bool receives = tile.kind[i] != kAbsent && tile.infinite[i] == 0;
            grad[i] += keep_if(receives, tile.x[i] < 0.0f ? falling : rising);
          }
        });
      });
    });
  }

  Partial total;
  for (int64_t task = 0; task < pieces.tasks(); ++task) total.add(space.partials[task]);
  int64_t seen = 0;
  for (int64_t row = 0; row < args.rows; ++row) seen += space.seen[row];
  finish(call, total, seen, call.rows.broken + pieces.broken);
}

}  // namespace hpo::HPO_ISA
