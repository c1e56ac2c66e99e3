// The rows of a task while its tiles go by: the lazy_max of their weights, and sums by lanes. Sums and update_moments
// of a tile are added where the row stands; a new lazy_max moves all sums of weights.

// A row after some of its keys; `out` is keep beside it.
template <class T>
struct RowState {
    T max = -std::numeric_limits<T>::infinity();  // or what kRowStats allows in its place
    T denom = 0, sum_exp_logit = 0, squares = 0;
    T out_scale = 1;  // what `out` is to be multiplied by to be at the lazy_max of `max`
    // Moments of the scores; the mean less the base: at the lazy_max of the scores the gap between two means would lose
    // its digits.
    T count = 0, base = 0, mean = 0, deviation = 0;

    void merge_moments(T other_count, T other_base, T other_mean, T other_deviation) {
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
inline T safe_max(T maximum) {
    return maximum == -std::numeric_limits<T>::infinity() ? T(0) : maximum;
}

template <class T>
inline T rescale_factor(T old_max, T to) {
    return old_max == -std::numeric_limits<T>::infinity() ? T(0) : exp_scalar<T>(old_max - to);
}

// OnlineSoftmax sums of rows, by lanes: they are added up once, at the end.
//
// The weight of a score s is exp(s - lazy_max), as 2^((s - lazy_max) log2 e). The lazy_max is the row's maximum when it
// was last raised, and is raised only where the weights of a tile come out large: a maximum that creeps up moves
// nothing, and nobody looks for it.
template <class T>
struct OnlineSoftmax {
    static constexpr int L = Vector<T>::lanes;
    static constexpr T kMaxWeightSum = 256;  // that weights of a tile add up to, by lanes
    // Of a row that has seen nothing yet: hidden scores, which are -inf, stay below it.
    static constexpr T kUnset = std::numeric_limits<T>::lowest();
    T *lazy_max, *denom, *out;
    T *row_max = nullptr, *sum_exp_logit = nullptr, *squares = nullptr;
    // Moments of the scores: sums of what they lie above a base near their mean, and of its square, over the last full
    // tiles; and what is merged of all others.
    T *shifted = nullptr, *shifted_squares = nullptr, *base = nullptr, *full = nullptr;
    RowState<T>* merged = nullptr;
    int64_t width;

    OnlineSoftmax(Arena& arena, const Problem& problem, int64_t count) : width(row_width<T>(problem)) {
        lazy_max = filled(arena, count, kUnset);
        denom = filled(arena, count * L, T(0));
        out = filled(arena, count * width, T(0));
        if (problem.exact_row_max || problem.full_statistics)
            row_max = filled(arena, count * L, -std::numeric_limits<T>::infinity());
        if (!problem.full_statistics) return;
        for (T** x : {&sum_exp_logit, &squares, &shifted, &shifted_squares}) *x = filled(arena, count * L, T(0));
        base = filled(arena, count, T(0));
        full = filled(arena, count, T(0));
        merged = arena.take<RowState<T>>(count);
        std::fill(merged, merged + count, RowState<T>{});
    }

    // Scores become weights. What dropout takes logit counts in the sums; `keep` (null: all) are the bits of what it
    // leaves, times `factor`.
    void update(int64_t first, int64_t size, T* s, const uint64_t* bits, int64_t key_count, const uint64_t* keep,
                T factor) {
        // Short rows are common (a sequence of a few words), and a whole row of exponentials is what they cost.
        dispatch_width(key_count, [&](auto vectors) {
            if (!sum_exp_logit && !keep) return update_rows<vectors, false, false>(first, size, s, bits, keep, factor);
            if (!sum_exp_logit) return update_rows<vectors, false, true>(first, size, s, bits, keep, factor);
            if (!keep) return update_rows<vectors, true, false>(first, size, s, bits, keep, factor);
            update_rows<vectors, true, true>(first, size, s, bits, keep, factor);
        });
    }

    RowState<T> state(int64_t i) const {
        RowState<T> found;
        const T sum = reduce_sum<T>(load(denom + i * L));
        constexpr T infinity = std::numeric_limits<T>::infinity();
        if (row_max)
            found.max = reduce_max<T>(load(row_max + i * L));
        else if (lazy_max[i] != kUnset || sum != 0)
            found.max = lazy_max[i];
        if (sum != sum && found.max != infinity) found.max = sum;  // a visible NaN
        found.denom = sum;
        if (!row_max) return found;
        // From the lazy_max to the maximum.
        const T rise = found.max == -infinity ? T(0) : found.max - lazy_max[i];
        found.out_scale = exp_scalar<T>(-rise);
        found.denom *= found.out_scale;
        if (!sum_exp_logit) return found;
        found.sum_exp_logit = (reduce_sum<T>(load(sum_exp_logit + i * L)) - rise * sum) * found.out_scale;
        found.squares = reduce_sum<T>(load(squares + i * L)) * (found.out_scale * found.out_scale);
        const RowState<T>& rest = merged[i];
        found.merge_moments(rest.count, rest.base, rest.mean, rest.deviation);
        merge_full_tiles(found, i);
        return found;
    }

   private:
    static T* filled(Arena& arena, int64_t count, T with) {
        T* x = arena.take<T>(count);
        std::fill_n(x, count, with);
        return x;
    }

    template <class F>
    static void dispatch_width(int64_t key_count, const F& f) {
        constexpr int W = kTileVectors<T>;
        if (key_count <= L)
            f(std::integral_constant<int, 1>{});
        else if (key_count <= kTileKeys / 2)
            f(std::integral_constant<int, W / 2>{});
        else
            f(std::integral_constant<int, W>{});
    }

    template <int W, bool statistics, bool drops>
    void update_rows(int64_t first, int64_t size, T* s, const uint64_t* bits, const uint64_t* keep, T factor) {
        for (int64_t i = first; i < first + size; i++, s += kTileKeys) {
            V<T> logit[W], e[W], sum;
            if (lazy_max[i] == kUnset) raise_lazy_max<W>(i, s);
            do {
                const V<T> own = splat(lazy_max[i]);
#pragma GCC unroll 16
                for (int j = 0; j < W; j++) {
                    logit[j] = load(s + j * L) - own;
                    e[j] = exp2_of<T>(logit[j] * kLog2E<T>);
                    sum = j == 0 ? e[j] : sum + e[j];
                }
            } while (exceeds<T>(sum, kMaxWeightSum) && raise_lazy_max<W>(i, s));
            store(denom + i * L, load(denom + i * L) + sum);
            if (row_max) {
                V<T> most = load(row_max + i * L);
#pragma GCC unroll 16
                for (int j = 0; j < W; j++) most = fast_max<T>(load(s + j * L), most);
                store(row_max + i * L, most);
            }
            if constexpr (statistics) {
                update_moments<W>(i, s, bits[i - first]);
                V<T> logits = load(sum_exp_logit + i * L), square = load(squares + i * L);
#pragma GCC unroll 16
                for (int j = 0; j < W; j++) {
                    // Where s = -inf the product is 0: below `lowest` e is, and NaN shows in the sum.
                    logits += e[j] * fast_max<T>(logit[j], splat<T>(Exp<T>::lowest));
                    square += e[j] * e[j];
                }
                store(sum_exp_logit + i * L, logits);
                store(squares + i * L, square);
            }
#pragma GCC unroll 16
            for (int j = 0; j < W; j++) {
                if constexpr (drops)
                    store(s + j * L, select_bits<T>(keep[i - first], j, e[j] * factor, V<T>{}));
                else
                    store(s + j * L, e[j]);
            }
        }
    }

    // Rare: the lazy_max of a row becomes the maximum of the scores of a tile, with everything summed so far. False
    // where it is no higher.
    template <int W>
    __attribute__((noinline)) bool raise_lazy_max(int64_t i, const T* s) {
        V<T> most = load(s);
        for (int j = 1; j < W; j++) most = fast_max<T>(most, load(s + j * L));
        const T maximum = reduce_max<T>(most), from = lazy_max[i];
        if (!(maximum > from)) return false;
        lazy_max[i] = maximum;
        // What stood at the lowest number, a mask's in some hands, is nothing beside any other.
        const T factor = from == kUnset ? T(0) : exp_scalar<T>(from - maximum);
        const T fall = factor == 0 ? T(0) : from - maximum;  // not infinite
        if (sum_exp_logit) {
            store(sum_exp_logit + i * L, (load(sum_exp_logit + i * L) + fall * load(denom + i * L)) * factor);
            store(squares + i * L, load(squares + i * L) * (factor * factor));
        }
        store(denom + i * L, load(denom + i * L) * factor);
        for (int64_t j = 0; j < width; j += L) store(out + i * width + j, load(out + i * width + j) * factor);
        return true;
    }

    // Moments of a row's scores in a tile.
    template <int W>
    void update_moments(int64_t i, const T* s, uint64_t bits) {
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
            if (full[i] == kTilesPerBase) flush_full_tiles(i);
        } else if (bits) {
            const T count = static_cast<T>(__builtin_popcountll(bits));
            V<T> sum{}, square{};
            for (int j = 0; j < W; j++) sum += select_bits<T>(bits, j, load(s + j * L) - lazy_max[i], V<T>{});
            const T own = reduce_sum<T>(sum) / count;
            for (int j = 0; j < W; j++) {
                const V<T> rest = select_bits<T>(bits, j, load(s + j * L) - lazy_max[i] - own, V<T>{});
                square += rest * rest;
            }
            merged[i].merge_moments(count, lazy_max[i], own, reduce_sum<T>(square));
        }
    }

    template <int W>
    __attribute__((noinline)) static T mean_of(const T* s) {
        V<T> sum{};
        for (int j = 0; j < W; j++) sum += load(s + j * L) - s[0];
        return s[0] + reduce_sum<T>(sum) / (W * L);
    }

    // Full tiles that are summed up from one base, the mean of the first of them: sums stay short.
    static constexpr T kTilesPerBase = 32;

    void merge_full_tiles(RowState<T>& to, int64_t i) const {
        const T count = full[i] * kTileKeys;
        if (count == 0) return;
        const T sum = reduce_sum<T>(load(shifted + i * L)), mean = sum / count;
        const T deviation = reduce_sum<T>(load(shifted_squares + i * L)) - sum * mean;
        // Less than none is rounding; NaN stays.
        to.merge_moments(count, base[i], mean, deviation < T(0) ? T(0) : deviation);
    }

    __attribute__((noinline)) void flush_full_tiles(int64_t i) {
        merge_full_tiles(merged[i], i);
        store(shifted + i * L, V<T>{});
        store(shifted_squares + i * L, V<T>{});
        full[i] = 0;
    }
};
