// Sums over tokens whose bits depend on the packing only: fixed lanes inside a tile, tiles in order inside a task, tasks in
// order at the end.
#pragma once
#include <cfloat>
#include <type_traits>

#include "hpo/gates.h"
#include "hpo/metrics.h"
#include "lanes.h"
#include "parallel.h"

namespace hpo::HPO_ISA {

// Selects by bits: a masked value may be NaN and must not enter arithmetic whose result is kept.
HPO_INLINE int32_t mask_of(bool condition) { return condition ? -1 : 0; }
HPO_INLINE float keep_if(bool condition, float x) { return from_bits(to_bits(x) & mask_of(condition)); }
HPO_INLINE bool finite(float x) { return __builtin_fabsf(x) <= FLT_MAX; }

// The kind of a token in the policy term, by the sign of its advantage. A sum of kinds over a tile counts both signs at once.
constexpr int32_t kAbsent = 0, kPositive = 1, kNegative = 1 << 16;

// Without a branch, which would be taken for half of the rows.
HPO_INLINE int32_t kind_of(bool negative) { return kPositive << (16 * negative); }
static_assert(kNegative == kPositive << 16, "the kinds of kind_of");

HPO_INLINE int32_t positives(int32_t sum_of_kinds) { return sum_of_kinds & (kNegative - 1); }
HPO_INLINE int32_t negatives(int32_t sum_of_kinds) { return sum_of_kinds / kNegative; }

// The sums of float64 lanes behind the metrics.
enum MetricSum { kLossSum, kPenaltySum, kX, kXSquare, kDeviation, kDeviationSquare, kS, kSSquare, kK3, kEntropySum, kSums };

// One task's share of the metrics. Counts go to their slots at once; sums stay in float64 lanes until the end.
struct alignas(64) Partial {
  double slots[kMetrics] = {};
  double sums[kSums][kLanes] = {};
  float smallest[kLanes], largest[kLanes];

  Partial() {
    for (int lane = 0; lane < kLanes; ++lane) smallest[lane] = INFINITY, largest[lane] = -INFINITY;
  }

  void extend(const float* low, const float* high) {
    for (int lane = 0; lane < kLanes; ++lane) {
      smallest[lane] = low[lane] < smallest[lane] ? low[lane] : smallest[lane];
      largest[lane] = high[lane] > largest[lane] ? high[lane] : largest[lane];
    }
  }

  void add(const Partial& other) {
    for (int slot = 0; slot < kMetrics; ++slot) slots[slot] += other.slots[slot];
    for (int sum = 0; sum < kSums; ++sum) {
      for (int lane = 0; lane < kLanes; ++lane) sums[sum][lane] += other.sums[sum][lane];
    }
    extend(other.smallest, other.largest);
  }

  double total(MetricSum sum) const {
    double all = 0.0;
    for (int lane = 0; lane < kLanes; ++lane) all += sums[sum][lane];
    return all;
  }
};

// Sums of one tile in short float lanes: at most 64 additions each.
struct alignas(64) TileSum {
  float lanes[kLanes] = {};

  void add_to(double* sums) const {
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += double(lanes[lane]);
  }
};

// Fills the last vector of a tile.
template <class T>
inline void pad(T* values, int n, T neutral) {
  for (; n % kLanes != 0; ++n) values[n] = neutral;
}

// Adds from(i) to the lane of i, for all i below n, a multiple of kLanes. There are two chains of additions, so that neither
// waits for the other.
template <class From>
inline void add_lanes(int n, double* sums, const From& from) {
  int i = 0;
  if (n > kLanes) {
    double odd[kLanes] = {};
    for (; i + kLanes < n; i += 2 * kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) sums[lane] += from(i + lane);
      for (int lane = 0; lane < kLanes; ++lane) odd[lane] += from(i + kLanes + lane);
    }
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += odd[lane];
  }
  for (int lane = 0; i < n && lane < kLanes; ++lane) sums[lane] += from(i + lane);
}

// Adds up the terms in float64 from the start.
inline void add_terms(float* terms, int n, double* sums) {
  pad(terms, n, 0.0f);
  add_lanes(n, sums, [=](int i) { return double(terms[i]); });
}

inline void add_to_lanes(const double* lanes, double* sums) {
  for (int lane = 0; lane < kLanes; ++lane) sums[lane] += lanes[lane];
}

// Tokens of a run are added in float, by lane, and runs in double: a conversion for each token would cost more than its
// rounding is worth.
constexpr int kRun = 8 * kLanes;

// Loops prefetch so many tokens ahead: the prefetcher of the hardware stops at the end of a page, which is a tile of floats.
constexpr int kAhead = 512;

// Calls step(i, part, own, whole) for every vector of the tokens [begin, end), and end_run() before those of a new run; the
// last run is the caller's to end. `own`: the lanes that hold these tokens, all lanes where the type `whole` is true.
template <class Step, class EndRun>
HPO_INLINE void for_each_vector(int begin, int end, const Step& step, const EndRun& end_run) {
  for (int pack = begin / kLanes * kLanes; pack < end;) {
    const int next_run = (pack / kRun + 1) * kRun, stop = next_run < end ? next_run : end;
    if (pack >= begin) {
      if (pack % kRun == 0 && pack > 0) end_run();
      for (; pack + kLanes <= stop; pack += kLanes) {
        for (int part = 0; part < kParts; ++part) step(pack + part * kWidth, part, all_lanes(), std::true_type{});
      }
    }
    if (pack < stop) {
      for (int part = 0; part < kParts; ++part) {
        const int i = pack + part * kWidth;
        step(i, part, but_not(leading_lanes(end - i), leading_lanes(begin - i)), std::false_type{});
      }
      pack += kLanes;
    }
  }
}

