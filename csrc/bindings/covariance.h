// covariance.
#pragma once
#include <array>

#include "arguments.h"

namespace hpo::bindings {

inline void bind_covariance(py::module_& m) {
  m.def("covariance_workspace", &hpo_covariance_workspace);
  m.def("covariance", [](int64_t tokens, int64_t rows, Address logp, Address advantages, Address cu_seqlens, Address mask,
                         Address old_logp, std::array<double, 4> bounds, uint32_t factor, uint32_t offset, Address keys,
                         Address members, Address workspace, int64_t context) {
    const CovarianceDraw draw = {pointer<const float>(old_logp), bounds[0], bounds[1], bounds[2], bounds[3], factor, offset};
    const CovarianceArgs args = {tokens,
                                 rows,
                                 pointer<const float>(logp),
                                 pointer<const float>(advantages),
                                 pointer<const int64_t>(cu_seqlens),
                                 pointer<const uint8_t>(mask),
                                 draw,
                                 pointer<float>(keys),
                                 pointer<int64_t>(members),
                                 pointer<void>(workspace)};
    run([&] { return hpo_covariance(&args, context); });
  });
}

}  // namespace hpo::bindings
