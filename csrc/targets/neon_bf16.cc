// The kernels compiled for NEON with the dot products of bfloat16 (BF16); CMakeLists.txt sets the flags of this file.
#define ATTNSCORE_TARGET neon_bf16
#include "kernels/kernels-inl.h"
