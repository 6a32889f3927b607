// Gated activations: SiLU and both GELUs of one half of a row times the other half.
#include "vac/elementwise.h"

#include "common/activation.h"

namespace vac::VAC_TIER_NS {

void silu_and_mul(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_silu_and_mul_args *>(untyped);
    with_activation(args.dtype, args.activation, [&](auto type, auto activation) {
        using Type = decltype(type);
        using Element = typename Type::Element;
        for_row_pieces(args.num_tokens, args.d, thread_index, thread_count,
                       [&](int64_t token, int64_t begin, int64_t end) {
                           const Element *gate = static_cast<const Element *>(args.x) + token * args.x_token_stride;
                           Element *out = static_cast<Element *>(args.out) + token * args.out_token_stride;
                           act_and_mul_columns<Type, decltype(activation)>(out, gate, gate + args.d, begin, end);
                       });
    });
}

}  // namespace vac::VAC_TIER_NS
