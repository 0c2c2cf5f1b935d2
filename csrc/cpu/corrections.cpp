// correction: a factor on tokens from log-ratios that are constants of the differentiation. The definition is
// hpo_core/reference/corrections.py.
#include "hpo/corrections.h"

#include <algorithm>

#include "gates_fast_path.h"
#include "hierarchy_leaves.h"
#include "kernels.h"
#include "parallel.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

struct Workspace {
  Arena arena;
  int64_t* start;  // [leaves + 1]
  Reduced *of_leaves, *of_blocks, *segments;  // [leaves], [tasks], [leaves]
  int64_t bytes;

  Workspace(void* base, int64_t tokens, int64_t count) : arena(base) {
    start = arena.take<int64_t>(count + 1);
    of_leaves = arena.take<Reduced>(count);
    of_blocks = arena.take<Reduced>(tokens / kChunk + 1);
    segments = arena.take<Reduced>(count);
    bytes = arena.bytes();
  }
};

// The tokens of a vector that have a say, beyond those whose own statistic is NaN.
template <bool kWhole>
HPO_INLINE Mask counted(const Compared& from, const uint8_t* mask, int64_t at, Mask present) {
  if (mask) present = both(present, present_own<kWhole>(present, mask + at));
  if (from.logp) {
    const Floats logp = load_own<kWhole>(present, from.logp + at);
    present = but_not(present, is_nan(logp - load_own<kWhole>(present, from.old_logp + at)));
    if (from.ref_logp) present = but_not(present, is_nan(logp - load_own<kWhole>(present, from.ref_logp + at)));
  }
  return present;
}

// Calls body(i, part, statistics, the tokens that have one) for the vectors of n tokens from `begin` on.
template <Statistic kStatistic, class Body>
HPO_INLINE void for_each_statistic(const Compared& from, const uint8_t* mask, int64_t begin, int n, const Body& body) {
  const Compared local = from;
  const auto step = [&](int i, int part, Mask own, auto whole) __attribute__((always_inline)) {
    constexpr bool kWhole = decltype(whole)::value;
    const int64_t at = begin + i;
    const Floats v =
        statistic_of(kStatistic, load_own<kWhole>(own, local.first + at), load_own<kWhole>(own, local.second + at));
    body(i, part, v, but_not(counted<kWhole>(local, mask, at, own), is_nan(v)));
  };
  for_each_vector(0, n, step, [] {});
}

// Reduces the statistics of n tokens from `begin` on.
using ReduceTile = Reduced (*)(const Compared& from, const uint8_t* mask, int64_t begin, int n);

template <Statistic kStatistic>
Reduced find_extrema(const Compared& from, const uint8_t* mask, int64_t begin, int n) {
  Floats smallest = all<Floats>(INFINITY), largest = all<Floats>(-INFINITY);
  LaneCount valid;
  for_each_statistic<kStatistic>(from, mask, begin, n, [&](int, int, Floats v, Mask known) __attribute__((always_inline)) {
    valid.add(known);
    smallest = smaller_where(known, v, smallest), largest = larger_where(known, v, largest);
  });
  Reduced found;
  found.valid = valid.total();
  for (int lane = 0; lane < kWidth; ++lane) {
    found.smallest = smallest[lane] < found.smallest ? smallest[lane] : found.smallest;
    found.largest = largest[lane] > found.largest ? largest[lane] : found.largest;
  }
  return found;
}

// Statistics within kStatisticSaturation of 0, as nearly all are, are added without doubles, to the same integers.
template <Statistic kStatistic>
Reduced sum_tile(const Compared& from, const uint8_t* mask, int64_t begin, int n) {
  FixedSum fixed;
  Floats about[kParts] = {}, largest[kParts] = {};
  LaneCount valid;
  for_each_statistic<kStatistic>(from, mask, begin, n, [&](int, int part, Floats v, Mask known) __attribute__((always_inline)) {
    valid.add(known);
    const Floats counted = keep_if(known, v), size = Floats(Ints(counted) & INT32_MAX);
    fixed.add(part, all_lanes(), rounded(beyond_integer(counted) * float(kFixedPoint)));
    about[part] += counted;
    largest[part] = larger_where(all_lanes(), size, largest[part]);
  });
  Mask within = all_lanes();
  for (const Floats& each : largest) within = both(within, at_least(all<Floats>(kStatisticSaturation), each));
  Reduced found;
  if (!any(but_not(all_lanes(), within))) {
    found.valid = valid.total(), found.fixed = fixed.total(about);
    return found;
  }
  alignas(kLine) float statistics[kTile];
  for_each_statistic<kStatistic>(from, mask, begin, n, [&](int i, int, Floats v, Mask known) __attribute__((always_inline)) {
    store_lanes(blend(known, v, all<Floats>(NAN)), statistics + i);
  });
  for (int i = 0; i < n; ++i) {
    if (statistics[i] == statistics[i]) found.add(statistics[i]);
  }
  return found;
}

