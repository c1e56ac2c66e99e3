// A call whose arrays were checked once, for other memory of the same shapes and strides. A tiny call spends more on
// these checks than on its products.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "api/array.h"
#include "api/validate.h"
#include "runtime/attention.h"

namespace attnscore {

class CallPlan {
   public:
    // `score` holds form, numbers and dtypes. The arrays are examples: none is kept, and only the numbers of intervals
    // are read, to check them.
    CallPlan(Problem score, const Inputs& in, const ForwardArrays& arrays);
    CallPlan(Problem score, const Inputs& in, const BackwardArrays& arrays);

    // `addresses`: of the arrays that were given, in the order of their structs.
    void run(const Kernels& kernels, const std::vector<char*>& addresses, uint64_t seed, Threads threads) const;

   private:
    using Rows = std::vector<RowArrays>;
    using Move = std::function<void(Problem&, Rows&, ptrdiff_t)>;

    // An array, and how the pointers into it move when its memory does.
    struct Slot {
        const char* name;
        int64_t item;        // bytes of an element; 0 of an empty array, of which nothing is reached
        const char* origin;  // of the example
        std::vector<Move> moves;
        int64_t cleared = 0;  // bytes to clear before a run
    };

    // `moves`: of each array of `fields`, in their order.
    template <class Arrays, size_t N>
    void add_slots(const Field<Arrays> (&fields)[N], const Arrays& examples, std::vector<std::vector<Move>> moves);
    void add_inputs(const Inputs& in);

    // The problem of a run, with pointers into the arrays at these addresses.
    struct Working {
        Problem problem;
        Rows rows;
        std::vector<const char*> addresses;
    };
    Working make_working() const;
    void run_on(Working& working, const Kernels& kernels, const std::vector<char*>& addresses, uint64_t seed,
                Threads threads) const;

    bool is_backward_;
    std::vector<Slot> slots_;
    Problem problem_;
    Rows rows_;
    // Kept between runs, which then change the pointers alone; a second run at once makes its own.
    mutable std::optional<Working> working_;
    mutable std::atomic<bool> is_busy_{false};
};

}  // namespace attnscore
