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

// The tokens of a vector that count, provided that their own statistic is no NaN.
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

// Calls body(i, part, statistics, the tokens that have one) for the vectors of n tokens from `begin` on. Log-ratios do not
// saturate yet, as few would; infinite ones are no statistics.
template <Statistic kStatistic, class Body>
HPO_INLINE void for_each_statistic(const Compared& from, const uint8_t* mask, int64_t begin, int n, const Body& body) {
  const Compared local = from;
  const auto step = [&](int i, int part, Mask own, auto whole) HPO_INSIDE {
    constexpr bool kWhole = decltype(whole)::value;
    const int64_t at = begin + i;
    const Floats first = load_own<kWhole>(own, local.first + at), second = load_own<kWhole>(own, local.second + at);
    const Floats v = kStatistic == Statistic::log_ratio ? first - second : statistic_of(kStatistic, first, second);
    body(i, part, v, but_not(counted<kWhole>(local, mask, at, own), is_nan(v - v)));
  };
  for_each_vector(0, n, step, [] {});
}

// Reduces the statistics of n tokens from `begin` on to their extrema and, unless these are all that is wanted, their sums.
using ReduceTile = Reduced (*)(const Compared& from, const uint8_t* mask, int64_t begin, int n, bool sums);

// Statistics within kStatisticSaturation of 0, as nearly all are, are added without doubles, to the same integers.
template <Statistic kStatistic>
Reduced reduce_tile(const Compared& from, const uint8_t* mask, int64_t begin, int n, bool sums) {
  const auto saturated = [](auto v) HPO_INSIDE {
    using F = decltype(v);
    return kStatistic == Statistic::log_ratio ? clamp(v, all<F>(-kSaturation), all<F>(kSaturation)) : v;
  };
  FixedSum fixed;
  Floats about[kParts] = {}, smallest = all<Floats>(INFINITY), largest = all<Floats>(-INFINITY);
  LaneCount valid;
  for_each_statistic<kStatistic>(from, mask, begin, n, [&](int, int part, Floats v, Mask known) HPO_INSIDE {
    valid.add(known);
    smallest = smaller_where(known, v, smallest), largest = larger_where(known, v, largest);
    const Floats kept = keep_if(known, v);
    fixed.add(part, all_lanes(), rounded(beyond_integer(kept) * float(kFixedPoint)));
    about[part] += kept;
  });
  Reduced reduced;
  for (int lane = 0; lane < kWidth; ++lane) {
    reduced.smallest = smallest[lane] < reduced.smallest ? smallest[lane] : reduced.smallest;
    reduced.largest = largest[lane] > reduced.largest ? largest[lane] : reduced.largest;
  }
  const bool within = reduced.smallest >= -kStatisticSaturation && reduced.largest <= kStatisticSaturation;
  reduced.smallest = saturated(reduced.smallest), reduced.largest = saturated(reduced.largest);
  if (within || !sums) {
    reduced.valid = valid.total(), reduced.fixed = fixed.total(about);
    return reduced;
  }
  alignas(kLine) float statistics[kTile];
  for_each_statistic<kStatistic>(from, mask, begin, n, [&](int i, int, Floats v, Mask known) HPO_INSIDE {
    store_lanes(blend(known, saturated(v), all<Floats>(NAN)), statistics + i);
  });
  for (int i = 0; i < n; ++i) {
    if (statistics[i] == statistics[i]) reduced.add(statistics[i]);
  }
  return reduced;
}

// The factors of tokens, times their weights.
template <Statistic kStatistic>
struct Factors {
  const PolicyLossArgs& args;
  const Correction& correction;
  const Compared from;
  const int64_t first;  // the positions below are behind it
  const RuleNumbers rule;

  Factors(const PolicyLossArgs& args, const Correction& correction, int64_t first)
      : args(args), correction(correction), from(compared(args)), first(first), rule(correction.rule) {}

