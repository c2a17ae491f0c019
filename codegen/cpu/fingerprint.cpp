#include "fingerprint.h"

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(dsmp_cpu, m) { m.def("fingerprint(Tensor weight) -> int"); }

TORCH_LIBRARY_IMPL(dsmp_cpu, CPU, m) { m.impl("fingerprint", dsmp::fingerprint); }
