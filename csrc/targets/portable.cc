// The kernels compiled for every CPU of the architecture; no flags of their own.
#define ATTNSCORE_TARGET portable
#include "kernels/kernels-inl.h"
