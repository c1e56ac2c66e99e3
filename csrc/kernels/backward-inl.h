// Backward: from P and dS of each pair of tiles to the gradients of all inputs. A task is a range of keys of one group
// against a range of its query rows, and owns every gradient that it adds to. With R ranges of both, step t pairs the
// keys r with the rows (r + t) mod R: tasks of a step share nothing, each sum has one order, and no partial gradients
// of keys or rows are held.
#pragma once

#include "kernels/additive-inl.h"
#include "kernels/additive_gradients-inl.h"
#include "kernels/additive_pairs-inl.h"
#include "kernels/few_keys_gradients-inl.h"
#include "kernels/for_each_task-inl.h"
#include "kernels/gemm-inl.h"
#include "kernels/masking-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/score_gradients-inl.h"
#include "kernels/scores-inl.h"
#include "kernels/simd-inl.h"
#include "kernels/tasks-inl.h"
#include "kernels/unmasked_products-inl.h"

template <class T>
void add_rows(T* to, int64_t cols, const T* from, int64_t from_stride, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < cols; j++) to[i * cols + j] += from[i * from_stride + j];
}

// The sum of a row of a tile, where masked pairs hold zeros.
template <class T>
inline T row_sum(const T* x) {
    V<T> sum{};
    for (int64_t j = 0; j < kTileKeys; j += Vector<T>::lanes) sum += load(x + j);
    return reduce_sum<T>(sum);
}

// Gradients of the keys and values of a tile, summed over one query tile, and then added to the caller's arrays. Where
// the caller's rows are whole vectors, sums go there directly (`in_place`), unless many terms would be added singly,
// which rounds more than adding sums of blocks. Only GEMM, for inner products, adds sums of blocks, which are short
// without fused multiply-adds, and only if masked pairs need not be left out.
template <class T>
struct KeyTileGradients {
    T *dk, *dv, *scratch_dk, *scratch_dv, *bias;
    int64_t width, value_width;
    bool in_place;

    KeyTileGradients(Arena& arena, const Problem& problem)
        : width(padded(problem.dim, Vector<T>::lanes)), value_width(padded(problem.value_dim, Vector<T>::lanes)) {
        scratch_dk = arena.take<T>(kTileKeys * width);
        scratch_dv = arena.take<T>(kTileKeys * value_width);
        bias = arena.take<T>(kTileKeys);
    }
    // Begin with the keys from `key` on.
    void start(const Problem& problem, const Group& group, int64_t key, int64_t key_count, bool skip_masked) {
        std::fill_n(bias, kTileKeys, T(0));
        const bool adds_blocks = kHasFma && problem.form == Form::inner && !skip_masked;
        // From their tables, additive scores write gradients of whole tiles, which may end behind the caller's rows.
        in_place = width == problem.dim && value_width == problem.value_dim &&
                   (adds_blocks || problem.query_len <= kFewRows) &&
                   (problem.form != Form::additive || Additive<T>(problem).by_pairs);
        if (in_place) {
            dk = as<T>(group.grad_key) + key * width;
            dv = as<T>(group.grad_value) + key * value_width;
        } else {
            dk = scratch_dk, dv = scratch_dv;
            std::fill_n(dk, (problem.form == Form::additive ? kTileKeys : key_count) * width, T(0));
            std::fill_n(dv, key_count * value_width, T(0));
        }
    }
    // Add to the gradients of the keys [key, key + key_count) of a group.
    void add_to(const Problem& problem, const Group& group, int64_t key, int64_t key_count) const {
        if (!in_place) {
            add_rows(as<T>(group.grad_key) + key * problem.dim, problem.dim, dk, width, key_count);
            add_rows(as<T>(group.grad_value) + key * problem.value_dim, problem.value_dim, dv, value_width, key_count);
        }
        if (group.grad_key_bias)
            for (int64_t j = 0; j < key_count; j++) as<T>(group.grad_key_bias)[key + j] += bias[j];
    }
};

