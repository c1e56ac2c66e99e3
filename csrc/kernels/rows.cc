// The table of a target's kernels, and the short kernels: rows before a backward and after a forward, products of
// matrices and of 16-bit rows.
#include "kernels/target.h"

namespace attnscore::ATTNSCORE_TARGET {

#include "kernels/bf16_dot-inl.h"
#include "kernels/matrix_product-inl.h"
#include "kernels/row_finish-inl.h"
#include "kernels/row_prepare-inl.h"

ATTNSCORE_GEMM(, Product<float>, float, float, Float16)
ATTNSCORE_GEMM(, Product<float>, float, float, Bfloat16)
#if defined(ATTNSCORE_BF16_DOT)
ATTNSCORE_GEMM(, Bf16Product, float, Bf16Pair, Bf16Pair)
#endif

namespace {

// A function with sums of double where values are of double, else with sums of float.
template <auto of_double, auto of_float, class... Arguments>
void by_sum_type(const Problem& problem, Arguments... arguments) {
    (problem.value_dtype == Dtype::f64 ? of_double : of_float)(problem, arguments...);
}

void multiply(const MatrixProduct& product, Threads threads) {
    // As in `clamp_threads`: waking a thread takes as long as 2^19 multiply-adds.
    const double work = static_cast<double>(product.rows) * product.depth * product.cols;
    threads = threads.at_most(1 + work / (1 << 19));
    return (product.dtype == Dtype::f64 ? multiply_typed<double> : multiply_typed<float>)(product, threads);
}

}  // namespace

#define ATTNSCORE_TEXT_(x) #x
#define ATTNSCORE_TEXT(x) ATTNSCORE_TEXT_(x)
extern const Kernels kernels;
const Kernels kernels = {ATTNSCORE_TEXT(ATTNSCORE_TARGET),
                         by_sum_type<forward_typed<double>, forward_typed<float>>,
                         by_sum_type<backward_typed<double>, backward_typed<float>>,
                         by_sum_type<finish_rows<double>, finish_rows<float>>,
                         by_sum_type<prepare_rows<double>, prepare_rows<float>>,
                         multiply};

}  // namespace attnscore::ATTNSCORE_TARGET
