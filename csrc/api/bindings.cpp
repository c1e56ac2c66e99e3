// The only C++ that knows Python: arguments in, a Problem to the chosen kernels, errors out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "api/call_plan.h"
#include "api/parse.h"
#include "api/row_finish.h"
#include "api/validate.h"
#include "runtime/attention.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace attnscore;

namespace {

// ---- targets ----

std::vector<std::string> targets() {
    std::vector<std::string> names;
    for (const Kernels* k : runnable_kernels()) names.emplace_back(k->name);
    return names;
}

std::string current_target() { return selected_kernels().name; }

// ---- arguments ----

using ReadOnly = nb::ndarray<nb::ro, nb::device::cpu>;
using Writable = nb::ndarray<nb::device::cpu>;

constexpr uint8_t kInt = static_cast<uint8_t>(nb::dlpack::dtype_code::Int);
constexpr uint8_t kUInt = static_cast<uint8_t>(nb::dlpack::dtype_code::UInt);
constexpr uint8_t kFloat = static_cast<uint8_t>(nb::dlpack::dtype_code::Float);

std::string name_of(nb::dlpack::dtype d) {
    const char* kind = d.code == kInt ? "int" : d.code == kUInt ? "uint" : d.code == kFloat ? "float" : "type";
    return kind + std::to_string(d.bits);
}

// Holds what it reads until the call returns.
class Arguments {
   public:
    Array in(const char* name, nb::handle object, Dtype dtype) { return array<ReadOnly>(name, object, code_of(dtype)); }
    Array out(const char* name, nb::handle object, Dtype dtype) {
        return array<Writable>(name, object, code_of(dtype));
    }
    Array integers(const char* name, nb::handle object) { return array<ReadOnly>(name, object, {kInt, 64, 1}); }
    Array bytes(const char* name, nb::handle object) { return array<ReadOnly>(name, object, {kUInt, 8, 1}); }

   private:
    // NumPy has no bfloat16, and its float16 comes the same way: as bits.
    static nb::dlpack::dtype code_of(Dtype dtype) {
        const bool bits = dtype == Dtype::bf16 || dtype == Dtype::f16;
        return {bits ? kUInt : kFloat, static_cast<uint8_t>(size_of(dtype) * 8), 1};
    }

    template <class Kind>
    Array array(const char* name, nb::handle object, nb::dlpack::dtype expected) {
        Array a{name};
        if (object.is_none()) return a;
        Kind read;
        if (!nb::try_cast<Kind>(object, read, false)) {
            ReadOnly unlocked;
            const bool readable = !std::is_same_v<Kind, ReadOnly> && nb::try_cast<ReadOnly>(object, unlocked, false);
            throw nb::type_error((std::string(name) + ": expected a " + (readable ? "writable " : "") +
                                  "NumPy array of " + name_of(expected) + " with strides of whole elements, got " +
                                  nb::cast<std::string>(nb::str(object.type())))
                                     .c_str());
        }
        if (read.dtype() != expected) {
            throw nb::type_error(
                (std::string(name) + ": expected dtype " + name_of(expected) + ", got " + name_of(read.dtype()))
                    .c_str());
        }
        a.data = static_cast<char*>(const_cast<void*>(static_cast<const void*>(read.data())));
        a.item = expected.bits / 8;
        a.ndim = static_cast<int>(read.ndim());
        a.shape = read.shape_ptr();
        a.strides = read.stride_ptr();
        a.given = true;
        held_.emplace_back(read);
        return a;
    }

