// The kernels as custom calls of programs compiled by XLA: over XLA's own buffers, without Python. XLA's thread makes
// the call, the pool does the work. Built where jaxlib's headers are; only the functions at the end are exported, for
// attnscore's JAX backend.
#include <xla/ffi/api/ffi.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "api/call_plan.h"
#include "api/parse.h"
#include "api/row_finish.h"
#include "api/validate.h"

namespace ffi = xla::ffi;

namespace attnscore {
namespace {

std::atomic<int> threads{1};  // of each call: attnscore_xla_threads

enum class Direction { forward, backward };

// Operands in the order of the bits of the attribute `present_operands`: kInputs, the dropout seed, kForwardResults. A
// call has the operands whose bits are set; no call saves scores. Bits of `requested_results` are in the order of
// kForwardArrays or kGradients.
constexpr size_t kSeed = std::size(kInputs), kFirstResult = kSeed + 1;
constexpr size_t kOperands = kFirstResult + std::size(kForwardResults);

constexpr size_t index_of(Array Inputs::* input) {
    size_t index = 0;
    while (kInputs[index].array != input) ++index;
    return index;
}
constexpr size_t kQuery = index_of(&Inputs::query), kKey = index_of(&Inputs::key);
constexpr size_t kStart = index_of(&Inputs::start), kStop = index_of(&Inputs::stop);

constexpr int64_t bit(size_t operand) { return int64_t{1} << operand; }

const char* operand_name(size_t operand) {
    if (operand < kSeed) return kInputs[operand].name;
    return operand == kSeed ? "seed" : kForwardResults[operand - kFirstResult].name;
}

const char* name_of(ffi::DataType type) {
    using Type = ffi::DataType;
    constexpr std::pair<Type, const char*> names[] = {
        {Type::F16, "float16"}, {Type::BF16, "bfloat16"}, {Type::F32, "float32"}, {Type::F64, "float64"},
        {Type::PRED, "bool"},   {Type::U32, "uint32"},    {Type::S32, "int32"},   {Type::S64, "int64"}};
    for (const auto& [value, name] : names) {
        if (value == type) return name;
    }
    return "another dtype";
}

// The number of axes of an array's buffer: axes of length 1 are left out, because XLA copies an array to move them.
size_t axes_passed(ffi::Span<const int64_t> shape) {
    return static_cast<size_t>(std::count_if(shape.begin(), shape.end(), [](int64_t n) { return n != 1; }));
}

// A call as XLA hands it over.
struct Call {
    ffi::RemainingArgs args;
    ffi::RemainingRets rets;
    ffi::Dictionary attributes;

    template <class T>
    T attribute(const char* name) const {
        const ffi::ErrorOr<T> value = attributes.get<T>(name);
        if (!value.has_value()) throw std::invalid_argument(std::string(name) + ": " + value.error().message());
        return *value;
    }

    // The number of buffers: the operands', and behind them the results'.
    size_t buffers() const { return args.size() + rets.size(); }
    ffi::AnyBuffer buffer(size_t i) const {
        return i < args.size() ? *args.get<ffi::AnyBuffer>(i) : **rets.get<ffi::AnyBuffer>(i - args.size());
    }

    bool has_any_of(int64_t bits) const { return (attribute<int64_t>("present_operands") & bits) != 0; }
    // Whether the call has valid lengths: `stop` without `start`, whose numbers may be out of range.
    bool has_lens() const { return has_any_of(bit(kStop)) && !has_any_of(bit(kStart)); }

