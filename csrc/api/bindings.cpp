// Python bindings: arguments in, a Problem to the selected kernels, errors out. Only this file and python_arrays.cc
// know Python. _native.pyi documents the functions of the module.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "api/call_plan.h"
#include "api/decoding_plan.h"
#include "api/parse.h"
#include "api/python_arrays.h"
#include "api/row_finish.h"
#include "api/validate.h"
#include "runtime/attention.h"
#include "runtime/cpu.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace attnscore;

namespace {

// Python's lock, released in this scope. A daemon thread cannot get it back once Python ends: before 3.14 CPython then
// ends the thread by an exception that no destructor may pass on, which would end the process. Such a thread sleeps
// instead.
class ReleasedLock {
   public:
    ReleasedLock() : state_(PyEval_SaveThread()) {}
    ~ReleasedLock() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {
            for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
        }
    }
    ReleasedLock(const ReleasedLock&) = delete;
    ReleasedLock& operator=(const ReleasedLock&) = delete;

   private:
    PyThreadState* state_;
};

// ---- targets ----

std::vector<std::string> targets() {
    std::vector<std::string> names;
    for (const Kernels* k : runnable_kernels()) names.emplace_back(k->name);
    return names;
}

std::vector<std::string> targets_left_out() {
    std::vector<std::string> names;
    const std::vector<std::string> compiled = targets();
    for (std::string_view name : targets_of_cpu())
        if (std::find(compiled.begin(), compiled.end(), name) == compiled.end()) names.emplace_back(name);
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

// Arrays or None, in the order of validate.h.
using Objects = std::vector<nb::object>;

void check_count(const char* name, const Objects& objects, size_t expected) {
    if (objects.size() != expected) {
        throw std::invalid_argument(std::string(name) + ": expected " + std::to_string(expected) + " arrays, got " +
                                    std::to_string(objects.size()));
    }
}

// A negative number stands for threads of OpenMP.
Threads threads_of(int count) {
    if (count == 0) throw std::invalid_argument("threads: expected 1 or more, or a negative number, got 0");
    return {std::abs(count), count < 0};
}

nb::dlpack::dtype dlpack_dtype(const Problem& p, Element element) {
    if (element == Element::byte) return {kUInt, 8, 1};
    if (element == Element::index) return {kInt, 64, 1};
    const Dtype dtype = dtype_of(p, element);
    // NumPy has no bfloat16, and float16 comes in the same way: as bits.
    const bool bits = dtype == Dtype::bf16 || dtype == Dtype::f16;
    return {bits ? kUInt : kFloat, static_cast<uint8_t>(size_of(dtype) * 8), 1};
}

// Reads arrays of Python, and holds them until the call returns.
class Arguments {
   public:
    explicit Arguments(const Problem& problem) : problem_(problem) {}

    // Read all arrays of a list. `Kind`: ReadOnly or Writable.
    template <class Kind, class Arrays, size_t N>
    void read_all(const char* list, const Objects& objects, const Field<Arrays> (&fields)[N], Arrays& to) {
        check_count(list, objects, N);
        for (size_t i = 0; i < N; ++i) {
            to.*fields[i].array = read<Kind>(fields[i].name, objects[i], fields[i].element);
        }
    }

    template <class Kind>
    Array read(const char* name, nb::handle object, Element element) {
        const nb::dlpack::dtype expected = dlpack_dtype(problem_, element);
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
        a.present = true;
        held_.emplace_back(read);
        return a;
    }

   private:
    const Problem& problem_;
    std::vector<ReadOnly> held_;
};

// ---- forward and backward ----

void forward(const ScoreSpec& score, const Objects& inputs, const Objects& filled, int threads) {
    const Threads max_threads = threads_of(threads);
    const Kernels& chosen = selected_kernels();
    Problem p = parse_problem(score);
    Arguments from(p);
    Inputs in;
    ForwardArrays arrays;
    from.read_all<ReadOnly>("inputs", inputs, kInputs, in);
    from.read_all<Writable>("rows", filled, kForwardArrays, arrays);
    check_present(arrays.row_max);
    check_present(arrays.log_denom);
    const std::vector<RowArrays> rows = build_forward(p, in, arrays);
    if (p.heads.empty()) return;
    const ReleasedLock released;
    run_forward(chosen, p, rows, max_threads);
}

void backward(const ScoreSpec& score, const Objects& inputs, const Objects& results, std::string_view grad_dtype,
              const Objects& gradients, int threads) {
    const Threads max_threads = threads_of(threads);
    const Kernels& chosen = selected_kernels();
    Problem p = parse_problem(score);
    p.grad_dtype = parse_dtype(grad_dtype, "grad_dtype");
    Arguments from(p);
    Inputs in;
    BackwardArrays arrays;
    from.read_all<ReadOnly>("inputs", inputs, kInputs, in);
    from.read_all<ReadOnly>("rows", results, kForwardResults, arrays);
    from.read_all<Writable>("gradients", gradients, kGradients, arrays);
    const std::vector<RowArrays> rows = build_backward(p, in, arrays);
    if (p.heads.empty()) return;
    const ReleasedLock released;
    run_backward(chosen, p, rows, max_threads);
}

// ---- call plans ----

// The memory of arrays and tensors, which is held until the call returns where it comes by the buffer protocol.
class Extents {
   public:
    explicit Extents(const nb::tuple& objects) {
        values.reserve(objects.size() + 8);
        for (const nb::handle object : objects) add(object);
    }
    // Also get the layouts of the arrays of a DecodingPlan that have an axis of keys.
    Extents(const nb::tuple& objects, const DecodingPlan& plan, std::vector<ArrayLayout>& by_key) {
        values.resize(objects.size());
        by_key.resize(plan.has_mask() ? 3 : 2);
        bool fits = objects.size() > by_key.size();
        for (size_t i = 0; fits && i < objects.size(); ++i) {
            ArrayLayout* layout = i > 0 && i <= by_key.size() ? &by_key[i - 1] : nullptr;
            fits = get_extent(nb::handle(objects[i]).ptr(), values[i], layout);
            fits = fits && (layout == nullptr || plan.has_keys(*layout, i - 1));
        }
        if (!fits) {
            throw std::invalid_argument("arrays: expected query, key, value and the mask of the plan, if it has one");
        }
    }
    void add(nb::handle object) {
        Extent extent;
        if (!get_extent(object.ptr(), extent)) {
            Py_buffer& view = views_.emplace_back().buffer;
            if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_STRIDED_RO) != 0) throw nb::python_error();
            extent = {static_cast<char*>(view.buf), 0, view.len > 0 ? view.itemsize : 0};
            for (int i = 0; view.len > 0 && i < view.ndim; ++i) extent.add_axis(view.shape[i], view.strides[i]);
        }
        values.push_back(extent);
    }
    Extents(const Extents&) = delete;
    Extents& operator=(const Extents&) = delete;

    std::vector<Extent> values;

   private:
    struct View {
        Py_buffer buffer{};
        ~View() { PyBuffer_Release(&buffer); }
    };
    std::deque<View> views_;
};

