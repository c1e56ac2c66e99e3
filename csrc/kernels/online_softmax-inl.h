// Online softmax: the state of query rows while key tiles go by. Sums are kept by lanes and added up at the end.
//
// The weight of a score s is exp(s - lazy_max), computed as 2^((s - lazy_max) log2 e). The lazy maximum of a row is the
// maximum of the tile that last raised it, and is raised only where the weights of a tile come out large: most tiles
// then need neither a maximum nor a rescaling.

// The state of a row after some of its keys. Its output, not yet normalised, is in OnlineSoftmax::out.
template <class T>
struct RowState {
    T max = -std::numeric_limits<T>::infinity();  // or the lazy maximum; see RowStat
    T denom = 0, sum_exp_logit = 0, squares = 0;
    T out_scale = 1;  // the output times this is sum exp(s - max) v
    // Moments of the scores. The mean is relative to the base: among large scores the difference of two means would
    // lose its digits.
    T count = 0, base = 0, mean = 0, deviation = 0;

    // Merge the moments of other scores (Chan et al.).
    void merge_moments(T other_count, T other_base, T other_mean, T other_deviation) {
        if (other_count == 0) return;
        if (count == 0) {
            count = other_count, base = other_base, mean = other_mean, deviation = other_deviation;
            return;
        }
        if (const T both = mean + other_mean; !std::isfinite(both)) {
            // Where one side alone is infinite, its mean is that of both; a difference would make NaN of it.
            count += other_count, mean = both, deviation = std::numeric_limits<T>::quiet_NaN();
            return;
        }
        const T all = count + other_count, gap = (other_base - base) + (other_mean - mean);
        deviation += other_deviation + gap * gap * count * (other_count / all);
        mean += gap * (other_count / all);
        count = all;
    }
};

// The maximum to subtract from the scores of a row: 0 for a fully masked row, where inf - inf would be NaN.
template <class T>
inline T safe_max(T maximum) {
    return maximum == -std::numeric_limits<T>::infinity() ? T(0) : maximum;
}

// The factor that moves sums of weights from one maximum to another.
template <class T>
inline T rescale_factor(T old_max, T to) {
    return old_max == -std::numeric_limits<T>::infinity() ? T(0) : exp_scalar<T>(old_max - to);
}

// The states of the rows of a query tile.
template <class T>
struct OnlineSoftmax {
    static constexpr int L = Vector<T>::lanes;
    static constexpr T kMaxWeightSum = 256;  // by lane, of a tile; above it the lazy maximum is raised
    // The lazy maximum before the first unmasked score: masked scores, which are -inf, stay below it.
    static constexpr T kUnset = std::numeric_limits<T>::lowest();
    T *lazy_max, *denom, *out;
    T *row_max = nullptr, *sum_exp_logit = nullptr, *squares = nullptr;
    // Moments of the scores. `shifted` and `shifted_squares`, by lanes: sums of (s - base) and of its square over the
    // last full tiles, whose number is `full`. `merged`: the moments of all other tiles.
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

    // Compute the weights of the scores of a tile, and update the sums of their rows, dropped weights included. `keep`
    // (null: all) are the bits of the weights that dropout keeps, which are multiplied by `factor`.
    void update(int64_t first, int64_t size, T* weights, const T* s, const uint64_t* bits, int64_t key_count,
                const uint64_t* keep, T factor) {
        // Exponentials take most of the time of a short row, which is common (a sequence of a few words).
        dispatch_width<T>(key_count, [&](auto vectors) {
            const auto rows = [&](auto statistics, auto drops) {
                update_rows<vectors, statistics, drops>(first, size, weights, s, bits, keep, factor);
            };
            constexpr std::true_type yes;
            constexpr std::false_type no;
            if (!sum_exp_logit && !keep) return rows(no, no);
            if (!sum_exp_logit) return rows(no, yes);
            if (!keep) return rows(yes, no);
            rows(yes, yes);
        });
    }

