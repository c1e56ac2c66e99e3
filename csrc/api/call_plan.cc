#include "api/call_plan.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "api/row_finish.h"
#include "api/validate.h"

namespace attnscore {

namespace {

// Whole numbers in C order, from now on in memory of our own.
std::vector<int64_t> copy_integers(Array& a) {
    std::vector<int64_t> own;
    if (!a.given) return own;
    int64_t count = 1;
    for (int i = 0; i < a.ndim; ++i) count *= a.shape[i];
    const auto* first = reinterpret_cast<const int64_t*>(a.data);
    own.assign(first, first + count);
    a.data = reinterpret_cast<char*>(own.data());
    return own;
}

// `item`: bytes of an element; 0 where there is none to be reached.
void check_address(const char* name, const char* memory, int64_t item) {
    const auto address = reinterpret_cast<uintptr_t>(memory);
    if (item == 0 || (address != 0 && address % static_cast<uintptr_t>(item) == 0)) return;
    throw std::invalid_argument(std::string(name) + ": expected an address at a multiple of " + std::to_string(item) +
                                " bytes, got " + std::to_string(address));
}

}  // namespace

CallPlan::CallPlan(Problem score, const std::array<Array, kArrays>& examples, Array start, Array stop)
    : items_{}, problem_(std::move(score)) {
    for (const Array* a : {&start, &stop}) {
        if (a->given) check_contiguous(*a);
    }
    start_ = copy_integers(start);
    stop_ = copy_integers(stop);
    Inputs in{};
    in.start = start;
    in.stop = stop;
    in.query = examples[0];
    in.key = examples[1];
    in.value = examples[2];
    in.weights = examples[4];
    ForwardArrays filled{};
    filled.out = examples[3];
    build_forward(problem_, in, filled);
    for (size_t i = 0; i < examples.size(); ++i) {
        items_[i] = !examples[i].given || is_empty(examples[i]) ? 0 : examples[i].item;
    }
    const auto from = [&](const char* at, size_t i) { return items_[i] == 0 ? 0 : at - examples[i].data; };
    for (Head& head : problem_.heads) {
        offsets_.push_back({from(head.query.data, 0), from(head.key.data, 1), from(head.value.data, 2),
                            from(head.out, 3), from(head.weights, 4)});
        head.query.data = head.key.data = head.value.data = head.out = nullptr;
        head.weights = nullptr;
    }
}

// Addresses are checked: a bad one must not end in a bad read.
Problem CallPlan::bind(const Addresses& memory, char* scores) const {
    constexpr const char* names[] = {"query", "key", "value", "out", "weights"};
    for (size_t i = 0; i < memory.size(); ++i) {
        if (items_[i] != 0) check_address(names[i], memory[i], items_[i]);
    }
    // A copy: several threads may be in here at once.
    Problem p = problem_;
    const int64_t item = size_of(sum_dtype(p));
    if (scores != nullptr) check_address("scores", scores, item);
    const auto at = [&](size_t h, size_t i) { return items_[i] == 0 ? nullptr : memory[i] + offsets_[h][i]; };
    for (size_t h = 0; h < p.heads.size(); ++h) {
        Head& head = p.heads[h];
        head.query.data = at(h, 0);
        head.key.data = at(h, 1);
        head.value.data = at(h, 2);
        head.out = at(h, 3);
        head.weights = at(h, 4);
        if (scores != nullptr) head.saved_scores = scores + static_cast<int64_t>(h) * p.query_len * p.key_len * item;
    }
    return p;
}

std::vector<RowArrays> CallPlan::bind_rows(const Problem& p, char* rows) const {
    const int64_t item = size_of(sum_dtype(p)), column = p.query_len * item;
    check_address("rows", rows, item);
    std::vector<RowArrays> found(p.heads.size());
    for (size_t h = 0; h < found.size(); ++h) {
        found[h].row_max = rows + static_cast<int64_t>(h) * column;
        found[h].log_denom = rows + static_cast<int64_t>(found.size() + h) * column;
    }
    return found;
}

void CallPlan::run(const Kernels& kernels, const Addresses& memory, const Saved& saved, int threads) const {
    Problem p = bind(memory, saved.scores);
    if (p.heads.empty() || p.query_len == 0) return;
    if (saved.attention_weights != nullptr) {
        const int64_t item = size_of(sum_dtype(p)), pairs = p.query_len * p.key_len;
        if (pairs > 0) check_address("attention_weights", saved.attention_weights, item);
        p.matrix = MatrixOutput::weights;
        for (size_t h = 0; h < p.heads.size(); ++h)
            p.heads[h].matrix = saved.attention_weights + static_cast<int64_t>(h) * pairs * item;
    }
    const std::vector<RowArrays> rows = saved.rows == nullptr ? std::vector<RowArrays>() : bind_rows(p, saved.rows);
    // The kernels write what they know of each row, whether anybody reads it or not.
    const ForwardRowFinish numbers(p, rows);
    kernels.forward(p, threads);
    if (saved.rows != nullptr) numbers.finish(threads);
}

void CallPlan::backward(const Kernels& kernels, const Addresses& memory, const Saved& saved, const Gradients& gradients,
                        int threads) const {
    Problem p = bind(memory, saved.scores);
    if (p.heads.empty() || p.query_len == 0) return;
    const int64_t item = size_of(sum_dtype(p)), stored = size_of(p.value_dtype);
    std::vector<RowArrays> rows = bind_rows(p, saved.rows);
    check_address("grad_out", gradients.grad_out, p.value_dim == 0 ? 0 : stored);
    check_address("grad_query", gradients.query, p.dim == 0 ? 0 : item);
    check_address("grad_key", gradients.key, p.key_len * p.dim == 0 ? 0 : item);
    check_address("grad_value", gradients.value, p.key_len * p.value_dim == 0 ? 0 : item);
    if (p.form == Form::additive) check_address("grad_weights", gradients.weights, p.dim == 0 ? 0 : item);
    if (gradients.grad_attention_weights != nullptr) {
        p.matrix = MatrixOutput::weights;
        check_address("attention_weights", saved.attention_weights, p.key_len == 0 ? 0 : item);
        check_address("grad_attention_weights", gradients.grad_attention_weights, p.key_len == 0 ? 0 : item);
    }
    p.grad_dtype = p.value_dtype;
    for (size_t h = 0; h < p.heads.size(); ++h) {
        Head& head = p.heads[h];
        const int64_t row = static_cast<int64_t>(h) * p.query_len;
        if (p.matrix == MatrixOutput::weights) {
            rows[h].attention_weights = saved.attention_weights + row * p.key_len * item;
            head.grad_matrix = {gradients.grad_attention_weights + row * p.key_len * item, p.key_len, 1};
        }
        head.row_max = rows[h].row_max;
        head.grad_query = gradients.query + row * p.dim * item;
        head.grad_out = {gradients.grad_out + row * p.value_dim * stored, p.value_dim, 1};
        rows[h].out = {head.out, p.value_dim, 1};
    }
    for (size_t g = 0; g < p.groups.size(); ++g) {
        Group& group = p.groups[g];
        const int64_t key = static_cast<int64_t>(g) * p.key_len;
        group.grad_key = gradients.key + key * p.dim * item;
        group.grad_value = gradients.value + key * p.value_dim * item;
        if (p.form == Form::additive) group.grad_weights = gradients.weights + static_cast<int64_t>(g) * p.dim * item;
    }
    const BackwardRowPrepare numbers(p, rows, threads);
    kernels.backward(p, threads);
}

}  // namespace attnscore
