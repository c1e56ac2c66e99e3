// The threads of a call, and the key tiles that its tasks share.
#pragma once

#include "kernels/for_each_task-inl.h"
#include "kernels/masking-inl.h"
#include "kernels/memory-inl.h"
#include "kernels/simd-inl.h"

// The threads that the work of a call pays for. Waking one costs some 10 us, in which tiles do at least 2^19
// multiply-adds. One to three queries take as long as four: they wait for the keys and values. A term of an additive
// score counts as 8 multiply-adds, and each pair as 8 more.
inline Threads clamp_threads(const Problem& problem, Threads threads) {
    const double rows = static_cast<double>(std::max<int64_t>(problem.query_len, 4));
    const double work = static_cast<double>(problem.heads.size()) * rows * problem.key_len *
                        (problem.dim * (problem.form == Form::additive ? 8.0 : 1.0) + problem.value_dim + 8);
    return threads.at_most(1 + work / (1 << 19));
}

// The key tiles of each head, made once for all query tiles of the head; none where sharing does not pay. In short
// additive calls, whose query tiles are small, making them for each took a tenth of the time. `Tile` is a KeyTile or a
// BackwardKeyTile.
template <class Tile>
class SharedTiles {
   public:
    // `query_tiles`: how many there are for each head. `form`: Additive of the problem. A tile serves any query tile.
    template <class AdditiveForm>
    SharedTiles(const Problem& problem, const AdditiveForm& form, Threads threads, int64_t query_tiles) {
        if (!is_profitable(problem, query_tiles)) return;
        std::vector<std::pair<const Head*, int64_t>> firsts;  // the head of a tile, and its first key
        for (const Head& head : problem.heads) {
            begins_.push_back(static_cast<int64_t>(firsts.size()));
            const int64_t end = unmasked_prefix(problem, head);
            // A tile inside which the intervals end is left to each query tile, which reads no masked key behind them.
            for (int64_t key = 0; key + kTileKeys <= end || (key < end && end == problem.key_len); key += kTileKeys)
                firsts.emplace_back(&head, key);
        }
        begins_.push_back(static_cast<int64_t>(firsts.size()));
        Arena& arena = call_arena();
        tiles_.reserve(firsts.size());
        for (size_t i = 0; i < firsts.size(); i++) tiles_.emplace_back(arena, problem, form);
        for_each_task(static_cast<int64_t>(firsts.size()), threads, [&](int64_t i) {
            const auto [head, key] = firsts[i];
            tiles_[i].fill(problem, form, *head, key, std::min(kTileKeys, problem.key_len - key), true, {});
        });
    }

    // The tile of the keys [key, key + key_count) of a head, or null where no shared tile has these keys.
    const Tile* find(const Problem& problem, const Head& head, int64_t key, int64_t key_count) const {
        if (tiles_.empty() || key % kTileKeys || key_count < std::min(kTileKeys, problem.key_len - key)) return nullptr;
        const int64_t h = &head - problem.heads.data(), at = begins_[h] + key / kTileKeys;
        return at < begins_[h + 1] ? &tiles_[at] : nullptr;
    }

   private:
    // Whether sharing pays, and takes little memory: keys and values have at most 2^19 numbers, their tiles a few times
    // as many.
    static bool is_profitable(const Problem& problem, int64_t query_tiles) {
        constexpr int64_t max_numbers = int64_t{1} << 19;
        const int64_t keys = static_cast<int64_t>(problem.heads.size()) * problem.key_len;
        return problem.form == Form::additive && query_tiles > 1 &&
               keys * (problem.dim + problem.value_dim) <= max_numbers;
    }

    // The end of the last interval of a head; 0 where the intervals do not all begin at key 0, because query tiles then
    // cut the keys into different tiles.
    static int64_t unmasked_prefix(const Problem& problem, const Head& head) {
        Span hull{0, 0};
        for (int64_t row = 0; row < problem.query_len; row++) {
            const Span interval = key_interval(problem, head, row);
            if (!interval.empty() && interval.first > 0) return 0;
            hull = hull.covering(interval);
        }
        return hull.end;
    }

    std::vector<Tile> tiles_;
    std::vector<int64_t> begins_;  // first tile of each head, then the number of tiles
};
