/* Linear layers with 4-bit weights: out[m, n] = sum_k lhs[m, k] * weight[n, k] (+ bias[n]).
 *
 * weight[n, k] = scale[n, k / group] * (value[n, k] - zero_point[n, k / group]), value a 4-bit integer, one scale
 * (and zero point) for `group` consecutive k of a row, or for the whole row (group = 0, "per channel").
 *
 *   vac_int4_w4a8      activations are rounded to 8 bits, a scale per row: integer products, exact integer sums of a
 *                      group, FP32 sums over groups
 *   vac_int4_w4a16     activations stay as they are; FP32 sums
 *   vac_int4_kai       KleidiAI's W4A8 kernels, out of another library, driven by this one
 *
 * The first two share one packed weight and one struct of arguments; the third has its own packed form. A packed
 * weight must be used under the tier that packed it.
 *
 * Packed layout, N rounded up to panels of 8 columns (rows of the weight), K to 16, what is beyond is zero:
 *   [panel][K / 16][64 bytes]      a byte holds two values less 8: of one column and k in its high nibble as a signed
 *                                  number, of k + 8 in its low nibble plus 8. A 16-byte vector is, under bf16_i8mm,
 *                                  2 columns x 8 bytes (an operand of SMMLA), under dotprod 4 columns x 4 bytes (SDOT)
 *   [panel][group][8 columns]      scales, BF16 if they were given so, else FP32
 *   [panel][group][8 columns]      zero points less 8, int8, if there are any
 *
 * Activations of vac_int4_w4a8: q = round to nearest even(x * (127 / largest |x| of the row)), so symmetric, as in
 * compressed-tensors' dynamic per-token int8. A row of zeros gives the bias; one whose largest magnitude is below
 * 2^-118 counts as zeros; one with a NaN or an infinity gives NaN everywhere.
 */
#ifndef VAC_QUANT_INT4_H
#define VAC_QUANT_INT4_H

#include "vac/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How values are handed to the packer. Without zero points VAC_INT4_S8 stands for itself, the others have 8. */
enum vac_int4_format {
    VAC_INT4_S8 = 0, /* int8 [n, k], -8 .. 7 */
    VAC_INT4_U8 = 1, /* uint8 [n, k], 0 .. 15 */
    VAC_INT4_NIBBLES =
        2 /* uint8 [n, (k + 1) / 2], 0 .. 15: even k in the low nibble, odd in the high one. int32 words
             of 8 values along k, lowest first (compressed-tensors' pack-quantized), are the same bytes */
};

enum vac_int4_limits {
    VAC_INT4_MAX_GROUP = 2048,         /* larger groups (but not whole rows) are not accepted */
    VAC_INT4_MAX_K_PER_CHANNEL = 65536 /* of vac_int4_w4a8 with group = 0: sums of a whole row are int32 */
};

/* --- packed weights --------------------------------------------------------------------------------------------- */

/* Bytes of a packed weight; 0 if anything is not acceptable. group: 0, or a multiple of 32 up to
 * VAC_INT4_MAX_GROUP (the last group of a row may be shorter; group >= k is the same as 0). Always a multiple of 64,
 * so that experts packed one after the other stay aligned. The same for every tier. */
size_t vac_int4_rhs_packed_size(int scale_dtype, size_t n, size_t k, size_t group, int has_zero_points);

typedef struct vac_int4_rhs_pack_args {
    int32_t format;      /* vac_int4_format of rhs */
    int32_t scale_dtype; /* vac_dtype of scales */
    size_t n;
    size_t k;
    size_t group;
    const void *rhs;           /* values, n rows */
    size_t rhs_stride;         /* bytes from one row to the next */
    const void *scales;        /* [n, groups], groups = ceil(k / group) (1 for group = 0) */
    size_t scale_stride;       /* elements from one row of scales to the next */
    const int8_t *zero_points; /* [n, groups] in the same terms as the values, or NULL; at most 8 away from 8 (from 0
                                  with VAC_INT4_S8), so 0 .. 16: GPTQ's "stored value plus one" fits */
    size_t zero_point_stride;  /* elements */
    void *packed;              /* vac_int4_rhs_packed_size bytes, all written; align to 64 bytes for speed */
} vac_int4_rhs_pack_args;

/* Kernel; split over N as vac_int4_w4a8 splits a dense layer, so that a page is first touched by its reader. */
void vac_int4_rhs_pack(const void *args /* vac_int4_rhs_pack_args */, uint32_t thread_index, uint32_t thread_count);

int vac_int4_rhs_pack_check(const vac_int4_rhs_pack_args *args);

typedef struct vac_int4_rhs_unpack_args {
    int32_t scale_dtype; /* as it was packed */
    int32_t has_zero_points;
    size_t n;
    size_t k;
    size_t group;
    const void *packed;
    float *out; /* [n, k], row stride out_stride >= k elements; written: scale * (value - zero point) in FP32 */
    size_t out_stride;
} vac_int4_rhs_unpack_args;