// The factors of tokens, times their weights.
template <Statistic kStatistic>
struct Factors {
  const PolicyLossArgs& args;
  const Correction& correction;
  const Compared from;
  const int64_t first;  // the positions below are behind it
  float low[2], high[2];  // by sign of the advantage

  Factors(const PolicyLossArgs& args, const Correction& correction, int64_t first)
      : args(args), correction(correction), from(compared(args)), first(first) {
    for (int sign = 0; sign < 2; ++sign) {
      low[sign] = float(correction.rule.low[sign]), high[sign] = float(correction.rule.high[sign]);
    }
  }

  // of_segment: by sign; null where tokens have factors by their own statistics. `present`: of a row, but perhaps masked.
  template <bool kWhole>
  HPO_INLINE void write(int i, Mask own, Mask present, Ints negative, const float* of_segment) const {
    const int64_t at = first + i;
    const Floats v = statistic_of(kStatistic, load_own<kWhole>(own, from.first + at), load_own<kWhole>(own, from.second + at));
    if (args.advantage_per_token) negative = load_own<kWhole>(own, args.advantages + at) < 0.0f;
    const Floats factor = of_segment ? by_sign<Floats>(negative, of_segment)
                                     : factor_of(correction.rule.action, correction.rule.strict, by_sign<Floats>(negative, low),
                                                 by_sign<Floats>(negative, high), v);
    const Floats defined = v != v ? v : factor;  // a token without a statistic is in no segment
    const Floats weight = args.token_weight ? load_own<kWhole>(own, args.token_weight + at) : all<Floats>(1.0f);
    present = counted<kWhole>(from, args.mask, at, present);
    store_own<kWhole>(own, blend(present, defined * weight, weight), correction.factor + at);
  }

  void of_row(int begin, int end, int64_t row, const float* of_segment) const {
    const Ints negative = Ints{} - int32_t(!args.advantage_per_token && args.advantages[row] < 0.0f);
    for_each_vector(begin, end, [&](int i, Mask own, auto whole) __attribute__((always_inline)) {
      write<decltype(whole)::value>(i, own, own, negative, of_segment);
    });
  }

  // Tokens of no row get their weight.
  void of_tile(int n, const Segments& segments) const {
    if (segments.few(n)) {
      for (const Segment& segment : segments) of_row(segment.begin, segment.end, segment.row, nullptr);
      return;
    }
    alignas(kLine) int32_t kind[kPadded];
    int covered = 0;
    for (const Segment& segment : segments) {
      for (; covered < segment.begin; ++covered) kind[covered] = kAbsent;
      covered = segment.end;
      const int32_t here = !args.advantage_per_token && args.advantages[segment.row] < 0.0f ? kNegative : kPositive;
      for (int i = segment.begin; i < segment.end; i += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) kind[i + lane] = here;
      }
    }
    for (; covered < n; ++covered) kind[covered] = kAbsent;
    for_each_vector(0, n, [&](int i, Mask own, auto whole) __attribute__((always_inline)) {
      const Ints here = load_lanes<Ints>(kind + i);
      write<decltype(whole)::value>(i, own, present_lanes(here), here == kNegative, nullptr);
    });
  }
};

// The loops of one call.
struct CorrectionLoops {
  ReduceTile sum, find_extrema;
  void (*of_row)(const PolicyLossArgs&, const Correction&, int64_t first, int n, int64_t row, const float* of_segment);
  void (*of_tile)(const PolicyLossArgs&, const Correction&, int64_t first, int n, const Segments&);
};

