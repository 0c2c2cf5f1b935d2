// window_score, order_statistic, select and order_statistics.
#pragma once
#include <array>

#include "arguments.h"

namespace hpo::bindings {

// Arguments with the fields that ops on scores of tokens share.
template <class Args>
Args of_tokens(int64_t tokens, int64_t rows, Address values, Address mask, const Offsets& offsets) {
  Args args{};
  args.tokens = tokens;
  args.rows = rows;
  args.values = pointer<const float>(values);
  args.mask = pointer<const uint8_t>(mask);
  args.cu_seqlens = offsets.data();
  return args;
}

inline void bind_entropy(py::module_& m) {
  m.def("window_score_workspace", &hpo_window_score_workspace);
  m.def("window_score",
        [](int64_t tokens, int64_t rows, Address values, Address mask, Address cu_seqlens, int64_t first, int64_t last,
           int boundary, int invalid, int aggregate, Address score, Address workspace, int64_t context) {
          const Offsets offsets(cu_seqlens, rows);
          auto args = of_tokens<WindowArgs>(tokens, rows, values, mask, offsets);
          args.first = first;
          args.last = last;
          args.boundary = Boundary(boundary);
          args.invalid = Invalid(invalid);
          args.aggregate = WindowAggregate(aggregate);
          args.score = pointer<float>(score);
          args.workspace = pointer<void>(workspace);
          run([&] { return hpo_window_score(&args, context); });
        });

  m.def("order_statistic_workspace", &hpo_order_statistic_workspace);
  m.def("order_statistic", [](int64_t tokens, int64_t rows, Address values, Address mask, Address cu_seqlens, int64_t numerator,
                              int64_t denominator, int rule, Address threshold, Address counts, bool strict, Address selected,
                              Address workspace, int64_t context) {
    const Offsets offsets(cu_seqlens, rows);
    auto args = of_tokens<OrderStatisticArgs>(tokens, rows, values, mask, offsets);
    args.numerator = numerator;
    args.denominator = denominator;
    args.rule = OrderRule(rule);
    args.threshold = pointer<float>(threshold);
    args.counts = pointer<int64_t>(counts);
    args.strict = strict;
    args.selected = pointer<uint8_t>(selected);
    args.workspace = pointer<void>(workspace);
    run([&] { return hpo_order_statistic(&args, context); });
  });

  m.def("select", [](int64_t tokens, int64_t rows, Address values, Address mask, Address cu_seqlens, Address threshold,
                     bool strict, Address selected, int64_t context) {
    const Offsets offsets(cu_seqlens, rows);
    auto args = of_tokens<SelectArgs>(tokens, rows, values, mask, offsets);
    args.threshold = pointer<const float>(threshold);
    args.strict = strict;
    args.selected = pointer<uint8_t>(selected);
    run([&] { return hpo_select(&args, context); });
  });

  m.def("order_statistics_workspace", &hpo_order_statistics_workspace);
  m.def("order_statistics", [](std::array<int64_t, 3> sizes, Address values, Address mask, Address offsets, Address order,
                               Address begin, int64_t numerator, int64_t denominator, int rule, Address k, Address thresholds,
                               Address counts, Address selected, Address workspace, int64_t context) {
    OrderStatisticsArgs args{};
    args.tokens = sizes[0];
    args.segments = sizes[1];
    args.scopes = sizes[2];
    args.values = pointer<const float>(values);
    args.mask = pointer<const uint8_t>(mask);
    const Offsets copied(offsets, sizes[1]);
    args.offsets = copied.data();
    args.order = pointer<const int64_t>(order);
    args.begin = pointer<const int64_t>(begin);
    args.numerator = numerator;
    args.denominator = denominator;
    args.rule = OrderRule(rule);
    args.k = pointer<const int64_t>(k);
    args.thresholds = pointer<float>(thresholds);
    args.counts = pointer<int64_t>(counts);
    args.selected = pointer<uint8_t>(selected);
    args.workspace = pointer<void>(workspace);
    run([&] { return hpo_order_statistics(&args, context); });
  });
}

}  // namespace hpo::bindings
