// Vectors of the target's widest registers, as vector types of the compiler, and functions of them. Intrinsics are used
// only where the compiler's code was measured to be worse.
#pragma once

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kNR = 4;  // 6 x 4 of 32 registers
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kNR = 2;  // 6 x 2 of 16 registers
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kNR = 4;  // 6 x 4 of 32 registers
#else
constexpr int kVectorBytes = 16;
constexpr int kNR = 2;
#endif
// A micro-tile of a GEMM, whose sums stay in registers: kMR rows x kNR vectors (above).
constexpr int kMR = 6;
constexpr int kStepPanels =
    kNR == 2 ? 8 : 4;              // micro-panels (kMR query rows) that a step takes together, to share its overhead
constexpr int64_t kTileKeys = 64;  // keys of a key tile: one bit of a uint64_t each

template <class T>
struct Vector {
    typedef T type __attribute__((vector_size(kVectorBytes)));
    typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> integer;
    typedef integer mask __attribute__((vector_size(kVectorBytes)));
    static constexpr int lanes = kVectorBytes / sizeof(T);
};
template <class T>
using V = typename Vector<T>::type;
template <class T>
using M = typename Vector<T>::mask;
template <class T>
constexpr int kTileVectors = kTileKeys / Vector<T>::lanes;  // of a row of scores

// Hide from the compiler where a pointer comes from. Otherwise GCC computes the addresses of all vectors of a
// micro-tile in advance, 24 of them, more than there are registers for.
template <class T>
inline T* opaque(T* p) {
    asm("" : "+r"(p));
    return p;
}

// Keep a vector in a register: with 16 of them GCC would rather keep sums in memory.
template <class T>
inline void in_register([[maybe_unused]] V<T>& v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    asm("" : "+x"(v));
#endif
}

template <class T>
inline V<T> load(const T* p) {  // at any alignment, as `store`
    V<T> v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class T>
inline void store(T* p, V<T> v) {
    std::memcpy(p, &v, sizeof v);
}
// Load the first `count` numbers, at most all lanes, with zeros behind them; no memory behind them is read.
template <class T>
inline V<T> load_first(const T* p, int64_t count) {
    constexpr int L = sizeof(V<T>) / sizeof(T);
    if (count >= L) return load(p);
#if defined(__AVX512F__)
    const auto lanes = static_cast<uint16_t>((1u << count) - 1);
    if constexpr (sizeof(T) == 4)
        return (V<T>)_mm512_maskz_loadu_ps(lanes, p);
    else
        return (V<T>)_mm512_maskz_loadu_pd(static_cast<__mmask8>(lanes), p);
#elif defined(__AVX2__)
    if constexpr (sizeof(T) == 4)
        return (V<T>)_mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)),
                                                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
    else
        return (V<T>)_mm256_maskload_pd(p,
                                        _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3)));
#else
    T x[L] = {};
    std::copy_n(p, count, x);
    return load(x);
#endif
}
// Store the first `count` lanes, at most all; no memory behind them is written.
template <class T>
inline void store_first(T* p, int64_t count, V<T> v) {
    constexpr int L = sizeof(V<T>) / sizeof(T);
    if (count >= L) return store(p, v);
#if defined(__AVX512F__)
    const auto lanes = static_cast<uint16_t>((1u << count) - 1);
    if constexpr (sizeof(T) == 4)
        _mm512_mask_storeu_ps(p, lanes, (__m512)v);
    else
        _mm512_mask_storeu_pd(p, static_cast<__mmask8>(lanes), (__m512d)v);
#else
    T x[L];
    store(x, v);
    std::copy_n(x, count, p);
#endif
}
template <class T>
inline V<T> splat(T x) {
    return x - V<T>{};  // x + 0 would make -0 a 0
}
template <class T>
inline V<T> select(M<T> condition, V<T> a, V<T> b) {
    return condition ? a : b;
}
// The larger of two; NaN where either is NaN.
template <class T>
inline V<T> nan_max(V<T> a, V<T> b) {
    return select<T>((a > b) | (a != a), a, b);
}
// A constant with f(p) in lane p. Lanes set one by one in a loop are no constant to the compiler: shuffles by them made
// a tiny call take 24 us instead of 14.
template <class T, class F, size_t... p>
constexpr M<T> lane_constant(F f, std::index_sequence<p...>) {
    return M<T>{static_cast<typename Vector<T>::integer>(f(static_cast<int>(p)))...};
}
template <class T, class F>
constexpr M<T> lane_constant(F f) {
    return lane_constant<T>(f, std::make_index_sequence<Vector<T>::lanes>{});
}

// Lane p becomes lane f(p) of `a` followed by `b`. clang takes the lanes as numbers, GCC before its 12th release only
// as a vector.
template <class T, class F, size_t... p>
inline V<T> shuffle(V<T> a, V<T> b, F f, std::index_sequence<p...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, f(static_cast<int>(p))...);
#else
    constexpr M<T> from = lane_constant<T>(f);
    return __builtin_shuffle(a, b, from);
#endif
}
template <class T, class F>
inline V<T> shuffle(V<T> a, V<T> b, F f) {
    return shuffle<T>(a, b, f, std::make_index_sequence<Vector<T>::lanes>{});
}

// Swap the lanes whose numbers differ in bit `s`.
template <class T, int s>
inline V<T> swap_lanes(V<T> v) {
    return shuffle<T>(v, v, [](int p) { return p ^ s; });
}
// Combine all lanes by op, halves first.
template <class T, int s = Vector<T>::lanes / 2, class F>
inline T reduce(V<T> v, F op) {
    v = op(v, swap_lanes<T, s>(v));
    if constexpr (s > 1)
        return reduce<T, s / 2>(v, op);
    else
        return v[0];
}
template <class T>
inline T reduce_sum(V<T> v) {
    return reduce<T>(v, [](V<T> a, V<T> b) { return a + b; });
}
template <class T>
inline T reduce_nan_max(V<T> v) {
    return reduce<T>(v, nan_max<T>);
}

// Lane i becomes the lanes of vector i, combined by op in the order of `reduce`. Combining halves of two vectors at a
// time takes a third of the steps that reducing each takes.
template <class T, int s = Vector<T>::lanes / 2, class F>
inline V<T> reduce_each(V<T>* v, F op) {
    constexpr int L = Vector<T>::lanes;
    constexpr auto same_lane = [](int p) { return (p & s) ? L + p : p; };
    constexpr auto partner_lane = [](int p) { return (p & s) ? L + p - s : p + s; };
#pragma GCC unroll 8
    for (int i = 0; i < s; i++)
        v[i] = op(shuffle<T>(v[i], v[i + s], same_lane), shuffle<T>(v[i], v[i + s], partner_lane));
    if constexpr (s > 1)
        return reduce_each<T, s / 2>(v, op);
    else
        return v[0];
}
template <class T>
inline V<T> reduce_sums(V<T>* v) {
    return reduce_each<T>(v, [](V<T> a, V<T> b) { return a + b; });
}

// The larger of two; b where either is NaN. One instruction, where GCC makes two of `select`.
template <class T>
inline V<T> fast_max(V<T> a, V<T> b) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        return (V<T>)_mm512_max_ps((__m512)a, (__m512)b);
    else
        return (V<T>)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
    if constexpr (sizeof(T) == 4)
        return (V<T>)_mm256_max_ps((__m256)a, (__m256)b);
    else
        return (V<T>)_mm256_max_pd((__m256d)a, (__m256d)b);
#else
    return select<T>(a > b, a, b);
#endif
}
// The smaller of two; b where either is NaN.
template <class T>
inline V<T> fast_min(V<T> a, V<T> b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return (V<T>)_mm256_min_ps((__m256)a, (__m256)b);
#endif
    return select<T>(a < b, a, b);
}
template <class T>
inline T reduce_max(V<T> v) {
    return reduce<T>(v, fast_max<T>);
}

template <class T>
inline V<T> abs_of(V<T> x) {
    return select<T>(x < T(0), -x, x);
}

// Whether some lane is above `bound` or NaN.
template <class T>
inline bool exceeds(V<T> x, T bound) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(bound), _CMP_NLE_UQ) != 0;
    else
        return _mm512_cmp_pd_mask((__m512d)x, _mm512_set1_pd(bound), _CMP_NLE_UQ) != 0;
#elif defined(__AVX2__)
    if constexpr (sizeof(T) == 4)
        return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(bound), _CMP_NLE_UQ)) != 0;
    else
        return _mm256_movemask_pd(_mm256_cmp_pd((__m256d)x, _mm256_set1_pd(bound), _CMP_NLE_UQ)) != 0;
#elif defined(__aarch64__)
    const M<T> within = x <= bound;
    return vminvq_u32((uint32x4_t)within) == 0;
#else
    const M<T> within = x <= bound;
    typename Vector<T>::integer all = -1;
    for (int i = 0; i < Vector<T>::lanes; i++) all &= within[i];
    return all == 0;
#endif
}

// Vector `at` of a row of scores: a in the lanes i where bit (at * lanes + i) is set, otherwise b.
template <class T>
inline V<T> select_bits(uint64_t bits, int at, V<T> a, V<T> b) {
    constexpr int L = Vector<T>::lanes;
    const uint32_t here = static_cast<uint32_t>(bits >> (at * L)) & ((1u << L) - 1);
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        return (V<T>)_mm512_mask_blend_ps(static_cast<__mmask16>(here), (__m512)b, (__m512)a);
    else
        return (V<T>)_mm512_mask_blend_pd(static_cast<__mmask8>(here), (__m512d)b, (__m512d)a);
#else
    constexpr M<T> lane = lane_constant<T>([](int p) { return 1 << p; });
    const M<T> all = static_cast<typename Vector<T>::integer>(here) - M<T>{};
    return select<T>((all & lane) != 0, a, b);
#endif
}

// Bits (from bit 0) of the lanes that are -inf.
template <class T>
inline uint64_t minus_infinity_bits(V<T> x) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
    else
        return _mm512_cmp_pd_mask((__m512d)x, _mm512_set1_pd(-INFINITY), _CMP_EQ_OQ);
#elif defined(__aarch64__)
    constexpr M<T> lane = lane_constant<T>([](int p) { return 1 << p; });
    const M<T> lane_bits = (x == -std::numeric_limits<T>::infinity()) & lane;
    if constexpr (sizeof(T) == 4)
        return vaddvq_u32((uint32x4_t)lane_bits);
    else
        return vaddvq_u64((uint64x2_t)lane_bits);
#else
    uint64_t bits = 0;
    for (int i = 0; i < Vector<T>::lanes; i++) bits |= uint64_t(x[i] == -std::numeric_limits<T>::infinity()) << i;
    return bits;
#endif
}

// The number of vectors that the rows of scores of a tile with `key_count` keys take: one, a quarter, a half or all of
// them, as constants for `dispatch_width`.
template <class T>
constexpr int width_of(int64_t key_count) {
    constexpr int W = kTileVectors<T>;
    if (key_count <= Vector<T>::lanes) return 1;
    return key_count <= kTileKeys / 4 ? W / 4 : key_count <= kTileKeys / 2 ? W / 2 : W;
}
template <class T, class F>
inline void dispatch_width(int64_t key_count, const F& f) {
    constexpr int W = kTileVectors<T>;
    const int width = width_of<T>(key_count);
    if (width == 1) return f(std::integral_constant<int, 1>{});
    if constexpr (W / 4 > 1)
        if (width == W / 4) return f(std::integral_constant<int, W / 4>{});
    if (width == W / 2) return f(std::integral_constant<int, W / 2>{});
    f(std::integral_constant<int, W>{});
}

// ---------------------------------------------------------------------------------------------------------------------
// exp: 2^n e^r with |r| <= ln 2 / 2. NaN stays NaN. tail(r) = (e^r - 1 - r) / r^2.

template <class T>
struct Exp;
template <>
struct Exp<float> {
    static constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f, lowest = -104.0f, highest = 88.72f;
    static constexpr int bias = 127, shift = 23;
    static inline V<float> tail(V<float> r) {
        V<float> q = 1.3814601651803663e-3f * r + 8.368716917084365e-3f;
        q = q * r + 4.166838800523407e-2f;
        q = q * r + 1.6666520631318713e-1f;
        return q * r + 4.999999344787884e-1f;
    }
};
template <>
struct Exp<double> {
    static constexpr double magic = 6755399441055744.0;
    static constexpr double ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6, lowest = -745.2,
                            highest = 709.7;
    static constexpr int bias = 1023, shift = 52;
    static inline V<double> tail(V<double> r) {
        // 1 / k! from k = 14 down to 2
        double factorial = 87178291200.0;
        V<double> q = 1 / factorial - V<double>{};
        for (int k = 14; k > 2; k--) {
            factorial /= k;
            q = q * r + 1 / factorial;
        }
        return q;
    }
};

template <class T>
constexpr T kLog2E = static_cast<T>(1.44269504088896340736);

// e^y / 2^n for n = round(y log2 e)
template <class T>
inline V<T> exp_remainder(V<T> y, V<T> n) {
    const V<T> r = (y - n * Exp<T>::ln2_high) - n * Exp<T>::ln2_low;
    return (Exp<T>::tail(r) * r) * r + (r + T(1));
}

