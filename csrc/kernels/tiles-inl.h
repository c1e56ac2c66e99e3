// What the scores are computed from: the query rows of a task, and a tile of keys, ready for products.

// Whether a row held NaN or infinity; it then holds zeros.
template <class T>
inline bool zero_if_nonfinite(T* row, int64_t width) {
    if (is_finite(View<T>{row, width}, 1, width)) return false;
    std::fill_n(row, width, T(0));
    return true;
}

// Query rows of one task: rows of one head, or of several heads that share their keys, one after the other. Rows stand
// in scratch as T, times the scale where the form is an inner product.
template <class T>
struct QueryTile {
    int64_t count = 0, width = 0;
    const Head** head;
    int64_t* row;
    T* query;
    // By strip: keys that any_row row sees, and keys that all_rows row sees.
    Span *any_row, *all_rows;
    // By strip, and hole after hole: keys in that hole of all_rows row, and of any_row row; behind them those of the
    // block.
    int64_t holes = 0;
    Span *hole_all = nullptr, *hole_any = nullptr;
    bool masked = false;       // whether any_row pair may be masked
    bool pair_masked = false;  // whether only looking at a pair tells
    bool no_epilogue = true;   // whether scores are products or distances and nothing else
    uint32_t* stream;          // of dropout, where there is any
    // Additive: rows that held NaN or infinity. Zeros stand in their place, so that the rest of a tile is computed as
    // it would be beside any other row; their own pairs are computed one by one.
    bool* nonfinite = nullptr;

    int64_t panels() const { return (count + kMR - 1) / kMR; }
    int64_t panel_size(int64_t s) const { return std::min<int64_t>(kMR, count - s * kMR); }

    QueryTile(Arena& arena, const Problem& problem, const std::vector<int64_t>& heads, int64_t first, int64_t rows)
        : count(rows) {
        width = padded(problem.dim, Vector<T>::lanes);
        head = arena.take<const Head*>(count);
        row = arena.take<int64_t>(count);
        query = arena.take<T>(count * width);
        stream = arena.take<uint32_t>(problem.dropout > 0 ? count : 0);
        any_row = arena.take<Span>(panels());
        all_rows = arena.take<Span>(panels());
        const T scale = problem.form == Form::inner ? static_cast<T>(problem.scale) : T(1);
        int64_t at = first / problem.query_len, next = first % problem.query_len;
        for (int64_t i = 0; i < count; i++, next++) {
            if (next == problem.query_len) at++, next = 0;
            head[i] = &problem.heads[heads[at]];
            row[i] = next;
            prefetch_row(head[i]->query, problem.score_dtype, next + kPrefetchRows, problem.query_len, problem.dim);
            T* own = query + i * width;
            read_row(own, width, head[i]->query, problem.score_dtype, next, 0, problem.dim);
            for (int64_t j = 0; j < width; j += Vector<T>::lanes) store(own + j, load(own + j) * scale);
            masked = masked || has_mask(*head[i]);
            holes = std::max(holes, head[i]->holes);
            pair_masked = pair_masked || has_pair_mask(*head[i]);
            no_epilogue = no_epilogue && !head[i]->query_bias.data && !head[i]->key_bias.data && problem.caps.empty();
            if (problem.dropout > 0) stream[i] = Dropout::stream(problem, *head[i], row[i]);
        }
        if (problem.form == Form::additive && !is_finite(View<T>{query, width}, count, width)) {
            nonfinite = arena.take<bool>(count);
            for (int64_t i = 0; i < count; i++) nonfinite[i] = zero_if_nonfinite(query + i * width, width);
        }
        for (int64_t s = 0; s < panels(); s++) {
            Span all{problem.key_len, 0}, each{0, problem.key_len};
            for (int64_t i = s * kMR; i < s * kMR + panel_size(s); i++) {
                const Span own = key_interval(problem, *head[i], row[i]);
                if (own.last > own.first) all = {std::min(all.first, own.first), std::max(all.last, own.last)};
                each = {std::max(each.first, own.first), std::min(each.last, own.last)};
            }
            any_row[s] = all;
            all_rows[s] = each;
        }
        if (holes > 0) find_holes(arena, problem);
    }

