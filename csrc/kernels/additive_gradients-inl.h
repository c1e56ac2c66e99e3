// Gradients of additive scores: da_ip = w_p sum_j ds_ij f'(a_ip + b_jp), db alike over i, dw_p = sum_ij ds_ij
// f(a_ip + b_jp). Blocks of rows are not inlined, as panels of scores are not.

template <class T>
class AdditiveGradients {
    static constexpr int L = Vector<T>::lanes;
#if defined(__AVX512F__)
    static constexpr int kGradRows = 4;
#else
    static constexpr int kGradRows = 2;
#endif
    using Form = Additive<T>;
    using Query = typename Form::Query;
    using Keys = typename Form::Keys;

   public:
    explicit AdditiveGradients(const Form& form) : form_(form) {}

    // From ds (as s; exactly 0 where a pair is hidden): da[i * lda + p] +=, db[j * ldb + p] +=, dw[p] +=.
    void operator()(const T* ds, int64_t lds, const Query& query, int64_t first, int64_t last, const Keys& keys,
                    const T* w, T* da, int64_t lda, T* db, int64_t ldb, T* dw) const {
        const AdditiveAlgorithm way = form_.algorithm_for(query.largest, keys);
        const Arguments pass{ds, lds, first, last, query.width, w, da, lda, db, ldb, dw};
        const T* b = keys.rows;
        if (way == AdditiveAlgorithm::direct_nonfinite || way == AdditiveAlgorithm::direct)
            return form_.with_term(way, [&](auto term) {
                if (way == AdditiveAlgorithm::direct_nonfinite)
                    direct_gradients<true>(term, pass, query.rows, b);
                else
                    direct_gradients<false>(term, pass, query.rows, b);
            });
        if (way == AdditiveAlgorithm::tanh_addition) {
            const T* t = keys.row_tanhs;
            return ratio_gradients<RatioForm::tanh, true>(pass, query.tanhs, query.tanhs, t, t);
        }
        const T *ea = query.exps, *eb = keys.row_exps;
        if (form_.activation == Activation::silu)
            way != AdditiveAlgorithm::single_division
                ? ratio_gradients<RatioForm::silu, true>(pass, ea, query.rows, eb, b)
                : ratio_gradients<RatioForm::silu, false>(pass, ea, query.rows, eb, b);
        else
            way != AdditiveAlgorithm::single_division
                ? ratio_gradients<RatioForm::reciprocal, true>(pass, ea, nullptr, eb, nullptr)
                : ratio_gradients<RatioForm::reciprocal, false>(pass, ea, nullptr, eb, nullptr);
    }

   private:
    const Form& form_;

    struct Arguments {
        const T* ds;
        int64_t lds, first, last, width;
        const T* w;
        T* da;
        int64_t lda;
        T* db;
        int64_t ldb;
        T* dw;
    };

    // What one vector of channels gathers.
    struct Sums {
        V<T> keys[kTileKeys] = {};
        V<T> weight = {};
    };

    // Calls block(sums, row, channel, whole) for all rows of each vector of channels, and hands on what it gathered.
    // d f = factor * (what the block calls dz), f = level + slope * (its value).
    template <class F>
    void for_each_channel(F block, const Arguments& pass, T factor, T level, T slope, bool weighted) const {
        T all = 0;
        if (level != T(0))
            for (int64_t i = pass.first; i < pass.last; i++) {
                V<T> row{};
                for (int64_t j = 0; j < kTileKeys; j += L) row += load(pass.ds + i * pass.lds + j);
                all += reduce_sum<T>(row);
            }
        for (int64_t p = 0; p < form_.dim; p += L) {
            Sums sums;
            const int64_t here = std::min<int64_t>(L, form_.dim - p);
            T lanes[L] = {};
            std::copy(pass.w + p, pass.w + p + here, lanes);
            const V<T> weight = load(lanes), scale = weighted ? splat(T(1)) : weight * factor;
            for (int64_t i = pass.first; i < pass.last;) {
                const bool whole = i + kGradRows <= pass.last;
                block(sums, i, p, whole, weight, scale);
                i += whole ? kGradRows : 1;
            }
            for (int64_t j = 0; j < kTileKeys; j++) {
                T* to = pass.db + j * pass.ldb + p;
                store(to, fused<T>(scale, sums.keys[j], load(to)));
            }
            store(lanes, sums.weight);
            for (int64_t i = 0; i < here; i++) pass.dw[p + i] += level * all + slope * lanes[i];
        }
    }

    // f in terms of r = 1 / (1 + A B) and of the sum of two numbers z.
    enum class RatioForm { reciprocal, tanh, silu };

