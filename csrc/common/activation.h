// SiLU and both GELUs as functions of FP32 vectors, and their product with the
// other half of a row: included by .tier.cc files only, private to each of them.
// All three are x * F(s(x)) with F a sigmoid or the normal distribution, each
// built on an exponential of s and one reciprocal.
#pragma once

#include "common/simd.h"
#include "vac/elementwise.h"

namespace vac::VAC_TIER_NS {
namespace {

// Adding 1.5 * 2^23 rounds a float to an integer, left in the low bits.
constexpr float kRound = 12582912.0f;
constexpr float kLog2e = 1.44269504f;

// 1 / d for d in [1, inf]; inf gives 0. FRECPE has 8 bits, each Newton step doubles them.
template <Precision kPrecision>
inline float32x4_t reciprocal(float32x4_t d) {
    float32x4_t y = vrecpeq_f32(d);
    y = vmulq_f32(y, vrecpsq_f32(d, y));
    if constexpr (kPrecision == Precision::kF32) y = vmulq_f32(y, vrecpsq_f32(d, y));
    return y;
}

// p * 2^n, n in the low bits of `rounded`: added to the exponent field.
inline float32x4_t scale_by_power(float32x4_t p, float32x4_t rounded) {
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), vshlq_n_s32(vreinterpretq_s32_f32(rounded), 23)));
}

inline float32x4_t fma(float acc, float32x4_t a, float32x4_t b) { return vfmaq_f32(vdupq_n_f32(acc), a, b); }

// exp(x) for x in [-87, 88], relative error below 2^-22. 2^r on [-1/2, 1/2] is a
// minimax polynomial (relative error 2^-28.9); x * log2(e) keeps its product's low part.
inline float32x4_t exp_precise(float32x4_t x) {
    constexpr float kLog2eLow = 1.92596299e-8f;
    const float32x4_t rounded = vfmaq_n_f32(vdupq_n_f32(kRound), x, kLog2e);
    float32x4_t r = vfmaq_n_f32(vsubq_f32(vdupq_n_f32(kRound), rounded), x, kLog2e);
    r = vfmaq_n_f32(r, x, kLog2eLow);
    float32x4_t p = fma(0.0013398875f, r, vdupq_n_f32(0.00015353362f));
    p = fma(0.00961843692f, p, r);
    p = fma(0.05550332367f, p, r);
    p = fma(0.24022647738f, p, r);
    p = fma(0.69314718246f, p, r);
    p = fma(1.0f, p, r);
    return scale_by_power(p, rounded);
}

// The least argument of sigmoid(): what is below gives the same, an exact zero.
template <Precision kPrecision>
constexpr float kSigmoidMin = kPrecision == Precision::kF32 ? -87.0f : -88.7228394f;

// 1 / (1 + exp(-x)) for x >= kSigmoidMin, and 0 at kSigmoidMin.
template <Precision kPrecision>
inline float32x4_t sigmoid(float32x4_t x) {
    if constexpr (kPrecision == Precision::kF32) {
        const float32x4_t e = exp_precise(vnegq_f32(vminq_f32(x, vdupq_n_f32(87.0f))));
        const float32x4_t y = reciprocal<Precision::kF32>(vaddq_f32(vdupq_n_f32(1.0f), e));
        const uint32x4_t zero = vcleq_f32(x, vdupq_n_f32(kSigmoidMin<Precision::kF32>));
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), zero));
    }
    // kSigmoidMin times -log2(e) is 128 in float: there r is 0, p is 1, the sum of exponents
    // is that of infinity and the reciprocal 0.
    const float32x4_t t = vmaxq_f32(vmulq_n_f32(x, -kLog2e), vdupq_n_f32(-126.0f));
    const float32x4_t rounded = vaddq_f32(t, vdupq_n_f32(kRound));
    const float32x4_t r = vsubq_f32(t, vsubq_f32(rounded, vdupq_n_f32(kRound)));
    // 2^r with a relative error of 2^-13.3 for bf16, of 2^-18.4 for f16.
    float32x4_t p;
    if constexpr (kPrecision == Precision::kBF16) {
        p = fma(0.24221095443f, r, vdupq_n_f32(0.05500892922f));
        p = fma(0.69328290224f, p, r);
    } else {
        p = fma(0.05590642616f, r, vdupq_n_f32(0.00958285294f));
        p = fma(0.24024099112f, p, r);
        p = fma(0.69312417507f, p, r);
    }
    p = fma(1.0f, p, r);
    return reciprocal<kPrecision>(vaddq_f32(vdupq_n_f32(1.0f), scale_by_power(p, rounded)));
}

