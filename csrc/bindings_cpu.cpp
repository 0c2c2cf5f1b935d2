#define HPO_ON_HOST
#include "bindings.h"

PYBIND11_MODULE(_cpu, m) { hpo::bindings::bind(m); }
