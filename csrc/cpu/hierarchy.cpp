// policy_loss under a hierarchy of gates: z = g_0(x - a_1) + g_1(a_1 - a_2) + ... + g_K(a_K), any depth in two sweeps over the
// tokens. A third one only touches pieces to which a saturated gate hands gradient through an aggregate; under open levels it
// is part of the second, see hierarchy_plain.h. The definition is hpo_core/reference/gates.py.
//
// What happens above the tokens depends on a token only through its piece and the sign of its advantage, so it is arithmetic on
// pieces: sums of log-ratios up, gates, sums of gradients up, and what flows back down.
#include <algorithm>

#include "hierarchy_pieces.h"
#include "hierarchy_tokens.h"
#include "kernels.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

// --------------------------------------------------------------------------------------------------- what pieces add up

struct Workspace {
  Arena arena;
  Partial* partials;  // [tasks]
  uint8_t* seen;  // [rows]
  int64_t* start;  // [pieces + 1]
  LogRatios *log_ratios, *log_ratios_of_blocks;  // [pieces], [tasks]: the rest of a piece that other tasks began
  uint8_t *plain, *plain_blocks;  // [pieces], [tasks], 1 where later sweeps may take all tiles of a block for plain
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
    start = arena.take<int64_t>(count + 1);
    log_ratios = arena.take<LogRatios>(count);
    log_ratios_of_blocks = arena.take<LogRatios>(tasks);
    plain = arena.take<uint8_t>(count);
    plain_blocks = arena.take<uint8_t>(tasks);
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

  uint8_t& plain_at(int64_t task, const Block& block) const { return block.begins ? plain[block.piece] : plain_blocks[task]; }

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
HPO_INLINE void gate_piece(const Pieces& pieces, int64_t p, const SegmentAt& segment, PieceGate& gate, LevelSlopes& slopes) {
  // Advantages of rows have one sign here.
  const PolicyLossArgs& args = pieces.args;
  const int negative = !args.advantage_per_token && args.advantages[pieces.row(p)] < 0.0f;
  const int first_sign = args.advantage_per_token ? 0 : negative, last_sign = args.advantage_per_token ? 1 : negative;
  for (int channel = 0; channel <= pieces.hierarchy.split; ++channel) {
    for (int sign = first_sign; sign <= last_sign; ++sign) {
      const auto put_slope = [&](int k, double slope) { slopes.slope[k][channel][sign] = slope; };
      const GateColumn column = gate_column<true>(pieces.hierarchy, channel, sign, segment, put_slope);
      gate.z[sign] += column.z;
      gate.mean[channel] = column.mean;
      gate.slope[channel][sign] = column.slope;
      gate.own[channel][sign] = column.own;
      gate.below[sign] |= column.below;
      gate.above[sign] |= column.above;
      gate.bent[sign] |= column.bent;
    }
  }
}

// ----------------------------------------------------------------------------------------------------------- one call

void add_children(const Pieces& pieces, const Workspace& space, int k) {
  LogRatios *segments = space.segments() + k * pieces.count(), *finer = segments - pieces.count();
  for (int64_t s = 0; s < pieces.count(); ++s) {
    const Child child = child_at(pieces.hierarchy, k, s, finer[s]);
    if (child.parent >= 0) segments[child.parent].add(child.sums);
  }
}

void sum_segments(const Pieces& pieces, const Workspace& space) {
  for (int k = 0; k < pieces.hierarchy.depth; ++k) {
    LogRatios* segments = space.segments() + k * pieces.count();
    std::fill_n(segments, pieces.count(), LogRatios{});
    if (pieces.hierarchy.levels[k].aggregate == Aggregate::balanced) {
      add_children(pieces, space, k);
      continue;
    }
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
          const int64_t at = 2 * (k * pieces.count() + pieces.ancestor(k, p)) + channel;
          const auto segment = [&](int level) { return space.segments()[level * pieces.count() + pieces.ancestor(level, p)]; };
          sum += arrived(space.tables.arriving[at], space.tables.largest[at]) / shares(hierarchy, k, channel, segment);
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
      if (pieces.hierarchy.depth > 0 && space.log_ratios[p].valid > 0)
        gate_piece(pieces, p, segment, space.gates[p], space.slopes[p]);
    }
  });
}

