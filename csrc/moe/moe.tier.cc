// Sorting rows by expert, and adding the experts' outputs up by token.
#include "vac/moe.h"

#include "common/simd.h"

namespace vac::VAC_TIER_NS {
namespace {

inline int64_t expert_of(const vac_moe_sort_args &args, size_t token, size_t choice) {
    const size_t i = token * args.topk_ids_stride + choice;
    return args.ids_are_int64 ? static_cast<const int64_t *>(args.topk_ids)[i]
                              : static_cast<const int32_t *>(args.topk_ids)[i];
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

}  // namespace vac::VAC_TIER_NS
