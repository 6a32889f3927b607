// The C ABI of the linear layers: kernels by tier, sizes and the check of arguments.
#include "vac/gemm.h"

#include "common/dispatch.h"
#include "gemm/blocking.h"

VAC_DEFINE_KERNEL(gemm)
VAC_DEFINE_KERNEL(gemm_grouped)
VAC_DEFINE_KERNEL(gemm_rhs_pack)
VAC_DEFINE_KERNEL(gemm_rhs_gather_rows)
VAC_DEFINE_KERNEL(gemm_rhs_unpack)

namespace {

bool known(int dtype) { return dtype == VAC_F32 || dtype == VAC_F16 || dtype == VAC_BF16; }

}  // namespace

extern "C" {

VAC_EXPORT size_t vac_gemm_rhs_packed_size(int dtype, size_t n, size_t k) {
    return known(dtype) ? ceil_div(n, kPanelColumns) * panel_bytes(dtype, k) : 0;
}

VAC_EXPORT size_t vac_gemm_workspace_size(int dtype, size_t m, size_t n, size_t k, uint32_t num_threads) {
    (void)dtype;
    return num_threads * workspace_up_to(m, n, k) + kWorkspaceAlign;
}

VAC_EXPORT int vac_gemm_check(const vac_gemm_args *args) {
    const bool types = known(args->dtype) && (args->out_dtype == args->dtype || args->out_dtype == VAC_F32) &&
                       (args->bias == nullptr || args->bias_dtype == args->dtype ||
                        args->bias_dtype == args->out_dtype || args->bias_dtype == VAC_F32);
    const bool strides = args->lhs_stride >= args->k && args->out_stride >= args->n &&
                         (args->residual == nullptr || args->residual_stride >= args->n);
    const bool work = args->m != 0 && args->n != 0;
    const bool pointers = !work || (args->out != nullptr && args->workspace != nullptr &&
                                    (args->k == 0 || (args->lhs != nullptr && args->rhs != nullptr)));
    return types && strides && pointers ? VAC_OK : VAC_INVALID_ARGUMENT;
}

VAC_EXPORT int vac_gemm_grouped_check(const vac_gemm_grouped_args *args) {
    const bool groups = args->num_groups == 0 || args->group_start != nullptr;
    return groups && args->each.residual == nullptr ? vac_gemm_check(&args->each) : VAC_INVALID_ARGUMENT;
}

}  // extern "C"
