// The arithmetic of one group of units, shared by all backends in C++ and CUDA. The definition is
// hpo_core/reference/advantages.py.
#pragma once
#include <cfloat>

#include "api/advantages.h"
#include "math.h"

namespace hpo {

// Sums over the members of a group relative to its first member: x - mean = (x - pivot) - (mean - pivot), so that identical
// values cancel exactly and an offset common to the group costs no digits.
struct GroupSums {
  double pivot;
  int64_t count;
  double weight, sum, squares;  // the sums of w, w (x - pivot) and w (x - pivot)^2

  HPO_INLINE void add(float x, double w) {
    if (count == 0) pivot = double(x);
    const double offset = double(x) - pivot;
    ++count;
    weight += w;
    sum += w * offset;
    squares += w * offset * offset;
  }

  HPO_INLINE double center() const { return sum / weight; }  // mean - pivot; the group has members
};

// The row of group_statistics for the units of a group.
HPO_INLINE void put_statistics(const GroupSums& group, float least, float greatest, double statistics[6]) {
  if (group.count == 0) return;
  const double squares = group.squares - group.sum * group.center();
  statistics[0] = double(group.count), statistics[1] = group.weight, statistics[2] = group.pivot + group.center();
  statistics[3] = squares > 0.0 ? squares : 0.0, statistics[4] = double(least), statistics[5] = double(greatest);
}

// Whether a unit with this weight may be a member.
HPO_INLINE bool counts(float weight) { return weight > 0.0f && weight <= FLT_MAX; }

// Standard deviation; 0 with too few members.
HPO_INLINE double deviation(const GroupSums& group, int32_t ddof) {
  if (group.count == 0 || group.weight <= ddof) return 0.0;
  const double squares = group.squares - group.sum * group.center();
  return squares > 0.0 ? ::sqrt(squares / (group.weight - ddof)) : 0.0;
}

HPO_INLINE double guarded_scale(double scale, double weight, const GroupTerm& term) {
  if (term.scale == Scale::none) return 1.0;
  if (term.eps_mode == EpsMode::add) return scale + term.eps;
  if (term.eps_mode == EpsMode::sqrt) return ::sqrt(scale * scale + term.eps);
  if (term.eps_mode == EpsMode::add_share) return scale + term.eps / weight;
  return scale < term.eps ? term.eps : scale;
}

// The map of one group for its units: ((x - pivot) - center) * slope + offset. With leave-one-out the first factor is also
// multiplied by weight / (weight - own weight).
struct GroupMap {
  double pivot, center, slope, offset;
  double weight;  // 0: no leave-one-out
  double share;   // 0: the term is absent for the group
};

HPO_INLINE double share_of(const GroupSums& group, const GroupTerm& term, Share share) {
  const bool silent = term.part == Part::normalised && group.count == 1 && !term.singleton_raw;
  if (silent || (term.presence == Presence::spread && group.squares == 0.0)) return 0.0;
  if (share == Share::count) return double(group.count);
  return share == Share::deviation ? deviation(group, term.ddof) : 1.0;
}

// absolute: the sum of w |x - mean| over the members, read for Scale::absolute only.
HPO_INLINE GroupMap group_map(const GroupSums& group, double absolute, double batch_deviation, const GroupTerm& term,
                              Share share) {
  GroupMap map = {};
  if (group.count == 0) return map;
  map.share = share_of(group, term, share);
  const bool single = group.count == 1;
  const double mean = group.pivot + group.center();
  if (term.part == Part::mean) {
    map.offset = mean;
    return map;
  }
  if (single && !term.singleton_raw) return map;
  double scale = 1.0;
  if (term.scale == Scale::batch) scale = batch_deviation;
  else if (!single && term.scale == Scale::group) scale = deviation(group, term.ddof);
  else if (!single && term.scale == Scale::absolute) scale = absolute / group.weight;
  else if (!single && term.scale == Scale::mean) scale = mean;
  else if (!single && term.scale == Scale::root_mean) scale = mean > 0.0 ? ::sqrt(mean) : 0.0;
  scale = guarded_scale(scale, single ? 1.0 : group.weight, term);
  const bool by_mean = !single && (term.scale == Scale::mean || term.scale == Scale::root_mean);
  const double slope = scale > 0.0 && (!by_mean || mean > 0.0) ? 1.0 / scale : 0.0;
  map.slope = slope > DBL_MAX ? DBL_MAX : slope;  // 0 times it stays 0
  if (single) return map;
  map.pivot = group.pivot, map.center = group.center();
  if (term.center == Center::leave_one_out) map.weight = group.weight;
  return map;
}

// factor: the factor of leave-one-out.
HPO_INLINE double mapped(const GroupMap& map, float x, double factor = 1.0) {
  return factor * ((double(x) - map.pivot) - map.center) * map.slope + map.offset;
}

// own: the weight of the unit itself in its group, 0 if it is no member.
HPO_INLINE double amount(const GroupMap& map, float x, double own) {
  const double others = map.weight - own;  // rounding may make it 0
  return mapped(map, x, others > 0.0 ? map.weight / others : 1.0);
}

// The combined terms of one unit.
struct Shares {
  double total, shares;

  HPO_INLINE void add(const GroupMap& map, const GroupTerm& term, Share share, double amount) {
    const double size = share == Share::sum ? 1.0 : (term.presence == Presence::nonzero && amount == 0.0 ? 0.0 : map.share);
    const double weighed = term.coefficient * size;
    if (size > 0.0) total += weighed * amount;
    shares += weighed;
  }

  HPO_INLINE float advantage(const GroupNormaliseArgs& args) const {
    if (args.share == Share::sum) return float(total) + 0.0f;  // + 0.0f: never -0, which rounding may leave
    return shares > args.share_least ? float(total / (shares + args.share_eps)) + 0.0f : 0.0f;
  }
};

}  // namespace hpo
