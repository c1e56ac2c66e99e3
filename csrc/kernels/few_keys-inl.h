// The forward of heads of a few query rows and a few keys: a step of a recurrent decoder, a short sentence. One tile
// has all of their keys, so nothing is kept from tile to tile: the state of a ForwardTask takes such a head longer than
// its products.

// Normalise and store the output of a row.
template <class T>
void store_row(const Problem& problem, const Head& head, int64_t row, T scale, T* out) {
    const int64_t size = attnscore::size_of(problem.value_dtype), width = problem.value_dim;
    char* stored = head.out + row * width * size;
    if (row + kPrefetchRows < problem.query_len) prefetch<1>(stored + kPrefetchRows * width * size, width * size);
    if (problem.value_dtype == dtype_of<T>()) {
        for (int64_t j = 0; j < width; j++) as<T>(stored)[j] = out[j] * scale;
    } else if constexpr (sizeof(T) == 4) {
        for (int64_t j = 0; j < width; j++) out[j] *= scale;
        narrow_row(as<uint16_t>(stored), out, problem.value_dtype, width);
    }
}

// So many rows that no more are computed here: their softmax goes row by row.
constexpr int64_t kMostShortRows = 32;

// Whether the heads of a call have so few rows and keys, and ask for nothing that goes beyond a tile's state.
inline bool has_few_keys(const Problem& problem) {
    const Head& head = problem.heads[0];
    return problem.key_len <= kTileKeys && problem.query_len <= kMostShortRows && problem.groups[0].heads.size() == 1 &&
           problem.form != Form::additive && problem.caps.empty() && problem.dropout == 0 &&
           problem.matrix != MatrixOutput::scores && !problem.full_statistics && !head.query_bias.data &&
           !head.key_bias.data && !has_pair_mask(head) && head.holes == 0 &&
           !(kHasBf16Dot && Bf16Dot::supports(problem) && !has_few_rows(problem));
}

// The first `count` rows, in the caller's memory if they can be read there.
template <class T>
StoredRows<T> first_rows(Arena& arena, const Matrix& m, Dtype dtype, int64_t count, int64_t cols) {
    if (has_stored_layout<T>(m, dtype, cols)) return stored_rows<T>(m, dtype, 0);
    return StoredRows<T>(view_rows(arena.take<T>(count * padded(cols, Vector<T>::lanes)), m, dtype, 0, count, cols));
}

// A head whose rows and keys are few.
template <class T>
class ShortHead {
    static constexpr int L = Vector<T>::lanes;

   public:
    ShortHead(Arena& arena, const Problem& problem, const Head& head)
        : arena_(arena), problem_(problem), head_(head), rows_(problem.query_len) {
        const int64_t last = key_interval(problem, head, 0).last;
        for (int64_t i = 0; i < rows_; i++) {
            const Span own = key_interval(problem, head, i);
            count_ = std::max(count_, own.last);
            same_ = same_ && own.first == 0 && own.last == last;
        }
        values_ = first_rows<T>(arena, head.value, problem.value_dtype, count_, problem.value_dim);
        width_ = padded(problem.value_dim, L);
    }

    // Attend to the keys. Returns false, with nothing done, where a masked value is not finite.
    bool attend() {
        const auto finite = [&](const auto& rows) { return is_finite(rows, count_, width_); };
        if (!same_ && !values_.with_view(finite)) return false;
        T *s = arena_.take<T>(rows_ * kTileKeys), *out = arena_.take<T>(rows_ * width_);
        if (problem_.form == Form::distance)
            fill_scores(SquaredDistance<T>{}, s, -scale_of<T>(problem_, head_));
        else
            fill_scores(Product<T>{}, s, T(1));
        T denoms[kMostShortRows];
        dispatch_width<T>(count_, [&](auto vectors) {
            for (int64_t i = 0; i < rows_; i++) denoms[i] = softmax<vectors>(i, s + i * kTileKeys);
        });
        std::fill_n(out, rows_ * width_, T(0));
        values_.with_view([&](const auto& view) { add_weighted_rows(out, s, rows_, view, count_, width_); });
        for (int64_t i = 0; i < rows_; i++)
            store_row(problem_, head_, i, denoms[i] == 0 ? T(1) : 1 / denoms[i], out + i * width_);
        return true;
    }

   private:
    // Compute the scores of all pairs, times `factor`. As everywhere, few rows go key by key.
    template <class Terms>
    void fill_scores(const Terms& terms, T* s, T factor) const {
        const int64_t width = padded(problem_.dim, L), columns = padded(count_, L);
        T* query = arena_.take<T>(rows_ * width);
        for (int64_t i = 0; i < rows_; i++) read_query(query + i * width, width, problem_, head_, i);
        if (has_few_rows(problem_)) {
            first_rows<T>(arena_, head_.key, problem_.score_dtype, count_, problem_.dim)
                .with_view([&](const auto& keys) {
                    few_rows_gemm(terms, s, query, width, rows_, keys, count_, width, {values_, count_, width_});
                });
        } else {
            T *copy = arena_.take<T>(count_ * width), *transposed = arena_.take<T>(width * kTileKeys);
            transpose_tile(transposed, view_rows(copy, head_.key, problem_.score_dtype, 0, count_, problem_.dim), width,
                           count_);
            gemm(terms, s, kTileKeys, query, width, 1, transposed, kTileKeys, rows_, columns, problem_.dim, false);
        }
        if (factor == 1) return;
        for (int64_t i = 0; i < rows_; i++)
            for (int64_t j = i * kTileKeys; j < i * kTileKeys + columns; j += L) store(s + j, load(s + j) * factor);
    }

    // Make weights of the scores of a row, in W vectors, and keep its statistics. Returns the sum of the weights.
    template <int W>
    T softmax(int64_t i, T* s) const {
        constexpr T infinity = std::numeric_limits<T>::infinity(), unset = OnlineSoftmax<T>::kUnset;
        const bool keeps_weights = problem_.matrix == MatrixOutput::weights;
        if (keeps_weights) std::copy_n(s, count_, as<T>(head_.matrix) + i * problem_.key_len);
        if (!same_ || count_ < W * L) {
            const uint64_t bits = same_ ? lowest_bits(count_) : interval_bits(problem_, head_, i, 0, count_);
#pragma GCC unroll 16
            for (int j = 0; j < W; j++) store(s + j * L, select_bits<T>(bits, j, load(s + j * L), splat(-infinity)));
        }
        V<T> most = splat(unset), sum{};
#pragma GCC unroll 16
        for (int j = 0; j < W; j++) most = fast_max<T>(load(s + j * L), most);
        T maximum = reduce_max<T>(most);
#pragma GCC unroll 16
        for (int j = 0; j < W; j++) {
            const V<T> e = exp2_of<T>((load(s + j * L) - maximum) * kLog2E<T>);
            sum += e;
            store(s + j * L, e);
        }
        const T denom = reduce_sum<T>(sum);
        if (maximum == unset && denom == 0) maximum = -infinity;
        if (denom != denom && maximum != infinity) maximum = denom;  // an unmasked NaN
        as<T>(head_.row_stats)[kStatMax * rows_ + i] = maximum;
        as<T>(head_.row_stats)[kStatDenom * rows_ + i] = denom;
        if (keeps_weights) finish_matrix_row(problem_, head_, i, maximum, denom);
        return denom;
    }

    Arena& arena_;
    const Problem& problem_;
    const Head& head_;
    const int64_t rows_;
    int64_t count_ = 0;  // of the keys up to the last one that some row attends to
    bool same_ = true;   // whether every row attends to all of them
    StoredRows<T> values_;
    int64_t width_;
};