    std::vector<ReadOnly> held_;
};

// ---- the two directions ----

// Arrays or None, in the order that the stub says.
using Objects = std::vector<nb::object>;

void check_count(const char* name, const Objects& objects, size_t expected) {
    if (objects.size() != expected) {
        throw std::invalid_argument(std::string(name) + ": expected " + std::to_string(expected) + " arrays, got " +
                                    std::to_string(objects.size()));
    }
}

void check_threads(int threads) {
    if (threads < 1) throw std::invalid_argument("threads: expected 1 or more, got " + std::to_string(threads));
}

Inputs inputs_of(Arguments& from, const Problem& p, const Objects& x) {
    check_count("inputs", x, 14);
    const Dtype sum = sum_dtype(p);
    return {.query = from.in("query", x[0], p.score_dtype),
            .key = from.in("key", x[1], p.score_dtype),
            .value = from.in("value", x[2], p.value_dtype),
            .query_bias = from.in("query_bias", x[3], sum),
            .key_bias = from.in("key_bias", x[4], sum),
            .bias = from.in("bias", x[5], p.bias_dtype),
            .mask = from.bytes("mask", x[6]),
            .query_ids = from.integers("query_ids", x[7]),
            .key_ids = from.integers("key_ids", x[8]),
            .start = from.integers("start", x[9]),
            .stop = from.integers("stop", x[10]),
            .weights = from.in("weights", x[11], sum),
            .sink = from.in("sink", x[12], sum),
            .scales = from.in("scales", x[13], sum)};
}

constexpr const char* kStatisticNames[] = {"max_score",  "mean_score",     "var_score",  "entropy",
                                           "max_weight", "sum_sq_weights", "sum_weights"};

ForwardArrays forward_arrays(Arguments& from, const Problem& p, const Objects& x) {
    check_count("rows", x, 6 + kStatistics);
    const Dtype sum = sum_dtype(p);
    ForwardArrays arrays{.out = from.out("out", x[0], p.value_dtype),
                         .row_max = from.out("row_max", x[1], sum),
                         .log_denom = from.out("log_denom", x[2], sum),
                         .saved_scores = from.out("scores", x[3], sum),
                         .statistics = {},
                         .attention_scores = from.out("attention_scores", x[4], sum),
                         .attention_weights = from.out("attention_weights", x[5], sum)};
    for (size_t i = 0; i < kStatistics; ++i) {
        arrays.statistics[i] = from.out(kStatisticNames[i], x[6 + i], sum);
    }
    return arrays;
}

BackwardArrays backward_arrays(Arguments& from, const Problem& p, const Objects& saved, const Objects& gradients) {
    check_count("rows", saved, 11);
    check_count("gradients", gradients, 9);
    const Dtype sum = sum_dtype(p);
    return {.out = from.in("out", saved[0], p.value_dtype),
            .row_max = from.in("row_max", saved[1], sum),
            .log_denom = from.in("log_denom", saved[2], sum),
            .entropy = from.in("entropy", saved[3], sum),
            .saved_scores = from.in("scores", saved[4], sum),
            .attention_weights = from.in("attention_weights", saved[5], sum),
            .grad_out = from.in("grad_out", saved[6], p.grad_dtype),
            .grad_log_sum_exp = from.in("grad_log_sum_exp", saved[7], sum),
            .grad_entropy = from.in("grad_entropy", saved[8], sum),
            .grad_attention_scores = from.in("grad_attention_scores", saved[9], sum),
            .grad_attention_weights = from.in("grad_attention_weights", saved[10], sum),
            .query = from.out("grad_query", gradients[0], sum),
            .key = from.out("grad_key", gradients[1], sum),
            .value = from.out("grad_value", gradients[2], sum),
            .query_bias = from.out("grad_query_bias", gradients[3], sum),
            .key_bias = from.out("grad_key_bias", gradients[4], sum),
            .bias = from.out("grad_bias", gradients[5], sum),
            .weights = from.out("grad_weights", gradients[6], sum),
            .sink = from.out("grad_sink", gradients[7], sum),
            .scales = from.out("grad_scales", gradients[8], sum)};
}

void forward(const ScoreSpec& score, const Objects& inputs, const Objects& filled, int threads) {
    check_threads(threads);
    const Kernels& chosen = selected_kernels();
    Problem p = parse_problem(score);
    Arguments from;
    const Inputs in = inputs_of(from, p, inputs);
    const ForwardArrays arrays = forward_arrays(from, p, filled);
    check_given(arrays.row_max);
    check_given(arrays.log_denom);
    const std::vector<RowArrays> rows = build_forward(p, in, arrays);
    if (p.heads.empty()) return;
    nb::gil_scoped_release released;
    const ForwardRowFinish numbers(p, rows);
    chosen.forward(p, threads);
    numbers.finish(threads);
}

void backward(const ScoreSpec& score, const Objects& inputs, const Objects& saved, std::string_view grad_dtype,
              const Objects& gradients, int threads) {
    check_threads(threads);
    const Kernels& chosen = selected_kernels();
    Problem p = parse_problem(score);
    p.grad_dtype = parse_dtype(grad_dtype, "grad_dtype");
    Arguments from;
    const Inputs in = inputs_of(from, p, inputs);
    const std::vector<RowArrays> rows = build_backward(p, in, backward_arrays(from, p, saved, gradients));
    if (p.heads.empty()) return;
    nb::gil_scoped_release released;
    const BackwardRowPrepare prepared(p, rows, threads);
    chosen.backward(p, threads);
    set_sink_gradients(p, rows);
}

// ---- plans ----

// Addresses of arrays: whole numbers, or memory of NumPy's that is held until the call returns.
class Addresses {
   public:
    explicit Addresses(const nb::tuple& objects) {
        values.reserve(objects.size());
        for (const nb::handle object : objects) {
            if (PyLong_Check(object.ptr())) {
                values.push_back(static_cast<char*>(PyLong_AsVoidPtr(object.ptr())));
                if (PyErr_Occurred() != nullptr) throw nb::python_error();
            } else {
                Py_buffer& view = views_.emplace_back().buffer;
                if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_STRIDED_RO) != 0) throw nb::python_error();
                values.push_back(static_cast<char*>(view.buf));
            }
        }
    }
    Addresses(const Addresses&) = delete;
    Addresses& operator=(const Addresses&) = delete;

    std::vector<char*> values;

   private:
    struct View {
        Py_buffer buffer{};
        ~View() { PyBuffer_Release(&buffer); }
    };
    std::deque<View> views_;
};

