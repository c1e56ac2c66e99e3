// The kernels as custom calls of programs compiled by XLA: over XLA's own buffers, without Python. XLA's thread makes
// the call, the pool does the work. Built where jaxlib's headers are; only the functions at the end are exported, for
// attnscore's JAX backend.
#include <xla/ffi/api/ffi.h>

#include <algorithm>
#include <atomic>
#include <bit>
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

std::atomic<int> threads{1};

// A call runs forward, or backward.
enum class Direction { forward, backward };

// Operands in the order of the bits of the attribute `present_operands`: kInputs, the dropout seed, kForwardResults
// without the saved scores. A call has the operands whose bits are set.
constexpr size_t kSeed = std::size(kInputs), kFirstResult = kSeed + 1, kSavedScores = 4;
constexpr size_t kOperands = kFirstResult + std::size(kForwardResults) - 1;
static_assert(kForwardResults[kSavedScores].array == &BackwardArrays::saved_scores);

// Index of the operand of a backward that is result `i` of the forward (`kForwardResults`).
constexpr size_t operand_of_forward_result(size_t i) { return kFirstResult + i - (i > kSavedScores); }

const char* operand_name(size_t operand) {
    if (operand < kSeed) return kInputs[operand].name;
    if (operand == kSeed) return "seed";
    const size_t i = operand - kFirstResult;
    return kForwardResults[i + (i >= kSavedScores)].name;
}

// Results of a forward in the order of the bits of the attribute `requested_results`: kForwardArrays without the saved
// scores and the log-sum-exp, the last of them. A backward's results are kGradients.
constexpr size_t kForwardResultCount = std::size(kForwardArrays) - 2;
constexpr const auto& forward_result(size_t i) { return kForwardArrays[i + (i >= 3)]; }
static_assert(forward_result(3).array == &ForwardArrays::attention_scores);

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

template <class T>
T attribute(ffi::Dictionary attributes, const char* name) {
    const ffi::ErrorOr<T> found = attributes.get<T>(name);
    if (!found.has_value()) throw std::invalid_argument(std::string(name) + ": " + found.error().message());
    return *found;
}

// The attribute `shapes`: the shapes of a call's operands, then of its results, each after its number of axes.
class Shapes {
   public:
    explicit Shapes(ffi::Dictionary attributes)
        : numbers_(attribute<ffi::Span<const int64_t>>(attributes, "shapes")), next_(numbers_.begin()) {}

    ffi::Span<const int64_t> next() {
        if (next_ == numbers_.end() || *next_ < 0 || *next_ >= numbers_.end() - next_) {
            throw std::invalid_argument("shapes: expected one for each buffer");
        }
        const ffi::Span<const int64_t> shape(next_ + 1, static_cast<size_t>(*next_));
        next_ += 1 + *next_;
        return shape;
    }

   private:
    ffi::Span<const int64_t> numbers_;
    const int64_t* next_;
};

// The number of axes of an array's buffer: axes of length 1 are left out, because XLA copies an array to move them.
size_t axes_passed(ffi::Span<const int64_t> shape) {
    return static_cast<size_t>(std::count_if(shape.begin(), shape.end(), [](int64_t n) { return n != 1; }));
}

// Copy 32-bit integers, which programs without 64-bit numbers have, or 64-bit ones.
void read_integers(const ffi::AnyBuffer& from, std::vector<int64_t>& to) {
    const auto count = static_cast<ptrdiff_t>(from.element_count());
    if (from.element_type() == ffi::DataType::S32) {
        const auto* numbers = static_cast<const int32_t*>(from.untyped_data());
        to.assign(numbers, numbers + count);
    } else {
        const auto* numbers = static_cast<const int64_t*>(from.untyped_data());
        to.assign(numbers, numbers + count);
    }
}

// Turn valid lengths into the stops of `repeats` queries each.
void become_stops(std::vector<int64_t>& lens, int64_t repeats, int64_t key_len) {
    const size_t count = lens.size();
    lens.resize(count * static_cast<size_t>(repeats));
    for (size_t i = count; i-- > 0;) {
        const int64_t stop = std::clamp<int64_t>(lens[i], 0, key_len);
        std::fill_n(lens.begin() + static_cast<ptrdiff_t>(i) * repeats, repeats, stop);
    }
}

