// The kernels as custom calls of a program that XLA has compiled: over XLA's own buffers, without Python. XLA's thread
// makes the call, the pool does the work.
// Built where jaxlib's headers are; the functions at the end are all that is seen outside (frameworks/jax_ffi.py).
#include <xla/ffi/api/ffi.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "api/parse.h"
#include "api/row_finish.h"
#include "api/validate.h"

namespace ffi = xla::ffi;

namespace attnscore {
namespace {

std::atomic<int> threads{1};

// The places of operands: a call has those whose bits are set in its attribute `given`, in this order.
// clang-format off
enum Place {
    kQuery, kKey, kValue, kQueryBias, kKeyBias, kBias, kMask, kQueryIds, kKeyIds, kStart, kStop, kWeights, kSink, kScales,
    kSeed,
    kOut, kRowMax, kLogDenom, kKnownEntropy, kKnownWeights, kGradOut, kGradLogSumExp, kGradEntropy,
    kGradAttentionScores, kGradAttentionWeights, kOperands
};
constexpr const char* kNames[] = {
    "query", "key", "value", "query_bias", "key_bias", "bias", "mask", "query_ids", "key_ids", "start", "stop",
    "weights", "sink", "scales", "seed", "out", "row_max", "log_denom", "entropy", "attention_weights", "grad_out",
    "grad_log_sum_exp", "grad_entropy", "grad_attention_scores", "grad_attention_weights"};
// And of results, by the attribute `wanted`.
constexpr const char* kForward[] = {"out", "row_max", "log_denom", "max_score", "mean_score", "var_score", "entropy",
                                    "max_weight", "sum_sq_weights", "sum_weights", "attention_scores",
                                    "attention_weights"};
constexpr const char* kBackward[] = {"grad_query", "grad_key", "grad_value", "grad_query_bias", "grad_key_bias",
                                     "grad_bias", "grad_weights", "grad_sink", "grad_scales"};
// clang-format on

const char* name_of(ffi::DataType type) {
    switch (type) {
        case ffi::DataType::F16:
            return "float16";
        case ffi::DataType::BF16:
            return "bfloat16";
        case ffi::DataType::F32:
            return "float32";
        case ffi::DataType::F64:
            return "float64";
        case ffi::DataType::PRED:
            return "bool";
        case ffi::DataType::U32:
            return "uint32";
        case ffi::DataType::S32:
            return "int32";
        case ffi::DataType::S64:
            return "int64";
        default:
            return "another dtype";
    }
}

// One buffer. In front of its own axes lie those of vmap, of length 1 where it is not mapped.
class Operand {
   public:
    // `transposed`: the buffer is (*lead, rows, 1, head, cols), the layout of Flax and Keras, for (*lead, head, 1,
    // rows, cols).
    Operand(const char* name, ffi::AnyBuffer buffer, size_t outer, bool transposed)
        : name_(name), type_(buffer.element_type()), base_(static_cast<char*>(buffer.untyped_data())) {
        item_ = static_cast<int64_t>(ffi::ByteWidth(type_));
        const ffi::AnyBuffer::Dimensions all = buffer.dimensions();
        if (all.size() < outer)
            throw std::invalid_argument(std::string(name_) + ": expected the axes of vmap in front");
        shape_.assign(all.begin() + outer, all.end());
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
        if (type_ == ffi::DataType::S32) widen(size);
    }

    std::string dtype() const { return name_of(type_); }
    const Shape& mapped() const { return mapped_; }

    Array at(const Shape& example) const {
        int64_t offset = 0;
        for (size_t i = 0; i < steps_.size(); ++i) offset += steps_[i] * example[i];
        Array a{name_};
        a.data = wide_.empty() ? base_ + offset * item_ : reinterpret_cast<char*>(const_cast<int64_t*>(&wide_[offset]));
        a.item = item_;
        a.ndim = static_cast<int>(shape_.size());
        a.shape = shape_.data();
        a.strides = strides_.data();
        a.given = true;
        return a;
    }

