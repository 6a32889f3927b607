// The C ABI of the INT8 linears: kernels by tier, sizes and the checks of arguments.
#include "common/dispatch.h"
#include "quant/int8_layout.h"
#include "vac/elementwise.h"

VAC_DEFINE_KERNEL(int8_quantize_rows)
VAC_DEFINE_KERNEL(int8_gemm_rhs_pack)
VAC_DEFINE_KERNEL(int8_gemm)
VAC_DEFINE_KERNEL(int8_grouped_gemm)
VAC_DEFINE_KERNEL(rms_norm_int8)
VAC_DEFINE_KERNEL(silu_and_mul_int8)
VAC_DEFINE_KERNEL(silu_and_mul_int8_finish)

namespace {

bool known(int dtype) { return dtype == VAC_F32 || dtype == VAC_F16 || dtype == VAC_BF16; }

bool aligned(const void *p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

bool accepted(const vac_int8_quantization &q) {
    if (q.mode != VAC_INT8_STATIC) return q.mode == VAC_INT8_DYNAMIC_SYMMETRIC || q.mode == VAC_INT8_DYNAMIC_ASYMMETRIC;
    // Normal, and so the reciprocal: 2^126 has the smallest normal one.
    return q.scale >= 0x1p-126f && q.scale <= 0x1p126f && q.zero_point >= -128 && q.zero_point <= 127;
}

int status(bool good) { return good ? VAC_OK : VAC_INVALID_ARGUMENT; }

}  // namespace

extern "C" {

VAC_EXPORT size_t vac_int8_rows_size(size_t m, size_t k) { return rows_size(m, k); }

VAC_EXPORT size_t vac_int8_row_pair_stride(size_t k) { return row_pair_stride(k); }

VAC_EXPORT size_t vac_int8_gemm_rhs_packed_size(size_t n, size_t k) { return packed_size(n, k); }

VAC_EXPORT size_t vac_int8_gemm_workspace_size(size_t m, size_t n, size_t k, uint32_t num_threads) {
    // A smaller batch may take another path, and the size is to hold for it too.
    const size_t small = gemm_workspace(min_size(m, VAC_INT8_GEMM_QUANTIZE_ROWS), n, k).size;
    const size_t whole = gemm_workspace(m, n, k).size;
    return num_threads * (small > whole ? small : whole) + kWorkspaceAlign;
}

VAC_EXPORT size_t vac_int8_grouped_gemm_workspace_size(size_t num_rows, size_t n, size_t k, uint32_t num_threads) {
    return num_threads * grouped_gemm_workspace(num_rows, n, k).size + kWorkspaceAlign;
}

VAC_EXPORT size_t vac_rms_norm_int8_workspace_size(size_t hidden_size, uint32_t num_threads) {
    return num_threads * 2 * round_up(hidden_size * sizeof(float), kWorkspaceAlign) + kWorkspaceAlign;
}

VAC_EXPORT size_t vac_silu_and_mul_int8_workspace_size(size_t d, uint32_t num_threads) {
    return num_threads * (2 * round_up(d * sizeof(float), kWorkspaceAlign) + 64) + kWorkspaceAlign;
}

VAC_EXPORT int vac_int8_quantize_rows_check(const vac_int8_quantize_rows_args *args) {
    const bool pointers =
        args->m == 0 || (args->rows != nullptr && aligned(args->rows) && (args->k == 0 || args->x != nullptr));
    return status(accepted(args->quantization) && known(args->dtype) && args->x_stride >= args->k && pointers);
}

VAC_EXPORT int vac_int8_gemm_rhs_pack_check(const vac_int8_gemm_rhs_pack_args *args) {
    const bool pointers = args->n == 0 || (args->packed != nullptr && aligned(args->packed) &&
                                           args->scales != nullptr && (args->k == 0 || args->rhs != nullptr));
    return status(args->k <= VAC_INT8_MAX_K && args->rhs_stride >= args->k && pointers);
}

VAC_EXPORT int vac_int8_gemm_check(const vac_int8_gemm_args *args) {
    const bool types = known(args->out_dtype) && (args->bias == nullptr || known(args->bias_dtype));
    const bool sizes = args->k <= VAC_INT8_MAX_K && args->out_stride >= args->n &&
                       (args->residual == nullptr || args->residual_stride >= args->n);
    const bool work = args->m != 0 && args->n != 0;
    bool lhs = args->rows != nullptr && aligned(args->rows);
    if (args->quantize) {
        vac_int8_quantize_rows_args quantize = *args->quantize;
        // Ignored, so anything that the check accepts.
        quantize.rows = args->workspace ? reinterpret_cast<void *>(uintptr_t{16}) : nullptr;
        lhs = args->m <= VAC_INT8_GEMM_QUANTIZE_ROWS && quantize.m == args->m && quantize.k == args->k &&
              vac_int8_quantize_rows_check(&quantize) == VAC_OK;
    }
    const bool pointers = !work || (args->out != nullptr && args->workspace != nullptr && args->rhs != nullptr &&
                                    aligned(args->rhs) && lhs);
    return status(types && sizes && pointers);
}

VAC_EXPORT int vac_int8_grouped_gemm_check(const vac_int8_grouped_gemm_args *args) {
    const bool types = known(args->out_dtype) && (args->bias == nullptr || known(args->bias_dtype));
    const bool sizes = args->k <= VAC_INT8_MAX_K && args->out_stride >= args->n &&
                       (args->bias == nullptr || args->bias_stride >= args->n) &&
                       (args->row_index != nullptr || args->num_rows <= args->num_rows_read) &&
                       args->rhs_expert_stride % 16 == 0 && args->rhs_expert_stride >= packed_size(args->n, args->k);
    const bool work = args->num_rows != 0 && args->n != 0 && args->num_experts != 0;
    const bool pointers =
        !work || (args->out != nullptr && args->workspace != nullptr && args->rhs != nullptr && aligned(args->rhs) &&
                  args->rows != nullptr && aligned(args->rows) && args->expert_start != nullptr);
    return status(types && sizes && pointers);
}

VAC_EXPORT int vac_rms_norm_int8_check(const vac_rms_norm_int8_args *args) {
    const bool types = known(args->dtype) &&
                       (args->weight == nullptr || args->weight_dtype == args->dtype || args->weight_dtype == VAC_F32);
    const bool sizes = args->num_tokens >= 0 && args->hidden_size >= 0 && args->x_token_stride >= args->hidden_size &&
                       (args->residual == nullptr || args->residual_token_stride >= args->hidden_size) &&
                       (args->normed == nullptr || args->normed_token_stride >= args->hidden_size);
    const bool pointers = args->num_tokens == 0 || (args->rows != nullptr && aligned(args->rows) &&
                                                    args->x != nullptr && args->workspace != nullptr);
    return status(accepted(args->quantization) && types && sizes && pointers);
}

VAC_EXPORT int vac_silu_and_mul_int8_check(const vac_silu_and_mul_int8_args *args) {
    const bool types =
        known(args->dtype) && args->activation >= VAC_ACTIVATION_SILU && args->activation <= VAC_ACTIVATION_GELU_TANH;
    const bool sizes = args->num_tokens >= 0 && args->d >= 0 && args->x_token_stride >= 2 * args->d;
    const bool pointers = args->num_tokens == 0 || (args->rows != nullptr && aligned(args->rows) &&
                                                    args->x != nullptr && args->workspace != nullptr);
    return status(accepted(args->quantization) && types && sizes && pointers);
}

}  // extern "C"
