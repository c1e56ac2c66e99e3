// Numbers of every dtype in memory. Included in a namespace of its users, so that each compiles it with flags
// of its own.
#pragma once

// The number that a 16-bit float stands for.
inline float widened(uint16_t bits, Dtype dtype) {
    uint32_t wide;
    if (dtype == Dtype::bf16) {
        wide = static_cast<uint32_t>(bits) << 16;
    } else {
        const uint32_t sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31, fraction = bits & 0x3FFu;
        if (exponent == 31) {
            wide = sign | 0x7F800000u | (fraction << 13);
        } else if (exponent) {
            wide = sign | ((exponent + 112) << 23) | (fraction << 13);  // 112: the biases are 127 and 15
        } else {
            const float small = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
            return sign ? -small : small;
        }
    }
    float x;
    std::memcpy(&x, &wide, sizeof x);
    return x;
}

// The nearest 16-bit float; of two as near, the even one.
inline uint16_t narrowed(float x, Dtype dtype) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof x);
    if (dtype == Dtype::bf16) {
        const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, quiet = (bits >> 16) | 0x40;
        return static_cast<uint16_t>(x != x ? quiet : rounded);
    }
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const float size = std::fabs(x);
    if (x != x) return static_cast<uint16_t>(sign | 0x7E00);
    if (size >= 65520.0f) return static_cast<uint16_t>(sign | 0x7C00);  // rounds to infinity
    if (size < 6.103515625e-5f)  // subnormal: whole multiples of 2^-24, rounded to even by the machine
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(size * 16777216.0f)));
    const uint32_t rounded = (bits & 0x7FFFFFFFu) + 0xFFF + ((bits >> 13) & 1);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));  // 112 << 23, as in `widened`
}

// Number `i` behind `data`, as T.
template <class T>
inline T load_number(const char* data, Dtype dtype, int64_t i) {
    switch (dtype) {
        case Dtype::f32:
            return static_cast<T>(as<float>(data)[i]);
        case Dtype::f64:
            return static_cast<T>(as<double>(data)[i]);
        default:
            return static_cast<T>(widened(as<uint16_t>(data)[i], dtype));
    }
}
