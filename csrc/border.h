// The border: arrays as a caller hands them over, checked and turned into a Problem. No Python here.
// Whatever is wrong with shapes, strides, alignment or intervals ends in std::invalid_argument, never in a bad read.
#pragma once

#include <cstdint>

#include "attention.h"

namespace attnscore {

// Strides in elements. Without data it stands for "not given"; an empty array has a shape all the same.
struct Array {
    const char* name = "";
    char* data = nullptr;
    int64_t item = 0;  // bytes of an element
    int ndim = 0;
    const int64_t* shape = nullptr;
    const int64_t* strides = nullptr;
    bool given = false;
};

struct ForwardArrays {
    Array query, key, value, out, statistics, start, stop, weights;
};

struct BackwardArrays {
    Array query, key, value, grad_out, top, log_total, shift, start, stop, weights;
    Array grad_query, grad_key, grad_value, grad_weights;
};

// Fill in sizes, heads and groups; form, dtypes and numbers are the caller's already.
void set_forward(Problem& problem, const ForwardArrays& arrays);
void set_backward(Problem& problem, const BackwardArrays& arrays);

Dtype sum_dtype(const Problem& problem);
int64_t size_of(Dtype dtype);

}  // namespace attnscore
