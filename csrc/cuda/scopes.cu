// order_statistics in one launch: a block for a scope, or all blocks for the only one; where scopes are short on average, a
// warp for each short one. The definition is hpo_core/reference/scopes.py.
//
// Radix selection on order_key, 11, 11 and 10 bits, with a histogram in shared memory; a warp holds the keys of its scope in
// registers and decides bit by bit. Counts are integers, so results do not depend on the order.
#include "bins.cuh"
#include "grid.cuh"
#include "hpo/api/scopes.h"
#include "hpo/entropy.h"
#include "hpo/rows.h"

namespace hpo {
namespace {

constexpr int kBins = 2048;

// The number of threads before this one in its block with `flag`, and that of all; the call is a block barrier.
struct Count {
  int before, all;
};

__device__ __forceinline__ Count count_flags(bool flag) {
  HPO_SHARED(int, of_warp, [kBinThreads / kWarp]);
  const unsigned flags = __ballot_sync(kFullWarp, flag);
  if (lane() == 0) of_warp[warp_in_block()] = __popc(flags);
  __syncthreads();
  Count count = {__popc(flags & ((1u << lane()) - 1u)), 0};
  for (int warp = 0; warp < kBinThreads / kWarp; ++warp) {
    if (warp < warp_in_block()) count.before += of_warp[warp];
    count.all += of_warp[warp];
  }
  __syncthreads();
  return count;
}

// The blocks that work on a scope. Each takes every `size`-th segment of the list. The counts that several blocks exchange are
// in global memory.
struct Team {
  int member = 0, size = 1;
  unsigned* histograms = nullptr;        // [3][kBins]
  unsigned long long* errors = nullptr;  // [1]
  unsigned long long* ties = nullptr;    // [segments], of each place of the list
  int64_t* k = nullptr;                  // [1], as one thread has read it

