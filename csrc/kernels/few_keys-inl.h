// Heads of a few query rows and a few keys: a step of a recurrent decoder, a short sentence. One tile has all of their
// keys, so nothing is kept from tile to tile: the state of a ForwardTask takes such a head longer than its products.
// Their forward is here, their backward in few_keys_gradients-inl.h.
#pragma once

#include "kernels/bf16_dot-inl.h"
#include "kernels/gemm-inl.h"
#include "kernels/masking-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/online_softmax-inl.h"
#include "kernels/pv-inl.h"
#include "kernels/scores-inl.h"
#include "kernels/simd-inl.h"
#include "kernels/store_rows-inl.h"
#include "kernels/tiles-inl.h"

// The most rows of a short head: more take longer this way.
constexpr int64_t kMostShortRows = 32;

// Whether the heads of a call have so few rows and keys, keys of their own, and inner or distance scores without biases
// of rows or keys and without caps. Only a ForwardTask stores a matrix of scores.
inline bool has_short_heads(const Problem& problem) {
    const Head& head = problem.heads[0];
    return problem.key_len <= kTileKeys && problem.query_len <= kMostShortRows && problem.groups[0].heads.size() == 1 &&
           (problem.form == Form::inner || problem.form == Form::distance) && problem.caps.empty() &&
           problem.matrix != MatrixOutput::scores && !head.query_bias.data && !head.key_bias.data;
}

// Whether the forward of such a call goes head by head: not if a ForwardTask multiplies in bfloat16.
inline bool has_few_keys(const Problem& problem) {
    return has_short_heads(problem) && !(kHasBf16Dot && Bf16Dot::supports(problem) && !has_few_rows(problem));
}

// The rows and keys of a short head, and the scores of their pairs, as both directions compute them.
template <class T>
struct ShortScores {
    static constexpr int L = Vector<T>::lanes;

    Arena& arena;
    const Problem& problem;
    const Head& head;
    const int64_t rows;
    const bool few_rows;
    bool masked;        // whether some row may not attend to all of the first `count` keys
    int64_t count = 0;  // of the keys up to the last one that the interval of some row holds

    ShortScores(Arena& arena, const Problem& problem, const Head& head)
        : arena(arena),
          problem(problem),
          head(head),
          rows(problem.query_len),
          few_rows(has_few_rows(problem)),
          masked(has_pair_mask(head) || head.holes > 0) {
        const int64_t first_end = key_interval(problem, head, 0).end;
        for (int64_t i = 0; i < rows; i++) {
            const Span interval = key_interval(problem, head, i);
            count = std::max(count, interval.end);
            masked = masked || interval.first != 0 || interval.end != first_end;
        }
    }

    // The query rows as T, as `read_query` gives them.
    View<T> read_queries() const {
        const int64_t width = padded(problem.dim, L);
        T* query = arena.take<T>(rows * width);
        for (int64_t i = 0; i < rows; i++) read_query(query + i * width, width, problem, head, i);
        return {query, width};
    }

    // Keys or values, as T unless few rows read them where they are.
    StoredRows<T> read_keys(const Matrix& m, Dtype dtype, int64_t cols) const {
        if (few_rows && has_stored_layout<T>(m, dtype, cols)) return stored_rows<T>(m, dtype, 0);
        return StoredRows<T>(view_rows(arena.take<T>(count * padded(cols, L)), m, dtype, 0, count, cols));
    }

