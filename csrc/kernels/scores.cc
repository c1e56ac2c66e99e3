// Scores of tiles with sums of one type: every form, with biases, caps and masks.
#include "kernels/target.h"

namespace attnscore::ATTNSCORE_TARGET {

#include "kernels/scores-inl.h"

template <class T>
void Scores<T>::operator()(T* s, uint64_t* bits, const QueryTile<T>& queries,
                           const typename Additive<T>::Query& additive_query, Span panels, const KeyTile<T>& tile,
                           const Interleaved<T>* interleaved, const Bf16Dot* bf16, bool saves) const {
    constexpr int L = Vector<T>::lanes;
    const int64_t first = panels.first * kMR, size = std::min(panels.end * kMR, queries.count) - first;
    const T* query = queries.query + first * queries.width;
    // Products are of whole vectors of keys: the lanes after the last key are masked below, like pairs.
    const int64_t columns = padded(tile.count, L);
    if (problem_.form == Form::additive) {
        additive_scores(s, bits, queries, additive_query, first, size, tile);
    } else if (problem_.form == Form::distance) {
        products(SquaredDistance<T>{}, s, query, queries.width, size, tile, interleaved);
        if (saves && queries.head[first]->scale) std::copy_n(s, size * kTileKeys, squares_);
        for (int64_t i = 0; i < size; i++) {
            const T scale = -scale_of<T>(problem_, *queries.head[first + i]);
            for (int64_t j = i * kTileKeys; j < i * kTileKeys + columns; j += L) store(s + j, load(s + j) * scale);
        }
    } else if (bf16) {
        if constexpr (sizeof(T) == 4) bf16->qk(s, first, size, columns);
    } else {
        products(Product<T>{}, s, query, queries.width, size, tile, interleaved);
    }
    const int vectors = width_of<T>(tile.count);
    // Where no pair is masked, and neither biases nor caps follow, the scores are final.
    bool full = true;
    for (int64_t panel = panels.first; panel < panels.end; panel++)
        full = full && queries.is_unmasked(panel, tile.first, tile.count);
    if (full && queries.no_epilogue && !queries.nonfinite && !tile.nonfinite) {
        std::fill_n(bits, size, kAll);
        return;
    }
    if (!queries.masked && queries.no_epilogue && !queries.nonfinite && !tile.nonfinite) {
        // The same in the last tile, except that the lanes after its last key are masked.
        const uint64_t keys = lowest_bits(tile.count);
        std::fill_n(bits, size, keys);
        for (int64_t j = tile.count / L; j < vectors; j++)
            for (int64_t i = 0; i < size; i++) {
                T* at = s + i * kTileKeys + j * L;
                store(at,
                      select_bits<T>(keys, static_cast<int>(j), load(at), splat(-std::numeric_limits<T>::infinity())));
            }
        return;
    }
    for (int64_t i = 0; i < size; i++) {
        const Head& head = *queries.head[first + i];
        const int64_t row = queries.row[first + i];
        const bool all = full || queries.is_unmasked((first + i) / kMR, tile.first, tile.count);
        bits[i] = all ? kAll : unmasked_bits(problem_, head, row, tile.first, tile.count);
        T* line = s + i * kTileKeys;
        const uint64_t nonfinite = queries.nonfinite && queries.nonfinite[first + i] ? kAll : tile.nonfinite;
        for_each_bit(nonfinite & bits[i],
                     [&](int j) { line[j] = form_.pair_score(problem_, head, row, tile.first + j); });
        if (head.query_bias.data || head.key_bias.data || !problem_.caps.empty())
            apply_biases_and_caps(line, head, row, tile, saves ? cap_slopes_ + i * kTileKeys : nullptr);
        if (head.bias.data)
            add_bias(line, bits[i], problem_, head, row, Span{tile.first, tile.first + tile.count}, line_);
        if (bits[i] != kAll)
            for (int j = 0; j < vectors; j++)
                store(line + j * L,
                      select_bits<T>(bits[i], j, load(line + j * L), splat(-std::numeric_limits<T>::infinity())));
    }
}

// The sums of terms of `size` query rows with the keys of a tile, in whole vectors of keys.
template <class T>
template <class Terms>
void Scores<T>::products(const Terms& terms, T* s, const T* query, int64_t width, int64_t size, const KeyTile<T>& tile,
                         const Interleaved<T>* interleaved) const {
    if (!interleaved) {
        gemm(terms, s, kTileKeys, query, width, 1, tile.transposed, kTileKeys, size,
             padded(tile.count, Vector<T>::lanes), problem_.dim, /*add=*/false);
        return;
    }
    few_rows_gemm(terms, s, query, width, size, tile.stored, tile.count, width, *interleaved);
}

// Compute, save or read additive scores of rows of one head. The two directions may cut keys into different tiles,
// and the forward skips tiles that are masked: scores that it has not written are masked here too. Pairs that are
// not finite are replaced afterwards, in both directions.
template <class T>
void Scores<T>::additive_scores(T* s, uint64_t* bits, const QueryTile<T>& queries,
                                const typename Additive<T>::Query& additive_query, int64_t first, int64_t size,
                                const KeyTile<T>& tile) const {
    const Head& head = *queries.head[first];
    T* saved = as<T>(head.saved_scores);
    if (saved) saved += queries.row[first] * problem_.key_len + tile.first;
    if (saved && backward_) {
        for (int64_t i = 0; i < size; i++) std::copy_n(saved + i * problem_.key_len, tile.count, s + i * kTileKeys);
        return;
    }
    if (form_.by_pairs) {
        for (int64_t i = 0; i < size; i++)
            bits[i] = unmasked_bits(problem_, head, queries.row[first + i], tile.first, tile.count);
        const AdditivePairs<T> pairs(form_, as<T>(head.w_v));
        pairs.scores(s, queries.query + first * queries.width, queries.width, size, tile.rows, bits);
    } else {
        additive_(s - first * kTileKeys, kTileKeys, additive_query, first, first + size, tile.additive,
                  as<T>(head.w_v));
    }
    if (!saved) return;
    for (int64_t i = 0; i < size; i++) std::copy_n(s + i * kTileKeys, tile.count, saved + i * problem_.key_len);
}

// Add the biases of the row and of the keys, then apply the caps in order: factor * cap * tanh(s / cap).
template <class T>
void Scores<T>::apply_biases_and_caps(T* s, const Head& head, int64_t row, const KeyTile<T>& tile,
                                      T* cap_slopes) const {
    constexpr int L = Vector<T>::lanes;
    const T row_bias = head.query_bias.data ? as<T>(head.query_bias.data)[row * head.query_bias.row_stride] : T(0);
    for (int64_t j = 0; j < width_of<T>(tile.count) * L; j += L) {
        V<T> x = load(s + j);
        if (head.key_bias.data) x += load(tile.bias + j);
        x += row_bias;
        V<T> slope = splat(T(1));
        for (const Cap& cap : problem_.caps) {
            const T factor = static_cast<T>(cap.factor);
            if (std::isinf(cap.cap)) {
                x = x * factor;
                slope = slope * factor;
            } else {
                const V<T> bounded = tanh_of<T>(x / static_cast<T>(cap.cap));
                const V<T> capped = bounded * static_cast<T>(cap.factor * cap.cap);
                // x / cap may be subnormal, which is flushed to 0; there cap * tanh(x / cap) is x.
                x = cap.cap > kLargeCap ? select<T>(abs_of<T>(x) < static_cast<T>(1e-9 * cap.cap), x * factor, capped)
                                        : capped;
                slope = slope * (factor * (T(1) - bounded * bounded));
            }
        }
        store(s + j, x);
        if (cap_slopes) store(cap_slopes + j, slope);
    }
}

ATTNSCORE_SCORES(, ATTNSCORE_SUM)

}  // namespace attnscore::ATTNSCORE_TARGET
