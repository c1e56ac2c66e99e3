// Forward: a task is a block of query rows against all keys that they see, or a range of them, tile by tile.

// Below this a tile of keys is not worth turning: its dot products are taken row by row.
constexpr int64_t kFewRows = 4;

template <class T>
void forward_block(Arena& arena, const Problem& problem, const Block<T>& block, Span keys,
                   const SharedTiles<KeyTile<T>>& tiles, Running<T>& running) {
    const Head& shared = *block.head[0];
    Scores<T> scores(arena, problem, false);
    KeyTile<T> own_tile(arena, problem, scores.additive(), false);
    const KeyTile<T>* tile = nullptr;
    ValueTile<T> values(arena, problem, block.hidden, block.strips() >= kRun);
    Dropout dropout(problem);
    typename Additive<T>::Query prepared;
    if (problem.form == Form::additive)
        AdditiveTables<T>{scores.additive()}.fill(arena, prepared, block.query, block.count);
    // Scores, then weights, of two runs of strips. Those of one are pooled after the scores of the next and before its
    // weights: neighbouring steps do not wait for one another, and the processor, which looks hundreds of instructions
    // ahead, begins the one before the other ends.
    struct Run {
        T* s;
        int64_t first = 0, size = 0;
        uint64_t bits[kRun * kStrip];
    } runs[2];
    for (Run& run : runs) run.s = arena.take<T>(kRun * kStrip * kKeys);
    std::optional<Pairs> pairs;
    if constexpr (kPairs && sizeof(T) == 4)
        if (Pairs::serves(problem) && block.count > kFewRows) pairs.emplace(arena, problem, block);
    const bool few = problem.form == Form::inner && block.count <= kFewRows;
    const T factor = static_cast<T>(dropout.factor);
    const int64_t together = few ? 1 : kRun;
    uint64_t kept[kRun * kStrip];
    // Keys and values of the next tile are asked for while this one is worked on, some with each run: they come from
    // the third-level cache, and the turning of the keys would wait for them (2% of a long pass on Zen 4). In bfloat16
    // they are half as large, and additive scores take longer than any memory: there it is no gain.
    const int64_t steps = (block.strips() + kRun - 1) / kRun;
    const bool asks = !few && !pairs && problem.form != Form::additive && steps >= 4;
    const int64_t each = asks ? (kKeys + steps - 1) / steps : 0;
    const auto pool = [&](const Run& run, int64_t here) {
        T* out = running.out + run.first * running.width;
        if (pairs && !values.narrow()) {
            if constexpr (sizeof(T) == 4) pairs->pool(out, run.s, run.size, here);
        } else {
            const View<T> next{tile->rows.row(here), tile->rows.stride};
            values.pool(out, run.s, run.size, few ? &next : nullptr);
        }
        if (values.bad) values.let_escape(out, run.s, run.bits, run.size);
    };
    for (int64_t key = keys.first; key < keys.last; key += kKeys) {
        const int64_t here = std::min<int64_t>(kKeys, keys.last - key);
        if (block.skips(key, here)) continue;
        bool filled = false, waiting = false;
        int at = 0;
        int64_t asked = key + kKeys;
        for (int64_t strip = 0, end; strip < block.strips(); strip = end) {
            end = strip + 1;
            if (block.misses(strip, key, here)) continue;
            while (end < block.strips() && end < strip + together && !block.misses(end, key, here)) end++;
            if (!filled) {
                tile = tiles.find(problem, shared, key, here);
                if (!tile) {
                    own_tile.fill(problem, scores.additive(), shared, key, here, !few && !pairs,
                                  {prepared.largest, prepared.largest});
                    tile = &own_tile;
                }
                values.fill(shared, key, here);
                if constexpr (sizeof(T) == 4)
                    if (pairs) pairs->fill(shared, key, here, values.clean);
                if (dropout.on) dropout.at(key);
                filled = true;
            }
            for (const int64_t until = asked + each; asked < until; asked++) {
                ask_for_row(shared.key, problem.score_dtype, asked, keys.last, problem.dim);
                ask_for_row(shared.value, problem.value_dtype, asked, keys.last, problem.value_dim);
            }
            Run& own = runs[at];
            own.first = strip * kStrip, own.size = std::min(end * kStrip, block.count) - own.first;
            scores(own.s, own.bits, block, prepared, {strip, end}, *tile, few ? &values.rows : nullptr,
                   pairs ? &*pairs : nullptr, false);
            if (problem.matrix != PairMatrix::none) store_scores(problem, block, own.first, own.size, own.s, key, here);
            // Nothing but the scores is wanted.
            if (problem.matrix == PairMatrix::scores) continue;
            if (waiting) pool(runs[1 - at], here);
            if (dropout.on)
                for (int64_t i = 0; i < own.size; i++) kept[i] = dropout.kept(block.stream[own.first + i]);
            running.weigh(own.first, own.size, own.s, own.bits, here, dropout.on ? kept : nullptr, factor);
            waiting = true, at = 1 - at;
        }
        if (waiting) pool(runs[1 - at], here);
    }
    values.finish(running.out, block.count);
}

