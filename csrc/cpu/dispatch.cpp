// The C interface of the CPU backend: chooses an instruction set once and hands every call to its kernels.
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "arithmetic.h"
#include "kernels.h"

HPO_DECLARE_KERNELS(generic)
#if defined(__x86_64__)
HPO_DECLARE_KERNELS(avx2)
HPO_DECLARE_KERNELS(avx512)
#endif

namespace {

// What kernels.h declares, once for the types and for the values of a table.
#define HPO_EACH_KERNEL(DO, isa)      \
  DO(isa, policy_loss_workspace)      \
  DO(isa, policy_loss)                \
  DO(isa, hierarchy_workspace)        \
  DO(isa, hierarchy)                  \
  DO(isa, correction_workspace)       \
  DO(isa, correction)                 \
  DO(isa, group_normalise_workspace)  \
  DO(isa, group_normalise)            \
  DO(isa, group_statistics_workspace) \
  DO(isa, group_statistics)           \
  DO(isa, recurrence)                 \
  DO(isa, window_score_workspace)     \
  DO(isa, window_score)               \
  DO(isa, order_statistic_workspace)  \
  DO(isa, order_statistic)            \
  DO(isa, select)                     \
  DO(isa, order_statistics_workspace) \
  DO(isa, order_statistics)           \
  DO(isa, row_counts)                 \
  DO(isa, row_spans)                  \
  DO(isa, token_logprobs)             \
  DO(isa, token_logprobs_backward)    \
  DO(isa, widen)

struct Kernels {
  const char* name;         // as in HPO_CORE_ISA
  const char* description;
  bool supported;           // by this CPU
#define HPO_MEMBER(isa, kernel) decltype(&hpo::isa::kernel) kernel;
  HPO_EACH_KERNEL(HPO_MEMBER, generic)
};

#define HPO_VALUE(isa, kernel) hpo::isa::kernel,
#define HPO_KERNELS(isa, description, supported) {#isa, description, supported, HPO_EACH_KERNEL(HPO_VALUE, isa)}

// A child process after fork() has no OpenMP threads, and libgomp would wait for those of the parent for ever. Results do not
// depend on the number of threads, so the child uses one.
std::atomic<bool> forked{false};

struct Choice {
  const Kernels* kernels = nullptr;
  std::string error;  // the reason if there are none

  Choice() {
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    static const Kernels all[] = {HPO_KERNELS(avx512, "AVX-512", avx512), HPO_KERNELS(avx2, "AVX2", avx2),
                                  HPO_KERNELS(generic, "generic", true)};
#else
    static const Kernels all[] = {HPO_KERNELS(generic, "generic", true)};
#endif
    const char* asked = std::getenv("HPO_CORE_ISA");
    std::string here;
    for (const Kernels& candidate : all) {
      if (!candidate.supported) continue;
      if (!kernels && (!asked || !*asked || std::string(asked) == candidate.name)) kernels = &candidate;
      here += std::string(here.empty() ? "" : ", ") + candidate.name;
    }
    if (!kernels) {
      error = "HPO_CORE_ISA=" + std::string(asked) + " cannot run on this machine; it can run " + here +
              ". Set HPO_CORE_ISA to one of these, or unset it to use the first.";
    }
  }
};

const Choice& choice() {
  static const Choice once;
  return once;
}

enum Status { kDone = 0, kNoKernels = hpo_unusable };

template <class Call>
int run(int64_t context, const Call& call) {
  const Kernels* kernels = choice().kernels;
  if (!kernels) return kNoKernels;
  const int64_t most = 1024;
  const StandardArithmetic standard;
  call(*kernels, forked || context < 1 ? 1 : int(context < most ? context : most));
  return kDone;
}

}  // namespace

int64_t hpo_policy_loss_workspace(int64_t tokens, int64_t rows) {
  const Kernels* kernels = choice().kernels;
  return kernels ? kernels->policy_loss_workspace(tokens, rows) : 0;
}

int hpo_policy_loss(const hpo::PolicyLossArgs* args, const hpo::GateStructure* structure, const hpo::GateNumbers* numbers,
                    int64_t context) {
  return run(context, [&](const Kernels& kernels, int threads) { kernels.policy_loss(*args, *structure, *numbers, threads); });
}

int64_t hpo_hierarchy_workspace(int64_t tokens, int64_t rows, int64_t leaves) {
  const Kernels* kernels = choice().kernels;
  return kernels ? kernels->hierarchy_workspace(tokens, rows, leaves) : 0;
}

