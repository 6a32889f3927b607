/* Gated delta nets: a short causal convolution, then a state per head that each token decays, corrects and reads.
 *
 * After Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024). For a head with key k, query q (both of unit
 * length, q divided by the root of its size), value v, decay a and step size b of a token, its state S [v_dim, k_dim]
 * becomes S = a S;  S = S + b (v - S k) k^T;  out = S q. Rows of S have nothing to do with each other: the work is
 * split over requests, heads and rows. Tokens of a request are done one after the other. All sums are FP32.
 *
 * Requests: query_start_loc[r] to query_start_loc[r + 1] - 1 are request r's tokens, slots[r] is where its state lies
 * (a request with a negative slot is left out), and without has_state[r] it begins with zeros. Strides are in elements.
 * Kernels check nothing; the _check functions do.
 */
#ifndef VAC_RECURRENT_H
#define VAC_RECURRENT_H

#include "vac/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct vac_requests {
    size_t num_requests;
    const int32_t *query_start_loc; /* [num_requests + 1], read */
    const int32_t *slots;           /* [num_requests], read */
    const uint8_t *has_state;       /* [num_requests], read */
} vac_requests;

typedef struct vac_causal_conv_args {
    vac_requests requests;
    int32_t dtype; /* enum vac_dtype, of x, out and state */
    size_t channels;
    size_t width;  /* 2 to 4 */
    const void *x; /* [tokens, channels], row stride x_stride, read */
    size_t x_stride;
    void *out; /* [tokens, channels], row stride out_stride, written; not x */
    size_t out_stride;
    const float *weight; /* [width, channels], the newest input's last, read */
    const float *bias;   /* [channels], or NULL */
    void *state; /* [slots, width - 1, channels]: the inputs before the next token, oldest first; read, written */
    size_t state_slot_stride;
    size_t state_row_stride;
} vac_causal_conv_args;

/* Kernel: out[t] = silu(bias + sum over j of weight[j] * x[t - width + 1 + j]), channel by channel. Split over requests
 * and blocks of 64 channels. */
void vac_causal_conv(const void *args /* vac_causal_conv_args */, uint32_t thread_index, uint32_t thread_count);
int vac_causal_conv_check(const vac_causal_conv_args *args);

typedef struct vac_delta_inputs_args {
    int32_t dtype; /* enum vac_dtype, of x, a and b */
    size_t num_tokens;
    size_t num_k_heads;
    size_t num_v_heads;
    size_t k_dim;  /* multiple of 8 */
    const void *x; /* [num_tokens, queries | keys | ...]: 2 x num_k_heads x k_dim, row stride x_stride, read */
    size_t x_stride;
    const void *a; /* [num_tokens, num_v_heads], row stride a_stride, read */
    size_t a_stride;
    const void *b; /* [num_tokens, num_v_heads], row stride b_stride, read */
    size_t b_stride;
    const float *rate;    /* [num_v_heads], -exp(A_log), read */
    const float *dt_bias; /* [num_v_heads], read */
    float *directions;    /* [num_tokens, num_k_heads, 2, k_dim]: query, then key; written */
    float *gates;         /* [num_tokens, num_v_heads, 2]: decay, then step size; written */
} vac_delta_inputs_args;

/* Kernel: queries and keys to unit length (x / sqrt(sum x^2 + 1e-6)), queries divided by sqrt(k_dim), decay
 * exp(rate * softplus(a + dt_bias)), step size sigmoid(b). Split over tokens. */
void vac_delta_inputs(const void *args /* vac_delta_inputs_args */, uint32_t thread_index, uint32_t thread_count);
int vac_delta_inputs_check(const vac_delta_inputs_args *args);

typedef struct vac_gated_delta_args {
    vac_requests requests;
    int32_t dtype;       /* enum vac_dtype, of value and out */
    int32_t state_dtype; /* enum vac_dtype */
    size_t num_k_heads;
    size_t num_v_heads;      /* multiple of num_k_heads: neighbours share a key */
    size_t k_dim;            /* multiple of 8, at most 256 */
    size_t v_dim;            /* multiple of 8 */
    const float *directions; /* as vac_delta_inputs wrote them, read */
    const float *gates;      /* likewise */
    const void *value;       /* [tokens, num_v_heads, v_dim], row stride value_stride, heads without gaps; read */
    size_t value_stride;
    void *out; /* [tokens, num_v_heads, v_dim], row stride out_stride, heads without gaps; written */
    size_t out_stride;
    void *state; /* [slots, num_v_heads, v_dim, k_dim], no gaps within a slot; read, written */
    size_t state_slot_stride;
} vac_gated_delta_args;

/* Kernel: the recurrence. A state that is not FP32 is kept in FP32 between the tokens of a call. */
void vac_gated_delta(const void *args /* vac_gated_delta_args */, uint32_t thread_index, uint32_t thread_count);
int vac_gated_delta_check(const vac_gated_delta_args *args);

#ifdef __cplusplus
}
#endif
#endif
