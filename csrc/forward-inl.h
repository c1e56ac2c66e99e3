// Forward: a task is a block of query rows against all keys that they see, or a range of them, tile by tile.

template <class F>
void for_each_task(int64_t count, int threads, const F& f) {
    struct Context {
        const F& f;
        std::atomic<bool> failed;
        std::exception_ptr error;
    } context{f, {}, {}};
    // What a task throws must not leave its thread.
    const auto one = [](int64_t task, void* p) {
        Context& c = *static_cast<Context*>(p);
        try {
            c.f(task);
        } catch (...) {
            if (!c.failed.exchange(true)) c.error = std::current_exception();
        }
    };
    parallel(count, one, &context, threads);
    if (context.error) std::rethrow_exception(context.error);
}

// A row after some of its keys; `out` is kept beside it.
template <class T>
struct RowState {
    T max = -std::numeric_limits<T>::infinity();
    T total = 0, tilt = 0, squares = 0;
    // Moments of the scores; the mean less the base: at the level of the scores the gap between two means would lose
    // its digits.
    T count = 0, base = 0, mean = 0, deviation = 0;

    void join_moments(T other_count, T other_base, T other_mean, T other_deviation) {
        if (other_count == 0) return;
        if (count == 0) {
            count = other_count, base = other_base, mean = other_mean, deviation = other_deviation;
            return;
        }
        const T all = count + other_count, gap = (other_base - base) + (other_mean - mean);
        deviation += other_deviation + gap * gap * count * (other_count / all);
        mean += gap * (other_count / all);
        count = all;
    }
};

template <class T>
inline T anchor(T maximum) {
    return maximum == -std::numeric_limits<T>::infinity() ? T(0) : maximum;
}

template <class T>
inline T rescaling(T old_max, T to) {
    return old_max == -std::numeric_limits<T>::infinity() ? T(0) : exp_of_one<T>(old_max - to);
}

// Running sums of rows, by lanes: they are added up once, at the end.
template <class T>
struct Running {
    static constexpr int L = Vector<T>::lanes;
    T *max, *total, *out;
    T *tilt = nullptr, *squares = nullptr, *mean = nullptr, *deviation = nullptr, *base = nullptr, *full = nullptr;
    RowState<T>* partial = nullptr;  // moments of tiles that are not full
    int64_t width;

    Running(Arena& arena, const Problem& problem, int64_t count) : width(padded(problem.value_dim, L)) {
        max = arena.take<T>(count);
        total = zeros(arena, count * L);
        out = zeros(arena, count * width);
        std::fill(max, max + count, -std::numeric_limits<T>::infinity());
        if (!problem.full_statistics) return;
        for (T** x : {&tilt, &squares, &mean, &deviation}) *x = zeros(arena, count * L);
        base = zeros(arena, count);
        full = zeros(arena, count);
        partial = arena.take<RowState<T>>(count);
        std::fill(partial, partial + count, RowState<T>{});
    }

    // One row of a tile of `here` keys: scores become exp(s - max), and the sums move with the maximum.
    void absorb(int64_t i, T* s, uint64_t bits, int64_t here) {
        constexpr int W = kVectors<T>;
        // Short rows are common (a sequence of a few words), and a whole row of exponentials is what they cost.
        if (here <= L)
            absorb_vectors<1>(i, s, bits);
        else if (here <= kKeys / 2)
            absorb_vectors<W / 2>(i, s, bits);
        else
            absorb_vectors<W>(i, s, bits);
    }

