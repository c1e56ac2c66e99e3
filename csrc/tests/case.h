// A drawn problem, run: what a kernel fills, what the backward is given, and how far results may be apart.
#pragma once

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tests/draw.h"

namespace attnscore::tests {

// What a kernel filled: `count` numbers, `step` apart.
struct Result {
    const char* name;
    Dtype dtype;
    int64_t count, step;
    char* data;
};

struct Case : Drawn {
    using Drawn::Drawn;
    bool keeps = false;  // whether targets hand the scores of the forward to the backward

    std::vector<Result> forward(const Kernels& kernels, int threads) {
        std::vector<Result> results;
        for (Head& head : problem.heads) {
            const int64_t out = problem.query_len * problem.value_dim, rows = problem.query_len;
            head.out = memory.filled(out, problem.value_dtype, NAN, 1);
            head.row_stats = memory.filled(rows * kRowStats, sum, 77, 1);
            // NaN shows where a pair that was not written is read.
            if (keeps) head.saved_scores = memory.filled(rows * problem.key_len, sum, NAN, 1);
            if (problem.matrix != MatrixOutput::none) {
                const int64_t pairs = rows * problem.key_len;
                head.matrix = memory.filled(pairs, sum, 77, 1);
                results.push_back({"matrix", sum, pairs, 1, head.matrix});
                // Nothing else is computed.
                if (problem.matrix == MatrixOutput::scores) continue;
            }
            results.push_back({"out", problem.value_dtype, out, 1, head.out});
            static constexpr const char* names[] = {"max",   "total", "sum_exp_logit", "squares",
                                                    "count", "mean",  "deviations",    "least"};
            // Not the first key of the largest score: among scores that rounding makes equal each target has its own.
            for (int i = problem.exact_row_max ? 0 : 2; i < kStatFirstKey; ++i) {
                results.push_back({names[i], sum, rows, 1, head.row_stats + i * rows * size_of(sum)});
            }
        }
        kernels.forward(problem, threads);
        for (const Head& head : problem.heads)
            if (!problem.exact_row_max && problem.matrix != MatrixOutput::scores) add_log_sum_exp(results, head);
        return results;
    }

    std::vector<Result> backward(const Kernels& kernels, int threads) {
        const Problem& p = problem;
        std::vector<Result> results;
        const auto add = [&](const char* name, int64_t count, double first = 0) {
            results.push_back({name, sum, count, 1, memory.filled(count, sum, first, 1)});
            return results.back().data;
        };
        // The naive kernels only add; where there are no pairs, so do all.
        const bool clears =
            p.clears_gradients && p.query_len > 0 && p.key_len > 0 && std::strncmp(kernels.name, "naive", 5) != 0;
        const double old = clears ? NAN : 0;
        for (Head& head : problem.heads) {
            head.grad_query = add("grad_query", p.query_len * p.dim, old);
            if (head.query_bias.data) head.grad_query_bias = add("grad_query_bias", p.query_len);
            if (head.scale != nullptr) head.grad_scale = add("grad_scale", 1);
        }
        for (Group& group : problem.groups) {
            group.grad_key = add("grad_key", p.key_len * p.dim, old);
            group.grad_value = add("grad_value", p.key_len * p.value_dim, old);
            if (p.heads[group.heads[0]].key_bias.data) group.grad_key_bias = add("grad_key_bias", p.key_len);
            if (p.form == Form::additive) group.grad_w_v = add("grad_w_v", p.dim);
        }
        for (BiasGroup& group : problem.bias_groups) {
            if (group.is_relative()) {
                const int64_t before = p.query_len - 1;
                group.grad_bias = add("grad_bias", before + p.key_len) + before * size_of(sum);
                continue;
            }
            const int64_t rows = group.row_stride ? p.query_len : std::min<int64_t>(p.query_len, 1);
            group.grad_bias = add("grad_bias", rows * (group.col_stride ? p.key_len : std::min<int64_t>(p.key_len, 1)));
        }
        kernels.backward(problem, threads);
        return results;
    }

    double row_stat(const Head& head, RowStat which, int64_t row) const {
        return number(head.row_stats + (which * problem.query_len + row) * size_of(sum), sum);
    }

    // Where no exact_row_max are wanted a kernel chooses the score that its sums are taken against: log-sum-exp is the
    // same for all, and a weight is between 0 and 256 (with a rounding's room).
    void add_log_sum_exp(std::vector<Result>& results, const Head& head) {
        const int64_t size = size_of(sum), rows = problem.query_len;
        char* log_sum_exp = memory.filled(rows, sum, 0, 1);
        for (int64_t i = 0; i < rows; ++i) {
            const double row_max = row_stat(head, kStatMax, i), total = row_stat(head, kStatDenom, i);
            const bool chosen_well = !std::isfinite(row_max) || (total > 0.9 && total < 257.0 * problem.key_len);
            put(log_sum_exp + i * size, sum, chosen_well ? row_max + std::log(total) : 1e30);
        }
        results.push_back({"log_sum_exp", sum, rows, 1, log_sum_exp});
    }

