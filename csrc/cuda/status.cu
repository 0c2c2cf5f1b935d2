#include "hpo/api.h"
#include "hpo/cuda.h"

extern "C" const char* hpo_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }

#ifndef HPO_EMULATE
// Neither query starts CUDA.
extern "C" void hpo_cuda_versions(int* driver, int* runtime) {
  *driver = *runtime = 0;
  cudaDriverGetVersion(driver);
  cudaRuntimeGetVersion(runtime);
}
#endif
