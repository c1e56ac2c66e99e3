// Names and numbers that callers give, parsed and checked: the CPU target, and the score. No Python here.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime/attention.h"

namespace attnscore {

// The kernels of the selected target: by select_kernels, by the environment variable ATTNSCORE_TARGET, or the best.
const Kernels& selected_kernels();
// Select a target for all later calls.
void select_kernels(std::string_view name);

Dtype parse_dtype(std::string_view name, const char* argument);
std::string_view dtype_name(Dtype dtype);

using Caps = std::vector<std::pair<double, double>>;

// form, activation, negative_slope, scale, caps, score_dtype, value_dtype, bias_dtype, dropout, first_row, all_rows,
// seed
using ScoreSpec = std::tuple<std::string_view, std::string_view, double, double, Caps, std::string_view,
                             std::string_view, std::string_view, double, int64_t, int64_t, uint64_t>;

// A problem with its score, and without arrays.
Problem parse_problem(const ScoreSpec& score);

}  // namespace attnscore
