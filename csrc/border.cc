#include "border.h"

#include <stdexcept>
#include <string>
#include <vector>

namespace attnscore {
namespace {

using Shape = std::vector<int64_t>;

std::string text(const int64_t* shape, size_t ndim) {
    std::string result = "(";
    for (size_t i = 0; i < ndim; ++i) result += (i ? ", " : "") + std::to_string(shape[i]);
    return result + (ndim == 1 ? ",)" : ")");
}

std::string shape_of(const Array& a) { return text(a.shape, static_cast<size_t>(a.ndim)); }

[[noreturn]] void refuse(const Array& a, const std::string& expected, const std::string& got) {
    throw std::invalid_argument(std::string(a.name) + ": expected " + expected + ", got " + got);
}

bool is_empty(const Array& a) {
    for (int i = 0; i < a.ndim; ++i) {
        if (a.shape[i] == 0) return true;
    }
    return false;
}

void check_aligned(const Array& a) {
    if (!is_empty(a) && reinterpret_cast<uintptr_t>(a.data) % static_cast<uintptr_t>(a.item) != 0) {
        refuse(a, "elements at multiples of their size (" + std::to_string(a.item) + " bytes)", "a misaligned array");
    }
}

void check_given(const Array& a) {
    if (!a.given) refuse(a, "an array", "None");
}

// The first `loose` axes may be 1 instead: they are broadcast.
void check_shape(const Array& a, const Shape& expected, size_t loose = 0) {
    check_given(a);
    bool fits = static_cast<size_t>(a.ndim) == expected.size();
    for (size_t i = 0; fits && i < expected.size(); ++i) {
        fits = a.shape[i] == expected[i] || (i < loose && a.shape[i] == 1);
    }
    if (!fits) {
        const std::string hint = loose ? " (1 in the first " + std::to_string(loose) + " axes is broadcast)" : "";
        refuse(a, "shape " + text(expected.data(), expected.size()) + hint, shape_of(a));
    }
    check_aligned(a);
}

void check_contiguous(const Array& a, int from = 0) {
    if (is_empty(a)) return;
    int64_t stride = 1;
    for (int i = a.ndim - 1; i >= from; --i) {
        if (a.shape[i] != 1 && a.strides[i] != stride) {
            refuse(a, "a C-contiguous array", "strides (in elements) " + text(a.strides, static_cast<size_t>(a.ndim)));
        }
        stride *= a.shape[i];
    }
}

void check_full(const Array& a, const Shape& expected) {
    check_shape(a, expected);
    check_contiguous(a);
}

Shape joined(Shape front, std::initializer_list<int64_t> back) {
    front.insert(front.end(), back);
    return front;
}

// An array whose last `inner` axes belong to a head; steps along the others, in bytes, 0 where it is broadcast.
struct Walk {
    char* base = nullptr;
    Shape steps;

    Walk() = default;
    Walk(const Array& a, size_t outer) : base(a.data), steps(outer) {
        for (size_t i = 0; i < outer; ++i) steps[i] = a.shape[i] == 1 ? 0 : a.strides[i] * a.item;
    }

    char* at(const Shape& place) const {
        if (base == nullptr) return nullptr;
        int64_t offset = 0;
        for (size_t i = 0; i < steps.size(); ++i) offset += place[i] * steps[i];
        return base + offset;
    }
};

struct MatrixWalk : Walk {
    Matrix shape;

    MatrixWalk() = default;
    MatrixWalk(const Array& a, size_t outer) : Walk(a, outer) {
        const int64_t rows = a.shape[outer], cols = a.shape[outer + 1];
        // The stride of an axis of length 1 says nothing; 1 lets a single column take the contiguous path.
        shape.col_stride = cols > 1 ? a.strides[outer + 1] : 1;
        shape.row_stride = rows > 1 ? a.strides[outer] : cols;
    }

