// Activations of additive scores, evaluated term by term.
#pragma once

#include "kernels/simd-inl.h"

// c + a b and c - a b, rounded once where the target can.
template <class T>
inline V<T> fused(V<T> a, V<T> b, V<T> c) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        return (V<T>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
    else
        return (V<T>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX2__)
    if constexpr (sizeof(T) == 4)
        return (V<T>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
    else
        return (V<T>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
    return a * b + c;
#endif
}
template <class T>
inline V<T> fused_negative(V<T> a, V<T> b, V<T> c) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        return (V<T>)_mm512_fnmadd_ps((__m512)a, (__m512)b, (__m512)c);
    else
        return (V<T>)_mm512_fnmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#else
    return c - a * b;
#endif
}

// 1 / x, where it is a normal number, by an estimate and one Newton step: off by at most 1.5 units in the last place
// with AVX-512 (14 bits estimated), 3 with AVX2 (12 bits). Faster than a division on Cascade Lake, not on Zen 4 and 5.
// `kEstimates`: whether a CPU that does not divide quickly uses it instead of divisions.
#if defined(__AVX512F__)
template <class T>
constexpr bool kEstimates = sizeof(T) == 4;
#else
template <class T>
constexpr bool kEstimates = false;
#endif
template <class T>
inline V<T> reciprocal(V<T> x) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) {
        const V<T> r = (V<T>)_mm512_maskz_rcp14_ps(0xFFFF, (__m512)x);
        return r * fused_negative<T>(x, r, splat(T(2)));
    }
#elif defined(__AVX2__)
    if constexpr (sizeof(T) == 4) {
        const V<T> r = (V<T>)_mm256_rcp_ps((__m256)x);
        return r * fused_negative<T>(x, r, splat(T(2)));
    }
#endif
    return T(1) / x;
}

// tanh. In float x P(x^2) / Q(x^2), a minimax fit of its relative error up to where tanh rounds to 1: at most 5 units
// in the last place (7 where multiply-adds round twice), 1 in the mean square. At 9.13, to which x is bounded, it
// rounds to more than 1, fused multiply-adds or not, so that beyond it tanh is 1 exactly: the slope of a cap ends
// there. In double the polynomials of the Cephes library up to 0.625, beyond it 1 - 2 / (1 + e^2x), which would lose
// digits of small numbers. NaN stays NaN.
template <class T>
inline V<T> tanh_of(V<T> x) {
    if constexpr (sizeof(T) == 4) {
        const V<T> bounded = fast_min<T>(splat(T(9.13)), fast_max<T>(splat(T(-9.13)), x)), z = bounded * bounded;
        V<T> p = fused<T>(z, splat(T(1.33190685e-8)), splat(T(2.05835e-5)));
        p = fused<T>(p, z, splat(T(3.4940338e-3)));
        p = fused<T>(p, z, splat(T(1.3379718e-1)));
        p = fused<T>(p, z, splat(T(1)));
        V<T> q = fused<T>(z, splat(T(7.7620285e-7)), splat(T(3.2830934e-4)));
        q = fused<T>(q, z, splat(T(2.587107e-2)));
        q = fused<T>(q, z, splat(T(4.6713036e-1)));
        q = fused<T>(q, z, splat(T(1)));
        // Rounding may exceed 1, which no cap and no gradient 1 - y^2 expects.
        return fast_min<T>(splat(T(1)), fast_max<T>(splat(T(-1)), bounded * p / q));
    } else {
        const V<T> size = abs_of<T>(x), z = x * x;
        V<T> p = -9.64399179425052238628e-1 * z - 9.92877231001918586564e1;
        p = p * z - 1.61468768441708447952e3;
        V<T> q = z + 1.12811678491631932402e2;
        q = q * z + 2.23548839060100448583e3;
        q = q * z + 4.84406305325125486048e3;
        const V<T> near = x * (z * (p / q)) + x;
        const V<T> far = T(1) - T(2) / (exp_of<T>(size + size) + T(1));
        return select<T>(size < T(0.625), near, select<T>(x < T(0), -far, far));
    }
}

// An activation f: value(z); and for g = ds, `dz` = g f'(z) and `value` = g f(z). `inexpensive`: several rows at a time
// pay.

template <class T>
struct TanhTerm {
    static constexpr bool inexpensive = false;
    V<T> value(V<T> z) const { return tanh_of<T>(z); }
    void value_and_gradient(V<T> g, V<T> z, V<T>& dz, V<T>& value) const {
        const V<T> y = tanh_of<T>(z);
        value = g * y;
        dz = fused_negative<T>(value, y, g);
    }
};

template <class T>
struct SigmoidTerm {
    static constexpr bool inexpensive = false;
    V<T> value(V<T> z) const { return T(1) / (exp_of<T>(-z) + T(1)); }
    void value_and_gradient(V<T> g, V<T> z, V<T>& dz, V<T>& value_out) const {
        const V<T> y = value(z);
        value_out = g * y;
        dz = fused_negative<T>(value_out, y, value_out);
    }
};

