// covariance. The definition is hpo_core/reference/covariance.py.
#include "hpo/covariance.h"

#include "gates_sums.h"
#include "hpo/entropy.h"
#include "kernels.h"
#include "rows.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

HPO_INLINE Mask is_finite(Floats x) { return less(Floats(Ints(x) & INT32_MAX), all<Floats>(INFINITY)); }

// The advantages of the tokens of one row.
struct AdvantageOfRow {
  const Floats value;

  template <bool kWhole>
  HPO_INLINE Floats at(int, Mask) const {
    return value;
  }
};

// The advantages of tokens of any rows.
struct AdvantagesOfTokens {
  const float* values;

  template <bool kWhole>
  HPO_INLINE Floats at(int i, Mask own) const {
    return load_own<kWhole>(own, values + i);
  }
};

// Writes the advantages of rows to their tokens. A token in no row gets NaN, with which it is no member.
void spread(const float* advantages, int n, const Segments& segments, float* of_tokens) {
  int i = 0;
  for (const Segment& segment : segments) {
    const float advantage = advantages[segment.row];
    for (; i < segment.begin; ++i) of_tokens[i] = NAN;
    for (; i < segment.end; ++i) of_tokens[i] = advantage;
  }
  for (; i < n; ++i) of_tokens[i] = NAN;
}

// Calls body(begin, end, advantages) for the n tokens of a tile, or for those of each row.
template <class Body>
HPO_INLINE void with_advantages(const CovarianceArgs& args, int64_t first, int n, const Segments& segments, const Body& body) {
  if (!args.cu_seqlens) return body(0, n, AdvantagesOfTokens{args.advantages + first});
  if (segments.few(n)) {
    for (const Segment& each : segments) body(each.begin, each.end, AdvantageOfRow{all<Floats>(args.advantages[each.row])});
    return;
  }
  float of_tokens[kTile];
  spread(args.advantages, n, segments, of_tokens);
  body(0, n, AdvantagesOfTokens{of_tokens});
}

// The members among the tokens of a vector, and their numbers. A token is a member if its byte is not 0 and its two numbers
// are finite.
struct Members {
  Mask mask;
  Floats logp, advantage;
};

// Calls body(i, part, own, whole, members) for every vector of the tokens [begin, end) of a tile, as for_each_vector does.
template <class Advantages, class Body>
HPO_INLINE void for_each_member(const CovarianceArgs& args, int64_t first, int begin, int end, const Advantages advantages,
                                const Body& body) {
  const float* const logp = args.logp + first;
  const uint8_t* const valid = args.mask ? args.mask + first : nullptr;
  const auto step = [&](int i, int part, Mask own, auto whole) HPO_INSIDE {
    constexpr bool kWhole = decltype(whole)::value;
    const Floats x = load_own<kWhole>(own, logp + i), advantage = advantages.template at<kWhole>(i, own);
    const Mask finite = both(is_finite(x), is_finite(advantage));
    const Mask member = both(finite, valid ? present_own<kWhole>(own, valid + i) : own);
    body(i, part, own, whole, Members{member, x, advantage});
  };
  for_each_vector(begin, end, step, [] {});
}

// The sums of tiles, of each lane apart.
struct LaneSums {
  int64_t members = 0;
  struct {
    Doubles logp[kParts] = {}, advantages[kParts] = {};
  } lanes;

  template <class Advantages>
  HPO_INLINE void add_tokens(const CovarianceArgs& args, int64_t first, int begin, int end, const Advantages& advantages) {
    auto sums = lanes;  // in registers meanwhile
    LaneCount count;
    for_each_member(args, first, begin, end, advantages, [&](int, int part, Mask, auto, const Members& of) HPO_INSIDE {
      count.add(of.mask);
      add(keep_if(of.mask, of.logp), sums.logp[part]);
      add(keep_if(of.mask, of.advantage), sums.advantages[part]);
    });
    members += count.total();
    lanes = sums;
  }

  CovarianceSums total() const { return {double(members), total(lanes.logp), total(lanes.advantages)}; }

 private:
  static HPO_INLINE void add(Floats values, Doubles& sum) {
    const Doubles doubles = as_doubles(values);
    sum.low += doubles.low, sum.high += doubles.high;
  }

