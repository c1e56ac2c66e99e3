#include "plain.h"

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "border.h"

namespace attnscore {

namespace {

// Whole numbers in C order, from now on in memory of our own.
std::vector<int64_t> copied(Array& a) {
    std::vector<int64_t> own;
    if (!a.given) return own;
    int64_t count = 1;
    for (int i = 0; i < a.ndim; ++i) count *= a.shape[i];
    const auto* first = reinterpret_cast<const int64_t*>(a.data);
    own.assign(first, first + count);
    a.data = reinterpret_cast<char*>(own.data());
    return own;
}

}  // namespace

Plain::Plain(Problem score, const std::array<Array, kArrays>& examples, Array start, Array stop)
    : items_{}, problem_(std::move(score)) {
    for (const Array* a : {&start, &stop}) {
        if (a->given) check_contiguous(*a);
    }
    start_ = copied(start);
    stop_ = copied(stop);
    Inputs in{};
    in.start = start;
    in.stop = stop;
    in.query = examples[0];
    in.key = examples[1];
    in.value = examples[2];
    in.weights = examples[4];
    ForwardArrays filled{};
    filled.out = examples[3];
    set_forward(problem_, in, filled);
    for (size_t i = 0; i < examples.size(); ++i) {
        items_[i] = !examples[i].given || is_empty(examples[i]) ? 0 : examples[i].item;
    }
    const auto from = [&](const char* at, size_t i) { return items_[i] == 0 ? 0 : at - examples[i].data; };
    for (Head& head : problem_.heads) {
        places_.push_back({from(head.query.data, 0), from(head.key.data, 1), from(head.value.data, 2),
                           from(head.out, 3), from(head.weights, 4)});
        head.query.data = head.key.data = head.value.data = head.out = nullptr;
        head.weights = nullptr;
    }
}

void Plain::run(const Kernels& kernels, const Addresses& memory, int threads) const {
    constexpr const char* names[] = {"query", "key", "value", "out", "weights"};
    for (size_t i = 0; i < memory.size(); ++i) {
        const auto address = reinterpret_cast<uintptr_t>(memory[i]);
        if (items_[i] != 0 && (address == 0 || address % static_cast<uintptr_t>(items_[i]) != 0)) {
            throw std::invalid_argument(std::string(names[i]) + ": expected an address at a multiple of " +
                                        std::to_string(items_[i]) + " bytes, got " + std::to_string(address));
        }
    }
    if (problem_.heads.empty()) return;
    // A copy: several threads may be in here at once.
    Problem p = problem_;
    const auto rows = static_cast<size_t>(p.query_len * kNumbers * size_of(sum_dtype(p)));
    // The kernels write what they know of each row; nobody reads it.
    const auto numbers = std::make_unique_for_overwrite<char[]>(rows * p.heads.size());
    const auto at = [&](size_t h, size_t i) { return items_[i] == 0 ? nullptr : memory[i] + places_[h][i]; };
    for (size_t h = 0; h < p.heads.size(); ++h) {
        Head& head = p.heads[h];
        head.query.data = at(h, 0);
        head.key.data = at(h, 1);
        head.value.data = at(h, 2);
        head.out = at(h, 3);
        head.weights = at(h, 4);
        head.numbers = numbers.get() + h * rows;
    }
    kernels.forward(p, threads);
}

}  // namespace attnscore