    Matrix matrix(const Shape& place) const { return {at(place), shape.row_stride, shape.col_stride}; }
};

// What both directions share: the axes, and the inputs head by head.
struct Setting {
    Shape grid;  // (*lead, head, group)
    size_t outer = 0, head_axis = 0, group_axis = 0;
    bool empty = false;
    MatrixWalk query, key, value;
    Walk start, stop, weights;
};

void check_intervals(const Problem& p, const Setting& s, const Array& start, const Array& stop) {
    if (start.given != stop.given) refuse(start.given ? stop : start, "start and stop together", "None");
    if (!start.given) return;
    for (const Array* a : {&start, &stop}) {
        check_shape(*a, {s.grid[0], p.query_len}, 1);
        check_contiguous(*a);
    }
    if (start.shape[0] != stop.shape[0]) refuse(stop, "the shape of start, " + shape_of(start), shape_of(stop));
    if (is_empty(start)) return;
    const auto* first = reinterpret_cast<const int64_t*>(start.data);
    const auto* last = reinterpret_cast<const int64_t*>(stop.data);
    for (int64_t i = 0; i < start.shape[0] * start.shape[1]; ++i) {
        if (first[i] < 0) refuse(start, "numbers from 0", std::to_string(first[i]));
        if (last[i] > p.key_len) {
            refuse(stop, "numbers up to key_len = " + std::to_string(p.key_len), std::to_string(last[i]));
        }
        if (first[i] > last[i]) {
            refuse(stop, "numbers from start on", std::to_string(last[i]) + " with start " + std::to_string(first[i]));
        }
    }
}

void check_weights(const Problem& p, const Setting& s, const Array& weights) {
    if (p.form == Form::inner) {
        if (weights.given) refuse(weights, "None with form 'inner'", "an array");
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

void set_weights(Setting& s, const Array& weights) {
    if (!weights.given) return;
    s.weights.base = weights.data;
    s.weights.steps.assign(s.outer, 0);
    if (weights.ndim == 1) return;
    for (const size_t axis : {s.head_axis, s.group_axis}) {
        const size_t own = axis - s.head_axis;
        s.weights.steps[axis] = weights.shape[own] == 1 ? 0 : weights.strides[own] * weights.item;
    }
}

void set_intervals(Setting& s, const Array& start, const Array& stop) {
    if (!start.given) return;
    for (auto [walk, a] : {std::pair{&s.start, &start}, std::pair{&s.stop, &stop}}) {
        walk->base = a->data;
        walk->steps.assign(s.outer, 0);
        walk->steps[0] = a->shape[0] == 1 ? 0 : a->shape[1] * a->item;
    }
}

// `full` has the whole grid and a row for each query.
Setting read(Problem& p, const Array& full, const ForwardArrays& in) {
    for (const Array* a : {&full, &in.query, &in.key, &in.value}) {
        check_given(*a);
        if (a->ndim < 5) refuse(*a, "at least 5 axes: (*lead, head, group, rows, cols)", shape_of(*a));
        if (a->ndim != full.ndim) refuse(*a, std::to_string(full.ndim) + " axes, as " + full.name, shape_of(*a));
    }
    Setting s;
    s.outer = static_cast<size_t>(full.ndim) - 2;
    s.head_axis = s.outer - 2;
    s.group_axis = s.outer - 1;
    s.grid.assign(full.shape, full.shape + s.outer);
    p.query_len = full.shape[s.outer];
    p.key_len = in.key.shape[s.outer];
    p.value_dim = in.value.shape[s.outer + 1];
    p.dim = in.query.shape[s.outer + 1];
    check_shape(in.query, joined(s.grid, {p.query_len, p.dim}), s.outer);
    check_shape(in.key, joined(s.grid, {p.key_len, p.dim}), s.outer);
    check_shape(in.value, joined(s.grid, {p.key_len, p.value_dim}), s.outer);
    check_intervals(p, s, in.start, in.stop);
    check_weights(p, s, in.weights);

    for (const int64_t length : s.grid) s.empty |= length == 0;
    s.query = MatrixWalk(in.query, s.outer);
    s.key = MatrixWalk(in.key, s.outer);
    s.value = MatrixWalk(in.value, s.outer);
    set_intervals(s, in.start, in.stop);
    set_weights(s, in.weights);
    return s;
}

Head head_at(const Setting& s, const Shape& place) {
    Head head;
    head.query = s.query.matrix(place);
    head.key = s.key.matrix(place);
    head.value = s.value.matrix(place);
    head.start = reinterpret_cast<const int64_t*>(s.start.at(place));
    head.stop = reinterpret_cast<const int64_t*>(s.stop.at(place));
    head.weights = s.weights.at(place);
    return head;
}

// Calls f(place) for each head, in C order.
template <class F>
void each_head(const Setting& s, const F& f) {
    if (s.empty) return;
    Shape place(s.outer, 0);
    for (;;) {
        f(place);
        size_t axis = s.outer;
        while (axis > 0 && ++place[axis - 1] == s.grid[axis - 1]) place[--axis] = 0;
        if (axis == 0) return;
    }
}

// How many query heads lie side by side in one gradient of keys and values: all of the group axis, or one.
bool heads_share(const Problem& p, const Setting& s, const BackwardArrays& in) {
    const int64_t group = s.grid[s.group_axis];
    for (const Array* a : {&in.grad_key, &in.grad_value}) {
        check_given(*a);
        if (a->ndim != static_cast<int>(s.outer + 2)) {
            refuse(*a, std::to_string(s.outer + 2) + " axes, as grad_out", shape_of(*a));
        }
    }
    const int64_t key_group = in.grad_key.shape[s.group_axis];
    Shape grid = s.grid;
    if (key_group == 1) grid[s.group_axis] = 1;
    check_full(in.grad_key, joined(grid, {p.key_len, p.dim}));
    check_full(in.grad_value, joined(grid, {p.key_len, p.value_dim}));
    if (p.form == Form::additive) {
        check_full(in.grad_weights, joined(grid, {p.dim}));
    } else if (in.grad_weights.given) {
        refuse(in.grad_weights, "None with form 'inner'", "an array");
    }
    if (key_group != 1 || group == 1) return false;
    for (const Array* a : {&in.key, &in.value}) {
        if (a->shape[s.group_axis] != 1) refuse(*a, "one key head per group, as grad_key has", shape_of(*a));
    }
    if (in.weights.given && in.weights.ndim == 3 && in.weights.shape[1] != 1) {
        refuse(in.weights, "one row per group, as grad_weights has", shape_of(in.weights));
    }
    return true;
}

}  // namespace

int64_t size_of(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

Dtype sum_dtype(const Problem& problem) { return problem.value_dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }

void set_forward(Problem& p, const ForwardArrays& in) {
    const Setting s = read(p, in.out, in);
    check_full(in.out, joined(s.grid, {p.query_len, p.value_dim}));
    check_full(in.statistics, joined(s.grid, {p.query_len, kStatistics}));
    const Walk out(in.out, s.outer), statistics(in.statistics, s.outer);
    each_head(s, [&](const Shape& place) {
        Head head = head_at(s, place);
        head.out = out.at(place);
        head.statistics = statistics.at(place);
        p.heads.push_back(head);
    });
}

void set_backward(Problem& p, const BackwardArrays& in) {
    const Setting s = read(p, in.grad_query, {in.query, in.key, in.value, {}, {}, in.start, in.stop, in.weights});
    check_full(in.grad_query, joined(s.grid, {p.query_len, p.dim}));
    check_shape(in.grad_out, joined(s.grid, {p.query_len, p.value_dim}), s.outer);
    for (const Array* a : {&in.top, &in.log_total, &in.shift}) check_full(*a, joined(s.grid, {p.query_len}));
    const bool shared = heads_share(p, s, in);

    const MatrixWalk grad_out(in.grad_out, s.outer);
    const Walk top(in.top, s.outer), log_total(in.log_total, s.outer), shift(in.shift, s.outer);
    const Walk grad_query(in.grad_query, s.outer), grad_key(in.grad_key, s.outer), grad_value(in.grad_value, s.outer);
    const Walk grad_weights = in.grad_weights.given ? Walk(in.grad_weights, s.outer) : Walk();
    each_head(s, [&](const Shape& place) {
        Head head = head_at(s, place);
        head.grad_out = grad_out.matrix(place);
        head.top = top.at(place);
        head.log_total = log_total.at(place);
        head.shift = shift.at(place);
        head.grad_query = grad_query.at(place);
        if (!shared || place[s.group_axis] == 0) {
            p.groups.push_back({{}, grad_key.at(place), grad_value.at(place), grad_weights.at(place)});
        }
        p.groups.back().heads.push_back(static_cast<int64_t>(p.heads.size()));
        p.heads.push_back(head);
    });
}

}  // namespace attnscore
