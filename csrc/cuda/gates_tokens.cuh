// The inputs of the kernels of gates.cu, and the classification of a token: valid or not, selected or not, and its coefficient.
#pragma once
#include <cfloat>

#include "hpo/correction_rules.h"
#include "tokens.cuh"

namespace hpo {

// An index that is not a constant would put the pair into memory.
template <class T>
__device__ __forceinline__ T by_sign(const T (&pair)[2], bool negative) {
  return negative ? pair[1] : pair[0];
}

// The inputs of a kernel beside log-probabilities, masks and numbers of rows: none, those that few calls have, or these and a
// correction. A specialisation each keeps them out of the registers of the others.
constexpr int kNoExtras = 0, kExtras = 1, kCorrected = 2;

// The numbers of a row that its tokens need.
struct RowTerms {
  float weight, advantage;
  float a;  // weight * advantage
  float threshold;  // of scores, the same for all rows

  HPO_INLINE float penalty_weight() const { return fabsf(weight) <= FLT_MAX ? weight : 0.0f; }
};

// The arguments of policy_loss as its kernels take them.
struct Gate {
  PolicyLossArgs args;
  GateStructure structure;
  float token_low[2], token_high[2];
  float kl_beta;
  RuleNumbers rule;
  bool low_driven[2], high_driven[2];  // tokens have this bound of their own
  bool wide;  // vectors of four tokens may be read at once from every array
  bool coefficient_varies;  // a may differ between the tokens of a row

  Gate(const PolicyLossArgs& args, const GateStructure& structure, const GateNumbers& numbers)
      : args(args), structure(structure), kl_beta(float(numbers.kl_beta)), rule(args.correction.rule), wide(true) {
    const bool clips = structure.token == TokenGate::clip, drops = structure.token == TokenGate::drop;
    if (!args.old_logp) this->args.old_logp = args.logp;
    if (!clips) this->args.low = this->args.high = nullptr;
    for (int sign = 0; sign < 2; ++sign) {
      token_low[sign] = clips ? float(numbers.token_low[sign]) : (drops ? 1.0f : 0.0f);
      token_high[sign] = clips ? float(numbers.token_high[sign]) : (drops ? 1.0f : INFINITY);
      low_driven[sign] = this->args.low && structure.low_driven[sign];
      high_driven[sign] = this->args.high && structure.high_driven[sign];
    }
    const float* floats[] = {args.logp,    args.old_logp, args.ref_logp,
                             args.entropy, args.score,    args.token_weight,
                             args.low,     args.high,     args.advantage_per_token ? args.advantages : nullptr};
    for (const float* array : floats) wide &= allows_wide(array, 16);
    for (const uint8_t* array : {args.mask, args.token_mask}) wide &= allows_wide(array, 4);
    coefficient_varies = args.advantage_per_token || args.token_weight || args.correction.second;
  }

  int extras() const {
    if (args.correction.second) return kCorrected;
    return args.entropy || args.score || args.token_weight || args.low || args.high || args.token_mask ||
                   args.advantage_per_token || args.kl_weight
               ? kExtras
               : kNoExtras;
  }

  HPO_INLINE Pack pack() const { return {args.cu_seqlens, args.tokens, int(args.rows)}; }

  HPO_INLINE RowTerms row_terms(int row) const {
    const float weight = args.weights[row], advantage = args.advantage_per_token ? 0.0f : args.advantages[row];
    return {weight, advantage, weight * advantage, args.score ? *args.threshold : -INFINITY};
  }
};

// Writes the results of a token of no row or leaf.
__device__ __forceinline__ void clear_token(const PolicyLossArgs& args, int64_t token) {
  if (args.grad) args.grad[token] = 0.0f;
  if (args.token_loss) args.token_loss[token] = 0.0f;
}

// All zero before they are read: a register that only some paths write would be kept for it on every path.
template <int WIDTH>
struct Inputs {
  Vector<WIDTH> vector;
  float logp[WIDTH], old_logp[WIDTH], ref_logp[WIDTH];
  float entropy[WIDTH], score[WIDTH], advantage[WIDTH], token_weight[WIDTH], low[WIDTH], high[WIDTH];
  uint32_t mask, token_mask;  // a byte each

