// GEMM of small matrices, C (+)= A B. A micro-tile of C (kMR rows x kNR vectors) is summed in registers, from broadcast
// elements of A, which has the strides `row` and `col`, and contiguous vectors of B. Every sum runs over k in order, so
// its bits do not depend on the micro-tile that computes it.
#pragma once

#include "kernels/memory-inl.h"
#include "kernels/simd-inl.h"

// Whether the target has fused multiply-adds. Without them each product is rounded too, and sums are kept short.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
constexpr bool kHasFma = true;
#else
constexpr bool kHasFma = false;
#endif

// Terms of a GEMM: how an element of A and a vector of B, which may be stored in another type, add to a sum, and how
// many terms are summed in registers before they join C. Rounding errors grow with the length of a sum, and more where
// each product is rounded or all terms have one sign.
template <class T>
struct Product {
    using Element = T;
    using Sum = T;
    static constexpr int64_t kMaxTerms = kHasFma ? std::numeric_limits<int64_t>::max() : 16;
    template <class B>
    static V<T> read(const B* b) {
        return load_as<T>(b);
    }
    static T broadcast(T a) {
#if defined(__aarch64__)
        // Multiplied from one lane, where a plain load puts it. clang and, in places, GCC would fill all lanes, by a
        // load that takes one of the pipes of the multiply-adds.
        asm("" : "+w"(a));
#endif
        return a;
    }
    // `a`: one element for all lanes, or a vector.
    template <class A>
    static V<T> add(V<T> sum, A a, V<T> b) {
        return sum + a * b;
    }
    V<T> finish(V<T> sum) const { return sum; }
};
template <class T>
struct SquaredDistance : Product<T> {
    static constexpr int64_t kMaxTerms = 16;
    template <class A>
    static V<T> add(V<T> sum, A a, V<T> b) {
        const V<T> difference = a - b;
        return sum + difference * difference;
    }
};

// The last terms of a full micro-tile are added two rows at a time, so that a pair of rows is stored while the next one
// gets its terms. When all sums are stored at once, the multiply-adds behind them wait (on Zen 4, 80 cycles of 1620
// instead of 45).
constexpr int64_t kTailTerms = 4;
template <int R>
constexpr int kTailRows = R == kMR && kNR > 2 ? 2 : R;

// Add one term: sum[R x N vectors] += A[R] B[N vectors].
template <int R, int N, class Terms, class T, class E, class B>
__attribute__((always_inline)) inline void rank1_update(V<T> (*sum)[N], const E* a, int64_t row, const B* b) {
    decltype(Terms::read(b)) line[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) line[j] = Terms::read(b + j * Vector<T>::lanes);
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) {
        const auto a_i = Terms::broadcast(a[i * row]);
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) sum[i][j] = Terms::add(sum[i][j], a_i, line[j]);
    }
}

// Compute a micro-tile: C[R x N vectors] (+)= sum over k of A[R x k] B[k x N vectors]. Sums start from 0 and C is added
// at the end, so that no term waits for the load of C.
template <int R, int N, class Terms, class B, class T = typename Terms::Sum, class E = typename Terms::Element>
inline void micro_kernel(const Terms& terms, T* c, int64_t ldc, const E* a, int64_t row, int64_t col, const B* b,
                         int64_t ldb, int64_t k, bool add) {
    V<T> sum[R][N];
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) sum[i][j] = V<T>{};
    const int64_t together = kTailRows<R> < R ? std::max<int64_t>(k - kTailTerms, 0) : k;
#pragma GCC unroll 8
    for (int64_t p = 0; p < together; p++) rank1_update<R, N, Terms, T>(sum, a + p * col, row, b + p * ldb);
#pragma GCC unroll 8
    for (int first = 0; first < R; first += kTailRows<R>) {
#pragma GCC unroll 1
        for (int64_t p = together; p < k; p++)
            rank1_update<kTailRows<R>, N, Terms, T>(sum + first, a + first * row + p * col, row, b + p * ldb);
#pragma GCC unroll 8
        for (int i = first; i < first + kTailRows<R>; i++) {
            T* to = opaque(c + i * ldc);
#pragma GCC unroll 8
            for (int j = 0; j < N; j++) {
                T* at = to + j * Vector<T>::lanes;
                store(at, add ? load(at) + sum[i][j] : terms.finish(sum[i][j]));
            }
        }
    }
}

// Call f with `rows` (0 to R) as a constant, unless it is 0.
template <int R, class F>
inline void with_constant_rows(int64_t rows, const F& f) {
    if (rows == R)
        f(std::integral_constant<int, R>{});
    else if constexpr (R > 1)
        with_constant_rows<R - 1>(rows, f);
}

// Compute N vectors of columns of C, one micro-tile after the other.
template <int N, class Terms, class B, class T = typename Terms::Sum, class E = typename Terms::Element>
void column_panel(const Terms& terms, T* c, int64_t ldc, const E* a, int64_t row, int64_t col, const B* b, int64_t ldb,
                  int64_t m, int64_t k, bool add) {
    int64_t i = 0;
    for (; i + kMR <= m; i += kMR) micro_kernel<kMR, N>(terms, c + i * ldc, ldc, a + i * row, row, col, b, ldb, k, add);
    with_constant_rows<kMR - 1>(m - i, [&](auto rows) {
        micro_kernel<rows, N>(terms, c + i * ldc, ldc, a + i * row, row, col, b, ldb, k, add);
    });
}