  int64_t place(void* base, int64_t segments) {
    Placement placement(base);
    placement.take(histograms, 3 * kBins), placement.take(errors, 1), placement.take(ties, segments);
    placement.take(k, 1);
    return placement.bytes();
  }
};

struct Places {
  int64_t first, end;
};

__device__ __forceinline__ Places places_of(const OrderStatisticsArgs& args, int64_t scope) {
  if (!args.begin) return {scope, scope + 1};
  return {args.begin[scope], args.begin[scope + 1]};
}

// Calls visit(token, exists, value) for a segment, all threads of the block together. One thread reads the offsets: threads
// that disagreed would wait for each other.
template <class Visit>
__device__ __forceinline__ void visit_segment(const OrderStatisticsArgs& args, int64_t place, Visit visit) {
  HPO_SHARED(int64_t, range, [2]);
  if (threadIdx.x == 0) {
    const Range read = row_range(args.offsets, args.order ? args.order[place] : place, args.tokens);
    range[0] = read.begin, range[1] = read.end;
  }
  __syncthreads();
  const int64_t end = range[1];
#pragma unroll 1
  for (int64_t base = range[0]; base < end; base += kBinThreads) {
    const int64_t token = base + threadIdx.x;
    const float value = token < end ? args.values[token] : 0.0f;  // this load does not wait for the mask
    visit(token, token < end && (!args.mask || args.mask[token]), value);
  }
  __syncthreads();
}

// Counts one digit of the keys that continue `prefix` in all blocks of the team; `shift` bits follow the digit. Returns the
// errors that this thread saw.
template <int BITS, bool TOGETHER>
__device__ __forceinline__ int64_t count_digit(const OrderStatisticsArgs& args, const Team& team, const Places& places,
                                               unsigned prefix, int shift, HPO_SHARED_POINTER(unsigned) histogram) {
  clear_histogram(histogram, kBins);
  int64_t errors = 0;
#pragma unroll 1
  for (int64_t place = places.first + team.member; place < places.end; place += team.size) {
    visit_segment(args, place, [&](int64_t, bool exists, float value) {
      errors += exists && !is_finite(value) && value != -INFINITY;
      const unsigned key = order_key(value);
      const bool continues = shift + BITS == 32 || key >> (shift + BITS) % 32 == prefix;
      count_bin(histogram, exists && is_finite(value) && continues, key >> shift & ((1u << BITS) - 1u));
    });
  }
  __syncthreads();
  if constexpr (TOGETHER) {
    unsigned* const all = team.histograms + (shift == 21 ? 0 : (shift == 10 ? 1 : 2)) * kBins;
    for (int i = int(threadIdx.x); i < kBins; i += kBinThreads) {
      if (histogram[i] > 0) atomicAdd(&all[i], histogram[i]);
    }
    const int64_t of_warp = warp_sum(errors);
    if (shift == 21 && lane() == 0 && of_warp > 0) atomicAdd(team.errors, static_cast<unsigned long long>(of_warp));
    sync_grid();
    for (int i = int(threadIdx.x); i < kBins; i += kBinThreads) histogram[i] = __ldcg(all + i);
    __syncthreads();
  }
  return errors;
}

// The selected scores of the least key are the first `needed` ones in the order of the list.
__device__ __forceinline__ void select_alone(const OrderStatisticsArgs& args, const Places& places, unsigned least,
                                             int64_t needed) {
#pragma unroll 1
  for (int64_t place = places.first; place < places.end; ++place) {
    visit_segment(args, place, [&](int64_t token, bool exists, float value) {
      const bool counts = exists && is_finite(value);
      const unsigned key = order_key(value);
      const Count ties = count_flags(counts && key == least);
      if (counts) args.selected[token] = key > least || (key == least && ties.before < needed);
      needed = max(needed - ties.all, int64_t(0));
    });
  }
}

// The same for all blocks: first the ties of every segment are counted, and then each segment knows how many of them it
// selects.
__device__ __forceinline__ void select_together(const OrderStatisticsArgs& args, const Team& team, const Places& places,
                                                unsigned least, int64_t needed) {
#pragma unroll 1
  for (int64_t place = places.first + team.member; place < places.end; place += team.size) {
    int64_t ties = 0;
    visit_segment(args, place, [&](int64_t token, bool exists, float value) {
      const bool counts = exists && is_finite(value);
      const unsigned key = order_key(value);
      ties += count_flags(counts && key == least).all;
      if (counts) args.selected[token] = key > least;
    });
    if (threadIdx.x == 0) team.ties[place] = static_cast<unsigned long long>(ties);
  }
  sync_grid();
  int64_t counted = places.first;
#pragma unroll 1
  for (int64_t place = places.first + team.member; place < places.end && needed > 0; place += team.size) {
    int64_t before = 0;
    for (int64_t base = counted; base < place; base += kBinThreads) {
      const int64_t other = base + threadIdx.x;
      HPO_SHARED(unsigned long long, sum, );
      if (threadIdx.x == 0) sum = 0;
      __syncthreads();
      const int64_t of_warp = warp_sum(other < place ? int64_t(__ldcg(team.ties + other)) : int64_t(0));
      if (lane() == 0 && of_warp > 0) atomicAdd(&sum, static_cast<unsigned long long>(of_warp));
      __syncthreads();
      before += int64_t(sum);
      __syncthreads();
    }
    counted = place;
    needed = max(needed - before, int64_t(0));
    if (needed == 0 || __ldcg(team.ties + place) == 0) continue;
    int64_t left = needed;
    visit_segment(args, place, [&](int64_t token, bool exists, float value) {
      const bool tied = exists && is_finite(value) && order_key(value) == least;
      const Count ties = count_flags(tied);
      if (tied && ties.before < left) args.selected[token] = 1;
      left = max(left - ties.all, int64_t(0));
    });
  }
}

template <bool TOGETHER>
__device__ __forceinline__ void scan_scope(const OrderStatisticsArgs& args, const Team& team, int64_t scope) {
  HPO_SHARED(unsigned, histogram, [kBins]);
  HPO_SHARED(unsigned long long, totals, [2]);
  HPO_SHARED(Places, places, );
  HPO_SHARED(int64_t, k, );
  // One thread reads places and k, before the barrier of clear_histogram: threads that disagreed would wait for each other.
  if (threadIdx.x == 0) {
    places = places_of(args, scope);
    if (args.k) k = TOGETHER ? __ldcg(team.k) : args.k[scope];
  }
  const auto count_of = [&](int bin) { return int64_t(histogram[bin]); };
  int64_t own = 0, errors = count_digit<11, TOGETHER>(args, team, places, 0, 21, histogram);
  if (threadIdx.x == 0) totals[0] = 0, totals[1] = TOGETHER ? __ldcg(team.errors) : 0;
  __syncthreads();
  for (int i = int(threadIdx.x); i < kBins; i += kBinThreads) own += histogram[i];
  own = warp_sum(own), errors = warp_sum(errors);
  if (lane() == 0) {
    atomicAdd(&totals[0], static_cast<unsigned long long>(own));
    if (!TOGETHER) atomicAdd(&totals[1], static_cast<unsigned long long>(errors));
  }
  __syncthreads();
  const int64_t population = int64_t(totals[0]);
  const bool writes = threadIdx.x == 0 && team.member == 0;
  if (writes && args.counts) args.counts[2 * scope] = population, args.counts[2 * scope + 1] = int64_t(totals[1]);
  if (writes && args.thresholds) args.thresholds[scope] = NAN;
  __syncthreads();
  const int64_t wanted = args.k ? max(int64_t(0), min(k, population)) : 1;
  if (population == 0 || wanted == 0) return;
  const int64_t index = args.k ? population - wanted : order_index(args.numerator, args.denominator, args.rule, population);
  const Bin top = find_bin<kBins>(index, count_of);
  count_digit<11, TOGETHER>(args, team, places, unsigned(top.bin), 10, histogram);
  const Bin middle = find_bin<kBins>(top.index, count_of);
  const unsigned prefix = unsigned(top.bin) << 11 | unsigned(middle.bin);
  count_digit<10, TOGETHER>(args, team, places, prefix, 0, histogram);
  const Bin low = find_bin<kBins>(middle.index, count_of);
  const unsigned least = prefix << 10 | unsigned(low.bin);
  if (writes && args.thresholds) args.thresholds[scope] = from_order_key(least);
  if (!args.k) return;
  const int64_t needed = int64_t(histogram[low.bin]) - low.index;
  if constexpr (TOGETHER) select_together(args, team, places, least, needed);
  else select_alone(args, places, least, needed);
}

__global__ void __launch_bounds__(kBinThreads, 2) scan_scopes(const OrderStatisticsArgs args) {
  for (int64_t scope = blockIdx.x; scope < args.scopes; scope += gridDim.x) {
    scan_scope<false>(args, Team(), scope);
    __syncthreads();  // before the next scope's histogram
  }
}

// ----------------------------------------------------------------------------------------------------------- short scopes

constexpr int kHeld = 8, kShort = kHeld * kWarp;  // keys of a lane, tokens of a short scope
constexpr int64_t kShortOnAverage = kShort / 2;  // tokens: few scopes are long then, and a whole block takes each of them

// The tokens of a scope of one segment, or of none. One lane reads the offsets, as in visit_segment.
__device__ __forceinline__ Range range_of_scope(const OrderStatisticsArgs& args, int64_t scope, bool& is_short) {
  Range range = {};
  int several = 0;
  if (lane() == 0) {
    const Places places = places_of(args, scope);
    several = places.end - places.first > 1;
    if (places.end - places.first == 1) {
      range = row_range(args.offsets, args.order ? args.order[places.first] : places.first, args.tokens);
    }
  }
  range.begin = __shfl_sync(kFullWarp, range.begin, 0), range.end = __shfl_sync(kFullWarp, range.end, 0);
  is_short = !__shfl_sync(kFullWarp, several, 0) && range.end - range.begin <= kShort;
  return range;
}

// Whether the scope is short; it is done then.
__device__ __forceinline__ bool scan_short_scope(const OrderStatisticsArgs& args, int64_t scope) {
  bool is_short = false;
  const Range range = range_of_scope(args, scope, is_short);
  if (!is_short) return false;
  unsigned keys[kHeld];
  int population = 0, errors = 0;
  unsigned counts = 0;  // a bit for each key that is one
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int64_t token = range.begin + i * kWarp + lane();
    const bool exists = token < range.end && (!args.mask || args.mask[token]);
    const float value = exists ? args.values[token] : 0.0f;
    keys[i] = order_key(value);
    const bool is_key = exists && is_finite(value);
    counts |= is_key ? 1u << i : 0u;
    population += __popc(__ballot_sync(kFullWarp, is_key));
    errors += __popc(__ballot_sync(kFullWarp, exists && !is_key && value != -INFINITY));
  }
  const bool writes = lane() == 0;
  if (writes && args.counts) args.counts[2 * scope] = population, args.counts[2 * scope + 1] = errors;
  const int64_t wanted = args.k ? max(int64_t(0), min(args.k[scope], int64_t(population))) : 1;
  if (population == 0 || __shfl_sync(kFullWarp, int(wanted), 0) == 0) {
    if (writes && args.thresholds) args.thresholds[scope] = NAN;
    return true;
  }
  // The place of the sought key among those that share its bits so far.
  int index = int(args.k ? population - wanted : order_index(args.numerator, args.denominator, args.rule, population));
  index = __shfl_sync(kFullWarp, index, 0);
  unsigned least = 0;
  int equal = 0;  // keys with all bits of the sought one
#pragma unroll 1
  for (int bit = 31; bit >= 0; --bit) {
    int zeros = 0, ones = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const bool is_key = counts >> i & 1u;
      zeros += __popc(__ballot_sync(kFullWarp, is_key && keys[i] >> bit == least >> bit));
      ones += __popc(__ballot_sync(kFullWarp, is_key && keys[i] >> bit == (least >> bit | 1u)));
    }
    const bool is_one = index >= zeros;
    if (is_one) index -= zeros, least |= 1u << bit;
    equal = is_one ? ones : zeros;
  }
  if (writes && args.thresholds) args.thresholds[scope] = from_order_key(least);
  if (!args.k) return true;
  int needed = equal - index;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const bool is_key = counts >> i & 1u;
    const unsigned ties = __ballot_sync(kFullWarp, is_key && keys[i] == least);
    const bool is_needed = keys[i] == least && __popc(ties & ((1u << lane()) - 1u)) < needed;
    if (is_key) args.selected[range.begin + i * kWarp + lane()] = keys[i] > least || is_needed;
    needed -= __popc(ties);
  }
  return true;
}

