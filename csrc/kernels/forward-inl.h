// Forward: FlashAttention on the CPU. A task is a query tile against all keys that it attends to, or against a range of
// them, one key tile at a time: S = Q K^T, P = online softmax of S, O += P V.
#pragma once

#include "kernels/additive-inl.h"
#include "kernels/additive_tables-inl.h"
#include "kernels/bf16_dot-inl.h"
#include "kernels/few_keys-inl.h"
#include "kernels/for_each_task-inl.h"
#include "kernels/full_tiles-inl.h"
#include "kernels/gemm-inl.h"
#include "kernels/masking-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/online_softmax-inl.h"
#include "kernels/pv-inl.h"
#include "kernels/score_matrix-inl.h"
#include "kernels/scores-inl.h"
#include "kernels/simd-inl.h"
#include "kernels/store_rows-inl.h"
#include "kernels/tasks-inl.h"
#include "kernels/tiles-inl.h"

// One task: attends a query tile to a range of keys, one key tile after the other.
template <class T>
class ForwardTask {
   public:
    ForwardTask(Arena& arena, const Problem& problem, const QueryTile<T>& queries, const SharedTiles<KeyTile<T>>& tiles,
                OnlineSoftmax<T>& softmax)
        : problem_(problem),
          queries_(queries),
          tiles_(tiles),
          softmax_(softmax),
          head_(*queries.head[0]),
          scores_(arena, problem, /*backward=*/false),
          task_tile_(arena, problem, scores_.additive()),
          few_rows_(problem.form != Form::additive && has_few_rows(problem)),
          values_(arena, problem, queries.masked, /*reused=*/queries.panels() >= kStepPanels, few_rows_),
          dropout_(problem) {
        if (problem.form == Form::additive && !scores_.additive().by_pairs)
            AdditiveTables<T>{scores_.additive()}.fill(arena, additive_query_, queries.query, queries.count);
        for (T** x : {&step_scores_, &step_weights_}) *x = arena.take<T>(kStepPanels * kMR * kTileKeys);
        if constexpr (kHasBf16Dot && sizeof(T) == 4)
            if (Bf16Dot::supports(problem) && !few_rows_) bf16_.emplace(arena, problem, queries);
        if (few_rows_ && FullTiles<T>::supports(problem, queries))
            full_tiles_.emplace(arena, problem, queries, softmax);
        const int64_t steps = (queries.panels() + kStepPanels - 1) / kStepPanels;
        // Each step prefetches a share of the next keys and values, for which transposing the keys would wait (2% of a
        // long pass on Zen 4). It gains nothing in bfloat16, where they are half as large, for additive scores, which
        // take longer than any memory, nor with large shares, of fewer than four steps (a whole tile at once, Zen 5).
        if (!few_rows_ && !bf16_ && problem.form != Form::additive && steps >= 4)
            prefetched_rows_ = (kTileKeys + steps - 1) / steps;
    }

    void run(Span keys) {
        for (int64_t key = keys.first, end; key < keys.end; key = end) {
            if (full_tiles_) key = full_tiles_->run(key, keys.end);
            if (key == keys.end) break;
            end = queries_.tile_end(key, keys.end);
            if (!queries_.is_in_hole(key, end - key)) attend_to_tile(key, end - key, keys.end);
        }
        values_.reduce_lanes(softmax_.out, queries_.count);
    }

   private:
    // Up to kStepPanels micro-panels against a key tile: the rows [first, first + size).
    struct Step {
        int64_t first = 0, size = 0;
        uint64_t bits[kStepPanels * kMR];  // of unmasked keys, by row
    };

