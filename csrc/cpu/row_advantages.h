// Advantages of tokens that are one number in each row, as trainers with padded tensors hand them over. As advantages of rows
// they take the loops that know one sign and one coefficient for all tokens of a row.
#pragma once
#include "gates_tile.h"

namespace hpo::HPO_ISA {

// Successive tokens of a row that a gate may read. Advantages between leaves are read by no gate, and decide nothing.
struct Stretch {
  int64_t row, first, tokens;
};

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

  // Compares the advantages of tokens row by row. stretch(i) is row or leaf i, and for_each(task, body) calls body(stretch) for
  // the part of them in a task. Only the tokens of a row decide its way, because the ways differ in the last bits.
  template <class StretchAt, class ForEach>
  void find(const PolicyLossArgs& args, int64_t count, const StretchAt& stretch, int64_t tasks, int threads,
            const ForEach& for_each) const {
    std::fill_n(of_rows, args.rows, 0.0f);
    std::fill_n(alike, args.rows, uint8_t{1});
    for (int64_t i = 0; i < count; ++i) {
      const auto [row, first, tokens] = stretch(i);
      int64_t at = first;
      while (args.mask && at < first + tokens && !args.mask[at]) ++at;
      if (at < first + tokens) of_rows[row] = args.advantages[at];
    }
    parallel_for(tasks, worthwhile(threads, args.tokens), [&](int64_t task) {
      for_each(task, [&](const Stretch& here) {
        uint8_t& row = alike[here.row];  // other threads write it, too
        if (__atomic_load_n(&row, __ATOMIC_RELAXED) && differs(args, here)) __atomic_store_n(&row, 0, __ATOMIC_RELAXED);
      });
    });
  }

 private:
  // Advantages of tokens mostly differ among the first of them.
  bool differs(const PolicyLossArgs& args, const Stretch& here) const {
    const int64_t few = here.tokens < kRun ? here.tokens : kRun;
    return some_differ(args, {here.row, here.first, few}) || some_differ(args, {here.row, here.first + few, here.tokens - few});
  }

  bool some_differ(const PolicyLossArgs& args, const Stretch& here) const {
    const Ints row = Ints(all<Floats>(of_rows[here.row]));
    Ints differing = {};
    for_each_vector(0, int(here.tokens), [&](int i, Mask own, auto whole) HPO_INSIDE {
      constexpr bool kWhole = decltype(whole)::value;
      const Mask present = args.mask ? present_own<kWhole>(own, args.mask + here.first + i) : own;
      differing |= keep_if(present, Ints(load_own<kWhole>(own, args.advantages + here.first + i)) ^ row);
    });
    return any(present_lanes(differing));
  }
};

}  // namespace hpo::HPO_ISA
