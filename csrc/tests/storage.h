// Numbers of every dtype in raw memory, for the tests: written here anew, so that no test shares a mistake with what it
// tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "api/validate.h"
#include "runtime/attention.h"

namespace attnscore::tests {

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
    return static_cast<uint16_t>(sign | (((exponent + 14) << 10) + steps));
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

// Which pairs a head is_unmasked, by the definition.
inline bool is_unmasked(const Problem& p, const Head& h, int64_t i, int64_t j) {
    if (h.start != nullptr && (j < h.start[i] || j >= h.stop[i])) return false;
    for (int64_t k = 1; k <= h.holes; ++k) {
        if (j >= h.start[k * h.hole_stride + i] && j < h.stop[k * h.hole_stride + i]) return false;
    }
    if (h.mask.data != nullptr && h.mask.data[i * h.mask.row_stride + j * h.mask.col_stride] == 0) return false;
    if (h.query_ids.data != nullptr) {
        const int64_t own = reinterpret_cast<const int64_t*>(h.query_ids.data)[i * h.query_ids.row_stride];
        const int64_t other = reinterpret_cast<const int64_t*>(h.key_ids.data)[j * h.key_ids.row_stride];
        if (own < 0 || own != other) return false;
    }
    return h.bias.data == nullptr || at(h.bias, p.bias_dtype, i, j) != -INFINITY;
}

}  // namespace attnscore::tests
