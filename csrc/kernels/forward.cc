// The forward of a target.
#include "kernels/target.h"

namespace attnscore::ATTNSCORE_TARGET {
namespace {

#include "kernels/forward-inl.h"

}  // namespace

void forward(const Problem& problem, Threads threads) {
    if (problem.query_len == 0 || problem.heads.empty()) return;
    if (problem.value_dtype == Dtype::f64)
        forward_typed<double>(problem, threads);
    else
        forward_typed<float>(problem, threads);
}

}  // namespace attnscore::ATTNSCORE_TARGET
