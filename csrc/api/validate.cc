#include "api/validate.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

namespace attnscore {
namespace {

struct CallLayout {
    Shape head_grid;                                           // (*lead, head, group)
    Shape group_grid;                                          // the same, 1 along an axis whose heads are in one group
    size_t head_grid_axes = 0, head_axis = 0, group_axis = 0;  // the number of axes of the grid, and the last two
};

// Check shapes and numbers of the intervals: (batch or 1, query), behind an axis of holes where there are any.
void check_intervals(const Problem& p, const CallLayout& s, const Array& start, const Array& stop) {
    if (start.present != stop.present) throw_invalid(start.present ? stop : start, "start and stop together", "None");
    if (!start.present) return;
    for (const Array* a : {&start, &stop}) {
        if (a->ndim == 3 && a->shape[0] > 0) {
            check_shape(*a, {a->shape[0], s.head_grid[0], p.query_len}, 2);
        } else {
            check_shape(*a, {s.head_grid[0], p.query_len}, 1);
        }
        check_contiguous(*a);
    }
    if (!std::equal(start.shape, start.shape + start.ndim, stop.shape, stop.shape + stop.ndim)) {
        throw_invalid(stop, "the shape of start, " + shape_text(start), shape_text(stop));
    }
    const int64_t *starts = as<int64_t>(start.data), *stops = as<int64_t>(stop.data);
    for (int64_t i = 0; i < element_count(start); ++i) {
        if (starts[i] < 0) throw_invalid(start, "numbers from 0", std::to_string(starts[i]));
        if (stops[i] > p.key_len) {
            throw_invalid(stop, "numbers up to key_len = " + std::to_string(p.key_len), std::to_string(stops[i]));
        }
        if (starts[i] > stops[i]) {
            throw_invalid(stop, "numbers from start on",
                          std::to_string(stops[i]) + " with start " + std::to_string(starts[i]));
        }
    }
}

// Raise unless an array that one form of scores has is present with that form alone.
void check_form(const Array& a, bool has_form, const char* form) {
    if (a.present && !has_form) throw_invalid(a, std::string("None but with form '") + form + "'", "an array");
}

// Which of the two matrices over pairs is present.
MatrixOutput matrix_of(const Array& scores, const Array& weights) {
    if (scores.present && weights.present)
        throw_invalid(weights, "None beside " + std::string(scores.name), "an array");
    return scores.present ? MatrixOutput::scores : weights.present ? MatrixOutput::weights : MatrixOutput::none;
}

// How many numbers a relative bias has: one for each key - query.
int64_t relative_positions(const Problem& p) { return p.query_len + p.key_len - 1; }

// Whether a bias has a number for each key - query instead of each pair. Of a single query the two are the same.
bool is_relative(const Problem& p, const CallLayout& s, const Array& bias) {
    return bias.present && p.query_len > 1 && p.key_len > 0 && static_cast<size_t>(bias.ndim) == s.head_grid_axes + 2 &&
           bias.shape[s.head_grid_axes] == 1 && bias.shape[s.head_grid_axes + 1] == relative_positions(p);
}

// A cursor over an array that is present.
HeadCursor cursor_of(const Problem& p, const CallLayout& s, Array a, Kind kind) {
    if (kind == Kind::heads) return HeadCursor(a, s.head_grid_axes, s.head_axis, a.ndim > 1 ? 2 : 0);
    // The interval is in front of its holes, which the kernels find from it.
    if (kind == Kind::bounds && a.ndim == 3) ++a.shape, ++a.strides, --a.ndim;
    if (kind == Kind::bounds || kind == Kind::batch) return HeadCursor(a, s.head_grid_axes, 0, 1);
    HeadCursor cursor(a, s.head_grid_axes, 0, s.head_grid_axes);
    // A single column takes the kernels' path of contiguous rows.
    if (kind == Kind::strided && a.shape[s.head_grid_axes + 1] <= 1) cursor.col_stride = 1;
    if ((kind == Kind::bias || kind == Kind::bias_gradient) && is_relative(p, s, a)) {
        // At the pair (0, 0) of a matrix, each row of which begins one number in front of the row before it.
        cursor.base += (p.query_len - 1) * cursor.col_stride * a.item;
        cursor.row_stride = -cursor.col_stride;
    }
    return cursor;
}

// Check the shape of an array that is present against its `Kind`, and its strides where the kind asks for C order.
// `check_intervals` checks bounds, `check_gradients` the gradient of a bias.
void check_array_axes(const Problem& p, const CallLayout& s, const Array& a, const Axes& axes) {
    if (!a.present || axes.kind == Kind::bounds || axes.kind == Kind::bias_gradient) return;
    Shape shape = axes.kind == Kind::groups  ? s.group_grid
                  : axes.kind == Kind::heads ? Shape{s.head_grid[s.head_axis], s.head_grid[s.group_axis]}
                  : axes.kind == Kind::batch ? Shape{s.head_grid[0]}
                                             : s.head_grid;
    const int64_t lengths[] = {0, 1, p.query_len, p.key_len, p.dim, p.value_dim};  // by Size
    for (const Size size : {axes.rows, axes.cols}) {
        if (size != Size::none) shape.push_back(lengths[static_cast<size_t>(size)]);
    }
    switch (axes.kind) {
        case Kind::strided:
            return check_shape(a, shape, s.head_grid_axes);
        case Kind::bias:
            if (is_relative(p, s, a)) shape.end()[-2] = 1, shape.back() = relative_positions(p);
            return check_broadcast(a, shape);
        case Kind::broadcast:
            return check_broadcast(a, shape);
        case Kind::heads:
            if (axes.rows == Size::none) return check_broadcast(a, shape);
            // One vector for all heads, or one for each.
            check_shape(a, a.ndim == 1 ? Shape{shape.back()} : shape, a.ndim == 1 ? 0 : 2);
            return check_contiguous(a, a.ndim - 1);
        case Kind::batch:
            return check_shape(a, shape, 1);
        default:
            return check_exact(a, shape);
    }
}

template <class Arrays, size_t N>
void check_all(const Problem& p, const CallLayout& s, const Field<Arrays> (&fields)[N], const Arrays& arrays) {
    for (const auto& field : fields) check_array_axes(p, s, arrays.*field.array, field.axes);
}

// Numbers the indices of a grid in C order; along an axis of length 1 all indices count as one.
struct IndexNumbering {
    Shape steps;
    int64_t count = 1;

