// The fast path of a tile, in one pass: all log-ratios are finite and small. The loops here are those of calls whose tokens
// have no weights, advantages or bounds of their own, as nearly all calls; gates_token_inputs.h has those of the others, and
// gates_tile.h takes what is not on the fast path in several passes.
#pragma once
#include <algorithm>
#include <type_traits>

#include "gates_call.h"
#include "hpo/terms.h"

namespace hpo::HPO_ISA {

// The largest |x| whose e^x needs no power of two: just below ln 2 / 2.
constexpr float kNear = 0.3465f;

// Statistics of a tile, one vector for each part of the lanes. The Partial gets them if the fast path holds for the tile.
struct FastSums {
  Floats sum[kParts] = {}, square[kParts] = {}, deviation[kParts] = {}, deviation_square[kParts] = {};
  Floats smallest[kParts], largest[kParts];

  FastSums() {
    for (int part = 0; part < kParts; ++part) {
      smallest[part] = all<Floats>(INFINITY);
      largest[part] = all<Floats>(-INFINITY);
    }
  }

  HPO_INLINE void add(int part, Mask present, Floats x, Floats ratio) {
    sum[part] += x;
    square[part] = Number<Floats>::fused(x, x, square[part]);
    smallest[part] = smaller_where(present, x, smallest[part]);
    largest[part] = larger_where(present, x, largest[part]);
    const Floats d = ratio - 1.0f;  // centred, so that sums stay small
    deviation[part] += d;
    deviation_square[part] = Number<Floats>::fused(d, d, deviation_square[part]);
  }

  // No number is beyond +-limit, and none is NaN.
  bool within(float limit) const {
    Mask exceptions = {};
    for (int part = 0; part < kParts; ++part) {
      const Mask small = less(smallest[part], all<Floats>(-limit)), large = less(all<Floats>(limit), largest[part]);
      exceptions = either(exceptions, either(is_nan(sum[part]), either(small, large)));
    }
    return !any(exceptions);
  }

  void add_to(Partial& partial) const {
    for (int part = 0; part < kParts; ++part) {
      const int first = part * kWidth;
      add_as_doubles(sum[part], partial.sums[kX] + first);
      add_as_doubles(square[part], partial.sums[kXSquare] + first);
      add_as_doubles(deviation[part], partial.sums[kDeviation] + first);
      add_as_doubles(deviation_square[part], partial.sums[kDeviationSquare] + first);
      float *low = partial.smallest + first, *high = partial.largest + first;
      store_lanes(smaller_where(all_lanes(), smallest[part], load_lanes<Floats>(low)), low);
      store_lanes(larger_where(all_lanes(), largest[part], load_lanes<Floats>(high)), high);
    }
  }
};

// Log-ratios near 0 come together, so a tile is taken for near if the last one was. sweep(taken for near) makes one attempt.
template <class Sweep>
HPO_INLINE bool guess_near(bool near, const Sweep& sweep) {
  return (near && sweep(std::true_type{})) || sweep(std::false_type{});
}

// The end of an attempt. False: the fast path does not hold, or the log-ratios are not near 0 as assumed; nothing is counted
// then. `near`: whether they are near 0, and so many that the next tile is worth the same guess: a failed guess costs more time
// than one for few tokens saves.
template <bool kTakenForNear>
HPO_INLINE bool settle_fast(const FastSums& sums, int64_t tokens, Partial& partial, bool& near,
                            float most = kStatisticSaturation) {
  near = sums.within(kNear);
  // A kLongTile has twice as many tokens: where log-ratios are half as large at most, their sum is no larger.
  if (!near && (kTakenForNear || !sums.within(tokens > kTile ? most / 2 : most))) return false;
  near &= tokens >= kRun;
  sums.add_to(partial);
  partial.slots[kTokens] += double(tokens);
  return true;
}

// The tokens of one vector of a fast-path tile: those in the range of a sweep, and the unmasked ones among these.
template <bool kWhole>
struct FastVector {
  static constexpr bool whole = kWhole;  // all lanes are in the range
  int i, part;
  Mask own, present;
  Floats x, ratio;  // 0 and 1 where none is present

