// A whole call: the kernels, and the work once for each row around them. After a forward, the kernels' row statistics
// become the caller's results; before a backward, the gradients of these results become the kernels' log_denom and
// delta. The sink is handled here alone, except in a matrix of weights.
#pragma once

#include <vector>

#include "api/validate.h"
#include "runtime/attention.h"

namespace attnscore {

// Run a forward. Unless `rows` is empty, scale `out` by the keys' share of the weights, and set the statistics that are
// present, row_max, and log_denom = log sum exp(s - row_max), with the sink as an s (-inf where a row is fully masked).
void run_forward(const Kernels& kernels, Problem& problem, const std::vector<RowArrays>& rows, Threads threads);

// Run a backward, and set the gradients of the sinks.
void run_backward(const Kernels& kernels, Problem& problem, const std::vector<RowArrays>& rows, Threads threads);

}  // namespace attnscore
