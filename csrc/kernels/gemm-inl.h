// Products of small matrices: a few rows of accumulators stay in registers, rows of A are broadcast (so A may have any
// strides), rows of B are contiguous vectors. Each sum runs over k in order, whatever block it falls into.

// Without a fused multiply-add the rounding of each gemm joins that of the sum, and sums are kept short.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
constexpr bool kHasFma = true;
#else
constexpr bool kHasFma = false;
#endif

// What a term of a row of A and one of a column of B add to their sum.
enum class Term { product, distance };

template <class T, Term kind>
inline V<T> add_terms(V<T> sum, T a, V<T> b) {
    if constexpr (kind == Term::product) {
        return sum + a * b;
    } else {
        const V<T> away = a - b;
        return sum + away * away;
    }
}

// The last terms of a full strip go by pairs of rows, each of which is stored while the next has its terms: where all
// sums are stored at once the multiply-adds behind them wait (on Zen 4 80 cycles of 1620, so 45).
constexpr int64_t kTailTerms = 4;
template <int R>
constexpr int kTailRows = R == kMR ? 2 : R;

// sum[R x N vectors] += A[R] B[N vectors], or (A - B)^2
template <class T, int R, int N, Term kind>
__attribute__((always_inline)) inline void add_terms(V<T> (*sum)[N], const T* a, int64_t row, const T* b) {
    V<T> line[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) line[j] = load(b + j * Vector<T>::lanes);
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) {
        const T own = a[i * row];
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) sum[i][j] = add_terms<T, kind>(sum[i][j], own, line[j]);
    }
}

// C[R x N vectors] (+)= sum over k of A[R x k] B[k x N vectors], or of (A - B)^2. Sums start from 0, and what C holds
// is added at the end: nothing waits for it.
template <class T, int R, int N, Term kind>
inline void micro_kernel(T* c, int64_t ldc, const T* a, int64_t row, int64_t col, const T* b, int64_t ldb, int64_t k,
                         bool add) {
    constexpr int L = Vector<T>::lanes;
    V<T> sum[R][N];
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) sum[i][j] = V<T>{};
    const int64_t together = kTailRows<R> < R ? std::max<int64_t>(k - kTailTerms, 0) : k;
#pragma GCC unroll 2
    for (int64_t p = 0; p < together; p++) add_terms<T, R, N, kind>(sum, a + p * col, row, b + p * ldb);
#pragma GCC unroll 8
    for (int first = 0; first < R; first += kTailRows<R>) {
#pragma GCC unroll 1
        for (int64_t p = together; p < k; p++)
            add_terms<T, kTailRows<R>, N, kind>(sum + first, a + first * row + p * col, row, b + p * ldb);
#pragma GCC unroll 8
        for (int i = first; i < first + kTailRows<R>; i++) {
            T* to = opaque(c + i * ldc);
#pragma GCC unroll 8
            for (int j = 0; j < N; j++) store(to + j * L, add ? load(to + j * L) + sum[i][j] : sum[i][j]);
        }
    }
}

template <class T, int N, Term kind>
void column_panel(T* c, int64_t ldc, const T* a, int64_t row, int64_t col, const T* b, int64_t ldb, int64_t m,
                  int64_t k, bool add) {
    int64_t i = 0;
    for (; i + kMR <= m; i += kMR)
        micro_kernel<T, kMR, N, kind>(c + i * ldc, ldc, a + i * row, row, col, b, ldb, k, add);
    c += i * ldc, a += i * row;
    switch (m - i) {
        case 5:
            micro_kernel<T, 5, N, kind>(c, ldc, a, row, col, b, ldb, k, add);
            break;
        case 4:
            micro_kernel<T, 4, N, kind>(c, ldc, a, row, col, b, ldb, k, add);
            break;
        case 3:
            micro_kernel<T, 3, N, kind>(c, ldc, a, row, col, b, ldb, k, add);
            break;
        case 2:
            micro_kernel<T, 2, N, kind>(c, ldc, a, row, col, b, ldb, k, add);
            break;
        case 1:
            micro_kernel<T, 1, N, kind>(c, ldc, a, row, col, b, ldb, k, add);
            break;
    }
}

// Terms that are summed in registers before they join the sum so far. The rounding of a sum grows with its length, and
// more where a gemm is rounded before it is added; squares of distances are all of one sign.
template <Term kind>
constexpr int64_t kMaxTerms = kHasFma && kind == Term::product ? std::numeric_limits<int64_t>::max() : 16;

// C[m x n] (+)= A[m x k] B[k x n]; `n` is a number of columns that whole vectors cover.
template <class T, Term kind = Term::product>
void gemm(T* c, int64_t ldc, const T* a, int64_t row, int64_t col, const T* b, int64_t ldb, int64_t m, int64_t n,
          int64_t k, bool add) {
    constexpr int L = Vector<T>::lanes;
    int64_t p = 0;
    do {
        const int64_t terms = std::min(kMaxTerms<kind>, k - p);
        int64_t j = 0;
        for (; j + kNR * L <= n; j += kNR * L)
            column_panel<T, kNR, kind>(c + j, ldc, a, row, col, b + j, ldb, m, terms, add);
        if constexpr (kNR > 2)
            for (; j + 2 * L <= n; j += 2 * L)
                column_panel<T, 2, kind>(c + j, ldc, a, row, col, b + j, ldb, m, terms, add);
        for (; j < n; j += L) column_panel<T, 1, kind>(c + j, ldc, a, row, col, b + j, ldb, m, terms, add);
        p += terms, a += terms * col, b += terms * ldb, add = true;
    } while (p < k);
}

