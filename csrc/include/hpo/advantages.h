// The arithmetic of one group of units: every backend in C++ and CUDA calls these, none repeats them. The definition they
// follow is hpo_core/reference/advantages.py.
#pragma once
#include <cfloat>

#include "api.h"
#include "math.h"

namespace hpo {

// Sums over the members of a group relative to its first member: x - mean = (x - pivot) - (mean - pivot), so that identical
// values cancel exactly and an offset common to the group costs no digits.
struct GroupSums {
  double pivot;
  int64_t count;
  double sum, squares;  // of x - pivot, and of its square
};

HPO_INLINE void add_member(GroupSums& group, float x) {
  if (group.count == 0) group.pivot = double(x);
  const double offset = double(x) - group.pivot;
  ++group.count;
  group.sum += offset;
  group.squares += offset * offset;
}

// Standard deviation; 0 where there are too few members.
HPO_INLINE double deviation(const GroupSums& group, int32_t ddof) {
  if (group.count <= ddof) return 0.0;
  const double n = double(group.count);
  const double squares = group.squares - group.sum * (group.sum / n);
  return squares > 0.0 ? ::sqrt(squares / (n - ddof)) : 0.0;
}

HPO_INLINE double guarded_scale(double sigma, const GroupNormaliseArgs& args) {
  if (args.scale == Scale::none) return 1.0;
  if (args.eps_mode == EpsMode::add) return sigma + args.eps;
  if (args.eps_mode == EpsMode::sqrt) return ::sqrt(sigma * sigma + args.eps);
  return sigma < args.eps ? args.eps : sigma;
}

// What one group does to its units: ((x - pivot) - center) * slope, one slope for members and one for everybody else (they
// differ under leave-one-out, where a unit that is not a member has all members as its "others").
struct GroupMap {
  double pivot, center, member_slope, other_slope;
};

HPO_INLINE GroupMap group_map(const GroupSums& group, double batch_deviation, const GroupNormaliseArgs& args) {
  const bool single = group.count == 1;
  if (group.count == 0 || (single && !args.singleton_raw)) return {0.0, 0.0, 0.0, 0.0};
  const double own_deviation = single ? 1.0 : deviation(group, args.ddof);
  const double scale = guarded_scale(args.scale == Scale::batch ? batch_deviation : own_deviation, args);
  double slope = scale > 0.0 ? 1.0 / scale : 0.0;
  if (slope > DBL_MAX) slope = DBL_MAX;  // 0 times it stays 0
  if (single) return {0.0, 0.0, slope, slope};
  const double n = double(group.count);
  const double leave_out = args.center == Center::leave_one_out ? n / (n - 1.0) : 1.0;
  return {group.pivot, group.sum / n, leave_out * slope, slope};
}

HPO_INLINE float advantage(const GroupMap& group, float x, bool member) {
  const double centred = (double(x) - group.pivot) - group.center;
  return float(centred * (member ? group.member_slope : group.other_slope) + 0.0);  // + 0.0: never -0
}

}  // namespace hpo
