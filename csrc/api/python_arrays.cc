#include "api/python_arrays.h"

#include <cstring>

namespace attnscore {
namespace {

static_assert(sizeof(Py_ssize_t) == sizeof(int64_t), "shapes of buffers are read as 64-bit numbers");

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

// Written once, when the module or PyTorch's backend is imported, and read under Python's lock.
PyObject* numpy_type = nullptr;
const ExchangeApi* exchange = nullptr;
PyObject* tensor_types = nullptr;
PyObject* is_neg_name = nullptr;

bool is_tensor_type(PyTypeObject* type) {
    if (tensor_types == nullptr) return false;
    const Py_ssize_t count = PyTuple_GET_SIZE(tensor_types);
    for (Py_ssize_t i = 0; i < count; ++i)
        if (reinterpret_cast<PyObject*>(type) == PyTuple_GET_ITEM(tensor_types, i)) return true;
    return false;
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

void use_numpy(PyObject* ndarray) { numpy_type = Py_NewRef(ndarray); }

bool use_tensors(PyObject* types, PyObject* exchange_api) {
    const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(exchange_api, "dlpack_exchange_api"));
    while (api != nullptr && api->major != 1) api = api->previous;
    if (api == nullptr || api->view == nullptr) {
        PyErr_Clear();
        return false;
    }
    is_neg_name = PyUnicode_InternFromString("is_neg");
    tensor_types = Py_NewRef(types);
    exchange = api;
    return true;
}

bool get_tensor_data(PyObject* object, char*& data) {
    DlTensor found;
    if (!is_tensor_type(Py_TYPE(object))) return false;
    if (exchange->view(object, &found) != 0) {
        PyErr_Clear();
        return false;
    }
    data = static_cast<char*>(found.data) + found.byte_offset;
    return true;
}

ArrayView::ArrayView(PyObject* object) {
    const bool is_tensor = is_tensor_type(Py_TYPE(object));
    if (!is_tensor && reinterpret_cast<PyObject*>(Py_TYPE(object)) != numpy_type) return;
    if (is_tensor ? !read_tensor(object) : !read_numpy(object)) return;
    if (size() != 0 && (data_ == nullptr || reinterpret_cast<uintptr_t>(data_) % static_cast<uintptr_t>(item_) != 0)) {
        return;
    }
    kind_ = is_tensor ? Kind::tensor : Kind::numpy;
}

ArrayView::~ArrayView() {
    if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
}

bool ArrayView::read_numpy(PyObject* object) {
    if (PyObject_GetBuffer(object, &buffer_, PyBUF_STRIDED_RO | PyBUF_FORMAT) != 0) {
        PyErr_Clear();
        return false;
    }
    // One letter alone is a number in native byte order; longer formats are byte-swapped numbers or structures.
    if (buffer_.format == nullptr || buffer_.format[0] == 0 || buffer_.format[1] != 0) return false;
    format_ = buffer_.format[0] == 'l' ? 'q' : buffer_.format[0];
    ndim_ = buffer_.ndim;
    item_ = buffer_.itemsize;
    stride_unit_ = 1;
    data_ = static_cast<char*>(buffer_.buf);
    shape_ = reinterpret_cast<const int64_t*>(buffer_.shape);
    strides_ = reinterpret_cast<const int64_t*>(buffer_.strides);
    return true;
}

bool ArrayView::read_tensor(PyObject* object) {
    DlTensor found;
    // Tensors that have no memory of the CPU (fake, sparse, wrapped by a transform) fail here.
    if (exchange->view(object, &found) != 0) {
        PyErr_Clear();
        return false;
    }
    format_ = format_of(found.code, found.bits);
    if (found.device_type != kCpu || found.lanes != 1 || format_ == 0) return false;
    // A lazily negated tensor (`is_neg`) holds the negated numbers in memory, and DLPack does not say so.
    PyObject* is_neg = PyObject_CallMethodNoArgs(object, is_neg_name);
    if (is_neg == nullptr) PyErr_Clear();
    Py_XDECREF(is_neg);
    if (is_neg != Py_False) return false;
    ndim_ = found.ndim;
    item_ = found.bits / 8;
    stride_unit_ = item_;
    data_ = static_cast<char*>(found.data) + found.byte_offset;
    shape_ = found.shape;
    strides_ = found.strides;
    return true;
}

int64_t ArrayView::size() const {
    int64_t found = 1;
    for (int i = 0; i < ndim_; ++i) found *= shape_[i];
    return found;
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

void ArrayView::append_signature(std::string& to) const {
    const char head[] = {static_cast<char>(kind_), format_, static_cast<char>(ndim_)};
    to.append(head, sizeof head);
    const size_t bytes = static_cast<size_t>(ndim_) * sizeof(int64_t);
    to.append(reinterpret_cast<const char*>(shape_), bytes);
    to.append(reinterpret_cast<const char*>(strides_), bytes);
}

}  // namespace attnscore
