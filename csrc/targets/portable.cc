// The kernels compiled for every CPU of the architecture; no flags of their own.
#include "../attention.h"

#define ATTNSCORE_TARGET portable

// Declared before it is defined: a constant would otherwise be visible in this file only.
namespace attnscore::ATTNSCORE_TARGET {
extern const Kernels kernels;
}

#include "../kernels-inl.h"
