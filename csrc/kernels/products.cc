// Products of tiles with sums of one type: the matrices of GEMM, and a few query rows with their keys, key by key.
#include "kernels/target.h"

namespace attnscore::ATTNSCORE_TARGET {

#include "kernels/gemm-inl.h"

// Sum in lanes the terms of R rows `a`, `stride` apart, with one row `b`, at most kMaxTerms at a time; memory after `b`
// is prefetched. The terms of a row are added in one order whatever R is, because the backward may join other rows
// than the forward did.
template <int R, class Terms, class E, class T = typename Terms::Sum>
__attribute__((always_inline)) inline std::array<V<T>, R> lanes_of_terms(const T* a, int64_t stride, const E* b,
                                                                         int64_t width) {
    constexpr int L = Vector<T>::lanes;
    const auto part = [&](int64_t j, int64_t end) {
        std::array<V<T>, R> even{}, odd{};
        const auto add = [&](std::array<V<T>, R>& sum, int64_t at) {
            const V<T> b_lanes = load_as<T>(b + at);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sum[r] = Terms::add(sum[r], load(a + r * stride + at), b_lanes);
        };
        for (; j + 2 * L <= end; j += 2 * L) {
            prefetch_stream<T, 2>(b + j);
            add(even, j);
            add(odd, j + L);
        }
        if (j < end) add(even, j);
        for (int r = 0; r < R; r++) even[r] += odd[r];
        return even;
    };
    if constexpr (Terms::kMaxTerms == std::numeric_limits<int64_t>::max()) {
        return part(0, width);
    } else {
        constexpr int64_t terms_per_part = 2 * L * Terms::kMaxTerms;
        std::array<V<T>, R> sum = part(0, std::min(width, terms_per_part));
        for (int64_t j = terms_per_part; j < width; j += terms_per_part) {
            const std::array<V<T>, R> next = part(j, std::min(width, j + terms_per_part));
            for (int r = 0; r < R; r++) sum[r] += next[r];
        }
        return sum;
    }
}

// `few_rows_gemm` of R rows. Reading memory takes all the time there, so each key is read once for all rows. After each
// 2 KB of keys `interleaved` does its part, so that memory does not idle between keys and values.
template <int R, class Terms, class E, class T = typename Terms::Sum>
void few_rows_kernel(T* s, const T* q, int64_t stride, const View<E>& keys, int64_t count, int64_t width,
                     const Interleaved<T>& interleaved) {
    constexpr int L = Vector<T>::lanes;
    const int64_t turn_keys = 2048 / (std::max<int64_t>(width, 1) * static_cast<int64_t>(sizeof(E)));
    const int keys_per_turn = std::clamp<int>(std::bit_floor(static_cast<uint64_t>(turn_keys)), 1, L);
    const int64_t vector_count = count - count % L;
    for (int64_t i = 0; i < vector_count; i += L) {
        V<T> sum[R][L];
        for (int first = 0; first < L; first += keys_per_turn) {
            for (int u = first; u < first + keys_per_turn; u++) {
                const auto lanes = lanes_of_terms<R, Terms>(q, stride, keys.row(i + u), width);
                for (int r = 0; r < R; r++) sum[r][u] = lanes[r];
            }
            interleaved.run(i + first, i + first + keys_per_turn);
        }
        for (int r = 0; r < R; r++) store(s + r * kTileKeys + i, reduce_sums<T>(sum[r]));
    }
    interleaved.run(vector_count, interleaved.count);
    for (int64_t i = vector_count; i < count; i++) {
        const auto lanes = lanes_of_terms<R, Terms>(q, stride, keys.row(i), width);
        for (int r = 0; r < R; r++) s[r * kTileKeys + i] = reduce_sum<T>(lanes[r]);
    }
    for (int r = 0; r < R; r++) std::fill(s + r * kTileKeys + count, s + (r + 1) * kTileKeys, T(0));
}

template <class Terms, class T>
void few_rows_gemm(const Terms&, T* s, const T* q, int64_t stride, int64_t rows, const StoredRows<T>& keys,
                   int64_t count, int64_t width, const Interleaved<T>& interleaved) {
    keys.with_view([&](const auto& view) {
        with_constant_rows<kFewRows>(
            rows, [&](auto R) { few_rows_kernel<R, Terms>(s, q, stride, view, count, width, interleaved); });
    });
}

ATTNSCORE_PRODUCTS(, Product, ATTNSCORE_SUM)
ATTNSCORE_PRODUCTS(, SquaredDistance, ATTNSCORE_SUM)

}  // namespace attnscore::ATTNSCORE_TARGET