template <class T>
void write_row(const Problem& problem, const Head& head, int64_t row, const RowState<T>& state, T* out) {
    if (problem.matrix != PairMatrix::none) finish_matrix_row(problem, head, row, state);
    T* numbers = reinterpret_cast<T*>(head.numbers) + row * kNumbers;
    numbers[0] = state.max;
    numbers[1] = state.total;
    if (problem.full_statistics) {
        numbers[2] = state.tilt;
        numbers[3] = state.squares;
        numbers[4] = state.count;
        numbers[5] = state.base + state.mean;
        numbers[6] = state.deviation;
    }
    const T scale = state.total == 0 ? T(1) : state.unit / state.total;
    const int64_t size = attnscore::size_of(problem.value_dtype), width = problem.value_dim;
    char* to = head.out + row * width * size;
    if (row + kSoon < problem.query_len) ask_for<1>(to + kSoon * width * size, width * size);
    if (problem.value_dtype == own_dtype<T>()) {
        for (int64_t j = 0; j < width; j++) reinterpret_cast<T*>(to)[j] = out[j] * scale;
    } else if constexpr (sizeof(T) == 4) {
        for (int64_t j = 0; j < width; j++) out[j] *= scale;
        narrow_row(reinterpret_cast<uint16_t*>(to), out, problem.value_dtype, width);
    }
}

// The rows of a group, cut into blocks, and each block's keys into ranges: fixed by the shape alone, so that no result
// depends on the number of threads.
struct ForwardTasks {
    struct Unit {
        const std::vector<int64_t>* heads;
        int64_t first, count;
    };
    std::vector<Unit> units;
    std::vector<std::vector<int64_t>> single;  // heads taken alone
    int64_t ranges = 1;

    explicit ForwardTasks(const Problem& problem) {
        constexpr int64_t enough = 16;  // tasks to share among threads
        // Rows of several heads share a tile of keys where nothing of a form is the head's own.
        const bool join = problem.form != Form::additive;
        int64_t rows = 384;
        while (rows > (join ? 48 : 96) &&
               static_cast<int64_t>(problem.heads.size()) * ((problem.query_len + rows - 1) / rows) < enough)
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
        if (count > 0 && count < enough && problem.key_len >= 2048)
            ranges = std::min((enough + count - 1) / count, problem.key_len / 1024);
    }
    Span range(Span keys, int64_t r) const {
        const int64_t tiles = std::max<int64_t>(0, (keys.last - keys.first + kKeys - 1) / kKeys);
        return {keys.first + tiles * r / ranges * kKeys,
                std::min(keys.last, keys.first + tiles * (r + 1) / ranges * kKeys)};
    }

   private:
    // Into blocks of one size, but for the last: a small one of its own would leave a thread idle meanwhile.
    void cut(const std::vector<int64_t>& heads, int64_t total, int64_t most) {
        const int64_t count = (total + most - 1) / most;
        const int64_t rows = count > 0 ? padded((total + count - 1) / count, kStrip) : most;
        for (int64_t first = 0; first < total; first += rows)
            units.push_back({&heads, first, std::min(rows, total - first)});
    }
};

