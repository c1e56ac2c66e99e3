// What callers say in words, checked: which CPU target runs, and what a score is. No Python here.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime/attention.h"

namespace attnscore {

// The kernels of the target that was selected; before that of the environment variable ATTNSCORE_TARGET, or the best.
const Kernels& selected_kernels();
// From now on.
void select_kernels(std::string_view name);

Dtype parse_dtype(std::string_view name, const char* argument);

using Caps = std::vector<std::pair<double, double>>;

// form, activation, negative_slope, scale, caps, score_dtype, value_dtype, bias_dtype, dropout, seed
using ScoreSpec = std::tuple<std::string_view, std::string_view, double, double, Caps, std::string_view,
                             std::string_view, std::string_view, double, uint64_t>;

// A problem that knows its score, and no arrays yet.
Problem parse_problem(const ScoreSpec& score);

}  // namespace attnscore
