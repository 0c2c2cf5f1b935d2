// row_counts, with weights or without, row_spans and recurrence, each in one launch. The definitions are
// hpo_core/reference/segments.py.
//
// In row_counts a block takes eight neighbouring rows. A warp counts a short row alone; all warps count a long row together,
// so that one long row among short ones does not keep a single warp busy. With weights blocks wait for each other: the number
// that divides is the sum of all.
#include "hpo/segments.h"

#include <cfloat>

#include "grid.cuh"
#include "units.cuh"

namespace hpo {
namespace {

constexpr int64_t kLong = 16384;  // tokens, a mask of 32 loads of a warp

// The number of bytes that are not 0. Adding 0x7F carries into the top bit of a byte unless its lower bits are 0.
__device__ __forceinline__ int count_bytes(unsigned four) {
  return __popc((((four & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | four) & 0x80808080u);
}

// The number of unmasked tokens in [begin, end) that this thread, one of `threads`, counts.
__device__ __forceinline__ int64_t count_valid(const uint8_t* mask, int64_t begin, int64_t end, int thread, int threads) {
  const uint8_t* const aligned = mask + begin - reinterpret_cast<uintptr_t>(mask + begin) % 16;
  int64_t count = 0;
#pragma unroll 4
  for (const uint8_t* at = aligned + int64_t(thread) * 16; at < mask + end; at += int64_t(threads) * 16) {
    if (mask + begin <= at && at + 16 <= mask + end) {
      const uint4 bytes = __ldg(reinterpret_cast<const uint4*>(at));
      count += count_bytes(bytes.x) + count_bytes(bytes.y) + count_bytes(bytes.z) + count_bytes(bytes.w);
    } else {
      for (int i = 0; i < 16; ++i) {
        if (mask + begin <= at + i && at + i < mask + end) count += __ldg(at + i) != 0;
      }
    }
  }
  return count;
}

// The same for broken offsets, which may give a token to several rows: it belongs to the last of them.
__device__ __forceinline__ int64_t count_owned(const Pack& pack, const uint8_t* mask, int row, const Range& range) {
  int64_t count = 0;
  for (int64_t token = range.begin + lane(); token < range.end; token += kWarp) {
    count += (!mask || mask[token]) && find_owner(pack, token) == row;
  }
  return warp_sum(count);
}

__device__ __forceinline__ void count_rows_of_block(const RowCountsArgs& args) {
  HPO_SHARED(int64_t, partial, [kWarps]);
  HPO_SHARED(bool, is_long, [kWarps]);
  const Pack pack = {args.cu_seqlens, args.tokens, int(args.rows)};
  for (int first = int(blockIdx.x) * kWarps; first < pack.rows; first += int(gridDim.x) * kWarps) {
    const int row = first + warp_in_block();
    bool counts_alone = row < pack.rows;
    if (counts_alone) {
      const Range range = range_of_warp(pack, row);
      bool ascending = true;
      find_row(pack, range.begin, ascending);
      counts_alone = !ascending || !args.mask || range.end - range.begin <= kLong;
      if (counts_alone) {
        const int64_t count = !ascending   ? count_owned(pack, args.mask, row, range)
                              : !args.mask ? range.end - range.begin
                                           : warp_sum(count_valid(args.mask, range.begin, range.end, lane(), kWarp));
        if (lane() == 0) args.counts[row] = count;
      }
    }
    if (lane() == 0) is_long[warp_in_block()] = row < pack.rows && !counts_alone;
    __syncthreads();
    for (int i = 0; i < kWarps; ++i) {
      if (!is_long[i]) continue;
      const Range range = row_range(pack.cu_seqlens, first + i, pack.tokens);
      const int64_t count = warp_sum(count_valid(args.mask, range.begin, range.end, int(threadIdx.x), kThreads));
      if (lane() == 0) partial[warp_in_block()] = count;
      __syncthreads();
      if (threadIdx.x == 0) {
        int64_t total = 0;
        for (int warp = 0; warp < kWarps; ++warp) total += partial[warp];
        args.counts[first + i] = total;
      }
      __syncthreads();
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads) count_rows(const RowCountsArgs args) { count_rows_of_block(args); }

// Four blocks to a multiprocessor: the assembler would keep to the registers of eight, and spill.
__global__ void __launch_bounds__(kThreads, 4) weigh_rows(const RowCountsArgs args) {
  int64_t* const total = args.counts + args.rows;
  if (blockIdx.x == 0 && threadIdx.x == 0) *total = 0;
  count_rows_of_block(args);
  int64_t sum = 0;  // over the rows of this block
  if (threadIdx.x < kWarps) {
#pragma unroll 1
    for (int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x; row < args.rows; row += int64_t(gridDim.x) * kWarps) {
      sum += share_of_row(args.denominator, args.counts[row]);
    }
  }
  sum = warp_sum(sum);
  sync_grid();
  if (threadIdx.x == 0 && sum > 0) atomicAdd(total, sum);  // integers: no order of additions shows
  sync_grid();
  const int64_t stride = int64_t(gridDim.x) * kThreads;
#pragma unroll 1
  for (int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x; row < args.rows; row += stride) {
    args.weights[row] = row_weight(args, *total, args.counts[row]);
  }
}

// The first and last token in [begin, end) of 16 aligned ones that is valid; {end, -1} if none is.
struct Ends {
  int64_t first, last;
};

__device__ __forceinline__ Ends ends_of_sixteen(const uint8_t* mask, int64_t begin, int64_t end, int64_t token) {
  unsigned four[4] = {};
  if (begin <= token && token + 16 <= end) {
    const uint4 bytes = __ldg(reinterpret_cast<const uint4*>(mask + token));
    four[0] = bytes.x, four[1] = bytes.y, four[2] = bytes.z, four[3] = bytes.w;
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (begin <= token + i && token + i < end) four[i / 4] |= unsigned(__ldg(mask + token + i) != 0) << (i % 4 * 8);
    }
  }
  Ends ends = {end, -1};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!four[i]) continue;
    const int64_t last = token + 4 * i + (31 - __clz(int(four[i]))) / 8;
    ends = {ends.last < 0 ? token + 4 * i + (__ffs(int(four[i])) - 1) / 8 : ends.first, last};
  }
  return ends;
}

// A warp reads the mask of a row, 512 tokens at once, from either end up to a valid token.
__global__ void __launch_bounds__(kThreads) find_spans(const RowSpansArgs args) {
  const Pack pack = {args.cu_seqlens, args.tokens, int(args.rows)};
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    args.spans[0] = args.cu_seqlens[0], args.spans[2 * args.rows + 1] = args.cu_seqlens[args.rows];
  }
  const int64_t step = kWarp * 16;
#pragma unroll 1
  for (int row = int(blockIdx.x) * kWarps + warp_in_block(); row < pack.rows; row += int(gridDim.x) * kWarps) {
    const Range range = range_of_warp(pack, row);
    const int64_t lead = int64_t(reinterpret_cast<uintptr_t>(args.mask + range.begin) % 16);
    const int64_t aligned = range.begin - lead + lane() * 16;
    int64_t begin = range.end, end = range.begin, from = aligned;
    for (unsigned hits = 0; !hits && from - lane() * 16 < range.end; from += step) {
      const int64_t first = ends_of_sixteen(args.mask, range.begin, range.end, from).first;
      hits = __ballot_sync(kFullWarp, first < range.end);
      if (hits) begin = __shfl_sync(kFullWarp, first, __ffs(int(hits)) - 1);
    }
    if (begin < range.end) {
      int tile = int((range.end - range.begin + lead - 1) / step);
      for (unsigned hits = 0; !hits && tile >= 0; --tile) {  // a mask that changes in between ends it, too
        const int64_t last = ends_of_sixteen(args.mask, range.begin, range.end, aligned + tile * step).last;
        hits = __ballot_sync(kFullWarp, last >= 0);
        if (hits) end = __shfl_sync(kFullWarp, last, 31 - __clz(int(hits))) + 1;
      }
    }
    int64_t edge = begin == range.end ? range.begin : lane() ? end : begin;
    // Read again: a register more, held over the loops, would make the compiler spill.
    if (row_range(pack.cu_seqlens, row, pack.tokens).bad) edge = lane() ? -1 : args.tokens + 1;
    if (lane() < 2) args.spans[2 * int64_t(row) + 1 + lane()] = edge;
  }
}

// The composed map of units, from the last one to the first, of the y after them: add + gain * y.
struct Affine {
  double add, gain;

