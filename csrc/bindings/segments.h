// row_counts, row_spans, group_statistics and recurrence.
#pragma once
#include "arguments.h"

namespace hpo::bindings {

inline void bind_segments(py::module_& m) {
  m.def("row_counts", [](int64_t tokens, int64_t rows, Address mask, Address cu_seqlens, Address counts, int64_t context) {
    RowCountsArgs args{};
    args.tokens = tokens;
    args.rows = rows;
    args.mask = pointer<const uint8_t>(mask);
    const Offsets offsets(cu_seqlens, rows);
    args.cu_seqlens = offsets.data();
    args.counts = pointer<int64_t>(counts);
    run([&] { return hpo_row_counts(&args, context); });
  });

  m.def("row_spans", [](int64_t tokens, int64_t rows, Address mask, Address cu_seqlens, Address spans, int64_t context) {
    const Offsets offsets(cu_seqlens, rows);
    const RowSpansArgs args = {tokens, rows, pointer<const uint8_t>(mask), offsets.data(), pointer<int64_t>(spans)};
    run([&] { return hpo_row_spans(&args, context); });
  });

  m.def("group_statistics_workspace", &hpo_group_statistics_workspace);
  m.def("group_statistics", [](int64_t units, Address values, Address ids, Address weights, Address mask, Address statistics,
                               Address workspace, int64_t context) {
    const GroupStatisticsArgs args = {units,
                                      pointer<const float>(values),
                                      pointer<const int64_t>(ids),
                                      pointer<const float>(weights),
                                      pointer<const uint8_t>(mask),
                                      pointer<double>(statistics),
                                      pointer<void>(workspace)};
    run([&] { return hpo_group_statistics(&args, context); });
  });

  m.def("recurrence", [](int64_t units, int64_t rows, Address values, Address gains, Address cu_seqlens, Address scanned,
                         int64_t context) {
    const Offsets offsets(cu_seqlens, rows);
    const RecurrenceArgs args = {
        units, rows, pointer<const double>(values), pointer<const double>(gains), offsets.data(), pointer<double>(scanned)};
    run([&] { return hpo_recurrence(&args, context); });
  });
}

}  // namespace hpo::bindings
