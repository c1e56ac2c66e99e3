#include "api/array.h"

#include <stdexcept>

namespace attnscore {
namespace {

std::string shape_text(const int64_t* shape, size_t ndim) {
    std::string result = "(";
    for (size_t i = 0; i < ndim; ++i) result += (i ? ", " : "") + std::to_string(shape[i]);
    return result + (ndim == 1 ? ",)" : ")");
}

void check_aligned(const Array& a) {
    if (element_count(a) != 0 && reinterpret_cast<uintptr_t>(a.data) % static_cast<uintptr_t>(a.item) != 0) {
        throw_invalid(a, "elements at multiples of their size (" + std::to_string(a.item) + " bytes)",
                      "a misaligned array");
    }
}

}  // namespace

std::string shape_text(const Array& a) { return shape_text(a.shape, static_cast<size_t>(a.ndim)); }

void throw_invalid(const Array& a, const std::string& expected, const std::string& got) {
    throw std::invalid_argument(std::string(a.name) + ": expected " + expected + ", got " + got);
}

int64_t element_count(const Array& a) {
    int64_t count = 1;
    for (int i = 0; i < a.ndim; ++i) count *= a.shape[i];
    return count;
}

void check_present(const Array& a) {
    if (!a.present) throw_invalid(a, "an array", "None");
}

void check_shape(const Array& a, const Shape& expected, size_t broadcastable) {
    check_present(a);
    bool fits = static_cast<size_t>(a.ndim) == expected.size();
    for (size_t i = 0; fits && i < expected.size(); ++i) {
        fits = a.shape[i] == expected[i] || (i < broadcastable && a.shape[i] == 1);
    }
    if (!fits) {
        const std::string which =
            broadcastable == expected.size() ? "any axis" : "the first " + std::to_string(broadcastable) + " axes";
        const std::string hint = broadcastable ? " (1 in " + which + " is broadcast)" : "";
        throw_invalid(a, "shape " + shape_text(expected.data(), expected.size()) + hint, shape_text(a));
    }
    check_aligned(a);
}

void check_broadcast(const Array& a, const Shape& expected) { check_shape(a, expected, expected.size()); }

void check_contiguous(const Array& a, int from) {
    if (element_count(a) == 0) return;
    int64_t stride = 1;
    for (int i = a.ndim - 1; i >= from; --i) {
        if (a.shape[i] != 1 && a.strides[i] != stride) {
            throw_invalid(a, "a C-contiguous array",
                          "strides (in elements) " + shape_text(a.strides, static_cast<size_t>(a.ndim)));
        }
        stride *= a.shape[i];
    }
}

void check_exact(const Array& a, const Shape& expected) {
    check_shape(a, expected);
    check_contiguous(a);
}

HeadCursor::HeadCursor(const Array& a, size_t axes_of_grid, size_t grid_axis, size_t axes)
    : base(a.data), steps(axes_of_grid) {
    const auto stride = [&a](size_t axis) {
        return axis < static_cast<size_t>(a.ndim) && a.shape[axis] > 1 ? a.strides[axis] : 0;
    };
    for (size_t i = 0; i < axes; ++i) steps[grid_axis + i] = stride(i) * a.item;
    row_stride = stride(axes);
    col_stride = stride(axes + 1);
}

char* HeadCursor::at(const Shape& index) const { return base == nullptr ? nullptr : base + dot(index, steps); }

}  // namespace attnscore
