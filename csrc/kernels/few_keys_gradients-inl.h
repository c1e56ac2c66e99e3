// The backward of heads of a few query rows and a few keys: from the arrays of a head to its gradients, without the
// state of tiles and tasks, which takes such a head longer than its products.
#pragma once

#include "kernels/few_keys-inl.h"
#include "kernels/gemm-inl.h"
#include "kernels/masking-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/score_gradients-inl.h"
#include "kernels/scores-inl.h"
#include "kernels/simd-inl.h"
#include "kernels/unmasked_products-inl.h"

// Whether the backward of a call goes head by head. The gradient of a relative bias is summed by tiles.
inline bool has_short_gradients(const Problem& problem) {
    return has_short_heads(problem) && (problem.bias_groups.empty() || !problem.bias_groups[0].is_relative());
}

// Rows as operands of products over all pairs. Where pairs are masked, zeros replace NaN and infinity, because a masked
// pair adds 0 times a row, and 0 times NaN is NaN. `rest` has the replaced numbers, for the unmasked pairs. So one path
// serves all rows, and masked numbers change no bit of any result.
template <class T>
struct FiniteRows {
    View<T> rows, rest;
    uint64_t with_rest = 0;  // bits of the rows that have a rest

    // `factor`: numbers are replaced where this times them is not finite.
    FiniteRows(Arena& arena, const View<T>& all, int64_t count, int64_t width, bool masked, T factor) : rows(all) {
        if (!masked || is_finite(all, count, width, factor)) return;
        T *finite = arena.take<T>(count * width), *others = arena.take<T>(count * width);
        for (int64_t i = 0; i < count; i++) {
            with_rest |= uint64_t(!is_finite(View<T>{all.row(i), 0}, 1, width, factor)) << i;
            for (int64_t j = 0; j < width; j += Vector<T>::lanes) {
                const V<T> x = load(all.row(i) + j), zero{};
                const M<T> kept = x * factor * T(0) == zero;
                store(finite + i * width + j, select<T>(kept, x, zero));
                store(others + i * width + j, select<T>(kept, zero, x));
            }
        }
        rows = {finite, width}, rest = {others, width};
    }

    // The rest of all rows, zeros where there is none.
    View<T> rest_or_zeros(Arena& arena, int64_t width) const {
        if (with_rest) return rest;
        T* zeros = arena.take<T>(width);
        std::fill_n(zeros, width, T(0));
        return {zeros, 0};
    }
};

template <class T>
class ShortHeadGradients {
    static constexpr int L = Vector<T>::lanes;

   public:
    ShortHeadGradients(Arena& arena, const Problem& problem, const Group& group)
        : arena_(arena),
          problem_(problem),
          group_(group),
          head_(problem.heads[group.heads[0]]),
          scores_(arena, problem, head_),
          rows_(scores_.rows),
          count_(scores_.count) {}

    // Add to the gradients of query, key and value, and of the head's own scale.
    void add_all(T* grad_scale) {
        clear_behind(group_.grad_key, problem_.dim);
        clear_behind(group_.grad_value, problem_.value_dim);
        const int64_t width = padded(problem_.dim, L), value_width = padded(problem_.value_dim, L);
        const View<T> query = scores_.read_queries(),
                      keys = view_rows(arena_.take<T>(count_ * width), head_.key, problem_.score_dtype, 0, count_,
                                       problem_.dim),
                      grad_out = view_rows(arena_.take<T>(rows_ * value_width), head_.grad_out, problem_.grad_dtype, 0,
                                           rows_, problem_.value_dim);
        const StoredRows<T> values = scores_.read_keys(head_.value, problem_.value_dtype, problem_.value_dim);
        T *p = arena_.take<T>(rows_ * kTileKeys), *ds = arena_.take<T>(rows_ * kTileKeys);
        T* squares = head_.grad_scale ? arena_.take<T>(rows_ * kTileKeys) : nullptr;
        scores_.fill(p, query, StoredRows<T>(keys), {}, squares);
        // O = (P * keep) V, so dO V^T is the gradient of P * keep
        scores_.multiply(Product<T>{}, ds, grad_out, values, problem_.value_dim, {});
        dispatch_width<T>(count_, [&](auto vectors) { softmax_gradients<vectors>(p, ds); });
        if (squares) *grad_scale += scale_gradient(ds, squares);
        // O = (P * keep) V, so dV = (P * keep)^T dO
        const FiniteRows<T> finite_out(arena_, grad_out, rows_, value_width, scores_.masked, T(1));
        add(group_.grad_value, count_, problem_.value_dim, [&](T* dv, bool adds) {
            multiply_rows(dv, p, finite_out.rows, value_width, adds);
            if (finite_out.with_rest)
                unmasked_product(dv, value_width, p, unmasked(finite_out.with_rest, 0), rows_, finite_out.rest,
                                 value_width, /*by_keys=*/true);
        });
        const T factor = difference_factor<T>(problem_);
        const FiniteRows<T> finite_query(arena_, query, rows_, width, scores_.masked, factor),
            finite_keys(arena_, keys, count_, width, scores_.masked, factor);
        problem_.form == Form::distance ? add_of_distances(ds, finite_query, finite_keys)
                                        : add_of_products(ds, finite_query, finite_keys);
    }

   private:
    // Clear the gradients of the keys after the last key that a row attends to.
    void clear_behind(char* data, int64_t width) const {
        if (problem_.clears_gradients)
            std::fill_n(as<T>(data) + count_ * width, (problem_.key_len - count_) * width, T(0));
    }

