// Exports of the mixture-of-experts kernels, and the checks of their arguments.
#include "vac/moe.h"

#include "common/dispatch.h"

VAC_DEFINE_KERNEL(moe_route)
VAC_DEFINE_KERNEL(moe_sort)
VAC_DEFINE_KERNEL(moe_combine)
VAC_DEFINE_KERNEL(moe_swiglu_oai)

namespace {

bool known(int dtype) { return dtype == VAC_F32 || dtype == VAC_F16 || dtype == VAC_BF16; }

int status(bool good) { return good ? VAC_OK : VAC_INVALID_ARGUMENT; }

}  // namespace

extern "C" {

VAC_EXPORT int vac_moe_route_check(const vac_moe_route_args *args) {
    const bool top_k = args->top_k >= 1 && args->top_k <= VAC_MOE_MAX_TOP_K && args->top_k <= args->num_experts;
    const bool pointers = args->logits != nullptr && args->topk_weights != nullptr && args->topk_ids != nullptr;
    return status(known(args->dtype) && top_k && args->logits_stride >= args->num_experts &&
                  (args->num_tokens == 0 || pointers));
}

VAC_EXPORT int vac_moe_sort_check(const vac_moe_sort_args *args) {
    const bool empty = args->num_tokens == 0 || args->top_k == 0;
    const bool countable = empty || args->num_tokens <= INT32_MAX / args->top_k;
    const bool pointers =
        empty || (args->topk_ids != nullptr && args->row_index != nullptr && args->position != nullptr);
    return status(args->expert_start != nullptr && args->topk_ids_stride >= args->top_k && countable && pointers);
}

VAC_EXPORT int vac_moe_combine_check(const vac_moe_combine_args *args) {
    const bool strides = args->topk_weights_stride >= args->top_k && args->rows_stride >= args->hidden_size &&
                         args->out_stride >= args->hidden_size;
    const bool empty = args->num_tokens == 0 || args->hidden_size == 0;
    const bool read =
        args->top_k == 0 || (args->topk_weights != nullptr && args->position != nullptr && args->rows != nullptr);
    return status(known(args->dtype) && known(args->out_dtype) && strides && (empty || (args->out != nullptr && read)));
}

VAC_EXPORT int vac_moe_swiglu_oai_check(const vac_moe_swiglu_oai_args *args) {
    const bool strides = args->x_stride >= 2 * args->d && args->out_stride >= args->d;
    const bool empty = args->num_rows == 0 || args->d == 0;
    return status(known(args->dtype) && strides && args->limit > 0 &&
                  (empty || (args->x != nullptr && args->out != nullptr)));
}

}  // extern "C"