int hpo_hierarchy(const hpo::PolicyLossArgs* args, const hpo::GateStructure* structure, const hpo::GateNumbers* numbers,
                  const hpo::Hierarchy* hierarchy, int64_t context) {
  return run(context,
             [&](const Kernels& kernels, int threads) { kernels.hierarchy(*args, *structure, *numbers, *hierarchy, threads); });
}

int64_t hpo_correction_workspace(int64_t tokens, int64_t rows, int64_t leaves) {
  const Kernels* kernels = choice().kernels;
  return kernels ? kernels->correction_workspace(tokens, rows, leaves) : 0;
}

int hpo_correction(const hpo::PolicyLossArgs* args, const hpo::Hierarchy* hierarchy, const hpo::Correction* correction,
                   int64_t context) {
  return run(context,
             [&](const Kernels& kernels, int threads) { kernels.correction(*args, *hierarchy, *correction, threads); });
}

int64_t hpo_group_normalise_workspace(int64_t units, int32_t terms) {
  const Kernels* kernels = choice().kernels;
  return kernels ? kernels->group_normalise_workspace(units, terms) : 0;
}

int hpo_group_normalise(const hpo::GroupNormaliseArgs* args, int64_t context) {
  return run(context, [&](const Kernels& kernels, int threads) { kernels.group_normalise(*args, threads); });
}

int64_t hpo_group_statistics_workspace(int64_t units) {
  const Kernels* kernels = choice().kernels;
  return kernels ? kernels->group_statistics_workspace(units) : 0;
}

int hpo_group_statistics(const hpo::GroupStatisticsArgs* args, int64_t context) {
  return run(context, [&](const Kernels& kernels, int threads) { kernels.group_statistics(*args, threads); });
}

int hpo_recurrence(const hpo::RecurrenceArgs* args, int64_t context) {
  return run(context, [&](const Kernels& kernels, int threads) { kernels.recurrence(*args, threads); });
}

int64_t hpo_window_score_workspace(int64_t tokens, int64_t width) {
  const Kernels* kernels = choice().kernels;
  return kernels ? kernels->window_score_workspace(tokens, width) : 0;
}

int hpo_window_score(const hpo::WindowArgs* args, int64_t context) {
  return run(context, [&](const Kernels& kernels, int threads) { kernels.window_score(*args, threads); });
}

int64_t hpo_order_statistic_workspace(int64_t tokens) {
  const Kernels* kernels = choice().kernels;
  return kernels ? kernels->order_statistic_workspace(tokens) : 0;
}

int hpo_order_statistic(const hpo::OrderStatisticArgs* args, int64_t context) {
  return run(context, [&](const Kernels& kernels, int threads) { kernels.order_statistic(*args, threads); });
}

int hpo_select(const hpo::SelectArgs* args, int64_t context) {
  return run(context, [&](const Kernels& kernels, int threads) { kernels.select(*args, threads); });
}

int64_t hpo_order_statistics_workspace(int64_t tokens, int64_t segments) {
  const Kernels* kernels = choice().kernels;
  return kernels ? kernels->order_statistics_workspace(tokens, segments) : 0;
}

int hpo_order_statistics(const hpo::OrderStatisticsArgs* args, int64_t context) {
  return run(context, [&](const Kernels& kernels, int threads) { kernels.order_statistics(*args, threads); });
}

int hpo_row_counts(const hpo::RowCountsArgs* args, int64_t context) {
  return run(context, [&](const Kernels& kernels, int threads) { kernels.row_counts(*args, threads); });
}

int hpo_row_spans(const hpo::RowSpansArgs* args, int64_t context) {
  return run(context, [&](const Kernels& kernels, int threads) { kernels.row_spans(*args, threads); });
}

int hpo_token_logprobs(const hpo::LogprobsArgs* args, int64_t context) {
  return run(context, [&](const Kernels& kernels, int threads) { kernels.token_logprobs(*args, threads); });
}

int hpo_token_logprobs_backward(const hpo::LogprobsBackwardArgs* args, int64_t context) {
  return run(context, [&](const Kernels& kernels, int threads) { kernels.token_logprobs_backward(*args, threads); });
}

int hpo_widen(const uint16_t* from, float* to, int64_t count, int64_t context) {
  return run(context, [&](const Kernels& kernels, int threads) { kernels.widen(from, to, count, threads); });
}

const char* hpo_error(int status) { return status == kNoKernels ? choice().error.c_str() : "no error"; }

const char* hpo_description() { return choice().kernels ? choice().kernels->description : nullptr; }
