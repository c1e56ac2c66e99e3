// The problem that kernels compute, as plain structs over the caller's memory; the functions of a CPU target; the
// thread pool. No Python here, and no result is allocated.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace attnscore {

enum class Dtype { f32, f64, bf16, f16 };
constexpr int64_t size_of(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

// The numbers of T behind a pointer to their bytes.
template <class T>
const T* as(const char* bytes) {
    return reinterpret_cast<const T*>(bytes);
}
template <class T>
T* as(char* bytes) {
    return reinterpret_cast<T*>(bytes);
}

// One matrix (rows x cols) inside the caller's memory, null where the caller has none; strides in elements, 0 along a
// broadcast axis.
struct Matrix {
    const char* data = nullptr;
    int64_t row_stride = 0;
    int64_t col_stride = 0;
};

// scale * q . k, or sum_h w_h activation(q_h + k_h), or -scale * |q - k|^2
enum class Form { inner, additive, distance };
enum class Activation { tanh, sigmoid, relu, leaky_relu, silu, gelu };

// The matrix over (query, key) pairs that a call fills in addition to its output: the scores as they enter the softmax,
// -inf where masked, or the weights before dropout.
enum class MatrixOutput { none, scores, weights };

// s becomes factor * cap * tanh(s / cap), or factor * s where the cap is infinite.
struct Cap {
    double cap, factor;
};

// Statistics of each row that the forward writes, in the sum type, over the unmasked keys and with e = exp(s - max).
// Without full_statistics only the first two of the sums are written. Without exact_row_max, `max` may be a score
// within a few units of the largest, and e is relative to it.
enum RowStat {
    kStatMax,          // max s
    kStatDenom,        // sum e
    kStatSumExpLogit,  // sum e (s - max)
    kStatSumSquares,   // sum e^2
    kStatCount,        // number of unmasked keys
    kStatMean,         // mean s
    kStatDeviation,    // sum (s - mean)^2
    kStatMinScore,     // min s, where min_score asks for it
    kStatFirstKey,     // the first key of the largest score, or -1, where first_key asks for it
    kRowStats
};

// One attention matrix: a query head of one batch row against its KV head. The sum type is double for f64 values and
// float otherwise.
struct Head {
    Matrix query, key, value;
    Matrix query_bias, key_bias;  // one column, in the sum type: added to the scores before the caps
    // query_len x key_len, in bias_dtype: added after the caps; -inf masks the pair. Of a relative bias, which is a
    // number for each key - query, the row stride is minus the column stride.
    Matrix bias;
    Matrix mask;                     // query_len x key_len bytes: 0 masks the pair
    Matrix query_ids, key_ids;       // one column of int64 each: pairs of different or negative ids are masked
    const int64_t* start = nullptr;  // row i attends to the keys start[i] <= j < stop[i]; null: to every key
    const int64_t* stop = nullptr;
    // Holes in these intervals: row i does not attend to start[k * hole_stride + i] <= j < stop[k * hole_stride + i],
    // for k from 1 to `holes`, in any order.
    int64_t holes = 0, hole_stride = 0;
    const char* w_v = nullptr;    // additive: dim contiguous numbers of the sum type
    const char* scale = nullptr;  // distance: a number of the sum type, times the problem's scale; null: 1
    int64_t index = 0;            // among the matrices of the call: dropout counts rows through all of them
    char* out = nullptr;          // query_len x value_dim contiguous, in the dtype of value
    char* row_stats = nullptr;    // kRowStats x query_len, in the sum type
    // Additive: the scores before biases and caps, query_len x key_len contiguous, in the sum type, except in key tiles
    // that the intervals mask for a whole micro-panel. The forward writes them and the backward reads them. Null: the
    // backward computes them again.
    char* saved_scores = nullptr;
    char* matrix = nullptr;      // Problem::matrix, query_len x key_len contiguous, in the sum type
    const char* sink = nullptr;  // a number of the sum type, or null; used to normalise a matrix of weights alone

    // Backward only. p = exp(s - row_max - log_denom), ds = p (dp - delta).
    Matrix grad_out;                     // in grad_dtype
    Matrix grad_matrix;                  // query_len x key_len, in the sum type: the gradient of Problem::matrix
    const char* row_max = nullptr;       // by row
    const char* log_denom = nullptr;     // by row; +inf where it is fully masked
    const char* delta = nullptr;         // by row: dout . out + (weights . grad_matrix) - dlse
    const char* entropy = nullptr;       // by row; null where the entropy has no gradient
    const char* grad_entropy = nullptr;  // by row: dp -= grad_entropy * (log p + entropy)
    char* grad_query = nullptr;          // query_len x dim contiguous, sum type; see clears_gradients
    char* grad_query_bias = nullptr;     // query_len
    char* grad_scale = nullptr;          // one number of the sum type
};

// The query heads that share one KV head, and the gradients that they share, for the backward alone.
struct Group {
    std::vector<int64_t> heads;
    char* grad_key = nullptr;       // key_len x dim contiguous, sum type; see Problem::clears_gradients
    char* grad_value = nullptr;     // key_len x value_dim
    char* grad_key_bias = nullptr;  // key_len
    char* grad_w_v = nullptr;       // additive: dim
};

// The heads that share one bias matrix, and its gradient; strides are 0 along a broadcast axis, -1 and 1 of a relative
// bias. Backward only.
struct BiasGroup {
    std::vector<int64_t> heads;
    char* grad_bias = nullptr;  // of the pair (0, 0), in the sum type, zeroed by the caller
    int64_t row_stride = 0, col_stride = 0;

    bool is_relative() const { return row_stride < 0; }
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
    bool exact_row_max = false;    // see RowStat
    bool full_statistics = false;  // see RowStat
    bool min_score = false;        // see RowStat
    bool first_key = false;        // see RowStat; with exact_row_max
    MatrixOutput matrix = MatrixOutput::none;
    double dropout = 0.0;  // probability that a weight is dropped; dropout.py defines which
    uint64_t seed = 0;
    // Where the call is a chunk of a larger one: its first row, and the rows of a matrix of the larger call (0:
    // query_len).
    int64_t first_row = 0, all_rows = 0;
    // Whether the backward, if there are queries and keys, clears gradients of queries, keys and values before it adds
    // to them. The caller clears all others.
    bool clears_gradients = false;
    std::vector<Head> heads;
    std::vector<Group> groups;  // every head is in one
    std::vector<BiasGroup> bias_groups;
};

// Statistics of a row, and the flag of Problem that makes the kernels compute their sums (null: none). In the order of
// Python's table (problem/statistics.py), but for the log-sum-exp. Arrays, checks and results follow from this list.
#define ATTNSCORE_STATISTICS(X)                  \
    X(max_score, &Problem::exact_row_max)        \
    X(mean_score, &Problem::full_statistics)     \
    X(var_score, &Problem::full_statistics)      \
    X(entropy, &Problem::full_statistics)        \
    X(max_weight, &Problem::exact_row_max)       \
    X(sum_sq_weights, &Problem::full_statistics) \
    X(sum_weights, nullptr)                      \
    X(min_score, &Problem::min_score)            \
    X(argmax_key, &Problem::first_key)           \
    X(log_sum_exp, nullptr)

#define ATTNSCORE_NAME(name, needed) name,
enum class Statistic { ATTNSCORE_STATISTICS(ATTNSCORE_NAME) end };
constexpr int kStatistics = static_cast<int>(Statistic::end);

// The arrays of a head's rows that `forward` and `backward` do not know: the sink, and results from row statistics.
struct RowArrays {
    const char* sink = nullptr;
    char* row_max = nullptr;  // query_len each, in the sum type
    char* log_denom = nullptr;
    char* statistics[kStatistics] = {};  // forward only
    char*& at(Statistic which) { return statistics[static_cast<int>(which)]; }

    // Backward only.
    Matrix out;
    const char* attention_weights = nullptr;
    const char* grad_log_sum_exp = nullptr;
    char* grad_sink = nullptr;
};

// The threads of a call: of the pool, or with `openmp` of the runtime that `use_openmp` has set.
struct Threads {
    Threads(int most = 1, bool of_openmp = false) : count(most), openmp(of_openmp) {}
    Threads at_most(double most) const { return {static_cast<int>(std::min<double>(count, most)), openmp}; }

    int count;
    bool openmp;
};

// Set the OpenMP runtime whose threads calls may share with the caller's framework, by its function `GOMP_parallel`.
// Workers of OpenMP spin for milliseconds after each parallel region, and take the cores from any other pool.
void use_openmp(void* gomp_parallel);

// C = A B. A and C are contiguous; all three are of one dtype, f32 or f64.
struct MatrixProduct {
    Dtype dtype = Dtype::f32;
    int64_t rows = 0, depth = 0, cols = 0;  // A is rows x depth, B depth x cols
    const char* a = nullptr;
    Matrix b;
    char* c = nullptr;
};

// The kernels of one CPU target. Results do not depend on the number of threads.
struct Kernels {
    const char* name;
    void (*forward)(const Problem&, Threads threads);
    void (*backward)(const Problem&, Threads threads);
    // After a forward: set the caller's results of the rows [first, end) of a head. `log_denom` is
    // log sum exp(s - row_max) with the sink among the s, and `out` is scaled by the keys' share of the weights.
    void (*finish_rows)(const Problem&, const Head&, const RowArrays&, int64_t first, int64_t end) = nullptr;
    // Before a backward: set log_denom and delta of the rows [first, end) of a head.
    void (*prepare_rows)(const Problem&, const Head&, const RowArrays&, char* log_denoms, char* deltas, int64_t first,
                         int64_t end) = nullptr;
    // C = A B, with NaN for the rows of A that are not finite.
    void (*multiply)(const MatrixProduct&, Threads threads) = nullptr;
};

// The targets that this CPU can run, best first ("avx512bf16", "avx512", "avx2", "portable"; on Arm "neon_bf16",
// "neon").
std::vector<const Kernels*> runnable_kernels();

// Run f(0, context) .. f(count - 1, context) on at most so many threads, the caller among them. Safe from several
// threads at once (a second caller of the pool runs its tasks itself) and after fork (the child starts its own pool).
void parallel(int64_t count, void (*f)(int64_t task, void* context), void* context, Threads threads);

}  // namespace attnscore
