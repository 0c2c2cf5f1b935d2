// Packed rows seen from a tile of tokens: vectorised loops run over tiles and know no rows; the numbers of a row are written
// into the tile first, segment by segment.
#pragma once
#include <algorithm>

#include "hpo/rows.h"
#include "parallel.h"

namespace hpo::HPO_ISA {

constexpr int kTile = 1024;         // tokens: the numbers that a fast-path tile keeps stay in the first-level cache
constexpr int kLongTile = 2 * kTile;  // tokens that no array holds; their log-ratios are half as large at most
constexpr int kChunk = 16 * kTile;  // tokens of one task; to begin and end one takes as long as some hundred of them

constexpr int kWorthwhileRow = 64;  // tokens, on average
constexpr int kFewRows = kTile / kWorthwhileRow;

// The part of one row inside a tile; positions are relative to the tile.
struct Segment {
  int64_t row;
  int begin, end;
};

struct Segments {
  int count;
  Segment list[kTile];

  // Few enough that each is worth its own loop, and all n tokens of the tile in one of them.
  bool few(int n) const {
    if (count == 0 || count > kFewRows || (count > 1 && count * kWorthwhileRow > n)) return false;
    int covered = 0;
    for (const Segment& segment : *this) covered += segment.end - segment.begin;
    return covered == n;
  }
  void set(int64_t row, int begin, int end) { count = 1, list[0] = {row, begin, end}; }

  const Segment* begin() const { return list; }
  const Segment* end() const { return list + count; }
};

constexpr int kRuns = 256;

struct Rows {
  const int64_t* cu_seqlens;  // [count + 1]
  int64_t count, tokens;
  int64_t broken;  // with broken rows the others may be out of order
  // With broken rows: the tokens between which each of kRuns runs of rows lies. Mostly all rows but a few are in order, and a
  // tile has to look into one run or two.
  int64_t in_run;
  Range runs[kRuns];

  Rows(const int64_t* cu_seqlens, int64_t count, int64_t tokens) : cu_seqlens(cu_seqlens), count(count), tokens(tokens) {
    int64_t bad = 0;
    for (int64_t row = 0; row < count; ++row) bad += row_range(cu_seqlens, row, tokens).bad;
    broken = bad;
    in_run = (count + kRuns - 1) / kRuns;
    if (broken) find_runs();
  }

  void find_runs() {
    for (int run = 0; run < kRuns; ++run) {
      Range& whole = runs[run];
      whole = {tokens, 0, false};
      for (int64_t row = run * in_run; row < count && row < (run + 1) * in_run; ++row) {
        const Range range = row_range(cu_seqlens, row, tokens);
        if (range.begin >= range.end) continue;
        whole.begin = range.begin < whole.begin ? range.begin : whole.begin;
        whole.end = range.end > whole.end ? range.end : whole.end;
      }
    }
  }

  // The offsets must be in order.
  int64_t first_ending_after(int64_t token) const {
    const int64_t* ends = cu_seqlens + 1;
    return std::upper_bound(ends, ends + count, token) - ends;
  }

  bool continues_elsewhere(int64_t row, int64_t chunk) const {
    return broken || cu_seqlens[row] < chunk * kChunk || cu_seqlens[row + 1] > (chunk + 1) * kChunk;
  }
};

// Walks through the rows while its tiles move forward.
class RowWalk {
 public:
  RowWalk(const Rows& rows, int64_t first_token) : rows_(rows) {
    if (!rows.broken) row_ = rows.first_ending_after(first_token);
  }

  void segments(int64_t tile_begin, int64_t tile_end, Segments& out) {
    if (rows_.broken) return unordered_segments(tile_begin, tile_end, out);
    const int64_t* cu = rows_.cu_seqlens;
    while (row_ < rows_.count && cu[row_ + 1] <= tile_begin) ++row_;
    out.count = 0;
    int64_t row = row_;
    for (; row < rows_.count && cu[row] < tile_end; ++row) {
      const int64_t begin = cu[row] < tile_begin ? tile_begin : cu[row];
      const int64_t end = cu[row + 1] > tile_end ? tile_end : cu[row + 1];
      if (begin < end) out.list[out.count++] = {row, int(begin - tile_begin), int(end - tile_begin)};
    }
    row_ = row > row_ ? row - 1 : row;  // the last row may go on in the next tile
  }

 private:
  // Calls body(row, begin, end), in the order of rows, with the range of each in a tile; stops where body returns false.
  template <class Body>
  bool for_each_part(int64_t tile_begin, int64_t tile_end, const Body& body) const {
    for (int run = 0; run < kRuns; ++run) {
      if (rows_.runs[run].begin >= tile_end || rows_.runs[run].end <= tile_begin) continue;
      for (int64_t row = run * rows_.in_run; row < rows_.count && row < (run + 1) * rows_.in_run; ++row) {
        const Range range = row_range(rows_.cu_seqlens, row, rows_.tokens);
        const int64_t begin = range.begin > tile_begin ? range.begin : tile_begin;
        const int64_t end = range.end < tile_end ? range.end : tile_end;
        if (begin < end && !body(row, int(begin - tile_begin), int(end - tile_begin))) return false;
      }
    }
    return true;
  }

  // Rows in any order, overlapping perhaps: a token belongs to the last row that claims it, as in the reference.
  void unordered_segments(int64_t tile_begin, int64_t tile_end, Segments& out) const {
    const int tokens = int(tile_end - tile_begin);
    out.count = 0;
    int covered = 0;
    const bool apart = for_each_part(tile_begin, tile_end, [&](int64_t row, int begin, int end) {
      if (begin < covered) return false;
      out.list[out.count++] = {row, begin, covered = end};
      return true;
    });
    if (apart) return;
    int64_t owner[kTile];
    for (int i = 0; i < tokens; ++i) owner[i] = -1;
    for_each_part(tile_begin, tile_end, [&](int64_t row, int begin, int end) {
      for (int i = begin; i < end; ++i) owner[i] = row;
      return true;
    });
    out.count = 0;
    for (int begin = 0, end; begin < tokens; begin = end) {
      for (end = begin + 1; end < tokens && owner[end] == owner[begin]; ++end) continue;
      if (owner[begin] >= 0) out.list[out.count++] = {owner[begin], begin, end};
    }
  }

  const Rows& rows_;
  int64_t row_ = 0;
};

// Calls body(first token, number of tokens, segments) for each tile of one chunk.
template <class Body>
inline void for_each_tile(const Rows& rows, int64_t chunk, const Body& body) {
  const int64_t begin = chunk * kChunk, end = begin + kChunk < rows.tokens ? begin + kChunk : rows.tokens;
  RowWalk walk(rows, begin);
  Segments segments;
  for (int64_t tile = begin; tile < end; tile += kTile) {
    const int64_t tile_end = tile + kTile < end ? tile + kTile : end;
    walk.segments(tile, tile_end, segments);
    body(tile, int(tile_end - tile), segments);
  }
}

// Adds to a counter of a row. Only a row that may continue in another task needs an atomic addition; integers have no order.
inline void add_to_row(int64_t& counter, int64_t value, bool shared) {
  if (shared) __atomic_fetch_add(&counter, value, __ATOMIC_RELAXED);
  else counter += value;
}

}  // namespace hpo::HPO_ISA
