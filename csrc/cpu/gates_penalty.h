// The penalty on the distance from a reference policy, and the metrics of that distance.
#pragma once
#include "gates_tile.h"

namespace hpo::HPO_ISA {

// Adds the statistics of s = logp - ref_logp, saturated, to the metrics, and leaves s in tile.ratio.
inline void add_reference_statistics(const float* __restrict logp, const float* __restrict ref_logp, int n, Tile& tile,
                                     Partial& partial) {
  for (int i = 0; i < n; ++i) tile.ratio[i] = keep_if(tile.kind[i] != kAbsent, log_ratio(logp[i], ref_logp[i]).x);
  pad(tile.ratio, n, 0.0f);
  TileSum sum, square, k3_sum;
  for (int i = 0; i < n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float s = tile.ratio[i + lane];
      sum.lanes[lane] += s;
      square.lanes[lane] += s * s;
      k3_sum.lanes[lane] += k3(s, exp(-s));
    }
  }
  sum.add_to(partial.sums[kS]);
  square.add_to(partial.sums[kSSquare]);
  k3_sum.add_to(partial.sums[kK3]);
}

// The penalty of a token is w c beta k(s), with w the weight of its row, c its kl_weight, and s in tile.ratio. Adds it to the
// sums, its derivative to the gradient, and it without w to token_loss, unless that is null. A token that pays nothing gets
// zeros by selection: its own value and slope may be infinite.
inline void add_penalty(const Call& call, int64_t first, int n, const Segments& segments, Tile& tile, float* grad,
                        float* token_loss, Partial& partial) {
  const PolicyLossArgs& args = call.args;
  const KLEstimator estimator = call.structure.kl;
  const KLGradient gradient = call.structure.kl_gradient;
  const Floats beta = all<Floats>(float(call.numbers.kl_beta));
  const float *logp = args.logp + first, *ref_logp = args.ref_logp + first;
  const float* kl_weight = args.kl_weight ? args.kl_weight + first : nullptr;
  float *value = tile.loss, *weight = tile.spread[0];
  spread_rows(segments, weight, [&](int64_t row) { return finite(args.weights[row]) ? args.weights[row] : 0.0f; });
  for_each_vector(0, n, [&](int i, Mask own, auto whole) HPO_INSIDE {
    constexpr bool kWhole = decltype(whole)::value;
    const auto load = [&](const float* from) HPO_INSIDE { return load_own<kWhole>(own, from + i); };
    const auto add = [&](float* to, Floats x) HPO_INSIDE { store_own<kWhole>(own, load(to) + x, to + i); };
    const Floats s = load(tile.ratio), apart = load(logp) - load(ref_logp);
    const Ints s_finite = apart - apart == 0.0f, x_finite = load_lanes<Ints>(tile.infinite + i) == 0;
    const TermNumber<Floats> k = kl_term<Floats>(estimator, gradient, s, exp(-s), load(tile.x), s_finite, x_finite);
    const Floats factor = kl_weight ? load(kl_weight) : all<Floats>(1.0f);
    const Floats share = kl_weight ? penalty_share<Floats>(load(weight), factor) : load(weight);
    const Ints pays = (load_lanes<Ints>(tile.kind + i) != kAbsent) & pays_penalty<Floats>(factor);
    const Floats loss = beta * k.loss;
    store_lanes(keep_if(pays, share * loss), value + i);
    add(grad, keep_if(pays, share * (beta * k.grad)));
    if (token_loss) add(token_loss, keep_if(pays, factor * loss));
  });
  add_terms(value, n, partial.sums[kPenaltySum]);
}

}  // namespace hpo::HPO_ISA
