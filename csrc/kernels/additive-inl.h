// Additive scores s_ij = sum_p w_p f(a_ip + b_jp) of a tile of kTileKeys keys, and their gradients: what
// value_and_gradient are made of, and which way a block takes. The three files after this one compute tables, scores,
// gradients.
//
// - tanh(z) = 1 - 2 r, sigmoid(z) = r, silu(z) = z r with r = 1 / (1 + A B), A = exp(kappa a), B = exp(kappa b): the
//   exps are taken once per row and key. In scores the weights stand in the denominators, w / x =
//   1 / (u + A (u B)) with u = 1 / w, and eight terms, four or two share one division where the product of their
//   denominators cannot store_sums the range of the type: bounded for panels of rows and eight channels of a tile.
//   Where the exps themselves store_sums it, f is evaluated term by term.
// - Where |a|, |b| <= 1, tanh(a + b) = (tanh a + tanh b) / (1 + tanh a tanh b): small numbers keep their digits.
// - Scores have keys in the lanes and broadcast the rows; gradients have channels in the lanes and broadcast ds, so
//   that no sum runs across lanes.
// - A row's scores do not depend, but for their rounding, on which rows are computed with it.
// - Where a weight is not finite, terms are evaluated one by one; a pair with ds == 0 adds nothing. Bf16Dot of a row or
//   key that is not finite are left out of tiles, and go one by one: tanh(inf) is 1, inf - inf is NaN.
//
// Query rows and tile stay the caller's and must outlive the Query and the Keys; columns dim <= p < width of the rows
// are zeros. `da` and `db` are written up to column `width` (zeros are added there); db has the keys in rows:
// db[j * ldb + p].
//
// Measured, one thread, 512 x 512 x 256, float. Zen 5: scores 41 G terms/s in fours by a division (34 in pairs, 25 one
// by one), gradients 19 (17 with divisions shared by two). A 512-bit division takes the time of 3 to 4 multiplications
// there, as does an estimate with a Newton step. On Cascade Lake a division takes that of 20; the loop alone reaches 15
// in fours by a division, 17 by an estimate, 18 in eights by an estimate (16 by a division). On Zen 4 it takes that of
// 2.2 (an estimate with its step 3), and the loop reaches 20 in fours by a division, 2% less in eights.

// How a block of rows meets a tile. Scores have one way for pairs, singles and beyond: see `scores_by_exps`.
enum class AdditiveAlgorithm {
    tanh_addition,    // tanh by the tanhs of value_and_gradient operands
    shared_division,  // by the exps; two terms may share a division
    single_division,  // by the exps, one term to a division
    direct,           // f(a + b) as it stands
    direct_nonfinite  // the same, and terms with ds == 0 are left out
};

template <class T>
class Additive {
    static constexpr int L = Vector<T>::lanes;

   public:
    static constexpr int kAcross = 2;
    static constexpr int kChunk = kAcross * L;  // keys whose scores are in registers

    // Rows of a block; null what no way needs.
    struct Query {
        const T* rows = nullptr;  // count x width
        const T *exps = nullptr, *tanhs = nullptr;
        const T *exp_bounds = nullptr, *tanh_bounds = nullptr;  // by strip and channel: the largest of |.|
        int64_t width = 0;
        T largest = 0;
    };

    // A tile of keys. Of the tables only those hold numbers that some row may need.
    struct Keys {
        const T* transposed = nullptr;
        const T* weights = nullptr;
        T largest = 0, max_weight = 0, total = 0;      // of |b|, of |w|; sum of w
        bool finite = true, nonfinite_weight = false;  // nonfinite_weight: some weight is not finite
        bool scores_known = false;                     // the scores are known: no tables for them
        T* inverse_weights = nullptr;                  // by channel
        // For scores, chunk by chunk of keys; `weighted`: times the inverse_weights, whose peaks are by channel.
        T *tanhs = nullptr, *weighted_tanhs = nullptr, *weighted_exps = nullptr;
        T *tanh_bounds = nullptr, *exp_bounds = nullptr;
        // For gradients, channels in the lanes.
        T *rows = nullptr, *row_tanhs = nullptr, *row_exps = nullptr;
    };

    const Activation activation;
    const int64_t dim;

    explicit Additive(const Problem& problem)
        : activation(problem.activation),
          dim(problem.dim),
          negative_(static_cast<T>(problem.negative_slope)),
          kappa_(activation == Activation::tanh ? T(2) : T(-1)),
          ratio_(activation == Activation::tanh || activation == Activation::sigmoid ||
                 activation == Activation::silu) {}

