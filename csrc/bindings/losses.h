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

inline Outputs make_outputs(const py::tuple& tensors, Address workspace) {
  if (tensors.size() != 4) throw std::invalid_argument("outputs: expected loss, metrics, grad and token_loss");
  return {address_at(tensors, 0), address_at(tensors, 1), address_at(tensors, 2), address_at(tensors, 3), workspace};
}

// No tensors: the sums of segments stay inside the call.
inline SegmentTables make_tables(const py::tuple& tensors) {
  if (tensors.size() == 0) return {};
  if (tensors.size() != 3) throw std::invalid_argument("tables: expected sums, largest and aggregate_grad, or nothing");
  const auto table = [&](int at) { return pointer<int64_t>(address_at(tensors, at)); };
  return {table(0), table(1), table(2)};
}

template <class T>
void read(T*& to, py::handle tensor, const char* name) {
  to = pointer<T>(address_of(tensor, name));
}
inline void read(int32_t& to, py::handle flag, const char*) { to = flag.cast<bool>(); }

// DO(field, place in Inputs) for each field of PolicyLossInputs of hpo_core/specs, in the order there, which a test compares.
#define HPO_EACH_INPUT(DO)                          \
  DO(logp, args.logp)                               \
  DO(old_logp, args.old_logp)                       \
  DO(advantages, args.advantages)                   \
  DO(weights, args.weights)                         \
  DO(cu_seqlens, args.cu_seqlens)                   \
  DO(mask, args.mask)                               \
  DO(ref_logp, args.ref_logp)                       \
  DO(entropy, args.entropy)                         \
  DO(score, args.score)                             \
  DO(threshold, args.threshold)                     \
  DO(token_mask, args.token_mask)                   \
  DO(token_weight, args.token_weight)               \
  DO(low, args.low)                                 \
  DO(high, args.high)                               \
  DO(advantage_per_token, args.advantage_per_token) \
  DO(leaf_begin, hierarchy.leaf_begin)              \
  DO(leaf_end, hierarchy.leaf_end)                  \
  DO(leaf_row, hierarchy.leaf_row)                  \
  DO(ancestors, hierarchy.ancestors)                \
  DO(target, args.target)                           \
  DO(target_per_token, args.target_per_token)       \
  DO(penalty_mask, args.penalty_mask)               \
  DO(kl_weight, args.kl_weight)                     \
  DO(correction_first, args.correction.first)       \
  DO(correction_second, args.correction.second)

#define HPO_NAME(field, place) #field,
constexpr const char* kInputs[] = {HPO_EACH_INPUT(HPO_NAME)};

// The arguments of a call. `fields` is a PolicyLossInputs; leaves: how many, and without tables of them they are the rows.
class Inputs {
 public:
  PolicyLossArgs args{};
  Hierarchy hierarchy;

  Inputs(int64_t tokens, int64_t rows, const py::tuple& fields, const Outputs& outputs, const TokenCorrection& correction = {},
         const Hierarchy& levels = {}, int64_t leaves = 0)
      : hierarchy(levels) {
    if (fields.size() != std::size(kInputs)) throw std::invalid_argument("inputs: expected a PolicyLossInputs");
    args.tokens = tokens;
    args.rows = rows;
    args.correction = correction;
    py::ssize_t next = 0;
#define HPO_READ(field, place) read(place, PyTuple_GET_ITEM(fields.ptr(), next++), #field);
    HPO_EACH_INPUT(HPO_READ)
    offsets_ = {args.cu_seqlens, rows};
    args.cu_seqlens = offsets_.data();
    args.loss = pointer<float>(outputs.loss);
    args.metrics = pointer<double>(outputs.metrics);
    args.grad = pointer<float>(outputs.grad);
    args.token_loss = pointer<float>(outputs.token_loss);
    args.workspace = pointer<void>(outputs.workspace);
    hierarchy.leaves = leaves;
    const bool are_rows = !hierarchy.leaf_begin && leaves > 0;
    if (are_rows) hierarchy.leaf_begin = offsets_.data(), hierarchy.leaf_end = offsets_.data() + 1;
  }
  Inputs(const Inputs&) = delete;

 private:
  Offsets offsets_;
};

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
  m.def("policy_loss", [](const PolicyLossSpec& spec, int64_t tokens, int64_t rows, const py::tuple& inputs,
                          const py::tuple& outputs, Address workspace, int64_t context) {
    const Inputs call(tokens, rows, inputs, make_outputs(outputs, workspace), spec.correction);
    run([&] { return hpo_policy_loss(&call.args, &spec.structure, &spec.numbers, context); });
  });

  py::class_<Hierarchy>(m, "Hierarchy", py::module_local()).def(py::init(&make_hierarchy));
  m.def("hierarchy_workspace", &hpo_hierarchy_workspace);
  m.def("hierarchy", [](const PolicyLossSpec& spec, const Hierarchy& levels, int64_t tokens, int64_t rows, int64_t leaves,
                        const py::tuple& inputs, const py::tuple& outputs, Address workspace, int stage,
                        const py::tuple& tables, int64_t context) {
    Inputs call(tokens, rows, inputs, make_outputs(outputs, workspace), spec.correction, levels, leaves);
    call.hierarchy.stage = Stage(stage);
    call.hierarchy.tables = make_tables(tables);
    run([&] { return hpo_hierarchy(&call.args, &spec.structure, &spec.numbers, &call.hierarchy, context); });
  });

  m.def("correction_workspace", &hpo_correction_workspace);
  m.def("correction", [](int statistic, int reduction, int action, bool of_segments, bool strict, const py::tuple& low,
                         const py::tuple& high, int64_t tokens, int64_t rows, int64_t leaves, const py::tuple& inputs,
                         Address factor, Address workspace, int stage, Address segments, int64_t context) {
    Hierarchy level{};
    level.depth = of_segments;
    level.stage = Stage(stage);
    level.tables.sums = pointer<int64_t>(segments);
    Outputs outputs{};
    outputs.workspace = workspace;
    const Inputs call(tokens, rows, inputs, outputs, {}, level, leaves);
    const CorrectionRule rule = make_rule(statistic, action, strict, low, high);
    const Correction correction{rule, Reduction(reduction), pointer<float>(factor)};
    run([&] { return hpo_correction(&call.args, &call.hierarchy, &correction, context); });
  });
}

}  // namespace hpo::bindings
