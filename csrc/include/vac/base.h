/* What every part of libvac shares: data types, tiers, ops and the driver.
 *
 * These headers are parsed twice: by the C++ compiler and by cffi. Keep to
 * plain C declarations; constants are enums; preprocessor lines are dropped
 * before cffi sees the text.
 */
#ifndef VAC_BASE_H
#define VAC_BASE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bit patterns; arithmetic on them happens inside kernels only. */
typedef uint16_t vac_bf16;
typedef uint16_t vac_fp16;

enum vac_dtype { VAC_F32 = 0, VAC_F16 = 1, VAC_BF16 = 2 };

enum vac_status {
    VAC_OK = 0,
    VAC_INVALID_ARGUMENT = 1, /* a size, stride or flag that no kernel accepts */
    VAC_UNSUPPORTED = 2       /* a valid request that this CPU or build has no kernel for */
};

/* Instruction sets the kernels are built for, lowest first. */
enum vac_tier {
    VAC_TIER_NONE = 0,     /* older than Armv8.2 + dotprod: nothing may run */
    VAC_TIER_DOTPROD = 1,  /* Neoverse N1: LSE, FP16 arithmetic, SDOT */
    VAC_TIER_BF16_I8MM = 2 /* Neoverse V1, N2, V2 and newer: + BFMMLA, SMMLA */
};

/* Bits of vac_cpu_features(): what the kernel reports in AT_HWCAP and AT_HWCAP2. */
enum vac_feature {
    VAC_FEATURE_LSE = 1,
    VAC_FEATURE_FP16 = 2,
    VAC_FEATURE_DOTPROD = 4,
    VAC_FEATURE_FHM = 8,
    VAC_FEATURE_BF16 = 16,
    VAC_FEATURE_I8MM = 32,
    VAC_FEATURE_SVE = 64,
    VAC_FEATURE_SVE2 = 128,
    VAC_FEATURE_SME2 = 256
};

/* A kernel is a pure function of its arguments and of which thread of how
 * many it is. It allocates nothing, starts no thread and keeps no state. */
typedef void (*vac_kernel)(const void *args, uint32_t thread_index, uint32_t thread_count);

enum vac_op_flags {
    VAC_OP_BARRIER_AFTER = 1 /* later ops read what other threads wrote in this one */
};

typedef struct vac_op {
    vac_kernel kernel;
    const void *args;
    uint32_t flags; /* vac_op_flags */
} vac_op;

/* Runs the list in one parallel region of at most num_threads threads
 * (0: as many as OpenMP would use). The team may come out smaller.
 * Returns VAC_OK, or VAC_UNSUPPORTED on a CPU without the lowest tier. */
int vac_execute(const vac_op *ops, uint32_t num_ops, uint32_t num_threads);

/* Threads that vac_execute(..., 0) would use. */
uint32_t vac_max_threads(void);

uint32_t vac_cpu_features(void);
/* The highest tier that this CPU can run. */
int vac_cpu_tier(void);
/* The tier in use; set from vac_cpu_tier() when the library is loaded. */
int vac_tier(void);
/* Chooses a lower tier than the CPU's (for tests). Not while ops run.
 * Returns VAC_UNSUPPORTED for a tier that the CPU lacks. */
int vac_set_tier(int tier);
/* The package's version that the library was built from, such as "0.1.0". */
const char *vac_version(void);

#ifdef __cplusplus
}
#endif
#endif