    // The attribute `shapes`: the shapes of all buffers, each after its number of axes.
    std::vector<ffi::Span<const int64_t>> shapes() const {
        const auto numbers = attribute<ffi::Span<const int64_t>>("shapes");
        std::vector<ffi::Span<const int64_t>> shapes;
        for (const int64_t* axes = numbers.begin(); axes != numbers.end(); axes += 1 + *axes) {
            if (*axes < 0 || *axes >= numbers.end() - axes) break;
            shapes.emplace_back(axes + 1, static_cast<size_t>(*axes));
        }
        if (shapes.size() != buffers()) throw std::invalid_argument("shapes: expected one for each buffer");
        return shapes;
    }
    // The shape of the first result, of a call that has one.
    ffi::Span<const int64_t> result_shape() const { return shapes()[args.size()]; }
    // The number of axes of vmap, which are in front of each buffer's own axes.
    size_t mapped_axes() const {
        if (rets.size() == 0) return 0;
        const size_t all = buffer(args.size()).dimensions().size(), unmapped = axes_passed(result_shape());
        if (all < unmapped) throw std::invalid_argument("shapes: expected that of the first result");
        return all - unmapped;
    }
};

// Copy 32-bit integers, which programs without 64-bit numbers have, or 64-bit ones.
void read_integers(const ffi::AnyBuffer& from, std::vector<int64_t>& to) {
    const auto copy = [&]<class T>(const T* numbers) { to.assign(numbers, numbers + from.element_count()); };
    from.element_type() == ffi::DataType::S32 ? copy(static_cast<const int32_t*>(from.untyped_data()))
                                              : copy(static_cast<const int64_t*>(from.untyped_data()));
}

// Turn valid lengths into the stops of `repeats` queries each, in place and therefore from the last one.
void become_stops(std::vector<int64_t>& lens, int64_t repeats, int64_t key_len) {
    const size_t count = lens.size();
    lens.resize(count * static_cast<size_t>(repeats));
    for (size_t i = count; i-- > 0;) {
        const int64_t stop = std::clamp<int64_t>(lens[i], 0, key_len);
        std::fill_n(lens.begin() + static_cast<ptrdiff_t>(i) * repeats, repeats, stop);
    }
}

// One buffer of XLA: an array for each example of vmap. The axes of vmap are in front of the array's own, with length 1
// where it is not mapped.
class MappedArray {
   public:
    // `outer`: the number of axes of vmap. `transposed`: the array is (*lead, rows, 1, head, cols), the layout of Flax
    // and Keras, and stands for (*lead, head, 1, rows, cols).
    MappedArray(const char* name, ffi::AnyBuffer buffer, ffi::Span<const int64_t> shape, size_t outer, bool transposed)
        : name_(name),
          type_(buffer.element_type()),
          base_(static_cast<char*>(buffer.untyped_data())),
          size_(buffer.element_count()),
          shape_(shape.begin(), shape.end()) {
        item_ = static_cast<int64_t>(ffi::ByteWidth(type_));
        const ffi::AnyBuffer::Dimensions all = buffer.dimensions();
        Shape passed;
        std::copy_if(shape.begin(), shape.end(), std::back_inserter(passed), [](int64_t n) { return n != 1; });
        if (all.size() != outer + passed.size() || !std::equal(passed.begin(), passed.end(), all.begin() + outer)) {
            throw std::invalid_argument(std::string(name_) + ": expected the axes of vmap, then those of its shape");
        }
        strides_.resize(shape_.size());
        int64_t size = 1;
        for (size_t i = shape_.size(); i-- > 0; size *= shape_[i]) strides_[i] = size;
        if (transposed && shape_.size() >= 4) {
            std::swap(shape_[shape_.size() - 4], shape_[shape_.size() - 2]);
            std::swap(strides_[shape_.size() - 4], strides_[shape_.size() - 2]);
        }
        mapped_.assign(all.begin(), all.begin() + outer);
        steps_.resize(outer);
        for (size_t i = outer; i-- > 0; size *= mapped_[i]) steps_[i] = mapped_[i] == 1 ? 0 : size;
        if (type_ == ffi::DataType::S32) {
            read_integers(buffer, integers_);
            type_ = ffi::DataType::S64;
            item_ = 8;
        }
    }

    std::string dtype() const { return name_of(type_); }
    int64_t rows() const { return shape_.size() < 2 ? 0 : shape_[shape_.size() - 2]; }
    // Check that the axes of vmap have the lengths of the grid of examples, or 1.
    void check_mapped(const Shape& examples) const {
        for (size_t i = 0; i < examples.size(); ++i) {
            if (mapped_[i] != 1 && mapped_[i] != examples[i]) {
                throw_invalid(at(Shape(examples.size())), "the axes of vmap, or 1", std::to_string(mapped_[i]));
            }
        }
    }