    void expect(const std::string& dtype) const {
        if (this->dtype() != dtype) {
            throw std::invalid_argument(std::string(name_) + ": expected dtype " + dtype + ", got " + this->dtype());
        }
    }

   private:
    // Programs without 64-bit numbers have lengths and ids of 32.
    void widen(int64_t size) {
        const auto* narrow = reinterpret_cast<const int32_t*>(base_);
        wide_.assign(narrow, narrow + size);
        type_ = ffi::DataType::S64;
        item_ = 8;
    }

    const char* name_;
    ffi::DataType type_;
    char* base_;
    int64_t item_;
    Shape shape_, strides_, mapped_, steps_;
    std::vector<int64_t> wide_;
};

class Call {
   public:
    template <size_t N>
    Call(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes, const char* const (&results)[N])
        : attributes_(attributes), results_(results), in_(kOperands), out_(N) {
        const auto given = attribute<int64_t>("given"), transposed = attribute<int64_t>("turned");
        const auto wanted = attribute<int64_t>("wanted"), axes = attribute<int64_t>("axes");
        const size_t most = rets.size() ? rets.get<ffi::AnyBuffer>(0).value()->dimensions().size() : 0;
        if (most < static_cast<size_t>(axes)) throw std::invalid_argument("axes: expected those of the first result");
        const size_t outer = most - static_cast<size_t>(axes);
        size_t next = 0;
        for (size_t i = 0; i < kOperands; ++i) {
            if (!(given >> i & 1)) continue;
            if (next == args.size()) throw std::invalid_argument(std::string(kNames[i]) + ": expected a buffer");
            in_[i].emplace(kNames[i], args.get<ffi::AnyBuffer>(next++).value(), outer, transposed >> i & 1);
        }
        next = 0;
        for (size_t i = 0; i < N; ++i) {
            if (!(wanted >> i & 1)) continue;
            if (next == rets.size()) throw std::invalid_argument(std::string(results[i]) + ": expected a buffer");
            buffers_.push_back(*rets.get<ffi::AnyBuffer>(next++).value());
            out_[i].emplace(results[i], buffers_.back(), outer, false);
            if (next == 1) examples_ = out_[i]->mapped();
            check_mapped(*out_[i]);
        }
        for (const auto& x : in_) {
            if (x) check_mapped(*x);
        }
    }

    Array in(Place i, const Shape& example, const std::string& dtype) const {
        return read(in_[i], kNames[i], example, dtype);
    }
    Array out(size_t i, const Shape& example, const std::string& dtype) const {
        return read(out_[i], results_[i], example, dtype);
    }

    std::string dtype_of(Place i) const { return in_[i] ? in_[i]->dtype() : "float32"; }

    void clear_results() const {
        for (const ffi::AnyBuffer& x : buffers_) {
            if (x.size_bytes()) std::memset(x.untyped_data(), 0, x.size_bytes());
        }
    }

    int64_t examples() const {
        int64_t count = 1;
        for (const int64_t n : examples_) count *= n;
        return count;
    }

    Shape example(int64_t number) const {
        Shape place(examples_.size());
        for (size_t i = place.size(); i-- > 0; number /= examples_[i]) place[i] = number % examples_[i];
        return place;
    }

    Problem problem(const Shape& example) const {
        Caps caps;
        const auto numbers = attribute<ffi::Span<const double>>("caps");
        for (size_t i = 0; i + 1 < numbers.size(); i += 2) caps.emplace_back(numbers[i], numbers[i + 1]);
        auto seed = static_cast<uint64_t>(attribute<int64_t>("seed"));
        if (in_[kSeed]) {
            const Array words = in(kSeed, example, "uint32");
            if (words.ndim != 1 || words.shape[0] != 2) throw_invalid(words, "two words", shape_text(words));
            const auto* word = reinterpret_cast<const uint32_t*>(words.data);
            seed = word[0] | static_cast<uint64_t>(word[1]) << 32;
        }
        const std::string score = dtype_of(kQuery), value = dtype_of(kValue), bias = dtype_of(kBias);
        Problem p = parse_problem({attribute<std::string_view>("form"), attribute<std::string_view>("activation"),
                                   attribute<double>("negative_slope"), attribute<double>("scale"), caps, score, value,
                                   bias, attribute<double>("dropout"), seed});
        if (in_[kGradOut]) p.grad_dtype = parse_dtype(dtype_of(kGradOut), "grad_out");
        return p;
    }

