// A problem drawn at random: every form, mask and extra that attention.h knows, over odd sizes, strides and dtypes.
#pragma once

#include <string>
#include <vector>

#include "tests/memory.h"

namespace attnscore::tests {

struct Drawn {
    // What came later is drawn from numbers of its own, so that a seed stays the case that it was.
    Random random, later, latest, shorts;
    Memory memory;
    Problem problem;
    Dtype sum = Dtype::f32;
    double magnitude = 1, level = 0, weight = 1;
    bool planted = false, is_short = false;

    explicit Drawn(uint64_t seed)
        : random{std::mt19937_64(seed)},
          later{std::mt19937_64(~seed)},
          latest{std::mt19937_64(seed ^ 0x9E3779B9u)},
          shorts{std::mt19937_64(seed ^ 0x85EBCA6Bu)} {
        // Heads of few rows and keys, and with keys of their own, have kernels of their own.
        is_short = shorts.one_in(4);
        problem.clears_gradients = shorts.coin();
        draw_score();
        draw_sizes();
        draw_heads();
        if (problem.form == Form::additive && later.one_in(4)) draw_odd_w_v();
        if (!problem.heads.empty() && random.one_in(3)) plant();
        problem.exact_row_max = problem.full_statistics || later.coin();
        draw_matrix();
        problem.min_score = latest.coin();
        problem.first_key = problem.exact_row_max && latest.coin();
    }

   private:
    void draw_matrix() {
        if (!later.one_in(3)) return;
        problem.matrix = later.one_of({MatrixOutput::weights, MatrixOutput::weights, MatrixOutput::scores});
        // Who wants the scores alone has no values.
        if (problem.matrix == MatrixOutput::scores) problem.value_dim = 0;
        const bool sinks = later.coin();
        for (Head& head : problem.heads) {
            if (sinks) {
                char* sink = memory.filled(1, sum, 0, 1);
                put(sink, sum, 3 * later.normal());
                head.sink = sink;
            }
            head.grad_matrix = numbers_laid(memory, later, {later, problem.query_len, problem.key_len}, sum,
                                            [&] { return later.normal(); });
        }
    }

    void draw_score() {
        Problem& p = problem;
        p.form = random.one_of({Form::inner, Form::inner, Form::additive, Form::additive, Form::distance});
        if (is_short && p.form == Form::additive) p.form = shorts.one_of({Form::inner, Form::distance});
        p.activation = random.one_of({Activation::tanh, Activation::tanh, Activation::sigmoid, Activation::relu,
                                      Activation::leaky_relu, Activation::silu, Activation::gelu});
        p.score_dtype = random.one_of({Dtype::f32, Dtype::f32, Dtype::f64, Dtype::bf16, Dtype::f16});
        p.value_dtype = random.one_of({Dtype::f32, Dtype::f32, Dtype::bf16, Dtype::f16});
        if (p.score_dtype == Dtype::f64 && random.coin()) p.value_dtype = Dtype::f64;
        // The pairs of neighbours that targets with bfloat16 products know.
        if (p.score_dtype == Dtype::bf16 && random.coin()) p.value_dtype = Dtype::bf16;
        sum = sum_dtype(p);
        p.grad_dtype = random.one_of({Dtype::f32, p.value_dtype, Dtype::f64});
        p.bias_dtype = random.one_of({Dtype::f32, Dtype::f64, Dtype::bf16, Dtype::f16});
        p.full_statistics = random.coin();
        p.negative_slope = random.one_of({0.01, 0.2, -0.5, 2.0});
        magnitude = random.one_of({0.1, 1.0, 1.0, 4.0});
        // Arguments that cancel, out of the range of exponentials. Read as float, doubles would lose their difference.
        if (p.form == Form::additive && random.one_in(4) && (p.score_dtype != Dtype::f64 || sum == Dtype::f64)) {
            level = random.one_of({1.0, 43.85, 300.0, 1e4});
        }
        for (int64_t n = random.one_in(3) ? 1 + random.below(2) : 0; n > 0; --n) {
            p.caps.push_back({random.one_of<double>({0.5, 2.0, 30.0, INFINITY}), random.one_of({1.0, 0.25, 2.0})});
        }
        if (is_short) p.caps.clear();
        if (random.one_in(3)) p.dropout = random.one_of({0.1, 0.5, 0.999, 1e-12, 1 - 1e-12});
        p.seed = random.coin() ? random.bits() : static_cast<uint64_t>(random.below(3));
    }

