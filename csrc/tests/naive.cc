// The naive target: plain loops in double precision, one (query, key) pair after the other, by the definitions in
// attention.h and dropout.py. The driver compares the other targets with it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/storage.h"

namespace attnscore::naive {
extern const Kernels kernels, kernels_nan_slope;

namespace {

using namespace tests;

// A matrix as numbers.
struct Table {
    int64_t cols = 0;
    std::vector<double> numbers;

    Table(const Matrix& m, Dtype dtype, int64_t rows, int64_t columns) : cols(columns) {
        for (int64_t i = 0; i < (cols ? rows : 0); ++i) {
            for (int64_t j = 0; j < cols; ++j) numbers.push_back(at(m, dtype, i, j));
        }
    }
    const double* row(int64_t i) const { return numbers.data() + i * cols; }
};

double activated(const Problem& p, double u) {
    switch (p.activation) {
        case Activation::tanh:
            return std::tanh(u);
        case Activation::sigmoid:
            return 1 / (1 + std::exp(-u));
        case Activation::relu:
            return u <= 0 ? 0 : u;
        case Activation::leaky_relu:
            return u > 0 ? u : u * p.negative_slope;
        case Activation::silu:
            return u / (1 + std::exp(-u));
        case Activation::gelu:
            return u * std::erfc(-u * std::sqrt(0.5)) / 2;
    }
    return NAN;
}

double slope_of(const Problem& p, double u) {
    const double y = activated(p, u), gate = 1 / (1 + std::exp(-u));
    switch (p.activation) {
        case Activation::tanh:
            return 1 - y * y;
        case Activation::sigmoid:
            return y * (1 - y);
        case Activation::relu:
            return u > 0 ? 1 : u <= 0 ? 0 : u;
        case Activation::leaky_relu:
            return u > 0 ? 1 : u <= 0 ? p.negative_slope : u;
        case Activation::silu:
            return gate + u * gate * (1 - gate);
        case Activation::gelu:
            return std::erfc(-u * std::sqrt(0.5)) / 2 + u * std::exp(-u * u / 2) / std::sqrt(2 * std::acos(-1.0));
    }
    return NAN;
}

// 0 or 1 / (1 - p), as dropout.py has it.
double kept(const Problem& p, const Head& h, int64_t i, int64_t j) {
    if (p.dropout == 0) return 1;
    const auto hash32 = [](uint64_t x) {
        x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF;
        x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF;
        return x ^ x >> 16;
    };
    const uint64_t row = static_cast<uint64_t>(h.index * p.query_len + i), low = p.seed & 0xFFFFFFFF;
    const uint64_t stream = hash32((hash32((row + low) & 0xFFFFFFFF) + (row >> 32) + (p.seed >> 32)) & 0xFFFFFFFF);
    const uint64_t key = static_cast<uint64_t>(j) * 0x9E3779B9 & 0xFFFFFFFF;
    const double bits = static_cast<double>(hash32((stream + key) & 0xFFFFFFFF));
    return bits >= std::nearbyint(p.dropout * 4294967296.0) ? 1 / (1 - p.dropout) : 0;
}

// A head's arrays as numbers, and the scores of its pairs.
struct Reader {
    const Problem& p;
    const Head& h;
    Dtype sum;
    Table query, key, value;
    std::vector<double> w_v;

    Reader(const Problem& problem, const Head& head)
        : p(problem),
          h(head),
          sum(sum_dtype(p)),
          query(h.query, p.score_dtype, p.query_len, p.dim),
          key(h.key, p.score_dtype, p.key_len, p.dim),
          value(h.value, p.value_dtype, p.key_len, p.value_dim) {
        for (int64_t d = 0; h.w_v != nullptr && d < p.dim; ++d) {
            w_v.push_back(number(h.w_v + d * size_of(sum), sum));
        }
    }

    double number_of(const char* numbers, int64_t i) const { return number(numbers + i * size_of(sum), sum); }

    double scale() const { return h.scale == nullptr ? p.scale : p.scale * number(h.scale, sum); }

