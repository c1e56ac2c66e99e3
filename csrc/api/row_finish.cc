#include "api/row_finish.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace attnscore {
namespace {

constexpr int64_t kTaskRows = 512;  // rows of a task
constexpr int64_t kMinWork = 1 << 15;

float from_bf16(uint16_t bits) {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
}

float from_f16(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                       : exponent     ? std::ldexp(static_cast<float>(1024 + fraction), exponent - 25)
                                      : std::ldexp(static_cast<float>(fraction), -24);
    return bits >> 15 ? -size : size;
}

uint16_t to_bf16(float x) {
    uint32_t word;
    std::memcpy(&word, &x, 4);
    if (std::isnan(x)) return static_cast<uint16_t>(word >> 16 | 64);
    return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);  // to nearest, ties to even
}

uint16_t to_f16(float x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return sign | 0x7e00;
    const float size = std::abs(x);
    if (size >= 65520.0f) return sign | 0x7c00;
    // Below 2^-14 the steps stay 2^-24 wide; nearbyint rounds ties to even, and what it carries raises the exponent.
    const int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
    const auto steps = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
    return static_cast<uint16_t>(sign | ((exponent + 14) * 1024 + steps));
}

template <class T>
T load(const char* at, Dtype dtype) {
    double wide;
    float single;
    uint16_t half;
    switch (dtype) {
        case Dtype::f64:
            std::memcpy(&wide, at, 8);
            return static_cast<T>(wide);
        case Dtype::f32:
            std::memcpy(&single, at, 4);
            return static_cast<T>(single);
        default:
            std::memcpy(&half, at, 2);
            return static_cast<T>(dtype == Dtype::bf16 ? from_bf16(half) : from_f16(half));
    }
}

template <class T>
void store(char* at, Dtype dtype, T x) {
    const auto wide = static_cast<double>(x);
    const auto single = static_cast<float>(x);
    if (dtype == Dtype::f64) {
        std::memcpy(at, &wide, 8);
    } else if (dtype == Dtype::f32) {
        std::memcpy(at, &single, 4);
    } else {
        const uint16_t half = dtype == Dtype::bf16 ? to_bf16(single) : to_f16(single);
        std::memcpy(at, &half, 2);
    }
}

// One row as row_stats of T: where it lies if it can be read there, otherwise in `buffer`.
template <class T>
const T* row_of(const Matrix& m, Dtype dtype, int64_t row, int64_t cols, std::vector<T>& buffer) {
    const int64_t item = size_of(dtype);
    const char* first = m.data + row * m.row_stride * item;
    if (m.col_stride == 1 && dtype == (sizeof(T) == 8 ? Dtype::f64 : Dtype::f32)) {
        return reinterpret_cast<const T*>(first);
    }
    buffer.resize(static_cast<size_t>(cols));
    for (int64_t j = 0; j < cols; ++j) buffer[static_cast<size_t>(j)] = load<T>(first + j * m.col_stride * item, dtype);
    return buffer.data();
}

// sum of x y where x is not 0: a row that sees nothing ignores what comes in. In lanes, which compilers can vectorise.
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

// What is subtracted from the scores of a row: its maximum, or 0 where that is -inf.
template <class T>
T safe_max(T maximum) {
    return maximum == -std::numeric_limits<T>::infinity() ? T(0) : maximum;
}

// A row when all its denom have been seen: the kernels' row_stats of it, and what the sink makes of them.
template <class T>
struct Row {
    T max, denom, sum_exp_logit, squares, count, mean, deviations;  // see kRowStats; `denom` is sum e
    T row_max, all_denom, log_denom;                                // of denom and sink together
    T factor = 1;              // from units of the denom' maximum to those of `row_max`
    T sink_sum_exp_logit = 0;  // the sum_exp_logit in units of `row_max`

