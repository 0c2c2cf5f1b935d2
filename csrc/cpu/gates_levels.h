// Gates on the mean log-ratio of a trajectory. Tokens of one trajectory and one sign of the advantage share all that follows
// from the mean, so the work is: sums of every row, from them one Level per trajectory, and a second sweep over the tokens.
#pragma once
#include "gates_fast_path.h"

namespace hpo::HPO_ISA {

// The sums of one row for its trajectory. Pairs are (advantage >= 0, advantage < 0).
struct RowSums {
  int64_t fixed;  // sum of the log-ratios, see to_fixed
  int64_t valid;
  int64_t chosen[2];
  double advantage[2];  // sum of a over the chosen tokens
};

// The gate of a trajectory, as its tokens need it.
struct Level {
  float ratio[2];
  float slope[2];     // the ratio where the gate passes gradient, else 0
  float shared_grad;  // Routing::through: minus the mean over the trajectory of a * slope
  int32_t side[2];    // -1: below the gate, 1: above
};

inline int64_t trajectory_of(const PolicyLossArgs& args, int64_t row) {
  const int64_t i = args.row_trajectory ? args.row_trajectory[row] : row;
  return i < 0 ? 0 : (i < args.rows ? i : args.rows - 1);
}

// Sums of coefficients that vary inside a row, by sign, in lanes that depend on the position inside the row only.
struct AdvantageSums {
  double lanes[2][kLanes] = {};

  // The next tokens of the row, from `first` on in a tile that is split by sign; all but the last call pass whole lanes.
  void add(const float by_sign[2][kPadded], int first, int n) {
    for (int sign = 0; sign < 2; ++sign) {
      const float* __restrict a = by_sign[sign] + first;
      double* __restrict sums = lanes[sign];
      int i = 0;
      for (; i + kLanes <= n; i += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) sums[lane] += double(a[i + lane]);
      }
      for (int lane = 0; i + lane < n; ++lane) sums[lane] += double(a[i + lane]);
    }
  }

  void store(double sums[2]) const {
    for (int sign = 0; sign < 2; ++sign) {
      sums[sign] = 0.0;
      for (int lane = 0; lane < kLanes; ++lane) sums[sign] += lanes[sign][lane];
    }
  }
};

// Writes the coefficients of chosen tokens into one array for each sign, 0 elsewhere.
inline void split_by_sign(const Tile& tile, int n, float by_sign[2][kPadded]) {
  const int32_t* __restrict chosen = tile.chosen;
  for (int i = 0; i < n; ++i) by_sign[0][i] = keep_if(chosen[i] == kPositive, tile.coefficient[i]);
  for (int i = 0; i < n; ++i) by_sign[1][i] = keep_if(chosen[i] == kNegative, tile.coefficient[i]);
}

inline bool coefficients_vary(const PolicyLossArgs& args) { return args.advantage_per_token || weighs_tokens(args); }

// A row in one tile is summed with the tile, every other row by itself.
inline bool lies_in_one_tile(const Rows& rows, int64_t row) {
  const Range range = row_range(rows.cu_seqlens, row, rows.tokens);
  return !rows.broken && range.begin / kTile == (range.end - 1) / kTile;
}

