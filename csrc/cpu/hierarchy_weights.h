// The policy terms of tokens in fast-path blocks of a hierarchy: which tokens have one (masks of tokens, windows), and their
// weights. Both are gathered once in each sweep, before the loops over the block.
#pragma once
#include "gates_token_inputs.h"
#include "hierarchy_leaves.h"

namespace hpo::HPO_ISA {

// Whether some tokens have weights or no policy term.
inline bool weighs_terms(const PolicyLossArgs& args) { return weighs_tokens(args) || args.token_mask || args.score; }

// The weights of a block by position in it, so that no bit depends on where it lies.
struct BlockWeights {
  alignas(64) float of_token[kChunk + kLanes];  // NaN: the token has no policy term
  double lanes[kLanes];                         // sums of the others
  int32_t chosen;                               // their number
  bool usual = true;                            // every input has a meaning, and nothing overflows

  double total() const { return sum_halves(lanes); }

  // Reads the weights of a block, whose advantages have one sign.
  void gather(const Call& call, const Block& block) {
    const PolicyLossArgs& args = call.args;
    const TokenInputs inputs(args, block.first, of_token);
    const int end = int(block.tokens);
    if (args.correction.second) {
      const bool negative = args.advantages[block.row] < 0.0f;
      const Segment whole = {block.row, 0, end};
      write_weights(args, block.first, 0, end, &whole, 1, {nullptr, nullptr, negative}, of_token);
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
      finite.add(part, present, coefficient * weight);
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
