// The forward of heads of a few query rows and a few keys: a step of a recurrent decoder, a short sentence. One tile
// has all of their keys, so nothing is kept from tile to tile: the state of a ForwardTask takes such a head longer than
// its products.

// The most rows of a short head: more take longer this way.
constexpr int64_t kMostShortRows = 32;

// Whether the heads of a call have so few rows and keys, and keys of their own.
inline bool has_few_keys(const Problem& problem) {
    const Head& head = problem.heads[0];
    return problem.key_len <= kTileKeys && problem.query_len <= kMostShortRows && problem.groups[0].heads.size() == 1 &&
           problem.form != Form::additive && problem.caps.empty() && problem.matrix != MatrixOutput::scores &&
           !head.query_bias.data && !head.key_bias.data &&
           !(kHasBf16Dot && Bf16Dot::supports(problem) && !has_few_rows(problem));
}

// A head whose rows and keys are few.
template <class T>
class ShortHead {
    static constexpr int L = Vector<T>::lanes;
    using Softmax = OnlineSoftmax<T>;

   public:
    ShortHead(Arena& arena, const Problem& problem, const Head& head)
        : arena_(arena),
          problem_(problem),
          head_(head),
          rows_(problem.query_len),
          few_rows_(has_few_rows(problem)),
          masked_(has_pair_mask(head) || head.holes > 0) {
        const int64_t last = key_interval(problem, head, 0).last;
        for (int64_t i = 0; i < rows_; i++) {
            const Span own = key_interval(problem, head, i);
            count_ = std::max(count_, own.last);
            masked_ = masked_ || own.first != 0 || own.last != last;
        }
    }

    // Attend to the keys, and store the rows.
    void attend() {
        const int64_t width = row_width<T>(problem_);
        ValueTile<T> values(arena_, problem_, masked_, false, few_rows_);
        values.fill(head_, 0, count_, masked_);
        T *s = arena_.take<T>(rows_ * kTileKeys), *out = arena_.take<T>(rows_ * width);
        if (problem_.form == Form::distance)
            fill_scores(SquaredDistance<T>{}, s, values.prefetched(), -scale_of<T>(problem_, head_));
        else
            fill_scores(Product<T>{}, s, values.prefetched(), T(1));
        RowStates<T> states[kMostShortRows / L];
        uint64_t bits[kMostShortRows];
        dispatch_width<T>(count_, [&](auto vectors) {
            for (int64_t i = 0; i < rows_; i += L) {
                T* line = s + i * kTileKeys;
                problem_.full_statistics ? softmax<vectors, true>(i, line, bits + i, states[i / L])
                                         : softmax<vectors, false>(i, line, bits + i, states[i / L]);
            }
        });
        std::fill_n(out, rows_ * width, T(0));
        values.add_pv(out, s, rows_);
        if (values.nonfinite) values.propagate_nonfinite(out, s, bits, rows_);
        values.reduce_lanes(out, rows_);
        for (int64_t first = 0; first < rows_; first += L)
            store_rows(problem_, std::min<int64_t>(L, rows_ - first), states[first / L], out + first * width, width,
                       [&](int64_t i) { return std::pair(&head_, first + i); });
    }

   private:
    // Compute the products or distances of all pairs, times `factor`. As everywhere, few rows go key by key, and
    // `other` has its turns between the keys.
    template <class Terms>
    void fill_scores(const Terms& terms, T* s, const Interleaved<T>& other, T factor) const {
        const int64_t width = padded(problem_.dim, L), columns = padded(count_, L);
        T *query = arena_.take<T>(rows_ * width), *copy = arena_.take<T>(count_ * width);
        for (int64_t i = 0; i < rows_; i++) read_query(query + i * width, width, problem_, head_, i);
        if (few_rows_) {
            const auto multiply = [&](const auto& keys) {
                few_rows_gemm(terms, s, query, width, rows_, keys, count_, width, other);
            };
            if (has_stored_layout<T>(head_.key, problem_.score_dtype, problem_.dim))
                stored_rows<T>(head_.key, problem_.score_dtype, 0).with_view(multiply);
            else
                multiply(view_rows(copy, head_.key, problem_.score_dtype, 0, count_, problem_.dim));
        } else {
            T* transposed = arena_.take<T>(width * kTileKeys);
            transpose_tile(transposed, view_rows(copy, head_.key, problem_.score_dtype, 0, count_, problem_.dim), width,
                           count_);
            gemm(terms, s, kTileKeys, query, width, 1, transposed, kTileKeys, rows_, columns, problem_.dim, false);
        }
        if (factor == 1) return;
        for (int64_t i = 0; i < rows_; i++)
            for (int64_t j = i * kTileKeys; j < i * kTileKeys + columns; j += L) store(s + j, load(s + j) * factor);
    }