// Add the gradients of additive scores of the rows [first, end) to `dq`, `dk` and `dw`.
template <class T>
void additive_gradients(const Problem& problem, const Additive<T>& form, BackwardQueryTile<T>& queries,
                        const BackwardKeyTile<T>& tile, int64_t first, int64_t end, T* dk, T* dq, T* dw) {
    const Head& head = *queries.rows.head[0];
    const int64_t width = tile.width;
    // Pairs with a row or key that is not finite, for which the tiles hold zeros, are taken out and computed one by
    // one.
    struct NonfinitePair {
        int64_t row, key;
        T ds;
    };
    std::vector<NonfinitePair> alone;
    for (int64_t i = first; i < end; i++)
        for_each_bit(
            queries.bits[i] & (queries.rows.nonfinite && queries.rows.nonfinite[i] ? kAll : tile.keys.nonfinite),
            [&](int j) {
                T& ds = queries.ds[i * kTileKeys + j];
                if (ds != T(0)) alone.push_back({i, j, std::exchange(ds, T(0))});
            });
    if (form.by_pairs)
        AdditivePairs<T>(form, as<T>(head.w_v))
            .gradients(queries.ds + first * kTileKeys, queries.rows.query + first * width, width, end - first,
                       tile.keys.rows, tile.keys.count, dq, width, dk, width, dw);
    else
        AdditiveGradients<T>{form}(queries.ds, kTileKeys, queries.additive_query, first, end, tile.keys.additive,
                                   as<T>(head.w_v), dq - first * width, width, dk, width, dw);
    for (const NonfinitePair& pair : alone) {
        queries.ds[pair.row * kTileKeys + pair.key] = pair.ds;
        form.add_pair_gradients(problem, head, queries.rows.row[pair.row], tile.keys.first + pair.key, pair.ds,
                                dq + (pair.row - first) * width, dk + pair.key * width, dw);
    }
}

// Add the gradients from P and dS of a tile: of keys and values to `sums`, of w_v to `dw`, of the query and its bias to
// the caller's arrays.
template <class T>
void accumulate_gradients(const Problem& problem, BackwardQueryTile<T>& queries, const BackwardKeyTile<T>& tile,
                          ScoreGradients<T>& gradients, KeyTileGradients<T>& sums, T* dq_scratch, T* dw) {
    constexpr int L = Vector<T>::lanes;
    const Head& head = *queries.rows.head[0];
    const int64_t first = gradients.panels.first * kMR, end = std::min(gradients.panels.end * kMR, queries.rows.count);
    const int64_t count = end - first, key_count = tile.keys.count, width = tile.width;
    const T *p = queries.p + first * kTileKeys, *query = queries.rows.query + first * width;
    T* ds = queries.ds + first * kTileKeys;
    const uint64_t* bits = queries.bits + first;
    const View<T> grad_out{queries.grad_out.row(first), queries.grad_out.stride}, keys = tile.keys.rows;
    const bool skip_masked = gradients.skip_masked;
    // O = P V, so dV = P^T dO
    if (skip_masked)
        unmasked_product(sums.dv, sums.value_width, p, bits, count, grad_out, sums.value_width, /*by_keys=*/true);
    else
        gemm(Product<T>{}, sums.dv, sums.value_width, p, 1, kTileKeys, grad_out.data, grad_out.stride, key_count,
             sums.value_width, count, /*add=*/true);

    if (head.grad_query_bias)
        for (int64_t i = 0; i < count; i++)
            as<T>(head.grad_query_bias)[queries.rows.row[first + i]] += row_sum(ds + i * kTileKeys);
    if (head.key_bias.data)
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < kTileKeys; j += L)
                store(sums.bias + j, load(sums.bias + j) + load(ds + i * kTileKeys + j));

    T* grad_query = as<T>(head.grad_query) + queries.rows.row[first] * problem.dim;
    // The caller's rows take the sums themselves where they are as wide.
    const bool in_place = problem.dim == width;
    T* dq = in_place ? grad_query : dq_scratch;
    if (!in_place) std::fill_n(dq, count * width, T(0));
    if (problem.form == Form::additive) {
        // s = sum_h w_h activation(a_h + b_h)
        additive_gradients(problem, gradients.scores.additive(), queries, tile, first, end, sums.dk, dq, dw);
    } else if (problem.form == Form::distance) {
        // s = -scale |q - k|^2
        const T factor = T(-2) * scale_of<T>(problem, head);
        for (int64_t i = 0; i < count * kTileKeys; i += L) store(ds + i, load(ds + i) * factor);
        if (skip_masked) {
            unmasked_differences(dq, sums.dk, width, ds, bits, count, View<T>{query, width}, keys);
        } else {
            gemm_difference(dq, width, ds, kTileKeys, 1, query, width, keys.data, keys.stride, count, width, key_count,
                            /*add=*/true);
            gemm_difference(sums.dk, width, ds, 1, kTileKeys, keys.data, keys.stride, query, width, key_count, width,
                            count, /*add=*/true);
        }
    } else {
        // s = scale q . k: query and key rows hold the scale. A few rows leave it to key_factor, and skip masked pairs.
        const View<T> rows{query, width};
        if (skip_masked) {
            unmasked_product(sums.dk, width, ds, bits, count, rows, width, /*by_keys=*/true);
            unmasked_product(dq, width, ds, bits, count, tile.key_rows, width, /*by_keys=*/false, tile.key_factor);
        } else {
            gemm(Product<T>{}, sums.dk, width, ds, 1, kTileKeys, query, width, key_count, width, count, /*add=*/true);
            gemm(Product<T>{}, dq, width, ds, kTileKeys, 1, tile.key_rows.data, tile.key_rows.stride, count, width,
                 key_count, /*add=*/true);
        }
    }
    if (!in_place) add_rows(grad_query, problem.dim, dq, width, count);
}

