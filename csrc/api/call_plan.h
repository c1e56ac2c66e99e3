// Attention of query, key and value (and an additive score's weights), without statistics: checked once, and then run
// on other memory of the same shapes and strides, with the same intervals of keys. A tiny call spends more at the
// border than in its products.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "api/array.h"
#include "runtime/attention.h"

namespace attnscore {

struct RowArrays;

class CallPlan {
   public:
    // Of query, key, value, out and weights, in this order everywhere; weights may be absent.
    static constexpr size_t kArrays = 5;
    using Addresses = std::array<char*, kArrays>;

    // What a forward leaves for its gradient, in the sum type and in C order: the top and, behind them, the log_denom
    // of all rows; additive: the scores (attention.h). And the matrix of weights, which the caller gets. Null where not
    // wanted.
    struct Saved {
        char *rows, *scores, *attention_weights;
    };
    // What comes in, which lies as `out` and the matrix of weights do (null where nothing comes into that), and what is
    // added to, in the sum type and in C order: of all rows, and of keys, values and weights of all groups (axes of
    // heads are 1 along which key, value and weights are all broadcast). Weights' is null where there are none.
    struct Gradients {
        char *grad_out, *grad_attention_weights, *query, *key, *value, *weights;
    };

    // `score` knows form, numbers and dtypes. The arrays are examples: none is read, and none is remembered. Intervals,
    // where they are given, are copied.
    CallPlan(Problem score, const std::array<Array, kArrays>& examples, Array start, Array stop);
    // Heads point into the intervals.
    CallPlan(const CallPlan&) = delete;
    CallPlan& operator=(const CallPlan&) = delete;

    void run(const Kernels& kernels, const Addresses& memory, const Saved& saved, int threads) const;
    void backward(const Kernels& kernels, const Addresses& memory, const Saved& saved, const Gradients& gradients,
                  int threads) const;

   private:
    Problem bind(const Addresses& memory, char* saved_scores) const;
    std::vector<RowArrays> bind_rows(const Problem& p, char* rows) const;

    std::vector<std::array<int64_t, kArrays>> offsets_;  // of each head, in bytes from the addresses
    std::array<int64_t, kArrays> items_;                 // bytes of an element; 0 of an array that is empty or absent
    std::vector<int64_t> start_, stop_;
    Problem problem_;
};

}  // namespace attnscore
