#include "api/call_plan.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "api/row_finish.h"

namespace attnscore {

namespace {

// Copy whole numbers in C order, and let the array be the copy.
std::vector<int64_t> copied(Array& a) {
    std::vector<int64_t> own;
    if (!a.given) return own;
    check_contiguous(a);
    int64_t count = 1;
    for (int i = 0; i < a.ndim; ++i) count *= a.shape[i];
    const auto* first = reinterpret_cast<const int64_t*>(a.data);
    own.assign(first, first + count);
    a.data = reinterpret_cast<char*>(own.data());
    return own;
}

template <class Byte>
void move(Byte*& pointer, ptrdiff_t by) {
    if (pointer != nullptr) pointer += by;
}
void move(Matrix& matrix, ptrdiff_t by) { move(matrix.data, by); }

template <auto Field>
void heads(Problem& p, std::vector<RowArrays>&, ptrdiff_t by) {
    for (Head& head : p.heads) move(head.*Field, by);
}
template <auto Field>
void groups(Problem& p, std::vector<RowArrays>&, ptrdiff_t by) {
    for (Group& group : p.groups) move(group.*Field, by);
}
template <auto Field>
void rows(Problem&, std::vector<RowArrays>& all, ptrdiff_t by) {
    for (RowArrays& row : all) move(row.*Field, by);
}
void bias_groups(Problem& p, std::vector<RowArrays>&, ptrdiff_t by) {
    for (BiasGroup& group : p.bias_groups) move(group.grad_bias, by);
}

// A bad address must not end in a bad read.
void check_address(const char* name, const char* memory, int64_t item) {
    const auto address = reinterpret_cast<uintptr_t>(memory);
    if (address != 0 && address % static_cast<uintptr_t>(item) == 0) return;
    throw std::invalid_argument(std::string(name) + ": expected an address at a multiple of " + std::to_string(item) +
                                " bytes, got " + std::to_string(address));
}

}  // namespace

CallPlan::CallPlan(Problem score, const Inputs& in, const ForwardArrays& a)
    : is_backward_(false),
      finishes_rows_(in.sink.given || a.row_max.given || a.log_denom.given),
      problem_(std::move(score)) {
    const Inputs inputs = with_own_intervals(in);
    rows_ = build_forward(problem_, inputs, a);
    add_inputs(inputs);
    add(a.out, {heads<&Head::out>});
    add(a.row_max, {rows<&RowArrays::row_max>});
    add(a.log_denom, {rows<&RowArrays::log_denom>});
    add(a.saved_scores, {heads<&Head::saved_scores>});
    add(a.attention_scores, {heads<&Head::matrix>});
    add(a.attention_weights, {heads<&Head::matrix>});
    for (int i = 0; i < kStatistics; ++i) {
        add(a.statistics[i], {[i](Problem&, Rows& all, ptrdiff_t by) {
                for (RowArrays& row : all) move(row.statistics[i], by);
            }});
        finishes_rows_ = finishes_rows_ || a.statistics[i].given;
    }
}

CallPlan::CallPlan(Problem score, const Inputs& in, const BackwardArrays& a)
    : is_backward_(true), finishes_rows_(true), problem_(std::move(score)) {
    const Inputs inputs = with_own_intervals(in);
    rows_ = build_backward(problem_, inputs, a);
    add_inputs(inputs);
    add(a.out, {rows<&RowArrays::out>});
    add(a.row_max, {heads<&Head::row_max>, rows<&RowArrays::row_max>});
    add(a.log_denom, {rows<&RowArrays::log_denom>});
    add(a.entropy, {heads<&Head::entropy>});
    add(a.saved_scores, {heads<&Head::saved_scores>});
    add(a.attention_weights, {rows<&RowArrays::attention_weights>});
    add(a.grad_out, {heads<&Head::grad_out>});
    add(a.grad_log_sum_exp, {rows<&RowArrays::grad_log_sum_exp>});
    add(a.grad_entropy, {heads<&Head::grad_entropy>});
    add(a.grad_attention_scores, {heads<&Head::grad_matrix>});
    add(a.grad_attention_weights, {heads<&Head::grad_matrix>});
    add(a.query, {heads<&Head::grad_query>});
    add(a.key, {groups<&Group::grad_key>});
    add(a.value, {groups<&Group::grad_value>});
    add(a.query_bias, {heads<&Head::grad_query_bias>});
    add(a.key_bias, {groups<&Group::grad_key_bias>});
    add(a.bias, {bias_groups});
    add(a.weights, {groups<&Group::grad_weights>});
    add(a.sink, {rows<&RowArrays::grad_sink>});
    add(a.scales, {heads<&Head::grad_scale>});
}

Inputs CallPlan::with_own_intervals(Inputs in) {
    start_ = copied(in.start);
    stop_ = copied(in.stop);
    return in;
}

void CallPlan::add(const Array& example, std::vector<Move> moves) {
    if (!example.given) return;
    slots_.push_back({example.name, is_empty(example) ? 0 : example.item, example.data, std::move(moves)});
}

void CallPlan::add_inputs(const Inputs& in) {
    add(in.query, {heads<&Head::query>});
    add(in.key, {heads<&Head::key>});
    add(in.value, {heads<&Head::value>});
    add(in.query_bias, {heads<&Head::query_bias>});
    add(in.key_bias, {heads<&Head::key_bias>});
    add(in.bias, {heads<&Head::bias>});
    add(in.mask, {heads<&Head::mask>});
    add(in.query_ids, {heads<&Head::query_ids>});
    add(in.key_ids, {heads<&Head::key_ids>});
    add(in.weights, {heads<&Head::weights>});
    add(in.sink, {heads<&Head::sink>, rows<&RowArrays::sink>});
    add(in.scales, {heads<&Head::scale>});
}

void CallPlan::run(const Kernels& kernels, const std::vector<char*>& addresses, uint64_t seed, int threads) const {
    if (addresses.size() != slots_.size()) {
        throw std::invalid_argument("addresses: expected " + std::to_string(slots_.size()) + ", got " +
                                    std::to_string(addresses.size()));
    }
    // Copies: several threads may be in here at once.
    Problem p = problem_;
    Rows all = rows_;
    p.seed = seed;
    for (size_t i = 0; i < slots_.size(); ++i) {
        const Slot& slot = slots_[i];
        if (slot.item == 0) continue;
        check_address(slot.name, addresses[i], slot.item);
        for (const Move& move : slot.moves) move(p, all, addresses[i] - slot.origin);
    }
    if (p.heads.empty()) return;
    if (is_backward_) {
        const BackwardRowPrepare prepared(p, all, threads);
        kernels.backward(p, threads);
        set_sink_gradients(p, all);
        return;
    }
    // The kernels write the numbers of each row even if they are not finished.
    const ForwardRowFinish numbers(p, all);
    kernels.forward(p, threads);
    if (finishes_rows_) numbers.finish(threads);
}

}  // namespace attnscore
