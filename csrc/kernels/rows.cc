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

// Whether sums are of double: they are where values are.
bool is_double(const Problem& problem) { return problem.value_dtype == Dtype::f64; }

void forward_of(const Problem& problem, Threads threads) {
    (is_double(problem) ? forward<double> : forward<float>)(problem, threads);
}

void backward_of(const Problem& problem, Threads threads) {
    (is_double(problem) ? backward<double> : backward<float>)(problem, threads);
}

// Compute C.
void multiply(const MatrixProduct& product, Threads threads) {
    const double work = static_cast<double>(product.rows) * product.depth * product.cols;
    threads = threads.at_most(1 + work / (1 << 19));
    return (product.dtype == Dtype::f64 ? multiply_typed<double> : multiply_typed<float>)(product, threads);
}

}  // namespace

#define ATTNSCORE_TEXT_(x) #x
#define ATTNSCORE_TEXT(x) ATTNSCORE_TEXT_(x)
extern const Kernels kernels;
const Kernels kernels = {
    ATTNSCORE_TEXT(ATTNSCORE_TARGET), forward_of, backward_of, finish_rows, prepare_rows, multiply};

}  // namespace attnscore::ATTNSCORE_TARGET
