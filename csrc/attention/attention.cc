// Exports of the attention kernels, and the checks in front of them.
#include "vac/attention.h"

#include "attention/layout.h"
#include "common/dispatch.h"

VAC_DEFINE_KERNEL(attention)
VAC_DEFINE_KERNEL(exp_f32)
VAC_DEFINE_KERNEL(kv_cache_read)
VAC_DEFINE_KERNEL(kv_cache_write)
VAC_DEFINE_KERNEL(slot_mapping)

extern "C" {

VAC_EXPORT size_t vac_kv_cache_page_size(int32_t format, int32_t dtype, uint32_t head_size, uint32_t v_head_size,
                                         uint32_t block_size) {
    if (dtype != VAC_BF16 && dtype != VAC_F16 && dtype != VAC_F32) return 0;
    if ((head_size | v_head_size | block_size) % 16 != 0) return 0;
    const size_t elements = static_cast<size_t>(block_size) * (static_cast<size_t>(head_size) + v_head_size);
    switch (format) {
        case VAC_KV_SAME:
            return elements * (dtype == VAC_F32 ? 4 : 2);
        case VAC_KV_INT8:
            return elements + sizeof(float) * 2 * block_size;
        case VAC_KV_FP8_E4M3:
            return elements;
        default:
            return 0;
    }
}

VAC_EXPORT size_t vac_attention_workspace_size(uint32_t head_size, uint32_t v_head_size, uint32_t num_threads) {
    return vac::Workspace(head_size, v_head_size, num_threads).size;
}

VAC_EXPORT int vac_attention_check(const vac_attention_args *args) {
    if (args == nullptr) return VAC_INVALID_ARGUMENT;
    if (args->dtype != VAC_BF16 && args->dtype != VAC_F16 && args->dtype != VAC_F32) return VAC_UNSUPPORTED;
    if (args->num_kv_heads == 0 || args->num_heads == 0 || args->num_heads % args->num_kv_heads != 0)
        return VAC_INVALID_ARGUMENT;
    if (args->cache_format < VAC_KV_SAME || args->cache_format > VAC_KV_FP8_E4M3) return VAC_UNSUPPORTED;
    if (args->head_size == 0 || args->v_head_size == 0 || args->block_size == 0) return VAC_INVALID_ARGUMENT;
    if ((args->head_size | args->v_head_size | args->block_size) % 16 != 0) return VAC_INVALID_ARGUMENT;
    const int64_t unit = args->cache_format == VAC_KV_SAME ? 8 : 16;
    if (args->cache_block_stride % unit != 0 || args->cache_head_stride % unit != 0) return VAC_INVALID_ARGUMENT;
    return VAC_OK;
}

}  // extern "C"