  static double total(const Doubles (&sums)[kParts]) {
    double each[kLanes];
    std::memcpy(each, sums, sizeof each);
    return sum_halves(each);
  }
};

template <class Advantages>
HPO_INLINE void write_terms(const CovarianceArgs& args, const CovarianceMeans means, int64_t first, int begin, int end,
                            const Advantages& advantages) {
  float* const keys = args.keys + first;
  for_each_member(args, first, begin, end, advantages, [&](int i, int, Mask own, auto whole, const Members& of) HPO_INSIDE {
    const Doubles logp = as_doubles(of.logp), advantage = as_doubles(of.advantage);
    const Floats term =
        as_floats({covariance_term(means, logp.low, advantage.low), covariance_term(means, logp.high, advantage.high)});
    store_own<decltype(whole)::value>(own, blend(of.mask, finite_key(term), all<Floats>(-INFINITY)), keys + i);
  });
}

template <class Advantages>
HPO_INLINE void write_draws(const CovarianceArgs& args, const CovarianceMeans means, int64_t first, int begin, int end,
                            const Advantages& advantages) {
  const CovarianceDraw draw = args.draw;
  float* const keys = args.keys + first;
  const uint32_t place = uint32_t(first);
  for (int i = begin; i < end; ++i) keys[i] = draw_of_place(draw, place + uint32_t(i));
  for_each_member(args, first, begin, end, advantages, [&](int i, int, Mask own, auto whole, const Members& of) HPO_INSIDE {
    constexpr bool kWhole = decltype(whole)::value;
    const Doubles logp = as_doubles(of.logp), advantage = as_doubles(of.advantage);
    const Doubles old_logp = as_doubles(load_own<kWhole>(own, draw.old_logp + first + i));
    const auto drawn = [&](HalfDoubles x, HalfDoubles old, HalfDoubles a) HPO_INSIDE {
      return may_be_drawn(draw, covariance_term(means, x, a), x, old, a) ? HalfDoubles{} + 1.0 : HalfDoubles{};
    };
    const Floats one_or_0 =
        as_floats({drawn(logp.low, old_logp.low, advantage.low), drawn(logp.high, old_logp.high, advantage.high)});
    const Mask selected = both(of.mask, present_lanes(Ints(one_or_0)));
    store_own<kWhole>(own, blend(selected, load_own<kWhole>(own, keys + i), all<Floats>(-INFINITY)), keys + i);
  });
}

}  // namespace

int64_t covariance_workspace(int64_t tokens) {
  Arena arena(nullptr);
  arena.take<CovarianceSums>(ceil_divide(tokens, kChunk));
  return arena.bytes();
}

void covariance(const CovarianceArgs& args, int threads) {
  const int64_t chunks = ceil_divide(args.tokens, kChunk);
  CovarianceSums* of_chunk = Arena(args.workspace).take<CovarianceSums>(chunks);
  const int64_t no_rows[] = {0};
  const Rows rows(args.cu_seqlens ? args.cu_seqlens : no_rows, args.rows, args.tokens);
  const int used = worthwhile(threads, args.tokens);
  parallel_for(chunks, used, [&](int64_t chunk) {
    LaneSums sums;
    for_each_tile(rows, chunk, [&](int64_t first, int n, const Segments& segments) {
      with_advantages(args, first, n, segments,
                      [&](int begin, int end, auto advantages) { sums.add_tokens(args, first, begin, end, advantages); });
    });
    of_chunk[chunk] = sums.total();
  });
  CovarianceSums sums = {};
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const CovarianceSums& own = of_chunk[chunk];
    sums = {sums.members + own.members, sums.logp + own.logp, sums.advantages + own.advantages};
  }
  *args.members = int64_t(sums.members);
  const CovarianceMeans means = means_of(sums);
  parallel_for(chunks, used, [&](int64_t chunk) {
    for_each_tile(rows, chunk, [&](int64_t first, int n, const Segments& segments) {
      with_advantages(args, first, n, segments, [&](int begin, int end, auto advantages) {
        if (args.draw.old_logp) write_draws(args, means, first, begin, end, advantages);
        else write_terms(args, means, first, begin, end, advantages);
      });
    });
  });
}

}  // namespace hpo::HPO_ISA
