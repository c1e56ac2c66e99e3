// Backward: weights are computed again from each row's maximum and total. A task is a range of keys of one group
// against a range of its query rows; it owns every gradient that it adds to. With R ranges of both, step t pairs the
// keys r with the rows (r + t) mod R: nothing is shared within a step, every sum has one order, and no partial gradient
// is held.

template <class T>
void add_rows(T* to, int64_t cols, const T* from, int64_t width, int64_t count, T factor) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < cols; j++) to[i * cols + j] += factor * from[i * width + j];
}

// The sum of a row of a tile; hidden pairs hold zeros.
template <class T>
inline T row_sum(const T* x) {
    V<T> sum{};
    for (int64_t j = 0; j < kKeys; j += Vector<T>::lanes) sum += load(x + j);
    return sum_of<T>(sum);
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
    void add_to(const Problem& problem, const Head& head, const Group& group, int64_t key, int64_t here) const {
        T* grad_key = reinterpret_cast<T*>(group.grad_key) + key * problem.dim;
        add_rows(grad_key, problem.dim, dk, width, here,
                 problem.form == Form::distance ? T(-2) * scale_of<T>(problem, head) : T(1));
        add_rows(reinterpret_cast<T*>(group.grad_value) + key * problem.value_dim, problem.value_dim, dv, value_width,
                 here, T(1));
        if (group.grad_key_bias)
            for (int64_t j = 0; j < here; j++) reinterpret_cast<T*>(group.grad_key_bias)[key + j] += bias[j];
    }
};

// Gradients of additive scores of the rows [first, last) of a block, added to `dq`, `dk` and `dw`.
template <class T>
void additive_gradients(const Problem& problem, const Additive<T>& form, BackwardBlock<T>& block,
                        const BackwardTile<T>& tile, int64_t first, int64_t last, T* dk, T* dq, T* dw) {
    const Head& head = *block.rows.head[0];
    const int64_t width = tile.width;
    // Pairs of rows and keys that are not finite, in whose place zeros stand: each by itself.
    struct Pair {
        int64_t row, key;
        T ds;
    };
    std::vector<Pair> alone;
    for (int64_t i = first; i < last; i++)
        for (uint64_t left = block.bits[i] & (block.rows.bad && block.rows.bad[i] ? kAll : tile.keys.bad); left;
             left &= left - 1) {
            const int64_t j = __builtin_ctzll(left);
            if (T& ds = block.ds[i * kKeys + j]; ds != T(0)) alone.push_back({i, j, std::exchange(ds, T(0))});
        }
    AdditiveGradients<T>{form}(block.ds, kKeys, block.prepared, first, last, tile.keys.additive,
                               reinterpret_cast<const T*>(head.weights), dq - first * width, width, dk, width, dw);
    for (const Pair& pair : alone) {
        block.ds[pair.row * kKeys + pair.key] = pair.ds;
        form.add_gradients_of(problem, head, block.rows.row[pair.row], tile.keys.first + pair.key, pair.ds,
                              dq + (pair.row - first) * width, dk + pair.key * width, dw);
    }
}

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
    // Added to the caller's where its rows lie as ours do, and take no factor.
    const bool straight = problem.dim == width && problem.form != Form::distance;
    T* dq = straight ? grad_query : dq_scratch;
    if (!straight) std::fill_n(dq, count * width, T(0));
    if (problem.form == Form::additive) {
        // s = sum_h w_h activation(a_h + b_h)
        additive_gradients(problem, gradients.scores.additive(), block, tile, first, last, sums.dk, dq, dw);
    } else if (problem.form == Form::distance) {
        // s = -scale |q - k|^2
        if (careful) {
            seen_differences(dq, sums.dk, width, ds, bits, count, query, tile.keys.rows);
        } else {
            difference_product<T>(dq, width, ds, kKeys, 1, query, width, tile.keys.rows.data, tile.keys.rows.stride,
                                  count, width, here);
            difference_product<T>(sums.dk, width, ds, 1, kKeys, tile.keys.rows.data, tile.keys.rows.stride, query,
                                  width, here, width, count);
        }
    } else {
        // s = scale q . k, where the block's rows and the tile's hold the scale already
        const View<T> rows{query, width};
        if (careful) {
            seen_product(sums.dk, width, ds, bits, count, rows, width, true);
            seen_product(dq, width, ds, bits, count, tile.key_rows, width, false);
        } else {
            product<T>(sums.dk, width, ds, 1, kKeys, query, width, here, width, count, true);
            product<T>(dq, width, ds, kKeys, 1, tile.key_rows.data, tile.key_rows.stride, count, width, here, true);
        }
    }
    if (!straight)
        add_rows(grad_query, problem.dim, dq, width, count,
                 problem.form == Form::distance ? T(-2) * scale_of<T>(problem, head) : T(1));
    if (head.grad_query_bias)
        for (int64_t i = 0; i < count; i++)
            reinterpret_cast<T*>(head.grad_query_bias)[block.rows.row[first + i]] += row_sum(ds + i * kKeys);
    if (head.key_bias.data)
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < kKeys; j += L) store(sums.bias + j, load(sums.bias + j) + load(ds + i * kKeys + j));
}

// Rows of one head on their way over the tiles of keys that they see.
template <class T>
struct BackwardWalk {
    const Problem& problem;
    const Head& head;
    TileGradients<T> gradients;
    BackwardBlock<T> block;

    BackwardWalk(Arena& arena, const Problem& p, int64_t index, Span rows)
        : problem(p),
          head(p.heads[index]),
          gradients(arena, p),
          block(arena, p, gradients.scores.additive(), index, rows.first, rows.last - rows.first),
          own_tile_(arena, p, gradients.scores.additive()) {}

