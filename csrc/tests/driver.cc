// Every target against the naive kernels, over odd sizes, strides, dtypes, intervals and groups; and the pool.
// Made for the sanitizers: each array has a heap buffer of its own that ends with its last element, so that one element
// read or written too far is an error. `driver CASES SEED` draws CASES cases; the first failure says how to repeat it.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "attention.h"

namespace attnscore::naive {
extern const Kernels kernels;
}

using namespace attnscore;

namespace {

int64_t size_of(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

struct Random {
    std::mt19937_64 bits;

    int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
    bool coin() { return below(2) == 0; }
    template <class T>
    T one_of(std::initializer_list<T> choices) {
        return choices.begin()[below(static_cast<int64_t>(choices.size()))];
    }
    double normal() { return std::normal_distribution<double>()(bits); }
};

void put(char* at, Dtype dtype, double x) {
    const float single = static_cast<float>(x);
    uint32_t word;
    std::memcpy(&word, &single, 4);
    uint16_t half = static_cast<uint16_t>(word >> 16);  // bfloat16, truncated
    if (dtype == Dtype::f16) {
        // Truncated; the numbers drawn here are neither large nor, if too small, anything but 0.
        const int exponent = static_cast<int>(word >> 23 & 255) - 112;
        half = static_cast<uint16_t>(word >> 16 & 0x8000);
        if (exponent > 0) half |= static_cast<uint16_t>(exponent << 10 | (word >> 13 & 1023));
    }
    if (dtype == Dtype::f64) {
        std::memcpy(at, &x, 8);
    } else if (dtype == Dtype::f32) {
        std::memcpy(at, &single, 4);
    } else {
        std::memcpy(at, &half, 2);
    }
}

double get(const char* at, Dtype dtype) {
    double x = 0;
    float single;
    uint16_t half;
    uint32_t word;
    if (dtype == Dtype::f64) {
        std::memcpy(&x, at, 8);
    } else if (dtype == Dtype::f32) {
        std::memcpy(&single, at, 4);
        x = single;
    } else if (dtype == Dtype::bf16) {
        std::memcpy(&half, at, 2);
        word = static_cast<uint32_t>(half) << 16;
        std::memcpy(&single, &word, 4);
        x = single;
    } else {
        std::memcpy(&half, at, 2);
        const int exponent = half >> 10 & 31, fraction = half & 1023;
        x = exponent == 31 ? NAN : std::ldexp(exponent ? 1024 + fraction : fraction, std::max(exponent, 1) - 25);
        if (half >> 15) x = -x;
    }
    return x;
}

// Heap memory of exactly the size asked for, which lives as long as the case does.
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

// A matrix of random numbers in one of many layouts.
Matrix matrix(Memory& memory, Random& random, int64_t rows, int64_t cols, Dtype dtype, double magnitude) {
    Matrix m;
    switch (random.below(5)) {
        case 0:  // columns inside
            m.row_stride = 1;
            m.col_stride = rows + random.below(3);
            break;
        case 1:  // rows apart
            m.col_stride = 1;
            m.row_stride = cols + random.below(20);
            break;
        case 2:  // both apart
            m.col_stride = 1 + random.below(3);
            m.row_stride = cols * m.col_stride + random.below(3);
            break;
        case 3:  // the same row, column or number all over
            m.row_stride = random.below(2);
            m.col_stride = m.row_stride ? 0 : random.below(2);
            break;
        default:
            m.col_stride = 1;
            m.row_stride = cols;
    }
    if (random.below(4) == 0) m.row_stride = -m.row_stride;
    if (random.below(4) == 0) m.col_stride = -m.col_stride;
    if (rows == 0 || cols == 0) return m;
    const int64_t last_row = (rows - 1) * m.row_stride, last_col = (cols - 1) * m.col_stride;
    const int64_t lowest = std::min<int64_t>(last_row, 0) + std::min<int64_t>(last_col, 0);
    const int64_t highest = std::max<int64_t>(last_row, 0) + std::max<int64_t>(last_col, 0);
    const int64_t size = size_of(dtype);
    // What lies between the elements is NaN: whoever reads it shows it.
    char* data = memory.filled(highest - lowest + 1, dtype, NAN, random.below(3)) - lowest * size;
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < cols; ++j) {
            put(data + (i * m.row_stride + j * m.col_stride) * size, dtype, magnitude * random.normal());
        }
    }
    m.data = data;
    return m;
}

