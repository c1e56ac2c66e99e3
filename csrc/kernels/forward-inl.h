// Forward: a task is a queries of query rows against all keys that they see, or a range of them, tile by tile.

// Below this a tile of keys is not clamp_threads turning: its dot products are taken row by row.
constexpr int64_t kFewRows = 4;

template <class T>
void forward_tile(Arena& arena, const Problem& problem, const QueryTile<T>& queries, Span keys,
                  const SharedTiles<KeyTile<T>>& tiles, OnlineSoftmax<T>& softmax) {
    const Head& shared = *queries.head[0];
    Scores<T> scores(arena, problem, false);
    KeyTile<T> own_tile(arena, problem, scores.additive(), false);
    const KeyTile<T>* tile = nullptr;
    ValueTile<T> values(arena, problem, queries.masked, queries.panels() >= kStepPanels);
    Dropout dropout(problem);
    typename Additive<T>::Query additive_query;
    if (problem.form == Form::additive)
        AdditiveTables<T>{scores.additive()}.fill(arena, additive_query, queries.query, queries.count);
    // Scores, then weights, of two steps_ of panels. Those of one are pooled after the scores of the next and before
    // its weights: neighbouring steps do not wait for one another, and the processor, which looks hundreds of
    // instructions ahead, begins the one before the other ends.
    struct Step {
        T* s;
        int64_t first = 0, size = 0;
        uint64_t bits[kStepPanels * kMR];
    } steps_[2];
    for (Step& step : steps_) step.s = arena.take<T>(kStepPanels * kMR * kTileKeys);
    std::optional<Bf16Dot> bf16;
    if constexpr (kHasBf16Dot && sizeof(T) == 4)
        if (Bf16Dot::supports(problem) && queries.count > kFewRows) bf16.emplace(arena, problem, queries);
    const bool few_rows = problem.form == Form::inner && queries.count <= kFewRows;
    const T factor = static_cast<T>(dropout.factor);
    const int64_t together = few_rows ? 1 : kStepPanels;
    uint64_t keep[kStepPanels * kMR];
    // Keys and values of the next tile are next_prefetch for while this one is worked on, some with per_step step: they
    // come from the third-level cache, and the turning of the keys would wait for them (2% of a long pass on Zen 4). In
    // bfloat16 they are half as large, and additive scores take longer than any memory: there it is no gain.
    const int64_t steps = (queries.panels() + kStepPanels - 1) / kStepPanels;
    const bool prefetches = !few_rows && !bf16 && problem.form != Form::additive && steps >= 4;
    const int64_t per_step = prefetches ? (kTileKeys + steps - 1) / steps : 0;
    const auto add_pv = [&](const Step& step, int64_t key_count) {
        T* out = softmax.out + step.first * softmax.width;
        if (bf16 && !values.narrow()) {
            if constexpr (sizeof(T) == 4) bf16->pv(out, step.s, step.size, key_count);
        } else {
            const View<T> next{tile->rows.row(key_count), tile->rows.stride};
            values.add_pv(out, step.s, step.size, few_rows ? &next : nullptr);
        }
        if (values.nonfinite) values.propagate_nonfinite(out, step.s, step.bits, step.size);
    };
    for (int64_t key = keys.first; key < keys.last; key += kTileKeys) {
        const int64_t key_count = std::min<int64_t>(kTileKeys, keys.last - key);
        if (queries.is_in_hole(key, key_count)) continue;
        bool filled = false, waiting = false;
        int at = 0;
        int64_t next_prefetch = key + kTileKeys;
        for (int64_t panel = 0, end; panel < queries.panels(); panel = end) {
            end = panel + 1;
            if (queries.is_masked(panel, key, key_count)) continue;
            while (end < queries.panels() && end < panel + together && !queries.is_masked(end, key, key_count)) end++;
            if (!filled) {
                tile = tiles.find(problem, shared, key, key_count);
                if (!tile) {
                    own_tile.fill(problem, scores.additive(), shared, key, key_count, !few_rows && !bf16,
                                  {additive_query.largest, additive_query.largest});
                    tile = &own_tile;
                }
                values.fill(shared, key, key_count);
                if constexpr (sizeof(T) == 4)
                    if (bf16) bf16->fill(shared, key, key_count, values.clean);
                if (dropout.on) dropout.set_tile(key);
                filled = true;
            }
            for (const int64_t until = next_prefetch + per_step; next_prefetch < until; next_prefetch++) {
                prefetch_row(shared.key, problem.score_dtype, next_prefetch, keys.last, problem.dim);
                prefetch_row(shared.value, problem.value_dtype, next_prefetch, keys.last, problem.value_dim);
            }
            Step& own = steps_[at];
            own.first = panel * kMR, own.size = std::min(end * kMR, queries.count) - own.first;
            scores(own.s, own.bits, queries, additive_query, {panel, end}, *tile, few_rows ? &values.rows : nullptr,
                   bf16 ? &*bf16 : nullptr, false);
            if (problem.matrix != MatrixOutput::none)
                store_scores(problem, queries, own.first, own.size, own.s, key, key_count);
            // Nothing but the scores is wanted.
            if (problem.matrix == MatrixOutput::scores) continue;
            if (waiting) add_pv(steps_[1 - at], key_count);
            if (dropout.on)
                for (int64_t i = 0; i < own.size; i++) keep[i] = dropout.keep_bits(queries.stream[own.first + i]);
            softmax.update(own.first, own.size, own.s, own.bits, key_count, dropout.on ? keep : nullptr, factor);
            waiting = true, at = 1 - at;
        }
        if (waiting) add_pv(steps_[1 - at], key_count);
    }
    values.reduce_lanes(softmax.out, queries.count);
}

