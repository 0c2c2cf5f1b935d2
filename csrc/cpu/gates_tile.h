// One tile of tokens while policy_loss works on it: rows, masks and optional inputs are first spread into arrays by token, so
// that the arithmetic runs in short loops without branches, rows or exceptions.
#pragma once
#include "gates_weights.h"
#include "rows.h"

namespace hpo::HPO_ISA {

constexpr int kPadded = kTile + 2 * kLanes;  // spread values run over; and 4 KiB apart, arrays would share cache sets

struct Call {
  const PolicyLossArgs& args;
  const GateStructure& structure;
  const GateNumbers& numbers;
  const Rows& rows;
};

// How many tokens of a tile are masked; `some` is right for every tile. Most tiles of a padded batch are of another kind.
enum class Masked : uint8_t { none, some, all };

inline Masked masked_tokens(const uint8_t* mask, int64_t first, int n) {
  if (!mask) return Masked::none;
  const uint8_t* bytes = mask + first;
  constexpr int kBytes = sizeof(Unsigned);
  Unsigned not_one = {}, not_zero = {};
  const auto look = [&](int i) HPO_INSIDE {
    const Unsigned tokens = load_lanes<Unsigned>(bytes + i);
    not_one |= tokens ^ 0x01010101u, not_zero |= tokens;
  };
  uint8_t one_not_one = 0, one_not_zero = 0;
  if (n < kBytes) {
    for (int i = 0; i < n; ++i) one_not_one |= bytes[i] ^ 1u, one_not_zero |= bytes[i];
  } else {
    for (int i = 0; i + kBytes <= n; i += kBytes) look(i);
    look(n - kBytes);  // some for the second time, which does not matter
  }
  if (one_not_one == 0 && !any(present_lanes(Ints(not_one)))) return Masked::none;
  return one_not_zero == 0 && !any(present_lanes(Ints(not_zero))) ? Masked::all : Masked::some;
}

// A call, and the same call without its mask for tiles in which all tokens are kept.
class Calls {
 public:
  const Call& masked;

  explicit Calls(const Call& call)
      : masked(call), args_(without_mask(call.args)), open_{args_, call.structure, call.numbers, call.rows} {}
  Calls(const Calls&) = delete;

  const Call& of(Masked tile) const { return tile == Masked::none ? open_ : masked; }

 private:
  static PolicyLossArgs without_mask(PolicyLossArgs args) {
    args.mask = nullptr;
    return args;
  }

  const PolicyLossArgs args_;
  const Call open_;
};

struct alignas(64) Tile {
  int32_t kind[kPadded];       // of the valid tokens: in a row, not masked, no log-ratio NaN
  int32_t selection[kPadded];  // the same, but absent where the policy term does not count
  int32_t infinite[kPadded];   // not 0: the log-ratio was infinite; its value is saturated, its derivative 0
  float coefficient[kPadded];  // a = (weight * advantage) * token weight; anything where not chosen
  float x[kPadded];            // log-ratio within +-60; 0 where not valid
  float ratio[kPadded];        // e^x
  float loss[kPadded];
  float grad[kPadded];
  float spread[4][kPadded];    // numbers of rows at their tokens, while a loop needs them
  float corrected[kPadded];    // token weights times the factors of the correction
  int32_t* chosen;  // `selection`, or `kind` where all valid tokens count; behind the arrays, so that they stay aligned
  bool has_infinite = false;  // some log-ratio was infinite
  bool near = false;         // the log-ratios of the last fast-path tile were near 0
  bool exceptional = false;  // some log-ratio may be infinite, NaN or beyond the saturation of statistics

  Tile() {
    for (int32_t& each : infinite) each = 0;
  }
};

// Writes numbers of rows to their tokens: value(row) once for each segment, whole vectors at a time.
template <class Value>
inline void spread_rows(const Segments& segments, float* out, const Value& value) {
  for (const Segment& segment : segments) {
    const float here = value(segment.row);
    for (int i = segment.begin; i < segment.end; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) out[i + lane] = here;
    }
  }
}

// The weights of the tokens of a tile, whose `corrected` is filled if the call has a correction; null if all are 1.
inline const float* token_weights(const PolicyLossArgs& args, int64_t first, const Tile& tile) {
  if (args.correction.second) return tile.corrected;
  return args.token_weight ? args.token_weight + first : nullptr;
}

// Multiplies coefficients by those of their factors that belong to tokens.
inline void multiply_token_factors(const PolicyLossArgs& args, int64_t first, int n, const Tile& tile,
                                   float* __restrict coefficient) {
  if (args.advantage_per_token) {
    for (int i = 0; i < n; ++i) coefficient[i] *= args.advantages[first + i];
  }
  if (const float* weight = token_weights(args, first, tile)) {
    for (int i = 0; i < n; ++i) coefficient[i] *= weight[i];
  }
}

