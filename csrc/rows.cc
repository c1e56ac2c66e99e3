#include "rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace attnscore {
namespace {

constexpr int64_t kBlock = 512;  // rows of a task
constexpr int64_t kSmall = 1 << 15;

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

// One row as numbers of T: where it lies if it can be read there, otherwise in `buffer`.
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
T anchor(T maximum) {
    return maximum == -std::numeric_limits<T>::infinity() ? T(0) : maximum;
}

// A row when all its keys have been seen: the kernels' numbers of it, and what the sink makes of them.
template <class T>
struct Row {
    T max, keys, tilt, squares, count, mean, deviations;  // see kNumbers; `keys` is sum e
    T top, total, log_total;                              // of keys and sink together
    T factor = 1;                                         // from units of the keys' maximum to those of `top`
    T moved = 0;                                          // the tilt in units of `top`

    Row(const T* numbers, bool full, const T* sink) : max(numbers[0]), keys(numbers[1]), top(anchor(max)), total(keys) {
        tilt = full ? numbers[2] : T(0);
        squares = full ? numbers[3] : T(0);
        count = full ? numbers[4] : T(0);
        mean = full ? numbers[5] : T(0);
        deviations = full ? numbers[6] : T(0);
        if (sink == nullptr) {
            moved = tilt;
        } else {
            add_sink(*sink);
        }
        log_total = total == 0 ? -std::numeric_limits<T>::infinity() : std::log(total);
    }

    T share() const { return keys * factor / (total == 0 ? T(1) : total); }

