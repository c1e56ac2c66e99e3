// The matrix of scores or weights that a caller gets in addition to the output. Scores are stored tile by tile; a row
// becomes weights when its denominator is known, while it is still in the cache.
#pragma once

#include "kernels/masking-inl.h"
#include "kernels/online_softmax-inl.h"
#include "kernels/simd-inl.h"
#include "kernels/tiles-inl.h"

// Store the scores of `size` rows of a query tile against the keys [key, key + key_count).
template <class T>
void store_scores(const Problem& problem, const QueryTile<T>& queries, int64_t first, int64_t size, const T* s,
                  int64_t key, int64_t key_count) {
    for (int64_t i = 0; i < size; i++) {
        T* row = as<T>(queries.head[first + i]->matrix) + queries.row[first + i] * problem.key_len;
        for (int64_t j = 0; j < key_count; j += Vector<T>::lanes)
            store_first(row + key + j, key_count - j, load(s + i * kTileKeys + j));
    }
}

// The weight of a score s in its row: exp(s - reference) * factor.
template <class T>
struct WeightScale {
    T reference, factor;

    // `max` and `denom` are without the sink.
    WeightScale(T max, T denom, const char* sink_number) : reference(safe_max(max)) {
        if (sink_number) {
            // The sink is one more logit, without a value.
            const T sink = *as<T>(sink_number);
            reference = safe_max(std::isnan(max) || std::isnan(sink) ? max + sink : std::max(max, sink));
            denom = denom * rescale_factor(max, reference) + exp_scalar<T>(sink - reference);
        }
        factor = denom == 0 ? T(1) : T(1) / denom;
    }
};

// Finish a row of the matrix: -inf or 0 where the intervals mask a pair, whose score was never stored, and in a matrix
// of weights the weights in the place of the scores.
template <class T>
void finish_matrix_row(const Problem& problem, const Head& head, int64_t row, T max, T denom) {
    constexpr int L = Vector<T>::lanes;
    constexpr T infinity = std::numeric_limits<T>::infinity();
    const bool weights = problem.matrix == MatrixOutput::weights;
    const WeightScale<T> scale(max, denom, head.sink);
    T* line = as<T>(head.matrix) + row * problem.key_len;
    for (int64_t key = 0; key < problem.key_len; key += kTileKeys) {
        const int64_t key_count = std::min<int64_t>(kTileKeys, problem.key_len - key);
        const uint64_t bits = interval_bits(problem, head, row, key, key_count);
        T* to = line + key;
        if (!weights && bits == lowest_bits(key_count)) continue;
        if (bits == 0) {
            std::fill_n(to, key_count, weights ? T(0) : -infinity);
            continue;
        }
        for (int64_t j = 0; j < key_count; j += L) {
            V<T> s = select_bits<T>(bits, j / L, load_first(to + j, key_count - j), splat(-infinity));
            // Selected, not multiplied: an unmasked NaN makes the reference NaN, and masked pairs stay 0.
            if (weights)
                s = select<T>(s == splat(-infinity), V<T>{},
                              exp2_of<T>((s - scale.reference) * kLog2E<T>) * scale.factor);
            store_first(to + j, key_count - j, s);
        }
    }
}
