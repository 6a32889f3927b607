/* From logits to token ids: penalties, argmax, softmax, Gumbel sampling, min-p, top-k, top-p, logprobs and the
 * rejection sampling of speculative decoding.
 *
 * Logits are [num_reqs, vocab_size] rows; strides are in elements, the innermost
 * dimension is contiguous, pointers need no more than 2-byte alignment. A kernel
 * given a dtype that it does not know writes nothing.
 * Argmax, Gumbel sampling and what rejection sampling does with whole rows are two ops each, so that one row keeps all
 * threads busy: `*_partial` (with VAC_OP_BARRIER_AFTER) leaves one entry per piece of a
 * row in the workspace, `*_merge` turns the entries into results. Both take the
 * same args. No result depends on the number of threads.
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

/* Rejection sampling of drafted tokens (Leviathan et al., "Fast Inference from Transformers via Speculative
 * Decoding", ICML 2023): three steps in one list of five ops, each with a barrier behind it.
 *   softmax_stats_partial, softmax_stats_merge    what the target's probabilities follow from (not for greedy requests)
 *   rejection_sample                              accepts drafts, names the row of the first rejected one
 *   recovered_tokens_partial, .._merge            samples a token in its place
 * A row belongs to a drafted token; request i has the rows cu_num_draft_tokens[i - 1] (0 for the first) to
 * cu_num_draft_tokens[i] - 1, perhaps none. */

/* Of a row: softmax(row)[i] = exp(row[i] - max) / sum. */
typedef struct vac_softmax_stat {
    float max;
    float sum; /* of exp(row[i] - max); NaN if the row has a NaN or +inf, or nothing but -inf */
} vac_softmax_stat;

/* The statistics of rows, and on request their argmax. Sums are taken in FP32 over 2048 logits and in double over
 * these (relative error below 2^-19). */
typedef struct vac_softmax_stats_args {
    vac_softmax_stat *out; /* [num_rows], written by merge */
    int64_t *argmax;       /* [num_rows], written by merge as vac_argmax does; NULL: not wanted */
    const float *logits;   /* [num_rows, vocab_size], read by both ops */
    void *workspace;       /* vac_softmax_stats_workspace_size() bytes, 4-byte aligned */
    int64_t num_rows;
    int64_t vocab_size; /* at least 1 */
    int64_t row_stride;
} vac_softmax_stats_args;

size_t vac_softmax_stats_workspace_size(int64_t num_rows, int64_t vocab_size);
void vac_softmax_stats_partial(const void *args, uint32_t thread_index, uint32_t thread_count);
void vac_softmax_stats_merge(const void *args, uint32_t thread_index, uint32_t thread_count);

/* Walks through each request's drafts up to the first that is rejected, and writes the tokens that are known then:
 * the accepted drafts and, behind them, the request's bonus token if all were accepted. The rest of `out` is left
 * as it is.
 *   greedy request    a draft is accepted if it is the target's argmax, which takes the first rejected one's place
 *   random request    a draft is accepted if p / q >= uniform, where p and q are its probabilities of the target and of
 *                     the draft model (q = 1 without draft_probs); never where p is 0 or NaN, or q is not above 0
 *   synthetic_rates   whichever the request, a draft is accepted if uniform < synthetic_rates[its place in the request]
 * A random request's, or with synthetic_rates any, draft outside [0, vocab_size) is rejected: -1 is vLLM's padding.
 * A random request whose draft was rejected gets its token from recovered_token_ids, or is left for
 * vac_recovered_tokens. Looks at no more than one element of a row. Split over requests. */
typedef struct vac_rejection_sample_args {
    int32_t *out;      /* [num_reqs, drafts of a request + 1], rows out_row_stride apart, written */
    int32_t *rejected; /* [num_reqs], written: the row of a random request's rejected draft, or -1 (also
                        * for greedy requests); NULL: not wanted */
    const int32_t *cu_num_draft_tokens; /* [num_reqs], read: drafts of this request and of all before it */
    const int32_t *draft_token_ids;     /* [rows], read */
    const int32_t *bonus_token_ids;     /* [num_reqs], read */
    const int64_t *target_argmax;       /* [rows], read; NULL: greedy requests are left out, `out` included */
    const uint8_t *is_greedy;           /* [num_reqs], read: not 0 for a greedy request; NULL: all are */
    const float *target;           /* [rows, vocab_size], read: logits, or without stats probabilities; NULL: random
                                    * requests are left out, `out` included */
    const vac_softmax_stat *stats; /* [rows], read: of target; NULL: target has probabilities */
    const float *draft_probs;      /* [rows, vocab_size], read; NULL: 1 for each draft */
    const double *uniform;         /* [rows], read: in [0, 1); NULL if all are greedy, without synthetic_rates */
    const float *synthetic_rates;  /* [most drafts of a request], read; NULL: off */
    const int32_t *recovered_token_ids; /* [rows], read: tokens in the place of rejected drafts; NULL: left out */
    int64_t num_reqs;
    int64_t vocab_size; /* below 2^31 */
    int64_t out_row_stride;
    int64_t target_row_stride;
    int64_t draft_row_stride;
} vac_rejection_sample_args;

void vac_rejection_sample(const void *args, uint32_t thread_index, uint32_t thread_count);

/* For each rejected draft a token from what the target has more of than the draft model, max(p - q, 0) made a
 * distribution; without draft_probs from the target's distribution without the drafted token. Sampled as
 * vac_gumbel_argmax does from the logarithms of these weights (without draft_probs: from the logits), with offset 0.
 * Neither probabilities nor weights are stored: p <= exp(logit - max) / sum rules most tokens out by their logits, and
 * only the few groups of tokens that noise may lift above the best take exponentials and logarithms. Where no token is
 * left (p and q differ by less than their rounding, or the row has no probabilities) it is the row's argmax, which
 * the target at least allows. Without draft_probs a NaN or +inf that is not the draft's wins as in vac_gumbel_argmax.
 */
typedef struct vac_recovered_tokens_args {
    int32_t *out;                       /* as vac_rejection_sample's; merge writes the rejected drafts' entries */
    const int32_t *rejected;            /* [num_reqs], read: a row, or -1 for nothing to do */
    const int32_t *cu_num_draft_tokens; /* [num_reqs], read */
    const int32_t *draft_token_ids; /* [rows], read without draft_probs; outside the vocabulary: nothing taken out */
    const float *logits;            /* [rows, vocab_size], read */
    const vac_softmax_stat *stats;  /* [rows], read with draft_probs */
    const float *draft_probs;       /* [rows, vocab_size], read; NULL: none */
    const uint64_t *seed;           /* [num_reqs], read: fresh for each step */
    void *workspace;                /* vac_recovered_tokens_workspace_size() bytes, 8-byte aligned */
    int64_t num_reqs;
    int64_t vocab_size; /* at least 1, below 2^31 */
    int64_t out_row_stride;
    int64_t logits_row_stride;
    int64_t draft_row_stride;
} vac_recovered_tokens_args;

size_t vac_recovered_tokens_workspace_size(int64_t num_reqs, int64_t vocab_size);
void vac_recovered_tokens_partial(const void *args, uint32_t thread_index, uint32_t thread_count);
void vac_recovered_tokens_merge(const void *args, uint32_t thread_index, uint32_t thread_count);

#ifdef __cplusplus
}
#endif
#endif
