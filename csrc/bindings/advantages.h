// group_normalise and group_statistics.
#pragma once
#include "arguments.h"

namespace hpo::bindings {

// terms: the fields of each GroupTerm of hpo_core/specs, in order.
inline GroupNormaliseArgs make_groups(const py::sequence& terms, int share, double share_eps, double share_least) {
  GroupNormaliseArgs args{};
  args.count = int32_t(terms.size());
  if (args.count < 1 || args.count > kMostTerms)
    throw std::invalid_argument("terms: expected 1 to " + std::to_string(kMostTerms));
  for (int32_t i = 0; i < args.count; ++i) {
    const auto fields = terms[i].cast<py::tuple>();
    GroupTerm& term = args.terms[i];
    term.center = Center(fields[0].cast<int>());
    term.scale = Scale(fields[1].cast<int>());
    term.ddof = fields[2].cast<int>();
    term.eps = fields[3].cast<double>();
    term.eps_mode = EpsMode(fields[4].cast<int>());
    term.singleton_raw = fields[5].cast<bool>();
    term.part = Part(fields[6].cast<int>());
    term.presence = Presence(fields[7].cast<int>());
    term.coefficient = fields[8].cast<double>();
  }
  args.share = Share(share);
  args.share_eps = share_eps;
  args.share_least = share_least;
  return args;
}

inline void bind_advantages(py::module_& m) {
  m.def("group_normalise_workspace", &hpo_group_normalise_workspace);
  py::class_<GroupNormaliseArgs>(m, "GroupNormalisation", py::module_local()).def(py::init(&make_groups));
  m.def("group_normalise", [](GroupNormaliseArgs args, int64_t units, const py::tuple& inputs, Address advantages,
                              Address workspace, int64_t context) {
    args.units = units;
    const auto by_term = [&](size_t field) { return inputs[field].cast<py::tuple>(); };
    const py::tuple values = by_term(0), ids = by_term(1), weights = by_term(2);
    for (int32_t i = 0; i < args.count; ++i) {
      args.terms[i].values = pointer<const float>(address_of(values[i]));
      args.terms[i].ids = pointer<const int64_t>(address_of(ids[i]));
      args.terms[i].weights = pointer<const float>(address_of(weights[i]));
    }
    args.mask = pointer<const uint8_t>(address_of(inputs[3]));
    args.apply_mask = pointer<const uint8_t>(address_of(inputs[4]));
    args.advantages = pointer<float>(advantages);
    args.workspace = pointer<void>(workspace);
    run([&] { return hpo_group_normalise(&args, context); });
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
}

}  // namespace hpo::bindings