    bool has_ratio_form() const { return ratio_; }
    T kappa() const { return kappa_; }
    // Whether tanhs serve numbers up to this size, and whether their exps are numbers.
    bool tanh_addition_applies(T size) const { return activation == Activation::tanh && size <= T(1); }
    bool exp_in_range(T size) const { return std::fabs(kappa_) * size <= kMaxExponent; }

    // `rows`: the largest of their numbers. The more that is, the later the way.
    AdditiveAlgorithm algorithm_for(T rows, const Keys& keys) const {
        if (!is_finite_size(rows) || !keys.finite) return AdditiveAlgorithm::direct_nonfinite;
        if (!ratio_) return AdditiveAlgorithm::direct;
        if (tanh_addition_applies(rows) && tanh_addition_applies(keys.largest) && weights_foldable(keys))
            return AdditiveAlgorithm::tanh_addition;
        const T span = std::fabs(kappa_) * (rows + keys.largest);
        if (2 * span <= kMaxExponent) return AdditiveAlgorithm::shared_division;
        if (span <= kMaxExponent) return AdditiveAlgorithm::single_division;
        return AdditiveAlgorithm::direct;
    }

    // Whether scores go by the exps: value_and_gradient operands' are numbers (in silu, whose terms grow, their
    // products too), and the weights can stand in the denominators.
    bool scores_by_exps(T rows, const Keys& keys) const {
        if (!ratio_ || !is_finite_size(rows) || !keys.finite || !weights_foldable(keys)) return false;
        if (activation == Activation::silu) return exp_in_range(rows + keys.largest);
        // Where u B overflows nevertheless, its weight is below the rounding of the max_weight.
        const T room = std::log(T(4) / std::numeric_limits<T>::epsilon());
        return exp_in_range(rows) && std::fabs(kappa_) * keys.largest <= kMaxExponent - room;
    }

    template <class F>
    void with_term(AdditiveAlgorithm way, F f) const {
        switch (activation) {
            case Activation::tanh:
                return way == AdditiveAlgorithm::direct ? f(LargeTanhTerm<T>{}) : f(TanhTerm<T>{});
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
        // A slope of 0 makes NaN of -inf, which a maximum would pass over.
        if (negative_ <= T(1) && negative_ != T(0)) return f(RectifierTerm<T, true>{negative_});
        return f(RectifierTerm<T, false>{negative_});
    }

    // The score of one pair from its row and key as they lie.
    T pair_score(const Problem& problem, const Head& head, int64_t row, int64_t key) const {
        V<T> sum{};
        with_term(AdditiveAlgorithm::direct_nonfinite, [&](auto term) {
            for_each_channel(problem, head, row, key, [&](int64_t, V<T> z, V<T> w) {
                sum += w * term.value(z);
                const T whole = reduce_sum<T>(sum);
                return whole == whole;  // what comes to NaN stays it
            });
        });
        return reduce_sum<T>(sum);
    }

    // What the gradient of such a score is to its row, its key and the weights: da[p] +=, db[p] +=, dw[p] +=.
    void add_pair_gradients(const Problem& problem, const Head& head, int64_t row, int64_t key, T ds, T* da, T* db,
                            T* dw) const {
        if (ds != ds) {
            // Of a model that has failed all pairs are such.
            for (T* sums : {da, db, dw})
                for (int64_t p = 0; p < dim; p++) sums[p] += ds;
            return;
        }
        with_term(AdditiveAlgorithm::direct_nonfinite, [&](auto term) {
            for_each_channel(problem, head, row, key, [&](int64_t p, V<T> z, V<T> w) {
                V<T> dz, value;
                term.value_and_gradient(splat(ds), z, dz, value);
                dz *= w;
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
    // Calls f(p, a + b, w) for each vector of channels from p on, as long as it says so; zeros behind the last.
    template <class F>
    void for_each_channel(const Problem& problem, const Head& head, int64_t row, int64_t key, F f) const {
        for (int64_t p = 0; p < dim; p += L) {
            T a[L], b[L], w[L] = {};
            const int64_t here = std::min<int64_t>(L, dim - p);
            read_row(a, L, head.query, problem.score_dtype, row, p, here);
            read_row(b, L, head.key, problem.score_dtype, key, p, here);
            std::copy_n(reinterpret_cast<const T*>(head.weights) + p, here, w);
            if (!f(p, load(a) + load(b), load(w))) return;
        }
    }

    const T negative_, kappa_;
    const bool ratio_;
    static constexpr T kMaxExponent = sizeof(T) == 4 ? T(86) : T(706);  // exponents that store_sums room for a few sums

    static bool is_finite_size(T size) { return size <= std::numeric_limits<T>::max(); }
    bool weights_foldable(const Keys& keys) const {
        return keys.max_weight == 0 || (keys.max_weight > T(1e-30) && keys.max_weight < T(1e30));
    }
};