    // Attend to one key tile, in steps. O += P V of a step runs between the scores and the softmax of the next one:
    // neighbouring instructions then do not wait for one another, and the processor, which looks hundreds of
    // instructions ahead, overlaps the two.
    void attend_to_tile(int64_t key, int64_t key_count, int64_t end_of_keys) {
        const int64_t panels = queries_.panels(), together = few_rows_ ? 1 : kStepPanels;
        int64_t next_prefetch = key + kTileKeys;
        bool loaded = false;
        for (int64_t panel = 0, end; panel < panels; panel = end) {
            end = panel + 1;
            if (queries_.is_masked(panel, key, key_count)) continue;
            while (end < panels && end < panel + together && !queries_.is_masked(end, key, key_count)) end++;
            if (!loaded) load_keys(key, key_count), load_values(key, key_count);
            loaded = true;
            for (const int64_t until = next_prefetch + prefetched_rows_; next_prefetch < until; next_prefetch++) {
                prefetch_row(head_.key, problem_.score_dtype, next_prefetch, end_of_keys, problem_.dim);
                prefetch_row(head_.value, problem_.value_dtype, next_prefetch, end_of_keys, problem_.value_dim);
            }
            step_->first = panel * kMR, step_->size = std::min(end * kMR, queries_.count) - step_->first;
            const Interleaved<T> interleaved = values_.prefetched();
            scores_(step_scores_, step_->bits, queries_, additive_query_, {panel, end}, *tile_,
                    few_rows_ ? &interleaved : nullptr, bf16_ ? &*bf16_ : nullptr, /*saves=*/false);
            finish_pv();
            if (problem_.matrix != MatrixOutput::none)
                store_scores(problem_, queries_, step_->first, step_->size, step_scores_, key, key_count);
            if (problem_.matrix == MatrixOutput::scores) continue;  // such a call has neither weights nor an output
            update_softmax(*step_, key, key_count);
            previous_ = step_;
            step_ = step_ == &steps_[0] ? &steps_[1] : &steps_[0];
        }
        finish_pv();
    }

    // Read the keys of a tile, or find them among the shared tiles.
    void load_keys(int64_t key, int64_t key_count) {
        tile_ = tiles_.find(problem_, head_, key, key_count);
        if (tile_) return;
        const MagnitudeRange<T> sizes{additive_query_.largest, additive_query_.largest};  // only these queries use it
        task_tile_.fill(problem_, scores_.additive(), head_, key, key_count, !few_rows_ && !bf16_, sizes);
        tile_ = &task_tile_;
    }

    // Read the values of a tile, and hash its keys for dropout.
    void load_values(int64_t key, int64_t key_count) {
        bool masked = false;
        if (queries_.masked)
            for (int64_t panel = 0; panel < queries_.panels(); panel++)
                masked = masked || !queries_.is_unmasked(panel, key, key_count);
        values_.fill(head_, key, key_count, masked);
        if constexpr (sizeof(T) == 4)
            if (bf16_) bf16_->fill(head_, key, key_count, values_.clean);
        if (dropout_.on) dropout_.set_tile(key);
    }

    // Compute the weights of a step from its scores.
    void update_softmax(Step& step, int64_t key, int64_t key_count) {
        uint64_t keep[kStepPanels * kMR];
        if (dropout_.on)
            for (int64_t i = 0; i < step.size; i++) keep[i] = dropout_.keep_bits(queries_.stream[step.first + i]);
        softmax_.update(step.first, step.size, step_weights_, step_scores_, step.bits, key_count,
                        dropout_.on ? keep : nullptr, static_cast<T>(dropout_.factor), key);
    }

    // O += P V for the rows of a step. Written into finish_pv, it slows decoding by 5% (GCC 12, Zen 4, 2026-11-30).
    void add_pv(const Step& step) {
        T* out = softmax_.out + step.first * softmax_.width;
        if (bf16_ && !values_.narrow()) {
            if constexpr (sizeof(T) == 4) bf16_->pv(out, step_weights_, step.size, values_.count());
        } else {
            values_.add_pv(out, step_weights_, step.size);
        }
    }

    // Complete the output of the step whose weights were made last, if that is still to be done.
    void finish_pv() {
        if (!previous_) return;
        add_pv(*previous_);
        if (values_.nonfinite)
            values_.propagate_nonfinite(softmax_.out + previous_->first * softmax_.width, step_weights_,
                                        previous_->bits, previous_->size);
        previous_ = nullptr;
    }

    const Problem& problem_;
    const QueryTile<T>& queries_;
    const SharedTiles<KeyTile<T>>& tiles_;
    OnlineSoftmax<T>& softmax_;
    const Head& head_;  // whose keys and values all rows share
    Scores<T> scores_;
    KeyTile<T> task_tile_;
    const KeyTile<T>* tile_ = nullptr;
    const bool few_rows_;  // products go key by key; additive scores have no such path
    ValueTile<T> values_;
    Dropout dropout_;
    typename Additive<T>::Query additive_query_;
    std::optional<Bf16Dot> bf16_;
    std::optional<FullTiles<T>> full_tiles_;
    int64_t prefetched_rows_ = 0;  // of keys and of values, in each step
    Step steps_[2], *step_ = &steps_[0], *previous_ = nullptr;
    T *step_scores_, *step_weights_;  // of one step: weights are used before the next step's are made
};