  __device__ __forceinline__ double operator()(double following) const { return add + gain * following; }

  __device__ __forceinline__ Affine after(const Affine& earlier) const {
    return {(*this)(earlier.add), clamp(gain * earlier.gain, -DBL_MAX, DBL_MAX)};  // 0 times it stays 0
  }
};

__device__ __forceinline__ Affine shuffle_up(const Affine& map, int step) {
  return {__shfl_up_sync(kFullWarp, map.add, step), __shfl_up_sync(kFullWarp, map.gain, step)};
}

constexpr int kSteps = 4;  // neighbouring units of a lane
constexpr int kChunk = kWarp * kSteps;

// One warp scans a row. Chunks start at the row's end, so that bits do not depend on the position of the row.
__device__ __forceinline__ void scan_row(const RecurrenceArgs& args, const Pack& pack, int index) {
  const Range row = range_of_warp(pack, index);
  bool ascending = true;
  find_row(pack, row.begin, ascending);
  double following = 0.0;
#pragma unroll 1
  for (int64_t end = row.end; end > row.begin; end -= kChunk) {
    const int64_t last = end - 1 - lane() * kSteps;
    Affine steps[kSteps], all = {0.0, 1.0};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int64_t unit = last - i;
      steps[i] = {0.0, 0.0};
      if (unit >= row.begin) steps[i] = {__ldg(args.values + unit), __ldg(args.gains + unit)};
      all = steps[i].after(all);
    }
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const Affine earlier = shuffle_up(all, step);
      if (lane() >= step) all = all.after(earlier);
    }
    const Affine before = shuffle_up(all, 1);
    double scanned = lane() == 0 ? following : before(following);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      scanned = steps[i](scanned);
      const int64_t unit = last - i;
      if (unit < row.begin || (!ascending && find_owner(pack, unit) != index)) continue;
      args.scanned[unit] = scanned + 0.0;  // never -0
    }
    following = __shfl_sync(kFullWarp, scanned, kWarp - 1);
  }
}

