/* INT8 linear layers (W8A8): out[m, n] = sum_k x[m, k] * weight[n, k] (+ bias[n]) (+ residual[m, n]) with both
 * operands in 8 bits and exact 32-bit sums.
 *
 * Two objects pass between the kernels:
 *
 * Quantized rows. x[m, k] ~ scale[m] * (q[m, k] - zero_point[m]), made by vac_int8_quantize_rows, vac_rms_norm_int8 or
 * vac_silu_and_mul_int8, read by vac_int8_gemm and vac_int8_grouped_gemm. One buffer of vac_int8_rows_size(m, k) bytes,
 * aligned to 16, valid under the tier that wrote it, for the m and k that it was written with:
 *   float scale[m rounded up to 16], int32_t zero_point[m rounded up to 16], then int8_t q, pair of rows by pair
 *   (vac_int8_row_pair_stride(k) bytes apart), K rounded up to 64:
 *     tier bf16_i8mm   [K / 8][2 rows][8 k]: a 16-byte vector is an operand of SMMLA. The second row of a last pair
 *                      that has only one is unspecified;
 *     tier dotprod     [2 rows][K].
 *   What lies beyond K is unspecified: the weight's zeros stand against it.
 *
 * Packed weight. By vac_int8_gemm_rhs_pack, once; valid under the tier that packed it. Panels of 8 columns (rows of the
 * weight) one after the other, N rounded up to 8, K to 64 (64 for
 * K = 0), what is beyond N or K zero; inside a panel
 *     tier bf16_i8mm   [K / 8][8 columns][8 k]: a vector is 2 columns x 8 k;
 *     tier dotprod     [K / 4][8 columns][4 k]: a vector is 4 columns x 4 k;
 *   then per column a scale (float) and the sum of its weights (int32_t), which the zero points are corrected with.
 *
 * Quantization (enum vac_int8_mode), r(.) rounding to nearest even, of a row x:
 *   DYNAMIC_SYMMETRIC    scale = max|x| / 127, q = r(x * (127 / max|x|)), in [-127, 127], zero_point = 0;
 *   DYNAMIC_ASYMMETRIC   low = min(x, 0), high = max(x, 0), scale = high / 255 - low / 255,
 *                        zero_point = -128 - r(low / scale), in [-128, 127], q = r(x * (1 / scale)) + zero_point,
 *                        saturated to [-128, 127]: zero is exact, as in compressed-tensors;
 *   STATIC               scale and zero_point given, for all rows; q = r(x * (1 / scale)) + zero_point, saturated to
 *                        [-128, 127].
 * Maxima are those of the whole row in its own dtype. A row of zeros gives zeros and a finite scale; where a dynamic
 * row's range is below 2^-110 that is taken for it, so that nothing underflows. A row that holds a NaN, or in the
 * dynamic modes an infinity, gets the scale NaN, and with it a row of NaN in out; a static scale saturates infinities.
 *
 * Results: sum_k (q - zero_point) * weight is exact for any K up to 131,072; then FP32: (sum * scale[m]) * scale[n],
 * with the bias added in the same rounding as the last product, then the residual, rounded once to out's dtype. A row
 * of out has the same bits for any M, any team and any place in the batch.
 *
 * Strides are in elements. Pointers need the alignment of their element type only, unless said otherwise. Nothing
 * outside the given rows is read or written. Kernels check nothing; the _check functions do.
 */
#ifndef VAC_QUANT_INT8_H
#define VAC_QUANT_INT8_H

#include "vac/base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum vac_int8_mode { VAC_INT8_DYNAMIC_SYMMETRIC = 0, VAC_INT8_DYNAMIC_ASYMMETRIC = 1, VAC_INT8_STATIC = 2 };

enum vac_int8_limits {
    VAC_INT8_MAX_K = 131072,
    /* Up to so many rows vac_int8_gemm can quantize by itself (see its field quantize). */
    VAC_INT8_GEMM_QUANTIZE_ROWS = 4
};

/* Bytes of a buffer of quantized rows. Grows with m and k; the same for every tier. */
size_t vac_int8_rows_size(size_t m, size_t k);
/* Bytes from one pair of rows to the next: 2 * (k rounded up to 64), and 64 more where that is a multiple of 512, so
 * that rows do not meet in the same sets of a cache. */
size_t vac_int8_row_pair_stride(size_t k);

/* How rows are quantized. */
typedef struct vac_int8_quantization {
    int32_t mode;       /* enum vac_int8_mode */
    float scale;        /* STATIC: positive and normal, as its reciprocal; else ignored */
    int32_t zero_point; /* STATIC: in [-128, 127], 0 for symmetric; else ignored */
} vac_int8_quantization;

typedef struct vac_int8_quantize_rows_args {
    vac_int8_quantization quantization;
    int32_t dtype; /* enum vac_dtype, of x */
    size_t m;      /* 0 is no work */
    size_t k;
    const void *x; /* [m, k] dtype, row stride x_stride >= k, read */
    size_t x_stride;
    void *rows; /* vac_int8_rows_size(m, k) bytes, written */
} vac_int8_quantize_rows_args;