    // Turn valid lengths, (batch or 1, query or 1), into the stops of the intervals of `query_len` queries.
    void become_stops(int64_t query_len, int64_t key_len) {
        expect("int64");
        if (shape_.size() != 2 || (shape_[1] != 1 && shape_[1] != query_len)) {
            const Array a = at(Shape(steps_.size()));
            throw_invalid(a, "(batch or 1, query or 1) valid lengths", shape_text(a));
        }
        const int64_t repeats = shape_[1] == query_len ? 1 : query_len;
        if (integers_.empty()) integers_.assign(as<int64_t>(base_), as<int64_t>(base_) + size_);
        attnscore::become_stops(integers_, repeats, key_len);
        shape_[1] = query_len;
        strides_[0] *= repeats;
        for (int64_t& step : steps_) step *= repeats;
    }
    // The starts of intervals whose stops are these.
    MappedArray starts() const {
        MappedArray start = *this;
        start.name_ = "start";
        std::fill(start.integers_.begin(), start.integers_.end(), 0);
        return start;
    }

    // The array of one example: `example` has its index on each axis of vmap.
    Array at(const Shape& example) const {
        const int64_t offset = dot(example, steps_);
        Array a{name_};
        a.data = integers_.empty() ? base_ + offset * item_
                                   : reinterpret_cast<char*>(const_cast<int64_t*>(&integers_[offset]));
        a.item = item_;
        a.ndim = static_cast<int>(shape_.size());
        a.shape = shape_.data();
        a.strides = strides_.data();
        a.present = true;
        return a;
    }

    void expect(const std::string& dtype) const {
        if (this->dtype() != dtype) {
            throw std::invalid_argument(std::string(name_) + ": expected dtype " + dtype + ", got " + this->dtype());
        }
    }

   private:
    const char* name_;
    ffi::DataType type_;
    char* base_;
    size_t size_;  // elements of all examples
    int64_t item_;
    Shape shape_, strides_, mapped_, steps_;  // steps: from one example to the next, in elements
    std::vector<int64_t> integers_;           // a copy that takes the place of the buffer, unless it is empty
};

class CallArrays {
   public:
    CallArrays(Direction direction, const Call& call) : direction_(direction), call_(call), operands_(kOperands) {
        direction == Direction::forward ? read_buffers(kForwardArrays) : read_buffers(kGradients);
    }

    // The grid of the examples: the lengths of the axes of vmap.
    const Shape& examples() const { return examples_; }

    // The problem of an example, without arrays.
    Problem problem(const Shape& example) const {
        Caps caps;
        const auto numbers = call_.attribute<ffi::Span<const double>>("caps");
        for (size_t i = 0; i + 1 < numbers.size(); i += 2) caps.emplace_back(numbers[i], numbers[i + 1]);
        auto seed = static_cast<uint64_t>(call_.attribute<int64_t>("seed"));
        if (operands_[kSeed]) {
            operands_[kSeed]->expect("uint32");
            const Array words = operands_[kSeed]->at(example);
            if (words.ndim != 1 || words.shape[0] != 2) throw_invalid(words, "two words", shape_text(words));
            seed = as<uint32_t>(words.data)[0] | static_cast<uint64_t>(as<uint32_t>(words.data)[1]) << 32;
        }
        const std::string score = dtype(&Inputs::query), value = dtype(&Inputs::value), bias = dtype(&Inputs::bias);
        Problem p =
            parse_problem({call_.attribute<std::string_view>("form"), call_.attribute<std::string_view>("activation"),
                           call_.attribute<double>("negative_slope"), call_.attribute<double>("scale"), caps, score,
                           value, bias, call_.attribute<double>("dropout"), /*first_row=*/0, /*all_rows=*/0, seed});
        for (size_t i = 0; i < std::size(kForwardResults); ++i) {
            const auto& x = operands_[kFirstResult + i];
            if (kForwardResults[i].element == Element::grad && x) p.grad_dtype = parse_dtype(x->dtype(), "grad_out");
        }
        return p;
    }

    // The arrays of an example whose problem is `p`; of a call without vmap, whose example is {}, all arrays.
    Inputs inputs(const Problem& p, const Shape& example) const {
        Inputs arrays;
        read(operands_.data(), kInputs, p, example, arrays);
        return arrays;
    }
    ForwardArrays forward_arrays(const Problem& p, const Shape& example) const {
        ForwardArrays arrays;
        read(results_.data(), kForwardArrays, p, example, arrays);
        return arrays;
    }
    BackwardArrays backward_arrays(const Problem& p, const Shape& example) const {
        BackwardArrays arrays;
        read(operands_.data() + kFirstResult, kForwardResults, p, example, arrays);
        read(results_.data(), kGradients, p, example, arrays);
        return arrays;
    }