/* Kernel; split over N. */
void vac_int4_rhs_unpack(const void *args /* vac_int4_rhs_unpack_args */, uint32_t thread_index, uint32_t thread_count);

/* --- W4A8 and W4A16 ---------------------------------------------------------------------------------------------- */

/* One layer (num_experts = 0), or the experts of a mixture-of-experts layer. Strides are in elements. Pointers need
 * the alignment of their element type only; nothing outside the given rows is read.
 *
 * Grouped form: rows of out are sorted by expert; row i, expert_start[e] <= i < expert_start[e + 1], is
 * lhs[row_index[i]] times the weight of expert e. */
typedef struct vac_int4_gemm_args {
    int32_t dtype;       /* vac_dtype of lhs */
    int32_t out_dtype;   /* of out: any */
    int32_t bias_dtype;  /* of bias: any; ignored without bias */
    int32_t scale_dtype; /* as the weight was packed */
    int32_t has_zero_points;
    int32_t lhs_quantized; /* vac_int4_w4a8: 1 if vac_int4_w4a8_quantize ran before on the same arguments, with a
                              barrier between; 0: every thread quantizes for itself, for at most
                              VAC_INT4_SELF_QUANTIZED_ROWS rows. vac_int4_w4a16 ignores it */
    size_t m;              /* rows of lhs; 0 is no work */
    size_t n;              /* columns of out, rows of a weight */
    size_t k;
    size_t group;
    const void *lhs; /* [m, k], row stride lhs_stride >= k */
    size_t lhs_stride;
    const void *rhs;  /* packed weight, or those of all experts, rhs_expert_stride bytes apart */
    const void *bias; /* [n], or [num_experts, n] without gaps, or NULL */
    void *out;        /* [m or num_rows, n], row stride out_stride >= n; written */
    size_t out_stride;
    void *workspace;    /* *_workspace_size bytes, any alignment; written; not shared with an op that may run at the
                           same time */
    size_t num_experts; /* 0: one layer, and what follows is ignored */
    size_t rhs_expert_stride;    /* bytes */
    size_t num_rows;             /* rows of out */
    const int32_t *row_index;    /* [num_rows], each 0 .. m - 1, or NULL for i -> i */
    const int32_t *expert_start; /* [num_experts + 1], ascending, from 0 to num_rows */
} vac_int4_gemm_args;

enum vac_int4_w4a8_limits { VAC_INT4_SELF_QUANTIZED_ROWS = 2 };

/* Kernel: quantizes lhs into the workspace, each row once; split over pairs of rows. Writes the workspace only. */
void vac_int4_w4a8_quantize(const void *args /* vac_int4_gemm_args */, uint32_t thread_index, uint32_t thread_count);

/* Kernel: reads lhs or the workspace, writes out and the workspace. Split over N (and experts), and over M too for
 * many rows. Up to M = 16 each byte of the packed weight is read from memory by one thread, once. */
void vac_int4_w4a8(const void *args /* vac_int4_gemm_args */, uint32_t thread_index, uint32_t thread_count);

/* Kernel. Many rows: BF16 lhs under bf16_i8mm by BFMMLA on the integers, scales applied to the FP32 sums of a group;
 * else the weight is dequantized to FP32. Few rows (of BF16 under bf16_i8mm up to 8; else of 16 bits up to 16, less
 * where K is beyond 10922): each activation is split into three digits of 8 bits, which integer products take as they
 * are. Its value is exact down to 2^-14 of its row's largest (FP16: 2^-11) and else off by 2^-22 of that at most, as an
 * FP32 sum is; below 2^-126 it counts as zero. There a row with a NaN or an infinity gives NaN everywhere. Needs no
 * other op before. */
void vac_int4_w4a16(const void *args /* vac_int4_gemm_args */, uint32_t thread_index, uint32_t thread_count);

/* VAC_OK, or VAC_INVALID_ARGUMENT. The kernels check nothing; row_index and expert_start are not looked into. */
int vac_int4_w4a8_check(const vac_int4_gemm_args *args);
int vac_int4_w4a16_check(const vac_int4_gemm_args *args);

/* Bytes of workspace for a team of at most num_threads; grows with m, num_rows and num_threads. About m * k bytes
 * plus some hundred KiB a thread: cut batches of many rows, to 1024 rows say, to bound it. */
size_t vac_int4_w4a8_workspace_size(size_t m, size_t n, size_t k, size_t group, size_t num_experts,
                                    uint32_t num_threads);
size_t vac_int4_w4a16_workspace_size(size_t m, size_t n, size_t k, size_t group, size_t num_experts,
                                     uint32_t num_threads);

/* --- KleidiAI ---------------------------------------------------------------------------------------------------- */

/* Functions of KleidiAI as its headers declare them (kai_*_qai8dxp_qsi4cxp, *_qsi4c32p); filled by
 * vllm_arm_cpu.native.kleidiai, which checks that they are there and fit this CPU. */
typedef void (*vac_kai_lhs_pack)(size_t m, size_t k, size_t mr, size_t kr, size_t sr, size_t m_idx_start,
                                 const void *lhs, size_t lhs_stride_bytes, void *lhs_packed);
