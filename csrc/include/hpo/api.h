// The C interface of every native backend: plain structs of raw pointers and int64 sizes, the same for C++ and CUDA.
// A null pointer means "not given". Nothing here knows a framework; the Python side checks shapes and dtypes once.
// Whatever the values behind the pointers are, no kernel reads or writes outside the sizes given here.
#pragma once
#include <cstdint>

namespace hpo {

enum class TokenGate : int32_t { identity = 0, drop = 1, clip = 2 };
enum class Routing : int32_t { through = 0, self = 1, stopped = 2 };
enum class Head : int32_t {
  linear = 0,
  score = 1,
  log = 2,
  mirror = 3,
  sigmoid = 4,
  simple = 5,
  target = 6,
  negative_aware = 7,
  flipped = 8,
  censored = 9
};
enum class Penalty : int32_t { none = 0, k1 = 1, k2 = 2, k3 = 3, absolute = 4 };
enum class KLEstimator : int32_t { none = 0, k1 = 1, k2 = 2, k3 = 3 };
enum class KLGradient : int32_t { value = 0, straight_through = 1, importance = 2 };

// The structure of a ratio gate: what may specialise a kernel. Everything else is a run-time number.
struct GateStructure {
  TokenGate token;
  Head head;
  KLEstimator kl;
  KLGradient kl_gradient;
  int32_t strict;          // window selection: 1 `score > threshold`, 0 `score >= threshold`
  int32_t low_driven[2];   // 1: `low` replaces this bound per token; index 0: advantage >= 0, 1: advantage < 0
  int32_t high_driven[2];
};

struct GateNumbers {
  double token_low[2], token_high[2];  // ratio space; 0 and +inf are "no bound"; [advantage >= 0, < 0]
  double kl_beta;
};

enum class Statistic : int32_t { log_ratio = 0, k2 = 1, k3 = 2, probability = 3, binary_kl = 4 };
enum class Reduction : int32_t { mean = 0, sum = 1, min = 2, max = 3 };
enum class Action : int32_t { mask = 0, band = 1, clamp = 2 };

// How the statistic of two log-probabilities becomes a factor.
struct CorrectionRule {
  Statistic statistic;
  Action action;
  int32_t strict;  // a statistic on a bound is outside
  double low[2], high[2];  // of the statistic, [advantage >= 0, < 0]
};

// The factor of corrections on the tokens of a row.
struct RowFactor {
  float by_sign[2];  // of the advantage
  bool complete;     // each of its tokens has a statistic
  bool unmasked;     // each token with a statistic passes the rule of tokens, which is a mask
};

// A correction of rows, by the statistic of their tokens.
struct RowCorrection {
  CorrectionRule rule;
  Reduction reduction;
};

constexpr int kMostRowCorrections = 2;

// Factors of the sweep's own on the weight of every token, all over one pair of log-probabilities.
struct TokenCorrection {
  const float* first;   // [tokens]; null: logp
  const float* second;  // [tokens]; null: no correction
  CorrectionRule rule;  // by the statistic of the token
  // Read on the CPU alone: elsewhere a correction has a rule of tokens, and none of rows.
  int32_t of_tokens, of_rows;                // whether there is a rule of tokens; the number of those of rows
  RowCorrection rows[kMostRowCorrections];
  RowFactor* factors;                        // [rows], of all corrections of rows; workspace of the call, which writes it
};

struct PolicyLossArgs {
  int64_t tokens, rows;
  // [tokens]
  const float* logp;
  const float* old_logp;      // null: on-policy, the log-ratio is 0
  const float* ref_logp;
  const float* entropy;       // metrics only
  const float* score;         // window score: -inf undefined, NaN in error
  const float* token_weight;
  const float* low;           // per-token ratio bounds
  const float* high;
  const uint8_t* mask;        // null: every token of every row is valid
  const uint8_t* token_mask;
  // [rows + 1], [rows]
  const int64_t* cu_seqlens;
  const float* weights;
  const float* advantages;    // [rows], or [tokens] if advantage_per_token
  int32_t advantage_per_token;
  const float* threshold;     // [1], with score
  // with a term: what some heads compare the ratio with, [rows], or [tokens] if target_per_token; and which tokens pay its
  // penalty
  const float* target;
  int32_t target_per_token;
  const uint8_t* penalty_mask;  // [tokens]; null: every valid token
  const float* kl_weight;       // [tokens], with ref_logp: a factor on the penalty on it; not finite: 0
  TokenCorrection correction;
  // outputs
  float* loss;                // [1]
  double* metrics;            // [kMetrics], see metrics.h
  float* grad;                // [tokens]; null: not wanted
  float* token_loss;          // [tokens]; null: not wanted
  void* workspace;            // policy_loss_workspace(tokens, rows) bytes, 16-byte aligned, any content
};

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

// A factor on tokens from u = logp - old_logp of PolicyLossArgs, whose mask, cu_seqlens, advantages and token_weight count too.
// PolicyLossArgs::correction, where given, has the two log-probabilities; a token whose log-ratios to old_logp and ref_logp are
// not both numbers is masked then.
//
// leaves and their segments are those of a Hierarchy of depth 1, or 0 where the statistic is the token's own.
struct Correction {
  CorrectionRule rule;
  Reduction reduction;
  float* factor;  // [tokens]: times token_weight; NaN where the statistic is; 1 times it where masked or in no leaf
};

// The log-probabilities that a correction compares, and those of the loss, null where these are the same tensors.
struct Compared {
  const float *first, *second;
  const float *logp, *old_logp, *ref_logp;
};

inline Compared compared(const PolicyLossArgs& args) {
  const TokenCorrection& own = args.correction;
  if (!own.second) return {args.logp, args.old_logp, nullptr, nullptr, nullptr};
  const float* old_logp = args.old_logp ? args.old_logp : args.logp;
  return {own.first ? own.first : args.logp, own.second, args.logp, old_logp, args.ref_logp};
}

enum class Center : int32_t { mean = 0, leave_one_out = 1 };
enum class Scale : int32_t { none = 0, group = 1, batch = 2, absolute = 3, mean = 4, root_mean = 5 };
enum class EpsMode : int32_t { add = 0, sqrt = 1, floor = 2, add_share = 3 };
enum class Part : int32_t { normalised = 0, mean = 1 };
enum class Presence : int32_t { always = 0, spread = 1, nonzero = 2 };
enum class Share : int32_t { sum = 0, equal = 1, count = 2, deviation = 3 };

// A grouping of units, and how the statistics of a group become a term of its units.
struct GroupTerm {
  const float* values;          // [units]
  const int64_t* ids;           // [units], any integers, negative: in no group; null: one group
  const float* weights;         // [units], in the statistics; not above 0 or not finite: no member; null: 1 each
  Center center;                // a unit equal to its group's centre gets exactly 0, whatever eps is
  Scale scale;                  // mean, root_mean: a group whose mean is not above 0 gets exactly 0, whatever eps is
  int32_t ddof;
  EpsMode eps_mode;
  double eps;
  int32_t singleton_raw;        // 1: a group of one keeps its raw value (centre 0, group scale 1); 0: exactly 0
  Part part;
  Presence presence;
  double coefficient;
};

constexpr int kMostTerms = 8;

struct GroupNormaliseArgs {
  int64_t units;
  int32_t count;                // of terms, 1 to kMostTerms
  GroupTerm terms[kMostTerms];
  const uint8_t* mask;          // [units], which of them enter the statistics; null: all
  const uint8_t* apply_mask;    // [units], which of them receive an advantage; null: those of mask
  Share share;
  double share_eps, share_least;
  float* advantages;            // [units]
  void* workspace;              // group_normalise_workspace(units, count) bytes
};

// The statistics of the group of every unit.
struct GroupStatisticsArgs {
  int64_t units;
  const float* values;    // [units]
  const int64_t* ids;     // [units], negative: in no group; null: one group
  const float* weights;   // [units], not above 0 or not finite: no member; null: 1 each
  const uint8_t* mask;    // [units], which of them are members; null: all
  double* statistics;     // [6][units]: members, their weight, mean, sum of w (x - mean)^2, least, greatest; else 0
  void* workspace;        // group_statistics_workspace(units) bytes
};

// y[i] = x[i] + g[i] y[i + 1] from the end of every row to its begin, y = 0 behind a row and outside all rows.
struct RecurrenceArgs {
  int64_t units, rows;
  const double* values;       // [units]
  const double* gains;        // [units]
  const int64_t* cu_seqlens;  // [rows + 1]
  double* scanned;            // [units]
};

enum class Boundary : int32_t { full = 0, shrink = 1, zero = 2, carry = 3 };
enum class Invalid : int32_t { skip = 0, stop = 1 };  // "break" in Python
enum class WindowAggregate : int32_t { mean = 0, sum = 1, max = 2, min = 3 };

struct WindowArgs {
  int64_t tokens, rows;
  const float* values;          // [tokens]
  const uint8_t* mask;          // [tokens] or null
  const int64_t* cu_seqlens;    // [rows + 1]
  int64_t first, last;          // the window of token t is {t + first, ..., t + last}, cut by its row; first <= last
  Boundary boundary;
  Invalid invalid;
  WindowAggregate aggregate;
  float* score;  // [tokens]: the aggregate; -inf where undefined or masked; NaN where the token's own value is not finite
  void* workspace;
};

// index = rule(numerator * (n - 1) / denominator); linear interpolates between two of them, outside of kernels
enum class OrderRule : int32_t { ceil = 0, floor = 1, nearest = 2, linear = 3 };

struct OrderStatisticArgs {
  int64_t tokens, rows;
  const float* values;  // [tokens]; the population is what is neither -inf nor NaN of their scores
  // both null: the values are scores. Else the score of a token is its value; -inf outside rows and where masked; NaN where
  // the value is not finite
  const uint8_t* mask;        // [tokens] or null
  const int64_t* cu_seqlens;  // [rows + 1]
  int64_t numerator, denominator;
  OrderRule rule;
  float* threshold;  // [1]; NaN for an empty population
  int64_t* counts;  // [2]: population, NaN scores
  int32_t strict;     // these two as in SelectArgs, with this threshold
  uint8_t* selected;  // [tokens] or null: then only the threshold is wanted
  void* workspace;  // order_statistic_workspace(tokens) bytes, any content
};

struct SelectArgs {
  int64_t tokens, rows;
  const float* values;        // as in OrderStatisticArgs
  const uint8_t* mask;
  const int64_t* cu_seqlens;
  const float* threshold;     // [1]
  int32_t strict;             // 1: score > threshold, 0: score >= threshold
  uint8_t* selected;          // [tokens]: 0 or 1
};

// Order statistics of scopes: a scope is a list of segments, which are ranges of tokens.
struct OrderStatisticsArgs {
  int64_t tokens, segments, scopes;
  const float* values;     // [tokens]; the population are the finite ones. -inf is undefined, all others are errors.
  const uint8_t* mask;     // [tokens] or null
  const int64_t* offsets;  // [segments + 1]: segment n holds the tokens offsets[n] .. offsets[n + 1]
  // both null: scope c is segment c. Else scope c has the segments order[begin[c] .. begin[c + 1])
  const int64_t* order;    // [segments]
  const int64_t* begin;    // [scopes + 1]
  int64_t numerator, denominator;
  OrderRule rule;
  const int64_t* k;   // [scopes] or null: the k largest are selected, ties in the order of the list; no quantile then
  float* thresholds;  // [scopes] or null; NaN for an empty population
  int64_t* counts;    // [scopes][2] or null: population, errors
  uint8_t* selected;  // [tokens], null without k; zeros, as tokens outside of the scopes are not written
  void* workspace;    // order_statistics_workspace(tokens, segments) bytes, any content
};

// The draw of tokens by their terms of the covariance.
struct CovarianceDraw {
  const float* old_logp;    // [tokens]; null: nothing is drawn
  double low, high;         // of terms, which lie between them
  double least, most;       // of the log-ratios of tokens with an advantage below 0, and above 0
  uint32_t factor, offset;  // of the pseudo-random numbers of places
};

// The terms of the covariance of log-probability and advantage, over the members: unmasked tokens where both are finite.
struct CovarianceArgs {
  int64_t tokens, rows;
  const float* logp;          // [tokens]
  const float* advantages;    // [rows], without rows [tokens]
  const int64_t* cu_seqlens;  // [rows + 1], or null: there are no rows. A token in no row is no member
  const uint8_t* mask;        // [tokens] or null
  CovarianceDraw draw;
  float* keys;       // [tokens]: the terms, or the numbers of the tokens that may be drawn; -inf elsewhere
  int64_t* members;  // [1], the number of them
  void* workspace;   // covariance_workspace(tokens) bytes, any content
};

// The arguments of select after order_statistic.
inline SelectArgs selection_of(const OrderStatisticArgs& args) {
  return {args.tokens, args.rows, args.values, args.mask, args.cu_seqlens, args.threshold, args.strict, args.selected};
}

enum class LogitType : int32_t { float32 = 0, bfloat16 = 1, float16 = 2 };

// Log-probability of a target and entropy of its distribution, for rows of logits over a vocabulary.
struct LogprobsArgs {
  int64_t rows, columns;      // columns >= 1: the part of the vocabulary that the logits are of
  int64_t first, vocabulary;  // id of the first column; size of the whole
  // row r begins at element (r / inner) * outer_stride + (r % inner) * inner_stride
  int64_t inner, outer_stride, inner_stride;
  const void* logits;
  LogitType type;
  const int64_t* targets;     // [rows]; outside [0, vocabulary): the row is undefined, NaN
  const float* temperatures;  // [rows]; null: that number for all. Where it is not above 0 the row is undefined.
  double temperature;
  int64_t ignore_index;  // rows with this target are not read and get 0
  const float* floors;   // [rows] or null; a logit that is not at least that counts as -inf
  int32_t kept;          // 2, 3 or 4 statistics of each row
  float* logp;           // [rows]; -inf where the target is not in this part
  float* entropy;        // [rows]; null if kept == 2
  // [kept][rows]: greatest logit, sum of the others, mean distance, sum of squared probabilities. A part in which all logits
  // are -inf has -inf and zeros, which is what merging leaves as it is; the whole is undefined then.
  float* statistics;
};

struct LogprobsBackwardArgs {
  LogprobsArgs given;            // without outputs
  const float* statistics;        // of the whole vocabulary: the first two, and the third for an entropy_gradient
  const float* logp_gradient;     // [rows]; null: 0
  const float* entropy_gradient;  // [rows]; null: 0
  // The gradient has the type of the logits, and strides of its own. The logits themselves, at their strides: in place.
  void* grad;
  int64_t grad_outer_stride, grad_inner_stride;
};

struct RowCountsArgs {
  int64_t tokens, rows;
  const uint8_t* mask;  // [tokens] or null
  const int64_t* cu_seqlens;  // [rows + 1]
  int64_t* counts;  // [rows]: valid tokens of each row
};

struct RowSpansArgs {
  int64_t tokens, rows;
  const uint8_t* mask;  // [tokens]
  const int64_t* cu_seqlens;  // [rows + 1]
  // [2 rows + 2]: the first offset; the first valid token of each row, and the one after its last; the last offset. A broken
  // row has tokens + 1 and -1: rows of these offsets that begin or end there are broken, too.
  int64_t* spans;
};

}  // namespace hpo

