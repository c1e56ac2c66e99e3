// Additive scores s_ij = sum_p w_p f(a_ip + b_jp) of a tile of kKeys keys, and their gradients: what both are made
// of, and which way a block takes. The two files after this one compute them.
//
// - tanh(z) = 1 - 2 r, sigmoid(z) = r, silu(z) = z r with r = 1 / (1 + A B), A = exp(kappa a), B = exp(kappa b): the
//   exponentials are taken once per row and key. In scores the weights stand in the denominators, w / x =
//   1 / (u + A (u B)) with u = 1 / w, and eight terms, four or two share one division where the product of their
//   denominators cannot leave the range of the type: bounded for each few rows and eight channels of a tile. Where the
//   exponentials themselves leave it, f is evaluated term by term.
// - Where |a|, |b| <= 1, tanh(a + b) = (tanh a + tanh b) / (1 + tanh a tanh b): small numbers keep their digits.
// - Scores have keys in the lanes and broadcast the rows; gradients have channels in the lanes and broadcast ds, so
//   that no sum runs across lanes.
// - A row's scores do not depend, but for their rounding, on which rows are computed with it.
// - Where a weight is not finite, terms are evaluated one by one; a pair with ds == 0 adds nothing. Pairs of a row or
//   key that is not finite are left out of tiles, and go one by one: tanh(inf) is 1, inf - inf is NaN.
//
// The query rows given to `prepare` stay the caller's and must outlive the Query, as the tile must the Keys; columns
// dim <= p < width of the rows are zeros. `da` and `db` are written up to column `width` (zeros are added there); db
// has the keys in rows: db[j * ldb + p].
//
// Measured, one thread, 512 x 512 x 256, float. Zen 5: scores 41 G terms/s in fours by a division (34 in pairs, 25 one
// by one), gradients 19 (17 with divisions shared by two). A 512-bit division takes the time of 3 to 4 multiplications
// there, as does an estimate with a Newton step. On Cascade Lake a division takes that of 20; the loop alone reaches 15
// in fours by a division, 17 by an estimate, 18 in eights by an estimate (16 by a division). On Zen 4 it takes that of
// 3 (an estimate with its step 4), and the loop reaches 20, which is all that its multiplications leave.

