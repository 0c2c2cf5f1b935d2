// covariance. The definition is hpo_core/reference/covariance.py.
#include "hpo/covariance.h"

#include "hpo/entropy.h"
#include "kernels.h"
#include "lanes.h"
#include "rows.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {
namespace {

// The numbers of a tile of n tokens. A token is a member if its byte is not 0 and its two numbers are finite.
class Tile {
 public:
  int n;
  const float *logp, *advantage;
  const uint8_t* valid;

  Tile(const CovarianceArgs& args, int64_t first, int n, const Segments& segments)
      : n(n),
        logp(args.logp + first),
        advantage(args.cu_seqlens ? of_rows_ : args.advantages + first),
        valid(args.mask ? args.mask + first : ones_) {
    if (!args.mask) std::fill_n(ones_, n, uint8_t(1));
    if (args.cu_seqlens) spread(args.advantages, segments);
  }

 private:
  // A token in no row gets NaN, with which it is no member.
  void spread(const float* advantages, const Segments& segments) {
    int i = 0;
    for (const Segment& segment : segments) {
      const float advantage = advantages[segment.row];
      for (; i < segment.begin; ++i) of_rows_[i] = NAN;
      for (; i < segment.end; ++i) of_rows_[i] = advantage;
    }
    for (; i < n; ++i) of_rows_[i] = NAN;
  }

  float of_rows_[kTile];
  uint8_t ones_[kTile];
};

HPO_INLINE bool is_member(float logp, float advantage, uint8_t valid) {
  return hpo::is_finite(logp) & hpo::is_finite(advantage) & (valid != 0);
}

HPO_INLINE Mask is_finite(Floats x) { return less(Floats(Ints(x) & INT32_MAX), all<Floats>(INFINITY)); }

// The sums of tiles, of each lane apart.
struct LaneSums {
  int64_t members = 0;
  double logp[kLanes] = {}, advantages[kLanes] = {};

  void add(const Tile& tile) {
    LaneCount count;
    int i = 0;
    for (; i + kWidth <= tile.n; i += kWidth) {
      const Floats x = load_lanes<Floats>(tile.logp + i), advantage = load_lanes<Floats>(tile.advantage + i);
      const Mask finite = both(is_finite(x), is_finite(advantage));
      const Mask member = both(finite, present_bytes(tile.valid + i));
      count.add(member);
      add_as_doubles(keep_if(member, x), logp + i % kLanes);
      add_as_doubles(keep_if(member, advantage), advantages + i % kLanes);
    }
    members += count.total();
    for (; i < tile.n; ++i) {
      if (!is_member(tile.logp[i], tile.advantage[i], tile.valid[i])) continue;
      ++members, logp[i % kLanes] += double(tile.logp[i]), advantages[i % kLanes] += double(tile.advantage[i]);
    }
  }

  CovarianceSums total() const { return {double(members), sum_halves(logp), sum_halves(advantages)}; }
};

void write_terms(const Tile& tile, const CovarianceMeans& means, float* __restrict keys) {
  const float* __restrict logp = tile.logp, * __restrict advantage = tile.advantage;
  const uint8_t* __restrict valid = tile.valid;
  for (int i = 0; i < tile.n; ++i) {
    const float key = key_of_term(covariance_term(means, logp[i], advantage[i]));
    keys[i] = is_member(logp[i], advantage[i], valid[i]) ? key : -INFINITY;
  }
}

// Of a copy of the draw: numbers behind a reference would be loaded under conditions, and no vector.
void write_draws(const Tile& tile, const CovarianceMeans& means, const CovarianceDraw draw, int64_t first,
                 float* __restrict keys) {
  const float* __restrict logp = tile.logp, * __restrict advantage = tile.advantage;
  const float* __restrict old_logp = draw.old_logp + first;
  const uint8_t* __restrict valid = tile.valid;
  const uint32_t place = uint32_t(first);
  for (int i = 0; i < tile.n; ++i) {
    const double term = covariance_term(means, logp[i], advantage[i]);
    const bool drawn =
        is_member(logp[i], advantage[i], valid[i]) & may_be_drawn(draw, term, logp[i], old_logp[i], advantage[i]);
    const float key = draw_of_place(draw, place + uint32_t(i));
    keys[i] = drawn ? key : -INFINITY;
  }
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
    for_each_tile(rows, chunk,
                  [&](int64_t first, int n, const Segments& segments) { sums.add(Tile(args, first, n, segments)); });
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
      const Tile tile(args, first, n, segments);
      if (args.draw.old_logp) write_draws(tile, means, args.draw, first, args.keys + first);
      else write_terms(tile, means, args.keys + first);
    });
  });
}

}  // namespace hpo::HPO_ISA
