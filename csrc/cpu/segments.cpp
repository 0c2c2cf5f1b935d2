// row_counts: the valid tokens of every row, and weights made of them; row_spans: the first and the last of them; recurrence:
// a scan from the end of every row to its start. The definitions are hpo_core/reference/segments.py.
#include "hpo/segments.h"

#include <algorithm>

#include "kernels.h"
#include "rows.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {

void row_counts(const RowCountsArgs& args, int threads) {
  const Rows rows(args.cu_seqlens, args.rows, args.tokens);
  for (int64_t row = 0; row < args.rows; ++row) args.counts[row] = 0;
  parallel_for(ceil_divide(args.tokens, kChunk), worthwhile(threads, args.tokens), [&](int64_t chunk) {
    for_each_tile(rows, chunk, [&](int64_t tile, int, const Segments& segments) {
      for (const Segment& segment : segments) {
        int valid = segment.end - segment.begin;
        if (args.mask) {
          valid = 0;
          for (int i = segment.begin; i < segment.end; ++i) valid += args.mask[tile + i] != 0;
        }
        add_to_row(args.counts[segment.row], valid, rows.continues_elsewhere(segment.row, chunk));
      }
    });
  });
  if (!args.weights) return;
  int64_t total = 0;
  for (int64_t row = 0; row < args.rows; ++row) total += share_of_row(args.denominator, args.counts[row]);
  for (int64_t row = 0; row < args.rows; ++row) args.weights[row] = row_weight(args, total, args.counts[row]);
  args.counts[args.rows] = total;
}

// The mask is read up to a row's first valid token from either end.
void row_spans(const RowSpansArgs& args, int threads) {
  args.spans[0] = args.cu_seqlens[0], args.spans[2 * args.rows + 1] = args.cu_seqlens[args.rows];
  for_each_range(args.rows, worthwhile(threads, args.tokens), [&](int64_t first, int64_t behind) {
    for (int64_t row = first; row < behind; ++row) {
      const Range range = row_range(args.cu_seqlens, row, args.tokens);
      int64_t begin = range.begin, end = range.end;
      while (begin < end && !args.mask[begin]) ++begin;
      while (begin < end && !args.mask[end - 1]) --end;
      args.spans[2 * row + 1] = range.bad ? args.tokens + 1 : begin < end ? begin : range.begin;
      args.spans[2 * row + 2] = range.bad ? -1 : begin < end ? end : range.begin;
    }
  });
}

// A row is one chain of additions, whose results depend on the row alone. If offsets descend, rows may overlap: the last
// row of a unit counts, so rows run in order.
void recurrence(const RecurrenceArgs& args, int threads) {
  const bool apart = Rows(args.cu_seqlens, args.rows, args.units).broken == 0;
  std::fill_n(args.scanned, args.units, 0.0);
  for_each_range(args.rows, apart ? worthwhile(threads, args.units) : 1, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      const Range range = row_range(args.cu_seqlens, row, args.units);
      double following = 0.0;
      for (int64_t unit = range.end - 1; unit >= range.begin; --unit) {
        following = args.values[unit] + args.gains[unit] * following;
        args.scanned[unit] = following + 0.0;  // never -0
      }
    }
  });
}

}  // namespace hpo::HPO_ISA
