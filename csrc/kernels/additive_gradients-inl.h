// Gradients of additive scores: da_ip = w_p sum_j ds_ij f'(a_ip + b_jp), db likewise over i, and dw_p = sum_ij ds_ij
// f(a_ip + b_jp). Micro-tiles are not inlined, as in additive_scores-inl.h.
#pragma once

#include "kernels/activations-inl.h"
#include "kernels/additive-inl.h"
#include "kernels/additive_scores-inl.h"
#include "kernels/simd-inl.h"

template <class T>
class AdditiveGradients {
    static constexpr int L = Vector<T>::lanes;
    static constexpr int kGradRows = 4;  // rows of a micro-tile
    using Form = Additive<T>;
    using Query = typename Form::Query;
    using Keys = typename Form::Keys;

   public:
    explicit AdditiveGradients(const Form& form) : form_(form) {}

    // Add the gradients from ds, exactly 0 where a pair is masked, to da[i * lda + p], db[j * ldb + p] and dw[p].
    void operator()(const T* ds, int64_t lds, const Query& query, int64_t first, int64_t end, const Keys& keys,
                    const T* w, T* da, int64_t lda, T* db, int64_t ldb, T* dw) const {
        const AdditiveAlgorithm algorithm = form_.algorithm_for(query.largest, keys);
        const Arguments args{ds, lds, first, end, query.width, w, da, lda, db, ldb, dw};
        const T* b = keys.rows;
        if (algorithm == AdditiveAlgorithm::direct_nonfinite)
            return form_.with_term([&](auto term) { direct_gradients<true>(term, args, query.rows, b); });
        if (algorithm == AdditiveAlgorithm::direct)
            return form_.with_term([&](auto term) { direct_gradients<false>(term, args, query.rows, b); });
        if (algorithm == AdditiveAlgorithm::tanh_addition) {
            // (tanh a + tanh b) / (1 + tanh a tanh b), and products of these denominators are in range.
            const T* t = keys.row_tanhs;
            return ratio_gradients<RatioForm::tanh>(args, query.tanhs, query.tanhs, t, t, true);
        }
        const T *ea = query.exps, *eb = keys.row_exps;
        const bool in_range = algorithm == AdditiveAlgorithm::shared_division;
        if (form_.activation == Activation::silu)
            ratio_gradients<RatioForm::silu>(args, ea, query.rows, eb, b, in_range);
        else
            ratio_gradients<RatioForm::reciprocal>(args, ea, nullptr, eb, nullptr, in_range);
    }

   private:
    const Form& form_;

    struct Arguments {
        const T* ds;
        int64_t lds, first, end, width;
        const T* w;
        T* da;
        int64_t lda;
        T* db;
        int64_t ldb;
        T* dw;
    };

    // The sums of one vector of channels.
    struct Sums {
        V<T> keys[kTileKeys] = {};
        V<T> weight = {};
    };

    // Call block(sums, row, channel, whole, w, scale) for all rows of each vector of channels: for kGradRows rows where
    // `whole`, else for one. Add its sums to db and dw: df = factor * (dz of the block), f = level + slope * (value of
    // the block). `weighted`: the block multiplies dz by w_v itself.
    template <class F>
    void for_each_channel(F block, const Arguments& args, T factor, T level, T slope, bool weighted) const {
        T all = 0;  // sum of ds
        if (level != T(0))
            for (int64_t i = args.first; i < args.end; i++) {
                V<T> row{};
                for (int64_t j = 0; j < kTileKeys; j += L) row += load(args.ds + i * args.lds + j);
                all += reduce_sum<T>(row);
            }
        for (int64_t p = 0; p < form_.dim; p += L) {
            Sums sums;
            const int64_t here = std::min<int64_t>(L, form_.dim - p);
            T lanes[L] = {};
            std::copy(args.w + p, args.w + p + here, lanes);
            const V<T> weight = load(lanes), scale = weighted ? splat(T(1)) : weight * factor;
            for (int64_t i = args.first; i < args.end;) {
                const bool whole = i + kGradRows <= args.end;
                block(sums, i, p, whole, weight, scale);
                i += whole ? kGradRows : 1;
            }
            for (int64_t j = 0; j < kTileKeys; j++) {
                T* to = args.db + j * args.ldb + p;
                store(to, fused<T>(scale, sums.keys[j], load(to)));
            }
            store(lanes, sums.weight);
            for (int64_t i = 0; i < here; i++) args.dw[p + i] += level * all + slope * lanes[i];
        }
    }

