// Backward: weights are computed again from each row's maximum and total. A task is a range of keys of one group
// against a range of its query rows; it owns every gradient that it adds to. With R ranges of both, step t pairs the
// keys r with the rows (r + t) mod R: nothing is shared within a step, every sum has one order, and no partial gradient
// is held.

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
        if (problem.form == Form::additive) form.prepare(prepared, rows.query, rows.width, count);
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

    BackwardTile(Arena& arena, const Problem& problem)
        : keys(arena, problem),
          width(padded(problem.dim, Vector<T>::lanes)),
          value_width(padded(problem.value_dim, Vector<T>::lanes)) {
        key_copy = arena.take<T>(kKeys * width);
        value_copy = arena.take<T>(kKeys * value_width);
        value_turned = arena.take<T>(kKeys * value_width);
    }

    void fill(const Problem& problem, const Additive<T>& form, const Head& head, int64_t key, int64_t here,
              bool hidden) {
        keys.fill(problem, form, head, key, here, true, hidden);
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
    Span strips;
    bool of_final_scores = false;  // before the caps are gone back through: what a bias gets
    bool careful = false;          // a hidden pair beside NaN or infinity: products must not touch it

    TileGradients(Arena& arena, const Problem& p) : problem(p), scores(arena, p), dropout(p) {}

    void operator()(BackwardBlock<T>& block, const BackwardTile<T>& tile) {
        const Block<T>& rows = block.rows;
        const int64_t key = tile.keys.first, here = tile.keys.count;
        strips = {rows.strips(), 0};
        careful = false;
        for (int64_t s = 0; s < rows.strips(); s++)
            if (!rows.misses(s, key, here)) strips = {std::min(strips.first, s), s + 1};
        if (dropout.on) dropout.at(key);
        for (int64_t s = strips.first; s < strips.last; s++) {
            const int64_t first = s * kStrip, size = rows.strip_size(s);
            if (rows.misses(s, key, here)) {
                std::fill_n(block.bits + first, size, 0);
                std::fill_n(block.p + first * kKeys, size * kKeys, T(0));
                std::fill_n(block.ds + first * kKeys, size * kKeys, T(0));
            } else {
                strip(block, tile, s, first, size);
            }
        }
    }

   private:
    void strip(BackwardBlock<T>& block, const BackwardTile<T>& tile, int64_t s, int64_t first, int64_t size) {
        constexpr int L = Vector<T>::lanes;
        const bool capped = !problem.caps.empty() && !of_final_scores;
        T *p = block.p + first * kKeys, *ds = block.ds + first * kKeys;
        const int64_t here = tile.keys.count;
        uint64_t* bits = block.bits + first;
        scores(p, bits, block.rows, block.prepared, s, tile.keys, nullptr, nullptr, capped);
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
#pragma GCC unroll 8
            for (int j = 0; j < kVectors<T>; j++) {
                // p = exp(s - top - log total)
                const V<T> log_p = load(weights + j * L) - top - log_total;
                V<T> weight = exp_of<T>(log_p), pooling = weight, grad = load(grads + j * L);
                if (dropout.on) {
                    const T factor = static_cast<T>(dropout.factor);
                    grad = choose_bits<T>(kept, j, grad * factor, V<T>{});
                    pooling = choose_bits<T>(kept, j, weight * factor, V<T>{});
                }
                grad = weight * (grad + shift);
                // H = -sum p log p
                if (tilted) grad -= weight * grad_entropy * (choose<T>(weight == T(0), V<T>{}, log_p) + entropy);
                if (seen != kAll) {
                    pooling = choose_bits<T>(seen, j, pooling, V<T>{});
                    grad = choose_bits<T>(seen, j, grad, V<T>{});
                }
                store(weights + j * L, pooling);
                store(grads + j * L, grad);
            }
        }
        if (capped) through_caps(ds, size);
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

template <class T>
void add_rows(T* to, int64_t cols, const T* from, int64_t width, int64_t count, T factor) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < cols; j++) to[i * cols + j] += factor * from[i * width + j];
}