    Inputs inputs(const Shape& at, const std::string& sum) const {
        const std::string score = dtype_of(kQuery), whole = "int64";
        return {.query = in(kQuery, at, score),
                .key = in(kKey, at, score),
                .value = in(kValue, at, dtype_of(kValue)),
                .query_bias = in(kQueryBias, at, sum),
                .key_bias = in(kKeyBias, at, sum),
                .bias = in(kBias, at, dtype_of(kBias)),
                .mask = in(kMask, at, "bool"),
                .query_ids = in(kQueryIds, at, whole),
                .key_ids = in(kKeyIds, at, whole),
                .start = in(kStart, at, whole),
                .stop = in(kStop, at, whole),
                .weights = in(kWeights, at, sum),
                .sink = in(kSink, at, sum),
                .scales = in(kScales, at, sum)};
    }

   private:
    template <class T>
    T attribute(const char* name) const {
        const ffi::ErrorOr<T> found = attributes_.get<T>(name);
        if (!found.has_value()) throw std::invalid_argument(std::string(name) + ": " + found.error().message());
        return *found;
    }

    static Array read(const std::optional<Operand>& x, const char* name, const Shape& example,
                      const std::string& dtype) {
        if (!x) return {name};
        x->expect(dtype);
        return x->at(example);
    }

    void check_mapped(const Operand& x) const {
        for (size_t i = 0; i < examples_.size(); ++i) {
            if (x.mapped()[i] != 1 && x.mapped()[i] != examples_[i]) {
                throw_invalid(x.at(Shape(examples_.size())), "the axes of vmap, or 1", std::to_string(x.mapped()[i]));
            }
        }
    }