__global__ void __launch_bounds__(kBinThreads) scan_short_scopes(const OrderStatisticsArgs args) {
  constexpr int kScopes = kBinThreads / kWarp;
  HPO_SHARED(bool, is_long, [kScopes]);
  for (int64_t first = int64_t(blockIdx.x) * kScopes; first < args.scopes; first += int64_t(gridDim.x) * kScopes) {
    const int64_t scope = first + warp_in_block();
    const bool done = scope >= args.scopes || scan_short_scope(args, scope);
    if (lane() == 0) is_long[warp_in_block()] = !done;
    __syncthreads();
    for (int i = 0; i < kScopes; ++i) {
      if (!is_long[i]) continue;
      scan_scope<false>(args, Team(), first + i);
      __syncthreads();  // before the next scope's histogram
    }
    __syncthreads();  // before `is_long` of the next scopes
  }
}

__global__ void __launch_bounds__(kBinThreads, 2) scan_only_scope(const OrderStatisticsArgs args, Team team) {
  team.member = int(blockIdx.x), team.size = int(gridDim.x);
  const int thread = int(blockIdx.x) * kBinThreads + int(threadIdx.x);
  for (int i = thread; i < 3 * kBins; i += int(gridDim.x) * kBinThreads) team.histograms[i] = 0;
  if (thread == 0) {
    *team.errors = 0;
    if (args.k) *team.k = args.k[0];
  }
  sync_grid();
  scan_scope<true>(args, team, 0);
}

