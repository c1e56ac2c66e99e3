// Backward: weights are computed again from each row's maximum and total. A task is a range of keys of one group
// against a range of its query rows; it owns every gradient that it adds to. With R ranges of both, step t pairs the
// keys r with the rows (r + t) mod R: nothing is shared within a step, every sum has one order, and no partial gradient
// is held.

template <class T>
void add_rows(T* to, int64_t cols, const T* from, int64_t width, int64_t count, T factor) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < cols; j++) to[i * cols + j] += factor * from[i * width + j];
}

// The sum of a row of a tile; masked pairs hold zeros.
template <class T>
inline T row_sum(const T* x) {
    V<T> sum{};
    for (int64_t j = 0; j < kTileKeys; j += Vector<T>::lanes) sum += load(x + j);
    return reduce_sum<T>(sum);
}

// c[j] += sum for_each_tile rows i that see key j of a[i][j] * b[i] (by_keys), or c[i] += sum for_each_tile unmasked
// keys j of a[i][j] * b[j].
template <class T>
void unmasked_product(T* c, int64_t ldc, const T* a, const uint64_t* bits, int64_t rows, const View<T>& b,
                      int64_t width, bool by_keys) {
    constexpr int L = Vector<T>::lanes;
    for (int64_t i = 0; i < rows; i++)
        for (uint64_t left = bits[i]; left; left &= left - 1) {
            const int j = __builtin_ctzll(left);
            const T x = a[i * kTileKeys + j];
            T* to = c + (by_keys ? j : i) * ldc;
            const T* from = b.row(by_keys ? i : j);
            for (int64_t k = 0; k < width; k += L) store(to + k, load(to + k) + x * load(from + k));
        }
}

// The same for a distance: a[i][j] (q[i] - k[j]).
template <class T>
void unmasked_differences(T* dq, T* dk, int64_t width, const T* a, const uint64_t* bits, int64_t rows, const T* query,
                          const View<T>& key) {
    constexpr int L = Vector<T>::lanes;
    for (int64_t i = 0; i < rows; i++)
        for (uint64_t left = bits[i]; left; left &= left - 1) {
            const int j = __builtin_ctzll(left);
            const T x = a[i * kTileKeys + j];
            for (int64_t k = 0; k < width; k += L) {
                const V<T> difference = x * (load(query + i * width + k) - load(key.row(j) + k));
                store(dq + i * width + k, load(dq + i * width + k) + difference);
                store(dk + j * width + k, load(dk + j * width + k) - difference);
            }
        }
}

// Gradients of one tile of keys, until they are added to the caller's.
template <class T>
struct KeyTileGradients {
    T *dk, *dv, *bias;
    int64_t width, value_width;

    KeyTileGradients(Arena& arena, const Problem& problem)
        : width(padded(problem.dim, Vector<T>::lanes)), value_width(padded(problem.value_dim, Vector<T>::lanes)) {
        dk = arena.take<T>(kTileKeys * width);
        dv = arena.take<T>(kTileKeys * value_width);
        bias = arena.take<T>(kTileKeys);
    }
    void clear() {
        std::fill_n(dk, kTileKeys * width, T(0));
        std::fill_n(dv, kTileKeys * value_width, T(0));
        std::fill_n(bias, kTileKeys, T(0));
    }
    void add_to(const Problem& problem, const Head& head, const Group& group, int64_t key, int64_t key_count) const {
        T* grad_key = reinterpret_cast<T*>(group.grad_key) + key * problem.dim;
        add_rows(grad_key, problem.dim, dk, width, key_count,
                 problem.form == Form::distance ? T(-2) * scale_of<T>(problem, head) : T(1));
        add_rows(reinterpret_cast<T*>(group.grad_value) + key * problem.value_dim, problem.value_dim, dv, value_width,
                 key_count, T(1));
        if (group.grad_key_bias)
            for (int64_t j = 0; j < key_count; j++) reinterpret_cast<T*>(group.grad_key_bias)[key + j] += bias[j];
    }
};

