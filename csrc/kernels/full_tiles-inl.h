// A few query rows against key tiles that no row masks, where products alone make the scores: most of a step of
// decoding. Several tiles are attended to at a time: first their scores, between whose keys the values of the tiles
// before are added, then their weights. One tile at a time would take a sixth longer: between tiles a task reads a few
// dozen cache lines of its own, which keys and values have driven out of the first-level cache, and which come behind
// all reads under way (TUNING.md, Decoding).
#pragma once

#include "kernels/gemm-inl.h"
#include "kernels/masking-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/online_softmax-inl.h"
#include "kernels/pv-inl.h"
#include "kernels/simd-inl.h"
#include "kernels/tiles-inl.h"

template <class T>
class FullTiles {
   public:
    FullTiles(Arena& arena, const Problem& problem, const QueryTile<T>& queries, OnlineSoftmax<T>& softmax)
        : queries_(queries),
          head_(*queries.head[0]),
          softmax_(softmax),
          key_dtype_(problem.score_dtype),
          value_dtype_(problem.value_dtype) {
        for (T** x : {&scores_, &weights_}) *x = arena.take<T>(kTiles * queries.count * kTileKeys);
    }

    // Whether a query tile has so few rows, products alone make its scores, its weights are neither dropped nor stored,
    // and keys and values are read in place. A single tile has no others to join; narrow values are not read in place.
    static bool supports(const Problem& problem, const QueryTile<T>& queries) {
        const Head& head = *queries.head[0];
        return queries.count <= kMostRows && problem.key_len > kTileKeys && problem.form == Form::inner &&
               queries.no_epilogue && problem.dropout == 0 && problem.matrix == MatrixOutput::none &&
               problem.value_dim > kNarrow && has_stored_layout<T>(head.key, problem.score_dtype, problem.dim) &&
               has_stored_layout<T>(head.value, problem.value_dtype, problem.value_dim);
    }

    // Attend to the full tiles from `key` on, until some row masks a key or the keys end. Returns the key behind them.
    int64_t run(int64_t key, int64_t end) {
        for (int64_t pending = 0;;) {  // tiles before `key` whose values are still to be added
            const int64_t tiles = count(key, end);
            for (int64_t i = 0; i < std::max(tiles, pending); i++) {
                const Interleaved<T> pv = i < pending ? adding(i, key + (i - pending) * kTileKeys) : Interleaved<T>{};
                if (i < tiles)
                    fill_scores(i, key + i * kTileKeys, pv);
                else
                    pv.run(0, kTileKeys);
            }
            if (tiles == 0) return key;
            for (int64_t i = 0; i < tiles; i++) update_softmax(i, key + i * kTileKeys);
            key += tiles * kTileKeys, pending = tiles;
        }
    }

   private:
    static constexpr int64_t kTiles = 8;     // at a time
    static constexpr int64_t kMostRows = 3;  // more take longer this way where the caches hold their keys

    // How many full tiles from `key` on are attended to together. Micro-panel 0 has all rows.
    int64_t count(int64_t key, int64_t end) const {
        int64_t tiles = 0;
        for (; tiles < kTiles && key + kTileKeys <= end && queries_.is_unmasked(0, key, kTileKeys); tiles++)
            key += kTileKeys;
        return tiles;
    }

    // Adding the values of tile i, whose keys begin at `key`.
    Interleaved<T> adding(int64_t i, int64_t key) const {
        const StoredRows<T> values = stored_rows<T>(head_.value, value_dtype_, key);
        return {values, kTileKeys, softmax_.width, tile(weights_, i), softmax_.out, queries_.count};
    }

    // Compute the scores of tile i, whose keys begin at `key`; `interleaved` does its work between the keys.
    void fill_scores(int64_t i, int64_t key, const Interleaved<T>& interleaved) const {
        few_rows_gemm(Product<T>{}, tile(scores_, i), queries_.query, queries_.width, queries_.count,
                      stored_rows<T>(head_.key, key_dtype_, key), kTileKeys, queries_.width, interleaved);
    }

    // Compute the weights of tile i, whose keys begin at `key`. Where it raises the lazy maximum of a row, the tiles
    // before it, whose values are not added yet, are rescaled too.
    void update_softmax(int64_t i, int64_t key) {
        constexpr uint64_t bits[kMostRows] = {kAll, kAll, kAll};
        T from[kMostRows];
        std::copy_n(softmax_.lazy_max, queries_.count, from);
        softmax_.update(0, queries_.count, tile(weights_, i), tile(scores_, i), bits, kTileKeys, nullptr, T(1), key);
        for (int64_t row = 0; row < queries_.count; row++) {
            if (softmax_.lazy_max[row] == from[row]) continue;
            const T factor = rescale_factor(from[row], softmax_.lazy_max[row]);
            for (int64_t before = 0; before < i; before++) {
                T* weights = tile(weights_, before) + row * kTileKeys;
                for (int64_t j = 0; j < kTileKeys; j++) weights[j] *= factor;
            }
        }
    }

    T* tile(T* x, int64_t i) const { return x + i * queries_.count * kTileKeys; }

    const QueryTile<T>& queries_;
    const Head& head_;  // whose keys and values all rows share
    OnlineSoftmax<T>& softmax_;
    const Dtype key_dtype_, value_dtype_;
    T *scores_, *weights_;  // by tile and row
};
