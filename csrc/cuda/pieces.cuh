// Pieces of a hierarchy cut into work as units.cuh cuts rows: tiles of kTile tokens from the piece's own first token on, a tile
// to a warp. Pieces ascend and do not overlap, but leave gaps:
//
//   unit i < pieces    is the first tile of the i-th piece that counts;
//   unit pieces + j    is the further tile that goes with token (j + 1) * kTile of the pack.
#pragma once
#include "grid.cuh"
#include "hpo/hierarchy.h"
#include "units.cuh"

namespace hpo {

// Which pieces count, as those who checked them tell the rest.
struct Counted {
  int64_t* begin;  // [pieces]: of the pieces that count, where not all do
  int* list;  // [pieces]: these pieces
  int* count;  // how many
  int* broken;  // [blocks of the launch that checks]: whether it met a piece that does not count

  void take(Placement& placement, int64_t pieces) {
    placement.take(begin, pieces);
    placement.take(list, pieces);
    placement.take(count, 1);
    placement.take(broken, kMaxBlocks);
  }
};

// The pieces that count. If all do, as they should, their list is the input itself.
struct Pieces {
  const int64_t* begin;  // [count], ascending
  const int64_t* end;  // [pieces]
  const int64_t* row;  // [pieces]
  const int* list;  // [count], the pieces that count; null: all
  int pieces, count, units;
  int blocks;  // that share the units
  int64_t tokens;
};

// All pieces count if each is good by itself and behind its neighbour.
__device__ __forceinline__ void check_pieces(const Hierarchy& hierarchy, const PolicyLossArgs& args, const Counted& counted) {
  bool bad = false;
#pragma unroll 1
  for (int64_t p = int64_t(blockIdx.x) * kThreads + threadIdx.x; p < hierarchy.pieces; p += int64_t(gridDim.x) * kThreads) {
    bad |= piece_range(hierarchy, args, p).bad || (p > 0 && hierarchy.piece_begin[p] < hierarchy.piece_end[p - 1]);
  }
  const bool any = __syncthreads_or(bad);
  if (threadIdx.x == 0) counted.broken[blockIdx.x] = any;
}

// One warp lists the pieces that count: those that are good and begin at or behind the end of every one listed before.
__device__ __forceinline__ void list_pieces(const Hierarchy& hierarchy, const PolicyLossArgs& args, const Counted& counted) {
  const int pieces = int(hierarchy.pieces);
  int64_t covered = 0;
  int count = 0;
#pragma unroll 1
  for (int base = 0; base < pieces; base += kWarp) {
    const int piece = base + lane();
    const Range own = piece < pieces ? piece_range(hierarchy, args, piece) : Range{0, 0, true};
    bool counts = false;
#pragma unroll 1
    for (int source = 0; source < kWarp; ++source) {
      const int64_t begin = __shfl_sync(kFullWarp, own.begin, source), end = __shfl_sync(kFullWarp, own.end, source);
      const bool fits = !__shfl_sync(kFullWarp, int(own.bad), source) && begin >= covered;
      covered = fits ? end : covered;
      counts = source == lane() ? fits : counts;
    }
    const unsigned all = __ballot_sync(kFullWarp, counts);
    if (counts) {
      const int at = count + __popc(all & ((1u << lane()) - 1));
      counted.list[at] = piece;
      counted.begin[at] = own.begin;
    }
    count += __popc(all);
  }
  if (lane() == 0) *counted.count = count;
}

// By the first block, behind the grid barrier after they were checked. Until every block has seen the list it does all there
// is to do: the sequence of pieces says which of them count, and blocks cannot share that. A barrier.
__device__ __forceinline__ void list_broken(const Hierarchy& hierarchy, const PolicyLossArgs& args, const Counted& counted) {
  if (warp_in_block() == 0) list_pieces(hierarchy, args, counted);
  __syncthreads();
}

__device__ __forceinline__ Pieces get_pieces(const Hierarchy& hierarchy, const PolicyLossArgs& args, const Counted& counted,
                                             bool broken, int blocks) {
  const int all = int(hierarchy.pieces);
  return {broken ? counted.begin : hierarchy.piece_begin,
          hierarchy.piece_end,
          hierarchy.piece_row,
          broken ? counted.list : nullptr,
          all,
          broken ? *counted.count : all,
          int(units_of(args.tokens, all)),
          blocks,
          args.tokens};
}

struct PieceUnit {
  int piece;
  Unit tile;  // length 0: nothing to do
};

__device__ __forceinline__ PieceUnit get_unit(const Pieces& pieces, int index) {
  const int64_t token = int64_t(index - pieces.pieces + 1) * kTile;
  const bool further = index >= pieces.pieces;
  int at = index;
  if (further) {
    if (pieces.count == 0 || token >= pieces.tokens) return {};
    bool ascending = true;
    at = find_row({pieces.begin, pieces.tokens, pieces.count}, token, ascending);
  }
  if (at >= pieces.count) return {};
  const int piece = pieces.list ? pieces.list[at] : at;
  int64_t begin = pieces.begin[at];
  const int64_t end = pieces.end[piece];
  if (further) {
    if (token <= begin || end <= token) return {};
    begin = token + begin % kTile;  // as many tiles behind the first token as there are multiples of kTile
  }
  return {piece, {int(pieces.row[piece]), begin, min(max(end - begin, int64_t(0)), int64_t(kTile))}};
}

// Calls `visit(index, unit)` with the units of this warp.
template <class Visit>
__device__ __forceinline__ void for_each_unit(const Pieces& pieces, Visit visit) {
#pragma unroll 1
  for (int index = int(blockIdx.x) * kWarps + warp_in_block(); index < pieces.units; index += pieces.blocks * kWarps) {
    const PieceUnit unit = get_unit(pieces, index);
    if (unit.tile.length > 0) visit(index, unit);
  }
}

// The four neighbouring tokens of each lane; all lanes together take a window.
constexpr int kWindow = 4 * kWarp;

// Calls `visit(group)` with every lane's group in each window of a tile. Windows are aligned in the pack; a lane that has no
// token of the tile gets a group that has none.
template <class Visit>
__device__ __forceinline__ void for_each_window(const Unit& tile, bool groupable, Visit visit) {
  const int before = int(tile.begin % 4), end = before + int(tile.length);
#pragma unroll 1
  for (int window = 0; window < end; window += kWindow) {
    const int at = window + lane() * 4, from = max(before - at, 0), to = min(end - at, 4);
    const unsigned inside = from < to ? (1u << to) - (1u << from) : 0u;
    const bool any = inside != 0;
    visit(Group<4>{any ? tile.begin - before + at : tile.begin, any ? from : 0, any ? to : 1, inside,
                   groupable && inside == 15u});
  }
}

// Integers on their way to words of the workspace. Units that follow each other mostly share their segments above, so what
// goes to one word is held back while it does: a domain of a hundred thousand pieces would have as many atomics on one word.
struct Carrier {
  int64_t* to;
  int64_t sum;

  __device__ __forceinline__ void add(int64_t* where, int64_t value) {
    if (where != to) {
      flush();
      to = where, sum = 0;
    }
    sum += value;
  }

  __device__ __forceinline__ void flush() const {
    if (to && sum != 0) atomicAdd(to, sum);
  }
};

}  // namespace hpo