// Writes the kinds of tokens as far as their rows determine them.
inline void spread_kinds(const PolicyLossArgs& args, int n, const Segments& segments, int32_t* kind) {
  int covered = 0;
  for (const Segment& segment : segments) {
    for (int i = covered; i < segment.begin; ++i) kind[i] = kAbsent;
    covered = segment.end;
    const int32_t here = !args.advantage_per_token && args.advantages[segment.row] < 0.0f ? kNegative : kPositive;
    for (int i = segment.begin; i < segment.end; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) kind[i + lane] = here;
    }
  }
  for (int i = covered; i < n; ++i) kind[i] = kAbsent;
}

// The coefficient of a row; where advantages are of tokens, only its weight.
inline float row_coefficient(const PolicyLossArgs& args, int64_t row) {
  return args.weights[row] * (args.advantage_per_token ? 1.0f : args.advantages[row]);
}

// Whether the coefficients of rows with unmasked tokens here are finite: those of other rows must not choose the way of the
// tile. The first loop has no branch, because tiles of short rows have many segments.
inline bool finite_coefficients(const PolicyLossArgs& args, int64_t first, const Segments& segments) {
  bool all_finite = true;
  for (const Segment& segment : segments) all_finite &= finite(row_coefficient(args, segment.row));
  if (all_finite) return true;
  return std::all_of(segments.begin(), segments.end(), [&](const Segment& segment) {
    return finite(row_coefficient(args, segment.row)) ||
           masked_tokens(args.mask, first + segment.begin, segment.end - segment.begin) == Masked::all;
  });
}

// kind and coefficient as far as rows determine them; true if some coefficient is infinite or NaN.
inline bool load_row_numbers(const PolicyLossArgs& args, int n, const Segments& segments, Tile& tile) {
  bool doubtful = false;
  spread_kinds(args, n, segments, tile.kind);
  spread_rows(segments, tile.coefficient, [&](int64_t row) {
    const float coefficient = row_coefficient(args, row);
    doubtful |= !finite(coefficient);
    return coefficient;
  });
  return doubtful;
}

// The same with the advantages and weights of tokens.
inline bool load_rows(const PolicyLossArgs& args, int64_t first, int n, const Segments& segments, Tile& tile) {
  const bool row_doubtful = load_row_numbers(args, n, segments, tile) && !finite_coefficients(args, first, segments);
  const bool doubtful = row_doubtful || args.advantage_per_token || weighs_tokens(args);
  if (args.advantage_per_token) {
    for (int i = 0; i < n; ++i) {
      const int32_t kind = args.advantages[first + i] < 0.0f ? kNegative : kPositive;
      tile.kind[i] = kind & mask_of(tile.kind[i] != kAbsent);
    }
  }
  if (args.correction.second) {
    write_weights(args, first, 0, n, segments.list, segments.count, {nullptr, tile.kind, false}, tile.corrected);
  }
  multiply_token_factors(args, first, n, tile, tile.coefficient);
  return doubtful;
}

// A target without a meaning makes its token's coefficient NaN. Returns whether there may be one.
inline bool load_targets(const PolicyLossArgs& args, Head head, int64_t first, int n, const Segments& segments, Tile& tile) {
  if (!args.target) return false;
  for (const Segment& segment : segments) {
    for (int i = segment.begin; i < segment.end && i < n; ++i) {
      const float target = args.target_per_token ? args.target[first + i] : args.target[segment.row];
      if (!is_target(head, tile.kind[i] == kNegative, target)) tile.coefficient[i] = NAN;
    }
  }
  return true;
}

// The same for bounds.
inline bool load_bounds_of_tokens(const Call& call, int64_t first, int n, Tile& tile) {
  const PolicyLossArgs& args = call.args;
  if (call.structure.token != TokenGate::clip) return false;
  if (args.low) {
    for (int i = 0; i < n; ++i) tile.coefficient[i] = is_low_bound(args.low[first + i]) ? tile.coefficient[i] : NAN;
  }
  if (args.high) {
    for (int i = 0; i < n; ++i) tile.coefficient[i] = is_high_bound(args.high[first + i]) ? tile.coefficient[i] : NAN;
  }
  return args.low || args.high;
}

inline void apply_mask(const PolicyLossArgs& args, int64_t first, int n, Tile& tile) {
  if (!args.mask) return;
  for (int i = 0; i < n; ++i) tile.kind[i] &= mask_of(args.mask[first + i] != 0);
}

