// The leaves of a hierarchy, and how the work on their tokens is shared out.
//
// Leaves are cut into blocks of kChunk tokens from their own first token on, so that the bits of a sum over a leaf
// depend on nothing but the leaf. Block j of leaf p belongs to the task that holds token start[p] + j kChunk when the leaves
// lie end to end: short leaves share a task, long ones spread over many, and at most one block of a task does not begin its
// leaf.

#pragma once
#include "gates_tile.h"
#include "hpo/hierarchy.h"

namespace hpo::HPO_ISA {

struct Block {
  int64_t leaf, row;
  int64_t first, tokens;
  bool begins;  // the block is the first of its leaf
};

struct Leaves {
  const Hierarchy& hierarchy;
  const PolicyLossArgs& args;
  int64_t* start;  // [leaves + 1], tokens of the leaves before
  int64_t broken = 0;
  int64_t longest = 0;  // tokens of a leaf
  bool are_rows;  // leaf p is row p, whatever p
  bool alone;  // at most one level, every leaf is a segment of it, and the sums of segments stay inside the call

  Leaves(const Hierarchy& hierarchy, const PolicyLossArgs& args, int64_t* start, int threads)
      : hierarchy(hierarchy),
        args(args),
        start(start),
        are_rows(hierarchy.leaves == args.rows),
        alone(hierarchy.depth <= 1 && hierarchy.stage == Stage::whole) {
    start[0] = 0;
    const bool rows_are_leaves = count() > 0 && !hierarchy.leaf_row && hierarchy.leaf_begin == args.cu_seqlens;
    if (rows_are_leaves && take_rows_in_order(threads)) return;
    int64_t covered = 0;
    for (int64_t p = 0; p < hierarchy.leaves; ++p) {
      const Range range = leaf_range(hierarchy, args, p);
      const bool good = !range.bad && range.begin >= covered;
      broken += !good && hierarchy.leaf_row;  // else it is a row, which counts as one
      are_rows &= good && row(p) == p && range.begin == args.cu_seqlens[p] && range.end == args.cu_seqlens[p + 1];
      covered = good ? range.end : covered;
      start[p + 1] = start[p] + (good ? range.end - range.begin : 0);
      longest = std::max(longest, length(p));
      if (hierarchy.depth > 0) alone &= ancestor(0, p) == p;
    }
  }

  int64_t count() const { return hierarchy.leaves; }
  int64_t length(int64_t p) const { return start[p + 1] - start[p]; }
  int64_t blocks(int64_t p) const { return ceil_divide(length(p), kChunk); }
  bool stands_alone(int64_t p) const { return stand_alone(length(p)); }
  bool any_together() const { return longest > 0 && !stand_alone(longest); }
  int64_t task(int64_t p) const { return start[p] / kChunk; }  // of its first block
  int64_t tasks() const { return start[count()] / kChunk + 1; }
  int64_t row(int64_t p) const { return row_of_leaf(hierarchy, p); }
  int64_t ancestor(int k, int64_t p) const { return ancestor_of(hierarchy, k, p); }

  // The first leaf that starts at or behind this token.
  int64_t starting_at(int64_t token) const { return std::lower_bound(start, start + count(), token) - start; }

  // Calls body(block) for the blocks of a task.
  template <class Body>
  void for_each_block(int64_t task, const Body& body) const {
    const int64_t next = starting_at(task * kChunk);
    int64_t before = next - 1;  // the leaf that comes in from the left
    while (before >= 0 && length(before) == 0) --before;
    if (before >= 0) {
      const int64_t block = task - this->task(before);
      if (block > 0 && block < blocks(before)) visit(before, block, body);
    }
    for (int64_t p = next, end = starting_at((task + 1) * kChunk); p < end; ++p) {
      if (length(p) > 0) visit(p, 0, body);
    }
  }

  // Calls body(task) for the tasks of a leaf's blocks behind its first.
  template <class Body>
  void for_each_later_task(int64_t p, const Body& body) const {
    for (int64_t block = 1; block * kChunk < length(p); ++block) body(task(p) + block);
  }