    // Add the arrays of an example to its problem, and return its row arrays.
    std::vector<RowArrays> build(Problem& p, const Shape& example) const {
        const Inputs in = inputs(p, example);
        return direction_ == Direction::forward ? build_forward(p, in, forward_arrays(p, example))
                                                : build_backward(p, in, backward_arrays(p, example));
    }

   private:
    // Read the buffers of the operands, and of the results that are requested among these.
    template <class Results, size_t N>
    void read_buffers(const Field<Results> (&results)[N]) {
        const auto present = call_.attribute<int64_t>("present_operands");
        const auto transposed = call_.attribute<int64_t>("transposed");
        const auto requested_results = call_.attribute<int64_t>("requested_results");
        const size_t outer = call_.mapped_axes();
        const std::vector<ffi::Span<const int64_t>> shapes = call_.shapes();
        results_.resize(N);
        if (outer > 0) {
            const ffi::AnyBuffer::Dimensions axes = call_.buffer(call_.args.size()).dimensions();
            examples_.assign(axes.begin(), axes.begin() + outer);
        }
        size_t next = 0;
        const auto add = [&](std::optional<MappedArray>& to, const char* name, size_t end, bool is_transposed) {
            if (next == end) throw std::invalid_argument(std::string(name) + ": expected a buffer");
            to.emplace(name, call_.buffer(next), shapes[next], outer, is_transposed);
            to->check_mapped(examples_);
            ++next;
        };
        for (size_t i = 0; i < kOperands; ++i) {
            if (present >> i & 1) add(operands_[i], operand_name(i), call_.args.size(), transposed >> i & 1);
        }
        if (next != call_.args.size()) {
            throw std::invalid_argument("present_operands: expected one bit for each buffer");
        }
        if (call_.has_lens() && operands_[kQuery] && operands_[kKey]) {
            operands_[kStop]->become_stops(operands_[kQuery]->rows(), operands_[kKey]->rows());
            operands_[kStart] = operands_[kStop]->starts();
        }
        for (size_t i = 0; i < N; ++i) {
            if (requested_results >> i & 1) add(results_[i], results[i].name, call_.buffers(), /*is_transposed=*/false);
        }
    }

    std::string dtype(Array Inputs::* input) const {
        const auto& x = operands_[index_of(input)];
        return x ? x->dtype() : "float32";
    }

    // Set the arrays of a struct from as many `from`, where these are present, after a check of their dtypes.
    template <class Arrays, size_t N>
    static void read(const std::optional<MappedArray>* from, const Field<Arrays> (&fields)[N], const Problem& p,
                     const Shape& example, Arrays& to) {
        for (const auto& field : fields) {
            const std::optional<MappedArray>& x = *from++;
            (to.*field.array).name = field.name;
            if (!x) continue;
            x->expect(field.element == Element::byte    ? "bool"
                      : field.element == Element::index ? "int64"
                                                        : std::string(dtype_name(dtype_of(p, field.element))));
            to.*field.array = x->at(example);
        }
    }