    Row(const T* row_stats, bool full, const T* sink)
        : max(row_stats[0]), denom(row_stats[1]), row_max(safe_max(max)), all_denom(denom) {
        sum_exp_logit = full ? row_stats[2] : T(0);
        squares = full ? row_stats[3] : T(0);
        count = full ? row_stats[4] : T(0);
        mean = full ? row_stats[5] : T(0);
        deviations = full ? row_stats[6] : T(0);
        if (sink == nullptr) {
            sink_sum_exp_logit = sum_exp_logit;
        } else {
            add_sink(*sink);
        }
        log_denom = all_denom == 0 ? -std::numeric_limits<T>::infinity() : std::log(all_denom);
    }

    T share() const { return denom * factor / (all_denom == 0 ? T(1) : all_denom); }

    T statistic(Statistic which) const {
        // The empty-row rule: nothing is divided by a all_denom of 0, and the entropy is 0.
        const T safe = all_denom == 0 ? T(1) : all_denom;
        switch (which) {
            case kMaxScore:
                return max;
            case kMeanScore:
                return mean;
            case kVarScore:
                return deviations / std::max(count, T(1));
            case kEntropy:
                // H = log l - sum e (s - m) / l: lse - sum(e s) / l loses digits with the level of the logits.
                return all_denom == 0 ? T(0) : log_denom - sink_sum_exp_logit / safe;
            case kMaxWeight:
                return denom == 0 ? T(0) : factor / safe;
            case kSumSqWeights:
                return factor * factor * squares / (safe * safe);
            case kSumWeights:
                return share();
            case kStatistics:
                break;
        }
        return T(0);
    }

   private:
    // One more logit, without a value.
    void add_sink(T sink) {
        const T old = row_max;
        row_max = safe_max(std::isnan(max) || std::isnan(sink) ? max + sink : std::max(max, sink));
        factor = denom == 0 ? T(0) : std::exp(max - row_max);
        const T own = std::exp(sink - row_max);
        all_denom = denom * factor + own;
        // sum e (s - new) = e^(old - new) (sum e (s - old) + (old - new) sum e)
        sink_sum_exp_logit = (factor == 0 ? T(0) : factor * (sum_exp_logit + (old - row_max) * denom)) +
                             (own == 0 ? T(0) : own * (sink - row_max));
    }
};

template <class T>
void finish_row(const Problem& p, const Head& head, const RowArrays& rows, int64_t i) {
    const Row<T> row(reinterpret_cast<const T*>(head.row_stats) + i * kRowStats, p.full_statistics,
                     reinterpret_cast<const T*>(rows.sink));
    if (rows.sink != nullptr) {
        const T share = row.share();
        const int64_t item = size_of(p.value_dtype);
        char* out = head.out + i * p.value_dim * item;
        for (int64_t j = 0; j < p.value_dim; ++j, out += item) {
            store<T>(out, p.value_dtype, load<T>(out, p.value_dtype) * share);
        }
    }
    if (rows.row_max != nullptr) reinterpret_cast<T*>(rows.row_max)[i] = row.row_max;
    if (rows.log_denom != nullptr) reinterpret_cast<T*>(rows.log_denom)[i] = row.log_denom;
    for (int which = 0; which < kStatistics; ++which) {
        if (rows.statistics[which] == nullptr) continue;
        reinterpret_cast<T*>(rows.statistics[which])[i] = row.statistic(static_cast<Statistic>(which));
    }
}

template <class T>
void prepare_rows(const Problem& p, const Head& head, const RowArrays& rows, int64_t first, int64_t last) {
    std::vector<T> left, right;
    const auto* weights = reinterpret_cast<const T*>(rows.attention_weights);
    for (int64_t i = first; i < last; ++i) {
        const T all_denom = reinterpret_cast<const T*>(rows.log_denom)[i];
        const T* out = row_of(rows.out, p.value_dtype, i, p.value_dim, left);
        const T* grad = row_of(head.grad_out, p.grad_dtype, i, p.value_dim, right);
        const T dlse = rows.grad_log_sum_exp ? reinterpret_cast<const T*>(rows.grad_log_sum_exp)[i] : T(0);
        constexpr T infinity = std::numeric_limits<T>::infinity();
        reinterpret_cast<T*>(const_cast<char*>(head.log_denom))[i] = all_denom == -infinity ? infinity : all_denom;
        // out = sum_j p_j v_j, so sum_j p_j dp_j = dout . out
        T pooled = product(out, grad, p.value_dim);
        if (p.matrix == MatrixOutput::weights) {
            // A gradient into the weights adds to dp, and sum_j p_j of it to what all dp of the row lose.
            pooled += product(weights + i * p.key_len, row_of(head.grad_matrix, sum_dtype(p), i, p.key_len, right),
                              p.key_len);
        }
        reinterpret_cast<T*>(const_cast<char*>(head.delta))[i] = dlse - pooled;
    }
}

