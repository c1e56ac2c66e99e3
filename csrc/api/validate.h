// The border: arrays as a caller hands them over, checked and turned into a Problem. No Python here.
// Whatever is wrong with shapes, strides, alignment or intervals ends in std::invalid_argument, never in a bad read.
#pragma once

#include <vector>

#include "api/array.h"
#include "runtime/attention.h"

namespace attnscore {

struct Inputs {
    Array query, key, value;
    Array query_bias, key_bias, bias, mask, query_ids, key_ids, start, stop, weights, sink, scales;
};

// What a caller may ask of a row beyond the log-sum-exp, by these places in an array of arrays; each (..., query, 1).
enum Statistic { kMaxScore, kMeanScore, kVarScore, kEntropy, kMaxWeight, kSumSqWeights, kSumWeights, kStatistics };

struct ForwardArrays {
    Array out;
    Array row_max, log_denom, saved_scores, statistics[kStatistics];  // null where not wanted; scores: additive only
    Array attention_scores, attention_weights;                        // one of them at most
};

struct BackwardArrays {
    Array out, row_max, log_denom, entropy, saved_scores, attention_weights;  // what the forward gave
    Array grad_out, grad_log_sum_exp, grad_entropy;                           // what comes in
    Array grad_attention_scores, grad_attention_weights;                      // one of them at most
    // What is wanted, null where it is not.
    Array query, key, value, query_bias, key_bias, bias, weights, sink, scales;
};

// The numbers of a head's rows that the kernels know nothing of: the sink, and what the rows of a forward become.
struct RowArrays {
    const char* sink = nullptr;
    char* row_max = nullptr;  // query_len each, in the sum type
    char* log_denom = nullptr;
    char* statistics[kStatistics] = {};  // forward only

    // Backward only.
    Matrix out;
    const char* attention_weights = nullptr;
    const char* grad_log_sum_exp = nullptr;
    char* grad_sink = nullptr;
};

// Fill in sizes, heads and groups; form, dtypes and numbers are the caller's already. One RowArrays for each head.
std::vector<RowArrays> build_forward(Problem& problem, const Inputs& in, const ForwardArrays& arrays);
std::vector<RowArrays> build_backward(Problem& problem, const Inputs& in, const BackwardArrays& arrays);

Dtype sum_dtype(const Problem& problem);

}  // namespace attnscore
