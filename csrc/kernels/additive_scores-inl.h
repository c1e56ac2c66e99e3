// Additive scores of query rows against a key tile. A micro-tile here is R rows x a chunk of keys, over some channels.
// Micro-tiles are not inlined: inside one large function the compiler would keep their sums in memory.
#pragma once

#include "kernels/activations-inl.h"
#include "kernels/additive-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/simd-inl.h"

template <class T>
class AdditiveScores {
    static constexpr int L = Vector<T>::lanes;
    static constexpr int kAcross = Additive<T>::kAcross, kChunk = Additive<T>::kChunk;
#if defined(__AVX512F__)
    static constexpr int kRowsTogether = 3;  // divides kMR
#else
    static constexpr int kRowsTogether = 2;
#endif
    static constexpr int64_t kChannels = 256;  // of a pass, with up to 32 KB of a chunk of keys
    using Form = Additive<T>;
    using Query = typename Form::Query;
    using Keys = typename Form::Keys;

   public:
    AdditiveScores(Arena& arena, const Form& form)
        : form_(form), octets_((form.dim + 7) / 8), shares_(arena.take<Share>(kStepPanels * octets_)) {}

    // Compute s[i * lds + j] for the rows [first, end) and all keys of the tile; `first` begins a micro-panel.
    void operator()(T* s, int64_t lds, const Query& query, int64_t first, int64_t end, const Keys& keys,
                    const T* w) const {
        const bool by_tanh_addition = form_.algorithm_for(query.largest, keys) == AdditiveAlgorithm::tanh_addition;
        if (by_tanh_addition || form_.scores_by_exps(query.largest, keys)) {
            const bool sum = by_tanh_addition || form_.activation == Activation::silu;
            // A target without estimates divides in any case.
            const auto scores = divides_quickly() ? (sum ? &AdditiveScores::fraction_scores<true, true>
                                                         : &AdditiveScores::fraction_scores<false, true>)
                                                  : (sum ? &AdditiveScores::fraction_scores<true, !kEstimates<T>>
                                                         : &AdditiveScores::fraction_scores<false, !kEstimates<T>>);
            return (this->*scores)(s, lds, query, first, end, keys, by_tanh_addition);
        }
        form_.with_term([&](auto term) { direct_scores(term, s, lds, query, first, end, keys, w); });
    }

    // Whether at most four terms share a division, and none is estimated: on AMD's CPUs. A division of 16 floats takes
    // as long there as 2 multiplications on Zen 4 (3 to 4 on Zen 5), the estimate of `reciprocal` as long as 3. On
    // Intel's CPUs a division takes as long as 20.
    static bool divides_quickly() {
#if defined(__AVX2__)
        static const bool is_amd = __builtin_cpu_is("amd");
        return is_amd;
#else
        return false;
#endif
    }

   private:
    const Form& form_;
    // How many terms share a division in an octet of channels, and the number of octets from this one on with as many.
    struct Share {
        int32_t terms, octets;
    };

    const int64_t octets_;
    Share* shares_;                                  // by micro-panel and eight channels
    static constexpr int64_t kStep = L > 8 ? L : 8;  // channels that `share_channels` takes together

    struct MicroTile {
        T* s = nullptr;
        int64_t lds = 0;
        int64_t width = 0;                       // of the rows
        const T* w = nullptr;                    // by channel: w_v, or its inverse for fractions
        int64_t from = 0, to = 0;                // channels
        T level = 0, slope = 1;                  // a finished sum x is stored as level + slope x
        bool resumed = false, finished = false;  // whether there are channels in front of these, and none behind
    };

