// Scores of micro-panels of query rows against a key tile: every form, with biases, caps and masks.
#pragma once

#include "kernels/activations-inl.h"
#include "kernels/additive-inl.h"
#include "kernels/additive_pairs-inl.h"
#include "kernels/additive_scores-inl.h"
#include "kernels/bf16_dot-inl.h"
#include "kernels/gemm-inl.h"
#include "kernels/masking-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/simd-inl.h"
#include "kernels/tiles-inl.h"

// Above this cap, score / cap may be subnormal.
constexpr double kLargeCap = 1e20;

// The factor of a head's products or squared distances.
template <class T>
inline T scale_of(const Problem& problem, const Head& head) {
    const T head_scale = head.scale ? *as<T>(head.scale) : T(1);
    return static_cast<T>(problem.scale) * head_scale;
}

// Add a row of the bias over some keys, and mask the pairs where it is -inf. `line`: memory for a tile of numbers.
template <class T>
void add_bias(T* s, uint64_t& bits, const Problem& problem, const Head& head, int64_t row, Span keys, T* line) {
    constexpr int L = Vector<T>::lanes;
    const Matrix& m = head.bias;
    const int64_t count = keys.end - keys.first;
    const int vectors = width_of<T>(count);
    if (m.col_stride == 0)
        std::fill_n(line, vectors * L, element<T>(m, problem.bias_dtype, row, 0));
    else
        read_row(line, vectors * L, m, problem.bias_dtype, row, keys.first, count);
    for (int j = 0; j < vectors; j++) {
        const V<T> x = load(line + j * L);
        bits &= ~(minus_infinity_bits<T>(x) << (j * L));
        store(s + j * L, load(s + j * L) + x);
    }
}

template <class T>
class Scores {
   public:
    // `backward`: additive scores that the forward has saved are read, not computed.
    Scores(Arena& arena, const Problem& problem, bool backward)
        : problem_(problem),
          backward_(backward),
          form_(problem),
          additive_(arena, form_),
          line_(arena.take<T>(kTileKeys)),
          cap_slopes_(arena.take<T>(kStepPanels * kMR * kTileKeys)),
          squares_(arena.take<T>(problem.form == Form::distance ? kStepPanels * kMR * kTileKeys : 0)) {}

    // Members refer to one another.
    Scores(const Scores&) = delete;
    Scores& operator=(const Scores&) = delete;

    const Additive<T>& additive() const { return form_; }

    // Compute the scores s[i * kTileKeys + j] of the rows of micro-panels, -inf where masked, in as many vectors as
    // `width_of` the tile, and the bits of the unmasked keys of each row.
    // `interleaved`: not null where the rows are too few to transpose the keys; the work to do between these.
    // `bf16`: not null where products are taken in bfloat16.
    // `saves`: keep the slopes of the caps for gradients, and squared distances where the head has its own scale.
    void operator()(T* s, uint64_t* bits, const QueryTile<T>& queries,
                    const typename Additive<T>::Query& additive_query, Span panels, const KeyTile<T>& tile,
                    const Interleaved<T>* interleaved, const Bf16Dot* bf16, bool saves) const;

    const T* cap_slopes() const { return cap_slopes_; }
    const T* squares() const { return squares_; }

   private:
    template <class Terms>
    void products(const Terms& terms, T* s, const T* query, int64_t width, int64_t size, const KeyTile<T>& tile,
                  const Interleaved<T>* interleaved) const;
    void additive_scores(T* s, uint64_t* bits, const QueryTile<T>& queries,
                         const typename Additive<T>::Query& additive_query, int64_t first, int64_t size,
                         const KeyTile<T>& tile) const;
    void apply_biases_and_caps(T* s, const Head& head, int64_t row, const KeyTile<T>& tile, T* cap_slopes) const;

    const Problem& problem_;
    const bool backward_;
    Additive<T> form_;
    AdditiveScores<T> additive_;
    T* line_;
    T *cap_slopes_, *squares_;
};

// Compiled once for a target, by scores.cc.
#define ATTNSCORE_SCORES(extern, T)                                                                                 \
    extern template void Scores<T>::operator()(T*, uint64_t*, const QueryTile<T>&, const Additive<T>::Query&, Span, \
                                               const KeyTile<T>&, const Interleaved<T>*, const Bf16Dot*, bool) const;
ATTNSCORE_SCORES(extern, float)
ATTNSCORE_SCORES(extern, double)