// The same for loops that add nothing up: step(i, own, whole).
template <class Step>
HPO_INLINE void for_each_vector(int begin, int end, const Step& step) {
  int i = begin / kWidth * kWidth;
  if (i < begin) {
    step(i, but_not(leading_lanes(end - i), leading_lanes(begin - i)), std::false_type{});
    i += kWidth;
  }
  for (; i + kWidth <= end; i += kWidth) step(i, all_lanes(), std::true_type{});
  if (i < end) step(i, leading_lanes(end - i), std::false_type{});
}

// The terms of a run whose sum overflows a float, as that of losses around |w A| e^60 does, are added in double.
inline void add_runs(float* terms, int n, double* sums) {
  double of_tile[kLanes] = {};
  double* const to = n > kRun ? of_tile : sums;  // one run needs no sum of runs
  for (int first = 0; first < n; first += kRun) {
    const int end = n - first < kRun ? n : first + kRun;
    Floats lanes[kParts] = {};
    for_each_vector(
        first, end,
        [&](int i, int part, Mask own, auto whole)
            HPO_INSIDE { lanes[part] += load_own<decltype(whole)::value>(own, terms + i); },
        []() HPO_INSIDE {});
    Mask out_of_range = {};
    for (int part = 0; part < kParts; ++part)
      out_of_range =
          either(out_of_range, but_not(all_lanes(), at_least(all<Floats>(FLT_MAX), Floats(Ints(lanes[part]) & 0x7FFFFFFF))));
    if (any(out_of_range)) {
      double of_run[kLanes] = {};
      pad(terms, n, 0.0f);
      add_lanes((end - first + kLanes - 1) / kLanes * kLanes, of_run, [=](int i) { return double(terms[first + i]); });
      add_to_lanes(of_run, to);
    } else {
      for (int part = 0; part < kParts; ++part) add_as_doubles(lanes[part], to + part * kWidth);
    }
  }
  if (to == of_tile) add_to_lanes(of_tile, sums);
}

// Sums of runs in floats and of these in double, as in add_runs, of terms that come as vectors and stand in no array. Terms are
// at most |w A| e^kStatisticSaturation, so that no run overflows.
struct RunSum {
  double* lanes;  // of the runs that have ended
  Floats run[kParts] = {};

  explicit RunSum(double* lanes) : lanes(lanes) {}

  HPO_INLINE void add(int part, Mask present, Floats value) { run[part] = add_where(present, value, run[part]); }

  HPO_INLINE void end() {
    for (int part = 0; part < kParts; ++part) {
      add_as_doubles(run[part], lanes + part * kWidth);
      run[part] = Floats{};
    }
  }
};

// Sums of the log-ratios of one tile, which are 0 where a token is absent.
struct LogRatioSums {
  TileSum sum, square;
  float smallest[kLanes], largest[kLanes];
  int32_t kinds[kLanes] = {};

  LogRatioSums(int32_t* kind, float* x, int n) {
    pad(kind, n, kAbsent);
    pad(x, n, 0.0f);
    for (int lane = 0; lane < kLanes; ++lane) smallest[lane] = INFINITY, largest[lane] = -INFINITY;
    for (int i = 0; i < n; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const float each = x[i + lane];
        const float or_nan = from_bits(to_bits(each) | mask_of(kind[i + lane] == kAbsent));  // neither smaller nor larger
        sum.lanes[lane] += each;
        square.lanes[lane] = fused(each, each, square.lanes[lane]);
        smallest[lane] = or_nan < smallest[lane] ? or_nan : smallest[lane];
        largest[lane] = or_nan > largest[lane] ? or_nan : largest[lane];
        kinds[lane] += kind[i + lane];
      }
    }
  }

  // Whether no log-ratio is NaN or so large that anything saturates.
  bool ordinary() const {
    int32_t exceptions = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      exceptions |= mask_of(smallest[lane] < -kStatisticSaturation) | mask_of(largest[lane] > kStatisticSaturation);
      exceptions |= mask_of(sum.lanes[lane] != sum.lanes[lane]);
    }
    return exceptions == 0;
  }

  void add_to(Partial& partial) const {
    sum.add_to(partial.sums[kX]);
    square.add_to(partial.sums[kXSquare]);
    partial.extend(smallest, largest);
    int32_t all_kinds = 0;
    for (int lane = 0; lane < kLanes; ++lane) all_kinds += kinds[lane];
    partial.slots[kTokens] += positives(all_kinds) + negatives(all_kinds);
  }
};

// ratio = e^x, and the sums of ratio - 1: centred, so that sums stay small.
inline void fill_ratios(float* x, int n, float* ratio, Partial& partial) {
  pad(x, n, 0.0f);
  TileSum deviation, square;
  for (int i = 0; i < n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float r = exp(x[i + lane]);
      const float d = r - 1.0f;
      ratio[i + lane] = r;
      deviation.lanes[lane] += d;
      square.lanes[lane] = fused(d, d, square.lanes[lane]);
    }
  }
  deviation.add_to(partial.sums[kDeviation]);
  square.add_to(partial.sums[kDeviationSquare]);
}

}  // namespace hpo::HPO_ISA