    // Store the sums of some channels, added to the sums of earlier channels (`resumed`).
    template <int R>
    __attribute__((always_inline)) static inline void store_sums(const MicroTile& tile, V<T> (&sum)[R][kAcross],
                                                                 bool resumed, bool finished) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int j = 0; j < kAcross; j++) {
                T* to = tile.s + r * tile.lds + j * L;
                V<T> x = sum[r][j];
                if (resumed) x = x + load(to);
                store(to, finished ? fused<T>(x, splat(tile.slope), splat(tile.level)) : x);
            }
    }

    // The operands of denominators (e) and numerators (n): of a row (a), at one channel, and of a chunk of keys (b).
    struct Operands {
        const T *ea, *na, *eb, *nb;
        int64_t step;  // from one channel of nb to the next
    };

    // The sum of num / x over N channels as n / d, with x = u + A (u B) and num = 1 or the sum of two numbers.
    template <bool Sum, int N>
    __attribute__((always_inline)) static inline void fraction(const Operands& at, int j, const T* u, V<T>& n,
                                                               V<T>& d) {
        if constexpr (N == 1) {
            d = at.ea[0] * load(at.eb + j) + u[0];
            n = Sum ? at.na[0] + load(at.nb + j) : splat(T(1));
        } else {
            fraction<Sum, N / 2>(at, j, u, n, d);
            add_fraction<Sum, N>(at, j, u, n, d);
        }
    }
    // Add the second half of N channels to the first.
    template <bool Sum, int N>
    __attribute__((always_inline)) static inline void add_fraction(const Operands& at, int j, const T* u, V<T>& n,
                                                                   V<T>& d) {
        V<T> n2, d2;
        fraction<Sum, N / 2>(offset(at, 0, N / 2), j, u + N / 2, n2, d2);
        n = N == 2 && !Sum ? d + d2 : fused<T>(n, d2, n2 * d);  // 1 / d + 1 / d2, or n / d + n2 / d2
        d = d * d2;
    }

    __attribute__((always_inline)) static inline Operands offset(const Operands& operands, int64_t row, int64_t p) {
        return {operands.ea + row + p, operands.na + row + p, operands.eb + p * kChunk, operands.nb + p * operands.step,
                operands.step};
    }

    // Add the terms of channels [p, to), N to a division. Returns the first channel that is left. Not inlined, and with
    // few other variables: on 16 registers each more keeps a sum in memory.
    template <bool Sum, bool Divides, int N, int R>
    __attribute__((noinline)) static int64_t add_fractions(const MicroTile& tile, const Operands& operands, int64_t p,
                                                           int64_t to) {
        V<T> sum[R][kAcross] = {};
        const int64_t first = p, width = tile.width;
        const T* weights = tile.w + p;
        Operands at = offset(operands, 0, p);
        for (; p + N <= to; p += N, at = offset(at, 0, N), weights += N)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const Operands row = offset(at, r * width, 0);
                V<T> n[kAcross], d[kAcross];
#pragma GCC unroll 8
                for (int j = 0; j < kAcross; j++) fraction<Sum, N == 1 ? 1 : N / 2>(row, j * L, weights, n[j], d[j]);
#pragma GCC unroll 8
                for (int j = 0; j < kAcross; j++) {
                    if constexpr (N > 1) add_fraction<Sum, N>(row, j * L, weights, n[j], d[j]);
                    // The denominator of a single term may be infinite.
                    sum[r][j] += N == 1 || Divides ? n[j] / d[j] : n[j] * reciprocal<T>(d[j]);
                    in_register<T>(sum[r][j]);
                }
            }
        store_sums<R>(tile, sum, first > 0, tile.finished && p == tile.to);
        return p;
    }

    // Add the terms of the channels of a micro-tile, as many to a division as `shares` allows.
    template <bool Sum, bool Divides, int R>
    static void fraction_micro_tile(const MicroTile& tile, const Operands& operands, const Share* shares) {
        if (tile.to == 0) add_fractions<Sum, Divides, 1, R>(tile, operands, 0, 0);  // no channels: stores empty sums
        for (int64_t p = tile.from; p < tile.to;) {
            const auto [terms, octets] = shares[p / 8];
            const int64_t to = std::min(p + 8 * octets, tile.to);
            if (terms == 8 && p + 8 <= to) p = add_fractions<Sum, Divides, 8, R>(tile, operands, p, to);
            if (terms >= 4 && p + 4 <= to) p = add_fractions<Sum, Divides, 4, R>(tile, operands, p, to);
            if (terms >= 2 && p + 2 <= to) p = add_fractions<Sum, Divides, 2, R>(tile, operands, p, to);
            if (p < to) p = add_fractions<Sum, Divides, 1, R>(tile, operands, p, to);
        }
    }

    template <int R, class Term>
    __attribute__((noinline)) static void direct_micro_tile(const Term& term, const MicroTile& tile, const T* a,
                                                            const T* b) {
        V<T> sum[R][kAcross] = {};
        for (int64_t p = tile.from; p < tile.to; p++) {
            const V<T> weight = splat(tile.w[p]);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                for (int j = 0; j < kAcross; j++)
                    sum[r][j] = fused<T>(weight, term.value(a[r * tile.width + p] + load(b + p * kTileKeys + j * L)),
                                         sum[r][j]);
        }
        store_sums<R>(tile, sum, tile.resumed, tile.finished);
    }

    // Call f(tile, row, first key of the chunk, is_full_step) for all micro-tiles of `rows_per_step` rows, and single
    // rows at the end.
    template <class F>
    void for_each_micro_tile(F f, MicroTile tile, T* s, int64_t first, int64_t end, int64_t rows_per_step) const {
        const int64_t passes = std::max<int64_t>(1, (form_.dim + kChannels - 1) / kChannels);
        for (int64_t c = 0; c < kTileKeys; c += kChunk)
            for (int64_t pass = 0; pass < passes; pass++) {
                tile.from = pass * kChannels;
                tile.to = std::min(form_.dim, tile.from + kChannels);
                tile.resumed = pass > 0;
                tile.finished = pass + 1 == passes;
                for (int64_t i = first; i < end;) {
                    const bool is_full_step = i + rows_per_step <= end;
                    tile.s = s + i * tile.lds + c;
                    f(tile, i, c, is_full_step);
                    i += is_full_step ? rows_per_step : 1;
                }
            }
    }

    // Set how many terms share a division, by micro-panel and eight channels. Returns the distance in `shares_` from
    // one micro-panel to the next: 0 where as many terms as allowed share everywhere.
    int64_t plan_shared_divisions(const Query& query, const Keys& keys, bool by_tanh_addition, int64_t first,
                                  int64_t end) const {
        // Numerators are sums of as many products, times a sum of both operands in silu. Its denominators are up to
        // 1 + exp(reach): in floats two of them exceed `max_product` above a reach of 40, four above 20.
        const T reach = query.largest + keys.largest;
        const bool silu = form_.activation == Activation::silu;
        const T max_product = std::numeric_limits<T>::max() / 32 / (silu ? std::max(T(1), reach) : T(1));
        const int limit = !silu ? (divides_quickly() ? 4 : 8) : reach <= T(16) ? 4 : reach <= T(40) ? 2 : 1;
        const int64_t panel = first / kMR, panels = (end - first + kMR - 1) / kMR, width = query.width;
        const T* rows = (by_tanh_addition ? query.tanh_bounds : query.exp_bounds) + panel * width;
        const T* key_bounds = by_tanh_addition ? keys.tanh_bounds : keys.exp_bounds;
        const auto all_rows = [&](int64_t p) {
            V<T> x = load(rows + p);
            for (int64_t k = 1; k < panels; k++) x = fast_max<T>(x, load(rows + k * width + p));
            return x;
        };
        if (share_channels(shares_, keys, key_bounds, max_product, limit, all_rows)) return 0;
        for (int64_t k = 0; k < panels; k++)
            share_channels(shares_ + k * octets_, keys, key_bounds, max_product, limit,
                           [&](int64_t p) { return load(rows + k * width + p); });
        return octets_;
    }

    // Set how many terms share a division in eight channels, where the denominators are u + A (u B), rows(p) bounds A,
    // and `key_bounds` u B. Returns whether `limit` terms do everywhere.
    template <class F>
    bool share_channels(Share* shares, const Keys& keys, const T* key_bounds, T max_product, int limit,
                        const F& rows) const {
        bool all = true;
        for (int64_t p = 0; p < form_.dim; p += kStep) {
            T bounds[kStep];
            for (int64_t j = 0; j < kStep; j += L) {
                V<T> bound = splat(T(1));
                if (p + j < form_.dim)
                    bound = fast_max<T>(bound, fused<T>(rows(p + j), load(key_bounds + p + j),
                                                        abs_of<T>(load(keys.inverse_w_v + p + j))));
                store(bounds + j, bound);
            }
            for (int64_t j = 0; j < kStep && p + j < form_.dim; j += 8) {
                const int32_t terms = group_size(bounds + j, max_product, limit);
                shares[(p + j) / 8] = {terms, 1};
                all = all && terms == limit;
            }
        }
        for (int64_t i = octets_ - 2; i >= 0; i--)
            if (shares[i].terms == shares[i + 1].terms) shares[i].octets += shares[i + 1].octets;
        return all;
    }

    // The most terms of eight, up to `limit`, whose bounds have products up to `max_product`. No bound is below 1, so
    // that fewer terms fit wherever more do. There are no branches, which could not be predicted.
    static int32_t group_size(const T* bounds, T max_product, int limit) {
        T two[4], four[2];
        for (int i = 0; i < 4; i++) two[i] = bounds[2 * i] * bounds[2 * i + 1];
        for (int i = 0; i < 2; i++) four[i] = two[2 * i] * two[2 * i + 1];
        const bool twos =
            (two[0] <= max_product) & (two[1] <= max_product) & (two[2] <= max_product) & (two[3] <= max_product);
        const bool fours = (four[0] <= max_product) & (four[1] <= max_product), all = four[0] * four[1] <= max_product;
        return std::min(limit, 1 << (twos + (twos & fours) + (twos & fours & all)));
    }

    // Sum fractions, of which several share a division. `Sum`: the numerators are sums of two numbers, not 1.
    // `Divides`: without an estimate of the reciprocal.
    template <bool Sum, bool Divides>
    void fraction_scores(T* s, int64_t lds, const Query& query, int64_t first, int64_t end, const Keys& keys,
                         bool by_tanh_addition) const {
        const bool is_tanh = form_.activation == Activation::tanh && !by_tanh_addition;
        const T *ea = by_tanh_addition ? query.tanhs : query.exps, *na = by_tanh_addition ? ea : query.rows;
        const T* eb = by_tanh_addition ? keys.weighted_tanhs : keys.weighted_exps;
        const T* nb = by_tanh_addition ? keys.tanhs : keys.transposed;
        MicroTile plan{.lds = lds, .width = query.width, .w = keys.inverse_w_v, .slope = keys.max_weight};
        // Inverse weights are max_weight / w, so that sums lack the factor max_weight. tanh(z) = 1 - 2 r
        if (is_tanh) plan.level = keys.total, plan.slope = -2 * keys.max_weight;
        const int64_t share_stride = plan_shared_divisions(query, keys, by_tanh_addition, first, end);
        auto run_micro_tile = [&](const MicroTile& tile, int64_t i, int64_t c, bool is_full_step) {
            const int64_t at = i * query.width;
            const Share* shares = shares_ + (i - first) / kMR * share_stride;
            const Operands operands{ea + at, na + at, eb + c * form_.dim, nb + (by_tanh_addition ? c * form_.dim : c),
                                    by_tanh_addition ? kChunk : kTileKeys};
            is_full_step ? fraction_micro_tile<Sum, Divides, kRowsTogether>(tile, operands, shares)
                         : fraction_micro_tile<Sum, Divides, 1>(tile, operands, shares);
        };
        for_each_micro_tile(run_micro_tile, plan, s, first, end, kRowsTogether);
    }

    template <class Term>
    void direct_scores(const Term& term, T* s, int64_t lds, const Query& query, int64_t first, int64_t end,
                       const Keys& keys, const T* w) const {
        const MicroTile plan{.lds = lds, .width = query.width, .w = w};
        auto run_micro_tile = [&](const MicroTile& tile, int64_t i, int64_t c, bool is_full_step) {
            const T *a = query.rows + i * query.width, *b = keys.transposed + c;
            if constexpr (Term::inexpensive)
                if (is_full_step) return direct_micro_tile<kRowsTogether>(term, tile, a, b);
            direct_micro_tile<1>(term, tile, a, b);
        };
        for_each_micro_tile(run_micro_tile, plan, s, first, end, Term::inexpensive ? kRowsTogether : 1);
    }
};