  // Inputs that few calls have are read token by token, when they are needed.
  template <bool SOUND = false>
  __device__ __forceinline__ float one(const float* array, int i) const {
    return __ldg(array + (SOUND ? vector.token + i : vector.at(i)));
  }

  // Bit i: token i belongs to the row and is not masked.
  __device__ __forceinline__ unsigned unmasked() const {
    unsigned bits = vector.inside();
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) bits &= byte_of(mask, i) ? ~0u : ~(1u << i);
    return bits;
  }

  // The inputs of one token of four.
  __device__ __forceinline__ Inputs<1> only(int i) const {
    return {vector.only(i),     {pick(logp, i)},  {pick(old_logp, i)},    {pick(ref_logp, i)},
            {pick(entropy, i)}, {pick(score, i)}, {pick(advantage, i)},   {pick(token_weight, i)},
            {pick(low, i)},     {pick(high, i)},  mask >> (8 * i) & 0xFF, token_mask >> (8 * i) & 0xFF};
  }
};

// `absent`: the value of every token where the array is null, which is asked once a vector and not once a token.
template <bool WHOLE, int WIDTH>
__device__ __forceinline__ void read(const float* array, float absent, const Vector<WIDTH>& vector, float (&values)[WIDTH]) {
  if (array) return read<WHOLE>(array, vector, values);
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) values[i] = absent;
}

// All but the policy's log-probabilities.
template <bool WHOLE, bool REFERENCE, int EXTRAS, int WIDTH>
__device__ __forceinline__ void read_constants(const PolicyLossArgs& args, Inputs<WIDTH>& inputs) {
  const Vector<WIDTH>& vector = inputs.vector;
  inputs.mask = 0x01010101u;
  if (args.mask) read<WHOLE>(args.mask, vector, inputs.mask);
  if (REFERENCE && args.ref_logp) read<WHOLE>(args.ref_logp, vector, inputs.ref_logp);
  if constexpr (EXTRAS) {
    read<WHOLE>(args.entropy, NAN, vector, inputs.entropy);
    read<WHOLE>(args.score, INFINITY, vector, inputs.score);
    if (args.advantage_per_token) read<WHOLE>(args.advantages, vector, inputs.advantage);
    read<WHOLE>(args.token_weight, 1.0f, vector, inputs.token_weight);
    read<WHOLE>(args.low, 0.0f, vector, inputs.low);
    read<WHOLE>(args.high, INFINITY, vector, inputs.high);
    inputs.token_mask = 0x01010101u;
    if (args.token_mask) read<WHOLE>(args.token_mask, vector, inputs.token_mask);
  }
}

template <bool WHOLE, bool REFERENCE, int EXTRAS, int WIDTH>
__device__ __forceinline__ void read_inputs(const PolicyLossArgs& args, Inputs<WIDTH>& inputs) {
  read<WHOLE>(args.logp, inputs.vector, inputs.logp);
  read<WHOLE>(args.old_logp, inputs.vector, inputs.old_logp);
  read_constants<WHOLE, REFERENCE, EXTRAS>(args, inputs);
}

// One branch for all arrays, so that their loads are on the way together.
template <bool REFERENCE, int EXTRAS, int WIDTH>
__device__ __forceinline__ Inputs<WIDTH> read_inputs(const PolicyLossArgs& args, const Vector<WIDTH>& vector) {
  Inputs<WIDTH> inputs = {};
  inputs.vector = vector;
  if (WIDTH == 4 && vector.whole) {
    read_inputs<true, REFERENCE, EXTRAS>(args, inputs);
  } else {
    read_inputs<false, REFERENCE, EXTRAS>(args, inputs);
  }
  return inputs;
}