    template <RatioForm rule>
    static inline void step(V<T> g, V<T> r, V<T> z, V<T> product, V<T>& dz, V<T>& value) {
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

    template <bool Pair>
    static inline void reciprocals(V<T> x1, V<T> x2, V<T>& r1, V<T>& r2) {
        // Where a division is dear, an estimate is cheap, and has no range to keep: 7% faster than sharing on Zen 5.
        if constexpr (Pair && !kEstimates<T>) {
            const V<T> inverse = T(1) / (x1 * x2);
            r1 = inverse * x2;
            r2 = inverse * x1;
        } else {
            r1 = reciprocal<T>(x1);
            r2 = reciprocal<T>(x2);
        }
    }

    template <RatioForm rule, bool Pair, int R>
    __attribute__((noinline)) static void ratio_micro_tile(const Arguments& pass, Sums& sums, int64_t i, int64_t p,
                                                           V<T> scale, const T* ea, const T* na, const T* eb,
                                                           const T* nb) {
        constexpr bool Sum = rule != RatioForm::reciprocal;
        const V<T> one = splat(T(1));
        V<T> a[R], n[R] = {}, row[R] = {}, weight[R] = {};
        eb += p * kTileKeys;
        if constexpr (Sum) nb += p * kTileKeys;
        for (int r = 0; r < R; r++) {
            a[r] = load(ea + (i + r) * pass.width + p);
            if constexpr (Sum) n[r] = load(na + (i + r) * pass.width + p);
        }
        const T* ds = pass.ds + i * pass.lds;
        for (int64_t j = 0; j < kTileKeys; j += 2) {
            const V<T> b1 = load(eb + j * L), b2 = load(eb + (j + 1) * L);
            V<T> n1{}, n2{};
            if constexpr (Sum) {
                n1 = load(nb + j * L);
                n2 = load(nb + (j + 1) * L);
            }
            V<T> key1 = sums.keys[j], key2 = sums.keys[j + 1];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const V<T> ab1 = a[r] * b1, ab2 = a[r] * b2;
                const V<T> x1 = ab1 + one, x2 = ab2 + one;
                V<T> r1, r2, through1, through2, value1, value2;
                reciprocals<Pair>(x1, x2, r1, r2);
                step<rule>(splat(ds[r * pass.lds + j]), r1, n[r] + n1, ab1, through1, value1);
                step<rule>(splat(ds[r * pass.lds + j + 1]), r2, n[r] + n2, ab2, through2, value2);
                row[r] += through1 + through2;
                weight[r] += value1 + value2;
                key1 += through1;
                key2 += through2;
            }
            sums.keys[j] = key1;
            sums.keys[j + 1] = key2;
        }
        for (int r = 0; r < R; r++) {
            T* to = pass.da + (i + r) * pass.lda + p;
            store(to, fused<T>(scale, row[r], load(to)));
            sums.weight += weight[r];
        }
    }

    template <RatioForm rule, bool Pair>
    void ratio_gradients(const Arguments& pass, const T* ea, const T* na, const T* eb, const T* nb) const {
        const bool is_tanh = rule == RatioForm::reciprocal && form_.activation == Activation::tanh;
        auto block = [&](Sums& sums, int64_t i, int64_t p, bool whole, V<T>, V<T> scale) {
            whole ? ratio_micro_tile<rule, Pair, kGradRows>(pass, sums, i, p, scale, ea, na, eb, nb)
                  : ratio_micro_tile<rule, Pair, 1>(pass, sums, i, p, scale, ea, na, eb, nb);
        };
        for_each_channel(block, pass, is_tanh ? T(4) : T(1), is_tanh ? T(1) : T(0), is_tanh ? T(-2) : T(1), false);
    }

    template <bool SkipZeros, class Term, int R>
    __attribute__((noinline)) static void direct_micro_tile(const Term& term, const Arguments& pass, Sums& sums,
                                                            int64_t i, int64_t p, V<T> w, V<T> scale, const T* a,
                                                            const T* b) {
        V<T> row[R] = {}, weight[R] = {};
        for (int64_t j = 0; j < kTileKeys; j++) {
            V<T> key = sums.keys[j];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const V<T> g = splat(pass.ds[(i + r) * pass.lds + j]);
                V<T> dz, value;
                term.value_and_gradient(g, load(a + (i + r) * pass.width + p) + load(b + p * kTileKeys + j * L), dz,
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
        for (int r = 0; r < R; r++) {
            T* to = pass.da + (i + r) * pass.lda + p;
            store(to, fused<T>(scale, row[r], load(to)));
            sums.weight += weight[r];
        }
    }

    template <bool SkipZeros, class Term>
    void direct_gradients(const Term& term, const Arguments& pass, const T* a, const T* b) const {
        constexpr int R = Term::inexpensive && !SkipZeros ? kGradRows : 1;
        auto block = [&](Sums& sums, int64_t i, int64_t p, bool whole, V<T> w, V<T> scale) {
            if (whole)
                for (int64_t k = i; k < i + kGradRows; k += R)
                    direct_micro_tile<SkipZeros, Term, R>(term, pass, sums, k, p, w, scale, a, b);
            else
                direct_micro_tile<SkipZeros, Term, 1>(term, pass, sums, i, p, w, scale, a, b);
        };
        for_each_channel(block, pass, T(1), T(0), T(1), SkipZeros);
    }
};
