// The rows of a task while its tiles go by: the running maximum, and sums by lanes. Sums and moments of a tile are
// added where the row stands; a new maximum moves all of them.

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

    Running(Arena& arena, const Problem& problem, int64_t count) : width(row_width<T>(problem)) {
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
        if (exceeds<T>(top, max[i])) raise(i, top, x, W);
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
            // Where s = -inf the product is 0: below `lowest` e is, and NaN shows in the sum.
            tilts += e * quick_max<T>(away, splat<T>(Exp<T>::lowest));
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
    __attribute__((noinline)) void raise(int64_t i, V<T> top, const V<T>* x, int count) {
        bool broken = false;
        for (int j = 0; j < count; j++) broken |= exceeds<T>(x[j], std::numeric_limits<T>::infinity());
        const T above = broken ? std::numeric_limits<T>::quiet_NaN() : quick_largest_of<T>(top);
        const T maximum = (above > max[i] || broken) ? above : max[i];
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
