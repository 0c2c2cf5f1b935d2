// Loss and metrics of policy_loss: from the tokens of a lane to the vector, every addition in an order that the sizes fix.
#pragma once
#include <cfloat>

#include "gates_tokens.cuh"
#include "grid.cuh"
#include "hpo/metrics.h"

namespace hpo {

// Sums that a lane keeps in float, in the order of their metrics.
enum LaneSum { kX, kXSquare, kDeviation, kDeviationSquare, kS, kSSquare, kK3, kEntropySum };

// Counts, three to a register of ten bits each: a tile has fewer than 1024 tokens.
constexpr int kCountBits = 10, kCountsHeld = 3;
constexpr unsigned kCountMask = (1u << kCountBits) - 1;
__device__ constexpr int kCountSlots[4 * kCountsHeld] = {kTokens,
                                                         kSelected,
                                                         kEntropyTokens,  // counts[0]
                                                         kClippedHighPositive,
                                                         kClippedLowPositive,
                                                         kClippedLowNegative,
                                                         kClippedHighNegative,
                                                         kNanTokens,
                                                         kInfiniteTokens,
                                                         kBadAdvantages,
                                                         -1,
                                                         -1};
enum Count { kValid, kChosen, kWithEntropy, kHighPositive, kLowPositive, kLowNegative, kHighNegative, kNan, kInfinite, kBad };

// What a lane adds up over one tile: at most kTile / 32 + 4 additions each.
struct TileTotals {
  float sums[8];
  unsigned counts[4];

  __device__ __forceinline__ void count(Count what, bool yes) {
    counts[what / kCountsHeld] += yes ? 1u << (kCountBits * (what % kCountsHeld)) : 0u;
  }
};

// A lane's share of what a warp has added up. The rest is in the warp's slots: it would only take registers from the tokens.
struct Totals {
  double loss, penalty;
  float smallest, largest;

  static __device__ __forceinline__ Totals empty(HPO_SHARED_POINTER(double) slots) {
    if (lane() < kMetrics) slots[lane()] = 0.0;
    __syncwarp();
    return {0.0, 0.0, INFINITY, -INFINITY};
  }

  // After the tile lane l holds the sum of sums[l / 4] and of counts[l / 8].
  static __device__ __forceinline__ void merge(TileTotals& tile, HPO_SHARED_POINTER(double) slots) {
    const float sum = warp_sums(tile.sums);
    const unsigned held = warp_sums(tile.counts);
    if (lane() % 4 == 0) {
      const int i = lane() / 4;
      slots[i < kS ? kLogRatioSum + i : (i < kEntropySum ? kReferenceLogRatio + i - kS : int(kEntropy))] += double(sum);
    }
    if (lane() % 8 == 0) {
#pragma unroll
      for (int i = 0; i < kCountsHeld; ++i) {
        const int slot = kCountSlots[lane() / 8 * kCountsHeld + i];
        if (slot >= 0) slots[slot] += double(held >> (kCountBits * i) & kCountMask);
      }
    }
  }

  __device__ __forceinline__ void store(HPO_SHARED_POINTER(double) slots) const {
    const double all_penalty = warp_sum(penalty), all_loss = warp_sum(loss) + all_penalty;
    const float minimum = warp_min(smallest), maximum = warp_max(largest);
    if (lane() == 0) {
      slots[kLoss] = all_loss;
      slots[kPenalty] = all_penalty;
      slots[kLogRatioMin] = double(minimum);
      slots[kLogRatioMax] = double(maximum);
    }
  }
};

__device__ __forceinline__ double combine(int slot, double a, double b) {
  return slot == kLogRatioMin ? fmin(a, b) : (slot == kLogRatioMax ? fmax(a, b) : a + b);
}

__device__ __forceinline__ double neutral(int slot) {
  return slot == kLogRatioMin ? double(INFINITY) : (slot == kLogRatioMax ? -double(INFINITY) : 0.0);
}

// The block's total of one slot, from its warps [kWarps * kMetrics] and from what is counted row by row, `events` [kMetrics].
__device__ __forceinline__ double block_total(int slot, HPO_SHARED_POINTER(double) warps, HPO_SHARED_POINTER(int) events) {
  double total = warps[slot];
  for (int warp = 1; warp < kWarps; ++warp) total = combine(slot, total, warps[warp * kMetrics + slot]);
  return total + events[slot];
}

// Loss and metrics from the partials of all blocks, by one block.
__device__ __forceinline__ void finish(const double* partials, float* loss, double* metrics) {
  constexpr int kParts = kThreads / kMetrics;
  HPO_SHARED(double, parts, [kParts][kMetrics]);
  const int slot = int(threadIdx.x) % kMetrics, part = int(threadIdx.x) / kMetrics;
  if (part < kParts) {
    double total = neutral(slot);
#pragma unroll 8
    for (int block = part; block < int(gridDim.x); block += kParts) {
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
