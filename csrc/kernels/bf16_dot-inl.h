// bfloat16 as it is: products of pairs of neighbours, summed in float32, at twice the rate of float32 products. Scores
// pair the channels of a row, pooling pairs neighbouring keys; weights are rounded to bfloat16 for it.

#if defined(__AVX512BF16__)
constexpr bool kHasBf16Dot = true;

typedef uint32_t Bf16Pair;  // two bfloat16, the first in the low half

// sum[R x N vectors] += A[R pairs] B[pairs x N vectors]
template <int R, int N>
__attribute__((always_inline)) inline void add_pairs(__m512 (*sum)[N], const Bf16Pair* a, int64_t lda,
                                                     const Bf16Pair* b) {
    __m512bh line[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) line[j] = (__m512bh)_mm512_loadu_si512(b + j * 16);
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) {
        const __m512bh own = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[i * lda]));
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], own, line[j]);
    }
}

// C[R x N vectors] = factor * sum over k of A[R x k pairs] B[k pairs x N vectors], or, to add, C += the sum; see
// micro_kernel.
template <int R, int N>
inline void bf16_micro_kernel(float* c, int64_t ldc, const Bf16Pair* a, int64_t lda, const Bf16Pair* b, int64_t ldb,
                              int64_t k, bool add, float factor) {
    __m512 sum[R][N];
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) sum[i][j] = _mm512_setzero_ps();
    const int64_t together = kTailRows<R> < R ? std::max<int64_t>(k - kTailTerms, 0) : k;
#pragma GCC unroll 2
    for (int64_t p = 0; p < together; p++) add_pairs<R, N>(sum, a + p, lda, b + p * ldb);
#pragma GCC unroll 8
    for (int first = 0; first < R; first += kTailRows<R>) {
#pragma GCC unroll 1
        for (int64_t p = together; p < k; p++)
            add_pairs<kTailRows<R>, N>(sum + first, a + first * lda + p, lda, b + p * ldb);
#pragma GCC unroll 8
        for (int i = first; i < first + kTailRows<R>; i++) {
            float* to = opaque(c + i * ldc);
#pragma GCC unroll 8
            for (int j = 0; j < N; j++)
                _mm512_storeu_ps(to + j * 16, add ? _mm512_add_ps(_mm512_loadu_ps(to + j * 16), sum[i][j])
                                                  : _mm512_mul_ps(sum[i][j], _mm512_set1_ps(factor)));
        }
    }
}

template <int N>
void bf16_column_panel(float* c, int64_t ldc, const Bf16Pair* a, int64_t lda, const Bf16Pair* b, int64_t ldb, int64_t m,
                       int64_t k, bool add, float factor) {
    int64_t i = 0;
    for (; i + kMR <= m; i += kMR)
        bf16_micro_kernel<kMR, N>(c + i * ldc, ldc, a + i * lda, lda, b, ldb, k, add, factor);
    c += i * ldc, a += i * lda;
    switch (m - i) {
        case 5:
            bf16_micro_kernel<5, N>(c, ldc, a, lda, b, ldb, k, add, factor);
            break;
        case 4:
            bf16_micro_kernel<4, N>(c, ldc, a, lda, b, ldb, k, add, factor);
            break;
        case 3:
            bf16_micro_kernel<3, N>(c, ldc, a, lda, b, ldb, k, add, factor);
            break;
        case 2:
            bf16_micro_kernel<2, N>(c, ldc, a, lda, b, ldb, k, add, factor);
            break;
        case 1:
            bf16_micro_kernel<1, N>(c, ldc, a, lda, b, ldb, k, add, factor);
            break;
    }
}

// C[m x n] = factor * A[m x k pairs] B[k pairs x n], or, to add, C += A B.
inline void bf16_gemm(float* c, int64_t ldc, const Bf16Pair* a, int64_t lda, const Bf16Pair* b, int64_t ldb, int64_t m,
                      int64_t n, int64_t k, bool add, float factor = 1) {
    int64_t j = 0;
    for (; j + 64 <= n; j += 64) bf16_column_panel<4>(c + j, ldc, a, lda, b + j, ldb, m, k, add, factor);
    for (; j < n; j += 16) bf16_column_panel<1>(c + j, ldc, a, lda, b + j, ldb, m, k, add, factor);
}