// ---- layouts ----

void read_numpy_by_fields() {
    const nb::module_ numpy = nb::module_::import_("numpy");
    const nb::object zeros = numpy.attr("zeros")(nb::make_tuple(2, 6), "f4");
    const nb::object example = zeros[nb::make_tuple(nb::ellipsis(), nb::slice(nb::none(), nb::none(), nb::int_(2)))];
    const auto address = nb::cast<uintptr_t>(example.attr("__array_interface__")["data"][nb::int_(0)]);
    if (set_numpy_type(numpy.attr("ndarray").ptr(), example.ptr(), reinterpret_cast<void*>(address))) return;
    throw nb::import_error("the fields of NumPy's arrays are not those of NumPy 1 and 2");
}

nb::object signature(nb::handle arrays) {
    std::string bytes;
    bytes.reserve(256);
    for (const nb::handle each : nb::borrow<nb::sequence>(arrays)) {
        const ArrayView view(each.ptr());
        if (!view) return nb::none();
        view.append_signature(bytes);
    }
    return nb::bytes(bytes.data(), bytes.size());
}

// The signature of query, key, value and, where there is one, a boolean mask or valid lengths, without what a
// DecodingPlan reads at each run: the number of keys, and the strides of the arrays that have an axis of keys. None
// where there is no such plan.
nb::object decoding_signature(nb::handle arrays, int head_axis) {
    std::string bytes;
    bytes.reserve(256);
    int64_t key_len = 0;
    int ndim = 0, index = 0;
    for (const nb::handle each : nb::borrow<nb::sequence>(arrays)) {
        const ArrayView view(each.ptr());
        // A plan has two canonical axes more than a caller at most.
        const int max_axes = static_cast<int>(ArrayLayout::kMaxAxes) - 2;
        if (!view || view.ndim() < (index < 3 ? 2 : 1) || view.ndim() > max_axes || !view.has_whole_strides()) {
            return nb::none();
        }
        if (index == 0) {
            ndim = view.ndim();
            view.append_signature(bytes);
        } else if (index < 3) {
            const int axis = ndim - (ndim >= 4 && head_axis == -2 ? 3 : 2);
            if (view.ndim() != ndim || (index == 2 && view.shape()[axis] != key_len)) return nb::none();
            key_len = view.shape()[axis];
            view.append_signature_without(axis, bytes);
        } else if (view.format() == '?') {
            const int64_t columns = view.shape()[view.ndim() - 1];
            // Of a single key, a mask of one column may be for all keys, or for this one.
            if (view.ndim() < 2 || key_len == 1 || (columns != 1 && columns != key_len)) return nb::none();
            view.append_signature_without(view.ndim() - 1, bytes);
            bytes.push_back(columns == 1 ? '1' : 'n');
        } else {
            view.append_signature(bytes);
        }
        ++index;
    }
    return key_len == 0 ? nb::none() : nb::object(nb::bytes(bytes.data(), bytes.size()));
}

