// The arithmetic of covariance, shared by C++ and CUDA. The definition is hpo_core/reference/covariance.py.
#pragma once
#include <cfloat>

#include "api/covariance.h"
#include "math.h"

namespace hpo {

// Sums over the members.
struct CovarianceSums {
  double members, logp, advantages;
};

// The means that a token needs.
struct CovarianceMeans {
  double logp, advantage;
};

HPO_INLINE CovarianceMeans means_of(const CovarianceSums& sums) {
  const double members = sums.members > 0.0 ? sums.members : 1.0;
  return {sums.logp / members, sums.advantages / members};
}

HPO_INLINE double covariance_term(const CovarianceMeans& means, float logp, float advantage) {
  return (double(advantage) - means.advantage) * (double(logp) - means.logp);
}

HPO_INLINE float key_of_term(double term) {
  const double largest = FLT_MAX;
  return float(term > largest ? largest : (term < -largest ? -largest : term));
}

// Whether a member may be drawn: PPO leaves its ratio as it is, and its term lies between the bounds.
HPO_INLINE bool may_be_drawn(const CovarianceDraw& draw, double term, float logp, float old_logp, float advantage) {
  const double log_ratio = double(logp) - double(old_logp);
  const double least = advantage < 0.0f ? draw.least : -INFINITY, most = advantage > 0.0f ? draw.most : INFINITY;
  return (term > draw.low) & (term < draw.high) & (log_ratio >= least) & (log_ratio <= most);
}

// A pseudo-random number of the place of a token, no two of which are equal before they are rounded.
HPO_INLINE float draw_of_place(const CovarianceDraw& draw, uint32_t token) {
  uint32_t z = (token * draw.factor) ^ draw.offset;
  z = (z ^ (z >> 16)) * 569420461u;
  z = (z ^ (z >> 15)) * 3545902487u;
  return float(int32_t(z ^ (z >> 15)));
}

}  // namespace hpo