// How a call is cut into tasks: query tiles of a group, each against ranges of its keys. The shape alone decides, so
// that no result depends on the number of threads.
struct ForwardTasks {
    // Rows of one head, or of several heads of a group, counted through these heads.
    struct QueryRows {
        const int64_t* heads;
        int64_t first, count;
    };
    std::vector<QueryRows> query_tiles;
    int64_t ranges = 1;  // of the keys of each query tile

    explicit ForwardTasks(const Problem& problem) {
        // Heads of a group are joined to share key tiles, except with additive scores, whose tables of a key tile
        // depend on the w_v of the head.
        const bool join = problem.form != Form::additive;
        const int64_t min_rows = join ? 48 : 96;  // of a tile cut for threads: 1 or 2 steps; 96: TUNING.md, query tiles
        const auto parts = static_cast<int64_t>(join ? problem.groups.size() : problem.heads.size());
        for (const Group& group : problem.groups) {
            const auto heads = static_cast<int64_t>(group.heads.size()), joined = join ? heads : 1;
            for (int64_t h = 0; h < heads; h += joined)
                cut(group.heads.data() + h, joined * problem.query_len, parts, min_rows);
        }
        const int64_t count = static_cast<int64_t>(query_tiles.size());
        if (count > 0 && count < kThreads && problem.key_len >= 2 * kMinRangeKeys)
            ranges = std::min((kThreads + count - 1) / count, problem.key_len / kMinRangeKeys);
    }

    // Range r of the keys of a query tile, in whole key tiles.
    Span range(Span keys, int64_t r) const {
        if (ranges == 1) return keys;  // without two divisions, which a row of ten keys would notice
        const int64_t tiles = std::max<int64_t>(0, (keys.end - keys.first + kTileKeys - 1) / kTileKeys);
        return {keys.first + tiles * r / ranges * kTileKeys,
                std::min(keys.end, keys.first + tiles * (r + 1) / ranges * kTileKeys)};
    }

   private:
    static constexpr int64_t kThreads = 16;         // few tasks are cut so that as many threads stay busy to the end
    static constexpr int64_t kMostRows = 384;       // of a query tile, which reads key tiles from the third-level cache
    static constexpr int64_t kMinRangeKeys = 1024;  // of a range, so that merging it takes about 1/1000 of its work

    // Cut the `total` rows of joined heads, one of `parts` such parts of the call, into query tiles of about one size:
    // with a small last tile, its thread would wait for the others. For the same reason few tiles are a multiple of the
    // threads.
    void cut(const int64_t* heads, int64_t total, int64_t parts, int64_t min_rows) {
        const auto tiles_of = [&](int64_t rows) { return (total + rows - 1) / rows; };
        int64_t count = tiles_of(kMostRows);
        if (parts * count < 4 * kThreads) {
            // With `even` the tiles of all parts are a multiple of kThreads. Small tiles share less: tiles of less than
            // kMostRows / 2 rows are made only where there would be fewer than kThreads.
            const int64_t even = padded(count, kThreads / std::gcd(kThreads, parts));
            if (parts * count < kThreads || total >= kMostRows / 2 * even)
                count = std::max(count, std::min(even, tiles_of(min_rows)));
        }
        const int64_t rows = padded((total + count - 1) / std::max<int64_t>(1, count), kMR);
        for (int64_t first = 0; first < total; first += rows)
            query_tiles.push_back({heads, first, std::min(rows, total - first)});
    }
};

// State and output, not yet normalised, of the rows of a query tile after one range of keys.
template <class T>
struct RangeResult {
    std::vector<RowState<T>> states;
    std::vector<T> out;
};

