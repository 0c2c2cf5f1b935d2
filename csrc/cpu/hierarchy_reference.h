// The reference policy in fast-path blocks of a hierarchy: nothing about it depends on the gate, so its penalty is added to
// the gradient and losses that the loops of the gate have written.
#pragma once
#include "gates_token_inputs.h"

namespace hpo::HPO_ISA {

// Calls step(i, part, own, present, s, whole) for every vector of the tokens [begin, end) behind the first, with s their
// log-ratios to the reference policy, and end_run() as for_each_vector does.
template <class Step, class EndRun>
HPO_INLINE void for_each_reference(const PolicyLossArgs& args, int64_t first, int begin, int end, const Step& step,
                                   const EndRun& end_run) {
  const float *logp = args.logp + first, *ref_logp = args.ref_logp + first;
  const uint8_t* mask = args.mask ? args.mask + first : nullptr;
  for_each_vector(
      begin, end,
      [&](int i, int part, Mask own, auto whole) HPO_INSIDE {
        constexpr bool kWhole = decltype(whole)::value;
        const Mask present = mask ? present_own<kWhole>(own, mask + i) : own;
        step(i, part, own, present, difference(present, load_own<kWhole>(own, logp + i), load_own<kWhole>(own, ref_logp + i)),
             whole);
      },
      end_run);
}

// The fast path takes log-ratios to the reference policy and weights of the penalty up to these sizes: no RunSum overflows.
constexpr float kMostReference = 10.0f, kMostPenaltyWeight = 1e12f;

// Whether this holds for the tokens [begin, end) behind the first; no log-ratio is NaN then. The weight does not count where
// all tokens are masked: a row must not take the rows beside it off the fast path by tokens that are not there.
inline bool is_ordinary_reference(const Call& call, int64_t first, int begin, int end, float weight) {
  const bool small = __builtin_fabsf(weight * float(call.numbers.kl_beta)) <= kMostPenaltyWeight;
  if (!small && masked_tokens(call.args.mask, first + begin, end - begin) != Masked::all) return false;
  Mask good = all_lanes();
  for_each_reference(
      call.args, first, begin, end,
      [&](int, int, Mask, Mask, Floats s, auto)
          HPO_INSIDE { good = both(good, at_least(all<Floats>(kMostReference), size_of(s))); },
      [] {});
  return !any(but_not(all_lanes(), good));
}

// Adds the penalty of these tokens to their gradient and losses, and their statistics of the reference to the metrics.
inline void pay_reference(const Call& call, int64_t first, int begin, int end, float weight, Partial& partial) {
  const PolicyLossArgs& args = call.args;
  const bool penalised = call.structure.kl != KLEstimator::none;
  float* grad = args.grad && penalised ? args.grad + first : nullptr;
  float* token_loss = args.token_loss && penalised ? args.token_loss + first : nullptr;
  const FastSource source(args, first);
  const Floats row_weight = all<Floats>(weight);
  FastReference reference(call);
  RunSum paid(partial.sums[kPenaltySum]);
  const auto step = [&](int i, int part, Mask own, Mask present, Floats s, auto whole) HPO_INSIDE {
    constexpr bool kWhole = decltype(whole)::value;
    const Floats x = difference(present, load_own<kWhole>(own, source.logp + i), load_own<kWhole>(own, source.old_logp + i));
    const TermNumber<Floats> term = reference.add(part, all<Floats>(1.0f), s, x);
    const auto add = [&](float* to, Floats value) HPO_INSIDE {
      store_own<kWhole>(own, load_own<kWhole>(own, to + i) + keep_if(present, value), to + i);
    };
    paid.add(part, present, row_weight * term.loss);
    if (grad) add(grad, row_weight * term.grad);
    if (token_loss) add(token_loss, term.loss);
  };
  for_each_reference(args, first, begin, end, step, [&] { paid.end(); });
  paid.end();
  reference.add_to(partial);
}

}  // namespace hpo::HPO_ISA
