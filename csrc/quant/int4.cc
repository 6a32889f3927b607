// The C ABI of the int4 layers: kernels by tier, sizes and checks of arguments.
#include "common/dispatch.h"
#include "quant/int4_layout.h"

VAC_DEFINE_KERNEL(int4_kai)
VAC_DEFINE_KERNEL(int4_kai_lhs_pack)
VAC_DEFINE_KERNEL(int4_kai_rhs_pack)
VAC_DEFINE_KERNEL(int4_rhs_pack)
VAC_DEFINE_KERNEL(int4_rhs_unpack)
VAC_DEFINE_KERNEL(int4_w4a16)
VAC_DEFINE_KERNEL(int4_w4a8)
VAC_DEFINE_KERNEL(int4_w4a8_quantize)

namespace {

int status(bool fine) { return fine ? VAC_OK : VAC_INVALID_ARGUMENT; }

bool valid_gemm(const vac_int4_gemm_args &args) {
    const bool types = known_dtype(args.dtype) && known_dtype(args.out_dtype) && known_dtype(args.scale_dtype) &&
                       (args.bias == nullptr || known_dtype(args.bias_dtype));
    const bool shape = valid_group(args.k, args.group) && args.lhs_stride >= args.k && args.out_stride >= args.n;
    const size_t rows = args.num_experts ? args.num_rows : args.m;
    const bool work = args.m != 0 && args.n != 0 && rows != 0;
    const bool pointers = !work || (args.rhs != nullptr && args.out != nullptr && args.workspace != nullptr &&
                                    (args.k == 0 || args.lhs != nullptr));
    const size_t packed = packed_int4(args.scale_dtype, args.n, args.k, args.group, args.has_zero_points).size;
    const bool experts = args.num_experts == 0 ||
                         (args.expert_start != nullptr && (args.rhs_expert_stride >= packed || args.num_experts == 1) &&
                          (args.row_index != nullptr || args.num_rows <= args.m));
    return types && shape && pointers && experts;
}

}  // namespace

extern "C" {

VAC_EXPORT size_t vac_int4_rhs_packed_size(int scale_dtype, size_t n, size_t k, size_t group, int has_zero_points) {
    if (!known_dtype(scale_dtype) || !valid_group(k, group)) return 0;
    return packed_int4(scale_dtype, n, k, group, has_zero_points).size;
}

VAC_EXPORT int vac_int4_rhs_pack_check(const vac_int4_rhs_pack_args *args) {
    const bool format = args->format == VAC_INT4_S8 || args->format == VAC_INT4_U8 || args->format == VAC_INT4_NIBBLES;
    const size_t groups = groups_of(args->k, args->group);
    const size_t row_bytes = args->format == VAC_INT4_NIBBLES ? ceil_div(args->k, 2) : args->k;
    const bool shape = known_dtype(args->scale_dtype) && valid_group(args->k, args->group) &&
                       args->rhs_stride >= row_bytes && args->scale_stride >= groups &&
                       (args->zero_points == nullptr || args->zero_point_stride >= groups);
    const bool pointers =
        args->n == 0 || (args->packed != nullptr && args->scales != nullptr && (args->k == 0 || args->rhs != nullptr));
    return status(format && shape && pointers);
}

VAC_EXPORT size_t vac_int4_w4a8_workspace_size(size_t m, size_t n, size_t k, size_t group, size_t num_experts,
                                               uint32_t num_threads) {
    (void)n;
    const W4a8Workspace w = w4a8_workspace(m, k, group, num_experts);
    return w.lhs + num_threads * w.thread + kLine;
}

VAC_EXPORT int vac_int4_w4a8_check(const vac_int4_gemm_args *args) {
    return status(valid_gemm(*args) && (args->lhs_quantized || args->m <= VAC_INT4_SELF_QUANTIZED_ROWS) &&
                  (groups_of(args->k, args->group) > 1 || args->k <= VAC_INT4_MAX_K_PER_CHANNEL));
}

VAC_EXPORT size_t vac_int4_w4a16_workspace_size(size_t m, size_t n, size_t k, size_t group, size_t num_experts,
                                                uint32_t num_threads) {
    (void)n;
    // An expert can have more rows than lhs.
    return num_threads * w4a16_workspace(num_experts ? kBlockRows : m, k, group).thread + kLine;
}

VAC_EXPORT int vac_int4_w4a16_check(const vac_int4_gemm_args *args) { return status(valid_gemm(*args)); }

VAC_EXPORT size_t vac_int4_kai_rhs_packed_size(size_t n, size_t k, size_t group) {
    return kai_valid_shape(n, k, group) ? ceil_div(n, kKaiNr) * kai_panel_bytes(k, group) : 0;
}

VAC_EXPORT size_t vac_int4_kai_workspace_size(size_t m, size_t n, size_t k, size_t group, uint32_t num_threads) {
    (void)n, (void)group;
    const KaiWorkspace w = kai_workspace(m, k);
    return w.lhs + num_threads * w.thread + kLine;
}

VAC_EXPORT int vac_int4_kai_rhs_pack_check(const vac_int4_kai_rhs_pack_args *args) {
    const vac_kai_int4 *kai = args->kai;
    return status(kai_valid_shape(args->n, args->k, args->group) && kai != nullptr && args->rhs != nullptr &&
                  args->scales != nullptr && args->packed != nullptr &&
                  (args->group == 0 ? kai->rhs_pack_cx != nullptr : kai->rhs_pack_c32 != nullptr));
}

VAC_EXPORT int vac_int4_kai_check(const vac_int4_kai_args *args) {
    const vac_kai_int4 *kai = args->kai;
    const bool shape = kai_valid_shape(args->n, args->k, args->group) && known_dtype(args->dtype) &&
                       known_dtype(args->out_dtype) && args->lhs_stride >= args->k && args->out_stride >= args->n;
    const bool functions = kai != nullptr && kai->lhs_pack_f32 != nullptr &&
                           (args->group == 0 ? kai->matmul_cx_f32[0] != nullptr : kai->matmul_c32_f32[0] != nullptr);
    const bool pointers = args->m == 0 || (args->lhs != nullptr && args->rhs != nullptr && args->out != nullptr &&
                                           args->workspace != nullptr);
    const bool rows = args->lhs_packed || args->m <= VAC_INT4_SELF_QUANTIZED_ROWS;
    return status(shape && functions && pointers && rows);
}

}  // extern "C"