CallPlan* plan_forward(const ScoreSpec& score, const Objects& inputs, const Objects& filled) {
    const Problem p = parse_problem(score);
    Arguments from;
    const Inputs in = inputs_of(from, p, inputs);
    return new CallPlan(p, in, forward_arrays(from, p, filled));
}

CallPlan* plan_backward(const ScoreSpec& score, const Objects& inputs, const Objects& saved,
                        std::string_view grad_dtype, const Objects& gradients) {
    Problem p = parse_problem(score);
    p.grad_dtype = parse_dtype(grad_dtype, "grad_dtype");
    Arguments from;
    const Inputs in = inputs_of(from, p, inputs);
    return new CallPlan(p, in, backward_arrays(from, p, saved, gradients));
}

void run_plan(const CallPlan& plan, const nb::tuple& addresses, uint64_t seed, int threads) {
    check_threads(threads);
    const Kernels& chosen = selected_kernels();
    const Addresses held(addresses);
    const nb::gil_scoped_release released;
    plan.run(chosen, held.values, seed, threads);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The native CPU kernels; attnscore.kernels.native is the door to them.";
    // A tensor that lives when Python ends holds its graph, and that a CallPlan.
    nb::set_leak_warnings(false);
    m.def("targets", &targets);
    m.def("current_target", &current_target);
    m.def("select", &select_kernels);
    // Without names or None, for nanobind's short way in.
    m.def("forward", &forward);
    m.def("backward", &backward);
    nb::class_<CallPlan>(m, "CallPlan").def("__call__", &run_plan);
    m.def("plan_forward", &plan_forward, nb::rv_policy::take_ownership);
    m.def("plan_backward", &plan_backward, nb::rv_policy::take_ownership);
}