template <class T>
bool copy_lengths(const ArrayView& lens, int64_t* target, int64_t rows, int64_t cols, int64_t max_length) {
    bool fits = true;
    for (int64_t b = 0; b < rows; ++b) {
        for (int64_t i = 0; i < cols; ++i) {
            const int64_t n = *lens.at<T>(b, lens.ndim() > 1 ? i : 0);
            fits = fits && n >= 0 && n <= max_length;
            *target++ = n;
        }
    }
    return fits;
}

// Copy lengths to (rows, cols) numbers; whether all are in 0..max_length.
bool read_lengths(nb::handle lens, int64_t* target, int64_t rows, int64_t cols, int64_t max_length) {
    const ArrayView from(lens.ptr());
    if (!from || from.ndim() < 1 || from.ndim() > 2 || (from.format() != 'i' && from.format() != 'q')) {
        throw nb::type_error("lens: expected an int32 or int64 array of one or two axes");
    }
    if (!from.broadcasts_to(rows, from.ndim() > 1 ? cols : 1)) {
        throw std::invalid_argument("lens: expected an array that broadcasts to (batch, query)");
    }
    return (from.format() == 'q' ? copy_lengths<int64_t> : copy_lengths<int32_t>)(from, target, rows, cols, max_length);
}

// Copy lengths to `to`, int64 (batch, query); whether all are in 0..max_length.
bool copy_valid_lens(nb::handle lens, nb::handle to, int64_t max_length) {
    const ArrayView out(to.ptr());
    if (!out || out.ndim() != 2 || out.format() != 'q' || !out.is_c_contiguous()) {
        throw std::invalid_argument("to: expected an int64 array (batch, query) in C order");
    }
    return read_lengths(lens, reinterpret_cast<int64_t*>(out.data()), out.shape()[0], out.shape()[1], max_length);
}

// Whether no number has this exponent, whose bits are all ones: that of NaN and infinity.
template <class Bits>
bool all_finite(const char* data, int64_t count, Bits exponent) {
    const auto* numbers = reinterpret_cast<const Bits*>(data);
    constexpr int64_t kBlock = 1024;  // compilers vectorise a loop without an exit
    for (int64_t first = 0; first < count; first += kBlock) {
        const int64_t end = std::min(first + kBlock, count);
        Bits nonfinite = 0;
        for (int64_t i = first; i < end; ++i) nonfinite |= static_cast<Bits>((numbers[i] & exponent) == exponent);
        if (nonfinite != 0) return false;
    }
    return true;
}

