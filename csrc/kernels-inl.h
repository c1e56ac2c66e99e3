// The kernels, written once and compiled for each CPU target in a namespace of its own.
//
// Scores of 6 query rows against a tile of 64 keys are computed at a time, as products of broadcast rows with
// contiguous vectors; 64 bits say which of the keys a row sees. What a pair hides reaches nothing through it, NaN and
// infinity included: scores are selected, and where a tile holds such a number and a row does not see all of it,
// products touch what is seen and nothing else.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "attention.h"

namespace attnscore {
namespace ATTNSCORE_TARGET {
namespace {

// Each rests on those above it.
// clang-format off
#include "simd-inl.h"
#include "memory-inl.h"
#include "product-inl.h"
#include "visibility-inl.h"
#include "activations-inl.h"
#include "additive-inl.h"
#include "additive-tables-inl.h"
#include "additive-scores-inl.h"
#include "additive-gradients-inl.h"
#include "block-inl.h"
#include "pairs-inl.h"
#include "scores-inl.h"
#include "values-inl.h"
#include "running-inl.h"
#include "tasks-inl.h"
#include "matrix-inl.h"
#include "forward-inl.h"
#include "tile-gradients-inl.h"
#include "backward-inl.h"
// clang-format on

}  // namespace

#define ATTNSCORE_TEXT_(x) #x
#define ATTNSCORE_TEXT(x) ATTNSCORE_TEXT_(x)
extern const Kernels kernels;
const Kernels kernels = {ATTNSCORE_TEXT(ATTNSCORE_TARGET), forward, backward};

}  // namespace ATTNSCORE_TARGET
}  // namespace attnscore