    // What the backward needs of each row, from one forward for all targets.
    void set_rows() {
        const int64_t size = size_of(sum), n = problem.query_len;
        const bool tilted = random.coin(), sinks = later.one_in(4);
        for (Head& head : problem.heads) {
            // One more logit: it may stand above all scores, and rows that see nothing have it alone.
            const double sink = sinks ? 3 * later.normal() : -INFINITY;
            char *row_max = memory.filled(n, sum, 0, 1), *total = memory.filled(n, sum, 0, 1);
            const auto column = [&] {
                char* numbers = memory.filled(n, sum, 0, 1);
                for (int64_t i = 0; i < n; ++i) put(numbers + i * size, sum, random.normal());
                return numbers;
            };
            head.delta = column();
            if (tilted) head.entropy = column(), head.grad_entropy = column();
            for (int64_t i = 0; i < n; ++i) {
                const double largest = row_stat(head, kStatMax, i), all = row_stat(head, kStatDenom, i);
                const bool empty = all == 0 && !sinks;
                const double highest = empty ? 0 : std::isnan(largest) ? largest : std::max(largest, sink);
                const double whole = all * std::exp(largest - highest) + std::exp(sink - highest);
                put(row_max + i * size, sum, highest);
                put(total + i * size, sum, empty ? INFINITY : std::log(whole));
                // Nothing comes into a row that is_unmasked nothing.
                if (planted && all == 0) put(const_cast<char*>(head.delta) + i * size, sum, NAN);
            }
            head.row_max = row_max;
            head.log_denom = total;
        }
        keeps = problem.form == Form::additive && later.coin();
    }

    // What a rounding error of a score is relative to, caps and biases included.
    double score_bound() const {
        const Problem& p = problem;
        const double d = static_cast<double>(p.dim), m = std::max(1.0, magnitude);
        double bound = 1;
        if (p.form == Form::inner) bound += std::abs(p.scale) * m * m * d * 2;
        // Scales of heads reach 2.
        const bool scales = !p.heads.empty() && p.heads[0].scale != nullptr;
        if (p.form == Form::distance) bound += std::abs(p.scale) * m * m * d * 8 * (scales ? 2 : 1);
        if (p.form == Form::additive) bound += m * d * 2 * weight;
        if (!p.heads.empty() && (p.heads[0].query_bias.data || p.heads[0].key_bias.data)) bound += 6;
        for (const Cap& cap : p.caps) bound = (bound + (std::isinf(cap.cap) ? 0 : cap.cap)) * std::max(1.0, cap.factor);
        return bound + (!p.heads.empty() && p.heads[0].bias.data ? 4 : 0);
    }

    std::string text() const {
        const Problem& p = problem;
        const Head none, &h = p.heads.empty() ? none : p.heads[0];
        char line[500];
        std::snprintf(
            line, sizeof line,
            "form %d activation %d score %d value %d grad %d bias %d queries %ld keys %ld dim %ld value_dim %ld heads "
            "%zu groups %zu full %d magnitude %g level %g scale %g slope %g caps %zu dropout %g planted %d; has:%s%s%s"
            "%s%s%s%s%s%s%s",
            static_cast<int>(p.form), static_cast<int>(p.activation), static_cast<int>(p.score_dtype),
            static_cast<int>(p.value_dtype), static_cast<int>(p.grad_dtype), static_cast<int>(p.bias_dtype),
            static_cast<long>(p.query_len), static_cast<long>(p.key_len), static_cast<long>(p.dim),
            static_cast<long>(p.value_dim), p.heads.size(), p.groups.size(), p.full_statistics, magnitude, level,
            p.scale, p.negative_slope, p.caps.size(), p.dropout, planted,
            h.holes   ? " intervals with holes"
            : h.start ? " intervals"
                      : "",
            h.mask.data ? " mask" : "", h.query_ids.data ? " ids" : "", h.bias.data ? " bias" : "",
            h.query_bias.data ? " query_bias" : "", h.key_bias.data ? " key_bias" : "", h.scale ? " scales" : "",
            keeps ? " kept scores" : "",
            p.matrix == MatrixOutput::weights  ? " weights"
            : p.matrix == MatrixOutput::scores ? " scores"
                                               : "");
        return line;
    }
};

}  // namespace attnscore::tests
