// Of a tile in the backward: the weights, computed again from each row's maximum and total, and the gradient of the
// scores. What these are for the arrays behind them is backward-inl.h's.

// One queries of rows with what the backward knows of it.
template <class T>
struct BackwardQueryTile {
    QueryTile<T> rows;
    View<T> grad_out;
    typename Additive<T>::Query additive_query;
    bool finite = true;  // query and grad_out
    uint64_t* bits;
    T *p, *ds;  // count x kTileKeys: weights as they pool, and the scores' gradient

    BackwardQueryTile(Arena& arena, const Problem& problem, const Additive<T>& form, int64_t head, int64_t first,
                      int64_t count)
        : rows(arena, problem, {head}, first, count) {
        const int64_t width = padded(problem.value_dim, Vector<T>::lanes);
        T* copy = arena.take<T>(count * width);
        grad_out = view_rows(copy, problem.heads[head].grad_out, problem.grad_dtype, first, count, problem.value_dim);
        bits = arena.take<uint64_t>(padded(count, kMR));
        p = arena.take<T>(padded(count, kMR) * kTileKeys);
        ds = arena.take<T>(padded(count, kMR) * kTileKeys);
        if (rows.masked)
            finite = is_finite(grad_out, count, width) && is_finite(View<T>{rows.query, rows.width}, count, rows.width);
        if (problem.form == Form::additive) AdditiveTables<T>{form}.fill(arena, additive_query, rows.query, count);
    }
};

// One tile of keys and values with what the backward needs of it.
template <class T>
struct BackwardKeyTile {
    KeyTile<T> keys;
    View<T> key_rows;  // times the scale where the form is an inner product
    T *key_copy, *value_copy, *value_transposed;
    int64_t width, value_width;
    bool finite = true;  // keys and values

    BackwardKeyTile(Arena& arena, const Problem& problem, const Additive<T>& form)
        : keys(arena, problem, form, true),
          width(padded(problem.dim, Vector<T>::lanes)),
          value_width(padded(problem.value_dim, Vector<T>::lanes)) {
        key_copy = arena.take<T>(kTileKeys * width);
        value_copy = arena.take<T>(kTileKeys * value_width);
        value_transposed = arena.take<T>(kTileKeys * value_width);
    }

    // `masked`: whether some pair may be masked.
    void fill(const Problem& problem, const Additive<T>& form, const Head& head, int64_t key, int64_t key_count,
              bool masked, const MagnitudeRange<T>& sizes) {
        keys.fill(problem, form, head, key, key_count, true, sizes);
        key_rows = keys.rows;
        if (problem.form == Form::inner && problem.scale != 1) {
            const T scale = static_cast<T>(problem.scale);
            for (int64_t i = 0; i < key_count; i++)
                for (int64_t j = 0; j < width; j += Vector<T>::lanes)
                    store(key_copy + i * width + j, load(keys.rows.row(i) + j) * scale);
            key_rows = {key_copy, width};
        }
        const View<T> value = view_rows(value_copy, head.value, problem.value_dtype, key, key_count, problem.value_dim);
        transpose_tile(value_transposed, value, value_width, key_count);
        finite = !masked || (is_finite(value, key_count, value_width) && is_finite(keys.rows, key_count, width));
    }
};

// Weights and score gradients of the panels of a queries that see a tile. Gives the panels [first, last) among which
// all that see it are; the others between them hold zeros.
template <class T>
struct ScoreGradients {
    const Problem& problem;
    Scores<T> scores;
    Dropout dropout;
    T* line;  // of the gradient of the matrix
    Span panels;
    bool for_bias = false;     // before the caps are gone back through: what a bias gets
    double grad_scale = 0;     // of the head's own, from all tiles so far
    bool skip_masked = false;  // a masked pair beside NaN or infinity: products must not touch it

    ScoreGradients(Arena& arena, const Problem& p)
        : problem(p), scores(arena, p, true), dropout(p), line(arena.take<T>(kTileKeys)) {}

    void operator()(BackwardQueryTile<T>& queries, const BackwardKeyTile<T>& tile) {
        const QueryTile<T>& rows = queries.rows;
        const int64_t key = tile.keys.first, key_count = tile.keys.count;
        panels = {rows.panels(), 0};
        skip_masked = false;
        for (int64_t s = 0; s < rows.panels(); s++)
            if (!rows.is_masked(s, key, key_count)) panels = {std::min(panels.first, s), s + 1};
        if (dropout.on) dropout.set_tile(key);
        for (int64_t s = panels.first, end; s < panels.last; s = end) {
            const bool missed = rows.is_masked(s, key, key_count);
            end = s + 1;
            while (end < panels.last && end < s + kStepPanels && rows.is_masked(end, key, key_count) == missed) end++;
            const int64_t first = s * kMR, size = std::min(end * kMR, rows.count) - first;
            if (missed) {
                std::fill_n(queries.bits + first, size, 0);
                std::fill_n(queries.p + first * kTileKeys, size * kTileKeys, T(0));
                std::fill_n(queries.ds + first * kTileKeys, size * kTileKeys, T(0));
            } else {
                step(queries, tile, {s, end}, first, size);
            }
        }
    }

