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
    if (!is_empty(a) && reinterpret_cast<uintptr_t>(a.data) % static_cast<uintptr_t>(a.item) != 0) {
        throw_invalid(a, "elements at multiples of their size (" + std::to_string(a.item) + " bytes)",
                      "a misaligned array");
    }
}

}  // namespace

std::string shape_text(const Array& a) { return shape_text(a.shape, static_cast<size_t>(a.ndim)); }

void throw_invalid(const Array& a, const std::string& expected, const std::string& got) {
    throw std::invalid_argument(std::string(a.name) + ": expected " + expected + ", got " + got);
}

bool is_empty(const Array& a) {
    for (int i = 0; i < a.ndim; ++i) {
        if (a.shape[i] == 0) return true;
    }
    return false;
}

void check_present(const Array& a) {
    if (!a.present) throw_invalid(a, "an array", "None");
}

void check_shape(const Array& a, const Shape& expected, size_t loose) {
    check_present(a);
    bool fits = static_cast<size_t>(a.ndim) == expected.size();
    for (size_t i = 0; fits && i < expected.size(); ++i) {
        fits = a.shape[i] == expected[i] || (i < loose && a.shape[i] == 1);
    }
    if (!fits) {
        const std::string which =
            loose == expected.size() ? "any axis" : "the first " + std::to_string(loose) + " axes";
        const std::string hint = loose ? " (1 in " + which + " is broadcast)" : "";
        throw_invalid(a, "shape " + shape_text(expected.data(), expected.size()) + hint, shape_text(a));
    }
    check_aligned(a);
}

void check_broadcast(const Array& a, const Shape& expected) { check_shape(a, expected, expected.size()); }

void check_contiguous(const Array& a, int from) {
    if (is_empty(a)) return;
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

Shape concat(Shape front, std::initializer_list<int64_t> back) {
    front.insert(front.end(), back);
    return front;
}

StridedCursor::StridedCursor(const Array& a, size_t outer) : base(a.data), steps(outer) {
    if (!a.present) return;
    for (size_t i = 0; i < outer; ++i) steps[i] = a.shape[i] == 1 ? 0 : a.strides[i] * a.item;
}

char* StridedCursor::at(const Shape& index) const {
    if (base == nullptr) return nullptr;
    int64_t offset = 0;
    for (size_t i = 0; i < steps.size(); ++i) offset += index[i] * steps[i];
    return base + offset;
}

MatrixCursor::MatrixCursor(const Array& a, size_t outer) : StridedCursor(a, outer) {
    if (!a.present) return;
    const int64_t rows = a.shape[outer], cols = a.shape[outer + 1];
    // The stride of an axis of length 1 says nothing; 1 lets a single column take the contiguous path.
    col_stride = cols > 1 ? a.strides[outer + 1] : 1;
    row_stride = rows > 1 ? a.strides[outer] : cols;
}

MatrixCursor MatrixCursor::broadcast(const Array& a, size_t outer) {
    MatrixCursor cursor(a, outer);
    if (a.present && a.shape[outer] == 1) cursor.row_stride = 0;
    if (a.present && a.shape[outer + 1] == 1) cursor.col_stride = 0;
    return cursor;
}

}  // namespace attnscore