// One buffer of XLA. The axes of vmap are in front of its own, with length 1 where it is not mapped.
class Operand {
   public:
    // `transposed`: the array is (*lead, rows, 1, head, cols), the layout of Flax and Keras, and stands for (*lead,
    // head, 1, rows, cols).
    Operand(const char* name, ffi::AnyBuffer buffer, ffi::Span<const int64_t> shape, size_t outer, bool transposed)
        : name_(name),
          type_(buffer.element_type()),
          base_(static_cast<char*>(buffer.untyped_data())),
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
            read_integers(buffer, wide_);
            type_ = ffi::DataType::S64;
            item_ = 8;
        }
    }

    std::string dtype() const { return name_of(type_); }
    const Shape& shape() const { return shape_; }
    const Shape& mapped() const { return mapped_; }

    // Turn valid lengths, (batch or 1, query or 1), into the stops of the intervals of `query_len` queries.
    void become_stops(int64_t query_len, int64_t key_len) {
        expect("int64");
        if (shape_.size() != 2 || (shape_[1] != 1 && shape_[1] != query_len)) {
            throw_invalid(at(Shape(steps_.size())), "(batch or 1, query or 1) valid lengths",
                          shape_text(at(Shape(steps_.size()))));
        }
        const int64_t repeats = shape_[1] == query_len ? 1 : query_len;
        if (wide_.empty()) {
            int64_t count = shape_[0] * shape_[1];
            for (const int64_t n : mapped_) count *= n;
            const auto* numbers = reinterpret_cast<const int64_t*>(base_);
            wide_.assign(numbers, numbers + count);
        }
        attnscore::become_stops(wide_, repeats, key_len);
        shape_[1] = query_len;
        strides_[0] *= repeats;
        for (int64_t& step : steps_) step *= repeats;
    }
    // The starts of intervals whose stops are these.
    Operand starts() const {
        Operand start = *this;
        start.name_ = "start";
        std::fill(start.wide_.begin(), start.wide_.end(), 0);
        return start;
    }

    // The array of one example of a mapped call: `example` has its index on each axis that vmap added.
    Array at(const Shape& example) const {
        int64_t offset = 0;
        for (size_t i = 0; i < steps_.size(); ++i) offset += steps_[i] * example[i];
        Array a{name_};
        a.data = wide_.empty() ? base_ + offset * item_ : reinterpret_cast<char*>(const_cast<int64_t*>(&wide_[offset]));
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
    int64_t item_;
    Shape shape_, strides_, mapped_, steps_;
    std::vector<int64_t> wide_;
};

constexpr size_t kQuery = 0, kKey = 1, kQueryIds = 7, kKeyIds = 8, kStart = 9, kStop = 10;
static_assert(kInputs[kQuery].array == &Inputs::query && kInputs[kKey].array == &Inputs::key);
static_assert(kInputs[kQueryIds].array == &Inputs::query_ids && kInputs[kKeyIds].array == &Inputs::key_ids);
static_assert(kInputs[kStart].array == &Inputs::start && kInputs[kStop].array == &Inputs::stop);

constexpr int64_t bit(size_t operand) { return int64_t{1} << operand; }

// Whether the call has valid lengths: `stop` without `start`, of any values.
bool has_lens(ffi::Dictionary attributes) {
    return (attribute<int64_t>(attributes, "present_operands") & (bit(kStart) | bit(kStop))) == bit(kStop);
}

// The shape of the first result, of a call that has one.
ffi::Span<const int64_t> first_result(ffi::RemainingArgs args, ffi::Dictionary attributes) {
    Shapes shapes(attributes);
    for (size_t i = 0; i < args.size(); ++i) shapes.next();
    return shapes.next();
}

// The number of axes of vmap, which are in front of each buffer's own axes.
size_t mapped_axes(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
    if (rets.size() == 0) return 0;
    const size_t axes = (**rets.get<ffi::AnyBuffer>(0)).dimensions().size();
    const size_t operand_axes = axes_passed(first_result(args, attributes));
    if (axes < operand_axes) throw std::invalid_argument("shapes: expected that of the first result");
    return axes - operand_axes;
}

