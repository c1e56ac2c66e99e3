// Backward, of one key tile: the weights P, computed again from each row's maximum and denominator, and the gradient dS
// of the scores. From these backward-inl.h computes the gradients of the inputs.
#pragma once

#include "kernels/additive-inl.h"
#include "kernels/additive_tables-inl.h"
#include "kernels/bf16_dot-inl.h"
#include "kernels/gemm-inl.h"
#include "kernels/masking-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/scores-inl.h"
#include "kernels/simd-inl.h"
#include "kernels/tiles-inl.h"

// The factor of vectors before they are tested for infinity: the difference of two large vectors may overflow.
template <class T>
inline T difference_factor(const Problem& problem) {
    return problem.form == Form::distance ? T(2) : T(1);
}

// A query tile of one head with its part of the backward.
template <class T>
struct BackwardQueryTile {
    QueryTile<T> rows;
    View<T> grad_out;
    typename Additive<T>::Query additive_query;
    bool finite = true;  // query and grad_out, which are tested where some pair may be masked
    uint64_t* bits;      // of unmasked keys, by row
    T *p, *ds;           // count x kTileKeys: weights after dropout, and the gradient of the scores

    BackwardQueryTile(Arena& arena, const Problem& problem, const Additive<T>& form, int64_t head, int64_t first,
                      int64_t count)
        : rows(arena, problem, &head, first, count) {
        const int64_t width = padded(problem.value_dim, Vector<T>::lanes);
        T* copy = arena.take<T>(count * width);
        grad_out = view_rows(copy, problem.heads[head].grad_out, problem.grad_dtype, first, count, problem.value_dim);
        bits = arena.take<uint64_t>(padded(count, kMR));
        p = arena.take<T>(padded(count, kMR) * kTileKeys);
        ds = arena.take<T>(padded(count, kMR) * kTileKeys);
        if (rows.masked)
            finite = is_finite(grad_out, count, width) &&
                     is_finite(View<T>{rows.query, rows.width}, count, rows.width, difference_factor<T>(problem));
        if (problem.form == Form::additive && !form.by_pairs)
            AdditiveTables<T>{form}.fill(arena, additive_query, rows.query, count);
    }
};

// A key tile and its values, as the backward reads them.
template <class T>
struct BackwardKeyTile {
    KeyTile<T> keys;
    View<T> key_rows;  // times `key_factor`: scaled where the form is an inner product
    View<T> values;
    T key_factor = 1;
    T *key_copy, *value_copy, *value_transposed;
    int64_t width, value_width;
    const bool few_rows;  // too few query rows to transpose or scale a tile for: products go key by key
    bool finite = true;   // keys and values, likewise

    BackwardKeyTile(Arena& arena, const Problem& problem, const Additive<T>& form)
        : keys(arena, problem, form, /*gradients=*/true),
          width(padded(problem.dim, Vector<T>::lanes)),
          value_width(padded(problem.value_dim, Vector<T>::lanes)),
          few_rows(has_few_rows(problem)) {
        key_copy = arena.take<T>(kTileKeys * width);
        value_copy = arena.take<T>(kTileKeys * value_width);
        value_transposed = arena.take<T>(kTileKeys * value_width);
    }

    // Read a tile. `masked`: whether some pair may be masked. `sizes`: see KeyTile::fill.
    void fill(const Problem& problem, const Additive<T>& form, const Head& head, int64_t key, int64_t key_count,
              bool masked, const MagnitudeRange<T>& sizes) {
        keys.fill(problem, form, head, key, key_count, !few_rows || problem.form == Form::additive, sizes);
        key_rows = keys.rows;
        const T scale = problem.form == Form::inner ? static_cast<T>(problem.scale) : T(1);
        if (few_rows) {
            key_factor = scale;
        } else if (scale != T(1)) {
            for (int64_t i = 0; i < key_count; i++)
                for (int64_t j = 0; j < width; j += Vector<T>::lanes)
                    store(key_copy + i * width + j, load(keys.rows.row(i) + j) * scale);
            key_rows = {key_copy, width};
        }
        values = view_rows(value_copy, head.value, problem.value_dtype, key, key_count, problem.value_dim);
        if (!few_rows) transpose_tile(value_transposed, values, value_width, key_count);
        // With few rows, products leave masked pairs out in any case.
        finite = few_rows || !masked ||
                 (is_finite(values, key_count, value_width) &&
                  is_finite(key_rows, key_count, width, difference_factor<T>(problem)));
    }
};

