#include "api/python_arrays.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <string_view>
#include <utility>

namespace attnscore {

static_assert(sizeof(Py_ssize_t) == sizeof(int64_t), "shapes of NumPy's arrays are read as 64-bit numbers");

// The first fields of NumPy's dtypes and arrays, which its ABI keeps (numpy/ndarraytypes.h): the buffer protocol, which
// describes each array anew, takes a tiny call a tenth of its time.
struct NumpyDtype {
    PyObject_HEAD PyTypeObject* scalar;
    char kind, letter, byte_order, flags;
    int number;
};
struct NumpyArray {
    PyObject_HEAD char* data;
    int ndim;
    const int64_t* shape;
    const int64_t* strides;
    PyObject* base;
    const NumpyDtype* dtype;
    int flags;
};

// The parts of the DLPack 1.x ABI that are read here (github.com/dmlc/dlpack, dlpack.h).
struct DlTensor {
    void* data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};

namespace {

constexpr int kAligned = 0x100;  // a flag of arrays

const NumpyArray& numpy_array(const PyObject* object) { return *reinterpret_cast<const NumpyArray*>(object); }

// Bytes of an element, by the letter of Python's struct module; 0 for a dtype that is not read here.
constexpr auto kLetterSizes = [] {
    constexpr std::pair<std::string_view, int64_t> sizes[] = {
        {"?bB", 1}, {"hHe", 2}, {"iIf", 4}, {"lL", sizeof(long)}, {"qQd", 8}};
    std::array<int64_t, 128> of_letter{};
    for (const auto& [letters, size] : sizes)
        for (const char letter : letters) of_letter[static_cast<size_t>(letter)] = size;
    return of_letter;
}();

// Bytes of an element of a dtype.
int64_t item_of(const NumpyDtype& dtype) {
    // NumPy's own dtypes; other libraries' dtypes have larger numbers and letters of their own.
    constexpr int kOwnTypes = 24;
    return dtype.number < kOwnTypes ? kLetterSizes[dtype.letter & 0x7f] : 0;
}

struct ExchangeApi {
    uint32_t major, minor;
    ExchangeApi* previous;
    void* allocate;
    void* from_object;
    void* to_object;
    int (*view)(void* object, DlTensor* out);  // may be null
    void* current_stream;
};
constexpr int32_t kCpu = 1;

// Written once, when the module or PyTorch's backend is imported. Other threads may read arrays while PyTorch is being
// imported: the types are written last.
PyObject* numpy_type = nullptr;
const ExchangeApi* exchange = nullptr;
PyObject* is_neg_name = nullptr;
std::atomic<PyObject*> tensor_types{nullptr};

// Whether a type is one of `tensor_types` itself: a subclass may override what its memory means.
bool is_tensor_type(PyTypeObject* type) {
    PyObject* types = tensor_types.load(std::memory_order_acquire);
    if (types == nullptr) return false;
    const Py_ssize_t count = PyTuple_Size(types);
    for (Py_ssize_t i = 0; i < count; ++i)
        if (reinterpret_cast<PyObject*>(type) == PyTuple_GetItem(types, i)) return true;
    return false;
}

// Whether a tensor is lazily negated: the negated numbers are in its memory, and DLPack does not say so.
bool is_negated(PyObject* tensor) {
    PyObject* is_neg = PyObject_VectorcallMethod(is_neg_name, &tensor, 1, nullptr);
    if (is_neg == nullptr) PyErr_Clear();
    Py_XDECREF(is_neg);
    return is_neg != Py_False;  // after an error, too: such a tensor is not read
}

// The letter of a dtype, by DLPack's codes: 0 signed, 1 unsigned, 2 floating, 4 bfloat, 6 bool. 0 for any other.
char format_of(uint8_t code, uint8_t bits) {
    switch (code) {
        case 0:
            return bits == 64 ? 'q' : bits == 32 ? 'i' : bits == 16 ? 'h' : 'b';
        case 1:
            return bits == 64 ? 'Q' : bits == 32 ? 'I' : bits == 16 ? 'H' : 'B';
        case 2:
            return bits == 64 ? 'd' : bits == 32 ? 'f' : bits == 16 ? 'e' : 0;
        case 4:
            return bits == 16 ? 'E' : 0;
        case 6:
            return bits == 8 ? '?' : 0;
        default:
            return 0;
    }
}

}  // namespace

bool set_numpy_type(PyObject* ndarray, PyObject* example, const void* address) {
    const NumpyArray& x = numpy_array(example);
    PyObject* bytes = PyObject_GetAttrString(ndarray, "__basicsize__");
    const bool has_fields = bytes != nullptr && PyLong_AsSsize_t(bytes) >= static_cast<Py_ssize_t>(sizeof(NumpyArray));
    Py_XDECREF(bytes);
    if (!has_fields || x.data != address) return false;
    if (x.ndim != 2 || x.shape[0] != 2 || x.shape[1] != 3 || x.strides[0] != 24 || x.strides[1] != 8) return false;
    if ((x.flags & kAligned) == 0 || x.dtype->letter != 'f' || x.dtype->byte_order != '=') return false;
    numpy_type = Py_NewRef(ndarray);
    return true;
}

bool set_tensor_types(PyObject* types, PyObject* exchange_api) {
    const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(exchange_api, "dlpack_exchange_api"));
    while (api != nullptr && api->major != 1) api = api->previous;
    if (api == nullptr || api->view == nullptr) {
        PyErr_Clear();
        return false;
    }
    is_neg_name = PyUnicode_InternFromString("is_neg");
    exchange = api;
    tensor_types.store(Py_NewRef(types), std::memory_order_release);
    return true;
}

