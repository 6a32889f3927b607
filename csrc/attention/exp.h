// e^x for softmax: magic-number rounding, a polynomial on FMA, and a shift.
//
// 2^(s * scale - M) with M an integer: r = s * scale + (magic - M) leaves the
// rounded exponent in r's low bits, s * scale - (r - (magic - M)) is the
// fraction in [-1/2, 1/2], exact because it is one FMA. FRINT and FCVT, which
// have half or a quarter of FMA's throughput, are not needed.
#pragma once

#include <arm_neon.h>

namespace vac::VAC_TIER_NS {
namespace {

// 1.5 * 2^23 plus the exponent bias: the low bits of r are 127 + n.
constexpr float kMagic = 12582912.0f + 127.0f;
constexpr float kLog2E = 1.44269504088896341f;

// A factor of the scores and its inverse.
struct Factor {
    float value, inverse;
};
constexpr Factor kNatural = {kLog2E, 1 / kLog2E};

struct ExpScale {
    float32x4_t scale;
    float32x4_t shift;  // magic - M
    float32x4_t floor;  // the score whose weight is 2^-127, that is 0
};

// max_exponent is M. The floor keeps n + 127 from wrapping below 0.
inline ExpScale exp_scale(Factor factor, float32x4_t max_exponent) {
    return {vdupq_n_f32(factor.value), vsubq_f32(vdupq_n_f32(kMagic), max_exponent),
            vmulq_n_f32(vsubq_f32(max_exponent, vdupq_n_f32(127.0f)), factor.inverse)};
}

// A minimax polynomial of 2^f for g = -f in [-1/2, 1/2].
template <int Degree>
struct Exp2;

// Relative error 2^-13.7. In factors, ((k f + b)^2 + c)(f + a): a step less than Horner's.
template <>
struct Exp2<3> {
    static constexpr float kOffset = 0.241821154f, kSquare = 0.369145726f;
    static float32x4_t polynomial(float32x4_t g, float32x4_t offset = vdupq_n_f32(kOffset),
                                  float32x4_t square = vdupq_n_f32(kSquare)) {
        const float32x4_t u = vfmsq_f32(offset, g, vdupq_n_f32(0.234886504f));
        return vmulq_f32(vfmaq_f32(square, u, u), vsubq_f32(vdupq_n_f32(2.33833916f), g));
    }
};

// Relative error 2^-18.5.
template <>
struct Exp2<4> {
    static float32x4_t polynomial(float32x4_t g) {
        float32x4_t p = vfmsq_f32(vdupq_n_f32(0.05591786096f), vdupq_n_f32(0.009570101984f), g);
        p = vfmsq_f32(vdupq_n_f32(0.2402474483f), p, g);
        p = vfmsq_f32(vdupq_n_f32(0.6931218147f), p, g);
        return vfmsq_f32(vdupq_n_f32(0.9999992614f), p, g);
    }
};

// Relative error 2^-29, below FP32's roundoff.
template <>
struct Exp2<6> {
    static float32x4_t polynomial(float32x4_t g) {
        float32x4_t p = vfmsq_f32(vdupq_n_f32(0.001339993129f), vdupq_n_f32(0.000153458121f), g);
        p = vfmsq_f32(vdupq_n_f32(0.009618488957f), p, g);
        p = vfmsq_f32(vdupq_n_f32(0.05550328777f), p, g);
        p = vfmsq_f32(vdupq_n_f32(0.2402264689f), p, g);
        p = vfmsq_f32(vdupq_n_f32(0.6931472057f), p, g);
        return vfmsq_f32(vdupq_n_f32(1.0f), p, g);
    }
};

// 2^(s * scale - M), 0 below 2^-126.
template <int Degree>
inline float32x4_t exp2_scores(float32x4_t s, const ExpScale &e) {
    s = vmaxq_f32(s, e.floor);
    const float32x4_t r = vfmaq_f32(e.shift, s, e.scale);
    const float32x4_t minus_f = vfmsq_f32(vsubq_f32(r, e.shift), s, e.scale);
    const float32x4_t power = vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(r), 23));
    return vmulq_f32(Exp2<Degree>::polynomial(minus_f), power);
}

// The same for weights that go into BFMMLA or become integers, with two differences.
//
// The operands that FMLA overwrites are in memory: read anew for each use, a
// load takes the place of a register copy, which would need a vector pipe.
//
// The exponent is added to the polynomial's bits (one MLA). What is too small
// comes out just below 2^-126; BFMMLA takes denormal inputs for 0, an integer is 0.
class WeightExp {
  public:
    WeightExp(Factor factor, float32x4_t max_exponent)
        : WeightExp(vdupq_n_f32(factor.value), vdupq_n_f32(factor.inverse), max_exponent) {}

    // With a factor of each lane and its inverse.
    WeightExp(float32x4_t factor, float32x4_t inverse, float32x4_t max_exponent)
        : scale_(factor),
          shift_(vsubq_f32(vdupq_n_f32(12582912.0f), max_exponent)),
          floor_(vmulq_f32(vsubq_f32(max_exponent, vdupq_n_f32(126.0f)), inverse)),
          shift_operand_(shift_),
          offset_operand_(vdupq_n_f32(Exp2<3>::kOffset)),
          square_operand_(vdupq_n_f32(Exp2<3>::kSquare)) {
        // Known to be a power of two, it would make a shift and an addition of the MLA.
        asm("" : "+w"(exponent_bit_));
    }

    float32x4_t operator()(float32x4_t s) const {
        s = vmaxq_f32(s, floor_);
        const float32x4_t r = vfmaq_f32(shift_operand_, s, scale_);
        const float32x4_t minus_f = vfmsq_f32(vsubq_f32(r, shift_), s, scale_);
        const float32x4_t p = Exp2<3>::polynomial(minus_f, offset_operand_, square_operand_);
        return vreinterpretq_f32_u32(vmlaq_u32(vreinterpretq_u32_f32(p), vreinterpretq_u32_f32(r), exponent_bit_));
    }

  private:
    float32x4_t scale_, shift_, floor_;
    uint32x4_t exponent_bit_ = vdupq_n_u32(1u << 23);
    volatile float32x4_t shift_operand_, offset_operand_, square_operand_;
};

}  // namespace
}  // namespace vac::VAC_TIER_NS
