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

}  // namespace

int64_t correction_workspace(int64_t tokens, int64_t, int64_t leaves) { return Workspace(nullptr, tokens, leaves).bytes; }

void correction(const PolicyLossArgs& args, const Hierarchy& hierarchy, const Correction& correction, int threads) {
  const Workspace space(args.workspace, args.tokens, hierarchy.leaves);
  const Leaves leaves(hierarchy, args, space.start);
  threads = worthwhile(threads, args.tokens + hierarchy.leaves);
  const auto valid = [&](int64_t t) { return !args.mask || args.mask[t] != 0; };
  const auto statistic = [&](int64_t t) { return statistic_of(correction.statistic, args.logp[t], args.old_logp[t]); };

  const bool whole = hierarchy.stage == Stage::whole;
  const Reduction reduction = correction.reduction;
  const auto words_of = [&](int64_t segment) { return hierarchy.tables.sums + segment * kWords; };

  if (hierarchy.depth > 0 && (whole || hierarchy.stage == Stage::sums)) {
    parallel_for(leaves.tasks(), threads, [&](int64_t task) {
      leaves.for_each_block(task, [&](const Block& block) {
        Reduced found;
        for (int64_t t = block.first; t < block.first + block.tokens; ++t) {
          const float v = valid(t) ? statistic(t) : NAN;
          if (v == v) found.add(v);
        }
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
      for (int64_t t = block.first; t < block.first + block.tokens; ++t) {
        if (!valid(t)) continue;
        const float advantage = args.advantage_per_token ? args.advantages[t] : args.advantages[block.row], v = statistic(t);
        const int sign = advantage < 0.0f;
        const float factor = v != v ? v : (hierarchy.depth > 0 ? of_segment[sign] : factor_of(correction, sign, v));
        correction.factor[t] = args.token_weight ? factor * args.token_weight[t] : factor;
      }
    });
  });
}

}  // namespace hpo::HPO_ISA
