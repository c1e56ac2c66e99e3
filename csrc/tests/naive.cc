// A target of plain loops in double precision, in the driver alone: what the others are compared with.
#include "../attention.h"

#define ATTNSCORE_TARGET naive

namespace attnscore::ATTNSCORE_TARGET {
extern const Kernels kernels;
}

#include "naive-inl.h"
