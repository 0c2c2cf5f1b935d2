// Loss and metrics of policy_loss: from the tokens of a lane to the vector, every addition in an order that the sizes fix.
#pragma once
#include <cfloat>

#include "gates_tokens.cuh"
#include "grid.cuh"
#include "hpo/metrics.h"

namespace hpo {

// Sums that a lane keeps in float.
enum LaneSum { kX, kXSquare, kDeviation, kDeviationSquare, kS, kSSquare, kK3, kEntropySum };

// Counts of a lane, four to a register of a byte each: it meets at most kTile / 32 + 4 tokens of a tile.
enum Count { kValid, kChosen, kWithEntropy, kHighPositive = 4, kLowPositive, kLowNegative, kHighNegative };

// The places of a warp: sums, counts as Totals::merge leaves them with its lanes, and the rest. A lane finds its own without a
// table, whose results would be kept in registers through the loop over tokens.
enum Place { kCounts = 8, kOtherCounts = 12, kLossPlace = 16, kPenaltyPlace, kMinPlace, kMaxPlace, kPlaces };
__device__ constexpr int kPlaceOf[kMetrics] = {kCounts,           // kTokens
                                               kCounts + 1,       // kSelected
                                               -1,                // kRows: an event, as others without a place
                                               kLossPlace,
                                               kX,
                                               kXSquare,
                                               kDeviation,
                                               kDeviationSquare,
                                               kMinPlace,
                                               kMaxPlace,
                                               kCounts + 2,       // kClippedHighPositive
                                               kCounts + 3,       // kClippedLowPositive
                                               kOtherCounts + 2,  // kClippedLowNegative
                                               kOtherCounts + 3,  // kClippedHighNegative
                                               kS,
                                               kSSquare,
                                               kK3,
                                               kPenaltyPlace,
                                               kEntropySum,
                                               kOtherCounts,  // kEntropyTokens
                                               -1,
                                               -1,
                                               -1,
                                               -1};

// The sums of a lane over one tile.
struct TileTotals {
  HPO_SHARED_POINTER(int) events;  // [kMetrics], of the block: rare events take no registers
  float sums[8];
  unsigned counts[2];

  __device__ __forceinline__ explicit TileTotals(HPO_SHARED_POINTER(int) events) : events(events), sums(), counts() {}

  static __device__ __forceinline__ unsigned one(Count what) { return 1u << (8 * (what % 4)); }

  __device__ __forceinline__ void count(Count what, bool yes) { counts[what / 4] += yes ? one(what) : 0u; }

  // The addend is the same for all tokens of a row whose advantages have one sign.
  __device__ __forceinline__ void count_clipped(bool negative, bool below, bool above) {
    counts[1] += below ? (negative ? one(kLowNegative) : one(kLowPositive)) : 0u;
    counts[1] += above ? (negative ? one(kHighNegative) : one(kHighPositive)) : 0u;
  }

  // Whether any lane of the warp has counted a valid token.
  __device__ __forceinline__ bool has_valid() const { return __any_sync(kFullWarp, counts[0] != 0); }

  __device__ __forceinline__ void count_event(Metric slot, bool yes) {
    if (yes) atomicAdd(&events[slot], 1);
  }
};

// The shares of the tokens of a vector in the loss.
template <int WIDTH>
struct Shares {
  float loss[WIDTH], penalty[WIDTH];
};

// A quarter of the sums of a vector, because the sum of four finite numbers may overflow. The tokens are added in order; one
// that is left out adds 0.
struct Quarters {
  float loss, penalty;

  template <bool PENALTIES, int WIDTH>
  __device__ __forceinline__ void add(const Shares<WIDTH>& shares) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      loss = fused(0.25f, shares.loss[i], loss);
      if (PENALTIES) penalty = fused(0.25f, shares.penalty[i], penalty);
    }
  }
};

// A lane's share of the totals of a warp. The others are in the warp's places, for they would take registers from the tokens.
struct Totals {
  double loss, penalty;
  float smallest, largest;

  static __device__ __forceinline__ Totals empty(HPO_SHARED_POINTER(double) places) {
    if (lane() < kPlaces) places[lane()] = 0.0;
    __syncwarp();
    return {0.0, 0.0, INFINITY, -INFINITY};
  }