// The functions of a backend. They return 0, or the backend's own error code (see hpo_error). `context` is the CUDA stream, or
// on the CPU the number of threads allowed: results never depend on it.
extern "C" {
int64_t hpo_policy_loss_workspace(int64_t tokens, int64_t rows);
int hpo_policy_loss(const hpo::PolicyLossArgs* args, const hpo::GateStructure* structure, const hpo::GateNumbers* numbers,
                    int64_t context);
// The same under a hierarchy.
int64_t hpo_hierarchy_workspace(int64_t tokens, int64_t rows, int64_t leaves);
int hpo_hierarchy(const hpo::PolicyLossArgs* args, const hpo::GateStructure* structure, const hpo::GateNumbers* numbers,
                  const hpo::Hierarchy* hierarchy, int64_t context);
int64_t hpo_correction_workspace(int64_t tokens, int64_t leaves);
int hpo_correction(const hpo::PolicyLossArgs* args, const hpo::Hierarchy* hierarchy, const hpo::Correction* correction,
                   int64_t context);
int64_t hpo_group_normalise_workspace(int64_t units, int32_t terms);
int hpo_group_normalise(const hpo::GroupNormaliseArgs* args, int64_t context);
int64_t hpo_group_statistics_workspace(int64_t units);
int hpo_group_statistics(const hpo::GroupStatisticsArgs* args, int64_t context);
int hpo_recurrence(const hpo::RecurrenceArgs* args, int64_t context);
int64_t hpo_window_score_workspace(int64_t tokens, int64_t width);  // width = last - first + 1
int hpo_window_score(const hpo::WindowArgs* args, int64_t context);
int64_t hpo_order_statistic_workspace(int64_t tokens);
int hpo_order_statistic(const hpo::OrderStatisticArgs* args, int64_t context);
int hpo_select(const hpo::SelectArgs* args, int64_t context);
int64_t hpo_covariance_workspace(int64_t tokens);
int hpo_covariance(const hpo::CovarianceArgs* args, int64_t context);
int64_t hpo_order_statistics_workspace(int64_t tokens, int64_t segments);
int hpo_order_statistics(const hpo::OrderStatisticsArgs* args, int64_t context);
int hpo_row_counts(const hpo::RowCountsArgs* args, int64_t context);
int hpo_row_spans(const hpo::RowSpansArgs* args, int64_t context);
int hpo_token_logprobs(const hpo::LogprobsArgs* args, int64_t context);
int hpo_token_logprobs_backward(const hpo::LogprobsBackwardArgs* args, int64_t context);
// CUDA alone: values[count] *= *factor, each float32, bfloat16 or float16; they are not touched where it is 1.
int hpo_scale(void* values, int64_t count, hpo::LogitType type, const float* factor, int64_t context);
// CUDA alone: both directions of token_logprobs in one launch, with d loss / d logp of a gate on tokens between them. Row r of
// the logits predicts token r + 1; log-probabilities and entropies go to `logits.given`, by token, the gradient to
// `logits.grad`. Of `args` the log-probabilities and outputs do not count. hierarchy: of depth 0, where a term is present, else
// null. blocks: what hpo_loss_from_logits_blocks says.
int hpo_loss_from_logits(const hpo::LogprobsBackwardArgs* logits, const hpo::PolicyLossArgs* args,
                         const hpo::GateStructure* structure, const hpo::GateNumbers* numbers, const hpo::Hierarchy* hierarchy,
                         int64_t blocks, int64_t context);
// The number of rows that may be read at once, so that the cache of the current device keeps them for the gradient; 0: so few
// that most of the device would stand idle, and one launch for each direction is the quicker way.
int64_t hpo_loss_from_logits_blocks(const hpo::LogprobsArgs* logits);
const char* hpo_error(int status);
// "AVX-512", "sm_80 sm_90 ...", "emulated": what runs; null where nothing can, hpo_error(hpo_unusable) then says why.
const char* hpo_description();
// CUDA alone. A version is 12080 for CUDA 12.8; the driver's is the newest that it knows, and 0 without a driver.
void hpo_cuda_versions(int* driver, int* runtime);
constexpr int hpo_unusable = 1;
}
