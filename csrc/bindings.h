// Binds the C interface of one backend to Python: tensors come in as they are, checked before, and all that is asked of them
// is where their data is.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <array>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "hpo/api.h"
#include "hpo/metrics.h"

namespace hpo::bindings {

namespace py = pybind11;

// Of a tensor, or null for None.
struct Address {
  uintptr_t value = 0;
};

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address.value);
}

inline uintptr_t call_for_number(py::handle tensor, PyObject* method) {
  const py::object number = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor.ptr(), method));
  if (!number) throw py::error_already_set();
  return PyLong_AsUnsignedLongLong(number.ptr());
}

// Kernels take a null pointer for a tensor that is not given: one with elements and without memory never reaches them.
inline Address address_of(py::handle tensor, const char* name = "a tensor") {
  if (tensor.is_none()) return {};
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  static PyObject* const numel = PyUnicode_InternFromString("numel");
  const Address address{call_for_number(tensor, data_ptr)};
  if (address.value == 0 && call_for_number(tensor, numel) != 0) {
    throw py::value_error(std::string(name) + ": expected a tensor with memory, got elements without any; was it freed?");
  }
  return address;
}

}  // namespace hpo::bindings

template <>
struct pybind11::detail::type_caster<hpo::bindings::Address> {
  PYBIND11_TYPE_CASTER(hpo::bindings::Address, const_name("Tensor | None"));

  bool load(handle tensor, bool) {
    value = hpo::bindings::address_of(tensor);
    return true;
  }
};