  // Calls body(first, end) for the tokens outside every leaf.
  template <class Body>
  void for_each_gap(const Body& body) const {
    int64_t covered = 0;
    for (int64_t p = 0; p < count(); ++p) {
      if (length(p) == 0) continue;
      if (covered < hierarchy.leaf_begin[p]) body(covered, hierarchy.leaf_begin[p]);
      covered = hierarchy.leaf_begin[p] + length(p);
    }
    if (covered < args.tokens) body(covered, args.tokens);
  }

 private:
  // The rows as leaves, if all their offsets are in order and all ancestors exist: then none waits for the one before.
  bool take_rows_in_order(int threads) {
    constexpr int kShares = 16;
    struct Share {
      int64_t longest = 0;
      bool good = true, alone = true;
    } shares[kShares];
    const int64_t used = worthwhile(kShares, count());
    const int64_t first = leaf_range(hierarchy, args, 0).begin;  // inside the pack: a difference of wild offsets may overflow
    parallel_for(used, threads, [&](int64_t share) {
      Share own;
      for (int64_t p = count() * share / used, end = count() * (share + 1) / used; p < end; ++p) {
        const Range range = leaf_range(hierarchy, args, p);
        own.good &= !range.bad;
        start[p + 1] = range.end - first;
        own.longest = std::max(own.longest, range.end - range.begin);
        if (hierarchy.depth > 0) own.alone &= ancestor(0, p) == p;
      }
      shares[share] = own;
    });
    for (const Share& share : shares) {
      if (!share.good) return false;
    }
    for (const Share& share : shares) longest = std::max(longest, share.longest), alone &= share.alone;
    return true;
  }

  // Whether leaves of at most so many tokens share no segment with others, and are one block.
  bool stand_alone(int64_t tokens) const { return alone && (hierarchy.depth == 0 || tokens <= kChunk); }

  template <class Body>
  void visit(int64_t p, int64_t block, const Body& body) const {
    const int64_t skipped = block * kChunk, rest = length(p) - skipped;
    body(Block{p, row(p), hierarchy.leaf_begin[p] + skipped, rest < kChunk ? rest : kChunk, block == 0});
  }
};

// Adds to each leaf the sums of its blocks in later tasks.
template <class Sums>
inline void gather_blocks(const Leaves& leaves, const Sums* of_blocks, Sums* of_leaves) {
  for (int64_t p = 0; p < leaves.count(); ++p) {
    leaves.for_each_later_task(p, [&](int64_t task) { of_leaves[p].add(of_blocks[task]); });
  }
}

// Calls body(from, to) for the parts of [begin, end) between multiples of `size`.
template <class Body>
inline void for_each_part(int begin, int end, int size, const Body& body) {
  for (int to; begin < end; begin = to) {
    to = (begin / size + 1) * size < end ? (begin / size + 1) * size : end;
    body(begin, to);
  }
}

// Tiles begin with their block: sums by lane have the same bits wherever the block lies.
constexpr int kGridOfBlock = 1;
// No vector crosses a line of the cache, if tensors begin with a line.
constexpr int kGridOfLines = kLine / sizeof(float);

// The first token of the line in which a block begins.
inline int64_t line_of(const Block& block) { return block.first / kGridOfLines * kGridOfLines; }

// Calls body(tile, begin, end) for the tiles of a block: its tokens [begin, end) behind token `tile`, a multiple of `grid`.
template <class Body>
inline void for_each_tile_of(const Block& block, int grid, const Body& body) {
  const int64_t block_end = block.first + block.tokens;
  for (int64_t tile = block.first / grid * grid; tile < block_end; tile += kTile) {
    const int begin = tile < block.first ? int(block.first - tile) : 0;
    body(tile, begin, int(block_end - tile < kTile ? block_end - tile : kTile));
  }
}

constexpr int kTilesOfBlock = kChunk / kTile + 1;

// The same for stretches of successive tiles that are masked alike. Null: there is no mask.
template <class Body>
inline void for_each_stretch_of(const Block& block, const Masked* masked, const Body& body) {
  const int64_t tile = line_of(block);
  const int first = int(block.first - tile), end = first + int(block.tokens);
  if (!masked) return body(Masked::none, tile, first, end);
  for (int begin = first, stop; begin < end; begin = stop) {
    int next = begin / kTile;
    const Masked kind = masked[next];
    while (next * kTile < end && masked[next] == kind) ++next;
    stop = next * kTile < end ? next * kTile : end;
    body(kind, tile, begin, stop);
  }
}

}  // namespace hpo::HPO_ISA
