// Tiles about which nothing is out of the ordinary, in one pass: every log-ratio is finite and small, the coefficient belongs
// to the row, and nothing is selected, penalised or reported by token. That is the loss as it is nearly always called; what
// the pass does not know, gates_tile.h does in several.
#pragma once
#include <type_traits>

#include "gates_call.h"

namespace hpo::HPO_ISA {

// What a call must be for its tiles to have a chance.
inline bool may_be_plain(const PolicyLossArgs& args) {
  return !(args.advantage_per_token || args.token_weight || args.token_mask || args.score || args.ref_logp || args.entropy ||
           args.token_loss);
}

// Up to it e^x needs no power of two: just below ln 2 / 2.
constexpr float kNear = 0.3465f;

// Statistics of a tile, one vector for each part of the lanes. They leave for the Partial when the tile turns out to be plain.
struct PlainSums {
  Floats sum[kParts] = {}, square[kParts] = {}, deviation[kParts] = {}, deviation_square[kParts] = {};
  Floats smallest[kParts], largest[kParts];

  PlainSums() {
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
    const Floats d = ratio - 1.0f;  // centred, what is summed stays small
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

// What rows say about the tokens of a vector: with several rows in the tile it stands in arrays (see load_rows), in which the
// kinds of masked tokens are put right. What lies behind the tile's n tokens is absent.
template <bool kMasked>
struct ManyRows {
  static constexpr bool all_present = false;
  Tile& tile;
  const uint8_t* mask;

  HPO_INLINE Mask present(int i) const {
    if (!kMasked) return present_lanes(kind(i));
    const Ints here = keep_where(mask + i, kind(i));
    store_lanes(here, tile.kind + i);
    return present_lanes(here);
  }
  HPO_INLINE Ints kind(int i) const { return load_lanes<Ints>(tile.kind + i); }
  HPO_INLINE Floats coefficient(int i) const { return load_lanes<Floats>(tile.coefficient + i); }
};

// With one row it is the same for all of them.
template <bool kMasked>
struct OneRow {
  static constexpr bool all_present = !kMasked;
  const uint8_t* mask;
  Floats row_coefficient;

  HPO_INLINE Mask present(int i) const { return kMasked ? present_bytes(mask + i) : all_lanes(); }
  HPO_INLINE Ints kind(int) const { return Ints{}; }  // who takes one row knows it
  HPO_INLINE Floats coefficient(int) const { return row_coefficient; }
};

// Goes through a tile and calls each(i, part, present, kind, coefficient, x, ratio) for every vector, and each.end_group()
// after those of a group; kind and coefficient are anything where no token is present. False: the tile is not plain after all,
// or its log-ratios are not near 0 as they were taken for, and nothing was counted. `near`: whether they are.
template <bool kTakenForNear, class Rows, class Each>
HPO_INLINE bool sweep_plain(const PolicyLossArgs& args, int64_t first, int n, const Rows& rows, Partial& partial, Each& each,
                            bool& near) {
  const float* logp = args.logp + first;
  const float* old_logp = args.old_logp ? args.old_logp + first : logp;  // on-policy: x = 0, or NaN where logp is
  PlainSums sums;
  LaneCount present_count;
  const auto step = [&](int i, int part, int left) __attribute__((always_inline)) {
    const Mask given = rows.present(i), present = left == kWidth ? given : both(given, leading_lanes(left));
    const Ints kind = rows.kind(i);
    const Floats x = difference(present, load_lanes<Floats>(logp + i), load_lanes<Floats>(old_logp + i));
    const Floats ratio = kTakenForNear ? exp_near_0(x) : exp_of_number(x);  // a tile with NaN is not plain
    sums.add(part, present, x, ratio);
    if (!Rows::all_present) present_count.add(present);
    each(i, part, present, kind, rows.coefficient(i), x, ratio);
  };
  for_each_vector(n, step, [&]() __attribute__((always_inline)) { each.end_group(); });
  near = sums.within(kNear);
  if (!near && (kTakenForNear || !sums.within(kStatisticSaturation))) return false;
  sums.add_to(partial);
  partial.slots[kTokens] += Rows::all_present ? n : present_count.total();
  return true;
}

// Log-ratios near 0 come together, so a tile is taken for what the last one was. sweep(taken for near) makes one attempt.
template <class Sweep>
HPO_INLINE bool guess_near(bool near, const Sweep& sweep) {
  return (near && sweep(std::true_type{})) || sweep(std::false_type{});
}

// Loss and gradient of the tokens of a vector; `inside`: present, and the gate has the derivative 1.
template <bool kScoreHead>
HPO_INLINE void put_term(int part, Mask present, Mask inside, Floats value, const float* logp, GroupSum& loss, float* grad) {
  loss.add(part, present, kScoreHead ? value * load_lanes<Floats>(logp) : value);
  store_lanes(keep_if(kScoreHead ? present : inside, value), grad);
}

// Whether a tile can be read by whole vectors: what lies behind it is other tokens, which are absent here.
inline bool has_whole_vectors(const PolicyLossArgs& args, int64_t first, int n) {
  return first + (n + kLanes - 1) / kLanes * kLanes <= args.tokens;
}

// A plain tile of the first of two sweeps: its log-ratios are kept.
struct PlainLogRatios {
  float* log_ratios;
  HPO_INLINE void operator()(int i, int, Mask, Ints, Floats, Floats x, Floats) { store_lanes(x, log_ratios + i); }
  HPO_INLINE void end_group() {}
};

inline bool measure_plain(const Call& call, int64_t first, int n, const Segments& segments, Tile& tile, uint8_t* seen,
                          Partial& partial) {
  const PolicyLossArgs& args = call.args;
  if (!has_whole_vectors(args, first, n) || load_rows(args, first, n, segments, tile)) return false;
  for (int i = n; i % kLanes != 0; ++i) tile.kind[i] = kAbsent;
  const bool plain = guess_near(tile.near, [&](auto near) {
    constexpr bool kTakenForNear = decltype(near)::value;
    PlainLogRatios keep = {tile.x};
    if (!args.mask) return sweep_plain<kTakenForNear>(args, first, n, ManyRows<false>{tile, nullptr}, partial, keep, tile.near);
    return sweep_plain<kTakenForNear>(args, first, n, ManyRows<true>{tile, args.mask + first}, partial, keep, tile.near);
  });
  if (!plain) return false;
  tile.exceptional = false;
  tile.chosen = tile.kind;
  mark_rows(segments, tile.kind, seen);
  return true;
}

// What the first of two sweeps asks of a plain tile of one row.
struct RowLogRatios {
  int64_t valid = 0, fixed = 0, rising = 0;  // log-ratios in fixed point, and those of them that are not negative
};

// A sum of numbers of at most kStatisticSaturation in fixed point, equal to that of to_fixed without its doubles: a first
// shifter rounds each to 16 binary digits, a second what that leaves to 32, and what stands above these bits is taken off at
// the end.
struct FixedSum {
  static constexpr float kCoarse = 192.0f, kFine = 0.0029296875f;  // 1.5 * 2^7 and 1.5 * 2^-9
  Unsigned coarse[kParts] = {}, fine[kParts] = {};

  HPO_INLINE void add(int part, Mask mask, Unsigned coarse_bits, Unsigned fine_bits) {
    coarse[part] = add_where(mask, coarse_bits, coarse[part]);
    fine[part] = add_where(mask, fine_bits, fine[part]);
  }

  // `added`: how many, by lane.
  int64_t total(const Unsigned added[kParts]) const {
    int64_t sum = 0;
    for (int part = 0; part < kParts; ++part) {
      const Ints high = Ints(coarse[part] - added[part] * uint32_t(to_bits(kCoarse)));
      const Ints low = Ints(fine[part] - added[part] * uint32_t(to_bits(kFine)));
      for (int lane = 0; lane < kWidth; ++lane) sum += int64_t(high[lane]) * 65536 + low[lane];
    }
    return sum;
  }
};

template <bool kSplit>
struct PlainFixedSums {
  FixedSum all_sum, rising_sum;
  Unsigned rising_count[kParts] = {};

  HPO_INLINE void operator()(int, int part, Mask, Ints, Floats, Floats x, Floats) {
    const Floats coarse = x + FixedSum::kCoarse, rest = x - (coarse - FixedSum::kCoarse), fine = rest + FixedSum::kFine;
    all_sum.add(part, all_lanes(), Unsigned(coarse), Unsigned(fine));
    if (!kSplit) return;
    const Mask rises = at_least(x, Floats{});
    rising_sum.add(part, rises, Unsigned(coarse), Unsigned(fine));
    rising_count[part] = add_where(rises, Unsigned{} + 1, rising_count[part]);
  }
  HPO_INLINE void end_group() {}

  // Of n tokens; those that are absent added 0.
  RowLogRatios sums(int n, int64_t valid) const {
    Unsigned added[kParts];
    for (int part = 0; part < kParts; ++part) added[part] = Unsigned{} + uint32_t((n + kLanes - 1) / kLanes);
    return {valid, all_sum.total(added), kSplit ? rising_sum.total(rising_count) : 0};
  }
};
static_assert(kTile / kLanes * int64_t(kStatisticSaturation) * 65536 < (int64_t(1) << 31), "a lane of FixedSum");

template <bool kSplit>
inline bool measure_plain_row(const PolicyLossArgs& args, int64_t first, int n, int64_t row, Tile& tile, uint8_t* seen,
                              Partial& partial, RowLogRatios& sums) {
  const float advantage = args.advantages[row];
  if (!has_whole_vectors(args, first, n) || !finite(args.weights[row] * advantage)) return false;
  const bool plain = guess_near(tile.near, [&](auto near) {
    constexpr bool kTakenForNear = decltype(near)::value;
    PlainFixedSums<kSplit> fixed;
    const double tokens_before = partial.slots[kTokens];
    const bool swept =
        args.mask ? sweep_plain<kTakenForNear>(args, first, n, OneRow<true>{args.mask + first, {}}, partial, fixed, tile.near)
                  : sweep_plain<kTakenForNear>(args, first, n, OneRow<false>{nullptr, {}}, partial, fixed, tile.near);
    if (swept) sums = fixed.sums(n, int64_t(partial.slots[kTokens] - tokens_before));
    return swept;
  });
  if (!plain) return false;
  if (sums.valid > 0) mark_row(row, seen);
  return true;
}

}  // namespace hpo::HPO_ISA