struct Scratch {
  Tile tile;
  Segments whole;
  TokenTerms terms;
  Masked masked[kTilesOfBlock];  // on the grid of lines
  OpenTokens open;
  Partial counted;  // what later sweeps count once more
};

// What is done to the tokens of one block.
struct Sweeps {
  const Calls& calls;
  const Pieces& pieces;
  const Workspace& space;
  const TokenPlan& plan;
  const Call& call = calls.masked;

  void look_at_mask(const Block& block, Scratch& scratch) const {
    if (!call.args.mask) return;
    int tile = 0;
    for_each_tile_of(block, kGridOfLines, [&](int64_t at, int begin, int end) {
      scratch.masked[tile++] = masked_tokens(call.args.mask, at + begin, end - begin);
    });
  }

  // The first sweep, of a block whose mask was looked at; returns whether the others may take every tile for plain.
  bool measure(const Block& block, Scratch& scratch, Partial& partial, LogRatios& sums) const {
    const bool may = plan.may_be_plain;
    bool plain = may && !plan.term_loop && !plan.driven;
    for_each_stretch_of(block, call.args.mask ? scratch.masked : nullptr, [&](Masked masked, int64_t at, int begin, int end) {
      if (may && masked == Masked::all) return;
      const Call& here = calls.of(masked);
      for_each_part(begin, end, kLongTile, [&](int from, int to) {
        if (measure_plain_part(here, block.row, at, from, to, scratch, partial, sums)) return;
        for_each_part(from, to, kTile, [&](int first, int stop) {
          if (stop - first < to - from && measure_plain_part(here, block.row, at, first, stop, scratch, partial, sums)) return;
          const int tile = first / kTile * kTile;
          plain &= measure_tile(here, block.row, at + tile, first - tile, stop - tile, scratch, partial, sums);
        });
      });
    });
    return plain;
  }

  // The tokens [begin, end) behind the first at once, if they are plain and their log-ratios enter the gates as they are.
  bool measure_plain_part(const Call& here, int64_t row, int64_t first, int begin, int end, Scratch& scratch, Partial& partial,
                          LogRatios& sums) const {
    if (!plan.may_be_plain || !plan.as_they_are) return false;
    const bool split = plan.hierarchy.split;
    RowLogRatios found;
    scratch.whole.set(row, begin, end);
    if (!plan.measure_plain(here.args, first, scratch.whole, scratch.tile, space.seen, partial, &found)) return false;
    sums.add({found.valid, {split ? found.rising : found.fixed, split ? found.rising - found.fixed : 0}});
    return true;
  }

  // Those of one tile, whatever they are; returns whether they are plain.
  bool measure_tile(const Call& here, int64_t row, int64_t first, int begin, int end, Scratch& scratch, Partial& partial,
                    LogRatios& sums) const {
    Tile& tile = scratch.tile;
    bool plain = true;
    scratch.whole.set(row, begin, end);
    if (plan.as_they_are || !plan.may_be_plain || !measure_plain(here, first, end, scratch.whole, tile, space.seen, partial)) {
      hpo::HPO_ISA::measure(here, first, end, scratch.whole, tile, space.seen, partial);
      plain = !tile.exceptional && tile.chosen == tile.kind;
    }
    if (plan.hierarchy.depth > 0) {  // log-ratios are added up as integers
      add_log_ratios(tile, load_aggregated(plan.term, tile, end, scratch.terms), end, plan.hierarchy.split, sums);
    }
    return plain;
  }