// Gradients of additive scores of the rows [first, last) of a queries, added to `dq`, `dk` and `dw`.
template <class T>
void additive_gradients(const Problem& problem, const Additive<T>& form, BackwardQueryTile<T>& queries,
                        const BackwardKeyTile<T>& tile, int64_t first, int64_t last, T* dk, T* dq, T* dw) {
    const Head& head = *queries.rows.head[0];
    const int64_t width = tile.width;
    // Bf16Dot of rows and keys that are not finite, in whose place zeros stand: each by itself.
    struct NonfinitePair {
        int64_t row, key;
        T ds;
    };
    std::vector<NonfinitePair> alone;
    for (int64_t i = first; i < last; i++)
        for (uint64_t left =
                 queries.bits[i] & (queries.rows.nonfinite && queries.rows.nonfinite[i] ? kAll : tile.keys.nonfinite);
             left; left &= left - 1) {
            const int64_t j = __builtin_ctzll(left);
            if (T& ds = queries.ds[i * kTileKeys + j]; ds != T(0)) alone.push_back({i, j, std::exchange(ds, T(0))});
        }
    AdditiveGradients<T>{form}(queries.ds, kTileKeys, queries.additive_query, first, last, tile.keys.additive,
                               reinterpret_cast<const T*>(head.weights), dq - first * width, width, dk, width, dw);
    for (const NonfinitePair& pair : alone) {
        queries.ds[pair.row * kTileKeys + pair.key] = pair.ds;
        form.add_pair_gradients(problem, head, queries.rows.row[pair.row], tile.keys.first + pair.key, pair.ds,
                                dq + (pair.row - first) * width, dk + pair.key * width, dw);
    }
}

// What a tile's weights and score gradients are for the arrays behind them.
template <class T>
void accumulate_gradients(const Problem& problem, BackwardQueryTile<T>& queries, const BackwardKeyTile<T>& tile,
                          ScoreGradients<T>& gradients, KeyTileGradients<T>& sums, T* dq_scratch, T* dw) {
    constexpr int L = Vector<T>::lanes;
    const Head& head = *queries.rows.head[0];
    const int64_t first = gradients.panels.first * kMR,
                  last = std::min(gradients.panels.last * kMR, queries.rows.count);
    const int64_t count = last - first, key_count = tile.keys.count, width = tile.width;
    const T *p = queries.p + first * kTileKeys, *query = queries.rows.query + first * width;
    T* ds = queries.ds + first * kTileKeys;
    const uint64_t* bits = queries.bits + first;
    const View<T> grad_out{queries.grad_out.row(first), queries.grad_out.stride};
    const bool skip_masked = gradients.skip_masked;
    // out = p v
    if (skip_masked)
        unmasked_product(sums.dv, sums.value_width, p, bits, count, grad_out, sums.value_width, true);
    else
        gemm<T>(sums.dv, sums.value_width, p, 1, kTileKeys, grad_out.data, grad_out.stride, key_count, sums.value_width,
                count, true);

    T* grad_query = reinterpret_cast<T*>(head.grad_query) + queries.rows.row[first] * problem.dim;
    // Added to the caller's where its rows lie as ours do, and take no factor.
    const bool in_place = problem.dim == width && problem.form != Form::distance;
    T* dq = in_place ? grad_query : dq_scratch;
    if (!in_place) std::fill_n(dq, count * width, T(0));
    if (problem.form == Form::additive) {
        // s = sum_h w_h activation(a_h + b_h)
        additive_gradients(problem, gradients.scores.additive(), queries, tile, first, last, sums.dk, dq, dw);
    } else if (problem.form == Form::distance) {
        // s = -scale |q - k|^2
        if (skip_masked) {
            unmasked_differences(dq, sums.dk, width, ds, bits, count, query, tile.keys.rows);
        } else {
            gemm_difference<T>(dq, width, ds, kTileKeys, 1, query, width, tile.keys.rows.data, tile.keys.rows.stride,
                               count, width, key_count);
            gemm_difference<T>(sums.dk, width, ds, 1, kTileKeys, tile.keys.rows.data, tile.keys.rows.stride, query,
                               width, key_count, width, count);
        }
    } else {
        // s = scale q . k, where the queries's rows and the tile's hold the scale already
        const View<T> rows{query, width};
        if (skip_masked) {
            unmasked_product(sums.dk, width, ds, bits, count, rows, width, true);
            unmasked_product(dq, width, ds, bits, count, tile.key_rows, width, false);
        } else {
            gemm<T>(sums.dk, width, ds, 1, kTileKeys, query, width, key_count, width, count, true);
            gemm<T>(dq, width, ds, kTileKeys, 1, tile.key_rows.data, tile.key_rows.stride, count, width, key_count,
                    true);
        }
    }
    if (!in_place)
        add_rows(grad_query, problem.dim, dq, width, count,
                 problem.form == Form::distance ? T(-2) * scale_of<T>(problem, head) : T(1));
    if (head.grad_query_bias)
        for (int64_t i = 0; i < count; i++)
            reinterpret_cast<T*>(head.grad_query_bias)[queries.rows.row[first + i]] += row_sum(ds + i * kTileKeys);
    if (head.key_bias.data)
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < kTileKeys; j += L)
                store(sums.bias + j, load(sums.bias + j) + load(ds + i * kTileKeys + j));
}