template <Statistic kStatistic>
CorrectionLoops loops_of() {
  return {sum_tile<kStatistic>, find_extrema<kStatistic>,
          [](const PolicyLossArgs& args, const Correction& correction, int64_t first, int n, int64_t row,
             const float* of_segment) { Factors<kStatistic>(args, correction, first).of_row(0, n, row, of_segment); },
          [](const PolicyLossArgs& args, const Correction& correction, int64_t first, int n, const Segments& segments) {
            Factors<kStatistic>(args, correction, first).of_tile(n, segments);
          }};
}

CorrectionLoops pick_loops(Statistic statistic) {
  switch (statistic) {
    case Statistic::log_ratio: return loops_of<Statistic::log_ratio>();
    case Statistic::k2: return loops_of<Statistic::k2>();
    case Statistic::k3: return loops_of<Statistic::k3>();
    case Statistic::probability: return loops_of<Statistic::probability>();
    default: return loops_of<Statistic::binary_kl>();
  }
}

ReduceTile pick_reduce(Statistic statistic, Reduction reduction) {
  const CorrectionLoops loops = pick_loops(statistic);
  return is_extremum(reduction) ? loops.find_extrema : loops.sum;
}

Reduced reduce_tokens(const PolicyLossArgs& args, ReduceTile reduce, const Block& block) {
  const Compared from = compared(args);
  Reduced found;
  for_each_tile_of(block, kGridOfBlock, [&](int64_t tile, int, int n) { found.add(reduce(from, args.mask, tile, n)); });
  return found;
}

// Reduces the leaves for which wants(leaf).
template <class Wants>
void reduce_leaves(const Leaves& leaves, const Workspace& space, ReduceTile reduce, int threads, const Wants& wants) {
  parallel_for(leaves.tasks(), threads, [&](int64_t task) {
    leaves.for_each_block(task, [&](const Block& block) {
      if (!wants(block.leaf)) return;
      (block.begins ? space.of_leaves[block.leaf] : space.of_blocks[task]) = reduce_tokens(leaves.args, reduce, block);
    });
  });
  for (int64_t p = 0; p < leaves.count(); ++p) {
    if (leaves.length(p) == 0) space.of_leaves[p] = {};
  }
  gather_blocks(leaves, space.of_blocks, space.of_leaves);
}

RowFactor factor_of_row(const TokenCorrection& correction, const Reduced& reduced, int64_t tokens) {
  if (tokens == 0) return {{1.0f, 1.0f}, true};  // of no tokens, or of a row that lies nowhere
  const float v = reduced.as(correction.reduction);
  return {{factor_of(correction.rule, 0, v), factor_of(correction.rule, 1, v)}, reduced.valid == tokens};
}

// Whether all tokens of the row lie in one chunk.
bool is_in_chunk(const Rows& rows, int64_t row) { return !rows.continues_elsewhere(row, rows.cu_seqlens[row] / kChunk); }

}  // namespace

RowFactors::RowFactors(Arena& arena, int64_t tokens, int64_t rows)
    : factors(arena.take<RowFactor>(rows)), workspace(arena.take<uint8_t>(correction_workspace(tokens, rows, rows))) {}

PolicyLossArgs RowFactors::added_to(PolicyLossArgs args, bool first_sweep, int threads) const {
  if (!corrects_rows(args)) return args;
  args.correction.rows = factors;
  if (!first_sweep) return args;
  Hierarchy each{};
  each.leaves = args.rows;
  if (args.rows > 0) each.leaf_begin = args.cu_seqlens, each.leaf_end = args.cu_seqlens + 1;
  const Workspace space(workspace, args.tokens, args.rows);
  const Leaves leaves(each, args, space.start);
  const Rows rows(args.cu_seqlens, args.rows, args.tokens);
  const auto wants = [&](int64_t row) { return !is_in_chunk(rows, row); };
  reduce_leaves(leaves, space, pick_reduce(args.correction.rule.statistic, args.correction.reduction),
                worthwhile(threads, args.tokens), wants);
  for (int64_t row = 0; row < args.rows; ++row) {
    if (wants(row)) factors[row] = factor_of_row(args.correction, space.of_leaves[row], leaves.length(row));
  }
  return args;
}