ArrayView::ArrayView(PyObject* object) {
    if (!read(object) || (kind_ == Kind::tensor && is_negated(object)) ||
        (size() != 0 &&
         (data_ == nullptr || reinterpret_cast<uintptr_t>(data_) % static_cast<uintptr_t>(item_) != 0))) {
        kind_ = Kind::none;
    }
}

bool ArrayView::read(PyObject* object) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) == numpy_type) return read_numpy(numpy_array(object));
    DlTensor x;
    if (!is_tensor_type(Py_TYPE(object))) return false;
    // Tensors without strided memory (fake, sparse, wrapped by a transform) fail here.
    if (exchange->view(object, &x) != 0) {
        PyErr_Clear();
        return false;
    }
    return read_tensor(x);
}

bool ArrayView::read_numpy(const NumpyArray& x) {
    item_ = item_of(*x.dtype);
    const bool is_native = x.dtype->byte_order == '=' || x.dtype->byte_order == '|';
    if (item_ == 0 || !is_native || (x.flags & kAligned) == 0) return false;
    kind_ = Kind::numpy;
    format_ = x.dtype->letter == 'l' ? (sizeof(long) == 8 ? 'q' : 'i') : x.dtype->letter;
    ndim_ = x.ndim;
    stride_unit_ = 1;
    data_ = x.data;
    shape_ = x.shape;
    strides_ = x.strides;
    return true;
}

bool ArrayView::read_tensor(const DlTensor& x) {
    format_ = format_of(x.code, x.bits);
    if (x.device_type != kCpu || x.lanes != 1 || format_ == 0) return false;
    kind_ = Kind::tensor;
    ndim_ = x.ndim;
    item_ = x.bits / 8;
    stride_unit_ = item_;
    data_ = static_cast<char*>(x.data) + x.byte_offset;
    shape_ = x.shape;
    strides_ = x.strides;
    return true;
}

bool get_extent(PyObject* object, Extent& extent, ArrayLayout* layout) {
    ArrayView x;
    if (!x.read(object)) return false;
    extent = {x.data_, 0, x.item_};
    for (int i = 0; i < x.ndim_; ++i) extent.add_axis(x.shape_[i], x.strides_[i] * x.stride_unit_);
    if (x.size() == 0) extent = {x.data_};
    if (layout == nullptr) return true;
    layout->axes = static_cast<size_t>(x.ndim_);
    if (layout->axes > layout->shape.size() || !x.has_whole_strides()) return false;
    std::copy_n(x.shape_, x.ndim_, layout->shape.begin());
    for (int i = 0; i < x.ndim_; ++i) layout->strides[static_cast<size_t>(i)] = x.stride(i);
    return true;
}

int64_t ArrayView::size() const {
    int64_t count = 1;
    for (int i = 0; i < ndim_; ++i) count *= shape_[i];
    return count;
}

bool ArrayView::is_c_contiguous() const {
    int64_t expected = item_ / stride_unit_;
    for (int i = ndim_ - 1; i >= 0; --i) {
        if (shape_[i] != 1 && strides_[i] != expected) return false;
        expected *= shape_[i];
    }
    return true;
}

bool ArrayView::broadcasts_to(int64_t rows, int64_t columns) const {
    return (shape_[0] == 1 || shape_[0] == rows) && (ndim_ < 2 || shape_[1] == 1 || shape_[1] == columns);
}

bool ArrayView::get_matrix(Matrix& to) const {
    if (!has_whole_strides()) return false;
    to = {data_, stride(0), stride(1)};
    return true;
}

bool ArrayView::has_whole_strides() const {
    const int64_t units = item_ / stride_unit_;
    return std::all_of(strides_, strides_ + ndim_, [units](int64_t stride) { return stride % units == 0; });
}

void ArrayView::append_signature(std::string& to) const {
    append_signature_without(ndim_, to);  // the axes end before it: none is left out
    to.append(reinterpret_cast<const char*>(strides_), static_cast<size_t>(ndim_) * sizeof(int64_t));
}

void ArrayView::append_signature_without(int length_axis, std::string& to) const {
    const char head[] = {static_cast<char>(kind_), format_, static_cast<char>(ndim_)};
    to.append(head, sizeof head);
    const auto append = [&](int from, int end) {
        if (from < end)
            to.append(reinterpret_cast<const char*>(shape_ + from), static_cast<size_t>(end - from) * sizeof(int64_t));
    };
    append(0, length_axis);
    append(length_axis + 1, ndim_);
}

}  // namespace attnscore
