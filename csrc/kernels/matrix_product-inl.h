// The product of two matrices, C = A B, for scores that project queries or keys. Rows of A that are not finite become
// NaN, as wherever rows are projected, and change no bit of others.
//
// A task computes rows of C in some panels of columns. It copies the rows of B in these panels part by part, so that a
// panel stays in the first-level cache for all rows of C; where these are few it reads B where it is. The parts of a
// sum depend on its panel, not on the task, so its bits do not depend on the number of threads.
#pragma once

#include "kernels/for_each_task-inl.h"
#include "kernels/gemm-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/simd-inl.h"

constexpr int64_t kProductRows = 192;     // of a task
constexpr int64_t kPanelRowBytes = 256;   // of a panel of B: neighbouring lines of memory are read together
constexpr int64_t kPanelBytes = 1 << 14;  // of a part of a panel: half of a first-level cache
// Micro-tiles of two vectors read one line of each row of B, too little to keep memory busy, and where rows are a power
// of two apart the lines beside it leave the caches before they are read. There a task takes several panels, and reads
// all of a row before the next one: in place, so few rows at a time.
constexpr bool kReadsOneLine = kNR <= 2;
constexpr int64_t kMostPanels = kReadsOneLine ? 8 : 1;
constexpr int64_t kTermsInPlace = kReadsOneLine ? 8 : std::numeric_limits<int64_t>::max();
constexpr int64_t kRowsInPlace = kReadsOneLine ? 8 : 4 * kMR;  // so few rows of C need no copy

// Read a block of a matrix into rows `width` apart, with zeros behind its columns; `width` covers whole vectors.
template <class T>
void read_block(T* to, int64_t width, const Matrix& m, int64_t row, int64_t rows, int64_t col, int64_t cols) {
    constexpr int64_t L = Vector<T>::lanes;
    const bool is_transposed = m.row_stride == 1 && m.col_stride != 1;
    const int64_t square_rows = is_transposed ? rows - rows % L : 0, square_cols = cols - cols % L;
    const T* from = as<T>(m.data) + row * m.row_stride + col * m.col_stride;
    for (int64_t i = 0; i < square_rows; i += L) {
        for (int64_t j = 0; j < square_cols; j += L)
            transpose_square(to + i * width + j, width, from + i + j * m.col_stride, m.col_stride);
        for (int64_t ii = i; ii < i + L; ii++)
            for (int64_t j = square_cols; j < width; j++)
                to[ii * width + j] = j < cols ? from[ii + j * m.col_stride] : 0;
    }
    for (int64_t i = square_rows; i < rows; i++) read_row(to + i * width, width, m, dtype_of<T>(), row + i, col, cols);
}

// Whether `count` numbers are finite: x * 0 is NaN for all others.
template <class T>
bool all_finite(const T* x, int64_t count) {
    const int64_t whole = count - count % Vector<T>::lanes;
    T rest = 0;
    for (int64_t i = whole; i < count; i++) rest += x[i] * T(0);
    return rest == 0 && is_finite(View<T>{x, 0}, 1, whole);
}

// Copy `terms` rows of panels of B, all panels of a row before the next row. A panel follows the one before it.
template <class T>
void read_panels(T* to, const Matrix& b, int64_t row, int64_t terms, int64_t col, int64_t cols, int64_t width) {
    constexpr int64_t L = Vector<T>::lanes, columns = kPanelRowBytes / sizeof(T);
    if (width <= columns) return read_block(to, width, b, row, terms, col, cols);
    for (int64_t k = 0; k < terms; k++)
        for (int64_t j = 0; j < width; j += columns) {
            const int64_t block_cols = std::min(columns, width - j);
            T* line = to + j * terms + k * block_cols;
            if (b.col_stride != 1 || j + block_cols > cols) {
                read_block(line, block_cols, b, row + k, 1, col + j, std::min(block_cols, cols - j));
                continue;
            }
            const T* from = as<T>(b.data) + (row + k) * b.row_stride + col + j;
            for (int64_t l = 0; l < block_cols; l += L) store(line + l, load(from + l));
        }
}

