#include "api/call_plan.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "api/row_finish.h"

namespace attnscore {

namespace {

// Add `by` bytes to a pointer into an array.
template <class Byte>
void move(Byte*& pointer, ptrdiff_t by) {
    if (pointer != nullptr) pointer += by;
}
void move(const int64_t*& pointer, ptrdiff_t by) {
    if (pointer != nullptr) pointer = as<int64_t>(reinterpret_cast<const char*>(pointer) + by);
}
void move(Matrix& matrix, ptrdiff_t by) { move(matrix.data, by); }

// Moves (`CallPlan::Move`): the memory of an array has moved, and so does one field of all heads, groups or rows.
template <auto Field>
void move_heads(Problem& p, std::vector<RowArrays>&, ptrdiff_t by) {
    for (Head& head : p.heads) move(head.*Field, by);
}
template <auto Field>
void move_groups(Problem& p, std::vector<RowArrays>&, ptrdiff_t by) {
    for (Group& group : p.groups) move(group.*Field, by);
}
template <auto Field>
void move_rows(Problem&, std::vector<RowArrays>& all, ptrdiff_t by) {
    for (RowArrays& row : all) move(row.*Field, by);
}
void move_bias_groups(Problem& p, std::vector<RowArrays>&, ptrdiff_t by) {
    for (BiasGroup& group : p.bias_groups) move(group.grad_bias, by);
}

// Throw where an address cannot be one of an array: null, or misaligned.
void check_address(const char* name, const char* memory, int64_t item) {
    const auto address = reinterpret_cast<uintptr_t>(memory);
    if (address != 0 && address % static_cast<uintptr_t>(item) == 0) return;
    throw std::invalid_argument(std::string(name) + ": expected an address at a multiple of " + std::to_string(item) +
                                " bytes, got " + std::to_string(address));
}

struct Release {
    std::atomic<bool>& flag;
    ~Release() { flag.store(false, std::memory_order_release); }
};

}  // namespace

CallPlan::CallPlan(Problem score, const Inputs& in, const ForwardArrays& a)
    : is_backward_(false), problem_(std::move(score)) {
    rows_ = build_forward(problem_, in, a);
    add_inputs(in);
    std::vector<std::vector<Move>> moves{{move_heads<&Head::out>},           {move_rows<&RowArrays::row_max>},
                                         {move_rows<&RowArrays::log_denom>}, {move_heads<&Head::saved_scores>},
                                         {move_heads<&Head::matrix>},        {move_heads<&Head::matrix>}};
    bool has_rows = in.sink.given || a.row_max.given || a.log_denom.given;
    for (size_t i = 0; i < kStatistics; ++i) {
        moves.push_back({[i](Problem&, Rows& all, ptrdiff_t by) {
            for (RowArrays& row : all) move(row.statistics[i], by);
        }});
        has_rows = has_rows || (a.*kForwardArrays[kFirstStatistic + i].array).given;
    }
    add_slots(kForwardArrays, a, std::move(moves));
    // Nothing to do for each row after the kernels (see run_forward).
    if (!has_rows) rows_.clear();
}

CallPlan::CallPlan(Problem score, const Inputs& in, const BackwardArrays& a)
    : is_backward_(true), problem_(std::move(score)) {
    rows_ = build_backward(problem_, in, a);
    add_inputs(in);
    add_slots(kForwardResults, a,
              {{move_rows<&RowArrays::out>},
               {move_heads<&Head::row_max>, move_rows<&RowArrays::row_max>},
               {move_rows<&RowArrays::log_denom>},
               {move_heads<&Head::entropy>},
               {move_heads<&Head::saved_scores>},
               {move_rows<&RowArrays::attention_weights>},
               {move_heads<&Head::grad_out>},
               {move_rows<&RowArrays::grad_log_sum_exp>},
               {move_heads<&Head::grad_entropy>},
               {move_heads<&Head::grad_matrix>},
               {move_heads<&Head::grad_matrix>}});
    problem_.clears_gradients = true;
    const size_t first_gradient = slots_.size();
    add_slots(kGradients, a,
              {{move_heads<&Head::grad_query>},
               {move_groups<&Group::grad_key>},
               {move_groups<&Group::grad_value>},
               {move_heads<&Head::grad_query_bias>},
               {move_groups<&Group::grad_key_bias>},
               {move_bias_groups},
               {move_groups<&Group::grad_w_v>},
               {move_rows<&RowArrays::grad_sink>},
               {move_heads<&Head::grad_scale>}});
    size_t slot = first_gradient;
    for (const auto& field : kGradients) {
        const Array& x = a.*field.array;
        if (!x.given) continue;
        // The kernels clear the gradients of query, key and value (Problem::clears_gradients), but return at once where
        // there are no keys.
        const bool is_cleared = field.array == &BackwardArrays::grad_query ||
                                field.array == &BackwardArrays::grad_key || field.array == &BackwardArrays::grad_value;
        int64_t bytes = x.item;
        for (int i = 0; i < x.ndim; ++i) bytes *= x.shape[i];
        slots_[slot++].cleared = is_cleared && problem_.key_len > 0 ? 0 : bytes;
    }
}

template <class Arrays, size_t N>
void CallPlan::add_slots(const Field<Arrays> (&fields)[N], const Arrays& examples,
                         std::vector<std::vector<Move>> moves) {
    for (size_t i = 0; i < N; ++i) {
        const Array& x = examples.*fields[i].array;
        if (!x.given) continue;
        slots_.push_back({fields[i].name, is_empty(x) ? 0 : x.item, x.data, std::move(moves[i])});
    }
}

void CallPlan::add_inputs(const Inputs& in) {
    add_slots(kInputs, in,
              {{move_heads<&Head::query>},
               {move_heads<&Head::key>},
               {move_heads<&Head::value>},
               {move_heads<&Head::query_bias>},
               {move_heads<&Head::key_bias>},
               {move_heads<&Head::bias>},
               {move_heads<&Head::mask>},
               {move_heads<&Head::query_ids>},
               {move_heads<&Head::key_ids>},
               {move_heads<&Head::start>},
               {move_heads<&Head::stop>},
               {move_heads<&Head::w_v>},
               {move_heads<&Head::sink>, move_rows<&RowArrays::sink>},
               {move_heads<&Head::scale>}});
}

void CallPlan::run(const Kernels& kernels, const std::vector<char*>& addresses, uint64_t seed, Threads threads) const {
    if (addresses.size() != slots_.size()) {
        throw std::invalid_argument("addresses: expected " + std::to_string(slots_.size()) + ", got " +
                                    std::to_string(addresses.size()));
    }
    // Another thread is running this plan: use a working copy of its own.
    if (is_busy_.exchange(true, std::memory_order_acquire)) {
        Working own = make_working();
        run_on(own, kernels, addresses, seed, threads);
        return;
    }
    const Release release{is_busy_};
    if (!working_) working_ = make_working();
    run_on(*working_, kernels, addresses, seed, threads);
}

CallPlan::Working CallPlan::make_working() const {
    Working working{problem_, rows_, {}};
    for (const Slot& slot : slots_) working.addresses.push_back(slot.origin);
    return working;
}

void CallPlan::run_on(Working& working, const Kernels& kernels, const std::vector<char*>& addresses, uint64_t seed,
                      Threads threads) const {
    for (size_t i = 0; i < slots_.size(); ++i)
        if (slots_[i].item != 0) check_address(slots_[i].name, addresses[i], slots_[i].item);
    for (size_t i = 0; i < slots_.size(); ++i) {
        const char*& current = working.addresses[i];
        if (slots_[i].item == 0 || current == addresses[i]) continue;
        for (const Move& move : slots_[i].moves) move(working.problem, working.rows, addresses[i] - current);
        current = addresses[i];
    }
    for (size_t i = 0; i < slots_.size(); ++i)
        if (slots_[i].cleared > 0) std::memset(addresses[i], 0, static_cast<size_t>(slots_[i].cleared));
    working.problem.seed = seed;
    if (working.problem.heads.empty()) return;
    (is_backward_ ? run_backward : run_forward)(kernels, working.problem, working.rows, threads);
}

}  // namespace attnscore
