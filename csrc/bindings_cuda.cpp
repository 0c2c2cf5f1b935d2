// HPO_MODULE is _cuda, or _cuda_emulated for the test double built from the same sources.
#include "bindings.h"
#include "hpo/launches.h"

extern "C" const char* hpo_description() {
#ifdef HPO_CUDA_TARGETS
  return HPO_CUDA_TARGETS;  // "sm_80 compute_80 sm_90 ..."
#else
  return "emulated";
#endif
}

PYBIND11_MODULE(HPO_MODULE, m) {
  using namespace hpo::bindings;
  using namespace hpo;
  bind(m);
#ifdef HPO_CUDA_TARGETS
  m.def("versions", [] {
    int driver, runtime;
    hpo_cuda_versions(&driver, &runtime);
    return std::pair(driver, runtime);
  });
#endif
  m.def("scale", [](Address values, int64_t count, int type, Address factor, int64_t context) {
    run([&] { return hpo_scale(pointer<void>(values), count, LogitType(type), pointer<const float>(factor), context); });
  });
  m.def("loss_from_logits_blocks", [](int64_t rows, int64_t columns, int type) {
    LogprobsArgs args{};
    args.rows = rows;
    args.columns = columns;
    args.type = hpo::LogitType(type);
    return hpo_loss_from_logits_blocks(&args);
  });
  // Returns whether the kernel was launched: not without rows, and not if these are too long for the cache.
  // levels: None without a term.
  m.def("loss_from_logits", [](const py::tuple& logit_rows, const PolicyLossSpec& spec, const Hierarchy* levels, int64_t tokens,
                               int64_t rows, const py::tuple& inputs, Address logp, Address entropy, Address grad,
                               int64_t grad_outer_stride, int64_t grad_inner_stride, int64_t context) {
    LogprobsBackwardArgs of_logits{};
    of_logits.given = make_logprobs(logit_rows);
    of_logits.given.kept = 3;
    of_logits.given.logp = pointer<float>(logp);
    of_logits.given.entropy = pointer<float>(entropy);
    of_logits.grad = pointer<void>(grad);
    of_logits.grad_outer_stride = grad_outer_stride;
    of_logits.grad_inner_stride = grad_inner_stride;
    const int64_t blocks = hpo_loss_from_logits_blocks(&of_logits.given);
    if (blocks == 0) return false;
    const Inputs call(tokens, rows, inputs, {});
    run([&] { return hpo_loss_from_logits(&of_logits, &call.args, &spec.structure, &spec.numbers, levels, blocks, context); });
    return true;
  });
  m.def("launches", &hpo::LaunchCounter::all, "Kernel launches so far, by kernel name.");
  m.def("launches_of_instances", &hpo::LaunchCounter::of_instances, "The same by instance, where kernels are emulated.");
}