/* Kernel. Split over rows and, where there are fewer rows than threads, over K: then each thread that has a part of a
 * row finds the row's maximum by itself, which costs less than a second barrier. */
void vac_int8_quantize_rows(const void *args /* vac_int8_quantize_rows_args */, uint32_t thread_index,
                            uint32_t thread_count);

/* VAC_OK, or VAC_INVALID_ARGUMENT for a mode, scale, zero point, dtype, size, stride or missing pointer that is not
 * accepted. */
int vac_int8_quantize_rows_check(const vac_int8_quantize_rows_args *args);

/* Bytes of a packed weight [n, k]. The same for every tier. */
size_t vac_int8_gemm_rhs_packed_size(size_t n, size_t k);

typedef struct vac_int8_gemm_rhs_pack_args {
    size_t n;
    size_t k;          /* at most VAC_INT8_MAX_K */
    const int8_t *rhs; /* weight [n, k], row stride rhs_stride >= k, read */
    size_t rhs_stride;
    const float *scales; /* [n], or [1] with one_scale, read */
    int32_t one_scale;   /* nonzero: scales[0] is every column's */
    void *packed;        /* vac_int8_gemm_rhs_packed_size(n, k) bytes, aligned to 16 (64 for speed), all written */
} vac_int8_gemm_rhs_pack_args;

/* Kernel; split over N as vac_int8_gemm does at M = 1, so that a page is first touched by the thread that is going to
 * read it. */
void vac_int8_gemm_rhs_pack(const void *args /* vac_int8_gemm_rhs_pack_args */, uint32_t thread_index,
                            uint32_t thread_count);

int vac_int8_gemm_rhs_pack_check(const vac_int8_gemm_rhs_pack_args *args);

typedef struct vac_int8_gemm_args {
    int32_t out_dtype;  /* enum vac_dtype, of out and residual */
    int32_t bias_dtype; /* enum vac_dtype, any; ignored without bias */
    size_t m;           /* 0 is no work */
    size_t n;
    size_t k;         /* at most VAC_INT8_MAX_K; 0 gives bias + residual */
    const void *rows; /* quantized rows (m, k), read; ignored with quantize */
    /* NULL, or what the rows are to be made from: then each thread quantizes all of x for itself (quantize->rows is
     * ignored), which saves a vac_int8_quantize_rows op and its barrier. m and k as here, m at most
     * VAC_INT8_GEMM_QUANTIZE_ROWS. The results are the same. */
    const vac_int8_quantize_rows_args *quantize;
    const void *rhs;      /* packed weight (n, k), read */
    const void *bias;     /* [n] bias_dtype, or NULL */
    const void *residual; /* [m, n] out_dtype, row stride residual_stride >= n, or NULL; may be out itself */
    size_t residual_stride;
    void *out; /* [m, n] out_dtype, row stride out_stride >= n; written */
    size_t out_stride;
    void *workspace; /* vac_int8_gemm_workspace_size bytes, any alignment; written; not shared with an op that may run
                        at the same time */
} vac_int8_gemm_args;

/* Kernel. List: {vac_int8_quantize_rows, barrier after}, {vac_int8_gemm}. Split over N, and over M too from M = 17 on.
 * Up to M = 16 each byte of the packed weight is read by one thread, once from memory. */
void vac_int8_gemm(const void *args /* vac_int8_gemm_args */, uint32_t thread_index, uint32_t thread_count);

int vac_int8_gemm_check(const vac_int8_gemm_args *args);

/* Bytes of workspace for a team of at most num_threads, with or without quantize, for this m and every smaller one. */
size_t vac_int8_gemm_workspace_size(size_t m, size_t n, size_t k, uint32_t num_threads);

/* Linear layers by expert (MoE): the rows of out are sorted by expert, row i of expert e's range is
 * rows[row_index[i]] times expert e's weight. */
typedef struct vac_int8_grouped_gemm_args {
    int32_t out_dtype;  /* enum vac_dtype, of out */
    int32_t bias_dtype; /* enum vac_dtype, any; ignored without bias */
    size_t num_experts;
    size_t num_rows;      /* of out; 0 is no work */
    size_t num_rows_read; /* m that rows was quantized with */
    size_t n;
    size_t k;                    /* at most VAC_INT8_MAX_K */
    const void *rows;            /* quantized rows (num_rows_read, k), read: each token once, before the gather */
    const int32_t *row_index;    /* [num_rows], each in [0, num_rows_read); NULL: 0, 1, 2, ... */
    const int32_t *expert_start; /* [num_experts + 1], ascending: expert e has rows expert_start[e] to
                                    expert_start[e + 1] - 1; rows outside of all ranges are not written */
    const void *rhs;             /* packed weights (n, k), one per expert, rhs_expert_stride bytes apart */
    size_t rhs_expert_stride;    /* bytes, a multiple of 16, at least vac_int8_gemm_rhs_packed_size(n, k) */
    const void *bias;            /* [num_experts, n] bias_dtype, row stride bias_stride >= n, or NULL */
    size_t bias_stride;
    void *out; /* [num_rows, n] out_dtype, row stride out_stride >= n; written */
    size_t out_stride;
    void *workspace; /* vac_int8_grouped_gemm_workspace_size bytes, any alignment; written */
} vac_int8_grouped_gemm_args;

