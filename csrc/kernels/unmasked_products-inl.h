// Products over unmasked pairs alone, for rows that may hold NaN or infinity: 0 times these is NaN.
#pragma once

#include "kernels/masking-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/score_gradients-inl.h"
#include "kernels/simd-inl.h"

// The product of a tile's A (rows x keys) and B over the unmasked pairs alone: c[j] += factor * a[i][j] * b[i]
// (by_keys), or c[i] += factor * a[i][j] * b[j].
template <class T>
void unmasked_product(T* c, int64_t ldc, const T* a, const uint64_t* bits, int64_t rows, const View<T>& b,
                      int64_t width, bool by_keys, T factor = 1) {
    for (int64_t i = 0; i < rows; i++)
        for_each_bit(bits[i], [&](int j) {
            const T x = factor * a[i * kTileKeys + j];
            T* to = c + (by_keys ? j : i) * ldc;
            const T* from = b.row(by_keys ? i : j);
            for (int64_t k = 0; k < width; k += Vector<T>::lanes) store(to + k, load(to + k) + x * load(from + k));
        });
}

// Gradients of squared distances over the unmasked pairs: dq[i] += a[i][j] (q[i] - k[j]), dk[j] -= the same terms.
template <class T>
void unmasked_differences(T* dq, T* dk, int64_t width, const T* a, const uint64_t* bits, int64_t rows,
                          const View<T>& query, const View<T>& key) {
    for (int64_t i = 0; i < rows; i++)
        for_each_bit(bits[i], [&](int j) {
            const T x = a[i * kTileKeys + j];
            for (int64_t k = 0; k < width; k += Vector<T>::lanes) {
                const V<T> difference = x * (load(query.row(i) + k) - load(key.row(j) + k));
                store(dq + i * width + k, load(dq + i * width + k) + difference);
                store(dk + j * width + k, load(dk + j * width + k) - difference);
            }
        });
}