    Span keys(int64_t key_len) const {
        Span all{key_len, 0};
        for (int64_t s = 0; s < panels(); s++)
            if (any_row[s].last > any_row[s].first)
                all = {std::min(all.first, any_row[s].first), std::max(all.last, any_row[s].last)};
        return all;
    }
    bool is_masked(int64_t s, int64_t key, int64_t key_count) const {
        return any_row[s].first >= key + key_count || any_row[s].last <= key || in_hole(s, key, key_count);
    }
    // Whether no row sees any key of the tile because of a hole.
    bool is_in_hole(int64_t key, int64_t key_count) const { return in_hole(panels(), key, key_count); }
    // Whether all_rows row of a strip sees the whole tile.
    bool is_unmasked(int64_t s, int64_t key, int64_t key_count) const {
        return key_count == kTileKeys && !pair_masked && all_rows[s].first <= key &&
               all_rows[s].last >= key + kTileKeys && !touches_hole(s, key);
    }

   private:
    bool in_hole(int64_t s, int64_t key, int64_t key_count) const {
        for (const Span* gap = hole_all + s * holes; gap != hole_all + (s + 1) * holes; gap++)
            if (gap->first <= key && gap->last >= key + key_count) return true;
        return false;
    }
    bool touches_hole(int64_t s, int64_t key) const {
        for (const Span* nick = hole_any + s * holes; nick != hole_any + (s + 1) * holes; nick++)
            if (nick->first < key + kTileKeys && nick->last > key) return true;
        return false;
    }
    void find_holes(Arena& arena, const Problem& problem) {
        const Span all{0, problem.key_len}, none{problem.key_len, 0};
        hole_all = arena.take<Span>((panels() + 1) * holes);
        hole_any = arena.take<Span>((panels() + 1) * holes);
        std::fill_n(hole_all, (panels() + 1) * holes, all);
        std::fill_n(hole_any, (panels() + 1) * holes, none);
        for (int64_t i = 0; i < count; i++) {
            const Span own = key_interval(problem, *head[i], row[i]);
            if (own.last <= own.first) continue;
            for (int64_t k = 0; k < holes; k++) {
                const Span hole = k < head[i]->holes ? hole_interval(*head[i], row[i], k) : Span{0, 0};
                for (const int64_t s : {i / kMR, panels()}) {
                    Span &gap = hole_all[s * holes + k], &nick = hole_any[s * holes + k];
                    gap = {std::max(gap.first, hole.first), std::min(gap.last, hole.last)};
                    if (hole.last > hole.first)
                        nick = {std::min(nick.first, hole.first), std::max(nick.last, hole.last)};
                }
            }
        }
    }
};

// One tile of keys, as the scores of a form need them.
template <class T>
struct KeyTile {
    int64_t first = 0, count = 0;
    View<T> rows;   // as they lie
    T* transposed;  // as columns
    T* bias;        // one number a key, where there is a key bias
    T* copy;
    uint64_t nonfinite = 0;  // additive: keys that held NaN or infinity; see QueryTile
    typename Additive<T>::Keys additive;

    // `gradients`: whether they are computed of it too.
    KeyTile(Arena& arena, const Problem& problem, const Additive<T>& form, bool gradients) {
        const int64_t width = padded(problem.dim, Vector<T>::lanes);
        transposed = arena.take<T>(kTileKeys * width);
        copy = arena.take<T>(kTileKeys * width);
        bias = arena.take<T>(kTileKeys);
        if (problem.form == Form::additive) AdditiveTables<T>{form}.reserve(arena, additive, gradients);
    }

    // `sizes`: of the rows that it will meet.
    void fill(const Problem& problem, const Additive<T>& form, const Head& head, int64_t key, int64_t key_count,
              bool transpose, const MagnitudeRange<T>& sizes = {}) {
        const int64_t width = padded(problem.dim, Vector<T>::lanes);
        first = key, count = key_count, nonfinite = 0;
        rows = view_rows(copy, head.key, problem.score_dtype, key, key_count, problem.dim);
        if (transpose) transpose_tile(transposed, rows, width, key_count, problem.form == Form::additive);
        if (head.key_bias.data)
            for (int64_t j = 0; j < kTileKeys; j++)
                bias[j] = j < key_count
                              ? reinterpret_cast<const T*>(head.key_bias.data)[(key + j) * head.key_bias.row_stride]
                              : T(0);
        if (problem.form != Form::additive) return;
        const T* weights = reinterpret_cast<const T*>(head.weights);
        const AdditiveTables<T> tables{form};
        additive.scores_known = additive.rows && head.saved_scores;
        tables.fill(additive, transposed, weights, sizes);
        if (additive.largest <= std::numeric_limits<T>::max()) return;
        read_rows(copy, width, head.key, problem.score_dtype, key, key_count, problem.dim);
        rows = {copy, width};
        for (int64_t j = 0; j < key_count; j++) nonfinite |= uint64_t(zero_if_nonfinite(copy + j * width, width)) << j;
        transpose_tile(transposed, rows, width, key_count, true);
        tables.fill(additive, transposed, weights, sizes);
    }
};
