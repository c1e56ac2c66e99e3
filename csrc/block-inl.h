// What the scores are computed from: the query rows of a task, and a tile of keys, ready for products.

// Whether a row held NaN or infinity; it then holds zeros.
template <class T>
inline bool cleared(T* row, int64_t width) {
    if (is_finite(View<T>{row, width}, 1, width)) return false;
    std::fill_n(row, width, T(0));
    return true;
}

// Query rows of one task: rows of one head, or of several heads that share their keys, one after the other. Rows stand
// in scratch as T, times the scale where the form is an inner product.
template <class T>
struct Block {
    int64_t count = 0, width = 0;
    const Head** head;
    int64_t* row;
    T* query;
    // By strip: keys that some row sees, and keys that every row sees.
    Span *some, *every;
    // By strip, and hole after hole: keys in that hole of every row, and of some row; behind them those of the block.
    int64_t holes = 0;
    Span *gaps = nullptr, *nicks = nullptr;
    bool hidden = false;     // whether some pair may be hidden
    bool irregular = false;  // whether only looking at a pair tells
    bool plain = true;       // whether scores are products or distances and nothing else
    uint32_t* stream;        // of dropout, where there is any
    // Additive: rows that held NaN or infinity. Zeros stand in their place, so that the rest of a tile is computed as
    // it would be beside any other row; their own pairs are computed one by one.
    bool* bad = nullptr;

    int64_t strips() const { return (count + kStrip - 1) / kStrip; }
    int64_t strip_size(int64_t s) const { return std::min<int64_t>(kStrip, count - s * kStrip); }

    Block(Arena& arena, const Problem& problem, const std::vector<int64_t>& heads, int64_t first, int64_t rows)
        : count(rows) {
        width = padded(problem.dim, Vector<T>::lanes);
        head = arena.take<const Head*>(count);
        row = arena.take<int64_t>(count);
        query = arena.take<T>(count * width);
        stream = arena.take<uint32_t>(problem.dropout > 0 ? count : 0);
        some = arena.take<Span>(strips());
        every = arena.take<Span>(strips());
        const T scale = problem.form == Form::inner ? static_cast<T>(problem.scale) : T(1);
        int64_t at = first / problem.query_len, next = first % problem.query_len;
        for (int64_t i = 0; i < count; i++, next++) {
            if (next == problem.query_len) at++, next = 0;
            head[i] = &problem.heads[heads[at]];
            row[i] = next;
            ask_for_row(head[i]->query, problem.score_dtype, next + kSoon, problem.query_len, problem.dim);
            T* own = query + i * width;
            read_row(own, width, head[i]->query, problem.score_dtype, next, 0, problem.dim);
            for (int64_t j = 0; j < width; j += Vector<T>::lanes) store(own + j, load(own + j) * scale);
            hidden = hidden || hides(*head[i]);
            holes = std::max(holes, head[i]->holes);
            irregular = irregular || is_irregular(*head[i]);
            plain = plain && !head[i]->query_bias.data && !head[i]->key_bias.data && problem.caps.empty();
            if (problem.dropout > 0) stream[i] = Dropout::stream(problem, *head[i], row[i]);
        }
        if (problem.form == Form::additive && !is_finite(View<T>{query, width}, count, width)) {
            bad = arena.take<bool>(count);
            for (int64_t i = 0; i < count; i++) bad[i] = cleared(query + i * width, width);
        }
        for (int64_t s = 0; s < strips(); s++) {
            Span all{problem.key_len, 0}, each{0, problem.key_len};
            for (int64_t i = s * kStrip; i < s * kStrip + strip_size(s); i++) {
                const Span own = keys_of(problem, *head[i], row[i]);
                if (own.last > own.first) all = {std::min(all.first, own.first), std::max(all.last, own.last)};
                each = {std::max(each.first, own.first), std::min(each.last, own.last)};
            }
            some[s] = all;
            every[s] = each;
        }
        if (holes > 0) find_gaps(arena, problem);
    }

