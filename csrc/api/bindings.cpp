// The only C++ that knows Python: arguments in, a Problem to the chosen kernels, errors out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
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

void forward(const ScoreSpec& score, const Objects& inputs, const Objects& filled, int threads) {
    check_threads(threads);
    check_count("rows", filled, 6 + kStatistics);
    const Kernels& chosen = selected_kernels();
    Problem p = parse_problem(score);
    const Dtype sum = sum_dtype(p);
    Arguments from;
    const Inputs in = inputs_of(from, p, inputs);
    ForwardArrays arrays{.out = from.out("out", filled[0], p.value_dtype),
                         .row_max = from.out("row_max", filled[1], sum),
                         .log_denom = from.out("log_denom", filled[2], sum),
                         .saved_scores = from.out("scores", filled[3], sum),
                         .statistics = {},
                         .attention_scores = from.out("attention_scores", filled[4], sum),
                         .attention_weights = from.out("attention_weights", filled[5], sum)};
    for (size_t i = 0; i < kStatistics; ++i) {
        arrays.statistics[i] = from.out(kStatisticNames[i], filled[6 + i], sum);
    }
    check_given(arrays.row_max);
    check_given(arrays.log_denom);
    const std::vector<RowArrays> rows = build_forward(p, in, arrays);
    if (p.heads.empty()) return;
    nb::gil_scoped_release released;
    const ForwardRowFinish numbers(p, rows);
    chosen.forward(p, threads);
    numbers.finish(threads);
}

void backward(const ScoreSpec& score, const Objects& inputs, const Objects& known, std::string_view grad_dtype,
              const Objects& gradients, int threads) {
    check_threads(threads);
    check_count("rows", known, 11);
    check_count("gradients", gradients, 9);
    const Kernels& chosen = selected_kernels();
    Problem p = parse_problem(score);
    p.grad_dtype = parse_dtype(grad_dtype, "grad_dtype");
    const Dtype sum = sum_dtype(p);
    Arguments from;
    const Inputs in = inputs_of(from, p, inputs);
    const std::vector<RowArrays> rows =
        build_backward(p, in,
                       {.out = from.in("out", known[0], p.value_dtype),
                        .row_max = from.in("row_max", known[1], sum),
                        .log_denom = from.in("log_denom", known[2], sum),
                        .entropy = from.in("entropy", known[3], sum),
                        .saved_scores = from.in("scores", known[4], sum),
                        .attention_weights = from.in("attention_weights", known[5], sum),
                        .grad_out = from.in("grad_out", known[6], p.grad_dtype),
                        .grad_log_sum_exp = from.in("grad_log_sum_exp", known[7], sum),
                        .grad_entropy = from.in("grad_entropy", known[8], sum),
                        .grad_attention_scores = from.in("grad_attention_scores", known[9], sum),
                        .grad_attention_weights = from.in("grad_attention_weights", known[10], sum),
                        .query = from.out("grad_query", gradients[0], sum),
                        .key = from.out("grad_key", gradients[1], sum),
                        .value = from.out("grad_value", gradients[2], sum),
                        .query_bias = from.out("grad_query_bias", gradients[3], sum),
                        .key_bias = from.out("grad_key_bias", gradients[4], sum),
                        .bias = from.out("grad_bias", gradients[5], sum),
                        .weights = from.out("grad_weights", gradients[6], sum),
                        .sink = from.out("grad_sink", gradients[7], sum),
                        .scales = from.out("grad_scales", gradients[8], sum)});
    if (p.heads.empty()) return;
    nb::gil_scoped_release released;
    const BackwardRowPrepare prepared(p, rows, threads);
    chosen.backward(p, threads);
    set_sink_gradients(p, rows);
}

// ---- a plan forward, prepared ----

// Where an array begins: an address as it is, or memory of NumPy's.
class Address {
   public:
    explicit Address(nb::handle object) {
        if (PyLong_Check(object.ptr())) {
            address_ = static_cast<char*>(PyLong_AsVoidPtr(object.ptr()));
            if (PyErr_Occurred() != nullptr) throw nb::python_error();
        } else {
            if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_STRIDED_RO) != 0) throw nb::python_error();
            address_ = static_cast<char*>(view_.buf);
        }
    }
    Address(const Address&) = delete;
    Address& operator=(const Address&) = delete;
    ~Address() { PyBuffer_Release(&view_); }

    char* address() const { return address_; }

   private:
    Py_buffer view_{};
    char* address_ = nullptr;
};

CallPlan* prepared(const ScoreSpec& score, const Objects& x) {
    check_count("arrays", x, 7);
    const Problem p = parse_problem(score);
    Arguments from;
    return new CallPlan(p,
                        {from.in("query", x[0], p.score_dtype), from.in("key", x[1], p.score_dtype),
                         from.in("value", x[2], p.value_dtype), from.out("out", x[3], p.value_dtype),
                         from.in("weights", x[4], sum_dtype(p))},
                        from.integers("start", x[5]), from.integers("stop", x[6]));
}

void run_plan(const CallPlan& plan, nb::handle query, nb::handle key, nb::handle value, nb::handle out,
              nb::handle weights, nb::handle rows, nb::handle scores, nb::handle attention_weights, int threads) {
    check_threads(threads);
    const Kernels& chosen = selected_kernels();
    const Address q(query), k(key), v(value), o(out), w(weights), r(rows), s(scores), a(attention_weights);
    const nb::gil_scoped_release released;
    plan.run(chosen, {q.address(), k.address(), v.address(), o.address(), w.address()},
             {r.address(), s.address(), a.address()}, threads);
}

void run_plan_backward(const CallPlan& plan, nb::handle query, nb::handle key, nb::handle value, nb::handle out,
                       nb::handle weights, nb::handle rows, nb::handle scores, nb::handle attention_weights,
                       nb::handle grad_out, nb::handle grad_attention_weights, nb::handle grad_query,
                       nb::handle grad_key, nb::handle grad_value, nb::handle grad_weights, int threads) {
    check_threads(threads);
    const Kernels& chosen = selected_kernels();
    const Address q(query), k(key), v(value), o(out), w(weights), r(rows), s(scores), g(grad_out);
    const Address a(attention_weights), ga(grad_attention_weights);
    const Address gq(grad_query), gk(grad_key), gv(grad_value), gw(grad_weights);
    const nb::gil_scoped_release released;
    plan.backward(chosen, {q.address(), k.address(), v.address(), o.address(), w.address()},
                  {r.address(), s.address(), a.address()},
                  {g.address(), ga.address(), gq.address(), gk.address(), gv.address(), gw.address()}, threads);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The native CPU kernels; attnscore.kernels.native is the door to them.";
    // A tensor that lives when Python ends holds its graph, and that a prepared call.
    nb::set_leak_warnings(false);
    m.def("targets", &targets);
    m.def("current_target", &current_target);
    m.def("select", &select_kernels);
    // Without names or None, for nanobind's short way in.
    m.def("forward", &forward);
    m.def("backward", &backward);
    nb::class_<CallPlan>(m, "CallPlan").def("__call__", &run_plan).def("backward", &run_plan_backward);
    m.def("prepared", &prepared, nb::rv_policy::take_ownership);
}
