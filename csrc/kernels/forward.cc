// The forward of a target with sums of one type.
#include "kernels/target.h"

namespace attnscore::ATTNSCORE_TARGET {

#include "kernels/forward-inl.h"

template <class T>
void forward(const Problem& problem, Threads threads) {
    if (problem.query_len > 0 && !problem.heads.empty()) forward_typed<T>(problem, threads);
}
template void forward<ATTNSCORE_SUM>(const Problem& problem, Threads threads);

}  // namespace attnscore::ATTNSCORE_TARGET