    // Calls f(tile) for each tile of `keys` whose weights and gradients now stand in the block.
    template <class F>
    void over(Span keys, const SharedTiles<BackwardTile<T>>& tiles, const F& f) {
        const Span seen = block.rows.keys(problem.key_len);
        const int64_t last = std::min(keys.last, seen.last);
        for (int64_t key = std::max(keys.first, seen.first); key < last; key += kKeys) {
            const int64_t here = std::min<int64_t>(kKeys, last - key);
            if (block.rows.skips(key, here)) continue;
            const BackwardTile<T>* tile = tiles.find(problem, head, key, here);
            if (!tile) {
                own_tile_.fill(problem, gradients.scores.additive(), head, key, here, block.rows.hidden,
                               {block.prepared.largest, block.prepared.largest});
                tile = &own_tile_;
            }
            gradients(block, *tile);
            if (gradients.strips.first < gradients.strips.last) f(*tile);
        }
    }

   private:
    BackwardTile<T> own_tile_;
};

// Rows of a walk: keys are turned once for so many.
constexpr int64_t kBackwardRows = 384;

template <class T>
void backward_range(const Problem& problem, const Group& group, Span keys, Span rows,
                    const SharedTiles<BackwardTile<T>>& tiles, T* dw) {
    for (size_t h = 0; h < group.heads.size(); h++)
        for (int64_t first = rows.first; first < rows.last; first += kBackwardRows) {
            Arena& arena = thread_arena();
            BackwardWalk<T> walk(arena, problem, group.heads[h], {first, std::min(first + kBackwardRows, rows.last)});
            KeyGradients<T> sums(arena, problem);
            T* dq = arena.take<T>(walk.block.rows.count * sums.width);
            walk.over(keys, tiles, [&](const BackwardTile<T>& tile) {
                sums.clear();
                gather_gradients(problem, walk.block, tile, walk.gradients, sums, dq, dw);
                sums.add_to(problem, walk.head, group, tile.keys.first, tile.keys.count);
            });
            if (walk.head.grad_scale) dw[h] += static_cast<T>(walk.gradients.grad_scale);
        }
}

// The gradient of a bias that heads share: rows of it against all keys, head after head. Along a broadcast axis it is a
// sum over all rows or all keys, whose terms cancel: added one after the other in float, 10^5 of them left 3 digits.
template <class T>
void backward_bias(const Problem& problem, const BiasGroup& group, Span rows,
                   const SharedTiles<BackwardTile<T>>& tiles) {
    constexpr int64_t size = 96;
    const bool tall = group.row_stride != 0, wide = group.col_stride != 0;
    T* to = reinterpret_cast<T*>(group.grad_bias);
    std::vector<double> sums(tall && wide ? 0 : (tall ? rows.last - rows.first : 1) * (wide ? problem.key_len : 1));
    for (const int64_t index : group.heads)
        for (int64_t first = rows.first; first < rows.last; first += size) {
            BackwardWalk<T> walk(thread_arena(), problem, index, {first, std::min(first + size, rows.last)});
            walk.gradients.of_final_scores = true;
            walk.over({0, problem.key_len}, tiles, [&](const BackwardTile<T>& tile) {
                const int64_t key = tile.keys.first, here = tile.keys.count;
                const Span strips = walk.gradients.strips;
                for (int64_t i = strips.first * kStrip; i < std::min(strips.last * kStrip, walk.block.rows.count);
                     i++) {
                    const int64_t row = walk.block.rows.row[i];
                    const T* ds = walk.block.ds + i * kKeys;
                    if (!wide)
                        sums[tall ? row - rows.first : 0] += static_cast<double>(row_sum(ds));
                    else if (!tall)
                        for (int64_t j = 0; j < here; j++) sums[key + j] += static_cast<double>(ds[j]);
                    else
                        for (int64_t j = 0; j < here; j++)
                            to[row * group.row_stride + (key + j) * group.col_stride] += ds[j];
                }
            });
        }
    for (size_t k = 0; k < sums.size(); k++) {
        const int64_t at = static_cast<int64_t>(k);
        to[tall ? (rows.first + at) * group.row_stride : at * group.col_stride] += static_cast<T>(sums[k]);
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
    // Each range of keys adds to gradients of its own where all rows and keys have a part: of the weights of a group,
    // of the scales of its heads.
    int64_t common = problem.form == Form::additive ? problem.dim : 0;
    for (const Group& group : problem.groups)
        if (problem.heads[group.heads[0]].grad_scale)
            common = std::max(common, static_cast<int64_t>(group.heads.size()));
    std::vector<T> sums(groups * ranges * common);
    const Additive<T> form(problem);
    SharedTiles<BackwardTile<T>> tiles;
    if (tiles.serve(problem, ranges))
        tiles = {problem, threads, [&](Arena& arena) { return BackwardTile<T>(arena, problem, form); },
                 [&](BackwardTile<T>& tile, const Head& head, int64_t key, int64_t here) {
                     tile.fill(problem, form, head, key, here, true, {});
                 }};
    const auto cut = [&](int64_t length, int64_t r, int64_t unit) {
        const int64_t units = (length + unit - 1) / unit;
        return Span{std::min(length, units * r / ranges * unit), std::min(length, units * (r + 1) / ranges * unit)};
    };
    for (int64_t step = 0; step < ranges; step++)
        for_each_task(groups * ranges, threads, [&](int64_t task) {
            const int64_t r = task % ranges;
            T* dw = sums.data() + task * common;
            backward_range<T>(problem, problem.groups[task / ranges], cut(problem.key_len, r, kKeys),
                              cut(problem.query_len, (r + step) % ranges, kStrip), tiles, dw);
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
        backward_as<double>(problem, threads);
    else
        backward_as<float>(problem, threads);
}
