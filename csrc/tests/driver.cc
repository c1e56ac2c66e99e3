// Every target against the naive kernels, on problems drawn at random; and the pool. Made for the sanitizers.
// `driver CASES SEED` draws CASES cases; each failure says how to repeat it.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "tests/case.h"

namespace attnscore::naive {
extern const Kernels kernels, kernels_nan_slope;
}

using namespace attnscore;
using namespace attnscore::tests;

namespace {

// The largest difference relative to the largest number of the array (1 at least); infinity where only one is finite. A
// NaN is right too where `other` has one.
double difference(const Result& found, const Result& expected, const Result& other) {
    double largest = 1, worst = 0;
    const int64_t size = size_of(found.dtype) * found.step;
    for (int64_t i = 0; i < expected.count; ++i) {
        const double x = number(found.data + i * size, found.dtype), y = number(expected.data + i * size, found.dtype);
        if (std::isnan(x) && std::isnan(number(other.data + i * size, found.dtype))) continue;
        if (std::isfinite(y)) largest = std::max(largest, std::abs(y));
        if (std::isfinite(x) != std::isfinite(y)) return INFINITY;
        if (std::isfinite(x)) worst = std::max(worst, std::abs(x - y));
    }
    return worst / largest;
}

bool identical(const std::vector<Result>& left, const std::vector<Result>& right) {
    for (size_t i = 0; i < left.size(); ++i) {
        const int64_t size = size_of(left[i].dtype), step = size * left[i].step;
        for (int64_t j = 0; j < left[i].count; ++j) {
            if (std::memcmp(left[i].data + j * step, right[i].data + j * step, static_cast<size_t>(size)) != 0) {
                return false;
            }
        }
    }
    return true;
}

bool agree(const Case& c, const char* target, const std::vector<Result>& found, const std::vector<Result>& expected,
           const std::vector<Result>& other) {
    // A score's rounding is the weight's relative error.
    const double scores = (c.sum == Dtype::f64 ? 1e-15 : 1e-6) * c.score_bound();
    for (size_t i = 0; i < found.size(); ++i) {
        // Both sides round the result once more.
        const double step = found[i].dtype == Dtype::f64    ? 1e-14
                            : found[i].dtype == Dtype::f32  ? 1e-6
                            : found[i].dtype == Dtype::bf16 ? 8e-3
                                                            : 1e-3;
        // A sum over all pairs of a group, which cancel: its rounding is that of terms many times as large.
        const double terms = std::strcmp(found[i].name, "grad_w_v") == 0 ? 4 : 1;
        const double allowed = (4 * step + 8 * scores) * terms, got = difference(found[i], expected[i], other[i]);
        if (!(got <= allowed)) {
            std::fprintf(stderr, "%s: %s (number %zu) differs by %g, allowed %g\n", target, found[i].name, i, got,
                         allowed);
            return false;
        }
    }
    return true;
}

bool one_case(uint64_t seed) {
    Case c(seed);
    const auto forward = c.forward(naive::kernels, 1);
    c.set_rows();
    const auto backward = c.backward(naive::kernels, 1);
    // 0 * NaN at the flat side of relu has two readings; kernels may take either.
    const auto nan_slope = c.backward(naive::kernels_nan_slope, 1);
    bool good = true;
    for (const Kernels* target : runnable_kernels()) {
        const auto out = c.forward(*target, 1), gradients = c.backward(*target, 1);
        bool same =
            agree(c, target->name, out, forward, forward) && agree(c, target->name, gradients, backward, nan_slope);
        for (const int threads : {2, 3, 7}) {
            // All three on a third of the cases, one on the others.
            if (seed % 3 != 0 && threads != 2 + static_cast<int>(seed % 2)) continue;
            if (identical(c.forward(*target, threads), out) && identical(c.backward(*target, threads), gradients)) {
                continue;
            }
            std::fprintf(stderr, "%s: other bits with %d threads than with 1\n", target->name, threads);
            same = false;
        }
        good = good && same;
    }
    if (!good)
        std::fprintf(stderr, "failed: driver 1 %llu: %s\n", static_cast<unsigned long long>(seed), c.text().c_str());
    return good;
}

// The product of two matrices drawn at random, of every target, with plain sums; and whether it sees what is not
// finite.
bool one_product(uint64_t seed) {
    Random random{std::mt19937_64(seed)};
    Memory memory;
    const auto size = [&random](int64_t most) { return 1 + random.below(random.coin() ? 8 : most); };
    MatrixProduct product;
    product.dtype = random.coin() ? Dtype::f32 : Dtype::f64;
    product.rows = size(600), product.depth = size(400), product.cols = size(200);
    const int64_t count = product.rows * product.cols, width = size_of(product.dtype);
    const auto normal = [&random] { return random.normal(); };
    const auto draw = [&](int64_t rows, int64_t cols) {
        Layout layout(random, rows, cols);
        layout.row_stride = cols, layout.col_stride = 1;
        return numbers_laid(memory, random, layout, product.dtype, normal);
    };
    product.a = draw(product.rows, product.depth).data;
    product.b = numbers_laid(memory, random, Layout(random, product.depth, product.cols), product.dtype, normal);
    std::vector<double> expected(static_cast<size_t>(count)), sizes(expected.size());
    for (int64_t i = 0; i < product.rows; ++i) {
        for (int64_t p = 0; p < product.depth; ++p) {
            const double x = number(product.a + (i * product.depth + p) * width, product.dtype);
            for (int64_t j = 0; j < product.cols; ++j) {
                const int64_t at = p * product.b.row_stride + j * product.b.col_stride;
                const double term = x * number(product.b.data + at * width, product.dtype);
                expected[static_cast<size_t>(i * product.cols + j)] += term;
                sizes[static_cast<size_t>(i * product.cols + j)] += std::abs(term);
            }
        }
    }
    bool good = true;
    for (const Kernels* target : runnable_kernels()) {
        char* outs[2];
        for (const int threads : {1, 3}) {
            product.c = outs[threads / 2] = memory.filled(count, product.dtype, NAN, random.below(3));
            target->multiply(product, threads);
        }
        good = good && std::memcmp(outs[0], outs[1], static_cast<size_t>(count * width)) == 0;
        const double step = product.dtype == Dtype::f64 ? 1e-15 : 6e-7;
        for (size_t i = 0; i < expected.size(); ++i) {
            const double found = number(outs[0] + static_cast<int64_t>(i) * width, product.dtype);
            good = good && std::abs(found - expected[i]) <= 4 * step * sizes[i];
        }
        // A row that is not finite becomes NaN, and no bit of the others changes.
        const int64_t place = random.below(product.rows * product.depth), row = place / product.depth;
        char* entry = const_cast<char*>(product.a) + place * width;
        const double before = number(entry, product.dtype);
        put(entry, product.dtype, random.coin() ? NAN : INFINITY);
        target->multiply(product, 2);
        put(entry, product.dtype, before);
        for (int64_t i = 0; i < product.rows; ++i) {
            const int64_t start = i * product.cols * width;
            if (i != row) good = good && std::memcmp(outs[0] + start, product.c + start, product.cols * width) == 0;
            for (int64_t j = 0; i == row && j < product.cols; ++j)
                good = good && std::isnan(number(product.c + start + j * width, product.dtype));
        }
        if (good) continue;
        std::fprintf(stderr, "%s: a product of %lld x %lld x %lld is wrong: driver 1 %llu\n", target->name,
                     static_cast<long long>(product.rows), static_cast<long long>(product.depth),
                     static_cast<long long>(product.cols), static_cast<unsigned long long>(seed));
        return false;
    }
    return true;
}

// Many short jobs from several callers: every task runs once, and all are done on return.
bool pool_holds(int rounds) {
    std::atomic<bool> good{true};
    const auto caller = [&](int which) {
        std::vector<int> counts;
        for (int round = 0; round < rounds && good; ++round) {
            counts.assign(static_cast<size_t>(round % 13), 0);
            const auto task = [](int64_t i, void* at) {
                ++(*static_cast<std::vector<int>*>(at))[static_cast<size_t>(i)];
            };
            parallel(static_cast<int64_t>(counts.size()), task, &counts, 1 + (round + which) % 5);
            if (std::any_of(counts.begin(), counts.end(), [](int n) { return n != 1; })) good = false;
        }
    };
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i) callers.emplace_back(caller, i);
    for (std::thread& thread : callers) thread.join();
    if (!good) std::fprintf(stderr, "the pool ran a task never or twice\n");
    return good;
}

