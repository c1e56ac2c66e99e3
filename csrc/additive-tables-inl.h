// What additive scores and their gradients read of rows and keys: exponentials and tangents, each in the order of its
// pass. A block's rows have theirs made once, a tile's keys once for all blocks that share it.

// The size of the rows that a tile may meet: of each block the largest number.
template <class T>
struct RowSizes {
    T least = 0, most = std::numeric_limits<T>::max();
};

template <class T>
class AdditiveTables {
    static constexpr int L = Vector<T>::lanes;
    static constexpr int kChunk = Additive<T>::kChunk;
    using Form = Additive<T>;
    using Query = typename Form::Query;
    using Keys = typename Form::Keys;

   public:
    explicit AdditiveTables(const Form& form) : form_(form), width_(padded(form.dim, L)) {}

    void fill(Arena& arena, Query& query, const T* rows, int64_t count) const {
        query = {};
        query.rows = rows;
        query.width = width_;
        query.largest = largest(rows, count * width_);
        if (!form_.by_ratios()) return;
        if (form_.in_range(query.largest)) {
            T* to = arena.take<T>(count * width_);
            for (int64_t i = 0; i < count * width_; i += L) store(to + i, exp_of<T>(load(rows + i) * form_.kappa()));
            query.exponentials = to;
            query.exponential_peaks = strip_peaks(arena, to, count);
        }
        if (form_.has_tangents(query.largest)) {
            T* to = arena.take<T>(count * width_);
            for (int64_t i = 0; i < count * width_; i += L) store(to + i, tanh_of<T>(load(rows + i)));
            query.tangents = to;
            query.tangent_peaks = strip_peaks(arena, to, count);
        }
    }

    // Memory for the tables of a tile, those of gradients among them.
    void reserve(Arena& arena, Keys& keys, bool gradients) const {
        const int64_t size = kKeys * width_;
        const bool ratios = form_.by_ratios(), tangents = form_.has_tangents(0);
        if (ratios) {
            keys.coefficients = arena.take<T>(width_);
            keys.weighted_exponentials = arena.take<T>(size);
            keys.exponential_peaks = arena.take<T>(width_);
        }
        if (tangents) {
            keys.tangents = arena.take<T>(size);
            keys.weighted_tangents = arena.take<T>(size);
            keys.tangent_peaks = arena.take<T>(width_);
        }
        if (!gradients) return;
        keys.rows = arena.take<T>(size);
        if (ratios) keys.row_exponentials = arena.take<T>(size);
        if (tangents) keys.row_tangents = arena.take<T>(size);
    }

    // The tile stays the caller's.
    void fill(Keys& keys, const T* turned, const T* w, const RowSizes<T>& rows) const {
        keys.turned = turned;
        keys.largest = largest(turned, form_.dim * kKeys);
        if (w != keys.weights) weigh(keys, w);
        keys.finite = keys.largest <= std::numeric_limits<T>::max() && !keys.heavy;
        const Way first = form_.way_of(rows.least, keys), last = form_.way_of(rows.most, keys);
        const bool small = first == Way::small, larger = last != Way::small;
        if (small && !keys.scored) {
            fill_tangents(keys);
            fill_weighted(keys.weighted_tangents, keys.tangent_peaks, keys, keys.tangents);
        }
        if (larger && !keys.scored && form_.by_exponentials(rows.least, keys))
            fill_weighted(keys.weighted_exponentials, keys.exponential_peaks, keys, nullptr);
        if (!keys.rows) return;
        fill_rows(keys);
        const int64_t size = kKeys * width_;
        if (small)
            for (int64_t i = 0; i < size; i += L) store(keys.row_tangents + i, tanh_of<T>(load(keys.rows + i)));
        if (larger && first <= Way::singles)
            for (int64_t i = 0; i < size; i += L)
                store(keys.row_exponentials + i, exp_of<T>(load(keys.rows + i) * form_.kappa()));
    }

