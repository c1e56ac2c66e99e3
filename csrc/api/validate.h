// Arrays as a caller hands them over, checked and turned into a Problem. No Python here. Wrong shapes, strides,
// alignment or intervals end in std::invalid_argument, never in a bad read.
#pragma once

#include <cstdint>
#include <iterator>
#include <type_traits>
#include <vector>

#include "api/array.h"
#include "runtime/attention.h"

namespace attnscore {

struct Inputs {
    Array query, key, value, query_bias, key_bias, bias, mask, query_ids, key_ids, start, stop, w_v, sink, scales;
};

// Arrays that a forward fills; only `out` must be present. Statistics of rows have the shape (..., query, 1).
struct ForwardArrays {
    Array out, row_max, log_denom;
    Array saved_scores;                         // additive only
    Array attention_scores, attention_weights;  // one of them at most
#define ATTNSCORE_ARRAY(name, needed) Array name;
    ATTNSCORE_STATISTICS(ATTNSCORE_ARRAY)
};

struct BackwardArrays {
    // From the forward.
    Array out, row_max, log_denom, entropy, saved_scores, attention_weights;
    // Gradients of its results; one of the last two at most.
    Array grad_out, grad_log_sum_exp, grad_entropy, grad_attention_scores, grad_attention_weights;
    // The gradients to add to, where they are requested.
    Array grad_query, grad_key, grad_value, grad_query_bias, grad_key_bias, grad_bias, grad_w_v, grad_sink;
    Array grad_scales;
};

// The kind of an array's elements; the problem knows their dtypes.
enum class Element { score, value, grad, bias, sum, byte, index };

// How the axes of an array match the axes (*lead, head, group) of the call. The first four have a matrix, a column or a
// number for each head.
enum class Kind {
    strided,        // any strides, and 1 along an axis of the call that is broadcast
    broadcast,      // the same, and rows and columns may be 1 too
    exact,          // C order
    groups,         // C order, and 1 along an axis of the call whose heads are in one group
    bias,           // broadcast, or relative
    bias_gradient,  // C order, in the shape of the bias
    heads,          // (head, group) in front; or neither axis, where it is one vector for all heads
    batch,          // (batch,) in front
    bounds          // the same; where intervals have holes, behind an axis of the interval and its holes
};

// The length of an axis after the call's axes; none: no such axis.
enum class Size { none, one, query_len, key_len, dim, value_dim };

struct Axes {
    Kind kind;
    Size rows = Size::none, cols = Size::none;
};

// A field that points into an array, of all of its owners: heads, groups, groups of a bias, or rows of a call. Both
// functions are null for an array without such a field.
struct Pointer {
    // Set the field of one owner to the part of the array at an index of the grid.
    void (*set)(Problem&, std::vector<RowArrays>&, size_t owner, const HeadCursor&, const Shape& index) = nullptr;
    // Move the field of all owners: the array of this run lies so many bytes behind the array of the run before.
    void (*move)(Problem&, std::vector<RowArrays>&, ptrdiff_t bytes) = nullptr;
};

// One array of a call: its name in messages, its place in the struct, its axes, the pointers into it, its elements.
template <class Arrays>
struct Field {
    const char* name;
    Array Arrays::* array;
    Axes axes;
    Pointer pointers[2];
    Element element = Element::sum;
};

inline void set_part(Matrix& to, const HeadCursor& cursor, const Shape& index) { to = cursor.matrix_at(index); }
template <class T>
void set_part(T*& to, const HeadCursor& cursor, const Shape& index) {
    to = reinterpret_cast<T*>(cursor.at(index));
}

template <class T>
void move_part(T*& pointer, ptrdiff_t bytes) {
    if (pointer != nullptr) pointer = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(pointer) + bytes);
}
inline void move_part(Matrix& matrix, ptrdiff_t bytes) { move_part(matrix.data, bytes); }

// All owners of a field of this type.
template <class Owner, class Value>
std::vector<Owner>& owners(Value Owner::*, Problem& p, std::vector<RowArrays>& rows) {
    if constexpr (std::is_same_v<Owner, Head>) return p.heads;
    if constexpr (std::is_same_v<Owner, Group>) return p.groups;
    if constexpr (std::is_same_v<Owner, BiasGroup>) return p.bias_groups;
    if constexpr (std::is_same_v<Owner, RowArrays>) return rows;
}

