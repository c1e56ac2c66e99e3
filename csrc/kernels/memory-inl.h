// Scratch memory, and rows of the caller's memory: read, converted, prefetched, transposed.
#pragma once

#include "kernels/simd-inl.h"
#include "kernels/storage-inl.h"

inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Scratch memory of a task, which its thread keeps for the next task: a fresh allocation of a few hundred kilobytes
// costs a system call and a page fault per page.
class Arena {
   public:
    // Memory for `count` numbers, not initialised, until the next `reset`.
    template <class T>
    T* take(int64_t count) {
        const size_t bytes = padded(std::max<int64_t>(count, 1) * sizeof(T), 64);
        if (bytes > static_cast<size_t>(end_ - next_)) next_chunk(bytes);
        char* block = next_;
        next_ += bytes;
        return reinterpret_cast<T*>(block);
    }
    // Free everything that was taken. Chunks of unusual size go back to the system.
    void reset() {
        std::erase_if(chunks_, [](const Chunk& chunk) { return chunk.size > 4 * kChunkBytes; });
        at_ = 0;
        enter_chunk();
    }

   private:
    // Go on in a chunk with room for so many bytes.
    __attribute__((noinline)) void next_chunk(size_t bytes) {
        do at_++;
        while (at_ < chunks_.size() && bytes > chunks_[at_].size);
        if (at_ >= chunks_.size()) {
            const size_t size = std::max<size_t>(bytes, kChunkBytes);
            std::unique_ptr<char, Free> memory(static_cast<char*>(::operator new(size, kCacheLine)));
            chunks_.push_back({std::move(memory), size});
            at_ = chunks_.size() - 1;
        }
        enter_chunk();
    }
    void enter_chunk() {
        next_ = chunks_.empty() ? nullptr : chunks_[at_].memory.get();
        end_ = chunks_.empty() ? nullptr : next_ + chunks_[at_].size;
    }

    static constexpr size_t kChunkBytes = 1 << 20;
    static constexpr std::align_val_t kCacheLine{64};
    struct Free {
        void operator()(char* p) const { ::operator delete(p, kCacheLine); }
    };
    struct Chunk {
        std::unique_ptr<char, Free> memory;
        size_t size;
    };
    std::vector<Chunk> chunks_;
    size_t at_ = 0;
    char *next_ = nullptr, *end_ = nullptr;
};

// The scratch of a task.
inline Arena& thread_arena() {
    thread_local Arena arena;
    arena.reset();
    return arena;
}

// The scratch of a call, which its tasks read while the caller's thread runs tasks of its own.
inline Arena& call_arena() {
    thread_local Arena arena;
    arena.reset();
    return arena;
}

// ---------------------------------------------------------------------------------------------------------------------
// 16-bit floats, in memory

struct Bfloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

// A vector of T from numbers of T, or of float from 16-bit ones.
template <class T>
inline V<T> load_as(const T* p) {
    return load(p);
}
template <class T>
inline V<float> load_as(const Bfloat16* p) {
#if defined(__AVX512F__)
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return (V<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#elif defined(__AVX2__)
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (V<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#elif defined(__aarch64__)
    return (V<float>)vshll_n_u16(vld1_u16(&p->bits), 16);
#else
    V<float> v;
    for (int i = 0; i < Vector<float>::lanes; i++) v[i] = widened(p[i].bits, Dtype::bf16);
    return v;
#endif
}
template <class T>
inline V<float> load_as(const Float16* p) {
#if defined(__AVX512F__)
    return (V<float>)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
    return (V<float>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__aarch64__)
    return (V<float>)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
#else
    V<float> v;
    for (int i = 0; i < Vector<float>::lanes; i++) v[i] = widened(p[i].bits, Dtype::f16);
    return v;
#endif
}

inline void widen_row(float* to, const uint16_t* from, Dtype dtype, int64_t count) {
    constexpr int64_t L = Vector<float>::lanes;
    int64_t j = 0;
    if (dtype == Dtype::bf16)
        for (; j + L <= count; j += L) store(to + j, load_as<float>(reinterpret_cast<const Bfloat16*>(from + j)));
    else
        for (; j + L <= count; j += L) store(to + j, load_as<float>(reinterpret_cast<const Float16*>(from + j)));
    for (; j < count; j++) to[j] = widened(from[j], dtype);
}

inline void narrow_row(uint16_t* to, const float* from, Dtype dtype, int64_t count) {
    int64_t j = 0;
#if defined(__AVX512F__)
    if (dtype == Dtype::f16)
        for (; j + 16 <= count; j += 16)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + j), _mm512_cvtps_ph(_mm512_loadu_ps(from + j), 0));
#elif defined(__aarch64__)
    if (dtype == Dtype::f16)
        for (; j + 4 <= count; j += 4) vst1_u16(to + j, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from + j))));
