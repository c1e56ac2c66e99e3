// The kernels compiled for AVX-512 (F, BW, DQ, VL) with the dot products of bfloat16 (BF16) and of bytes (VNNI);
// CMakeLists.txt sets the flags of this file alone.
#define ATTNSCORE_TARGET avx512bf16
#include "kernels/kernels-inl.h"