// The buffers and attributes of one call.
class Call {
   public:
    // `results`: the names of the results that the attribute `requested_results` counts.
    Call(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes,
         const std::vector<const char*>& results)
        : attributes_(attributes), in_(kOperands), out_(results.size()) {
        const auto present = attribute<int64_t>("present_operands"), transposed = attribute<int64_t>("transposed");
        const auto requested_results = attribute<int64_t>("requested_results");
        const size_t outer = mapped_axes(args, rets, attributes);
        Shapes shapes(attributes);
        size_t next = 0;
        for (size_t i = 0; i < kOperands; ++i) {
            if (!(present >> i & 1)) continue;
            const char* name = operand_name(i);
            if (next == args.size()) throw std::invalid_argument(std::string(name) + ": expected a buffer");
            in_[i].emplace(name, args.get<ffi::AnyBuffer>(next++).value(), shapes.next(), outer, transposed >> i & 1);
        }
        if (next != args.size()) throw std::invalid_argument("present_operands: expected one bit for each buffer");
        if (has_lens(attributes) && in_[kQuery] && in_[kKey]) {
            in_[kStop]->become_stops(rows_of(*in_[kQuery]), rows_of(*in_[kKey]));
            in_[kStart] = in_[kStop]->starts();
        }
        next = 0;
        for (size_t i = 0; i < results.size(); ++i) {
            if (!(requested_results >> i & 1)) continue;
            if (next == rets.size()) throw std::invalid_argument(std::string(results[i]) + ": expected a buffer");
            buffers_.push_back(*rets.get<ffi::AnyBuffer>(next++).value());
            out_[i].emplace(results[i], buffers_.back(), shapes.next(), outer, false);
            if (next == 1) examples_ = out_[i]->mapped();
            check_mapped(*out_[i]);
        }
        for (const auto& x : in_) {
            if (x) check_mapped(*x);
        }
    }

    void clear_results() const {
        for (const ffi::AnyBuffer& x : buffers_) {
            if (x.size_bytes()) std::memset(x.untyped_data(), 0, x.size_bytes());
        }
    }

    // The number of examples of vmap, and the index of one.
    int64_t examples() const {
        int64_t count = 1;
        for (const int64_t n : examples_) count *= n;
        return count;
    }
    Shape example(int64_t number) const {
        Shape index(examples_.size());
        for (size_t i = index.size(); i-- > 0; number /= examples_[i]) index[i] = number % examples_[i];
        return index;
    }

    // The problem of an example, without arrays.
    Problem problem(const Shape& example) const {
        Caps caps;
        const auto numbers = attribute<ffi::Span<const double>>("caps");
        for (size_t i = 0; i + 1 < numbers.size(); i += 2) caps.emplace_back(numbers[i], numbers[i + 1]);
        auto seed = static_cast<uint64_t>(attribute<int64_t>("seed"));
        if (in_[kSeed]) {
            in_[kSeed]->expect("uint32");
            const Array words = in_[kSeed]->at(example);
            if (words.ndim != 1 || words.shape[0] != 2) throw_invalid(words, "two words", shape_text(words));
            seed = as<uint32_t>(words.data)[0] | static_cast<uint64_t>(as<uint32_t>(words.data)[1]) << 32;
        }
        const std::string score = dtype(&Inputs::query), value = dtype(&Inputs::value), bias = dtype(&Inputs::bias);
        Problem p = parse_problem({attribute<std::string_view>("form"), attribute<std::string_view>("activation"),
                                   attribute<double>("negative_slope"), attribute<double>("scale"), caps, score, value,
                                   bias, attribute<double>("dropout"), 0, 0, seed});
        for (size_t i = 0; i < std::size(kForwardResults); ++i) {
            const auto& x = in_[operand_of_forward_result(i)];
            if (kForwardResults[i].element == Element::grad && x) p.grad_dtype = parse_dtype(x->dtype(), "grad_out");
        }
        return p;
    }