inline void add_row_sums(const Call& call, int64_t chunk, int n, const Segments& segments, Tile& tile, RowSums* rows) {
  const bool varies = coefficients_vary(call.args);
  if (varies) split_by_sign(tile, n, tile.spread);
  const bool alike = !(call.args.mask || call.args.advantage_per_token || tile.exceptional);  // all tokens of a row
  int64_t fixed[kTile];  // converted all together: rows may be shorter than a vector
  for (int i = 0; i < n; ++i) fixed[i] = to_fixed(tile.x[i]);
  for (const Segment& segment : segments) {
    int64_t sum = 0;
    int32_t valid = 0, chosen = 0;
    for (int i = segment.begin; i < segment.end; ++i) sum += fixed[i];
    if (alike) valid = tile.kind[segment.begin] * (segment.end - segment.begin);
    else
      for (int i = segment.begin; i < segment.end; ++i) valid += tile.kind[i];
    if (tile.chosen == tile.kind) chosen = valid;
    else
      for (int i = segment.begin; i < segment.end; ++i) chosen += tile.chosen[i];
    RowSums& row = rows[segment.row];
    const bool shared = call.rows.continues_elsewhere(segment.row, chunk);
    add_to_row(row.fixed, sum, shared);
    add_to_row(row.valid, positives(valid) + negatives(valid), shared);
    add_to_row(row.chosen[0], positives(chosen), shared);
    add_to_row(row.chosen[1], negatives(chosen), shared);
    if (varies && lies_in_one_tile(call.rows, segment.row)) {
      AdvantageSums sums;
      sums.add(tile.spread, segment.begin, segment.end - segment.begin);
      sums.store(row.advantage);
    }
  }
}

// The same of a fast-path tile of few rows.
inline void add_row_sums(const Call& call, int64_t chunk, const Segments& segments, const RowLogRatios* of_rows,
                         RowSums* rows) {
  for (int index = 0; index < segments.count; ++index) {
    const int64_t of_row = segments.list[index].row;
    RowSums& row = rows[of_row];
    const bool shared = call.rows.continues_elsewhere(of_row, chunk);
    add_to_row(row.fixed, of_rows[index].fixed, shared);
    add_to_row(row.valid, of_rows[index].valid, shared);
    add_to_row(row.chosen[call.args.advantages[of_row] < 0.0f], of_rows[index].valid, shared);
  }
}

// The advantages of a row that does not lie in one tile: tiles of its own, from its first token on.
inline void sum_advantages_of_row(const Call& call, int64_t row, double sums[2]) {
  const Range range = row_range(call.args.cu_seqlens, row, call.args.tokens);
  AdvantageSums lanes;
  Tile tile;
  Partial uncounted;
  Segments whole;
  for (int64_t first = range.begin; first < range.end; first += kTile) {
    const int n = int(range.end - first < kTile ? range.end - first : kTile);
    whole.count = 1;
    whole.list[0] = {row, 0, n};
    load(call, first, n, whole, true, tile, uncounted);
    split_by_sign(tile, n, tile.spread);
    lanes.add(tile.spread, 0, n);
  }
  lanes.store(sums);
}

inline void sum_advantages(const Call& call, int threads, RowSums* rows) {
  const PolicyLossArgs& args = call.args;
  const bool varies = coefficients_vary(args);
  for_each_range(args.rows, threads, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      RowSums& sums = rows[row];
      if (sums.chosen[0] + sums.chosen[1] == 0) continue;
      if (varies) {
        if (!lies_in_one_tile(call.rows, row)) sum_advantages_of_row(call, row, sums.advantage);
      } else {
        const double a = double(args.weights[row] * args.advantages[row]);
        for (int sign = 0; sign < 2; ++sign) sums.advantage[sign] = a * double(sums.chosen[sign]);
      }
    }
  });
}

inline Level make_level(const RowSums& sums, const GateStructure& structure, const GateNumbers& numbers) {
  const double n = double(sums.valid > 0 ? sums.valid : 1);
  const double mean = from_fixed(sums.fixed) / n;
  Level level = {};
  double flow = 0.0;
  for (int sign = 0; sign < 2; ++sign) {
    if (sums.chosen[sign] == 0) continue;  // unused
    const LevelGate gate = level_gate(mean, structure.level_clips, numbers.level_log_low[sign], numbers.level_log_high[sign]);
    level.ratio[sign] = gate.ratio;
    level.slope[sign] = gate.inside ? gate.ratio : 0.0f;
    level.side[sign] = gate.inside ? 0 : (mean < numbers.level_log_low[sign] ? -1 : 1);
    // n equal float32 terms sum to n a exactly, so that a constant a comes back to the bit: the on-policy promise.
    flow += double(level.slope[sign]) * (sums.advantage[sign] / n);
  }
  level.shared_grad = -float(flow);
  return level;
}

