// Advantages of tokens that are one number in each row, as trainers with padded tensors hand them over. As advantages of rows
// they take the loops that know one sign and one coefficient for all tokens of a row.
#pragma once
#include "gates_tile.h"

namespace hpo::HPO_ISA {

struct RowAdvantages {
  float* of_rows;  // [rows]
  uint8_t* alike;  // [rows], 1 where all unmasked tokens have that of the row, bit by bit

  RowAdvantages(Arena& arena, int64_t rows) : of_rows(arena.take<float>(rows)), alike(arena.take<uint8_t>(rows)) {}

  PolicyLossArgs put_into(PolicyLossArgs args) const {
    args.advantages = of_rows, args.advantage_per_token = false;
    return args;
  }

  bool all_alike(const PolicyLossArgs& args) const {
    return args.advantage_per_token && std::all_of(alike, alike + args.rows, [](uint8_t row) { return row != 0; });
  }

  // Of advantages of tokens. A row is judged by its own tokens alone, and so are the bits of its gradient.
  void find(const PolicyLossArgs& args, const Rows& rows, int threads) const {
    if (!args.advantage_per_token) return;
    std::memset(alike, !rows.broken, size_t(args.rows));
    if (rows.broken) return;
    threads = worthwhile(threads, args.tokens);
    for_each_range(rows.count, threads, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        int64_t first = rows.cu_seqlens[row];
        while (args.mask && first < rows.cu_seqlens[row + 1] && !args.mask[first]) ++first;
        of_rows[row] = first < rows.cu_seqlens[row + 1] ? args.advantages[first] : 0.0f;
      }
    });
    parallel_for(ceil_divide(args.tokens, kChunk), threads, [&](int64_t chunk) {
      for_each_tile(rows, chunk, [&](int64_t first, int, const Segments& segments) {
        for (const Segment& segment : segments) {
          uint8_t& row = alike[segment.row];  // other threads write it, too
          if (__atomic_load_n(&row, __ATOMIC_RELAXED) && differs(args, first, segment))
            __atomic_store_n(&row, 0, __ATOMIC_RELAXED);
        }
      });
    });
  }

 private:
  bool differs(const PolicyLossArgs& args, int64_t first, const Segment& segment) const {
    const Ints row = Ints(all<Floats>(of_rows[segment.row]));
    Ints differing = {};
    for_each_vector(segment.begin, segment.end, [&](int i, Mask own, auto whole) HPO_INSIDE {
      constexpr bool kWhole = decltype(whole)::value;
      const Mask present = args.mask ? present_own<kWhole>(own, args.mask + first + i) : own;
      differing |= keep_if(present, Ints(load_own<kWhole>(own, args.advantages + first + i)) ^ row);
    });
    return any(present_lanes(differing));
  }
};

}  // namespace hpo::HPO_ISA
