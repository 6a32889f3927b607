// Exponential, logarithm and maxima of logits: included by .tier.cc files only,
// private to each of them.
#pragma once

#include <arm_neon.h>

#include "vac/base.h"

namespace vac::VAC_TIER_NS {
namespace {

constexpr float kInfinity = __builtin_inff();
// A temperature below this is zero, as in vLLM: the row is greedy.
constexpr float kGreedyTemperature = 1e-5f;

struct F32x8 {
    float32x4_t lo, hi;
};

// A data type of logits: eight of them, or one, as FP32.
struct F32 {
    using Element = float;
    static F32x8 load(const float *p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
    static float value(float v) { return v; }
};
struct F16 {
    using Element = uint16_t;
    static F32x8 load(const uint16_t *p) {
        const float16x8_t v = vreinterpretq_f16_u16(vld1q_u16(p));
        return {vcvt_f32_f16(vget_low_f16(v)), vcvt_high_f32_f16(v)};
    }
    static float value(uint16_t bits) {
        return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits))), 0);
    }
};
struct BF16 {
    using Element = uint16_t;
    static F32x8 load(const uint16_t *p) {
        const uint16x8_t v = vld1q_u16(p), zero = vdupq_n_u16(0);
        return {vreinterpretq_f32_u16(vzip1q_u16(zero, v)), vreinterpretq_f32_u16(vzip2q_u16(zero, v))};
    }
    static float value(uint16_t bits) {
        return vgetq_lane_f32(vreinterpretq_f32_u32(vdupq_n_u32(static_cast<uint32_t>(bits) << 16)), 0);
    }
};

// FMAX: a NaN in either operand is the result.
inline float32x4_t max(float32x4_t a, float32x4_t b) { return vmaxq_f32(a, b); }
inline float max(float a, float b) { return vget_lane_f32(vmax_f32(vdup_n_f32(a), vdup_n_f32(b)), 0); }

// The largest of logits [0, size), NaN if there is one, -inf if there are none.
template <class Type>
inline float max_of(const typename Type::Element *logits, int64_t size) {
    float32x4_t m[8];
    for (auto &v : m) v = vdupq_n_f32(-kInfinity);
    int64_t i = 0;
    for (; i + 32 <= size; i += 32)
        for (int j = 0; j < 4; ++j) {
            const F32x8 v = Type::load(logits + i + 8 * j);
            m[2 * j] = max(m[2 * j], v.lo);
            m[2 * j + 1] = max(m[2 * j + 1], v.hi);
        }
    for (; i + 8 <= size; i += 8) {
        const F32x8 v = Type::load(logits + i);
        m[0] = max(m[0], v.lo);
        m[1] = max(m[1], v.hi);
    }
    float result = vmaxvq_f32(max(max(max(m[0], m[1]), max(m[2], m[3])), max(max(m[4], m[5]), max(m[6], m[7]))));
    for (; i < size; ++i) result = max(result, Type::value(logits[i]));
    return result;
}

// The first index of a logit that equals `wanted`, or of a NaN if `wanted` is one.
template <class Type>
inline int64_t first_index_of(const typename Type::Element *logits, int64_t size, float wanted) {
    const bool wants_nan = wanted != wanted;
    const float32x4_t target = vdupq_n_f32(wanted);
    int64_t i = 0;
    for (; i + 8 <= size; i += 8) {
        const F32x8 v = Type::load(logits + i);
        const uint32x4_t differs = wants_nan ? vandq_u32(vceqq_f32(v.lo, v.lo), vceqq_f32(v.hi, v.hi))
                                             : vmvnq_u32(vorrq_u32(vceqq_f32(v.lo, target), vceqq_f32(v.hi, target)));
        if (vminvq_u32(differs) == 0) break;
    }
    for (; i < size; ++i) {
        const float v = Type::value(logits[i]);
        if (wants_nan ? v != v : v == wanted) return i;
    }
    return 0;
}

