// The kernels of one instruction set. Every file of this folder but dispatch.cpp is compiled once per instruction set, with
// HPO_ISA as the name of its namespace; dispatch.cpp chooses between them. No kernel depends on the number of threads.
#pragma once
#include <cstdint>

namespace hpo {  // the structs of hpo/api/
struct PolicyLossArgs;
struct GateStructure;
struct GateNumbers;
struct Hierarchy;
struct Correction;
struct GroupNormaliseArgs;
struct GroupStatisticsArgs;
struct RecurrenceArgs;
struct WindowArgs;
struct OrderStatisticArgs;
struct SelectArgs;
struct OrderStatisticsArgs;
struct CovarianceArgs;
struct RowCountsArgs;
struct RowSpansArgs;
struct LogprobsArgs;
struct LogprobsBackwardArgs;
}  // namespace hpo

// DO(isa, result, name, parameters) for each kernel.
#define HPO_EACH_KERNEL(DO, isa)                                                                                          \
  DO(isa, int64_t, policy_loss_workspace, (int64_t tokens, int64_t rows))                                                 \
  DO(isa, void, policy_loss,                                                                                              \
     (const PolicyLossArgs& args, const GateStructure& structure, const GateNumbers& numbers, int threads))               \
  DO(isa, int64_t, hierarchy_workspace, (int64_t tokens, int64_t rows, int64_t leaves))                                   \
  DO(isa, void, hierarchy,                                                                                                \
     (const PolicyLossArgs& args, const GateStructure& structure, const GateNumbers& numbers, const Hierarchy& hierarchy, \
      int threads))                                                                                                       \
  DO(isa, int64_t, correction_workspace, (int64_t tokens, int64_t leaves))                                                \
  DO(isa, void, correction,                                                                                               \
     (const PolicyLossArgs& args, const Hierarchy& hierarchy, const Correction& correction, int threads))                 \
  DO(isa, int64_t, group_normalise_workspace, (int64_t units, int32_t terms))                                             \
  DO(isa, void, group_normalise, (const GroupNormaliseArgs& args, int threads))                                           \
  DO(isa, int64_t, group_statistics_workspace, (int64_t units))                                                           \
  DO(isa, void, group_statistics, (const GroupStatisticsArgs& args, int threads))                                         \
  DO(isa, void, recurrence, (const RecurrenceArgs& args, int threads))                                                    \
  DO(isa, int64_t, window_score_workspace, (int64_t tokens, int64_t width))                                               \
  DO(isa, void, window_score, (const WindowArgs& args, int threads))                                                      \
  DO(isa, int64_t, order_statistic_workspace, (int64_t tokens))                                                           \
  DO(isa, void, order_statistic, (const OrderStatisticArgs& args, int threads))                                           \
  DO(isa, void, select, (const SelectArgs& args, int threads))                                                            \
  DO(isa, int64_t, covariance_workspace, (int64_t tokens))                                                                \
  DO(isa, void, covariance, (const CovarianceArgs& args, int threads))                                                    \
  DO(isa, int64_t, order_statistics_workspace, (int64_t tokens, int64_t segments))                                        \
  DO(isa, void, order_statistics, (const OrderStatisticsArgs& args, int threads))                                         \
  DO(isa, void, row_counts, (const RowCountsArgs& args, int threads))                                                     \
  DO(isa, void, row_spans, (const RowSpansArgs& args, int threads))                                                       \
  DO(isa, void, token_logprobs, (const LogprobsArgs& args, int threads))                                                  \
  DO(isa, void, token_logprobs_backward, (const LogprobsBackwardArgs& args, int threads))                                 \
  DO(isa, void, widen, (const uint16_t* from, float* to, int64_t count, int threads))

#define HPO_DECLARE_KERNEL(isa, result, name, parameters) result name parameters;
#define HPO_DECLARE_KERNELS(isa)           \
  namespace hpo::isa {                     \
  HPO_EACH_KERNEL(HPO_DECLARE_KERNEL, isa) \
  }

// bfloat16 as float32. The CPU alone has this kernel, because matrix products there multiply float32 only.
extern "C" int hpo_widen(const uint16_t* from, float* to, int64_t count, int64_t context);