template <class T>
void store_row(const Problem& problem, const Head& head, int64_t row, const RowState<T>& state, T* out) {
    if (problem.matrix != MatrixOutput::none) finish_matrix_row(problem, head, row, state);
    T* row_stats = reinterpret_cast<T*>(head.row_stats) + row * kRowStats;
    row_stats[0] = state.max;
    row_stats[1] = state.denom;
    if (problem.full_statistics) {
        row_stats[2] = state.sum_exp_logit;
        row_stats[3] = state.squares;
        row_stats[4] = state.count;
        row_stats[5] = state.base + state.mean;
        row_stats[6] = state.deviation;
    }
    const T scale = state.denom == 0 ? T(1) : state.out_scale / state.denom;
    const int64_t size = attnscore::size_of(problem.value_dtype), width = problem.value_dim;
    char* to = head.out + row * width * size;
    if (row + kPrefetchRows < problem.query_len) prefetch<1>(to + kPrefetchRows * width * size, width * size);
    if (problem.value_dtype == dtype_of<T>()) {
        for (int64_t j = 0; j < width; j++) reinterpret_cast<T*>(to)[j] = out[j] * scale;
    } else if constexpr (sizeof(T) == 4) {
        for (int64_t j = 0; j < width; j++) out[j] *= scale;
        narrow_row(reinterpret_cast<uint16_t*>(to), out, problem.value_dtype, width);
    }
}

// The rows of a group, cut into blocks, and per_step queries's keys into ranges: fixed by the shape alone, so that no
// result depends on the number of threads.
struct ForwardTasks {
    struct Unit {
        const std::vector<int64_t>* heads;
        int64_t first, count;
    };
    std::vector<Unit> units;
    std::vector<std::vector<int64_t>> single;  // heads taken alone
    int64_t ranges = 1;

    explicit ForwardTasks(const Problem& problem) {
        constexpr int64_t kMinTasks = 16;  // tasks to share among threads
        // Rows of several heads share a tile of keys where nothing of a form is the head's own.
        const bool join = problem.form != Form::additive;
        int64_t rows = 384;
        while (rows > (join ? 48 : 96) &&
               static_cast<int64_t>(problem.heads.size()) * ((problem.query_len + rows - 1) / rows) < kMinTasks)
            rows /= 2;
        if (!join) single.reserve(problem.heads.size());
        for (const Group& group : problem.groups) {
            if (join) {
                cut(group.heads, static_cast<int64_t>(group.heads.size()) * problem.query_len, rows);
                continue;
            }
            for (const int64_t head : group.heads) {
                single.push_back({head});
                cut(single.back(), problem.query_len, rows);
            }
        }
        const int64_t count = static_cast<int64_t>(units.size());
        if (count > 0 && count < kMinTasks && problem.key_len >= 2048)
            ranges = std::min((kMinTasks + count - 1) / count, problem.key_len / 1024);
    }
    Span range(Span keys, int64_t r) const {
        const int64_t tiles = std::max<int64_t>(0, (keys.last - keys.first + kTileKeys - 1) / kTileKeys);
        return {keys.first + tiles * r / ranges * kTileKeys,
                std::min(keys.last, keys.first + tiles * (r + 1) / ranges * kTileKeys)};
    }

