// Tiles of rows ready for products. A query tile is the rows of one task, in micro-panels of kMR rows; a key tile is
// kTileKeys keys.
#pragma once

#include "kernels/additive-inl.h"
#include "kernels/additive_tables-inl.h"
#include "kernels/gemm-inl.h"
#include "kernels/masking-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/simd-inl.h"

// Replace a row that holds NaN or infinity by zeros, and return whether it did: tables of additive scores are made of
// all rows of a tile, and the other rows keep their bits. The pairs of the replaced row are computed one by one
// (`QueryTile::nonfinite`).
template <class T>
inline bool zero_if_nonfinite(T* row, int64_t width) {
    if (is_finite(View<T>{row, width}, 1, width)) return false;
    std::fill_n(row, width, T(0));
    return true;
}

// Products do not go key by key where keys are so short: adding up the lanes of a vector for each takes longer.
constexpr int64_t kShortKeys = 16;

// Whether few query rows meet each key tile, which the heads of a group share, except with additive scores. The
// backward asks the same question: scores that it rounds in another order are off by as much as their largest
// roundings, and so are the weights that it computes from them with the forward's maximum and denominator.
inline bool has_few_rows(const Problem& problem) {
    if (problem.form == Form::additive) return problem.query_len <= kFewRows;
    return static_cast<int64_t>(problem.groups[0].heads.size()) * problem.query_len <= kFewRows &&
           problem.dim > kShortKeys;
}

// Read a query row as T, times the scale where the form is an inner product; `width` is `dim` up to whole vectors. A
// row that fills whole vectors of T is not copied first. Where dim is 0 the array may have no memory.
template <class T>
inline void read_query(T* to, int64_t width, const Problem& problem, const Head& head, int64_t row) {
    const T scale = problem.form == Form::inner ? static_cast<T>(problem.scale) : T(1);
    const bool native = problem.dim > 0 && has_native_layout<T>(head.query, problem.score_dtype, problem.dim);
    if (!native) read_row(to, width, head.query, problem.score_dtype, row, 0, problem.dim);
    const T* from = native ? as<T>(head.query.data) + row * head.query.row_stride : to;
    for (int64_t j = 0; j < width; j += Vector<T>::lanes) store(to + j, load(from + j) * scale);
}

// The query rows of a task: rows of one head, or of several heads that share their keys, one head after the other. They
// are copied as T, times the scale where the form is an inner product.
template <class T>
struct QueryTile {
    int64_t count = 0, width = 0;
    const Head** head;  // of each row
    int64_t* row;       // of each row: its number in the head
    T* query;
    Span *any_row, *all_rows;  // by micro-panel: keys in the interval of some row, and of every row
    // First keys of the packed sequences after the first one, in rising order: no row of an earlier sequence attends to
    // them.
    int64_t *begins = nullptr, begin_count = 0;
    // By micro-panel and hole: keys in this hole of every row, and of some row. One more panel is the whole tile.
    int64_t holes = 0;
    Span *hole_all = nullptr, *hole_any = nullptr;
    bool masked = false;       // whether some pair may be masked
    bool pair_masked = false;  // whether there is a mask of pairs, beyond the intervals
    bool no_epilogue = true;   // whether neither row biases, key biases nor caps follow the products
    uint32_t* stream;          // the dropout stream of each row, with dropout
    // Additive: rows that held NaN or infinity, null where none did. They are zeros here, so that the pairs of other
    // rows get the same bits as without them, and their own pairs are computed one by one.
    bool* nonfinite = nullptr;

    int64_t panels() const { return (count + kMR - 1) / kMR; }

