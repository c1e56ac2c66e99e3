// The kernels, written once and compiled for each CPU target in a namespace of its own.
//
// FlashAttention on the CPU. The scores of a micro-panel (kMR query rows) against a key tile (64 keys) are products of
// broadcast query elements and contiguous vectors of keys; 64 bits say which keys a row attends to. Nothing propagates
// through a masked pair, NaN and infinity included: scores are selected, and where a tile holds such a number and a row
// does not attend to all of it, products leave the masked pairs out.
//
// For a target five files are compiled: products.cc, scores.cc, forward.cc and backward.cc twice, with sums of float
// and of double, and rows.cc once. CMakeLists.txt sets their flags, ATTNSCORE_TARGET to the name and ATTNSCORE_SUM to
// the type. Each includes all headers of the system here, and then *-inl.h files inside of the target's namespace: an
// inline function with another target's instructions must not be taken for one of these.
#pragma once

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

namespace attnscore::ATTNSCORE_TARGET {

// Fill outputs, row statistics and matrices of all heads; T is the type of the sums. Compiled by forward.cc.
template <class T>
void forward_typed(const Problem& problem, Threads threads);
// Add to the gradients of all heads and groups. Compiled by backward.cc.
template <class T>
void backward_typed(const Problem& problem, Threads threads);

}  // namespace attnscore::ATTNSCORE_TARGET