   private:
    // What depends on the weights alone. By channel the coefficient is u = heaviest / w, and 1 up to the width; what is
    // next to nothing beside the heaviest counts as kLight of it.
    void weigh(Keys& keys, const T* w) const {
        keys.weights = w;
        keys.heaviest = 0;
        keys.heavy = false;
        double total = 0;
        for (int64_t p = 0; p < form_.dim; p++) {
            keys.heaviest = std::max(keys.heaviest, std::fabs(w[p]));
            keys.heavy |= !(std::fabs(w[p]) <= std::numeric_limits<T>::max());
            total += w[p];
        }
        keys.total = static_cast<T>(total);
        if (!keys.coefficients) return;
        std::fill_n(keys.coefficients, width_, T(1));
        const T least = keys.heaviest * kLight;
        for (int64_t p = 0; p < form_.dim; p++)
            keys.coefficients[p] = std::fabs(w[p]) > least ? keys.heaviest / w[p] : std::copysign(1 / kLight, w[p]);
    }

    // Chunk by chunk of keys: what a pass reads fits the first-level cache.
    void fill_tangents(Keys& keys) const {
        T* to = keys.tangents;
        for (int64_t c = 0; c < kKeys; c += kChunk)
            for (int64_t p = 0; p < form_.dim; p++)
                for (int j = 0; j < kChunk; j += L, to += L)
                    store(to, tanh_of<T>(load(keys.turned + p * kKeys + c + j)));
    }

    // Tangents, or without them exponentials, times u, in the same order; and of each channel the largest.
    void fill_weighted(T* to, T* peaks, const Keys& keys, const T* tangents) const {
        const T* u = keys.coefficients;
        std::fill_n(peaks, width_, T(0));
        for (int64_t p = 0; p < form_.dim; p++) {
            V<T> most{};
            for (int64_t c = 0; c < kKeys; c += kChunk)
                for (int64_t j = 0; j < kChunk; j += L) {
                    const int64_t at = c * form_.dim + p * kChunk + j;
                    const V<T> y = u[p] * (tangents ? load(tangents + at)
                                                    : exp_of<T>(load(keys.turned + p * kKeys + c + j) * form_.kappa()));
                    most = quick_max<T>(most, size_of<T>(y));
                    store(to + at, y);
                }
            peaks[p] = quick_largest_of<T>(most);
        }
    }

    // Keys with channels in the lanes: a block of kKeys x L for each vector of channels (whole rows, a power of two
    // apart, would fall on the same few sets of the cache). Zeros behind the channels.
    void fill_rows(Keys& keys) const {
        T square[L * L];
        for (int64_t p = 0; p < width_; p += L)
            for (int64_t j = 0; j < kKeys; j += L) {
                for (int64_t i = 0; i < L; i++)
                    store(square + i * L, p + i < form_.dim ? load(keys.turned + (p + i) * kKeys + j) : V<T>{});
                transpose_square(keys.rows + p * kKeys + j * L, L, square, L);
            }
    }

    const T* strip_peaks(Arena& arena, const T* rows, int64_t count) const {
        T* peaks = arena.take<T>((count + kStrip - 1) / kStrip * width_);
        for (int64_t i = 0; i < count; i++, rows += width_) {
            T* to = peaks + i / kStrip * width_;
            for (int64_t p = 0; p < width_; p += L) {
                const V<T> size = size_of<T>(load(rows + p));
                store(to + p, i % kStrip ? quick_max<T>(size, load(to + p)) : size);
            }
        }
        return peaks;
    }

    // Of |x|; NaN comes out. Several at a time: each waits for the one before.
    static T largest(const T* x, int64_t count) {
        constexpr int together = 4;
        V<T> top[together] = {};
        int64_t i = 0;
        for (; i + together * L <= count; i += together * L)
#pragma GCC unroll 4
            for (int k = 0; k < together; k++) top[k] = max_of<T>(top[k], size_of<T>(load(x + i + k * L)));
        for (; i < count; i += L) top[0] = max_of<T>(top[0], size_of<T>(load(x + i)));
        return largest_of<T>(max_of<T>(max_of<T>(top[0], top[1]), max_of<T>(top[2], top[3])));
    }

    const Form& form_;
    const int64_t width_;

    // Two of its inverse can be multiplied in float, eight in double.
    static constexpr T kLight = sizeof(T) == 4 ? T(1e-12) : T(1e-25);
};
