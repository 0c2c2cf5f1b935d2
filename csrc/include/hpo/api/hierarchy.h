// hierarchy: policy_loss under levels.
#pragma once
#include "gates.h"

namespace hpo {

enum class LevelKind : int32_t { identity = 0, clip = 1, rollback = 2, tanh = 3, gamma = 4, excess = 5 };
enum class Aggregate : int32_t { mean = 0, sum = 1, log_mean_exp = 2, balanced = 3 };

// One level of a hierarchy. Bounds are in log space, [channel][advantage >= 0, < 0].
struct HierarchyLevel {
  LevelKind gate;
  Routing routing;
  Aggregate aggregate;  // log_mean_exp: of all levels that are not balanced, and with a term; balanced: never of the finest
  double low[2][2], high[2][2];
  double slope;  // of the rollback; negative: the number of the segment's tokens, at most -slope
};

// The parts of a token's term that few gates have. Pairs are [advantage >= 0, < 0].
struct TokenTerm {
  int32_t present;  // 0: the head is linear or score, and nothing below counts
  Penalty penalty;  // on the token's own log-ratio
  double penalty_coefficient;
  double head[2];  // the head's number
  double slope_low[2], slope_high[2];  // derivative of the token clip beyond its bounds
  double weight_low[2], weight_high[2];  // factor on the objective there
  double pre_low[2], pre_high[2];  // clip of the log-ratio before any aggregate
};

constexpr int kMostLevels = 4;  // step, trajectory, group, domain

// A call at once, or in stages, in this order. Between stages the caller may change the sums of segments: add those of other
// processes, or replace them. The last two stages do nothing where no gradient flows through aggregates.
enum class Stage : int32_t { whole = 0, sums = 1, sweep = 2, reduce_grad = 3, broadcast_grad = 4 };

// The sums of segments, all in integers: of segment s at level k at [k][s], 0 for those that have no token. The caller owns the
// tables of a call in stages; null: they are in the workspace.
struct SegmentTables {
  // [depth][leaves][3]: valid tokens, and by channel their log-ratios, or e^x - 1 for log_mean_exp, see to_fixed; of a balanced
  // level the finer segments that have tokens, and their aggregates. After `sums`
  int64_t* sums;
  // [depth][leaves][2]: by channel the largest magnitude of a leaf's gradient in the aggregate, the bits of a double. After
  // `sweep`
  int64_t* largest;
  // [depth][leaves][2]: by channel the gradient in the aggregate, in steps that `largest` fixes. After `reduce_grad`
  int64_t* aggregate_grad;
};

// Levels above the tokens, finest first, none at depth 0. Leaves are ranges of tokens that tile the finest level, each inside
// its row and behind the leaf before it; a leaf that breaks this is left out and counted.
struct Hierarchy {
  int32_t depth;
  int32_t split;  // 1: positive and negative log-ratios are two channels
  double token_low[2], token_high[2];  // of the token's residual, log space
  HierarchyLevel levels[kMostLevels];
  TokenTerm term;
  int64_t leaves;
  const int64_t* leaf_begin;  // [leaves]
  const int64_t* leaf_end;
  const int64_t* leaf_row;   // null: leaf p is row p
  const int64_t* ancestors;  // [depth][leaves], in [0, leaves): a segment's number is that of its first leaf; null: leaf p
                             // is segment p at every level
  Stage stage;
  SegmentTables tables;
};

}  // namespace hpo

extern "C" {
// The same under a hierarchy.
int64_t hpo_hierarchy_workspace(int64_t tokens, int64_t rows, int64_t leaves);
int hpo_hierarchy(const hpo::PolicyLossArgs* args, const hpo::GateStructure* structure, const hpo::GateNumbers* numbers,
                  const hpo::Hierarchy* hierarchy, int64_t context);
}
