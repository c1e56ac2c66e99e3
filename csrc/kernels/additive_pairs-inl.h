// Additive scores and their gradients pair by pair, with channels in the lanes: for tiles of so few pairs that the
// tables of rows and keys would take longer than f itself. Pairs that are masked or whose ds is 0 are not read.
#pragma once

#include "kernels/activations-inl.h"
#include "kernels/additive-inl.h"
#include "kernels/masking-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/simd-inl.h"

template <class T>
class AdditivePairs {
    static constexpr int L = Vector<T>::lanes;
    static constexpr int kTogether = 4;  // keys, so that evaluations of f overlap
    using Form = Additive<T>;

   public:
    // `w`: w_v, dim numbers, which are read as long as the object lives.
    AdditivePairs(const Form& form, const T* w) : form_(form), w_(w), whole_(form.dim / L * L) {
        std::copy_n(w + whole_, form.dim - whole_, last_w_);
    }

    // Compute s[i * kTileKeys + j] for `count` rows, `width` apart, and the keys j of `bits[i]`.
    void scores(T* s, const T* rows, int64_t width, int64_t count, const View<T>& keys, const uint64_t* bits) const {
        form_.with_term([&](auto term) {
            for (int64_t i = 0; i < count; i++) {
                int key[kTogether], pending = 0;
                T* to = s + i * kTileKeys;
                const T* a = rows + i * width;
                for_each_bit(bits[i], [&](int j) {
                    key[pending++] = j;
                    if (pending == kTogether) compute_scores<kTogether>(term, to, a, keys, key), pending = 0;
                });
                for (int k = 0; k < pending; k++) compute_scores<1>(term, to, a, keys, key + k);
            }
        });
    }

    // Add the gradients from ds, exactly 0 where a pair is masked, to da[i * lda + p], db[j * ldb + p] and dw[p]. da
    // and db have whole vectors, dw has dim numbers.
    void gradients(const T* ds, const T* rows, int64_t width, int64_t count, const View<T>& keys, int64_t key_count,
                   T* da, int64_t lda, T* db, int64_t ldb, T* dw) const {
        form_.with_term([&](auto term) {
            for (int64_t i = 0; i < count; i++) {
                int key[kTileKeys], unmasked_count = 0;
                for (int j = 0; j < key_count; j++)
                    if (ds[i * kTileKeys + j] != T(0)) key[unmasked_count++] = j;
                add_gradients(term, ds + i * kTileKeys, rows + i * width, keys, key, unmasked_count, da + i * lda, db,
                              ldb, dw);
            }
        });
    }

   private:
    const Form& form_;
    const T* w_;
    const int64_t whole_;  // channels in whole vectors
    T last_w_[L] = {};     // weights of the channels after whole_, and zeros

    // The weights of the channels from p on.
    V<T> weight(int64_t p) const { return load(p < whole_ ? w_ + p : last_w_); }

    // Compute s[key[n]] for a row `a` and N keys.
    template <int N, class Term>
    __attribute__((noinline)) void compute_scores(const Term& term, T* s, const T* a, const View<T>& keys,
                                                  const int* key) const {
        V<T> sum[N] = {};
        const T* b[N];
        for (int n = 0; n < N; n++) b[n] = keys.row(key[n]);
        const int64_t ahead = kTogether * keys.stride;
        for (int64_t p = 0; p < form_.dim; p += L) {
            const V<T> w = weight(p), a_p = load(a + p);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                // The rows that come next: each is too short for the processor to run ahead.
                __builtin_prefetch(b[n] + p + ahead);
                sum[n] = fused<T>(w, term.value(a_p + load(b[n] + p)), sum[n]);
            }
        }
        for (int n = 0; n < N; n++) s[key[n]] = reduce_sum<T>(sum[n]);
    }

    // Add the gradients of a row `a` and `count` keys.
    template <class Term>
    __attribute__((noinline)) void add_gradients(const Term& term, const T* ds, const T* a, const View<T>& keys,
                                                 const int* key, int count, T* da, T* db, int64_t ldb, T* dw) const {
        for (int64_t p = 0; p < form_.dim; p += L) {
            const V<T> w = weight(p), a_p = load(a + p);
            V<T> row{}, weights{};
            for (int k = 0; k < count; k++) {
                T* to = db + key[k] * ldb + p;
                V<T> dz, value;
                const V<T> z = a_p + load(keys.row(key[k]) + p);
                term.value_and_gradient(splat(ds[key[k]]), z, dz, value);
                // The slope at NaN is NaN; the rectifiers' terms select one.
                dz = select<T>(z == z, dz, z) * w;
                row += dz;
                weights += value;
                store(to, load(to) + dz);
            }
            store(da + p, load(da + p) + row);
            if (p < whole_) {
                store(dw + p, load(dw + p) + weights);
            } else {
                for (int64_t i = 0; i < form_.dim - p; i++) dw[p + i] += weights[i];
            }
        }
    }
};