    QueryTile(Arena& arena, const Problem& problem, const int64_t* heads, int64_t first, int64_t rows) : count(rows) {
        width = padded(problem.dim, Vector<T>::lanes);
        head = arena.take<const Head*>(count);
        row = arena.take<int64_t>(count);
        query = arena.take<T>(count * width);
        stream = arena.take<uint32_t>(problem.dropout > 0 ? count : 0);
        int64_t at = first / problem.query_len, next = first % problem.query_len;
        for (int64_t i = 0; i < count; at++, next = 0) {
            const Head& source_head = problem.heads[heads[at]];
            masked = masked || has_mask(source_head);
            holes = std::max(holes, source_head.holes);
            pair_masked = pair_masked || has_pair_mask(source_head);
            no_epilogue =
                no_epilogue && !source_head.query_bias.data && !source_head.key_bias.data && problem.caps.empty();
            for (; i < count && next < problem.query_len; i++, next++) {
                head[i] = &source_head;
                row[i] = next;
                prefetch_row(source_head.query, problem.score_dtype, next + kPrefetchRows, problem.query_len,
                             problem.dim);
                read_query(query + i * width, width, problem, source_head, next);
                if (problem.dropout > 0) stream[i] = Dropout::stream(problem, source_head, next);
            }
        }
        if (problem.form == Form::additive && !is_finite(View<T>{query, width}, count, width)) {
            nonfinite = arena.take<bool>(count);
            for (int64_t i = 0; i < count; i++) nonfinite[i] = zero_if_nonfinite(query + i * width, width);
        }
        find_intervals(arena, problem);
        if (holes > 0) find_holes(arena, problem);
    }

    // Keys that the interval of some row holds.
    Span keys(int64_t key_len) const {
        Span all{key_len, 0};
        for (int64_t panel = 0; panel < panels(); panel++) all = all.covering(any_row[panel]);
        return all;
    }
    // The end of the key tile that begins at `key`. A packed sequence begins a new tile, because a tile with keys of
    // two sequences would be computed for the rows of both.
    int64_t tile_end(int64_t key, int64_t end) const {
        end = std::min(key + kTileKeys, end);
        const int64_t* next = std::upper_bound(begins, begins + begin_count, key);
        return next == begins + begin_count ? end : std::min(end, *next);
    }
    // Whether the intervals of a micro-panel, or a hole of all of its rows, mask a whole key tile.
    bool is_masked(int64_t panel, int64_t key, int64_t key_count) const {
        return any_row[panel].first >= key + key_count || any_row[panel].end <= key || in_hole(panel, key, key_count);
    }
    // Whether a hole of all rows masks a whole key tile.
    bool is_in_hole(int64_t key, int64_t key_count) const { return in_hole(panels(), key, key_count); }
    // Whether every row of a micro-panel attends to all keys of a full key tile.
    bool is_unmasked(int64_t panel, int64_t key, int64_t key_count) const {
        return key_count == kTileKeys && !pair_masked && all_rows[panel].first <= key &&
               all_rows[panel].end >= key + kTileKeys && !touches_hole(panel, key);
    }

   private:
    // Whether a hole of all rows of a micro-panel, or of the tile where it is panels(), masks a whole key tile.
    bool in_hole(int64_t panel, int64_t key, int64_t key_count) const {
        for (const Span* hole = hole_all + panel * holes; hole != hole_all + (panel + 1) * holes; hole++)
            if (hole->first <= key && hole->end >= key + key_count) return true;
        return false;
    }
    // Whether a hole of some row of a micro-panel reaches into the full key tile at `key`.
    bool touches_hole(int64_t panel, int64_t key) const {
        for (const Span* hole = hole_any + panel * holes; hole != hole_any + (panel + 1) * holes; hole++)
            if (hole->first < key + kTileKeys && hole->end > key) return true;
        return false;
    }
    // Set any_row, all_rows and `begins` from the intervals of the rows.
    void find_intervals(Arena& arena, const Problem& problem) {
        any_row = arena.take<Span>(panels());
        all_rows = arena.take<Span>(panels());
        std::fill_n(all_rows, panels(), Span{0, problem.key_len});
        if (!masked) {
            std::copy_n(all_rows, panels(), any_row);
            return;
        }
        std::fill_n(any_row, panels(), Span{problem.key_len, 0});
        begins = arena.take<int64_t>(count);
        Span hull{problem.key_len, 0};  // of the intervals of the rows from the last of `begins` on
        for (int64_t i = 0; i < count; i++) {
            const Span interval = key_interval(problem, *head[i], row[i]);
            // Sequences shorter than a key tile share one.
            if (!interval.empty() && interval.first >= hull.end && interval.first - hull.first >= kTileKeys)
                begins[begin_count++] = interval.first, hull = interval;
            hull = hull.covering(interval);
            any_row[i / kMR] = any_row[i / kMR].covering(interval);
            all_rows[i / kMR] = all_rows[i / kMR].within(interval);
        }
    }
    // Set hole_all and hole_any, for which rows without keys do not count.
    void find_holes(Arena& arena, const Problem& problem) {
        const int64_t size = (panels() + 1) * holes;
        hole_all = arena.take<Span>(size);
        hole_any = arena.take<Span>(size);
        std::fill_n(hole_all, size, Span{0, problem.key_len});
        std::fill_n(hole_any, size, Span{problem.key_len, 0});
        for (int64_t i = 0; i < count; i++) {
            if (key_interval(problem, *head[i], row[i]).empty()) continue;
            for (int64_t k = 0; k < holes; k++) {
                const Span hole = k < head[i]->holes ? hole_interval(*head[i], row[i], k) : Span{0, 0};
                for (const int64_t panel : {i / kMR, panels()}) {
                    hole_all[panel * holes + k] = hole_all[panel * holes + k].within(hole);
                    hole_any[panel * holes + k] = hole_any[panel * holes + k].covering(hole);
                }
            }
        }
    }
};

