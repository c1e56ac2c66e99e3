// Scores and outputs of bfloat16 rows without widening them: products of pairs of neighbours are summed in float32, at
// twice the rate of float32 products. QK^T pairs the channels of a row; P V pairs neighbouring keys, with the weights
// rounded to bfloat16.
#pragma once

#include "kernels/gemm-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/simd-inl.h"
#include "kernels/tiles-inl.h"

#if defined(__AVX512BF16__) || (defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define ATTNSCORE_BF16_DOT
constexpr bool kHasBf16Dot = true;

typedef uint32_t Bf16Pair;  // two bfloat16, the first in the low half
typedef Bf16Pair Bf16Pairs __attribute__((vector_size(kVectorBytes)));

inline Bf16Pairs load_pairs(const void* from) {
    Bf16Pairs pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    return pairs;
}

// Round two vectors to bfloat16, the first into the lower half of the pairs.
inline Bf16Pairs narrowed_pairs(V<float> low, V<float> high) {
#if defined(__AVX512BF16__)
    return (Bf16Pairs)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
    return (Bf16Pairs)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)low), (float32x4_t)high);
#endif
}

// Terms of a GEMM over pairs of bfloat16. `factor` multiplies sums that are not added to C.
struct Bf16Product {
    using Element = Bf16Pair;
    using Sum = float;
    static constexpr int64_t kMaxTerms = std::numeric_limits<int64_t>::max();
#if defined(__AVX512BF16__)
    static __m512bh read(const Bf16Pair* b) { return (__m512bh)_mm512_loadu_si512(b); }
    static __m512bh broadcast(Bf16Pair a) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(a)); }
    static V<float> add(V<float> sum, __m512bh a, __m512bh b) { return (V<float>)_mm512_dpbf16_ps((__m512)sum, a, b); }
#else
    static Bf16Pairs read(const Bf16Pair* b) { return load_pairs(b); }
    static Bf16Pair broadcast(Bf16Pair a) { return a; }
    // The intrinsic takes its factor from a vector: GCC moves it there through two more registers, clang fills all
    // lanes with it.
    static V<float> add(V<float> sum, Bf16Pair a, Bf16Pairs b) {
        asm("bfdot %0.4s, %1.8h, %2.2h[0]" : "+w"(sum) : "w"(b), "w"(a));
        return sum;
    }
#endif
    V<float> finish(V<float> sum) const { return sum * factor; }

    float factor = 1;
};
ATTNSCORE_GEMM(extern, Bf16Product, float, Bf16Pair, Bf16Pair)  // compiled by rows.cc

// The bfloat16 rows of a query tile and of a key tile, as pairs.
class Bf16Dot {
   public:
    static bool supports(const Problem& problem) {
        return problem.form == Form::inner && problem.score_dtype == Dtype::bf16 && problem.value_dtype == Dtype::bf16;
    }
    Bf16Dot(Arena& arena, const Problem& problem, const QueryTile<float>& queries)
        : problem_(problem), pairs_(padded(problem.dim, 2 * L) / 2), width_(padded(problem.value_dim, L)) {
        query_ = arena.take<Bf16Pair>(queries.count * pairs_);
        for (int64_t i = 0; i < queries.count; i++)
            copy_row(query_ + i * pairs_, queries.head[i]->query, queries.row[i], problem.dim, pairs_);
        rows_ = arena.take<Bf16Pair>(kTileKeys * pairs_);
        key_ = arena.take<Bf16Pair>(kTileKeys * pairs_);
        value_ = arena.take<Bf16Pair>(kTileKeys / 2 * width_);
        weights_ = arena.take<uint16_t>(kStepPanels * kMR * kTileKeys);
    }

    // Read a key tile. `value` are its values as float32, finite where some pair may be masked.
    void fill(const Head& head, int64_t key, int64_t key_count, const View<float>& value) {
        for (int64_t i = 0; i < key_count; i++) copy_row(rows_ + i * pairs_, head.key, key + i, problem_.dim, pairs_);
        transpose_tile(reinterpret_cast<float*>(key_), View<float>{reinterpret_cast<const float*>(rows_), pairs_},
                       pairs_, key_count);
        for (int64_t j = 0; j < kTileKeys / 2 && 2 * j < key_count; j++)
            for (int64_t k = 0; k < width_; k += L) {
                // The upper half of a widened bfloat16 holds its bits.
                const Bf16Pairs even = load_pairs(value.row(2 * j) + k);
                const Bf16Pairs odd = 2 * j + 1 < key_count ? load_pairs(value.row(2 * j + 1) + k) : Bf16Pairs{};
                const Bf16Pairs both = (even >> 16) | odd;
                std::memcpy(value_ + j * width_ + k, &both, sizeof both);
            }
    }

    // S = scale Q K^T, for `size` rows from `first` on.
    void qk(float* s, int64_t first, int64_t size, int64_t columns) const {
        gemm(Bf16Product{static_cast<float>(problem_.scale)}, s, kTileKeys, query_ + first * pairs_, pairs_, 1, key_,
             kTileKeys, size, columns, pairs_, /*add=*/false);
    }

    // O += P V, for `size` rows of weights.
    void pv(float* out, const float* weights, int64_t size, int64_t key_count) const {
        for (int64_t j = 0; j < size * kTileKeys; j += 2 * L) {
            const Bf16Pairs two = narrowed_pairs(load(weights + j), load(weights + j + L));
            std::memcpy(weights_ + j, &two, sizeof two);
        }
        gemm(Bf16Product{}, out, width_, reinterpret_cast<const Bf16Pair*>(weights_), kTileKeys / 2, 1, value_, width_,
             size, width_, (key_count + 1) / 2, /*add=*/true);
    }

   private:
    static constexpr int L = Vector<float>::lanes;

    // Copy a row without converting it, with zeros behind its columns.
    static void copy_row(Bf16Pair* to, const Matrix& m, int64_t i, int64_t cols, int64_t pairs) {
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
// Stands in for the class on other targets, where it is never used.
struct Bf16Dot {
    static bool supports(const Problem&) { return false; }
    Bf16Dot(Arena&, const Problem&, const QueryTile<float>&) {}
    void fill(const Head&, int64_t, int64_t, const View<float>&) {}
    void qk(float*, int64_t, int64_t, int64_t) const {}
    void pv(float*, const float*, int64_t, int64_t) const {}
};
#endif