  HPO_INLINE Floats load(const float* from) const { return load_own<kWhole>(own, from + i); }
  HPO_INLINE void store(Floats values, float* to) const { store_own<kWhole>(own, values, to + i); }
};

// The gradient of so many tokens, 4 MiB, does not fit in the caches of a core.
constexpr int64_t kPastCaches = int64_t(1) << 20;

// The place of a tile's gradient. A large gradient that nothing reads before the call returns is written past the caches: its
// lines are not read before, and evict none of the inputs. Such a gradient begins with a cache line, so that the vectors of its
// tiles are aligned. read_again: a later loop of the call adds to the gradient.
struct GradientOut {
  float* to;
  const bool past_caches;

  GradientOut(const PolicyLossArgs& args, int64_t first, float* otherwise, bool read_again = false)
      : to(args.grad ? args.grad + first : otherwise),
        past_caches(args.grad && !read_again && args.tokens >= kPastCaches && uintptr_t(args.grad) % kLine == 0) {}

  template <bool kWhole>
  HPO_INLINE void store(int i, Mask own, Floats gradient) const {
    if (kWhole && past_caches) store_past_caches(gradient, to + i);
    else store_own<kWhole>(own, gradient, to + i);
  }

  template <class Vector>
  HPO_INLINE void store(const Vector& vector, Floats gradient) const {
    store<Vector::whole>(vector.i, vector.own, gradient);
  }
};

// The sources of a tile's log-ratios: local copies of pointers, because stores may alias the arguments of the call.
struct FastSource {
  const float *logp, *old_logp;

  FastSource(const PolicyLossArgs& args, int64_t first)
      : logp(args.logp + first),
        old_logp(args.old_logp ? args.old_logp + first : logp) {}  // on-policy: x = 0, or NaN where logp is not finite

  template <bool kWhole>
  HPO_INLINE Floats log_ratio(int i, Mask own) const {
    return load_own<kWhole>(own, logp + i) - load_own<kWhole>(own, old_logp + i);
  }

  template <bool kTakenForNear, bool kWhole>
  HPO_INLINE FastVector<kWhole> vector(int i, int part, Mask own, Mask present, FastSums& sums) const {
    __builtin_prefetch(logp + i + kAhead), __builtin_prefetch(old_logp + i + kAhead);
    const Floats x = difference(present, load_own<kWhole>(own, logp + i), load_own<kWhole>(own, old_logp + i));
    const Floats ratio = kTakenForNear ? exp_near_0(x) : exp_of_number(x);  // a tile with NaN leaves the fast path
    sums.add(part, present, x, ratio);
    return {i, part, own, present, x, ratio};
  }
};

// A tile of many rows, whose numbers stand at their tokens in arrays (see load_rows); the kinds of masked tokens are corrected
// here. each(vector, kind, coefficient) is called for every vector, and each.end_run() behind those of a run.
template <bool kTakenForNear, bool kMasked, class Each>
HPO_INLINE bool sweep_many_rows(const PolicyLossArgs& args, int64_t first, int n, Partial& partial, Each& each, Tile& tile) {
  const FastSource source(args, first);
  const uint8_t* mask = kMasked ? args.mask + first : nullptr;
  FastSums sums;
  LaneCount present_count;
  const auto step = [&](int i, int part, Mask own, auto whole) HPO_INSIDE {
    constexpr bool kWhole = decltype(whole)::value;
    Ints kind = load_lanes<Ints>(tile.kind + i);
    if (kMasked) {
      kind = keep_if(present_own<kWhole>(own, mask + i), kind);
      store_lanes(kind, tile.kind + i);
    }
    const Mask present = present_lanes(kind);
    present_count.add(present);
    const auto vector = source.vector<kTakenForNear, kWhole>(i, part, own, present, sums);
    each(vector, kind, load_lanes<Floats>(tile.coefficient + i));
  };
  for_each_vector(0, n, step, [&]() HPO_INSIDE { each.end_run(); });
  return settle_fast<kTakenForNear>(sums, present_count.total(), partial, tile.near);
}

// Each of a few rows has a sweep of its own, because its numbers are the same for all its tokens. Two rows that meet inside a
// vector both sweep it, so that every token is added to its own lane whichever row it belongs to. Returns how many tokens of
// the row are present; each(vector) and each.end_run() are called as above.
template <bool kTakenForNear, bool kMasked, class Each>
HPO_INLINE int32_t sweep_row(const PolicyLossArgs& args, int64_t first, const Segment& segment, FastSums& all_sums,
                             Each& each) {
  const FastSource source(args, first);
  const uint8_t* mask = kMasked ? args.mask + first : nullptr;
  FastSums sums = all_sums;  // in registers meanwhile
  LaneCount present_count;
  const auto step = [&](int i, int part, Mask own, auto whole) HPO_INSIDE {
    constexpr bool kWhole = decltype(whole)::value;
    const Mask present = kMasked ? present_own<kWhole>(own, mask + i) : own;
    if (kMasked) present_count.add(present);
    each(source.vector<kTakenForNear, kWhole>(i, part, own, present, sums));
  };
  for_each_vector(segment.begin, segment.end, step, [&]() HPO_INSIDE { each.end_run(); });
  all_sums = sums;
  return kMasked ? present_count.total() : segment.end - segment.begin;
}

// The numbers of present tokens in a tile of few rows.
struct PresentTokens {
  int32_t of_row[kFewRows], all = 0;