// Offsets are data: units in no row are unknown before all rows are read, so zeros are written everywhere first.
__global__ void __launch_bounds__(kThreads) scan_rows(const RecurrenceArgs args) {
  clear(args.scanned, args.units);
  sync_grid();
  const Pack pack = {args.cu_seqlens, args.units, int(args.rows)};
#pragma unroll 1
  for (int row = int(blockIdx.x) * kWarps + warp_in_block(); row < pack.rows; row += int(gridDim.x) * kWarps) {
    scan_row(args, pack, row);
  }
}

}  // namespace
}  // namespace hpo

extern "C" int hpo_row_counts(const hpo::RowCountsArgs* args, int64_t context) {
  using namespace hpo;
  if (args->rows == 0) return 0;
  const auto stream = reinterpret_cast<cudaStream_t>(context);
  if (args->weights) {
    const dim3 blocks(unsigned(blocks_together<weigh_rows>(args->rows * kWarp)));
    HPO_LAUNCH_TOGETHER(weigh_rows, blocks, dim3(kThreads), 0, stream, *args);
  } else {
    HPO_LAUNCH(count_rows, blocks_of((args->rows + kWarps - 1) / kWarps), dim3(kThreads), 0, stream, *args);
  }
  return int(cudaGetLastError());
}

extern "C" int hpo_row_spans(const hpo::RowSpansArgs* args, int64_t context) {
  using namespace hpo;
  const dim3 blocks = blocks_of(std::max((args->rows + kWarps - 1) / kWarps, int64_t(1)));
  HPO_LAUNCH(find_spans, blocks, dim3(kThreads), 0, reinterpret_cast<cudaStream_t>(context), *args);
  return int(cudaGetLastError());
}

extern "C" int hpo_recurrence(const hpo::RecurrenceArgs* args, int64_t context) {
  using namespace hpo;
  if (args->units == 0) return 0;
  const dim3 blocks(unsigned(blocks_together<scan_rows>(std::max(args->units / kSteps, args->rows * kWarp))));
  HPO_LAUNCH_TOGETHER(scan_rows, blocks, dim3(kThreads), 0, reinterpret_cast<cudaStream_t>(context), *args);
  return int(cudaGetLastError());
}
