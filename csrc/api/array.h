// One array as a caller hands it over, and the checks that all arrays share. A failed check throws
// std::invalid_argument with the argument's name, the expected and the actual value.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "runtime/attention.h"

namespace attnscore {

using Shape = std::vector<int64_t>;

// An array or None. Strides are in elements.
struct Array {
    const char* name = "";
    char* data = nullptr;
    int64_t item = 0;  // bytes of an element
    int ndim = 0;
    const int64_t* shape = nullptr;
    const int64_t* strides = nullptr;
    bool present = false;
};

[[noreturn]] void throw_invalid(const Array& a, const std::string& expected, const std::string& got);
std::string shape_text(const Array& a);
bool is_empty(const Array& a);

void check_present(const Array& a);
// Check a shape, of which the first `loose` axes may be 1 instead: they are broadcast.
void check_shape(const Array& a, const Shape& expected, size_t loose = 0);
// Check a shape of which all axes may be 1 instead.
void check_broadcast(const Array& a, const Shape& expected);
// Check that the axes from `from` on are in C order.
void check_contiguous(const Array& a, int from = 0);
// Check for exactly this shape, in C order.
void check_exact(const Array& a, const Shape& expected);

Shape concat(Shape front, std::initializer_list<int64_t> back);

// Finds the part of a head in an array whose first axes are the grid of heads. Steps are in bytes, 0 where the array is
// broadcast.
struct StridedCursor {
    char* base = nullptr;
    Shape steps;

    StridedCursor() = default;
    StridedCursor(const Array& a, size_t outer);

    char* at(const Shape& index) const;
};

// Finds the matrix of a head in an array whose last two axes are a matrix.
struct MatrixCursor : StridedCursor {
    int64_t row_stride = 0, col_stride = 0;

    MatrixCursor() = default;
    MatrixCursor(const Array& a, size_t outer);
    // A cursor over matrices whose rows and columns may be broadcast too.
    static MatrixCursor broadcast(const Array& a, size_t outer);

    Matrix at(const Shape& index) const { return {StridedCursor::at(index), row_stride, col_stride}; }
};

}  // namespace attnscore
