// row_counts: the valid tokens of every row.
#include "kernels.h"
#include "rows.h"

HPO_DECLARE_KERNELS(HPO_ISA)

namespace hpo::HPO_ISA {

void row_counts(const RowCountsArgs& args, int threads) {
  const Rows rows(args.cu_seqlens, args.rows, args.tokens);
  for (int64_t row = 0; row < args.rows; ++row) args.counts[row] = 0;
  parallel_for(pieces(args.tokens, kChunk), worthwhile(threads, args.tokens), [&](int64_t chunk) {
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
}

}  // namespace hpo::HPO_ISA