    // Compute the scores of all pairs, before biases and masks. `squares`: where squared distances are kept, or null.
    void fill(T* s, const View<T>& query, const StoredRows<T>& keys, const Interleaved<T>& interleaved,
              T* squares = nullptr) const {
        if (problem.form != Form::distance) return multiply(Product<T>{}, s, query, keys, problem.dim, interleaved);
        multiply(SquaredDistance<T>{}, s, query, keys, problem.dim, interleaved);
        if (squares) std::copy_n(s, rows * kTileKeys, squares);
        const T factor = -scale_of<T>(problem, head);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < count; j += L) store(s + i * kTileKeys + j, load(s + i * kTileKeys + j) * factor);
    }

    // Compute the sums of terms of all rows with all keys or values of `cols` numbers. As everywhere, few rows go key
    // by key, and `interleaved` does its work between the keys.
    template <class Terms>
    void multiply(const Terms& terms, T* s, const View<T>& queries, const StoredRows<T>& keys, int64_t cols,
                  const Interleaved<T>& interleaved) const {
        const int64_t width = padded(cols, L);
        if (few_rows)
            return few_rows_gemm(terms, s, queries.data, queries.stride, rows, keys, count, width, interleaved);
        T* transposed = arena.take<T>(width * kTileKeys);
        transpose_tile(transposed, View<T>{as<T>(keys.data), keys.stride}, width, count);
        gemm(terms, s, kTileKeys, queries.data, queries.stride, 1, transposed, kTileKeys, rows, padded(count, L), cols,
             /*add=*/false);
    }

    // Add the bias of a row to its scores, which take W vectors, and mask them. Returns the bits of the unmasked keys.
    template <int W>
    uint64_t finish(int64_t i, T* s) const {
        uint64_t bits = masked ? unmasked_bits(problem, head, i, 0, count) : lowest_bits(count);
        alignas(64) T line[kTileKeys];
        if (head.bias.data) add_bias(s, bits, problem, head, i, Span{0, count}, line);
        if (masked || count < W * L)
#pragma GCC unroll 16
            for (int j = 0; j < W; j++)
                store(s + j * L, select_bits<T>(bits, j, load(s + j * L), splat(-std::numeric_limits<T>::infinity())));
        return bits;
    }
};

template <class T>
class ShortHead {
    static constexpr int L = Vector<T>::lanes;
    using Softmax = OnlineSoftmax<T>;

   public:
    ShortHead(Arena& arena, const Problem& problem, const Head& head)
        : arena_(arena), problem_(problem), head_(head), scores_(arena, problem, head), rows_(scores_.rows) {}

    void attend() {
        const int64_t width = row_width<T>(problem_), count = scores_.count;
        ValueTile<T> values(arena_, problem_, scores_.masked, /*reused=*/false, scores_.few_rows);
        values.fill(head_, 0, count, scores_.masked);
        T *s = arena_.take<T>(rows_ * kTileKeys), *out = arena_.take<T>(rows_ * width);
        scores_.fill(s, scores_.read_queries(), scores_.read_keys(head_.key, problem_.score_dtype, problem_.dim),
                     values.prefetched());
        RowStates<T> states[kMostShortRows / L];
        uint64_t bits[kMostShortRows];
        dispatch_width<T>(count, [&](auto vectors) {
            for (int64_t i = 0; i < rows_; i += L) {
                T* line = s + i * kTileKeys;
                problem_.full_statistics ? softmax<vectors, true>(i, line, bits + i, states[i / L])
                                         : softmax<vectors, false>(i, line, bits + i, states[i / L]);
            }
        });
        std::fill_n(out, rows_ * width, T(0));
        values.add_pv(out, s, rows_);
        if (values.nonfinite) values.propagate_nonfinite(out, s, bits, rows_);
        values.reduce_lanes(out, rows_);
        for (int64_t first = 0; first < rows_; first += L)
            store_rows(problem_, std::min<int64_t>(L, rows_ - first), states[first / L], out + first * width, width,
                       [&](int64_t i) { return std::pair(&head_, first + i); });
    }

