// The kernels, written once and compiled for each CPU target in a namespace of its own.
//
// Scores of 6 query rows against a tile of 64 keys are computed at a time, as products of broadcast rows with
// contiguous vectors; 64 bits say which of the keys a row sees. What a pair has_mask reaches nothing through it, NaN
// and infinity included: scores are selected, and where a tile holds such a number and a row does not see all of it,
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

#include "runtime/attention.h"

namespace attnscore {
namespace ATTNSCORE_TARGET {
namespace {

// Each rests on those above it.
// clang-format off
#include "kernels/simd-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/gemm-inl.h"
#include "kernels/masking-inl.h"
#include "kernels/activations-inl.h"
#include "kernels/additive-inl.h"
#include "kernels/additive_tables-inl.h"
#include "kernels/additive_scores-inl.h"
#include "kernels/additive_gradients-inl.h"
#include "kernels/tiles-inl.h"
#include "kernels/bf16_dot-inl.h"
#include "kernels/scores-inl.h"
#include "kernels/pv-inl.h"
#include "kernels/online_softmax-inl.h"
#include "kernels/tasks-inl.h"
#include "kernels/score_matrix-inl.h"
#include "kernels/forward-inl.h"
#include "kernels/score_gradients-inl.h"
#include "kernels/backward-inl.h"
// clang-format on

}  // namespace

#define ATTNSCORE_TEXT_(x) #x
#define ATTNSCORE_TEXT(x) ATTNSCORE_TEXT_(x)
extern const Kernels kernels;
const Kernels kernels = {ATTNSCORE_TEXT(ATTNSCORE_TARGET), forward, backward};

}  // namespace ATTNSCORE_TARGET
}  // namespace attnscore
