#include "bindings.h"

namespace {

using namespace hpo;
using namespace hpo::bindings;

// levels: (gate, routing, aggregate, low, high, slope) each; low and high are [channel][sign of the advantage].
Hierarchy make_hierarchy(bool split, const py::tuple& token_low, const py::tuple& token_high, const py::list& levels) {
  Hierarchy hierarchy{};
  hierarchy.split = split;
  for (int sign = 0; sign < 2; ++sign) {
    hierarchy.token_low[sign] = token_low[sign].cast<double>();
    hierarchy.token_high[sign] = token_high[sign].cast<double>();
  }
  if (levels.size() > size_t(kMostLevels)) throw std::invalid_argument("levels: expected at most 4");
  for (const py::handle item : levels) {
    const py::tuple level = py::reinterpret_borrow<py::tuple>(item);
    HierarchyLevel& out = hierarchy.levels[hierarchy.depth++];
    out.gate = LevelKind(level[0].cast<int>());
    out.routing = Routing(level[1].cast<int>());
    out.aggregate = Aggregate(level[2].cast<int>());
    const py::tuple low = level[3], high = level[4];
    for (int at = 0; at < 4; ++at) {
      out.low[at / 2][at % 2] = low[at].cast<double>();
      out.high[at / 2][at % 2] = high[at].cast<double>();
    }
    out.slope = level[5].cast<double>();
  }
  return hierarchy;
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  bind(m);
  py::class_<Hierarchy>(m, "Hierarchy", py::module_local()).def(py::init(&make_hierarchy));
  m.def("hierarchy_workspace", &hpo_hierarchy_workspace);
  m.def("hierarchy", [](const PolicyLossSpec& spec, const Hierarchy& levels, int64_t tokens, int64_t rows, int64_t pieces,
                        const py::tuple& inputs, Address loss, Address metrics, Address grad, Address token_loss,
                        Address workspace, int64_t context) {
    const PolicyLossArgs args = make_args(tokens, rows, inputs, {loss, metrics, grad, token_loss, workspace});
    Hierarchy hierarchy = levels;
    hierarchy.pieces = pieces;
    const size_t first = std::size(kInputs) - 4;
    hierarchy.piece_begin = pointer<const int64_t>(address_of(inputs[first]));
    hierarchy.piece_end = pointer<const int64_t>(address_of(inputs[first + 1]));
    hierarchy.piece_row = pointer<const int64_t>(address_of(inputs[first + 2]));
    hierarchy.ancestors = pointer<const int64_t>(address_of(inputs[first + 3]));
    int status;
    {
      py::gil_scoped_release release;
      status = hpo_hierarchy(&args, &spec.structure, &spec.numbers, &hierarchy, context);
    }
    check(status);
  });
}