// A query tile of one head, and the iteration over the key tiles that it attends to.
template <class T>
struct BackwardTask {
    const Problem& problem;
    const Head& head;
    ScoreGradients<T> gradients;
    BackwardQueryTile<T> queries;

    BackwardTask(Arena& arena, const Problem& p, int64_t index, Span rows)
        : problem(p),
          head(p.heads[index]),
          gradients(arena, p),
          queries(arena, p, gradients.scores.additive(), index, rows.first, rows.end - rows.first),
          task_tile_(arena, p, gradients.scores.additive()) {}

    // Call f(tile) for each tile of `keys`, after its P and dS are computed.
    template <class F>
    void for_each_tile(Span keys, const SharedTiles<BackwardKeyTile<T>>& tiles, const F& f) {
        const Span attended = keys.within(queries.rows.keys(problem.key_len));
        for (int64_t key = attended.first, end; key < attended.end; key = end) {
            end = queries.rows.tile_end(key, attended.end);
            const int64_t key_count = end - key;
            if (queries.rows.is_in_hole(key, key_count)) continue;
            const BackwardKeyTile<T>* tile = tiles.find(problem, head, key, key_count);
            if (!tile) {
                const T size = queries.additive_query.largest;  // only these queries use the tile
                task_tile_.fill(problem, gradients.scores.additive(), head, key, key_count, queries.rows.masked,
                                {size, size});
                tile = &task_tile_;
            }
            gradients(queries, *tile);
            if (!gradients.panels.empty()) f(*tile);
        }
    }

   private:
    BackwardKeyTile<T> task_tile_;
};

// Rows of a query tile of the backward: keys are transposed once for so many.
constexpr int64_t kBackwardRows = 384;
constexpr int64_t kBiasRows = 96;  // rows of a query tile of `backward_bias`

// The gradients to which every task adds: of w_v, of the heads' scales, of a relative bias. Each range of keys has sums
// of its own, which `finish` adds up in one order.
template <class T>
class SharedSums {
   public:
    SharedSums(const Problem& problem, int64_t ranges) : problem_(problem), ranges_(ranges) {
        width_ = problem.form == Form::additive ? problem.dim : 0;
        for (const Group& group : problem.groups)
            if (problem.heads[group.heads[0]].grad_scale)
                width_ = std::max(width_, static_cast<int64_t>(group.heads.size()));
        group_sums_.resize(problem.groups.size() * ranges * width_);
        if (!problem.bias_groups.empty() && problem.bias_groups[0].is_relative())
            positions_ = problem.query_len + problem.key_len - 1;
        relative_.resize(problem.heads.size() * ranges * positions_);
    }

    // Gradients of w_v of a group, or of the scales of its heads.
    T* group_sums(int64_t group, int64_t range) { return group_sums_.data() + (group * ranges_ + range) * width_; }
    // The gradient of the relative bias of a head; null where there is none.
    double* relative(int64_t head, int64_t range) {
        return positions_ ? relative_.data() + (head * ranges_ + range) * positions_ : nullptr;
    }