// Sums of trajectories from those of their rows; returns how many rows name a trajectory that does not exist.
inline int64_t gather_trajectories(const PolicyLossArgs& args, const RowSums* rows, RowSums* trajectories) {
  for (int64_t i = 0; i < args.rows; ++i) trajectories[i] = {};
  int64_t broken = 0;
  for (int64_t row = 0; row < args.rows; ++row) {
    broken += args.row_trajectory[row] < 0 || args.row_trajectory[row] >= args.rows;
    RowSums& sums = trajectories[trajectory_of(args, row)];
    sums.fixed += rows[row].fixed;
    sums.valid += rows[row].valid;
    for (int sign = 0; sign < 2; ++sign) {
      sums.chosen[sign] += rows[row].chosen[sign];
      sums.advantage[sign] += rows[row].advantage[sign];
    }
  }
  return broken;
}

// Chosen tokens, and those beyond the gate of their trajectory, by sign.
struct LevelCounts {
  int64_t chosen, low[2], high[2];

  void add_to(double* slots) const {
    slots[kSelected] += double(chosen);
    slots[kClippedLowPositive] += double(low[0]);
    slots[kClippedLowNegative] += double(low[1]);
    slots[kClippedHighPositive] += double(high[0]);
    slots[kClippedHighNegative] += double(high[1]);
  }
};

// Counts of chosen and clipped tokens from the sums of rows alone, and under the linear head the loss, -ratio * (sum of a); a
// term of `losses` is the loss of kRange rows.
inline LevelCounts settle_rows(const Call& call, int threads, const RowSums* rows, const Level* levels, double* losses) {
  LevelCounts total = {};
  for_each_range(call.args.rows, threads, [&](int64_t first, int64_t end) {
    LevelCounts here = {};
    double loss = 0.0;
    for (int64_t row = first; row < end; ++row) {
      const Level& level = levels[trajectory_of(call.args, row)];
      for (int sign = 0; sign < 2; ++sign) {
        const int64_t chosen = rows[row].chosen[sign];
        here.chosen += chosen;
        here.low[sign] += level.side[sign] < 0 ? chosen : 0;
        here.high[sign] += level.side[sign] > 0 ? chosen : 0;
        loss -= double(level.ratio[sign]) * rows[row].advantage[sign];
      }
    }
    losses[first / kRange] = loss;
    add_to_row(total.chosen, here.chosen, true);
    for (int sign = 0; sign < 2; ++sign) {
      add_to_row(total.low[sign], here.low[sign], true);
      add_to_row(total.high[sign], here.high[sign], true);
    }
  });
  return total;
}

// ----------------------------------------------------------------------------------------------------- second sweep

// The levels of a tile's rows at its tokens: by sign, the ratio and the factor of the gradient.
struct TokenLevels {
  const float *ratio[2], *flow[2];
};

inline TokenLevels spread_levels(const Call& call, const Segments& segments, const Level* levels, Tile& tile) {
  const PolicyLossArgs& args = call.args;
  const bool through = call.structure.routing == Routing::through;
  const int signs = args.advantage_per_token ? 2 : 1;  // with one sign in each row, both are in the same place
  for (const Segment& segment : segments) {
    const Level& level = levels[trajectory_of(args, segment.row)];
    for (int k = 0; k < signs; ++k) {
      const int sign = signs == 2 ? k : args.advantages[segment.row] < 0.0f;
      const float ratio = level.ratio[sign], flow = through ? level.shared_grad : level.slope[sign];
      float *ratios = tile.spread[2 * k], *flows = tile.spread[2 * k + 1];
      for (int i = segment.begin; i < segment.end; i += kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) ratios[i + lane] = ratio;
        for (int lane = 0; lane < kLanes; ++lane) flows[i + lane] = flow;
      }
    }
  }
  const int second = signs == 2 ? 2 : 0;
  return {{tile.spread[0], tile.spread[second]}, {tile.spread[1], tile.spread[second + 1]}};
}