// c[j] += sum over rows i that see key j of a[i][j] * b[i] (by_keys), or c[i] += sum over seen keys j of a[i][j] *
// b[j].
template <class T>
void seen_product(T* c, int64_t ldc, const T* a, const uint64_t* bits, int64_t rows, const View<T>& b, int64_t width,
                  bool by_keys) {
    constexpr int L = Vector<T>::lanes;
    for (int64_t i = 0; i < rows; i++)
        for (uint64_t left = bits[i]; left; left &= left - 1) {
            const int j = __builtin_ctzll(left);
            const T x = a[i * kKeys + j];
            T* to = c + (by_keys ? j : i) * ldc;
            const T* from = b.row(by_keys ? i : j);
            for (int64_t k = 0; k < width; k += L) store(to + k, load(to + k) + x * load(from + k));
        }
}

// The same for a distance: a[i][j] (q[i] - k[j]).
template <class T>
void seen_differences(T* dq, T* dk, int64_t width, const T* a, const uint64_t* bits, int64_t rows, const T* query,
                      const View<T>& key) {
    constexpr int L = Vector<T>::lanes;
    for (int64_t i = 0; i < rows; i++)
        for (uint64_t left = bits[i]; left; left &= left - 1) {
            const int j = __builtin_ctzll(left);
            const T x = a[i * kKeys + j];
            for (int64_t k = 0; k < width; k += L) {
                const V<T> away = x * (load(query + i * width + k) - load(key.row(j) + k));
                store(dq + i * width + k, load(dq + i * width + k) + away);
                store(dk + j * width + k, load(dk + j * width + k) - away);
            }
        }
}

// Gradients of one tile of keys, until they are added to the caller's.
template <class T>
struct KeyGradients {
    T *dk, *dv, *bias;
    int64_t width, value_width;

    KeyGradients(Arena& arena, const Problem& problem)
        : width(padded(problem.dim, Vector<T>::lanes)), value_width(padded(problem.value_dim, Vector<T>::lanes)) {
        dk = arena.take<T>(kKeys * width);
        dv = arena.take<T>(kKeys * value_width);
        bias = arena.take<T>(kKeys);
    }
    void clear() {
        std::fill_n(dk, kKeys * width, T(0));
        std::fill_n(dv, kKeys * value_width, T(0));
        std::fill_n(bias, kKeys, T(0));
    }
    void add_to(const Problem& problem, const Group& group, int64_t key, int64_t here) const {
        T* grad_key = reinterpret_cast<T*>(group.grad_key) + key * problem.dim;
        add_rows(grad_key, problem.dim, dk, width, here,
                 static_cast<T>(problem.form == Form::distance ? -2 * problem.scale : 1));
        add_rows(reinterpret_cast<T*>(group.grad_value) + key * problem.value_dim, problem.value_dim, dv, value_width,
                 here, T(1));
        if (group.grad_key_bias)
            for (int64_t j = 0; j < here; j++) reinterpret_cast<T*>(group.grad_key_bias)[key + j] += bias[j];
    }
};

