// Scores of tokens, given or read from the values of tokens, for window_score, order_statistic and select.
#pragma once
#include "hpo/entropy.h"
#include "rows.h"

namespace hpo::HPO_ISA {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Calls body(row, first position, end) for the part of every row inside [begin, end).
template <class Body>
void for_each_row_in(const Rows& rows, int64_t begin, int64_t end, const Body& body) {
  RowWalk walk(rows, begin);
  Segments segments;
  int64_t row = -1, row_begin = begin, row_end = begin;
  for (int64_t tile = begin; tile < end; tile += kTile) {
    walk.segments(tile, smaller(tile + kTile, end), segments);
    for (const Segment& segment : segments) {
      if (segment.row != row || tile + segment.begin != row_end) {
        if (row_begin < row_end) body(row, row_begin, row_end);
        row = segment.row;
        row_begin = tile + segment.begin;
      }
      row_end = tile + segment.end;
    }
  }
  if (row_begin < row_end) body(row, row_begin, row_end);
}

inline void drop_masked(const uint8_t* mask, float* score, int64_t n) {
  if (!mask) return;
  for (int64_t i = 0; i < n; ++i) score[i] = mask[i] ? score[i] : -INFINITY;
}

// Scores of windows of one token, which are the values of the tokens [begin, end).
inline void score_tokens(const float* values, const uint8_t* mask, const Rows& rows, int64_t begin, int64_t end, float* score) {
  for (int64_t t = begin; t < end; ++t) score[t - begin] = -INFINITY;
  for_each_row_in(rows, begin, end, [&](int64_t, int64_t first, int64_t row_end) {
    for (int64_t t = first; t < row_end; ++t) score[t - begin] = is_finite(values[t]) ? values[t] : NAN;
  });
  drop_masked(mask ? mask + begin : nullptr, score, end - begin);
}

constexpr int64_t kPart = 4096;  // scores that are read several times while they are in the first-level cache
constexpr int64_t kScoresAhead = 1024;  // loops over scores prefetch so many elements ahead

inline bool all_finite(const float* values, int64_t n) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t magnitude = to_bits(values[i]) & INT32_MAX;
    largest = magnitude > largest ? magnitude : largest;
  }
  return is_finite(from_bits(largest));
}

// Given scores, or scores of single tokens. Few of the latter differ from the values, so they are not stored.
class Scores {
 public:
  template <class Args>
  explicit Scores(const Args& args)
      : given(!args.cu_seqlens), values(args.values), mask_(args.mask), rows_(args.cu_seqlens, args.rows, args.tokens) {
    if (given) end_ = args.tokens;
    else if (!rows_.broken && args.rows > 0) begin_ = args.cu_seqlens[0], end_ = args.cu_seqlens[args.rows];
  }

  const bool given;
  const float* const values;

  // Whether every finite value among these n is a score.
  bool are_values(int64_t first, int64_t n) const {
    bool masked = false;
    for (int64_t t = first; mask_ && t < first + n; ++t) masked |= mask_[t] == 0;
    return begin_ <= first && first + n <= end_ && !masked;
  }

  void write(int64_t first, int64_t n, float* score) const {
    if (given) std::memcpy(score, values + first, size_t(n) * sizeof(float));
    else score_tokens(values, mask_, rows_, first, first + n, score);
  }

  // The value of a token that has a score; NaN for other tokens, and for all tokens if offsets are broken.
  float sample(int64_t t) const { return begin_ <= t && t < end_ && (!mask_ || mask_[t]) ? values[t] : NAN; }

 private:
  const uint8_t* mask_;
  Rows rows_;
  int64_t begin_ = 0, end_ = 0;  // all tokens in between have a row; empty if broken rows make that uncertain
};

}  // namespace hpo::HPO_ISA