// A row of the matrix's gradient for the keys of a tile, with zeros after them: in place, or copied to `line`.
template <class T>
const T* grad_matrix_row(T* line, const Head& head, int64_t row, int64_t key, int64_t key_count) {
    const Matrix& m = head.grad_matrix;
    const T* from = as<T>(m.data) + row * m.row_stride + key * m.col_stride;
    if (m.col_stride == 1 && key_count == kTileKeys) return from;
    for (int64_t j = 0; j < key_count; j++) line[j] = from[j * m.col_stride];
    std::fill_n(line + key_count, kTileKeys - key_count, T(0));
    return line;
}

// exp(logit - log_denom). In float a power of 2 takes less time, and its exponent is rounded no worse than the scores.
// In double the digits count: gradients of saturated rows are nothing but such weights.
template <class T>
inline V<T> weight_of(V<T> logit, T log_denom) {
    if constexpr (sizeof(T) == 4)
        return exp2_of<T>(logit * kLog2E<T> - log_denom * kLog2E<T>);
    else
        return exp_of<T>(logit - log_denom);
}

// Turn a row of scores and of dP, W vectors of keys, into P after dropout and dS, with zeros where masked. `keep`: bits
// of the weights that dropout keeps; `grad_matrix`: the gradient of the row's weights, or null.
template <int W, class T>
__attribute__((always_inline)) inline void row_gradients(const Head& head, int64_t row, const Dropout& dropout,
                                                         uint64_t unmasked, uint64_t keep, const T* grad_matrix,
                                                         T* weights, T* grads) {
    constexpr int L = Vector<T>::lanes;
    const T row_max = as<T>(head.row_max)[row], log_denom = as<T>(head.log_denom)[row];
    const T delta = as<T>(head.delta)[row];
    const bool with_entropy = head.grad_entropy != nullptr;
    const T grad_entropy = with_entropy ? as<T>(head.grad_entropy)[row] : T(0);
    const T entropy = with_entropy ? as<T>(head.entropy)[row] : T(0);
    const T factor = static_cast<T>(dropout.factor);
    // `is_plain`: no dropout, no gradient of the weights or the entropy, no masked key. A constant when compiled,
    // because testing for the four at each vector of keys takes a third of all instructions.
    const auto run = [&](auto is_plain) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int j = 0; j < W; j++) {
            // p = exp(s - row_max - log_denom)
            const V<T> logit = load(weights + j * L) - row_max;
            const V<T> weight = weight_of(logit, log_denom);
            V<T> dropped_weight = weight, grad = load(grads + j * L);
            if (!is_plain && dropout.on) {
                grad = select_bits<T>(keep, j, grad * factor, V<T>{});
                dropped_weight = select_bits<T>(keep, j, weight * factor, V<T>{});
            }
            if (!is_plain && grad_matrix) grad += load(grad_matrix + j * L);
            grad = weight * (grad - delta);
            // H = -sum p log p
            if (!is_plain && with_entropy) {
                const V<T> log_p = select<T>(weight == T(0), V<T>{}, logit - log_denom);
                grad -= weight * grad_entropy * (log_p + entropy);
            }
            if (!is_plain && unmasked != kAll) {
                dropped_weight = select_bits<T>(unmasked, j, dropped_weight, V<T>{});
                grad = select_bits<T>(unmasked, j, grad, V<T>{});
            }
            store(weights + j * L, dropped_weight);
            store(grads + j * L, grad);
        }
    };
    const bool plain = !dropout.on && !grad_matrix && !with_entropy && unmasked == kAll;
    plain ? run(std::true_type{}) : run(std::false_type{});
}

