// Additive scores s_ij = sum_p w_p f(a_ip + b_jp) of a tile of kKeys keys, and their gradients: what both are made
// of, and which way a block takes. The two files after this one compute them.
//
// - tanh(z) = 1 - 2 r, sigmoid(z) = r, silu(z) = z r with r = 1 / (1 + A B), A = exp(kappa a), B = exp(kappa b): the
//   exponentials are taken once per row and key. Four terms, or two, share one division where their product of
//   denominators cannot leave the range of the type; beyond, each term has its own; beyond that, f is evaluated term by
//   term. In fours the weights stand in the denominators: w / x = 1 / (u + A (u B)) with u = 1 / w.
// - Where |a|, |b| <= 1, tanh(a + b) = (tanh a + tanh b) / (1 + tanh a tanh b): small numbers keep their digits.
// - Scores have keys in the lanes and broadcast the rows; gradients have channels in the lanes and broadcast ds, so
//   that no sum runs across lanes.
// - A row's scores do not depend on which rows are computed with it: where a sum of products could be contracted in two
//   ways, the code says which.
// - Where a weight is not finite, terms are evaluated one by one; a pair with ds == 0 adds nothing. Pairs of a row or
// key
//   that is not finite are left out of tiles, and go one by one: tanh(inf) is 1, inf - inf is NaN.
//
// The query rows given to `prepare` stay the caller's and must outlive the Query, as the tile must the Keys; columns
// dim <= p < width of the rows are zeros. `da` and `db` are written up to column `width` (zeros are added there); db
// has the keys in rows: db[j * ldb + p].
//
// Measured on Zen 5, one thread, 512 x 512 x 256, float: scores 41 G terms/s in fours (34 in pairs, 25 one by one),
// gradients 19 (17 with divisions shared by two). A 512-bit division takes the time of 3 to 4 multiplications there, as
// does an estimate with a Newton step, which is why both sides of the range cost about the same.

// How a block of rows meets a tile.
enum class Way {
    small,    // tanh by the tangents of both sides
    fours,    // by the exponentials, four terms to a division
    pairs,    // by the exponentials, two terms to a division
    singles,  // by the exponentials, one term to a division
    terms,    // f(a + b) as it stands
    careful   // the same, and terms with ds == 0 are left out
};

template <class T>
class Additive {
    static constexpr int L = Vector<T>::lanes;

   public:
    static constexpr int kAcross = 2;
    static constexpr int kChunk = kAcross * L;  // keys whose scores are in registers

    struct Query {
        const T* rows = nullptr;  // count x width
        const T *exponentials = nullptr, *tangents = nullptr;
        int64_t width = 0;
        T largest = 0;
        bool finite = true;
        Buffer<T> exponentials_memory, tangents_memory;
        int64_t exponentials_size = 0, tangents_size = 0;
    };

    // What a way needs of a tile is computed when it is first asked for: one tile belongs to one thread.
    struct Keys {
        const T* turned = nullptr;
        T largest = 0, heaviest = 0, total = 0;  // of |b|, of |w|; sum of w
        bool finite = true;
        enum Kind {
            chunked_exponentials,
            chunked_tangents,
            folded_exponentials,
            folded_tangents,
            coefficients,
            rows,
            row_exponentials,
            row_tangents,
            kinds
        };
        mutable std::vector<char> folded;  // which fours have their weights in the denominators
        mutable T* data[kinds] = {};
        mutable bool ready[kinds] = {};
        mutable Buffer<T> memory[kinds];
        mutable int64_t size[kinds] = {};
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

    void prepare(Query& query, const T* rows, int64_t width, int64_t count) const {
        query.rows = rows;
        query.width = width;
        query.largest = largest(rows, count * width);
        query.finite = query.largest <= std::numeric_limits<T>::max();
        query.exponentials = query.tangents = nullptr;
        if (!ratio_ || !query.finite) return;
        if (in_range(query.largest)) {
            T* to = reserve(query.exponentials_memory, query.exponentials_size, count * width);
            for (int64_t i = 0; i < count * width; i += L) store(to + i, exp_of<T>(load(rows + i) * kappa_));
            query.exponentials = to;
        }
        if (has_tangents(query.largest)) {
            T* to = reserve(query.tangents_memory, query.tangents_size, count * width);
            for (int64_t i = 0; i < count * width; i += L) store(to + i, tanh_of<T>(load(rows + i)));
            query.tangents = to;
        }
    }