// The gradient of a fast-path token under the linear head: one number for all tokens of a row.
inline float row_gradient(const Call& call, int64_t row, const Level& level) {
  if (call.structure.routing == Routing::through) return level.shared_grad;
  if (call.structure.routing == Routing::stopped) return 0.0f;
  const float advantage = call.args.advantages[row], a = call.args.weights[row] * advantage;
  const float slope = level.slope[advantage < 0.0f];
  return slope != 0.0f && finite(a) ? -(a * slope) : 0.0f;
}

// The gradient of a fast-path tile needs nothing but its rows and its mask.
inline void spread_gradient(const Call& call, int64_t first, int n, const Segments& segments, const Level* levels, Tile& tile,
                            float* __restrict grad) {
  const PolicyLossArgs& args = call.args;
  if (segments.few(n)) {
    for (const Segment& segment : segments) {
      const Floats each = all<Floats>(row_gradient(call, segment.row, levels[trajectory_of(args, segment.row)]));
      const auto step = [&](int i, int, Mask own, auto whole) __attribute__((always_inline)) {
        constexpr bool kWhole = decltype(whole)::value;
        const Floats here = args.mask ? keep_if(present_own<kWhole>(own, args.mask + first + i), each) : each;
        store_own<kWhole>(own, here, grad + i);
      };
      for_each_vector(segment.begin, segment.end, step, [] {});
    }
    return;
  }
  float* __restrict each = tile.spread[0];
  spread_rows(segments, each, [&](int64_t row) { return row_gradient(call, row, levels[trajectory_of(args, row)]); });
  int covered = 0;
  for (const Segment& segment : segments) {
    for (; covered < segment.begin; ++covered) each[covered] = 0.0f;
    covered = segment.end;
  }
  for (; covered < n; ++covered) each[covered] = 0.0f;
  if (args.mask) {
    const uint8_t* __restrict mask = args.mask + first;
    for (int i = 0; i < n; ++i) grad[i] = keep_if(mask[i] != 0, each[i]);
  } else {
    std::memcpy(grad, each, size_t(n) * sizeof(float));
  }
}

using LevelGateLoop = void (*)(const TokenLevels&, const Tile&, const float* coefficient, const float* logp, float* loss,
                               float* grad, int n);

template <bool kScoreHead, Routing kRouting>
void level_gate_loop(const TokenLevels& levels, const Tile& tile, const float* __restrict coefficient,
                     const float* __restrict logp, float* __restrict loss, float* __restrict grad, int n) {
  const float* __restrict ratio_positive = levels.ratio[0], * __restrict ratio_negative = levels.ratio[1];
  const float* __restrict flow_positive = levels.flow[0], * __restrict flow_negative = levels.flow[1];
  const int32_t* __restrict kind = tile.kind, * __restrict chosen = tile.chosen;
  for (int i = 0; i < n; ++i) {
    const bool counts = chosen[i] != kAbsent, negative = chosen[i] == kNegative;
    const float r0 = ratio_positive[i], r1 = ratio_negative[i], f0 = flow_positive[i], f1 = flow_negative[i];
    const float flow = negative ? f1 : f0;
    const Gated gated = {negative ? r1 : r0, kRouting == Routing::self ? flow != 0.0f : 0};
    const Term term = policy_term(kScoreHead, coefficient[i], gated, kScoreHead ? logp[i] : 0.0f);
    loss[i] = keep_if(counts, term.loss);
    if (!kScoreHead && kRouting == Routing::through) grad[i] = keep_if(kind[i] != kAbsent, flow);
    else grad[i] = keep_if(counts, term.grad);
  }
}

inline LevelGateLoop pick_level_gate(const GateStructure& structure) {
  if (structure.head == Head::score) return level_gate_loop<true, Routing::stopped>;
  switch (structure.routing) {
    case Routing::through: return level_gate_loop<false, Routing::through>;
    case Routing::self: return level_gate_loop<false, Routing::self>;
    default: return level_gate_loop<false, Routing::stopped>;
  }
}

}  // namespace hpo::HPO_ISA
