// How a pack of ragged rows is cut into work. A row is cut into tiles of kTile tokens from its own first token, so that what
// a tile computes depends on the row alone; a warp takes a tile, so that one row of a million tokens keeps as many warps
// busy as a thousand rows of a thousand. The host need not read the offsets for that:
//
//   unit s < rows    is the first tile of row s;
//   unit rows + j    is the further tile that goes with token (j + 1) * kTile of the pack. Behind its first token a row
//                    contains at least as many multiples of kTile as it has further tiles; a search finds the row.
#pragma once
#include "hpo/gates.h"
#include "warp.cuh"

namespace hpo {

constexpr int kTile = 512;

struct Pack {
  const int64_t* cu_seqlens;  // [rows + 1]
  int64_t tokens;
  int rows;
};

HPO_INLINE int64_t tiles_of(int64_t tokens) { return (tokens + kTile - 1) / kTile; }
HPO_INLINE int64_t units_of(int64_t tokens, int64_t rows) { return rows + tiles_of(tokens); }

// Where the further tiles of a row begin among the units.
HPO_INLINE int further_unit(const Pack& pack, int64_t row_begin) { return pack.rows + int(row_begin / kTile); }

// The row that contains `token`, if offsets ascend and any does; 32 probes a step. `ascending` turns false where the probes
// show that they do not; up to 32 rows all offsets are probed.
__device__ __forceinline__ int find_row(const Pack& pack, int64_t token, bool& ascending) {
  int low = 0, high = pack.rows;
  while (high - low > 1) {
    const int step = (high - low + kWarp - 1) / kWarp;
    const int64_t probe = low + int64_t(lane()) * step;
    const int64_t offset = probe < high ? __ldg(pack.cu_seqlens + probe) : INT64_MAX;
    const int64_t offset_before = __shfl_up_sync(kFullWarp, offset, 1);
    if (__any_sync(kFullWarp, offset < offset_before)) ascending = false;
    low += max(__popc(__ballot_sync(kFullWarp, offset <= token)) - 1, 0) * step;
    high = min(low + step, high);
  }
  return low;
}

// The same for any offsets, slowly: among rows that claim a token the last one owns it. -1: no row does.
__device__ __forceinline__ int find_owner(const Pack& pack, int64_t token) {
  for (int row = pack.rows - 1; row >= 0; --row) {
    const Range range = row_range(pack.cu_seqlens, row, pack.tokens);
    if (range.begin <= token && token < range.end) return row;
  }
  return -1;
}

// The same in every lane, even where somebody writes offsets while they are read: lanes that disagreed would wait for each
// other.
__device__ __forceinline__ Range range_of_warp(const Pack& pack, int row) {
  const Range own = row_range(pack.cu_seqlens, row, pack.tokens);
  return {__shfl_sync(kFullWarp, own.begin, 0), __shfl_sync(kFullWarp, own.end, 0), own.bad};
}

// A tile of one row; or, with broken offsets, a whole row. length 0: nothing to do.
struct Unit {
  int row;
  int64_t begin, length;
};

__device__ __forceinline__ Unit get_unit(const Pack& pack, int index) {
  if (index < pack.rows) {
    const Range range = range_of_warp(pack, index);
    return {index, range.begin, min(range.end - range.begin, int64_t(kTile))};
  }
  const int64_t multiple = index - pack.rows + 1, token = multiple * kTile;
  if (pack.rows == 0 || token >= pack.tokens) return {};
  bool ascending = true;
  const int row = find_row(pack, token, ascending);
  const Range range = range_of_warp(pack, row);
  if (token <= range.begin || range.end <= token) return {};
  const int64_t begin = range.begin + (multiple - range.begin / kTile) * kTile;
  return {row, begin, min(max(range.end - begin, int64_t(0)), int64_t(kTile))};
}

// With a broken row anywhere a search may miss the others: then the first unit of a row is all of it.
__device__ __forceinline__ Unit get_unit_unordered(const Pack& pack, int index) {
  if (index >= pack.rows) return {};
  const Range range = range_of_warp(pack, index);
  return {index, range.begin, range.end - range.begin};
}

}  // namespace hpo
