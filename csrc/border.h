// The border: arrays as a caller hands them over, checked and turned into a Problem. No Python here.
// Whatever is wrong with shapes, strides, alignment or intervals ends in std::invalid_argument, never in a bad read.
#pragma once

#include <vector>

#include "array.h"
#include "attention.h"

namespace attnscore {

struct Inputs {
    Array query, key, value;
    Array query_bias, key_bias, bias, mask, query_ids, key_ids, start, stop, weights, sink;
};

struct ForwardArrays {
    Array out, statistics, top, log_total;
};

struct BackwardArrays {
    Array out, top, log_total, entropy;                                  // what the forward gave
    Array grad_out, grad_log_sum_exp, grad_entropy;                      // what comes in
    Array query, key, value, query_bias, key_bias, bias, weights, sink;  // what is wanted: null where it is not
};

// The numbers of a head's rows that the kernels know nothing of: the sink, and what the rows of a forward become.
struct HeadRows {
    const char* sink = nullptr;
    char* top = nullptr;  // query_len each, in the sum type
    char* log_total = nullptr;

    // Backward only.
    Matrix out;
    const char* grad_log_sum_exp = nullptr;
    char* grad_sink = nullptr;
};

// Fill in sizes, heads and groups; form, dtypes and numbers are the caller's already. One HeadRows for each head.
std::vector<HeadRows> set_forward(Problem& problem, const Inputs& in, const ForwardArrays& arrays);
std::vector<HeadRows> set_backward(Problem& problem, const Inputs& in, const BackwardArrays& arrays);

Dtype sum_dtype(const Problem& problem);
int64_t size_of(Dtype dtype);

}  // namespace attnscore