// C[m x n] (+)= A[m x k] B[k x n]. Element (i, p) of A stands at a[i * row + p * col]; `n` covers whole vectors.
template <class Terms, class B, class T = typename Terms::Sum, class E = typename Terms::Element>
void gemm(const Terms& terms, T* c, int64_t ldc, const E* a, int64_t row, int64_t col, const B* b, int64_t ldb,
          int64_t m, int64_t n, int64_t k, bool add) {
    constexpr int L = Vector<T>::lanes;
    int64_t p = 0;
    do {  // at least once: k = 0 stores zeros
        const int64_t count = std::min(Terms::kMaxTerms, k - p);
        int64_t j = 0;
        for (; j + kNR * L <= n; j += kNR * L)
            column_panel<kNR>(terms, c + j, ldc, a, row, col, b + j, ldb, m, count, add);
        if constexpr (kNR > 2)
            for (; j + 2 * L <= n; j += 2 * L)
                column_panel<2>(terms, c + j, ldc, a, row, col, b + j, ldb, m, count, add);
        for (; j < n; j += L) column_panel<1>(terms, c + j, ldc, a, row, col, b + j, ldb, m, count, add);
        p += count, a += count * col, b += count * ldb, add = true;
    } while (p < k);
}

// Compute a micro-tile: C[R x N vectors] (+)= sum over k of A[R x k] (X[R x N vectors] - B[k x N vectors]).
template <int R, int N, class T>
inline void difference_micro_kernel(T* c, int64_t ldc, const T* a, int64_t row, int64_t col, const T* x, int64_t ldx,
                                    const T* b, int64_t ldb, int64_t k, bool add) {
    constexpr int L = Vector<T>::lanes;
    V<T> sum[R][N], x_vectors[R][N];
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) {
            sum[i][j] = add ? load(c + i * ldc + j * L) : V<T>{};
            x_vectors[i][j] = load(x + i * ldx + j * L);
        }
    for (int64_t p = 0; p < k; p++)
#pragma GCC unroll 8
        for (int i = 0; i < R; i++) {
            const T factor = a[i * row + p * col];
#pragma GCC unroll 8
            for (int j = 0; j < N; j++) sum[i][j] += factor * (x_vectors[i][j] - load(b + p * ldb + j * L));
        }
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) store(c + i * ldc + j * L, sum[i][j]);
}

// C[i] (+)= sum over p of A[i][p] (X[i] - B[p]): the gradient of squared distances.
template <class T>
void gemm_difference(T* c, int64_t ldc, const T* a, int64_t row, int64_t col, const T* x, int64_t ldx, const T* b,
                     int64_t ldb, int64_t m, int64_t n, int64_t k, bool add) {
    constexpr int L = Vector<T>::lanes, R = 4, N = kNR / 2;  // X takes as many registers as the sums
    const auto at = [&](auto rows, auto vectors, int64_t i, int64_t j) {
        difference_micro_kernel<rows, vectors>(c + i * ldc + j, ldc, a + i * row, row, col, x + i * ldx + j, ldx, b + j,
                                               ldb, k, add);
    };
    constexpr std::integral_constant<int, 1> one;
    int64_t j = 0;
    for (; j + N * L <= n; j += N * L) {
        int64_t i = 0;
        for (; i + R <= m; i += R) at(std::integral_constant<int, R>{}, std::integral_constant<int, N>{}, i, j);
        for (; i < m; i++) at(one, std::integral_constant<int, N>{}, i, j);
    }
    for (; j < n; j += L)
        for (int64_t i = 0; i < m; i++) at(one, one, i, j);
}

// Prefetch N vectors of T, as stored, of a stream of rows, not far ahead of `p`. The processor's own prefetcher then
// keeps up better: TUNING.md, Decoding.
constexpr int64_t kStreamAhead = 256;
template <class T, int N, class E>
__attribute__((always_inline)) inline void prefetch_stream(const E* p) {
    if constexpr (kVectorBytes >= 32) {
#pragma GCC unroll 16
        for (size_t j = 0; j < N * Vector<T>::lanes * sizeof(E); j += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(p) + kStreamAhead + j, /*to_write=*/0, 2);
    }
}