namespace hpo::bindings {

inline void check(int status) {
  if (status != 0) throw std::runtime_error(std::string("hpo_core: ") + hpo_error(status));
}

// Other threads of Python may go on meanwhile.
template <class Call>
void run(const Call& call) {
  int status;
  {
    py::gil_scoped_release release;
    status = call();
  }
  check(status);
}

struct PolicyLossSpec {
  GateStructure structure;
  GateNumbers numbers;
  CorrectionRule correction;
};

inline void copy_pair(double (&to)[2], const py::tuple& pair) {
  for (int sign = 0; sign < 2; ++sign) to[sign] = pair[sign].cast<double>();
}

inline CorrectionRule make_rule(int statistic, int action, bool strict, const py::tuple& low, const py::tuple& high) {
  CorrectionRule rule{Statistic(statistic), Action(action), strict, {}, {}};
  copy_pair(rule.low, low);
  copy_pair(rule.high, high);
  return rule;
}

// correction: None, or the arguments of make_rule.

inline PolicyLossSpec make_spec(int token, bool has_level, bool level_clips, int routing, int head, int kl, int kl_gradient,
                                bool strict, py::sequence low_driven, py::sequence high_driven, py::sequence token_low,
                                py::sequence token_high, py::sequence level_log_low, py::sequence level_log_high,
                                double kl_beta, const py::object& correction) {
  PolicyLossSpec spec{};
  spec.structure.token = TokenGate(token);
  spec.structure.has_level = has_level;
  spec.structure.level_clips = level_clips;
  spec.structure.routing = Routing(routing);
  spec.structure.head = Head(head);
  spec.structure.kl = KLEstimator(kl);
  spec.structure.kl_gradient = KLGradient(kl_gradient);
  spec.structure.strict = strict;
  for (int sign = 0; sign < 2; ++sign) {
    spec.structure.low_driven[sign] = low_driven[sign].cast<bool>();
    spec.structure.high_driven[sign] = high_driven[sign].cast<bool>();
    spec.numbers.token_low[sign] = token_low[sign].cast<double>();
    spec.numbers.token_high[sign] = token_high[sign].cast<double>();
    spec.numbers.level_log_low[sign] = level_log_low[sign].cast<double>();
    spec.numbers.level_log_high[sign] = level_log_high[sign].cast<double>();
  }
  spec.numbers.kl_beta = kl_beta;
  if (!correction.is_none()) {
    const py::tuple rule = correction;
    spec.correction = make_rule(rule[0].cast<int>(), rule[1].cast<int>(), rule[2].cast<bool>(), rule[3], rule[4]);
  }
  return spec;
}

// terms: of a GroupTerm of hpo_core/specs its fields, in order.
inline GroupNormaliseArgs make_groups(const py::sequence& terms, int share, double share_eps, double share_least) {
  GroupNormaliseArgs args{};
  args.count = int32_t(terms.size());
  if (args.count < 1 || args.count > kMostTerms) throw std::invalid_argument("terms: expected 1 to 8 of them");
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

// Kernels on the host validate offsets, and read them again: they get a copy, which no thread rewrites in between.
class Offsets {
 public:
  Offsets(Address from, int64_t rows) : data_(pointer<const int64_t>(from)) {
#ifdef HPO_ON_HOST
    if (data_) copy_.assign(data_, data_ + rows + 1), data_ = copy_.data();
#else
    (void)rows;
#endif
  }
  const int64_t* data() const { return data_; }

 private:
  const int64_t* data_;
  std::vector<int64_t> copy_;
};

struct Outputs {
  Address loss, metrics, grad, token_loss, workspace;
};

// `inputs` is a PolicyLossInputs of hpo_core/specs; a test compares the order.
constexpr const char* kInputs[] = {
    "logp",
    "old_logp",
    "advantages",
    "weights",
    "cu_seqlens",
    "mask",
    "ref_logp",
    "entropy",
    "score",
    "threshold",
    "token_mask",
    "token_weight",
    "low",
    "high",
    "row_trajectory",
    "trajectory_start",
    "trajectory_rows",
    "advantage_per_token",
    "leaf_begin",
    "leaf_end",
    "leaf_row",
    "ancestors",
    "target",
    "target_per_token",
    "penalty_mask",
    "kl_weight",
    "correction_first",
    "correction_second",
};
constexpr size_t kOffsets = 4;
constexpr size_t kLeaves = 18;  // of leaf_begin, which the other three follow

inline Offsets offsets_of(const py::tuple& inputs, int64_t rows) {
  if (inputs.size() != std::size(kInputs)) throw std::invalid_argument("inputs: expected a PolicyLossInputs");
  return {address_of(inputs[kOffsets], kInputs[kOffsets]), rows};
}

inline PolicyLossArgs make_args(int64_t tokens, int64_t rows, const py::tuple& inputs, const Offsets& offsets,
                                const Outputs& outputs, const CorrectionRule& rule = {}) {
  py::ssize_t next = 0;
  const auto take = [&] {
    const py::ssize_t field = next++;
    return address_of(PyTuple_GET_ITEM(inputs.ptr(), field), kInputs[field]);
  };
  PolicyLossArgs args{};
  args.tokens = tokens;
  args.rows = rows;
  args.logp = pointer<const float>(take());
  args.old_logp = pointer<const float>(take());
  args.advantages = pointer<const float>(take());
  args.weights = pointer<const float>(take());
  args.cu_seqlens = offsets.data(), ++next;
  args.mask = pointer<const uint8_t>(take());
  args.ref_logp = pointer<const float>(take());
  args.entropy = pointer<const float>(take());
  args.score = pointer<const float>(take());
  args.threshold = pointer<const float>(take());
  args.token_mask = pointer<const uint8_t>(take());
  args.token_weight = pointer<const float>(take());
  args.low = pointer<const float>(take());
  args.high = pointer<const float>(take());
  args.row_trajectory = pointer<const int64_t>(take());
  args.trajectory_start = pointer<const int64_t>(take());
  args.trajectory_rows = pointer<const int64_t>(take());
  args.advantage_per_token = inputs[next++].cast<bool>();
  next += 4;  // the leaves, see add_leaves
  args.target = pointer<const float>(take());
  args.target_per_token = inputs[next++].cast<bool>();
  args.penalty_mask = pointer<const uint8_t>(take());
  args.kl_weight = pointer<const float>(take());
  args.correction.first = pointer<const float>(take());
  args.correction.second = pointer<const float>(take());
  args.correction.rule = rule;
  args.loss = pointer<float>(outputs.loss);
  args.metrics = pointer<double>(outputs.metrics);
  args.grad = pointer<float>(outputs.grad);
  args.token_loss = pointer<float>(outputs.token_loss);
  args.workspace = pointer<void>(outputs.workspace);
  return args;
}

inline void add_leaves(Hierarchy& hierarchy, int64_t leaves, const py::tuple& inputs) {
  hierarchy.leaves = leaves;
  hierarchy.leaf_begin = pointer<const int64_t>(address_of(inputs[kLeaves], kInputs[kLeaves]));
  hierarchy.leaf_end = pointer<const int64_t>(address_of(inputs[kLeaves + 1], kInputs[kLeaves + 1]));
  hierarchy.leaf_row = pointer<const int64_t>(address_of(inputs[kLeaves + 2], kInputs[kLeaves + 2]));
  hierarchy.ancestors = pointer<const int64_t>(address_of(inputs[kLeaves + 3], kInputs[kLeaves + 3]));
}

// levels: (gate, routing, aggregate, low, high, slope) each; low and high are [channel][sign of the advantage]. term: None, or
// (penalty, its coefficient, and the pairs of a TermSpec in their order).
inline Hierarchy make_hierarchy(bool split, const py::tuple& token_low, const py::tuple& token_high, const py::list& levels,
                                const py::object& term) {
  Hierarchy hierarchy{};
  hierarchy.split = split;
  if (!term.is_none()) {
    const py::tuple fields = term;
    TokenTerm& out = hierarchy.term;
    out.present = 1;
    out.penalty = Penalty(fields[0].cast<int>());
    out.penalty_coefficient = fields[1].cast<double>();
    double (*const pairs[])[2] = {&out.head,        &out.slope_low, &out.slope_high, &out.weight_low,
                                  &out.weight_high, &out.pre_low,   &out.pre_high};
    for (size_t at = 0; at < std::size(pairs); ++at) copy_pair(*pairs[at], fields[2 + at]);
  }
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

// Asks for large pages, of memory of this process that nothing has touched: a kernel may go over a workspace once, and faults
// on its small pages then take longer than the kernel. Nothing depends on the answer.
inline void advise_large_pages(Address memory, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 4096;
  const uintptr_t first = (memory.value + kPage - 1) / kPage * kPage, end = (memory.value + uintptr_t(bytes)) / kPage * kPage;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

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

inline void bind(py::module_& m) {
  m.attr("metrics") = int(kMetrics);
  py::list names;
  for (const char* name : kInputs) names.append(name);
  m.attr("inputs") = names;
  m.def("description", [] {
    if (hpo_description() == nullptr) check(hpo_unusable);
    return std::string(hpo_description());
  });
  m.def("advise_large_pages", &advise_large_pages);
  py::class_<PolicyLossSpec>(m, "PolicyLossSpec", py::module_local()).def(py::init(&make_spec));

  m.def("policy_loss_workspace", &hpo_policy_loss_workspace);
  m.def("policy_loss", [](const PolicyLossSpec& spec, int64_t tokens, int64_t rows, const py::tuple& inputs, Address loss,
                          Address metrics, Address grad, Address token_loss, Address workspace, int64_t context) {
    const Offsets offsets = offsets_of(inputs, rows);
    const PolicyLossArgs args =
        make_args(tokens, rows, inputs, offsets, {loss, metrics, grad, token_loss, workspace}, spec.correction);
    run([&] { return hpo_policy_loss(&args, &spec.structure, &spec.numbers, context); });
  });

  py::class_<Hierarchy>(m, "Hierarchy", py::module_local()).def(py::init(&make_hierarchy));
  m.def("hierarchy_workspace", &hpo_hierarchy_workspace);
  m.def("hierarchy", [](const PolicyLossSpec& spec, const Hierarchy& levels, int64_t tokens, int64_t rows, int64_t leaves,
                        const py::tuple& inputs, Address loss, Address metrics, Address grad, Address token_loss,
                        Address workspace, int stage, Address sums, Address largest, Address aggregate_grad, int64_t context) {
    const Offsets offsets = offsets_of(inputs, rows);
    const PolicyLossArgs args =
        make_args(tokens, rows, inputs, offsets, {loss, metrics, grad, token_loss, workspace}, spec.correction);
    Hierarchy hierarchy = levels;
    add_leaves(hierarchy, leaves, inputs);
    hierarchy.stage = Stage(stage);
    hierarchy.tables = {pointer<int64_t>(sums), pointer<int64_t>(largest), pointer<int64_t>(aggregate_grad)};
    run([&] { return hpo_hierarchy(&args, &spec.structure, &spec.numbers, &hierarchy, context); });
  });

  m.def("correction_workspace", &hpo_correction_workspace);
  m.def("correction", [](int statistic, int reduction, int action, bool of_segments, bool strict, const py::tuple& low,
                         const py::tuple& high, int64_t tokens, int64_t rows, int64_t leaves, const py::tuple& inputs,
                         Address factor, Address workspace, int stage, Address segments, int64_t context) {
    Outputs outputs{};
    outputs.workspace = workspace;
    const Offsets offsets = offsets_of(inputs, rows);
    const PolicyLossArgs args = make_args(tokens, rows, inputs, offsets, outputs);
    Hierarchy hierarchy{};
    hierarchy.depth = of_segments;
    hierarchy.stage = Stage(stage);
    hierarchy.tables.sums = pointer<int64_t>(segments);
    add_leaves(hierarchy, leaves, inputs);
    const CorrectionRule rule = make_rule(statistic, action, strict, low, high);
    const Correction correction{rule, Reduction(reduction), pointer<float>(factor)};
    run([&] { return hpo_correction(&args, &hierarchy, &correction, context); });
  });

  m.def("group_normalise_workspace", &hpo_group_normalise_workspace);
  py::class_<GroupNormaliseArgs>(m, "GroupNormalisation", py::module_local()).def(py::init(&make_groups));
  m.def("group_normalise", [](GroupNormaliseArgs args, int64_t units, const py::tuple& inputs, Address advantages,
                              Address workspace, int64_t context) {
    args.units = units;
    const auto given = [&](size_t field) { return inputs[field].cast<py::tuple>(); };
    const py::tuple values = given(0), ids = given(1), weights = given(2);
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

  m.def("recurrence",
        [](int64_t units, int64_t rows, Address values, Address gains, Address cu_seqlens, Address scanned, int64_t context) {
          const Offsets offsets(cu_seqlens, rows);
          const RecurrenceArgs args = {
              units, rows, pointer<const float>(values), pointer<const float>(gains), offsets.data(), pointer<float>(scanned)};
          run([&] { return hpo_recurrence(&args, context); });
        });

  m.def("window_score_workspace", &hpo_window_score_workspace);
  m.def("window_score",
        [](int64_t tokens, int64_t rows, Address values, Address mask, Address cu_seqlens, int64_t first, int64_t last,
           int boundary, int invalid, int aggregate, Address score, Address workspace, int64_t context) {
          WindowArgs args{};
          args.tokens = tokens;
          args.rows = rows;
          args.values = pointer<const float>(values);
          args.mask = pointer<const uint8_t>(mask);
          const Offsets offsets(cu_seqlens, rows);
          args.cu_seqlens = offsets.data();
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
    OrderStatisticArgs args{};
    args.tokens = tokens;
    args.rows = rows;
    args.values = pointer<const float>(values);
    args.mask = pointer<const uint8_t>(mask);
    const Offsets offsets(cu_seqlens, rows);
    args.cu_seqlens = offsets.data();
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
    SelectArgs args{};
    args.tokens = tokens;
    args.rows = rows;
    args.values = pointer<const float>(values);
    args.mask = pointer<const uint8_t>(mask);
    const Offsets offsets(cu_seqlens, rows);
    args.cu_seqlens = offsets.data();
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

  m.def("row_counts", [](int64_t tokens, int64_t rows, Address mask, Address cu_seqlens, Address counts, int64_t context) {
    RowCountsArgs args{};
    args.tokens = tokens;
    args.rows = rows;
    args.mask = pointer<const uint8_t>(mask);
    const Offsets offsets(cu_seqlens, rows);
    args.cu_seqlens = offsets.data();
    args.counts = pointer<int64_t>(counts);
    run([&] { return hpo_row_counts(&args, context); });
  });

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