    Inputs inputs(const Problem& p, const Shape& example) const {
        Inputs in;
        for (size_t i = 0; i < std::size(kInputs); ++i) read(in_[i], kInputs[i], p, example, in);
        return in;
    }
    // Read the results of the forward, and their gradients.
    void forward_results(const Problem& p, const Shape& example, BackwardArrays& to) const {
        for (size_t i = 0; i < std::size(kForwardResults); ++i) {
            if (i != kSavedScores) read(in_[operand_of_forward_result(i)], kForwardResults[i], p, example, to);
        }
    }
    // Read result `i` of this call.
    template <class Arrays>
    void result(size_t i, const Field<Arrays>& field, const Problem& p, const Shape& example, Arrays& to) const {
        read(out_[i], field, p, example, to);
    }

   private:
    template <class T>
    T attribute(const char* name) const {
        return attnscore::attribute<T>(attributes_, name);
    }

    static int64_t rows_of(const Operand& x) { return x.shape().size() < 2 ? 0 : x.shape()[x.shape().size() - 2]; }

    std::string dtype(Array Inputs::* input) const {
        for (size_t i = 0; i < std::size(kInputs); ++i) {
            if (kInputs[i].array == input && in_[i]) return in_[i]->dtype();
        }
        return "float32";
    }

    template <class Arrays>
    static void read(const std::optional<Operand>& x, const Field<Arrays>& field, const Problem& p,
                     const Shape& example, Arrays& to) {
        (to.*field.array).name = field.name;
        if (!x) return;
        x->expect(field.element == Element::byte    ? "bool"
                  : field.element == Element::index ? "int64"
                                                    : std::string(dtype_name(dtype_of(p, field.element))));
        to.*field.array = x->at(example);
    }

    void check_mapped(const Operand& x) const {
        for (size_t i = 0; i < examples_.size(); ++i) {
            if (x.mapped()[i] != 1 && x.mapped()[i] != examples_[i]) {
                throw_invalid(x.at(Shape(examples_.size())), "the axes of vmap, or 1", std::to_string(x.mapped()[i]));
            }
        }
    }

    ffi::Dictionary attributes_;
    std::vector<std::optional<Operand>> in_, out_;
    std::vector<ffi::AnyBuffer> buffers_;
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

// Run the examples of a call as more heads of one problem, so that small ones share the threads: an example is one
// index of the axes that vmap added. Examples with different dropout seeds are separate runs. `build(problem, example)`
// adds the arrays of an example.
template <class Build, class Run>
ffi::Error run_mapped(const Call& call, const Build& build, const Run& run) {
    const Kernels& kernels = selected_kernels();
    const int count = threads.load(std::memory_order_relaxed);
    Problem joined;
    std::vector<RowArrays> rows;
    for (int64_t i = 0; i < call.examples(); ++i) {
        const Shape example = call.example(i);
        Problem example_problem = call.problem(example);
        const std::vector<RowArrays> row_arrays = build(example_problem, example);
        if (!joined.heads.empty() && example_problem.seed != joined.seed) {
            run(kernels, joined, rows, count);
            joined = {};
            rows.clear();
        }
        join(joined, std::move(example_problem));
        rows.insert(rows.end(), row_arrays.begin(), row_arrays.end());
    }
    if (!joined.heads.empty()) run(kernels, joined, rows, count);
    return ffi::Error::Success();
}

// Names of the results that a direction may have, in the order of the bits of the attribute `requested_results`.
std::vector<const char*> result_names(Direction direction) {
    std::vector<const char*> names;
    if (direction == Direction::backward) {
        for (const auto& field : kGradients) names.push_back(field.name);
    } else {
        for (size_t i = 0; i < kForwardResultCount; ++i) names.push_back(forward_result(i).name);
    }
    return names;
}

// The buffers of the results of one example of a mapped call; of any other call, of the whole ({}).
ForwardArrays forward_arrays(const Call& call, const Problem& p, const Shape& example) {
    ForwardArrays arrays;
    for (size_t i = 0; i < kForwardResultCount; ++i) call.result(i, forward_result(i), p, example, arrays);
    return arrays;
}

BackwardArrays backward_arrays(const Call& call, const Problem& p, const Shape& example) {
    BackwardArrays arrays;
    call.forward_results(p, example, arrays);
    for (size_t i = 0; i < std::size(kGradients); ++i) call.result(i, kGradients[i], p, example, arrays);
    return arrays;
}

// Calls that differ in addresses and seed alone are checked once, and then run by a plan, which is found by the
// attribute `digest`, a digest of direction, shapes, dtypes and all other attributes without the seed. Reading and
// comparing all of these takes 2 us, as long as a tiny program. Mapped calls, empty calls, and calls with ids or a seed
// of the program's have no plan.
constexpr size_t kMostPlans = 64;
constexpr int64_t kMostPlannedHeads = 8192;  // of all plans of a thread: 20 MB

class PlannedCall {
   public:
    PlannedCall(Direction direction, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
        const Call call(args, rets, attributes, result_names(direction));
        for (size_t i = 0; i < args.size(); ++i) buffers_.push_back(size_of(*args.get<ffi::AnyBuffer>(i)));
        for (size_t i = 0; i < rets.size(); ++i) buffers_.push_back(size_of(**rets.get<ffi::AnyBuffer>(i)));
        has_dropout_ = attribute<double>(attributes, "dropout") > 0;
        Problem p = call.problem({});
        const Inputs in = call.inputs(p, {});
        key_len_ = in.key.present ? in.key.shape[in.key.ndim - 2] : 0;
        if (in.start.present) start_ = slot_of(attributes, has_lens(attributes) ? kStop : kStart);
        if (has_lens(attributes)) {
            int64_t count = 1;
            for (int i = 0; i < in.stop.ndim; ++i) count *= in.stop.shape[i];
            ends_[0].assign(static_cast<size_t>(count), 0);
            has_lens_ = true;
        }
        if (direction == Direction::backward) {
            const BackwardArrays arrays = backward_arrays(call, p, {});
            plan_.emplace(std::move(p), in, arrays);
            return;
        }
        const ForwardArrays arrays = forward_arrays(call, p, {});
        plan_.emplace(std::move(p), in, arrays);
    }