    const Direction direction_;
    const Call& call_;
    std::vector<std::optional<MappedArray>> operands_, results_;
    Shape examples_;
};

// Append the heads of one example's problem to `joined`, which differs from it in its arrays alone.
void join(Problem& joined, Problem&& example_problem) {
    const auto first = static_cast<int64_t>(joined.heads.size());
    if (first == 0) {
        joined = std::move(example_problem);
        return;
    }
    const auto append = [&](auto& groups, auto& more) {
        for (auto& group : more) {
            for (int64_t& head : group.heads) head += first;
            groups.push_back(std::move(group));
        }
    };
    append(joined.groups, example_problem.groups);
    append(joined.bias_groups, example_problem.bias_groups);
    joined.heads.insert(joined.heads.end(), example_problem.heads.begin(), example_problem.heads.end());
}

// Run a call without a plan, with the examples of vmap as more heads of one problem, so that small ones share the
// threads. Examples with different dropout seeds are separate runs.
void run_unplanned(Direction direction, const Call& call) {
    const CallArrays arrays(direction, call);
    for (size_t i = call.args.size(); direction == Direction::backward && i < call.buffers(); ++i) {
        const ffi::AnyBuffer gradient = call.buffer(i);
        if (gradient.size_bytes()) std::memset(gradient.untyped_data(), 0, gradient.size_bytes());
    }
    Problem joined;
    std::vector<RowArrays> rows;
    const auto run = [&] {
        if (joined.heads.empty()) return;
        (direction == Direction::forward ? run_forward : run_backward)(selected_kernels(), joined, rows,
                                                                       threads.load(std::memory_order_relaxed));
    };
    for_each_index(arrays.examples(), [&](const Shape& example) {
        Problem example_problem = arrays.problem(example);
        const std::vector<RowArrays> example_rows = arrays.build(example_problem, example);
        if (example_problem.seed != joined.seed) {
            run();
            joined = {};
            rows.clear();
        }
        join(joined, std::move(example_problem));
        rows.insert(rows.end(), example_rows.begin(), example_rows.end());
    });
    run();
}

// Calls that differ in addresses and seed alone are checked once, and then run by a plan, which is found by the
// attribute `digest`, a digest of direction, shapes, dtypes and all other attributes without the seed. Reading and
// comparing all of these takes 2 us, as long as a tiny program. Mapped calls, empty calls, and calls with ids or a seed
// of the program's have no plan.
constexpr size_t kMostPlans = 64;
constexpr int64_t kMostPlannedHeads = 8192;  // of all plans of a thread: 20 MB

class PlannedCall {
   public:
    PlannedCall(Direction direction, const Call& call) {
        const CallArrays arrays(direction, call);
        for (size_t i = 0; i < call.buffers(); ++i) buffers_.push_back(size_of(call.buffer(i)));
        has_dropout_ = call.attribute<double>("dropout") > 0;
        has_lens_ = call.has_lens();
        const Problem p = arrays.problem({});
        const Inputs in = arrays.inputs(p, {});
        if (in.start.present) {
            start_ = place_of_start(in);
            if (has_lens_) starts_.assign(static_cast<size_t>(in.stop.shape[0] * in.stop.shape[1]), 0);
        }
        direction == Direction::forward ? plan_.emplace(p, in, arrays.forward_arrays(p, {}))
                                        : plan_.emplace(p, in, arrays.backward_arrays(p, {}));
    }

    // Whether the buffers of a call have the sizes of the plan's buffers.
    bool fits(const Call& call) const {
        if (call.buffers() != buffers_.size()) return false;
        for (size_t i = 0; i < buffers_.size(); ++i) {
            if (size_of(call.buffer(i)) != buffers_[i]) return false;
        }
        return true;
    }

    // Run; return false without running where the ends of an interval are out of range or in the wrong order: without
    // a plan the call reports them.
    bool run(const Call& call) {
        if (start_ && !read_intervals(call)) return false;
        arrays_.clear();
        for (size_t i = 0; i < call.buffers(); ++i) {
            // The plan's starts, which a call with valid lengths does not pass.
            if (has_lens_ && i == *start_) arrays_.emplace_back();
            const ffi::AnyBuffer x = call.buffer(i);
            arrays_.push_back(extent_of(x.untyped_data(), x.size_bytes()));
        }
        if (start_) {
            arrays_[*start_] = extent_of(starts_.data(), starts_.size() * sizeof(int64_t));
            arrays_[*start_ + 1] = extent_of(stops_.data(), stops_.size() * sizeof(int64_t));
        }
        const uint64_t seed = has_dropout_ ? static_cast<uint64_t>(call.attribute<int64_t>("seed")) : 0;
        plan_->run(selected_kernels(), arrays_, seed, threads.load(std::memory_order_relaxed));
        return true;
    }

   private:
    using Size = std::pair<ffi::DataType, size_t>;

    static Extent extent_of(void* data, size_t bytes) {
        return {static_cast<char*>(data), 0, static_cast<int64_t>(bytes)};
    }
    static Size size_of(const ffi::AnyBuffer& x) { return {x.element_type(), x.element_count()}; }

    // Read the intervals of a call, or make them of its valid lengths; false where one is not in [0, key_len].
    bool read_intervals(const Call& call) {
        if (has_lens_) {
            read_integers(call.buffer(*start_), stops_);
            const size_t lens = std::max<size_t>(stops_.size(), 1);
            become_stops(stops_, static_cast<int64_t>(starts_.size() / lens), plan_->key_len());
            return true;
        }
        read_integers(call.buffer(*start_), starts_);
        read_integers(call.buffer(*start_ + 1), stops_);
        for (size_t i = 0; i < starts_.size(); ++i) {
            if (starts_[i] < 0 || stops_[i] > plan_->key_len() || starts_[i] > stops_[i]) return false;
        }
        return true;
    }

