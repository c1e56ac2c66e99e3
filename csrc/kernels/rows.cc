// The table of a target's kernels, and those that are short: rows before a backward and after a forward, products.
#include "kernels/target.h"

namespace attnscore::ATTNSCORE_TARGET {
namespace {

#include "kernels/matrix_product-inl.h"
#include "kernels/row_finish-inl.h"
#include "kernels/row_prepare-inl.h"

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
const Kernels kernels = {ATTNSCORE_TEXT(ATTNSCORE_TARGET), forward, backward, finish_rows, prepare_rows, multiply};

}  // namespace attnscore::ATTNSCORE_TARGET
