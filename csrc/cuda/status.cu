#include "hpo/api.h"
#include "hpo/cuda.h"

extern "C" const char* hpo_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }
