// The kernels, written once and compiled for each CPU target in a namespace of its own.
//
// Forward: a task is a block of query rows of one head, which walks over tiles of 64 keys. Keys are transposed tile by
// tile, so that scores and pooling are the same product of a few broadcast rows with contiguous vectors. Backward: a task is
// one key head with all its query heads, which owns every gradient that it adds to; where there are too few of those, tasks
// are ranges of keys (dk, dv) and then blocks of rows (dq). Nothing depends on which thread runs what.
//
// A pair that the interval hides gets a weight of exactly 0; inputs are finite wherever an interval hides anything (the
// caller sees to that), so that 0 times a value is 0.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "attention.h"

namespace attnscore {
namespace ATTNSCORE_TARGET {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kPanel = 4;  // vectors of a row that a product keeps in registers: 6 x 4 of 32
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kPanel = 2;  // 6 x 2 of 16
#else
constexpr int kVectorBytes = 16;
constexpr int kPanel = 2;
#endif
constexpr int kRows = 6;
constexpr int kKeys = 64;  // keys of a tile
constexpr int64_t kBackwardRows = 96;

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
inline V<T> load(const T* p) {
    V<T> v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class T>
inline void store(T* p, V<T> v) {
    std::memcpy(p, &v, sizeof v);
}
template <class T>
inline V<T> splat(T x) {
    V<T> v;
    for (int i = 0; i < Vector<T>::lanes; i++) v[i] = x;
    return v;
}
template <class T>
inline V<T> choose(M<T> condition, V<T> a, V<T> b) {
    return condition ? a : b;
}
template <class T>
inline V<T> max_of(V<T> a, V<T> b) {
    // NaN in either operand must come out.
    return choose<T>((a > b) | (a != a), a, b);
}
template <class T>
inline T sum_of(V<T> v) {
    T total = 0;
    T lanes[Vector<T>::lanes];
    std::memcpy(lanes, &v, sizeof v);
    for (int step = Vector<T>::lanes / 2; step > 0; step /= 2)
        for (int i = 0; i < step; i++) lanes[i] += lanes[i + step];
    return total + lanes[0];
}
template <class T>
inline T largest_of(V<T> v) {
    T lanes[Vector<T>::lanes];
    std::memcpy(lanes, &v, sizeof v);
    T top = lanes[0];
    for (int i = 1; i < Vector<T>::lanes; i++) top = (lanes[i] > top || lanes[i] != lanes[i]) ? lanes[i] : top;
    return top;
}

// ---------------------------------------------------------------------------------------------------------------------
// exp: 2^n e^r with |r| <= ln 2 / 2. Below the smallest normal number the result is 0; NaN stays NaN.

template <class T>
struct Exp;
template <>
struct Exp<float> {
    static constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f, lowest = -87.3f, highest = 88.3f;
    static constexpr int bias = 127, shift = 23;
    static inline V<float> tail(V<float> r) {
        V<float> q = splat(1.3814601651803663e-3f);
        q = q * r + 8.368716917084365e-3f;
        q = q * r + 4.166838800523407e-2f;
        q = q * r + 1.6666520631318713e-1f;
        return q * r + 4.999999344787884e-1f;
    }
};
template <>
struct Exp<double> {
    static constexpr double magic = 6755399441055744.0;
    static constexpr double ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6, lowest = -708.3,
                            highest = 709.0;
    static constexpr int bias = 1023, shift = 52;
    static inline V<double> tail(V<double> r) {
        // 1 / k! from k = 14 down to 2
        double factorial = 87178291200.0;
        V<double> q = splat(1 / factorial);
        for (int k = 14; k > 2; k--) {
            factorial /= k;
            q = q * r + 1 / factorial;
        }
        return q;
    }
};

template <class T>
inline V<T> exp_of(V<T> x) {
    using E = Exp<T>;
    const M<T> under = x < E::lowest;
    V<T> y = choose<T>(under, splat<T>(E::lowest), x);
    y = choose<T>(y > E::highest, splat<T>(E::highest), y);
    V<T> t = y * static_cast<T>(1.44269504088896340736) + E::magic;
    const V<T> n = t - E::magic;
    const V<T> r = (y - n * E::ln2_high) - n * E::ln2_low;
    const V<T> p = (E::tail(r) * r) * r + r + static_cast<T>(1);
    M<T> bits;
    std::memcpy(&bits, &t, sizeof t);
    bits = (bits + E::bias) << E::shift;
    V<T> power;
    std::memcpy(&power, &bits, sizeof bits);
    return choose<T>(under, V<T>{}, choose<T>(x > E::highest, splat(std::numeric_limits<T>::infinity()), p * power));
}

// ---------------------------------------------------------------------------------------------------------------------
// C[m x n] (+)= A[m x k] B[k x n]; n in vectors; rows of A broadcast, so A may have any strides.

template <class T, int R, int N>
inline void product_block(T* c, int64_t ldc, const T* a, int64_t row, int64_t col, const T* b, int64_t ldb, int64_t k, bool add) {
    constexpr int L = Vector<T>::lanes;
    V<T> sum[R][N];
    for (int i = 0; i < R; i++)
        for (int j = 0; j < N; j++) sum[i][j] = add ? load(c + i * ldc + j * L) : V<T>{};
    for (int64_t p = 0; p < k; p++) {
        V<T> line[N];
        for (int j = 0; j < N; j++) line[j] = load(b + p * ldb + j * L);
#pragma GCC unroll 8
        for (int i = 0; i < R; i++) {
            const V<T> factor = splat(a[i * row + p * col]);
#pragma GCC unroll 8
            for (int j = 0; j < N; j++) sum[i][j] += factor * line[j];
        }
    }
    for (int i = 0; i < R; i++)
        for (int j = 0; j < N; j++) store(c + i * ldc + j * L, sum[i][j]);
}

template <class T, int N>
void product_panel(T* c, int64_t ldc, const T* a, int64_t row, int64_t col, const T* b, int64_t ldb, int64_t m, int64_t k, bool add) {
    int64_t i = 0;
    for (; i + kRows <= m; i += kRows) product_block<T, kRows, N>(c + i * ldc, ldc, a + i * row, row, col, b, ldb, k, add);
    switch (m - i) {
        case 5: product_block<T, 5, N>(c + i * ldc, ldc, a + i * row, row, col, b, ldb, k, add); break;
        case 4: product_block<T, 4, N>(c + i * ldc, ldc, a + i * row, row, col, b, ldb, k, add); break;
        case 3: product_block<T, 3, N>(c + i * ldc, ldc, a + i * row, row, col, b, ldb, k, add); break;
        case 2: product_block<T, 2, N>(c + i * ldc, ldc, a + i * row, row, col, b, ldb, k, add); break;
        case 1: product_block<T, 1, N>(c + i * ldc, ldc, a + i * row, row, col, b, ldb, k, add); break;
    }
}

// `n` is a number of columns that whole vectors cover.
template <class T>
void product(T* c, int64_t ldc, const T* a, int64_t row, int64_t col, const T* b, int64_t ldb, int64_t m, int64_t n, int64_t k, bool add) {
    constexpr int L = Vector<T>::lanes;
    int64_t j = 0;
    for (; j + kPanel * L <= n; j += kPanel * L) product_panel<T, kPanel>(c + j, ldc, a, row, col, b + j, ldb, m, k, add);
    for (; j < n; j += L) product_panel<T, 1>(c + j, ldc, a, row, col, b + j, ldb, m, k, add);
}

// ---------------------------------------------------------------------------------------------------------------------
// Reading the caller's memory

inline float widened(uint16_t bits, Dtype dtype) {
    uint32_t wide;
    if (dtype == Dtype::bf16) {
        wide = static_cast<uint32_t>(bits) << 16;
    } else {
        const uint32_t sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31, fraction = bits & 0x3FFu;
        if (exponent == 31) {
            wide = sign | 0x7F800000u | (fraction << 13);
        } else if (exponent) {
            wide = sign | ((exponent + 112) << 23) | (fraction << 13);
        } else {
            const float small = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
            return sign ? -small : small;
        }
    }
    float x;
    std::memcpy(&x, &wide, sizeof x);
    return x;
}

inline uint16_t narrowed(float x, Dtype dtype) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof x);
    if (dtype == Dtype::bf16) {
        if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
        return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    }
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const float size = std::fabs(x);
    if (x != x) return static_cast<uint16_t>(sign | 0x7E00);
    if (size >= 65520.0f) return static_cast<uint16_t>(sign | 0x7C00);
    if (size < 6.103515625e-5f)  // subnormal: whole multiples of 2^-24, rounded to even by the machine
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(size * 16777216.0f)));
    uint32_t rounded = (bits & 0x7FFFFFFFu) + 0xFFF + ((bits >> 13) & 1);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <class T>
inline T element(const Matrix& m, Dtype dtype, int64_t i, int64_t j) {
    const int64_t at = i * m.row_stride + j * m.col_stride;
    switch (dtype) {
        case Dtype::f32: return static_cast<T>(reinterpret_cast<const float*>(m.data)[at]);
        case Dtype::f64: return static_cast<T>(reinterpret_cast<const double*>(m.data)[at]);
        default: return static_cast<T>(widened(reinterpret_cast<const uint16_t*>(m.data)[at], dtype));
    }
}

template <class T>
constexpr Dtype own_dtype() {
    return sizeof(T) == 4 ? Dtype::f32 : Dtype::f64;
}

// Whether rows can be read where they lie: right dtype, contiguous, and whole vectors of columns.
template <class T>
inline bool lies_ready(const Matrix& m, Dtype dtype, int64_t cols) {
    return dtype == own_dtype<T>() && m.col_stride == 1 && m.row_stride >= cols && cols % Vector<T>::lanes == 0;
}

// Rows [first, first + count) into a buffer whose rows are `width` apart, zeros behind the columns.
template <class T>
void gather(T* to, int64_t width, const Matrix& m, Dtype dtype, int64_t first, int64_t count, int64_t cols) {
    for (int64_t i = 0; i < count; i++) {
        T* row = to + i * width;
        if (cols > 0 && dtype == own_dtype<T>() && m.col_stride == 1)
            std::memcpy(row, reinterpret_cast<const T*>(m.data) + (first + i) * m.row_stride, cols * sizeof(T));
        else
            for (int64_t j = 0; j < cols; j++) row[j] = element<T>(m, dtype, first + i, j);
        for (int64_t j = cols; j < width; j++) row[j] = 0;
    }
}

