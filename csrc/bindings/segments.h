// row_counts, row_spans and recurrence.
#pragma once
#include "arguments.h"

namespace hpo::bindings {

inline void bind_segments(py::module_& m) {
  m.def("row_counts", [](int64_t tokens, int64_t rows, Address mask, Address cu_seqlens, Address counts, Address weights,
                         int32_t denominator, double factor, int64_t context) {
    const Offsets offsets(cu_seqlens, rows);
    const RowCountsArgs args = {tokens,
                                rows,
                                pointer<const uint8_t>(mask),
                                offsets.data(),
                                pointer<int64_t>(counts),
                                pointer<float>(weights),
                                Denominator(denominator),
                                factor};
    run([&] { return hpo_row_counts(&args, context); });
  });

  m.def("row_spans", [](int64_t tokens, int64_t rows, Address mask, Address cu_seqlens, Address spans, int64_t context) {
    const Offsets offsets(cu_seqlens, rows);
    const RowSpansArgs args = {tokens, rows, pointer<const uint8_t>(mask), offsets.data(), pointer<int64_t>(spans)};
    run([&] { return hpo_row_spans(&args, context); });
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