// Rows of one head on their way for_each_tile the tiles of keys that they see.
template <class T>
struct KeyTileLoop {
    const Problem& problem;
    const Head& head;
    ScoreGradients<T> gradients;
    BackwardQueryTile<T> queries;

    KeyTileLoop(Arena& arena, const Problem& p, int64_t index, Span rows)
        : problem(p),
          head(p.heads[index]),
          gradients(arena, p),
          queries(arena, p, gradients.scores.additive(), index, rows.first, rows.last - rows.first),
          own_tile_(arena, p, gradients.scores.additive()) {}

    // Calls f(tile) for each tile of `keys` whose weights and gradients now stand in the queries.
    template <class F>
    void for_each_tile(Span keys, const SharedTiles<BackwardKeyTile<T>>& tiles, const F& f) {
        const Span unmasked = queries.rows.keys(problem.key_len);
        const int64_t last = std::min(keys.last, unmasked.last);
        for (int64_t key = std::max(keys.first, unmasked.first); key < last; key += kTileKeys) {
            const int64_t key_count = std::min<int64_t>(kTileKeys, last - key);
            if (queries.rows.is_in_hole(key, key_count)) continue;
            const BackwardKeyTile<T>* tile = tiles.find(problem, head, key, key_count);
            if (!tile) {
                own_tile_.fill(problem, gradients.scores.additive(), head, key, key_count, queries.rows.masked,
                               {queries.additive_query.largest, queries.additive_query.largest});
                tile = &own_tile_;
            }
            gradients(queries, *tile);
            if (gradients.panels.first < gradients.panels.last) f(*tile);
        }
    }

   private:
    BackwardKeyTile<T> own_tile_;
};

// Rows of a loop: keys are turned once for so many.
constexpr int64_t kBackwardRows = 384;

template <class T>
void backward_range(const Problem& problem, const Group& group, Span keys, Span rows,
                    const SharedTiles<BackwardKeyTile<T>>& tiles, T* dw) {
    for (size_t h = 0; h < group.heads.size(); h++)
        for (int64_t first = rows.first; first < rows.last; first += kBackwardRows) {
            Arena& arena = thread_arena();
            KeyTileLoop<T> loop(arena, problem, group.heads[h], {first, std::min(first + kBackwardRows, rows.last)});
            KeyTileGradients<T> sums(arena, problem);
            T* dq = arena.take<T>(loop.queries.rows.count * sums.width);
            loop.for_each_tile(keys, tiles, [&](const BackwardKeyTile<T>& tile) {
                sums.clear();
                accumulate_gradients(problem, loop.queries, tile, loop.gradients, sums, dq, dw);
                sums.add_to(problem, loop.head, group, tile.keys.first, tile.keys.count);
            });
            if (loop.head.grad_scale) dw[h] += static_cast<T>(loop.gradients.grad_scale);
        }
}

