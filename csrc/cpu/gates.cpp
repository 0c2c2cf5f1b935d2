// policy_loss: loss, metrics and gradient of one pack. The definition is hpo_core/reference/gates.py.
//
//   gates_sums.h     sums in a fixed order
//   lanes.h          vectors of floats
//   gates_tile.h     row, masks, log-ratio and coefficient of each token
//   gates_fast_path.h    the same in one pass, where nothing is extraordinary
//   gates_token_inputs.h  and where tokens have inputs of their own, gates_binary_kl.h a mask of theirs
//   gates_penalty.h  the penalty on the distance from the reference policy
//   gates_call.h     the parts of a call that no gate changes
//   gates_tokens.h   gates on tokens
//   gates_levels.h   gates on trajectories
//   hierarchy.cpp    gates on several levels at once, hierarchy_tokens.h their tokens
//   here             one call from begin to end
#include "gates_levels.h"
#include "gates_tokens.h"
#include "kernels.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

// ---------------------------------------------------------------------------------------------------------- one call

struct Workspace {
  Arena arena;
  Partial* partials;             // [chunks]
  uint8_t* reload;               // [chunks], 1 where the second sweep needs the log-ratios again
  Masked* masked;                // [tiles], from the first sweep for the second
  uint8_t* seen;                 // [rows], 1 where a row has a valid token
  RowSums *rows, *trajectories;  // [rows]
  Level* levels;                 // [rows], of rows or of trajectories
  double* losses;                // [ranges of rows]
  int64_t bytes;

  Workspace(void* base, int64_t tokens, int64_t row_count) : arena(base) {
    partials = arena.take<Partial>(ceil_divide(tokens, kChunk));
    reload = arena.take<uint8_t>(ceil_divide(tokens, kChunk));
    masked = arena.take<Masked>(ceil_divide(tokens, kTile));
    seen = arena.take<uint8_t>(row_count);
    rows = arena.take<RowSums>(row_count);
    trajectories = arena.take<RowSums>(row_count);
    levels = arena.take<Level>(row_count);
    losses = arena.take<double>(ceil_divide(row_count, kRange));
    bytes = arena.bytes();
  }
};

// loss and grad of one tile under either kind of gate.
struct Gate {
  TokenGateLoop token_loop;
  LevelGateLoop level_loop;
  const Level* levels;  // null: the gate is on tokens
  bool values_by_row;   // the loss is known without the tokens, see settle_rows

  GateCounts operator()(const Call& call, int64_t first, int n, const Segments& segments, Tile& tile, const float* coefficient,
                        float* loss, float* grad) const {
    const float* logp = call.args.logp + first;
    GateCounts counts;
    if (levels) level_loop(spread_levels(call, segments, levels, tile), tile, coefficient, logp, loss, grad, n);
    else counts = token_loop(tile_bounds(call, first), tile, coefficient, logp, loss, grad, n);
    drop_infinite(call, n, tile, loss, grad);
    return counts;
  }
};

void run_token_gate(const Call& call, int threads, const Workspace& space) {
  const bool score = call.structure.head == Head::score;
  const BoundsKind kind = bounds_kind(call);
  const Gate gate = {score ? pick_token_gate<true>(kind) : pick_token_gate<false>(kind), nullptr, nullptr, false};
  const PolicyLossArgs without = without_gradient(call.args);
  const Call losses = {without, call.structure, call.numbers, call.rows};
  const Calls calls(call), calls_of_losses(losses);
  const FastTile fast_masked = pick_fast_tile(call.args, kind, true), fast_open = pick_fast_tile(call.args, kind, false);
  parallel_for(ceil_divide(call.args.tokens, kChunk), threads, [&](int64_t chunk) {
    Tile tile;
    Partial partial, counted;
    for_each_tile(call.rows, chunk, [&](int64_t first, int n, const Segments& segments) {
      const Masked masked = masked_tokens(call.args.mask, first, n);
      const Call& here = calls.of(masked);
      const auto fast = here.args.mask ? fast_masked : fast_open;
      if (masked == Masked::all) clear_gradient(call.args, first, n);
      const bool done = masked == Masked::all || fast(here, first, n, segments, tile, space.seen, partial);
      if (done && !call.args.token_loss) return;
      const Call& rest = done ? calls_of_losses.of(masked) : here;
      Partial& sums = done ? counted : partial;
      measure(rest, first, n, segments, tile, space.seen, sums);
      finish_tile(rest, gate, first, n, segments, tile, sums);
    });
    space.partials[chunk] = partial;
  });
}