struct Silu {
    template <Precision kPrecision>
    static float32x4_t apply(float32x4_t x) {
        // Bounded before the product as well: -inf * 0 would be NaN.
        x = vmaxq_f32(x, vdupq_n_f32(kSigmoidMin<kPrecision>));
        return vmulq_f32(x, sigmoid<kPrecision>(x));
    }
};

// tanh(u) is 2 * sigmoid(2u) - 1, so this GELU is x * sigmoid(2u).
struct GeluTanh {
    template <Precision kPrecision>
    static float32x4_t apply(float32x4_t x) {
        constexpr float kLinear = 1.59576912f;  // 2 * sqrt(2 / pi)
        x = vmaxq_f32(x, vdupq_n_f32(-30.0f));
        const float32x4_t s = vmulq_f32(x, fma(kLinear, vmulq_f32(x, x), vdupq_n_f32(kLinear * 0.044715f)));
        return vmulq_f32(x, sigmoid<kPrecision>(vmaxq_f32(s, vdupq_n_f32(kSigmoidMin<kPrecision>))));
    }
};

// x * Phi(x). With z = |x| / sqrt(2) and t = 1 / (1 + 0.4 z), erfc(z) * exp(z^2) is t
// times a polynomial in t (relative error 2^-24); the same for every data type.
struct Gelu {
    template <Precision kPrecision>
    static float32x4_t apply(float32x4_t x) {
        constexpr float kMin = -13.0f;
        x = vmaxq_f32(x, vdupq_n_f32(kMin));
        const float32x4_t magnitude = vminq_f32(vabsq_f32(x), vdupq_n_f32(-kMin));
        const float32x4_t t = reciprocal<Precision::kF32>(fma(1.0f, magnitude, vdupq_n_f32(0.4f * 0.70710678f)));
        float32x4_t p = fma(-0.13441681862f, t, vdupq_n_f32(0.04005394876f));
        p = fma(0.07162684202f, p, t);
        p = fma(0.10231101513f, p, t);
        p = fma(0.06968842447f, p, t);
        p = fma(0.19775581360f, p, t);
        p = fma(0.20075070858f, p, t);
        p = fma(0.22660563886f, p, t);
        p = fma(0.22562448680f, p, t);
        const float32x4_t gauss = exp_precise(vmulq_f32(vmulq_n_f32(magnitude, -0.5f), magnitude));
        const float32x4_t upper_tail = vmulq_f32(vmulq_f32(vmulq_n_f32(p, 0.5f), t), gauss);
        const float32x4_t zero = vdupq_n_f32(0);
        float32x4_t phi = vbslq_f32(vcltq_f32(x, zero), upper_tail, vsubq_f32(vdupq_n_f32(1.0f), upper_tail));
        phi = vbslq_f32(vcleq_f32(x, vdupq_n_f32(kMin)), zero, phi);
        return vmulq_f32(x, phi);
    }
};

// Columns begin .. end of out = activation(gate) * up.
template <class Type, class Activation>
inline void act_and_mul_columns(typename Type::Element *out, const typename Type::Element *gate,
                                const typename Type::Element *up, int64_t begin, int64_t end) {
    for_columns(begin, end, [&](int64_t i, auto part) {
        const F32x8 g = load<Type>(gate + i, part);
        const F32x8 activated = {Activation::template apply<Type::kPrecision>(g.lo),
                                 Activation::template apply<Type::kPrecision>(g.hi)};
        store<Type>(out + i, activated * load<Type>(up + i, part), part);
    });
}

// Calls body(Type{}, Activation{}); nothing for a value that is not known.
template <class Body>
inline void with_activation(int32_t dtype, int32_t activation, Body body) {
    with_dtype(dtype, [&](auto type) {
        if (activation == VAC_ACTIVATION_SILU) body(type, Silu{});
        if (activation == VAC_ACTIVATION_GELU) body(type, Gelu{});
        if (activation == VAC_ACTIVATION_GELU_TANH) body(type, GeluTanh{});
    });
}

}  // namespace
}  // namespace vac::VAC_TIER_NS