  // of_segment: by sign; null where tokens have factors by their own statistics. `present`: of a row, but perhaps masked.
  template <bool kWhole>
  HPO_INLINE void write(int i, Mask own, Mask present, Ints negative, const float* of_segment) const {
    const int64_t at = first + i;
    const Floats v = statistic_of(kStatistic, load_own<kWhole>(own, from.first + at), load_own<kWhole>(own, from.second + at));
    if (args.advantage_per_token) negative = load_own<kWhole>(own, args.advantages + at) < 0.0f;
    const Floats factor = of_segment ? by_sign<Floats>(negative, of_segment)
                                     : factor_of(rule.action, rule.strict, by_sign<Floats>(negative, rule.low),
                                                 by_sign<Floats>(negative, rule.high), v);
    const Floats defined = v != v ? v : factor;  // a token without a statistic is in no segment
    const Floats weight = args.token_weight ? load_own<kWhole>(own, args.token_weight + at) : all<Floats>(1.0f);
    present = counted<kWhole>(from, args.mask, at, present);
    store_own<kWhole>(own, blend(present, defined * weight, weight), correction.factor + at);
  }

  void of_row(int begin, int end, int64_t row, const float* of_segment) const {
    const Ints negative = Ints{} - int32_t(!args.advantage_per_token && args.advantages[row] < 0.0f);
    for_each_vector(begin, end, [&](int i, Mask own, auto whole) HPO_INSIDE {
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
    spread_kinds(args, n, segments, kind);
    for_each_vector(0, n, [&](int i, Mask own, auto whole) HPO_INSIDE {
      const Ints here = load_lanes<Ints>(kind + i);  // the last row's goes on behind the tile
      write<decltype(whole)::value>(i, own, both(own, present_lanes(here)), here == kNegative, nullptr);
    });
  }
};

// The loops of one call.
struct CorrectionLoops {
  ReduceTile reduce;
  void (*of_row)(const PolicyLossArgs&, const Correction&, int64_t first, int n, int64_t row, const float* of_segment);
  void (*of_tile)(const PolicyLossArgs&, const Correction&, int64_t first, int n, const Segments&);
};

template <Statistic kStatistic>
CorrectionLoops loops_of() {
  return {reduce_tile<kStatistic>,
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
    case Statistic::binary_kl: break;
  }
  return loops_of<Statistic::binary_kl>();
}

// One pass over statistics.
struct Reduce {
  ReduceTile tile;
  bool sums;

  Reduced operator()(const PolicyLossArgs& args, const Block& block) const {
    const Compared from = compared(args);
    Reduced reduced;
    for_each_tile_of(block, kGridOfBlock,
                     [&](int64_t begin, int, int n) { reduced.add(tile(from, args.mask, begin, n, sums)); });
    return reduced;
  }
};

// Reduces the leaves for which wants(leaf).
template <class Wants>
void reduce_leaves(const Leaves& leaves, const Workspace& space, const Reduce& reduce, int threads, const Wants& wants) {
  parallel_for(leaves.tasks(), threads, [&](int64_t task) {
    leaves.for_each_block(task, [&](const Block& block) {
      if (!wants(block.leaf)) return;
      (block.begins ? space.of_leaves[block.leaf] : space.of_blocks[task]) = reduce(leaves.args, block);
    });
  });
  for (int64_t p = 0; p < leaves.count(); ++p) {
    if (leaves.length(p) == 0) space.of_leaves[p] = {};
  }
  gather_blocks(leaves, space.of_blocks, space.of_leaves);
}

// Multiplies the factors of a row with those of the corrections [begin, end), which share the reduced statistic.
void multiply(RowFactor& factor, const RowCorrection* begin, const RowCorrection* end, const TokenCorrection& correction,
              const Reduced& reduced, int64_t tokens) {
  if (tokens == 0) return;  // an empty row, or one whose offsets are broken
  for (const RowCorrection* each = begin; each < end; ++each) {
    const float v = reduced.as(each->reduction);
    for (int sign = 0; sign < 2; ++sign) factor.by_sign[sign] *= factor_of(each->rule, sign, v);
  }
  factor.complete = reduced.valid == tokens;
  const CorrectionRule& own = correction.rule;
  if (!correction.of_tokens || own.action != Action::mask || own.statistic != begin->rule.statistic) return;
  const auto passes = [&](int sign) {
    return factor_of(own, sign, reduced.smallest) == 1.0f && factor_of(own, sign, reduced.largest) == 1.0f;
  };
  factor.unmasked = passes(0) && passes(1);
}

// Calls body(reduce, begin, end) for each pass that corrections of rows need: those of one statistic share it.
template <class Body>
void for_each_pass(const TokenCorrection& correction, const Body& body) {
  const RowCorrection *begin = correction.rows, *last = begin + correction.of_rows;
  for (const RowCorrection* end = begin; begin < last; begin = end) {
    bool sums = false;
    for (; end < last && end->rule.statistic == begin->rule.statistic; ++end) sums |= !is_extremum(end->reduction);
    body(Reduce{pick_loops(begin->rule.statistic).reduce, sums}, begin, end);
  }
}

// Whether all tokens of the row lie in one chunk.
bool is_in_chunk(const Rows& rows, int64_t row) { return !rows.continues_elsewhere(row, rows.cu_seqlens[row] / kChunk); }

}  // namespace

RowFactors::RowFactors(Arena& arena, int64_t tokens, int64_t rows)
    : factors(arena.take<RowFactor>(rows)), workspace(arena.take<uint8_t>(correction_workspace(tokens, rows))) {}

PolicyLossArgs RowFactors::added_to(PolicyLossArgs args, bool first_sweep, int threads) const {
  if (!corrects_rows(args)) return args;
  args.correction.factors = factors;
  if (!first_sweep) return args;
  Hierarchy each{};
  each.leaves = args.rows;
  if (args.rows > 0) each.leaf_begin = args.cu_seqlens, each.leaf_end = args.cu_seqlens + 1;
  const Workspace space(workspace, args.tokens, args.rows);
  const Leaves leaves(each, args, space.start, threads);
  const Rows rows(args.cu_seqlens, args.rows, args.tokens);
  const auto wants = [&](int64_t row) { return !is_in_chunk(rows, row); };
  std::fill_n(factors, args.rows, kNoFactor);
  for_each_pass(args.correction, [&](const Reduce& reduce, const RowCorrection* begin, const RowCorrection* end) {
    reduce_leaves(leaves, space, reduce, worthwhile(threads, args.tokens), wants);
    for (int64_t row = 0; row < args.rows; ++row) {
      if (wants(row)) multiply(factors[row], begin, end, args.correction, space.of_leaves[row], leaves.length(row));
    }
  });
  return args;
}

void correct_row(const PolicyLossArgs& args, const Rows& rows, int64_t row) {
  if (!is_in_chunk(rows, row)) return;
  const int64_t begin = rows.cu_seqlens[row], tokens = rows.cu_seqlens[row + 1] - begin;
  RowFactor& factor = args.correction.factors[row] = kNoFactor;
  for_each_pass(args.correction, [&](const Reduce& reduce, const RowCorrection* first, const RowCorrection* last) {
    multiply(factor, first, last, args.correction, reduce(args, {row, row, begin, tokens, true}), tokens);
  });
}

void correct_rows(const PolicyLossArgs& args, const Rows& rows, int64_t chunk) {
  if (rows.broken) return;
  int64_t row = rows.first_ending_after(chunk * kChunk);
  for (; row < rows.count && rows.cu_seqlens[row] < (chunk + 1) * kChunk; ++row) correct_row(args, rows, row);
}

int64_t correction_workspace(int64_t tokens, int64_t leaves) { return Workspace(nullptr, tokens, leaves).bytes; }

void correction(const PolicyLossArgs& args, const Hierarchy& hierarchy, const Correction& correction, int threads) {
  const Workspace space(args.workspace, args.tokens, hierarchy.leaves);
  const Leaves leaves(hierarchy, args, space.start, threads);
  threads = worthwhile(threads, args.tokens + hierarchy.leaves);
  const CorrectionLoops loops = pick_loops(correction.rule.statistic);

  const bool whole = hierarchy.stage == Stage::whole;
  const Reduction reduction = correction.reduction;
  const auto words_of = [&](int64_t segment) { return hierarchy.tables.sums + segment * kReducedWords; };

  if (hierarchy.depth > 0 && does(hierarchy, Stage::sums)) {
    reduce_leaves(leaves, space, {loops.reduce, !is_extremum(reduction)}, threads, [](int64_t) { return true; });
    for (int64_t p = 0; p < leaves.count(); ++p) space.segments[p] = {};
    for (int64_t p = 0; p < leaves.count(); ++p) {
      if (leaves.length(p) > 0) space.segments[leaves.ancestor(0, p)].add(space.of_leaves[p]);
    }
    for (int64_t s = 0; !whole && s < leaves.count(); ++s) {
      for (int word = 0; word < kReducedWords; ++word) words_of(s)[word] = word_of(space.segments[s], word, reduction);
    }
  }
  if (!does(hierarchy, Stage::sweep)) return;

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