// A token with NaN is invalid, log-ratios beyond +-60 saturate, and an infinite one loses its derivative as well. Conditions
// are the numbers 0 and 1 here, without a branch: such a loop is vectorised, and mispredicts no branch.
template <bool kReference>
inline void resolve_exceptions(const float* logp, const float* old_logp, const float* ref_logp, int n, Tile& tile,
                               Partial& partial) {
  int32_t* __restrict kind = tile.kind;
  int32_t* __restrict infinite = tile.infinite;
  float* __restrict x = tile.x;
  int32_t nan = 0, some_infinite = 0, has_infinite = 0;
  for (int i = 0; i < n; ++i) {
    const LogRatio policy = log_ratio(logp[i], old_logp[i]);
    const LogRatio reference = kReference ? log_ratio(logp[i], ref_logp[i]) : LogRatio{0.0f, 0, 0};
    const int32_t unmasked = kind[i] != kAbsent, valid = unmasked & (1 ^ (policy.nan | reference.nan));
    nan += unmasked - valid;
    some_infinite += valid & (policy.infinite | reference.infinite);
    has_infinite |= valid & policy.infinite;
    kind[i] &= -valid;
    infinite[i] = valid & policy.infinite;
    x[i] = from_bits(to_bits(policy.x) & -valid);
  }
  tile.has_infinite |= has_infinite != 0;
  partial.slots[kNanTokens] += nan;
  partial.slots[kInfiniteTokens] += some_infinite;
}

// x and its statistics. Log-ratios are assumed to be ordinary; if their extrema disprove it, they are taken once more.
inline void load_log_ratios(const PolicyLossArgs& args, int64_t first, int n, Tile& tile, Partial& partial) {
  const float* logp = args.logp + first;
  const float* old_logp = args.old_logp ? args.old_logp + first : logp;  // on-policy: x = 0, or NaN where logp is not finite
  const float* ref_logp = args.ref_logp ? args.ref_logp + first : nullptr;
  for (int i = 0; i < n; ++i) tile.x[i] = keep_if(tile.kind[i] != kAbsent, logp[i] - old_logp[i]);
  int32_t not_finite = 0;
  if (ref_logp) {
    for (int i = 0; i < n; ++i) not_finite |= mask_of(!finite(keep_if(tile.kind[i] != kAbsent, logp[i] - ref_logp[i])));
  }
  LogRatioSums sums(tile.kind, tile.x, n);
  tile.exceptional = not_finite || !sums.ordinary();
  if (tile.exceptional) {
    const auto resolve = ref_logp ? resolve_exceptions<true> : resolve_exceptions<false>;
    resolve(logp, old_logp, ref_logp, n, tile, partial);
    sums = LogRatioSums(tile.kind, tile.x, n);
  }
  sums.add_to(partial);
}

// Chooses the valid tokens that count in the policy term: those with a finite coefficient that the token mask and the window
// let pass.
inline void choose(const Call& call, int64_t first, int n, bool doubtful, Tile& tile, Partial& partial) {
  const PolicyLossArgs& args = call.args;
  tile.chosen = tile.kind;
  if (!doubtful && !args.token_mask && !args.score) return;
  tile.chosen = tile.selection;
  for (int i = 0; i < n; ++i) tile.selection[i] = tile.kind[i];
  if (doubtful) {
    int bad = 0;
    for (int i = 0; i < n; ++i) {
      const bool usable = finite(tile.coefficient[i]);
      bad -= mask_of(!usable) & mask_of(tile.kind[i] != kAbsent);
      tile.selection[i] &= mask_of(usable);
    }
    partial.slots[kBadAdvantages] += bad;
  }
  if (args.token_mask) {
    for (int i = 0; i < n; ++i) tile.selection[i] &= mask_of(args.token_mask[first + i] != 0);
  }
  if (args.score) {
    const float* __restrict score = args.score + first;
    const float threshold = *args.threshold;
    int nan = 0;
    for (int i = 0; i < n; ++i) nan -= mask_of(score[i] != score[i]) & mask_of(tile.kind[i] != kAbsent);
    if (call.structure.strict) {
      for (int i = 0; i < n; ++i) tile.selection[i] &= mask_of(score[i] > threshold);
    } else {
      for (int i = 0; i < n; ++i) tile.selection[i] &= mask_of(score[i] >= threshold);
    }
    partial.slots[kNanTokens] += nan;
  }
}

// Everything about the tokens [first, first + n) that does not depend on the gate.
inline void load(const Call& call, int64_t first, int n, const Segments& segments, Tile& tile, Partial& partial) {
  if (tile.has_infinite) {
    for (int32_t& each : tile.infinite) each = 0;
    tile.has_infinite = false;
  }
  bool doubtful = load_rows(call.args, first, n, segments, tile);  // statements, because operands of | have no order
  doubtful |= load_targets(call.args, call.structure.head, first, n, segments, tile);
  doubtful |= load_bounds_of_tokens(call, first, n, tile);
  apply_mask(call.args, first, n, tile);
  load_log_ratios(call.args, first, n, tile, partial);
  choose(call, first, n, doubtful, tile, partial);
}

}  // namespace hpo::HPO_ISA
