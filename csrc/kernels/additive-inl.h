// Additive scores s_ij = sum_p w_p f(a_ip + b_jp) of query rows a and a key tile b, and their gradients: the operands,
// and the algorithm for a pair of tiles. The three files after this one compute tables, scores and gradients.
//
// - tanh(z) = 1 - 2 r, sigmoid(z) = r, silu(z) = z r with r = 1 / (1 + A B), A = exp(kappa a), B = exp(kappa b). These
//   exponentials are computed once per row and key. In scores w_v is part of the denominators: with u = 1 / w a term is
//   w / x = 1 / (u + A (u B)). Eight, four or two terms share one division where the product of their denominators
//   stays in the range of the type, which is bounded by micro-panel and eight channels of a tile. Where the
//   exponentials themselves leave the range, f is evaluated term by term.
// - Where |a|, |b| <= 1, tanh(a + b) = (tanh a + tanh b) / (1 + tanh a tanh b): small numbers keep their digits.
// - Scores have keys in the lanes and broadcast the rows; gradients have channels in the lanes and broadcast ds. No sum
//   then runs across lanes.
// - The scores of a row depend on the rows computed with it only in their rounding.
// - Where a weight is not finite, terms are evaluated one by one, and a pair with ds == 0 adds nothing. Pairs with a
//   row or key that is not finite are computed one by one outside of tiles: tanh(inf) is 1, inf - inf is NaN.
//
// Query rows and tile belong to the caller and must outlive Query and Keys. Columns dim <= p < width of the rows are
// zeros. `da` and `db` are written up to column `width`, where zeros are added; db has keys in rows: db[j * ldb + p].
//
// csrc/TUNING.md, "Additive scores", has how many terms share a division on which CPU, and the times.
#pragma once

#include "kernels/activations-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/simd-inl.h"

// How the gradients of a query tile and a key tile are computed, from the smallest magnitudes to the largest. Scores do
// not tell shared_division, single_division and direct apart: see `scores_by_exps`.
enum class AdditiveAlgorithm {
    tanh_addition,    // tanh by its addition theorem
    shared_division,  // from exponentials, two terms to a division
    single_division,  // from exponentials, one term to a division
    direct,           // f(a + b) term by term
    direct_nonfinite  // the same, without terms with ds == 0
};

template <class T>
class Additive {
    static constexpr int L = Vector<T>::lanes;

   public:
    static constexpr int kAcross = 2;           // vectors of keys of a micro-tile
    static constexpr int kChunk = kAcross * L;  // its keys, whose scores are in registers

    // The operands of a query tile; tables that no algorithm needs are null.
    struct Query {
        const T* rows = nullptr;  // count x width
        const T *exps = nullptr, *tanhs = nullptr;
        const T *exp_bounds = nullptr, *tanh_bounds = nullptr;  // by micro-panel and channel: the largest magnitude
        int64_t width = 0;
        T largest = 0;
    };

    // The operands of a key tile. Only tables that some row may need are filled.
    struct Keys {
        const T* transposed = nullptr;
        const T* w_v = nullptr;
        T largest = 0, max_weight = 0, total = 0;      // of |b|, of |w|; sum of w
        bool finite = true, nonfinite_weight = false;  // no key or weight is NaN or infinite; some weight is
        bool scores_known = false;                     // saved scores are read: no tables for scores
        T* inverse_w_v = nullptr;                      // by channel
        // For scores, in chunks of keys; `weighted` ones are times the inverse of w_v, and are bounded by channel.
        T *tanhs = nullptr, *weighted_tanhs = nullptr, *weighted_exps = nullptr;
        T *tanh_bounds = nullptr, *exp_bounds = nullptr;
        // For gradients, with channels in the lanes.
        T *rows = nullptr, *row_tanhs = nullptr, *row_exps = nullptr;
    };

    const Activation activation;
    const int64_t dim;
    // Whether tiles have so few pairs that f is evaluated for each: see additive_pairs-inl.h.
    const bool by_pairs;

    explicit Additive(const Problem& problem)
        : activation(problem.activation),
          dim(problem.dim),
          by_pairs(problem.form == Form::additive && is_small(problem.query_len, problem.key_len)),
          negative_(static_cast<T>(problem.negative_slope)),
          kappa_(activation == Activation::tanh ? T(2) : T(-1)),
          ratio_(activation == Activation::tanh || activation == Activation::sigmoid ||
                 activation == Activation::silu) {}

    bool has_ratio_form() const { return ratio_; }  // f is 1 - 2 r, r or z r, as above
    T kappa() const { return kappa_; }
    // Whether the addition theorem of tanh serves numbers up to this size, and whether their exponentials are in range.
    bool tanh_addition_applies(T size) const { return activation == Activation::tanh && size <= T(1); }
    bool exp_in_range(T size) const { return std::fabs(kappa_) * size <= kMaxExponent; }

