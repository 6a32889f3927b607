// Activations as whole numbers of three digits to the base 256, so that integer tiles multiply them as they are.
//
//   x = (65536 d2 + 256 d1 + d0) * 2^(e - 21), 2^e <= largest |x| of the row < 2^(e + 1), digits -128 .. 127
//
// A digit is a row of int8 (int4_layout.h), with 2^(e - 21) times its place value for a scale: exact sums of a group,
// as in W4A8, then FP32. A BF16 number is exact where it is not below 2^-14 of its row's largest, an FP16 number where
// it is not below 2^-11; what is lost of others is at most 2^-22 of the largest, like a rounding of an FP32 sum.
// Included by the .tier.cc files only; all of it is local to each of them.
#pragma once

#include "quant/int4_quantize.h"

namespace {

constexpr size_t kDigits = 3;

inline float power_of_two(uint32_t biased_exponent) {
    const uint32_t bits = biased_exponent << 23;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

// 16 numbers to the digits of each, d2 first.
template <class Stored>
inline void digits_of_16(const typename Stored::Element *p, float32x4_t inverse, int8x16_t (&digits)[kDigits]) {
    // Digits less -128 are those of the number plus 128 * (65536 + 256 + 1).
    const int32x4_t offset = vdupq_n_s32(0x808080);
    uint16x8_t low[2], high[2];
    for (int j = 0; j < 2; ++j) {
        const auto number = [&](int at) {
            const float32x4_t x = vmulq_f32(Stored::load4(p + at), inverse);
            return vreinterpretq_u16_s32(vaddq_s32(vcvtnq_s32_f32(x), offset));
        };
        const uint16x8_t a = number(8 * j), b = number(8 * j + 4);
        low[j] = vuzp1q_u16(a, b);
        high[j] = vuzp2q_u16(a, b);
    }
    const auto bytes = [](uint16x8_t x) { return vreinterpretq_u8_u16(x); };
    const uint8x16_t less = vdupq_n_u8(0x80);
    digits[0] = vreinterpretq_s8_u8(veorq_u8(vuzp1q_u8(bytes(high[0]), bytes(high[1])), less));
    digits[1] = vreinterpretq_s8_u8(veorq_u8(vuzp2q_u8(bytes(low[0]), bytes(low[1])), less));
    digits[2] = vreinterpretq_s8_u8(veorq_u8(vuzp1q_u8(bytes(low[0]), bytes(low[1])), less));
}

// k numbers to rows `row`, `row` + 1, `row` + 2 of out.
template <class Stored>
void split_row(const typename Stored::Element *p, size_t k, size_t whole_group, const Quantized &out, size_t row) {
    using Element = typename Stored::Element;
    const size_t groups = groups_of(k, whole_group), group = groups == 1 ? round_up(k, kStep) : whole_group;
    const float largest = Rounded<Stored>::largest(p, k);
    uint32_t bits;
    __builtin_memcpy(&bits, &largest, 4);
    const bool finite = largest < __builtin_inff();
    // Below, neither the unit nor its inverse would be a normal number; beyond, the row's scale is NaN.
    const uint32_t exponent = finite ? bits >> 23 : 127;
    const uint32_t clamped = exponent < 22 ? 22 : exponent;
    const float32x4_t inverse = vdupq_n_f32(power_of_two(275 - clamped));
    int8_t *to[kDigits];
    int32_t *sums[kDigits];
    for (size_t d = 0; d < kDigits; ++d) {
        const size_t r = row + d;
        to[d] = out.values + r / 2 * out.pair_stride + r % 2 * 8;
        sums[d] = out.sums + r / 2 * out.sums_stride + r % 2 * 2;
        out.scales[r] =
            finite ? power_of_two(clamped - 21 + static_cast<uint32_t>(8 * (kDigits - 1 - d))) : __builtin_nanf("");
    }
    const int8x16_t second_half = vcombine_s8(vdup_n_s8(0), vdup_n_s8(1)), all = vdupq_n_s8(1);
    const int32_t start = groups == 1 ? 0 : kMagicBits;
    for (size_t begin = 0; begin < k; begin += group) {
        const size_t end = min_size(begin + group, k);
        int32x4_t low[kDigits] = {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)};
        int32x4_t whole[kDigits] = {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)};
        const auto put = [&](const Element *from) {
            int8x16_t digits[kDigits];
            digits_of_16<Stored>(from, inverse, digits);
            for (size_t d = 0; d < kDigits; ++d) {
                vst1_s8(to[d], vget_low_s8(digits[d]));
                vst1_s8(to[d] + 16, vget_high_s8(digits[d]));
                to[d] += 32;
                low[d] = vdotq_s32(low[d], digits[d], second_half);
                whole[d] = vdotq_s32(whole[d], digits[d], all);
            }
        };
        size_t i = begin;
        for (; i + kStep <= end; i += kStep) put(p + i);
        if (i < end) {
            Element tail[kStep] = {};
            for (size_t j = 0; j < end - i; ++j) tail[j] = p[i + j];
            put(tail);
        }
        for (size_t d = 0; d < kDigits; ++d) {
            vst1_s32(sums[d], vdup_n_s32(start - 8 * vaddvq_s32(low[d])));
            vst1_s32(sums[d] + 4, vdup_n_s32(-vaddvq_s32(whole[d])));
            sums[d] += 8;
        }
    }
}

}  // namespace
