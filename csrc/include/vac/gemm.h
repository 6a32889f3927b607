/* Linear layers: out[m, n] = sum_k lhs[m, k] * weight[n, k] (+ bias[n]) (+ residual[m, n]).
 *
 * The weight, [N, K] as in torch.nn.Linear, is packed once; the packed form
 * serves every M, and single rows can be read back from it (tied embeddings),
 * so the original can be released.
 *
 * Packed layout of a weight, by the dtype and the tier in use when it was
 * packed (a weight must be used under the tier that packed it): panels of 8
 * columns (rows of the weight) one after the other, N rounded up to 8, what is
 * beyond N or K zero. Inside a panel
 *   bf16, tier bf16_i8mm   [K rounded up to 4, / 4][8 columns][4 k]: a 16-byte
 *                          vector is 2 columns x 4 k, an operand of BFMMLA;
 *   bf16, tier dotprod     [K][8 columns in the order 0 4 1 5 2 6 3 7]: a shift
 *                          widens columns 0 to 3, a mask columns 4 to 7;
 *   f16                    [K][8 columns];
 *   f32                    [K][8 columns].
 *
 * Results: sums are FP32, one chain over ascending k for each element of out,
 * rounded once to out's dtype. Hence a row of out has the same bits for any M,
 * any team size and any place of the row in lhs. BF16 under bf16_i8mm uses
 * BFMMLA (which rounds to odd, flushes subnormals and adds products in pairs),
 * everything else fused multiply-add; NaN and infinities go their IEEE way.
 * Blocking after Goto and van de Geijn, "Anatomy of High-Performance Matrix
 * Multiplication" (2008).
 */
#ifndef VAC_GEMM_H
#define VAC_GEMM_H

#include "vac/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Strides are in elements. Pointers need the alignment of their element type
 * only (2 bytes for bf16 and f16); nothing outside the given rows is read. */
typedef struct vac_gemm_args {
    int32_t dtype;      /* vac_dtype of lhs and of the weight */
    int32_t out_dtype;  /* of out and residual: dtype or VAC_F32 */
    int32_t bias_dtype; /* of bias: dtype, out_dtype or VAC_F32; ignored without bias */
    size_t m;           /* rows of lhs and out; 0 is no work */
    size_t n;           /* columns of out, rows of the weight */
    size_t k;           /* 0 gives bias + residual */
    const void *lhs;    /* [m, k], row stride lhs_stride >= k */
    size_t lhs_stride;
    const void *rhs;      /* vac_gemm_rhs_pack's output for (dtype, n, k) */
    const void *bias;     /* [n], or NULL */
    const void *residual; /* [m, n], row stride residual_stride >= n, or NULL; may be out itself */
    size_t residual_stride;
    void *out; /* [m, n], row stride out_stride >= n; written */
    size_t out_stride;
    void *workspace; /* vac_gemm_workspace_size bytes, any alignment; written; not shared with an op
                        that may run at the same time */
} vac_gemm_args;

/* Kernel; the work is split over N, and over M too from M = 17 on. Up to
 * M = 16 each byte of the packed weight is read by one thread, once from memory. */
void vac_gemm(const void *args /* vac_gemm_args */, uint32_t thread_index, uint32_t thread_count);

/* VAC_OK, or VAC_INVALID_ARGUMENT for a dtype, size or stride that vac_gemm
 * does not accept. The kernel itself checks nothing. */
int vac_gemm_check(const vac_gemm_args *args);

typedef struct vac_gemm_grouped_args {
    vac_gemm_args each; /* as for one weight; m: the most rows that group_start may count; rhs and bias are group 0's;
                           residual: NULL; workspace: vac_gemm_workspace_size bytes for this m */
    size_t num_groups;
    const int32_t *group_start; /* [num_groups + 1], ascending: rows group_start[g] to group_start[g + 1] - 1 of lhs and
                                   out are group g's; read when the kernel runs */
    size_t rhs_group_stride;    /* bytes from one packed weight to the next; a multiple of 64 for speed */
    size_t bias_group_stride;   /* elements; ignored without bias */
} vac_gemm_grouped_args;

/* Kernel: vac_gemm with another weight for each group of rows, such as a mixture's experts. Rows get the bits that
 * vac_gemm gives them. Every group is split over the whole team, as vac_gemm is. */
void vac_gemm_grouped(const void *args /* vac_gemm_grouped_args */, uint32_t thread_index, uint32_t thread_count);

/* As vac_gemm_check; refuses a residual, too. */
int vac_gemm_grouped_check(const vac_gemm_grouped_args *args);

/* Bytes of workspace for a team of at most num_threads; grows with m and is
 * constant from m = 132 on, so the size for the largest batch fits all. */
size_t vac_gemm_workspace_size(int dtype, size_t m, size_t n, size_t k, uint32_t num_threads);

/* Bytes of a packed weight; 0 for an unknown dtype. The same for every tier. */
size_t vac_gemm_rhs_packed_size(int dtype, size_t n, size_t k);

typedef struct vac_gemm_rhs_pack_args {
    int32_t dtype;
    size_t n;
    size_t k;
    const void *rhs; /* weight [n, k], row stride rhs_stride >= k, read once */
    size_t rhs_stride;
    void *packed; /* vac_gemm_rhs_packed_size bytes, all written; align to 64 bytes for speed */
} vac_gemm_rhs_pack_args;

/* Kernel; split over N as vac_gemm does at M = 1, so that a page is first
 * touched by the thread that is going to read it. */
void vac_gemm_rhs_pack(const void *args /* vac_gemm_rhs_pack_args */, uint32_t thread_index, uint32_t thread_count);

typedef struct vac_gemm_rhs_gather_rows_args {
    int32_t dtype;
    int32_t id_bytes; /* of an id: 4 (int32_t) or 8 (int64_t) */
    size_t n;
    size_t k;
    const void *packed; /* vac_gemm_rhs_pack's output for (dtype, n, k) */
    const void *ids;    /* [num_rows]; ids outside [first_id, first_id + n) give a row of zeros */
    int64_t first_id;   /* that of weight's first row: another rank may hold those before */
    size_t num_rows;
    void *out; /* [num_rows, k] of dtype, row stride out_stride >= k; written */
    size_t out_stride;
} vac_gemm_rhs_gather_rows_args;

/* Kernel: out[i, :] = weight[ids[i] - first_id, :], bit for bit. */
void vac_gemm_rhs_gather_rows(const void *args /* vac_gemm_rhs_gather_rows_args */, uint32_t thread_index,
                              uint32_t thread_count);

/* Kernel: out = weight; ids, first_id, id_bytes and num_rows are ignored. */
void vac_gemm_rhs_unpack(const void *args /* vac_gemm_rhs_gather_rows_args */, uint32_t thread_index,
                         uint32_t thread_count);

#ifdef __cplusplus
}
#endif
#endif
