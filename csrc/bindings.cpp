// The only C++ that knows Python: arguments in, a Problem to the chosen kernels, errors out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

#include "attention.h"
#include "border.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace attnscore;

namespace {

// ---- targets ----

std::atomic<const Kernels*> selected{nullptr};

std::string names_of(const std::vector<const Kernels*>& kernels) {
    std::string names;
    for (const Kernels* k : kernels) names += std::string(names.empty() ? "" : ", ") + "'" + k->name + "'";
    return names;
}

const Kernels* kernels_named(std::string_view name, const std::string& argument) {
    const std::vector<const Kernels*> runnable = runnable_kernels();
    for (const Kernels* k : runnable) {
        if (name == k->name) return k;
    }
    throw std::invalid_argument(argument + ": expected a target that this CPU runs, one of " + names_of(runnable) +
                                ", got '" + std::string(name) + "'");
}

// At the first use, not at import: a wrong environment variable must not take the whole package away.
const Kernels& kernels() {
    const Kernels* found = selected.load(std::memory_order_acquire);
    if (found == nullptr) {
        const char* name = std::getenv("ATTNSCORE_TARGET");
        found = name != nullptr && *name != '\0' ? kernels_named(name, "environment variable ATTNSCORE_TARGET")
                                                 : runnable_kernels().front();
        selected.store(found, std::memory_order_release);
    }
    return *found;
}

std::vector<std::string> targets() {
    std::vector<std::string> names;
    for (const Kernels* k : runnable_kernels()) names.emplace_back(k->name);
    return names;
}

std::string current_target() { return kernels().name; }

void select_target(std::string_view name) { selected.store(kernels_named(name, "name"), std::memory_order_release); }

// ---- threads ----

int default_threads() {
    // "4,2" means 4 outside and 2 in nested regions; what is no number is ignored, as OpenMP does.
    const char* wanted = std::getenv("OMP_NUM_THREADS");
    const long count = wanted != nullptr ? std::strtol(wanted, nullptr, 10) : 0;
    if (count > 0) return static_cast<int>(std::min(count, 1024L));
#ifdef __linux__
    cpu_set_t allowed;  // fewer than the machine has in a container or under taskset
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return std::max(1, CPU_COUNT(&allowed));
#endif
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

std::atomic<int> chosen_threads{0};

int get_num_threads() {
    int count = chosen_threads.load(std::memory_order_relaxed);
    if (count == 0) {
        count = default_threads();
        chosen_threads.store(count, std::memory_order_relaxed);
    }
    return count;
}

void set_num_threads(int count) {
    if (count < 1) throw std::invalid_argument("n: expected at least 1 thread, got " + std::to_string(count));
    chosen_threads.store(count, std::memory_order_relaxed);
}

// The tasks without the interpreter's lock. A task that throws would end the process: what it threw is kept instead.
struct Run {
    const Problem& problem;
    void (*task)(const Problem&, int64_t);
    std::atomic<bool> failed{false};
    std::exception_ptr error;

    static void one(int64_t task, void* context) {
        Run& run = *static_cast<Run*>(context);
        try {
            run.task(run.problem, task);
        } catch (...) {
            if (!run.failed.exchange(true)) run.error = std::current_exception();
        }
    }
};

void run(const Problem& problem, int64_t (*count)(const Problem&), void (*task)(const Problem&, int64_t), int threads) {
    if (threads < 0)
        throw std::invalid_argument("threads: expected 0 (as set) or more, got " + std::to_string(threads));
    if (problem.heads.empty()) return;
    Run context{problem, task};
    {
        nb::gil_scoped_release released;
        parallel(count(problem), Run::one, &context, threads == 0 ? get_num_threads() : threads);
    }
    if (context.failed) std::rethrow_exception(context.error);
}

// ---- arguments ----

template <class T>
using Choice = std::pair<std::string_view, T>;

constexpr Choice<Dtype> kDtypes[] = {
    {"float32", Dtype::f32}, {"float64", Dtype::f64}, {"bfloat16", Dtype::bf16}, {"float16", Dtype::f16}};
constexpr Choice<Form> kForms[] = {{"inner", Form::inner}, {"additive", Form::additive}};
constexpr Choice<Activation> kActivations[] = {{"tanh", Activation::tanh},
                                               {"sigmoid", Activation::sigmoid},
                                               {"relu", Activation::relu},
                                               {"leaky_relu", Activation::leaky_relu}};

template <class T, size_t N>
T choice(const Choice<T> (&choices)[N], std::string_view name, const char* argument) {
    std::string known;
    for (const auto& [text, value] : choices) {
        if (text == name) return value;
        known += (known.empty() ? "'" : ", '") + std::string(text) + "'";
    }
    throw std::invalid_argument(std::string(argument) + ": expected one of " + known + ", got '" + std::string(name) +
                                "'");
}

Problem problem_of(std::string_view form, std::string_view activation, double negative_slope, double scale,
                   std::string_view score_dtype, std::string_view value_dtype) {
    Problem p;
    p.form = choice(kForms, form, "form");
    p.activation = choice(kActivations, activation, "activation");
    p.negative_slope = negative_slope;
    p.scale = scale;
    p.score_dtype = choice(kDtypes, score_dtype, "score_dtype");
    p.value_dtype = choice(kDtypes, value_dtype, "value_dtype");
    if (p.value_dtype == Dtype::f64 && p.score_dtype != Dtype::f64) {
        throw std::invalid_argument("value_dtype: float64 needs score_dtype float64, got '" + std::string(score_dtype) +
                                    "'");
    }
    return p;
}

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

void forward(nb::handle query, nb::handle key, nb::handle value, nb::handle out, nb::handle statistics,
             nb::handle start, nb::handle stop, nb::handle weights, std::string_view form, std::string_view activation,
             double negative_slope, double scale, std::string_view score_dtype, std::string_view value_dtype,
             bool full_statistics, int threads) {
    const Kernels& chosen = kernels();
    Problem p = problem_of(form, activation, negative_slope, scale, score_dtype, value_dtype);
    p.full_statistics = full_statistics;
    const Dtype sum = sum_dtype(p);
    Arguments from;
    set_forward(p, {.query = from.in("query", query, p.score_dtype),
                    .key = from.in("key", key, p.score_dtype),
                    .value = from.in("value", value, p.value_dtype),
                    .out = from.out("out", out, p.value_dtype),
                    .statistics = from.out("statistics", statistics, sum),
                    .start = from.integers("start", start),
                    .stop = from.integers("stop", stop),
                    .weights = from.in("weights", weights, sum)});
    run(p, chosen.forward_tasks, chosen.forward, threads);
}

void backward(nb::handle query, nb::handle key, nb::handle value, nb::handle grad_out, nb::handle top,
              nb::handle log_total, nb::handle shift, nb::handle start, nb::handle stop, nb::handle weights,
              nb::handle grad_query, nb::handle grad_key, nb::handle grad_value, nb::handle grad_weights,
              std::string_view form, std::string_view activation, double negative_slope, double scale,
              std::string_view score_dtype, std::string_view value_dtype, std::string_view grad_dtype, int threads) {
    const Kernels& chosen = kernels();
    Problem p = problem_of(form, activation, negative_slope, scale, score_dtype, value_dtype);
    p.grad_dtype = choice(kDtypes, grad_dtype, "grad_dtype");
    const Dtype sum = sum_dtype(p);
    Arguments from;
    set_backward(p, {.query = from.in("query", query, p.score_dtype),
                     .key = from.in("key", key, p.score_dtype),
                     .value = from.in("value", value, p.value_dtype),
                     .grad_out = from.in("grad_out", grad_out, p.grad_dtype),
                     .top = from.in("top", top, sum),
                     .log_total = from.in("log_total", log_total, sum),
                     .shift = from.in("shift", shift, sum),
                     .start = from.integers("start", start),
                     .stop = from.integers("stop", stop),
                     .weights = from.in("weights", weights, sum),
                     .grad_query = from.out("grad_query", grad_query, sum),
                     .grad_key = from.out("grad_key", grad_key, sum),
                     .grad_value = from.out("grad_value", grad_value, sum),
                     .grad_weights = from.out("grad_weights", grad_weights, sum)});
    run(p, chosen.backward_tasks, chosen.backward, threads);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The native CPU kernels; attnscore.kernels.native is the door to them.";
    m.attr("STATISTICS") = kStatistics;
    m.def("targets", &targets);
    m.def("current_target", &current_target);
    m.def("select", &select_target, "name"_a);
    m.def("get_num_threads", &get_num_threads);
    m.def("set_num_threads", &set_num_threads, "n"_a);
    m.def("forward", &forward, "query"_a.none(), "key"_a.none(), "value"_a.none(), "out"_a.none(),
          "statistics"_a.none(), "start"_a.none(), "stop"_a.none(), "weights"_a.none(), nb::kw_only(), "form"_a,
          "activation"_a, "negative_slope"_a, "scale"_a, "score_dtype"_a, "value_dtype"_a, "full_statistics"_a,
          "threads"_a);
    m.def("backward", &backward, "query"_a.none(), "key"_a.none(), "value"_a.none(), "grad_out"_a.none(),
          "top"_a.none(), "log_total"_a.none(), "shift"_a.none(), "start"_a.none(), "stop"_a.none(), "weights"_a.none(),
          "grad_query"_a.none(), "grad_key"_a.none(), "grad_value"_a.none(), "grad_weights"_a.none(), nb::kw_only(),
          "form"_a, "activation"_a, "negative_slope"_a, "scale"_a, "score_dtype"_a, "value_dtype"_a, "grad_dtype"_a,
          "threads"_a);
}