    ffi::Dictionary attributes_;
    const char* const* results_;
    std::vector<std::optional<Operand>> in_, out_;
    std::vector<ffi::AnyBuffer> buffers_;
    Shape examples_;
};

// The heads of `one` behind those of `whole`, which differs from it in its arrays alone.
void join(Problem& whole, Problem&& one) {
    const auto first = static_cast<int64_t>(whole.heads.size());
    if (first == 0) {
        whole = std::move(one);
        return;
    }
    for (Group& group : one.groups) {
        for (int64_t& head : group.heads) head += first;
    }
    for (BiasGroup& group : one.bias_groups) {
        for (int64_t& head : group.heads) head += first;
    }
    whole.heads.insert(whole.heads.end(), one.heads.begin(), one.heads.end());
    whole.groups.insert(whole.groups.end(), one.groups.begin(), one.groups.end());
    whole.bias_groups.insert(whole.bias_groups.end(), one.bias_groups.begin(), one.bias_groups.end());
}

// The examples of a mapped call are so many more heads of one problem: small ones share the threads. A dropout seed of
// its own makes one a call of its own.
template <class Set, class Run>
ffi::Error for_each_example(const Call& call, const Set& set, const Run& run) {
    Problem whole;
    std::vector<RowArrays> rows;
    for (int64_t i = 0; i < call.examples(); ++i) {
        const Shape example = call.example(i);
        Problem one = call.problem(example);
        const std::string sum = sum_dtype(one) == Dtype::f64 ? "float64" : "float32";
        const std::vector<RowArrays> own = set(one, example, sum);
        if (!whole.heads.empty() && one.seed != whole.seed) {
            run(whole, rows);
            whole = {};
            rows.clear();
        }
        join(whole, std::move(one));
        rows.insert(rows.end(), own.begin(), own.end());
    }
    if (!whole.heads.empty()) run(whole, rows);
    return ffi::Error::Success();
}

ffi::Error forward(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) try {
    const Kernels& kernels = selected_kernels();
    const int count = threads.load(std::memory_order_relaxed);
    const Call call(args, rets, attributes, kForward);
    const auto set = [&](Problem& p, const Shape& at, const std::string& sum) {
        const Inputs in = call.inputs(at, sum);
        ForwardArrays arrays{.out = call.out(0, at, call.dtype_of(kValue)),
                             .row_max = call.out(1, at, sum),
                             .log_denom = call.out(2, at, sum),
                             .saved_scores = {},
                             .statistics = {},
                             .attention_scores = call.out(3 + kStatistics, at, sum),
                             .attention_weights = call.out(4 + kStatistics, at, sum)};
        for (size_t i = 0; i < kStatistics; ++i) arrays.statistics[i] = call.out(3 + i, at, sum);
        return build_forward(p, in, arrays);
    };
    return for_each_example(call, set, [&](Problem& p, const std::vector<RowArrays>& rows) {
        const ForwardRowFinish numbers(p, rows);
        kernels.forward(p, count);
        numbers.finish(count);
    });
} catch (const std::exception& error) {
    return ffi::Error::InvalidArgument(error.what());
}

ffi::Error backward(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attributes) try {
    const Kernels& kernels = selected_kernels();
    const int count = threads.load(std::memory_order_relaxed);
    const Call call(args, rets, attributes, kBackward);
    call.clear_results();
    const auto set = [&](Problem& p, const Shape& at, const std::string& sum) {
        const Inputs in = call.inputs(at, sum);
        return build_backward(p, in,
                              {.out = call.in(kOut, at, call.dtype_of(kValue)),
                               .row_max = call.in(kRowMax, at, sum),
                               .log_denom = call.in(kLogDenom, at, sum),
                               .entropy = call.in(kKnownEntropy, at, sum),
                               .saved_scores = {},
                               .attention_weights = call.in(kKnownWeights, at, sum),
                               .grad_out = call.in(kGradOut, at, call.dtype_of(kGradOut)),
                               .grad_log_sum_exp = call.in(kGradLogSumExp, at, sum),
                               .grad_entropy = call.in(kGradEntropy, at, sum),
                               .grad_attention_scores = call.in(kGradAttentionScores, at, sum),
                               .grad_attention_weights = call.in(kGradAttentionWeights, at, sum),
                               .query = call.out(0, at, sum),
                               .key = call.out(1, at, sum),
                               .value = call.out(2, at, sum),
                               .query_bias = call.out(3, at, sum),
                               .key_bias = call.out(4, at, sum),
                               .bias = call.out(5, at, sum),
                               .weights = call.out(6, at, sum),
                               .sink = call.out(7, at, sum),
                               .scales = call.out(8, at, sum)});
    };
    return for_each_example(call, set, [&](Problem& p, const std::vector<RowArrays>& rows) {
        const BackwardRowPrepare prepared(p, rows, count);
        kernels.backward(p, count);
        set_sink_gradients(p, rows);
    });
} catch (const std::exception& error) {
    return ffi::Error::InvalidArgument(error.what());
}

XLA_FFI_DEFINE_HANDLER(forward_handler, forward, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(backward_handler, backward, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

}  // namespace
}  // namespace attnscore

#define ATTNSCORE_EXPORT extern "C" __attribute__((visibility("default")))

ATTNSCORE_EXPORT XLA_FFI_Error* attnscore_xla_forward(XLA_FFI_CallFrame* frame) {
    return (*attnscore::forward_handler)(frame);
}

ATTNSCORE_EXPORT XLA_FFI_Error* attnscore_xla_backward(XLA_FFI_CallFrame* frame) {
    return (*attnscore::backward_handler)(frame);
}

// How many threads the calls use from now on: nobody can be asked while a program runs.
ATTNSCORE_EXPORT void attnscore_xla_threads(int count) { attnscore::threads.store(count, std::memory_order_relaxed); }