    T statistic(Statistic which) const {
        // The empty-row rule: nothing is divided by a total of 0, and the entropy is 0.
        const T safe = total == 0 ? T(1) : total;
        switch (which) {
            case kMaxScore:
                return max;
            case kMeanScore:
                return mean;
            case kVarScore:
                return deviations / std::max(count, T(1));
            case kEntropy:
                // H = log l - sum e (s - m) / l: lse - sum(e s) / l loses digits with the level of the logits.
                return total == 0 ? T(0) : log_total - moved / safe;
            case kMaxWeight:
                return keys == 0 ? T(0) : factor / safe;
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
        const T old = top;
        top = anchor(std::isnan(max) || std::isnan(sink) ? max + sink : std::max(max, sink));
        factor = keys == 0 ? T(0) : std::exp(max - top);
        const T own = std::exp(sink - top);
        total = keys * factor + own;
        // sum e (s - new) = e^(old - new) (sum e (s - old) + (old - new) sum e)
        moved = (factor == 0 ? T(0) : factor * (tilt + (old - top) * keys)) + (own == 0 ? T(0) : own * (sink - top));
    }
};

template <class T>
void finish_row(const Problem& p, const Head& head, const HeadRows& rows, int64_t i) {
    const Row<T> row(reinterpret_cast<const T*>(head.numbers) + i * kNumbers, p.full_statistics,
                     reinterpret_cast<const T*>(rows.sink));
    if (rows.sink != nullptr) {
        const T share = row.share();
        const int64_t item = size_of(p.value_dtype);
        char* out = head.out + i * p.value_dim * item;
        for (int64_t j = 0; j < p.value_dim; ++j, out += item) {
            store<T>(out, p.value_dtype, load<T>(out, p.value_dtype) * share);
        }
    }
    if (rows.top != nullptr) reinterpret_cast<T*>(rows.top)[i] = row.top;
    if (rows.log_total != nullptr) reinterpret_cast<T*>(rows.log_total)[i] = row.log_total;
    for (int which = 0; which < kStatistics; ++which) {
        if (rows.statistics[which] == nullptr) continue;
        reinterpret_cast<T*>(rows.statistics[which])[i] = row.statistic(static_cast<Statistic>(which));
    }
}

template <class T>
void prepare_rows(const Problem& p, const Head& head, const HeadRows& rows, int64_t first, int64_t last) {
    std::vector<T> left, right;
    const auto* weights = reinterpret_cast<const T*>(rows.attention_weights);
    for (int64_t i = first; i < last; ++i) {
        const T total = reinterpret_cast<const T*>(rows.log_total)[i];
        const T* out = row_of(rows.out, p.value_dtype, i, p.value_dim, left);
        const T* grad = row_of(head.grad_out, p.grad_dtype, i, p.value_dim, right);
        const T dlse = rows.grad_log_sum_exp ? reinterpret_cast<const T*>(rows.grad_log_sum_exp)[i] : T(0);
        constexpr T infinity = std::numeric_limits<T>::infinity();
        reinterpret_cast<T*>(const_cast<char*>(head.log_total))[i] = total == -infinity ? infinity : total;
        // out = sum_j p_j v_j, so sum_j p_j dp_j = dout . out
        T pooled = product(out, grad, p.value_dim);
        if (p.matrix == PairMatrix::weights) {
            // A gradient into the weights adds to dp, and sum_j p_j of it to what all dp of the row lose.
            pooled += product(weights + i * p.key_len, row_of(head.grad_matrix, sum_dtype(p), i, p.key_len, right),
                              p.key_len);
        }
        reinterpret_cast<T*>(const_cast<char*>(head.shift))[i] = dlse - pooled;
    }
}

template <class T>
void set_sink_gradient(const Problem& p, const Head& head, const HeadRows& rows) {
    const auto at = [](const char* numbers, int64_t i) { return reinterpret_cast<const T*>(numbers)[i]; };
    const T sink = at(rows.sink, 0);
    double sum = 0;
    for (int64_t i = 0; i < p.query_len; ++i) {
        const T log_p = sink - at(head.top, i) - at(head.log_total, i), weight = std::exp(log_p);
        T grad = weight * at(head.shift, i);
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
void each_block(const Problem& p, int threads, F f) {
    struct Context {
        const Problem& p;
        F& f;
        int64_t blocks;
    } context{p, f, (p.query_len + kBlock - 1) / kBlock};
    const auto task = [](int64_t i, void* at) {
        Context& c = *static_cast<Context*>(at);
        const int64_t first = i % c.blocks * kBlock;
        c.f(static_cast<size_t>(i / c.blocks), first, std::min(first + kBlock, c.p.query_len));
    };
    const int64_t matrix_cols = p.matrix == PairMatrix::none ? 0 : p.key_len;
    // Less than it costs to wake a thread (a few microseconds) is done here.
    if (static_cast<int64_t>(p.heads.size()) * p.query_len * (p.value_dim + matrix_cols + 16) < kSmall) threads = 1;
    parallel(static_cast<int64_t>(p.heads.size()) * context.blocks, task, &context, threads);
}

}  // namespace

ForwardRows::ForwardRows(Problem& p, const std::vector<HeadRows>& rows) : problem_(p), rows_(rows) {
    const auto head = static_cast<size_t>(p.query_len * kNumbers * size_of(sum_dtype(p)));
    // Written before it is read; zeros would cost a pass over it.
    numbers_ = std::make_unique_for_overwrite<char[]>(head * p.heads.size());
    for (size_t h = 0; h < p.heads.size(); ++h) p.heads[h].numbers = numbers_.get() + h * head;
}

void ForwardRows::finish(int threads) const {
    const auto finish = is_double(problem_) ? finish_row<double> : finish_row<float>;
    each_block(problem_, threads, [&](size_t h, int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) finish(problem_, problem_.heads[h], rows_[h], i);
    });
}

BackwardRows::BackwardRows(Problem& p, const std::vector<HeadRows>& rows, int threads) {
    const auto item = static_cast<size_t>(size_of(sum_dtype(p))), column = static_cast<size_t>(p.query_len) * item;
    numbers_.resize(2 * column * p.heads.size());
    for (size_t h = 0; h < p.heads.size(); ++h) {
        p.heads[h].log_total = numbers_.data() + 2 * h * column;
        p.heads[h].shift = p.heads[h].log_total + column;
    }
    const auto prepare = is_double(p) ? prepare_rows<double> : prepare_rows<float>;
    each_block(p, threads,
               [&](size_t h, int64_t first, int64_t last) { prepare(p, p.heads[h], rows[h], first, last); });
}

void set_sink_gradients(const Problem& p, const std::vector<HeadRows>& rows) {
    for (size_t h = 0; h < rows.size(); ++h) {
        if (rows[h].grad_sink == nullptr) continue;
        (is_double(p) ? set_sink_gradient<double> : set_sink_gradient<float>)(p, p.heads[h], rows[h]);
    }
}

}  // namespace attnscore