struct Result {
    const char* name;
    Dtype dtype;
    int64_t count;
    char* data;
};

struct Case {
    Memory memory;
    Problem problem;
    Dtype sum = Dtype::f32;
    double magnitude = 1;

    explicit Case(Random& random);
    std::vector<Result> forward(const Kernels& kernels, int threads);
    std::vector<Result> backward(const Kernels& kernels, int threads);
    void set_rows(const std::vector<Result>& forward, Random& random);
    std::string text() const;

   private:
    void set_intervals(Random& random, Head& head);
};

Case::Case(Random& random) {
    Problem& p = problem;
    p.form = random.one_of({Form::inner, Form::additive});
    p.activation = random.one_of({Activation::tanh, Activation::sigmoid, Activation::relu, Activation::leaky_relu});
    p.score_dtype = random.one_of({Dtype::f32, Dtype::f32, Dtype::f64, Dtype::bf16, Dtype::f16});
    p.value_dtype = random.one_of({Dtype::f32, Dtype::f32, Dtype::bf16, Dtype::f16});
    if (p.score_dtype == Dtype::f64 && random.coin()) p.value_dtype = Dtype::f64;
    p.grad_dtype = random.one_of({Dtype::f32, p.value_dtype, Dtype::f64});
    p.query_len = random.one_of<int64_t>({0, 1, 2, 5, 6, 7, 13, 17, 63, 64, 65, 97, 131});
    p.key_len = random.one_of<int64_t>({0, 1, 2, 3, 15, 31, 63, 64, 65, 67, 127, 129, 193});
    p.dim = random.one_of<int64_t>({0, 1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 65});
    p.value_dim = random.one_of<int64_t>({0, 1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 65, 130});
    p.full_statistics = random.coin();
    p.negative_slope = random.one_of({0.01, 0.2, -0.5, 2.0});
    magnitude = random.one_of({0.1, 1.0, 1.0, 4.0});
    p.scale = random.one_of({1.0, -0.5}) / std::sqrt(1.0 + static_cast<double>(p.dim));
    sum = p.value_dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32;

    const int64_t groups = 1 + random.below(3), sharing = 1 + random.below(3);
    for (int64_t g = 0; g < groups; ++g) {
        Group group;
        const Matrix key = matrix(memory, random, p.key_len, p.dim, p.score_dtype, magnitude);
        const Matrix value = matrix(memory, random, p.key_len, p.value_dim, p.value_dtype, 1);
        const char* weights = nullptr;
        if (p.form == Form::additive) {
            char* numbers = memory.filled(p.dim, sum, 0, random.below(3));
            for (int64_t i = 0; i < p.dim; ++i) put(numbers + i * size_of(sum), sum, random.normal());
            weights = numbers;
        }
        for (int64_t h = 0; h < sharing; ++h) {
            Head head;
            head.query = matrix(memory, random, p.query_len, p.dim, p.score_dtype, magnitude);
            head.key = key;
            head.value = value;
            head.grad_out = matrix(memory, random, p.query_len, p.value_dim, p.grad_dtype, 1);
            head.weights = weights;
            set_intervals(random, head);
            group.heads.push_back(static_cast<int64_t>(p.heads.size()));
            p.heads.push_back(head);
        }
        p.groups.push_back(group);
    }
}

