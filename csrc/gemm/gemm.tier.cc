// The linear op: each thread finds its workspace and goes to the kernels of the dtype.
#include "gemm/blocking.h"
#include "gemm/kernels.h"

namespace vac::VAC_TIER_NS {

void gemm(const void *opaque, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_gemm_args *>(opaque);
    if (args.m == 0 || args.n == 0) return;
    const size_t base = round_up(reinterpret_cast<uintptr_t>(args.workspace), kWorkspaceAlign) -
                        reinterpret_cast<uintptr_t>(args.workspace);
    char *workspace =
        static_cast<char *>(args.workspace) + base + thread_index * workspace_layout(args.m, args.n, args.k).size;
    const auto run = [&](auto kernel) { kernel(args, thread_index, thread_count, workspace); };
    if (args.dtype == VAC_F32) return run(gemm_any_f32_f32p1x8_fmla);
#if defined(__ARM_FEATURE_FP16_FML)
    if (args.dtype == VAC_F16) return run(gemm_any_f16_f16p1x8_fmlal);
#else
    if (args.dtype == VAC_F16) return run(gemm_any_f16_f16p1x8_fmla);
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    run(gemm_any_bf16_bf16p4x8_bfmmla);
#else
    run(gemm_any_bf16_bf16p1x8_fmla);
#endif
}

}  // namespace vac::VAC_TIER_NS