  // The second: loss, gradient of the token's own path, and the flow into aggregates.
  void finish(const Block& block, const PieceGate& piece, bool plain, Scratch& scratch, Partial& partial, Flow& flow) const {
    const OpenLevels levels = open_levels(block, piece, plain);
    if (levels.open) {
      look_at_mask(block, scratch);
      count(block, levels, scratch, partial, flow);
      write(block, piece, Arriving{}, scratch, partial);
    } else {
      finish_closed(block, piece, plain, scratch, partial, flow);
    }
  }

  void finish_closed(const Block& block, const PieceGate& piece, bool plain, Scratch& scratch, Partial& partial,
                     Flow& flow) const {
    FlowLanes lanes;
    const BlockGate gate = {plan, piece, block.row, scratch.terms, lanes};
    if (plain && call.args.token_loss) write_token_losses(block, gate, scratch);
    for_each_tile_of(block, kGridOfBlock, [&](int64_t at, int, int n) {
      if (plain) {
        const Masked masked = masked_tokens(call.args.mask, at, n);
        if (masked == Masked::all) return clear_gradient(call.args, at, n);
        return gate.finish_plain(calls.of(masked), at, n, scratch.tile, partial);
      }
      scratch.whole.set(block.row, 0, n);
      load(call, at, n, scratch.whole, true, scratch.tile, scratch.counted);
      finish_tile(call, gate, at, n, scratch.whole, scratch.tile, partial);
      if (plan.term_loop && plan.term.term.penalty != Penalty::none) {
        float* grad = call.args.grad ? call.args.grad + at : scratch.tile.grad;
        float* token_loss = call.args.token_loss ? call.args.token_loss + at : nullptr;
        add_own_penalty(call, plan.term, at, n, block.row, scratch.tile, grad, token_loss, partial);
      }
    });
    if (plan.carries) flow = lanes.total(plan.hierarchy.split, plan.by_sign);
  }

  // That of a plain block apart from all else, in which it changes no bit.
  void write_token_losses(const Block& block, const BlockGate& gate, Scratch& scratch) const {
    for_each_tile_of(block, kGridOfBlock, [&](int64_t at, int, int n) {
      scratch.whole.set(block.row, 0, n);
      load(call, at, n, scratch.whole, true, scratch.tile, scratch.counted);
      write_token_loss(call, gate, at, n, scratch.whole, scratch.tile);
    });
  }

  OpenLevels open_levels(const Block& block, const PieceGate& piece, bool plain) const {
    if (!plain || !plan.opens) return {};
    const int sign = call.args.advantages[block.row] < 0.0f;
    return OpenLevels(piece, sign, plan.hierarchy.split, plan.bounds.low[sign], plan.bounds.high[sign]);
  }

  // Of a plain block under open levels, what is clipped, which tokens are not, and what flows into aggregates.
  void count(const Block& block, const OpenLevels& levels, Scratch& scratch, Partial& partial, Flow& flow) const {
    const float advantage = call.args.advantages[block.row], coefficient = call.args.weights[block.row] * advantage;
    const bool split = plan.hierarchy.split;
    const ClippedLoss clipped(levels, split, coefficient);  // ready by the time that it is needed
    OpenTokens& open = scratch.open;
    OpenCounts counts;
    for_each_stretch_of(block, call.args.mask ? scratch.masked : nullptr, [&](Masked masked, int64_t at, int begin, int end) {
      if (masked == Masked::all) return;
      plan.open_loops.count[masked == Masked::some](levels, call.args, at, begin, end, open.inside_and_falling, counts);
    });
    counts.add_to(partial.slots, advantage < 0.0f);
    const double above = clipped.of_above(counts), below = clipped.of_below(counts);
    partial.sums[kLossSum][0] += above + below;
    if (!plan.carries) return;
    // Multiples of one number, so that their sum has no order. By sign levels with one slope hand nothing up.
    flow.past_token[0] = split ? above : above + below;
    flow.past_token[1] = split ? below : 0.0;
  }