void correct_row(const PolicyLossArgs& args, const Rows& rows, int64_t row) {
  if (!is_in_chunk(rows, row)) return;
  const int64_t begin = rows.cu_seqlens[row], tokens = rows.cu_seqlens[row + 1] - begin;
  const Reduced reduced = reduce_tokens(args, pick_reduce(args.correction.rule.statistic, args.correction.reduction),
                                        {row, row, begin, tokens, true});
  args.correction.rows[row] = factor_of_row(args.correction, reduced, tokens);
}

void correct_rows(const PolicyLossArgs& args, const Rows& rows, int64_t chunk) {
  if (rows.broken) return;
  const int64_t* ends = rows.cu_seqlens + 1;
  int64_t row = std::upper_bound(ends, ends + rows.count, chunk * kChunk) - ends;
  for (; row < rows.count && rows.cu_seqlens[row] < (chunk + 1) * kChunk; ++row) correct_row(args, rows, row);
}

int64_t correction_workspace(int64_t tokens, int64_t, int64_t leaves) { return Workspace(nullptr, tokens, leaves).bytes; }

void correction(const PolicyLossArgs& args, const Hierarchy& hierarchy, const Correction& correction, int threads) {
  const Workspace space(args.workspace, args.tokens, hierarchy.leaves);
  const Leaves leaves(hierarchy, args, space.start);
  threads = worthwhile(threads, args.tokens + hierarchy.leaves);
  const CorrectionLoops loops = pick_loops(correction.rule.statistic);

  const bool whole = hierarchy.stage == Stage::whole;
  const Reduction reduction = correction.reduction;
  const auto words_of = [&](int64_t segment) { return hierarchy.tables.sums + segment * kWords; };

  if (hierarchy.depth > 0 && (whole || hierarchy.stage == Stage::sums)) {
    reduce_leaves(leaves, space, pick_reduce(correction.rule.statistic, reduction), threads, [](int64_t) { return true; });
    for (int64_t p = 0; p < leaves.count(); ++p) space.segments[p] = {};
    for (int64_t p = 0; p < leaves.count(); ++p) {
      if (leaves.length(p) > 0) space.segments[leaves.ancestor(0, p)].add(space.of_leaves[p]);
    }
    for (int64_t s = 0; !whole && s < leaves.count(); ++s) {
      for (int word = 0; word < kWords; ++word) words_of(s)[word] = word_of(space.segments[s], word, reduction);
    }
  }
  if (!whole && hierarchy.stage != Stage::sweep) return;

  if (hierarchy.depth == 0 && leaves.are_rows) {
    const Rows rows(args.cu_seqlens, args.rows, args.tokens);
    parallel_for(ceil_divide(args.tokens, kChunk), threads, [&](int64_t chunk) {
      for_each_tile(rows, chunk, [&](int64_t first, int n, const Segments& segments) {
        loops.of_tile(args, correction, first, n, segments);
      });
    });
    return;
  }
  leaves.for_each_gap([&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) correction.factor[t] = args.token_weight ? args.token_weight[t] : 1.0f;
  });
  parallel_for(leaves.tasks(), threads, [&](int64_t task) {
    leaves.for_each_block(task, [&](const Block& block) {
      float of_segment[2] = {};  // by sign of the advantage
      if (hierarchy.depth > 0) {
        const bool alike = whole && !args.token_weight && !args.advantage_per_token;
        const int64_t segment = leaves.ancestor(0, block.leaf);
        const float v = whole ? space.segments[segment].as(reduction) : from_words(words_of(segment), reduction);
        for (int sign = 0; sign < 2; ++sign) of_segment[sign] = factor_of(correction.rule, sign, v);
        if (alike && space.of_leaves[block.leaf].valid == leaves.length(block.leaf)) {  // all are valid
          std::fill_n(correction.factor + block.first, block.tokens, of_segment[args.advantages[block.row] < 0.0f]);
          return;
        }
      }
      loops.of_row(args, correction, block.first, int(block.tokens), block.row, hierarchy.depth > 0 ? of_segment : nullptr);
    });
  });
}

}  // namespace hpo::HPO_ISA
