// Scores of strips of query rows against a tile of keys, for every form, with biases and caps.

// What multiplies the products or squared distances of a head.
template <class T>
inline T scale_of(const Problem& problem, const Head& head) {
    const T own = head.scale ? *reinterpret_cast<const T*>(head.scale) : T(1);
    return static_cast<T>(problem.scale) * own;
}

template <class T>
class Scores {
   public:
    // `again`: in the backward, which reads the additive scores that the forward has kept, if it has.
    Scores(Arena& arena, const Problem& problem, bool again)
        : problem_(problem),
          again_(again),
          form_(problem),
          additive_(arena, form_),
          line_(arena.take<T>(kKeys)),
          slopes_(arena.take<T>(kRun * kStrip * kKeys)),
          squares_(arena.take<T>(problem.form == Form::distance ? kRun * kStrip * kKeys : 0)) {}

    // Parts point into it.
    Scores(const Scores&) = delete;
    Scores& operator=(const Scores&) = delete;

    const Additive<T>& additive() const { return form_; }

    // `few` (the values of the tile) where rows are too few for the keys to be turned.
    // s[i * kKeys + j] of strips of the block, and which pairs are seen; -inf where hidden. With `keeps`, what a
    // gradient needs stays: the caps' slopes, and squared distances where their scale is the head's.
    void operator()(T* s, uint64_t* bits, const Block<T>& block, const typename Additive<T>::Query& prepared,
                    Span strips, const KeyTile<T>& tile, const View<T>* few, const Pairs* pairs, bool keeps) const {
        constexpr int L = Vector<T>::lanes;
        const int64_t first = strips.first * kStrip, size = std::min(strips.last * kStrip, block.count) - first;
        const T* query = block.query + first * block.width;
        // Whole vectors of keys: what lies behind the tile's own is selected away with what is hidden.
        const int64_t columns = padded(tile.count, L);
        if (problem_.form == Form::additive) {
            additive_scores(s, block, prepared, first, size, tile);
        } else if (problem_.form == Form::distance) {
            product<T, Pair::distance>(s, kKeys, query, block.width, 1, tile.turned, kKeys, size, columns, problem_.dim,
                                       false);
            if (keeps && block.head[first]->scale) std::copy_n(s, size * kKeys, squares_);
            for (int64_t i = 0; i < size; i++) {
                const T scale = -scale_of<T>(problem_, *block.head[first + i]);
                for (int64_t j = i * kKeys; j < (i + 1) * kKeys; j += L) store(s + j, load(s + j) * scale);
            }
        } else if (pairs) {
            if constexpr (sizeof(T) == 4) pairs->scores(s, first, size, columns);
        } else if (few) {
            for (int64_t i = 0; i < size; i++)
                dot_rows(s + i * kKeys, query + i * block.width, tile.rows, tile.count, block.width, *few);
        } else {
            product<T>(s, kKeys, query, block.width, 1, tile.turned, kKeys, size, columns, problem_.dim, false);
        }
        bool full = true;
        for (int64_t strip = strips.first; strip < strips.last; strip++)
            full = full && block.is_full(strip, tile.first, tile.count);
        if (full && block.plain && !block.bad && !tile.bad) {
            std::fill_n(bits, size, kAll);
            return;
        }
        for (int64_t i = 0; i < size; i++) {
            const Head& head = *block.head[first + i];
            const int64_t row = block.row[first + i];
            const bool all = full || block.is_full((first + i) / kStrip, tile.first, tile.count);
            bits[i] = all ? kAll : seen_bits(problem_, head, row, tile.first, tile.count);
            T* line = s + i * kKeys;
            if (const uint64_t bad = block.bad && block.bad[first + i] ? kAll : tile.bad)
                for (uint64_t left = bad & bits[i]; left; left &= left - 1) {
                    const int j = __builtin_ctzll(left);
                    line[j] = form_.score_of(problem_, head, row, tile.first + j);
                }
            if (head.query_bias.data || head.key_bias.data || !problem_.caps.empty())
                transform(line, head, row, tile, keeps ? slopes_ + i * kKeys : nullptr);
            if (head.bias.data) add_bias(line, bits[i], head, row, tile);
            if (bits[i] != kAll)
                for (int j = 0; j < kVectors<T>; j++)
                    store(line + j * L,
                          choose_bits<T>(bits[i], j, load(line + j * L), splat(-std::numeric_limits<T>::infinity())));
        }
    }