template <class T>
struct SiluTerm {
    static constexpr bool inexpensive = false;
    V<T> value(V<T> z) const { return z / (exp_of<T>(-z) + T(1)); }
    void value_and_gradient(V<T> g, V<T> z, V<T>& dz, V<T>& value) const {
        // 1 - gate loses its digits for large z, where the gate is almost 1: both are computed from exp(-|z|).
        const V<T> e = exp_of<T>(select<T>(z < T(0), z, -z)), larger = T(1) / (e + T(1)), smaller = e * larger;
        const V<T> gate = select<T>(z < T(0), smaller, larger), y = z * gate;
        value = g * y;
        dz = g * fused<T>(y, select<T>(z < T(0), larger, smaller), gate);
    }
};

// leaky_relu with the slope `negative` below 0. `Flat`: it is at most 1 and not 0, so that f is max(z, negative * z).
template <class T, bool Flat>
struct RectifierTerm {
    static constexpr bool inexpensive = true;
    T negative;
    V<T> value(V<T> z) const { return Flat ? fast_max<T>(z * negative, z) : select<T>(z > T(0), z, z * negative); }
    void value_and_gradient(V<T> g, V<T> z, V<T>& dz, V<T>& value) const {
        dz = select<T>(z > T(0), g, g * negative);
        value = dz * z;
    }
};

template <class T>
struct ReluTerm {
    static constexpr bool inexpensive = true;
    V<T> value(V<T> z) const { return fast_max<T>(V<T>{}, z); }
    void value_and_gradient(V<T> g, V<T> z, V<T>& dz, V<T>& value_out) const {
        dz = select<T>(z <= T(0), V<T>{}, g);  // at NaN the slope is 1, not 0
        value_out = g * value(z);
    }
};

// gelu(z) = z P(z), with the normal distribution P(-t) = exp(-t^2 / 2) R(t) for t >= 0. R is a polynomial in
// y = (t - k) / (t + k), times 1 - y, fitted at the Chebyshev points to 1.2e-8 (float) and 5e-17 (double) relative.
template <class T>
struct GeluTerm {
    static constexpr bool inexpensive = false;
    // `below`: P(z); `bell`: exp(-z^2 / 2), times 1 / sqrt(2 pi) the derivative of P.
    static void parts(V<T> z, V<T>& below, V<T>& bell) {
        const V<T> t = select<T>(z < T(0), -z, z);
        bell = exp_of<T>(t * t * T(-0.5));
        const T k = sizeof(T) == 4 ? T(3.5) : T(5);
        const V<T> d = (T(2) * k) / (t + k), y = T(1) - d;
        V<T> q;
        if constexpr (sizeof(T) == 4) {
            constexpr float c[] = {4.947885832e-6f,  6.467055996e-5f, -5.968122831e-5f, -4.54140843e-4f,
                                   9.236048681e-4f,  2.486579819e-3f, -1.657843506e-2f, 4.506072256e-2f,
                                   -8.079455839e-2f, 0.1063451536f};
            q = y * -7.109555622e-6f + c[0];
#pragma GCC unroll 10
            for (int i = 1; i < 10; i++) q = q * y + c[i];
        } else {
            constexpr double c[] = {
                5.03730212158742888e-11,  9.446827522150298911e-10, -5.015649937527709499e-10, -6.782555313802720778e-9,
                3.581840051061195377e-9,  4.340262594888541184e-8,  -3.310698071471489219e-8,  -2.769337871047958465e-7,
                3.977912640589374928e-7,  1.668109911586526056e-6,  -4.976177118979049217e-6,  -5.937567328648914241e-6,
                5.448988309009295485e-5,  -7.978694094808062751e-5, -2.993376738223219886e-4,  2.079506680094161526e-3,
                -6.911863870881432849e-3, 1.650203661703428134e-2,  -3.135331566712137664e-2,  4.953056159699767901e-2,
                -6.65382502890057685e-2,  7.691930497500629596e-2};
            q = y * -8.166192629515080399e-11 + c[0];
#pragma GCC unroll 22
            for (int i = 1; i < 22; i++) q = q * y + c[i];
        }
        const V<T> tail = bell * (q * d);
        below = select<T>(z < T(0), tail, T(1) - tail);
    }
    V<T> value(V<T> z) const {
        V<T> below, bell;
        parts(z, below, bell);
        return z * below;
    }
    void value_and_gradient(V<T> g, V<T> z, V<T>& dz, V<T>& value) const {
        V<T> below, bell;
        parts(z, below, bell);
        value = g * (z * below);
        dz = g * fused<T>(z * T(0.39894228040143267794), bell, below);
    }
};
