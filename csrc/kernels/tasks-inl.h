// Tasks on several threads, and what the tasks of one call share.

template <class F>
void for_each_task(int64_t count, int threads, const F& f) {
    struct Context {
        const F& f;
        std::atomic<bool> failed;
        std::exception_ptr error;
    } context{f, {}, {}};
    // What a task throws must not leave its thread.
    const auto one = [](int64_t task, void* p) {
        Context& c = *static_cast<Context*>(p);
        try {
            c.f(task);
        } catch (...) {
            if (!c.failed.exchange(true)) c.error = std::current_exception();
        }
    };
    parallel(count, one, &context, threads);
    if (context.error) std::rethrow_exception(context.error);
}

// Threads beyond what the work pays for only cost their waking: about 2^20 multiply-adds each (some 10 us).
inline int clamp_threads(const Problem& problem, int threads) {
    const double work = static_cast<double>(problem.heads.size()) * problem.query_len * problem.key_len *
                        (problem.dim * (problem.form == Form::additive ? 8.0 : 1.0) + problem.value_dim + 8);
    return static_cast<int>(std::min<double>(threads, 1 + work / (1 << 20)));
}

// The tiles of all keys of each head, made once where several blocks of its rows would each make them again. In short
// additive scores, whose blocks are cut small, that took a tenth of the time. `Tile` is a KeyTile or has one, `keys`.
template <class Tile>
class SharedTiles {
   public:
    SharedTiles() = default;

    // `make(arena)` gives an empty tile, `fill(tile, head, key, key_count)` fills it.
    template <class Make, class Fill>
    SharedTiles(const Problem& problem, int threads, const Make& make, const Fill& fill) {
        struct TileSpec {
            const Head* head;
            int64_t key;
        };
        std::vector<TileSpec> specs;
        for (const Head& head : problem.heads) {
            begins_.push_back(static_cast<int64_t>(specs.size()));
            const int64_t last = unmasked_prefix(problem, head);
            // A tile that the last unmasked_prefix key cuts is each block's own: what is hidden behind it stays out of
            // it.
            for (int64_t key = 0; key + kTileKeys <= last || (key < last && last == problem.key_len); key += kTileKeys)
                specs.push_back({&head, key});
        }
        begins_.push_back(static_cast<int64_t>(specs.size()));
        Arena& arena = call_arena();
        tiles_.reserve(specs.size());
        for (size_t i = 0; i < specs.size(); i++) tiles_.push_back(make(arena));
        for_each_task(static_cast<int64_t>(specs.size()), threads, [&](int64_t i) {
            const auto [head, key] = specs[i];
            fill(tiles_[i], *head, key, std::min(kTileKeys, problem.key_len - key));
        });
    }

    // Whether it pays, and takes little memory: some times the 2 MB that keys and values may have.
    static bool is_profitable(const Problem& problem, int64_t blocks) {
        constexpr int64_t most = int64_t{1} << 19;
        const int64_t keys = static_cast<int64_t>(problem.heads.size()) * problem.key_len;
        return problem.form == Form::additive && blocks > 1 && keys * (problem.dim + problem.value_dim) <= most;
    }

    // The tile of the keys [key, key + key_count) of a head, or null.
    const Tile* find(const Problem& problem, const Head& head, int64_t key, int64_t key_count) const {
        if (tiles_.empty() || key % kTileKeys || key_count < std::min(kTileKeys, problem.key_len - key)) return nullptr;
        const int64_t h = &head - problem.heads.data(), at = begins_[h] + key / kTileKeys;
        return at < begins_[h + 1] ? &tiles_[at] : nullptr;
    }

   private:
    // How many keys some row sees; 0 where rows do not all begin with the first, so that their tiles are not the same.
    static int64_t unmasked_prefix(const Problem& problem, const Head& head) {
        int64_t last = 0;
        for (int64_t row = 0; row < problem.query_len; row++) {
            const Span own = key_interval(problem, head, row);
            if (own.last <= own.first) continue;
            if (own.first > 0) return 0;
            last = std::max(last, own.last);
        }
        return last;
    }

    std::vector<Tile> tiles_;
    std::vector<int64_t> begins_;  // of each head; one more behind the last
};