nb::object is_all_finite(nb::handle array) {
    const ArrayView view(array.ptr());
    if (!view || !view.is_c_contiguous()) return nb::none();
    const char* data = view.data();
    const int64_t count = view.size();
    const char format = view.format();
    if (format != 'f' && format != 'd' && format != 'e' && format != 'E') return nb::none();
    bool finite;
    {
        const ReleasedLock released;
        finite = format == 'f'   ? all_finite<uint32_t>(data, count, 0x7f800000)
                 : format == 'd' ? all_finite<uint64_t>(data, count, 0x7ff0000000000000)
                 : format == 'e' ? all_finite<uint16_t>(data, count, 0x7c00)
                                 : all_finite<uint16_t>(data, count, 0x7f80);
    }
    return nb::bool_(finite);
}

bool multiply_rows(nb::handle x, nb::handle matrix, nb::handle to, int threads) {
    const Threads max_threads = threads_of(threads);
    const ArrayView a(x.ptr()), b(matrix.ptr()), c(to.ptr());
    if (!a || !b || !c || a.ndim() < 1 || b.ndim() != 2 || c.ndim() != a.ndim()) return false;
    MatrixProduct product;
    product.depth = b.shape()[0], product.cols = b.shape()[1];
    const bool has_shapes = a.shape()[a.ndim() - 1] == product.depth && c.shape()[c.ndim() - 1] == product.cols;
    if (!has_shapes || !a.is_c_contiguous() || !c.is_c_contiguous() || a.size() == 0 || c.size() == 0) return false;
    product.rows = a.size() / product.depth;
    if (product.rows * product.cols != c.size()) return false;
    const char format = b.format();
    if ((format != 'f' && format != 'd') || a.format() != format || c.format() != format) return false;
    product.dtype = format == 'f' ? Dtype::f32 : Dtype::f64;
    product.a = a.data(), product.c = c.data();
    if (!b.get_matrix(product.b)) return false;
    const Kernels& chosen = selected_kernels();
    const ReleasedLock released;
    chosen.multiply(product, max_threads);
    return true;
}

// ---- plans ----

// A plan of a forward; `options`: the last arguments of its constructor.
template <class Plan, class... Options>
Plan* plan_forward(const ScoreSpec& score, const Objects& inputs, const Objects& filled, Options... options) {
    const Problem p = parse_problem(score);
    Arguments from(p);
    Inputs in;
    ForwardArrays arrays;
    from.read_all<ReadOnly>("inputs", inputs, kInputs, in);
    from.read_all<Writable>("rows", filled, kForwardArrays, arrays);
    return new Plan(p, in, arrays, options...);
}

CallPlan* plan_backward(const ScoreSpec& score, const Objects& inputs, const Objects& results,
                        std::string_view grad_dtype, const Objects& gradients) {
    Problem p = parse_problem(score);
    p.grad_dtype = parse_dtype(grad_dtype, "grad_dtype");
    Arguments from(p);
    Inputs in;
    BackwardArrays arrays;
    from.read_all<ReadOnly>("inputs", inputs, kInputs, in);
    from.read_all<ReadOnly>("rows", results, kForwardResults, arrays);
    from.read_all<Writable>("gradients", gradients, kGradients, arrays);
    return new CallPlan(p, in, arrays);
}

void run_plan(const CallPlan& plan, const nb::tuple& arrays, uint64_t seed, int threads) {
    const Threads max_threads = threads_of(threads);
    const Kernels& chosen = selected_kernels();
    const Extents extents(arrays);
    const ReleasedLock released;
    plan.run(chosen, extents.values, seed, max_threads);
}