// A square of lanes x lanes, transposed in registers.
template <class T>
inline void transpose_square(T* to, int64_t ldt, const T* from, int64_t ldf) {
    constexpr int L = Vector<T>::lanes;
    V<T> v[L];
    for (int i = 0; i < L; i++) v[i] = load(from + i * ldf);
#pragma GCC unroll 4
    for (int s = L / 2; s > 0; s /= 2) {
        M<T> low, high;
        for (int p = 0; p < L; p++) {
            low[p] = (p & s) ? L + p - s : p;
            high[p] = (p & s) ? L + p : p + s;
        }
#pragma GCC unroll 16
        for (int i = 0; i < L; i++) {
            if (i & s) continue;
            const V<T> a = v[i], b = v[i + s];
            v[i] = __builtin_shuffle(a, b, low);
            v[i + s] = __builtin_shuffle(a, b, high);
        }
    }
    for (int i = 0; i < L; i++) store(to + i * ldt, v[i]);
}

// Rows of a tile as columns: to[j * kKeys + i] = factor * from[i * width + j]; `width` covers whole vectors, zeros in it.
template <class T>
void transpose_tile(T* to, const T* from, int64_t width, int64_t count, T factor) {
    constexpr int L = Vector<T>::lanes;
    for (int64_t j = 0; j < width; j += L) {
        for (int64_t i = 0; i < kKeys; i += L) {
            if (i + L <= count) {
                transpose_square(to + j * kKeys + i, kKeys, from + i * width + j, width);
            } else {
                for (int64_t jj = j; jj < j + L; jj++)
                    for (int64_t ii = i; ii < i + L; ii++) to[jj * kKeys + ii] = ii < count ? from[ii * width + jj] : T(0);
            }
        }
        if (factor != T(1))
            for (int64_t jj = j; jj < j + L; jj++)
                for (int64_t i = 0; i < kKeys; i += L) store(to + jj * kKeys + i, load(to + jj * kKeys + i) * factor);
    }
}

template <class T>
struct Buffer {
    std::unique_ptr<T[], void (*)(void*)> memory{nullptr, [](void* p) { std::free(p); }};
    T* reserve(int64_t count) {
        const size_t bytes = padded(std::max<int64_t>(count, 1) * sizeof(T), 64);
        memory.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
        if (!memory) throw std::bad_alloc();
        return memory.get();
    }
};

// Rows of a matrix as T with padded columns: in place where they lie ready, otherwise copied once.
template <class T>
struct Rows {
    Buffer<T> copy;
    const T* data = nullptr;
    int64_t stride = 0;