// The scores and the pooling of a run of panels from bfloat16 rows.
class Bf16Dot {
   public:
    static bool supports(const Problem& problem) {
        return problem.form == Form::inner && problem.score_dtype == Dtype::bf16 && problem.value_dtype == Dtype::bf16;
    }
    Bf16Dot(Arena& arena, const Problem& problem, const QueryTile<float>& queries)
        : problem_(problem), pairs_(padded(problem.dim, 32) / 2), width_(padded(problem.value_dim, 16)) {
        query_ = arena.take<Bf16Pair>(queries.count * pairs_);
        for (int64_t i = 0; i < queries.count; i++)
            raw_row(query_ + i * pairs_, queries.head[i]->query, queries.row[i], problem.dim, pairs_);
        rows_ = arena.take<Bf16Pair>(kTileKeys * pairs_);
        key_ = arena.take<Bf16Pair>(kTileKeys * pairs_);
        value_ = arena.take<Bf16Pair>(kTileKeys / 2 * width_);
        weights_ = arena.take<uint16_t>(kStepPanels * kMR * kTileKeys);
    }

    // `value` are the rows of the tile as float32, free of NaN and infinity where something may be hidden.
    void fill(const Head& head, int64_t key, int64_t key_count, const View<float>& value) {
        for (int64_t i = 0; i < key_count; i++) raw_row(rows_ + i * pairs_, head.key, key + i, problem_.dim, pairs_);
        transpose_tile(reinterpret_cast<float*>(key_), View<float>{reinterpret_cast<const float*>(rows_), pairs_},
                       pairs_, key_count);
        for (int64_t j = 0; j < kTileKeys / 2 && 2 * j < key_count; j++)
            for (int64_t k = 0; k < width_; k += 16) {
                // bfloat16 values as float32 hold their bits in the upper half.
                const __m512i even = _mm512_loadu_si512(value.row(2 * j) + k);
                const __m512i odd =
                    2 * j + 1 < key_count ? _mm512_loadu_si512(value.row(2 * j + 1) + k) : _mm512_setzero_si512();
                _mm512_storeu_si512(value_ + j * width_ + k, _mm512_or_si512(_mm512_srli_epi32(even, 16), odd));
            }
    }

    void qk(float* s, int64_t first, int64_t size, int64_t columns) const {
        bf16_gemm(s, kTileKeys, query_ + first * pairs_, pairs_, key_, kTileKeys, size, columns, pairs_, false,
                  static_cast<float>(problem_.scale));
    }

    void pv(float* out, const float* weights, int64_t size, int64_t key_count) const {
        for (int64_t j = 0; j < size * kTileKeys; j += 32) {
            const __m512bh two = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(weights + j + 16), _mm512_loadu_ps(weights + j));
            _mm512_storeu_si512(weights_ + j, (__m512i)two);
        }
        bf16_gemm(out, width_, reinterpret_cast<const Bf16Pair*>(weights_), kTileKeys / 2, value_, width_, size, width_,
                  (key_count + 1) / 2, true);
    }

   private:
    static void raw_row(Bf16Pair* to, const Matrix& m, int64_t i, int64_t cols, int64_t pairs) {
        uint16_t* bits = reinterpret_cast<uint16_t*>(to);
        const uint16_t* from = reinterpret_cast<const uint16_t*>(m.data) + i * m.row_stride;
        if (m.col_stride == 1)
            std::memcpy(bits, from, cols * sizeof(uint16_t));
        else
            for (int64_t j = 0; j < cols; j++) bits[j] = from[j * m.col_stride];
        std::fill(bits + cols, bits + 2 * pairs, uint16_t{0});
    }

    const Problem& problem_;
    int64_t pairs_, width_;
    Bf16Pair *query_, *rows_, *key_, *value_;
    uint16_t* weights_;
};
#else
constexpr bool kHasBf16Dot = false;
struct Bf16Dot {  // never called
    static bool supports(const Problem&) { return false; }
    Bf16Dot(Arena&, const Problem&, const QueryTile<float>&) {}
    void fill(const Head&, int64_t, int64_t, const View<float>&) {}
    void qk(float*, int64_t, int64_t, int64_t) const {}
    void pv(float*, const float*, int64_t, int64_t) const {}
};
#endif