// Add to the output of each of `size` query rows its weights times the `count` rows of values. For a single query row
// up to 16 vectors of a row of values are read together, in the order of memory: reading half of each row, and then the
// other halves, takes 1.4 times as long if the values are not in a cache.
template <class T, class E>
void add_weighted_rows(T* out, const T* weights, int64_t size, const View<E>& values, int64_t count, int64_t width) {
    constexpr int L = Vector<T>::lanes;
    int64_t j = 0;
    // Inlined: as a function of its own it made the forward of short heads 1.2 times as long.
    const auto columns = [&]<int N>(std::integral_constant<int, N>) __attribute__((always_inline)) {
        for (; j + N * L <= width; j += N * L) {
            V<T> sum[N];
#pragma GCC unroll 16
            for (int u = 0; u < N; u++) sum[u] = load(out + j + u * L);
            for (int64_t i = 0; i < count; i++) {
                const E* row = values.row(i) + j;
                prefetch_stream<T, N>(row);
#pragma GCC unroll 16
                for (int u = 0; u < N; u++) sum[u] += weights[i] * load_as<T>(row + u * L);
            }
#pragma GCC unroll 16
            for (int u = 0; u < N; u++) store(out + j + u * L, sum[u]);
        }
    };
    // Without fused multiply-adds long sums are left to `gemm`, which cuts them.
    if (kHasFma && size == 1) {
        columns(std::integral_constant<int, 16>{});
        columns(std::integral_constant<int, 8>{});
    }
    if (j == width) return;
    gemm(Product<T>{}, out + j, width, weights, kTileKeys, 1, values.data + j, values.stride, size, width - j, count,
         /*add=*/true);
}

// The work of `few_rows_gemm` between its keys, on the values of as many keys: O += P V, or prefetching.
template <class T>
struct Interleaved {
    StoredRows<T> values;
    int64_t count = 0, width = 0;
    const T* weights = nullptr;
    T* out = nullptr;  // null: prefetch
    int64_t size = 1;  // rows of weights and outputs

    // Do the work for the keys [first, end), as far as there are keys.
    void run(int64_t first, int64_t end) const {
        end = std::min(end, count);
        if (first >= end) return;
        if (out) return add_values(first, end);
        const int64_t bytes = attnscore::size_of(values.dtype);
        for (int64_t i = first; i < end; i++) prefetch(values.data + i * values.stride * bytes, width * bytes);
    }

   private:
    // O += P V, one row of weights after the other: the second one finds the values in the first-level cache.
    __attribute__((noinline)) void add_values(int64_t first, int64_t end) const {
        values.with_view([&]<class E>(const View<E>& rows) {
            const View<E> part{rows.row(first), rows.stride};
            for (int64_t i = 0; i < size; i++)
                add_weighted_rows(out + i * width, weights + i * kTileKeys + first, 1, part, end - first, width);
        });
    }
};

// For up to so many query rows, transposing a key tile costs more than it saves: products go key by key.
constexpr int64_t kFewRows = 4;

// The sums of the terms of up to kFewRows rows, `stride` apart, with each of the 64 rows of a tile (0 behind `count`):
// s[i * kTileKeys + j]. `interleaved` does its work between the keys.
template <class Terms, class T = typename Terms::Sum>
void few_rows_gemm(const Terms& terms, T* s, const T* q, int64_t stride, int64_t rows, const StoredRows<T>& keys,
                   int64_t count, int64_t width, const Interleaved<T>& interleaved);

// C[j] (+)= sum over few rows i of A[i][j] B[i], or with `differences` of A[i][j] (X[j] - B[i]): gradients of `count`
// keys, which are written once, in the order of memory.
template <bool differences, class T>
void few_rows_outer(T* c, int64_t ldc, const T* a, int64_t rows, View<T> b, View<T> x, int64_t count, int64_t width,
                    bool add) {
    with_constant_rows<kFewRows>(rows, [=](auto R) {
        for (int64_t j = 0; j < count; j++)
            for (int64_t k = 0; k < width; k += Vector<T>::lanes) {
                V<T> sum{};
                for (int i = 0; i < R; i++) {
                    V<T> term = load(b.row(i) + k);
                    if constexpr (differences) term = load(x.row(j) + k) - term;
                    sum += a[i * kTileKeys + j] * term;
                }
                T* to = c + j * ldc + k;
                store(to, add ? load(to) + sum : sum);
            }
    });
}

// Compiled once for a target, by products.cc; for 16-bit rows, by rows.cc.
#define ATTNSCORE_GEMM(extern, Terms, T, A, B)                                                                   \
    extern template void gemm(const Terms&, T*, int64_t, const A*, int64_t, int64_t, const B*, int64_t, int64_t, \
                              int64_t, int64_t, bool);
#define ATTNSCORE_PRODUCTS(extern, Terms, T)                                                                           \
    ATTNSCORE_GEMM(extern, Terms<T>, T, T, T)                                                                          \
    extern template void few_rows_gemm(const Terms<T>&, T*, const T*, int64_t, int64_t, const StoredRows<T>&, int64_t, \
                                       int64_t, const Interleaved<T>&);
ATTNSCORE_PRODUCTS(extern, Product, float)
ATTNSCORE_PRODUCTS(extern, Product, double)
ATTNSCORE_PRODUCTS(extern, SquaredDistance, float)
ATTNSCORE_PRODUCTS(extern, SquaredDistance, double)
ATTNSCORE_GEMM(extern, Product<float>, float, float, Float16)
ATTNSCORE_GEMM(extern, Product<float>, float, float, Bfloat16)