    // Turn scores and the gradient of P * keep into P after dropout and dS.
    template <int W>
    void softmax_gradients(T* p, T* ds) {
        Dropout dropout(problem_);
        if (dropout.on) dropout.set_tile(0);
        alignas(64) T line[kTileKeys];
        for (int64_t i = 0; i < rows_; i++, p += kTileKeys, ds += kTileKeys) {
            unmasked_[i] = scores_.template finish<W>(i, p);
            const uint64_t keep = dropout.on ? dropout.keep_bits(Dropout::stream(problem_, head_, i)) : kAll;
            const T* grad_matrix =
                problem_.matrix == MatrixOutput::none ? nullptr : grad_matrix_row(line, head_, i, 0, count_);
            row_gradients<W>(head_, i, dropout, unmasked_[i], keep, grad_matrix, p, ds);
        }
    }

    // s = -scale * squared distance
    T scale_gradient(const T* ds, const T* squares) const {
        V<T> sum{};
        for (int64_t i = 0; i < rows_ * kTileKeys; i += kTileKeys)
            for (int64_t j = i; j < i + count_; j += L) {
                const V<T> grad = load(ds + j);
                sum += select<T>(grad == T(0), V<T>{}, grad * load(squares + j));
            }
        return static_cast<T>(-problem_.scale * static_cast<double>(reduce_sum<T>(sum)));
    }

    // s = scale q . k, where the query holds the scale already
    void add_of_products(T* ds, const FiniteRows<T>& query, const FiniteRows<T>& keys) {
        const int64_t width = padded(problem_.dim, L);
        add(group_.grad_key, count_, problem_.dim, [&](T* dk, bool adds) {
            multiply_rows(dk, ds, query.rows, width, adds);
            if (query.with_rest)
                unmasked_product(dk, width, ds, unmasked(query.with_rest, 0), rows_, query.rest, width,
                                 /*by_keys=*/true);
        });
        multiply_by(ds, static_cast<T>(problem_.scale));
        add(head_.grad_query, rows_, problem_.dim, [&](T* dq, bool adds) {
            gemm(Product<T>{}, dq, width, ds, kTileKeys, 1, keys.rows.data, keys.rows.stride, rows_, width, count_,
                 adds);
            if (keys.with_rest)
                unmasked_product(dq, width, ds, unmasked(0, keys.with_rest), rows_, keys.rest, width,
                                 /*by_keys=*/false);
        });
    }

    // s = -scale |q - k|^2
    void add_of_distances(T* ds, const FiniteRows<T>& query, const FiniteRows<T>& keys) {
        const int64_t width = padded(problem_.dim, L);
        multiply_by(ds, T(-2) * scale_of<T>(problem_, head_));
        add(head_.grad_query, rows_, problem_.dim, [&](T* dq, bool query_adds) {
            add(group_.grad_key, count_, problem_.dim, [&](T* dk, bool adds) {
                gemm_difference(dq, width, ds, kTileKeys, 1, query.rows.data, query.rows.stride, keys.rows.data,
                                keys.rows.stride, rows_, width, count_, query_adds);
                if (rows_ <= kFewRows)
                    few_rows_outer<true>(dk, width, ds, rows_, query.rows, keys.rows, count_, width, adds);
                else
                    gemm_difference(dk, width, ds, 1, kTileKeys, keys.rows.data, keys.rows.stride, query.rows.data,
                                    query.rows.stride, count_, width, rows_, adds);
                if (query.with_rest || keys.with_rest)
                    unmasked_differences(dq, dk, width, ds, unmasked(query.with_rest, keys.with_rest), rows_,
                                         query.rest_or_zeros(arena_, width), keys.rest_or_zeros(arena_, width));
            });
        });
    }

    // C (+)= A^T B, for A of rows x keys.
    void multiply_rows(T* c, const T* a, const View<T>& b, int64_t width, bool adds) const {
        if (rows_ <= kFewRows) return few_rows_outer<false>(c, width, a, rows_, b, {}, count_, width, adds);
        gemm(Product<T>{}, c, width, a, 1, kTileKeys, b.data, b.stride, count_, width, rows_, adds);
    }

    void multiply_by(T* ds, T factor) const {
        for (int64_t i = 0; i < rows_ * kTileKeys; i += kTileKeys)
            for (int64_t j = i; j < i + count_; j += L) store(ds + j, load(ds + j) * factor);
    }

    // Call f(rows of whole vectors, whether to add to their numbers) with gradients: the caller's memory, or scratch
    // that is then added or copied to it.
    template <class F>
    void add(char* to, int64_t count, int64_t cols, const F& f) {
        const int64_t width = padded(cols, L);
        T* gradients = as<T>(to);
        if (width == cols) return f(gradients, !problem_.clears_gradients);
        T* sums = arena_.take<T>(count * width);
        f(sums, false);
        for (int64_t i = 0; i < count; i++, gradients += cols, sums += width)
            for (int64_t j = 0; j < cols; j += L) {
                const V<T> sum = load(sums + j);
                store_first(gradients + j, cols - j,
                            problem_.clears_gradients ? sum : load_first(gradients + j, cols - j) + sum);
            }
    }

    // By row, the bits of the unmasked pairs of the rows `of_rows` with all keys, and of other rows with `of_keys`.
    const uint64_t* unmasked(uint64_t of_rows, uint64_t of_keys) {
        for (int64_t i = 0; i < rows_; i++) some_unmasked_[i] = unmasked_[i] & ((of_rows >> i) & 1 ? kAll : of_keys);
        return some_unmasked_;
    }

    Arena& arena_;
    const Problem& problem_;
    const Group& group_;
    const Head& head_;
    const ShortScores<T> scores_;
    const int64_t rows_, count_;
    uint64_t unmasked_[kMostShortRows], some_unmasked_[kMostShortRows];
};
