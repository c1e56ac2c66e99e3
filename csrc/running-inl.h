// The rows of a task while its tiles go by: the level of their weights, and sums by lanes. Sums and moments of a tile
// are added where the row stands; a new level moves all sums of weights.

// A row after some of its keys; `out` is kept beside it.
template <class T>
struct RowState {
    T max = -std::numeric_limits<T>::infinity();  // or what kNumbers allows in its place
    T total = 0, tilt = 0, squares = 0;
    T unit = 1;  // what `out` is to be multiplied by to be at the level of `max`
    // Moments of the scores; the mean less the base: at the level of the scores the gap between two means would lose
    // its digits.
    T count = 0, base = 0, mean = 0, deviation = 0;

    void join_moments(T other_count, T other_base, T other_mean, T other_deviation) {
        if (other_count == 0) return;
        if (count == 0) {
            count = other_count, base = other_base, mean = other_mean, deviation = other_deviation;
            return;
        }
        if (const T both = mean + other_mean; !std::isfinite(both)) {
            // Infinity less infinity would be NaN where one side alone is infinite.
            count += other_count, mean = both, deviation = std::numeric_limits<T>::quiet_NaN();
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
//
// The weight of a score s is exp(s - level), as 2^((s - level) log2 e). The level is the row's maximum when it was last
// raised, and is raised only where the weights of a tile come out large: a maximum that creeps up moves nothing, and
// nobody looks for it.
template <class T>
struct Running {
    static constexpr int L = Vector<T>::lanes;
    static constexpr T kMost = 256;  // that weights of a tile add up to, by lanes
    // Of a row that has seen nothing yet: hidden scores, which are -inf, stay below it.
    static constexpr T kNothing = std::numeric_limits<T>::lowest();
    T *level, *total, *out;
    T *top = nullptr, *tilt = nullptr, *squares = nullptr;
    // Moments of the scores: sums of what they lie above a base near their mean, and of its square, over the last full
    // tiles; and what is known of all others.
    T *shifted = nullptr, *shifted_squares = nullptr, *base = nullptr, *full = nullptr;
    RowState<T>* known = nullptr;
    int64_t width;

    Running(Arena& arena, const Problem& problem, int64_t count) : width(row_width<T>(problem)) {
        level = filled(arena, count, kNothing);
        total = filled(arena, count * L, T(0));
        out = filled(arena, count * width, T(0));
        if (problem.maxima || problem.full_statistics)
            top = filled(arena, count * L, -std::numeric_limits<T>::infinity());
        if (!problem.full_statistics) return;
        for (T** x : {&tilt, &squares, &shifted, &shifted_squares}) *x = filled(arena, count * L, T(0));
        base = filled(arena, count, T(0));
        full = filled(arena, count, T(0));
        known = arena.take<RowState<T>>(count);
        std::fill(known, known + count, RowState<T>{});
    }

    // Scores become weights. What dropout takes away counts in the sums; `kept` (null: all) are the bits of what it
    // leaves, times `factor`.
    void weigh(int64_t first, int64_t size, T* s, const uint64_t* bits, int64_t here, const uint64_t* kept, T factor) {
        // Short rows are common (a sequence of a few words), and a whole row of exponentials is what they cost.
        with_vectors(here, [&](auto vectors) {
            if (!tilt && !kept) return weigh_vectors<vectors, false, false>(first, size, s, bits, kept, factor);
            if (!tilt) return weigh_vectors<vectors, false, true>(first, size, s, bits, kept, factor);
            if (!kept) return weigh_vectors<vectors, true, false>(first, size, s, bits, kept, factor);
            weigh_vectors<vectors, true, true>(first, size, s, bits, kept, factor);
        });
    }

    RowState<T> state(int64_t i) const {
        RowState<T> found;
        const T sum = sum_of<T>(load(total + i * L));
        constexpr T infinity = std::numeric_limits<T>::infinity();
        if (top)
            found.max = quick_largest_of<T>(load(top + i * L));
        else if (level[i] != kNothing || sum != 0)
            found.max = level[i];
        if (sum != sum && found.max != infinity) found.max = sum;  // a visible NaN
        found.total = sum;
        if (!top) return found;
        // From the level to the maximum.
        const T rise = found.max == -infinity ? T(0) : found.max - level[i];
        found.unit = exp_of_one<T>(-rise);
        found.total *= found.unit;
        if (!tilt) return found;
        found.tilt = (sum_of<T>(load(tilt + i * L)) - rise * sum) * found.unit;
        found.squares = sum_of<T>(load(squares + i * L)) * (found.unit * found.unit);
        const RowState<T>& rest = known[i];
        found.join_moments(rest.count, rest.base, rest.mean, rest.deviation);
        join_full(found, i);
        return found;
    }

   private:
    static T* filled(Arena& arena, int64_t count, T with) {
        T* x = arena.take<T>(count);
        std::fill_n(x, count, with);
        return x;
    }

    template <class F>
    static void with_vectors(int64_t here, const F& f) {
        constexpr int W = kVectors<T>;
        if (here <= L)
            f(std::integral_constant<int, 1>{});
        else if (here <= kKeys / 2)
            f(std::integral_constant<int, W / 2>{});
        else
            f(std::integral_constant<int, W>{});
    }

    template <int W, bool statistics, bool drops>
    void weigh_vectors(int64_t first, int64_t size, T* s, const uint64_t* bits, const uint64_t* kept, T factor) {
        for (int64_t i = first; i < first + size; i++, s += kKeys) {
            V<T> away[W], e[W], sum;
            if (level[i] == kNothing) raise<W>(i, s);
            do {
                const V<T> own = splat(level[i]);
#pragma GCC unroll 16
                for (int j = 0; j < W; j++) {
                    away[j] = load(s + j * L) - own;
                    e[j] = power_of<T>(away[j] * kLog2E<T>);
                    sum = j == 0 ? e[j] : sum + e[j];
                }
            } while (exceeds<T>(sum, kMost) && raise<W>(i, s));
            store(total + i * L, load(total + i * L) + sum);
            if (top) {
                V<T> most = load(top + i * L);
#pragma GCC unroll 16
                for (int j = 0; j < W; j++) most = quick_max<T>(load(s + j * L), most);
                store(top + i * L, most);
            }
            if constexpr (statistics) {
                moments<W>(i, s, bits[i - first]);
                V<T> tilts = load(tilt + i * L), square = load(squares + i * L);
#pragma GCC unroll 16
                for (int j = 0; j < W; j++) {
                    // Where s = -inf the product is 0: below `lowest` e is, and NaN shows in the sum.
                    tilts += e[j] * quick_max<T>(away[j], splat<T>(Exp<T>::lowest));
                    square += e[j] * e[j];
                }
                store(tilt + i * L, tilts);
                store(squares + i * L, square);
            }
#pragma GCC unroll 16
            for (int j = 0; j < W; j++) {
                if constexpr (drops)
                    store(s + j * L, choose_bits<T>(kept[i - first], j, e[j] * factor, V<T>{}));
                else
                    store(s + j * L, e[j]);
            }
        }
    }

    // Rare: the level of a row becomes the maximum of the scores of a tile, with everything summed so far. False where
    // it is no higher.
    template <int W>
    __attribute__((noinline)) bool raise(int64_t i, const T* s) {
        V<T> most = load(s);
        for (int j = 1; j < W; j++) most = quick_max<T>(most, load(s + j * L));
        const T maximum = quick_largest_of<T>(most), from = level[i];
        if (!(maximum > from)) return false;
        level[i] = maximum;
        // What stood at the lowest number, a mask's in some hands, is nothing beside any other.
        const T factor = from == kNothing ? T(0) : exp_of_one<T>(from - maximum);
        const T fall = factor == 0 ? T(0) : from - maximum;  // not infinite
        if (tilt) {
            store(tilt + i * L, (load(tilt + i * L) + fall * load(total + i * L)) * factor);
            store(squares + i * L, load(squares + i * L) * (factor * factor));
        }
        store(total + i * L, load(total + i * L) * factor);
        for (int64_t j = 0; j < width; j += L) store(out + i * width + j, load(out + i * width + j) * factor);
        return true;
    }

    // Moments of a row's scores in a tile.
    template <int W>
    void moments(int64_t i, const T* s, uint64_t bits) {
        if (bits == kAll) {
            if (full[i] == 0) {
                // A visible infinity is for the sums to show.
                const T mean = mean_of<W>(s);
                base[i] = std::isfinite(mean) ? mean : T(0);
            }
            const T from = base[i];
            V<T> sum = load(shifted + i * L), square = load(shifted_squares + i * L);
#pragma GCC unroll 16
            for (int j = 0; j < W; j++) {
                const V<T> x = load(s + j * L) - from;
                sum += x;
                square += x * x;
            }
            store(shifted + i * L, sum);
            store(shifted_squares + i * L, square);
            full[i] += 1;
            if (full[i] == kMoments) leave_base(i);
        } else if (bits) {
            const T count = static_cast<T>(__builtin_popcountll(bits));
            V<T> sum{}, square{};
            for (int j = 0; j < W; j++) sum += choose_bits<T>(bits, j, load(s + j * L) - level[i], V<T>{});
            const T own = sum_of<T>(sum) / count;
            for (int j = 0; j < W; j++) {
                const V<T> rest = choose_bits<T>(bits, j, load(s + j * L) - level[i] - own, V<T>{});
                square += rest * rest;
            }
            known[i].join_moments(count, level[i], own, sum_of<T>(square));
        }
    }

    template <int W>
    __attribute__((noinline)) static T mean_of(const T* s) {
        V<T> sum{};
        for (int j = 0; j < W; j++) sum += load(s + j * L) - s[0];
        return s[0] + sum_of<T>(sum) / (W * L);
    }

    // Full tiles that are summed up from one base, the mean of the first of them: sums stay short.
    static constexpr T kMoments = 32;

    void join_full(RowState<T>& to, int64_t i) const {
        const T count = full[i] * kKeys;
        if (count == 0) return;
        const T sum = sum_of<T>(load(shifted + i * L)), mean = sum / count;
        const T deviation = sum_of<T>(load(shifted_squares + i * L)) - sum * mean;
        // Less than none is rounding; NaN stays.
        to.join_moments(count, base[i], mean, deviation < T(0) ? T(0) : deviation);
    }

    __attribute__((noinline)) void leave_base(int64_t i) {
        join_full(known[i], i);
        store(shifted + i * L, V<T>{});
        store(shifted_squares + i * L, V<T>{});
        full[i] = 0;
    }
};
