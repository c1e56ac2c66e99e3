#include "api/decoding_plan.h"

#include <algorithm>

namespace attnscore {
namespace {

// Set the address of each array that is present to the next one of `arrays`.
template <class Arrays, size_t N>
void set_addresses(const Field<Arrays> (&fields)[N], Arrays& to, std::vector<Extent>::const_iterator& arrays) {
    for (const auto& field : fields)
        if ((to.*field.array).present) (to.*field.array).data = arrays++->data;
}

void set_layout(Array& array, const ArrayLayout& layout) {
    array.shape = layout.shape.data();
    array.strides = layout.strides.data();
}

ArrayLayout layout_of(const Array& array) {
    ArrayLayout layout;
    layout.axes = static_cast<size_t>(array.ndim);
    if (layout.axes > layout.shape.size()) throw_invalid(array, "fewer axes", shape_text(array));
    std::copy_n(array.shape, array.ndim, layout.shape.begin());
    std::copy_n(array.strides, array.ndim, layout.strides.begin());
    return layout;
}

}  // namespace

DecodingPlan::DecodingPlan(const Problem& score, const Inputs& in, const ForwardArrays& arrays, bool has_heads,
                           bool length_before_heads)
    : score_(score),
      inputs_(in),
      filled_(arrays),
      has_heads_(has_heads),
      length_before_heads_(length_before_heads),
      // Checks the examples.
      intervals_(CallPlan(score, in, arrays).intervals()) {
    copy_layouts(kInputs, inputs_);
    copy_layouts(kForwardArrays, filled_);
}

// Replace the examples' shapes and strides, which are the caller's, by copies.
template <class Arrays, size_t N>
void DecodingPlan::copy_layouts(const Field<Arrays> (&fields)[N], Arrays& arrays) {
    for (const auto& field : fields) {
        Array& a = arrays.*field.array;
        if (a.present) set_layout(a, layouts_.emplace_back(layout_of(a)));
    }
}

// The layout on the canonical axes, (*lead, head, group, rows, columns), of the caller's key, value or mask: the
// example's, with the caller's number of keys and strides. An axis that the caller's array lacks has the length 1.
ArrayLayout DecodingPlan::canonical_layout(const Array& example, const ArrayLayout& caller, bool is_mask) const {
    // Axes are counted from the last one. The caller has rows and heads at 1 and 2, or at 2 and 1.
    constexpr size_t kRows = 1, kGroup = 2, kHead = 3;
    const size_t rows_of_caller = is_mask ? 1 : rows(), heads_of_caller = 3 - rows_of_caller;
    ArrayLayout layout = layout_of(example);
    layout.shape[layout.from_end(is_mask ? 0 : kRows)] = caller.shape[caller.from_end(is_mask ? 0 : rows_of_caller)];
    for (size_t axis = 0; axis < layout.axes; ++axis) {
        // The caller's axis of heads is (head, group) in a mask, which has query heads, and head in key and value.
        if ((axis == kHead && !has_heads_) || (axis == kGroup && !(has_heads_ && is_mask))) continue;
        const size_t from = axis == 0       ? 0
                            : axis == kRows ? rows_of_caller
                            : axis <= kHead ? heads_of_caller
                                            : axis - (has_heads_ ? 1 : 2);  // the caller lacks group, or head too
        if (from >= caller.axes) continue;
        const int64_t heads_in_group = axis == kHead && is_mask ? layout.shape[layout.from_end(kGroup)] : 1;
        layout.strides[layout.from_end(axis)] = caller.strides[caller.from_end(from)] * heads_in_group;
    }
    return layout;
}

std::unique_ptr<CallPlan> DecodingPlan::make_plan(const std::vector<Extent>& arrays,
                                                  const std::vector<ArrayLayout>& by_key) const {
    check_count(layouts_.size(), arrays.size());
    Inputs in = inputs_;
    ForwardArrays filled = filled_;
    auto next = arrays.begin();
    set_addresses(kInputs, in, next);
    set_addresses(kForwardArrays, filled, next);
    Array* const with_keys[] = {&in.key, &in.value, &in.mask};
    ArrayLayout layouts[3];  // a CallPlan keeps none of them
    for (size_t i = 0; i < by_key.size(); ++i) {
        set_layout(*with_keys[i], layouts[i] = canonical_layout(*with_keys[i], by_key[i], /*is_mask=*/i == 2));
    }
    return std::make_unique<CallPlan>(score_, in, filled);
}

void DecodingPlan::run(const Kernels& kernels, const std::vector<Extent>& arrays,
                       const std::vector<ArrayLayout>& by_key, uint64_t seed, Threads threads) const {
    current_.use([&](Current& current) {
        if (by_key != current.by_key) current = {make_plan(arrays, by_key), by_key};
        current.plan->run(kernels, arrays, seed, threads);
    });
}

}  // namespace attnscore
