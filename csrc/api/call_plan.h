// A call whose arrays are checked once, and which then runs on other arrays of the same shapes and strides, of which
// only the memory is checked. All checks take longer than the products of a tiny call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "api/array.h"
#include "api/validate.h"
#include "runtime/attention.h"

namespace attnscore {

// The memory of an array of a run: the address of its first element, and how many bytes in front of it (of an axis with
// a negative stride) and from it on belong to the array.
struct Extent {
    char* data = nullptr;
    int64_t before = 0, after = 0;

    // Extend to the elements of an axis; `stride` in bytes.
    void add_axis(int64_t length, int64_t stride) {
        (stride < 0 ? before : after) += (length - 1) * (stride < 0 ? -stride : stride);
    }
};

// Where `start`, if present, is among the arrays of a run: how many inputs are in front of it.
size_t place_of_start(const Inputs& in);
// Throws std::invalid_argument unless a run gets all arrays of its plan.
void check_count(size_t expected, size_t count);

// A state that the runs of a plan keep for the next one. A run that begins while another one uses it gets a new state,
// for itself alone, so that none waits.
template <class State>
class KeptState {
   public:
    template <class F>
    void use(const F& f) {
        if (const std::unique_lock lock(mutex_, std::try_to_lock); lock) return f(state_);
        State fresh;
        f(fresh);
    }

   private:
    State state_;
    std::mutex mutex_;  // held while a run uses the state
};

class CallPlan {
   public:
    // `score` holds form, parameters and dtypes. The arrays are examples: none is kept, and no entries are read, except
    // to check start and stop.
    CallPlan(Problem score, const Inputs& in, const ForwardArrays& arrays);
    CallPlan(Problem score, const Inputs& in, const BackwardArrays& arrays);

    // `arrays`: all that are present, in the order of their structs. Throws std::invalid_argument where an array is
    // misaligned or has less memory than the example, so that no run reads or writes outside of its arrays.
    void run(const Kernels& kernels, const std::vector<Extent>& arrays, uint64_t seed, Threads threads) const;

    // Where a run finds its intervals: `start` is number `index` of the arrays of a run, `stop` the next one, both
    // (rows, cols) in C order. The index is negative where there are none, or where they have holes.
    struct Intervals {
        ptrdiff_t index = -1;
        int64_t rows = 0, cols = 0;
    };
    const Intervals& intervals() const { return intervals_; }
    int64_t key_len() const { return problem_.key_len; }

   private:
    using Rows = std::vector<RowArrays>;

    // An array of a run.
    struct Slot {
        const char* name;
        int64_t item;  // bytes of an element; 0 for an empty array, which is not read or written
        Extent example;
        std::span<const Pointer> pointers;  // the problem's pointers into the array
        int64_t cleared = 0;                // bytes to clear before a run
    };

    template <class Arrays, size_t N>
    void add_slots(const Field<Arrays> (&fields)[N], const Arrays& examples);

    // A copy of the problem whose pointers point into the arrays at `addresses`, one for each slot.
    struct Working {
        Problem problem;
        Rows rows;
        std::vector<const char*> addresses;
    };
    Working make_working() const;
    // Run on a copy of the problem, after its pointers into arrays that have moved are moved too.
    void run_on(Working& working, const Kernels& kernels, const std::vector<Extent>& arrays, uint64_t seed,
                Threads threads) const;
    static void check_memory(const Slot& slot, const Extent& array);

    bool is_backward_;
    Intervals intervals_;
    std::vector<Slot> slots_;  // of all present arrays, in the order of a run
    Problem problem_;          // of the examples: its pointers are never read, only moved
    Rows rows_;                // empty where a forward has nothing to do for each row
    // Kept, so that a run changes only the pointers into arrays that have moved since the last run.
    mutable KeptState<std::optional<Working>> working_;
};

}  // namespace attnscore
