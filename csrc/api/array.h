// One array as a caller hands it over, and the checks that all arrays share. A failed check throws
// std::invalid_argument with the argument's name, the expected and the actual value.
#pragma once

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "runtime/attention.h"

namespace attnscore {

using Shape = std::vector<int64_t>;

// The number of steps to an index, with so many steps along each axis.
inline int64_t dot(const Shape& index, const Shape& steps) {
    return std::inner_product(steps.begin(), steps.end(), index.begin(), int64_t{0});
}

// An array or None. Strides are in elements.
struct Array {
    const char* name = "";  // of the argument, for messages
    char* data = nullptr;   // may be null where the array is empty
    int64_t item = 0;       // bytes of an element
    int ndim = 0;
    const int64_t* shape = nullptr;
    const int64_t* strides = nullptr;
    bool present = false;
};

[[noreturn]] void throw_invalid(const Array& a, const std::string& expected, const std::string& got);
std::string shape_text(const Array& a);
int64_t element_count(const Array& a);

void check_present(const Array& a);
// Check a shape, whose first `broadcastable` axes may have the length 1 instead, and the alignment.
void check_shape(const Array& a, const Shape& expected, size_t broadcastable = 0);
// Check a shape whose axes may all have the length 1 instead.
void check_broadcast(const Array& a, const Shape& expected);
// Check that the axes from `from` on are in C order.
void check_contiguous(const Array& a, int from = 0);
// Check for exactly this shape, in C order.
void check_exact(const Array& a, const Shape& expected);

// Finds the part of a head in an array: in front it has axes of the grid of heads, behind these rows and columns.
struct HeadCursor {
    char* base;
    Shape steps;  // by axis of the grid, in bytes; 0 where the array is broadcast or has no such axis
    int64_t row_stride, col_stride;  // in elements; 0 along an axis of length 1 or 0, and where there is none

    // The first `axes` axes of the array are the grid's axes from `grid_axis` on.
    HeadCursor(const Array& a, size_t axes_of_grid, size_t grid_axis, size_t axes);

    char* at(const Shape& index) const;
    Matrix matrix_at(const Shape& index) const { return {at(index), row_stride, col_stride}; }
};

// Call f(index) for each index of a grid, in C order; of a grid without axes, once.
template <class F>
void for_each_index(const Shape& grid, const F& f) {
    for (const int64_t length : grid) {
        if (length == 0) return;
    }
    Shape index(grid.size(), 0);
    for (;;) {
        f(index);
        size_t axis = grid.size();
        while (axis > 0 && ++index[axis - 1] == grid[axis - 1]) index[--axis] = 0;
        if (axis == 0) return;
    }
}

}  // namespace attnscore