    const T* slopes() const { return slopes_; }
    const T* squares() const { return squares_; }

   private:
    // Those of rows of one head. Both directions may cut keys into other tiles, and the forward skips tiles that no row
    // of a strip sees: what it has not written is hidden here too, and goes as what lies behind the tile's own keys
    // does. Pairs that are not finite are replaced after this, in both directions.
    void additive_scores(T* s, const Block<T>& block, const typename Additive<T>::Query& prepared, int64_t first,
                         int64_t size, const KeyTile<T>& tile) const {
        const Head& head = *block.head[first];
        T* kept = reinterpret_cast<T*>(head.scores);
        if (kept) kept += block.row[first] * problem_.key_len + tile.first;
        if (kept && again_) {
            for (int64_t i = 0; i < size; i++) std::copy_n(kept + i * problem_.key_len, tile.count, s + i * kKeys);
            return;
        }
        additive_(s - first * kKeys, kKeys, prepared, first, first + size, tile.additive,
                  reinterpret_cast<const T*>(head.weights));
        if (!kept) return;
        for (int64_t i = 0; i < size; i++) std::copy_n(s + i * kKeys, tile.count, kept + i * problem_.key_len);
    }

    // Biases of rows and keys, then the caps in order: factor * cap * tanh(s / cap).
    void transform(T* s, const Head& head, int64_t row, const KeyTile<T>& tile, T* slopes) const {
        constexpr int L = Vector<T>::lanes;
        const T own = head.query_bias.data
                          ? reinterpret_cast<const T*>(head.query_bias.data)[row * head.query_bias.row_stride]
                          : T(0);
        for (int64_t j = 0; j < kKeys; j += L) {
            V<T> x = load(s + j);
            if (head.key_bias.data) x += load(tile.bias + j);
            x += own;
            V<T> slope = splat(T(1));
            for (const Cap& cap : problem_.caps) {
                const T factor = static_cast<T>(cap.factor);
                if (std::isinf(cap.cap)) {
                    x = x * factor;
                    slope = slope * factor;
                } else {
                    const V<T> bounded = tanh_of<T>(x / static_cast<T>(cap.cap));
                    x = bounded * static_cast<T>(cap.factor * cap.cap);
                    slope = slope * (factor * (T(1) - bounded * bounded));
                }
            }
            store(s + j, x);
            if (slopes) store(slopes + j, slope);
        }
    }

    void add_bias(T* s, uint64_t& bits, const Head& head, int64_t row, const KeyTile<T>& tile) const {
        constexpr int L = Vector<T>::lanes;
        const Matrix& m = head.bias;
        if (m.col_stride == 0) {
            const T x = element<T>(m, problem_.bias_dtype, row, 0);
            for (int64_t j = 0; j < kKeys; j++) line_[j] = x;
        } else {
            read_row(line_, kKeys, m, problem_.bias_dtype, row, tile.first, tile.count);
        }
        for (int j = 0; j < kVectors<T>; j++) {
            const V<T> x = load(line_ + j * L);
            bits &= ~(minus_infinite<T>(x) << (j * L));
            store(s + j * L, load(s + j * L) + x);
        }
    }

    const Problem& problem_;
    const bool again_;
    Additive<T> form_;
    AdditiveScores<T> additive_;
    T* line_;
    T *slopes_, *squares_;
};
