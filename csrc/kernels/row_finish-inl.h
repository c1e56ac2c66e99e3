// The caller's results of each row, from the row statistics of the forward and the sink: as many rows at once as a
// vector has lanes. 256 rows of a tiny call took 2.3 us one by one, a twentieth of the call.
#pragma once

#include "kernels/memory-inl.h"
#include "kernels/simd-inl.h"
#include "kernels/storage-inl.h"

// Rows after all their keys, one in each lane: statistics of the kernels, and with the sink as one more logit.
template <class T>
struct FinishedRows {
    V<T> max, denom, sum_exp_logit{}, squares{}, count{}, mean{}, deviations{}, min_score{},
        first_key{};                     // see RowStat
    V<T> row_max, all_denom, log_denom;  // with the sink, if any
    V<T> factor = splat(T(1));           // rescales sums relative to `max` to `row_max`
    V<T> all_sum_exp_logit;              // sum_exp_logit with the sink

    // `size` rows of a head from `first` on; `sink`: null where the head has none.
    FinishedRows(const Problem& problem, const Head& head, const T* sink, int64_t first, int64_t size) {
        const auto read = [&](RowStat which) {
            return load_first(as<T>(head.row_stats) + which * problem.query_len + first, size);
        };
        max = read(kStatMax);
        denom = all_denom = read(kStatDenom);
        row_max = safe(max);
        if (problem.full_statistics) {
            sum_exp_logit = read(kStatSumExpLogit), squares = read(kStatSumSquares), count = read(kStatCount);
            mean = read(kStatMean), deviations = read(kStatDeviation);
        }
        if (problem.min_score) min_score = read(kStatMinScore);
        if (problem.first_key) first_key = read(kStatFirstKey);
        all_sum_exp_logit = sum_exp_logit;
        if (sink) add_sink(splat(*sink));
        log_denom = log_of<T>(all_denom);
    }

    // The keys' share of the weights: 0 without keys, even with a sink of NaN.
    V<T> share() const { return select<T>(denom == 0, V<T>{}, denom * factor / safe_denom()); }

    V<T> statistic(Statistic which) const {
        switch (which) {
            case Statistic::max_score:
                return max;
            case Statistic::mean_score:
                return mean;
            case Statistic::var_score:
                return deviations / fast_max<T>(count, splat(T(1)));
            case Statistic::entropy:
                // H = log l - sum e (s - m) / l; lse - sum(e s) / l would lose digits among large logits.
                return select<T>(all_denom == 0, V<T>{}, log_denom - all_sum_exp_logit / safe_denom());
            case Statistic::max_weight:
                return select<T>(denom == 0, V<T>{}, factor / safe_denom());
            case Statistic::sum_sq_weights:
                return factor * factor * squares / (safe_denom() * safe_denom());
            case Statistic::sum_weights:
                return share();
            case Statistic::min_score:
                return min_score;
            case Statistic::argmax_key:
                return first_key;
            case Statistic::log_sum_exp:
                return row_max + log_denom;
            case Statistic::end:
                break;
        }
        return V<T>{};
    }

   private:
    // The maximum to subtract from the scores of a row; 0 for a fully masked row.
    static V<T> safe(V<T> maximum) {
        return select<T>(maximum == -std::numeric_limits<T>::infinity(), V<T>{}, maximum);
    }

    // The rule for fully masked rows: nothing is divided by 0, and the entropy is 0.
    V<T> safe_denom() const { return select<T>(all_denom == 0, splat(T(1)), all_denom); }

    // Add the sink: one more logit, without a value.
    void add_sink(V<T> sink) {
        const V<T> old = row_max;
        row_max = safe(nan_max<T>(max, sink));
        factor = select<T>(denom == 0, V<T>{}, exp_of<T>(max - row_max));
        const V<T> sink_exp = exp_of<T>(sink - row_max);
        all_denom = denom * factor + sink_exp;
        // sum e (s - new) = e^(old - new) (sum e (s - old) + (old - new) sum e)
        all_sum_exp_logit = select<T>(factor == 0, V<T>{}, factor * (sum_exp_logit + (old - row_max) * denom)) +
                            select<T>(sink_exp == 0, V<T>{}, sink_exp * (sink - row_max));
    }
};

// Multiply row i of a contiguous output by a number: the share of its weights that the keys have beside the sink.
template <class T>
void scale_row(char* data, Dtype dtype, int64_t i, int64_t cols, T factor) {
    if (dtype == dtype_of<T>()) {
        T* row = as<T>(data) + i * cols;
        for (int64_t j = 0; j < cols; j++) row[j] *= factor;
    } else if constexpr (sizeof(T) == 4) {
        for (int64_t j = i * cols; j < (i + 1) * cols; j++)
            as<uint16_t>(data)[j] = narrowed(load_number<T>(data, dtype, j) * factor, dtype);
    }
}

// Set the caller's results of the rows [first, end) of a head.
template <class T>
void finish_rows(const Problem& problem, const Head& head, const RowArrays& rows, int64_t first, int64_t end) {
    constexpr int L = Vector<T>::lanes;
    for (; first < end; first += L) {
        const int64_t size = std::min<int64_t>(L, end - first);
        const FinishedRows<T> finished(problem, head, as<T>(rows.sink), first, size);
        const auto set = [&](char* to, V<T> x) { store_first(as<T>(to) + first, size, x); };
        if (rows.sink) {
            const V<T> share = finished.share();
            for (int i = 0; i < size; i++)
                scale_row<T>(head.out, problem.value_dtype, first + i, problem.value_dim, share[i]);
        }
        if (rows.row_max) set(rows.row_max, finished.row_max);
        if (rows.log_denom) set(rows.log_denom, finished.log_denom);
        for (int which = 0; which < kStatistics; which++)
            if (rows.statistics[which]) set(rows.statistics[which], finished.statistic(static_cast<Statistic>(which)));
    }
}