    // The formula of f in r = 1 / (1 + A B) and a sum z of two numbers: r, or z r of tanh or of silu.
    enum class RatioForm { reciprocal, tanh, silu };

    // From r = 1 / (1 + product) of a pair: g times the value of the form, and g times its derivative in the sum of row
    // and key, as in the terms of activations-inl.h.
    template <RatioForm rule>
    __attribute__((always_inline)) static inline void ratio_gradient(V<T> g, V<T> r, V<T> z, V<T> product, V<T>& dz,
                                                                     V<T>& value) {
        if constexpr (rule == RatioForm::reciprocal) {
            value = g * r;
            dz = fused_negative<T>(value, r, value);
        } else if constexpr (rule == RatioForm::tanh) {
            const V<T> t = z * r;
            value = g * t;
            dz = fused_negative<T>(value, t, g);
        } else {
            const V<T> gr = g * r;
            value = gr * z;
            dz = fused<T>(value, product * r, gr);  // 1 - r = A B r keeps its digits
        }
    }

    // How the rows of a micro-tile get 1 / (1 + A B), one key at a time. Where divisions are cheap, three of
    // four rows divide and one estimates, which keeps the divider and the multiply-adds busy alike. Elsewhere all
    // estimate, or without estimates two share a division, where the range allows.
    enum class Inversion { mixed, shared, single };

    // Replace x by 1 / x.
    template <Inversion how, int R>
    __attribute__((always_inline)) static inline void invert(V<T> (&x)[R]) {
        if constexpr (how == Inversion::shared && !kEstimates<T> && R % 2 == 0) {
#pragma GCC unroll 8
            for (int r = 0; r < R; r += 2) {
                const V<T> inverse = T(1) / (x[r] * x[r + 1]), other = inverse * x[r];
                x[r] = inverse * x[r + 1];
                x[r + 1] = other;
            }
        } else {
            constexpr bool divides = how == Inversion::mixed || !kEstimates<T>;
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
                x[r] = divides && (how != Inversion::mixed || r > 0) ? T(1) / x[r] : reciprocal<T>(x[r]);
        }
    }

    // Add `scale` times row[r] to da of row i + r, of the R rows of a micro-tile.
    template <int R>
    __attribute__((always_inline)) static inline void add_row_sums(const Arguments& args, int64_t i, int64_t p,
                                                                   V<T> scale, const V<T> (&row)[R]) {
        for (int r = 0; r < R; r++) {
            T* to = args.da + (i + r) * args.lda + p;
            store(to, fused<T>(scale, row[r], load(to)));
        }
    }

    // `ea`, `eb`: A of rows and B of keys; `na`, `nb`: the numbers whose sum is z, unless z is not read.
    template <RatioForm rule, Inversion how, int R>
    __attribute__((noinline)) static void ratio_micro_tile(const Arguments& args, Sums& sums, int64_t i, int64_t p,
                                                           V<T> scale, const T* ea, const T* na, const T* eb,
                                                           const T* nb) {
        constexpr bool Sum = rule != RatioForm::reciprocal;
        const V<T> one = splat(T(1));
        V<T> a[R], n[R] = {}, row[R] = {}, weight{};
        eb += p * kTileKeys;
        if constexpr (Sum) nb += p * kTileKeys;
        for (int r = 0; r < R; r++) {
            a[r] = load(ea + (i + r) * args.width + p);
            if constexpr (Sum) n[r] = load(na + (i + r) * args.width + p);
        }
        const T* ds = args.ds + i * args.lds;
        const auto inverses = [&](int64_t j, V<T>(&x)[R]) {
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) x[r] = a[r] * load(eb + j * L) + one;
            invert<how>(x);
        };
        const auto add = [&](int64_t j, const V<T>(&inverse)[R]) {
            V<T> z{}, key = sums.keys[j], values{};
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                V<T> dz, value;
                if constexpr (Sum) z = n[r] + load(nb + j * L);
                ratio_gradient<rule>(splat(ds[r * args.lds + j]), inverse[r], z, a[r] * load(eb + j * L), dz, value);
                key += dz;
                row[r] += dz;
                // Added up by key: a chain of additions over all pairs, 3 cycles each, would take longer than the rest.
                values = r == 0 ? value : values + value;
            }
            sums.keys[j] = key;
            weight += values;
        };
        // A key is inverted while the one before is added, which would wait for the division.
        V<T> inverse[R], next[R];
        inverses(0, inverse);
