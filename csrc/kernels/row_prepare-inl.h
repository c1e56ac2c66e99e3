// Numbers of each row that the backward reads: log_denom, and delta = dout . out + dweights . weights - dlse.
#pragma once

#include "kernels/memory-inl.h"
#include "kernels/simd-inl.h"

// The dot product of x and y over the entries where x is not 0: a fully masked row, whose output and weights are 0,
// ignores a gradient of NaN.
template <class T>
T product_of_nonzero(const T* x, const T* y, int64_t count) {
    V<T> sum{};
    for (int64_t j = 0; j < count; j += Vector<T>::lanes) {
        const V<T> x_j = load_first(x + j, count - j);
        sum += select<T>(x_j == T(0), V<T>{}, x_j * load_first(y + j, count - j));
    }
    return reduce_sum<T>(sum);
}

// One row as numbers of T: in the caller's memory if it can be read there, otherwise in `copy`.
template <class T>
const T* view_row(T* copy, const Matrix& m, Dtype dtype, int64_t i, int64_t cols) {
    if (m.col_stride == 1 && dtype == dtype_of<T>()) return as<T>(m.data) + i * m.row_stride;
    read_row(copy, cols, m, dtype, i, 0, cols);
    return copy;
}

// Set log_denom and delta of the rows [first, end) of a head.
template <class T>
void prepare_rows(const Problem& problem, const Head& head, const RowArrays& rows, char* log_denoms, char* deltas,
                  int64_t first, int64_t end) {
    constexpr T infinity = std::numeric_limits<T>::infinity();
    const bool with_weights = problem.matrix == MatrixOutput::weights;
    const int64_t cols = std::max(problem.value_dim, with_weights ? problem.key_len : 0);
    Arena& arena = thread_arena();
    T *copy = arena.take<T>(cols), *grad_copy = arena.take<T>(cols);
    for (int64_t i = first; i < end; i++) {
        // out = sum_j p_j v_j, so sum_j p_j dp_j = dout . out
        T pooled = product_of_nonzero(view_row(copy, rows.out, problem.value_dtype, i, problem.value_dim),
                                      view_row(grad_copy, head.grad_out, problem.grad_dtype, i, problem.value_dim),
                                      problem.value_dim);
        // The gradient of the weights adds to dp, and so to sum_j p_j dp_j.
        if (with_weights)
            pooled += product_of_nonzero(as<T>(rows.attention_weights) + i * problem.key_len,
                                         view_row(grad_copy, head.grad_matrix, dtype_of<T>(), i, problem.key_len),
                                         problem.key_len);
        const T dlse = rows.grad_log_sum_exp ? as<T>(rows.grad_log_sum_exp)[i] : T(0);
        as<T>(deltas)[i] = pooled - dlse;
        // +inf where the row is fully masked, so that its weights are 0.
        const T log_denom = as<T>(rows.log_denom)[i];
        as<T>(log_denoms)[i] = log_denom == -infinity ? infinity : log_denom;
    }
}
