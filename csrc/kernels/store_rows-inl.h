// Stores the forward's results of each row: output, statistics, and its row of the matrix.
#pragma once

#include "kernels/memory-inl.h"
#include "kernels/online_softmax-inl.h"
#include "kernels/score_matrix-inl.h"
#include "kernels/simd-inl.h"

// Normalise and store the output of a row.
template <class T>
void store_row(const Problem& problem, const Head& head, int64_t row, T scale, T* out) {
    const int64_t size = attnscore::size_of(problem.value_dtype), width = problem.value_dim;
    char* stored = head.out + row * width * size;
    if (row + kPrefetchRows < problem.query_len) prefetch<1>(stored + kPrefetchRows * width * size, width * size);
    if (problem.value_dtype == dtype_of<T>()) {
        for (int64_t j = 0; j < width; j++) as<T>(stored)[j] = out[j] * scale;
    } else if constexpr (sizeof(T) == 4) {
        for (int64_t j = 0; j < width; j++) out[j] *= scale;
        narrow_row(as<uint16_t>(stored), out, problem.value_dtype, width);
    }
}

// Normalise and store the outputs of rows, their statistics, and their rows of the matrix. Outputs are `width` apart;
// at(i) gives the head of row i, and its number there.
template <class T, class At>
void store_rows(const Problem& problem, int64_t size, const RowStates<T>& states, T* out, int64_t width, const At& at) {
    const std::pair<const Head*, int64_t> first = at(0), last = at(size - 1);
    const auto store_stat = [&](RowStat which, V<T> x) {
        if (first.first == last.first) {
            T* to = as<T>(first.first->row_stats) + which * problem.query_len + first.second;
            return store_first(to, size, x);
        }
        for (int i = 0; i < size; i++) {
            const auto [head, row] = at(i);
            as<T>(head->row_stats)[which * problem.query_len + row] = x[i];
        }
    };
    store_stat(kStatMax, states.max);
    store_stat(kStatDenom, states.denom);
    if (problem.full_statistics) {
        store_stat(kStatSumExpLogit, states.sum_exp_logit);
        store_stat(kStatSumSquares, states.squares);
        store_stat(kStatCount, states.count);
        store_stat(kStatMean, states.base + states.mean);
        store_stat(kStatDeviation, states.deviation);
    }
    if (problem.min_score) store_stat(kStatMinScore, select<T>(states.max != states.max, states.max, states.min_score));
    if (problem.first_key)
        store_stat(kStatFirstKey, select<T>(states.max != states.max, splat(T(-1)), states.first_key));
    const V<T> scale = select<T>(states.denom == 0, splat(T(1)), states.out_scale / states.denom);
    for (int i = 0; i < size; i++) {
        const auto [head, row] = at(i);
        if (problem.matrix != MatrixOutput::none)
            finish_matrix_row(problem, *head, row, states.max[i], states.denom[i]);
        store_row(problem, *head, row, scale[i], out + i * width);
    }
}