    template <int W>
    void absorb_vectors(int64_t i, T* s, uint64_t bits) {
        V<T> x[W], top;
#pragma GCC unroll 8
        for (int j = 0; j < W; j++) x[j] = load(s + j * L);
        top = x[0];
#pragma GCC unroll 8
        for (int j = 1; j < W; j++) top = quick_max<T>(top, x[j]);
        // A NaN may hide in any vector, so a maximum that loses it is not enough; sums keep it.
        if (exceeds<T>(top, max[i])) raise(i, x, W);
        const T to = anchor(max[i]);
        V<T> sum = load(total + i * L);
        if (!tilt) {
#pragma GCC unroll 8
            for (int j = 0; j < W; j++) {
                const V<T> e = exp_of<T>(x[j] - to);
                store(s + j * L, e);
                sum += e;
            }
            store(total + i * L, sum);
            return;
        }
        V<T> tilts = load(tilt + i * L), square = load(squares + i * L);
#pragma GCC unroll 8
        for (int j = 0; j < W; j++) {
            const V<T> away = x[j] - to, e = exp_of<T>(away);
            store(s + j * L, e);
            sum += e;
            tilts += e * choose<T>(e == T(0), V<T>{}, away);
            square += e * e;
        }
        store(total + i * L, sum);
        store(tilt + i * L, tilts);
        store(squares + i * L, square);
        moments<W>(i, x, bits, to);
    }

    RowState<T> state(int64_t i) const {
        RowState<T> found;
        found.max = max[i];
        found.total = sum_of<T>(load(total + i * L));
        if (found.total != found.total && !std::isinf(found.max)) found.max = found.total;  // a visible NaN
        if (!tilt) return found;
        found.tilt = sum_of<T>(load(tilt + i * L));
        found.squares = sum_of<T>(load(squares + i * L));
        if (full[i] > 0) {
            // Lanes have seen the same number of scores: their mean is that of their means.
            const T each = full[i] * kVectors<T>;
            const V<T> means = load(mean + i * L);
            const T center = sum_of<T>(means) / L;
            const V<T> away = means - center;
            const T spread = sum_of<T>(load(deviation + i * L)) + each * sum_of<T>(away * away);
            found.join_moments(each * L, base[i], center, spread);
        }
        const RowState<T>& p = partial[i];
        found.join_moments(p.count, p.base, p.mean, p.deviation);
        return found;
    }

   private:
    static T* zeros(Arena& arena, int64_t count) {
        T* x = arena.take<T>(count);
        std::fill(x, x + count, T(0));
        return x;
    }

    // Rare: a new maximum (or a NaN), and everything summed so far at its level.
    __attribute__((noinline)) void raise(int64_t i, const V<T>* x, int count) {
        V<T> top = x[0];
        for (int j = 1; j < count; j++) top = max_of<T>(top, x[j]);
        const T above = largest_of<T>(top), maximum = (above > max[i] || above != above) ? above : max[i];
        if (max[i] == -std::numeric_limits<T>::infinity()) {  // all sums are 0
            max[i] = maximum;
            return;
        }
        const T from = anchor(max[i]), to = anchor(maximum), factor = rescaling(max[i], to);
        if (tilt) {
            store(tilt + i * L, (load(tilt + i * L) + (from - to) * load(total + i * L)) * factor);
            store(squares + i * L, load(squares + i * L) * (factor * factor));
        }
        store(total + i * L, load(total + i * L) * factor);
        for (int64_t j = 0; j < width; j += L) store(out + i * width + j, load(out + i * width + j) * factor);
        max[i] = maximum;
    }

    template <int W>
    void moments(int64_t i, const V<T>* x, uint64_t bits, T to) {
        V<T> sum{}, square{};
        if (bits == kAll) {
            // Each lane is a stream of its own, merged tile by tile.
            if (full[i] == 0) base[i] = to;
            V<T> away[W];
#pragma GCC unroll 8
            for (int j = 0; j < W; j++) {
                away[j] = x[j] - base[i];
                sum += away[j];
            }
            sum = sum * (T(1) / W);
#pragma GCC unroll 8
            for (int j = 0; j < W; j++) square += (away[j] - sum) * (away[j] - sum);
            const T before = full[i], share = T(1) / (before + 1);
            V<T> center = load(mean + i * L);
            const V<T> gap = sum - center;
            store(mean + i * L, center + gap * share);
            store(deviation + i * L, load(deviation + i * L) + square + gap * gap * (before * W * share));
            full[i] = before + 1;
        } else if (bits) {
            const T count = static_cast<T>(__builtin_popcountll(bits));
            for (int j = 0; j < W; j++) sum += choose_bits<T>(bits, j, x[j] - to, V<T>{});
            const T own = sum_of<T>(sum) / count;
            for (int j = 0; j < W; j++) {
                const V<T> away = choose_bits<T>(bits, j, x[j] - to - own, V<T>{});
                square += away * away;
            }
            partial[i].join_moments(count, to, own, sum_of<T>(square));
        }
    }
};