  void set(int index, int32_t count) { of_row[index] = count, all += count; }

  void mark(const Segments& segments, uint8_t* seen) const {
    for (int index = 0; index < segments.count; ++index) {
      if (of_row[index] > 0) mark_row(segments.list[index].row, seen);
    }
  }
};

// The term of the tokens of a vector; `inside`: present, and the gate has the derivative 1.
template <class Vector>
HPO_INLINE TermNumber<Floats> fast_term(bool score_head, const Vector& vector, Mask inside, Floats value, const float* logp) {
  if (score_head) return {scored(value * vector.load(logp)), keep_if(vector.present, value)};
  return {value, keep_if(inside, value)};
}

template <class Vector>
HPO_INLINE void put_term(const Vector& vector, const TermNumber<Floats>& term, RunSum& loss, const GradientOut& grad) {
  loss.add(vector.part, vector.present, term.loss);
  grad.store(vector, term.grad);
}

// Sums over a row in a fast-path tile, by the first of two sweeps.
struct RowLogRatios {
  int64_t valid = 0, fixed = 0, rising = 0;  // log-ratios in fixed point, and those of them that are not negative
};

// A sum of numbers in fixed point, equal to that of to_fixed but without doubles: the integers add up modulo 2^32, and the sum
// in floats tells which multiple of 2^32 is lost.
struct FixedSum {
  Unsigned modulo[kParts] = {};

  HPO_INLINE void add(int part, Mask mask, Ints fixed) { modulo[part] = add_where(mask, Unsigned(fixed), modulo[part]); }

  int64_t total(const Floats about[kParts]) const {
    Unsigned low = modulo[0];
    Floats near = about[0];  // off by less than 1/2 even at its largest, kTile kStatisticSaturation
    for (int part = 1; part < kParts; ++part) low += modulo[part], near += about[part];
    const int64_t rest = int32_t(sum_lanes(low));
    const double lost = ::rint(double(sum_lanes(near)) - double(rest) / kFixedPoint);
    if (!(__builtin_fabs(lost) <= kTile * kStatisticSaturation))
      return 0;  // the fast path does not hold, and the result is unused
    return rest + int64_t(lost) * (int64_t(1) << 32);
  }
};
static_assert(kFixedPoint == 4294967296.0, "the modulus of FixedSum");

// A clip of the log-ratios before they are added up, by sign of the advantage.
struct PreClip {
  float low[2], high[2];

  // Whether a clipped log-ratio is within kStatisticSaturation, as a log-ratio of the fast path is.
  bool narrows() const {
    bool all_within = true;
    for (int sign = 0; sign < 2; ++sign) all_within &= low[sign] <= kStatisticSaturation && high[sign] >= -kStatisticSaturation;
    return all_within;
  }
};

// The other work of the first sweep: it keeps ratios, or adds up another function than log-ratios.
enum class FirstSweep { plain, keeps_ratios, clips, deviates };

// The largest |x| with |e^x - 1| <= kStatisticSaturation.
constexpr float kDeviates = 3.7f;

template <bool kSplit, FirstSweep kSweep, bool kTakenForNear>
struct FastFixedSums {
  static constexpr bool kChanged = kSweep == FirstSweep::clips || kSweep == FirstSweep::deviates;
  const PreClip& clip;
  const Signs signs;
  const Floats row_low, row_high;  // where tokens have no sign of their own
  float* ratios;  // the memory of the gradient, where e^x is left for the sweep that writes it
  FixedSum all_sum, rising_sum;
  Floats changed_about[kParts] = {}, rising_about[kParts] = {};

