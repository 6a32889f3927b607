// RMSNorm of one row, alone or with the residual's addition: included by
// .tier.cc files only, private to each of them.
#pragma once

#include "common/simd.h"

namespace vac::VAC_TIER_NS {
namespace {

enum class Factor { kOne, kWeight, kOnePlusWeight };

// Sum over a row: eight independent chains of additions hide the latency of FMA.
template <class Accumulate>
inline float sum_columns(int64_t size, Accumulate accumulate) {
    const F32x8 zero = {vdupq_n_f32(0), vdupq_n_f32(0)};
    F32x8 sum0 = zero, sum1 = zero, sum2 = zero, sum3 = zero;
    int64_t i = 0;
    for (; i + 32 <= size; i += 32) {
        sum0 = accumulate(sum0, i, Full{});
        sum1 = accumulate(sum1, i + 8, Full{});
        sum2 = accumulate(sum2, i + 16, Full{});
        sum3 = accumulate(sum3, i + 24, Full{});
    }
    for (; i + 8 <= size; i += 8) sum0 = accumulate(sum0, i, Full{});
    if (i < size) sum1 = accumulate(sum1, i, Tail{size - i});
    const F32x8 sum = (sum0 + sum1) + (sum2 + sum3);
    return vaddvq_f32(vaddq_f32(sum.lo, sum.hi));
}

inline float32x4_t scale_of(float sum_of_squares, int64_t size, float eps) {
    return vdupq_n_f32(1.0f / __builtin_sqrtf(sum_of_squares / static_cast<float>(size) + eps));
}

template <Factor kFactor, class WeightType, class Part>
inline F32x8 apply(F32x8 v, float32x4_t scale, const typename WeightType::Element *weight, int64_t i, Part part) {
    const F32x8 normalised = v * scale;
    if constexpr (kFactor == Factor::kOne) return normalised;
    const F32x8 w = load<WeightType>(weight + i, part);
    return kFactor == Factor::kWeight ? normalised * w : multiply_add(normalised, normalised, w);
}

template <class Type, class WeightType, Factor kFactor, class Part>
inline void scale_columns(typename Type::Element *out, const typename Type::Element *x,
                          const typename WeightType::Element *weight, int64_t i, float32x4_t scale, Part part) {
    store<Type>(out, apply<kFactor, WeightType>(load<Type>(x, part), scale, weight, i, part), part);
}
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <>
inline void scale_columns<BF16, BF16, Factor::kWeight, Full>(uint16_t *out, const uint16_t *x, const uint16_t *weight,
                                                             int64_t i, float32x4_t scale, Full) {
    BF16::store_scaled_product(out, x, weight + i, scale);
}
#endif

// One row: the sum of squares, then the scaled elements. `out` may be x.
template <class Type, class WeightType, Factor kFactor>
inline void norm_row(typename Type::Element *out, const typename Type::Element *x,
                     const typename WeightType::Element *weight, int64_t size, float eps) {
    const float squares =
        sum_columns(size, [&](F32x8 sum, int64_t i, auto part) { return add_squares<Type>(sum, x + i, part); });
    const float32x4_t scale = scale_of(squares, size, eps);
    for_columns(0, size, [&](int64_t i, auto part) {
        scale_columns<Type, WeightType, kFactor>(out + i, x + i, weight, i, scale, part);
    });
}

// One row of x + residual, which becomes the residual. `out` may be x.
template <class Type, class WeightType, Factor kFactor>
inline void add_norm_row(typename Type::Element *out, const typename Type::Element *x, typename Type::Element *residual,
                         const typename WeightType::Element *weight, int64_t size, float eps) {
    const float squares = sum_columns(size, [&](F32x8 sum, int64_t i, auto part) {
        const F32x8 v = load<Type>(x + i, part) + load<Type>(residual + i, part);
        return multiply_add(sum, v, v);
    });
    const float32x4_t scale = scale_of(squares, size, eps);
    // The residual is written here, not above: the norm is of the unrounded sum.
    for_columns(0, size, [&](int64_t i, auto part) {
        const F32x8 v = load<Type>(x + i, part) + load<Type>(residual + i, part);
        store<Type>(residual + i, v, part);
        store<Type>(out + i, apply<kFactor, WeightType>(v, scale, weight, i, part), part);
    });
}

// Calls body(Type{}, WeightType{}, factor) for an argument struct's dtype, weight, weight_dtype and weight_plus_one;
// `factor` is a constant of type Factor.
template <Factor kFactor>
struct FactorConstant {
    static constexpr Factor value = kFactor;
};
template <class Args, class Body>
inline void with_norm_types(const Args &args, Body body) {
    with_dtype(args.dtype, [&](auto type) {
        const auto with_weight = [&](auto weight_type) {
            if (args.weight == nullptr)
                body(type, type, FactorConstant<Factor::kOne>{});
            else if (args.weight_plus_one)
                body(type, weight_type, FactorConstant<Factor::kOnePlusWeight>{});
            else
                body(type, weight_type, FactorConstant<Factor::kWeight>{});
        };
        if (args.weight == nullptr || args.weight_dtype == args.dtype)
            with_weight(type);
        else if (args.weight_dtype == VAC_F32)
            with_weight(F32{});
    });
}

}  // namespace
}  // namespace vac::VAC_TIER_NS
