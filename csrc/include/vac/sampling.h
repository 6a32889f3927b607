/* From logits to token ids: penalties, argmax, softmax, Gumbel sampling, min-p, top-k, top-p and logprobs.
 *
 * Logits are [num_reqs, vocab_size] rows; strides are in elements, the innermost
 * dimension is contiguous, pointers need no more than 2-byte alignment. A kernel
 * given a dtype that it does not know writes nothing.
 * argmax and Gumbel sampling are two ops each, so that one row keeps all threads
 * busy: `*_partial` (with VAC_OP_BARRIER_AFTER) leaves one entry per piece of a
 * row in the workspace, `*_merge` turns the entries into token ids. Both take the
 * same args. Neither result depends on the number of threads.
 */
#ifndef VAC_SAMPLING_H
#define VAC_SAMPLING_H

#include "vac/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Index of the largest logit of each row: of equal ones the first (+0 equals
 * -0); a NaN counts as larger than any number, so the first NaN wins. */
typedef struct vac_argmax_args {
    int64_t *out;       /* [num_reqs], written by merge */
    const void *logits; /* [num_reqs, vocab_size] dtype, read by both ops */
    void *workspace;    /* vac_argmax_workspace_size() bytes, 8-byte aligned */
    int64_t num_reqs;
    int64_t vocab_size; /* at least 1 */
    int64_t row_stride;
    int32_t dtype; /* enum vac_dtype, of logits */
} vac_argmax_args;

size_t vac_argmax_workspace_size(int64_t num_reqs, int64_t vocab_size);
void vac_argmax_partial(const void *args, uint32_t thread_index, uint32_t thread_count);
void vac_argmax_merge(const void *args, uint32_t thread_index, uint32_t thread_count);

/* probs = softmax(logits / temperature). A temperature below 1e-5 (vLLM's zero) gives 1 at the
 * argmax and 0 elsewhere. As in torch, a row with a NaN or +inf, or of nothing
 * but -inf, becomes NaN (unless greedy). Split over rows. */
typedef struct vac_softmax_rows_args {
    float *probs;             /* [num_reqs, vocab_size], written; may be logits itself (same stride) */
    const float *logits;      /* [num_reqs, vocab_size], read */
    const float *temperature; /* [num_reqs], at least 0, read; NULL: all 1 */
    int64_t num_reqs;
    int64_t vocab_size; /* at least 1 */
    int64_t logits_row_stride;
    int64_t probs_row_stride;
} vac_softmax_rows_args;

void vac_softmax_rows(const void *args, uint32_t thread_index, uint32_t thread_count);

/* Samples from softmax(logits / temperature): the argmax of
 * logits[i] / temperature + gumbel[i] (Gumbel-max), where gumbel[i] =
 * -log(-log(1 - v)) and v = (word + 1/2) / 2^32 in float. The word comes from
 * Philox4x32-10 (Salmon et al., SC'11) with the key (low, high half of seed) and
 * the counter (4 * (i / 16) + i % 4, 0, low, high half of offset): word
 * (i / 4) % 4 of the block belongs to token i. The same (seed, offset) therefore gives
 * the same token for any number of threads and requests; the caller raises a
 * request's offset by one per step. A row whose temperature is below 1e-5 is greedy, as
 * vac_argmax. Tokens of logit -inf are never chosen unless all are; NaN wins as
 * in vac_argmax, and the first +inf wins over numbers. */
typedef struct vac_gumbel_argmax_args {
    int64_t *out;             /* [num_reqs], written by merge */
    const float *logits;      /* [num_reqs, vocab_size], read by partial */
    const float *temperature; /* [num_reqs], at least 0, read; NULL: all 1 */
    const uint64_t *seed;     /* [num_reqs], read */
    const uint64_t *offset;   /* [num_reqs], read */
    void *workspace;          /* vac_gumbel_argmax_workspace_size() bytes, 8-byte aligned */
    int64_t num_reqs;
    int64_t vocab_size; /* at least 1, below 2^31 */
    int64_t row_stride;
} vac_gumbel_argmax_args;

size_t vac_gumbel_argmax_workspace_size(int64_t num_reqs, int64_t vocab_size);
void vac_gumbel_argmax_partial(const void *args, uint32_t thread_index, uint32_t thread_count);
void vac_gumbel_argmax_merge(const void *args, uint32_t thread_index, uint32_t thread_count);

/* Sets to -inf, in place, the logits that min-p, then top-k, then top-p exclude.
 * min-p keeps the logits that are at least the largest one plus log(min_p), those
 * of at least min_p times the largest one's probability (error of the logarithm: 2^-22).
 * top-k keeps the logits that are not below the k-th largest one, with all that
 * tie with it. top-p takes the softmax of what is left in ascending order
 * and masks a logit when the probabilities up to and including it sum to at most
 * 1 - p; the last one always stays. Equal logits are ordered by index, as
 * a stable sort does, so of those that tie at the boundary the first ones are
 * masked, exactly as many as the sum says. -0 equals +0. Sums are taken in
 * double from FP32 exponentials (relative error below 2^-20).
 * A row with a NaN is left as it is. In a row with +inf, whose probabilities are
 * undefined, min-p and top-p mask nothing.
 * Nothing is sorted as a whole: maxima of small blocks bound the threshold from below,
 * and only the few blocks that reach it are searched. Split over rows; threads
 * from num_workspaces on have no scratch and do nothing. */