    void take(const Matrix& m, Dtype dtype, int64_t first, int64_t count, int64_t cols, bool always_copy = false) {
        if (!always_copy && lies_ready<T>(m, dtype, cols)) {
            data = reinterpret_cast<const T*>(m.data) + first * m.row_stride;
            stride = m.row_stride;
            return;
        }
        stride = padded(cols, Vector<T>::lanes);
        T* to = copy.reserve(count * stride);
        gather(to, stride, m, dtype, first, count, cols);
        data = to;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Visibility

struct Span {
    int64_t first, last;
};

inline Span keys_of(const Problem& problem, const Head& head, int64_t row) {
    if (!head.start) return {0, problem.key_len};
    return {std::max<int64_t>(head.start[row], 0), std::min<int64_t>(head.stop[row], problem.key_len)};
}

// The keys that some row of a block sees.
inline Span keys_of_rows(const Problem& problem, const Head& head, int64_t first, int64_t count) {
    if (!head.start) return {0, problem.key_len};
    Span all{problem.key_len, 0};
    for (int64_t i = first; i < first + count; i++) {
        const Span s = keys_of(problem, head, i);
        if (s.last > s.first) all = {std::min(all.first, s.first), std::max(all.last, s.last)};
    }
    return all;
}

// The rows of a block, from the first to the last, that see a key of [key, key + count).
inline Span rows_that_see(const Problem& problem, const Head& head, Span rows, int64_t key, int64_t count) {
    if (!head.start) return rows;
    auto sees = [&](int64_t i) {
        const Span s = keys_of(problem, head, i);
        return s.first < key + count && s.last > key;
    };
    while (rows.first < rows.last && !sees(rows.first)) rows.first++;
    while (rows.last > rows.first && !sees(rows.last - 1)) rows.last--;
    return rows;
}

// Columns of a tile that a row sees.
inline Span columns(const Problem& problem, const Head& head, int64_t row, int64_t key, int64_t count) {
    const Span s = keys_of(problem, head, row);
    const int64_t first = std::clamp<int64_t>(s.first - key, 0, count);
    return {first, std::clamp<int64_t>(s.last - key, first, count)};
}

template <class T>
inline M<T> within(int64_t at, Span s) {
    M<T> lane;
    for (int i = 0; i < Vector<T>::lanes; i++) lane[i] = i;
    lane += static_cast<typename Vector<T>::integer>(at);
    return (lane >= static_cast<typename Vector<T>::integer>(s.first)) & (lane < static_cast<typename Vector<T>::integer>(s.last));
}

// ---------------------------------------------------------------------------------------------------------------------
// Additive scores of a tile.
//
// tanh(a + b) = 1 - 2 r and sigmoid(a + b) = r with r = 1 / (1 + A B), A = exp(kappa a), B = exp(kappa b), kappa = 2 and -1:
// the exponentials are taken once per row, and two terms share one division. Where A B, or a product of two such, could leave
// the range of the type, the tile takes exp(kappa (a + b)) term by term.

template <class T>
struct Additive {
    static constexpr int L = Vector<T>::lanes;
    const Problem& problem;
    T kappa, level, slope;  // score = level * sum w + slope * sum w r
    T bound;                // kappa (|a| + |b|) up to which the rational form holds

    explicit Additive(const Problem& p) : problem(p) {
        const bool is_tanh = p.activation == Activation::tanh;
        kappa = is_tanh ? T(2) : T(-1);
        level = is_tanh ? T(1) : T(0);
        slope = is_tanh ? T(-2) : T(1);
        bound = sizeof(T) == 4 ? T(43) : T(350);
    }
    bool rational() const { return problem.activation == Activation::tanh || problem.activation == Activation::sigmoid; }
    T negative() const { return problem.activation == Activation::relu ? T(0) : static_cast<T>(problem.negative_slope); }

    static T largest(const T* x, int64_t count) {
        T top = 0;
        for (int64_t i = 0; i < count; i++) top = std::max(top, std::fabs(x[i]));
        return top;
    }
    void exponentials(T* to, const T* x, int64_t count) const {
        for (int64_t i = 0; i < count; i += L) store(to + i, exp_of<T>(load(x + i) * kappa));
    }

    // One element, the exact way: r, or the value of a rectifier.
    V<T> exact(V<T> z) const {
        if (rational()) return T(1) / (T(1) + exp_of<T>(z * kappa));
        return choose<T>(z > T(0), z, z * negative());
    }

    // s[row][64] for rows of a (count x stride) and keys b (h x 64); ea and eb their exponentials, or null.
    void scores(T* s, const T* a, const T* ea, int64_t stride, int64_t rows, const T* b, const T* eb, const T* w) const {
        const int64_t h = problem.dim;
        T total = 0;
        for (int64_t p = 0; p < h; p++) total += w[p];
        for (int64_t i = 0; i < rows; i++) {
            V<T> sum[kKeys / L];
            for (auto& x : sum) x = V<T>{};
            if (ea) {
                const T* row = ea + i * stride;
                int64_t p = 0;
                for (; p + 2 <= h; p += 2) {
                    const V<T> a1 = splat(row[p]), a2 = splat(row[p + 1]), w1 = splat(w[p]), w2 = splat(w[p + 1]);
                    const T *b1 = eb + p * kKeys, *b2 = b1 + kKeys;
#pragma GCC unroll 4
                    for (int j = 0; j < kKeys / L; j++) {
                        const V<T> x1 = a1 * load(b1 + j * L) + T(1), x2 = a2 * load(b2 + j * L) + T(1);
                        sum[j] += (w1 * x2 + w2 * x1) / (x1 * x2);
                    }
                }
                if (p < h)
                    for (int j = 0; j < kKeys / L; j++) sum[j] += w[p] / (row[p] * load(eb + p * kKeys + j * L) + T(1));
            } else {
                const T* row = a + i * stride;
                for (int64_t p = 0; p < h; p++)
                    for (int j = 0; j < kKeys / L; j++) sum[j] += w[p] * exact(row[p] + load(b + p * kKeys + j * L));
            }
            for (int j = 0; j < kKeys / L; j++)
                store(s + i * kKeys + j * L, rational() ? sum[j] * slope + level * total : sum[j]);
        }
    }

    // From ds[row][64]: da (+= over keys), db (h x 64, += over rows), dw (+= over both).
    void gradients(const T* ds, const T* a, const T* ea, int64_t stride, int64_t rows, const T* b, const T* eb, const T* w,
                   T* da, int64_t lda, T* db, T* dw) const {
        const int64_t h = problem.dim;
        const bool ratio = rational();
        T all = 0;
        if (ratio && level != 0) {
            V<T> sum{};
            for (int64_t i = 0; i < rows * kKeys; i += L) sum += load(ds + i);
            all = level * sum_of<T>(sum);
        }
        for (int64_t p = 0; p < h; p++) {
            V<T> key_sum[kKeys / L], weight_sum{};
            for (auto& x : key_sum) x = V<T>{};
            const T factor = ratio ? -kappa * slope * w[p] : w[p];
            for (int64_t i = 0; i < rows; i++) {
                V<T> row_sum{};
#pragma GCC unroll 4
                for (int j = 0; j < kKeys / L; j++) {
                    const V<T> g = load(ds + i * kKeys + j * L);
                    V<T> through;
                    if (ratio) {
                        const V<T> r = ea ? T(1) / (ea[i * stride + p] * load(eb + p * kKeys + j * L) + T(1))
                                          : exact(a[i * stride + p] + load(b + p * kKeys + j * L));
                        const V<T> gr = g * r;
                        weight_sum += gr;
                        through = gr - gr * r;
                    } else {
                        const V<T> z = a[i * stride + p] + load(b + p * kKeys + j * L);
                        const V<T> y = choose<T>(z > T(0), splat(T(1)), splat(negative()));
                        weight_sum += g * y * z;
                        through = g * y;
                    }
                    row_sum += through;
                    key_sum[j] += through;
                }
                da[i * lda + p] += factor * sum_of<T>(row_sum);
            }
            for (int j = 0; j < kKeys / L; j++) {
                T* to = db + p * kKeys + j * L;
                store(to, load(to) + key_sum[j] * factor);
            }
            dw[p] += ratio ? all + slope * sum_of<T>(weight_sum) : sum_of<T>(weight_sum);
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// One tile of keys, ready for products.

template <class T>
struct KeyTile {
    const Problem& problem;
    int64_t dim_width, value_width;
    Buffer<T> rows_memory, turned_memory, exponentials_memory, value_memory, value_turned_memory;
    T *turned, *exponentials, *value_turned = nullptr;
    const T *key = nullptr, *value = nullptr;
    int64_t key_stride = 0, value_stride = 0;
    T *key_copy, *value_copy;
    bool in_range = true;
    T largest = 0;

    KeyTile(const Problem& p, bool backward)
        : problem(p), dim_width(padded(p.dim, Vector<T>::lanes)), value_width(padded(p.value_dim, Vector<T>::lanes)) {
        key_copy = rows_memory.reserve(kKeys * dim_width);
        turned = turned_memory.reserve(kKeys * dim_width);
        exponentials = p.form == Form::additive ? exponentials_memory.reserve(kKeys * dim_width) : nullptr;
        value_copy = value_memory.reserve(kKeys * value_width);
        if (backward) value_turned = value_turned_memory.reserve(kKeys * value_width);
    }

    void fill(const Head& head, int64_t first, int64_t count, const Additive<T>& additive) {
        key = view(head.key, problem.score_dtype, first, count, problem.dim, dim_width, key_copy, key_stride);
        const bool inner = problem.form == Form::inner;
        if (key_stride == dim_width) {
            transpose_tile(turned, key, dim_width, count, inner ? static_cast<T>(problem.scale) : T(1));
        } else {
            gather(key_copy, dim_width, head.key, problem.score_dtype, first, count, problem.dim);
            key = key_copy;
            key_stride = dim_width;
            transpose_tile(turned, key, dim_width, count, inner ? static_cast<T>(problem.scale) : T(1));
        }
        if (!inner && additive.rational()) {
            largest = Additive<T>::largest(turned, problem.dim * kKeys);
            additive.exponentials(exponentials, turned, problem.dim * kKeys);
        }
        value = view(head.value, problem.value_dtype, first, count, problem.value_dim, value_width, value_copy, value_stride);
        if (value_turned) {
            if (value_stride != value_width) {
                gather(value_copy, value_width, head.value, problem.value_dtype, first, count, problem.value_dim);
                value = value_copy;
                value_stride = value_width;
            }
            transpose_tile(value_turned, value, value_width, count, T(1));
        }
    }

   private:
    static const T* view(const Matrix& m, Dtype dtype, int64_t first, int64_t count, int64_t cols, int64_t width, T* copy,
                         int64_t& stride) {
        if (lies_ready<T>(m, dtype, cols)) {
            stride = m.row_stride;
            return reinterpret_cast<const T*>(m.data) + first * m.row_stride;
        }
        gather(copy, width, m, dtype, first, count, cols);
        stride = width;
        return copy;
    }
};

// Query rows as the scores need them.
template <class T>
struct QueryRows {
    Rows<T> rows;
    Buffer<T> memory;
    const T* exponentials = nullptr;
    T largest = 0;

    void take(const Problem& problem, const Head& head, int64_t first, int64_t count, const Additive<T>& additive) {
        // Additive: the exponentials stand in rows of the same stride.
        rows.take(head.query, problem.score_dtype, first, count, problem.dim, problem.form == Form::additive);
        exponentials = nullptr;
        if (problem.form == Form::inner || !additive.rational()) return;
        T* to = memory.reserve(count * rows.stride);
        for (int64_t i = 0; i < count; i++) {
            const T* row = rows.data + i * rows.stride;
            largest = std::max(largest, Additive<T>::largest(row, problem.dim));
            additive.exponentials(to + i * rows.stride, row, padded(problem.dim, Vector<T>::lanes));
        }
        exponentials = to;
    }
};

// Scores of `rows` (within the block) against a tile, into s[row * kKeys].
template <class T>
void tile_scores(T* s, const Problem& problem, const Head& head, const Additive<T>& additive, const QueryRows<T>& query,
                 Span rows, const KeyTile<T>& tile) {
    const int64_t stride = query.rows.stride, count = rows.last - rows.first;
    const T* q = query.rows.data + rows.first * stride;
    if (problem.form == Form::inner) {
        product(s + rows.first * kKeys, kKeys, q, stride, 1, tile.turned, kKeys, count, kKeys, problem.dim, false);
        return;
    }
    const bool quick = query.exponentials && std::fabs(additive.kappa) * (query.largest + tile.largest) <= additive.bound;
    additive.scores(s + rows.first * kKeys, q, quick ? query.exponentials + rows.first * stride : nullptr, stride, count,
                    tile.turned, quick ? tile.exponentials : nullptr, reinterpret_cast<const T*>(head.weights));
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

inline int64_t forward_rows(const Problem& problem) {
    // Long blocks pay for turning the keys; short problems need enough tasks to share. Fixed by the shape alone.
    int64_t rows = 192;
    while (rows > 48 && static_cast<int64_t>(problem.heads.size()) * ((problem.query_len + rows - 1) / rows) < 16) rows /= 2;
    return rows;
}

int64_t blocks_of(int64_t length, int64_t size) { return (length + size - 1) / size; }

int64_t forward_tasks(const Problem& problem) {
    return static_cast<int64_t>(problem.heads.size()) * blocks_of(problem.query_len, forward_rows(problem));
}

template <class T>
struct RowState {
    T max = -std::numeric_limits<T>::infinity();
    T total = 0, tilt = 0, squares = 0, count = 0, deviation = 0;
    T base = 0, mean = 0;  // mean less base: at the level of the scores the gap between two means would lose its digits
};

template <class T>
inline T anchor(T maximum) {
    return maximum == -std::numeric_limits<T>::infinity() ? T(0) : maximum;
}

// Statistics of one row of one tile, joined to what is known of the row.
template <class T>
void join_statistics(RowState<T>& state, const T* scores, Span seen, T old_anchor, T new_anchor, T factor, const T* weights) {
    T tilt = 0, squares = 0, sum = 0;
    const T count = static_cast<T>(seen.last - seen.first);
    if (state.count == 0) state.base = new_anchor;
    for (int64_t j = seen.first; j < seen.last; j++) {
        if (weights[j] != 0) tilt += weights[j] * (scores[j] - new_anchor);
        squares += weights[j] * weights[j];
        sum += scores[j] - state.base;
    }
    state.tilt = factor * (state.tilt + (old_anchor - new_anchor) * state.total) + tilt;
    state.squares = factor * factor * state.squares + squares;
    if (count == 0) return;
    const T mean = sum / count;
    T deviation = 0;
    for (int64_t j = seen.first; j < seen.last; j++) {
        const T away = scores[j] - state.base - mean;
        deviation += away * away;
    }
    const T all = state.count + count, gap = mean - state.mean;
    state.deviation += deviation + gap * gap * state.count * (count / all);
    state.mean += gap * (count / all);
    state.count = all;
}

template <class T>
void forward_block(const Problem& problem, const Head& head, int64_t first, int64_t count) {
    constexpr int L = Vector<T>::lanes;
    const T lowest = -std::numeric_limits<T>::infinity();
    const Additive<T> additive(problem);
    const int64_t width = padded(problem.value_dim, L);
    Buffer<T> scores_memory, out_memory, kept_memory;
    T* scores = scores_memory.reserve(count * kKeys);
    T* out = out_memory.reserve(count * width);
    T* kept = problem.full_statistics ? kept_memory.reserve(kKeys) : nullptr;
    std::fill(out, out + count * width, T(0));
    std::vector<RowState<T>> states(count);
    const Span keys = keys_of_rows(problem, head, first, count);
    QueryRows<T> query;
    KeyTile<T> tile(problem, false);
    if (keys.last > keys.first) query.take(problem, head, first, count, additive);
    for (int64_t key = keys.first; key < keys.last; key += kKeys) {
        const int64_t here = std::min<int64_t>(kKeys, keys.last - key);
        Span rows = rows_that_see(problem, head, {first, first + count}, key, here);
        rows = {rows.first - first, rows.last - first};
        if (rows.first >= rows.last) continue;
        tile.fill(head, key, here, additive);
        tile_scores(scores, problem, head, additive, query, rows, tile);
        for (int64_t i = rows.first; i < rows.last; i++) {
            T* s = scores + i * kKeys;
            const Span seen = columns(problem, head, first + i, key, here);
            if (seen.first > 0 || seen.last < kKeys)
                for (int j = 0; j < kKeys; j += L)
                    store(s + j, choose<T>(within<T>(j, seen), load(s + j), splat(lowest)));
            V<T> top = load(s);
            for (int j = L; j < kKeys; j += L) top = max_of<T>(top, load(s + j));
            RowState<T>& state = states[i];
            const T above = largest_of<T>(top);
            const T maximum = (above > state.max || above != above) ? above : state.max;
            const T from = anchor(state.max), to = anchor(maximum);
            const T factor = state.max == lowest ? T(0) : (maximum == state.max ? T(1) : std::exp(from - to));
            if (kept) std::memcpy(kept, s, kKeys * sizeof(T));
            V<T> total{};
            for (int j = 0; j < kKeys; j += L) {
                const V<T> e = exp_of<T>(load(s + j) - to);
                store(s + j, e);
                total += e;
            }
            if (kept) join_statistics(state, kept, seen, from, to, factor, s);
            state.total = state.total * factor + sum_of<T>(total);
            state.max = maximum;
            if (factor != T(1))
                for (int64_t j = 0; j < width; j += L) store(out + i * width + j, load(out + i * width + j) * factor);
        }
        product(out + rows.first * width, width, scores + rows.first * kKeys, kKeys, 1, tile.value, tile.value_stride,
                rows.last - rows.first, width, here, true);
    }
    T* statistics = reinterpret_cast<T*>(head.statistics) + first * kStatistics;
    for (int64_t i = 0; i < count; i++, statistics += kStatistics) {
        const RowState<T>& state = states[i];
        statistics[0] = state.max;
        statistics[1] = state.total;
        if (problem.full_statistics) {
            statistics[2] = state.tilt;
            statistics[3] = state.squares;
            statistics[4] = state.count;
            statistics[5] = state.base + state.mean;
            statistics[6] = state.deviation;
        }
        const T scale = state.total == 0 ? T(1) : T(1) / state.total;
        for (int64_t j = 0; j < problem.value_dim; j++) {
            const T x = out[i * width + j] * scale;
            const int64_t at = (first + i) * problem.value_dim + j;
            if (problem.value_dtype == Dtype::f32 || problem.value_dtype == Dtype::f64)
                reinterpret_cast<T*>(head.out)[at] = x;
            else
                reinterpret_cast<uint16_t*>(head.out)[at] = narrowed(static_cast<float>(x), problem.value_dtype);
        }
    }
}

void forward(const Problem& problem, int64_t task) {
    const int64_t size = forward_rows(problem), blocks = blocks_of(problem.query_len, size);
    const Head& head = problem.heads[task / blocks];
    const int64_t first = task % blocks * size, count = std::min(size, problem.query_len - first);
    if (problem.value_dtype == Dtype::f64)
        forward_block<double>(problem, head, first, count);
    else
        forward_block<float>(problem, head, first, count);
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

template <class T>
struct BackwardScratch {
    Buffer<T> p_memory, ds_memory, dk_memory, dv_memory, dq_memory, db_memory;
    T *p, *ds, *dk, *dv, *dq, *db;

    BackwardScratch(const Problem& problem, int64_t dim_width, int64_t value_width) {
        p = p_memory.reserve(kBackwardRows * kKeys);
        ds = ds_memory.reserve(kBackwardRows * kKeys);
        dk = dk_memory.reserve(kKeys * dim_width);
        dv = dv_memory.reserve(kKeys * value_width);
        dq = dq_memory.reserve(kBackwardRows * dim_width);
        db = problem.form == Form::additive ? db_memory.reserve(kKeys * dim_width) : nullptr;
    }
};

// Weights p and score gradients ds of `rows` of the block at `base` against a tile; 0 where hidden.
template <class T>
void tile_gradients(const Problem& problem, const Head& head, const Additive<T>& additive, const QueryRows<T>& query,
                    const Rows<T>& grad_out, const KeyTile<T>& tile, int64_t base, Span rows, int64_t key, int64_t here,
                    T* p, T* ds) {
    constexpr int L = Vector<T>::lanes;
    const int64_t count = rows.last - rows.first;
    tile_scores(p, problem, head, additive, query, rows, tile);
    // dp = dout . v
    product(ds + rows.first * kKeys, kKeys, grad_out.data + rows.first * grad_out.stride, grad_out.stride, 1,
            tile.value_turned, kKeys, count, kKeys, problem.value_dim, false);
    const T* top = reinterpret_cast<const T*>(head.top);
    const T* log_total = reinterpret_cast<const T*>(head.log_total);
    const T* shift = reinterpret_cast<const T*>(head.shift);
    for (int64_t i = rows.first; i < rows.last; i++) {
        const int64_t row = base + i;
        const Span seen = columns(problem, head, row, key, here);
        const bool partial = seen.first > 0 || seen.last < kKeys;
        for (int j = 0; j < kKeys; j += L) {
            // p = exp(s - top - log total)
            V<T> weight = exp_of<T>(load(p + i * kKeys + j) - top[row] - log_total[row]);
            V<T> grad = weight * (load(ds + i * kKeys + j) + shift[row]);
            if (partial) {
                const M<T> visible = within<T>(j, seen);
                weight = choose<T>(visible, weight, V<T>{});
                grad = choose<T>(visible, grad, V<T>{});
            }
            store(p + i * kKeys + j, weight);
            store(ds + i * kKeys + j, grad);
        }
    }
}

// Which gradients a pass leaves.
enum class Pass { all, keys, queries };

template <class T>
void add_rows(T* to, int64_t cols, const T* from, int64_t width, int64_t count, T factor) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < cols; j++) to[i * cols + j] += factor * from[i * width + j];
}

// Keys [from, to) of one group against all its query rows (or those in `only`).
template <class T>
void backward_range(const Problem& problem, const Group& group, Span keys, const std::vector<int64_t>& heads, Span only, Pass pass) {
    const Additive<T> additive(problem);
    const bool inner = problem.form == Form::inner;
    KeyTile<T> tile(problem, true);
    BackwardScratch<T> scratch(problem, tile.dim_width, tile.value_width);
    std::vector<QueryRows<T>> queries(heads.size());
    std::vector<Rows<T>> grads(heads.size());
    const int64_t row_count = only.last - only.first;
    if (row_count <= 0 || keys.last <= keys.first) return;
    for (size_t g = 0; g < heads.size(); g++) {
        const Head& head = problem.heads[heads[g]];
        queries[g].take(problem, head, only.first, row_count, additive);
        grads[g].take(head.grad_out, problem.grad_dtype, only.first, row_count, problem.value_dim);
    }
    std::vector<T> unused(problem.dim);
    for (int64_t key = keys.first; key < keys.last; key += kKeys) {
        const int64_t here = std::min<int64_t>(kKeys, keys.last - key);
        std::fill(scratch.dk, scratch.dk + kKeys * tile.dim_width, T(0));
        std::fill(scratch.dv, scratch.dv + kKeys * tile.value_width, T(0));
        if (scratch.db) std::fill(scratch.db, scratch.db + kKeys * tile.dim_width, T(0));
        bool filled = false;
        for (size_t g = 0; g < heads.size(); g++) {
            const Head& head = problem.heads[heads[g]];
            if (!filled) tile.fill(head, key, here, additive);
            filled = true;
            T* weights = pass == Pass::queries ? unused.data() : reinterpret_cast<T*>(group.grad_weights);
            for (int64_t base = only.first; base < only.last; base += kBackwardRows) {
                const int64_t end = std::min(base + kBackwardRows, only.last);
                Span rows = rows_that_see(problem, head, {base, end}, key, here);
                if (rows.first >= rows.last) continue;
                rows = {rows.first - base, rows.last - base};
                const int64_t count = rows.last - rows.first, offset = base - only.first;
                QueryRows<T> query_view;
                query_view.rows.data = queries[g].rows.data + offset * queries[g].rows.stride;
                query_view.rows.stride = queries[g].rows.stride;
                query_view.largest = queries[g].largest;
                query_view.exponentials = queries[g].exponentials ? queries[g].exponentials + offset * queries[g].rows.stride : nullptr;
                Rows<T> grad_view;
                grad_view.data = grads[g].data + offset * grads[g].stride;
                grad_view.stride = grads[g].stride;
                tile_gradients(problem, head, additive, query_view, grad_view, tile, base, rows, key, here, scratch.p, scratch.ds);
                const T* p = scratch.p + rows.first * kKeys;
                const T* ds = scratch.ds + rows.first * kKeys;
                const T* q = query_view.rows.data + rows.first * query_view.rows.stride;
                if (pass != Pass::queries)  // out = p v
                    product(scratch.dv, tile.value_width, p, 1, kKeys, grad_view.data + rows.first * grad_view.stride,
                            grad_view.stride, here, tile.value_width, count, true);
                T* dq = reinterpret_cast<T*>(head.grad_query) + (base + rows.first) * problem.dim;
                if (inner) {  // s = scale q . k
                    if (pass != Pass::queries)
                        product(scratch.dk, tile.dim_width, ds, 1, kKeys, q, query_view.rows.stride, here, tile.dim_width, count, true);
                    if (pass != Pass::keys) {
                        product(scratch.dq, tile.dim_width, ds, kKeys, 1, tile.key, tile.key_stride, count, tile.dim_width, here, false);
                        add_rows(dq, problem.dim, scratch.dq, tile.dim_width, count, static_cast<T>(problem.scale));
                    }
                } else {
                    const bool quick = query_view.exponentials &&
                                       std::fabs(additive.kappa) * (query_view.largest + tile.largest) <= additive.bound;
                    std::fill(scratch.dq, scratch.dq + count * tile.dim_width, T(0));
                    additive.gradients(ds, q, quick ? query_view.exponentials + rows.first * query_view.rows.stride : nullptr,
                                       query_view.rows.stride, count, tile.turned, quick ? tile.exponentials : nullptr,
                                       reinterpret_cast<const T*>(head.weights), scratch.dq, tile.dim_width, scratch.db, weights);
                    if (pass != Pass::keys) add_rows(dq, problem.dim, scratch.dq, tile.dim_width, count, T(1));
                }
            }
        }
        if (pass == Pass::queries) continue;
        if (inner)
            add_rows(reinterpret_cast<T*>(group.grad_key) + key * problem.dim, problem.dim, scratch.dk, tile.dim_width, here,
                     static_cast<T>(problem.scale));
        else
            for (int64_t j = 0; j < here; j++)
                for (int64_t p = 0; p < problem.dim; p++)
                    reinterpret_cast<T*>(group.grad_key)[(key + j) * problem.dim + p] += scratch.db[p * kKeys + j];
        add_rows(reinterpret_cast<T*>(group.grad_value) + key * problem.value_dim, problem.value_dim, scratch.dv,
                 tile.value_width, here, T(1));
    }
}

int64_t backward_tasks(const Problem& problem) { return static_cast<int64_t>(problem.groups.size()); }

template <class T>
void backward_group(const Problem& problem, const Group& group) {
    backward_range<T>(problem, group, {0, problem.key_len}, group.heads, {0, problem.query_len}, Pass::all);
}

void backward(const Problem& problem, int64_t task) {
    if (problem.value_dtype == Dtype::f64)
        backward_group<double>(problem, problem.groups[task]);
    else
        backward_group<float>(problem, problem.groups[task]);
}

}  // namespace

#define ATTNSCORE_TEXT_(x) #x
#define ATTNSCORE_TEXT(x) ATTNSCORE_TEXT_(x)
extern const Kernels kernels;
const Kernels kernels = {ATTNSCORE_TEXT(ATTNSCORE_TARGET), forward_tasks, forward, backward_tasks, backward};

}  // namespace ATTNSCORE_TARGET
}  // namespace attnscore
