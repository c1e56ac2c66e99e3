#include "api/call_plan.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "api/row_finish.h"

namespace attnscore {

namespace {

template <class Byte>
void move(Byte*& pointer, ptrdiff_t by) {
    if (pointer != nullptr) pointer += by;
}
void move(const int64_t*& pointer, ptrdiff_t by) {
    if (pointer != nullptr) pointer = as<int64_t>(reinterpret_cast<const char*>(pointer) + by);
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

struct Release {
    std::atomic<bool>& flag;
    ~Release() { flag.store(false, std::memory_order_release); }
};

}  // namespace

CallPlan::CallPlan(Problem score, const Inputs& in, const ForwardArrays& a)
    : is_backward_(false), problem_(std::move(score)) {
    rows_ = build_forward(problem_, in, a);
    add_inputs(in);
    std::vector<std::vector<Move>> moves{{heads<&Head::out>},           {rows<&RowArrays::row_max>},
                                         {rows<&RowArrays::log_denom>}, {heads<&Head::saved_scores>},
                                         {heads<&Head::matrix>},        {heads<&Head::matrix>}};
    bool has_rows = in.sink.given || a.row_max.given || a.log_denom.given;
    for (size_t i = 0; i < kStatistics; ++i) {
        moves.push_back({[i](Problem&, Rows& all, ptrdiff_t by) {
            for (RowArrays& row : all) move(row.statistics[i], by);
        }});
        has_rows = has_rows || (a.*kForwardArrays[kFirstStatistic + i].array).given;
    }
    add_slots(kForwardArrays, a, std::move(moves));
    // Without row arrays a forward leaves out what is done once for each row.
    if (!has_rows) rows_.clear();
}

CallPlan::CallPlan(Problem score, const Inputs& in, const BackwardArrays& a)
    : is_backward_(true), problem_(std::move(score)) {
    rows_ = build_backward(problem_, in, a);
    add_inputs(in);
    add_slots(kForwardResults, a,
              {{rows<&RowArrays::out>},
               {heads<&Head::row_max>, rows<&RowArrays::row_max>},
               {rows<&RowArrays::log_denom>},
               {heads<&Head::entropy>},
               {heads<&Head::saved_scores>},
               {rows<&RowArrays::attention_weights>},
               {heads<&Head::grad_out>},
               {rows<&RowArrays::grad_log_sum_exp>},
               {heads<&Head::grad_entropy>},
               {heads<&Head::grad_matrix>},
               {heads<&Head::grad_matrix>}});
    problem_.clears_gradients = true;
    const size_t first_gradient = slots_.size();
    add_slots(kGradients, a,
              {{heads<&Head::grad_query>},
               {groups<&Group::grad_key>},
               {groups<&Group::grad_value>},
               {heads<&Head::grad_query_bias>},
               {groups<&Group::grad_key_bias>},
               {bias_groups},
               {groups<&Group::grad_w_v>},
               {rows<&RowArrays::grad_sink>},
               {heads<&Head::grad_scale>}});
    size_t slot = first_gradient;
    for (const auto& field : kGradients) {
        const Array& x = a.*field.array;
        if (!x.given) continue;
        // The kernels clear the gradients of query, key and value, unless there are no keys to visit.
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
              {{heads<&Head::query>},
               {heads<&Head::key>},
               {heads<&Head::value>},
               {heads<&Head::query_bias>},
               {heads<&Head::key_bias>},
               {heads<&Head::bias>},
               {heads<&Head::mask>},
               {heads<&Head::query_ids>},
               {heads<&Head::key_ids>},
               {heads<&Head::start>},
               {heads<&Head::stop>},
               {heads<&Head::w_v>},
               {heads<&Head::sink>, rows<&RowArrays::sink>},
               {heads<&Head::scale>}});
}

void CallPlan::run(const Kernels& kernels, const std::vector<char*>& addresses, uint64_t seed, Threads threads) const {
    if (addresses.size() != slots_.size()) {
        throw std::invalid_argument("addresses: expected " + std::to_string(slots_.size()) + ", got " +
                                    std::to_string(addresses.size()));
    }
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
