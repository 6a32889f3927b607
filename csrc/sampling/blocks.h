// A row of logits with the maximum of each block of 64: what finds the largest few without sorting.
// Included by .tier.cc files only, private to each of them.
#pragma once

#include "sampling/pieces.h"
#include "sampling/simd.h"

namespace vac::VAC_TIER_NS {
namespace {

// An integer that orders as the float does. -0 becomes +0 first: they are equal.
inline int32_t key_of(float v) {
    v += 0.0f;
    int32_t bits;
    __builtin_memcpy(&bits, &v, sizeof(bits));
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}
inline float value_of(int32_t key) {
    const int32_t bits = key ^ ((key >> 31) & 0x7FFFFFFF);
    float v;
    __builtin_memcpy(&v, &bits, sizeof(v));
    return v;
}
inline int32x4_t keys_of(float32x4_t v) {
    const int32x4_t bits = vreinterpretq_s32_f32(vaddq_f32(v, vdupq_n_f32(0)));
    return veorq_s32(bits, vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(vshrq_n_s32(bits, 31)), 1)));
}
inline float32x4_t values_of(int32x4_t keys) {
    return vreinterpretq_f32_s32(
        veorq_s32(keys, vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(vshrq_n_s32(keys, 31)), 1))));
}

struct Row {
    float *logits;
    int64_t size;
    int64_t num_blocks;
    float *maxima;  // [num_blocks]
    float largest;  // of the maxima
};

inline void find_maxima(Row &row) {
    float32x4_t largest = vdupq_n_f32(-kInfinity);
    const int64_t full_blocks = row.size / kMaskBlock;
    const float *x = row.logits;
    for (int64_t b = 0; b < full_blocks; ++b, x += kMaskBlock) {
        float32x4_t m[4];
        for (int j = 0; j < 4; ++j)
            m[j] = max(max(vld1q_f32(x + 16 * j), vld1q_f32(x + 16 * j + 4)),
                       max(vld1q_f32(x + 16 * j + 8), vld1q_f32(x + 16 * j + 12)));
        const float32x4_t block = max(max(m[0], m[1]), max(m[2], m[3]));
        largest = max(largest, block);
        row.maxima[b] = vmaxvq_f32(block);
    }
    if (full_blocks < row.num_blocks) {
        row.maxima[full_blocks] = max_of<F32>(x, row.size - full_blocks * kMaskBlock);
        largest = max(largest, vdupq_n_f32(row.maxima[full_blocks]));
    }
    row.largest = vmaxvq_f32(largest);
}

inline int64_t count_from(const float *values, int64_t size, float bound) {
    uint32x4_t count0 = vdupq_n_u32(0), count1 = count0;
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) {
        count0 = vsubq_u32(count0, vcgeq_f32(vld1q_f32(values + i), vdupq_n_f32(bound)));
        count1 = vsubq_u32(count1, vcgeq_f32(vld1q_f32(values + i + 4), vdupq_n_f32(bound)));
    }
    int64_t count = vaddvq_u32(vaddq_u32(count0, count1));
    for (; i < size; ++i) count += values[i] >= bound;
    return count;
}

// A value that at least k block maxima reach, and not many more do.
inline float bound_of_top_k(const Row &row, int64_t k) {
    if (k > row.num_blocks) return -kInfinity;
    float32x4_t least = vdupq_n_f32(kInfinity);
    int64_t i = 0;
    for (; i + 4 <= row.num_blocks; i += 4) least = vminq_f32(least, vld1q_f32(row.maxima + i));
    int64_t low = key_of(vminvq_f32(least));
    for (; i < row.num_blocks; ++i) {
        const int64_t key = key_of(row.maxima[i]);
        low = key < low ? key : low;
    }
    // At least k maxima reach `low`, fewer than k reach `high`.
    int64_t high = static_cast<int64_t>(key_of(row.largest)) + 1;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        const int64_t count = count_from(row.maxima, row.num_blocks, value_of(static_cast<int32_t>(middle)));
        if (count < k) {
            high = middle;
            continue;
        }
        low = middle;
        if (count <= k + k / 2 + 8) break;
    }
    return value_of(static_cast<int32_t>(low));
}

}  // namespace
}  // namespace vac::VAC_TIER_NS