#endif
    if (dtype == Dtype::bf16)  // compiles to vectors, with the dtype a constant
        for (; j < count; j++) to[j] = narrowed(from[j], Dtype::bf16);
    for (; j < count; j++) to[j] = narrowed(from[j], dtype);
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows of a matrix as T

template <class T>
constexpr Dtype dtype_of() {
    return sizeof(T) == 4 ? Dtype::f32 : Dtype::f64;
}

template <class T>
inline T element(const Matrix& m, Dtype dtype, int64_t i, int64_t j) {
    return load_number<T>(m.data, dtype, i * m.row_stride + j * m.col_stride);
}

// Read `cols` columns of row i, from column `first` on, with zeros behind them up to `width`.
template <class T>
inline void read_row(T* to, int64_t width, const Matrix& m, Dtype dtype, int64_t i, int64_t first, int64_t cols) {
    const int64_t at = i * m.row_stride + first * m.col_stride;
    if (cols == 0) {
        // An array without columns may have no memory.
    } else if (m.col_stride == 1 && dtype == dtype_of<T>()) {
        std::memcpy(to, as<T>(m.data) + at, cols * sizeof(T));
    } else if (sizeof(T) == 4 && m.col_stride == 1 && (dtype == Dtype::bf16 || dtype == Dtype::f16)) {
        widen_row(reinterpret_cast<float*>(to), as<uint16_t>(m.data) + at, dtype, cols);
    } else {
        for (int64_t j = 0; j < cols; j++) to[j] = element<T>(m, dtype, i, first + j);
    }
    for (int64_t j = cols; j < width; j++) to[j] = 0;
}

// Prefetch bytes that are soon read or written, or row i of a matrix if there is one.
constexpr int64_t kPrefetchRows = 16;  // how far a loop over rows prefetches
template <int to_write = 0>
inline void prefetch(const char* from, int64_t bytes) {
    for (int64_t j = 0; j < bytes; j += 64) __builtin_prefetch(from + j, to_write, 2);  // 2: not to the first level
}
inline void prefetch_row(const Matrix& m, Dtype dtype, int64_t i, int64_t rows, int64_t cols) {
    const int64_t size = attnscore::size_of(dtype);
    if (i < rows && cols > 0 && m.col_stride == 1) prefetch(m.data + i * m.row_stride * size, cols * size);
}

// Read the rows [first, first + count), `width` apart.
template <class T>
void read_rows(T* to, int64_t width, const Matrix& m, Dtype dtype, int64_t first, int64_t count, int64_t cols) {
    if (cols == 0) return;
    for (int64_t i = 0; i < count; i++) read_row(to + i * width, width, m, dtype, first + i, 0, cols);
}

// Whether rows can be used in the caller's memory: as T, contiguous, and in whole vectors.
template <class T>
inline bool has_native_layout(const Matrix& m, Dtype dtype, int64_t cols) {
    return dtype == dtype_of<T>() && m.col_stride == 1 && cols % Vector<T>::lanes == 0;
}

// Rows of T in whole vectors.
template <class T>
struct View {
    const T* data = nullptr;
    int64_t stride = 0;
    const T* row(int64_t i) const { return data + i * stride; }
};

// Rows of T in whole vectors, or of 16-bit floats where T is float: these are widened where they are read.
template <class T>
struct StoredRows {
    const char* data = nullptr;
    int64_t stride = 0;  // in numbers
    Dtype dtype = dtype_of<T>();

    StoredRows() = default;
    StoredRows(const char* data, int64_t stride, Dtype dtype) : data(data), stride(stride), dtype(dtype) {}
    explicit StoredRows(const View<T>& rows)
        : data(reinterpret_cast<const char*>(rows.data)), stride(rows.stride), dtype(dtype_of<T>()) {}

    template <class F>
    auto with_view(const F& f) const {
        if constexpr (sizeof(T) == 4) {
            if (dtype == Dtype::bf16) return f(View<Bfloat16>{as<Bfloat16>(data), stride});
            if (dtype == Dtype::f16) return f(View<Float16>{as<Float16>(data), stride});
        }
        return f(View<T>{as<T>(data), stride});
    }
};