    // The score of a pair, and its slope in what the caps are applied to.
    double score(int64_t i, int64_t j, double* slope = nullptr) const {
        const double *q = query.row(i), *k = key.row(j);
        double s = 0, steep = 1;
        for (int64_t d = 0; d < p.dim; ++d) {
            if (p.form == Form::inner) s += q[d] * k[d];
            if (p.form == Form::distance) s -= (q[d] - k[d]) * (q[d] - k[d]);
            if (p.form == Form::additive) s += w_v[d] * activated(p, q[d] + k[d]);
        }
        if (p.form != Form::additive) s *= scale();
        if (h.query_bias.data != nullptr) s += at(h.query_bias, sum, i, 0);
        if (h.key_bias.data != nullptr) s += at(h.key_bias, sum, j, 0);
        for (const Cap& cap : p.caps) {
            const double t = std::isinf(cap.cap) ? 0 : std::tanh(s / cap.cap);
            s = cap.factor * (std::isinf(cap.cap) ? s : cap.cap * t);
            steep *= cap.factor * (1 - t * t);
        }
        if (slope != nullptr) *slope = steep;
        return h.bias.data == nullptr ? s : s + at(h.bias, p.bias_dtype, i, j);
    }
};

void forward_row(const Reader& r, int64_t i) {
    const Problem& p = r.p;
    const Head& h = r.h;
    std::vector<int64_t> keys;
    std::vector<double> scores, sums(p.value_dim);
    double row_max = -INFINITY, least = INFINITY, total_score = 0;
    for (int64_t j = 0; j < p.key_len; ++j) {
        if (!is_unmasked(p, h, i, j)) continue;
        keys.push_back(j);
        scores.push_back(r.score(i, j));
        row_max = std::isnan(scores.back()) || std::isnan(row_max) ? NAN : std::max(row_max, scores.back());
        least = std::isnan(scores.back()) || std::isnan(least) ? NAN : std::min(least, scores.back());
        total_score += scores.back();
    }
    const auto count = static_cast<double>(keys.size());
    const double mean = keys.empty() ? 0 : total_score / count, safe_max = row_max == -INFINITY ? 0 : row_max;
    double stats[kRowStats] = {row_max, 0, 0, 0, count, mean, 0, least};
    for (size_t n = 0; n < keys.size(); ++n) {
        const double s = scores[n], e = std::exp(s - safe_max), pooled = e * kept(p, h, i, keys[n]);
        stats[kStatDenom] += e;
        stats[kStatSumExpLogit] += e == 0 ? 0 : e * (s - safe_max);
        stats[kStatSumSquares] += e * e;
        stats[kStatDeviation] += (s - mean) * (s - mean);
        for (int64_t d = 0; d < p.value_dim; ++d) sums[d] += pooled * r.value.row(keys[n])[d];
    }
    for (int64_t d = 0; d < p.value_dim; ++d) {
        const double x = stats[kStatDenom] == 0 ? sums[d] : sums[d] / stats[kStatDenom];
        put(h.out + (i * p.value_dim + d) * size_of(p.value_dtype), p.value_dtype, x);
    }
    if (p.matrix != MatrixOutput::none) {
        const double sink = h.sink == nullptr ? -INFINITY : number(h.sink, r.sum);
        const double highest = std::isnan(safe_max) || sink <= safe_max ? safe_max : sink;
        const double total = stats[kStatDenom] * std::exp(safe_max - highest) + std::exp(sink - highest);
        const bool weights = p.matrix == MatrixOutput::weights;
        char* to = h.matrix + i * p.key_len * size_of(r.sum);
        for (int64_t j = 0; j < p.key_len; ++j) put(to + j * size_of(r.sum), r.sum, weights ? 0 : -INFINITY);
        for (size_t n = 0; n < keys.size(); ++n) {
            const double weight = scores[n] == -INFINITY ? 0 : std::exp(scores[n] - highest) / total;
            put(to + keys[n] * size_of(r.sum), r.sum, weights ? weight : scores[n]);
        }
    }
    for (int n = 0; n < kStatFirstKey; ++n) {
        if (n >= kStatSumExpLogit && !(n == kStatMinScore ? p.min_score : p.full_statistics)) continue;
        put(h.row_stats + (n * p.query_len + i) * size_of(r.sum), r.sum, stats[n]);
    }
}

// Sums in double that are added to an array of the sum type at the end.
struct Sums {
    char* to;
    Dtype dtype;
    std::vector<double> numbers;
    int64_t first;