    void draw_sizes() {
        Problem& p = problem;
        p.query_len = random.one_of<int64_t>({0, 1, 2, 3, 4, 5, 6, 7, 13, 17, 63, 64, 65, 97, 131, 191, 192, 193, 257});
        p.key_len = random.one_of<int64_t>({0, 1, 2, 3, 15, 31, 63, 64, 65, 67, 127, 129, 191, 192, 193, 257});
        p.dim = random.one_of<int64_t>({0, 1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 65, 127, 257});
        p.value_dim = random.one_of<int64_t>({0, 1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 65, 130});
        if (random.one_in(12)) {  // few rows and many keys, in ranges that are concat
            p.query_len = 1 + random.below(5);
            p.key_len = random.one_of<int64_t>({2047, 2048, 2049, 3001, 4161});
        }
        if (random.one_in(20)) {  // blocks of the backward; ranges of it
            p.query_len = random.one_of<int64_t>({256, 383, 384, 385});
            p.key_len = random.one_of<int64_t>({256, 257, 383, 384, 385});
        }
        if (is_short) {
            p.query_len = 1 + shorts.below(shorts.coin() ? 4 : 33);
            p.key_len = 1 + shorts.below(shorts.coin() ? 16 : 65);
        }
        // A case is to take milliseconds, sanitized.
        const int64_t pairs = p.query_len * p.key_len, term = p.form == Form::additive ? 4 : 1;
        while (pairs * (p.dim * term + p.value_dim) > 1500000) p.dim = (p.dim + 1) / 2, p.value_dim /= 2;
        p.scale =
            random.one_of({1.0, p.form == Form::inner ? -0.5 : 0.5}) / std::sqrt(1.0 + static_cast<double>(p.dim));
    }

    void draw_heads() {
        Problem& p = problem;
        const int64_t n = p.query_len, m = p.key_len;
        const bool large = n * m * (p.dim + p.value_dim) > 300000;
        const int64_t groups = 1 + random.below(large ? 1 : 3);
        const int64_t drawn = large ? 1 + random.below(2) : random.one_of<int64_t>({1, 2, 3, 7});
        const int64_t sharing = is_short ? 1 : drawn;
        const auto normal = [&] { return magnitude * random.normal(); };
        const bool with_query_bias = random.one_in(3) && !is_short, with_key_bias = random.one_in(3) && !is_short;
        const bool with_scales = p.form == Form::distance && random.coin();
        const int64_t first_place = random.one_in(4) ? int64_t{1} << 33 : 0;
        for (int64_t g = 0; g < groups; ++g) {
            Group group;
            Head head;
            head.key =
                numbers_laid(memory, random, {random, m, p.dim}, p.score_dtype, [&] { return normal() - level; });
            head.value =
                numbers_laid(memory, random, {random, m, p.value_dim}, p.value_dtype, [&] { return random.normal(); });
            if (p.form == Form::additive) {
                char* numbers = memory.filled(p.dim, sum, 0, random.below(3));
                for (int64_t i = 0; i < p.dim; ++i) put(numbers + i * size_of(sum), sum, random.normal());
                head.w_v = numbers;
            }
            if (with_key_bias) head.key_bias = column(m);
            for (int64_t h = 0; h < sharing; ++h) {
                head.query =
                    numbers_laid(memory, random, {random, n, p.dim}, p.score_dtype, [&] { return normal() + level; });
                head.grad_out = numbers_laid(memory, random, {random, n, p.value_dim}, p.grad_dtype,
                                             [&] { return random.normal(); });
                if (with_query_bias) head.query_bias = column(n);
                if (with_scales) head.scale = memory.filled(1, sum, random.one_of({0.25, 1.0, 2.0}), 1);
                head.index = first_place + static_cast<int64_t>(p.heads.size());
                group.heads.push_back(static_cast<int64_t>(p.heads.size()));
                p.heads.push_back(head);
            }
            p.groups.push_back(group);
        }
        // Masks and biases are of all heads, so that all rows of a micro-panel need the same; intervals are of each
        // head.
        const int64_t hiding = random.below(8);
        for (Head& head : p.heads) draw_intervals(head);
        if (hiding & 1) draw_mask();
        if (hiding & 2) draw_ids();
        if (random.one_in(3)) draw_bias();
    }

