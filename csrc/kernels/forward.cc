// The forward of a target with sums of one type.
#include "kernels/target.h"

namespace attnscore::ATTNSCORE_TARGET {

#include "kernels/forward-inl.h"

template void forward_typed<ATTNSCORE_SUM>(const Problem& problem, Threads threads);

}  // namespace attnscore::ATTNSCORE_TARGET
