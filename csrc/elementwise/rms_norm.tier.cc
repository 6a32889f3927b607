// RMSNorm of rows, alone or fused with the residual's addition. Two passes over
// a row, both from L1: the sum of squares, then the scaled elements.
#include "vac/elementwise.h"

#include "common/rms_norm.h"

namespace vac::VAC_TIER_NS {

void rms_norm(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_rms_norm_args *>(untyped);
    const Share share = share_of(args.num_tokens * args.num_heads, thread_index, thread_count);
    if (share.begin >= share.end) return;
    with_norm_types(args, [&](auto type, auto weight_type, auto factor) {
        using Type = decltype(type);
        using WeightType = decltype(weight_type);
        using Element = typename Type::Element;
        const auto *weight = static_cast<const typename WeightType::Element *>(args.weight);
        int64_t token = share.begin / args.num_heads, head = share.begin % args.num_heads;
        for (int64_t row = share.begin; row < share.end; ++row) {
            const Element *x =
                static_cast<const Element *>(args.x) + token * args.x_token_stride + head * args.x_head_stride;
            Element *out =
                static_cast<Element *>(args.out) + token * args.out_token_stride + head * args.out_head_stride;
            norm_row<Type, WeightType, factor.value>(out, x, weight, args.hidden_size, args.eps);
            if (++head == args.num_heads) {
                head = 0;
                ++token;
            }
        }
    });
}

void fused_add_rms_norm(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_fused_add_rms_norm_args *>(untyped);
    const Share share = share_of(args.num_tokens, thread_index, thread_count);
    with_norm_types(args, [&](auto type, auto weight_type, auto factor) {
        using Type = decltype(type);
        using WeightType = decltype(weight_type);
        using Element = typename Type::Element;
        const auto *weight = static_cast<const typename WeightType::Element *>(args.weight);
        for (int64_t token = share.begin; token < share.end; ++token) {
            add_norm_row<Type, WeightType, factor.value>(
                static_cast<Element *>(args.out) + token * args.out_token_stride,
                static_cast<const Element *>(args.x) + token * args.x_token_stride,
                static_cast<Element *>(args.residual) + token * args.residual_token_stride, weight, args.hidden_size,
                args.eps);
        }
    });
}

}  // namespace vac::VAC_TIER_NS