// Compute a few rows of C, `width` whole vectors of columns, from rows of B where they are.
template <class T>
void multiply_in_place(T* to, int64_t cols, const T* a, const View<T>& b, int64_t count, int64_t width, int64_t depth) {
    if (count == 1 && !kReadsOneLine) {
        std::fill_n(to, width, T(0));
        return add_weighted_rows(to, a, 1, b, depth, width);
    }
    // Two micro-tiles of about as many rows: one of few rows leaves the multiply-adds waiting for each other.
    const int64_t rows = kReadsOneLine && count > kMR ? (count + 1) / 2 : count;
    for (int64_t p = 0; p < depth || p == 0;) {  // at least once: depth = 0 stores zeros
        const int64_t terms = std::min(kTermsInPlace, depth - p);
        for (int64_t i = 0; i < count; i += rows)
            gemm(Product<T>{}, to + i * cols, cols, a + i * depth + p, depth, 1, b.row(p), b.stride,
                 std::min(rows, count - i), width, terms, p > 0);
        p += std::max<int64_t>(terms, 1);
    }
}

// Compute a block of C: `count` rows from `row` on, `col_count` columns from `col` on.
template <class T>
void multiply_block(const MatrixProduct& product, int64_t row, int64_t count, int64_t col, int64_t col_count) {
    constexpr int64_t L = Vector<T>::lanes, max_depth = kPanelBytes / kPanelRowBytes,
                      columns = kPanelRowBytes / sizeof(T);
    const int64_t depth = product.depth, cols = product.cols;
    const Matrix& b = product.b;
    const T* from = as<T>(product.a) + row * depth;
    T* to = as<T>(product.c) + row * cols + col;
    if (count <= kRowsInPlace && b.col_stride == 1) {
        // Columns that do not fill a vector are copied with the rest of their panel, in whichever task that is.
        const int64_t whole = col_count % L == 0 ? col_count : col_count / columns * columns;
        if (whole > 0)
            multiply_in_place(to, cols, from, View<T>{as<T>(b.data) + col, b.row_stride}, count, whole, depth);
        if (whole == col_count) return;
        to += whole, col += whole, col_count -= whole;
    }
    const int64_t width = padded(col_count, L);
    const int64_t parts = std::max<int64_t>((depth + max_depth - 1) / max_depth, 1);
    Arena& arena = thread_arena();
    T* panels = arena.take<T>((depth / parts + 1) * width);
    // Whole vectors are stored: columns that do not fill them are computed beside C.
    T* sums = width == col_count ? to : arena.take<T>(count * width);
    const int64_t stride = sums == to ? cols : width;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t p = part * depth / parts, terms = (part + 1) * depth / parts - p;
        read_panels(panels, b, p, terms, col, col_count, width);
        for (int64_t j = 0; j < width; j += columns) {
            const int64_t block_cols = std::min(columns, width - j);
            gemm(Product<T>{}, sums + j, stride, from + p, depth, 1, panels + j * terms, block_cols, count, block_cols,
                 terms, part > 0);
        }
    }
    if (sums == to) return;
    for (int64_t i = 0; i < count; i++) std::copy_n(sums + i * width, col_count, to + i * cols);
}

// The number of columns of a task.
template <class T>
int64_t columns_of_task(const MatrixProduct& product, Threads threads) {
    constexpr int64_t panel = kPanelRowBytes / sizeof(T);
    // One row has a single sum for each column, and needs more columns to keep the multiply-adds busy.
    if (!kReadsOneLine) return product.rows == 1 ? 16 * Vector<T>::lanes : panel;
    // Two tasks for each thread, so that a thread that comes late finds one left.
    return panel * std::clamp<int64_t>(product.cols / (2 * threads.count * panel), 1, kMostPanels);
}

template <class T>
void multiply_typed(const MatrixProduct& product, Threads threads) {
    const int64_t rows = product.rows, columns = columns_of_task<T>(product, threads);
    const int64_t parts = (product.cols + columns - 1) / columns, blocks = (rows + kProductRows - 1) / kProductRows;
    for_each_task(blocks * parts, threads, [&](int64_t task) {
        const int64_t block = task / parts, row = block * rows / blocks, count = (block + 1) * rows / blocks - row;
        const int64_t col = task % parts * columns;
        const int64_t col_count = std::min(columns, product.cols - col);
        multiply_block<T>(product, row, count, col, col_count);
        const T* a = as<T>(product.a) + row * product.depth;
        for (int64_t i = 0; i < count; i++)
            if (!all_finite(a + i * product.depth, product.depth))
                std::fill_n(as<T>(product.c) + (row + i) * product.cols + col, col_count,
                            std::numeric_limits<T>::quiet_NaN());
    });
}