// Allocate outputs by `empty(*layout)`, run a plan into them by `run(extents)`, and return them. `lens`: (), or the
// valid lengths from which the intervals of the plan are made. None where a length is out of range: nothing ran, and
// the caller raises.
template <class Run>
nb::object run_into_new(const CallPlan::Intervals& intervals, int64_t key_len, Extents& extents, const nb::tuple& lens,
                        nb::handle empty, const nb::tuple& layouts, const Run& run) {
    std::vector<int64_t> bounds;
    if (lens.size() > 0) {
        const auto [intervals_slot, rows, cols] = intervals;
        if (intervals_slot < 0 || intervals_slot > static_cast<ptrdiff_t>(extents.values.size())) {
            throw std::invalid_argument("lens: expected (), as the plan has no intervals");
        }
        bounds.resize(static_cast<size_t>(2 * rows * cols));
        int64_t* stop = bounds.data() + rows * cols;
        if (!read_lengths(lens[0], stop, rows, cols, key_len)) return nb::none();
        const int64_t bytes = rows * cols * static_cast<int64_t>(sizeof(int64_t));
        extents.values.insert(
            extents.values.begin() + intervals_slot,
            {{reinterpret_cast<char*>(bounds.data()), 0, bytes}, {reinterpret_cast<char*>(stop), 0, bytes}});
    }
    const auto count = static_cast<Py_ssize_t>(layouts.size());
    nb::object outputs = nb::steal(PyTuple_New(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
        const auto layout = nb::cast<nb::tuple>(layouts[static_cast<size_t>(i)]);
        PyObject* array = PyObject_Call(empty.ptr(), layout.ptr(), nullptr);
        if (array == nullptr) throw nb::python_error();
        PyTuple_SetItem(outputs.ptr(), i, array);
        extents.add(array);
    }
    {
        const ReleasedLock released;
        run(extents.values);
    }
    return outputs;
}

nb::object allocate_and_run(const CallPlan& plan, const nb::tuple& arrays, const nb::tuple& lens, nb::handle empty,
                            const nb::tuple& layouts, uint64_t seed, int threads) {
    const Threads max_threads = threads_of(threads);
    const Kernels& chosen = selected_kernels();
    Extents extents(arrays);
    return run_into_new(plan.intervals(), plan.key_len(), extents, lens, empty, layouts,
                        [&](const auto& all) { plan.run(chosen, all, seed, max_threads); });
}

nb::object allocate_and_run_decoding(const DecodingPlan& plan, const nb::tuple& arrays, const nb::tuple& lens,
                                     nb::handle empty, const nb::tuple& layouts, uint64_t seed, int threads) {
    const Threads max_threads = threads_of(threads);
    const Kernels& chosen = selected_kernels();
    std::vector<ArrayLayout> by_key;
    Extents extents(arrays, plan, by_key);
    return run_into_new(plan.intervals(), plan.key_len(by_key[0]), extents, lens, empty, layouts,
                        [&](const auto& all) { plan.run(chosen, all, by_key, seed, max_threads); });
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The native CPU kernels; used through attnscore's kernel \"native\".";
    // A tensor that is alive when Python ends holds its graph, and that a call plan.
    nb::set_leak_warnings(false);
    m.def("targets", &targets);
    m.def("targets_left_out", &targets_left_out);
    m.def("current_target", &current_target);
    m.def("select", &select_kernels);
    m.def("use_openmp", [](uintptr_t gomp_parallel) { use_openmp(reinterpret_cast<void*>(gomp_parallel)); });
    read_numpy_by_fields();
    m.def("set_tensor_types",
          [](nb::tuple types, nb::handle exchange_api) { return set_tensor_types(types.ptr(), exchange_api.ptr()); });
    // nanobind calls functions faster whose arguments have neither names nor None.
    m.def("forward", &forward);
    m.def("backward", &backward);
    m.def("signature", &signature);
    m.def("decoding_signature", &decoding_signature);
    m.def("copy_valid_lens", &copy_valid_lens);
    m.def("is_all_finite", &is_all_finite);
    m.def("multiply_rows", &multiply_rows);
    nb::class_<CallPlan>(m, "CallPlan").def("__call__", &run_plan).def("allocate_and_run", &allocate_and_run);
    nb::class_<DecodingPlan>(m, "DecodingPlan").def("allocate_and_run", &allocate_and_run_decoding);
    m.def("plan_forward", &plan_forward<CallPlan>, nb::rv_policy::take_ownership);
    m.def("plan_decoding", &plan_forward<DecodingPlan, bool, bool>, nb::rv_policy::take_ownership);
    m.def("plan_backward", &plan_backward, nb::rv_policy::take_ownership);
}
