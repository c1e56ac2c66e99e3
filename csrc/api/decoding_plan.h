// A forward whose number of keys may change from run to run, as it does when a KV cache grows at each step of decoding.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "api/call_plan.h"

namespace attnscore {

// Shape and strides of an array, in elements. No vectors, whose allocations take a noticeable part of a tiny call.
struct ArrayLayout {
    static constexpr size_t kMaxAxes = 10;

    size_t axes = 0;
    std::array<int64_t, kMaxAxes> shape{}, strides{};

    bool operator==(const ArrayLayout&) const = default;
    // The index of an axis that is counted from the last one, which is 0.
    size_t from_end(size_t axis) const { return axes - 1 - axis; }
};

class DecodingPlan {
   public:
    // As for CallPlan, whose example arrays are on the canonical axes. The caller's axes are (batch, head, length,
    // dim), without the first or the first two unless `has_heads`; with `length_before_heads` (batch, length, head,
    // dim).
    DecodingPlan(const Problem& score, const Inputs& in, const ForwardArrays& arrays, bool has_heads,
                 bool length_before_heads);

    // As CallPlan::run. `by_key`: the layouts of the caller's key, value and, where there is one, mask: only their
    // number of keys and strides may differ from the examples'.
    void run(const Kernels& kernels, const std::vector<Extent>& arrays, const std::vector<ArrayLayout>& by_key,
             uint64_t seed, Threads threads) const;

    // Whether number `index` of `by_key` can be read: key and value have an axis of keys, a mask has two axes.
    bool has_keys(const ArrayLayout& x, size_t index) const { return x.axes > (index < 2 ? rows() : 1); }
    int64_t key_len(const ArrayLayout& key) const { return key.shape[key.from_end(rows())]; }
    bool has_mask() const { return inputs_.mask.present; }
    const CallPlan::Intervals& intervals() const { return intervals_; }

   private:
    // The caller's axis of rows, counted from the last one.
    size_t rows() const { return length_before_heads_ ? 2 : 1; }
    template <class Arrays, size_t N>
    void copy_layouts(const Field<Arrays> (&fields)[N], Arrays& arrays);
    std::unique_ptr<CallPlan> make_plan(const std::vector<Extent>& arrays,
                                        const std::vector<ArrayLayout>& by_key) const;
    ArrayLayout canonical_layout(const Array& example, const ArrayLayout& caller, bool is_mask) const;

    Problem score_;
    Inputs inputs_;                    // examples, without memory
    ForwardArrays filled_;             // the same
    std::deque<ArrayLayout> layouts_;  // of these arrays, which point into it
    bool has_heads_, length_before_heads_;
    CallPlan::Intervals intervals_;
    // The plan for some layouts of key, value and mask. Kept: all layers of a model have the lengths of the first one.
    struct Current {
        std::unique_ptr<CallPlan> plan;
        std::vector<ArrayLayout> by_key;
    };
    mutable KeptState<Current> current_;
};

}  // namespace attnscore