// What a tile's weights and score gradients are for the arrays behind them.
template <class T>
void gather_gradients(const Problem& problem, BackwardBlock<T>& block, const BackwardTile<T>& tile,
                      TileGradients<T>& gradients, KeyGradients<T>& sums, T* dq_scratch, T* dw) {
    constexpr int L = Vector<T>::lanes;
    const Head& head = *block.rows.head[0];
    const int64_t first = gradients.strips.first * kStrip,
                  last = std::min(gradients.strips.last * kStrip, block.rows.count);
    const int64_t count = last - first, here = tile.keys.count, width = tile.width;
    const T *p = block.p + first * kKeys, *query = block.rows.query + first * width;
    T* ds = block.ds + first * kKeys;
    const uint64_t* bits = block.bits + first;
    const View<T> grad_out{block.grad_out.row(first), block.grad_out.stride};
    const bool careful = gradients.careful;
    // out = p v
    if (careful)
        seen_product(sums.dv, sums.value_width, p, bits, count, grad_out, sums.value_width, true);
    else
        product<T>(sums.dv, sums.value_width, p, 1, kKeys, grad_out.data, grad_out.stride, here, sums.value_width,
                   count, true);

    T* grad_query = reinterpret_cast<T*>(head.grad_query) + block.rows.row[first] * problem.dim;
    if (problem.form == Form::additive) {
        // s = sum_h w_h activation(a_h + b_h)
        std::fill_n(dq_scratch, count * width, T(0));
        gradients.scores.additive().gradients(block.ds, kKeys, block.prepared, first, last, tile.keys.additive,
                                              reinterpret_cast<const T*>(head.weights), dq_scratch - first * width,
                                              width, sums.dk, width, dw);
        add_rows(grad_query, problem.dim, dq_scratch, width, count, T(1));
    } else if (problem.form == Form::distance) {
        // s = -scale |q - k|^2
        std::fill_n(dq_scratch, count * width, T(0));
        if (careful) {
            seen_differences(dq_scratch, sums.dk, width, ds, bits, count, query, tile.keys.rows);
        } else {
            difference_product<T>(dq_scratch, width, ds, kKeys, 1, query, width, tile.keys.rows.data,
                                  tile.keys.rows.stride, count, width, here);
            difference_product<T>(sums.dk, width, ds, 1, kKeys, tile.keys.rows.data, tile.keys.rows.stride, query,
                                  width, here, width, count);
        }
        add_rows(grad_query, problem.dim, dq_scratch, width, count, static_cast<T>(-2 * problem.scale));
    } else {
        // s = scale q . k, where the block's rows and the tile's hold the scale already
        const View<T> rows{query, width};
        if (careful)
            seen_product(sums.dk, width, ds, bits, count, rows, width, true);
        else
            product<T>(sums.dk, width, ds, 1, kKeys, query, width, here, width, count, true);
        const bool straight = problem.dim == width;
        T* dq = straight ? grad_query : dq_scratch;
        if (!straight) std::fill_n(dq, count * width, T(0));
        if (careful)
            seen_product(dq, width, ds, bits, count, tile.key_rows, width, false);
        else
            product<T>(dq, width, ds, kKeys, 1, tile.key_rows.data, tile.key_rows.stride, count, width, here, true);
        if (!straight) add_rows(grad_query, problem.dim, dq, width, count, T(1));
    }
    if (head.grad_query_bias)
        for (int64_t i = 0; i < count; i++) {
            V<T> sum{};
            for (int64_t j = 0; j < kKeys; j += L) sum += load(ds + i * kKeys + j);
            reinterpret_cast<T*>(head.grad_query_bias)[block.rows.row[first + i]] += sum_of<T>(sum);
        }
    if (head.key_bias.data)
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < kKeys; j += L) store(sums.bias + j, load(sums.bias + j) + load(ds + i * kKeys + j));
}

// Rows of a block: keys are turned once for so many.
constexpr int64_t kBackwardRows = 384;

template <class T>
void backward_range(const Problem& problem, const Group& group, Span keys, Span rows, T* dw) {
    for (const int64_t index : group.heads) {
        const Head& head = problem.heads[index];
        for (int64_t first = rows.first; first < rows.last; first += kBackwardRows) {
            Arena& arena = thread_arena();
            TileGradients<T> gradients(arena, problem);
            BackwardBlock<T> block(arena, problem, gradients.scores.additive(), index, first,
                                   std::min(kBackwardRows, rows.last - first));
            const Span seen = block.rows.keys(problem.key_len);
            const Span range{std::max(keys.first, seen.first), std::min(keys.last, seen.last)};
            BackwardTile<T> tile(arena, problem);
            KeyGradients<T> sums(arena, problem);
            T* dq = arena.take<T>(block.rows.count * tile.width);
            for (int64_t key = range.first; key < range.last; key += kKeys) {
                const int64_t here = std::min<int64_t>(kKeys, range.last - key);
                tile.fill(problem, gradients.scores.additive(), head, key, here, block.rows.hidden);
                gradients(block, tile);
                if (gradients.strips.first >= gradients.strips.last) continue;
                sums.clear();
                gather_gradients(problem, block, tile, gradients, sums, dq, dw);
                sums.add_to(problem, group, key, here);
            }
        }
    }
}

