#include "api/row_finish.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <memory>

namespace attnscore {
namespace {

constexpr int64_t kTaskRows = 512;     // rows of a task
constexpr int64_t kMinWork = 1 << 15;  // numbers to read; a call of fewer is not shared by threads

#include "kernels/for_each_task-inl.h"

// Set the gradient of a head's sink: one more logit of each row, of the weight p, without a value, so that dp = 0 and
// ds = -p delta.
template <class T>
void set_sink_gradient(const Problem& p, const Head& head, const RowArrays& rows) {
    const T sink = *as<T>(rows.sink);
    double sum = 0;
    for (int64_t i = 0; i < p.query_len; ++i) {
        const T log_p = sink - as<T>(head.row_max)[i] - as<T>(head.log_denom)[i], weight = std::exp(log_p);
        T grad = -weight * as<T>(head.delta)[i];
        if (head.grad_entropy != nullptr) {
            // H = -sum p log p
            grad -= weight * ((weight == 0 ? T(0) : log_p) + as<T>(head.entropy)[i]) * as<T>(head.grad_entropy)[i];
        }
        sum += static_cast<double>(grad);
    }
    *as<T>(rows.grad_sink) = static_cast<T>(sum);
}

// Call f(head, first row, end of the rows) for blocks of rows of each head, on the pool.
template <class F>
void for_each_row_block(const Problem& p, Threads threads, F f) {
    const int64_t blocks = (p.query_len + kTaskRows - 1) / kTaskRows, heads = static_cast<int64_t>(p.heads.size());
    const int64_t matrix_cols = p.matrix == MatrixOutput::none ? 0 : p.key_len;
    // 16 stands for the statistics of a row. Waking a thread takes longer than so little work (a few microseconds).
    if (heads * p.query_len * (p.value_dim + matrix_cols + 16) < kMinWork) threads = 1;
    for_each_task(heads * blocks, threads, [&](int64_t i) {
        const int64_t first = i % blocks * kTaskRows;
        f(static_cast<size_t>(i / blocks), first, std::min(first + kTaskRows, p.query_len));
    });
}

// Bytes of `numbers` numbers of the sum type for each row of a head.
size_t bytes_of_head(const Problem& p, int numbers) {
    return static_cast<size_t>(p.query_len * numbers * size_of(sum_dtype(p)));
}

}  // namespace

void run_forward(const Kernels& kernels, Problem& p, const std::vector<RowArrays>& rows, Threads threads) {
    const size_t bytes = bytes_of_head(p, kRowStats);
    // Not zeroed, which would cost a pass over it: every number is written before it is read.
    const auto stats = std::make_unique_for_overwrite<char[]>(bytes * p.heads.size());
    for (size_t h = 0; h < p.heads.size(); ++h) p.heads[h].row_stats = stats.get() + h * bytes;
    kernels.forward(p, threads);
    if (rows.empty()) return;
    for_each_row_block(p, threads, [&](size_t h, int64_t first, int64_t end) {
        kernels.finish_rows(p, p.heads[h], rows[h], first, end);
    });
}

void run_backward(const Kernels& kernels, Problem& p, const std::vector<RowArrays>& rows, Threads threads) {
    const size_t bytes = bytes_of_head(p, 1);
    // Copies: prepare_rows writes a log_denom of infinity for a fully masked query, and delta = dout.out +
    // dweights.weights - dlse.
    std::vector<char> log_denoms(bytes * p.heads.size()), deltas(bytes * p.heads.size());
    for (size_t h = 0; h < p.heads.size(); ++h) {
        p.heads[h].log_denom = log_denoms.data() + h * bytes;
        p.heads[h].delta = deltas.data() + h * bytes;
    }
    for_each_row_block(p, threads, [&](size_t h, int64_t first, int64_t end) {
        kernels.prepare_rows(p, p.heads[h], rows[h], log_denoms.data() + h * bytes, deltas.data() + h * bytes, first,
                             end);
    });
    kernels.backward(p, threads);
    const auto set = sum_dtype(p) == Dtype::f64 ? set_sink_gradient<double> : set_sink_gradient<float>;
    for (size_t h = 0; h < rows.size(); ++h) {
        if (rows[h].grad_sink != nullptr) set(p, p.heads[h], rows[h]);
    }
}

}  // namespace attnscore