    // Make weights of the scores of up to as many rows as a vector has lanes, from `first` on, and get the bits of
    // their unmasked keys, and their states.
    template <int W, bool statistics>
    void softmax(int64_t first, T* s, uint64_t* bits, RowStates<T>& states) const {
        constexpr T unset = Softmax::kUnset;
        const int size = static_cast<int>(std::min<int64_t>(L, rows_ - first));
        for (int i = 0; i < size; i++) bits[i] = finish_scores<W>(first + i, s + i * kTileKeys);
        const V<T> maximum = reduce_rows(size, fast_max<T>, [&](int i) {
            V<T> most = splat(unset);
#pragma GCC unroll 16
            for (int j = 0; j < W; j++) most = fast_max<T>(load(s + i * kTileKeys + j * L), most);
            return most;
        });
        T maxima[L];
        store(maxima, maximum);
        if constexpr (statistics) set_moments<W>(size, s, bits, maximum, states);
        V<T> sums[L], logits[L], squares[L];
        for (int i = 0; i < size; i++) {
            T* line = s + i * kTileKeys;
            sums[i] = logits[i] = squares[i] = V<T>{};
#pragma GCC unroll 16
            for (int j = 0; j < W; j++) {
                const V<T> logit = load(line + j * L) - maxima[i], e = exp2_of<T>(logit * kLog2E<T>);
                sums[i] += e;
                if constexpr (statistics) {
                    // As in OnlineSoftmax, 0 * -inf stays 0.
                    logits[i] += e * fast_max<T>(logit, splat<T>(Exp<T>::lowest));
                    squares[i] += e * e;
                }
                store(line + j * L, e);
            }
        }
        if (problem_.dropout > 0) drop<W>(first, size, s);
        const auto sum_of = [&](const V<T>* lanes) {
            return reduce_rows(size, [](V<T> a, V<T> b) { return a + b; }, [&](int i) { return lanes[i]; });
        };
        states.denom = sum_of(sums), states.out_scale = splat(T(1));
        states.max = Softmax::maximum_of(maximum, states.denom);
        if constexpr (statistics) states.sum_exp_logit = sum_of(logits), states.squares = sum_of(squares);
    }

    // Drop weights, and multiply those that are kept.
    template <int W>
    void drop(int64_t first, int size, T* weights) const {
        Dropout dropout(problem_);
        dropout.set_tile(0);
        const T factor = static_cast<T>(dropout.factor);
        for (int i = 0; i < size; i++, weights += kTileKeys) {
            const uint64_t keep = dropout.keep_bits(Dropout::stream(problem_, head_, first + i));
#pragma GCC unroll 16
            for (int j = 0; j < W; j++)
                store(weights + j * L, select_bits<T>(keep, j, load(weights + j * L) * factor, V<T>{}));
        }
    }

    // Add the bias of a row to its scores, mask them, and keep them where the matrix is wanted. Returns the bits of the
    // unmasked keys.
    template <int W>
    uint64_t finish_scores(int64_t i, T* s) const {
        uint64_t bits = masked_ ? unmasked_bits(problem_, head_, i, 0, count_) : lowest_bits(count_);
        alignas(64) T line[kTileKeys];
        if (head_.bias.data) add_bias(s, bits, problem_, head_, i, Span{0, count_}, line);
        if (masked_ || count_ < W * L)
#pragma GCC unroll 16
            for (int j = 0; j < W; j++)
                store(s + j * L, select_bits<T>(bits, j, load(s + j * L), splat(-std::numeric_limits<T>::infinity())));
        if (problem_.matrix == MatrixOutput::weights)
            std::copy_n(s, count_, as<T>(head_.matrix) + i * problem_.key_len);
        return bits;
    }

    // Set the moments of scores that are not yet weights.
    template <int W>
    static void set_moments(int size, const T* s, const uint64_t* bits, V<T> maximum, RowStates<T>& states) {
        T maxima[L], counts[L] = {}, bases[L];
        store(maxima, maximum);
        for (int i = 0; i < size; i++) counts[i] = static_cast<T>(__builtin_popcountll(bits[i]));
        const auto sum = [](V<T> a, V<T> b) { return a + b; };
        const auto from = [&](const T* near) {
            return reduce_rows(
                size, sum, [&](int i) { return Softmax::template sum_from<W>(s + i * kTileKeys, bits[i], near[i]); });
        };
        states.count = load(counts);
        const V<T> least_one = fast_max<T>(states.count, splat(T(1)));
        states.base = Softmax::base_near(maximum + from(maxima) / least_one);
        store(bases, states.base);
        const V<T> squares = reduce_rows(size, sum, [&](int i) {
            V<T> found{};
            for (int j = 0; j < W; j++) {
                const V<T> x = select_bits<T>(bits[i], j, load(s + i * kTileKeys + j * L) - bases[i], V<T>{});
                found += x * x;
            }
            return found;
        });
        Softmax::set_moments(states, from(bases), squares);
    }

    // Lane i becomes the lanes of f(i), combined by op.
    template <class Op, class F>
    static V<T> reduce_rows(int size, const Op& op, const F& f) {
        if (size <= kFewRows) {
            alignas(64) T found[L] = {};
            for (int i = 0; i < size; i++) found[i] = reduce<T>(f(i), op);
            return load(found);
        }
        // The last row stands for those behind it.
        V<T> v[L];
        for (int i = 0; i < L; i++) v[i] = f(std::min(i, size - 1));
        return reduce_each<T>(v, op);
    }

    Arena& arena_;
    const Problem& problem_;
    const Head& head_;
    const int64_t rows_;
    const bool few_rows_;
    bool masked_;        // whether some row may not attend to all of the keys
    int64_t count_ = 0;  // of the keys up to the last one that the interval of some row holds
};