  FastFixedSums(const PreClip& clip, const Signs& signs, float* ratios)
      : clip(clip),
        signs(signs),
        row_low(all<Floats>(clip.low[signs.negative])),
        row_high(all<Floats>(clip.high[signs.negative])),
        ratios(ratios) {}

  template <class Vector>
  HPO_INLINE void operator()(const Vector& vector) {
    Floats x = vector.x;
    if (kSweep == FirstSweep::keeps_ratios) vector.store(vector.ratio, ratios);
    if (kSweep == FirstSweep::clips) {
      Floats low = row_low, high = row_high;
      if (signs.advantages) {
        const Ints negative = signs.at<Vector::whole>(vector.i, vector.own);
        low = by_sign<Floats>(negative, clip.low), high = by_sign<Floats>(negative, clip.high);
      }
      x = keep_if(vector.present, clamp(x, low, high));
    }
    if (kSweep == FirstSweep::deviates) x = deviation_of(x, vector.ratio).size;
    constexpr bool kSmall = kTakenForNear && kSweep != FirstSweep::clips;  // below 1 / 2
    const Ints fixed = rounded((kSmall ? x : beyond_integer(x)) * float(kFixedPoint));
    all_sum.add(vector.part, all_lanes(), fixed);
    if (kChanged) changed_about[vector.part] += x;
    if (!kSplit) return;
    const Mask rises = at_least(x, Floats{});
    rising_sum.add(vector.part, rises, fixed);
    rising_about[vector.part] = add_where(rises, x, rising_about[vector.part]);
  }
  HPO_INLINE void end_run() {}

  // about: the sum of all log-ratios in floats. Tokens that are absent added 0.
  RowLogRatios sums(const Floats about[kParts], int64_t valid) const {
    return {valid, all_sum.total(kChanged ? changed_about : about), kSplit ? rising_sum.total(rising_about) : 0};
  }
};

// A fast-path tile of few rows in the first of two sweeps; of_rows [segments.count].
template <bool kSplit, FirstSweep kSweep>
inline bool measure_fast_rows(const PolicyLossArgs& args, int64_t first, const Segments& segments, const PreClip& clip,
                              Tile& tile, uint8_t* seen, Partial& partial, RowLogRatios* of_rows) {
  if (!finite_coefficients(args, first, segments)) return false;
  float* ratios = kSweep == FirstSweep::keeps_ratios ? args.grad + first : nullptr;
  return guess_near(tile.near, [&](auto near) {
    constexpr bool kTakenForNear = decltype(near)::value;
    FastSums sums;
    PresentTokens present;
    for (int index = 0; index < segments.count; ++index) {
      const Segment& segment = segments.list[index];
      Floats about[kParts];
      std::copy_n(sums.sum, kParts, about);
      FastFixedSums<kSplit, kSweep, kTakenForNear> fixed(clip, Signs::of_row(args, segment.row, first), ratios);
      present.set(index, args.mask ? sweep_row<kTakenForNear, true>(args, first, segment, sums, fixed)
                                   : sweep_row<kTakenForNear, false>(args, first, segment, sums, fixed));
      for (int part = 0; part < kParts; ++part) about[part] = sums.sum[part] - about[part];
      of_rows[index] = fixed.sums(about, present.of_row[index]);
    }
    const float most = kSweep == FirstSweep::deviates ? kDeviates : kStatisticSaturation;
    if (!settle_fast<kTakenForNear>(sums, present.all, partial, tile.near, most)) return false;
    present.mark(segments, seen);
    return true;
  });
}

using MeasureFast = bool (*)(const PolicyLossArgs&, int64_t first, const Segments&, const PreClip&, Tile&, uint8_t* seen,
                             Partial&, RowLogRatios* of_rows);

template <bool kSplit>
MeasureFast pick_measure_fast(FirstSweep sweep) {
  switch (sweep) {
    case FirstSweep::keeps_ratios: return measure_fast_rows<kSplit, FirstSweep::keeps_ratios>;
    case FirstSweep::clips: return measure_fast_rows<kSplit, FirstSweep::clips>;
    case FirstSweep::deviates: return measure_fast_rows<kSplit, FirstSweep::deviates>;
    case FirstSweep::plain: break;
  }
  return measure_fast_rows<kSplit, FirstSweep::plain>;
}

}  // namespace hpo::HPO_ISA
