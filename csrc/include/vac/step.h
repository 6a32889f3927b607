/* What a step of the engine begins and ends with: from the state of the
 * requests to the model's inputs, and from sampled tokens back to the state.
 *
 * Both are plain functions for one thread: the work is a few operations for a
 * token. Arrays over requests are in batch order. A request's known tokens are
 * its prompt and what was sampled so far.
 */
#ifndef VAC_STEP_H
#define VAC_STEP_H

#include "vac/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Layers whose KV caches share block numbers. */
typedef struct vac_step_group {
    const int32_t *block_table; /* [num_reqs, block_table_stride], block numbers, read */
    int64_t block_table_stride; /* elements */
    int64_t *slot_mapping;      /* [num_tokens], block * block_size + offset of each token, written */
    uint32_t block_size;        /* tokens, >= 1 */
} vac_step_group;

typedef struct vac_step_inputs_args {
    const int32_t *num_scheduled_tokens; /* [num_reqs] tokens of this step, >= 1, read; NULL: one each */
    const int32_t *num_computed_tokens;  /* [num_reqs] tokens in the cache, read */
    const int32_t *num_known_tokens;     /* [num_reqs], read */
    const int32_t *token_ids;            /* [num_reqs, token_ids_stride] known tokens, read */
    int64_t token_ids_stride;            /* elements; also the longest sequence */
    const vac_step_group *groups;        /* [num_groups] */
    uint32_t num_groups;
    uint32_t num_reqs;
    uint32_t max_tokens;      /* room in input_ids, positions and slot_mapping */
    int32_t *input_ids;       /* [num_tokens], written */
    int64_t *positions;       /* [num_tokens], position in its sequence, written */
    int32_t *query_start_loc; /* [num_reqs + 1], first token of each request, written */
    int32_t *seq_lens;        /* [num_reqs], tokens in the cache behind this step, written */
    uint8_t *incomplete;      /* [num_reqs], 1 where known tokens remain, so that nothing is to be sampled; written */
    uint32_t num_tokens;      /* out: of the step */
    uint32_t max_query_len;   /* out: most tokens of a request */
    uint32_t max_seq_len;     /* out: largest of seq_lens */
    uint32_t num_incomplete;  /* out: requests that are */
} vac_step_inputs_args;

/* Returns VAC_OK, or VAC_INVALID_ARGUMENT for a request that is scheduled without tokens or beyond
 * token_ids_stride, or more tokens than max_tokens; outputs are undefined then. */
int vac_step_inputs(vac_step_inputs_args *args);

typedef struct vac_step_append_args {
    const int64_t *sampled;    /* [num_reqs] a token each, read */
    const uint8_t *incomplete; /* [num_reqs] as above: 1 leaves the request as it is, read */
    int32_t *token_ids;        /* [num_reqs, token_ids_stride], the sampled token is written behind the known ones */
    uint8_t *is_token_id;      /* [num_reqs, token_ids_stride], 1 is written there */
    int32_t *num_known_tokens; /* [num_reqs], read and incremented */
    int64_t token_ids_stride;
    uint32_t num_reqs;
} vac_step_append_args;

/* Returns VAC_OK, or VAC_INVALID_ARGUMENT, nothing written, where a sequence has token_ids_stride tokens already. */
int vac_step_append(const vac_step_append_args *args);

#ifdef __cplusplus
}
#endif
#endif
