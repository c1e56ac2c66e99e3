// The kernels compiled for NEON, which every 64-bit Arm CPU has; no instructions beyond it.
#define ATTNSCORE_TARGET neon
#include "kernels/kernels-inl.h"