  // Loss and gradient of a block that is counted.
  void write(const Block& block, const PieceGate& piece, const Arriving& arriving, Scratch& scratch, Partial& partial) const {
    const PolicyLossArgs& args = call.args;
    const float coefficient = args.weights[block.row] * args.advantages[block.row];
    const OpenTokens& open = scratch.open;
    for_each_stretch_of(block, call.args.mask ? scratch.masked : nullptr, [&](Masked masked, int64_t at, int begin, int end) {
      if (masked == Masked::all) return clear_gradient(args, at + begin, end - begin);
      plan.open_loops.write[masked == Masked::some][!arriving.nothing()](
          args, at, begin, end, coefficient, open.inside_and_falling, arriving, partial.sums[kLossSum]);
    });
    if (!args.token_loss) return;
    FlowLanes lanes;
    write_token_losses(block, BlockGate{plan, piece, block.row, scratch.terms, lanes}, scratch);
  }

  // The third, where something saturated: the gradient that arrives through aggregates. Elsewhere what is written stands.
  void receive(const Block& block, const Arriving& arriving, bool plain, Scratch& scratch) const {
    if (arriving.nothing()) return;
    Tile& tile = scratch.tile;
    for_each_tile_of(block, kGridOfLines, [&](int64_t at, int begin, int n) {
      if (plain) {
        const Masked masked = masked_tokens(call.args.mask, at + begin, n - begin);
        if (masked == Masked::all) return;
        return add_to_plain(calls.of(masked).args, at, begin, n, arriving);
      }
      scratch.whole.set(block.row, begin, n);
      load(call, at, n, scratch.whole, true, tile, scratch.counted);
      float* __restrict grad = call.args.grad + at;
      for (int i = begin; i < n; ++i) {
        const bool receives = tile.kind[i] != kAbsent && tile.infinite[i] == 0;
        grad[i] +=
            keep_if(receives, plan.term.through_pre_gate(tile, i, tile.x[i] < 0.0f ? arriving.falling : arriving.rising));
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
    const OpenLevels levels = open_levels(block, gate, plain);
    Flow flow = {};
    if (levels.open) count(block, levels, scratch, partial, flow);
    else finish_closed(block, gate, plain, scratch, partial, flow);
    const Arriving arriving = returning(flow, sums);
    if (levels.open) write(block, gate, arriving, scratch, partial);
    else receive(block, arriving, plain, scratch);
  }

  // What a piece that stands alone hands up comes back to it, as if by way of the tables.
  Arriving returning(const Flow& flow, const LogRatios& sums) const {
    if (!plan.carries || plan.hierarchy.levels[0].routing != Routing::through) return {};
    const auto arriving = [&](int channel) {
      const double handed = flow.past_token[channel];
      if (handed == 0.0) return 0.0f;
      const int64_t largest = magnitude_of(handed);
      return float(arrived(in_steps(handed, largest), largest) / shares(plan.hierarchy, 0, channel, [&](int) { return sums; }));
    };
    const float rising = arriving(0), falling = arriving(1);
    return {rising, plan.hierarchy.split ? falling : rising};
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
  const Calls calls(call);
  const Sweeps sweeps = {calls, pieces, space, plan};
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
      pieces.for_each_block(task, [&](const Block& block) {
        LogRatios sums = {};
        sweeps.look_at_mask(block, scratch);
        const bool plain = sweeps.measure(block, scratch, partial, sums);
        if (pieces.stands_alone(block.piece)) return sweeps.settle(block, sums, plain, scratch, partial);
        (block.begins ? space.log_ratios[block.piece] : space.log_ratios_of_blocks[task]) = sums;
        space.plain_at(task, block) = plain;
      });
      space.partials[task] = partial;
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
        sweeps.finish(block, space.gates[block.piece], space.plain_at(task, block), scratch, space.partials[task], flow);
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
      sweeps.receive(block, {delivered[0], delivered[1]}, space.plain_at(task, block), scratch);
    });
  }
}

}  // namespace hpo::HPO_ISA
