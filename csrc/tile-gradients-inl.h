// Of a tile in the backward: the weights, computed again from each row's maximum and total, and the gradient of the
// scores. What these are for the arrays behind them is backward-inl.h's.

// One block of rows with what the backward knows of it.
template <class T>
struct BackwardBlock {
    Block<T> rows;
    View<T> grad_out;
    typename Additive<T>::Query prepared;
    bool finite = true;  // query and grad_out
    uint64_t* bits;
    T *p, *ds;  // count x kKeys: weights as they pool, and the scores' gradient

    BackwardBlock(Arena& arena, const Problem& problem, const Additive<T>& form, int64_t head, int64_t first,
                  int64_t count)
        : rows(arena, problem, {head}, first, count) {
        const int64_t width = padded(problem.value_dim, Vector<T>::lanes);
        T* copy = arena.take<T>(count * width);
        grad_out = view_rows(copy, problem.heads[head].grad_out, problem.grad_dtype, first, count, problem.value_dim);
        bits = arena.take<uint64_t>(padded(count, kStrip));
        p = arena.take<T>(padded(count, kStrip) * kKeys);
        ds = arena.take<T>(padded(count, kStrip) * kKeys);
        if (rows.hidden)
            finite = is_finite(grad_out, count, width) && is_finite(View<T>{rows.query, rows.width}, count, rows.width);
        if (problem.form == Form::additive) AdditiveTables<T>{form}.fill(arena, prepared, rows.query, count);
    }
};

// One tile of keys and values with what the backward needs of it.
template <class T>
struct BackwardTile {
    KeyTile<T> keys;
    View<T> key_rows;  // times the scale where the form is an inner product
    T *key_copy, *value_copy, *value_turned;
    int64_t width, value_width;
    bool finite = true;  // keys and values

    BackwardTile(Arena& arena, const Problem& problem, const Additive<T>& form)
        : keys(arena, problem, form, true),
          width(padded(problem.dim, Vector<T>::lanes)),
          value_width(padded(problem.value_dim, Vector<T>::lanes)) {
        key_copy = arena.take<T>(kKeys * width);
        value_copy = arena.take<T>(kKeys * value_width);
        value_turned = arena.take<T>(kKeys * value_width);
    }

    // `hidden`: whether some pair may be hidden.
    void fill(const Problem& problem, const Additive<T>& form, const Head& head, int64_t key, int64_t here, bool hidden,
              const RowSizes<T>& sizes) {
        keys.fill(problem, form, head, key, here, true, sizes);
        key_rows = keys.rows;
        if (problem.form == Form::inner && problem.scale != 1) {
            const T scale = static_cast<T>(problem.scale);
            for (int64_t i = 0; i < here; i++)
                for (int64_t j = 0; j < width; j += Vector<T>::lanes)
                    store(key_copy + i * width + j, load(keys.rows.row(i) + j) * scale);
            key_rows = {key_copy, width};
        }
        const View<T> value = view_rows(value_copy, head.value, problem.value_dtype, key, here, problem.value_dim);
        transpose_tile(value_turned, value, value_width, here);
        finite = !hidden || (is_finite(value, here, value_width) && is_finite(keys.rows, here, width));
    }
};

// Weights and score gradients of the strips of a block that see a tile. Gives the strips [first, last) among which all
// that see it are; the others between them hold zeros.
template <class T>
struct TileGradients {
    const Problem& problem;
    Scores<T> scores;
    Dropout dropout;
    T* line;  // of the gradient of the matrix
    Span strips;
    bool of_final_scores = false;  // before the caps are gone back through: what a bias gets
    double grad_scale = 0;         // of the head's own, from all tiles so far
    bool careful = false;          // a hidden pair beside NaN or infinity: products must not touch it

    TileGradients(Arena& arena, const Problem& p)
        : problem(p), scores(arena, p, true), dropout(p), line(arena.take<T>(kKeys)) {}

    void operator()(BackwardBlock<T>& block, const BackwardTile<T>& tile) {
        const Block<T>& rows = block.rows;
        const int64_t key = tile.keys.first, here = tile.keys.count;
        strips = {rows.strips(), 0};
        careful = false;
        for (int64_t s = 0; s < rows.strips(); s++)
            if (!rows.misses(s, key, here)) strips = {std::min(strips.first, s), s + 1};
        if (dropout.on) dropout.at(key);
        for (int64_t s = strips.first, end; s < strips.last; s = end) {
            const bool missed = rows.misses(s, key, here);
            end = s + 1;
            while (end < strips.last && end < s + kRun && rows.misses(end, key, here) == missed) end++;
            const int64_t first = s * kStrip, size = std::min(end * kStrip, rows.count) - first;
            if (missed) {
                std::fill_n(block.bits + first, size, 0);
                std::fill_n(block.p + first * kKeys, size * kKeys, T(0));
                std::fill_n(block.ds + first * kKeys, size * kKeys, T(0));
            } else {
                run(block, tile, {s, end}, first, size);
            }
        }
    }