void Case::set_intervals(Random& random, Head& head) {
    const int64_t n = problem.query_len, m = problem.key_len, kind = random.below(5);
    if (kind == 0) return;
    auto* start = reinterpret_cast<int64_t*>(memory.take(n * 8));
    auto* stop = reinterpret_cast<int64_t*>(memory.take(n * 8));
    const int64_t valid = random.below(m + 1);
    for (int64_t i = 0; i < n; ++i) {
        int64_t first = 0, last = m;
        if (kind == 1) last = std::min(i + 1, m);                                            // causal
        if (kind == 2) last = valid;                                                         // lengths
        if (kind == 3) first = std::clamp<int64_t>(i - 9, 0, m), last = std::min(i + 3, m);  // window
        if (kind == 4) first = random.below(m + 1), last = random.below(m + 1);              // anything
        start[i] = first;
        stop[i] = std::max(first, last);
    }
    head.start = start;
    head.stop = stop;
}

std::vector<Result> Case::forward(const Kernels& kernels, int threads) {
    std::vector<Result> results;
    for (Head& head : problem.heads) {
        const int64_t out = problem.query_len * problem.value_dim, numbers = problem.query_len * kStatistics;
        head.out = memory.filled(out, problem.value_dtype, NAN, 1);
        head.statistics = memory.filled(numbers, sum, 77, 1);
        results.push_back({"out", problem.value_dtype, out, head.out});
        results.push_back({"statistics", sum, numbers, head.statistics});
    }
    kernels.forward(problem, threads);
    return results;
}

// What the backward needs of each row, from one forward for all targets.
void Case::set_rows(const std::vector<Result>& forward, Random& random) {
    const int64_t size = size_of(sum), n = problem.query_len;
    for (size_t h = 0; h < problem.heads.size(); ++h) {
        char *top = memory.filled(n, sum, 0, 1), *total = memory.filled(n, sum, 0, 1),
             *shift = memory.filled(n, sum, 0, 1);
        for (int64_t i = 0; i < n; ++i) {
            const char* numbers = forward[2 * h + 1].data + i * kStatistics * size;
            const double largest = get(numbers, sum), all = get(numbers + size, sum);
            put(top + i * size, sum, all == 0 ? 0 : largest);
            put(total + i * size, sum, all == 0 ? INFINITY : std::log(all));
            put(shift + i * size, sum, random.normal());
        }
        problem.heads[h].top = top;
        problem.heads[h].log_total = total;
        problem.heads[h].shift = shift;
    }
}

std::vector<Result> Case::backward(const Kernels& kernels, int threads) {
    const Problem& p = problem;
    std::vector<Result> results;
    const auto add = [&](const char* name, int64_t count) {
        results.push_back({name, sum, count, memory.filled(count, sum, 0, 1)});
        return results.back().data;
    };
    for (Head& head : problem.heads) head.grad_query = add("grad_query", p.query_len * p.dim);
    for (Group& group : problem.groups) {
        group.grad_key = add("grad_key", p.key_len * p.dim);
        group.grad_value = add("grad_value", p.key_len * p.value_dim);
        if (p.form == Form::additive) group.grad_weights = add("grad_weights", p.dim);
    }
    kernels.backward(problem, threads);
    return results;
}

std::string Case::text() const {
    const Problem& p = problem;
    char line[300];
    std::snprintf(
        line, sizeof line,
        "form %d activation %d score %d value %d grad %d queries %ld keys %ld dim %ld value_dim %ld heads %zu "
        "groups %zu full %d intervals %d magnitude %g scale %g slope %g",
        static_cast<int>(p.form), static_cast<int>(p.activation), static_cast<int>(p.score_dtype),
        static_cast<int>(p.value_dtype), static_cast<int>(p.grad_dtype), static_cast<long>(p.query_len),
        static_cast<long>(p.key_len), static_cast<long>(p.dim), static_cast<long>(p.value_dim), p.heads.size(),
        p.groups.size(), p.full_statistics, p.heads[0].start != nullptr, magnitude, p.scale, p.negative_slope);
    return line;
}

