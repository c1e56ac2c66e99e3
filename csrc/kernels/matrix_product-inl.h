// The product of two matrices, C = A B, for scores that project queries or keys. Rows of A that are not finite become
// NaN, as wherever rows are projected, and change no bit of others.
//
// A task computes rows of C in one panel of columns. It copies the rows of B in that panel part by part, so that they
// stay in the first-level cache for all rows of C; where these are few it reads them where they are. Every sum runs
// over the rows of B in the same parts, so its bits do not depend on the number of threads.

constexpr int64_t kProductRows = 192;     // of a task
constexpr int64_t kPanelRowBytes = 256;   // of a panel of B: neighbouring lines of memory are read together
constexpr int64_t kPanelBytes = 1 << 14;  // of a part of a panel: half of a first-level cache
// So few rows of C need no copy. Micro-tiles of two vectors read too little of each row of B to keep memory busy.
constexpr int64_t kRowsInPlace = (kNR > 2 ? 4 : 1) * kMR;

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

// Compute a block of C: `count` rows from `row` on, `own_cols` columns from `col` on.
template <class T>
void multiply_block(const MatrixProduct& product, int64_t row, int64_t count, int64_t col, int64_t own_cols) {
    constexpr int64_t L = Vector<T>::lanes, most = kPanelBytes / kPanelRowBytes;
    const int64_t depth = product.depth, cols = product.cols, width = padded(own_cols, L);
    const Matrix& b = product.b;
    const T* from = as<T>(product.a) + row * depth;
    T* to = as<T>(product.c) + row * cols + col;
    if (width == own_cols && count <= kRowsInPlace && b.col_stride == 1) {
        const View<T> own{as<T>(b.data) + col, b.row_stride};
        if (count > 1)
            return gemm(Product<T>{}, to, cols, from, depth, 1, own.data, own.stride, count, width, depth, false);
        std::fill_n(to, width, T(0));
        return add_weighted_rows(to, from, 1, own, depth, width);
    }
    const int64_t parts = std::max<int64_t>((depth + most - 1) / most, 1);
    Arena& arena = thread_arena();
    T* panel = arena.take<T>((depth / parts + 1) * width);
    // Whole vectors are stored: columns that do not fill them are computed beside C.
    T* sums = width == own_cols ? to : arena.take<T>(count * width);
    const int64_t stride = sums == to ? cols : width;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t p = part * depth / parts, terms = (part + 1) * depth / parts - p;
        read_block(panel, width, b, p, terms, col, own_cols);
        gemm(Product<T>{}, sums, stride, from + p, depth, 1, panel, width, count, width, terms, part > 0);
    }
    if (sums == to) return;
    for (int64_t i = 0; i < count; i++) std::copy_n(sums + i * width, own_cols, to + i * cols);
}

template <class T>
void multiply_typed(const MatrixProduct& product, Threads threads) {
    // One row has a single sum for each column, and needs more columns to keep the multiply-adds busy.
    const int64_t rows = product.rows, one = 16 * Vector<T>::lanes, several = kPanelRowBytes / sizeof(T);
    const int64_t columns = rows == 1 ? one : several;
    const int64_t panels = (product.cols + columns - 1) / columns, blocks = (rows + kProductRows - 1) / kProductRows;
    for_each_task(blocks * panels, threads, [&](int64_t task) {
        const int64_t block = task / panels, row = block * rows / blocks, count = (block + 1) * rows / blocks - row;
        const int64_t col = task % panels * columns;
        const int64_t own_cols = std::min(columns, product.cols - col);
        multiply_block<T>(product, row, count, col, own_cols);
        const T* a = as<T>(product.a) + row * product.depth;
        if (all_finite(a, count * product.depth)) return;
        for (int64_t i = 0; i < count; i++)
            if (!all_finite(a + i * product.depth, product.depth))
                std::fill_n(as<T>(product.c) + (row + i) * product.cols + col, own_cols,
                            std::numeric_limits<T>::quiet_NaN());
    });
}

// Compute C.
void multiply(const MatrixProduct& product, Threads threads) {
    const double work = static_cast<double>(product.rows) * product.depth * product.cols;
    threads = threads.at_most(1 + work / (1 << 19));
    return (product.dtype == Dtype::f64 ? multiply_typed<double> : multiply_typed<float>)(product, threads);
}
