// Leaves of a hierarchy cut into work as units.cuh cuts rows: tiles of kTile tokens from the leaf's own first token on, a tile
// to a warp. Leaves ascend and do not overlap, but leave gaps:
//
//   unit i < leaves    is the first tile of the i-th leaf that counts;
//   unit leaves + j    is the further tile that goes with token (j + 1) * kTile of the pack.
#pragma once
#include "grid.cuh"
#include "hpo/hierarchy.h"
#include "units.cuh"

namespace hpo {

// The leaves that count, as the checking blocks tell the others.
struct Counted {
  int64_t* begin;  // [leaves]: the begins of the leaves that count, where not all do
  int* list;  // [leaves]: these leaves
  int* count;  // how many
  int* broken;  // [blocks of the launch that checks]: whether it met a leaf that does not count

  void take(Placement& placement, int64_t leaves) {
    placement.take(begin, leaves);
    placement.take(list, leaves);
    placement.take(count, 1);
    placement.take(broken, kMaxBlocks);
  }
};

// The leaves that count. If all do, as they should, their list is the input itself.
struct Leaves {
  const int64_t* begin;  // [count], ascending
  const int64_t* end;  // [leaves]
  const int64_t* row;  // [leaves]; null: leaf p is row p
  const int* list;  // [count], the leaves that count; null: all
  int leaves, count, units;
  int64_t tokens;
};

// One warp lists the leaves that count: those that are good and begin at or behind the end of every one listed before.
__device__ __forceinline__ void list_leaves(const Hierarchy& hierarchy, const PolicyLossArgs& args, const Counted& counted) {
  const int leaves = int(hierarchy.leaves);
  int64_t covered = 0;
  int count = 0;
#pragma unroll 1
  for (int base = 0; base < leaves; base += kWarp) {
    const int leaf = base + lane();
    const Range own = leaf < leaves ? leaf_range(hierarchy, args, leaf) : Range{0, 0, true};
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
      counted.list[at] = leaf;
      counted.begin[at] = own.begin;
    }
    count += __popc(all);
  }
  if (lane() == 0) *counted.count = count;
}

// Whether some leaf does not count: all do if each is good by itself and behind its neighbour. If some does not, one warp lists
// the leaves that count, because whether a leaf counts depends on all before it. The call has grid barriers.
__device__ __forceinline__ bool check_leaves(const Hierarchy& hierarchy, const PolicyLossArgs& args, const Counted& counted) {
  bool bad = false;
#pragma unroll 1
  for (int64_t p = int64_t(blockIdx.x) * kThreads + threadIdx.x; p < hierarchy.leaves; p += int64_t(gridDim.x) * kThreads) {
    bad |= leaf_range(hierarchy, args, p).bad || (p > 0 && hierarchy.leaf_begin[p] < hierarchy.leaf_end[p - 1]);
  }
  const bool any = __syncthreads_or(bad);
  if (threadIdx.x == 0) counted.broken[blockIdx.x] = any;
  sync_grid();
  const bool broken = any_of(counted.broken, int(gridDim.x));
  if (broken) {
    if (blockIdx.x == 0 && warp_in_block() == 0) list_leaves(hierarchy, args, counted);
    sync_grid();
  }
  return broken;
}

__device__ __forceinline__ Leaves get_leaves(const Hierarchy& hierarchy, const PolicyLossArgs& args, const Counted& counted,
                                             bool broken) {
  const int all = int(hierarchy.leaves);
  return {broken ? counted.begin : hierarchy.leaf_begin,
          hierarchy.leaf_end,
          hierarchy.leaf_row,
          broken ? counted.list : nullptr,
          all,
          broken ? *counted.count : all,
          int(units_of(args.tokens, all)),
          args.tokens};
}

struct LeafUnit {
  int leaf;
  Unit tile;  // length 0: nothing to do
};

__device__ __forceinline__ LeafUnit get_unit(const Leaves& leaves, int index) {
  const int64_t token = int64_t(index - leaves.leaves + 1) * kTile;
  const bool further = index >= leaves.leaves;
  int at = index;
  if (further) {
    if (leaves.count == 0 || token >= leaves.tokens) return {};
    bool ascending = true;
    at = find_row({leaves.begin, leaves.tokens, leaves.count}, token, ascending);
  }
  if (at >= leaves.count) return {};
  const int leaf = leaves.list ? leaves.list[at] : at;
  // The same in every lane, and inside the pack, even if these are offsets that change during the read.
  const auto bound = [&](int64_t token) { return __shfl_sync(kFullWarp, min(max(token, int64_t(0)), leaves.tokens), 0); };
  int64_t begin = bound(leaves.begin[at]);
  const int64_t end = bound(leaves.end[leaf]);
  if (further) {
    if (token <= begin || end <= token) return {};
    begin = token + begin % kTile;  // as many tiles behind the first token as there are multiples of kTile
  }
  return {leaf, {leaves.row ? int(leaves.row[leaf]) : leaf, tile_length(end - begin), begin}};
}

// Calls `visit(index, unit)` with the units of this warp.
template <class Visit>
__device__ __forceinline__ void for_each_unit(const Leaves& leaves, Visit visit) {
#pragma unroll 1
  for (int index = int(blockIdx.x) * kWarps + warp_in_block(); index < leaves.units; index += int(gridDim.x) * kWarps) {
    const LeafUnit unit = get_unit(leaves, index);
    if (unit.tile.length > 0) visit(index, unit);
  }
}

// The four neighbouring tokens of each lane; all lanes together take a window.
constexpr int kWindow = 4 * kWarp;

// Calls `visit(vector)` with every lane's vector in each window of a tile. Windows are aligned in the pack; a lane that has no
// token of the tile gets a vector that has none.
template <class Visit>
__device__ __forceinline__ void for_each_window(const Unit& tile, bool wide, Visit visit) {
  const int before = int(tile.begin) & 3, end = before + tile.length;
#pragma unroll 1
  for (int window = 0; window < end; window += kWindow) {
    const int at = window + lane() * 4;
    visit(vector_at<4>(tile.begin - before, at, before, end, wide));
  }
}

// Integers on their way to words of the workspace. Successive units mostly share their segments, so sums for one word are held
// back as long as the word is the same: otherwise a domain of a hundred thousand leaves would have as many atomics on one word.
struct RunAccumulator {
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
