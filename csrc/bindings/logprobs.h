// token_logprobs and its backward.
#pragma once
#include <array>

#include "arguments.h"

namespace hpo::bindings {

// Rows of logits: shape, strides, logits, their type, targets, temperatures or one of them, ignored target, and floors.
inline LogprobsArgs make_logprobs(const py::tuple& logit_rows) {
  const auto shape = logit_rows[0].cast<std::array<int64_t, 4>>();
  const auto layout = logit_rows[1].cast<std::array<int64_t, 3>>();
  LogprobsArgs args{};
  args.rows = shape[0];
  args.columns = shape[1];
  args.first = shape[2];
  args.vocabulary = shape[3];
  args.inner = layout[0];
  args.outer_stride = layout[1];
  args.inner_stride = layout[2];
  args.logits = pointer<const void>(address_of(logit_rows[2]));
  args.type = LogitType(logit_rows[3].cast<int>());
  args.targets = pointer<const int64_t>(address_of(logit_rows[4]));
  args.temperatures = pointer<const float>(address_of(logit_rows[5]));
  args.temperature = logit_rows[6].cast<double>();
  args.ignore_index = logit_rows[7].cast<int64_t>();
  args.floors = pointer<const float>(address_of(logit_rows[8]));
  return args;
}

inline void bind_logprobs(py::module_& m) {
  m.def("token_logprobs",
        [](const py::tuple& logit_rows, int kept, Address logp, Address entropy, Address statistics, int64_t context) {
          LogprobsArgs args = make_logprobs(logit_rows);
          args.kept = kept;
          args.logp = pointer<float>(logp);
          args.entropy = pointer<float>(entropy);
          args.statistics = pointer<float>(statistics);
          run([&] { return hpo_token_logprobs(&args, context); });
        });

  m.def("token_logprobs_backward",
        [](const py::tuple& logit_rows, Address statistics, Address logp_gradient, Address entropy_gradient, Address grad,
           int64_t grad_outer_stride, int64_t grad_inner_stride, int64_t context) {
          const LogprobsBackwardArgs args = {make_logprobs(logit_rows),
                                             pointer<const float>(statistics),
                                             pointer<const float>(logp_gradient),
                                             pointer<const float>(entropy_gradient),
                                             pointer<void>(grad),
                                             grad_outer_stride,
                                             grad_inner_stride};
          run([&] { return hpo_token_logprobs_backward(&args, context); });
        });
}

}  // namespace hpo::bindings
