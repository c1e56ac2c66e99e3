// Additive scores s_ij = sum_p w_p f(a_ip + b_jp) of a tile of kKeys keys, and their gradients.
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
// - Where a row, a key or a weight is not finite, terms are evaluated one by one; a pair with ds == 0 adds nothing.
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
#if defined(__AVX512F__)
    static constexpr int kAcross = 2, kRowsTogether = 3, kGradRows = 4;  // 3: callers come with strips of 6
#else
    static constexpr int kAcross = 2, kRowsTogether = 2, kGradRows = 2;
#endif
    static constexpr int kChunk = kAcross * L;  // keys whose scores are in registers
    static constexpr int64_t kChannels = 256;   // of a pass: 32 KB of a chunk of keys; sums start anew for each

   public:
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

    explicit Additive(const Problem& problem)
        : activation_(problem.activation), negative_(static_cast<T>(problem.negative_slope)), dim_(problem.dim) {
        ratio_ =
            activation_ == Activation::tanh || activation_ == Activation::sigmoid || activation_ == Activation::silu;
        kappa_ = activation_ == Activation::tanh ? T(2) : T(-1);
    }

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
        keys.largest = largest(turned, dim_ * kKeys);
        keys.heaviest = 0;
        double total = 0;
        bool heavy = false;
        for (int64_t p = 0; p < dim_; p++) {
            keys.heaviest = std::max(keys.heaviest, std::fabs(w[p]));
            heavy |= !(std::fabs(w[p]) <= std::numeric_limits<T>::max());
            total += w[p];
        }
        keys.total = static_cast<T>(total);
        keys.finite = keys.largest <= std::numeric_limits<T>::max() && !heavy;
        std::fill(keys.ready, keys.ready + Keys::kinds, false);
    }

    // s[i * lds + j] for rows first <= i < last of the block, all keys of the tile.
    void scores(T* s, int64_t lds, const Query& query, int64_t first, int64_t last, const Keys& keys,
                const T* w) const {
        const Way way = way_of(query, keys);
        if (way == Way::terms || way == Way::careful)
            return with_term(way, [&](auto term) { term_scores(term, s, lds, query, first, last, keys, w); });
        const bool one = activation_ != Activation::silu && way != Way::small;
        if (way == Way::small || (way == Way::fours && !one))
            four_scores<true>(s, lds, query, first, last, keys, w, way == Way::small);
        else if (way == Way::fours)
            four_scores<false>(s, lds, query, first, last, keys, w, false);
        else if (one && way == Way::pairs)
            ratio_scores<false, true>(s, lds, query, first, last, keys, w);
        else if (one)
            ratio_scores<false, false>(s, lds, query, first, last, keys, w);
        else if (way == Way::pairs)
            ratio_scores<true, true>(s, lds, query, first, last, keys, w);
        else
            ratio_scores<true, false>(s, lds, query, first, last, keys, w);
    }

    // From ds (as s; exactly 0 where a pair is hidden): da[i * lda + p] +=, db[j * ldb + p] +=, dw[p] +=.
    void gradients(const T* ds, int64_t lds, const Query& query, int64_t first, int64_t last, const Keys& keys,
                   const T* w, T* da, int64_t lda, T* db, int64_t ldb, T* dw) const {
        const Way way = way_of(query, keys);
        const Pass pass{ds, lds, first, last, query.width, w, da, lda, db, ldb, dw};
        const T* b = row_table(keys, Keys::rows, query.width);
        if (way == Way::careful || way == Way::terms)
            return with_term(way, [&](auto term) {
                if (way == Way::careful)
                    term_gradients<true>(term, pass, query.rows, b);
                else
                    term_gradients<false>(term, pass, query.rows, b);
            });
        if (way == Way::small) {
            const T* t = row_table(keys, Keys::row_tangents, query.width);
            return ratio_gradients<Rule::tangent, true>(pass, query.tangents, query.tangents, t, t);
        }
        const T *ea = query.exponentials, *eb = row_table(keys, Keys::row_exponentials, query.width);
        if (activation_ == Activation::silu)
            way != Way::singles ? ratio_gradients<Rule::silu, true>(pass, ea, query.rows, eb, b)
                                : ratio_gradients<Rule::silu, false>(pass, ea, query.rows, eb, b);
        else
            way != Way::singles ? ratio_gradients<Rule::one, true>(pass, ea, nullptr, eb, nullptr)
                                : ratio_gradients<Rule::one, false>(pass, ea, nullptr, eb, nullptr);
    }

   private:
    Activation activation_;
    T negative_, kappa_;
    int64_t dim_;
    bool ratio_;

    static constexpr T kFold = T(1.6e5);  // e^12: a product of four normal weights rarely exceeds it
    static constexpr T kTop = sizeof(T) == 4 ? T(86) : T(706);  // exponents that leave room for a few sums

    bool in_range(T size) const { return std::fabs(kappa_) * size <= kTop; }
    bool has_tangents(T size) const { return activation_ == Activation::tanh && size <= T(1); }

    Way way_of(const Query& query, const Keys& keys) const {
        if (!query.finite || !keys.finite) return Way::careful;
        if (!ratio_) return Way::terms;
        const T reach = query.largest + keys.largest;
        // What multiplies a denominator: a weight, and for silu an argument.
        const T above = std::log(std::max(T(1), keys.heaviest)) +
                        (activation_ == Activation::silu ? std::log(std::max(T(1), reach)) : T(0));
        const bool folds = keys.heaviest > T(1e-30) && keys.heaviest < T(1e30);
        if (has_tangents(query.largest) && has_tangents(keys.largest) && folds) return Way::small;
        const T span = std::fabs(kappa_) * reach;
        // 4 for the ones in the denominators and the sums; of weights there is no more than kFold in one product.
        if (folds && 4 * span + above + 4 <= kTop - std::log(kFold)) return Way::fours;
        if (2 * span <= kTop && span + above <= kTop) return Way::pairs;
        if (span <= kTop && above <= kTop) return Way::singles;
        return Way::terms;
    }

    // The greatest |x|; NaN where one is.
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

    template <class F>
    void with_term(Way way, F f) const {
        switch (activation_) {
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
        if (negative_ <= T(1)) return f(RectifierTerm<T, true>{negative_});
        return f(RectifierTerm<T, false>{negative_});
    }

    // Exponentials or tangents of a tile, chunk by chunk of keys: what a pass reads fits the first-level cache.
    const T* chunked_table(const Keys& keys, typename Keys::Kind kind) const {
        if (keys.ready[kind]) return keys.data[kind];
        const bool tangents = kind == Keys::chunked_tangents || kind == Keys::folded_tangents;
        const bool folds = kind == Keys::folded_exponentials || kind == Keys::folded_tangents;
        const T* coefficient = folds ? keys.data[Keys::coefficients] : nullptr;
        const T* known = kind == Keys::folded_tangents ? chunked_table(keys, Keys::chunked_tangents) : nullptr;
        T* to = keys.data[kind] = reserve(keys.memory[kind], keys.size[kind], dim_ * kKeys);
        for (int64_t c = 0; c < kKeys; c += kChunk)
            for (int64_t p = 0; p < dim_; p++) {
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
        T* to = keys.data[kind] = reserve(keys.memory[kind], keys.size[kind], dim_);
        keys.folded.resize(dim_ / 4 + 1);
        for (int64_t p = 0; p < dim_; p += 4) {
            const int64_t here = std::min<int64_t>(4, dim_ - p);
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
                        store(square + i * L, p + i < dim_ ? load(keys.turned + (p + i) * kKeys + j) : V<T>{});
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

    // -----------------------------------------------------------------------------------------------------------------
    // Scores. A strip is R rows against a chunk of keys and some channels. Strips and blocks are not inlined: inside
    // one large function the compiler keeps their sums in memory.

    struct Strip {
        T* s;
        int64_t lds;
        int64_t width;  // of the rows
        const T* w;
        int64_t from, to;  // channels
        T level, slope;    // a finished sum x leaves as level + slope x
        bool begun, finished;
    };

    template <int R>
    static inline void leave(const Strip& strip, V<T> (&sum)[R][kAcross]) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int j = 0; j < kAcross; j++) {
                T* to = strip.s + r * strip.lds + j * L;
                V<T> x = sum[r][j];
                if (strip.begun) x = x + load(to);
                store(to, strip.finished ? fused<T>(x, splat(strip.slope), splat(strip.level)) : x);
            }
    }

    // What the denominators and numerators of a row (at one channel) and a chunk of keys are made of.
    struct Sides {
        const T *ea, *na, *eb, *nb;
        int64_t step;  // from one channel of nb to the next
    };

    // w1 num / x1 + w2 num / x2, with x = 1 + A B and num = 1 or the sum of two numbers.
    template <bool Sum>
    static inline V<T> pair_term(const Sides& at, int j, V<T> w1, V<T> w2) {
        const V<T> x1 = fused<T>(splat(at.ea[0]), load(at.eb + j), splat(T(1)));
        const V<T> x2 = fused<T>(splat(at.ea[1]), load(at.eb + kChunk + j), splat(T(1)));
        if constexpr (Sum) {
            w1 *= at.na[0] + load(at.nb + j);
            w2 *= at.na[1] + load(at.nb + at.step + j);
        }
        return fused<T>(w1, x2, w2 * x1) / (x1 * x2);
    }

    template <bool Sum>
    static inline V<T> single_term(const Sides& at, int j, V<T> w) {
        if constexpr (Sum) w *= at.na[0] + load(at.nb + j);
        return w / fused<T>(splat(at.ea[0]), load(at.eb + j), splat(T(1)));
    }

    // The sum of num / x of four channels, x = u + A (u B).
    template <bool Sum>
    static inline V<T> four_term(const Sides& at, int j, const T* u) {
        V<T> x[4], n[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            x[k] = fused<T>(splat(at.ea[k]), load(at.eb + k * kChunk + j), splat(u[k]));
            if constexpr (Sum) n[k] = at.na[k] + load(at.nb + k * at.step + j);
        }
        const V<T> d1 = x[0] * x[1], d2 = x[2] * x[3];
        V<T> n1 = x[0] + x[1], n2 = x[2] + x[3];
        if constexpr (Sum) {
            n1 = fused<T>(n[0], x[1], n[1] * x[0]);
            n2 = fused<T>(n[2], x[3], n[3] * x[2]);
        }
        return fused<T>(n1, d2, n2 * d1) / (d1 * d2);
    }

    static inline Sides moved(const Sides& sides, int64_t row, int64_t p) {
        return {sides.ea + row + p, sides.na + row + p, sides.eb + p * kChunk, sides.nb + p * sides.step, sides.step};
    }

    // Adds f(sides at row r and channel p, key) to the sums.
    template <int R, class F>
    static inline void add_terms(V<T> (&sum)[R][kAcross], const Strip& strip, const Sides& sides, int64_t p, F f) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int j = 0; j < kAcross; j++) sum[r][j] += f(moved(sides, r * strip.width, p), j * L);
    }

    // Channels [p, to) that no four covers.
    template <bool Sum, bool Pair, int R>
    static inline void loose_terms(V<T> (&sum)[R][kAcross], const Strip& strip, const Sides& sides, int64_t p,
                                   int64_t to) {
        for (; Pair && p + 2 <= to; p += 2) {
            const V<T> w1 = splat(strip.w[p]), w2 = splat(strip.w[p + 1]);
            add_terms<R>(sum, strip, sides, p, [&](const Sides& at, int j) { return pair_term<Sum>(at, j, w1, w2); });
        }
        for (; p < to; p++) {
            const V<T> w = splat(strip.w[p]);
            add_terms<R>(sum, strip, sides, p, [&](const Sides& at, int j) { return single_term<Sum>(at, j, w); });
        }
    }

    template <bool Sum, bool Pair, int R>
    __attribute__((noinline)) static void ratio_strip(const Strip& strip, const Sides& sides) {
        V<T> sum[R][kAcross] = {};
        loose_terms<Sum, Pair, R>(sum, strip, sides, strip.from, strip.to);
        leave<R>(strip, sum);
    }

    template <bool Sum, int R>
    __attribute__((noinline)) static void four_strip(const Strip& strip, const Sides& sides, const char* folded) {
        V<T> sum[R][kAcross] = {};
        for (int64_t p = strip.from; p < strip.to; p += 4) {
            if (folded[p / 4])
                add_terms<R>(sum, strip, sides, p,
                             [&](const Sides& at, int j) { return four_term<Sum>(at, j, strip.w + p); });
            else
                loose_terms<Sum, true, R>(sum, strip, sides, p, std::min(p + 4, strip.to));
        }
        leave<R>(strip, sum);
    }

    template <int R, class Term>
    __attribute__((noinline)) static void term_strip(const Term& term, const Strip& strip, const T* a, const T* b) {
        V<T> sum[R][kAcross] = {};
        for (int64_t p = strip.from; p < strip.to; p++) {
            const V<T> weight = splat(strip.w[p]);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                for (int j = 0; j < kAcross; j++)
                    sum[r][j] =
                        fused<T>(weight, term.value(a[r * strip.width + p] + load(b + p * kKeys + j * L)), sum[r][j]);
        }
        leave<R>(strip, sum);
    }

    // Calls f(strip, row, chunk's first key) for all strips, as many rows at a time as it says.
    template <class F>
    void each_strip(F f, Strip strip, T* s, int64_t first, int64_t last, int64_t together) const {
        const int64_t passes = std::max<int64_t>(1, (dim_ + kChannels - 1) / kChannels);
        for (int64_t c = 0; c < kKeys; c += kChunk)
            for (int64_t pass = 0; pass < passes; pass++) {
                strip.from = pass * kChannels;
                strip.to = std::min(dim_, strip.from + kChannels);
                strip.begun = pass > 0;
                strip.finished = pass + 1 == passes;
                for (int64_t i = first; i < last;) {
                    const bool whole = i + together <= last;
                    strip.s = s + i * strip.lds + c;
                    f(strip, i, c, whole);
                    i += whole ? together : 1;
                }
            }
    }

    // Rows i and on against the chunk of keys at c.
    Sides sides_of(const Query& query, const Keys& keys, bool small, int64_t i, int64_t c, const T* eb) const {
        const T *ea = small ? query.tangents : query.exponentials, *na = small ? ea : query.rows;
        const T* nb = small ? keys.data[Keys::chunked_tangents] + c * dim_ : keys.turned + c;
        const int64_t at = i * query.width;
        return {ea + at, na + at, eb + c * dim_, nb, small ? kChunk : kKeys};
    }

    template <bool Sum, bool Pair>
    void ratio_scores(T* s, int64_t lds, const Query& query, int64_t first, int64_t last, const Keys& keys,
                      const T* w) const {
        const bool tall = activation_ == Activation::tanh;
        const T* eb = chunked_table(keys, Keys::chunked_exponentials);
        const Strip plan{nullptr, lds,  query.width, w, 0, 0, tall ? keys.total : T(0), tall ? T(-2) : T(1),
                         false,   false};
        auto one = [&](const Strip& strip, int64_t i, int64_t c, bool whole) {
            const Sides sides = sides_of(query, keys, false, i, c, eb);
            whole ? ratio_strip<Sum, Pair, kRowsTogether>(strip, sides) : ratio_strip<Sum, Pair, 1>(strip, sides);
        };
        each_strip(one, plan, s, first, last, kRowsTogether);
    }

    template <bool Sum>
    void four_scores(T* s, int64_t lds, const Query& query, int64_t first, int64_t last, const Keys& keys, const T* w,
                     bool small) const {
        const bool tall = activation_ == Activation::tanh && !small;
        const T* u = coefficients(keys, w);
        if (small) chunked_table(keys, Keys::chunked_tangents);
        const T* eb = chunked_table(keys, small ? Keys::folded_tangents : Keys::folded_exponentials);
        const Strip plan{
            nullptr, lds,  query.width, u, 0, 0, tall ? keys.total : T(0), tall ? -2 * keys.heaviest : keys.heaviest,
            false,   false};
        auto one = [&](const Strip& strip, int64_t i, int64_t c, bool whole) {
            const Sides sides = sides_of(query, keys, small, i, c, eb);
            whole ? four_strip<Sum, kRowsTogether>(strip, sides, keys.folded.data())
                  : four_strip<Sum, 1>(strip, sides, keys.folded.data());
        };
        each_strip(one, plan, s, first, last, kRowsTogether);
    }

    template <class Term>
    void term_scores(const Term& term, T* s, int64_t lds, const Query& query, int64_t first, int64_t last,
                     const Keys& keys, const T* w) const {
        const Strip plan{nullptr, lds, query.width, w, 0, 0, T(0), T(1), false, false};
        auto one = [&](const Strip& strip, int64_t i, int64_t c, bool whole) {
            const T *a = query.rows + i * query.width, *b = keys.turned + c;
            if constexpr (Term::light)
                if (whole) return term_strip<kRowsTogether>(term, strip, a, b);
            term_strip<1>(term, strip, a, b);
        };
        each_strip(one, plan, s, first, last, Term::light ? kRowsTogether : 1);
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Gradients: da_ip = w_p sum_j ds_ij f'(a_ip + b_jp), db alike over i, dw_p = sum_ij ds_ij f(a_ip + b_jp).

    struct Pass {
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
        V<T> keys[kKeys] = {};
        V<T> weight = {};
    };

    // Calls block(sums, row, channel, whole) for all rows of each vector of channels, and hands on what it gathered.
    // d f = factor * (what the block calls through), f = level + slope * (its value).
    template <class F>
    void each_channel(F block, const Pass& pass, T factor, T level, T slope, bool weighted) const {
        T all = 0;
        if (level != T(0))
            for (int64_t i = pass.first; i < pass.last; i++) {
                V<T> row{};
                for (int64_t j = 0; j < kKeys; j += L) row += load(pass.ds + i * pass.lds + j);
                all += sum_of<T>(row);
            }
        for (int64_t p = 0; p < dim_; p += L) {
            Sums sums;
            const int64_t here = std::min<int64_t>(L, dim_ - p);
            T lanes[L] = {};
            std::copy(pass.w + p, pass.w + p + here, lanes);
            const V<T> weight = load(lanes), scale = weighted ? splat(T(1)) : weight * factor;
            for (int64_t i = pass.first; i < pass.last;) {
                const bool whole = i + kGradRows <= pass.last;
                block(sums, i, p, whole, weight, scale);
                i += whole ? kGradRows : 1;
            }
            for (int64_t j = 0; j < kKeys; j++) {
                T* to = pass.db + j * pass.ldb + p;
                store(to, fused<T>(scale, sums.keys[j], load(to)));
            }
            store(lanes, sums.weight);
            for (int64_t i = 0; i < here; i++) pass.dw[p + i] += level * all + slope * lanes[i];
        }
    }

    // f in terms of r = 1 / (1 + A B) and of the sum of two numbers z.
    enum class Rule { one, tangent, silu };

    template <Rule rule>
    static inline void step(V<T> g, V<T> r, V<T> z, V<T> product, V<T>& through, V<T>& value) {
        if constexpr (rule == Rule::one) {
            value = g * r;
            through = fused_less<T>(value, r, value);
        } else if constexpr (rule == Rule::tangent) {
            const V<T> t = z * r;
            value = g * t;
            through = fused_less<T>(value, t, g);
        } else {
            const V<T> gr = g * r;
            value = gr * z;
            through = fused<T>(value, product * r, gr);  // 1 - r = A B r keeps its digits
        }
    }

    template <bool Pair>
    static inline void reciprocals(V<T> x1, V<T> x2, V<T>& r1, V<T>& r2) {
#if defined(__AVX512F__)
        // An estimate of 14 bits and one Newton step: 7% faster than a shared division (Zen 5), and without its range.
        if constexpr (sizeof(T) == 4) {
            r1 = (V<T>)_mm512_maskz_rcp14_ps(0xFFFF, (__m512)x1);
            r2 = (V<T>)_mm512_maskz_rcp14_ps(0xFFFF, (__m512)x2);
            r1 *= fused_less<T>(x1, r1, splat(T(2)));
            r2 *= fused_less<T>(x2, r2, splat(T(2)));
            return;
        }
#endif
        if constexpr (Pair) {
            const V<T> inverse = T(1) / (x1 * x2);
            r1 = inverse * x2;
            r2 = inverse * x1;
        } else {
            r1 = T(1) / x1;
            r2 = T(1) / x2;
        }
    }

    template <Rule rule, bool Pair, int R>
    __attribute__((noinline)) static void ratio_block(const Pass& pass, Sums& sums, int64_t i, int64_t p, V<T> scale,
                                                      const T* ea, const T* na, const T* eb, const T* nb) {
        constexpr bool Sum = rule != Rule::one;
        const V<T> one = splat(T(1));
        V<T> a[R], n[R] = {}, row[R] = {}, weight[R] = {};
        eb += p * kKeys;
        if constexpr (Sum) nb += p * kKeys;
        for (int r = 0; r < R; r++) {
            a[r] = load(ea + (i + r) * pass.width + p);
            if constexpr (Sum) n[r] = load(na + (i + r) * pass.width + p);
        }
        const T* ds = pass.ds + i * pass.lds;
        for (int64_t j = 0; j < kKeys; j += 2) {
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

    template <Rule rule, bool Pair>
    void ratio_gradients(const Pass& pass, const T* ea, const T* na, const T* eb, const T* nb) const {
        const bool tall = rule == Rule::one && activation_ == Activation::tanh;
        auto block = [&](Sums& sums, int64_t i, int64_t p, bool whole, V<T>, V<T> scale) {
            whole ? ratio_block<rule, Pair, kGradRows>(pass, sums, i, p, scale, ea, na, eb, nb)
                  : ratio_block<rule, Pair, 1>(pass, sums, i, p, scale, ea, na, eb, nb);
        };
        each_channel(block, pass, tall ? T(4) : T(1), tall ? T(1) : T(0), tall ? T(-2) : T(1), false);
    }

    template <bool Careful, class Term, int R>
    __attribute__((noinline)) static void term_block(const Term& term, const Pass& pass, Sums& sums, int64_t i,
                                                     int64_t p, V<T> w, V<T> scale, const T* a, const T* b) {
        V<T> row[R] = {}, weight[R] = {};
        for (int64_t j = 0; j < kKeys; j++) {
            V<T> key = sums.keys[j];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const V<T> g = splat(pass.ds[(i + r) * pass.lds + j]);
                V<T> through, value;
                term.both(g, load(a + (i + r) * pass.width + p) + load(b + p * kKeys + j * L), through, value);
                if constexpr (Careful) {  // 0 * NaN is NaN
                    through = choose<T>(g == T(0), V<T>{}, through * w);
                    value = choose<T>(g == T(0), V<T>{}, value);
                }
                row[r] += through;
                weight[r] += value;
                key += through;
            }
            sums.keys[j] = key;
        }
        for (int r = 0; r < R; r++) {
            T* to = pass.da + (i + r) * pass.lda + p;
            store(to, fused<T>(scale, row[r], load(to)));
            sums.weight += weight[r];
        }
    }

    template <bool Careful, class Term>
    void term_gradients(const Term& term, const Pass& pass, const T* a, const T* b) const {
        constexpr int R = Term::light && !Careful ? kGradRows : 1;
        auto block = [&](Sums& sums, int64_t i, int64_t p, bool whole, V<T> w, V<T> scale) {
            if (whole)
                for (int64_t k = i; k < i + kGradRows; k += R)
                    term_block<Careful, Term, R>(term, pass, sums, k, p, w, scale, a, b);
            else
                term_block<Careful, Term, 1>(term, pass, sums, i, p, w, scale, a, b);
        };
        each_channel(block, pass, T(1), T(0), T(1), Careful);
    }
};