// Largest difference relative to the largest number of the array (1 at least); infinity where only one is finite.
double difference(const Result& found, const Result& expected) {
    double largest = 1, worst = 0;
    const int64_t size = size_of(found.dtype);
    for (int64_t i = 0; i < expected.count; ++i) {
        const double x = get(found.data + i * size, found.dtype), y = get(expected.data + i * size, found.dtype);
        if (std::isfinite(y)) largest = std::max(largest, std::abs(y));
        if (std::isfinite(x) != std::isfinite(y)) return INFINITY;
        if (std::isfinite(x)) worst = std::max(worst, std::abs(x - y));
    }
    return worst / largest;
}

bool identical(const std::vector<Result>& left, const std::vector<Result>& right) {
    for (size_t i = 0; i < left.size(); ++i) {
        const auto bytes = static_cast<size_t>(left[i].count * size_of(left[i].dtype));
        if (bytes != 0 && std::memcmp(left[i].data, right[i].data, bytes) != 0) return false;
    }
    return true;
}

bool agree(const Case& c, const char* target, const std::vector<Result>& found, const std::vector<Result>& expected,
           double largest_score) {
    for (size_t i = 0; i < found.size(); ++i) {
        // Both sides round the result once more; a score's rounding is the weight's relative error.
        const double step = found[i].dtype == Dtype::f64    ? 1e-14
                            : found[i].dtype == Dtype::f32  ? 1e-6
                            : found[i].dtype == Dtype::bf16 ? 8e-3
                                                            : 1e-3;
        const double rounding = c.sum == Dtype::f64 ? 1e-15 : 1e-6;
        const double allowed = 4 * step + 8 * rounding * largest_score, got = difference(found[i], expected[i]);
        if (!(got <= allowed)) {
            std::fprintf(stderr, "%s: %s differs by %g, allowed %g\n", target, found[i].name, got, allowed);
            return false;
        }
    }
    return true;
}

// The largest score that can matter: of the product q . k, or of sum |w|.
double score_bound(const Case& c) {
    const double d = static_cast<double>(c.problem.dim), m = std::max(1.0, c.magnitude);
    return 1 + (c.problem.form == Form::inner ? m * m * std::sqrt(d) * 4 : m * d * 2);
}

bool one_case(uint64_t seed) {
    Random random{std::mt19937_64(seed)};
    Case c(random);
    const auto forward = c.forward(naive::kernels, 1);
    c.set_rows(forward, random);
    const auto backward = c.backward(naive::kernels, 1);
    const double bound = score_bound(c);
    bool good = true;
    for (const Kernels* target : runnable_kernels()) {
        const auto out = c.forward(*target, 1), gradients = c.backward(*target, 1);
        good =
            good && agree(c, target->name, out, forward, bound) && agree(c, target->name, gradients, backward, bound);
        const bool same = identical(c.forward(*target, 3), out) && identical(c.backward(*target, 3), gradients);
        if (!same) std::fprintf(stderr, "%s: other bits with 3 threads than with 1\n", target->name);
        good = good && same;
    }
    if (!good)
        std::fprintf(stderr, "failed: driver 1 %llu: %s\n", static_cast<unsigned long long>(seed), c.text().c_str());
    return good;
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

}  // namespace

int main(int count, char** arguments) {
    const int64_t cases = count > 1 ? std::atoll(arguments[1]) : 300;
    const uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
    int64_t failed = 0;
    for (int64_t i = 0; i < cases; ++i) failed += !one_case(seed + static_cast<uint64_t>(i));
    const bool pool = pool_holds(3000);
    std::printf("%lld cases on", static_cast<long long>(cases));
    for (const Kernels* target : runnable_kernels()) std::printf(" %s", target->name);
    std::printf(": %lld failed; pool %s\n", static_cast<long long>(failed), pool ? "holds" : "fails");
    return failed != 0 || !pool;
}