// The gradient of a bias that heads share: rows of it against all keys, head after head. Along a broadcast axis it is a
// sum for_each_tile all rows or all keys, whose terms cancel: added one after the other in float, 10^5 of them left 3
// digits.
template <class T>
void backward_bias(const Problem& problem, const BiasGroup& group, Span rows,
                   const SharedTiles<BackwardKeyTile<T>>& tiles) {
    constexpr int64_t size = 96;
    const bool has_rows = group.row_stride != 0, has_cols = group.col_stride != 0;
    T* to = reinterpret_cast<T*>(group.grad_bias);
    std::vector<double> sums(
        has_rows && has_cols ? 0 : (has_rows ? rows.last - rows.first : 1) * (has_cols ? problem.key_len : 1));
    for (const int64_t index : group.heads)
        for (int64_t first = rows.first; first < rows.last; first += size) {
            KeyTileLoop<T> loop(thread_arena(), problem, index, {first, std::min(first + size, rows.last)});
            loop.gradients.for_bias = true;
            loop.for_each_tile({0, problem.key_len}, tiles, [&](const BackwardKeyTile<T>& tile) {
                const int64_t key = tile.keys.first, key_count = tile.keys.count;
                const Span panels = loop.gradients.panels;
                for (int64_t i = panels.first * kMR; i < std::min(panels.last * kMR, loop.queries.rows.count); i++) {
                    const int64_t row = loop.queries.rows.row[i];
                    const T* ds = loop.queries.ds + i * kTileKeys;
                    if (!has_cols)
                        sums[has_rows ? row - rows.first : 0] += static_cast<double>(row_sum(ds));
                    else if (!has_rows)
                        for (int64_t j = 0; j < key_count; j++) sums[key + j] += static_cast<double>(ds[j]);
                    else
                        for (int64_t j = 0; j < key_count; j++)
                            to[row * group.row_stride + (key + j) * group.col_stride] += ds[j];
                }
            });
        }
    for (size_t k = 0; k < sums.size(); k++) {
        const int64_t at = static_cast<int64_t>(k);
        to[has_rows ? (rows.first + at) * group.row_stride : at * group.col_stride] += static_cast<T>(sums[k]);
    }
}

template <class T>
void backward_typed(const Problem& problem, int threads) {
    constexpr int64_t kMinTasks = 16;  // tasks to share among threads
    const int64_t groups = static_cast<int64_t>(problem.groups.size());
    if (groups == 0) return;
    const int64_t wanted = (kMinTasks + groups - 1) / groups,
                  possible = std::min(problem.query_len, problem.key_len) / 128;
    const int64_t ranges = std::max<int64_t>(1, std::min(wanted, possible));
    threads = clamp_threads(problem, threads);
    // Each range of keys adds to gradients of its own where all rows and keys have a part: of the weights of a group,
    // of the scales of its heads.
    int64_t common = problem.form == Form::additive ? problem.dim : 0;
    for (const Group& group : problem.groups)
        if (problem.heads[group.heads[0]].grad_scale)
            common = std::max(common, static_cast<int64_t>(group.heads.size()));
    std::vector<T> sums(groups * ranges * common);
    const Additive<T> form(problem);
    SharedTiles<BackwardKeyTile<T>> tiles;
    if (tiles.is_profitable(problem, ranges))
        tiles = {problem, threads, [&](Arena& arena) { return BackwardKeyTile<T>(arena, problem, form); },
                 [&](BackwardKeyTile<T>& tile, const Head& head, int64_t key, int64_t key_count) {
                     tile.fill(problem, form, head, key, key_count, true, {});
                 }};
    const auto cut = [&](int64_t length, int64_t r, int64_t unit) {
        const int64_t units = (length + unit - 1) / unit;
        return Span{std::min(length, units * r / ranges * unit), std::min(length, units * (r + 1) / ranges * unit)};
    };
    for (int64_t step = 0; step < ranges; step++)
        for_each_task(groups * ranges, threads, [&](int64_t task) {
            const int64_t r = task % ranges;
            T* dw = sums.data() + task * common;
            backward_range<T>(problem, problem.groups[task / ranges], cut(problem.key_len, r, kTileKeys),
                              cut(problem.query_len, (r + step) % ranges, kMR), tiles, dw);
        });
    for (int64_t task = 0; common && task < groups * ranges; task++) {
        const Group& group = problem.groups[task / ranges];
        const T* found = sums.data() + task * common;
        if (problem.form == Form::additive)
            for (int64_t p = 0; p < problem.dim; p++) reinterpret_cast<T*>(group.grad_weights)[p] += found[p];
        else
            for (const int64_t head : group.heads) *reinterpret_cast<T*>(problem.heads[head].grad_scale) += *found++;
    }
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
                  [&](int64_t i) { backward_bias<T>(problem, *tasks[i].group, tasks[i].rows, tiles); });
}

void backward(const Problem& problem, int threads) {
    if (problem.query_len == 0 || problem.key_len == 0) return;
    if (problem.value_dtype == Dtype::f64)
        backward_typed<double>(problem, threads);
    else
        backward_typed<float>(problem, threads);
}
