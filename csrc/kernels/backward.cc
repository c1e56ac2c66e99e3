// The backward of a target.
#include "kernels/target.h"

namespace attnscore::ATTNSCORE_TARGET {
namespace {

#include "kernels/backward-inl.h"

}  // namespace

void backward(const Problem& problem, Threads threads) {
    if (problem.query_len == 0 || problem.key_len == 0) return;
    if (problem.value_dtype == Dtype::f64)
        backward_typed<double>(problem, threads);
    else
        backward_typed<float>(problem, threads);
}

}  // namespace attnscore::ATTNSCORE_TARGET
