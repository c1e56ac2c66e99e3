// The kernels compiled for AVX2 with FMA and F16C; CMakeLists.txt sets the flags of this file alone.
#include "../attention.h"

#define ATTNSCORE_TARGET avx2

// Declared before it is defined: a constant would otherwise be visible in this file only.
namespace attnscore::ATTNSCORE_TARGET {
extern const Kernels kernels;
}

#include "../kernels-inl.h"