    explicit IndexNumbering(const Shape& grid) : steps(grid.size()) {
        for (size_t i = grid.size(); i-- > 0;) {
            steps[i] = grid[i] == 1 ? 0 : count;
            count *= grid[i];
        }
    }

    size_t of(const Shape& index) const { return static_cast<size_t>(dot(index, steps)); }
};

// Set all pointers into the arrays that are present, except into the gradient of a bias, which `set_bias_groups` sets.
template <class Arrays, size_t N>
void set_pointers(Problem& p, const CallLayout& s, const Field<Arrays> (&fields)[N], const Arrays& arrays,
                  std::vector<RowArrays>& rows) {
    if (p.heads.empty()) return;
    const IndexNumbering heads(s.head_grid), groups(s.group_grid);
    for (const auto& field : fields) {
        const Array& a = arrays.*field.array;
        if (!a.present || a.data == nullptr || field.axes.kind == Kind::bias_gradient) continue;
        const HeadCursor cursor = cursor_of(p, s, a, field.axes.kind);
        const IndexNumbering& numbers = field.axes.kind == Kind::groups ? groups : heads;
        for_each_index(s.head_grid, [&](const Shape& index) {
            for (const Pointer& pointer : field.pointers) {
                if (pointer.set != nullptr) pointer.set(p, rows, numbers.of(index), cursor, index);
            }
        });
    }
}

// Find the grid of groups: along an axis heads are in one group where key, value, key bias and w_v are all broadcast.
void set_group_grid(CallLayout& s, const Inputs& in) {
    s.group_grid.assign(s.head_grid_axes, 1);
    for (const Array* a : {&in.key, &in.value, &in.key_bias}) {
        for (size_t i = 0; a->present && i < s.head_grid_axes; ++i) {
            if (a->shape[i] != 1) s.group_grid[i] = s.head_grid[i];
        }
    }
    if (!in.w_v.present || in.w_v.ndim == 1) return;
    for (const size_t axis : {s.head_axis, s.group_axis}) {
        if (in.w_v.shape[axis - s.head_axis] != 1) s.group_grid[axis] = s.head_grid[axis];
    }
}

// Check the inputs, and set the problem's sizes, heads with their inputs, and groups. No input need have the whole grid
// or all queries, so their sizes are read from `out`.
CallLayout read_inputs(Problem& p, const Inputs& in, const Array& out, std::vector<RowArrays>& rows) {
    for (const Array* a : {&out, &in.query, &in.key, &in.value}) {
        check_present(*a);
        if (a->ndim < 5) throw_invalid(*a, "at least 5 axes: (*lead, head, group, rows, cols)", shape_text(*a));
        if (a->ndim != out.ndim) throw_invalid(*a, std::to_string(out.ndim) + " axes, as " + out.name, shape_text(*a));
    }
    CallLayout s;
    s.head_grid_axes = static_cast<size_t>(out.ndim) - 2;
    s.head_axis = s.head_grid_axes - 2;
    s.group_axis = s.head_grid_axes - 1;
    s.head_grid.assign(out.shape, out.shape + s.head_grid_axes);
    p.query_len = out.shape[s.head_grid_axes];
    p.key_len = in.key.shape[s.head_grid_axes];
    p.value_dim = in.value.shape[s.head_grid_axes + 1];
    p.dim = in.query.shape[s.head_grid_axes + 1];
    if (in.query_ids.present != in.key_ids.present) {
        throw_invalid(in.query_ids.present ? in.key_ids : in.query_ids, "query_ids and key_ids together", "None");
    }
    check_form(in.w_v, p.form == Form::additive, "additive");
    if (p.form == Form::additive) check_present(in.w_v);
    check_form(in.scales, p.form == Form::distance, "distance");
    check_all(p, s, kInputs, in);
    check_intervals(p, s, in.start, in.stop);

    set_group_grid(s, in);
    const IndexNumbering heads(s.head_grid), groups(s.group_grid);
    if (heads.count == 0) return s;
    p.heads.resize(static_cast<size_t>(heads.count));
    p.groups.resize(static_cast<size_t>(groups.count));
    rows.resize(p.heads.size());
    for_each_index(s.head_grid, [&](const Shape& index) {
        const size_t head = heads.of(index);
        p.heads[head].index = static_cast<int64_t>(head);
        p.groups[groups.of(index)].heads.push_back(p.heads[head].index);
        if (in.start.present && in.start.ndim == 3) {
            p.heads[head].holes = in.start.shape[0] - 1;
            p.heads[head].hole_stride = in.start.shape[1] * in.start.shape[2];
        }
    });
    set_pointers(p, s, kInputs, in, rows);
    return s;
}

// Check that each gradient has an input, and its axes.
void check_gradients(const Problem& p, const CallLayout& s, const Inputs& in, const BackwardArrays& a) {
    // The kernels write these whether they are requested or not.
    for (const Array* x : {&a.grad_query, &a.grad_key, &a.grad_value}) check_present(*x);
    if (p.form == Form::additive) check_present(a.grad_w_v);
    for (const auto& field : kGradients) {
        const Array& grad = a.*field.array;
        const auto* input = std::find_if(std::begin(kInputs), std::end(kInputs), [&](const auto& candidate) {
            return std::string("grad_") + candidate.name == field.name;
        });
        if (input == std::end(kInputs)) throw_invalid(grad, "the gradient of an input", field.name);
        if (grad.present && !(in.*input->array).present) {
            throw_invalid(grad, "None where there is no such input", "an array");
        }
        check_array_axes(p, s, grad, field.axes);
    }
    if (a.grad_bias.present) check_exact(a.grad_bias, Shape(in.bias.shape, in.bias.shape + in.bias.ndim));
}

// Find the heads that share a part of the bias, and so its gradient.
void set_bias_groups(Problem& p, const CallLayout& s, const Array& grad) {
    if (!grad.present || p.heads.empty()) return;
    const IndexNumbering groups(Shape(grad.shape, grad.shape + s.head_grid_axes));
    const HeadCursor cursor = cursor_of(p, s, grad, Kind::bias_gradient);
    p.bias_groups.resize(static_cast<size_t>(groups.count));
    int64_t head = 0;
    for_each_index(s.head_grid, [&](const Shape& index) {
        BiasGroup& group = p.bias_groups[groups.of(index)];
        group.heads.push_back(head++);
        group.grad_bias = cursor.at(index);
        group.row_stride = cursor.row_stride;
        group.col_stride = cursor.col_stride;
    });
}

}  // namespace

Dtype sum_dtype(const Problem& problem) { return problem.value_dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }

Dtype dtype_of(const Problem& problem, Element element) {
    switch (element) {
        case Element::score:
            return problem.score_dtype;
        case Element::value:
            return problem.value_dtype;
        case Element::grad:
            return problem.grad_dtype;
        case Element::bias:
            return problem.bias_dtype;
        default:
            return sum_dtype(problem);
    }
}

// By statistic, the flag of the problem that it needs, or null.
#define ATTNSCORE_NEEDED(name, needed) needed,
constexpr bool Problem::* kNeeded[] = {ATTNSCORE_STATISTICS(ATTNSCORE_NEEDED)};

std::vector<RowArrays> build_forward(Problem& p, const Inputs& in, const ForwardArrays& a) {
    std::vector<RowArrays> rows;
    const CallLayout s = read_inputs(p, in, a.out, rows);
    check_form(a.saved_scores, p.form == Form::additive, "additive");
    p.matrix = matrix_of(a.attention_scores, a.attention_weights);
    check_all(p, s, kForwardArrays, a);
    for (size_t i = 0; i < std::size(kNeeded); ++i)
        if (kNeeded[i] && (a.*kForwardArrays[kFirstStatistic + i].array).present) p.*kNeeded[i] = true;
    p.exact_row_max = p.exact_row_max || p.first_key;  // the first key of that maximum
    set_pointers(p, s, kForwardArrays, a, rows);
    return rows;
}

std::vector<RowArrays> build_backward(Problem& p, const Inputs& in, const BackwardArrays& a) {
    std::vector<RowArrays> rows;
    const CallLayout s = read_inputs(p, in, a.out, rows);
    for (const Array* x : {&a.grad_out, &a.row_max, &a.log_denom}) check_present(*x);
    if (a.grad_entropy.present && !a.entropy.present) throw_invalid(a.entropy, "an array beside grad_entropy", "None");
    check_form(a.saved_scores, p.form == Form::additive, "additive");
    p.matrix = matrix_of(a.grad_attention_scores, a.grad_attention_weights);
    if (p.matrix == MatrixOutput::weights) check_present(a.attention_weights);  // for delta
    check_all(p, s, kForwardResults, a);
    check_gradients(p, s, in, a);
    set_pointers(p, s, kForwardResults, a, rows);
    set_pointers(p, s, kGradients, a, rows);
    set_bias_groups(p, s, a.grad_bias);
    return rows;
}

}  // namespace attnscore
