// The kernels of one instruction set. Every file of this folder but dispatch.cpp is compiled once per instruction set, with
// HPO_ISA as the name of its namespace; dispatch.cpp chooses between them. No kernel depends on the number of threads.
#pragma once
#include <cstdint>

// DO(name, type of the arguments, ...) for each op that takes nothing but these; hpo_name of hpo/api/ is its call.
#define HPO_EACH_OP(DO, ...)                             \
  DO(group_normalise, GroupNormaliseArgs, __VA_ARGS__)   \
  DO(group_statistics, GroupStatisticsArgs, __VA_ARGS__) \
  DO(recurrence, RecurrenceArgs, __VA_ARGS__)            \
  DO(window_score, WindowArgs, __VA_ARGS__)              \
  DO(order_statistic, OrderStatisticArgs, __VA_ARGS__)   \
  DO(select, SelectArgs, __VA_ARGS__)                    \
  DO(order_statistics, OrderStatisticsArgs, __VA_ARGS__) \
  DO(covariance, CovarianceArgs, __VA_ARGS__)            \
  DO(row_counts, RowCountsArgs, __VA_ARGS__)             \
  DO(row_spans, RowSpansArgs, __VA_ARGS__)               \
  DO(token_logprobs, LogprobsArgs, __VA_ARGS__)          \
  DO(token_logprobs_backward, LogprobsBackwardArgs, __VA_ARGS__)

namespace hpo {  // the structs of hpo/api/
#define HPO_DECLARE_ARGS(name, Args, ...) struct Args;
HPO_EACH_OP(HPO_DECLARE_ARGS)
struct PolicyLossArgs;
struct GateStructure;
struct GateNumbers;
struct Hierarchy;
struct Correction;
}  // namespace hpo

// DO(isa, result, name, parameters) for each kernel.
#define HPO_KERNEL_OF_OP(name, Args, DO, isa) DO(isa, void, name, (const Args& args, int threads))
#define HPO_EACH_KERNEL(DO, isa)                                                                                          \
  HPO_EACH_OP(HPO_KERNEL_OF_OP, DO, isa)                                                                                  \
  DO(isa, void, policy_loss,                                                                                              \
     (const PolicyLossArgs& args, const GateStructure& structure, const GateNumbers& numbers, int threads))               \
  DO(isa, void, hierarchy,                                                                                                \
     (const PolicyLossArgs& args, const GateStructure& structure, const GateNumbers& numbers, const Hierarchy& hierarchy, \
      int threads))                                                                                                       \
  DO(isa, void, correction,                                                                                               \
     (const PolicyLossArgs& args, const Hierarchy& hierarchy, const Correction& correction, int threads))                 \
  DO(isa, void, widen, (const uint16_t* from, float* to, int64_t count, int threads))                                     \
  DO(isa, int64_t, policy_loss_workspace, (int64_t tokens, int64_t rows))                                                 \
  DO(isa, int64_t, hierarchy_workspace, (int64_t tokens, int64_t rows, int64_t leaves))                                   \
  DO(isa, int64_t, correction_workspace, (int64_t tokens, int64_t leaves))                                                \
  DO(isa, int64_t, group_normalise_workspace, (int64_t units, int32_t terms))                                             \
  DO(isa, int64_t, group_statistics_workspace, (int64_t units))                                                           \
  DO(isa, int64_t, window_score_workspace, (int64_t tokens, int64_t width))                                               \
  DO(isa, int64_t, order_statistic_workspace, (int64_t tokens))                                                           \
  DO(isa, int64_t, covariance_workspace, (int64_t tokens))                                                                \
  DO(isa, int64_t, order_statistics_workspace, (int64_t tokens, int64_t segments))

#define HPO_DECLARE_KERNEL(isa, result, name, parameters) result name parameters;
#define HPO_DECLARE_KERNELS(isa)           \
  namespace hpo::isa {                     \
  HPO_EACH_KERNEL(HPO_DECLARE_KERNEL, isa) \
  }

// bfloat16 as float32. The CPU alone has this kernel, because matrix products there multiply float32 only.
extern "C" int hpo_widen(const uint16_t* from, float* to, int64_t count, int64_t context);
