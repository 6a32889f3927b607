// RMSNorm of rows, alone or fused with the residual's addition. Two passes over
// a row, both from L1: the sum of squares, then the scaled elements.
#include "vac/elementwise.h"

#include "elementwise/simd.h"

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

template <class Type, class WeightType, Factor kFactor>
void norm_rows(const vac_rms_norm_args &args, uint32_t thread_index, uint32_t thread_count) {
    using Element = typename Type::Element;
    const auto *weight = static_cast<const typename WeightType::Element *>(args.weight);
    const int64_t size = args.hidden_size;
    const Share share = share_of(args.num_tokens * args.num_heads, thread_index, thread_count);
    if (share.begin >= share.end) return;
    int64_t token = share.begin / args.num_heads, head = share.begin % args.num_heads;
    for (int64_t row = share.begin; row < share.end; ++row) {
        const Element *x =
            static_cast<const Element *>(args.x) + token * args.x_token_stride + head * args.x_head_stride;
        Element *out = static_cast<Element *>(args.out) + token * args.out_token_stride + head * args.out_head_stride;
        const float squares =
            sum_columns(size, [&](F32x8 sum, int64_t i, auto part) { return add_squares<Type>(sum, x + i, part); });
        const float32x4_t scale = scale_of(squares, size, args.eps);
        for_columns(0, size, [&](int64_t i, auto part) {
            scale_columns<Type, WeightType, kFactor>(out + i, x + i, weight, i, scale, part);
        });
        if (++head == args.num_heads) {
            head = 0;
            ++token;
        }
    }
}

template <class Type, class WeightType, Factor kFactor>
void norm_rows(const vac_fused_add_rms_norm_args &args, uint32_t thread_index, uint32_t thread_count) {
    using Element = typename Type::Element;
    const auto *weight = static_cast<const typename WeightType::Element *>(args.weight);
    const int64_t size = args.hidden_size;
    const Share share = share_of(args.num_tokens, thread_index, thread_count);
    for (int64_t token = share.begin; token < share.end; ++token) {
        const Element *x = static_cast<const Element *>(args.x) + token * args.x_token_stride;
        Element *residual = static_cast<Element *>(args.residual) + token * args.residual_token_stride;
        Element *out = static_cast<Element *>(args.out) + token * args.out_token_stride;
        const float squares = sum_columns(size, [&](F32x8 sum, int64_t i, auto part) {
            const F32x8 v = load<Type>(x + i, part) + load<Type>(residual + i, part);
            return multiply_add(sum, v, v);
        });
        const float32x4_t scale = scale_of(squares, size, args.eps);
        // The residual is written here, not above: the norm is of the unrounded sum.
        for_columns(0, size, [&](int64_t i, auto part) {
            const F32x8 v = load<Type>(x + i, part) + load<Type>(residual + i, part);
            store<Type>(residual + i, v, part);
            store<Type>(out + i, apply<kFactor, WeightType>(v, scale, weight, i, part), part);
        });
    }
}

template <class Type, class WeightType, class Args>
void choose_factor(const Args &args, uint32_t thread_index, uint32_t thread_count) {
    if (args.weight == nullptr)
        norm_rows<Type, Type, Factor::kOne>(args, thread_index, thread_count);
    else if (args.weight_plus_one)
        norm_rows<Type, WeightType, Factor::kOnePlusWeight>(args, thread_index, thread_count);
    else
        norm_rows<Type, WeightType, Factor::kWeight>(args, thread_index, thread_count);
}

template <class Args>
void choose(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const Args *>(untyped);
    with_dtype(args.dtype, [&](auto type) {
        using Type = decltype(type);
        if (args.weight == nullptr || args.weight_dtype == args.dtype)
            choose_factor<Type, Type>(args, thread_index, thread_count);
        else if (args.weight_dtype == VAC_F32)
            choose_factor<Type, F32>(args, thread_index, thread_count);
    });
}

}  // namespace

void rms_norm(const void *args, uint32_t thread_index, uint32_t thread_count) {
    choose<vac_rms_norm_args>(args, thread_index, thread_count);
}

void fused_add_rms_norm(const void *args, uint32_t thread_index, uint32_t thread_count) {
    choose<vac_fused_add_rms_norm_args>(args, thread_index, thread_count);
}

}  // namespace vac::VAC_TIER_NS
