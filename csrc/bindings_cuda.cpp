// HPO_MODULE is _cuda, or _cuda_emulated for the test double built from the same sources.
#include "bindings.h"
#include "hpo/launches.h"

extern "C" const char* hpo_description() {
#ifdef HPO_CUDA_TARGETS
  return HPO_CUDA_TARGETS;  // "sm_80 sm_90 compute_90 ..."
#else
  return "emulated";
#endif
}

PYBIND11_MODULE(HPO_MODULE, m) {
  hpo::bindings::bind(m);
  m.def("launches", &hpo::LaunchCounter::all, "Kernel launches so far, by kernel name.");
}
