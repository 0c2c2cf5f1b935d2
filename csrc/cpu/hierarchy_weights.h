// The policy terms of tokens in fast-path blocks of a hierarchy: which tokens have one (masks of tokens, windows), and their
// weights. Both are gathered once in each sweep, before the loops over the block.
#pragma once
#include "gates_token_inputs.h"
#include "hierarchy_leaves.h"

namespace hpo::HPO_ISA {

// Whether some tokens have weights or no policy term.
inline bool weighs_terms(const PolicyLossArgs& args) { return weighs_tokens(args) || args.token_mask || args.score; }

// Whether the coefficients of the tokens [begin, end) behind the first are finite, where advantages are theirs.
inline bool has_finite_advantages(const PolicyLossArgs& args, int64_t row, int64_t first, int begin, int end) {
  const float* advantages = args.advantages + first;
  const uint8_t* mask = args.mask ? args.mask + first : nullptr;
  const Floats weight = all<Floats>(args.weights[row]);
  FiniteSum finite;
  const auto step = [&](int i, int part, Mask own, auto whole) HPO_INSIDE {
    constexpr bool kWhole = decltype(whole)::value;
    const Mask present = mask ? present_own<kWhole>(own, mask + i) : own;
    finite.add(part, present, weight * load_own<kWhole>(own, advantages + i));
  };
  for_each_vector(begin, end, step, [] {});
  return finite.finite();
}

// The weights of a block by position in it, so that no bit depends on where it lies.
struct BlockWeights {
  alignas(64) float of_token[kChunk + kLanes];  // NaN: the token has no policy term
  double lanes[kLanes];                         // sums of the others
  int32_t chosen;                               // their number
  bool usual = true;                            // every input has a meaning, and nothing overflows

  double total() const { return sum_halves(lanes); }

  // Reads the weights of a block.
  void gather(const Call& call, const Block& block) {
    const PolicyLossArgs& args = call.args;
    const TokenInputs inputs(args, block.first, of_token);
    const int end = int(block.tokens);
    if (args.correction.second) {
      const Segment whole = {block.row, 0, end};
      write_weights(args, block.first, 0, end, &whole, 1, Signs::of_row(args, block.row, block.first), of_token);
    }
    for (double& lane : lanes) lane = 0.0;
    const Floats coefficient = all<Floats>(row_coefficient(args, block.row));
    RunSum sum(lanes);
    FiniteSum finite;
    LaneCount count;
    Mask exceptions = {};
    const auto step = [&](int i, int part, Mask own, auto whole) HPO_INSIDE {
      constexpr bool kWhole = decltype(whole)::value;
      const Mask present = inputs.mask ? present_own<kWhole>(own, inputs.mask + i) : own;
      const FastVector<kWhole> vector = {i, part, own, present, Floats{}, Floats{}};
      const Mask has_term = inputs.chosen(vector, call.structure.strict, exceptions);
      const Floats weight = inputs.weight ? vector.load(inputs.weight) : all<Floats>(1.0f);
      const Floats a = inputs.advantages ? coefficient * vector.load(inputs.advantages) : coefficient;
      finite.add(part, present, a * weight);
      sum.add(part, has_term, weight);
      count.add(has_term);
      store_lanes(blend(has_term, weight, all<Floats>(NAN)), of_token + i);
    };
    for_each_vector(0, end, step, [&]() HPO_INSIDE { sum.end(); });
    sum.end();
    chosen = count.total();
    usual = !any(exceptions) && finite.finite() && finite_lanes(lanes);
  }
};

// The entropies of the tokens of a block, of which those that are not finite do not count.
inline void add_entropies(const PolicyLossArgs& args, const Block& block, Partial& partial) {
  const float* entropies = args.entropy + block.first;
  const uint8_t* mask = args.mask ? args.mask + block.first : nullptr;
  LaneCount counted;
  const auto step = [&](int i, int part, Mask own, auto whole) HPO_INSIDE {
    constexpr bool kWhole = decltype(whole)::value;
    const Floats entropy = load_own<kWhole>(own, entropies + i);
    const Mask present = mask ? present_own<kWhole>(own, mask + i) : own;
    const Mask counts = both(present, at_least(all<Floats>(FLT_MAX), size_of(entropy)));
    add_as_doubles(keep_if(counts, entropy), partial.sums[kEntropySum] + part * kWidth);
    counted.add(counts);
  };
  for_each_vector(0, int(block.tokens), step, [] {});
  partial.slots[kEntropyTokens] += counted.total();
}

}  // namespace hpo::HPO_ISA