    // Whether the buffers of a call have the sizes of the plan's buffers.
    bool fits(ffi::RemainingArgs args, ffi::RemainingRets rets) const {
        if (args.size() + rets.size() != buffers_.size()) return false;
        for (size_t i = 0; i < args.size(); ++i) {
            if (size_of(*args.get<ffi::AnyBuffer>(i)) != buffers_[i]) return false;
        }
        for (size_t i = 0; i < rets.size(); ++i) {
            if (size_of(**rets.get<ffi::AnyBuffer>(i)) != buffers_[args.size() + i]) return false;
        }
        return true;
    }

    // Run; return false without running where the ends of an interval are out of range or in the wrong order.
    bool run(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
        arrays_.clear();
        for (size_t i = 0; i < args.size(); ++i) {
            // The plan's starts, which a call with valid lengths does not pass.
            if (has_lens_ && i == *start_) arrays_.emplace_back();
            arrays_.push_back(extent_of(*args.get<ffi::AnyBuffer>(i)));
        }
        for (size_t i = 0; i < rets.size(); ++i) arrays_.push_back(extent_of(**rets.get<ffi::AnyBuffer>(i)));
        if (has_lens_) {
            read_integers(*args.get<ffi::AnyBuffer>(*start_), ends_[1]);
            if (const size_t lens = ends_[1].size()) {
                become_stops(ends_[1], static_cast<int64_t>(ends_[0].size() / lens), key_len_);
            }
        } else if (start_) {
            for (size_t i = 0; i < 2; ++i) read_integers(*args.get<ffi::AnyBuffer>(*start_ + i), ends_[i]);
            for (size_t i = 0; i < ends_[0].size(); ++i) {
                if (ends_[0][i] < 0 || ends_[1][i] > key_len_ || ends_[0][i] > ends_[1][i]) return false;
            }
        }
        if (start_) {
            for (size_t i = 0; i < 2; ++i) {
                const auto bytes = static_cast<int64_t>(ends_[i].size() * sizeof(int64_t));
                arrays_[*start_ + i] = {reinterpret_cast<char*>(ends_[i].data()), 0, bytes};
            }
        }
        const uint64_t seed = has_dropout_ ? static_cast<uint64_t>(attribute<int64_t>(attributes, "seed")) : 0;
        plan_->run(selected_kernels(), arrays_, seed, threads.load(std::memory_order_relaxed));
        return true;
    }