   private:
    void step(BackwardQueryTile<T>& queries, const BackwardKeyTile<T>& tile, Span own, int64_t first, int64_t size) {
        constexpr int L = Vector<T>::lanes;
        const bool through_caps = !problem.caps.empty() && !for_bias;
        T *p = queries.p + first * kTileKeys, *ds = queries.ds + first * kTileKeys;
        const int64_t key = tile.keys.first, key_count = tile.keys.count;
        uint64_t* bits = queries.bits + first;
        scores(p, bits, queries.rows, queries.additive_query, own, tile.keys, nullptr, nullptr, !for_bias);
        // out = (p * keep) v
        gemm<T>(ds, kTileKeys, queries.grad_out.row(first), queries.grad_out.stride, 1, tile.value_transposed,
                kTileKeys, size, padded(key_count, L), problem.value_dim, false);
        for (int64_t i = 0; i < size; i++) {
            const Head& head = *queries.rows.head[first + i];
            const int64_t row = queries.rows.row[first + i];
            const T row_max = reinterpret_cast<const T*>(head.row_max)[row],
                    log_denom = reinterpret_cast<const T*>(head.log_denom)[row];
            const T delta = reinterpret_cast<const T*>(head.delta)[row];
            const uint64_t unmasked = bits[i],
                           keep = dropout.on ? dropout.keep_bits(queries.rows.stream[first + i]) : kAll;
            skip_masked = skip_masked || (unmasked != kAll && !(queries.finite && tile.finite));
            T *weights = p + i * kTileKeys, *grads = ds + i * kTileKeys;
            const bool with_entropy = head.grad_entropy != nullptr;
            const T grad_entropy = with_entropy ? reinterpret_cast<const T*>(head.grad_entropy)[row] : T(0);
            const T entropy = with_entropy ? reinterpret_cast<const T*>(head.entropy)[row] : T(0);
            const T* grad_matrix = nullptr;
            if (problem.matrix != MatrixOutput::none) grad_matrix = grad_matrix_row(head, row, key, key_count);
            if (problem.matrix == MatrixOutput::scores) {
                // The caller has the scores alone: no weight, no output.
                for (int j = 0; j < kTileVectors<T>; j++) {
                    store(weights + j * L, V<T>{});
                    store(grads + j * L,
                          select_bits<T>(unmasked & lowest_bits(key_count), j, load(grad_matrix + j * L), V<T>{}));
                }
                continue;
            }
#pragma GCC unroll 8
            for (int j = 0; j < kTileVectors<T>; j++) {
                // p = exp(s - row_max - log total)
                const V<T> above = load(weights + j * L) - row_max;
                const V<T> weight = weight_of(above, log_denom);
                V<T> dropped_weight = weight, grad = load(grads + j * L);
                if (dropout.on) {
                    const T factor = static_cast<T>(dropout.factor);
                    grad = select_bits<T>(keep, j, grad * factor, V<T>{});
                    dropped_weight = select_bits<T>(keep, j, weight * factor, V<T>{});
                }
                if (grad_matrix) grad += load(grad_matrix + j * L);
                grad = weight * (grad + delta);
                // H = -sum p log p
                if (with_entropy) {
                    const V<T> log_p = select<T>(weight == T(0), V<T>{}, above - log_denom);
                    grad -= weight * grad_entropy * (log_p + entropy);
                }
                if (unmasked != kAll) {
                    dropped_weight = select_bits<T>(unmasked, j, dropped_weight, V<T>{});
                    grad = select_bits<T>(unmasked, j, grad, V<T>{});
                }
                store(weights + j * L, dropped_weight);
                store(grads + j * L, grad);
            }
        }
        if (through_caps) apply_cap_slopes(ds, size);
        if (!for_bias && queries.rows.head[first]->grad_scale) add_scale_gradient(ds, size);
    }

    // A row of the gradient of the matrix, for the keys of a tile and zeros behind them.
    const T* grad_matrix_row(const Head& head, int64_t row, int64_t key, int64_t key_count) const {
        const Matrix& m = head.grad_matrix;
        const T* from = reinterpret_cast<const T*>(m.data) + row * m.row_stride + key * m.col_stride;
        if (m.col_stride == 1 && key_count == kTileKeys) return from;
        for (int64_t j = 0; j < key_count; j++) line[j] = from[j * m.col_stride];
        std::fill_n(line + key_count, kTileKeys - key_count, T(0));
        return line;
    }

    // A power of 2 takes less, with an exponent that is rounded, as the scores that it is made of are; in double the
    // digits count: gradients of saturated rows are nothing but such weights.
    static V<T> weight_of(V<T> above, T log_denom) {
        if constexpr (sizeof(T) == 4)
            return exp2_of<T>(above * kLog2E<T> - log_denom * kLog2E<T>);
        else
            return exp_of<T>(above - log_denom);
    }

    // s = -scale * squared distance, before the caps
    void add_scale_gradient(const T* ds, int64_t size) {
        V<T> sum{};
        for (int64_t j = 0; j < size * kTileKeys; j += Vector<T>::lanes) {
            const V<T> grad = load(ds + j);
            sum += select<T>(grad == T(0), V<T>{}, grad * load(scores.squares() + j));
        }
        grad_scale -= problem.scale * static_cast<double>(reduce_sum<T>(sum));
    }

    // From the gradient of the final scores to that of the scores before the caps: a slope may have overflowed where
    // the gradient is 0.
    void apply_cap_slopes(T* ds, int64_t size) const {
        for (int64_t j = 0; j < size * kTileKeys; j += Vector<T>::lanes) {
            const V<T> grad = load(ds + j);
            store(ds + j, select<T>(grad == T(0), V<T>{}, grad * load(scores.cap_slopes() + j)));
        }
    }
};