typedef struct vac_top_k_top_p_mask_args {
    float *logits;    /* [num_reqs, vocab_size], read and written */
    const int32_t *k; /* [num_reqs], read; <= 0 or >= vocab_size: off; NULL: off for all */
    const float *p;   /* [num_reqs], read; >= 1 or NaN: off; NULL: off for all */
    void *workspace;  /* vac_top_k_top_p_mask_workspace_size() bytes, 16-byte aligned */
    int64_t num_reqs;
    int64_t vocab_size; /* below 2^31 */
    int64_t row_stride;
    int64_t num_workspaces; /* at least 1; at most what the workspace was sized for */
    const float *min_p;     /* [num_reqs], read; below 2^-126 or NaN: off; 1 or more: only the largest stay;
                             * NULL: off for all */
} vac_top_k_top_p_mask_args;

/* Bytes for num_workspaces rows at a time: the smaller of threads and requests. */
size_t vac_top_k_top_p_mask_workspace_size(int64_t vocab_size, int64_t num_workspaces);
void vac_top_k_top_p_mask(const void *args, uint32_t thread_index, uint32_t thread_count);

/* Sets to -inf, in place, the logits of tokens that are not allowed. */
typedef struct vac_fill_masked_args {
    float *logits;       /* [num_reqs, vocab_size], read and written */
    const uint8_t *mask; /* [num_reqs, vocab_size], read: not 0 where the logit becomes -inf */
    int64_t num_reqs;
    int64_t vocab_size;
    int64_t row_stride;
    int64_t mask_row_stride;
} vac_fill_masked_args;

void vac_fill_masked(const void *args, uint32_t thread_index, uint32_t thread_count);

/* Penalizes, in place, the logits of tokens that were there before. A token of the
 * prompt or the output: a positive logit is multiplied by 1 / repetition, another
 * (NaN included) by repetition. One of the output, that it holds count times: logit - frequency
 * * count - presence. Each operation is rounded by itself, in this order, so that
 * the results are vLLM's bit by bit. Token ids outside [0, vocab_size) are padding.
 * Takes time in proportion to the tokens, not to the vocabulary. Split over rows;
 * threads from num_workspaces on have no scratch and do nothing, and a row of more
 * than max_tokens tokens stays as it is. */
typedef struct vac_penalties_args {
    float *logits;               /* [num_reqs, vocab_size], read and written */
    const float *repetition;     /* [num_reqs], above 0, read; 1: off */
    const float *frequency;      /* [num_reqs], read; 0: off */
    const float *presence;       /* [num_reqs], read; 0: off */
    const int64_t *prompt;       /* [num_reqs, num_prompt] token ids, rows prompt_stride apart, read */
    const int32_t *output;       /* token ids of all requests, one behind another, read */
    const int64_t *output_start; /* [num_reqs + 1], read: request i has output[start[i]] .. output[start[i + 1] - 1] */
    void *workspace;             /* vac_penalties_workspace_size() bytes, 16-byte aligned */
    int64_t num_reqs;
    int64_t vocab_size; /* below 2^31 */
    int64_t row_stride;
    int64_t num_prompt;
    int64_t prompt_stride;
    int64_t max_tokens;     /* num_prompt + the longest output; at most what the workspace was sized for */
    int64_t num_workspaces; /* at least 1; at most what the workspace was sized for */
} vac_penalties_args;

/* Bytes for num_workspaces requests at a time, of max_tokens tokens each: the smaller of threads and requests. */
size_t vac_penalties_workspace_size(int64_t max_tokens, int64_t num_workspaces);
void vac_penalties(const void *args, uint32_t thread_index, uint32_t thread_count);

/* out = log(softmax(logits)) in FP32 (error: a few units in the last place of the largest difference between
 * logits). As in torch, a row with a NaN or +inf, or of nothing but -inf, becomes NaN. Split over rows. */
typedef struct vac_log_softmax_rows_args {
    float *out;         /* [num_reqs, vocab_size], written */
    const void *logits; /* [num_reqs, vocab_size] dtype, read */
    int64_t num_reqs;
    int64_t vocab_size; /* at least 1 */
    int64_t logits_row_stride;
    int64_t out_row_stride;
    int32_t dtype; /* enum vac_dtype, of logits */
} vac_log_softmax_rows_args;

void vac_log_softmax_rows(const void *args, uint32_t thread_index, uint32_t thread_count);

/* Of each row: a given token's logprob and its rank, the number of logprobs that are no smaller; and the
 * num_top largest in descending order, of equal ones those of the lower tokens first (NaN counts as larger than
 * any number). A token outside the vocabulary has the logprob NaN and rank 0. Split over
 * rows; threads from num_workspaces on have no scratch and do nothing. */
typedef struct vac_top_logprobs_args {
    int32_t *out_tokens;   /* [num_reqs, 1 + num_top], written: the given token, then the largest */
    float *out_logprobs;   /* [num_reqs, 1 + num_top], written: theirs */
    int64_t *out_ranks;    /* [num_reqs], written */
    const float *logprobs; /* [num_reqs, vocab_size], read */
    const int64_t *tokens; /* [num_reqs], read */
    void *workspace;       /* vac_top_logprobs_workspace_size() bytes, 16-byte aligned */
    int64_t num_reqs;
    int64_t vocab_size; /* below 2^31 */
    int64_t row_stride;
    int64_t num_top;        /* 0 to vocab_size */
    int64_t num_workspaces; /* at least 1; at most what the workspace was sized for */
} vac_top_logprobs_args;

/* Bytes for num_workspaces rows at a time: the smaller of threads and requests. */
size_t vac_top_logprobs_workspace_size(int64_t vocab_size, int64_t num_workspaces);
void vac_top_logprobs(const void *args, uint32_t thread_index, uint32_t thread_count);

#ifdef __cplusplus
}
#endif
#endif