inline float32x4_t fma(float32x4_t acc, float32x4_t a, float32x4_t b) { return vfmaq_f32(acc, a, b); }
inline float32x4_t constant(float v) { return vdupq_n_f32(v); }

// exp(x) for x <= 0, relative error below 2^-22; 0 below -87. 2^r on [-1/2, 1/2] is
// a minimax polynomial (relative error 2^-28.9); x * log2(e) keeps its product's low part.
inline float32x4_t exp_negative(float32x4_t x) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, left in the low bits
    constexpr float kLog2e = 1.44269504f, kLog2eLow = 1.92596299e-8f, kMin = -87.0f;
    const uint32x4_t underflows = vcltq_f32(x, constant(kMin));
    x = max(x, constant(kMin));
    const float32x4_t rounded = vfmaq_n_f32(constant(kRound), x, kLog2e);
    float32x4_t r = vfmaq_n_f32(vsubq_f32(constant(kRound), rounded), x, kLog2e);
    r = vfmaq_n_f32(r, x, kLog2eLow);
    float32x4_t p = fma(constant(0.0013398875f), r, constant(0.00015353362f));
    p = fma(constant(0.00961843692f), p, r);
    p = fma(constant(0.05550332367f), p, r);
    p = fma(constant(0.24022647738f), p, r);
    p = fma(constant(0.69314718246f), p, r);
    p = fma(constant(1.0f), p, r);
    const int32x4_t power = vshlq_n_s32(vreinterpretq_s32_f32(rounded), 23);
    return vreinterpretq_f32_u32(
        vbicq_u32(vreinterpretq_u32_s32(vaddq_s32(vreinterpretq_s32_f32(p), power)), underflows));
}

// log(x) for positive normal x, error below 2^-22 relative or absolute, whichever is
// larger near 1: x = m * 2^e with m in [sqrt(1/2), sqrt(2)), log(1 + f) = f - f^2/2 + f^3 P(f).
inline float32x4_t log_normal(float32x4_t x) {
    const int32x4_t bits = vreinterpretq_s32_f32(x);
    const int32x4_t exponent = vshrq_n_s32(vsubq_s32(bits, vdupq_n_s32(0x3F3504F3)), 23);
    const float32x4_t f = vsubq_f32(vreinterpretq_f32_s32(vsubq_s32(bits, vshlq_n_s32(exponent, 23))), constant(1.0f));
    const float32x4_t e = vcvtq_f32_s32(exponent), square = vmulq_f32(f, f);
    float32x4_t p = fma(constant(-0.14267487824f), f, constant(0.08700433373f));
    p = fma(constant(0.14914768934f), p, f);
    p = fma(constant(-0.16577585042f), p, f);
    p = fma(constant(0.19963063300f), p, f);
    p = fma(constant(-0.25001338124f), p, f);
    p = fma(constant(0.33333909512f), p, f);
    p = vfmaq_n_f32(vmulq_f32(vmulq_f32(f, square), p), square, -0.5f);
    p = vaddq_f32(vfmaq_n_f32(p, e, -2.12194440e-4f), f);  // ln 2 = 0.693359375 - 2.1219444e-4
    return vfmaq_n_f32(p, e, 0.693359375f);
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// A thread's part of `total` units: contiguous, sizes differ by one at most.
struct Share {
    int64_t begin, end;
};
inline Share share_of(int64_t total, uint32_t thread_index, uint32_t thread_count) {
    if (total <= 0) return {0, 0};
    if (thread_count <= 1) return {0, total};
    return {total * thread_index / thread_count, total * (thread_index + 1) / thread_count};
}

// Calls body(Type{}) for a value of enum vac_dtype; nothing for another value.
template <class Body>
inline void with_dtype(int32_t dtype, Body body) {
    if (dtype == VAC_F32) body(F32{});
    if (dtype == VAC_F16) body(F16{});
    if (dtype == VAC_BF16) body(BF16{});
}

}  // namespace
}  // namespace vac::VAC_TIER_NS
