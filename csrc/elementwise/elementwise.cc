// Exports of the elementwise kernels; their code is in the .tier.cc files.
#include "vac/elementwise.h"

#include "common/dispatch.h"

VAC_DEFINE_KERNEL(rms_norm)
VAC_DEFINE_KERNEL(fused_add_rms_norm)
VAC_DEFINE_KERNEL(rotary)
VAC_DEFINE_KERNEL(silu_and_mul)
VAC_DEFINE_KERNEL(embedding)
VAC_DEFINE_KERNEL(add)
VAC_DEFINE_KERNEL(copy_rows)
