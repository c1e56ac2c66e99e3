#include "api/validate.h"

#include <string>
#include <utility>
#include <vector>

namespace attnscore {
namespace {

// What both directions share: the axes, and the inputs head by head.
struct CallLayout {
    Shape grid;    // (*lead, head, group)
    Shape shared;  // the same, 1 where heads along an axis have the same keys and values
    size_t outer = 0, head_axis = 0, group_axis = 0;
    MatrixCursor query, key, value, query_bias, key_bias, bias, mask, query_ids, key_ids;
    StridedCursor start, stop, weights, sink, scales;
    int64_t holes = 0, hole_stride = 0;  // of the intervals
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

void check_weights(const Problem& p, const CallLayout& s, const Array& weights) {
    if (p.form != Form::additive) {
        if (weights.given) throw_invalid(weights, "None but with form 'additive'", "an array");
        return;
    }
    check_given(weights);
    if (weights.ndim == 1) {
        check_shape(weights, {p.dim});
    } else {
        check_shape(weights, {s.grid[s.head_axis], s.grid[s.group_axis], p.dim}, 2);
    }
    check_contiguous(weights, weights.ndim - 1);
}

void check_scales(const Problem& p, const CallLayout& s, const Array& scales) {
    if (!scales.given) return;
    if (p.form != Form::distance) throw_invalid(scales, "None but with form 'distance'", "an array");
    check_broadcast(scales, {s.grid[s.head_axis], s.grid[s.group_axis]});
}

// The scores that a forward keeps: those of one matrix after the other.
StridedCursor saved_scores_cursor(const Problem& p, const CallLayout& s, const Array& scores) {
    if (!scores.given) return {};
    if (p.form != Form::additive) throw_invalid(scores, "None but with form 'additive'", "an array");
    check_exact(scores, concat(s.grid, {p.query_len, p.key_len}));
    return StridedCursor(scores, s.outer);
}

// Which of the two matrices of pairs is given.
MatrixOutput matrix_of(const Array& scores, const Array& weights) {
    if (scores.given && weights.given) throw_invalid(weights, "None beside " + std::string(scores.name), "an array");
    return scores.given ? MatrixOutput::scores : weights.given ? MatrixOutput::weights : MatrixOutput::none;
}

// An array over the batch alone: (first of lead or 1, length).
StridedCursor per_batch(const CallLayout& s, const Array& a) {
    StridedCursor cursor;
    cursor.steps.assign(s.outer, 0);
    if (!a.given) return cursor;
    cursor.base = a.data;
    cursor.steps[0] = a.shape[0] == 1 ? 0 : a.strides[0] * a.item;
    return cursor;
}

// The intervals of the rows, over the batch alone: their holes lie on an axis in front.
StridedCursor per_batch_ends(const CallLayout& s, Array a) {
    if (a.given && a.ndim == 3) {
        a.shape += 1;
        a.strides += 1;
    }
    return per_batch(s, a);
}

MatrixCursor column_per_batch(const CallLayout& s, const Array& a) {
    MatrixCursor cursor;
    static_cast<StridedCursor&>(cursor) = per_batch(s, a);
    if (a.given) cursor.row_stride = a.strides[1];
    return cursor;
}

// An array over the query heads alone: (head or 1, group or 1, ...).
StridedCursor per_head(const CallLayout& s, const Array& a) {
    StridedCursor cursor;
    cursor.steps.assign(s.outer, 0);
    if (!a.given) return cursor;
    cursor.base = a.data;
    if (a.ndim == 1) return cursor;
    for (const size_t axis : {s.head_axis, s.group_axis}) {
        const size_t own = axis - s.head_axis;
        cursor.steps[axis] = a.shape[own] == 1 ? 0 : a.strides[own] * a.item;
    }
    return cursor;
}

// Heads are in one group where all that a group shares is broadcast.
void set_shared(CallLayout& s, const Inputs& in) {
    s.shared.assign(s.outer, 1);
    for (const Array* a : {&in.key, &in.value, &in.key_bias}) {
        for (size_t i = 0; a->given && i < s.outer; ++i) {
            if (a->shape[i] != 1) s.shared[i] = s.grid[i];
        }
    }
    if (!in.weights.given || in.weights.ndim == 1) return;
    for (const size_t axis : {s.head_axis, s.group_axis}) {
        if (in.weights.shape[axis - s.head_axis] != 1) s.shared[axis] = s.grid[axis];
    }
}

// `out` has the whole grid and a row for each query.
CallLayout read_inputs(Problem& p, const Inputs& in, const Array& out) {
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
    for (const Array* a : {&in.bias, &in.mask}) {
        if (a->given) check_broadcast(*a, concat(s.grid, {p.query_len, p.key_len}));
    }
    if (in.sink.given) check_broadcast(in.sink, {s.grid[s.head_axis], s.grid[s.group_axis]});
    check_ids(p, s, in.query_ids, in.key_ids);
    check_intervals(p, s, in.start, in.stop);
    check_weights(p, s, in.weights);
    check_scales(p, s, in.scales);

    s.query = MatrixCursor(in.query, s.outer);
    s.key = MatrixCursor(in.key, s.outer);
    s.value = MatrixCursor(in.value, s.outer);
    s.query_bias = MatrixCursor::broadcast(in.query_bias, s.outer);
    s.key_bias = MatrixCursor::broadcast(in.key_bias, s.outer);
    s.bias = MatrixCursor::broadcast(in.bias, s.outer);
    s.mask = MatrixCursor::broadcast(in.mask, s.outer);
    s.query_ids = column_per_batch(s, in.query_ids);
    s.key_ids = column_per_batch(s, in.key_ids);
    s.start = per_batch_ends(s, in.start);
    s.stop = per_batch_ends(s, in.stop);
    if (in.start.given && in.start.ndim == 3) {
        s.holes = in.start.shape[0] - 1;
        s.hole_stride = in.start.shape[1] * in.start.shape[2];
    }
    s.weights = per_head(s, in.weights);
    s.sink = per_head(s, in.sink);
    s.scales = per_head(s, in.scales);
    set_shared(s, in);
    return s;
}

Head head_at(const CallLayout& s, const Shape& index) {
    Head head;
    head.query = s.query.matrix(index);
    head.key = s.key.matrix(index);
    head.value = s.value.matrix(index);
    head.query_bias = s.query_bias.matrix(index);
    head.key_bias = s.key_bias.matrix(index);
    head.bias = s.bias.matrix(index);
    head.mask = s.mask.matrix(index);
    head.query_ids = s.query_ids.matrix(index);
    head.key_ids = s.key_ids.matrix(index);
    head.start = reinterpret_cast<const int64_t*>(s.start.at(index));
    head.stop = reinterpret_cast<const int64_t*>(s.stop.at(index));
    head.holes = s.holes;
    head.hole_stride = s.hole_stride;
    head.weights = s.weights.at(index);
    head.scale = s.scales.at(index);
    return head;
}

// Calls f(index) for each index of the grid, in C order.
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

// Numbers the places of a grid in C order, those as one that differ in an axis of length 1 alone.
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

// The heads of the whole grid, each in its group; f(head, rows, group, index) sets what a direction adds.
template <class F>
std::vector<RowArrays> build_heads(Problem& p, const CallLayout& s, const F& f) {
    const IndexNumbering groups(s.shared);
    p.groups.resize(static_cast<size_t>(groups.count));
    std::vector<RowArrays> rows;
    for_each_index(s.grid, [&](const Shape& index) {
        Head head = head_at(s, index);
        Group& group = p.groups[groups.of(index)];
        head.index = static_cast<int64_t>(p.heads.size());
        group.heads.push_back(head.index);
        rows.emplace_back().sink = s.sink.at(index);
        f(head, rows.back(), group, index);
        p.heads.push_back(head);
    });
    if (p.heads.empty()) p.groups.clear();
    return rows;
}

void check_gradients(const Problem& p, const CallLayout& s, const Inputs& in, const BackwardArrays& a) {
    const auto check = [](const Array& grad, const Array& of, const Shape& shape) {
        if (!grad.given) return;
        if (!of.given) throw_invalid(grad, "None where there is no such input", "an array");
        check_exact(grad, shape);
    };
    check(a.query, in.query, concat(s.grid, {p.query_len, p.dim}));
    check(a.query_bias, in.query_bias, concat(s.grid, {p.query_len}));
    check(a.key, in.key, concat(s.shared, {p.key_len, p.dim}));
    check(a.value, in.value, concat(s.shared, {p.key_len, p.value_dim}));
    check(a.key_bias, in.key_bias, concat(s.shared, {p.key_len}));
    check(a.weights, in.weights, concat(s.shared, {p.dim}));
    check(a.bias, in.bias, Shape(in.bias.shape, in.bias.shape + in.bias.ndim));
    check(a.sink, in.sink, s.grid);
    check(a.scales, in.scales, s.grid);
}

void set_bias_groups(Problem& p, const CallLayout& s, const Array& grad) {
    if (!grad.given || p.heads.empty()) return;
    const IndexNumbering groups(Shape(grad.shape, grad.shape + s.outer));
    const MatrixCursor cursor = MatrixCursor::broadcast(grad, s.outer);
    p.bias_groups.resize(static_cast<size_t>(groups.count));
    int64_t head = 0;
    for_each_index(s.grid, [&](const Shape& index) {
        BiasGroup& group = p.bias_groups[groups.of(index)];
        group.heads.push_back(head++);
        group.grad_bias = cursor.at(index);
        group.row_stride = cursor.row_stride;
        group.col_stride = cursor.col_stride;
    });
}

}  // namespace

Dtype sum_dtype(const Problem& problem) { return problem.value_dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }

std::vector<RowArrays> build_forward(Problem& p, const Inputs& in, const ForwardArrays& arrays) {
    const CallLayout s = read_inputs(p, in, arrays.out);
    check_exact(arrays.out, concat(s.grid, {p.query_len, p.value_dim}));
    const Shape column = concat(s.grid, {p.query_len, 1});
    for (const Array* a : {&arrays.row_max, &arrays.log_denom}) {
        if (a->given) check_exact(*a, column);
    }
    StridedCursor statistics[kStatistics];
    for (int i = 0; i < kStatistics; ++i) {
        if (!arrays.statistics[i].given) continue;
        check_exact(arrays.statistics[i], column);
        statistics[i] = StridedCursor(arrays.statistics[i], s.outer);
    }
    // The sum of the weights is known of every row.
    p.exact_row_max = arrays.statistics[kMaxScore].given || arrays.statistics[kMaxWeight].given;
    for (const Statistic i : {kMeanScore, kVarScore, kEntropy, kSumSqWeights}) {
        p.full_statistics = p.full_statistics || arrays.statistics[i].given;
    }
    const StridedCursor out(arrays.out, s.outer), row_max(arrays.row_max, s.outer),
        log_denom(arrays.log_denom, s.outer);
    const StridedCursor scores = saved_scores_cursor(p, s, arrays.saved_scores);
    p.matrix = matrix_of(arrays.attention_scores, arrays.attention_weights);
    const Array& wanted = p.matrix == MatrixOutput::scores ? arrays.attention_scores : arrays.attention_weights;
    if (wanted.given) check_exact(wanted, concat(s.grid, {p.query_len, p.key_len}));
    const StridedCursor matrix(wanted, s.outer);
    return build_heads(p, s, [&](Head& head, RowArrays& rows, Group&, const Shape& index) {
        head.out = out.at(index);
        head.saved_scores = scores.at(index);
        head.matrix = matrix.at(index);
        head.sink = rows.sink;
        rows.row_max = row_max.at(index);
        rows.log_denom = log_denom.at(index);
        for (int i = 0; i < kStatistics; ++i) rows.statistics[i] = statistics[i].at(index);
    });
}

std::vector<RowArrays> build_backward(Problem& p, const Inputs& in, const BackwardArrays& a) {
    const CallLayout s = read_inputs(p, in, a.out);
    for (const Array* x : {&a.out, &a.grad_out}) check_shape(*x, concat(s.grid, {p.query_len, p.value_dim}), s.outer);
    if (a.grad_entropy.given && !a.entropy.given) throw_invalid(a.entropy, "an array beside grad_entropy", "None");
    for (const Array* x : {&a.row_max, &a.log_denom, &a.grad_log_sum_exp, &a.entropy, &a.grad_entropy}) {
        if (x->given || x == &a.row_max || x == &a.log_denom) check_exact(*x, concat(s.grid, {p.query_len, 1}));
    }
    check_gradients(p, s, in, a);
    const size_t outer = s.outer;
    const MatrixCursor out(a.out, outer), grad_out(a.grad_out, outer);
    const StridedCursor row_max(a.row_max, outer), log_denom(a.log_denom, outer), entropy(a.entropy, outer);
    const StridedCursor grad_log_sum_exp(a.grad_log_sum_exp, outer), grad_entropy(a.grad_entropy, outer);
    const StridedCursor query(a.query, outer), query_bias(a.query_bias, outer), key(a.key, outer),
        value(a.value, outer);
    const StridedCursor key_bias(a.key_bias, outer), weights(a.weights, outer), sink(a.sink, outer);
    const StridedCursor scales(a.scales, outer), scores = saved_scores_cursor(p, s, a.saved_scores);
    p.matrix = matrix_of(a.grad_attention_scores, a.grad_attention_weights);
    const Array& grad_matrix_array =
        p.matrix == MatrixOutput::scores ? a.grad_attention_scores : a.grad_attention_weights;
    const Shape pairs = concat(s.grid, {p.query_len, p.key_len});
    if (grad_matrix_array.given) check_broadcast(grad_matrix_array, pairs);
    if (p.matrix == MatrixOutput::weights) check_given(a.attention_weights);
    if (a.attention_weights.given) check_exact(a.attention_weights, pairs);
    const MatrixCursor grad_matrix = MatrixCursor::broadcast(grad_matrix_array, outer);
    const StridedCursor attention_weights(a.attention_weights, outer);
    std::vector<RowArrays> found =
        build_heads(p, s, [&](Head& head, RowArrays& rows, Group& group, const Shape& index) {
            head.grad_out = grad_out.matrix(index);
            head.grad_matrix = grad_matrix.matrix(index);
            rows.attention_weights = attention_weights.at(index);
            head.saved_scores = scores.at(index);
            head.row_max = row_max.at(index);
            if (a.grad_entropy.given) {
                head.entropy = entropy.at(index);
                head.grad_entropy = grad_entropy.at(index);
            }
            head.grad_query = query.at(index);
            head.grad_query_bias = query_bias.at(index);
            head.grad_scale = scales.at(index);
            group.grad_key = key.at(index);
            group.grad_value = value.at(index);
            group.grad_key_bias = key_bias.at(index);
            group.grad_weights = weights.at(index);
            rows.out = out.matrix(index);
            rows.row_max = row_max.at(index);
            rows.log_denom = log_denom.at(index);
            rows.grad_log_sum_exp = grad_log_sum_exp.at(index);
            rows.grad_sink = sink.at(index);
        });
    set_bias_groups(p, s, a.bias);
    return found;
}

}  // namespace attnscore
