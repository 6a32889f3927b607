// The families of linear kernels inside one tier; `gemm` picks one of them.
#pragma once

#include "vac/gemm.h"

namespace vac::VAC_TIER_NS {

// Names: gemm_<out>_<lhs>_<packed rhs: k x columns>_<instruction>; "any" is the lhs's type or f32. `workspace` is the
// calling thread's own.
void gemm_any_f32_f32p1x8_fmla(const vac_gemm_args &args, uint32_t thread_index, uint32_t thread_count,
                               char *workspace);
#if defined(__ARM_FEATURE_FP16_FML)
void gemm_any_f16_f16p1x8_fmlal(const vac_gemm_args &args, uint32_t thread_index, uint32_t thread_count,
                                char *workspace);
#else
void gemm_any_f16_f16p1x8_fmla(const vac_gemm_args &args, uint32_t thread_index, uint32_t thread_count,
                               char *workspace);
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
void gemm_any_bf16_bf16p4x8_bfmmla(const vac_gemm_args &args, uint32_t thread_index, uint32_t thread_count,
                                   char *workspace);
#else
void gemm_any_bf16_bf16p1x8_fmla(const vac_gemm_args &args, uint32_t thread_index, uint32_t thread_count,
                                 char *workspace);
#endif

}  // namespace vac::VAC_TIER_NS
