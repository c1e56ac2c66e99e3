// Tables of additive scores and their gradients: exponentials and tanh of rows and keys, each in the order of its pass.
// A query tile's tables are made once, a key tile's once for all query tiles that share it.
#pragma once

#include "kernels/activations-inl.h"
#include "kernels/additive-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/simd-inl.h"

// The range of `Query::largest` over the query tiles that a key tile may meet; any, unless it is set.
template <class T>
struct MagnitudeRange {
    T least = 0, most = std::numeric_limits<T>::max();
};

template <class T>
class AdditiveTables {
    static constexpr int L = Vector<T>::lanes;
    static constexpr int kChunk = Additive<T>::kChunk;
    using Form = Additive<T>;
    using Query = typename Form::Query;
    using Keys = typename Form::Keys;

   public:
    explicit AdditiveTables(const Form& form) : form_(form), width_(padded(form.dim, L)) {}

    // Set the operands of a query tile: its `count` rows, and tables in memory of the arena.
    void fill(Arena& arena, Query& query, const T* rows, int64_t count) const {
        query = {};
        query.rows = rows;
        query.width = width_;
        query.largest = largest(rows, count * width_);
        if (!form_.has_ratio_form()) return;
        if (form_.exp_in_range(query.largest)) {
            T* to = arena.take<T>(count * width_);
            for (int64_t i = 0; i < count * width_; i += L)
                store(to + i, normal_exp_of<T>(load(rows + i) * form_.kappa()));
            query.exps = to;
            query.exp_bounds = panel_bounds(arena, to, count);
        }
        if (form_.tanh_addition_applies(query.largest)) {
            T* to = arena.take<T>(count * width_);
            for (int64_t i = 0; i < count * width_; i += L) store(to + i, tanh_of<T>(load(rows + i)));
            query.tanhs = to;
            query.tanh_bounds = panel_bounds(arena, to, count);
        }
    }

    // Take memory for the tables of a key tile; `gradients`: also for the tables of its gradients.
    void reserve(Arena& arena, Keys& keys, bool gradients) const {
        const int64_t size = kTileKeys * width_;
        const bool ratios = form_.has_ratio_form(), tanhs = form_.tanh_addition_applies(0);
        if (ratios) {
            keys.inverse_w_v = arena.take<T>(width_);
            keys.weighted_exps = arena.take<T>(size);
            keys.exp_bounds = arena.take<T>(width_);
        }
        if (tanhs) {
            keys.tanhs = arena.take<T>(size);
            keys.weighted_tanhs = arena.take<T>(size);
            keys.tanh_bounds = arena.take<T>(width_);
        }
        if (!gradients) return;
        keys.rows = arena.take<T>(size);
        if (ratios) keys.row_exps = arena.take<T>(size);
        if (tanhs) keys.row_tanhs = arena.take<T>(size);
    }

    // Fill the tables of a key tile that the algorithms for queries of these magnitudes need. `transposed`, one channel
    // a row, is not copied.
    void fill(Keys& keys, const T* transposed, const T* w, const MagnitudeRange<T>& sizes) const {
        keys.transposed = transposed;
        keys.largest = largest(transposed, form_.dim * kTileKeys);
        if (w != keys.w_v) weigh(keys, w);
        keys.finite = keys.largest <= std::numeric_limits<T>::max() && !keys.nonfinite_weight;
        const AdditiveAlgorithm of_least = form_.algorithm_for(sizes.least, keys);
        const bool small = of_least == AdditiveAlgorithm::tanh_addition;
        const bool larger = form_.algorithm_for(sizes.most, keys) != AdditiveAlgorithm::tanh_addition;
        if (small && !keys.scores_known) {
            fill_tanhs(keys);
            fill_weighted(keys.weighted_tanhs, keys.tanh_bounds, keys, keys.tanhs);
        }
        if (larger && !keys.scores_known && form_.scores_by_exps(sizes.least, keys))
            fill_weighted(keys.weighted_exps, keys.exp_bounds, keys, nullptr);
        if (!keys.rows) return;
        fill_rows(keys);
        const int64_t size = kTileKeys * width_;
        if (small)
            for (int64_t i = 0; i < size; i += L) store(keys.row_tanhs + i, tanh_of<T>(load(keys.rows + i)));
        if (larger && of_least <= AdditiveAlgorithm::single_division)
            for (int64_t i = 0; i < size; i += L)
                store(keys.row_exps + i, normal_exp_of<T>(load(keys.rows + i) * form_.kappa()));
    }