// How to set this field of one owner, and move it for all.
template <auto field>
constexpr Pointer pointer_to{[](Problem& p, std::vector<RowArrays>& rows, size_t owner, const HeadCursor& cursor,
                                const Shape& index) { set_part(owners(field, p, rows)[owner].*field, cursor, index); },
                             [](Problem& p, std::vector<RowArrays>& rows, ptrdiff_t bytes) {
                                 for (auto& owner : owners(field, p, rows)) move_part(owner.*field, bytes);
                             }};

template <Statistic statistic>
constexpr Pointer pointer_to_statistic{
    [](Problem&, std::vector<RowArrays>& rows, size_t owner, const HeadCursor& cursor, const Shape& index) {
        set_part(rows[owner].at(statistic), cursor, index);
    },
    [](Problem&, std::vector<RowArrays>& rows, ptrdiff_t bytes) {
        for (RowArrays& row : rows) move_part(row.at(statistic), bytes);
    }};

constexpr Axes kRow{Kind::exact, Size::query_len, Size::one};
constexpr Axes kAllPairs{Kind::exact, Size::query_len, Size::key_len};
constexpr Axes kPairs{Kind::broadcast, Size::query_len, Size::key_len};
constexpr Axes kOut{Kind::exact, Size::query_len, Size::value_dim};
constexpr Axes kStridedOut{Kind::strided, Size::query_len, Size::value_dim};
constexpr Axes kValue{Kind::strided, Size::key_len, Size::value_dim};
constexpr Axes kGradQuery{Kind::exact, Size::query_len, Size::dim};
constexpr Axes kGradQueryBias{Kind::exact, Size::query_len};
constexpr Axes kGradValue{Kind::groups, Size::key_len, Size::value_dim};
constexpr Axes kGradKeyBias{Kind::groups, Size::key_len};

// The arrays of a call, in the order in which Python hands them over. XLA's order follows from it (ffi.cc).
inline constexpr Field<Inputs> kInputs[] = {
    {"query", &Inputs::query, {Kind::strided, Size::query_len, Size::dim}, {pointer_to<&Head::query>}, Element::score},
    {"key", &Inputs::key, {Kind::strided, Size::key_len, Size::dim}, {pointer_to<&Head::key>}, Element::score},
    {"value", &Inputs::value, kValue, {pointer_to<&Head::value>}, Element::value},
    {"query_bias", &Inputs::query_bias, {Kind::broadcast, Size::query_len, Size::one}, {pointer_to<&Head::query_bias>}},
    {"key_bias", &Inputs::key_bias, {Kind::broadcast, Size::key_len, Size::one}, {pointer_to<&Head::key_bias>}},
    {"bias", &Inputs::bias, {Kind::bias, Size::query_len, Size::key_len}, {pointer_to<&Head::bias>}, Element::bias},
    {"mask", &Inputs::mask, kPairs, {pointer_to<&Head::mask>}, Element::byte},
    {"query_ids", &Inputs::query_ids, {Kind::batch, Size::query_len}, {pointer_to<&Head::query_ids>}, Element::index},
    {"key_ids", &Inputs::key_ids, {Kind::batch, Size::key_len}, {pointer_to<&Head::key_ids>}, Element::index},
    {"start", &Inputs::start, {Kind::bounds, Size::query_len}, {pointer_to<&Head::start>}, Element::index},
    {"stop", &Inputs::stop, {Kind::bounds, Size::query_len}, {pointer_to<&Head::stop>}, Element::index},
    {"w_v", &Inputs::w_v, {Kind::heads, Size::dim}, {pointer_to<&Head::w_v>}},
    {"sink", &Inputs::sink, {Kind::heads}, {pointer_to<&Head::sink>, pointer_to<&RowArrays::sink>}},
    {"scales", &Inputs::scales, {Kind::heads}, {pointer_to<&Head::scale>}}};
