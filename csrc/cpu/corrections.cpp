// correction: a factor on tokens from log-ratios that are constants of the differentiation. The definition is
// hpo_core/reference/corrections.py.
#include "hpo/corrections.h"

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

using StatisticLoop = void (*)(const float* first, const float* second, float* out, int64_t n);

template <Statistic kStatistic>
void fill_statistics(const float* __restrict first, const float* __restrict second, float* __restrict out, int64_t n) {
  for_each_vector(0, int(n), [&](int i, Mask own, auto whole) __attribute__((always_inline)) {
    constexpr bool kWhole = decltype(whole)::value;
    const Floats statistic = statistic_of(kStatistic, load_own<kWhole>(own, first + i), load_own<kWhole>(own, second + i));
    store_own<kWhole>(own, statistic, out + i);
  });
}

StatisticLoop pick_statistic_loop(Statistic statistic) {
  switch (statistic) {
    case Statistic::log_ratio: return fill_statistics<Statistic::log_ratio>;
    case Statistic::k2: return fill_statistics<Statistic::k2>;
    case Statistic::k3: return fill_statistics<Statistic::k3>;
    case Statistic::probability: return fill_statistics<Statistic::probability>;
    default: return fill_statistics<Statistic::binary_kl>;
  }
}

// Tokens of a tile: the statistic of each, and the factor that it gets.
struct CorrectionTile {
  float own[kTile], factor[kTile];
  int32_t negative[kTile];  // the advantage is
};

// The factors of tokens by their own statistics.
using FactorLoop = void (*)(const Correction&, CorrectionTile&, int64_t n);

template <Action kAction, bool kStrict>
void fill_factors(const Correction& correction, CorrectionTile& tile, int64_t n) {
  Correction bounds = correction;  // a copy with constants, so that the loop does not decide for every token
  bounds.action = kAction, bounds.strict = kStrict;
  for (int64_t i = 0; i < n; ++i) {
    const float above = factor_of(bounds, 0, tile.own[i]), below = factor_of(bounds, 1, tile.own[i]);
    tile.factor[i] = tile.negative[i] ? below : above;
  }
}

FactorLoop pick_factor_loop(const Correction& correction) {
  if (correction.action == Action::clamp) return fill_factors<Action::clamp, false>;
  if (correction.action == Action::mask) {
    return correction.strict ? fill_factors<Action::mask, true> : fill_factors<Action::mask, false>;
  }
  return correction.strict ? fill_factors<Action::band, true> : fill_factors<Action::band, false>;
}

}  // namespace

int64_t correction_workspace(int64_t tokens, int64_t, int64_t leaves) { return Workspace(nullptr, tokens, leaves).bytes; }

void correction(const PolicyLossArgs& args, const Hierarchy& hierarchy, const Correction& correction, int threads) {
  const Workspace space(args.workspace, args.tokens, hierarchy.leaves);
  const Leaves leaves(hierarchy, args, space.start);
  threads = worthwhile(threads, args.tokens + hierarchy.leaves);
  const StatisticLoop statistics = pick_statistic_loop(correction.statistic);
  const FactorLoop factors = pick_factor_loop(correction);

  const bool whole = hierarchy.stage == Stage::whole;
  const Reduction reduction = correction.reduction;
  const auto words_of = [&](int64_t segment) { return hierarchy.tables.sums + segment * kWords; };

  if (hierarchy.depth > 0 && (whole || hierarchy.stage == Stage::sums)) {
    parallel_for(leaves.tasks(), threads, [&](int64_t task) {
      leaves.for_each_block(task, [&](const Block& block) {
        Reduced found;
        float own[kTile];
        for_each_tile_of(block, kGridOfBlock, [&](int64_t tile, int, int n) {
          statistics(args.logp + tile, args.old_logp + tile, own, n);
          for (int i = 0; i < n; ++i) {
            if (own[i] == own[i] && (!args.mask || args.mask[tile + i] != 0)) found.add(own[i]);
          }
        });
        (block.begins ? space.of_leaves[block.leaf] : space.of_blocks[task]) = found;
      });
    });
    gather_blocks(leaves, space.of_blocks, space.of_leaves);
    for (int64_t p = 0; p < leaves.count(); ++p) space.segments[p] = {};
    for (int64_t p = 0; p < leaves.count(); ++p) {
      if (leaves.length(p) > 0) space.segments[leaves.ancestor(0, p)].add(space.of_leaves[p]);
    }
    for (int64_t s = 0; !whole && s < leaves.count(); ++s) {
      for (int word = 0; word < kWords; ++word) words_of(s)[word] = word_of(space.segments[s], word, reduction);
    }
  }
  if (!whole && hierarchy.stage != Stage::sweep) return;

  for_each_range(args.tokens, threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) correction.factor[t] = args.token_weight ? args.token_weight[t] : 1.0f;
  });
  parallel_for(leaves.tasks(), threads, [&](int64_t task) {
    leaves.for_each_block(task, [&](const Block& block) {
      float of_segment[2] = {};  // by sign of the advantage
      if (hierarchy.depth > 0) {
        const int64_t segment = leaves.ancestor(0, block.leaf);
        const float v = whole ? space.segments[segment].as(reduction) : from_words(words_of(segment), reduction);
        for (int sign = 0; sign < 2; ++sign) of_segment[sign] = factor_of(correction, sign, v);
      }
      CorrectionTile tile;
      for_each_tile_of(block, kGridOfBlock, [&](int64_t first, int, int n) {
        statistics(args.logp + first, args.old_logp + first, tile.own, n);
        const int32_t negative = !args.advantage_per_token && args.advantages[block.row] < 0.0f;
        for (int i = 0; i < n; ++i) tile.negative[i] = negative;
        if (args.advantage_per_token) {
          for (int i = 0; i < n; ++i) tile.negative[i] = args.advantages[first + i] < 0.0f;
        }
        if (hierarchy.depth > 0) {
          for (int i = 0; i < n; ++i) tile.factor[i] = tile.negative[i] ? of_segment[1] : of_segment[0];
        } else {
          factors(correction, tile, n);
        }
        for (int i = 0; i < n; ++i) {  // a token without a statistic is in no segment
          tile.factor[i] = tile.own[i] != tile.own[i] ? tile.own[i] : tile.factor[i];
        }
        float* __restrict out = correction.factor + first;  // the token weight, or 1
        if (!args.mask) {
          for (int i = 0; i < n; ++i) out[i] *= tile.factor[i];
        } else {
          for (int i = 0; i < n; ++i) out[i] = args.mask[first + i] ? tile.factor[i] * out[i] : out[i];
        }
      });
    });
  });
}

}  // namespace hpo::HPO_ISA