// p * 2^n for z = n + magic, in two halves, each of which has the exponent of a normal number.
template <class T>
inline V<T> scale_by_power(V<T> p, V<T> z) {
    using E = Exp<T>;
    M<T> exponent, magic_bits;
    const V<T> start = splat(E::magic);
    std::memcpy(&exponent, &z, sizeof z);
    std::memcpy(&magic_bits, &start, sizeof start);
    exponent -= magic_bits;
    const M<T> half = exponent >> 1,
               halves[2] = {(half + E::bias) << E::shift, (exponent - half + E::bias) << E::shift};
    V<T> power[2];
    std::memcpy(power, halves, sizeof halves);
    return (p * power[0]) * power[1];
}

template <class T>
inline V<T> exp_of(V<T> x) {
    using E = Exp<T>;
#if defined(__AVX512F__)
    // scalef covers the whole range of results; lanes below it are zeroed. Above it, 2^200 is large enough, and keeps r
    // from being inf * 0.
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    if constexpr (sizeof(T) == 4) {
        const __mmask16 above = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(E::lowest), _CMP_NLT_UQ);
        const V<T> y = (V<T>)_mm512_min_ps(_mm512_set1_ps(140.0f), (__m512)x);
        const V<T> n = (V<T>)_mm512_roundscale_ps((__m512)(y * kLog2E<T>), nearest);
        return (V<T>)_mm512_maskz_scalef_ps(above, (__m512)exp_remainder<T>(y, n), (__m512)n);
    } else {
        const __mmask8 above = _mm512_cmp_pd_mask((__m512d)x, _mm512_set1_pd(E::lowest), _CMP_NLT_UQ);
        const V<T> y = (V<T>)_mm512_min_pd(_mm512_set1_pd(1000.0), (__m512d)x);
        const V<T> n = (V<T>)_mm512_roundscale_pd((__m512d)(y * kLog2E<T>), nearest);
        return (V<T>)_mm512_maskz_scalef_pd(above, (__m512d)exp_remainder<T>(y, n), (__m512d)n);
    }
#else
    const M<T> under = x < E::lowest;
    V<T> y = select<T>(under, splat<T>(E::lowest), x);
    y = select<T>(y > E::highest, splat<T>(E::highest), y);
    const V<T> z = y * kLog2E<T> + E::magic;
    const V<T> power = scale_by_power<T>(exp_remainder<T>(y, z - E::magic), z);
    return select<T>(under, V<T>{}, select<T>(x > E::highest, splat(std::numeric_limits<T>::infinity()), power));
#endif
}

// exp(x) without tests for the ends of the range, for |x| up to 86 in float and 706 in double.
template <class T>
__attribute__((always_inline)) inline V<T> normal_exp_of(V<T> x) {
#if defined(__AVX512F__)
    return exp_of<T>(x);
#else
    using E = Exp<T>;
    const V<T> z = x * kLog2E<T> + E::magic, p = exp_remainder<T>(x, z - E::magic);
    M<T> power, bits;
    std::memcpy(&power, &z, sizeof z);
    std::memcpy(&bits, &p, sizeof p);
    bits += power << E::shift;  // the low bits of z are n
    V<T> y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
#endif
}