    // The tile stays the caller's.
    void prepare(Keys& keys, const T* turned, const T* w) const {
        keys.turned = turned;
        keys.largest = largest(turned, dim * kKeys);
        keys.heaviest = 0;
        double total = 0;
        bool heavy = false;
        for (int64_t p = 0; p < dim; p++) {
            keys.heaviest = std::max(keys.heaviest, std::fabs(w[p]));
            heavy |= !(std::fabs(w[p]) <= std::numeric_limits<T>::max());
            total += w[p];
        }
        keys.total = static_cast<T>(total);
        keys.finite = keys.largest <= std::numeric_limits<T>::max() && !heavy;
        std::fill(keys.ready, keys.ready + Keys::kinds, false);
    }

    Way way_of(const Query& query, const Keys& keys) const {
        if (!query.finite || !keys.finite) return Way::careful;
        if (!ratio_) return Way::terms;
        const T reach = query.largest + keys.largest;
        // What multiplies a denominator: a weight, and for silu an argument.
        const T above = std::log(std::max(T(1), keys.heaviest)) +
                        (activation == Activation::silu ? std::log(std::max(T(1), reach)) : T(0));
        const bool folds = keys.heaviest > T(1e-30) && keys.heaviest < T(1e30);
        if (has_tangents(query.largest) && has_tangents(keys.largest) && folds) return Way::small;
        const T span = std::fabs(kappa_) * reach;
        // 4 for the ones in the denominators and the sums; of weights there is no more than kFold in one product.
        if (folds && 4 * span + above + 4 <= kTop - std::log(kFold)) return Way::fours;
        if (2 * span <= kTop && span + above <= kTop) return Way::pairs;
        if (span <= kTop && above <= kTop) return Way::singles;
        return Way::terms;
    }

