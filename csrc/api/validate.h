// Arrays as a caller hands them over, checked and turned into a Problem. No Python here. Wrong shapes, strides,
// alignment or intervals end in std::invalid_argument, never in a bad read.
#pragma once

#include <iterator>
#include <vector>

#include "api/array.h"
#include "runtime/attention.h"

namespace attnscore {

struct Inputs {
    Array query, key, value, query_bias, key_bias, bias, mask, query_ids, key_ids, start, stop, w_v, sink, scales;
};

// What a forward fills; only `out` must be given. Statistics of rows have the shape (..., query, 1).
struct ForwardArrays {
    Array out, row_max, log_denom;
    Array saved_scores;                         // additive only
    Array attention_scores, attention_weights;  // one of them at most
    Array max_score, mean_score, var_score, entropy, max_weight, sum_sq_weights, sum_weights, log_sum_exp;
};

struct BackwardArrays {
    // From the forward.
    Array out, row_max, log_denom, entropy, saved_scores, attention_weights;
    // Gradients of its results; one of the last two at most.
    Array grad_out, grad_log_sum_exp, grad_entropy, grad_attention_scores, grad_attention_weights;
    // The gradients to add to, where they are wanted.
    Array grad_query, grad_key, grad_value, grad_query_bias, grad_key_bias, grad_bias, grad_w_v, grad_sink;
    Array grad_scales;
};

// What the elements of an array are; the problem knows their dtypes.
enum class Element { score, value, grad, bias, sum, byte, index };

// One array of a call: its name in messages, and its place in the struct.
template <class Arrays>
struct Field {
    const char* name;
    Array Arrays::* array;
    Element element;
};

// The arrays of a call, in the order in which Python hands them over. XLA's order follows from it (ffi.cc).
inline constexpr Field<Inputs> kInputs[] = {
    {"query", &Inputs::query, Element::score},     {"key", &Inputs::key, Element::score},
    {"value", &Inputs::value, Element::value},     {"query_bias", &Inputs::query_bias, Element::sum},
    {"key_bias", &Inputs::key_bias, Element::sum}, {"bias", &Inputs::bias, Element::bias},
    {"mask", &Inputs::mask, Element::byte},        {"query_ids", &Inputs::query_ids, Element::index},
    {"key_ids", &Inputs::key_ids, Element::index}, {"start", &Inputs::start, Element::index},
    {"stop", &Inputs::stop, Element::index},       {"w_v", &Inputs::w_v, Element::sum},
    {"sink", &Inputs::sink, Element::sum},         {"scales", &Inputs::scales, Element::sum}};
inline constexpr Field<ForwardArrays> kForwardArrays[] = {
    {"out", &ForwardArrays::out, Element::value},
    {"row_max", &ForwardArrays::row_max, Element::sum},
    {"log_denom", &ForwardArrays::log_denom, Element::sum},
    {"scores", &ForwardArrays::saved_scores, Element::sum},
    {"attention_scores", &ForwardArrays::attention_scores, Element::sum},
    {"attention_weights", &ForwardArrays::attention_weights, Element::sum},
    {"max_score", &ForwardArrays::max_score, Element::sum},
    {"mean_score", &ForwardArrays::mean_score, Element::sum},
    {"var_score", &ForwardArrays::var_score, Element::sum},
    {"entropy", &ForwardArrays::entropy, Element::sum},
    {"max_weight", &ForwardArrays::max_weight, Element::sum},
    {"sum_sq_weights", &ForwardArrays::sum_sq_weights, Element::sum},
    {"sum_weights", &ForwardArrays::sum_weights, Element::sum},
    {"log_sum_exp", &ForwardArrays::log_sum_exp, Element::sum}};
inline constexpr Field<BackwardArrays> kForwardResults[] = {
    {"out", &BackwardArrays::out, Element::value},
    {"row_max", &BackwardArrays::row_max, Element::sum},
    {"log_denom", &BackwardArrays::log_denom, Element::sum},
    {"entropy", &BackwardArrays::entropy, Element::sum},
    {"scores", &BackwardArrays::saved_scores, Element::sum},
    {"attention_weights", &BackwardArrays::attention_weights, Element::sum},
    {"grad_out", &BackwardArrays::grad_out, Element::grad},
    {"grad_log_sum_exp", &BackwardArrays::grad_log_sum_exp, Element::sum},
    {"grad_entropy", &BackwardArrays::grad_entropy, Element::sum},
    {"grad_attention_scores", &BackwardArrays::grad_attention_scores, Element::sum},
    {"grad_attention_weights", &BackwardArrays::grad_attention_weights, Element::sum}};
inline constexpr Field<BackwardArrays> kGradients[] = {
    {"grad_query", &BackwardArrays::grad_query, Element::sum},
    {"grad_key", &BackwardArrays::grad_key, Element::sum},
    {"grad_value", &BackwardArrays::grad_value, Element::sum},
    {"grad_query_bias", &BackwardArrays::grad_query_bias, Element::sum},
    {"grad_key_bias", &BackwardArrays::grad_key_bias, Element::sum},
    {"grad_bias", &BackwardArrays::grad_bias, Element::sum},
    {"grad_w_v", &BackwardArrays::grad_w_v, Element::sum},
    {"grad_sink", &BackwardArrays::grad_sink, Element::sum},
    {"grad_scales", &BackwardArrays::grad_scales, Element::sum}};

// Statistics of a row; kForwardArrays ends with them, in this order.
enum Statistic {
    kMaxScore,
    kMeanScore,
    kVarScore,
    kEntropy,
    kMaxWeight,
    kSumSqWeights,
    kSumWeights,
    kLogSumExp,
    kStatistics
};
constexpr size_t kFirstStatistic = std::size(kForwardArrays) - kStatistics;

// The arrays of a head's rows that the kernels do not know: the sink, and what a forward's row statistics become.
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

// Check the arrays of a call, and fill in sizes, heads and groups of a problem that knows its score and dtypes. Return
// the row arrays of each head.
std::vector<RowArrays> build_forward(Problem& problem, const Inputs& in, const ForwardArrays& arrays);
std::vector<RowArrays> build_backward(Problem& problem, const Inputs& in, const BackwardArrays& arrays);

// The dtype in which rows are summed.
Dtype sum_dtype(const Problem& problem);
// The dtype of elements other than bytes and indices.
Dtype dtype_of(const Problem& problem, Element element);

}  // namespace attnscore
