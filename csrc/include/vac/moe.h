/* Mixture of experts, around the grouped products: experts chosen for each token, rows sorted by expert, and experts'
 * outputs added up by token.
 *
 * An entry is a pair (token, choice): the expert topk_ids[token, choice] takes the token's row. Strides are in
 * elements. Kernels check nothing; the _check functions do.
 */
#ifndef VAC_MOE_H
#define VAC_MOE_H

#include "vac/base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { VAC_MOE_MAX_TOP_K = 64 };

typedef struct vac_moe_route_args {
    int32_t dtype; /* enum vac_dtype, of logits */
    size_t num_tokens;
    size_t num_experts;
    size_t top_k;       /* 1 to VAC_MOE_MAX_TOP_K, and no more than num_experts */
    const void *logits; /* [num_tokens, num_experts] dtype, row stride logits_stride >= num_experts, read */
    size_t logits_stride;
    int32_t renormalize; /* zero: weights are probabilities among all experts; else among the chosen ones */
    float *topk_weights; /* [num_tokens, top_k], no gaps, written */
    int32_t *topk_ids;   /* [num_tokens, top_k], no gaps, written: all different, the likeliest first */
} vac_moe_route_args;

/* Kernel: softmax routing. The top_k largest logits of each token, of equal ones those with the lower ids, and their
 * softmax in FP32 (relative error of the exponential below 2^-22; a logit that is 87 below the largest weighs nothing).
 * A NaN among a token's logits counts as the least of them, and makes its weights NaN. Split over tokens. */
void vac_moe_route(const void *args /* vac_moe_route_args */, uint32_t thread_index, uint32_t thread_count);

/* VAC_OK, or VAC_INVALID_ARGUMENT for a missing pointer, a stride that is too small, or a top_k out of range. */
int vac_moe_route_check(const vac_moe_route_args *args);

typedef struct vac_moe_sort_args {
    const void *topk_ids;  /* [num_tokens, top_k] int32_t or int64_t, row stride topk_ids_stride >= top_k, read */
    int32_t ids_are_int64; /* zero: int32_t */
    size_t num_tokens;
    size_t top_k;
    size_t topk_ids_stride;
    size_t num_experts;
    int32_t
        *expert_start;  /* [num_experts + 1], written: rows expert_start[e] to expert_start[e + 1] - 1 are expert e's */
    int32_t *row_index; /* [num_tokens * top_k], written as far as expert_start[num_experts]: the token of each row */
    int32_t *position;  /* [num_tokens, top_k], no gaps, written: the row of each entry; -1 for an id that is outside
                           [0, num_experts), which has no row */
} vac_moe_sort_args;

/* Kernel: a counting sort, stable, so that an expert's rows are in the order of tokens. One thread does it: the work is
 * a few operations per entry. */
void vac_moe_sort(const void *args /* vac_moe_sort_args */, uint32_t thread_index, uint32_t thread_count);

/* VAC_OK, or VAC_INVALID_ARGUMENT for a missing pointer, a stride that is too small or more entries than int32_t
 * counts. */
int vac_moe_sort_check(const vac_moe_sort_args *args);

typedef struct vac_moe_combine_args {
    int32_t dtype;     /* enum vac_dtype, of rows */
    int32_t out_dtype; /* enum vac_dtype, of out */
    size_t num_tokens;
    size_t top_k;
    size_t hidden_size;
    const float *topk_weights; /* [num_tokens, top_k], row stride topk_weights_stride >= top_k, read */
    size_t topk_weights_stride;
    const int32_t *position; /* as vac_moe_sort wrote it, read */
    const void *rows;        /* [*, hidden_size] dtype, row stride rows_stride >= hidden_size, read */
    size_t rows_stride;
    void *out; /* [num_tokens, hidden_size] out_dtype, row stride out_stride >= hidden_size, written */
    size_t out_stride;
} vac_moe_combine_args;

/* Kernel: out[t] = sum over j of topk_weights[t, j] * rows[position[t, j]], in FP32 and in the order of j, rounded
 * once; entries without a row add nothing. Split over tokens and columns. */
void vac_moe_combine(const void *args /* vac_moe_combine_args */, uint32_t thread_index, uint32_t thread_count);

int vac_moe_combine_check(const vac_moe_combine_args *args);

typedef struct vac_moe_swiglu_oai_args {
    int32_t dtype; /* enum vac_dtype, of x and out */
    size_t num_rows;
    size_t d;
    const void *x; /* [num_rows, 2 d], gates before what they gate, row stride x_stride >= 2 d, read */
    size_t x_stride;
    void *out; /* [num_rows, d], row stride out_stride >= d, written; may be x itself with the same stride */
    size_t out_stride;
    float alpha;
    float limit; /* > 0 */
} vac_moe_swiglu_oai_args;

/* Kernel: gpt-oss's gated activation, with gate and up cut off at limit (up at -limit, too):
 * out = (up + 1) * gate / (1 + exp(-alpha * gate)). NaN stays NaN. Split over rows and columns. */
void vac_moe_swiglu_oai(const void *args /* vac_moe_swiglu_oai_args */, uint32_t thread_index, uint32_t thread_count);

int vac_moe_swiglu_oai_check(const vac_moe_swiglu_oai_args *args);

#ifdef __cplusplus
}
#endif
#endif