    // Weights of 0, and some that dwarf the others: what a division is shared by has to stay in range.
    void draw_odd_w_v() {
        const double large = later.one_of({1.0, 1.0, 30.0});
        for (const Group& group : problem.groups) {
            char* numbers = const_cast<char*>(problem.heads[group.heads[0]].w_v);
            for (int64_t i = 0; i < problem.dim; ++i) {
                const int64_t kind = later.below(6);
                char* to = numbers + i * size_of(sum);
                if (kind < 2) put(to, sum, kind == 0 ? 0 : large * number(to, sum));
            }
        }
        weight = large;
    }

    Matrix column(int64_t rows) {
        return numbers_laid(memory, random, {random, rows, 1}, sum, [&] { return 2 * random.normal(); });
    }

    void draw_intervals(Head& head) {
        const int64_t n = problem.query_len, m = problem.key_len, kind = random.below(6);
        if (kind == 0) return;
        const int64_t holes = random.coin() ? 0 : 1 + random.below(3);
        auto* start = reinterpret_cast<int64_t*>(memory.take((1 + holes) * n * 8));
        auto* stop = reinterpret_cast<int64_t*>(memory.take((1 + holes) * n * 8));
        const int64_t valid = random.below(m + 1);
        for (int64_t i = 0; i < n; ++i) {
            int64_t first = 0, last = m;
            if (kind == 1) last = std::min(i + 1, m);                                            // causal
            if (kind == 2) last = valid;                                                         // lengths
            if (kind == 3) first = std::clamp<int64_t>(i - 9, 0, m), last = std::min(i + 3, m);  // window
            if (kind == 4) first = random.below(m + 1), last = random.below(m + 1);              // anything
            start[i] = first;
            stop[i] = std::max(first, last);
        }
        for (int64_t k = 1; k <= holes; ++k) draw_hole(start + k * n, stop + k * n);
        head.start = start;
        head.stop = stop;
        head.holes = holes;
        head.hole_stride = n;
    }

    // One for each row: in front of a window, the same for all, or anything; rows may go without.
    void draw_hole(int64_t* start, int64_t* stop) {
        const int64_t m = problem.key_len, kind = random.below(3), share = random.one_of<int64_t>({1, 3, 1000000});
        const int64_t front = random.below(m + 1), back = random.below(m + 1);
        for (int64_t i = 0; i < problem.query_len; ++i) {
            int64_t first = std::min(front, back), last = std::max(front, back);
            if (kind == 0) last = std::clamp<int64_t>(i - 5, 0, m), first = std::min(front, last);
            if (kind == 1) first = random.below(m + 1), last = random.below(m + 1);
            start[i] = first;
            stop[i] = share > 1 && random.one_in(share) ? first : std::max(first, last);
        }
    }

    // The same for all heads, or one each; a row, a column, or whole.
    void draw_mask() {
        const bool each = random.coin();
        const int64_t share = random.one_of<int64_t>({2, 5, 100});
        Matrix mask;
        for (Head& head : problem.heads) {
            if (each || mask.data == nullptr) {
                mask = integers_laid<uint8_t>(memory, random, broadcast(), 255, [&] {
                    return static_cast<uint8_t>(random.one_in(share) ? 0 : 1 + random.below(255));
                });
            }
            head.mask = mask;
        }
    }

    Layout broadcast() {
        const int64_t kind = random.below(4);
        Layout layout(random, kind == 1 ? 1 : problem.query_len, kind == 2 ? 1 : problem.key_len);
        if (kind == 1) layout.rows = problem.query_len, layout.row_stride = 0;
        if (kind == 2) layout.cols = problem.key_len, layout.col_stride = 0;
        return layout;
    }

    void draw_ids() {
        const auto draw = [&] { return random.below(4) - 1; };
        Matrix query, key;
        for (Head& head : problem.heads) {
            if (query.data == nullptr || random.one_in(3)) {
                query = integers_laid<int64_t>(memory, random, {random, problem.query_len, 1}, 1, draw);
                key = integers_laid<int64_t>(memory, random, {random, problem.key_len, 1}, 1, draw);
            }
            head.query_ids = query;
            head.key_ids = key;
        }
    }