    // The state of a row, relative to its maximum if that is known, otherwise to its lazy maximum.
    RowState<T> state(int64_t i) const {
        RowState<T> found;
        const T sum = reduce_sum<T>(load(denom + i * L));
        constexpr T infinity = std::numeric_limits<T>::infinity();
        if (row_max)
            found.max = reduce_max<T>(load(row_max + i * L));
        else if (lazy_max[i] != kUnset || sum != 0)
            found.max = lazy_max[i];
        if (sum != sum && found.max != infinity) found.max = sum;  // an unmasked NaN
        found.denom = sum;
        if (!row_max) return found;
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

    // Update `size` rows whose keys take W vectors. Not inlined: with several variants in one function GCC keeps
    // vectors in memory.
    template <int W, bool statistics, bool drops>
    __attribute__((noinline)) void update_rows(int64_t first, int64_t size, T* weights, const T* s,
                                               const uint64_t* bits, const uint64_t* keep, T factor) {
        for (int64_t i = first; i < first + size; i++, s += kTileKeys, weights += kTileKeys) {
            V<T> sum, logits, square;
            if (lazy_max[i] == kUnset) raise_lazy_max<W>(i, s);
            do {
                const V<T> own = splat(lazy_max[i]);
                sum = logits = square = V<T>{};
#pragma GCC unroll 16
                for (int j = 0; j < W; j++) {
                    const V<T> logit = load(s + j * L) - own, e = exp2_of<T>(logit * kLog2E<T>);
                    sum += e;
                    if constexpr (statistics) {
                        // e is 0 below `lowest`, so that clamping keeps 0 * -inf from becoming NaN; NaN propagates by
                        // denom.
                        logits += e * fast_max<T>(logit, splat<T>(Exp<T>::lowest));
                        square += e * e;
                    }
                    if constexpr (drops)
                        store(weights + j * L, select_bits<T>(keep[i - first], j, e * factor, V<T>{}));
                    else
                        store(weights + j * L, e);
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
                store(sum_exp_logit + i * L, load(sum_exp_logit + i * L) + logits);
                store(squares + i * L, load(squares + i * L) + square);
            }
        }
    }

    // Raise the lazy maximum of a row to the maximum of a tile, and rescale all its sums. Returns false where it is not
    // higher. Rare, and therefore not inlined.
    template <int W>
    __attribute__((noinline)) bool raise_lazy_max(int64_t i, const T* s) {
        V<T> most = load(s);
        for (int j = 1; j < W; j++) most = fast_max<T>(most, load(s + j * L));
        const T maximum = reduce_max<T>(most), from = lazy_max[i];
        if (!(maximum > from)) return false;
        lazy_max[i] = maximum;
        // Scores equal to the lowest number, which some callers use as a mask, weigh nothing beside any other.
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

    // Update the moments of a row with the scores of a tile.
    template <int W>
    void update_moments(int64_t i, const T* s, uint64_t bits) {
        if (bits == kAll) {
            if (full[i] == 0) {
                // An unmasked infinity propagates through the sums, not through the base.
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

    // The mean of a full tile, near which the scores of the next tiles are summed.
    template <int W>
    __attribute__((noinline)) static T mean_of(const T* s) {
        V<T> sum{};
        for (int j = 0; j < W; j++) sum += load(s + j * L) - s[0];
        return s[0] + reduce_sum<T>(sum) / (W * L);
    }

    // Full tiles that share a base, the mean of the first of them: sums stay short.
    static constexpr T kTilesPerBase = 32;

    // Merge the moments of the last full tiles into a state.
    void merge_full_tiles(RowState<T>& to, int64_t i) const {
        const T count = full[i] * kTileKeys;
        if (count == 0) return;
        const T sum = reduce_sum<T>(load(shifted + i * L)), mean = sum / count;
        const T deviation = reduce_sum<T>(load(shifted_squares + i * L)) - sum * mean;
        // Rounding may leave less than 0; NaN stays.
        to.merge_moments(count, base[i], mean, deviation < T(0) ? T(0) : deviation);
    }

    // Merge the last full tiles, and start a new base.
    __attribute__((noinline)) void flush_full_tiles(int64_t i) {
        merge_full_tiles(merged[i], i);
        store(shifted + i * L, V<T>{});
        store(shifted_squares + i * L, V<T>{});
        full[i] = 0;
    }
};
