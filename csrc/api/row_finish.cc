#include "api/row_finish.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

namespace attnscore {
namespace {

constexpr int64_t kTaskRows = 512;     // rows of a task
constexpr int64_t kMinWork = 1 << 15;  // numbers to read up to which one thread does it

#include "kernels/storage-inl.h"

// One row as numbers of T: in the caller's memory if it can be read there, otherwise in `buffer`.
template <class T>
const T* row_of(const Matrix& m, Dtype dtype, int64_t row, int64_t cols, std::vector<T>& buffer) {
    if (m.col_stride == 1 && dtype == (sizeof(T) == 8 ? Dtype::f64 : Dtype::f32)) {
        return as<T>(m.data) + row * m.row_stride;
    }
    buffer.resize(static_cast<size_t>(cols));
    for (int64_t j = 0; j < cols; ++j) {
        buffer[static_cast<size_t>(j)] = load_number<T>(m.data, dtype, row * m.row_stride + j * m.col_stride);
    }
    return buffer.data();
}

// The dot product of x and y over the entries where x is not 0: a fully masked row, whose output and weights are 0,
// ignores a gradient of NaN. Eight partial sums, so that compilers vectorise the loop.
template <class T>
T product(const T* x, const T* y, int64_t count) {
    constexpr int64_t lanes = 8;
    T sums[lanes] = {};
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) {
        for (int64_t l = 0; l < lanes; ++l) sums[l] += x[i + l] == 0 ? T(0) : x[i + l] * y[i + l];
    }
    for (; i < count; ++i) sums[0] += x[i] == 0 ? T(0) : x[i] * y[i];
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

// Set log_denom (+inf where the row is fully masked, so that its weights are 0) and delta of a row, as the kernels read
// them. `left` and `right` are scratch.
template <class T>
void prepare_row(const Problem& p, const Head& head, const RowArrays& rows, char* log_denoms, char* deltas, int64_t i,
                 std::vector<T>& left, std::vector<T>& right) {
    constexpr T infinity = std::numeric_limits<T>::infinity();
    const T log_denom = as<T>(rows.log_denom)[i];
    const T dlse = rows.grad_log_sum_exp ? as<T>(rows.grad_log_sum_exp)[i] : T(0);
    as<T>(log_denoms)[i] = log_denom == -infinity ? infinity : log_denom;
    // out = sum_j p_j v_j, so sum_j p_j dp_j = dout . out
    T pooled = product(row_of(rows.out, p.value_dtype, i, p.value_dim, left),
                       row_of(head.grad_out, p.grad_dtype, i, p.value_dim, right), p.value_dim);
    if (p.matrix == MatrixOutput::weights) {
        // The gradient of the weights adds to dp, and so to sum_j p_j dp_j.
        pooled += product(as<T>(rows.attention_weights) + i * p.key_len,
                          row_of(head.grad_matrix, sum_dtype(p), i, p.key_len, right), p.key_len);
    }
    as<T>(deltas)[i] = dlse - pooled;
}

// Set the gradient of a head's sink: a logit without a value, whose dp is 0.
template <class T>
void set_sink_gradient(const Problem& p, const Head& head, const RowArrays& rows) {
    const T sink = *as<T>(rows.sink);
    double sum = 0;
    for (int64_t i = 0; i < p.query_len; ++i) {
        const T log_p = sink - as<T>(head.row_max)[i] - as<T>(head.log_denom)[i], weight = std::exp(log_p);
        T grad = weight * as<T>(head.delta)[i];
        if (head.grad_entropy != nullptr) {
            // H = -sum p log p
            grad -= weight * ((weight == 0 ? T(0) : log_p) + as<T>(head.entropy)[i]) * as<T>(head.grad_entropy)[i];
        }
        sum += static_cast<double>(grad);
    }
    *as<T>(rows.grad_sink) = static_cast<T>(sum);
}

// Call f(head, first row, last row) for blocks of rows, on the pool.
template <class F>
void for_each_row_block(const Problem& p, Threads threads, F f) {
    struct Context {
        const Problem& p;
        F& f;
        int64_t blocks;
    } context{p, f, (p.query_len + kTaskRows - 1) / kTaskRows};
    const auto task = [](int64_t i, void* at) {
        Context& c = *static_cast<Context*>(at);
        const int64_t first = i % c.blocks * kTaskRows;
        c.f(static_cast<size_t>(i / c.blocks), first, std::min(first + kTaskRows, c.p.query_len));
    };
    const int64_t matrix_cols = p.matrix == MatrixOutput::none ? 0 : p.key_len;
    // Waking a thread takes longer than so little work (a few microseconds).
    if (static_cast<int64_t>(p.heads.size()) * p.query_len * (p.value_dim + matrix_cols + 16) < kMinWork) threads = 1;
    parallel(static_cast<int64_t>(p.heads.size()) * context.blocks, task, &context, threads);
}

template <class T>
void run_forward_typed(const Kernels& kernels, Problem& p, const std::vector<RowArrays>& rows, Threads threads) {
    const auto head = static_cast<size_t>(p.query_len * kRowStats) * sizeof(T);
    // Not zeroed, which would cost a pass over it: every number is written before it is read.
    const auto stats = std::make_unique_for_overwrite<char[]>(head * p.heads.size());
    for (size_t h = 0; h < p.heads.size(); ++h) p.heads[h].row_stats = stats.get() + h * head;
    kernels.forward(p, threads);
    if (rows.empty()) return;
    for_each_row_block(p, threads, [&](size_t h, int64_t first, int64_t last) {
        kernels.finish_rows(p, p.heads[h], rows[h], first, last);
    });
}

template <class T>
void run_backward_typed(const Kernels& kernels, Problem& p, const std::vector<RowArrays>& rows, Threads threads) {
    const auto column = static_cast<size_t>(p.query_len) * sizeof(T);
    std::vector<char> log_denoms(column * p.heads.size()), deltas(column * p.heads.size());
    for (size_t h = 0; h < p.heads.size(); ++h) {
        p.heads[h].log_denom = log_denoms.data() + h * column;
        p.heads[h].delta = deltas.data() + h * column;
    }
    for_each_row_block(p, threads, [&](size_t h, int64_t first, int64_t last) {
        std::vector<T> left, right;
        for (int64_t i = first; i < last; ++i) {
            prepare_row<T>(p, p.heads[h], rows[h], log_denoms.data() + h * column, deltas.data() + h * column, i, left,
                           right);
        }
    });
    kernels.backward(p, threads);
    for (size_t h = 0; h < rows.size(); ++h) {
        if (rows[h].grad_sink != nullptr) set_sink_gradient<T>(p, p.heads[h], rows[h]);
    }
}

}  // namespace

void run_forward(const Kernels& kernels, Problem& p, const std::vector<RowArrays>& rows, Threads threads) {
    const bool wide = sum_dtype(p) == Dtype::f64;
    (wide ? run_forward_typed<double> : run_forward_typed<float>)(kernels, p, rows, threads);
}

void run_backward(const Kernels& kernels, Problem& p, const std::vector<RowArrays>& rows, Threads threads) {
    const bool wide = sum_dtype(p) == Dtype::f64;
    (wide ? run_backward_typed<double> : run_backward_typed<float>)(kernels, p, rows, threads);
}

}  // namespace attnscore
