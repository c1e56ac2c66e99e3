// A forward of query, key and value (and an additive score's weights), without statistics: checked once, and then run
// on other memory of the same shapes and strides, with the same intervals of keys. A tiny call spends more at the
// border than in its products.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "array.h"
#include "attention.h"

namespace attnscore {

class Plain {
   public:
    // Of query, key, value, out and weights, in this order everywhere; weights may be absent.
    static constexpr size_t kArrays = 5;
    using Addresses = std::array<char*, kArrays>;

    // `score` knows form, numbers and dtypes. The arrays are examples: none is read, and none is remembered. Intervals,
    // where they are given, are copied.
    Plain(Problem score, const std::array<Array, kArrays>& examples, Array start, Array stop);
    // Heads point into the intervals.
    Plain(const Plain&) = delete;
    Plain& operator=(const Plain&) = delete;

    void run(const Kernels& kernels, const Addresses& memory, int threads) const;

   private:
    std::vector<std::array<int64_t, kArrays>> places_;  // of each head, in bytes from the addresses
    std::array<int64_t, kArrays> items_;                // bytes of an element; 0 of an array that is empty or absent
    std::vector<int64_t> start_, stop_;
    Problem problem_;
};

}  // namespace attnscore
