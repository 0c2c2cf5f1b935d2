// Binds the C interface of one backend to Python.
#pragma once
#include "bindings/advantages.h"
#include "bindings/covariance.h"
#include "bindings/entropy.h"
#include "bindings/logprobs.h"
#include "bindings/losses.h"
#include "bindings/segments.h"

namespace hpo::bindings {

inline void bind(py::module_& m) {
  m.def("description", [] {
    if (hpo_description() == nullptr) check(hpo_unusable);
    return std::string(hpo_description());
  });
  m.def("advise_large_pages", &advise_large_pages);
  bind_losses(m);
  bind_advantages(m);
  bind_covariance(m);
  bind_entropy(m);
  bind_logprobs(m);
  bind_segments(m);
}

}  // namespace hpo::bindings