    // Add the sums to the caller's gradients.
    void finish() {
        for (size_t g = 0; width_ && g < problem_.groups.size(); g++)
            for (int64_t r = 0; r < ranges_; r++) {
                const Group& group = problem_.groups[g];
                const T* sums_of_range = group_sums(static_cast<int64_t>(g), r);
                if (problem_.form == Form::additive)
                    for (int64_t p = 0; p < problem_.dim; p++) as<T>(group.grad_w_v)[p] += sums_of_range[p];
                else
                    for (const int64_t head : group.heads) *as<T>(problem_.heads[head].grad_scale) += *sums_of_range++;
            }
        std::vector<double> sums(positions_);
        for (const BiasGroup& group : problem_.bias_groups) {
            if (!positions_) return;
            std::fill(sums.begin(), sums.end(), 0.0);
            for (const int64_t head : group.heads)
                for (int64_t r = 0; r < ranges_; r++)
                    for (int64_t k = 0; k < positions_; k++) sums[k] += relative(head, r)[k];
            T* to = as<T>(group.grad_bias) - (problem_.query_len - 1);
            for (int64_t k = 0; k < positions_; k++) to[k] += static_cast<T>(sums[k]);
        }
    }

   private:
    const Problem& problem_;
    const int64_t ranges_;
    int64_t width_ = 0, positions_ = 0;
    std::vector<T> group_sums_;
    std::vector<double> relative_;
};

// Add the gradients of a range of keys of a group against a range of its query rows.
template <class T>
void backward_range(const Problem& problem, int64_t group_index, int64_t range, Span keys, Span rows,
                    const SharedTiles<BackwardKeyTile<T>>& tiles, SharedSums<T>& shared) {
    const Group& group = problem.groups[group_index];
    T* dw_or_dscales = shared.group_sums(group_index, range);
    for (size_t h = 0; h < group.heads.size(); h++)
        for (int64_t first = rows.first; first < rows.end; first += kBackwardRows) {
            Arena& arena = thread_arena();
            const int64_t head = group.heads[h];
            BackwardTask<T> task(arena, problem, head, {first, std::min(first + kBackwardRows, rows.end)});
            task.gradients.grad_relative = shared.relative(head, range);
            KeyTileGradients<T> sums(arena, problem);
            T* dq = arena.take<T>(task.queries.rows.count * sums.width);
            task.for_each_tile(keys, tiles, [&](const BackwardKeyTile<T>& tile) {
                sums.start(problem, group, tile.keys.first, tile.keys.count, task.gradients.skip_masked);
                accumulate_gradients(problem, task.queries, tile, task.gradients, sums, dq, dw_or_dscales);
                sums.add_to(problem, group, tile.keys.first, tile.keys.count);
            });
            if (task.head.grad_scale) dw_or_dscales[h] += static_cast<T>(task.gradients.grad_scale);
        }
}

// Clear the gradients of a range of keys of a group, and of a range of its query rows: just before they are added to.
// A pass over all of them would read and write memory once more.
template <class T>
void clear_gradients(const Problem& problem, const Group& group, Span keys, Span rows) {
    const auto clear = [](char* data, Span span, int64_t width) {
        std::fill_n(as<T>(data) + span.first * width, (span.end - span.first) * width, T(0));
    };
    clear(group.grad_key, keys, problem.dim);
    clear(group.grad_value, keys, problem.value_dim);
    for (const int64_t head : group.heads) clear(problem.heads[head].grad_query, rows, problem.dim);
}

