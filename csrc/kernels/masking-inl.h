// Which pairs are unmasked and which weights dropout keeps: one bit for each of the 64 keys of a tile.
#pragma once

#include "kernels/simd-inl.h"

// The keys, rows or micro-panels [first, end); none where end <= first.
struct Span {
    int64_t first, end;

    bool empty() const { return end <= first; }
    // The smallest span that holds both; an empty `other` adds nothing.
    Span covering(Span other) const {
        return other.empty() ? *this : Span{std::min(first, other.first), std::max(end, other.end)};
    }
    // The keys that both hold.
    Span within(Span other) const { return {std::max(first, other.first), std::min(end, other.end)}; }
};

constexpr uint64_t kAll = ~uint64_t{0};

// The lowest `count` bits.
inline uint64_t lowest_bits(int64_t count) { return count >= kTileKeys ? kAll : (uint64_t{1} << count) - 1; }

// Call f(j) for each set bit j.
template <class F>
inline void for_each_bit(uint64_t bits, const F& f) {
    for (; bits; bits &= bits - 1) f(__builtin_ctzll(bits));
}

// The keys from the start to the stop of a row, holes included.
inline Span key_interval(const Problem& problem, const Head& head, int64_t row) {
    if (!head.start) return {0, problem.key_len};
    return {std::max<int64_t>(head.start[row], 0), std::min<int64_t>(head.stop[row], problem.key_len)};
}

// The k-th hole in the interval of a row, counted from 0.
inline Span hole_interval(const Head& head, int64_t row, int64_t k) {
    const int64_t at = (k + 1) * head.hole_stride + row;
    return {head.start[at], head.stop[at]};
}

// Bits of the keys [key, key + count) that a span holds.
inline uint64_t span_bits(const Span& span, int64_t key, int64_t count) {
    return lowest_bits(std::clamp<int64_t>(span.end - key, 0, count)) &
           ~lowest_bits(std::clamp<int64_t>(span.first - key, 0, count));
}

#if defined(__aarch64__)
// Bits of 64 bytes, each of which is 0 or all ones.
inline uint64_t bits_of_bytes(const uint8x16_t* bytes) {
    const uint8x16_t bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t low = vpaddq_u8(vandq_u8(bytes[0], bit), vandq_u8(bytes[1], bit)),
                     high = vpaddq_u8(vandq_u8(bytes[2], bit), vandq_u8(bytes[3], bit)), all = vpaddq_u8(low, high);
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(all, all)), 0);
}
#endif

// Bits of the bytes that are not 0.
inline uint64_t nonzero_bits(const char* bytes, int64_t stride, int64_t count) {
    if (stride == 0) return *bytes ? lowest_bits(count) : 0;
#if defined(__AVX512BW__)
    if (stride == 1) {
        const __m512i all = _mm512_maskz_loadu_epi8(lowest_bits(count), bytes);
        return _mm512_test_epi8_mask(all, all);
    }
#elif defined(__aarch64__)
    if (stride == 1 && count == kTileKeys) {
        uint8x16_t all[4];
        for (int j = 0; j < 4; j++) {
            const uint8x16_t x = vld1q_u8(reinterpret_cast<const uint8_t*>(bytes) + 16 * j);
            all[j] = vtstq_u8(x, x);
        }
        return bits_of_bytes(all);
    }
#endif
    uint64_t bits = 0;
    for (int64_t j = 0; j < count; j++) bits |= uint64_t(bytes[j * stride] != 0) << j;
    return bits;
}

// Bits of the ids that equal the id of a row, if that is not negative.
inline uint64_t equal_bits(int64_t id, const int64_t* ids, int64_t stride, int64_t count) {
    if (id < 0) return 0;
    uint64_t bits = 0;
    for (int64_t j = 0; j < count; j++) bits |= uint64_t(ids[j * stride] == id) << j;
    return bits;
}

// Bits of the keys [key, key + count) in the interval of a row and in none of its holes.
inline uint64_t interval_bits(const Problem& problem, const Head& head, int64_t row, int64_t key, int64_t count) {
    uint64_t bits = span_bits(key_interval(problem, head, row), key, count);
    for (int64_t k = 0; k < head.holes; k++) bits &= ~span_bits(hole_interval(head, row, k), key, count);
    return bits;
}

// Bits of the keys [key, key + count) that a row attends to, as far as a bias of -inf does not mask them.
inline uint64_t unmasked_bits(const Problem& problem, const Head& head, int64_t row, int64_t key, int64_t count) {
    uint64_t bits = interval_bits(problem, head, row, key, count);
    if (bits && head.mask.data)
        bits &= nonzero_bits(head.mask.data + row * head.mask.row_stride + key * head.mask.col_stride,
                             head.mask.col_stride, count);
    if (bits && head.query_ids.data) {
        const int64_t query_id = as<int64_t>(head.query_ids.data)[row * head.query_ids.row_stride];
        const int64_t stride = head.key_ids.row_stride;
        bits &= equal_bits(query_id, as<int64_t>(head.key_ids.data) + key * stride, stride, count);
    }
    return bits;
}

