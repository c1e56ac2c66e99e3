// The backward of a target with sums of one type.
#include "kernels/target.h"

namespace attnscore::ATTNSCORE_TARGET {

#include "kernels/backward-inl.h"

template void backward_typed<ATTNSCORE_SUM>(const Problem& problem, Threads threads);

}  // namespace attnscore::ATTNSCORE_TARGET
