// Sorting rows by expert, gpt-oss's activation, and adding the experts' outputs up by token.
#include "vac/moe.h"

#include "common/activation.h"
#include "common/simd.h"

namespace vac::VAC_TIER_NS {
namespace {

inline int64_t expert_of(const vac_moe_sort_args &args, size_t token, size_t choice) {
    const size_t i = token * args.topk_ids_stride + choice;
    return args.ids_are_int64 ? static_cast<const int64_t *>(args.topk_ids)[i]
                              : static_cast<const int32_t *>(args.topk_ids)[i];
}

// (up + 1) * gate * sigmoid(alpha * gate) of four columns.
template <Precision kPrecision>
inline float32x4_t swiglu_oai(float32x4_t gate, float32x4_t up, float alpha, float limit) {
    const float32x4_t most = vdupq_n_f32(limit);
    gate = vminq_f32(gate, most);
    up = vmaxq_f32(vminq_f32(up, most), vdupq_n_f32(-limit));
    // Bounded before the product as well: -inf * 0 would be NaN.
    const float32x4_t least = vdupq_n_f32(kSigmoidMin<kPrecision>);
    gate = vmaxq_f32(gate, vdupq_n_f32(kSigmoidMin<kPrecision> / alpha));
    const float32x4_t s = sigmoid<kPrecision>(vmaxq_f32(vmulq_n_f32(gate, alpha), least));
    return vmulq_f32(vaddq_f32(up, vdupq_n_f32(1.0f)), vmulq_f32(gate, s));
}

}  // namespace

void moe_sort(const void *untyped, uint32_t thread_index, uint32_t) {
    if (thread_index != 0) return;
    const auto &args = *static_cast<const vac_moe_sort_args *>(untyped);
    const auto experts = static_cast<int64_t>(args.num_experts);
    int32_t *start = args.expert_start;
    for (int64_t e = 0; e <= experts; ++e) start[e] = 0;
    // Counts, each one place further: summed up they are where the next expert begins.
    for (size_t token = 0; token < args.num_tokens; ++token)
        for (size_t j = 0; j < args.top_k; ++j) {
            const int64_t e = expert_of(args, token, j);
            if (e >= 0 && e < experts) ++start[e + 1];
        }
    for (int64_t e = 0; e < experts; ++e) start[e + 1] += start[e];
    // Each expert's beginning counts up to its end, which is the next one's beginning: all move by one place.
    for (size_t token = 0; token < args.num_tokens; ++token)
        for (size_t j = 0; j < args.top_k; ++j) {
            const int64_t e = expert_of(args, token, j);
            const bool has_row = e >= 0 && e < experts;
            const int32_t row = has_row ? start[e]++ : -1;
            if (has_row) args.row_index[row] = static_cast<int32_t>(token);
            args.position[token * args.top_k + j] = row;
        }
    for (int64_t e = experts; e > 0; --e) start[e] = start[e - 1];
    start[0] = 0;
}

void moe_combine(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_moe_combine_args *>(untyped);
    with_dtype(args.dtype, [&](auto type) {
        using Type = decltype(type);
        with_dtype(args.out_dtype, [&](auto out_type) {
            using Out = decltype(out_type);
            for_row_pieces(static_cast<int64_t>(args.num_tokens), static_cast<int64_t>(args.hidden_size), thread_index,
                           thread_count, [&](int64_t token, int64_t begin, int64_t end) {
                               const float *weights =
                                   args.topk_weights + static_cast<size_t>(token) * args.topk_weights_stride;
                               const int32_t *position = args.position + static_cast<size_t>(token) * args.top_k;
                               auto *out = static_cast<typename Out::Element *>(args.out) +
                                           static_cast<size_t>(token) * args.out_stride;
                               for_columns(begin, end, [&](int64_t i, auto part) {
                                   F32x8 sum = {vdupq_n_f32(0), vdupq_n_f32(0)};
                                   for (size_t j = 0; j < args.top_k; ++j) {
                                       if (position[j] < 0) continue;
                                       const auto *row = static_cast<const typename Type::Element *>(args.rows) +
                                                         static_cast<size_t>(position[j]) * args.rows_stride;
                                       const float32x4_t weight = vdupq_n_f32(weights[j]);
                                       sum = multiply_add(sum, load<Type>(row + i, part), F32x8{weight, weight});
                                   }
                                   store<Out>(out + i, sum, part);
                               });
                           });
        });
    });
}

void moe_swiglu_oai(const void *untyped, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_moe_swiglu_oai_args *>(untyped);
    with_dtype(args.dtype, [&](auto type) {
        using Type = decltype(type);
        using Element = typename Type::Element;
        for_row_pieces(static_cast<int64_t>(args.num_rows), static_cast<int64_t>(args.d), thread_index, thread_count,
                       [&](int64_t row, int64_t begin, int64_t end) {
                           const Element *gate =
                               static_cast<const Element *>(args.x) + static_cast<size_t>(row) * args.x_stride;
                           const Element *up = gate + args.d;
                           Element *out = static_cast<Element *>(args.out) + static_cast<size_t>(row) * args.out_stride;
                           for_columns(begin, end, [&](int64_t i, auto part) {
                               const F32x8 g = load<Type>(gate + i, part), u = load<Type>(up + i, part);
                               store<Type>(out + i,
                                           F32x8{swiglu_oai<Type::kPrecision>(g.lo, u.lo, args.alpha, args.limit),
                                                 swiglu_oai<Type::kPrecision>(g.hi, u.hi, args.alpha, args.limit)},
                                           part);
                           });
                       });
    });
}

}  // namespace vac::VAC_TIER_NS