   private:
    void run(BackwardBlock<T>& block, const BackwardTile<T>& tile, Span own, int64_t first, int64_t size) {
        constexpr int L = Vector<T>::lanes;
        const bool capped = !problem.caps.empty() && !of_final_scores;
        T *p = block.p + first * kKeys, *ds = block.ds + first * kKeys;
        const int64_t key = tile.keys.first, here = tile.keys.count;
        uint64_t* bits = block.bits + first;
        scores(p, bits, block.rows, block.prepared, own, tile.keys, nullptr, nullptr, !of_final_scores);
        // out = (p * keep) v
        product<T>(ds, kKeys, block.grad_out.row(first), block.grad_out.stride, 1, tile.value_turned, kKeys, size,
                   padded(here, L), problem.value_dim, false);
        for (int64_t i = 0; i < size; i++) {
            const Head& head = *block.rows.head[first + i];
            const int64_t row = block.rows.row[first + i];
            const T top = reinterpret_cast<const T*>(head.top)[row],
                    log_total = reinterpret_cast<const T*>(head.log_total)[row];
            const T shift = reinterpret_cast<const T*>(head.shift)[row];
            const uint64_t seen = bits[i], kept = dropout.on ? dropout.kept(block.rows.stream[first + i]) : kAll;
            careful = careful || (seen != kAll && !(block.finite && tile.finite));
            T *weights = p + i * kKeys, *grads = ds + i * kKeys;
            const bool tilted = head.grad_entropy != nullptr;
            const T grad_entropy = tilted ? reinterpret_cast<const T*>(head.grad_entropy)[row] : T(0);
            const T entropy = tilted ? reinterpret_cast<const T*>(head.entropy)[row] : T(0);
            const T* grad_matrix = nullptr;
            if (problem.matrix != PairMatrix::none) grad_matrix = grad_matrix_row(head, row, key, here);
            if (problem.matrix == PairMatrix::scores) {
                // The caller has the scores alone: no weight, no output.
                for (int j = 0; j < kVectors<T>; j++) {
                    store(weights + j * L, V<T>{});
                    store(grads + j * L,
                          choose_bits<T>(seen & lowest_bits(here), j, load(grad_matrix + j * L), V<T>{}));
                }
                continue;
            }
#pragma GCC unroll 8
            for (int j = 0; j < kVectors<T>; j++) {
                // p = exp(s - top - log total)
                const V<T> above = load(weights + j * L) - top;
                const V<T> weight = weight_of(above, log_total);
                V<T> pooling = weight, grad = load(grads + j * L);
                if (dropout.on) {
                    const T factor = static_cast<T>(dropout.factor);
                    grad = choose_bits<T>(kept, j, grad * factor, V<T>{});
                    pooling = choose_bits<T>(kept, j, weight * factor, V<T>{});
                }
                if (grad_matrix) grad += load(grad_matrix + j * L);
                grad = weight * (grad + shift);
                // H = -sum p log p
                if (tilted) {
                    const V<T> log_p = choose<T>(weight == T(0), V<T>{}, above - log_total);
                    grad -= weight * grad_entropy * (log_p + entropy);
                }
                if (seen != kAll) {
                    pooling = choose_bits<T>(seen, j, pooling, V<T>{});
                    grad = choose_bits<T>(seen, j, grad, V<T>{});
                }
                store(weights + j * L, pooling);
                store(grads + j * L, grad);
            }
        }
        if (capped) through_caps(ds, size);
        if (!of_final_scores && block.rows.head[first]->grad_scale) add_to_scale(ds, size);
    }

    // A row of the gradient of the matrix, for the keys of a tile and zeros behind them.
    const T* grad_matrix_row(const Head& head, int64_t row, int64_t key, int64_t here) const {
        const Matrix& m = head.grad_matrix;
        const T* from = reinterpret_cast<const T*>(m.data) + row * m.row_stride + key * m.col_stride;
        if (m.col_stride == 1 && here == kKeys) return from;
        for (int64_t j = 0; j < here; j++) line[j] = from[j * m.col_stride];
        std::fill_n(line + here, kKeys - here, T(0));
        return line;
    }

    // A power of 2 takes less, with an exponent that is rounded, as the scores that it is made of are; in double the
    // digits count: gradients of saturated rows are nothing but such weights.
    static V<T> weight_of(V<T> above, T log_total) {
        if constexpr (sizeof(T) == 4)
            return power_of<T>(above * kLog2E<T> - log_total * kLog2E<T>);
        else
            return exp_of<T>(above - log_total);
    }

    // s = -scale * squared distance, before the caps
    void add_to_scale(const T* ds, int64_t size) {
        V<T> sum{};
        for (int64_t j = 0; j < size * kKeys; j += Vector<T>::lanes) {
            const V<T> grad = load(ds + j);
            sum += choose<T>(grad == T(0), V<T>{}, grad * load(scores.squares() + j));
        }
        grad_scale -= problem.scale * static_cast<double>(sum_of<T>(sum));
    }

    // From the gradient of the final scores to that of the scores before the caps: a slope may have overflowed where
    // the gradient is 0.
    void through_caps(T* ds, int64_t size) const {
        for (int64_t j = 0; j < size * kKeys; j += Vector<T>::lanes) {
            const V<T> grad = load(ds + j);
            store(ds + j, choose<T>(grad == T(0), V<T>{}, grad * load(scores.slopes() + j)));
        }
    }
};
