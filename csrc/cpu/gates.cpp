// policy_loss: loss, metrics and gradient of one pack. The definition is hpo_core/reference/gates.py.
//
//   lanes.h               vectors of floats
//   gates_sums.h          sums in a fixed order
//   gates_sure_masks.h    masks that a cheap bound decides
//   gates_weights.h       the weights of tokens, with the factors of corrections
//   gates_tile.h          row, masks, log-ratio and coefficient of each token of a tile, in several passes
//   gates_penalty.h       the penalty on the distance from the reference policy
//   gates_call.h          the parts of a call that no gate changes
//   gates_fast_path.h     a tile in one pass, where nothing is extraordinary
//   gates_token_inputs.h  the same where tokens have inputs of their own
//   gates_tokens.h        gates on tokens
//   row_advantages.h      advantages of tokens that are one number in each row
//   this file             one call from begin to end
//
// Gates on several levels are in hierarchy.cpp.
#include "gates_tokens.h"
#include "kernels.h"
#include "row_advantages.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

// ---------------------------------------------------------------------------------------------------------- one call

struct Workspace {
  Arena arena;
  Partial* partials;  // [chunks]
  uint8_t* seen;      // [rows], 1 where a row has a valid token
  RowAdvantages row_advantages;
  RowFactors row_factors;
  int64_t bytes;

  Workspace(void* base, int64_t tokens, int64_t row_count)
      : arena(base), row_advantages(arena, row_count), row_factors(arena, tokens, row_count) {
    partials = arena.take<Partial>(ceil_divide(tokens, kChunk));
    seen = arena.take<uint8_t>(row_count);
    bytes = arena.bytes();
  }
};

// The loss and the gradient of one tile.
struct Gate {
  TokenGateLoop token_loop;

  GateCounts operator()(const Call& call, int64_t first, int n, const Segments&, Tile& tile, const float* coefficient,
                        float* loss, float* grad) const {
    const GateCounts counts = token_loop(call, first, n, tile, coefficient, loss, grad);
    drop_infinite(call, n, tile, loss, grad);
    return counts;
  }
};

void run_token_gate(const Call& call, int threads, const Workspace& space) {
  const BoundsKind kind = bounds_kind(call);
  const Gate gate = {pick_token_gate(kind)};
  const PolicyLossArgs without = without_gradient(call.args);
  const Call losses = {without, call.structure, call.numbers, call.rows};
  const Calls calls(call), calls_of_losses(losses);
  const FastTile fast_masked = pick_fast_tile(call.args, kind, true), fast_open = pick_fast_tile(call.args, kind, false);
  parallel_for(ceil_divide(call.args.tokens, kChunk), threads, [&](int64_t chunk) {
    Tile tile;
    Partial partial, counted;
    if (corrects_rows(call.args)) correct_rows(call.args, call.rows, chunk);
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
    end_stores_past_caches();
    space.partials[chunk] = partial;
  });
}

// Whether the advantages of tokens are one number in each row.
bool one_for_each_row(const PolicyLossArgs& args, const Rows& rows, const RowAdvantages& row_advantages, int threads) {
  if (!args.advantage_per_token || rows.broken) return false;
  const auto whole = [&](int64_t row) {
    return Stretch{row, rows.cu_seqlens[row], rows.cu_seqlens[row + 1] - rows.cu_seqlens[row]};
  };
  row_advantages.find(args, rows.count, whole, ceil_divide(args.tokens, kChunk), threads, [&](int64_t chunk, const auto& body) {
    for_each_tile(rows, chunk, [&](int64_t first, int, const Segments& segments) {
      for (const Segment& each : segments) body({each.row, first + each.begin, each.end - each.begin});
    });
  });
  return row_advantages.all_alike(args);
}

}  // namespace

int64_t policy_loss_workspace(int64_t tokens, int64_t rows) { return Workspace(nullptr, tokens, rows).bytes; }

void policy_loss(const PolicyLossArgs& caller_args, const GateStructure& structure, const GateNumbers& numbers, int threads) {
  const Workspace space(caller_args.workspace, caller_args.tokens, caller_args.rows);
  const Rows rows(caller_args.cu_seqlens, caller_args.rows, caller_args.tokens);
  const bool alike = one_for_each_row(caller_args, rows, space.row_advantages, threads);
  const PolicyLossArgs args =
      space.row_factors.added_to(alike ? space.row_advantages.put_into(caller_args) : caller_args, true, threads);
  const Call call = {args, structure, numbers, rows};
  threads = worthwhile(threads, args.tokens + args.rows);
  std::memset(space.seen, 0, size_t(args.rows));

  run_token_gate(call, threads, space);
  finish(call, space.partials, ceil_divide(args.tokens, kChunk), space.seen, call.rows.broken);
}

}  // namespace hpo::HPO_ISA