#pragma GCC unroll 2
        for (int64_t j = 0; j + 1 < kTileKeys; j++) {
            inverses(j + 1, next);
            add(j, inverse);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) inverse[r] = next[r];
        }
        add(kTileKeys - 1, inverse);
        add_row_sums<R>(args, i, p, scale, row);
        sums.weight += weight;
    }

    template <RatioForm rule, Inversion how>
    void ratio_gradients(const Arguments& args, const T* ea, const T* na, const T* eb, const T* nb) const {
        // tanh(z) = 1 - 2 r has the slope 4 r (1 - r).
        const bool is_tanh = rule == RatioForm::reciprocal && form_.activation == Activation::tanh;
        auto block = [&](Sums& sums, int64_t i, int64_t p, bool whole, V<T>, V<T> scale) {
            whole ? ratio_micro_tile<rule, how, kGradRows>(args, sums, i, p, scale, ea, na, eb, nb)
                  : ratio_micro_tile<rule, how, 1>(args, sums, i, p, scale, ea, na, eb, nb);
        };
        for_each_channel(block, args, is_tanh ? T(4) : T(1), is_tanh ? T(1) : T(0), is_tanh ? T(-2) : T(1), false);
    }

    template <RatioForm rule>
    void ratio_gradients(const Arguments& args, const T* ea, const T* na, const T* eb, const T* nb,
                         bool in_range) const {
        if constexpr (sizeof(T) == 4)
            if (AdditiveScores<T>::divides_quickly())
                return ratio_gradients<rule, Inversion::mixed>(args, ea, na, eb, nb);
        in_range ? ratio_gradients<rule, Inversion::shared>(args, ea, na, eb, nb)
                 : ratio_gradients<rule, Inversion::single>(args, ea, na, eb, nb);
    }

    // f evaluated pair by pair; `SkipZeros`: a pair with ds == 0 adds nothing, and dz are times w_v.
    template <bool SkipZeros, class Term, int R>
    __attribute__((noinline)) static void direct_micro_tile(const Term& term, const Arguments& args, Sums& sums,
                                                            int64_t i, int64_t p, V<T> w, V<T> scale, const T* a,
                                                            const T* b) {
        V<T> row[R] = {}, weight[R] = {};
        for (int64_t j = 0; j < kTileKeys; j++) {
            V<T> key = sums.keys[j];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const V<T> g = splat(args.ds[(i + r) * args.lds + j]);
                V<T> dz, value;
                term.value_and_gradient(g, load(a + (i + r) * args.width + p) + load(b + p * kTileKeys + j * L), dz,
                                        value);
                if constexpr (SkipZeros) {  // 0 * NaN is NaN
                    dz = select<T>(g == T(0), V<T>{}, dz * w);
                    value = select<T>(g == T(0), V<T>{}, value);
                }
                row[r] += dz;
                weight[r] += value;
                key += dz;
            }
            sums.keys[j] = key;
        }
        add_row_sums<R>(args, i, p, scale, row);
        for (int r = 0; r < R; r++) sums.weight += weight[r];
    }

    template <bool SkipZeros, class Term>
    void direct_gradients(const Term& term, const Arguments& args, const T* a, const T* b) const {
        constexpr int R = Term::inexpensive && !SkipZeros ? kGradRows : 1;
        auto block = [&](Sums& sums, int64_t i, int64_t p, bool whole, V<T> w, V<T> scale) {
            if (whole)
                for (int64_t k = i; k < i + kGradRows; k += R)
                    direct_micro_tile<SkipZeros, Term, R>(term, args, sums, k, p, w, scale, a, b);
            else
                direct_micro_tile<SkipZeros, Term, 1>(term, args, sums, i, p, w, scale, a, b);
        };
        for_each_channel(block, args, T(1), T(0), T(1), SkipZeros);
    }
};