// P and dS of the micro-panels of a query tile that attend to a key tile.
template <class T>
struct ScoreGradients {
    const Problem& problem;
    Scores<T> scores;
    Dropout dropout;
    T* line;                // a row of the matrix's gradient
    Span panels;            // covers all panels that attend to the tile; masked panels between get zeros
    bool for_bias = false;  // stop at the gradient of the scores after the caps, which is the bias's too
    double grad_scale = 0;  // of the head's own scale, over all tiles so far
    // The gradient of a relative bias over all tiles so far, from the last row and the first key on; or null.
    double* grad_relative = nullptr;
    // Whether products leave masked pairs out: NaN or infinity may be at one, or rows are too few for a test to pay.
    bool skip_masked = false;

    ScoreGradients(Arena& arena, const Problem& p)
        : problem(p), scores(arena, p, /*backward=*/true), dropout(p), line(arena.take<T>(kTileKeys)) {}

    // Fill bits, P and dS of `panels`.
    void operator()(BackwardQueryTile<T>& queries, const BackwardKeyTile<T>& tile) {
        const QueryTile<T>& rows = queries.rows;
        const int64_t key = tile.keys.first, key_count = tile.keys.count;
        panels = {rows.panels(), 0};
        skip_masked = false;
        for (int64_t s = 0; s < rows.panels(); s++)
            if (!rows.is_masked(s, key, key_count)) panels = panels.covering({s, s + 1});
        if (dropout.on) dropout.set_tile(key);
        for (int64_t s = panels.first, end; s < panels.end; s = end) {
            const bool masked = rows.is_masked(s, key, key_count);
            end = s + 1;
            while (end < panels.end && end < s + kStepPanels && rows.is_masked(end, key, key_count) == masked) end++;
            const int64_t first = s * kMR, size = std::min(end * kMR, rows.count) - first;
            if (masked) {
                skip_masked = skip_masked || !(queries.finite && tile.finite);
                std::fill_n(queries.bits + first, size, 0);
                std::fill_n(queries.p + first * kTileKeys, size * kTileKeys, T(0));
                std::fill_n(queries.ds + first * kTileKeys, size * kTileKeys, T(0));
            } else {
                step(queries, tile, {s, end}, first, size);
            }
        }
    }

   private:
    // Fill bits, P and dS of up to kStepPanels micro-panels, the rows [first, first + size). Until softmax_gradients, P
    // holds the scores and dS holds dP.
    void step(BackwardQueryTile<T>& queries, const BackwardKeyTile<T>& tile, Span attended, int64_t first,
              int64_t size) {
        constexpr int L = Vector<T>::lanes;
        T *p = queries.p + first * kTileKeys, *ds = queries.ds + first * kTileKeys;
        const int64_t key_count = tile.keys.count;
        uint64_t* bits = queries.bits + first;
        const Interleaved<T> none;  // nothing to do between the keys
        scores(p, bits, queries.rows, queries.additive_query, attended, tile.keys, tile.few_rows ? &none : nullptr,
               nullptr, !for_bias);
        // O = (P * keep) V, so dO V^T is the gradient of P * keep
        if (tile.few_rows) {
            few_rows_gemm(Product<T>{}, ds, queries.grad_out.row(first), queries.grad_out.stride, size,
                          StoredRows<T>(tile.values), key_count, tile.value_width, none);
            skip_masked = true;
        } else {
            gemm(Product<T>{}, ds, kTileKeys, queries.grad_out.row(first), queries.grad_out.stride, 1,
                 tile.value_transposed, kTileKeys, size, padded(key_count, L), problem.value_dim, /*add=*/false);
        }
        dispatch_width<T>(key_count, [&](auto vectors) { softmax_gradients<vectors>(queries, tile, first, size); });
        if (grad_relative) add_diagonals(queries.rows.row[first], tile.keys.first, key_count, ds, size);
        if (!problem.caps.empty() && !for_bias) apply_cap_slopes(ds, size);
        if (!for_bias && queries.rows.head[first]->grad_scale) add_scale_gradient(ds, size);
    }

