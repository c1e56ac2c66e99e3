// Online softmax: the state of query rows while key tiles go by. Sums are kept by lanes and added up at the end.
//
// The weight of a score s is exp(s - lazy_max), computed as 2^((s - lazy_max) log2 e). The lazy maximum of a row is the
// maximum of the tile that last raised it, and is raised only where the weights of a tile come out large: most tiles
// then need neither a maximum nor a rescaling.
#pragma once

#include "kernels/bf16_dot-inl.h"
#include "kernels/masking-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/pv-inl.h"
#include "kernels/simd-inl.h"

// The state of a row after some of its keys. Its output, not yet normalised, is in OnlineSoftmax::out.
template <class T>
struct RowState {
    T max = -std::numeric_limits<T>::infinity();  // or the lazy maximum; see RowStat
    T denom = 0, sum_exp_logit = 0, squares = 0;
    T out_scale = 1;  // the output times this is sum exp(s - max) v
    // Moments of the scores. The mean is relative to the base: among large scores the difference of two means would
    // lose its digits.
    T count = 0, base = 0, mean = 0, deviation = 0;
    T min_score = std::numeric_limits<T>::infinity();  // of the scores
    T first_key = -1;                                  // see RowStat

    // Merge the moments of other scores (Chan et al.).
    void merge_moments(T other_count, T other_base, T other_mean, T other_deviation) {
        if (other_count == 0) return;
        if (count == 0) {
            count = other_count, base = other_base, mean = other_mean, deviation = other_deviation;
            return;
        }
        if (const T both = mean + other_mean; !std::isfinite(both)) {
            // Where one side alone is infinite, so is the common mean; a difference would be NaN.
            count += other_count, mean = both, deviation = std::numeric_limits<T>::quiet_NaN();
            return;
        }
        const T all = count + other_count, gap = (other_base - base) + (other_mean - mean);
        deviation += other_deviation + gap * gap * count * (other_count / all);
        // Relative to the base that is nearer to its mean, which keeps more digits.
        if (std::abs(other_mean) < std::abs(mean))
            base = other_base, mean = other_mean - gap * (count / all);
        else
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

// The states of consecutive rows, one in each lane.
template <class T>
struct RowStates {
    V<T> max, denom, sum_exp_logit, squares, out_scale, count, base, mean, deviation, min_score, first_key;

    RowState<T> operator[](int i) const {
        return {max[i],  denom[i], sum_exp_logit[i], squares[i],   out_scale[i], count[i],
                base[i], mean[i],  deviation[i],     min_score[i], first_key[i]};
    }
    void set(int i, const RowState<T>& row) {
        max[i] = row.max, denom[i] = row.denom, sum_exp_logit[i] = row.sum_exp_logit, squares[i] = row.squares;
        out_scale[i] = row.out_scale;
        count[i] = row.count, base[i] = row.base, mean[i] = row.mean, deviation[i] = row.deviation;
        min_score[i] = row.min_score, first_key[i] = row.first_key;
    }
};

// The states of the rows of a query tile.
template <class T>
struct OnlineSoftmax {
    static constexpr int L = Vector<T>::lanes;
    static constexpr T kMaxWeightSum = 256;  // of a tile by lane, else the lazy maximum is raised; of 2^31 keys: 2^39
    // The lazy maximum before the first unmasked score: masked scores, which are -inf, stay below it.
    static constexpr T kUnset = std::numeric_limits<T>::lowest();
    T *lazy_max, *denom, *out;
    T *row_max = nullptr, *sum_exp_logit = nullptr, *squares = nullptr;
    // Moments of the scores. `shifted` and `shifted_squares`, by lanes: sums of (s - base) and of its square over the
    // last `count` scores. The base is the mean of `base_count` of them. `merged`: the moments of all scores before.
    T *shifted = nullptr, *shifted_squares = nullptr, *base = nullptr, *base_count = nullptr, *count = nullptr;
    // Smallest and largest score of each row, and the first key of the largest, where requested.
    T *min_score = nullptr, *max_score = nullptr, *first_key = nullptr;
    RowState<T>* merged = nullptr;
    bool has_merged = false;  // otherwise `merged` is not initialised
    int64_t rows, width;
    int64_t started = 0;  // no row from here on has been updated

    OnlineSoftmax(Arena& arena, const Problem& problem, int64_t row_count)
        : rows(row_count), width(row_width<T>(problem)) {
        // Whole vectors of rows, which `states` reads, except that one row is read alone.
        const int64_t padded_rows = padded(rows, L), lane_rows = rows == 1 ? 1 : padded_rows;
        lazy_max = filled(arena, padded_rows, kUnset);
        out = filled(arena, rows * width, T(0));
        T** const sums[] = {&denom, &sum_exp_logit, &squares, &shifted, &shifted_squares};
        const int64_t count_of_sums = problem.full_statistics ? std::size(sums) : 1;
        T* zeros = filled(arena, count_of_sums * lane_rows * L, T(0));
        for (int64_t i = 0; i < count_of_sums; i++) *sums[i] = zeros + i * lane_rows * L;
        if (problem.exact_row_max || problem.full_statistics)
            row_max = filled(arena, lane_rows * L, -std::numeric_limits<T>::infinity());
        if (problem.min_score) min_score = filled(arena, padded_rows, std::numeric_limits<T>::infinity());
        if (problem.first_key) {
            max_score = filled(arena, padded_rows, -std::numeric_limits<T>::infinity());
            first_key = filled(arena, padded_rows, T(-1));
        }
        if (!problem.full_statistics) return;
        for (T** x : {&base, &base_count, &count}) *x = filled(arena, padded_rows, T(0));
        merged = arena.take<RowState<T>>(rows);
    }

    // Compute the weights of the scores of a tile, and update the sums of their rows, dropped weights included. `key`
    // is its first key, larger than the keys of earlier tiles. `keep` (null: all) are the bits of the weights that
    // dropout keeps, which are multiplied by `factor`.
    void update(int64_t first, int64_t size, T* weights, const T* s, const uint64_t* bits, int64_t key_count,
                const uint64_t* keep, T factor, int64_t key) {
        // For as few vectors as the keys take: exponentials take most of the time of a short row, such as a few words.
        dispatch_width<T>(key_count, [&](auto vectors) {
            if (first >= started && size > 1) start_rows<vectors>(first, size, s, bits);
            started = std::max(started, first + size);
            if (min_score)
                for (int64_t i = 0; i < size; i++)
                    min_score[first + i] = std::min(
                        min_score[first + i], reduce<T>(lane_min<vectors>(s + i * kTileKeys, bits[i]), fast_min<T>));
            for (int64_t i = 0; first_key && i < size; i++)
                if (const T tile_max = reduce_max<T>(lane_max<vectors>(s + i * kTileKeys));
                    tile_max > max_score[first + i]) {
                    max_score[first + i] = tile_max;
                    first_key[first + i] = static_cast<T>(key + index_of(tile_max, s + i * kTileKeys));
                }
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

    // Call f(first, size, states) for the rows, as many at a time as a vector has lanes. Their states are relative to
    // `row_max`, or without it to `lazy_max`, and their moments include those in `merged`.
    template <class F>
    void for_each_row_block(const F& f) const {
        for (int64_t first = 0; first < rows; first += L) {
            const int64_t size = std::min<int64_t>(L, rows - first);
            RowStates<T> row_states = states(first);
            if (has_merged)
                for (int i = 0; i < size; i++) {
                    const RowState<T> current = row_states[i];
                    RowState<T> total = current, &earlier = merged[first + i];
                    total.count = earlier.count, total.base = earlier.base, total.mean = earlier.mean;
                    total.deviation = earlier.deviation;
                    total.merge_moments(current.count, current.base, current.mean, current.deviation);
                    row_states.set(i, total);
                }
            f(first, size, row_states);
        }
    }

    // The maximum of rows as a result: -inf where all keys are masked (kUnset, and no weight), NaN where a score is.
    // A maximum of infinity stays, although its own weight, exp(inf - inf), makes the sum of weights NaN.
    static V<T> maximum_of(V<T> maximum, V<T> sum) {
        constexpr T infinity = std::numeric_limits<T>::infinity();
        maximum = select<T>((maximum != kUnset) | (sum != 0), maximum, splat(-infinity));
        return select<T>((sum != sum) & (maximum != infinity), sum, maximum);
    }

    // Set the moments of scores, of one row or of a vector of rows, from the sums of their differences from the base.
    template <class State, class Number>
    static void set_moments(State& state, Number sum, Number square) {
        state.mean = sum / (state.count == 0 ? state.count + 1 : state.count);
        const Number deviation = square - sum * state.mean;
        // Rounding may leave less than 0; NaN stays.
        state.deviation = deviation < 0 ? Number{} : deviation;
    }

    // The sums of the differences of the unmasked scores of a tile from a number, by lanes.
    template <int W>
    static V<T> sum_of_differences(const T* s, uint64_t bits, T origin) {
        V<T> sum{};
        for (int j = 0; j < W; j++) sum += select_bits<T>(bits, j, load(s + j * L) - origin, V<T>{});
        return sum;
    }

    // The largest scores of a tile, by lanes; and the first key that has one of these.
    template <int W>
    static V<T> lane_max(const T* s) {
        V<T> maximum = load(s);
        for (int j = 1; j < W; j++) maximum = fast_max<T>(maximum, load(s + j * L));
        return maximum;
    }
    static int64_t index_of(T most, const T* s) { return std::find(s, s + kTileKeys, most) - s; }

    // The smallest unmasked scores of a tile, by lanes.
    template <int W>
    static V<T> lane_min(const T* s, uint64_t bits) {
        V<T> infinity = splat(std::numeric_limits<T>::infinity()), minimum = infinity;
        for (int j = 0; j < W; j++) minimum = fast_min<T>(select_bits<T>(bits, j, load(s + j * L), infinity), minimum);
        return minimum;
    }

    // A base at the mean of some scores. An unmasked infinity propagates through the sums, not through the base.
    static V<T> base_near(V<T> mean) {
        return select<T>(abs_of<T>(mean) < std::numeric_limits<T>::max(), mean, V<T>{});
    }

   private:
    static T* filled(Arena& arena, int64_t count, T with) {
        T* x = arena.take<T>(count);
        std::fill_n(x, count, with);
        return x;
    }

    // Lane i becomes the lanes of row first + i, combined by op.
    template <class F>
    V<T> reduce_rows(const T* x, int64_t first, const F& op) const {
        if (rows == 1) return splat(reduce<T>(load(x), op));
        V<T> v[L];
#pragma GCC unroll 16
        for (int i = 0; i < L; i++) v[i] = load(x + (first + i) * L);
        return reduce_each<T>(v, op);
    }
    V<T> sum_rows(const T* x, int64_t first) const {
        return reduce_rows(x, first, [](V<T> a, V<T> b) { return a + b; });
    }

    // The states of as many rows as a vector has lanes, without the moments in `merged`.
    RowStates<T> states(int64_t first) const {
        const V<T> lazy = load(lazy_max + first), sum = sum_rows(denom, first);
        RowStates<T> result;
        // Vector by vector: with few rows, clearing the whole struct takes longer than reading their states.
        result.sum_exp_logit = result.squares = result.count = result.base = result.mean = result.deviation = V<T>{};
        result.min_score = min_score ? load(min_score + first) : V<T>{};
        result.first_key = first_key ? load(first_key + first) : V<T>{};
        result.max = maximum_of(row_max ? reduce_rows(row_max, first, fast_max<T>) : lazy, sum);
        result.denom = sum;
        result.out_scale = splat(T(1));
        if (!row_max) return result;
        const V<T> rise = select<T>(result.max == -std::numeric_limits<T>::infinity(), V<T>{}, result.max - lazy);
        result.out_scale = exp_of<T>(-rise);
        result.denom *= result.out_scale;
        if (!sum_exp_logit) return result;
        result.sum_exp_logit = (sum_rows(sum_exp_logit, first) - rise * sum) * result.out_scale;
        result.squares = sum_rows(squares, first) * (result.out_scale * result.out_scale);
        result.count = load(count + first);
        result.base = load(base + first);
        set_moments(result, sum_rows(shifted, first), sum_rows(shifted_squares, first));
        return result;
    }

    // Set the lazy maxima of rows before their first tile, and the bases of their moments: row by row, each would wait
    // for its reductions (a tenth of a tiny call's time).
    template <int W>
    __attribute__((noinline)) void start_rows(int64_t first, int64_t size, const T* s, const uint64_t* bits) {
        for (const int64_t end = first + size; first < end; first += L, s += L * kTileKeys, bits += L) {
            const auto count_of_rows = static_cast<int>(std::min<int64_t>(L, end - first));
            // Lanes after the last row repeat it.
            const auto row = [&](int i) { return std::min(i, count_of_rows - 1); };
            V<T> v[L];
            for (int i = 0; i < L; i++) v[i] = lane_max<W>(s + row(i) * kTileKeys);
            const V<T> maximum = reduce_each<T>(v, fast_max<T>), lazy = fast_max<T>(maximum, splat(kUnset));
            store_first(lazy_max + first, count_of_rows, lazy);
            if (!shifted) continue;
            T counts[L];
            for (int i = 0; i < L; i++) {
                v[i] = sum_of_differences<W>(s + row(i) * kTileKeys, bits[row(i)], lazy[i]);
                counts[i] = static_cast<T>(__builtin_popcountll(bits[row(i)]));
            }
            const V<T> tile_count = load(counts),
                       mean = lazy + reduce_sums<T>(v) / fast_max<T>(tile_count, splat(T(1)));
            store_first(base + first, count_of_rows, base_near(mean));
            store_first(base_count + first, count_of_rows, tile_count);
        }
    }

    // Update `size` rows whose keys take W vectors. Not inlined: with several variants in one function GCC keeps
    // vectors in memory.
    template <int W, bool statistics, bool drops>
    __attribute__((noinline)) void update_rows(int64_t first, int64_t size, T* weights, const T* s,
                                               const uint64_t* bits, const uint64_t* keep, T factor) {
        for (int64_t i = first; i < first + size; i++, s += kTileKeys, weights += kTileKeys) {
            V<T> sum, logits, square;
            if (lazy_max[i] == kUnset) raise_lazy_max<W>(i, s);  // a single row, or one with all earlier keys masked
            do {
                const V<T> lazy = splat(lazy_max[i]);
                sum = logits = square = V<T>{};
#pragma GCC unroll 16
                for (int j = 0; j < W; j++) {
                    const V<T> logit = load(s + j * L) - lazy, e = exp2_of<T>(logit * kLog2E<T>);
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
                V<T> maximum = load(row_max + i * L);
#pragma GCC unroll 16
                for (int j = 0; j < W; j++) maximum = fast_max<T>(load(s + j * L), maximum);
                store(row_max + i * L, maximum);
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
        const T maximum = reduce_max<T>(lane_max<W>(s)), from = lazy_max[i];
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
        if (!bits) return;
        const T tile_count = static_cast<T>(__builtin_popcountll(bits));
        if (tile_count > kBaseGrowth * base_count[i]) set_base<W>(i, s, bits, tile_count);
        const T from = base[i];
        V<T> sum = load(shifted + i * L), square = load(shifted_squares + i * L);
        const auto add = [&](auto select_of) {
#pragma GCC unroll 16
            for (int j = 0; j < W; j++) {
                const V<T> x = select_of(j, load(s + j * L) - from);
                sum += x;
                square += x * x;
            }
        };
        if (bits == kAll)
            add([](int, V<T> x) { return x; });
        else
            add([bits](int j, V<T> x) { return select_bits<T>(bits, j, x, V<T>{}); });
        store(shifted + i * L, sum);
        store(shifted_squares + i * L, square);
        count[i] += tile_count;
        if (count[i] >= kMostPerBase) merge_last(i);
    }

    // Let the mean of the unmasked scores of a tile, `tile_count` of them, be the base of a row.
    template <int W>
    __attribute__((noinline)) void set_base(int64_t i, const T* s, uint64_t bits, T tile_count) {
        if (count[i] != 0) merge_last(i);
        base[i] =
            base_near(splat(lazy_max[i] + reduce_sum<T>(sum_of_differences<W>(s, bits, lazy_max[i])) / tile_count))[0];
        base_count[i] = tile_count;
    }

    // Scores that share a base: sums stay short.
    static constexpr T kMostPerBase = 32 * kTileKeys;
    // A tile with more than so many times the scores of the current base gets its own base: the mean of a few scores
    // may be far from the mean of many, whose sums would lose digits.
    static constexpr T kBaseGrowth = 4;

    // Merge the moments of the last scores, and let the next tile start a new base.
    __attribute__((noinline)) void merge_last(int64_t i) {
        if (!has_merged) std::fill_n(merged, rows, RowState<T>{});
        has_merged = true;
        RowState<T> last;
        last.count = count[i], last.base = base[i];
        set_moments(last, reduce_sum<T>(load(shifted + i * L)), reduce_sum<T>(load(shifted_squares + i * L)));
        merged[i].merge_moments(last.count, last.base, last.mean, last.deviation);
        store(shifted + i * L, V<T>{});
        store(shifted_squares + i * L, V<T>{});
        count[i] = base_count[i] = 0;
    }
};