    template <class F>
    void with_term(Way way, F f) const {
        switch (activation) {
            case Activation::tanh:
                return way == Way::terms ? f(LargeTanhTerm<T>{}) : f(TanhTerm<T>{});
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

    // Exponentials or tangents of a tile, chunk by chunk of keys: what a pass reads fits the first-level cache.
    const T* chunked_table(const Keys& keys, typename Keys::Kind kind) const {
        if (keys.ready[kind]) return keys.data[kind];
        const bool tangents = kind == Keys::chunked_tangents || kind == Keys::folded_tangents;
        const bool folds = kind == Keys::folded_exponentials || kind == Keys::folded_tangents;
        const T* coefficient = folds ? keys.data[Keys::coefficients] : nullptr;
        const T* known = kind == Keys::folded_tangents ? chunked_table(keys, Keys::chunked_tangents) : nullptr;
        T* to = keys.data[kind] = reserve(keys.memory[kind], keys.size[kind], dim * kKeys);
        for (int64_t c = 0; c < kKeys; c += kChunk)
            for (int64_t p = 0; p < dim; p++) {
                const T factor = folds && keys.folded[p / 4] ? coefficient[p] : T(1);
                for (int j = 0; j < kChunk; j += L, to += L) {
                    const V<T> x = load(keys.turned + p * kKeys + c + j);
                    const V<T> y = known      ? load(known + (to - keys.data[kind]))
                                   : tangents ? tanh_of<T>(x)
                                              : exp_of<T>(x * kappa_);
                    store(to, factor * y);
                }
            }
        keys.ready[kind] = true;
        return keys.data[kind];
    }

    // By channel u = heaviest / w in the fours whose product of those is moderate, w / heaviest in the others.
    const T* coefficients(const Keys& keys, const T* w) const {
        constexpr auto kind = Keys::coefficients;
        if (keys.ready[kind]) return keys.data[kind];
        T* to = keys.data[kind] = reserve(keys.memory[kind], keys.size[kind], dim);
        keys.folded.resize(dim / 4 + 1);
        for (int64_t p = 0; p < dim; p += 4) {
            const int64_t here = std::min<int64_t>(4, dim - p);
            T product = 1;
            for (int64_t i = p; i < p + here; i++) product *= to[i] = keys.heaviest / w[i];
            const bool fold = here == 4 && std::fabs(product) <= kFold;
            keys.folded[p / 4] = fold;
            if (!fold)
                for (int64_t i = p; i < p + here; i++) to[i] = w[i] / keys.heaviest;
        }
        keys.ready[kind] = true;
        return to;
    }

    // Keys, their exponentials or tangents with channels in the lanes: a block of kKeys x L for each vector of channels
    // (whole rows, a power of two apart, would fall on the same few sets of the cache). Zeros behind the channels.
    const T* row_table(const Keys& keys, typename Keys::Kind kind, int64_t width) const {
        if (keys.ready[kind]) return keys.data[kind];
        T* to = keys.data[kind] = reserve(keys.memory[kind], keys.size[kind], kKeys * width);
        if (kind == Keys::rows) {
            T square[L * L];
            for (int64_t p = 0; p < width; p += L)
                for (int64_t j = 0; j < kKeys; j += L) {
                    for (int64_t i = 0; i < L; i++)
                        store(square + i * L, p + i < dim ? load(keys.turned + (p + i) * kKeys + j) : V<T>{});
                    transpose_square(to + p * kKeys + j * L, L, square, L);
                }
        } else {
            const T* from = row_table(keys, Keys::rows, width);
            for (int64_t i = 0; i < kKeys * width; i += L) {
                const V<T> x = load(from + i);
                store(to + i, kind == Keys::row_tangents ? tanh_of<T>(x) : exp_of<T>(x * kappa_));
            }
        }
        keys.ready[kind] = true;
        return to;
    }

    // The score of one pair from its row and key as they lie.
    T score_of(const Problem& problem, const Head& head, int64_t row, int64_t key) const {
        V<T> sum{};
        with_term(Way::careful, [&](auto term) {
            each_term(problem, head, row, key, [&](int64_t, V<T> z, V<T> w) { sum += w * term.value(z); });
        });
        return sum_of<T>(sum);
    }

    // What the gradient of such a score is to its row, its key and the weights: da[p] +=, db[p] +=, dw[p] +=.
    void add_gradients_of(const Problem& problem, const Head& head, int64_t row, int64_t key, T ds, T* da, T* db,
                          T* dw) const {
        with_term(Way::careful, [&](auto term) {
            each_term(problem, head, row, key, [&](int64_t p, V<T> z, V<T> w) {
                V<T> through, value;
                term.both(splat(ds), z, through, value);
                through *= w;
                for (int64_t i = 0; i < std::min<int64_t>(L, dim - p); i++) {
                    da[p + i] += through[i];
                    db[p + i] += through[i];
                    dw[p + i] += value[i];
                }
            });
        });
    }

   private:
    // Calls f(p, a + b, w) for each vector of channels from p on; zeros behind the last.
    template <class F>
    void each_term(const Problem& problem, const Head& head, int64_t row, int64_t key, F f) const {
        for (int64_t p = 0; p < dim; p += L) {
            T z[L] = {}, w[L] = {};
            for (int64_t i = 0; i < std::min<int64_t>(L, dim - p); i++) {
                z[i] = element<T>(head.query, problem.score_dtype, row, p + i) +
                       element<T>(head.key, problem.score_dtype, key, p + i);
                w[i] = reinterpret_cast<const T*>(head.weights)[p + i];
            }
            f(p, load(z), load(w));
        }
    }

    const T negative_, kappa_;
    const bool ratio_;

    static constexpr T kFold = T(1.6e5);  // e^12: a product of four normal weights rarely exceeds it
    static constexpr T kTop = sizeof(T) == 4 ? T(86) : T(706);  // exponents that leave room for a few sums

    bool in_range(T size) const { return std::fabs(kappa_) * size <= kTop; }
    bool has_tangents(T size) const { return activation == Activation::tanh && size <= T(1); }

    static T largest(const T* x, int64_t count) {
        V<T> top{};
        for (int64_t i = 0; i < count; i += L) {
            const V<T> v = load(x + i);
            top = max_of<T>(top, choose<T>(v < T(0), -v, v));
        }
        return largest_of<T>(top);
    }

    static T* reserve(Buffer<T>& memory, int64_t& size, int64_t count) {
        if (size < count || !memory.memory) {
            memory.reserve(count);
            size = count;
        }
        return memory.memory.get();
    }
};