    std::optional<CallPlan> plan_;
    std::vector<Size> buffers_;  // of the call
    bool has_dropout_ = false;
    std::optional<size_t> start_;  // place of the starts of intervals among the plan's arrays; their stops are next
    bool has_lens_ = false;        // whether the call has valid lengths in their place, one buffer
    std::vector<int64_t> starts_, stops_;
    std::vector<Extent> arrays_;
};

// Whether a call can have a plan. Ids, copied to 64 bits, and a seed that is an operand are read when a problem is
// made: a plan would repeat the numbers of its first call.
bool can_be_planned(const Call& call) {
    constexpr int64_t unplanned = bit(index_of(&Inputs::query_ids)) | bit(index_of(&Inputs::key_ids)) | bit(kSeed);
    if (call.rets.size() == 0 || call.has_any_of(unplanned)) return false;
    // A batch, head, group and the two axes of a matrix; `jax.vmap` adds axes in front.
    if (call.result_shape().size() < 5 || call.mapped_axes() > 0) return false;
    // The kernels clear no gradients where there are no queries.
    for (size_t i = call.args.size(); i < call.buffers(); ++i) {
        if (call.buffer(i).element_count() == 0) return false;
    }
    return true;
}

// Run a call by its plan; false where it has none.
bool run_planned(Direction direction, const Call& call) {
    // A thread has its own plans, so that none waits for another.
    struct Entry {
        std::unique_ptr<PlannedCall> plan;
        int64_t heads, last_use;  // the number of the thread's call that used it last
    };
    thread_local std::unordered_map<int64_t, Entry> plans;
    thread_local int64_t planned_heads = 0, calls = 0;
    const auto digest = call.attribute<int64_t>("digest");
    if (const auto entry = plans.find(digest); entry != plans.end()) {
        entry->second.last_use = ++calls;
        return entry->second.plan->fits(call) && entry->second.plan->run(call);
    }
    if (!can_be_planned(call)) return false;
    const ffi::Span<const int64_t> shape = call.result_shape();
    int64_t heads = 1;
    for (size_t i = 0; i + 2 < shape.size(); ++i) heads *= shape[i];  // all axes but rows and columns
    if (heads > kMostPlannedHeads) return false;
    auto planned = std::make_unique<PlannedCall>(direction, call);
    while (plans.size() >= kMostPlans || planned_heads + heads > kMostPlannedHeads) {
        const auto oldest = std::min_element(plans.begin(), plans.end(), [](const auto& left, const auto& right) {
            return left.second.last_use < right.second.last_use;
        });
        planned_heads -= oldest->second.heads;
        plans.erase(oldest);
    }
    planned_heads += heads;
    return plans.emplace(digest, Entry{std::move(planned), heads, ++calls}).first->second.plan->run(call);
}

template <Direction direction>
ffi::Error run_call(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) try {
    const Call call{args, rets, attributes};
    if (!run_planned(direction, call)) run_unplanned(direction, call);
    return ffi::Error::Success();
} catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "attnscore: out of memory");
} catch (const std::exception& error) {
    return ffi::Error::InvalidArgument(error.what());
}

constexpr auto kForward = run_call<Direction::forward>, kBackward = run_call<Direction::backward>;
XLA_FFI_DEFINE_HANDLER(forward_handler, kForward, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(backward_handler, kBackward, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

}  // namespace
}  // namespace attnscore

#ifdef _WIN32
#define ATTNSCORE_EXPORT extern "C" __declspec(dllexport)
#else
#define ATTNSCORE_EXPORT extern "C" __attribute__((visibility("default")))
#endif

ATTNSCORE_EXPORT XLA_FFI_Error* attnscore_xla_forward(XLA_FFI_CallFrame* frame) {
    return (*attnscore::forward_handler)(frame);
}

ATTNSCORE_EXPORT XLA_FFI_Error* attnscore_xla_backward(XLA_FFI_CallFrame* frame) {
    return (*attnscore::backward_handler)(frame);
}

// Set the number of threads of all later calls: a running program cannot ask Python for it.
ATTNSCORE_EXPORT void attnscore_xla_threads(int count) { attnscore::threads.store(count, std::memory_order_relaxed); }