// What a range of keys leaves for the ranges to be joined.
template <class T>
struct Part {
    std::vector<RowState<T>> states;
    Buffer<T> out;
};

template <class T>
void join_parts(const Problem& problem, const ForwardTasks::Unit& unit, Part<T>* parts, int64_t ranges) {
    const int64_t width = row_width<T>(problem);
    for (int64_t i = 0; i < unit.count; i++) {
        RowState<T> whole = parts[0].states[i];
        T* out = parts[0].out.memory.get() + i * width;
        for (int64_t r = 1; r < ranges; r++) {
            const RowState<T>& part = parts[r].states[i];
            const T maximum = (part.max > whole.max || part.max != part.max) ? part.max : whole.max,
                    to = anchor(maximum);
            const T f = rescaling(whole.max, to), g = rescaling(part.max, to);
            const T* more = parts[r].out.memory.get() + i * width;
            for (int64_t j = 0; j < width; j++) out[j] = f * whole.unit * out[j] + g * part.unit * more[j];
            whole.tilt = f * (whole.tilt + (anchor(whole.max) - to) * whole.total) +
                         g * (part.tilt + (anchor(part.max) - to) * part.total);
            whole.squares = f * f * whole.squares + g * g * part.squares;
            whole.total = f * whole.total + g * part.total;
            whole.max = maximum, whole.unit = 1;
            whole.join_moments(part.count, part.base, part.mean, part.deviation);
        }
        const Head& head = problem.heads[(*unit.heads)[(unit.first + i) / problem.query_len]];
        write_row(problem, head, (unit.first + i) % problem.query_len, whole, out);
    }
}

template <class T>
void forward_as(const Problem& problem, int threads) {
    const ForwardTasks tasks(problem);
    const int64_t ranges = tasks.ranges;
    std::vector<Part<T>> parts(ranges > 1 ? tasks.units.size() * ranges : 0);
    threads = worth(problem, threads);
    const Additive<T> form(problem);
    SharedTiles<KeyTile<T>> tiles;
    if (tiles.serve(problem, static_cast<int64_t>(tasks.units.size() / problem.heads.size())))
        tiles = {problem, threads, [&](Arena& arena) { return KeyTile<T>(arena, problem, form, false); },
                 [&](KeyTile<T>& tile, const Head& head, int64_t key, int64_t here) {
                     tile.fill(problem, form, head, key, here, true);
                 }};
    for_each_task(static_cast<int64_t>(tasks.units.size()) * ranges, threads, [&](int64_t task) {
        const ForwardTasks::Unit& unit = tasks.units[task / ranges];
        Arena& arena = thread_arena();
        const Block<T> block(arena, problem, *unit.heads, unit.first, unit.count);
        Running<T> running(arena, problem, block.count);
        forward_block(arena, problem, block, tasks.range(block.keys(problem.key_len), task % ranges), tiles, running);
        if (ranges == 1) {
            for (int64_t i = 0; i < block.count; i++)
                write_row(problem, *block.head[i], block.row[i], running.state(i), running.out + i * running.width);
            return;
        }
        Part<T>& part = parts[task];
        for (int64_t i = 0; i < block.count; i++) part.states.push_back(running.state(i));
        std::copy_n(running.out, block.count * running.width, part.out.reserve(block.count * running.width));
    });
    if (ranges > 1)
        for_each_task(static_cast<int64_t>(tasks.units.size()), threads, [&](int64_t unit) {
            join_parts(problem, tasks.units[unit], parts.data() + unit * ranges, ranges);
        });
}

void forward(const Problem& problem, int threads) {
    if (problem.query_len == 0 || problem.heads.empty()) return;
    if (problem.value_dtype == Dtype::f64)
        forward_as<double>(problem, threads);
    else
        forward_as<float>(problem, threads);
}