// Takes NaN and infinity out of the values of a tile: zeros stand in their place, `bad` says which keys held any.
// Products with the rest are then the same as beside any other numbers.
template <class T>
View<T> cleaned(T* copy, const View<T>& value, int64_t count, int64_t width, uint64_t& bad) {
    for (int64_t j = 0; j < count; j++) {
        bad |= uint64_t(!is_finite(View<T>{value.row(j), 0}, 1, width)) << j;
        for (int64_t k = 0; k < width; k++)
            copy[j * width + k] = std::isfinite(value.row(j)[k]) ? value.row(j)[k] : T(0);
    }
    return {copy, width};
}

// What was taken out reaches the rows that see it.
template <class T>
void let_escape(T* out, int64_t width, const T* weights, const uint64_t* bits, int64_t size, const View<T>& value,
                uint64_t bad) {
    for (int64_t i = 0; i < size; i++)
        for (uint64_t left = bits[i] & bad; left; left &= left - 1) {
            const int j = __builtin_ctzll(left);
            for (int64_t k = 0; k < width; k++)
                if (!std::isfinite(value.row(j)[k])) out[i * width + k] += weights[i * kKeys + j] * value.row(j)[k];
        }
}

template <class T>
void drop(T* weights, uint64_t kept, T factor) {
    constexpr int L = Vector<T>::lanes;
    for (int j = 0; j < kVectors<T>; j++)
        store(weights + j * L, choose_bits<T>(kept, j, load(weights + j * L) * factor, V<T>{}));
}

// Below this a tile of keys is not worth turning: its dot products are taken row by row.
constexpr int64_t kFewRows = 4;

template <class T>
void forward_block(Arena& arena, const Problem& problem, const Block<T>& block, Span keys, Running<T>& running) {
    const Head& shared = *block.head[0];
    Scores<T> scores(arena, problem);
    KeyTile<T> tile(arena, problem);
    Dropout dropout(problem);
    typename Additive<T>::Query prepared;
    if (problem.form == Form::additive) scores.additive().prepare(prepared, block.query, block.width, block.count);
    T* s = arena.take<T>(kStrip * kKeys);
    T* value_copy = arena.take<T>(kKeys * running.width);
    T* clean_copy = block.hidden ? arena.take<T>(kKeys * running.width) : nullptr;
    std::optional<Pairs> pairs;
    if constexpr (kPairs && sizeof(T) == 4)
        if (Pairs::serves(problem) && block.count > kFewRows) pairs.emplace(arena, problem, block);
    const bool few = problem.form == Form::inner && block.count <= kFewRows;
    for (int64_t key = keys.first; key < keys.last; key += kKeys) {
        const int64_t here = std::min<int64_t>(kKeys, keys.last - key);
        bool filled = false;
        View<T> value, clean;
        uint64_t bad = 0;  // keys with NaN or infinity among their values
        for (int64_t strip = 0; strip < block.strips(); strip++) {
            if (block.misses(strip, key, here)) continue;
            if (!filled) {
                tile.fill(problem, scores.additive(), shared, key, here, !few && !pairs, block.hidden);
                clean = value = view_rows(value_copy, shared.value, problem.value_dtype, key, here, problem.value_dim);
                if (block.hidden && !is_finite(value, here, running.width))
                    clean = cleaned(clean_copy, value, here, running.width, bad);
                if constexpr (sizeof(T) == 4)
                    if (pairs) pairs->fill(shared, key, here, clean);
                if (dropout.on) dropout.at(key);
                filled = true;
            }
            const int64_t first = strip * kStrip, size = block.strip_size(strip);
            uint64_t bits[kStrip];
            scores(s, bits, block, prepared, strip, tile, few ? &value : nullptr, pairs ? &*pairs : nullptr, false);
            for (int64_t i = 0; i < size; i++) {
                running.absorb(first + i, s + i * kKeys, bits[i], here);
                if (dropout.on)
                    drop(s + i * kKeys, dropout.kept(block.stream[first + i]), static_cast<T>(dropout.factor));
            }
            T* out = running.out + first * running.width;
            if (pairs) {
                if constexpr (sizeof(T) == 4) pairs->pool(out, s, size, here);
            } else {
                product<T>(out, running.width, s, kKeys, 1, clean.data, clean.stride, size, running.width, here, true);
            }
            if (bad) let_escape(out, running.width, s, bits, size, value, bad);
        }
    }
}