template <class T>
void set_sink_gradient(const Problem& p, const Head& head, const RowArrays& rows) {
    const auto at = [](const char* row_stats, int64_t i) { return reinterpret_cast<const T*>(row_stats)[i]; };
    const T sink = at(rows.sink, 0);
    double sum = 0;
    for (int64_t i = 0; i < p.query_len; ++i) {
        const T log_p = sink - at(head.row_max, i) - at(head.log_denom, i), weight = std::exp(log_p);
        T grad = weight * at(head.delta, i);
        if (head.grad_entropy != nullptr) {
            // H = -sum p log p
            grad -= weight * ((weight == 0 ? T(0) : log_p) + at(head.entropy, i)) * at(head.grad_entropy, i);
        }
        sum += static_cast<double>(grad);
    }
    *reinterpret_cast<T*>(rows.grad_sink) = static_cast<T>(sum);
}

bool is_double(const Problem& p) { return sum_dtype(p) == Dtype::f64; }

// f(head, first row, last row) on blocks of rows.
template <class F>
void for_each_row_block(const Problem& p, int threads, F f) {
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
    // Less than it costs to wake a thread (a few microseconds) is done here.
    if (static_cast<int64_t>(p.heads.size()) * p.query_len * (p.value_dim + matrix_cols + 16) < kMinWork) threads = 1;
    parallel(static_cast<int64_t>(p.heads.size()) * context.blocks, task, &context, threads);
}

}  // namespace

ForwardRowFinish::ForwardRowFinish(Problem& p, const std::vector<RowArrays>& rows) : problem_(p), rows_(rows) {
    const auto head = static_cast<size_t>(p.query_len * kRowStats * size_of(sum_dtype(p)));
    // Written before it is read; zeros would cost a pass over it.
    row_stats_ = std::make_unique_for_overwrite<char[]>(head * p.heads.size());
    for (size_t h = 0; h < p.heads.size(); ++h) p.heads[h].row_stats = row_stats_.get() + h * head;
}

void ForwardRowFinish::finish(int threads) const {
    const auto finish = is_double(problem_) ? finish_row<double> : finish_row<float>;
    for_each_row_block(problem_, threads, [&](size_t h, int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) finish(problem_, problem_.heads[h], rows_[h], i);
    });
}

BackwardRowPrepare::BackwardRowPrepare(Problem& p, const std::vector<RowArrays>& rows, int threads) {
    const auto item = static_cast<size_t>(size_of(sum_dtype(p))), column = static_cast<size_t>(p.query_len) * item;
    row_stats_.resize(2 * column * p.heads.size());
    for (size_t h = 0; h < p.heads.size(); ++h) {
        p.heads[h].log_denom = row_stats_.data() + 2 * h * column;
        p.heads[h].delta = p.heads[h].log_denom + column;
    }
    const auto prepare = is_double(p) ? prepare_rows<double> : prepare_rows<float>;
    for_each_row_block(p, threads,
                       [&](size_t h, int64_t first, int64_t last) { prepare(p, p.heads[h], rows[h], first, last); });
}

void set_sink_gradients(const Problem& p, const std::vector<RowArrays>& rows) {
    for (size_t h = 0; h < rows.size(); ++h) {
        if (rows[h].grad_sink == nullptr) continue;
        (is_double(p) ? set_sink_gradient<double> : set_sink_gradient<float>)(p, p.heads[h], rows[h]);
    }
}

}  // namespace attnscore
