// The product P V of a micro-panel's weights and a tile of values.
#pragma once

#include "kernels/gemm-inl.h"
#include "kernels/masking-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/simd-inl.h"

// Values of so few channels keep one sum per lane of keys instead of one vector per channel: a product of matrices
// would pad each value to a vector (a tenth to a sixth of a pass over keys of 32 channels).
constexpr int64_t kNarrow = 4;

// The size of an output row while tiles go by: lanes of narrow values are added up at the end.
template <class T>
inline int64_t row_width(const Problem& problem) {
    constexpr int64_t L = Vector<T>::lanes;
    return problem.value_dim <= kNarrow ? problem.value_dim * L : padded(problem.value_dim, L);
}

// A tile of values and its products with weights.
template <class T>
class ValueTile {
   public:
    StoredRows<T> stored;  // `clean`, or the caller's memory, and then `clean` is not set
    View<T> clean;         // the rows as T, with zeros for NaN and infinity where some pair may be masked; or not set
    uint64_t nonfinite;    // bits of the keys whose values hold NaN or infinity

    // `masked`: whether some tile may be filled as masked. `reused`: whether rows are read often enough for a copy.
    // `in_place`: whether they are read so seldom that no copy of 16-bit numbers as T pays.
    ValueTile(Arena& arena, const Problem& problem, bool masked, bool reused, bool in_place)
        : problem_(problem), width_(padded(problem.value_dim, L)), reused_(reused), in_place_(in_place && !narrow()) {
        copy_ = arena.take<T>(kTileKeys * width_);
        clean_copy_ = arena.take<T>(masked ? kTileKeys * width_ : 0);
        transposed_ = arena.take<T>(narrow() ? kTileKeys * problem.value_dim : 0);
    }

    int64_t count() const { return count_; }
    bool narrow() const { return problem_.value_dim <= kNarrow; }

    // Read the values of the keys [key, key + key_count). `masked`: whether some pair of the tile may be masked.
    void fill(const Head& head, int64_t key, int64_t key_count, bool masked) {
        count_ = key_count, nonfinite = 0;
        if (in_place_ && has_stored_layout<T>(head.value, problem_.value_dtype, problem_.value_dim)) {
            stored = stored_rows<T>(head.value, problem_.value_dtype, key);
            const auto finite = [&](const auto& rows) { return is_finite(rows, key_count, width_); };
            if (!masked || stored.with_view(finite)) return;
        }
        rows_ = view_rows(copy_, head.value, problem_.value_dtype, key, key_count, problem_.value_dim);
        if (reused_ && !is_aligned(rows_)) {
            for (int64_t j = 0; j < key_count; j++) std::memcpy(copy_ + j * width_, rows_.row(j), width_ * sizeof(T));
            rows_ = {copy_, width_};
        }
        clean = rows_;
        if (masked && !is_finite(rows_, key_count, width_)) remove_nonfinite();
        stored = StoredRows<T>(clean);
        if (!narrow()) return;
        for (int64_t k = 0; k < problem_.value_dim; k++)
            for (int64_t j = 0; j < kTileKeys; j++)
                transposed_[k * kTileKeys + j] = j < key_count ? clean.row(j)[k] : T(0);
    }

    // The work between the keys of the tile's scores: prefetching its values.
    Interleaved<T> prefetched() const { return {stored, count_, width_}; }

    // O += P V, for `size` rows of weights.
    void add_pv(T* out, const T* weights, int64_t size) const {
        if (!narrow())
            return stored.with_view(
                [&](const auto& rows) { add_weighted_rows(out, weights, size, rows, count_, width_); });
        for (int64_t i = 0; i < size; i++)
            for (int64_t k = 0; k < problem_.value_dim; k++, out += L) {
                V<T> sum = load(out);
                for (int64_t j = 0; j < count_; j += L)
                    sum += load(weights + i * kTileKeys + j) * load(transposed_ + k * kTileKeys + j);
                store(out, sum);
            }
    }

    // Add the NaN and infinities that `clean` leaves out: they propagate to the rows that attend to them.
    void propagate_nonfinite(T* out, const T* weights, const uint64_t* bits, int64_t size) const {
        const int64_t width = row_width<T>(problem_);
        for (int64_t i = 0; i < size; i++, out += width)
            for_each_bit(bits[i] & nonfinite, [&](int j) {
                const T weight = weights[i * kTileKeys + j];
                const T* row = rows_.row(j);
                if (narrow()) {
                    for (int64_t k = 0; k < problem_.value_dim; k++)
                        if (!std::isfinite(row[k])) out[k * L] += weight * row[k];
                    return;
                }
                for (int64_t k = 0; k < width; k += L) {
                    const V<T> x = load(row + k);
                    store(out + k, load(out + k) + select<T>(x - x == T(0), V<T>{}, weight * x));
                }
            });
    }

    // Add up the lanes of narrow outputs, once all tiles have gone by.
    void reduce_lanes(T* out, int64_t count) const {
        if (!narrow()) return;
        const int64_t width = row_width<T>(problem_);
        for (int64_t i = 0; i < count; i++)
            for (int64_t k = 0; k < problem_.value_dim; k++)
                out[i * width + k] = reduce_sum<T>(load(out + i * width + k * L));
    }

   private:
    static constexpr int64_t L = Vector<T>::lanes;

    // Copy the rows with zeros for NaN and infinity: finite values keep their bits in products.
    void remove_nonfinite() {
        for (int64_t j = 0; j < count_; j++) {
            nonfinite |= uint64_t(!is_finite(View<T>{rows_.row(j), 0}, 1, width_)) << j;
            for (int64_t k = 0; k < width_; k++)
                clean_copy_[j * width_ + k] = std::isfinite(rows_.row(j)[k]) ? rows_.row(j)[k] : T(0);
        }
        clean = {clean_copy_, width_};
    }

    const Problem& problem_;
    int64_t width_, count_ = 0;
    bool reused_, in_place_;
    View<T> rows_;  // the caller's, as T
    T *copy_, *clean_copy_, *transposed_;
};
