// Additive scores of rows against a tile. A strip is R rows against a chunk of keys and some channels. Strips are not
// inlined: inside one large function the compiler keeps their sums in memory.

template <class T>
class AdditiveScores {
    static constexpr int L = Vector<T>::lanes;
    static constexpr int kAcross = Additive<T>::kAcross, kChunk = Additive<T>::kChunk;
#if defined(__AVX512F__)
    static constexpr int kRowsTogether = 3;  // callers come with strips of 6
#else
    static constexpr int kRowsTogether = 2;
#endif
    static constexpr int64_t kChannels = 256;  // of a pass: 32 KB of a chunk of keys; sums start anew for each
    using Form = Additive<T>;
    using Query = typename Form::Query;
    using Keys = typename Form::Keys;

   public:
    explicit AdditiveScores(const Form& form) : form_(form) {}

    // s[i * lds + j] for rows first <= i < last of the block, all keys of the tile.
    void operator()(T* s, int64_t lds, const Query& query, int64_t first, int64_t last, const Keys& keys,
                    const T* w) const {
        const Way way = form_.way_of(query, keys);
        if (way == Way::terms || way == Way::careful)
            return form_.with_term(way, [&](auto term) { term_scores(term, s, lds, query, first, last, keys, w); });
        const bool one = form_.activation != Activation::silu && way != Way::small;
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

   private:
    const Form& form_;

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
        const int64_t passes = std::max<int64_t>(1, (form_.dim + kChannels - 1) / kChannels);
        for (int64_t c = 0; c < kKeys; c += kChunk)
            for (int64_t pass = 0; pass < passes; pass++) {
                strip.from = pass * kChannels;
                strip.to = std::min(form_.dim, strip.from + kChannels);
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
        const T* nb = small ? keys.data[Keys::chunked_tangents] + c * form_.dim : keys.turned + c;
        const int64_t at = i * query.width;
        return {ea + at, na + at, eb + c * form_.dim, nb, small ? kChunk : kKeys};
    }

    template <bool Sum, bool Pair>
    void ratio_scores(T* s, int64_t lds, const Query& query, int64_t first, int64_t last, const Keys& keys,
                      const T* w) const {
        const bool tall = form_.activation == Activation::tanh;
        const T* eb = form_.chunked_table(keys, Keys::chunked_exponentials);
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
        const bool tall = form_.activation == Activation::tanh && !small;
        const T* u = form_.coefficients(keys, w);
        if (small) form_.chunked_table(keys, Keys::chunked_tangents);
        const T* eb = form_.chunked_table(keys, small ? Keys::folded_tangents : Keys::folded_exponentials);
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
};
