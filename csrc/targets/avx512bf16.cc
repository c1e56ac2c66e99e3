// The kernels compiled for AVX-512 (F, BW, DQ, VL) with the dot products of bfloat16 (BF16) and of bytes (VNNI);
// CMakeLists.txt sets the flags of this file alone.
#include "../attention.h"

#define ATTNSCORE_TARGET avx512bf16

// Declared before it is defined: a constant would otherwise be visible in this file only.
namespace attnscore::ATTNSCORE_TARGET {
extern const Kernels kernels;
}

#include "../kernels-inl.h"
