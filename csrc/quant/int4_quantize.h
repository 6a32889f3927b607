// Activations to int8 with a scale per row, in pairs of rows; vac/quant_int4.h says how they are rounded, and
// int4_layout.h how they are stored. Included by the .tier.cc files only.
#pragma once

#include "quant/int4_elements.h"

namespace {

// 1.5 * 2^23: added to a float below 2^22 it leaves the float, rounded to an integer, in the low bits. And the other
// way round: sums that start at its bit pattern are floats once they are less it, without a conversion.
constexpr float kMagic = 12582912.0f;
constexpr int32_t kMagicBits = 0x4b400000;

struct Quantized {
    int8_t *values;
    int32_t *sums;
    float *scales;
    size_t pair_stride, sums_stride;
};

inline Quantized quantized_at(char *base, size_t m, size_t k, size_t groups) {
    const QuantizedLayout layout = quantized_layout(m, k, groups);
    return {reinterpret_cast<int8_t *>(base), reinterpret_cast<int32_t *>(base + layout.sums),
            reinterpret_cast<float *>(base + layout.scales), layout.pair_stride, layout.sums_stride};
}

// How 16 elements of a dtype become int8, and the largest magnitude of a row.
template <class Stored>
struct Rounded {
    using Element = typename Stored::Element;
    static float largest(const Element *p, size_t k) {
        float32x4_t most[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
        size_t i = 0;
        for (; i + 16 <= k; i += 16) {
            for (int j = 0; j < 4; ++j) most[j] = vmaxq_f32(most[j], vabsq_f32(Stored::load4(p + i + 4 * j)));
        }
        for (; i < k; i += 4) most[0] = vmaxq_f32(most[0], vabsq_f32(load_some<Stored>(p + i, min_size(k - i, 4))));
        return vmaxvq_f32(vmaxq_f32(vmaxq_f32(most[0], most[1]), vmaxq_f32(most[2], most[3])));
    }
    static int8x16_t round16(const Element *p, float32x4_t inverse) {
        int16x8_t half[2];
        for (int j = 0; j < 2; ++j) {
            const float32x4_t low = vfmaq_f32(vdupq_n_f32(kMagic), Stored::load4(p + 8 * j), inverse);
            const float32x4_t high = vfmaq_f32(vdupq_n_f32(kMagic), Stored::load4(p + 8 * j + 4), inverse);
            half[j] = vuzp1q_s16(vreinterpretq_s16_f32(low), vreinterpretq_s16_f32(high));
        }
        return vuzp1q_s8(vreinterpretq_s8_s16(half[0]), vreinterpretq_s8_s16(half[1]));
    }
};

template <>
struct Rounded<StoredBF16> {
    using Element = uint16_t;
    // Without the sign, BF16 patterns are in the order of what they stand for, infinity and NaN last.
    static float largest(const uint16_t *p, size_t k) {
        const uint16x8_t magnitude = vdupq_n_u16(0x7fff);
        uint16x8_t most[4] = {vdupq_n_u16(0), vdupq_n_u16(0), vdupq_n_u16(0), vdupq_n_u16(0)};
        size_t i = 0;
        for (; i + 32 <= k; i += 32) {
            for (int j = 0; j < 4; ++j) most[j] = vmaxq_u16(most[j], vandq_u16(vld1q_u16(p + i + 8 * j), magnitude));
        }
        for (; i + 8 <= k; i += 8) most[0] = vmaxq_u16(most[0], vandq_u16(vld1q_u16(p + i), magnitude));
        uint32_t bits = vmaxvq_u16(vmaxq_u16(vmaxq_u16(most[0], most[1]), vmaxq_u16(most[2], most[3])));
        for (; i < k; ++i) bits = bits > (p[i] & 0x7fffu) ? bits : p[i] & 0x7fffu;
        bits <<= 16;
        float value;
        __builtin_memcpy(&value, &bits, 4);
        return value;
    }
    static int8x16_t round16(const uint16_t *p, float32x4_t inverse) {
        int16x8_t half[2];
        for (int j = 0; j < 2; ++j) {
            const uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(p + 8 * j));
            const float32x4_t even = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
            const float32x4_t odd = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000)));
            half[j] = vtrn1q_s16(vreinterpretq_s16_f32(vfmaq_f32(vdupq_n_f32(kMagic), even, inverse)),
                                 vreinterpretq_s16_f32(vfmaq_f32(vdupq_n_f32(kMagic), odd, inverse)));
        }
        return vuzp1q_s8(vreinterpretq_s8_s16(half[0]), vreinterpretq_s8_s16(half[1]));
    }
};

// What x is multiplied by; 0 for rows that count as zeros. Sets the row's scale.
inline float inverse_scale(float largest, float *scale) {
    constexpr float kSmallest = 0x1p-118f, kInfinity = __builtin_inff();
    if (!(largest < kInfinity)) return *scale = __builtin_nanf(""), 0.0f;
    if (largest < kSmallest) return *scale = 0.0f, 0.0f;
    *scale = largest * (1.0f / 127.0f);
    return 127.0f / largest;
}

