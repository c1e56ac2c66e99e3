// Predicts how calls scale on more threads than the machine has: runs the tasks of a call one by one, times each, and
// lays them out on 16, 32 and 64 threads in the order in which the pool gives them out. Efficiency is the time of all
// work shared evenly over that makespan. What it leaves out: memory bandwidth, caches that threads share, waking them.
//
//     makespan [dot|additive heads length dim [repeats]]
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <queue>
#include <random>
#include <string>

#include "runtime/attention.h"

namespace {

using attnscore::Threads;

// Of the CPU time of the process, which has one thread: other work on the machine adds nothing to it.
double now() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

// The tasks that a call hands to the pool at once.
struct Region {
    int threads;  // that the call allows
    std::vector<double> seconds;
};
std::vector<Region> regions;

}  // namespace

namespace attnscore {

// In place of the pool's.
void parallel(int64_t count, void (*f)(int64_t task, void* context), void* context, Threads threads) {
    Region region{threads.count, {}};
    for (int64_t task = 0; task < count; ++task) {
        const double start = now();
        f(task, context);
        region.seconds.push_back(now() - start);
    }
    regions.push_back(std::move(region));
}

}  // namespace attnscore

namespace {

using namespace attnscore;

struct Measured {
    std::vector<Region> regions;
    double serial = 1e30;  // outside of all regions
};

// The fastest of several runs, of each task.
Measured measure(const std::function<void()>& call, int repeats) {
    Measured best;
    for (int i = 0; i < repeats; ++i) {
        regions.clear();
        const double start = now();
        call();
        double serial = now() - start;
        for (const Region& region : regions)
            for (const double each : region.seconds) serial -= each;
        best.serial = std::min(best.serial, std::max(serial, 0.0));
        if (best.regions.empty()) best.regions = regions;
        for (size_t r = 0; r < regions.size(); ++r)
            for (size_t t = 0; t < regions[r].seconds.size(); ++t)
                best.regions[r].seconds[t] = std::min(best.regions[r].seconds[t], regions[r].seconds[t]);
    }
    return best;
}

// Each task goes to the thread that is free first.
double makespan(const Region& region, int threads) {
    std::priority_queue<double, std::vector<double>, std::greater<>> free;
    for (int i = 0; i < std::min(threads, region.threads); ++i) free.push(0);
    double last = 0;
    for (const double each : region.seconds) {
        const double end = free.top() + each;
        free.pop();
        free.push(end);
        last = std::max(last, end);
    }
    return last;
}

void report(const char* what, const Measured& measured) {
    double work = measured.serial;
    size_t tasks = 0, steps = 0;
    for (const Region& region : measured.regions) {
        for (const double each : region.seconds) work += each;
        tasks += region.seconds.size();
        steps += !region.seconds.empty();
    }
    std::printf("  %-9s %7.1f ms, %zu tasks in %zu steps, serial %.2f%%; efficiency", what, work * 1e3, tasks, steps,
                100 * measured.serial / work);
    for (const int threads : {16, 32, 64}) {
        double total = measured.serial;
        for (const Region& region : measured.regions) total += makespan(region, threads);
        std::printf(" %d: %.0f%%", threads, 100 * work / threads / total);
    }
    std::printf("\n");
    std::fflush(stdout);
}

struct Buffers {
    std::vector<std::vector<float>> all;
    std::mt19937 random{0};

    char* make(int64_t count, bool drawn) {
        std::normal_distribution<float> normal;
        std::vector<float> x(count);
        if (drawn)
            for (float& each : x) each = normal(random);
        all.push_back(std::move(x));
        return reinterpret_cast<char*>(all.back().data());
    }
    Matrix matrix(int64_t rows, int64_t cols) { return {make(rows * cols, true), cols, 1}; }
};

void run(const Kernels& kernels, bool is_additive, int64_t heads, int64_t length, int64_t dim, int repeats) {
    Buffers buffers;
    Problem p;
    p.form = is_additive ? Form::additive : Form::inner;
    p.scale = is_additive ? 1 : 1 / std::sqrt(static_cast<double>(dim));
    p.query_len = p.key_len = length;
    p.dim = p.value_dim = dim;
    p.clears_gradients = true;
    p.heads.resize(heads);
    p.groups.resize(heads);
    char* w_v = buffers.make(dim, true);
    for (int64_t h = 0; h < heads; ++h) {
        Head& head = p.heads[h];
        head.query = buffers.matrix(length, dim);
        head.key = buffers.matrix(length, dim);
        head.value = buffers.matrix(length, dim);
        head.grad_out = buffers.matrix(length, dim);
        head.index = h;
        head.w_v = is_additive ? w_v : nullptr;
        head.out = buffers.make(length * dim, false);
        head.row_stats = buffers.make(length * kRowStats, false);
        head.delta = buffers.make(length, true);
        head.grad_query = buffers.make(length * dim, false);
        Group& group = p.groups[h];
        group.heads = {h};
        group.grad_key = buffers.make(length * dim, false);
        group.grad_value = buffers.make(length * dim, false);
        group.grad_w_v = is_additive ? buffers.make(dim, false) : nullptr;
    }
    std::printf("%s (1,%lld,%lld,%lld), %s\n", is_additive ? "additive" : "dot", static_cast<long long>(heads),
                static_cast<long long>(length), static_cast<long long>(dim), kernels.name);
    report("forward", measure([&] { kernels.forward(p, Threads(1 << 20)); }, repeats));
    for (Head& head : p.heads) {
        char *row_max = buffers.make(length, false), *log_denom = buffers.make(length, false);
        for (int64_t i = 0; i < length; ++i) {
            as<float>(row_max)[i] = as<float>(head.row_stats)[kStatMax * length + i];
            as<float>(log_denom)[i] = std::log(as<float>(head.row_stats)[kStatDenom * length + i]);
        }
        head.row_max = row_max, head.log_denom = log_denom;
    }
    report("backward", measure([&] { kernels.backward(p, Threads(1 << 20)); }, repeats));
}

}  // namespace

int main(int argc, char** argv) {
    const Kernels& kernels = *runnable_kernels().front();
    if (argc >= 5) {
        run(kernels, std::string(argv[1]) == "additive", std::atoll(argv[2]), std::atoll(argv[3]), std::atoll(argv[4]),
            argc > 5 ? std::atoi(argv[5]) : 3);
        return 0;
    }
    for (const bool is_additive : {false, true})
        for (const auto& [heads, length] : {std::pair<int64_t, int64_t>{16, 4096}, {1, 4096}, {2, 8192}})
            run(kernels, is_additive, heads, length, 64, 3);
}