// Whether pairs are masked one by one, beyond the intervals.
inline bool has_pair_mask(const Head& head) { return head.mask.data || head.query_ids.data || head.bias.data; }

// Whether a head masks any pair.
inline bool has_mask(const Head& head) { return head.start || has_pair_mask(head); }

// ---------------------------------------------------------------------------------------------------------------------
// Dropout, as dropout.py defines it: two rounds of a 32-bit hash for the row, one for the pair.

inline uint32_t hash32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

struct Dropout {
    bool on;
    uint64_t threshold;  // a weight is kept if the hash of its pair is not below this; 2^32 keeps none
    double factor;
    uint32_t key_hash[kTileKeys];  // the keys' part of the hash, for the current tile

    explicit Dropout(const Problem& problem)
        : on(problem.dropout > 0),
          threshold(static_cast<uint64_t>(std::nearbyint(problem.dropout * 4294967296.0))),
          factor(1 / (1 - problem.dropout)) {}

    // Prepare for the keys from `key` on.
    void set_tile(int64_t key) {
        for (int64_t j = 0; j < kTileKeys; j++) key_hash[j] = static_cast<uint32_t>(key + j) * 0x9E3779B9u;
    }
    // The hash of a row of a head, a number for each row of the call, which `keep_bits` takes.
    static uint32_t stream(const Problem& problem, const Head& head, int64_t row) {
        const int64_t rows = problem.all_rows > 0 ? problem.all_rows : problem.query_len;
        const auto all = static_cast<uint64_t>(head.index * rows + problem.first_row + row);
        const uint32_t low = static_cast<uint32_t>(problem.seed), high = static_cast<uint32_t>(problem.seed >> 32);
        return hash32(hash32(static_cast<uint32_t>(all) + low) + static_cast<uint32_t>(all >> 32) + high);
    }
    // Bits of the keys whose weights a row keeps.
    uint64_t keep_bits(uint32_t stream) const {
        if (threshold > 0xFFFFFFFFu) return 0;
        uint64_t bits = 0;
#if defined(__AVX512F__)
        const __m512i least = _mm512_set1_epi32(static_cast<int>(threshold)),
                      streams = _mm512_set1_epi32(static_cast<int>(stream));
        for (int j = 0; j < 4; j++) {
            __m512i x = _mm512_add_epi32(streams, _mm512_loadu_si512(key_hash + j * 16));
            x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 16)), _mm512_set1_epi32(0x7FEB352D));
            x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 15)),
                                   _mm512_set1_epi32(static_cast<int>(0x846CA68Bu)));
            x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
            bits |= static_cast<uint64_t>(_mm512_cmpge_epu32_mask(x, least)) << (16 * j);
        }
#elif defined(__AVX2__)
        const __m256i least = _mm256_set1_epi32(static_cast<int>(threshold)),
                      streams = _mm256_set1_epi32(static_cast<int>(stream));
        for (int j = 0; j < kTileKeys; j += 8) {
            __m256i x = _mm256_add_epi32(streams, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(key_hash + j)));
            x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 16)), _mm256_set1_epi32(0x7FEB352D));
            x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 15)),
                                   _mm256_set1_epi32(static_cast<int>(0x846CA68Bu)));
            x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
            const __m256i kept = _mm256_cmpeq_epi32(_mm256_max_epu32(x, least), x);  // x >= least
            bits |= static_cast<uint64_t>(_mm256_movemask_ps((__m256)kept)) << j;
        }
#elif defined(__aarch64__)
        const uint32x4_t least = vdupq_n_u32(static_cast<uint32_t>(threshold)), streams = vdupq_n_u32(stream);
        const auto kept = [&](int j) {  // four keys
            uint32x4_t x = vaddq_u32(streams, vld1q_u32(key_hash + j));
            x = vmulq_n_u32(veorq_u32(x, vshrq_n_u32(x, 16)), 0x7FEB352Du);
            x = vmulq_n_u32(veorq_u32(x, vshrq_n_u32(x, 15)), 0x846CA68Bu);
            return vmovn_u32(vcgeq_u32(veorq_u32(x, vshrq_n_u32(x, 16)), least));
        };
        uint8x16_t all[4];
        for (int j = 0; j < 4; j++)
            all[j] = vcombine_u8(vmovn_u16(vcombine_u16(kept(16 * j), kept(16 * j + 4))),
                                 vmovn_u16(vcombine_u16(kept(16 * j + 8), kept(16 * j + 12))));
        bits = bits_of_bytes(all);
#else
        for (int j = 0; j < kTileKeys; j++) bits |= uint64_t(hash32(stream + key_hash[j]) >= threshold) << j;
#endif
        return bits;
    }
};