// A key tile, as the scores of a form read it.
template <class T>
struct KeyTile {
    int64_t first = 0, count = 0;
    StoredRows<T> stored;  // one key a row, where possible in the caller's memory
    View<T> rows;          // the same as T, where they are needed
    T* transposed;         // one channel a row
    T* bias;               // one number a key, where there is a key bias
    T* copy;
    uint64_t nonfinite = 0;  // additive: bits of the keys that held NaN or infinity; see QueryTile
    bool gradients;          // whether the tile serves the backward too
    typename Additive<T>::Keys additive;

    KeyTile(Arena& arena, const Problem& problem, const Additive<T>& form, bool gradients = false)
        : gradients(gradients) {
        const int64_t width = padded(problem.dim, Vector<T>::lanes);
        transposed = arena.take<T>(kTileKeys * width);
        copy = arena.take<T>(kTileKeys * width);
        bias = arena.take<T>(kTileKeys);
        if (problem.form == Form::additive && !form.by_pairs)
            AdditiveTables<T>{form}.reserve(arena, additive, gradients);
    }

    // Read the keys [key, key + key_count). `transpose`: whether scores read `transposed`; few rows read the keys in
    // memory order. `sizes`: the magnitudes of the query rows that the tile will meet.
    void fill(const Problem& problem, const Additive<T>& form, const Head& head, int64_t key, int64_t key_count,
              bool transpose, const MagnitudeRange<T>& sizes) {
        const int64_t width = padded(problem.dim, Vector<T>::lanes);
        first = key, count = key_count, nonfinite = 0;
        const bool in_place = has_stored_layout<T>(head.key, problem.score_dtype, problem.dim);
        if (in_place) stored = stored_rows<T>(head.key, problem.score_dtype, key);
        if (!in_place || transpose || gradients || problem.form == Form::additive) {
            rows = view_rows(copy, head.key, problem.score_dtype, key, key_count, problem.dim);
            stored = StoredRows<T>(rows);
        }
        if (transpose && !form.by_pairs)
            transpose_tile(transposed, rows, width, key_count, problem.form == Form::additive);
        if (head.key_bias.data)
            for (int64_t j = 0; j < kTileKeys; j++)
                bias[j] = j < key_count ? as<T>(head.key_bias.data)[(key + j) * head.key_bias.row_stride] : T(0);
        if (problem.form != Form::additive || form.by_pairs) return;
        const AdditiveTables<T> tables{form};
        additive.scores_known = additive.rows && head.saved_scores;  // `rows` is for gradients alone
        tables.fill(additive, transposed, as<T>(head.w_v), sizes);
        if (additive.largest <= std::numeric_limits<T>::max()) return;
        // Some key holds NaN or infinity: fill the tables again, with zeros for it.
        read_rows(copy, width, head.key, problem.score_dtype, key, key_count, problem.dim);
        rows = {copy, width};
        for (int64_t j = 0; j < key_count; j++) nonfinite |= uint64_t(zero_if_nonfinite(copy + j * width, width)) << j;
        transpose_tile(transposed, rows, width, key_count, true);
        tables.fill(additive, transposed, as<T>(head.w_v), sizes);
    }
};
