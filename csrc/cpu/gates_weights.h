// The weights of tokens: their own, and the factors of corrections by their own statistic and by those of their row.
#pragma once
#include "gates_sure_masks.h"
#include "hpo/api/gates.h"
#include "rows.h"

namespace hpo::HPO_ISA {

// Whether tokens may have weights other than 1.
inline bool weighs_tokens(const PolicyLossArgs& args) { return args.token_weight || args.correction.second; }

// The signs of advantages: by token, from the first of these arrays that is not null, or one for all tokens.
struct Signs {
  const float* advantages;
  const int32_t* kinds;
  bool negative;

  // The signs of the tokens of one row, by place behind the first.
  static Signs of_row(const PolicyLossArgs& args, int64_t row, int64_t first) {
    if (args.advantage_per_token) return {args.advantages + first, nullptr, false};
    return {nullptr, nullptr, args.advantages[row] < 0.0f};
  }

  template <bool kWhole>
  HPO_INLINE Ints at(int i, Mask own) const {
    if (advantages) return load_own<kWhole>(own, advantages + i) < 0.0f;
    return kinds ? Ints(load_lanes<Ints>(kinds + i) == kNegative) : Ints{} - int32_t(negative);
  }
};

// The weights of the tokens of a call that has a correction.
struct CorrectedWeights {
  const float *first, *second, *token_weight;
  const RuleNumbers rule;
  const bool some_are_sure, truncates;
  const float least[2], most[2];  // exponents, by sign of the advantage

  explicit CorrectedWeights(const PolicyLossArgs& args)
      : first(args.correction.first ? args.correction.first : args.logp),
        second(args.correction.second),
        token_weight(args.token_weight),
        rule(args.correction.rule),
        some_are_sure(has_sure_tokens(rule)),
        truncates(rule.statistic == Statistic::log_ratio && rule.action == Action::clamp),
        least{exponent_of(0, -INFINITY), exponent_of(1, -INFINITY)},
        most{exponent_of(0, INFINITY), exponent_of(1, INFINITY)} {}

  HPO_INLINE Floats factor(Mask own, Ints negative, Floats from, Floats to) const {
    // One clamp has the bits of the three that saturate, truncate and bound the exponent. An infinite log-ratio has no
    // statistic, so its weight is NaN.
    if (truncates) {
      const Floats log_ratio = from - to, zero_or_nan = log_ratio - log_ratio;
      const Floats exponent = clamp(log_ratio, by_sign<Floats>(negative, least), by_sign<Floats>(negative, most));
      return exp(exponent) + zero_or_nan;
    }
    if (some_are_sure) {
      const Floats low = by_sign<Floats>(negative, rule.low), high = by_sign<Floats>(negative, rule.high);
      if (!any(but_not(own, surely_inside(rule.statistic, from, to, low, high)))) return all<Floats>(1.0f);
    }
    return rule.factor(negative, from, to, Exponential{});
  }

 private:
  float exponent_of(int sign, float log_ratio) const { return clamped_exponent(rule.low[sign], rule.high[sign], log_ratio); }
};

constexpr RowFactor kNoFactor = {{1.0f, 1.0f}, true, false};

// Writes the weights of the tokens [from, to) behind `begin`: their token_weight, times the factor of their row unless `row` is
// null, times under kOfTokens the factor of their own statistic. kAlike: their advantages have one sign. The function is not
// inline, so that the loops of gates keep their numbers in registers.
template <bool kOfTokens, bool kAlike>
__attribute__((noinline)) void write_weights_of(const CorrectedWeights& of, const RowFactor* row, int64_t begin, int from,
                                                int to, const Signs& signs, float* weights) {
  const CorrectedWeights local = of;  // stores may alias
  const RowFactor of_row = row ? *row : kNoFactor;
  const Signs sign = signs;
  for_each_vector(from, to, [&](int i, Mask own, auto whole) HPO_INSIDE {
    constexpr bool kWhole = decltype(whole)::value;
    const int64_t at = begin + i;
    if (kOfTokens) __builtin_prefetch(local.first + at + kAhead), __builtin_prefetch(local.second + at + kAhead);
    const auto load = [&](const float* tokens) HPO_INSIDE { return load_own<kWhole>(own, tokens + at); };
    const Ints negative = kAlike ? Ints{} - int32_t(sign.negative) : sign.at<kWhole>(i, own);
    Floats weight = all<Floats>(1.0f);
    if (row) weight = by_sign<Floats>(negative, of_row.by_sign);
    if (kOfTokens) {
      weight *= local.factor(own, negative, load(local.first), load(local.second));
    } else if (!of_row.complete) {  // only such a row has tokens without a statistic, which are NaN
      const Floats log_ratio = load(local.first) - load(local.second);
      weight += log_ratio - log_ratio;
    }
    // A vector may begin before `from`; only the weights of the range's own tokens are stored.
    store_own<kWhole>(own, local.token_weight ? weight * load(local.token_weight) : weight, weights + i);
  });
}

// Writes the weights of the tokens [from, to) behind `begin`. Segments are read for corrections over rows only, and cover the
// tokens that lie in a row.
inline void write_weights(const PolicyLossArgs& args, int64_t begin, int from, int to, const Segment* segments, int count,
                          const Signs& signs, float* weights) {
  const CorrectedWeights of(args);
  const bool alike = !signs.advantages && !signs.kinds;
  const auto of_tokens = alike ? write_weights_of<true, true> : write_weights_of<true, false>;
  const auto of_rows = alike ? write_weights_of<false, true> : write_weights_of<false, false>;
  const auto write = args.correction.of_tokens ? of_tokens : of_rows;
  if (!args.correction.of_rows) return write(of, nullptr, begin, from, to, signs, weights);
  for (const Segment* each = segments; each < segments + count; ++each) {
    const RowFactor& row = args.correction.factors[each->row];
    (row.unmasked ? of_rows : write)(of, &row, begin, each->begin, each->end, signs, weights);
  }
}

// The factors of corrections over rows. A sweep computes those of a row that lies in one chunk right before it reads its
// tokens again; those of other rows are computed before the sweep. The functions are in corrections.cpp.
struct RowFactors {
  RowFactor* factors;  // [rows]
  uint8_t* workspace;

  RowFactors(Arena& arena, int64_t tokens, int64_t rows);

  // The arguments with room for factors, and with those of rows in several chunks if this is the first sweep.
  PolicyLossArgs added_to(PolicyLossArgs args, bool first_sweep, int threads) const;
};

inline bool corrects_rows(const PolicyLossArgs& args) { return args.correction.of_rows > 0; }

// Computes the factors of this row, if it lies in one chunk.
void correct_row(const PolicyLossArgs& args, const Rows& rows, int64_t row);
// Computes those of all rows that lie in this chunk.
void correct_rows(const PolicyLossArgs& args, const Rows& rows, int64_t chunk);

}  // namespace hpo::HPO_ISA