#if defined(__x86_64__)
constexpr uint64_t kFlushToZero = 0x8040;  // subnormal operands as well
uint64_t control_register() { return _mm_getcsr(); }
void set_control_register(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#define ATTNSCORE_CONTROL_REGISTER 1
#elif defined(__aarch64__)
constexpr uint64_t kFlushToZero = 1 << 24;
uint64_t control_register() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
void set_control_register(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#define ATTNSCORE_CONTROL_REGISTER 1
#endif

#ifdef ATTNSCORE_CONTROL_REGISTER
// Whether tasks flush subnormal results to zero, for callers that do (as XLA's threads) and that do not; both still do
// as before afterwards.
bool tasks_flush_subnormals() {
    bool good = true;
    const auto call = [&good](uint64_t mode) {
        set_control_register((control_register() & ~kFlushToZero) | mode);
        // More threads than pool_holds asks for, so that this caller starts some.
        for (const int threads : {1, 9}) {
            std::vector<float> halves(1000, std::numeric_limits<float>::min());
            const auto task = [](int64_t i, void* at) {
                volatile float* half = static_cast<std::vector<float>*>(at)->data() + i;
                *half = *half / 2;
            };
            parallel(static_cast<int64_t>(halves.size()), task, &halves, threads);
            // By their bits: a comparison here may take a subnormal number for zero.
            for (const float half : halves) good = good && std::memcmp(&half, "\0\0\0\0", 4) == 0;
            good = good && (control_register() & kFlushToZero) == mode;
        }
    };
    std::thread(call, 0).join();
    std::thread(call, kFlushToZero).join();
    if (!good) std::fprintf(stderr, "a task kept a subnormal number, or changed the mode of its caller\n");
    return good;
}
#else
bool tasks_flush_subnormals() { return true; }
#endif

}  // namespace

int main(int count, char** arguments) {
    const int64_t cases = count > 1 ? std::atoll(arguments[1]) : 300;
    const uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
    int64_t failed = 0;
    for (int64_t i = 0; i < cases; ++i) {
        const uint64_t own = seed + static_cast<uint64_t>(i);
        failed += !(one_case(own) && one_product(own));
    }
    const bool pool = pool_holds(3000) && tasks_flush_subnormals();
    std::printf("%lld cases on", static_cast<long long>(cases));
    for (const Kernels* target : runnable_kernels()) std::printf(" %s", target->name);
    std::printf(": %lld failed; pool %s\n", static_cast<long long>(failed), pool ? "holds" : "fails");
    return failed != 0 || !pool;
}
