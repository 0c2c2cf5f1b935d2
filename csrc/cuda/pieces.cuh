// Pieces of a hierarchy cut into work as units.cuh cuts rows: tiles of kTile tokens from the piece's own first token on, a tile
// to a warp. Pieces ascend and do not overlap, but leave gaps:
//
//   unit i < pieces    is the first tile of the i-th piece that counts;
//   unit pieces + j    is the further tile that goes with token (j + 1) * kTile of the pack.
#pragma once
#include "hpo/hierarchy.h"
#include "units.cuh"

namespace hpo {

// The pieces that count. If all do, as they should, their list is the input itself.
struct Pieces {
  const int64_t* begin;  // [count], ascending
  const int64_t* end;  // [pieces]
  const int64_t* row;  // [pieces]
  const int* list;  // [count], the pieces that count; null: all
  int pieces, count, units;
  int64_t tokens;
};

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
