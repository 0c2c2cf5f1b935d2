// row_counts in one launch: valid tokens of every row. The definition is hpo_core/reference/segments.py.
//
// A block takes eight neighbouring rows. Each of its warps counts one of them if it is short; long ones all warps count
// together, so that one long row among short ones does not keep a single warp busy.
#include "units.cuh"

namespace hpo {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int64_t kLong = 16384;  // masks of this many tokens are 32 loads of a warp

// Bytes that are not 0. Adding 0x7F carries into the top bit of a byte unless its lower bits are 0.
__device__ __forceinline__ int count_bytes(unsigned four) {
  return __popc((((four & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | four) & 0x80808080u);
}

// Tokens of [begin, end) that are not masked, as far as this thread out of `threads` counts them.
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

__global__ void __launch_bounds__(kThreads) count_rows(const RowCountsArgs args) {
  HPO_SHARED(int64_t, partial, [kWarps]);
  HPO_SHARED(bool, is_long, [kWarps]);
  const Pack pack = {args.cu_seqlens, args.tokens, int(args.rows)};
  for (int first = int(blockIdx.x) * kWarps; first < pack.rows; first += int(gridDim.x) * kWarps) {
    const int row = first + warp_in_block();
    bool counts_alone = row < pack.rows;
    if (counts_alone) {
      const Range range = row_range(pack.cu_seqlens, row, pack.tokens);
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

}  // namespace
}  // namespace hpo

extern "C" int hpo_row_counts(const hpo::RowCountsArgs* args, int64_t context) {
  using namespace hpo;
  if (args->rows == 0) return 0;
  const int64_t blocks = std::min((args->rows + kWarps - 1) / kWarps, int64_t(1) << 16);
  HPO_LAUNCH(count_rows, dim3(unsigned(blocks)), dim3(kThreads), 0, reinterpret_cast<cudaStream_t>(context), *args);
  return int(cudaGetLastError());
}
