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

// D: double, or a vector of doubles in csrc/cpu/covariance.cpp.
template <class D>
HPO_INLINE D covariance_term(const CovarianceMeans& means, D logp, D advantage) {
  return (advantage - means.advantage) * (logp - means.logp);
}

// The key of a term that has been rounded to a float, perhaps to infinity.
template <class F>
HPO_INLINE F finite_key(F term) {
  return clamp_number(term, all<F>(-FLT_MAX), all<F>(FLT_MAX));
}

// Whether a member may be drawn: PPO leaves its ratio as it is, and its term lies between the bounds.
template <class D>
HPO_INLINE auto may_be_drawn(const CovarianceDraw& draw, D term, D logp, D old_logp, D advantage) {
  const D zero = {}, log_ratio = logp - old_logp;
  const D least = advantage < zero ? zero + draw.least : all<D>(-INFINITY);
  const D most = advantage > zero ? zero + draw.most : all<D>(INFINITY);
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
