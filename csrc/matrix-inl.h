// The matrix of scores or weights that a caller wants beside the output. Scores are stored as tiles go by; a row
// becomes weights when its total is known, while it is still in the cache.

// Copies the scores of `size` rows of a block against the keys [key, key + here).
template <class T>
void store_scores(const Problem& problem, const Block<T>& block, int64_t first, int64_t size, const T* s, int64_t key,
                  int64_t here) {
    for (int64_t i = 0; i < size; i++) {
        const int64_t row = block.row[first + i];
        T* to = reinterpret_cast<T*>(block.head[first + i]->matrix) + row * problem.key_len + key;
        std::copy_n(s + i * kKeys, here, to);
    }
}

// exp(s - level) * factor is the weight of a score s in its row.
template <class T>
struct RowScale {
    T level, factor;

    RowScale(const RowState<T>& state, const char* sink_number) : level(anchor(state.max)) {
        T total = state.total;
        if (sink_number) {
            // One more logit, without a value.
            const T sink = *reinterpret_cast<const T*>(sink_number);
            level = anchor(std::isnan(state.max) || std::isnan(sink) ? state.max + sink : std::max(state.max, sink));
            total = total * rescaling(state.max, level) + exp_of_one<T>(sink - level);
        }
        factor = total == 0 ? T(1) : T(1) / total;
    }
};

// Finishes a row of the matrix: -inf or 0 where the intervals hide a pair, whose score was never stored, and weights in
// the place of scores where weights are wanted.
template <class T>
void finish_matrix_row(const Problem& problem, const Head& head, int64_t row, const RowState<T>& state) {
    constexpr int L = Vector<T>::lanes;
    constexpr T infinity = std::numeric_limits<T>::infinity();
    const bool weights = problem.matrix == PairMatrix::weights;
    const RowScale<T> scale(state, head.sink);
    T* line = reinterpret_cast<T*>(head.matrix) + row * problem.key_len;
    for (int64_t key = 0; key < problem.key_len; key += kKeys) {
        const int64_t here = std::min<int64_t>(kKeys, problem.key_len - key);
        const uint64_t bits = interval_bits(problem, head, row, key, here);
        T* to = line + key;
        if (!weights && bits == lowest_bits(here)) continue;
        if (bits == 0) {
            std::fill_n(to, here, weights ? T(0) : -infinity);
            continue;
        }
        // The last tile ends inside a vector, and the next row begins there.
        T tail[kKeys];
        T* x = to;
        if (here < kKeys) x = std::copy_n(to, here, tail) - here;
        for (int j = 0; j < (here + L - 1) / L; j++) {
            V<T> s = choose_bits<T>(bits, j, load(x + j * L), splat(-infinity));
            // Selected, not multiplied: a visible NaN makes the level NaN, and masked pairs stay 0.
            if (weights)
                s = choose<T>(s == splat(-infinity), V<T>{}, power_of<T>((s - scale.level) * kLog2E<T>) * scale.factor);
            store(x + j * L, s);
        }
        if (x != to) std::copy_n(x, here, to);
    }
}