typedef void (*vac_kai_matmul_cx)(size_t m, size_t n, size_t k, const void *lhs_packed, const void *rhs_packed,
                                  void *dst, size_t dst_stride_row, size_t dst_stride_col, float scalar_min,
                                  float scalar_max);
typedef void (*vac_kai_matmul_c32)(size_t m, size_t n, size_t k, size_t bl, const void *lhs_packed,
                                   const void *rhs_packed, float *dst, size_t dst_stride_row, size_t dst_stride_col,
                                   float scalar_min, float scalar_max);
typedef void (*vac_kai_rhs_pack_cx)(size_t num_groups, size_t n, size_t k, size_t nr, size_t kr, size_t sr,
                                    const uint8_t *rhs, const float *bias, const float *scale, void *packed,
                                    size_t extra_bytes, const void *params);
typedef void (*vac_kai_rhs_pack_c32)(size_t num_groups, size_t n, size_t k, size_t nr, size_t kr, size_t sr, size_t bl,
                                     const uint8_t *rhs, size_t rhs_stride_bytes, const float *bias, const void *scale,
                                     size_t scale_stride_bytes, void *packed, size_t extra_bytes, const void *params);

typedef struct vac_kai_int4 {
    vac_kai_lhs_pack lhs_pack_f32;
    vac_kai_lhs_pack lhs_pack_bf16; /* NULL on a CPU without BF16 */
    /* The first row of each pair is for M = 1 (dotprod), the second for M > 1 (I8MM; NULL on a CPU without it: then
     * the first serves every M). */
    vac_kai_matmul_cx matmul_cx_f32[2];
    vac_kai_matmul_cx matmul_cx_bf16[2]; /* NULL on a CPU without BF16 */
    vac_kai_matmul_c32 matmul_c32_f32[2];
    vac_kai_rhs_pack_cx rhs_pack_cx;
    vac_kai_rhs_pack_c32 rhs_pack_c32;
} vac_kai_int4;

/* Bytes of a weight packed for KleidiAI; 0 if it is not acceptable: k even per channel (group = 0), group a multiple
 * of 32 that divides k else. */
size_t vac_int4_kai_rhs_packed_size(size_t n, size_t k, size_t group);

typedef struct vac_int4_kai_rhs_pack_args {
    const vac_kai_int4 *kai;
    size_t n;
    size_t k;
    size_t group;
    const uint8_t *rhs; /* [n, k / 2] nibbles, 0 .. 15 with zero point 8, even k low (VAC_INT4_NIBBLES), no gaps */
    const void *scales; /* group = 0: float [n]; else BF16 [n, k / group]; no gaps */
    const float *bias;  /* [n], or NULL: it is part of the packed weight */
    void *packed;       /* vac_int4_kai_rhs_packed_size bytes; written */
} vac_int4_kai_rhs_pack_args;

/* Kernel; split over N as vac_int4_kai splits it. */
void vac_int4_kai_rhs_pack(const void *args /* vac_int4_kai_rhs_pack_args */, uint32_t thread_index,
                           uint32_t thread_count);

typedef struct vac_int4_kai_args {
    const vac_kai_int4 *kai;
    int32_t dtype;      /* vac_dtype of lhs: any */
    int32_t out_dtype;  /* of out: any */
    int32_t lhs_packed; /* 1 if vac_int4_kai_lhs_pack ran before, with a barrier between; 0: every thread packs the
                           lhs for itself, for at most VAC_INT4_SELF_QUANTIZED_ROWS rows */
    size_t m;
    size_t n;
    size_t k;
    size_t group;    /* 0 or as packed */
    const void *lhs; /* [m, k], row stride lhs_stride >= k elements */
    size_t lhs_stride;
    const void *rhs; /* vac_int4_kai_rhs_pack's output */
    void *out;       /* [m, n], row stride out_stride >= n elements; written */
    size_t out_stride;
    void *workspace; /* vac_int4_kai_workspace_size bytes, any alignment; written */
} vac_int4_kai_args;

/* Kernel: quantizes lhs into the workspace, each row once; split over tiles of rows. */
void vac_int4_kai_lhs_pack(const void *args /* vac_int4_kai_args */, uint32_t thread_index, uint32_t thread_count);

/* Kernel: the product. BF16 per channel is written by KleidiAI itself, every other 16-bit out is rounded from a tile
 * of FP32 in the L1 cache. Activations are quantized asymmetrically, with a zero point per row. */
void vac_int4_kai(const void *args /* vac_int4_kai_args */, uint32_t thread_index, uint32_t thread_count);

int vac_int4_kai_rhs_pack_check(const vac_int4_kai_rhs_pack_args *args);
int vac_int4_kai_check(const vac_int4_kai_args *args);

size_t vac_int4_kai_workspace_size(size_t m, size_t n, size_t k, size_t group, uint32_t num_threads);

#ifdef __cplusplus
}
#endif
#endif
