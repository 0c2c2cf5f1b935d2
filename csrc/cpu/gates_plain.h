// Tiles about which nothing is out of the ordinary, in one pass: every log-ratio is finite and small, the coefficient belongs
// to the row, and nothing is selected, penalised or reported by token. That is the loss as it is nearly always called; what
// the pass does not know, gates_tile.h does in several.
#pragma once
#include "gates_call.h"

namespace hpo::HPO_ISA {

// What a call must be for its tiles to have a chance.
inline bool may_be_plain(const PolicyLossArgs& args) {
  return !(args.advantage_per_token || args.token_weight || args.token_mask || args.score || args.ref_logp || args.entropy ||
           args.token_loss);
}

// Statistics of a tile, one vector for each part of the lanes. They leave for the Partial when the tile turns out to be plain.
struct PlainSums {
  Floats sum[kParts] = {}, square[kParts] = {}, deviation[kParts] = {}, deviation_square[kParts] = {};
  Floats smallest[kParts], largest[kParts];
  Ints kinds[kParts] = {};

  PlainSums() {
    for (int part = 0; part < kParts; ++part) {
      smallest[part] = all<Floats>(INFINITY);
      largest[part] = all<Floats>(-INFINITY);
    }
  }

  HPO_INLINE void add(int part, Ints kind, Floats x, Floats ratio) {
    sum[part] += x;
    square[part] = Number<Floats>::fused(x, x, square[part]);
    smallest[part] = smaller_where(kind != kAbsent, x, smallest[part]);
    largest[part] = larger_where(kind != kAbsent, x, largest[part]);
    kinds[part] += kind;
    const Floats d = ratio - 1.0f;  // centred, what is summed stays small
    deviation[part] += d;
    deviation_square[part] = Number<Floats>::fused(d, d, deviation_square[part]);
  }

  bool ordinary() const {
    Ints exceptions = {};
    for (int part = 0; part < kParts; ++part) {
      exceptions |=
          (smallest[part] < -kStatisticSaturation) | (largest[part] > kStatisticSaturation) | (sum[part] != sum[part]);
    }
    int32_t any = 0;
    for (int lane = 0; lane < kWidth; ++lane) any |= exceptions[lane];
    return any == 0;
  }

  void add_to(Partial& partial) const {
    int32_t all_kinds = 0;
    float low[kLanes], high[kLanes];
    for (int part = 0; part < kParts; ++part) {
      for (int lane = 0; lane < kWidth; ++lane) {
        const int at = part * kWidth + lane;
        partial.sums[kX][at] += double(sum[part][lane]);
        partial.sums[kXSquare][at] += double(square[part][lane]);
        partial.sums[kDeviation][at] += double(deviation[part][lane]);
        partial.sums[kDeviationSquare][at] += double(deviation_square[part][lane]);
        low[at] = smallest[part][lane];
        high[at] = largest[part][lane];
        all_kinds += kinds[part][lane];
      }
    }
    partial.extend(low, high);
    partial.slots[kTokens] += positives(all_kinds) + negatives(all_kinds);
  }
};

// Goes through a tile whose rows are loaded (see load_rows) and calls each(i, part, kind, x, ratio) for every vector. False:
// the tile is not plain after all, and nothing was counted.
template <bool kMasked, class Each>
HPO_INLINE bool sweep_plain(const PolicyLossArgs& args, int64_t first, int n, Tile& tile, Partial& partial, Each& each) {
  const float* logp = args.logp + first;
  const float* old_logp = args.old_logp ? args.old_logp + first : logp;  // on-policy: x = 0, or NaN where logp is
  const uint8_t* mask = kMasked ? args.mask + first : nullptr;
  PlainSums sums;
  for (int tokens = 0; tokens < n; tokens += kLanes) {  // what lies behind n is absent
    for (int part = 0; part < kParts; ++part) {
      const int i = tokens + part * kWidth;
      Ints kind = load_lanes<Ints>(tile.kind + i);
      if (kMasked) {
        kind = keep_where(mask + i, kind);
        store_lanes(kind, tile.kind + i);
      }
      const Floats x = keep_if(kind != kAbsent, load_lanes<Floats>(logp + i) - load_lanes<Floats>(old_logp + i));
      const Floats ratio = exp(x);
      sums.add(part, kind, x, ratio);
      each(i, part, kind, x, ratio);
    }
  }
  if (!sums.ordinary()) return false;
  sums.add_to(partial);
  return true;
}

// Whether a tile can be read by whole vectors: what lies behind it is other tokens, which are absent here.
inline bool has_whole_vectors(const PolicyLossArgs& args, int64_t first, int n) {
  return first + (n + kLanes - 1) / kLanes * kLanes <= args.tokens;
}

// A plain tile of the first of two sweeps: its log-ratios are kept.
struct PlainLogRatios {
  float* x;
  HPO_INLINE void operator()(int i, int, Ints, Floats each, Floats) { store_lanes(each, x + i); }
};

inline bool measure_plain(const Call& call, int64_t first, int n, const Segments& segments, Tile& tile, uint8_t* seen,
                          Partial& partial) {
  const PolicyLossArgs& args = call.args;
  if (!has_whole_vectors(args, first, n) || load_rows(args, first, n, segments, tile)) return false;
  for (int i = n; i % kLanes != 0; ++i) tile.kind[i] = kAbsent;
  PlainLogRatios keep = {tile.x};
  const bool plain = args.mask ? sweep_plain<true>(args, first, n, tile, partial, keep)
                               : sweep_plain<false>(args, first, n, tile, partial, keep);
  if (!plain) return false;
  tile.exceptional = false;
  tile.chosen = tile.kind;
  mark_rows(segments, tile.kind, seen);
  return true;
}

}  // namespace hpo::HPO_ISA
