// Arrays of Python as the module reads them without a Python call: NumPy's by their fields, PyTorch's tensors by the
// DLPack exchange API, whose table of functions `set_tensor_types` takes.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <string>

#include "api/call_plan.h"
#include "api/decoding_plan.h"
#include "runtime/attention.h"

namespace attnscore {

// Set the type of NumPy's arrays, once, when the module is imported. False where the fields of an example, whose memory
// is at `address`, are not where they are read: float32 of the shape (2, 3) and the strides (24, 8).
bool set_numpy_type(PyObject* ndarray, PyObject* example, const void* address);
// From now on read tensors of exactly these types (a tuple), by the functions in the capsule that is their
// `__dlpack_c_exchange_api__`. Return false, and read none, where its version is unknown here.
bool set_tensor_types(PyObject* types, PyObject* exchange_api);

// Get the memory of an array that a plan has seen before, or one like it, and unless `layout` is null also its shape
// and strides: in less time than an ArrayView, which asks a tensor whether it is negated. False where it cannot be
// read or `layout` cannot hold it (many axes, parts of elements as strides): no Python error is set then.
bool get_extent(PyObject* object, Extent& extent, ArrayLayout* layout = nullptr);

struct NumpyArray;
struct DlTensor;

// Memory, dtype, shape and strides of one array, valid while the array is held and unchanged.
class ArrayView {
   public:
    // Read an array. The view is false where the object is neither of exactly NumPy's type nor of one of PyTorch's, or
    // has no aligned CPU memory in native byte order. No Python error is set then.
    explicit ArrayView(PyObject* object);
    ArrayView(const ArrayView&) = delete;
    ArrayView& operator=(const ArrayView&) = delete;

    explicit operator bool() const { return kind_ != Kind::none; }
    char* data() const { return data_; }
    // The letter of Python's struct module; 'E' for bfloat16, which has none.
    char format() const { return format_; }
    int ndim() const { return ndim_; }
    int64_t size() const;
    const int64_t* shape() const { return shape_; }
    bool is_c_contiguous() const;
    // Whether the first two axes broadcast to these sizes; a one-dimensional array has no columns.
    bool broadcasts_to(int64_t rows, int64_t columns) const;
    // The place of entry (row, column) of the array so broadcast.
    template <class T>
    const T* at(int64_t row, int64_t column) const {
        int64_t offset = shape_[0] == 1 ? 0 : row * strides_[0];
        if (ndim_ > 1 && shape_[1] != 1) offset += column * strides_[1];
        return reinterpret_cast<const T*>(data_ + offset * stride_unit_);
    }
    // Get an array of two axes as a matrix; false where its strides are no multiples of its elements.
    bool get_matrix(Matrix& to) const;
    // Whether the strides are multiples of the elements.
    bool has_whole_strides() const;
    // Append kind, dtype, shape and strides to `to`: all but the address. Calls whose arrays have equal signatures
    // share a plan.
    void append_signature(std::string& to) const;
    // Append kind, dtype and shape without the length of one axis, and no strides: what calls share whose number of
    // keys grows, and which a DecodingPlan runs.
    void append_signature_without(int length_axis, std::string& to) const;

   private:
    enum class Kind : char { none, numpy, tensor };
    friend bool get_extent(PyObject* object, Extent& extent, ArrayLayout* layout);

    ArrayView() = default;
    // Read an array, without a look at its address and at the negation of a tensor.
    bool read(PyObject* object);
    bool read_numpy(const NumpyArray& x);
    bool read_tensor(const DlTensor& x);
    // A stride in elements, where it is whole.
    int64_t stride(int axis) const { return strides_[axis] / (item_ / stride_unit_); }

    Kind kind_ = Kind::none;
    char format_ = 0;
    int ndim_ = 0;
    int64_t item_ = 0;         // bytes of an element
    int64_t stride_unit_ = 1;  // bytes of a stride of 1: 1 in NumPy, an element in DLPack
    char* data_ = nullptr;
    const int64_t* shape_ = nullptr;
    const int64_t* strides_ = nullptr;
};

}  // namespace attnscore
