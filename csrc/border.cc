#include "border.h"

#include <string>
#include <utility>
#include <vector>

namespace attnscore {
namespace {

// What both directions share: the axes, and the inputs head by head.
struct Setting {
    Shape grid;    // (*lead, head, group)
    Shape shared;  // the same, 1 where heads along an axis have the same keys and values
    size_t outer = 0, head_axis = 0, group_axis = 0;
    MatrixWalk query, key, value, query_bias, key_bias, bias, mask, query_ids, key_ids;
    Walk start, stop, weights, sink, scales;
    int64_t holes = 0, hole_step = 0;  // of the intervals
};

void check_intervals(const Problem& p, const Setting& s, const Array& start, const Array& stop) {
    if (start.given != stop.given) refuse(start.given ? stop : start, "start and stop together", "None");
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
        refuse(stop, "the shape of start, " + shape_of(start), shape_of(stop));
    }
    if (is_empty(start)) return;
    const auto* first = reinterpret_cast<const int64_t*>(start.data);
    const auto* last = reinterpret_cast<const int64_t*>(stop.data);
    int64_t count = 1;
    for (const int64_t length : shape) count *= length;
    for (int64_t i = 0; i < count; ++i) {
        if (first[i] < 0) refuse(start, "numbers from 0", std::to_string(first[i]));
        if (last[i] > p.key_len) {
            refuse(stop, "numbers up to key_len = " + std::to_string(p.key_len), std::to_string(last[i]));
        }
        if (first[i] > last[i]) {
            refuse(stop, "numbers from start on", std::to_string(last[i]) + " with start " + std::to_string(first[i]));
        }
    }
}

void check_ids(const Problem& p, const Setting& s, const Array& query_ids, const Array& key_ids) {
    if (query_ids.given != key_ids.given) {
        refuse(query_ids.given ? key_ids : query_ids, "query_ids and key_ids together", "None");
    }
    if (!query_ids.given) return;
    check_shape(query_ids, {s.grid[0], p.query_len}, 1);
    check_shape(key_ids, {s.grid[0], p.key_len}, 1);
}

void check_weights(const Problem& p, const Setting& s, const Array& weights) {
    if (p.form != Form::additive) {
        if (weights.given) refuse(weights, "None but with form 'additive'", "an array");
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

void check_scales(const Problem& p, const Setting& s, const Array& scales) {
    if (!scales.given) return;
    if (p.form != Form::distance) refuse(scales, "None but with form 'distance'", "an array");
    check_broadcast(scales, {s.grid[s.head_axis], s.grid[s.group_axis]});
}

// The scores that a forward keeps: those of one matrix after the other.
Walk kept_scores(const Problem& p, const Setting& s, const Array& scores) {
    if (!scores.given) return {};
    if (p.form != Form::additive) refuse(scores, "None but with form 'additive'", "an array");
    check_full(scores, joined(s.grid, {p.query_len, p.key_len}));
    return Walk(scores, s.outer);
}

// Which of the two matrices of pairs is given.
PairMatrix matrix_of(const Array& scores, const Array& weights) {
    if (scores.given && weights.given) refuse(weights, "None beside " + std::string(scores.name), "an array");
    return scores.given ? PairMatrix::scores : weights.given ? PairMatrix::weights : PairMatrix::none;
}

// An array over the batch alone: (first of lead or 1, length).
Walk per_batch(const Setting& s, const Array& a) {
    Walk walk;
    walk.steps.assign(s.outer, 0);
    if (!a.given) return walk;
    walk.base = a.data;
    walk.steps[0] = a.shape[0] == 1 ? 0 : a.strides[0] * a.item;
    return walk;
}

// The intervals of the rows, over the batch alone: their holes lie on an axis in front.
Walk per_batch_ends(const Setting& s, Array a) {
    if (a.given && a.ndim == 3) {
        a.shape += 1;
        a.strides += 1;
    }
    return per_batch(s, a);
}

MatrixWalk column_per_batch(const Setting& s, const Array& a) {
    MatrixWalk walk;
    static_cast<Walk&>(walk) = per_batch(s, a);
    if (a.given) walk.row_stride = a.strides[1];
    return walk;
}

// An array over the query heads alone: (head or 1, group or 1, ...).
Walk per_head(const Setting& s, const Array& a) {
    Walk walk;
    walk.steps.assign(s.outer, 0);
    if (!a.given) return walk;
    walk.base = a.data;
    if (a.ndim == 1) return walk;
    for (const size_t axis : {s.head_axis, s.group_axis}) {
        const size_t own = axis - s.head_axis;
        walk.steps[axis] = a.shape[own] == 1 ? 0 : a.strides[own] * a.item;
    }
    return walk;
}

// Heads are in one group where all that a group shares is broadcast.
void set_shared(Setting& s, const Inputs& in) {
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
Setting read(Problem& p, const Inputs& in, const Array& out) {
    for (const Array* a : {&out, &in.query, &in.key, &in.value}) {
        check_given(*a);
        if (a->ndim < 5) refuse(*a, "at least 5 axes: (*lead, head, group, rows, cols)", shape_of(*a));
        if (a->ndim != out.ndim) refuse(*a, std::to_string(out.ndim) + " axes, as " + out.name, shape_of(*a));
    }
    Setting s;
    s.outer = static_cast<size_t>(out.ndim) - 2;
    s.head_axis = s.outer - 2;
    s.group_axis = s.outer - 1;
    s.grid.assign(out.shape, out.shape + s.outer);
    p.query_len = out.shape[s.outer];
    p.key_len = in.key.shape[s.outer];
    p.value_dim = in.value.shape[s.outer + 1];
    p.dim = in.query.shape[s.outer + 1];
    check_shape(in.query, joined(s.grid, {p.query_len, p.dim}), s.outer);
    check_shape(in.key, joined(s.grid, {p.key_len, p.dim}), s.outer);
    check_shape(in.value, joined(s.grid, {p.key_len, p.value_dim}), s.outer);
    if (in.query_bias.given) check_broadcast(in.query_bias, joined(s.grid, {p.query_len, 1}));
    if (in.key_bias.given) check_broadcast(in.key_bias, joined(s.grid, {p.key_len, 1}));
    for (const Array* a : {&in.bias, &in.mask}) {
        if (a->given) check_broadcast(*a, joined(s.grid, {p.query_len, p.key_len}));
    }
    if (in.sink.given) check_broadcast(in.sink, {s.grid[s.head_axis], s.grid[s.group_axis]});
    check_ids(p, s, in.query_ids, in.key_ids);
    check_intervals(p, s, in.start, in.stop);
    check_weights(p, s, in.weights);
    check_scales(p, s, in.scales);

    s.query = MatrixWalk(in.query, s.outer);
    s.key = MatrixWalk(in.key, s.outer);
    s.value = MatrixWalk(in.value, s.outer);
    s.query_bias = MatrixWalk::broadcast(in.query_bias, s.outer);
    s.key_bias = MatrixWalk::broadcast(in.key_bias, s.outer);
    s.bias = MatrixWalk::broadcast(in.bias, s.outer);
    s.mask = MatrixWalk::broadcast(in.mask, s.outer);
    s.query_ids = column_per_batch(s, in.query_ids);
    s.key_ids = column_per_batch(s, in.key_ids);
    s.start = per_batch_ends(s, in.start);
    s.stop = per_batch_ends(s, in.stop);
    if (in.start.given && in.start.ndim == 3) {
        s.holes = in.start.shape[0] - 1;
        s.hole_step = in.start.shape[1] * in.start.shape[2];
    }
    s.weights = per_head(s, in.weights);
    s.sink = per_head(s, in.sink);
    s.scales = per_head(s, in.scales);
    set_shared(s, in);
    return s;
}

Head head_at(const Setting& s, const Shape& place) {
    Head head;
    head.query = s.query.matrix(place);
    head.key = s.key.matrix(place);
    head.value = s.value.matrix(place);
    head.query_bias = s.query_bias.matrix(place);
    head.key_bias = s.key_bias.matrix(place);
    head.bias = s.bias.matrix(place);
    head.mask = s.mask.matrix(place);
    head.query_ids = s.query_ids.matrix(place);
    head.key_ids = s.key_ids.matrix(place);
    head.start = reinterpret_cast<const int64_t*>(s.start.at(place));
    head.stop = reinterpret_cast<const int64_t*>(s.stop.at(place));
    head.holes = s.holes;
    head.hole_step = s.hole_step;
    head.weights = s.weights.at(place);
    head.scale = s.scales.at(place);
    return head;
}

// Calls f(place) for each place of the grid, in C order.
template <class F>
void each_place(const Shape& grid, const F& f) {
    for (const int64_t length : grid) {
        if (length == 0) return;
    }
    Shape place(grid.size(), 0);
    for (;;) {
        f(place);
        size_t axis = grid.size();
        while (axis > 0 && ++place[axis - 1] == grid[axis - 1]) place[--axis] = 0;
        if (axis == 0) return;
    }
}

// Numbers the places of a grid in C order, those as one that differ in an axis of length 1 alone.
struct Numbering {
    Shape steps;
    int64_t count = 1;

    explicit Numbering(const Shape& grid) : steps(grid.size()) {
        for (size_t i = grid.size(); i-- > 0;) {
            steps[i] = grid[i] == 1 ? 0 : count;
            count *= grid[i];
        }
    }

    size_t of(const Shape& place) const {
        int64_t number = 0;
        for (size_t i = 0; i < steps.size(); ++i) number += steps[i] * place[i];
        return static_cast<size_t>(number);
    }
};

// The heads of the whole grid, each in its group; f(head, rows, group, place) sets what a direction adds.
template <class F>
std::vector<HeadRows> set_heads(Problem& p, const Setting& s, const F& f) {
    const Numbering groups(s.shared);
    p.groups.resize(static_cast<size_t>(groups.count));
    std::vector<HeadRows> rows;
    each_place(s.grid, [&](const Shape& place) {
        Head head = head_at(s, place);
        Group& group = p.groups[groups.of(place)];
        head.place = static_cast<int64_t>(p.heads.size());
        group.heads.push_back(head.place);
        rows.emplace_back().sink = s.sink.at(place);
        f(head, rows.back(), group, place);
        p.heads.push_back(head);
    });
    if (p.heads.empty()) p.groups.clear();
    return rows;
}

void check_gradients(const Problem& p, const Setting& s, const Inputs& in, const BackwardArrays& a) {
    const auto check = [](const Array& grad, const Array& of, const Shape& shape) {
        if (!grad.given) return;
        if (!of.given) refuse(grad, "None where there is no such input", "an array");
        check_full(grad, shape);
    };
    check(a.query, in.query, joined(s.grid, {p.query_len, p.dim}));
    check(a.query_bias, in.query_bias, joined(s.grid, {p.query_len}));
    check(a.key, in.key, joined(s.shared, {p.key_len, p.dim}));
    check(a.value, in.value, joined(s.shared, {p.key_len, p.value_dim}));
    check(a.key_bias, in.key_bias, joined(s.shared, {p.key_len}));
    check(a.weights, in.weights, joined(s.shared, {p.dim}));
    check(a.bias, in.bias, Shape(in.bias.shape, in.bias.shape + in.bias.ndim));
    check(a.sink, in.sink, s.grid);
    check(a.scales, in.scales, s.grid);
}

void set_bias_groups(Problem& p, const Setting& s, const Array& grad) {
    if (!grad.given || p.heads.empty()) return;
    const Numbering groups(Shape(grad.shape, grad.shape + s.outer));
    const MatrixWalk walk = MatrixWalk::broadcast(grad, s.outer);
    p.bias_groups.resize(static_cast<size_t>(groups.count));
    int64_t head = 0;
    each_place(s.grid, [&](const Shape& place) {
        BiasGroup& group = p.bias_groups[groups.of(place)];
        group.heads.push_back(head++);
        group.grad_bias = walk.at(place);
        group.row_stride = walk.row_stride;
        group.col_stride = walk.col_stride;
    });
}

}  // namespace

Dtype sum_dtype(const Problem& problem) { return problem.value_dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }

std::vector<HeadRows> set_forward(Problem& p, const Inputs& in, const ForwardArrays& arrays) {
    const Setting s = read(p, in, arrays.out);
    check_full(arrays.out, joined(s.grid, {p.query_len, p.value_dim}));
    const Shape column = joined(s.grid, {p.query_len, 1});
    for (const Array* a : {&arrays.top, &arrays.log_total}) {
        if (a->given) check_full(*a, column);
    }
    Walk statistics[kStatistics];
    for (int i = 0; i < kStatistics; ++i) {
        if (!arrays.statistics[i].given) continue;
        check_full(arrays.statistics[i], column);
        statistics[i] = Walk(arrays.statistics[i], s.outer);
    }
    // The sum of the weights is known of every row.
    p.maxima = arrays.statistics[kMaxScore].given || arrays.statistics[kMaxWeight].given;
    for (const Statistic i : {kMeanScore, kVarScore, kEntropy, kSumSqWeights}) {
        p.full_statistics = p.full_statistics || arrays.statistics[i].given;
    }
    const Walk out(arrays.out, s.outer), top(arrays.top, s.outer), log_total(arrays.log_total, s.outer);
    const Walk scores = kept_scores(p, s, arrays.scores);
    p.matrix = matrix_of(arrays.attention_scores, arrays.attention_weights);
    const Array& wanted = p.matrix == PairMatrix::scores ? arrays.attention_scores : arrays.attention_weights;
    if (wanted.given) check_full(wanted, joined(s.grid, {p.query_len, p.key_len}));
    const Walk matrix(wanted, s.outer);
    return set_heads(p, s, [&](Head& head, HeadRows& rows, Group&, const Shape& place) {
        head.out = out.at(place);
        head.scores = scores.at(place);
        head.matrix = matrix.at(place);
        head.sink = rows.sink;
        rows.top = top.at(place);
        rows.log_total = log_total.at(place);
        for (int i = 0; i < kStatistics; ++i) rows.statistics[i] = statistics[i].at(place);
    });
}

std::vector<HeadRows> set_backward(Problem& p, const Inputs& in, const BackwardArrays& a) {
    const Setting s = read(p, in, a.out);
    for (const Array* x : {&a.out, &a.grad_out}) check_shape(*x, joined(s.grid, {p.query_len, p.value_dim}), s.outer);
    if (a.grad_entropy.given && !a.entropy.given) refuse(a.entropy, "an array beside grad_entropy", "None");
    for (const Array* x : {&a.top, &a.log_total, &a.grad_log_sum_exp, &a.entropy, &a.grad_entropy}) {
        if (x->given || x == &a.top || x == &a.log_total) check_full(*x, joined(s.grid, {p.query_len, 1}));
    }
    check_gradients(p, s, in, a);
    const size_t outer = s.outer;
    const MatrixWalk out(a.out, outer), grad_out(a.grad_out, outer);
    const Walk top(a.top, outer), log_total(a.log_total, outer), entropy(a.entropy, outer);
    const Walk grad_log_sum_exp(a.grad_log_sum_exp, outer), grad_entropy(a.grad_entropy, outer);
    const Walk query(a.query, outer), query_bias(a.query_bias, outer), key(a.key, outer), value(a.value, outer);
    const Walk key_bias(a.key_bias, outer), weights(a.weights, outer), sink(a.sink, outer);
    const Walk scales(a.scales, outer), scores = kept_scores(p, s, a.scores);
    p.matrix = matrix_of(a.grad_attention_scores, a.grad_attention_weights);
    const Array& incoming = p.matrix == PairMatrix::scores ? a.grad_attention_scores : a.grad_attention_weights;
    const Shape pairs = joined(s.grid, {p.query_len, p.key_len});
    if (incoming.given) check_broadcast(incoming, pairs);
    if (p.matrix == PairMatrix::weights) check_given(a.attention_weights);
    if (a.attention_weights.given) check_full(a.attention_weights, pairs);
    const MatrixWalk grad_matrix = MatrixWalk::broadcast(incoming, outer);
    const Walk attention_weights(a.attention_weights, outer);
    std::vector<HeadRows> found = set_heads(p, s, [&](Head& head, HeadRows& rows, Group& group, const Shape& place) {
        head.grad_out = grad_out.matrix(place);
        head.grad_matrix = grad_matrix.matrix(place);
        rows.attention_weights = attention_weights.at(place);
        head.scores = scores.at(place);
        head.top = top.at(place);
        if (a.grad_entropy.given) {
            head.entropy = entropy.at(place);
            head.grad_entropy = grad_entropy.at(place);
        }
        head.grad_query = query.at(place);
        head.grad_query_bias = query_bias.at(place);
        head.grad_scale = scales.at(place);
        group.grad_key = key.at(place);
        group.grad_value = value.at(place);
        group.grad_key_bias = key_bias.at(place);
        group.grad_weights = weights.at(place);
        rows.out = out.matrix(place);
        rows.top = top.at(place);
        rows.log_total = log_total.at(place);
        rows.grad_log_sum_exp = grad_log_sum_exp.at(place);
        rows.grad_sink = sink.at(place);
    });
    set_bias_groups(p, s, a.bias);
    return found;
}

}  // namespace attnscore