// One scope of a single segment has nothing to share; order_statistic serves it.
bool is_shared(const OrderStatisticsArgs& args) { return args.scopes == 1 && args.segments > 1; }

}  // namespace
}  // namespace hpo

extern "C" int64_t hpo_order_statistics_workspace(int64_t, int64_t segments) { return hpo::Team().place(nullptr, segments); }

extern "C" int hpo_order_statistics(const hpo::OrderStatisticsArgs* args, int64_t context) {
  using namespace hpo;
  if (args->scopes == 0) return 0;
  const cudaStream_t stream = reinterpret_cast<cudaStream_t>(context);
  const dim3 threads(kBinThreads);
  if (is_shared(*args)) {
    Team team;
    team.place(args->workspace, args->segments);
    const int64_t wanted = std::min(args->segments, (args->tokens + kBinThreads - 1) / kBinThreads);
    const int most = blocks_together<scan_only_scope, kBinThreads>(wanted * kBinThreads);
    HPO_LAUNCH_TOGETHER(scan_only_scope, dim3(unsigned(most)), threads, 0, stream, *args, team);
  } else if (args->tokens <= args->scopes * kShortOnAverage) {
    const int64_t blocks = (args->scopes * kWarp + kBinThreads - 1) / kBinThreads;
    HPO_LAUNCH(scan_short_scopes, blocks_of(blocks), threads, 0, stream, *args);
  } else {
    HPO_LAUNCH(scan_scopes, blocks_of(args->scopes), threads, 0, stream, *args);
  }
  return int(cudaGetLastError());
}
