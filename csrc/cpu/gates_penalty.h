// The penalty on the distance from a reference policy, and what is reported about that distance.
#pragma once
#include "gates_tile.h"

namespace hpo::HPO_ISA {

// Sums of s = logp - ref_logp; leaves s in tile.ratio.
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

// k(s) and its derivative for every token; s is in tile.ratio.
using KLLoop = void (*)(const Tile& tile, const float* logp, const float* ref_logp, float* value, float* slope, int n);

template <KLEstimator kEstimator, KLGradient kGradient>
void kl_terms(const Tile& tile, const float* __restrict logp, const float* __restrict ref_logp, float* __restrict value,
              float* __restrict slope, int n) {
  for (int i = 0; i < n; ++i) {
    const bool s_finite = finite(logp[i] - ref_logp[i]), x_finite = tile.infinite[i] == 0;
    const float s = tile.ratio[i];
    const Term k = kl_term(kEstimator, kGradient, s, exp(-s), tile.x[i], s_finite, x_finite);
    value[i] = keep_if(tile.kind[i] != kAbsent, k.loss);
    slope[i] = keep_if(tile.kind[i] != kAbsent, k.grad);
  }
}

template <KLEstimator kEstimator>
KLLoop pick_kl_loop(KLGradient gradient) {
  switch (gradient) {
    case KLGradient::straight_through: return kl_terms<kEstimator, KLGradient::straight_through>;
    case KLGradient::importance: return kl_terms<kEstimator, KLGradient::importance>;
    default: return kl_terms<kEstimator, KLGradient::value>;
  }
}

inline KLLoop pick_kl_loop(const GateStructure& structure) {
  switch (structure.kl) {
    case KLEstimator::k1: return pick_kl_loop<KLEstimator::k1>(structure.kl_gradient);
    case KLEstimator::k2: return pick_kl_loop<KLEstimator::k2>(structure.kl_gradient);
    default: return pick_kl_loop<KLEstimator::k3>(structure.kl_gradient);
  }
}

// Multiplies the weights of rows with the factors of tokens. A token that pays nothing has no value and no slope: what is left
// of them may be infinite.
inline void weigh_penalty(const float* __restrict kl_weight, int n, float* __restrict value, float* __restrict slope,
                          float* __restrict weight) {
  for (int i = 0; i < n; ++i) {
    const bool pays = pays_penalty(kl_weight[i]);
    value[i] = keep_if(pays, value[i]);
    slope[i] = keep_if(pays, slope[i]);
    weight[i] = keep_if(pays, penalty_share(weight[i], kl_weight[i]));
  }
}

// Adds w c beta k(s) to the gradient and the sums, and c beta k(s) to the loss of each token where that is wanted.
inline void add_penalty(const Call& call, int64_t first, int n, const Segments& segments, Tile& tile, float* __restrict grad,
                        float* __restrict token_loss, Partial& partial) {
  const PolicyLossArgs& args = call.args;
  const float beta = float(call.numbers.kl_beta);
  const float* __restrict kl_weight = args.kl_weight ? args.kl_weight + first : nullptr;
  float* __restrict value = tile.loss, * __restrict slope = tile.spread[0], * __restrict weight = tile.spread[1];
  pick_kl_loop(call.structure)(tile, args.logp + first, args.ref_logp + first, value, slope, n);
  for (int i = 0; i < n; ++i) value[i] *= beta;
  for (int i = 0; i < n; ++i) slope[i] *= beta;
  spread_rows(segments, weight, [&](int64_t row) { return finite(args.weights[row]) ? args.weights[row] : 0.0f; });
  if (kl_weight) weigh_penalty(kl_weight, n, value, slope, weight);
  if (token_loss) {
    for (int i = 0; i < n; ++i) {
      const float factor = kl_weight ? kl_weight[i] : 1.0f;
      token_loss[i] += keep_if(pays_penalty(factor), factor * value[i]);
    }
  }
  for (int i = 0; i < n; ++i) {
    value[i] = keep_if(tile.kind[i] != kAbsent, weight[i] * value[i]);
    grad[i] = keep_if(tile.kind[i] != kAbsent, grad[i] + weight[i] * slope[i]);
  }
  add_terms(value, n, partial.sums[kPenaltySum]);
}

}  // namespace hpo::HPO_ISA
