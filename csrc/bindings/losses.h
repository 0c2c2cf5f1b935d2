// policy_loss, hierarchy and correction.
#pragma once
#include <iterator>

#include "arguments.h"
#include "hpo/metrics.h"

namespace hpo::bindings {

struct PolicyLossSpec {
  GateStructure structure;
  GateNumbers numbers;
  TokenCorrection correction;
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

inline CorrectionRule make_rule(const py::tuple& rule) {
  return make_rule(rule[0].cast<int>(), rule[1].cast<int>(), rule[2].cast<bool>(), rule[3], rule[4]);
}

// correction: None, or the arguments of make_rule. row_corrections: (these, the reduction) each.
inline PolicyLossSpec make_spec(int token, int head, int kl, int kl_gradient, bool strict, py::sequence low_driven,
                                py::sequence high_driven, py::sequence token_low, py::sequence token_high, double kl_beta,
                                const py::object& correction, const py::tuple& row_corrections) {
  PolicyLossSpec spec{};
  spec.structure.token = TokenGate(token);
  spec.structure.head = Head(head);
  spec.structure.kl = KLEstimator(kl);
  spec.structure.kl_gradient = KLGradient(kl_gradient);
  spec.structure.strict = strict;
  for (int sign = 0; sign < 2; ++sign) {
    spec.structure.low_driven[sign] = low_driven[sign].cast<bool>();
    spec.structure.high_driven[sign] = high_driven[sign].cast<bool>();
    spec.numbers.token_low[sign] = token_low[sign].cast<double>();
    spec.numbers.token_high[sign] = token_high[sign].cast<double>();
  }
  spec.numbers.kl_beta = kl_beta;
  if (!correction.is_none()) {
    spec.correction.of_tokens = 1;
    spec.correction.rule = make_rule(py::tuple(correction));
  }
  if (row_corrections.size() > size_t(kMostRowCorrections)) throw std::invalid_argument("row_corrections: expected at most 2");
  for (const py::handle item : row_corrections) {
    const py::tuple each = py::reinterpret_borrow<py::tuple>(item);
    spec.correction.rows[spec.correction.of_rows++] = {make_rule(py::tuple(each[0])), Reduction(each[1].cast<int>())};
  }
  return spec;
}

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
constexpr size_t kLeaves = 15;  // of leaf_begin, which the other three follow

inline Offsets offsets_of(const py::tuple& inputs, int64_t rows) {
  if (inputs.size() != std::size(kInputs)) throw std::invalid_argument("inputs: expected a PolicyLossInputs");
  return {address_of(inputs[kOffsets], kInputs[kOffsets]), rows};
}

inline PolicyLossArgs make_args(int64_t tokens, int64_t rows, const py::tuple& inputs, const Offsets& offsets,
                                const Outputs& outputs, const TokenCorrection& correction = {}) {
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
  args.advantage_per_token = inputs[next++].cast<bool>();
  next += 4;  // the leaves, see add_leaves
  args.target = pointer<const float>(take());
  args.target_per_token = inputs[next++].cast<bool>();
  args.penalty_mask = pointer<const uint8_t>(take());
  args.kl_weight = pointer<const float>(take());
  args.correction = correction;
  args.correction.first = pointer<const float>(take());
  args.correction.second = pointer<const float>(take());
  args.loss = pointer<float>(outputs.loss);
  args.metrics = pointer<double>(outputs.metrics);
  args.grad = pointer<float>(outputs.grad);
  args.token_loss = pointer<float>(outputs.token_loss);
  args.workspace = pointer<void>(outputs.workspace);
  return args;
}

// Without tables the rows are the leaves.
inline void add_leaves(Hierarchy& hierarchy, int64_t leaves, const py::tuple& inputs, const Offsets& offsets) {
  const auto table = [&](size_t at) { return pointer<const int64_t>(address_of(inputs[kLeaves + at], kInputs[kLeaves + at])); };
  hierarchy.leaves = leaves;
  hierarchy.leaf_begin = table(0), hierarchy.leaf_end = table(1), hierarchy.leaf_row = table(2), hierarchy.ancestors = table(3);
  if (!hierarchy.leaf_begin && leaves > 0) hierarchy.leaf_begin = offsets.data(), hierarchy.leaf_end = offsets.data() + 1;
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
  copy_pair(hierarchy.token_low, token_low);
  copy_pair(hierarchy.token_high, token_high);
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

inline void bind_losses(py::module_& m) {
  m.attr("metrics") = int(kMetrics);
  py::list names;
  for (const char* name : kInputs) names.append(name);
  m.attr("inputs") = names;
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
    add_leaves(hierarchy, leaves, inputs, offsets);
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
    add_leaves(hierarchy, leaves, inputs, offsets);
    const CorrectionRule rule = make_rule(statistic, action, strict, low, high);
    const Correction correction{rule, Reduction(reduction), pointer<float>(factor)};
    run([&] { return hpo_correction(&args, &hierarchy, &correction, context); });
  });
}

}  // namespace hpo::bindings
