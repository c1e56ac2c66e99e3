// Memory for the tests: each array has a heap buffer of its own that ends with its last element, so that one element
// read or written too far is an error under the address sanitizer. Memory between the elements is NaN (floats) or
// the wrong answer (bytes, ids): reading it shows.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <random>
#include <vector>

#include "tests/storage.h"

namespace attnscore::tests {

struct Random {
    std::mt19937_64 bits;

    int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
    bool coin() { return below(2) == 0; }
    bool one_in(int64_t n) { return below(n) == 0; }
    template <class T>
    T one_of(std::initializer_list<T> choices) {
        return choices.begin()[below(static_cast<int64_t>(choices.size()))];
    }
    double normal() { return std::normal_distribution<double>()(bits); }
};

// Lives as long as the case does.
class Memory {
   public:
    char* take(int64_t bytes) {
        blocks_.emplace_back(std::malloc(static_cast<size_t>(bytes)), std::free);
        return static_cast<char*>(blocks_.back().get());
    }

    // `slack` elements in front: the array begins at any multiple of its element, and ends with the buffer.
    char* filled(int64_t count, Dtype dtype, double x, int64_t slack = 0) {
        const int64_t size = size_of(dtype);
        char* data = take((count + slack) * size) + slack * size;
        for (int64_t i = 0; i < count; ++i) put(data + i * size, dtype, x);
        return data;
    }

   private:
    std::vector<std::unique_ptr<void, void (*)(void*)>> blocks_;
};

// The strides of a matrix, in one of many layouts, and the elements that it spans.
struct Layout {
    int64_t rows, cols, row_stride = 0, col_stride = 1;

    Layout(Random& random, int64_t n, int64_t m) : rows(n), cols(m), row_stride(m) {
        switch (random.below(6)) {
            case 0:  // columns inside
                row_stride = 1;
                col_stride = rows + random.below(3);
                break;
            case 1:  // rows apart
                row_stride = cols + random.below(20);
                break;
            case 2:  // both apart
                col_stride = 1 + random.below(3);
                row_stride = cols * col_stride + random.below(3);
                break;
            case 3:  // the same row, column or number all over
                row_stride = random.below(2);
                col_stride = row_stride ? 0 : random.below(2);
                break;
            default:
                break;
        }
        if (random.one_in(4)) row_stride = -row_stride;
        if (random.one_in(4)) col_stride = -col_stride;
    }

    bool empty() const { return rows == 0 || cols == 0; }
    int64_t lowest() const {
        return std::min<int64_t>((rows - 1) * row_stride, 0) + std::min<int64_t>((cols - 1) * col_stride, 0);
    }
    int64_t span() const {
        return std::max<int64_t>((rows - 1) * row_stride, 0) + std::max<int64_t>((cols - 1) * col_stride, 0) -
               lowest() + 1;
    }
};

// A matrix of numbers that `draw` gives.
template <class F>
Matrix numbers_laid(Memory& memory, Random& random, const Layout& layout, Dtype dtype, const F& draw) {
    Matrix m{nullptr, layout.row_stride, layout.col_stride};
    // Not null: an empty array may well have memory.
    if (layout.empty()) return m.data = memory.take(1), m;
    const int64_t size = size_of(dtype);
    char* data = memory.filled(layout.span(), dtype, NAN, random.below(3)) - layout.lowest() * size;
    for (int64_t i = 0; i < layout.rows; ++i) {
        for (int64_t j = 0; j < layout.cols; ++j) {
            put(data + (i * m.row_stride + j * m.col_stride) * size, dtype, draw());
        }
    }
    m.data = data;
    return m;
}

// The same of bytes or int64.
template <class T, class F>
Matrix integers_laid(Memory& memory, Random& random, const Layout& layout, T between, const F& draw) {
    Matrix m{nullptr, layout.row_stride, layout.col_stride};
    if (layout.empty()) return m.data = memory.take(1), m;
    const int64_t slack = random.below(3), count = layout.span() + slack;
    T* data = reinterpret_cast<T*>(memory.take(count * static_cast<int64_t>(sizeof(T))));
    for (int64_t i = 0; i < count; ++i) data[i] = between;
    data += slack - layout.lowest();
    for (int64_t i = 0; i < layout.rows; ++i) {
        for (int64_t j = 0; j < layout.cols; ++j) data[i * m.row_stride + j * m.col_stride] = draw();
    }
    m.data = reinterpret_cast<const char*>(data);
    return m;
}

}  // namespace attnscore::tests