// Row `row` of lhs and, kBoth, the one after it, as a pair.
template <class Stored, bool kBoth>
void quantize_pair(const vac_int4_gemm_args &args, size_t row, const Quantized &out) {
    using Round = Rounded<Stored>;
    using Element = typename Stored::Element;
    const size_t k = args.k, groups = groups_of(k, args.group), group = groups == 1 ? round_up(k, kStep) : args.group;
    const Element *p[2] = {static_cast<const Element *>(args.lhs) + row * args.lhs_stride};
    p[1] = p[0] + (kBoth ? args.lhs_stride : 0);
    float *scales = out.scales + row;
    float32x4_t inverse[2];
    inverse[0] = vdupq_n_f32(inverse_scale(Round::largest(p[0], k), scales));
    if (kBoth)
        inverse[1] = vdupq_n_f32(inverse_scale(Round::largest(p[1], k), scales + 1));
    else
        inverse[1] = vdupq_n_f32(0), scales[1] = 0;
    const int8x16_t second_half = vcombine_s8(vdup_n_s8(0), vdup_n_s8(1)), all = vdupq_n_s8(1);
    int8_t *to = out.values + row / 2 * out.pair_stride;
    int32_t *sums = out.sums + row / 2 * out.sums_stride;
    const int32_t start = groups == 1 ? 0 : kMagicBits;
    for (size_t g = 0, begin = 0; g < groups; ++g, begin += group, sums += 8) {
        const size_t end = min_size(begin + group, k);
        int32x4_t low[2] = {vdupq_n_s32(0), vdupq_n_s32(0)}, whole[2] = {vdupq_n_s32(0), vdupq_n_s32(0)};
        const auto put = [&](const Element *a, const Element *b) {
            // A NaN may become any number here: its row's scale is NaN, and so is what is multiplied with it.
            const int8x16_t q0 = Round::round16(a, inverse[0]);
            const int8x16_t q1 = kBoth ? Round::round16(b, inverse[1]) : vdupq_n_s8(0);
            const int64x2_t x = vreinterpretq_s64_s8(q0), y = vreinterpretq_s64_s8(q1);
            vst1q_s8(to, vreinterpretq_s8_s64(vzip1q_s64(x, y)));
            vst1q_s8(to + 16, vreinterpretq_s8_s64(vzip2q_s64(x, y)));
            to += 32;
            low[0] = vdotq_s32(low[0], q0, second_half);
            whole[0] = vdotq_s32(whole[0], q0, all);
            if (kBoth) {
                low[1] = vdotq_s32(low[1], q1, second_half);
                whole[1] = vdotq_s32(whole[1], q1, all);
            }
        };
        size_t i = begin;
        for (; i + kStep <= end; i += kStep) put(p[0] + i, p[1] + i);
        if (i < end) {
            Element tail[2][kStep] = {};
            for (size_t j = 0; j < end - i; ++j) tail[0][j] = p[0][i + j], tail[1][j] = p[1][i + j];
            put(tail[0], tail[1]);
        }
        for (int r = 0; r < 2; ++r) {
            vst1_s32(sums + 2 * r, vdup_n_s32(start - 8 * vaddvq_s32(low[r])));
            vst1_s32(sums + 4 + 2 * r, vdup_n_s32(-vaddvq_s32(whole[r])));
        }
    }
}

// Pairs [begin, end) of rows.
inline void quantize_pairs(const vac_int4_gemm_args &args, size_t begin, size_t end, const Quantized &out) {
    with_stored(args.dtype, [&](auto stored) {
        using Stored = decltype(stored);
        for (size_t pair = begin; pair < end; ++pair) {
            if (2 * pair + 1 < args.m)
                quantize_pair<Stored, true>(args, 2 * pair, out);
            else
                quantize_pair<Stored, false>(args, 2 * pair, out);
        }
    });
}

// Row `from` of one into row `to` of another; values, sums and the scale.
inline void copy_row(const Quantized &source, size_t from, const Quantized &target, size_t to, size_t k) {
    const int8_t *a = source.values + from / 2 * source.pair_stride + from % 2 * 8;
    int8_t *b = target.values + to / 2 * target.pair_stride + to % 2 * 8;
    for (size_t i = 0; i < round_up(k, kStep); i += 8) vst1_s8(b + 2 * i, vld1_s8(a + 2 * i));
    const int32_t *x = source.sums + from / 2 * source.sums_stride + from % 2 * 2;
    int32_t *y = target.sums + to / 2 * target.sums_stride + to % 2 * 2;
    for (size_t i = 0; i < target.sums_stride; i += 4) vst1_s32(y + i, vld1_s32(x + i));
    target.scales[to] = source.scales[from];
}

// A row of zeros, for a pair without its second row.
inline void clear_row(const Quantized &target, size_t to, size_t k) {
    int8_t *b = target.values + to / 2 * target.pair_stride + to % 2 * 8;
    for (size_t i = 0; i < round_up(k, kStep); i += 8) vst1_s8(b + 2 * i, vdup_n_s8(0));
    int32_t *y = target.sums + to / 2 * target.sums_stride + to % 2 * 2;
    for (size_t i = 0; i < target.sums_stride; i += 4) vst1_s32(y + i, vdup_n_s32(0));
    target.scales[to] = 0;
}

}  // namespace