// Two sweeps, the levels between them; returns how many rows name a trajectory that does not exist.
int64_t run_level_gate(const Call& call, int threads, const Workspace& space, Partial& total) {
  const PolicyLossArgs& args = call.args;
  const GateStructure& structure = call.structure;
  const int64_t chunks = ceil_divide(args.tokens, kChunk);
  const Calls calls(call);
  const bool may = may_be_fast(args) && !args.token_loss, linear = structure.head == Head::linear;
  std::memset(space.rows, 0, size_t(args.rows) * sizeof(RowSums));
  parallel_for(chunks, threads, [&](int64_t chunk) {
    Tile tile;
    Partial partial;
    bool reload = args.ref_logp != nullptr;
    for_each_tile(call.rows, chunk, [&](int64_t first, int n, const Segments& segments) {
      const Masked masked = space.masked[first / kTile] = masked_tokens(args.mask, first, n);
      if (may && masked == Masked::all) return;
      const Call& here = calls.of(masked);
      const bool few = segments.few(n);
      RowLogRatios of_rows[kFewRows];
      if (few && may &&
          measure_fast_rows<false, FirstSweep::plain>(here.args, first, segments, {}, tile, space.seen, partial, of_rows)) {
        return add_row_sums(here, chunk, segments, of_rows, space.rows);
      }
      if (few || !may || !measure_fast(here, first, n, segments, tile, space.seen, partial)) {
        measure(here, first, n, segments, tile, space.seen, partial);
      }
      add_row_sums(here, chunk, n, segments, tile, space.rows);
      reload |= tile.exceptional;
    });
    space.partials[chunk] = partial;
    space.reload[chunk] = reload;
  });

  sum_advantages(call, threads, space.rows);
  const RowSums* owners = args.row_trajectory ? space.trajectories : space.rows;
  const int64_t broken = args.row_trajectory ? gather_trajectories(args, space.rows, space.trajectories) : 0;
  for_each_range(args.rows, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) space.levels[i] = make_level(owners[i], structure, call.numbers);
  });
  settle_rows(call, threads, space.rows, space.levels, space.losses).add_to(total.slots);
  if (linear) {
    for (int64_t range = 0; range < ceil_divide(args.rows, kRange); ++range) total.sums[kLossSum][0] += space.losses[range];
  }
  const bool by_row = may && linear;
  if (by_row && !args.grad) return broken;

  const Gate gate = {nullptr, pick_level_gate(structure), space.levels, linear};
  parallel_for(chunks, threads, [&](int64_t chunk) {
    Tile tile;
    Partial counted;
    for_each_tile(call.rows, chunk, [&](int64_t first, int n, const Segments& segments) {
      if (by_row && !space.reload[chunk]) {
        const Masked masked = space.masked[first / kTile];
        if (masked == Masked::all) return clear_gradient(args, first, n);
        const Call& here = calls.of(masked);
        return spread_gradient(here, first, n, segments, space.levels, tile, args.grad + first);
      }
      load(call, first, n, segments, space.reload[chunk], tile, counted);
      finish_tile(call, gate, first, n, segments, tile, space.partials[chunk]);
    });
  });
  return broken;
}

}  // namespace

int64_t policy_loss_workspace(int64_t tokens, int64_t rows) { return Workspace(nullptr, tokens, rows).bytes; }

void policy_loss(const PolicyLossArgs& args, const GateStructure& structure, const GateNumbers& numbers, int threads) {
  const Call call = {args, structure, numbers, Rows(args.cu_seqlens, args.rows, args.tokens)};
  const Workspace space(args.workspace, args.tokens, args.rows);
  threads = worthwhile(threads, args.tokens + args.rows);
  std::memset(space.seen, 0, size_t(args.rows));

  int64_t broken = call.rows.broken;
  Partial total;
  if (structure.has_level) broken += run_level_gate(call, threads, space, total);
  else run_token_gate(call, threads, space);

  for (int64_t chunk = 0; chunk < ceil_divide(args.tokens, kChunk); ++chunk) total.add(space.partials[chunk]);
  int64_t seen = 0;
  const int64_t rows = args.rows;
  for (int64_t row = 0; row < rows; ++row) seen += space.seen[row];
  finish(call, total, seen, broken);
}

}  // namespace hpo::HPO_ISA
