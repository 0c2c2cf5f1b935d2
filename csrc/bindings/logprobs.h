// token_logprobs and its backward.
#pragma once
#include <array>

#include "arguments.h"

namespace hpo::bindings {

// Shape, strides, tensors and numbers of LogitRows, in this order.
inline LogprobsArgs make_logprobs(std::array<int64_t, 4> shape, std::array<int64_t, 3> layout, Address logits, int type,
                                  Address targets, Address temperatures, double temperature, int64_t ignore_index,
                                  Address floors) {
  LogprobsArgs args{};
  args.rows = shape[0];
  args.columns = shape[1];
  args.first = shape[2];
  args.vocabulary = shape[3];
  args.inner = layout[0];
  args.outer_stride = layout[1];
  args.inner_stride = layout[2];
  args.logits = pointer<const void>(logits);
  args.type = LogitType(type);
  args.targets = pointer<const int64_t>(targets);
  args.temperatures = pointer<const float>(temperatures);
  args.temperature = temperature;
  args.ignore_index = ignore_index;
  args.floors = pointer<const float>(floors);
  return args;
}

inline void bind_logprobs(py::module_& m) {
  m.def("token_logprobs", [](std::array<int64_t, 4> shape, std::array<int64_t, 3> layout, Address logits, int type,
                             Address targets, Address temperatures, double temperature, int64_t ignore_index, Address floors,
                             int kept, Address logp, Address entropy, Address statistics, int64_t context) {
    LogprobsArgs args = make_logprobs(shape, layout, logits, type, targets, temperatures, temperature, ignore_index, floors);
    args.kept = kept;
    args.logp = pointer<float>(logp);
    args.entropy = pointer<float>(entropy);
    args.statistics = pointer<float>(statistics);
    run([&] { return hpo_token_logprobs(&args, context); });
  });

  m.def("token_logprobs_backward", [](std::array<int64_t, 4> shape, std::array<int64_t, 3> layout, Address logits, int type,
                                      Address targets, Address temperatures, double temperature, int64_t ignore_index,
                                      Address floors, Address statistics, Address logp_gradient, Address entropy_gradient,
                                      Address grad, int64_t grad_outer_stride, int64_t grad_inner_stride, int64_t context) {
    const LogprobsBackwardArgs args = {
        make_logprobs(shape, layout, logits, type, targets, temperatures, temperature, ignore_index, floors),
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