    Span keys(int64_t key_len) const {
        Span all{key_len, 0};
        for (int64_t s = 0; s < strips(); s++)
            if (some[s].last > some[s].first)
                all = {std::min(all.first, some[s].first), std::max(all.last, some[s].last)};
        return all;
    }
    bool misses(int64_t s, int64_t key, int64_t here) const {
        return some[s].first >= key + here || some[s].last <= key || in_gap(s, key, here);
    }
    // Whether no row sees any key of the tile because of a hole.
    bool skips(int64_t key, int64_t here) const { return in_gap(strips(), key, here); }
    // Whether every row of a strip sees the whole tile.
    bool is_full(int64_t s, int64_t key, int64_t here) const {
        return here == kKeys && !irregular && every[s].first <= key && every[s].last >= key + kKeys && !nicked(s, key);
    }

   private:
    bool in_gap(int64_t s, int64_t key, int64_t here) const {
        for (const Span* gap = gaps + s * holes; gap != gaps + (s + 1) * holes; gap++)
            if (gap->first <= key && gap->last >= key + here) return true;
        return false;
    }
    bool nicked(int64_t s, int64_t key) const {
        for (const Span* nick = nicks + s * holes; nick != nicks + (s + 1) * holes; nick++)
            if (nick->first < key + kKeys && nick->last > key) return true;
        return false;
    }
    void find_gaps(Arena& arena, const Problem& problem) {
        const Span all{0, problem.key_len}, none{problem.key_len, 0};
        gaps = arena.take<Span>((strips() + 1) * holes);
        nicks = arena.take<Span>((strips() + 1) * holes);
        std::fill_n(gaps, (strips() + 1) * holes, all);
        std::fill_n(nicks, (strips() + 1) * holes, none);
        for (int64_t i = 0; i < count; i++) {
            const Span own = keys_of(problem, *head[i], row[i]);
            if (own.last <= own.first) continue;
            for (int64_t k = 0; k < holes; k++) {
                const Span hole = k < head[i]->holes ? hole_of(*head[i], row[i], k) : Span{0, 0};
                for (const int64_t s : {i / kStrip, strips()}) {
                    Span &gap = gaps[s * holes + k], &nick = nicks[s * holes + k];
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
    View<T> rows;  // as they lie
    T* turned;     // as columns
    T* bias;       // one number a key, where there is a key bias
    T* copy;
    uint64_t bad = 0;  // additive: keys that held NaN or infinity; see Block
    typename Additive<T>::Keys additive;

    // `gradients`: whether they are computed of it too.
    KeyTile(Arena& arena, const Problem& problem, const Additive<T>& form, bool gradients) {
        const int64_t width = padded(problem.dim, Vector<T>::lanes);
        turned = arena.take<T>(kKeys * width);
        copy = arena.take<T>(kKeys * width);
        bias = arena.take<T>(kKeys);
        if (problem.form == Form::additive) AdditiveTables<T>{form}.reserve(arena, additive, gradients);
    }

    // `sizes`: of the rows that it will meet.
    void fill(const Problem& problem, const Additive<T>& form, const Head& head, int64_t key, int64_t here, bool turn,
              const RowSizes<T>& sizes = {}) {
        const int64_t width = padded(problem.dim, Vector<T>::lanes);
        first = key, count = here, bad = 0;
        rows = view_rows(copy, head.key, problem.score_dtype, key, here, problem.dim);
        if (turn) transpose_tile(turned, rows, width, here, problem.form == Form::additive);
        if (head.key_bias.data)
            for (int64_t j = 0; j < kKeys; j++)
                bias[j] = j < here
                              ? reinterpret_cast<const T*>(head.key_bias.data)[(key + j) * head.key_bias.row_stride]
                              : T(0);
        if (problem.form != Form::additive) return;
        const T* weights = reinterpret_cast<const T*>(head.weights);
        const AdditiveTables<T> tables{form};
        additive.scored = additive.rows && head.scores;
        tables.fill(additive, turned, weights, sizes);
        if (additive.largest <= std::numeric_limits<T>::max()) return;
        gather(copy, width, head.key, problem.score_dtype, key, here, problem.dim);
        rows = {copy, width};
        for (int64_t j = 0; j < here; j++) bad |= uint64_t(cleared(copy + j * width, width)) << j;
        transpose_tile(turned, rows, width, here, true);
        tables.fill(additive, turned, weights, sizes);
    }
};