/* Kernel. The work, blocks of at most 132 rows of an expert x panels of 8 columns, is cut into equal parts whatever the
 * distribution of rows, so that all threads are busy for one token too. Results are those of vac_int8_gemm. */
void vac_int8_grouped_gemm(const void *args /* vac_int8_grouped_gemm_args */, uint32_t thread_index,
                           uint32_t thread_count);

/* Does not look at what row_index and expert_start hold. */
int vac_int8_grouped_gemm_check(const vac_int8_grouped_gemm_args *args);

/* Bytes of workspace for a team of at most num_threads, for this num_rows and every smaller one. */
size_t vac_int8_grouped_gemm_workspace_size(size_t num_rows, size_t n, size_t k, uint32_t num_threads);

/* RMSNorm and quantization in one pass over memory: the rows that vac_rms_norm (num_heads = 1), or with a residual
 * vac_fused_add_rms_norm, followed by vac_int8_quantize_rows of its out gives, bit for bit: the norm is rounded to
 * dtype before it is quantized. */
typedef struct vac_rms_norm_int8_args {
    vac_int8_quantization quantization;
    void *rows;         /* quantized rows (num_tokens, hidden_size), written */
    void *normed;       /* [num_tokens, hidden_size] dtype, the norm itself, written (for a router); NULL: not wanted;
                           may be x itself (same stride) */
    const void *x;      /* [num_tokens, hidden_size] dtype, read */
    void *residual;     /* [num_tokens, hidden_size] dtype, read, and written with x + residual; NULL: none */
    const void *weight; /* [hidden_size] weight_dtype, read; NULL: all ones */
    int64_t num_tokens;
    int64_t hidden_size;
    int64_t x_token_stride;
    int64_t residual_token_stride;
    int64_t normed_token_stride;
    float eps;
    int32_t weight_plus_one; /* nonzero: the factor is 1 + weight (Gemma) */
    int32_t dtype;           /* enum vac_dtype, of x, residual and normed */
    int32_t weight_dtype;    /* the same as dtype, or VAC_F32 */
    void *workspace;         /* vac_rms_norm_int8_workspace_size bytes, any alignment, written */
} vac_rms_norm_int8_args;

/* Kernel; split over tokens. */
void vac_rms_norm_int8(const void *args /* vac_rms_norm_int8_args */, uint32_t thread_index, uint32_t thread_count);

int vac_rms_norm_int8_check(const vac_rms_norm_int8_args *args);

/* Bytes for a team of at most num_threads. */
size_t vac_rms_norm_int8_workspace_size(size_t hidden_size, uint32_t num_threads);

/* activation(x[:, :d]) * x[:, d:], quantized: the rows that vac_silu_and_mul followed by vac_int8_quantize_rows of its
 * out gives, bit for bit. Two kernels with the same arguments, to be run one after the other by the same team:
 *   {vac_silu_and_mul_int8, barrier after}, {vac_silu_and_mul_int8_finish, barrier after}, {vac_int8_gemm}
 * The first does whole rows where there are at least as many tokens as threads. With fewer, a row is split over
 * threads: the first leaves each part and its extremes in the workspace, the second quantizes it; else that has nothing
 * to do. */
typedef struct vac_silu_and_mul_int8_args {
    vac_int8_quantization quantization;
    void *rows;    /* quantized rows (num_tokens, d), written */
    const void *x; /* [num_tokens, 2 * d] dtype, read */
    int64_t num_tokens;
    int64_t d;
    int64_t x_token_stride;
    int32_t activation; /* enum vac_activation of vac/elementwise.h */
    int32_t dtype;      /* enum vac_dtype, of x */
    void *workspace;    /* vac_silu_and_mul_int8_workspace_size bytes, any alignment, written */
} vac_silu_and_mul_int8_args;

void vac_silu_and_mul_int8(const void *args /* vac_silu_and_mul_int8_args */, uint32_t thread_index,
                           uint32_t thread_count);
void vac_silu_and_mul_int8_finish(const void *args /* vac_silu_and_mul_int8_args */, uint32_t thread_index,
                                  uint32_t thread_count);

int vac_silu_and_mul_int8_check(const vac_silu_and_mul_int8_args *args);

/* Bytes for a team of at most num_threads. */
size_t vac_silu_and_mul_int8_workspace_size(size_t d, uint32_t num_threads);

#ifdef __cplusplus
}
#endif
#endif