// The gradient of a bias that heads share: rows of it against all keys, head after head.
template <class T>
void backward_bias(const Problem& problem, const BiasGroup& group, Span rows) {
    constexpr int64_t size = 96;
    for (const int64_t index : group.heads) {
        const Head& head = problem.heads[index];
        for (int64_t first = rows.first; first < rows.last; first += size) {
            Arena& arena = thread_arena();
            TileGradients<T> gradients(arena, problem);
            BackwardBlock<T> block(arena, problem, gradients.scores.additive(), index, first,
                                   std::min(size, rows.last - first));
            const Span seen = block.rows.keys(problem.key_len);
            BackwardTile<T> tile(arena, problem);
            gradients.of_final_scores = true;
            for (int64_t key = seen.first; key < seen.last; key += kKeys) {
                const int64_t here = std::min<int64_t>(kKeys, seen.last - key);
                tile.fill(problem, gradients.scores.additive(), head, key, here, block.rows.hidden);
                gradients(block, tile);
                T* to = reinterpret_cast<T*>(group.grad_bias);
                for (int64_t i = gradients.strips.first * kStrip;
                     i < std::min(gradients.strips.last * kStrip, block.rows.count); i++)
                    for (int64_t j = 0; j < here; j++)
                        to[block.rows.row[i] * group.row_stride + (key + j) * group.col_stride] +=
                            block.ds[i * kKeys + j];
            }
        }
    }
}

template <class T>
void backward_as(const Problem& problem, int threads) {
    constexpr int64_t enough = 16;  // tasks to share among threads
    const int64_t groups = static_cast<int64_t>(problem.groups.size());
    if (groups == 0) return;
    const int64_t wanted = (enough + groups - 1) / groups,
                  possible = std::min(problem.query_len, problem.key_len) / 128;
    const int64_t ranges = std::max<int64_t>(1, std::min(wanted, possible));
    threads = worth(problem, threads);
    // Each range of keys adds to a gradient of the weights of its own.
    std::vector<T> weights(problem.form == Form::additive ? groups * ranges * problem.dim : 0);
    const auto cut = [&](int64_t length, int64_t r, int64_t unit) {
        const int64_t units = (length + unit - 1) / unit;
        return Span{std::min(length, units * r / ranges * unit), std::min(length, units * (r + 1) / ranges * unit)};
    };
    for (int64_t step = 0; step < ranges; step++)
        for_each_task(groups * ranges, threads, [&](int64_t task) {
            const int64_t r = task % ranges;
            T* dw = weights.empty() ? nullptr : weights.data() + task * problem.dim;
            backward_range<T>(problem, problem.groups[task / ranges], cut(problem.key_len, r, kKeys),
                              cut(problem.query_len, (r + step) % ranges, kStrip), dw);
        });
    if (!weights.empty())
        for (int64_t g = 0; g < groups; g++)
            for (int64_t r = 0; r < ranges; r++)
                for (int64_t p = 0; p < problem.dim; p++)
                    reinterpret_cast<T*>(problem.groups[g].grad_weights)[p] +=
                        weights[(g * ranges + r) * problem.dim + p];
    // Rows of a bias are tasks, unless they share one gradient.
    struct BiasTask {
        const BiasGroup* group;
        Span rows;
    };
    std::vector<BiasTask> tasks;
    for (const BiasGroup& group : problem.bias_groups) {
        const int64_t size = group.row_stride ? 96 : problem.query_len;
        for (int64_t first = 0; first < problem.query_len; first += size)
            tasks.push_back({&group, {first, std::min(problem.query_len, first + size)}});
    }
    for_each_task(static_cast<int64_t>(tasks.size()), threads,
                  [&](int64_t i) { backward_bias<T>(problem, *tasks[i].group, tasks[i].rows); });
}

void backward(const Problem& problem, int threads) {
    if (problem.query_len == 0 || problem.key_len == 0) return;
    if (problem.value_dtype == Dtype::f64)
        backward_as<double>(problem, threads);
    else
        backward_as<float>(problem, threads);
}
