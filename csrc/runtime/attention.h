// What the kernels compute on: plain structs over the caller's memory. No Python here, and no result is allocated.
#pragma once

#include <cstdint>
#include <vector>

namespace attnscore {

enum class Dtype { f32, f64, bf16, f16 };
constexpr int64_t size_of(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

// One matrix (rows x cols) inside the caller's memory; strides in elements, 0 along a broadcast axis. Null: there is
// none.
struct Matrix {
    const char* data = nullptr;
    int64_t row_stride = 0;
    int64_t col_stride = 0;
};

// scale * q . k, or sum_h w_h activation(q_h + k_h), or -scale * |q - k|^2
enum class Form { inner, additive, distance };
enum class Activation { tanh, sigmoid, relu, leaky_relu, silu, gelu };

// Which matrix of one number per (query, key) pair a call fills beside its output: the scores as they enter the
// softmax, -inf where masked, or the weights before dropout.
enum class MatrixOutput { none, scores, weights };

// s becomes factor * cap * tanh(s / cap), or factor * s where the cap is infinite.
struct Cap {
    double cap, factor;
};

// Numbers of each row that the forward writes, in the sum type (float; double for f64 values), in this order. With
// e = exp(s - max) over the visible keys: max s, sum e, sum e (s - max), sum e^2, count, mean s, sum (s - mean)^2.
// Without full_statistics only the first two are written. Where exact_row_max are not wanted either, a score that is
// within a few units of the largest stands for max: e is taken against it.
constexpr int kRowStats = 7;

// One attention matrix: a query head of one batch row against its key head. "Sum type" as above.
struct Head {
    Matrix query, key, value;
    Matrix query_bias, key_bias;     // one column, in the sum type: added to the scores before the caps
    Matrix bias;                     // query_len x key_len, in bias_dtype: added after the caps; -inf has_mask the pair
    Matrix mask;                     // query_len x key_len bytes: 0 has_mask the pair
    Matrix query_ids, key_ids;       // one column of int64 each: equal ids see each other, negative ones nothing
    const int64_t* start = nullptr;  // row i sees the keys start[i] <= j < stop[i]; null: every key
    const int64_t* stop = nullptr;
    // Less its holes: the k-th, from 1, lies from start[k * hole_stride + i] to stop[k * hole_stride + i]. In any
    // order.
    int64_t holes = 0, hole_stride = 0;
    const char* weights = nullptr;  // additive: dim contiguous row_stats of the sum type
    const char* scale = nullptr;    // distance: a number of the sum type, times the problem's scale; null: 1
    int64_t index = 0;              // which of the call's matrices this is: dropout counts rows through all of them
    char* out = nullptr;            // query_len x value_dim contiguous, in the dtype of value
    char* row_stats = nullptr;      // query_len x kRowStats, in the sum type
    // Additive: the scores before biases and caps, query_len x key_len contiguous, in the sum type. The forward writes
    // them, but for tiles in which the intervals hide every pair of a strip, and the backward reads them. Null: they
    // are computed again.
    char* saved_scores = nullptr;
    char* matrix = nullptr;      // Problem::matrix, query_len x key_len contiguous, in the sum type
    const char* sink = nullptr;  // a number of the sum type, or null; read only to normalise a matrix of weights

    // Backward only.
    Matrix grad_out;                     // in grad_dtype
    Matrix grad_matrix;                  // query_len x key_len, in the sum type: what comes into `Problem::matrix`
    const char* row_max = nullptr;       // per row: what is subtracted from its scores
    const char* log_denom = nullptr;     // per row: p = exp(s - row_max - log_denom); +inf where nothing is seen
    const char* delta = nullptr;         // per row: added to dp: dlse - dout . out - (weights . grad_matrix)
    const char* entropy = nullptr;       // per row; null where no gradient comes into the entropy
    const char* grad_entropy = nullptr;  // per row: dp -= grad_entropy * (log p + entropy)
    char* grad_query = nullptr;          // query_len x dim contiguous, sum type, zeroed by the caller
    char* grad_query_bias = nullptr;     // query_len
    char* grad_scale = nullptr;          // one number of the sum type
};

// The query heads that share one key head, and the gradients that they share (backward only; the forward reads
// `heads`).
struct Group {
    std::vector<int64_t> heads;
    char* grad_key = nullptr;       // key_len x dim contiguous, sum type, zeroed by the caller
    char* grad_value = nullptr;     // key_len x value_dim
    char* grad_key_bias = nullptr;  // key_len
    char* grad_weights = nullptr;   // additive: dim
};

// The heads that share one bias matrix, and its gradient; strides 0 along a broadcast axis. Backward only.
struct BiasGroup {
    std::vector<int64_t> heads;
    char* grad_bias = nullptr;  // sum type, zeroed by the caller
    int64_t row_stride = 0, col_stride = 0;
};

struct Problem {
    Form form = Form::inner;
    Activation activation = Activation::tanh;
    double negative_slope = 0.01;
    double scale = 1.0;
    std::vector<Cap> caps;           // applied in order
    Dtype score_dtype = Dtype::f32;  // of query and key
    Dtype value_dtype = Dtype::f32;  // of value and out; f64 only together with f64 query and key
    Dtype grad_dtype = Dtype::f32;   // of grad_out
    Dtype bias_dtype = Dtype::f32;
    int64_t query_len = 0, key_len = 0, dim = 0, value_dim = 0;
    bool exact_row_max = false;    // the largest score of each row is wanted
    bool full_statistics = false;  // and all other row_stats; see kRowStats
    MatrixOutput matrix = MatrixOutput::none;
    double dropout = 0.0;  // probability that a weight is dropped; dropout.py defines which
    uint64_t seed = 0;
    std::vector<Head> heads;
    std::vector<Group> groups;  // every head is in one
    std::vector<BiasGroup> bias_groups;
};

// One CPU target's kernels. Results do not depend on the number of threads.
struct Kernels {
    const char* name;
    void (*forward)(const Problem&, int threads);
    void (*backward)(const Problem&, int threads);
};

// Those that this CPU can run, best first (target names: "avx512bf16", "avx512", "avx2", "portable").
std::vector<const Kernels*> runnable_kernels();

// The pool: f(0, context) .. f(count - 1, context) on at most `threads` threads, the caller among them. Safe from
// several threads at once (a second caller runs its tasks itself) and after fork (the child starts its own pool).
void parallel(int64_t count, void (*f)(int64_t task, void* context), void* context, int threads);

}  // namespace attnscore