  template <bool PENALTIES>
  __device__ __forceinline__ void add(const Quarters& quarters) {
    loss = ::fma(4.0, double(quarters.loss), loss);
    if (PENALTIES) penalty = ::fma(4.0, double(quarters.penalty), penalty);
  }

  template <bool PENALTIES>
  __device__ __forceinline__ void add(const Shares<4>& shares) {
    Quarters quarters = {};
    quarters.add<PENALTIES>(shares);
    add<PENALTIES>(quarters);
  }

  // After the tile lane l holds the sum of sums[l / 4], and two counts: one, and the one after the next.
  static __device__ __forceinline__ void merge(TileTotals& tile, HPO_SHARED_POINTER(double) places) {
    const float sum = warp_sums(tile.sums);
    unsigned counts[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) counts[i] = tile.counts[i / 2] >> (8 * (i % 2)) & 0xFF00FFu;
    const unsigned held = warp_sums(counts);
    if (lane() % 4 == 0) places[lane() / 4] += double(sum);
    if (lane() % 8 == 0) {
      places[kCounts + lane() / 8] += double(held & 0xFFFFu);
      places[kOtherCounts + lane() / 8] += double(held >> 16);
    }
  }

  __device__ __forceinline__ void store(HPO_SHARED_POINTER(double) places) const {
    const double all_penalty = warp_sum(penalty), all_loss = warp_sum(loss) + all_penalty;
    const float minimum = warp_min(smallest), maximum = warp_max(largest);
    if (lane() == 0) {
      places[kLossPlace] = all_loss;
      places[kPenaltyPlace] = all_penalty;
      places[kMinPlace] = double(minimum);
      places[kMaxPlace] = double(maximum);
    }
  }
};

__device__ __forceinline__ double combine(int slot, double a, double b) {
  return slot == kLogRatioMin ? fmin(a, b) : (slot == kLogRatioMax ? fmax(a, b) : a + b);
}

__device__ __forceinline__ double neutral(int slot) {
  return slot == kLogRatioMin ? double(INFINITY) : (slot == kLogRatioMax ? -double(INFINITY) : 0.0);
}

// The block's total of one slot, from its warps [kWarps * kPlaces] and from its `events` [kMetrics].
__device__ __forceinline__ double block_total(int slot, HPO_SHARED_POINTER(double) warps, HPO_SHARED_POINTER(int) events) {
  const int place = kPlaceOf[slot];
  if (place < 0) return double(events[slot]);
  double total = warps[place];
  for (int warp = 1; warp < kWarps; ++warp) total = combine(slot, total, warps[warp * kPlaces + place]);
  return total;
}

// One block's share of loss and metrics.
__device__ __forceinline__ void store_block(const Totals& totals, HPO_SHARED_POINTER(double) warps,
                                            HPO_SHARED_POINTER(int) events, double* partial) {
  totals.store(warps + warp_in_block() * kPlaces);
  __syncthreads();
  if (threadIdx.x < kMetrics) partial[threadIdx.x] = block_total(int(threadIdx.x), warps, events);
}

// Loss and metrics from the partials of all blocks, by one block.
__device__ __forceinline__ void finish(const double* partials, int blocks, float* loss, double* metrics) {
  constexpr int kParts = kThreads / kMetrics;
  HPO_SHARED(double, parts, [kParts][kMetrics]);
  const int slot = int(threadIdx.x) % kMetrics, part = int(threadIdx.x) / kMetrics;
  if (part < kParts) {
    double total = neutral(slot);
#pragma unroll 8
    for (int block = part; block < blocks; block += kParts) {
      total = combine(slot, total, __ldcg(partials + block * kMetrics + slot));
    }
    parts[part][slot] = total;
  }
  __syncthreads();
  if (part != 0) return;
  double total = neutral(slot);
  for (int i = 0; i < kParts; ++i) total = combine(slot, total, parts[i][slot]);
  if (slot == kLoss) {
    total = fmin(fmax(total, -double(FLT_MAX)), double(FLT_MAX));
    *loss = float(total);
  }
  metrics[slot] = total;
}

}  // namespace hpo
