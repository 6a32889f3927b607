// The linear op: each thread finds its workspace and goes to the kernels of the dtype.
#include "gemm/blocking.h"
#include "gemm/kernels.h"

namespace vac::VAC_TIER_NS {
namespace {

// `each` bytes of the workspace for every thread.
char *workspace_of_thread(const vac_gemm_args &args, uint32_t thread_index, size_t each) {
    const size_t base = round_up(reinterpret_cast<uintptr_t>(args.workspace), kWorkspaceAlign) -
                        reinterpret_cast<uintptr_t>(args.workspace);
    return static_cast<char *>(args.workspace) + base + thread_index * each;
}

void run(const vac_gemm_args &args, uint32_t thread_index, uint32_t thread_count, char *workspace) {
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

}  // namespace

void gemm(const void *opaque, uint32_t thread_index, uint32_t thread_count) {
    const auto &args = *static_cast<const vac_gemm_args *>(opaque);
    if (args.m == 0 || args.n == 0) return;
    const size_t each = workspace_layout(args.m, args.n, args.k).size;
    run(args, thread_index, thread_count, workspace_of_thread(args, thread_index, each));
}

void gemm_grouped(const void *opaque, uint32_t thread_index, uint32_t thread_count) {
    const auto &grouped = *static_cast<const vac_gemm_grouped_args *>(opaque);
    vac_gemm_args args = grouped.each;
    if (args.m == 0 || args.n == 0) return;
    // Threads may be at different groups: a thread's part of the workspace is the same for all.
    const size_t each = workspace_up_to(args.m, args.n, args.k);
    char *workspace = workspace_of_thread(args, thread_index, each);
    const size_t in_bytes = element_size(args.dtype), out_bytes = element_size(args.out_dtype);
    const size_t bias_bytes = element_size(args.bias_dtype) * grouped.bias_group_stride;
    for (size_t group = 0; group < grouped.num_groups; ++group) {
        const auto begin = static_cast<size_t>(grouped.group_start[group]);
        args.m = static_cast<size_t>(grouped.group_start[group + 1]) - begin;
        if (args.m == 0) continue;
        args.lhs = static_cast<const char *>(grouped.each.lhs) + begin * args.lhs_stride * in_bytes;
        args.out = static_cast<char *>(grouped.each.out) + begin * args.out_stride * out_bytes;
        args.rhs = static_cast<const char *>(grouped.each.rhs) + group * grouped.rhs_group_stride;
        if (args.bias != nullptr) args.bias = static_cast<const char *>(grouped.each.bias) + group * bias_bytes;
        run(args, thread_index, thread_count, workspace);
    }
}

}  // namespace vac::VAC_TIER_NS