// C[R x N vectors] += sum over k of A[R x k] (X[R x N vectors] - B[k x N vectors])
template <class T, int R, int N>
inline void difference_micro_kernel(T* c, int64_t ldc, const T* a, int64_t row, int64_t col, const T* x, int64_t ldx,
                                    const T* b, int64_t ldb, int64_t k) {
    constexpr int L = Vector<T>::lanes;
    V<T> sum[R][N], own[R][N];
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) {
            sum[i][j] = load(c + i * ldc + j * L);
            own[i][j] = load(x + i * ldx + j * L);
        }
    for (int64_t p = 0; p < k; p++)
#pragma GCC unroll 8
        for (int i = 0; i < R; i++) {
            const T factor = a[i * row + p * col];
#pragma GCC unroll 8
            for (int j = 0; j < N; j++) sum[i][j] += factor * (own[i][j] - load(b + p * ldb + j * L));
        }
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) store(c + i * ldc + j * L, sum[i][j]);
}

// C[i] += sum over p of A[i][p] (X[i] - B[p]), row by row: what a distance's gradient is.
template <class T>
void gemm_difference(T* c, int64_t ldc, const T* a, int64_t row, int64_t col, const T* x, int64_t ldx, const T* b,
                     int64_t ldb, int64_t m, int64_t n, int64_t k) {
    constexpr int L = Vector<T>::lanes, R = 4, N = kNR / 2;
    int64_t j = 0;
    for (; j + N * L <= n; j += N * L) {
        int64_t i = 0;
        for (; i + R <= m; i += R)
            difference_micro_kernel<T, R, N>(c + i * ldc + j, ldc, a + i * row, row, col, x + i * ldx + j, ldx, b + j,
                                             ldb, k);
        for (; i < m; i++)
            difference_micro_kernel<T, 1, N>(c + i * ldc + j, ldc, a + i * row, row, col, x + i * ldx + j, ldx, b + j,
                                             ldb, k);
    }
    for (; j < n; j += L)
        for (int64_t i = 0; i < m; i++)
            difference_micro_kernel<T, 1, 1>(c + i * ldc + j, ldc, a + i * row, row, col, x + i * ldx + j, ldx, b + j,
                                             ldb, k);
}

// The dot gemm of one row with each of 64 rows (those behind `count` give 0), without turning them: for few rows,
// where reading is all that counts. Rows are read in order, and the values of the tile asked for meanwhile, so that
// memory does not idle between the two: 29 GB/s, 22 without, of 37 that two such streams reach.
template <class T>
void dot_rows(T* s, const T* q, const View<T>& keys, int64_t count, int64_t width, const View<T>& next) {
    constexpr int L = Vector<T>::lanes;
    int64_t i = 0;
    for (; i + L <= count; i += L) {
        V<T> sum[L];
        for (int u = 0; u < L; u++) {
            const T *row = keys.row(i + u), *ahead = next.row(i + u);
            V<T> even{}, odd{};
            int64_t j = 0;
            for (; j + 2 * L <= width; j += 2 * L) {
                even += load(q + j) * load(row + j);
                odd += load(q + j + L) * load(row + j + L);
                __builtin_prefetch(ahead + j);
                __builtin_prefetch(ahead + j + L);
            }
            if (j < width) even += load(q + j) * load(row + j);
            sum[u] = even + odd;
        }
        store(s + i, reduce_sums<T>(sum));
    }
    for (; i < count; i++) {
        V<T> sum{};
        for (int64_t j = 0; j < width; j += L) sum += load(q + j) * load(keys.row(i) + j);
        s[i] = reduce_sum<T>(sum);
    }
    for (; i < kTileKeys; i++) s[i] = 0;
}

// Adds to one row its weights times the rows of values: whole values at a time, which is 6 to 8% faster than halves,
// and the keys of the next tile asked for meanwhile (5% more).
template <class T>
void add_weighted_rows(T* out, const T* weights, const View<T>& values, int64_t count, int64_t width,
                       const View<T>& next) {
    constexpr int L = Vector<T>::lanes, N = 2 * kNR;
    int64_t j = 0;
    // Without fused multiply-adds `gemm` knows how long a sum may be.
    for (; kHasFma && j + N * L <= width; j += N * L) {
        V<T> sum[N];
#pragma GCC unroll 8
        for (int u = 0; u < N; u++) sum[u] = load(out + j + u * L);
        for (int64_t i = 0; i < count; i++) {
            const T *row = values.row(i) + j, *ahead = next.row(i) + j;
#pragma GCC unroll 8
            for (int u = 0; u < N; u++) {
                sum[u] += weights[i] * load(row + u * L);
                __builtin_prefetch(ahead + u * L);
            }
        }
#pragma GCC unroll 8
        for (int u = 0; u < N; u++) store(out + j + u * L, sum[u]);
    }
    gemm<T>(out + j, width, weights, kTileKeys, 1, values.data + j, values.stride, 1, width - j, count, true);
}
