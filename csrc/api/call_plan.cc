#include "api/call_plan.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "api/row_finish.h"

namespace attnscore {

namespace {

Extent extent_of(const Array& x) {
    Extent extent{x.data};
    if (element_count(x) == 0) return extent;
    extent.after = x.item;
    for (int i = 0; i < x.ndim; ++i) extent.add_axis(x.shape[i], x.strides[i] * x.item);
    return extent;
}

}  // namespace

size_t place_of_start(const Inputs& in) {
    size_t place = 0;
    for (const auto& field : kInputs) {
        if (field.array == &Inputs::start) break;
        place += (in.*field.array).present;
    }
    return place;
}

void check_count(size_t expected, size_t count) {
    if (count == expected) return;
    throw std::invalid_argument("arrays: expected " + std::to_string(expected) + ", got " + std::to_string(count));
}

CallPlan::CallPlan(Problem score, const Inputs& in, const ForwardArrays& a)
    : is_backward_(false), problem_(std::move(score)) {
    rows_ = build_forward(problem_, in, a);
    add_slots(kInputs, in);
    if (in.start.present && in.start.ndim == 2) {
        intervals_ = {static_cast<ptrdiff_t>(place_of_start(in)), in.start.shape[0], in.start.shape[1]};
    }
    add_slots(kForwardArrays, a);
    bool has_rows = in.sink.present || a.row_max.present || a.log_denom.present;
    for (size_t i = kFirstStatistic; i < std::size(kForwardArrays); ++i) {
        has_rows = has_rows || (a.*kForwardArrays[i].array).present;
    }
    // Nothing to do for each row after the kernels (see run_forward).
    if (!has_rows) rows_.clear();
}

CallPlan::CallPlan(Problem score, const Inputs& in, const BackwardArrays& a)
    : is_backward_(true), problem_(std::move(score)) {
    rows_ = build_backward(problem_, in, a);
    add_slots(kInputs, in);
    add_slots(kForwardResults, a);
    problem_.clears_gradients = true;
    size_t slot = slots_.size();
    add_slots(kGradients, a);
    for (const auto& field : kGradients) {
        const Array& x = a.*field.array;
        if (!x.present) continue;
        // The kernels clear the gradients of query, key and value (Problem::clears_gradients), but return at once where
        // there are no keys.
        const bool is_cleared = field.array == &BackwardArrays::grad_query ||
                                field.array == &BackwardArrays::grad_key || field.array == &BackwardArrays::grad_value;
        slots_[slot++].cleared = is_cleared && problem_.key_len > 0 ? 0 : element_count(x) * x.item;
    }
}

template <class Arrays, size_t N>
void CallPlan::add_slots(const Field<Arrays> (&fields)[N], const Arrays& examples) {
    for (const auto& field : fields) {
        const Array& x = examples.*field.array;
        if (x.present) slots_.push_back({field.name, element_count(x) == 0 ? 0 : x.item, extent_of(x), field.pointers});
    }
}

void CallPlan::check_memory(const Slot& slot, const Extent& array) {
    const auto address = reinterpret_cast<uintptr_t>(array.data);
    const auto error = [&slot](const std::string& text) { throw std::invalid_argument(slot.name + (": " + text)); };
    if (address == 0 || address % static_cast<uintptr_t>(slot.item) != 0) {
        error("expected an address at a multiple of " + std::to_string(slot.item) + " bytes, got " +
              std::to_string(address));
    }
    if (array.before < slot.example.before || array.after < slot.example.after) {
        const auto bytes = [](const Extent& x) { return std::to_string(x.before + x.after) + " bytes of memory"; };
        error("expected an array like the example of the plan, " + bytes(slot.example) + ", got " + bytes(array));
    }
}

void CallPlan::run(const Kernels& kernels, const std::vector<Extent>& arrays, uint64_t seed, Threads threads) const {
    check_count(slots_.size(), arrays.size());
    for (size_t i = 0; i < slots_.size(); ++i)
        if (slots_[i].item != 0) check_memory(slots_[i], arrays[i]);
    working_.use([&](std::optional<Working>& working) {
        if (!working) working = make_working();
        run_on(*working, kernels, arrays, seed, threads);
    });
}

CallPlan::Working CallPlan::make_working() const {
    Working working{problem_, rows_, {}};
    for (const Slot& slot : slots_) working.addresses.push_back(slot.example.data);
    return working;
}

void CallPlan::run_on(Working& working, const Kernels& kernels, const std::vector<Extent>& arrays, uint64_t seed,
                      Threads threads) const {
    for (size_t i = 0; i < slots_.size(); ++i) {
        const char*& current = working.addresses[i];
        if (slots_[i].item == 0 || current == arrays[i].data) continue;
        for (const Pointer& pointer : slots_[i].pointers) {
            if (pointer.move != nullptr) pointer.move(working.problem, working.rows, arrays[i].data - current);
        }
        current = arrays[i].data;
    }
    for (size_t i = 0; i < slots_.size(); ++i)
        if (slots_[i].cleared > 0) std::memset(arrays[i].data, 0, static_cast<size_t>(slots_[i].cleared));
    working.problem.seed = seed;
    if (working.problem.heads.empty()) return;
    (is_backward_ ? run_backward : run_forward)(kernels, working.problem, working.rows, threads);
}

}  // namespace attnscore
