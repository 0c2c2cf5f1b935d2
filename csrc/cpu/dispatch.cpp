// The C interface of the CPU backend: chooses an instruction set once and hands every call to its kernels.
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "arithmetic.h"
#include "hpo/api.h"
#include "kernels.h"

HPO_DECLARE_KERNELS(generic)
#if defined(__x86_64__)
HPO_DECLARE_KERNELS(avx2)
HPO_DECLARE_KERNELS(avx512)
#endif

namespace {

struct Kernels {
  const char* name;         // as in HPO_CORE_ISA
  const char* description;
  bool supported;           // by this CPU
#define HPO_MEMBER(isa, result, kernel, parameters) decltype(&hpo::isa::kernel) kernel;
  HPO_EACH_KERNEL(HPO_MEMBER, generic)
};

#define HPO_VALUE(isa, result, kernel, parameters) hpo::isa::kernel,
#define HPO_KERNELS(isa, description, supported) {#isa, description, supported, HPO_EACH_KERNEL(HPO_VALUE, isa)}

// A child process after fork() has no OpenMP threads, and libgomp would wait for those of the parent for ever. Results do not
// depend on the number of threads, so the child uses one.
std::atomic<bool> forked{false};

struct Choice {
  const Kernels* kernels = nullptr;
  std::string error;  // the reason if there are no kernels

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
    const char* wanted_isa = std::getenv("HPO_CORE_ISA");
    std::string here;
    for (const Kernels& candidate : all) {
      if (!candidate.supported) continue;
      if (!kernels && (!wanted_isa || !*wanted_isa || std::string(wanted_isa) == candidate.name)) kernels = &candidate;
      here += std::string(here.empty() ? "" : ", ") + candidate.name;
    }
    if (!kernels) {
      error = "HPO_CORE_ISA=" + std::string(wanted_isa) + " cannot run on this machine; it can run " + here +
              ". Set HPO_CORE_ISA to one of these, or unset it to use the first.";
    }
  }
};

const Choice& choice() {
  static const Choice once;
  return once;
}

enum Status { kDone = 0, kNoKernels = hpo_unusable };

// Runs a kernel of the chosen instruction set.
template <class... Parameters, class... Arguments>
int run(void (*Kernels::*kernel)(Parameters...), int64_t context, const Arguments&... arguments) {
  const Kernels* kernels = choice().kernels;
  if (!kernels) return kNoKernels;
  const int64_t most_threads = 1024;  // whatever number a caller asks for
  const StandardArithmetic standard;
  (kernels->*kernel)(arguments..., forked || context < 1 ? 1 : int(context < most_threads ? context : most_threads));
  return kDone;
}

// The bytes of a workspace.
template <class... Sizes>
int64_t measure(int64_t (*Kernels::*workspace)(Sizes...), Sizes... sizes) {
  const Kernels* kernels = choice().kernels;
  return kernels ? (kernels->*workspace)(sizes...) : 0;
}

}  // namespace

int64_t hpo_policy_loss_workspace(int64_t tokens, int64_t rows) {
  return measure(&Kernels::policy_loss_workspace, tokens, rows);
}
int hpo_policy_loss(const hpo::PolicyLossArgs* args, const hpo::GateStructure* structure, const hpo::GateNumbers* numbers,
                    int64_t context) {
  return run(&Kernels::policy_loss, context, *args, *structure, *numbers);
}
int64_t hpo_hierarchy_workspace(int64_t tokens, int64_t rows, int64_t leaves) {
  return measure(&Kernels::hierarchy_workspace, tokens, rows, leaves);
}
int hpo_hierarchy(const hpo::PolicyLossArgs* args, const hpo::GateStructure* structure, const hpo::GateNumbers* numbers,
                  const hpo::Hierarchy* hierarchy, int64_t context) {
  return run(&Kernels::hierarchy, context, *args, *structure, *numbers, *hierarchy);
}
int64_t hpo_correction_workspace(int64_t tokens, int64_t leaves) {
  return measure(&Kernels::correction_workspace, tokens, leaves);
}
int hpo_correction(const hpo::PolicyLossArgs* args, const hpo::Hierarchy* hierarchy, const hpo::Correction* correction,
                   int64_t context) {
  return run(&Kernels::correction, context, *args, *hierarchy, *correction);
}
int64_t hpo_group_normalise_workspace(int64_t units, int32_t terms) {
  return measure(&Kernels::group_normalise_workspace, units, terms);
}
int64_t hpo_group_statistics_workspace(int64_t units) { return measure(&Kernels::group_statistics_workspace, units); }
int64_t hpo_window_score_workspace(int64_t tokens, int64_t width) {
  return measure(&Kernels::window_score_workspace, tokens, width);
}
int64_t hpo_order_statistic_workspace(int64_t tokens) { return measure(&Kernels::order_statistic_workspace, tokens); }
int64_t hpo_covariance_workspace(int64_t tokens) { return measure(&Kernels::covariance_workspace, tokens); }
int64_t hpo_order_statistics_workspace(int64_t tokens, int64_t segments) {
  return measure(&Kernels::order_statistics_workspace, tokens, segments);
}

#define HPO_CALL(kernel, Args, ...) \
  int hpo_##kernel(const hpo::Args* args, int64_t context) { return run(&Kernels::kernel, context, *args); }
HPO_EACH_OP(HPO_CALL)

int hpo_widen(const uint16_t* from, float* to, int64_t count, int64_t context) {
  return run(&Kernels::widen, context, from, to, count);
}

const char* hpo_error(int status) { return status == kNoKernels ? choice().error.c_str() : "no error"; }

const char* hpo_description() { return choice().kernels ? choice().kernels->description : nullptr; }