    void draw_bias() {
        Problem& p = problem;
        const bool each = random.coin(), gradient = random.coin();
        const int64_t hiding = random.one_of<int64_t>({3, 20, 1000000});
        const bool relative = p.query_len > 1 && p.key_len > 0 && latest.one_in(3);
        Matrix bias;
        for (size_t h = 0; h < p.heads.size(); ++h) {
            if (each || bias.data == nullptr) {
                const Layout layout = broadcast();
                bias = numbers_laid(memory, random, layout, p.bias_dtype,
                                    [&] { return random.one_in(hiding) ? -INFINITY : 2 * random.normal(); });
                // As wide as the bias where it is broadcast; its own strides are no matter.
                BiasGroup group;
                group.row_stride = layout.row_stride == 0 ? 0 : layout.col_stride == 0 ? 1 : p.key_len;
                group.col_stride = layout.col_stride == 0 ? 0 : 1;
                if (relative) {
                    const int64_t step = 1 + latest.below(2), count = p.query_len + p.key_len - 1;
                    bias = numbers_laid(memory, latest, {latest, 1, (count - 1) * step + 1}, p.bias_dtype,
                                        [&] { return latest.one_in(hiding) ? -INFINITY : 2 * latest.normal(); });
                    bias.col_stride *= step;
                    bias.data += (p.query_len - 1) * bias.col_stride * size_of(p.bias_dtype);
                    bias.row_stride = -bias.col_stride;
                    group.row_stride = -1;
                    group.col_stride = 1;
                }
                if (gradient) p.bias_groups.push_back(group);
            }
            p.heads[h].bias = bias;
            if (gradient) p.bias_groups.back().heads.push_back(static_cast<int64_t>(h));
        }
    }

    // Plant NaN and infinity, mostly where everything is masked. Masked ones must not propagate; unmasked ones must
    // show.
    void plant() {
        Problem& p = problem;
        planted = true;
        const auto set = [&](const Matrix& m, Dtype dtype, int64_t row, int64_t cols, bool infinite) {
            if (cols == 0) return;
            char* to =
                const_cast<char*>(m.data) + (row * m.row_stride + random.below(cols) * m.col_stride) * size_of(dtype);
            put(to, dtype, infinite && random.coin() ? random.one_of<double>({INFINITY, -INFINITY}) : NAN);
        };
        for (const Group& group : p.groups) {
            std::vector<bool> key_unmasked(static_cast<size_t>(p.key_len));
            for (const int64_t index : group.heads) {
                const Head& head = p.heads[index];
                for (int64_t i = 0; i < p.query_len; ++i) {
                    bool some = false;
                    for (int64_t j = 0; j < p.key_len; ++j) {
                        const bool unmasked = is_unmasked(p, head, i, j);
                        some = some || unmasked;
                        if (unmasked) key_unmasked[j] = true;
                        // Where an array, not the bias itself, has_mask the pair.
                        if (!unmasked && head.bias.data && random.one_in(20) &&
                            at(head.bias, p.bias_dtype, i, j) > -INFINITY && head.bias.row_stride > 0 &&
                            head.bias.col_stride) {
                            put(const_cast<char*>(head.bias.data) +
                                    (i * head.bias.row_stride + j * head.bias.col_stride) * size_of(p.bias_dtype),
                                p.bias_dtype, NAN);
                        }
                    }
                    if (some && !random.one_in(300)) continue;
                    if (random.coin()) set(head.query, p.score_dtype, i, p.dim, true);
                    if (random.coin()) set(head.grad_out, p.grad_dtype, i, p.value_dim, true);
                    if (head.query_bias.data && random.coin()) set(head.query_bias, sum, i, 1, false);
                }
            }
            const Head& head = p.heads[group.heads[0]];
            for (int64_t j = 0; j < p.key_len; ++j) {
                if (key_unmasked[j] && !random.one_in(300)) continue;
                if (random.coin()) set(head.key, p.score_dtype, j, p.dim, true);
                if (random.coin()) set(head.value, p.value_dtype, j, p.value_dim, true);
                if (head.key_bias.data && random.coin()) set(head.key_bias, sum, j, 1, false);
            }
        }
    }
};

}  // namespace attnscore::tests