// 2^f for 0 <= f <= 1, to 8e-8 (float) before rounding.
template <class T>
inline V<T> exp2_fraction(V<T> f) {
    if constexpr (sizeof(T) == 4) {
        V<T> q = 1.8671300703818478e-3f * f + 9.017030321013517e-3f;
        q = q * f + 5.5799913105167326e-2f;
        q = q * f + 2.401644501545046e-1f;
        q = q * f + 6.931513118046801e-1f;
        return q * f + 1.0f;
    } else {
        constexpr double ln2 = 0.693147180559945309417, sqrt2 = 1.41421356237309504880;
        // sqrt2 e^r with |r| <= ln 2 / 2, as the polynomial needs.
        const V<T> r = f * ln2 - ln2 / 2;
        return ((Exp<T>::tail(r) * r) * r + (r + 1.0)) * sqrt2;
    }
}
// 2^(f - kExtraBits) for -1/2 <= f <= 1/2, to 9e-8 before rounding.
constexpr int kExtraBits = 24;  // 2^kExtraBits times the least subnormal number, 2^-149, is a normal one
inline V<float> exp2_rest(V<float> f) {
    constexpr float unit = 1.0f / (1 << kExtraBits);
    V<float> q = (unit * 1.3254669324859357e-3f) * f + unit * 9.671995720786577e-3f;
    q = q * f + unit * 5.550779016480541e-2f;
    q = q * f + unit * 2.4022231998275398e-1f;
    q = q * f + unit * 6.931469305944987e-1f;
    return q * f + unit;
}
// 2^t, for the weights of a softmax: exact for whole numbers; NaN stays NaN. Infinite beyond the range, which in float
// without scalef ends at 2^103: the power then takes 2 instructions in place of 8, and they compete with multiply-adds.
template <class T>
inline V<T> exp2_of(V<T> t) {
#if defined(__AVX512F__)
    // reduce gives t - floor(t), 0 for -inf; scalef multiplies by 2^floor(t).
    constexpr int down = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    if constexpr (sizeof(T) == 4)
        return (V<T>)_mm512_scalef_ps((__m512)exp2_fraction<T>((V<T>)_mm512_reduce_ps((__m512)t, down)), (__m512)t);
    else
        return (V<T>)_mm512_scalef_pd((__m512d)exp2_fraction<T>((V<T>)_mm512_reduce_pd((__m512d)t, down)), (__m512d)t);
#else
    using E = Exp<T>;
    if constexpr (sizeof(T) == 4) {
        // The low bits of z are the exponent of 2^(round(t) + kExtraBits): 0 makes it 0, and 255 infinite.
        constexpr int bias = E::bias + kExtraBits;
        constexpr float magic = E::magic + bias;
#if defined(__aarch64__)
        // One instruction each; NaN stays NaN.
        const V<T> y = (V<T>)vminq_f32(vdupq_n_f32(255 - bias), vmaxq_f32(vdupq_n_f32(-bias), (float32x4_t)t));
#else
        const V<T> y = fast_min<T>(splat(T(255 - bias)), fast_max<T>(splat(T(-bias)), t));
#endif
        const V<T> z = y + magic;
        M<T> bits;
        std::memcpy(&bits, &z, sizeof z);
        bits <<= E::shift;
        V<T> power;
        std::memcpy(&power, &bits, sizeof bits);
        return exp2_rest(y - (z - magic)) * power;
    } else {
        constexpr T min_exponent = -(E::bias + E::shift + 1);
        const M<T> under = t < min_exponent;
        constexpr T max_exponent = E::bias + 1;
        const V<T> y = select<T>(under, splat(min_exponent), select<T>(t > max_exponent, splat(max_exponent), t));
        const V<T> z = (y - T(0.5)) + E::magic;  // rounds down; a whole y may become y - 1, of which the fraction is 1
        return select<T>(under, V<T>{}, scale_by_power<T>(exp2_fraction<T>(y - (z - E::magic)), z));
    }
#endif
}

template <class T>
inline T exp_scalar(T x) {
    return exp_of<T>(splat(x))[0];
}

// log(x) of 0, of positive normal numbers, and of infinity; NaN stays NaN.
template <class T>
inline V<T> log_of(V<T> x) {
    if constexpr (sizeof(T) == 4) {
        // x = 2^n (1 + f) with 1 + f between the roots of 1/2 and 2; log(1 + f) by the polynomial of Cephes.
        constexpr int root_half = 0x3F3504F3;
        M<float> bits;
        std::memcpy(&bits, &x, sizeof x);
        const M<float> power = (bits - root_half) >> Exp<float>::shift;
        bits -= power << Exp<float>::shift;
        V<float> f;
        std::memcpy(&f, &bits, sizeof bits);
        f -= 1.0f;
        const V<float> n = __builtin_convertvector(power, V<float>), square = f * f;
        V<float> q = 7.0376836292e-2f * f - 1.1514610310e-1f;
        q = q * f + 1.1676998740e-1f;
        q = q * f - 1.2420140846e-1f;
        q = q * f + 1.4249322787e-1f;
        q = q * f - 1.6668057665e-1f;
        q = q * f + 2.0000714765e-1f;
        q = q * f - 2.4999993993e-1f;
        q = q * f + 3.3333331174e-1f;
        const V<float> low = (q * f * square + n * Exp<float>::ln2_low) - 0.5f * square;
        constexpr float infinity = std::numeric_limits<float>::infinity();
        const V<float> log_x = (f + low) + n * Exp<float>::ln2_high;
        return select<float>(x == 0, splat(-infinity), select<float>(x < infinity, log_x, x));
    } else {
        for (int i = 0; i < Vector<T>::lanes; i++) x[i] = std::log(x[i]);
        return x;
    }
}
