// The backward of a target with sums of one type.
#include "kernels/target.h"

namespace attnscore::ATTNSCORE_TARGET {

#include "kernels/backward-inl.h"

template <class T>
void backward(const Problem& problem, Threads threads) {
    if (problem.query_len > 0 && problem.key_len > 0) backward_typed<T>(problem, threads);
}
template void backward<ATTNSCORE_SUM>(const Problem& problem, Threads threads);

}  // namespace attnscore::ATTNSCORE_TARGET