// Add the gradient of a bias that heads share, for a range of its rows against all keys. Along a broadcast axis it is a
// sum over all rows or all keys, whose terms cancel: summed in float, 10^5 of them left 3 digits.
template <class T>
void backward_bias(const Problem& problem, const BiasGroup& group, Span rows,
                   const SharedTiles<BackwardKeyTile<T>>& tiles) {
    const bool has_rows = group.row_stride != 0, has_cols = group.col_stride != 0;
    T* to = as<T>(group.grad_bias);
    std::vector<double> sums(
        has_rows && has_cols ? 0 : (has_rows ? rows.end - rows.first : 1) * (has_cols ? problem.key_len : 1));
    for (const int64_t index : group.heads)
        for (int64_t first = rows.first; first < rows.end; first += kBiasRows) {
            BackwardTask<T> task(thread_arena(), problem, index, {first, std::min(first + kBiasRows, rows.end)});
            task.gradients.for_bias = true;
            task.for_each_tile({0, problem.key_len}, tiles, [&](const BackwardKeyTile<T>& tile) {
                const int64_t key = tile.keys.first, key_count = tile.keys.count;
                const Span panels = task.gradients.panels;
                for (int64_t i = panels.first * kMR; i < std::min(panels.end * kMR, task.queries.rows.count); i++) {
                    const int64_t row = task.queries.rows.row[i];
                    const T* ds = task.queries.ds + i * kTileKeys;
                    if (!has_cols)
                        sums[has_rows ? row - rows.first : 0] += static_cast<double>(row_sum(ds));
                    else if (!has_rows)
                        for (int64_t j = 0; j < key_count; j++) sums[key + j] += static_cast<double>(ds[j]);
                    else
                        for (int64_t j = 0; j < key_count; j++)
                            to[row * group.row_stride + (key + j) * group.col_stride] += ds[j];
                }
            });
        }
    for (size_t k = 0; k < sums.size(); k++) {
        const int64_t at = static_cast<int64_t>(k);
        to[has_rows ? (rows.first + at) * group.row_stride : at * group.col_stride] += static_cast<T>(sums[k]);
    }
}

template <class T>
void backward_typed(const Problem& problem, Threads threads) {
    constexpr int64_t kMinTasks = 16, kMinLength = 128;  // enough to share among threads; of a range of rows or keys
    const int64_t groups = static_cast<int64_t>(problem.groups.size());
    if (groups == 0 || problem.query_len == 0 || problem.key_len == 0) return;
    const int64_t target_ranges = (kMinTasks + groups - 1) / groups,
                  max_ranges = std::min(problem.query_len, problem.key_len) / kMinLength;
    const int64_t ranges = std::max<int64_t>(1, std::min(target_ranges, max_ranges));
    threads = clamp_threads(problem, threads);
    const bool short_heads = has_short_gradients(problem);
    SharedSums<T> shared(problem, ranges);
    const Additive<T> form(problem);
    const SharedTiles<BackwardKeyTile<T>> tiles(problem, form, threads, ranges);  // each range has query tiles
    const auto cut = [&](int64_t length, int64_t r, int64_t unit) {
        const int64_t units = (length + unit - 1) / unit;
        return Span{std::min(length, units * r / ranges * unit), std::min(length, units * (r + 1) / ranges * unit)};
    };
    for (int64_t step = 0; step < ranges; step++)
        for_each_task(groups * ranges, threads, [&](int64_t task) {
            const int64_t r = task % ranges;
            const Group& group = problem.groups[task / ranges];
            if (short_heads)  // with few keys there is one range, and a task is a group
                return ShortHeadGradients<T>(thread_arena(), problem, group).add_all(shared.group_sums(task, 0));
            const Span keys = cut(problem.key_len, r, kTileKeys),
                       rows = cut(problem.query_len, (r + step) % ranges, kMR);
            if (problem.clears_gradients && step == 0) clear_gradients<T>(problem, group, keys, rows);
            backward_range<T>(problem, task / ranges, r, keys, rows, tiles, shared);
        });
    shared.finish();
    // The tasks above have summed a relative bias. For any other bias P and dS are computed once more, by tasks of some
    // rows against all keys; rows that share one gradient are one task.
    std::vector<std::pair<const BiasGroup*, Span>> tasks;
    for (const BiasGroup& group : problem.bias_groups) {
        if (group.is_relative()) continue;
        const int64_t size = group.row_stride ? kBiasRows : problem.query_len;
        for (int64_t first = 0; first < problem.query_len; first += size)
            tasks.push_back({&group, {first, std::min(problem.query_len, first + size)}});
    }
    for_each_task(static_cast<int64_t>(tasks.size()), threads,
                  [&](int64_t i) { backward_bias<T>(problem, *tasks[i].first, tasks[i].second, tiles); });
}