template <class T>
void write_row(const Problem& problem, const Head& head, int64_t row, const RowState<T>& state, T* out) {
    T* statistics = reinterpret_cast<T*>(head.statistics) + row * kStatistics;
    statistics[0] = state.max;
    statistics[1] = state.total;
    if (problem.full_statistics) {
        statistics[2] = state.tilt;
        statistics[3] = state.squares;
        statistics[4] = state.count;
        statistics[5] = state.base + state.mean;
        statistics[6] = state.deviation;
    }
    const T scale = state.total == 0 ? T(1) : T(1) / state.total;
    for (int64_t j = 0; j < problem.value_dim; j++) out[j] *= scale;
    const int64_t at = row * problem.value_dim;
    if (problem.value_dtype == own_dtype<T>())
        std::memcpy(reinterpret_cast<T*>(head.out) + at, out, problem.value_dim * sizeof(T));
    else if constexpr (sizeof(T) == 4)
        narrow_row(reinterpret_cast<uint16_t*>(head.out) + at, out, problem.value_dtype, problem.value_dim);
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
        int64_t rows = 192;
        while (rows > 48 &&
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
    void cut(const std::vector<int64_t>& heads, int64_t total, int64_t rows) {
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
    const int64_t width = padded(problem.value_dim, Vector<T>::lanes);
    for (int64_t i = 0; i < unit.count; i++) {
        RowState<T> whole = parts[0].states[i];
        T* out = parts[0].out.memory.get() + i * width;
        for (int64_t r = 1; r < ranges; r++) {
            const RowState<T>& part = parts[r].states[i];
            const T maximum = (part.max > whole.max || part.max != part.max) ? part.max : whole.max,
                    to = anchor(maximum);
            const T f = rescaling(whole.max, to), g = rescaling(part.max, to);
            const T* more = parts[r].out.memory.get() + i * width;
            for (int64_t j = 0; j < width; j++) out[j] = f * out[j] + g * more[j];
            whole.tilt = f * (whole.tilt + (anchor(whole.max) - to) * whole.total) +
                         g * (part.tilt + (anchor(part.max) - to) * part.total);
            whole.squares = f * f * whole.squares + g * g * part.squares;
            whole.total = f * whole.total + g * part.total;
            whole.max = maximum;
            whole.join_moments(part.count, part.base, part.mean, part.deviation);
        }
        const Head& head = problem.heads[(*unit.heads)[(unit.first + i) / problem.query_len]];
        write_row(problem, head, (unit.first + i) % problem.query_len, whole, out);
    }
}

// Threads beyond what the work pays for only cost their waking: about 2^20 multiply-adds each (some 10 us).
inline int worth(const Problem& problem, int threads) {
    const double work = static_cast<double>(problem.heads.size()) * problem.query_len * problem.key_len *
                        (problem.dim * (problem.form == Form::additive ? 8.0 : 1.0) + problem.value_dim + 8);
    return static_cast<int>(std::min<double>(threads, 1 + work / (1 << 20)));
}

template <class T>
void forward_as(const Problem& problem, int threads) {
    const ForwardTasks tasks(problem);
    const int64_t ranges = tasks.ranges;
    std::vector<Part<T>> parts(ranges > 1 ? tasks.units.size() * ranges : 0);
    threads = worth(problem, threads);
    for_each_task(static_cast<int64_t>(tasks.units.size()) * ranges, threads, [&](int64_t task) {
        const ForwardTasks::Unit& unit = tasks.units[task / ranges];
        Arena& arena = thread_arena();
        const Block<T> block(arena, problem, *unit.heads, unit.first, unit.count);
        Running<T> running(arena, problem, block.count);
        forward_block(arena, problem, block, tasks.range(block.keys(problem.key_len), task % ranges), running);
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
