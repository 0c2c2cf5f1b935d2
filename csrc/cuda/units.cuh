// Units of work for a pack of ragged rows. A row is cut into tiles of kTile tokens from its own first token, so that the
// results of a tile depend on the row alone. A warp takes a tile, so that one row of a million tokens keeps as many warps
// busy as a thousand rows of a thousand. The host need not read the offsets for that:
//
//   unit s < rows    is the first tile of row s;
//   unit rows + j    is the further tile that belongs to token (j + 1) * kTile of the pack. After its first token a row
//                    contains at least as many multiples of kTile as it has further tiles; a search finds the row.
#pragma once
#include "hpo/rows.h"
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

// The row that contains `token`, if one does and offsets ascend; 32 probes a step. `ascending` becomes false if the probes
// show that offsets do not ascend; up to 32 rows all offsets are probed. The read-only path is not for them: the offsets of
// leaves may be a list that the same launch has made.
__device__ __forceinline__ int find_row(const Pack& pack, int64_t token, bool& ascending) {
  int low = 0, high = pack.rows;
  while (high - low > 1) {
    const int step = (high - low + kWarp - 1) / kWarp;
    const int64_t probe = low + int64_t(lane()) * step;
    const int64_t offset = probe < high ? pack.cu_seqlens[probe] : INT64_MAX;
    const int64_t offset_before = __shfl_up_sync(kFullWarp, offset, 1);
    if (__any_sync(kFullWarp, offset < offset_before)) ascending = false;
    low += max(__popc(__ballot_sync(kFullWarp, offset <= token)) - 1, 0) * step;
    high = min(low + step, high);
  }
  return low;
}

// The same for any offsets, slowly: the last row that contains a token owns it. -1: no row does.
__device__ __forceinline__ int find_owner(const Pack& pack, int64_t token) {
#pragma unroll 1
  for (int row = pack.rows - 1; row >= 0; --row) {
    const Range range = row_range(pack.cu_seqlens, row, pack.tokens);
    if (range.begin <= token && token < range.end) return row;
  }
  return -1;
}

// The rows of neighbouring tokens, if offsets ascend.
struct RowSpan {
  int first, last;
  bool ascending;
};

// The rows of the tokens [begin, end). A whole warp calls this.
__device__ __forceinline__ RowSpan span_of(const Pack& pack, int64_t begin, int64_t end) {
  RowSpan rows = {0, 0, true};
  rows.first = find_row(pack, begin, rows.ascending);
  rows.last = find_row(pack, end - 1, rows.ascending);
  return rows;
}

// The row that contains one of these tokens, if one does.
HPO_INLINE int row_in(const Pack& pack, const RowSpan& rows, int64_t token) {
  int low = rows.first, high = rows.last + 1;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (pack.cu_seqlens[middle] <= token) low = middle;
    else high = middle;
  }
  return low;
}

// The range of a row, the same in every lane even if offsets change during the read: lanes that disagreed would wait for
// each other.
__device__ __forceinline__ Range range_of_warp(const Pack& pack, int row) {
  const Range own = row_range(pack.cu_seqlens, row, pack.tokens);
  return {__shfl_sync(kFullWarp, own.begin, 0), __shfl_sync(kFullWarp, own.end, 0), own.bad};
}

// A tile of one row. length 0: nothing to do.
struct Unit {
  int row, length;
  int64_t begin;
};

HPO_INLINE int tile_length(int64_t tokens) { return int(tokens < kTile ? (tokens > 0 ? tokens : 0) : kTile); }

__device__ __forceinline__ Unit get_unit(const Pack& pack, int index) {
  if (index < pack.rows) {
    const Range range = range_of_warp(pack, index);
    return {index, tile_length(range.end - range.begin), range.begin};
  }
  const int64_t multiple = index - pack.rows + 1, token = multiple * kTile;
  if (pack.rows == 0 || token >= pack.tokens) return {};
  bool ascending = true;
  const int row = find_row(pack, token, ascending);
  const Range range = range_of_warp(pack, row);
  if (token <= range.begin || range.end <= token) return {};
  const int64_t begin = range.begin + (multiple - range.begin / kTile) * kTile;
  return {row, tile_length(range.end - begin), begin};
}

// With broken offsets a search may miss rows, so the first unit of a row has all its tiles.
__device__ __forceinline__ Unit get_unit_unordered(const Pack& pack, int index, int tile) {
  if (index >= pack.rows) return {};
  const Range range = range_of_warp(pack, index);
  const int64_t begin = range.begin + int64_t(tile) * kTile;
  return {index, tile_length(range.end - begin), begin};
}

// Whether a row behind the unit's reaches into the unit: the later row owns the tokens of both.
__device__ __forceinline__ bool is_shared(const Pack& pack, const Unit& unit) {
  bool any = false;
#pragma unroll 1
  for (int row = unit.row + 1 + lane(); row < pack.rows; row += kWarp) {
    const Range range = row_range(pack.cu_seqlens, row, pack.tokens);
    any |= range.begin < unit.begin + unit.length && unit.begin < range.end;
  }
  return __any_sync(kFullWarp, any);
}

}  // namespace hpo