// Merge the ranges of a query tile, row by row, and store the rows.
template <class T>
void merge_ranges(const Problem& problem, const ForwardTasks::QueryRows& rows, RangeResult<T>* results,
                  int64_t ranges) {
    const int64_t width = row_width<T>(problem);
    RowStates<T> states{};
    for (int64_t i = 0; i < rows.count; i++) {
        RowState<T> whole = results[0].states[i];
        T* out = results[0].out.data() + i * width;
        for (int64_t r = 1; r < ranges; r++) {
            const RowState<T>& part = results[r].states[i];
            if (part.max > whole.max) whole.first_key = part.first_key;
            const T maximum = (part.max > whole.max || part.max != part.max) ? part.max : whole.max,
                    new_max = safe_max(maximum);
            const T whole_factor = rescale_factor(whole.max, new_max), part_factor = rescale_factor(part.max, new_max);
            const T* part_out = results[r].out.data() + i * width;
            for (int64_t j = 0; j < width; j++)
                out[j] = whole_factor * whole.out_scale * out[j] + part_factor * part.out_scale * part_out[j];
            // Where the factor is 0, `step` may be infinite, and 0 times infinity is NaN.
            const auto moved = [&](const RowState<T>& from, T factor) {
                const T step = safe_max(from.max) - new_max;
                return factor == 0 ? T(0) : factor * (from.sum_exp_logit + step * from.denom);
            };
            whole.sum_exp_logit = moved(whole, whole_factor) + moved(part, part_factor);
            whole.squares = whole_factor * whole_factor * whole.squares + part_factor * part_factor * part.squares;
            whole.denom = whole_factor * whole.denom + part_factor * part.denom;
            whole.max = maximum, whole.out_scale = 1;
            whole.merge_moments(part.count, part.base, part.mean, part.deviation);
            whole.min_score = std::min(whole.min_score, part.min_score);
        }
        const int lane = static_cast<int>(i % Vector<T>::lanes);
        states.set(lane, whole);
        if (lane + 1 < Vector<T>::lanes && i + 1 < rows.count) continue;
        const int64_t first = rows.first + i - lane;
        store_rows(problem, lane + 1, states, out - lane * width, width, [&](int64_t j) {
            const Head& head = problem.heads[rows.heads[(first + j) / problem.query_len]];
            return std::pair(&head, (first + j) % problem.query_len);
        });
    }
}

template <class T>
void forward_typed(const Problem& problem, Threads threads) {
    if (problem.query_len == 0 || problem.heads.empty()) return;
    const ForwardTasks tasks(problem);
    const int64_t ranges = tasks.ranges, query_tiles = static_cast<int64_t>(tasks.query_tiles.size());
    std::vector<RangeResult<T>> results(ranges > 1 ? query_tiles * ranges : 0);
    threads = clamp_threads(problem, threads);
    const bool few_keys = has_few_keys(problem);
    const Additive<T> form(problem);
    const SharedTiles<KeyTile<T>> tiles(problem, form, threads,
                                        query_tiles / static_cast<int64_t>(problem.heads.size()));
    for_each_task(query_tiles * ranges, threads, [&](int64_t task) {
        const ForwardTasks::QueryRows& rows = tasks.query_tiles[task / ranges];
        Arena& arena = thread_arena();
        // So few rows of a head are one query tile, and so few keys one range.
        if (few_keys) return ShortHead<T>(arena, problem, problem.heads[rows.heads[0]]).attend();
        const QueryTile<T> queries(arena, problem, rows.heads, rows.first, rows.count);
        OnlineSoftmax<T> softmax(arena, problem, queries.count);
        ForwardTask<T>(arena, problem, queries, tiles, softmax)
            .run(tasks.range(queries.keys(problem.key_len), task % ranges));
        if (ranges == 1) {
            softmax.for_each_row_block([&](int64_t first, int64_t size, const RowStates<T>& states) {
                store_rows(problem, size, states, softmax.out + first * softmax.width, softmax.width,
                           [&](int64_t i) { return std::pair(queries.head[first + i], queries.row[first + i]); });
            });
            return;
        }
        RangeResult<T>& result = results[task];
        softmax.for_each_row_block([&](int64_t, int64_t size, const RowStates<T>& states) {
            for (int i = 0; i < size; i++) result.states.push_back(states[i]);
        });
        result.out.assign(softmax.out, softmax.out + queries.count * softmax.width);
    });
    if (ranges > 1)
        for_each_task(query_tiles, threads, [&](int64_t i) {
            merge_ranges(problem, tasks.query_tiles[i], results.data() + i * ranges, ranges);
        });
}