    // Add dS of the rows from `row` on to the gradient of a relative bias: ds[i][j] belongs to entry size - 1 - i + j
    // of the entries of these rows, so row i is added at `place` = size - 1 - i. Only rows whose places differ by
    // whole vectors share an array of sums: a load then never waits for a store that overlaps it in part. The few
    // terms of an entry are added in T here; over all tiles they are summed in double, because they cancel.
    void add_diagonals(int64_t row, int64_t key, int64_t key_count, const T* ds, int64_t size) {
        constexpr int64_t L = Vector<T>::lanes, width = L + (kStepPanels * kMR + kTileKeys + L) / L * L;
        T sums[L][width] = {};  // sums[r][L + k - r]: of entry k, over the rows whose places are r modulo L
        for (int64_t i = 0; i < size; i++) {
            const int64_t place = size - 1 - i;
            T* to = sums[place % L] + L + place / L * L;
            for (int64_t j = 0; j < kTileKeys; j += L) store(to + j, load(to + j) + load(ds + i * kTileKeys + j));
        }
        double* to = grad_relative + (problem.query_len - row - size) + key;
        const int64_t count = size - 1 + key_count;
        for (int64_t k = 0; k < count; k += L) {
            V<T> sum{};
            for (int64_t r = 0; r < L; r++) sum += load(sums[r] + L + k - r);
            for (int64_t j = 0; j < std::min(L, count - k); j++) to[k + j] += static_cast<double>(sum[j]);
        }
    }

    // Turn scores and dP of rows, whose keys take W vectors, into P and dS, with zeros behind them.
    template <int W>
    __attribute__((noinline)) void softmax_gradients(BackwardQueryTile<T>& queries, const BackwardKeyTile<T>& tile,
                                                     int64_t first, int64_t size) {
        constexpr int L = Vector<T>::lanes;
        T *p = queries.p + first * kTileKeys, *ds = queries.ds + first * kTileKeys;
        const int64_t key = tile.keys.first, key_count = tile.keys.count;
        const uint64_t* bits = queries.bits + first;
        for (int64_t i = 0; i < size; i++) {
            const Head& head = *queries.rows.head[first + i];
            const int64_t row = queries.rows.row[first + i];
            const uint64_t unmasked = bits[i];
            const uint64_t keep = dropout.on ? dropout.keep_bits(queries.rows.stream[first + i]) : kAll;
            skip_masked = skip_masked || (unmasked != kAll && !(queries.finite && tile.finite));
            T *weights = p + i * kTileKeys, *grads = ds + i * kTileKeys;
            for (int j = W; j < kTileVectors<T>; j++) {
                store(weights + j * L, V<T>{});
                store(grads + j * L, V<T>{});
            }
            const T* grad_matrix = nullptr;
            if (problem.matrix != MatrixOutput::none) grad_matrix = grad_matrix_row(line, head, row, key, key_count);
            if (problem.matrix == MatrixOutput::scores) {
                // A call for the scores has neither weights nor an output.
                for (int j = 0; j < W; j++) {
                    store(weights + j * L, V<T>{});
                    store(grads + j * L,
                          select_bits<T>(unmasked & lowest_bits(key_count), j, load(grad_matrix + j * L), V<T>{}));
                }
                continue;
            }
            row_gradients<W>(head, row, dropout, unmasked, keep, grad_matrix, weights, grads);
        }
    }

    // Add to the gradient of the head's scale: s = -scale * squared distance, before the caps. The gradient
    // of a masked pair is 0, and 0 times its distance, which may be infinite or NaN, is NaN.
    void add_scale_gradient(const T* ds, int64_t size) {
        V<T> sum{};
        for (int64_t j = 0; j < size * kTileKeys; j += Vector<T>::lanes) {
            const V<T> grad = load(ds + j);
            sum += select<T>(grad == T(0), V<T>{}, grad * load(scores.squares() + j));
        }
        grad_scale -= problem.scale * static_cast<double>(reduce_sum<T>(sum));
    }

    // Turn the gradient of the scores after the caps into the gradient before them. Selected, because a slope may have
    // overflowed where the gradient is 0.
    void apply_cap_slopes(T* ds, int64_t size) const {
        for (int64_t j = 0; j < size * kTileKeys; j += Vector<T>::lanes) {
            const V<T> grad = load(ds + j);
            store(ds + j, select<T>(grad == T(0), V<T>{}, grad * load(scores.cap_slopes() + j)));
        }
    }
};
