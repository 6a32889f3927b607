/* Norms, rotary embedding, gated activations, embedding lookup and row copies.
 *
 * All of them read and write f32, f16 or bf16 (enum vac_dtype), compute in FP32
 * and round to nearest even once, at the store. NaN stays NaN. Strides are in
 * elements; the innermost dimension is contiguous; pointers need no more than
 * 2-byte alignment. A kernel given a dtype or mode that it does not know writes
 * nothing. Buffers may not overlap unless a comment below says so.
 */
#ifndef VAC_ELEMENTWISE_H
#define VAC_ELEMENTWISE_H

#include "vac/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* out = x * rsqrt(mean(x^2) + eps) * weight, over the last dimension of
 * x [num_tokens, num_heads, hidden_size] (num_heads = 1 for a whole token's
 * norm; the heads of query or key for Qwen3's). A row is normalised by one
 * thread; rows are split over threads.
 * A row whose sum of squares overflows FP32 gives zeros, as x * rsqrt(inf). */
typedef struct vac_rms_norm_args {
    void *out;          /* [num_tokens, num_heads, hidden_size] dtype, written; may be x itself (same strides) */
    const void *x;      /* [num_tokens, num_heads, hidden_size] dtype, read */
    const void *weight; /* [hidden_size] weight_dtype, read; NULL: all ones */
    int64_t num_tokens;
    int64_t num_heads;
    int64_t hidden_size;
    int64_t x_token_stride;
    int64_t x_head_stride;
    int64_t out_token_stride;
    int64_t out_head_stride;
    float eps;
    int32_t weight_plus_one; /* nonzero: the factor is 1 + weight (Gemma) */
    int32_t dtype;           /* enum vac_dtype, of x and out */
    int32_t weight_dtype;    /* the same as dtype, or VAC_F32 */
} vac_rms_norm_args;

void vac_rms_norm(const void *args, uint32_t thread_index, uint32_t thread_count);

/* sum = x + residual in FP32; residual = sum rounded to dtype;
 * out = sum * rsqrt(mean(sum^2) + eps) * weight, from the unrounded sum. */
typedef struct vac_fused_add_rms_norm_args {
    void *out;          /* [num_tokens, hidden_size] dtype, written; may be x itself (same stride) */
    const void *x;      /* [num_tokens, hidden_size] dtype, read */
    void *residual;     /* [num_tokens, hidden_size] dtype, read and written */
    const void *weight; /* [hidden_size] weight_dtype, read; NULL: all ones */
    int64_t num_tokens;
    int64_t hidden_size;
    int64_t x_token_stride;
    int64_t residual_token_stride;
    int64_t out_token_stride;
    float eps;
    int32_t weight_plus_one; /* nonzero: the factor is 1 + weight (Gemma) */
    int32_t dtype;           /* enum vac_dtype, of x, residual and out */
    int32_t weight_dtype;    /* the same as dtype, or VAC_F32 */
} vac_fused_add_rms_norm_args;

void vac_fused_add_rms_norm(const void *args, uint32_t thread_index, uint32_t thread_count);

/* Rotary position embedding (Su et al., RoFormer), in place. With c and s the
 * two halves of the position's row in cos_sin_cache, a pair (a, b) becomes
 * (a*c - b*s, b*c + a*s). Pair i of a head is (i, i + rot_dim / 2) in NeoX
 * style, (2i, 2i + 1) in GPT-J style. Elements from rot_dim on are left alone,
 * and so are tokens whose position is outside [0, max_position).
 * Split over tokens x heads. */
typedef struct vac_rotary_args {
    void *query;               /* [num_tokens, num_heads, head_size] dtype, read and written */
    void *key;                 /* [num_tokens, num_kv_heads, head_size] dtype, read and written; NULL: none */
    const int64_t *positions;  /* [num_tokens], read */
    const void *cos_sin_cache; /* [max_position, rot_dim] cache_dtype, contiguous, read */
    int64_t num_tokens;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t rot_dim; /* even, at most head_size */
    int64_t max_position;
    int64_t query_token_stride;
    int64_t query_head_stride;
    int64_t key_token_stride;
    int64_t key_head_stride;
    int32_t is_neox_style; /* zero: GPT-J style */
    int32_t dtype;         /* enum vac_dtype, of query and key */
    int32_t cache_dtype;   /* the same as dtype, or VAC_F32 */
} vac_rotary_args;

void vac_rotary(const void *args, uint32_t thread_index, uint32_t thread_count);

enum vac_activation {
    VAC_ACTIVATION_SILU = 0,     /* x / (1 + exp(-x)) */
    VAC_ACTIVATION_GELU = 1,     /* x * (1 + erf(x / sqrt(2))) / 2 */
    VAC_ACTIVATION_GELU_TANH = 2 /* x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) / 2 */
};

/* out = activation(x[:, :d]) * x[:, d:]. The gate's relative error is below
 * 2^-13 for bf16 (a 32nd of its rounding), 2^-15 for f16 (a 16th) and a few FP32
 * roundings for f32. The activation of -inf is -0, that of +inf is +inf; an exponential that
 * FP32 cannot hold gives -0 as well (SiLU below about -87, GELU below about -13,
 * where the exact value is smaller than 2^-119).
 * Split over tokens and, so that one token keeps all threads busy, columns. */
typedef struct vac_silu_and_mul_args {
    void *out;     /* [num_tokens, d] dtype, written; may be x itself (same token stride) */
    const void *x; /* [num_tokens, 2 * d] dtype, read */
    int64_t num_tokens;
    int64_t d;
    int64_t x_token_stride;
    int64_t out_token_stride;
    int32_t activation; /* enum vac_activation */
    int32_t dtype;      /* enum vac_dtype, of x and out */
} vac_silu_and_mul_args;

void vac_silu_and_mul(const void *args, uint32_t thread_index, uint32_t thread_count);

/* out[i] = table[ids[i] - vocab_start]; ids outside [vocab_start, vocab_end),
 * which another rank holds, give rows of zeros. Split over tokens and columns. */
typedef struct vac_embedding_args {
    void *out;         /* [num_tokens, hidden_size] dtype, written */
    const void *ids;   /* [num_tokens] int64_t or int32_t, read */
    const void *table; /* [vocab_end - vocab_start, hidden_size] dtype, read */
    int64_t num_tokens;
    int64_t hidden_size;
    int64_t vocab_start;
    int64_t vocab_end;
    int64_t table_row_stride;
    int64_t out_token_stride;
    int32_t ids_are_int64; /* zero: int32_t */
    int32_t dtype;         /* enum vac_dtype */
} vac_embedding_args;

void vac_embedding(const void *args, uint32_t thread_index, uint32_t thread_count);

/* out = a + b, [num_rows, num_columns]. Split over rows and columns. */
typedef struct vac_add_args {
    void *out;     /* dtype, written; may be a or b itself (same stride) */
    const void *a; /* dtype, read */
    const void *b; /* dtype, read */
    int64_t num_rows;
    int64_t num_columns;
    int64_t out_row_stride;
    int64_t a_row_stride;
    int64_t b_row_stride;
    int32_t dtype; /* enum vac_dtype */
} vac_add_args;

void vac_add(const void *args, uint32_t thread_index, uint32_t thread_count);

/* out[i] = x[index[i]], such as the rows whose logits are wanted; an index
 * outside [0, num_rows) gives a row of zeros. Split over rows and columns. */
typedef struct vac_copy_rows_args {
    void *out;            /* [num_indices, num_columns] dtype, written */
    const void *x;        /* [num_rows, num_columns] dtype, read */
    const int64_t *index; /* [num_indices], read */
    int64_t num_indices;
    int64_t num_rows;
    int64_t num_columns;
    int64_t x_row_stride;
    int64_t out_row_stride;
    int32_t dtype; /* enum vac_dtype */
} vac_copy_rows_args;

void vac_copy_rows(const void *args, uint32_t thread_index, uint32_t thread_count);

#ifdef __cplusplus
}
#endif
#endif