// How a block of rows meets a tile. Scores have one way for pairs, singles and beyond: see `by_exponentials`.
enum class Way {
    small,    // tanh by the tangents of both sides
    pairs,    // by the exponentials; two terms may share a division
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
        bool finite = true, heavy = false;       // heavy: some weight is not finite
        enum Kind {
            chunked_tangents,
            weighted_exponentials,
            weighted_tangents,
            coefficients,
            peaks,
            rows,
            row_exponentials,
            row_tangents,
            kinds
        };
        const T* weights = nullptr;
        mutable std::vector<char> shares;  // by rows and channels: how many terms share a division
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
        const bool same = w == keys.weights, coefficients = same && keys.ready[Keys::coefficients];
        std::fill(keys.ready, keys.ready + Keys::kinds, false);
        keys.ready[Keys::coefficients] = coefficients;
        if (!same) {
            keys.weights = w;
            keys.heaviest = 0;
            keys.heavy = false;
            double total = 0;
            for (int64_t p = 0; p < dim; p++) {
                keys.heaviest = std::max(keys.heaviest, std::fabs(w[p]));
                keys.heavy |= !(std::fabs(w[p]) <= std::numeric_limits<T>::max());
                total += w[p];
            }
            keys.total = static_cast<T>(total);
        }
        keys.finite = keys.largest <= std::numeric_limits<T>::max() && !keys.heavy;
    }

    Way way_of(const Query& query, const Keys& keys) const {
        if (!query.finite || !keys.finite) return Way::careful;
        if (!ratio_) return Way::terms;
        const T reach = query.largest + keys.largest;
        if (has_tangents(query.largest) && has_tangents(keys.largest) && folds(keys)) return Way::small;
        const T span = std::fabs(kappa_) * reach;
        if (2 * span <= kTop) return Way::pairs;
        if (span <= kTop) return Way::singles;
        return Way::terms;
    }

    // Whether scores go by the exponentials: both sides' are numbers (in silu, whose terms grow, their products too),
    // and the weights can stand in the denominators.
    bool by_exponentials(const Query& query, const Keys& keys) const {
        if (!ratio_ || !query.finite || !keys.finite || !folds(keys)) return false;
        if (activation == Activation::silu) return in_range(query.largest + keys.largest);
        // Where u B overflows nevertheless, its weight is below the rounding of the heaviest.
        const T room = std::log(T(4) / std::numeric_limits<T>::epsilon());
        return in_range(query.largest) && std::fabs(kappa_) * keys.largest <= kTop - room;
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

    // By channel u = heaviest / w, and 1 up to the width. What is next to nothing beside the heaviest counts as kLight
    // of it.
    const T* coefficients(const Keys& keys) const {
        constexpr auto kind = Keys::coefficients;
        if (keys.ready[kind]) return keys.data[kind];
        const int64_t width = padded(dim, L);
        T* to = keys.data[kind] = reserve(keys.memory[kind], keys.size[kind], width);
        std::fill_n(to, width, T(1));
        for (int64_t p = 0; p < dim; p++) {
            const T w = keys.weights[p], least = keys.heaviest * kLight;
            to[p] = std::fabs(w) > least ? keys.heaviest / w : std::copysign(1 / kLight, w);
        }
        keys.ready[kind] = true;
        return to;
    }

    // Tangents of a tile, chunk by chunk of keys: what a pass reads fits the first-level cache.
    const T* chunked_tangents(const Keys& keys) const {
        constexpr auto kind = Keys::chunked_tangents;
        if (keys.ready[kind]) return keys.data[kind];
        T* to = keys.data[kind] = reserve(keys.memory[kind], keys.size[kind], dim * kKeys);
        for (int64_t c = 0; c < kKeys; c += kChunk)
            for (int64_t p = 0; p < dim; p++)
                for (int j = 0; j < kChunk; j += L, to += L)
                    store(to, tanh_of<T>(load(keys.turned + p * kKeys + c + j)));
        keys.ready[kind] = true;
        return keys.data[kind];
    }

    // Exponentials, or tangents, times u, in the same order; and of each channel the largest, in `peaks`.
    const T* weighted_table(const Keys& keys, bool tangents) const {
        const auto kind = tangents ? Keys::weighted_tangents : Keys::weighted_exponentials;
        if (keys.ready[kind]) return keys.data[kind];
        const int64_t width = padded(dim, L);
        const T *u = coefficients(keys), *known = tangents ? chunked_tangents(keys) : nullptr;
        T* to = keys.data[kind] = reserve(keys.memory[kind], keys.size[kind], dim * kKeys);
        T* peaks = keys.data[Keys::peaks] = reserve(keys.memory[Keys::peaks], keys.size[Keys::peaks], width);
        std::fill_n(peaks, width, T(0));
        for (int64_t p = 0; p < dim; p++) {
            V<T> most{};
            for (int64_t c = 0; c < kKeys; c += kChunk)
                for (int64_t j = 0; j < kChunk; j += L) {
                    const int64_t at = c * dim + p * kChunk + j;
                    const V<T> y =
                        u[p] * (known ? load(known + at) : exp_of<T>(load(keys.turned + p * kKeys + c + j) * kappa_));
                    most = quick_max<T>(most, size_of(y));
                    store(to + at, y);
                }
            peaks[p] = quick_largest_of<T>(most);
        }
        keys.ready[kind] = true;
        return keys.data[kind];
    }

    int64_t eights() const { return (dim + 7) / 8; }

    // How many terms share a division: 8, 4, 2 or 1, by rows (as many `together` as there are) and eights of channels.
    const char* shares(const Query& query, const Keys& keys, bool small, int64_t first, int64_t last,
                       int64_t together) const {
        // Numerators are sums of as many products, times a sum of both sides in silu. Such terms may be large, and each
        // that joins a fraction rounds all of it once more.
        const T reach = query.largest + keys.largest;
        const bool silu = activation == Activation::silu;
        const T most = std::numeric_limits<T>::max() / 32 / (silu ? std::max(T(1), reach) : T(1));
        const int limit = !silu ? 8 : reach <= T(16) ? 4 : reach <= T(40) ? 2 : 1;
        const T *u = coefficients(keys), *peaks = keys.data[Keys::peaks];
        const T* rows = small ? query.tangents : query.exponentials;
        keys.shares.resize((last - first) * eights());
        for (int64_t i = first; i < last;) {
            const int64_t count = i + together <= last ? together : 1;
            char* to = keys.shares.data() + (i - first) * eights();
            for (int64_t p = 0; p < dim; p += kStep) {
                // Of the denominators u + A (u B).
                T bounds[kStep];
                for (int64_t j = 0; j < kStep; j += L) {
                    V<T> bound = splat(T(1));
                    if (p + j < dim) {
                        const V<T> size = size_of(load(u + p + j));
                        for (int64_t r = 0; r < count; r++) {
                            const V<T> a = load(rows + (i + r) * query.width + p + j);
                            const V<T> most_here = fused<T>(size_of(a), load(peaks + p + j), size);
                            bound = r == 0 ? most_here : quick_max<T>(bound, most_here);
                        }
                    }
                    store(bounds + j, bound);
                }
                for (int64_t j = 0; j < kStep && p + j < dim; j += 8) to[(p + j) / 8] = share(bounds + j, most, limit);
            }
            i += count;
        }
        return keys.shares.data();
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

    // The most of eight terms, but not above `limit`, that share a division with their product up to `most`. No bound
    // is below 1, so fewer terms fit wherever more do; and nothing branches on what cannot be foreseen.
    static char share(const T* bounds, T most, int limit) {
        T two[4], four[2];
        for (int i = 0; i < 4; i++) two[i] = bounds[2 * i] * bounds[2 * i + 1];
        for (int i = 0; i < 2; i++) four[i] = two[2 * i] * two[2 * i + 1];
        const bool twos = (two[0] <= most) & (two[1] <= most) & (two[2] <= most) & (two[3] <= most);
        const bool fours = (four[0] <= most) & (four[1] <= most), all = four[0] * four[1] <= most;
        return static_cast<char>(std::min(limit, 1 << (twos + (twos & fours) + (twos & fours & all))));
    }

    const T negative_, kappa_;
    const bool ratio_;
    static constexpr int64_t kStep = L > 8 ? L : 8;

    // Two of its inverse can be multiplied in float, eight in double.
    static constexpr T kLight = sizeof(T) == 4 ? T(1e-12) : T(1e-25);
    static constexpr T kTop = sizeof(T) == 4 ? T(86) : T(706);  // exponents that leave room for a few sums

    bool folds(const Keys& keys) const {
        return keys.heaviest == 0 || (keys.heaviest > T(1e-30) && keys.heaviest < T(1e30));
    }
    bool in_range(T size) const { return std::fabs(kappa_) * size <= kTop; }
    bool has_tangents(T size) const { return activation == Activation::tanh && size <= T(1); }

    // Of |x|; NaN comes out. Several at a time: each waits for the one before.
    static T largest(const T* x, int64_t count) {
        constexpr int together = 4;
        V<T> top[together] = {};
        int64_t i = 0;
        for (; i + together * L <= count; i += together * L)
#pragma GCC unroll 4
            for (int k = 0; k < together; k++) top[k] = max_of<T>(top[k], size_of(load(x + i + k * L)));
        for (; i < count; i += L) top[0] = max_of<T>(top[0], size_of(load(x + i)));
        return largest_of<T>(max_of<T>(max_of<T>(top[0], top[1]), max_of<T>(top[2], top[3])));
    }
    static V<T> size_of(V<T> x) { return choose<T>(x < T(0), -x, x); }

    static T* reserve(Buffer<T>& memory, int64_t& size, int64_t count) {
        if (size < count || !memory.memory) {
            memory.reserve(count);
            size = count;
        }
        return memory.memory.get();
    }
};