    Sums(char* array, Dtype type, int64_t count, int64_t lowest = 0)
        : to(array), dtype(type), numbers(array ? count : 0), first(lowest) {}
    ~Sums() {
        for (size_t i = 0; i < numbers.size(); ++i) {
            char* there = to + (first + static_cast<int64_t>(i)) * size_of(dtype);
            put(there, dtype, number(there, dtype) + numbers[i]);
        }
    }
    void add(int64_t place, double x) {
        if (to != nullptr) numbers[static_cast<size_t>(place - first)] += x;
    }
};

struct GroupSums {
    Sums key, value, key_bias, w_v;
};

// `nan_slope`: where relu is flat, a NaN that comes in propagates (0 * NaN), instead of ending there.
template <bool nan_slope>
void backward_row(const Reader& r, GroupSums& group, Sums& query, Sums& query_bias, Sums& scale, Sums& bias,
                  const BiasGroup* shared, int64_t i) {
    const Problem& p = r.p;
    const Head& h = r.h;
    const double row_max = r.number_of(h.row_max, i), log_denom = r.number_of(h.log_denom, i),
                 delta = r.number_of(h.delta, i);
    for (int64_t j = 0; j < p.key_len; ++j) {
        if (!is_unmasked(p, h, i, j)) continue;
        double steep;
        const double log_p = r.score(i, j, &steep) - row_max - log_denom, weight = std::exp(log_p),
                     keep = kept(p, h, i, j);
        double dp = 0;
        for (int64_t d = 0; d < p.value_dim; ++d) {
            const double dout = at(h.grad_out, p.grad_dtype, i, d);
            dp += dout * r.value.row(j)[d];
            // A dropped weight is selected away: its NaN ends there.
            group.value.add(j * p.value_dim + d, (keep == 0 ? 0 : weight * keep) * dout);
        }
        dp = (keep == 0 ? 0 : dp * keep) - delta;
        if (h.grad_entropy != nullptr) {
            dp -= r.number_of(h.grad_entropy, i) * ((weight == 0 ? 0 : log_p) + r.number_of(h.entropy, i));
        }
        const double own = p.matrix == MatrixOutput::none ? 0 : at(h.grad_matrix, r.sum, i, j);
        double ds = p.matrix == MatrixOutput::scores ? own : weight * (dp + own);
        if (shared != nullptr) bias.add(i * shared->row_stride + j * shared->col_stride, ds);
        ds = ds == 0 ? 0 : ds * steep;
        query_bias.add(i, ds);
        group.key_bias.add(j, ds);
        if (r.h.grad_scale != nullptr && ds != 0) {
            double square = 0;  // NaN times it is NaN, also where there is no channel
            for (int64_t d = 0; d < p.dim; ++d) {
                const double away = r.query.row(i)[d] - r.key.row(j)[d];
                square += away * away;
            }
            scale.add(0, -ds * p.scale * square);
        }
        if (p.form != Form::additive) ds *= r.scale();
        for (int64_t d = 0; d < p.dim; ++d) {
            const double q = r.query.row(i)[d], k = r.key.row(j)[d];
            double dq = ds * k, dk = ds * q;
            if (p.form == Form::distance) dq = -2 * ds * (q - k), dk = -dq;
            if (p.form == Form::additive) {
                // Where relu is flat the gradient is selected, not multiplied.
                const bool flat = p.activation == Activation::relu && q + k <= 0 && !(nan_slope && std::isnan(ds));
                dq = dk = ds == 0 || flat ? 0 : ds * r.w_v[d] * slope_of(p, q + k);
                group.w_v.add(d, ds == 0 ? 0 : ds * activated(p, q + k));
            }
            query.add(i * p.dim + d, dq);
            group.key.add(j * p.dim + d, dk);
        }
    }
}

void forward(const Problem& p, Threads) {
    for (const Head& head : p.heads) {
        const Reader reader(p, head);
        for (int64_t i = 0; i < p.query_len; ++i) forward_row(reader, i);
    }
}

template <bool nan_slope>
void backward(const Problem& p, Threads) {
    const Dtype sum = sum_dtype(p);
    std::vector<Sums> biases;
    std::vector<int64_t> shared(p.heads.size(), -1);
    biases.reserve(p.bias_groups.size() + 1);
    for (const BiasGroup& group : p.bias_groups) {
        for (const int64_t head : group.heads) shared[head] = static_cast<int64_t>(biases.size());
        const bool empty = p.query_len == 0 || p.key_len == 0;
        const int64_t rows = (p.query_len - 1) * group.row_stride, cols = (p.key_len - 1) * group.col_stride;
        const int64_t first = std::min<int64_t>(0, rows), last = std::max<int64_t>(0, rows) + cols;
        biases.emplace_back(group.grad_bias, sum, empty ? 0 : last - first + 1, first);
    }
    for (const Group& g : p.groups) {
        GroupSums sums{{g.grad_key, sum, p.key_len * p.dim},
                       {g.grad_value, sum, p.key_len * p.value_dim},
                       {g.grad_key_bias, sum, p.key_len},
                       {g.grad_w_v, sum, p.dim}};
        for (const int64_t head : g.heads) {
            const Reader reader(p, p.heads[head]);
            Sums query(reader.h.grad_query, sum, p.query_len * p.dim), none(nullptr, sum, 0);
            Sums query_bias(reader.h.grad_query_bias, sum, p.query_len), scale(reader.h.grad_scale, sum, 1);
            const int64_t own = shared[head];
            for (int64_t i = 0; i < p.query_len; ++i) {
                backward_row<nan_slope>(reader, sums, query, query_bias, scale, own < 0 ? none : biases[own],
                                        own < 0 ? nullptr : &p.bias_groups[own], i);
            }
        }
    }
}

}  // namespace

const Kernels kernels{"naive", forward, backward<false>};
const Kernels kernels_nan_slope{"naive, NaN * 0 is NaN", forward, backward<true>};

}  // namespace attnscore::naive
