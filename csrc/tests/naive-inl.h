// Naive kernels: plain loops in double, one row at a time, behind the contract of attention.h.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "../attention.h"

namespace attnscore::ATTNSCORE_TARGET {
namespace {

inline double number(const char* at, Dtype dtype) {
    uint16_t half;
    uint32_t bits;
    float single;
    double result;
    switch (dtype) {
        case Dtype::f64:
            std::memcpy(&result, at, 8);
            return result;
        case Dtype::f32:
            std::memcpy(&single, at, 4);
            return single;
        case Dtype::bf16:
            std::memcpy(&half, at, 2);
            bits = static_cast<uint32_t>(half) << 16;
            std::memcpy(&single, &bits, 4);
            return single;
        case Dtype::f16:
            break;
    }
    std::memcpy(&half, at, 2);
    const double sign = half >> 15 ? -1 : 1;
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31) return fraction ? std::numeric_limits<double>::quiet_NaN() : sign * INFINITY;
    return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}

inline int64_t size_of(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

// To nearest, ties to even.
inline uint16_t half_of(double x) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    x = std::abs(x);
    if (std::isnan(x)) return 0x7e00;
    if (x == 0) return sign;
    if (x >= 65520) return sign | 0x7c00;
    int exponent;
    std::frexp(x, &exponent);
    exponent = std::max(exponent - 1, -14);
    const int steps = static_cast<int>(std::nearbyint(std::ldexp(x, 10 - exponent)));  // 1024 .. 2048 if normal
    return sign | static_cast<uint16_t>(((exponent + 14) << 10) + steps);
}

inline uint16_t brain_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (std::isnan(x)) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void put(char* at, Dtype dtype, double x) {
    const float single = static_cast<float>(x);
    if (dtype == Dtype::f64) {
        std::memcpy(at, &x, 8);
    } else if (dtype == Dtype::f32) {
        std::memcpy(at, &single, 4);
    } else {
        const uint16_t bits = dtype == Dtype::f16 ? half_of(x) : brain_of(single);
        std::memcpy(at, &bits, 2);
    }
}

inline double at(const Matrix& m, Dtype dtype, int64_t row, int64_t col) {
    return number(m.data + (row * m.row_stride + col * m.col_stride) * size_of(dtype), dtype);
}

inline Dtype sum_dtype(const Problem& p) { return p.value_dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }

inline void add(char* base, Dtype dtype, int64_t place, double x) {
    char* there = base + place * size_of(dtype);
    put(there, dtype, number(there, dtype) + x);
}

inline double activated(const Problem& p, double u) {
    switch (p.activation) {
        case Activation::tanh:
            return std::tanh(u);
        case Activation::sigmoid:
            return 1 / (1 + std::exp(-u));
        case Activation::relu:
            return u > 0 ? u : u * 0;
        case Activation::leaky_relu:
            break;
    }
    return u > 0 ? u : u * p.negative_slope;
}

inline double slope(const Problem& p, double u) {
    const double y = activated(p, u);
    switch (p.activation) {
        case Activation::tanh:
            return 1 - y * y;
        case Activation::sigmoid:
            return y * (1 - y);
        case Activation::relu:
            return u > 0;
        case Activation::leaky_relu:
            break;
    }
    return u > 0 ? 1 : p.negative_slope;
}

inline double score(const Problem& p, const Head& h, int64_t i, int64_t j) {
    double sum = 0;
    for (int64_t d = 0; d < p.dim; ++d) {
        const double q = at(h.query, p.score_dtype, i, d), k = at(h.key, p.score_dtype, j, d);
        if (p.form == Form::inner) {
            sum += q * k;
        } else {
            sum += number(h.weights + d * size_of(sum_dtype(p)), sum_dtype(p)) * activated(p, q + k);
        }
    }
    return p.form == Form::inner ? sum * p.scale : sum;
}

void forward_row(const Problem& p, const Head& h, int64_t i) {
    const int64_t start = h.start ? h.start[i] : 0, stop = h.stop ? h.stop[i] : p.key_len;
    std::vector<double> scores, sums(p.value_dim);
    double top = -INFINITY, mean = 0;
    for (int64_t j = start; j < stop; ++j) {
        scores.push_back(score(p, h, i, j));
        top = std::max(top, scores.back());
        mean += scores.back() / static_cast<double>(stop - start);
    }
    double numbers[kStatistics] = {top, 0, 0, 0, static_cast<double>(scores.size()), mean, 0};
    for (int64_t j = start; j < stop; ++j) {
        const double s = scores[j - start], e = std::exp(s - top);
        numbers[1] += e;
        numbers[2] += e == 0 ? 0 : e * (s - top);
        numbers[3] += e * e;
        numbers[6] += (s - mean) * (s - mean);
        for (int64_t d = 0; d < p.value_dim; ++d) sums[d] += e * at(h.value, p.value_dtype, j, d);
    }
    for (int64_t d = 0; d < p.value_dim; ++d) {
        const double x = scores.empty() ? 0 : sums[d] / numbers[1];
        put(h.out + (i * p.value_dim + d) * size_of(p.value_dtype), p.value_dtype, x);
    }
    const Dtype sum = sum_dtype(p);
    const int count = p.full_statistics ? kStatistics : 2;
    for (int n = 0; n < count; ++n) put(h.statistics + (i * kStatistics + n) * size_of(sum), sum, numbers[n]);
}

void backward_row(const Problem& p, const Group& g, const Head& h, int64_t i) {
    const Dtype sum = sum_dtype(p);
    const int64_t start = h.start ? h.start[i] : 0, stop = h.stop ? h.stop[i] : p.key_len, size = size_of(sum);
    const double top = number(h.top + i * size, sum), log_total = number(h.log_total + i * size, sum);
    for (int64_t j = start; j < stop; ++j) {
        const double weight = std::exp(score(p, h, i, j) - top - log_total);
        double slope_of_score = number(h.shift + i * size, sum);
        for (int64_t d = 0; d < p.value_dim; ++d) {
            const double dout = at(h.grad_out, p.grad_dtype, i, d);
            slope_of_score += dout * at(h.value, p.value_dtype, j, d);
            add(g.grad_value, sum, j * p.value_dim + d, weight * dout);
        }
        slope_of_score *= weight;
        for (int64_t d = 0; d < p.dim; ++d) {
            const double q = at(h.query, p.score_dtype, i, d), k = at(h.key, p.score_dtype, j, d);
            if (p.form == Form::inner) {
                add(h.grad_query, sum, i * p.dim + d, slope_of_score * p.scale * k);
                add(g.grad_key, sum, j * p.dim + d, slope_of_score * p.scale * q);
            } else {
                const double inside = slope_of_score * number(h.weights + d * size, sum) * slope(p, q + k);
                add(h.grad_query, sum, i * p.dim + d, inside);
                add(g.grad_key, sum, j * p.dim + d, inside);
                add(g.grad_weights, sum, d, slope_of_score * activated(p, q + k));
            }
        }
    }
}

void forward(const Problem& p, int) {
    for (const Head& head : p.heads) {
        for (int64_t i = 0; i < p.query_len; ++i) forward_row(p, head, i);
    }
}

void backward(const Problem& p, int) {
    for (const Group& g : p.groups) {
        for (const int64_t head : g.heads) {
            for (int64_t i = 0; i < p.query_len; ++i) backward_row(p, g, p.heads[head], i);
        }
    }
}

}  // namespace

#define ATTNSCORE_TEXT(x) #x
#define ATTNSCORE_NAME(x) ATTNSCORE_TEXT(x)
constinit const Kernels kernels{ATTNSCORE_NAME(ATTNSCORE_TARGET), forward, backward};

}  // namespace attnscore::ATTNSCORE_TARGET
