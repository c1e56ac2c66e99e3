// The kernels compiled for AVX2 with FMA and F16C; CMakeLists.txt sets the flags of this file alone.
#define ATTNSCORE_TARGET avx2
#include "kernels/kernels-inl.h"