    // The algorithm for query rows whose largest magnitude is `size`.
    AdditiveAlgorithm algorithm_for(T size, const Keys& keys) const {
        // The sum of two large numbers may be infinite.
        if (!is_finite_size(size + keys.largest) || !keys.finite) return AdditiveAlgorithm::direct_nonfinite;
        if (!ratio_) return AdditiveAlgorithm::direct;
        if (tanh_addition_applies(size) && tanh_addition_applies(keys.largest) && w_v_foldable(keys))
            return AdditiveAlgorithm::tanh_addition;
        const T span = std::fabs(kappa_) * (size + keys.largest);
        if (2 * span <= kMaxExponent) return AdditiveAlgorithm::shared_division;
        if (span <= kMaxExponent) return AdditiveAlgorithm::single_division;
        return AdditiveAlgorithm::direct;
    }

    // Whether scores can be computed from the exponentials of rows up to this size: both operands' exponentials are in
    // range (in silu, whose terms grow, also their products), and w_v can be part of the denominators.
    bool scores_by_exps(T size, const Keys& keys) const {
        if (!ratio_ || !is_finite_size(size) || !keys.finite || !w_v_foldable(keys)) return false;
        if (activation == Activation::silu) return exp_in_range(size + keys.largest);
        // Where u B overflows nevertheless, its weight is below the rounding of the largest weight.
        const T room = std::log(T(4) / std::numeric_limits<T>::epsilon());
        return exp_in_range(size) && std::fabs(kappa_) * keys.largest <= kMaxExponent - room;
    }

    // Call f with the term of the activation, so that its loops are compiled for each.
    template <class F>
    void with_term(F f) const {
        switch (activation) {
            case Activation::tanh:
                return f(TanhTerm<T>{});
            case Activation::sigmoid:
                return f(SigmoidTerm<T>{});
            case Activation::relu:
                return f(ReluTerm<T>{});
            case Activation::silu:
                return f(SiluTerm<T>{});
            case Activation::gelu:
                return f(GeluTerm<T>{});
            case Activation::leaky_relu:
                break;
        }
        // Up to slope 1 leaky_relu is max(z, slope z); not for slope 0, as -inf times 0 is a NaN that a maximum drops.
        if (negative_ <= T(1) && negative_ != T(0)) return f(RectifierTerm<T, true>{negative_});
        return f(RectifierTerm<T, false>{negative_});
    }

    // The score of one pair, read from the caller's memory.
    T pair_score(const Problem& problem, const Head& head, int64_t row, int64_t key) const {
        V<T> sum{};
        with_term([&](auto term) {
            for_each_channel(problem, head, row, key, [&](int64_t, V<T> z, V<T> w) {
                sum += w * term.value(z);
                const T whole = reduce_sum<T>(sum);
                return whole == whole;  // a sum that is NaN stays NaN
            });
        });
        return reduce_sum<T>(sum);
    }

    // Add the gradients of one pair: da[p] +=, db[p] +=, dw[p] +=.
    void add_pair_gradients(const Problem& problem, const Head& head, int64_t row, int64_t key, T ds, T* da, T* db,
                            T* dw) const {
        if (ds != ds) {
            // Fast, because all pairs of a diverged model are such.
            for (T* sums : {da, db, dw})
                for (int64_t p = 0; p < dim; p++) sums[p] += ds;
            return;
        }
        with_term([&](auto term) {
            for_each_channel(problem, head, row, key, [&](int64_t p, V<T> z, V<T> w) {
                V<T> dz, value;
                term.value_and_gradient(splat(ds), z, dz, value);
                // The slope at NaN is NaN; the rectifiers' terms select one.
                dz = select<T>(z == z, dz, z) * w;
                for (int64_t i = 0; i < std::min<int64_t>(L, dim - p); i++) {
                    da[p + i] += dz[i];
                    db[p + i] += dz[i];
                    dw[p + i] += value[i];
                }
                return true;
            });
        });
    }

   private:
    // Call f(p, a + b, w) for each vector of channels from p on, until it returns false; zeros follow the last channel.
    template <class F>
    void for_each_channel(const Problem& problem, const Head& head, int64_t row, int64_t key, F f) const {
        for (int64_t p = 0; p < dim; p += L) {
            T a[L], b[L], w[L] = {};
            const int64_t here = std::min<int64_t>(L, dim - p);
            read_row(a, L, head.query, problem.score_dtype, row, p, here);
            read_row(b, L, head.key, problem.score_dtype, key, p, here);
            std::copy_n(reinterpret_cast<const T*>(head.w_v) + p, here, w);
            if (!f(p, load(a) + load(b), load(w))) return;
        }
    }

    // Time in units of a term from tables, which always have 64 keys: making them takes some 8 for each key, a pair
    // without tables 4.5 with 512-bit vectors, 3.5 with shorter vectors, whose divisions are cheaper.
    static bool is_small(int64_t rows, int64_t keys) {
        constexpr double pair = kVectorBytes == 64 ? 4.5 : 3.5;
        return pair * double(rows * std::min(keys, kTileKeys)) < double((8 + rows) * kTileKeys);
    }

    const T negative_, kappa_;
    const bool ratio_;
    static constexpr T kMaxExponent =
        sizeof(T) == 4 ? T(86) : T(706);  // leaves room for a few sums in the range of exponents

    static bool is_finite_size(T size) { return size <= std::numeric_limits<T>::max(); }
    bool w_v_foldable(const Keys& keys) const {
        return keys.max_weight == 0 || (keys.max_weight > T(1e-30) && keys.max_weight < T(1e30));
    }
};
