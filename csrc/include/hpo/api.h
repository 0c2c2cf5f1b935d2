// The C interface of every native backend: plain structs of raw pointers and int64 sizes, the same for C++ and CUDA.
// A null pointer means "not given". Nothing here knows a framework; the Python side checks shapes and dtypes once.
// Whatever the values behind the pointers are, no kernel reads or writes outside the sizes given here.
//
// The functions return 0, or the backend's own error code (see hpo_error). `context` is the CUDA stream, or on the CPU the
// number of threads allowed: results never depend on it.
#pragma once
#include "api/advantages.h"
#include "api/corrections.h"
#include "api/covariance.h"
#include "api/entropy.h"
#include "api/gates.h"
#include "api/hierarchy.h"
#include "api/logprobs.h"
#include "api/loss_from_logits.h"
#include "api/scopes.h"
#include "api/segments.h"

extern "C" {
const char* hpo_error(int status);
// The code that runs: "AVX-512", "sm_80 sm_90 ...", "emulated"; null where none can, and hpo_error(hpo_unusable) says why.
const char* hpo_description();
// CUDA alone. A version is 12080 for CUDA 12.8; the driver's is the newest that it knows, and 0 without a driver.
void hpo_cuda_versions(int* driver, int* runtime);
constexpr int hpo_unusable = 1;
}