   private:
    // Set the members that depend on w_v alone. The inverse weight of a channel is u = max_weight / w, and 1 after the
    // last channel; entries of w_v far below the largest count as kMinWeight of it.
    void weigh(Keys& keys, const T* w) const {
        keys.w_v = w;
        keys.max_weight = 0;
        keys.nonfinite_weight = false;
        double total = 0;
        for (int64_t p = 0; p < form_.dim; p++) {
            keys.max_weight = std::max(keys.max_weight, std::fabs(w[p]));
            keys.nonfinite_weight |= !(std::fabs(w[p]) <= std::numeric_limits<T>::max());
            total += w[p];
        }
        keys.total = static_cast<T>(total);
        if (!keys.inverse_w_v) return;
        std::fill_n(keys.inverse_w_v, width_, T(1));
        const T least = keys.max_weight * kMinWeight;
        for (int64_t p = 0; p < form_.dim; p++)
            keys.inverse_w_v[p] =
                std::fabs(w[p]) > least ? keys.max_weight / w[p] : std::copysign(1 / kMinWeight, w[p]);
    }

    // tanh of the keys, in chunks of keys: the operands of a pass then fit the first-level cache.
    void fill_tanhs(Keys& keys) const {
        T* to = keys.tanhs;
        for (int64_t c = 0; c < kTileKeys; c += kChunk)
            for (int64_t p = 0; p < form_.dim; p++)
                for (int j = 0; j < kChunk; j += L, to += L)
                    store(to, tanh_of<T>(load(keys.transposed + p * kTileKeys + c + j)));
    }

    // Fill `to` with the table `tanhs`, or with exponentials where it is null, times u, and `bounds` with the largest
    // magnitude of each channel.
    void fill_weighted(T* to, T* bounds, const Keys& keys, const T* tanhs) const {
        const T* u = keys.inverse_w_v;
        std::fill_n(bounds, width_, T(0));
        for (int64_t p = 0; p < form_.dim; p++) {
            V<T> most{};
            for (int64_t c = 0; c < kTileKeys; c += kChunk)
                for (int64_t j = 0; j < kChunk; j += L) {
                    const int64_t at = c * form_.dim + p * kChunk + j;
                    const V<T> x =
                        tanhs ? load(tanhs + at)
                              : normal_exp_of<T>(load(keys.transposed + p * kTileKeys + c + j) * form_.kappa());
                    most = fast_max<T>(most, abs_of<T>(x));
                    store(to + at, u[p] * x);
                }
            bounds[p] = std::fabs(u[p]) * reduce_max<T>(most);
        }
    }

    // Transpose keys to channels in the lanes: one kTileKeys x L table for each vector of channels, because whole rows,
    // a power of two apart, would share a few sets of the cache. Zeros follow the last channel.
    void fill_rows(Keys& keys) const {
        T square[L * L];
        for (int64_t p = 0; p < width_; p += L)
            for (int64_t j = 0; j < kTileKeys; j += L) {
                for (int64_t i = 0; i < L; i++)
                    store(square + i * L, p + i < form_.dim ? load(keys.transposed + (p + i) * kTileKeys + j) : V<T>{});
                transpose_square(keys.rows + p * kTileKeys + j * L, L, square, L);
            }
    }

    // The largest magnitudes of rows, by micro-panel and channel.
    const T* panel_bounds(Arena& arena, const T* rows, int64_t count) const {
        T* bounds = arena.take<T>((count + kMR - 1) / kMR * width_);
        for (int64_t i = 0; i < count; i++, rows += width_) {
            T* to = bounds + i / kMR * width_;
            for (int64_t p = 0; p < width_; p += L) {
                const V<T> size = abs_of<T>(load(rows + p));
                store(to + p, i % kMR ? fast_max<T>(size, load(to + p)) : size);
            }
        }
        return bounds;
    }

    // The largest magnitude, or NaN. Several maxima at a time, because each waits for the one before.
    static T largest(const T* x, int64_t count) {
        constexpr int together = 4;
        V<T> most[together] = {};
        int64_t i = 0;
        for (; i + together * L <= count; i += together * L)
#pragma GCC unroll 4
            for (int k = 0; k < together; k++) most[k] = nan_max<T>(most[k], abs_of<T>(load(x + i + k * L)));
        for (; i < count; i += L) most[0] = nan_max<T>(most[0], abs_of<T>(load(x + i)));
        return reduce_nan_max<T>(nan_max<T>(nan_max<T>(most[0], most[1]), nan_max<T>(most[2], most[3])));
    }

    const Form& form_;
    const int64_t width_;

    // Products of two of its inverses stay in range in float, of eight in double.
    static constexpr T kMinWeight = sizeof(T) == 4 ? T(1e-12) : T(1e-25);
};
