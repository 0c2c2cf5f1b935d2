#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "hpo/launches.h"
#include "selftest.h"

namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

PYBIND11_MODULE(HPO_MODULE, m) {
  namespace selftest = hpo::selftest;
  m.def("launches", &hpo::LaunchCounter::all);
  m.def("segmented_sum", [](Address values, Address offsets, Address sums, int segments) {
    selftest::segmented_sum(at<float>(values), at<int64_t>(offsets), at<float>(sums), segments);
  });
  m.def("logsumexp", [](Address values, Address out, int rows, int columns) {
    selftest::logsumexp(at<float>(values), at<float>(out), rows, columns);
  });
  m.def("logsumexp_bf16", [](Address values, Address out, int rows, int columns) {
    selftest::logsumexp_bf16(at<uint16_t>(values), at<float>(out), rows, columns);
  });
  m.def("histogram", [](Address values, int count, Address counts, Address below, Address finished, int bins, int blocks) {
    selftest::histogram(at<int>(values), count, at<unsigned>(counts), at<unsigned>(below), at<unsigned>(finished), bins,
                        blocks);
  });
  m.def("sliding_mean", [](Address values, Address means, int count, int radius) {
    selftest::sliding_mean(at<float>(values), at<float>(means), count, radius);
  });
  m.def("primitives", [](Address out, Address atomics, int threads) {
    selftest::primitives(at<double>(out), at<int64_t>(atomics), threads);
  });
  m.def("rounds", [](Address sums, Address out, int rounds, int blocks, int threads) {
    selftest::rounds(at<int>(sums), at<int>(out), rounds, blocks, threads);
  });
  m.def("bug", [](const std::string& name, Address out) { selftest::bug(name, at<float>(out)); });
  m.def("bugs", &selftest::bugs);
}