   private:
    // Into blocks of one size, but for the last: a small one of its own would leave a thread idle meanwhile.
    void cut(const std::vector<int64_t>& heads, int64_t total, int64_t most) {
        const int64_t count = (total + most - 1) / most;
        const int64_t rows = count > 0 ? padded((total + count - 1) / count, kMR) : most;
        for (int64_t first = 0; first < total; first += rows)
            units.push_back({&heads, first, std::min(rows, total - first)});
    }
};

// What a range of keys leaves for the ranges to be concat.
template <class T>
struct RangeResult {
    std::vector<RowState<T>> states;
    Buffer<T> out;
};

template <class T>
void merge_ranges(const Problem& problem, const ForwardTasks::Unit& unit, RangeResult<T>* results, int64_t ranges) {
    const int64_t width = row_width<T>(problem);
    for (int64_t i = 0; i < unit.count; i++) {
        RowState<T> whole = results[0].states[i];
        T* out = results[0].out.memory.get() + i * width;
        for (int64_t r = 1; r < ranges; r++) {
            const RowState<T>& result = results[r].states[i];
            const T maximum = (result.max > whole.max || result.max != result.max) ? result.max : whole.max,
                    to = safe_max(maximum);
            const T f = rescale_factor(whole.max, to), g = rescale_factor(result.max, to);
            const T* more = results[r].out.memory.get() + i * width;
            for (int64_t j = 0; j < width; j++) out[j] = f * whole.out_scale * out[j] + g * result.out_scale * more[j];
            whole.sum_exp_logit = f * (whole.sum_exp_logit + (safe_max(whole.max) - to) * whole.denom) +
                                  g * (result.sum_exp_logit + (safe_max(result.max) - to) * result.denom);
            whole.squares = f * f * whole.squares + g * g * result.squares;
            whole.denom = f * whole.denom + g * result.denom;
            whole.max = maximum, whole.out_scale = 1;
            whole.merge_moments(result.count, result.base, result.mean, result.deviation);
        }
        const Head& head = problem.heads[(*unit.heads)[(unit.first + i) / problem.query_len]];
        store_row(problem, head, (unit.first + i) % problem.query_len, whole, out);
    }
}

template <class T>
void forward_typed(const Problem& problem, int threads) {
    const ForwardTasks tasks(problem);
    const int64_t ranges = tasks.ranges;
    std::vector<RangeResult<T>> results(ranges > 1 ? tasks.units.size() * ranges : 0);
    threads = clamp_threads(problem, threads);
    const Additive<T> form(problem);
    SharedTiles<KeyTile<T>> tiles;
    if (tiles.is_profitable(problem, static_cast<int64_t>(tasks.units.size() / problem.heads.size())))
        tiles = {problem, threads, [&](Arena& arena) { return KeyTile<T>(arena, problem, form, false); },
                 [&](KeyTile<T>& tile, const Head& head, int64_t key, int64_t key_count) {
                     tile.fill(problem, form, head, key, key_count, true);
                 }};
    for_each_task(static_cast<int64_t>(tasks.units.size()) * ranges, threads, [&](int64_t task) {
        const ForwardTasks::Unit& unit = tasks.units[task / ranges];
        Arena& arena = thread_arena();
        const QueryTile<T> queries(arena, problem, *unit.heads, unit.first, unit.count);
        OnlineSoftmax<T> softmax(arena, problem, queries.count);
        forward_tile(arena, problem, queries, tasks.range(queries.keys(problem.key_len), task % ranges), tiles,
                     softmax);
        if (ranges == 1) {
            for (int64_t i = 0; i < queries.count; i++)
                store_row(problem, *queries.head[i], queries.row[i], softmax.state(i), softmax.out + i * softmax.width);
            return;
        }
        RangeResult<T>& result = results[task];
        for (int64_t i = 0; i < queries.count; i++) result.states.push_back(softmax.state(i));
        std::copy_n(softmax.out, queries.count * softmax.width, result.out.reserve(queries.count * softmax.width));
    });
    if (ranges > 1)
        for_each_task(static_cast<int64_t>(tasks.units.size()), threads, [&](int64_t unit) {
            merge_ranges(problem, tasks.units[unit], results.data() + unit * ranges, ranges);
        });
}

void forward(const Problem& problem, int threads) {
    if (problem.query_len == 0 || problem.heads.empty()) return;
    if (problem.value_dtype == Dtype::f64)
        forward_typed<double>(problem, threads);
    else
        forward_typed<float>(problem, threads);
}
