// The kernels compiled for AVX-512 (F, BW, DQ, VL) with FMA and F16C; CMakeLists.txt sets the flags of this file alone.
#define ATTNSCORE_TARGET avx512
#include "kernels/kernels-inl.h"
