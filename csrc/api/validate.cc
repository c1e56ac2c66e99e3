#include "api/validate.h"

#include <string>
#include <type_traits>
#include <vector>

namespace attnscore {
namespace {

// The axes of a call.
struct CallLayout {
    Shape grid;                                       // (*lead, head, group)
    Shape shared;                                     // the same, 1 along an axis whose heads are in one group
    size_t outer = 0, head_axis = 0, group_axis = 0;  // the number of axes of the grid, and the last two
};

void check_intervals(const Problem& p, const CallLayout& s, const Array& start, const Array& stop) {
    if (start.given != stop.given) throw_invalid(start.given ? stop : start, "start and stop together", "None");
    if (!start.given) return;
    for (const Array* a : {&start, &stop}) {
        if (a->ndim == 3 && a->shape[0] > 0) {
            check_shape(*a, {a->shape[0], s.grid[0], p.query_len}, 2);
        } else {
            check_shape(*a, {s.grid[0], p.query_len}, 1);
        }
        check_contiguous(*a);
    }
    const Shape shape(start.shape, start.shape + start.ndim);
    if (shape != Shape(stop.shape, stop.shape + stop.ndim)) {
        throw_invalid(stop, "the shape of start, " + shape_text(start), shape_text(stop));
    }
    if (is_empty(start)) return;
    const auto* first = reinterpret_cast<const int64_t*>(start.data);
    const auto* last = reinterpret_cast<const int64_t*>(stop.data);
    int64_t count = 1;
    for (const int64_t length : shape) count *= length;
    for (int64_t i = 0; i < count; ++i) {
        if (first[i] < 0) throw_invalid(start, "numbers from 0", std::to_string(first[i]));
        if (last[i] > p.key_len) {
            throw_invalid(stop, "numbers up to key_len = " + std::to_string(p.key_len), std::to_string(last[i]));
        }
        if (first[i] > last[i]) {
            throw_invalid(stop, "numbers from start on",
                          std::to_string(last[i]) + " with start " + std::to_string(first[i]));
        }
    }
}

void check_ids(const Problem& p, const CallLayout& s, const Array& query_ids, const Array& key_ids) {
    if (query_ids.given != key_ids.given) {
        throw_invalid(query_ids.given ? key_ids : query_ids, "query_ids and key_ids together", "None");
    }
    if (!query_ids.given) return;
    check_shape(query_ids, {s.grid[0], p.query_len}, 1);
    check_shape(key_ids, {s.grid[0], p.key_len}, 1);
}

void check_w_v(const Problem& p, const CallLayout& s, const Array& w_v) {
    if (p.form != Form::additive) {
        if (w_v.given) throw_invalid(w_v, "None but with form 'additive'", "an array");
        return;
    }
    check_given(w_v);
    if (w_v.ndim == 1) {
        check_shape(w_v, {p.dim});
    } else {
        check_shape(w_v, {s.grid[s.head_axis], s.grid[s.group_axis], p.dim}, 2);
    }
    check_contiguous(w_v, w_v.ndim - 1);
}

void check_scales(const Problem& p, const CallLayout& s, const Array& scales) {
    if (!scales.given) return;
    if (p.form != Form::distance) throw_invalid(scales, "None but with form 'distance'", "an array");
    check_broadcast(scales, {s.grid[s.head_axis], s.grid[s.group_axis]});
}

void check_saved_scores(const Problem& p, const CallLayout& s, const Array& scores) {
    if (!scores.given) return;
    if (p.form != Form::additive) throw_invalid(scores, "None but with form 'additive'", "an array");
    check_exact(scores, concat(s.grid, {p.query_len, p.key_len}));
}

// Which of the two matrices over pairs is given.
MatrixOutput matrix_of(const Array& scores, const Array& weights) {
    if (scores.given && weights.given) throw_invalid(weights, "None beside " + std::string(scores.name), "an array");
    return scores.given ? MatrixOutput::scores : weights.given ? MatrixOutput::weights : MatrixOutput::none;
}

// How many numbers a relative bias has: one for each key - query.
int64_t relative_positions(const Problem& p) { return p.query_len + p.key_len - 1; }

// Whether a bias has a number for each key - query instead of each pair. Of a single query the two are the same.
bool is_relative(const Problem& p, const CallLayout& s, const Array& bias) {
    return bias.given && p.query_len > 1 && p.key_len > 0 && static_cast<size_t>(bias.ndim) == s.outer + 2 &&
           bias.shape[s.outer] == 1 && bias.shape[s.outer + 1] == relative_positions(p);
}

// A cursor over a bias or its gradient, at the pair (0, 0). A relative bias is a matrix each of whose rows begins one
// number before the last.
MatrixCursor bias_cursor(const Problem& p, const CallLayout& s, const Array& bias) {
    MatrixCursor cursor = MatrixCursor::broadcast(bias, s.outer);
    if (is_relative(p, s, bias)) {
        cursor.base += (p.query_len - 1) * cursor.col_stride * bias.item;
        cursor.row_stride = -cursor.col_stride;
    }
    return cursor;
}

// A cursor over an array of the first lead axis alone: (first of lead or 1, length).
StridedCursor per_batch(const CallLayout& s, const Array& a) {
    StridedCursor cursor;
    cursor.steps.assign(s.outer, 0);
    if (!a.given) return cursor;
    cursor.base = a.data;
    cursor.steps[0] = a.shape[0] == 1 ? 0 : a.strides[0] * a.item;
    return cursor;
}

// The same for the bounds of intervals, which may have the holes on an axis in front.
StridedCursor bounds_per_batch(const CallLayout& s, Array a) {
    if (a.given && a.ndim == 3) {
        a.shape += 1;
        a.strides += 1;
    }
    return per_batch(s, a);
}

// The same for ids, as one column.
MatrixCursor column_per_batch(const CallLayout& s, const Array& a) {
    MatrixCursor cursor;
    static_cast<StridedCursor&>(cursor) = per_batch(s, a);
    if (a.given) cursor.row_stride = a.strides[1];
    return cursor;
}

// A cursor over an array of the query heads alone: (head or 1, group or 1, ...), or one for all heads.
StridedCursor per_head(const CallLayout& s, const Array& a) {
    StridedCursor cursor;
    cursor.steps.assign(s.outer, 0);
    if (!a.given) return cursor;
    cursor.base = a.data;
    for (size_t axis = 0; a.ndim > 1 && axis < 2; ++axis) {
        cursor.steps[s.head_axis + axis] = a.shape[axis] == 1 ? 0 : a.strides[axis] * a.item;
    }
    return cursor;
}

// Call f(index) for each index of a grid, in C order.
template <class F>
void for_each_index(const Shape& grid, const F& f) {
    for (const int64_t length : grid) {
        if (length == 0) return;
    }
    Shape index(grid.size(), 0);
    for (;;) {
        f(index);
        size_t axis = grid.size();
        while (axis > 0 && ++index[axis - 1] == grid[axis - 1]) index[--axis] = 0;
        if (axis == 0) return;
    }
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

    size_t of(const Shape& index) const {
        int64_t number = 0;
        for (size_t i = 0; i < steps.size(); ++i) number += steps[i] * index[i];
        return static_cast<size_t>(number);
    }
};

// Set a field of all owners (heads, their row arrays, or groups) from an array over the grid: owner n has the indices
// that `shape`, the grid or that of the groups, numbers n.
template <class Cursor, class Owner, class Value>
void set_all(const CallLayout& s, const Shape& shape, const Cursor& cursor, std::vector<Owner>& owners,
             Value Owner::* field) {
    if (cursor.base == nullptr || owners.empty()) return;
    const IndexNumbering numbers(shape);
    for_each_index(s.grid, [&](const Shape& index) {
        if constexpr (std::is_same_v<Value, const int64_t*>) {
            owners[numbers.of(index)].*field = as<int64_t>(cursor.at(index));
        } else {
            owners[numbers.of(index)].*field = cursor.at(index);
        }
    });
}

// Find the grid of groups: along an axis heads are in one group where key, value, key bias and w_v are all broadcast.
void set_shared(CallLayout& s, const Inputs& in) {
    s.shared.assign(s.outer, 1);
    for (const Array* a : {&in.key, &in.value, &in.key_bias}) {
        for (size_t i = 0; a->given && i < s.outer; ++i) {
            if (a->shape[i] != 1) s.shared[i] = s.grid[i];
        }
    }
    if (!in.w_v.given || in.w_v.ndim == 1) return;
    for (const size_t axis : {s.head_axis, s.group_axis}) {
        if (in.w_v.shape[axis - s.head_axis] != 1) s.shared[axis] = s.grid[axis];
    }
}

// Check the inputs, and set the problem's sizes, heads with their inputs, and groups. No input need have the whole grid
// or all queries, so their sizes are read from `out`.
CallLayout read_inputs(Problem& p, const Inputs& in, const Array& out, std::vector<RowArrays>& rows) {
    for (const Array* a : {&out, &in.query, &in.key, &in.value}) {
        check_given(*a);
        if (a->ndim < 5) throw_invalid(*a, "at least 5 axes: (*lead, head, group, rows, cols)", shape_text(*a));
        if (a->ndim != out.ndim) throw_invalid(*a, std::to_string(out.ndim) + " axes, as " + out.name, shape_text(*a));
    }
    CallLayout s;
    s.outer = static_cast<size_t>(out.ndim) - 2;
    s.head_axis = s.outer - 2;
    s.group_axis = s.outer - 1;
    s.grid.assign(out.shape, out.shape + s.outer);
    p.query_len = out.shape[s.outer];
    p.key_len = in.key.shape[s.outer];
    p.value_dim = in.value.shape[s.outer + 1];
    p.dim = in.query.shape[s.outer + 1];
    check_shape(in.query, concat(s.grid, {p.query_len, p.dim}), s.outer);
    check_shape(in.key, concat(s.grid, {p.key_len, p.dim}), s.outer);
    check_shape(in.value, concat(s.grid, {p.key_len, p.value_dim}), s.outer);
    if (in.query_bias.given) check_broadcast(in.query_bias, concat(s.grid, {p.query_len, 1}));
    if (in.key_bias.given) check_broadcast(in.key_bias, concat(s.grid, {p.key_len, 1}));
    if (in.mask.given) check_broadcast(in.mask, concat(s.grid, {p.query_len, p.key_len}));
    if (is_relative(p, s, in.bias)) {
        check_broadcast(in.bias, concat(s.grid, {1, relative_positions(p)}));
    } else if (in.bias.given) {
        check_broadcast(in.bias, concat(s.grid, {p.query_len, p.key_len}));
    }
    if (in.sink.given) check_broadcast(in.sink, {s.grid[s.head_axis], s.grid[s.group_axis]});
    check_ids(p, s, in.query_ids, in.key_ids);
    check_intervals(p, s, in.start, in.stop);
    check_w_v(p, s, in.w_v);
    check_scales(p, s, in.scales);

    set_shared(s, in);
    const IndexNumbering heads(s.grid), groups(s.shared);
    if (heads.count == 0) return s;
    p.heads.resize(static_cast<size_t>(heads.count));
    p.groups.resize(static_cast<size_t>(groups.count));
    rows.resize(p.heads.size());
    for_each_index(s.grid, [&](const Shape& index) {
        const size_t head = heads.of(index);
        p.heads[head].index = static_cast<int64_t>(head);
        p.groups[groups.of(index)].heads.push_back(p.heads[head].index);
        if (in.start.given && in.start.ndim == 3) {
            p.heads[head].holes = in.start.shape[0] - 1;
            p.heads[head].hole_stride = in.start.shape[1] * in.start.shape[2];
        }
    });
    const auto set = [&](const auto& cursor, auto field) { set_all(s, s.grid, cursor, p.heads, field); };
    set(MatrixCursor(in.query, s.outer), &Head::query);
    set(MatrixCursor(in.key, s.outer), &Head::key);
    set(MatrixCursor(in.value, s.outer), &Head::value);
    set(MatrixCursor::broadcast(in.query_bias, s.outer), &Head::query_bias);
    set(MatrixCursor::broadcast(in.key_bias, s.outer), &Head::key_bias);
    set(bias_cursor(p, s, in.bias), &Head::bias);
    set(MatrixCursor::broadcast(in.mask, s.outer), &Head::mask);
    set(column_per_batch(s, in.query_ids), &Head::query_ids);
    set(column_per_batch(s, in.key_ids), &Head::key_ids);
    set(bounds_per_batch(s, in.start), &Head::start);
    set(bounds_per_batch(s, in.stop), &Head::stop);
    set(per_head(s, in.w_v), &Head::w_v);
    set(per_head(s, in.scales), &Head::scale);
    set_all(s, s.grid, per_head(s, in.sink), rows, &RowArrays::sink);
    return s;
}

void check_gradients(const Problem& p, const CallLayout& s, const Inputs& in, const BackwardArrays& a) {
    const auto check = [](const Array& grad, const Array& of, const Shape& shape) {
        if (!grad.given) return;
        if (!of.given) throw_invalid(grad, "None where there is no such input", "an array");
        check_exact(grad, shape);
    };
    check(a.grad_query, in.query, concat(s.grid, {p.query_len, p.dim}));
    check(a.grad_query_bias, in.query_bias, concat(s.grid, {p.query_len}));
    check(a.grad_key, in.key, concat(s.shared, {p.key_len, p.dim}));
    check(a.grad_value, in.value, concat(s.shared, {p.key_len, p.value_dim}));
    check(a.grad_key_bias, in.key_bias, concat(s.shared, {p.key_len}));
    check(a.grad_w_v, in.w_v, concat(s.shared, {p.dim}));
    check(a.grad_bias, in.bias, Shape(in.bias.shape, in.bias.shape + in.bias.ndim));
    check(a.grad_sink, in.sink, s.grid);
    check(a.grad_scales, in.scales, s.grid);
}

void set_bias_groups(Problem& p, const CallLayout& s, const Array& grad) {
    if (!grad.given || p.heads.empty()) return;
    const IndexNumbering groups(Shape(grad.shape, grad.shape + s.outer));
    const MatrixCursor cursor = bias_cursor(p, s, grad);
    p.bias_groups.resize(static_cast<size_t>(groups.count));
    int64_t head = 0;
    for_each_index(s.grid, [&](const Shape& index) {
        BiasGroup& group = p.bias_groups[groups.of(index)];
        group.heads.push_back(head++);
        group.grad_bias = cursor.StridedCursor::at(index);
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

std::vector<RowArrays> build_forward(Problem& p, const Inputs& in, const ForwardArrays& a) {
    std::vector<RowArrays> rows;
    const CallLayout s = read_inputs(p, in, a.out, rows);
    check_exact(a.out, concat(s.grid, {p.query_len, p.value_dim}));
    const Shape column = concat(s.grid, {p.query_len, 1});
    for (size_t i = 0; i < std::size(kForwardArrays); ++i) {
        const Array& x = a.*kForwardArrays[i].array;
        if (x.given && (&x == &a.row_max || &x == &a.log_denom || i >= kFirstStatistic)) check_exact(x, column);
    }
    // Statistics by the row statistics that they need: max_weight is that of the largest score, sum_weights needs none.
    p.exact_row_max = a.max_score.given || a.max_weight.given;
    p.full_statistics = a.mean_score.given || a.var_score.given || a.entropy.given || a.sum_sq_weights.given;
    check_saved_scores(p, s, a.saved_scores);
    p.matrix = matrix_of(a.attention_scores, a.attention_weights);
    const Array& matrix = p.matrix == MatrixOutput::scores ? a.attention_scores : a.attention_weights;
    if (matrix.given) check_exact(matrix, concat(s.grid, {p.query_len, p.key_len}));

    const auto set = [&](const Array& x, auto& owners, auto field) {
        set_all(s, s.grid, StridedCursor(x, s.outer), owners, field);
    };
    set(a.out, p.heads, &Head::out);
    set(a.saved_scores, p.heads, &Head::saved_scores);
    set(matrix, p.heads, &Head::matrix);
    set(a.row_max, rows, &RowArrays::row_max);
    set(a.log_denom, rows, &RowArrays::log_denom);
    for (size_t i = 0; i < kStatistics; ++i) {
        const StridedCursor cursor(a.*kForwardArrays[kFirstStatistic + i].array, s.outer);
        if (cursor.base == nullptr) continue;
        size_t head = 0;
        for_each_index(s.grid, [&](const Shape& index) { rows[head++].statistics[i] = cursor.at(index); });
    }
    for (size_t h = 0; h < rows.size(); ++h) p.heads[h].sink = rows[h].sink;
    return rows;
}

std::vector<RowArrays> build_backward(Problem& p, const Inputs& in, const BackwardArrays& a) {
    std::vector<RowArrays> rows;
    const CallLayout s = read_inputs(p, in, a.out, rows);
    for (const Array* x : {&a.out, &a.grad_out}) check_shape(*x, concat(s.grid, {p.query_len, p.value_dim}), s.outer);
    if (a.grad_entropy.given && !a.entropy.given) throw_invalid(a.entropy, "an array beside grad_entropy", "None");
    for (const Array* x : {&a.row_max, &a.log_denom, &a.grad_log_sum_exp, &a.entropy, &a.grad_entropy}) {
        if (x->given || x == &a.row_max || x == &a.log_denom) check_exact(*x, concat(s.grid, {p.query_len, 1}));
    }
    check_gradients(p, s, in, a);
    check_saved_scores(p, s, a.saved_scores);
    p.matrix = matrix_of(a.grad_attention_scores, a.grad_attention_weights);
    const Array& grad_matrix = p.matrix == MatrixOutput::scores ? a.grad_attention_scores : a.grad_attention_weights;
    const Shape pairs = concat(s.grid, {p.query_len, p.key_len});
    if (grad_matrix.given) check_broadcast(grad_matrix, pairs);
    if (p.matrix == MatrixOutput::weights) check_given(a.attention_weights);
    if (a.attention_weights.given) check_exact(a.attention_weights, pairs);

    const auto set = [&](const Array& x, auto& owners, auto field) {
        set_all(s, s.grid, StridedCursor(x, s.outer), owners, field);
    };
    set_all(s, s.grid, MatrixCursor(a.grad_out, s.outer), p.heads, &Head::grad_out);
    set_all(s, s.grid, MatrixCursor::broadcast(grad_matrix, s.outer), p.heads, &Head::grad_matrix);
    set(a.saved_scores, p.heads, &Head::saved_scores);
    set(a.row_max, p.heads, &Head::row_max);
    if (a.grad_entropy.given) {
        set(a.entropy, p.heads, &Head::entropy);
        set(a.grad_entropy, p.heads, &Head::grad_entropy);
    }
    set(a.grad_query, p.heads, &Head::grad_query);
    set(a.grad_query_bias, p.heads, &Head::grad_query_bias);
    set(a.grad_scales, p.heads, &Head::grad_scale);
    set_all(s, s.grid, MatrixCursor(a.out, s.outer), rows, &RowArrays::out);
    set(a.row_max, rows, &RowArrays::row_max);
    set(a.log_denom, rows, &RowArrays::log_denom);
    set(a.attention_weights, rows, &RowArrays::attention_weights);
    set(a.grad_log_sum_exp, rows, &RowArrays::grad_log_sum_exp);
    set(a.grad_sink, rows, &RowArrays::grad_sink);
    // Gradients of groups have size 1 along the axes whose heads they sum over.
    const auto set_group = [&](const Array& x, auto field) {
        set_all(s, s.shared, StridedCursor(x, s.outer), p.groups, field);
    };
    set_group(a.grad_key, &Group::grad_key);
    set_group(a.grad_value, &Group::grad_value);
    set_group(a.grad_key_bias, &Group::grad_key_bias);
    set_group(a.grad_w_v, &Group::grad_w_v);
    set_bias_groups(p, s, a.grad_bias);
    return rows;
}

}  // namespace attnscore
