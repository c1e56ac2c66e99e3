// bfloat16 as it is: products of pairs of neighbours, summed in float32, at twice the rate of float32 products. Scores
// pair the channels of a row, pooling pairs neighbouring keys; weights are rounded to bfloat16 for it.

#if defined(__AVX512BF16__)
constexpr bool kPairs = true;

typedef uint32_t Two;  // two bfloat16, the first in the low half

// sum[R x N vectors] += A[R pairs] B[pairs x N vectors]
template <int R, int N>
__attribute__((always_inline)) inline void add_pairs(__m512 (*sum)[N], const Two* a, int64_t lda, const Two* b) {
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
// block_of.
template <int R, int N>
inline void pair_block(float* c, int64_t ldc, const Two* a, int64_t lda, const Two* b, int64_t ldb, int64_t k, bool add,
                       float factor) {
    __m512 sum[R][N];
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) sum[i][j] = _mm512_setzero_ps();
    const int64_t together = kApart<R> < R ? std::max<int64_t>(k - kLast, 0) : k;
#pragma GCC unroll 2
    for (int64_t p = 0; p < together; p++) add_pairs<R, N>(sum, a + p, lda, b + p * ldb);
#pragma GCC unroll 8
    for (int first = 0; first < R; first += kApart<R>) {
#pragma GCC unroll 1
        for (int64_t p = together; p < k; p++)
            add_pairs<kApart<R>, N>(sum + first, a + first * lda + p, lda, b + p * ldb);
#pragma GCC unroll 8
        for (int i = first; i < first + kApart<R>; i++) {
            float* to = opaque(c + i * ldc);
#pragma GCC unroll 8
            for (int j = 0; j < N; j++)
                _mm512_storeu_ps(to + j * 16, add ? _mm512_add_ps(_mm512_loadu_ps(to + j * 16), sum[i][j])
                                                  : _mm512_mul_ps(sum[i][j], _mm512_set1_ps(factor)));
        }
    }
}

template <int N>
void pair_panel(float* c, int64_t ldc, const Two* a, int64_t lda, const Two* b, int64_t ldb, int64_t m, int64_t k,
                bool add, float factor) {
    int64_t i = 0;
    for (; i + kStrip <= m; i += kStrip)
        pair_block<kStrip, N>(c + i * ldc, ldc, a + i * lda, lda, b, ldb, k, add, factor);
    c += i * ldc, a += i * lda;
    switch (m - i) {
        case 5:
            pair_block<5, N>(c, ldc, a, lda, b, ldb, k, add, factor);
            break;
        case 4:
            pair_block<4, N>(c, ldc, a, lda, b, ldb, k, add, factor);
            break;
        case 3:
            pair_block<3, N>(c, ldc, a, lda, b, ldb, k, add, factor);
            break;
        case 2:
            pair_block<2, N>(c, ldc, a, lda, b, ldb, k, add, factor);
            break;
        case 1:
            pair_block<1, N>(c, ldc, a, lda, b, ldb, k, add, factor);
            break;
    }
}

// C[m x n] = factor * A[m x k pairs] B[k pairs x n], or, to add, C += A B.
inline void pair_product(float* c, int64_t ldc, const Two* a, int64_t lda, const Two* b, int64_t ldb, int64_t m,
                         int64_t n, int64_t k, bool add, float factor = 1) {
    int64_t j = 0;
    for (; j + 64 <= n; j += 64) pair_panel<4>(c + j, ldc, a, lda, b + j, ldb, m, k, add, factor);
    for (; j < n; j += 16) pair_panel<1>(c + j, ldc, a, lda, b + j, ldb, m, k, add, factor);
}

// The scores and the pooling of a run of strips from bfloat16 rows.
class Pairs {
   public:
    static bool serves(const Problem& problem) {
        return problem.form == Form::inner && problem.score_dtype == Dtype::bf16 && problem.value_dtype == Dtype::bf16;
    }
    Pairs(Arena& arena, const Problem& problem, const Block<float>& block)
        : problem_(problem), pairs_(padded(problem.dim, 32) / 2), width_(padded(problem.value_dim, 16)) {
        query_ = arena.take<Two>(block.count * pairs_);
        for (int64_t i = 0; i < block.count; i++)
            raw_row(query_ + i * pairs_, block.head[i]->query, block.row[i], problem.dim, pairs_);
        rows_ = arena.take<Two>(kKeys * pairs_);
        key_ = arena.take<Two>(kKeys * pairs_);
        value_ = arena.take<Two>(kKeys / 2 * width_);
        weights_ = arena.take<uint16_t>(kRun * kStrip * kKeys);
    }

    // `value` are the rows of the tile as float32, free of NaN and infinity where something may be hidden.
    void fill(const Head& head, int64_t key, int64_t here, const View<float>& value) {
        for (int64_t i = 0; i < here; i++) raw_row(rows_ + i * pairs_, head.key, key + i, problem_.dim, pairs_);
        transpose_tile(reinterpret_cast<float*>(key_), View<float>{reinterpret_cast<const float*>(rows_), pairs_},
                       pairs_, here);
        for (int64_t j = 0; j < kKeys / 2 && 2 * j < here; j++)
            for (int64_t k = 0; k < width_; k += 16) {
                // bfloat16 values as float32 hold their bits in the upper half.
                const __m512i even = _mm512_loadu_si512(value.row(2 * j) + k);
                const __m512i odd =
                    2 * j + 1 < here ? _mm512_loadu_si512(value.row(2 * j + 1) + k) : _mm512_setzero_si512();
                _mm512_storeu_si512(value_ + j * width_ + k, _mm512_or_si512(_mm512_srli_epi32(even, 16), odd));
            }
    }

    void scores(float* s, int64_t first, int64_t size, int64_t columns) const {
        pair_product(s, kKeys, query_ + first * pairs_, pairs_, key_, kKeys, size, columns, pairs_, false,
                     static_cast<float>(problem_.scale));
    }

    void pool(float* out, const float* weights, int64_t size, int64_t here) const {
        for (int64_t j = 0; j < size * kKeys; j += 32) {
            const __m512bh two = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(weights + j + 16), _mm512_loadu_ps(weights + j));
            _mm512_storeu_si512(weights_ + j, (__m512i)two);
        }
        pair_product(out, width_, reinterpret_cast<const Two*>(weights_), kKeys / 2, value_, width_, size, width_,
                     (here + 1) / 2, true);
    }

   private:
    static void raw_row(Two* to, const Matrix& m, int64_t i, int64_t cols, int64_t pairs) {
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
    Two *query_, *rows_, *key_, *value_;
    uint16_t* weights_;
};
#else
constexpr bool kPairs = false;
struct Pairs {  // never called
    static bool serves(const Problem&) { return false; }
    Pairs(Arena&, const Problem&, const Block<float>&) {}
    void fill(const Head&, int64_t, int64_t, const View<float>&) {}
    void scores(float*, int64_t, int64_t, int64_t) const {}
    void pool(float*, const float*, int64_t, int64_t) const {}
};
#endif