   private:
    // Make weights of the scores of up to as many rows as a vector has lanes, from `first` on, and set the bits of
    // their unmasked keys, and their states.
    template <int W, bool statistics>
    void softmax(int64_t first, T* s, uint64_t* bits, RowStates<T>& states) const {
        constexpr T unset = Softmax::kUnset;
        const int size = static_cast<int>(std::min<int64_t>(L, rows_ - first));
        for (int i = 0; i < size; i++) {
            bits[i] = scores_.template finish<W>(first + i, s + i * kTileKeys);
            // `finish_matrix_row` makes weights of these scores.
            if (problem_.matrix == MatrixOutput::weights)
                std::copy_n(s + i * kTileKeys, scores_.count, as<T>(head_.matrix) + (first + i) * problem_.key_len);
        }
        const V<T> maximum = reduce_rows(size, fast_max<T>, [&](int i) {
            V<T> most = splat(unset);
#pragma GCC unroll 16
            for (int j = 0; j < W; j++) most = fast_max<T>(load(s + i * kTileKeys + j * L), most);
            return most;
        });
        T maxima[L];
        store(maxima, maximum);
        if constexpr (statistics) set_moments<W>(size, s, bits, maximum, states);
        if (problem_.first_key)
            for (int i = 0; i < size; i++) {
                const T* line = s + i * kTileKeys;
                states.first_key[i] = maxima[i] == unset ? T(-1) : static_cast<T>(Softmax::index_of(maxima[i], line));
            }
        if (problem_.min_score)
            states.min_score = reduce_rows(
                size, fast_min<T>, [&](int i) { return Softmax::template lane_min<W>(s + i * kTileKeys, bits[i]); });
        V<T> sums[L], logits[L], squares[L];
        for (int i = 0; i < size; i++) {
            T* line = s + i * kTileKeys;
            sums[i] = logits[i] = squares[i] = V<T>{};
#pragma GCC unroll 16
            for (int j = 0; j < W; j++) {
                const V<T> logit = load(line + j * L) - maxima[i], e = exp2_of<T>(logit * kLog2E<T>);
                sums[i] += e;
                if constexpr (statistics) {
                    // As in OnlineSoftmax, 0 * -inf stays 0.
                    logits[i] += e * fast_max<T>(logit, splat<T>(Exp<T>::lowest));
                    squares[i] += e * e;
                }
                store(line + j * L, e);
            }
        }
        if (problem_.dropout > 0) drop<W>(first, size, s);
        const auto sum_of = [&](const V<T>* lanes) {
            return reduce_rows(size, [](V<T> a, V<T> b) { return a + b; }, [&](int i) { return lanes[i]; });
        };
        states.denom = sum_of(sums), states.out_scale = splat(T(1));
        states.max = Softmax::maximum_of(maximum, states.denom);
        if constexpr (statistics) states.sum_exp_logit = sum_of(logits), states.squares = sum_of(squares);
    }

    // Drop weights, and multiply the others by the factor of dropout.
    template <int W>
    void drop(int64_t first, int size, T* weights) const {
        Dropout dropout(problem_);
        dropout.set_tile(0);
        const T factor = static_cast<T>(dropout.factor);
        for (int i = 0; i < size; i++, weights += kTileKeys) {
            const uint64_t keep = dropout.keep_bits(Dropout::stream(problem_, head_, first + i));
#pragma GCC unroll 16
            for (int j = 0; j < W; j++)
                store(weights + j * L, select_bits<T>(keep, j, load(weights + j * L) * factor, V<T>{}));
        }
    }

    // Set the moments of scores that are not yet weights.
    template <int W>
    static void set_moments(int size, const T* s, const uint64_t* bits, V<T> maximum, RowStates<T>& states) {
        T maxima[L], counts[L] = {}, bases[L];
        store(maxima, maximum);
        for (int i = 0; i < size; i++) counts[i] = static_cast<T>(__builtin_popcountll(bits[i]));
        const auto sum = [](V<T> a, V<T> b) { return a + b; };
        // The sum of the differences of the scores of each row from a number of the row.
        const auto sum_from = [&](const T* origins) {
            return reduce_rows(size, sum, [&](int i) {
                return Softmax::template sum_of_differences<W>(s + i * kTileKeys, bits[i], origins[i]);
            });
        };
        states.count = load(counts);
        const V<T> least_one = fast_max<T>(states.count, splat(T(1)));
        states.base = Softmax::base_near(maximum + sum_from(maxima) / least_one);
        store(bases, states.base);
        const V<T> squares = reduce_rows(size, sum, [&](int i) {
            V<T> lanes{};
            for (int j = 0; j < W; j++) {
                const V<T> x = select_bits<T>(bits[i], j, load(s + i * kTileKeys + j * L) - bases[i], V<T>{});
                lanes += x * x;
            }
            return lanes;
        });
        Softmax::set_moments(states, sum_from(bases), squares);
    }

    // The vector whose lane i is the lanes of f(i), combined by op.
    template <class Op, class F>
    static V<T> reduce_rows(int size, const Op& op, const F& f) {
        if (size <= kFewRows) {
            alignas(64) T reduced[L] = {};
            for (int i = 0; i < size; i++) reduced[i] = reduce<T>(f(i), op);
            return load(reduced);
        }
        // Lanes after the last row repeat it.
        V<T> v[L];
        for (int i = 0; i < L; i++) v[i] = f(std::min(i, size - 1));
        return reduce_each<T>(v, op);
    }

    Arena& arena_;
    const Problem& problem_;
    const Head& head_;
    const ShortScores<T> scores_;
    const int64_t rows_;
};