   private:
    using Size = std::pair<ffi::DataType, size_t>;

    static Extent extent_of(const ffi::AnyBuffer& x) {
        return {static_cast<char*>(x.untyped_data()), 0, static_cast<int64_t>(x.size_bytes())};
    }
    static Size size_of(const ffi::AnyBuffer& x) { return {x.element_type(), x.element_count()}; }

    static size_t slot_of(ffi::Dictionary attributes, size_t operand) {
        const auto before = attribute<int64_t>(attributes, "present_operands") & ((int64_t{1} << operand) - 1);
        return static_cast<size_t>(std::popcount(static_cast<uint64_t>(before)));
    }

    std::optional<CallPlan> plan_;
    std::vector<Size> buffers_;  // of the call
    bool has_dropout_ = false;
    std::optional<size_t> start_;  // place of the starts of intervals among the arrays; their stops are next
    bool has_lens_ = false;        // whether the call has valid lengths in their place
    int64_t key_len_ = 0;
    std::vector<int64_t> ends_[2];
    std::vector<Extent> arrays_;
};

// Whether a call can have a plan.
bool is_planned(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
    if (rets.size() == 0 ||
        attribute<int64_t>(attributes, "present_operands") & (bit(kQueryIds) | bit(kKeyIds) | bit(kSeed))) {
        return false;
    }
    if (first_result(args, attributes).size() < 5 || mapped_axes(args, rets, attributes) > 0) return false;
    // The kernels clear no gradients where there are no queries.
    for (size_t i = 0; i < rets.size(); ++i) {
        if ((**rets.get<ffi::AnyBuffer>(i)).element_count() == 0) return false;
    }
    return true;
}

// Run a call by its plan; false where it has none.
bool run_planned(Direction direction, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) {
    // A thread has its own plans, so that none waits for another.
    struct Entry {
        std::unique_ptr<PlannedCall> plan;
        int64_t heads, used;
    };
    thread_local std::unordered_map<int64_t, Entry> plans;
    thread_local int64_t planned_heads = 0, calls = 0;
    const auto digest = attribute<int64_t>(attributes, "digest");
    if (const auto found = plans.find(digest); found != plans.end()) {
        PlannedCall& planned = *found->second.plan;
        found->second.used = ++calls;
        return planned.fits(args, rets) && planned.run(args, rets, attributes);
    }
    if (!is_planned(args, rets, attributes)) return false;
    const ffi::Span<const int64_t> axes = first_result(args, attributes);
    int64_t heads = 1;
    for (size_t i = 0; i + 2 < axes.size(); ++i) heads *= axes[i];
    if (heads > kMostPlannedHeads) return false;
    auto planned = std::make_unique<PlannedCall>(direction, args, rets, attributes);
    while (plans.size() >= kMostPlans || planned_heads + heads > kMostPlannedHeads) {
        const auto oldest = std::min_element(plans.begin(), plans.end(), [](const auto& left, const auto& right) {
            return left.second.used < right.second.used;
        });
        planned_heads -= oldest->second.heads;
        plans.erase(oldest);
    }
    planned_heads += heads;
    Entry& entry = plans.emplace(digest, Entry{std::move(planned), heads, ++calls}).first->second;
    return entry.plan->run(args, rets, attributes);
}

template <Direction direction>
ffi::Error run_call(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) try {
    if (run_planned(direction, args, rets, attributes)) return ffi::Error::Success();
    const Call call(args, rets, attributes, result_names(direction));
    const auto build = [&](Problem& p, const Shape& example) {
        const Inputs in = call.inputs(p, example);
        if constexpr (direction == Direction::forward) return build_forward(p, in, forward_arrays(call, p, example));
        return build_backward(p, in, backward_arrays(call, p, example));
    };
    if constexpr (direction == Direction::forward) return run_mapped(call, build, run_forward);
    call.clear_results();
    return run_mapped(call, build, run_backward);
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