inline constexpr Field<ForwardArrays> kForwardArrays[] = {
    {"out", &ForwardArrays::out, kOut, {pointer_to<&Head::out>}, Element::value},
    {"row_max", &ForwardArrays::row_max, kRow, {pointer_to<&RowArrays::row_max>}},
    {"log_denom", &ForwardArrays::log_denom, kRow, {pointer_to<&RowArrays::log_denom>}},
    {"scores", &ForwardArrays::saved_scores, kAllPairs, {pointer_to<&Head::saved_scores>}},
    {"attention_scores", &ForwardArrays::attention_scores, kAllPairs, {pointer_to<&Head::matrix>}},
    {"attention_weights", &ForwardArrays::attention_weights, kAllPairs, {pointer_to<&Head::matrix>}},
#define ATTNSCORE_FIELD(name, needed) {#name, &ForwardArrays::name, kRow, {pointer_to_statistic<Statistic::name>}},
    ATTNSCORE_STATISTICS(ATTNSCORE_FIELD)};
inline constexpr Field<BackwardArrays> kForwardResults[] = {
    {"out", &BackwardArrays::out, kStridedOut, {pointer_to<&RowArrays::out>}, Element::value},
    {"row_max", &BackwardArrays::row_max, kRow, {pointer_to<&Head::row_max>, pointer_to<&RowArrays::row_max>}},
    {"log_denom", &BackwardArrays::log_denom, kRow, {pointer_to<&RowArrays::log_denom>}},
    {"entropy", &BackwardArrays::entropy, kRow, {pointer_to<&Head::entropy>}},
    {"scores", &BackwardArrays::saved_scores, kAllPairs, {pointer_to<&Head::saved_scores>}},
    {"attention_weights", &BackwardArrays::attention_weights, kAllPairs, {pointer_to<&RowArrays::attention_weights>}},
    {"grad_out", &BackwardArrays::grad_out, kStridedOut, {pointer_to<&Head::grad_out>}, Element::grad},
    {"grad_log_sum_exp", &BackwardArrays::grad_log_sum_exp, kRow, {pointer_to<&RowArrays::grad_log_sum_exp>}},
    {"grad_entropy", &BackwardArrays::grad_entropy, kRow, {pointer_to<&Head::grad_entropy>}},
    {"grad_attention_scores", &BackwardArrays::grad_attention_scores, kPairs, {pointer_to<&Head::grad_matrix>}},
    {"grad_attention_weights", &BackwardArrays::grad_attention_weights, kPairs, {pointer_to<&Head::grad_matrix>}}};
// Each is named like its input, with "grad_" in front, by which `check_gradients` finds the input.
inline constexpr Field<BackwardArrays> kGradients[] = {
    {"grad_query", &BackwardArrays::grad_query, kGradQuery, {pointer_to<&Head::grad_query>}},
    {"grad_key", &BackwardArrays::grad_key, {Kind::groups, Size::key_len, Size::dim}, {pointer_to<&Group::grad_key>}},
    {"grad_value", &BackwardArrays::grad_value, kGradValue, {pointer_to<&Group::grad_value>}},
    {"grad_query_bias", &BackwardArrays::grad_query_bias, kGradQueryBias, {pointer_to<&Head::grad_query_bias>}},
    {"grad_key_bias", &BackwardArrays::grad_key_bias, kGradKeyBias, {pointer_to<&Group::grad_key_bias>}},
    {"grad_bias", &BackwardArrays::grad_bias, {Kind::bias_gradient}, {pointer_to<&BiasGroup::grad_bias>}},
    {"grad_w_v", &BackwardArrays::grad_w_v, {Kind::groups, Size::dim}, {pointer_to<&Group::grad_w_v>}},
    {"grad_sink", &BackwardArrays::grad_sink, {Kind::exact}, {pointer_to<&RowArrays::grad_sink>}},
    {"grad_scales", &BackwardArrays::grad_scales, {Kind::exact}, {pointer_to<&Head::grad_scale>}}};

constexpr size_t kFirstStatistic = std::size(kForwardArrays) - kStatistics;

// Check the arrays of a call, and set sizes, heads and groups of a problem that has its score and dtypes. Returns the
// row arrays of each head.
std::vector<RowArrays> build_forward(Problem& problem, const Inputs& in, const ForwardArrays& arrays);
std::vector<RowArrays> build_backward(Problem& problem, const Inputs& in, const BackwardArrays& arrays);

// The dtype in which rows are summed.
Dtype sum_dtype(const Problem& problem);
// The dtype of elements other than bytes and indices.
Dtype dtype_of(const Problem& problem, Element element);

}  // namespace attnscore