// Whether rows can be read as StoredRows in the caller's memory.
template <class T>
inline bool has_stored_layout(const Matrix& m, Dtype dtype, int64_t cols) {
    const bool narrow = sizeof(T) == 4 && attnscore::size_of(dtype) == 2;
    return (narrow || dtype == dtype_of<T>()) && m.col_stride == 1 && cols % Vector<T>::lanes == 0;
}

// The rows from `first` on in the caller's memory, whose layout is `has_stored_layout`.
template <class T>
inline StoredRows<T> stored_rows(const Matrix& m, Dtype dtype, int64_t first) {
    return {m.data + first * m.row_stride * attnscore::size_of(dtype), m.row_stride, dtype};
}

// Whether no vector of the rows spans two cache lines. NumPy's large arrays begin 16 bytes after a line, and their
// vectors span two, which takes 2% of a pass.
template <class T>
inline bool is_aligned(const View<T>& rows) {
    return (reinterpret_cast<uintptr_t>(rows.data) | static_cast<uintptr_t>(rows.stride) * sizeof(T)) % kVectorBytes ==
           0;
}

// The rows [first, first + count), in the caller's memory or in `copy`, which has room for count x padded(cols).
template <class T>
inline View<T> view_rows(T* copy, const Matrix& m, Dtype dtype, int64_t first, int64_t count, int64_t cols) {
    if (has_native_layout<T>(m, dtype, cols)) return {as<T>(m.data) + first * m.row_stride, m.row_stride};
    const int64_t width = padded(cols, Vector<T>::lanes);
    read_rows(copy, width, m, dtype, first, count, cols);
    return {copy, width};
}

// Whether rows times a factor hold neither NaN nor infinity: x * 0 is NaN for these alone.
template <class E, class T = std::conditional_t<sizeof(E) == 2, float, E>>
inline bool is_finite(const View<E>& rows, int64_t count, int64_t width, std::type_identity_t<T> factor = 1) {
    constexpr int L = Vector<T>::lanes;
    V<T> sum{};
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < width; j += L) sum += load_as<T>(rows.row(i) + j) * factor * T(0);
    return reduce_sum<T>(sum) == 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Transposition

// Transpose a square of lanes x lanes in registers: first halves, then the squares within them, down to single lanes.
template <class T, int s>
inline void transpose_step(V<T>* v) {
    constexpr int L = Vector<T>::lanes;
    constexpr auto low = [](int p) { return (p & s) ? L + p - s : p; };
    constexpr auto high = [](int p) { return (p & s) ? L + p : p + s; };
#pragma GCC unroll 16
    for (int i = 0; i < L; i++) {
        if (i & s) continue;
        const V<T> a = v[i], b = v[i + s];
        v[i] = shuffle<T>(a, b, low);
        v[i + s] = shuffle<T>(a, b, high);
    }
    if constexpr (s > 1) transpose_step<T, s / 2>(v);
}
template <class T>
inline void transpose_square(T* to, int64_t ldt, const T* from, int64_t ldf) {
    constexpr int L = Vector<T>::lanes;
    V<T> v[L];
#pragma GCC unroll 16
    for (int i = 0; i < L; i++) v[i] = load(from + i * ldf);
    transpose_step<T, L / 2>(v);
#pragma GCC unroll 16
    for (int i = 0; i < L; i++) store(to + i * ldt, v[i]);
}

// Transpose a tile: to[j * kTileKeys + i] = from[i][j]; `width` covers whole vectors. Columns of `to` behind `count`
// become 0 up to a whole vector, or to the end of the tile (`pad_to_tile`).
template <class T>
void transpose_tile(T* to, const View<T>& from, int64_t width, int64_t count, bool pad_to_tile = false) {
    constexpr int L = Vector<T>::lanes;
    for (int64_t j = 0; j < width; j += L)
        for (int64_t i = 0; i < (pad_to_tile ? kTileKeys : count); i += L) {
            T* square = to + j * kTileKeys + i;
            if (i + L <= count) {
                transpose_square(square, kTileKeys, from.row(i) + j, from.stride);
            } else if (i < count) {
                alignas(64) T padded_square[L * L] = {};
                for (int64_t ii = i; ii < count; ii++) store(padded_square + (ii - i) * L, load(from.row(ii) + j));
                transpose_square(square, kTileKeys, padded_square, L);
            } else {
                for (int64_t jj = 0; jj < L; jj++) store(square + jj * kTileKeys, V<T>{});
            }
        }
}