// A vector is sound if all its tokens are valid and no log-ratio saturates, neither in the loss nor in the statistics. Code for
// sound vectors repeats none of these checks for its tokens: kernels branch once a vector.
template <bool REFERENCE, int EXTRAS, int WIDTH>
__device__ __forceinline__ bool is_sound(const Gate& gate, const RowTerms& row, const Inputs<WIDTH>& inputs) {
  const PolicyLossArgs& args = gate.args;
  bool sound = inputs.vector.full() & all_bytes(inputs.mask);
  if constexpr (EXTRAS == kNoExtras) sound &= fabsf(row.a) <= FLT_MAX;
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) {
    sound &= fabsf(inputs.logp[i] - inputs.old_logp[i]) <= kStatisticSaturation;  // so it is no NaN
    if (REFERENCE && args.ref_logp) sound &= fabsf(inputs.logp[i] - inputs.ref_logp[i]) <= kSaturation;
  }
  return sound;
}

struct Token {
  bool valid;  // a token of the row, not masked, its log-ratios not NaN
  bool selected;  // valid, and the policy term counts
  bool negative;  // the advantage
  bool infinite, reference_infinite;  // the log-ratio, of a valid token
  bool nan, bad;  // error counters
  float x, s;  // log-ratios, 0 unless valid
  float a;  // weight * advantage * token weight, exactly 0 unless selected
  float unweighted;  // advantage * token weight, likewise
  float token_weight;  // that of a correction included
};

// BOUNDS: tokens may have bounds of their own.
template <bool SOUND, bool REFERENCE, int EXTRAS, bool BOUNDS = EXTRAS != kNoExtras, int WIDTH>
__device__ __forceinline__ Token classify(const Gate& gate, const RowTerms& row, const Inputs<WIDTH>& inputs, int i) {
  const PolicyLossArgs& args = gate.args;
  Token token = {};
  if constexpr (SOUND) {
    token.valid = true;
    token.x = inputs.logp[i] - inputs.old_logp[i];
    if (REFERENCE && args.ref_logp) token.s = inputs.logp[i] - inputs.ref_logp[i];
  } else {
    const bool unmasked = inputs.vector.has(i) && byte_of(inputs.mask, i);
    const LogRatio policy = log_ratio(inputs.logp[i], inputs.old_logp[i]);
    LogRatio reference = {};
    if (REFERENCE && args.ref_logp) reference = log_ratio(inputs.logp[i], inputs.ref_logp[i]);
    token.valid = unmasked && !policy.nan && !reference.nan;
    token.nan = unmasked && !token.valid;
    token.infinite = token.valid && policy.infinite;
    token.reference_infinite = token.valid && reference.infinite;
    token.x = token.valid ? policy.x : 0.0f;
    token.s = token.valid ? reference.x : 0.0f;
  }

  float advantage = row.advantage, a = row.a;
  bool chosen = token.valid;
  token.negative = advantage < 0.0f;
  if constexpr (EXTRAS) {
    if (args.advantage_per_token) {
      advantage = inputs.advantage[i];
      a = row.weight * advantage;
      token.negative = advantage < 0.0f;
    }
    if constexpr (EXTRAS == kCorrected) {
      const auto one = [&](const float* array) { return inputs.template one<SOUND>(array, i); };
      const float first = args.correction.first ? one(args.correction.first) : inputs.logp[i];
      token.token_weight =
          gate.rule.factor(Number<float>::mask(token.negative), first, one(args.correction.second), Exponential{});
      token.token_weight *= inputs.token_weight[i];
    } else {
      token.token_weight = inputs.token_weight[i];
    }
    a *= token.token_weight;
    advantage *= token.token_weight;
    const float score = inputs.score[i];
    token.nan |= token.valid & (score != score);
    chosen &= byte_of(inputs.token_mask, i) & (gate.structure.strict ? score > row.threshold : score >= row.threshold);
  }
  bool usable = (SOUND && EXTRAS == kNoExtras) || fabsf(a) <= FLT_MAX;
  if constexpr (BOUNDS) usable &= is_low_bound(inputs.low[i]) & is_high_bound(inputs.high[i]);
  token.bad = token.valid && !usable;
  token.selected = chosen && usable;
  token.a = token.selected ? a : 0.0f;
  token.unweighted = token.selected ? advantage : 0.0f;
  return token;
}

}  // namespace hpo
