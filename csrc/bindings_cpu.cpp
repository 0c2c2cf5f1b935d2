#define HPO_ON_HOST
#include "bindings.h"
#include "cpu/kernels.h"

PYBIND11_MODULE(_cpu, m) {
  using namespace hpo::bindings;
  bind(m);
  m.attr("corrects_rows") = true;
  m.def("widen", [](Address from, Address to, int64_t count, int64_t context) {
    run([&] { return hpo_widen(pointer<const uint16_t>(from), pointer<float>(to), count, context); });
  });
}
