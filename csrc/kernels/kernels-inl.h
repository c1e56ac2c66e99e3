// The kernels, written once and compiled for each CPU target in a namespace of its own.
//
// FlashAttention on the CPU. The scores of a micro-panel (kMR query rows) against a key tile (64 keys) are products of
// broadcast query elements and contiguous vectors of keys; 64 bits say which keys a row attends to. Nothing propagates
// through a masked pair, NaN and infinity included: scores are selected, and where a tile holds such a number and a row
// does not attend to all of it, products leave the masked pairs out.

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "runtime/attention.h"

namespace attnscore {
namespace ATTNSCORE_TARGET {
namespace {

// In order: each uses those above it.
// clang-format off
#include "kernels/simd-inl.h"
#include "kernels/storage-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/gemm-inl.h"
#include "kernels/masking-inl.h"
#include "kernels/activations-inl.h"
#include "kernels/additive-inl.h"
#include "kernels/additive_tables-inl.h"
#include "kernels/additive_scores-inl.h"
#include "kernels/additive_gradients-inl.h"
#include "kernels/additive_pairs-inl.h"
#include "kernels/tiles-inl.h"
#include "kernels/bf16_dot-inl.h"
#include "kernels/scores-inl.h"
#include "kernels/pv-inl.h"
#include "kernels/online_softmax-inl.h"
#include "kernels/for_each_task-inl.h"
#include "kernels/tasks-inl.h"
#include "kernels/matrix_product-inl.h"
#include "kernels/score_matrix-inl.h"
#include "kernels/full_tiles-inl.h"
#include "kernels/store_rows-inl.h"
#include "kernels/few_keys-inl.h"
#include "kernels/forward-inl.h"
#include "kernels/row_finish-inl.h"
#include "kernels/row_prepare-inl.h"
#include "kernels/score_gradients-inl.h"
#include "kernels/unmasked_products-inl.h"
#include "kernels/few_keys_gradients-inl.h"
#include "kernels/backward-inl.h"
// clang-format on

}  // namespace

#define ATTNSCORE_TEXT_(x) #x
#define ATTNSCORE_TEXT(x) ATTNSCORE_TEXT_(x)
extern const Kernels kernels;
const Kernels kernels = {ATTNSCORE_TEXT(ATTNSCORE_TARGET), forward, backward, finish_rows, prepare_rows, multiply};

}  // namespace ATTNSCORE_TARGET
}  // namespace attnscore
