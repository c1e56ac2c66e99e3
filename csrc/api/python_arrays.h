// Arrays of Python as the module reads them without a Python call: NumPy's by the buffer protocol, PyTorch's tensors by
// the DLPack exchange API, whose table of functions `use_tensors` takes.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <string>

namespace attnscore {

// Set the type of NumPy's arrays, once, when the module is imported.
void use_numpy(PyObject* ndarray);
// Take the tensors of these types (a tuple) by the capsule that is their `__dlpack_c_exchange_api__`. Return whether
// its version is one that this code knows.
bool use_tensors(PyObject* types, PyObject* exchange_api);

// Get the address of a tensor's memory; false where `object` is none of those types.
bool get_tensor_data(PyObject* object, char*& data);

// Memory, dtype, shape and strides of one array, valid while the array is held and unchanged.
class ArrayView {
   public:
    // Read an array; false where it is none of exactly these types, or has no aligned memory of the CPU in a dtype of
    // the machine. No error of Python is set then.
    explicit ArrayView(PyObject* object);
    ~ArrayView();
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
    // Whether its first two axes, a missing one and those of size 1 repeated, are of these sizes.
    bool broadcasts_to(int64_t rows, int64_t columns) const;
    // An entry of the first two axes, repeated along those of size 1.
    template <class T>
    T at(int64_t row, int64_t column) const {
        int64_t offset = shape_[0] == 1 ? 0 : row * strides_[0];
        if (ndim_ > 1 && shape_[1] != 1) offset += column * strides_[1];
        return *reinterpret_cast<const T*>(data_ + offset * stride_unit_);
    }
    // Add all but the address to `to`.
    void append_signature(std::string& to) const;

   private:
    enum class Kind : char { none, numpy, tensor };

    bool read_numpy(PyObject* object);
    bool read_tensor(PyObject* object);

    Kind kind_ = Kind::none;
    char format_ = 0;
    int ndim_ = 0;
    int64_t item_ = 0;
    int64_t stride_unit_ = 1;  // bytes that a stride of 1 stands for
    char* data_ = nullptr;
    const int64_t* shape_ = nullptr;
    const int64_t* strides_ = nullptr;
    Py_buffer buffer_{};
};

}  // namespace attnscore
