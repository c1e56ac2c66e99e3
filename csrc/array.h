// One array as a caller hands it over, and the checks that all arrays share. Whatever is wrong ends in
// std::invalid_argument that names the argument, what was expected and what came.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "attention.h"

namespace attnscore {

using Shape = std::vector<int64_t>;

// Strides in elements. Without data it stands for "not given"; an empty array has a shape all the same.
struct Array {
    const char* name = "";
    char* data = nullptr;
    int64_t item = 0;  // bytes of an element
    int ndim = 0;
    const int64_t* shape = nullptr;
    const int64_t* strides = nullptr;
    bool given = false;
};

[[noreturn]] void refuse(const Array& a, const std::string& expected, const std::string& got);
std::string shape_of(const Array& a);
bool is_empty(const Array& a);

void check_given(const Array& a);
// The first `loose` axes may be 1 instead: they are broadcast.
void check_shape(const Array& a, const Shape& expected, size_t loose = 0);
// All axes may be 1 instead.
void check_broadcast(const Array& a, const Shape& expected);
void check_contiguous(const Array& a, int from = 0);
// Exactly this shape, in C order.
void check_full(const Array& a, const Shape& expected);

Shape joined(Shape front, std::initializer_list<int64_t> back);

// An array whose first axes say which head; steps along them in bytes, 0 where it is broadcast.
struct Walk {
    char* base = nullptr;
    Shape steps;

    Walk() = default;
    Walk(const Array& a, size_t outer);

    char* at(const Shape& place) const;
};

// The same, of an array whose last two axes are a head's matrix.
struct MatrixWalk : Walk {
    int64_t row_stride = 0, col_stride = 0;

    MatrixWalk() = default;
    MatrixWalk(const Array& a, size_t outer);
    // Of an array whose rows and columns may be broadcast too.
    static MatrixWalk broadcast(const Array& a, size_t outer);

    Matrix matrix(const Shape& place) const { return {at(place), row_stride, col_stride}; }
};

}  // namespace attnscore
