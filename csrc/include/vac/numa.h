/* Collective operations of ranks that are processes on one machine, over a
 * shared memory segment. Each rank writes its own pages only and reads those of
 * the others; nothing is allocated, and no thread or process is started.
 *
 * A segment lives for one group of ranks: one rank makes and maps it (zeroed,
 * MAP_SHARED) and calls vac_segment_create(); all ranks map it and call
 * vac_segment_join(), which touches the rank's own pages first, so that they come
 * from its NUMA node. Only when all have joined may the first collective run.
 *
 * The kernels below are collective: every rank of the group runs the same ones
 * in the same order with the same sizes. They belong into vac_execute() with
 * VAC_OP_BARRIER_AFTER (the region's end will do): teams of different ranks may
 * have different sizes, and all threads of a team share its part of the work.
 * Results are the same bits on all ranks, whatever the teams.
 *
 * Waiting for a peer spins for some microseconds and then sleeps in a futex, so
 * that idle ranks, and more ranks than cores, do not burn cores.
 *
 * When a rank is lost (vac_segment_abort(), or a wait longer than timeout_ms),
 * every kernel of every rank returns within about 50 ms, its output undefined,
 * and so does every later one: ask vac_segment_state() after vac_execute().
 */
#ifndef VAC_NUMA_H
#define VAC_NUMA_H

#include "vac/base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum vac_numa_limits { VAC_MAX_RANKS = 16 };

/* Why a segment is of no use any more. */
enum vac_loss {
    VAC_LOSS_NONE = 0,
    VAC_LOSS_DIED = 1,   /* a rank's process has ended */
    VAC_LOSS_TIMEOUT = 2 /* a rank did not arrive within another one's timeout_ms */
};

/* A rank's view of its group; the caller's memory, unchanged while kernels run. */
typedef struct vac_communicator {
    void *segment;       /* as this process has it mapped, page-aligned */
    uint32_t rank;       /* from 0 */
    uint32_t timeout_ms; /* longest wait for a peer; 0: no limit */
} vac_communicator;

/* Bytes of a segment; messages larger than slot_bytes pass in pieces. 0 for an invalid
 * world size (1 to VAC_MAX_RANKS) or slot (1 byte to 1 GiB). */
size_t vac_segment_size(uint32_t world_size, size_t slot_bytes);
/* Writes the head of a zeroed segment of vac_segment_size() bytes; once, before any rank joins. */
int vac_segment_create(void *segment, uint32_t world_size, size_t slot_bytes);
/* Zeroes the rank's own pages from the calling thread. VAC_INVALID_ARGUMENT: not a segment, or no such rank. */
int vac_segment_join(const vac_communicator *communicator);
/* Says that a rank is lost, for any process that has mapped the segment; the first call counts. */
void vac_segment_abort(void *segment, uint32_t loss, uint32_t rank);
/* enum vac_loss, plus 256 times the rank that is lost; 0 while all is well. */
uint32_t vac_segment_state(const void *segment);

enum vac_all_reduce_phases {
    VAC_PHASES_AUTO = 0,
    VAC_PHASES_ONE = 1, /* every rank reads all of every other: one wait */
    VAC_PHASES_TWO = 2  /* reduce-scatter and all-gather: 2/world_size of the bytes, two waits */
};

/* out = sum over ranks of in. Added in FP32 in the order of ranks, rounded once:
 * the same bits on every rank, with one phase or two. In two phases a rank sums
 * its slice of the others' slots and then reads their sums, so that 2 (w-1) / w of
 * the message crosses to each of w ranks; AUTO takes one phase where the second
 * wait would cost more than the bytes it saves. */
typedef struct vac_all_reduce_args {
    const vac_communicator *communicator;
    void *out;      /* [num_rows, row_size] dtype, written; may be in itself */
    const void *in; /* [num_rows, row_size] dtype, read */
    int64_t num_rows;
    int64_t row_size; /* elements; rows are contiguous */
    int32_t dtype;    /* enum vac_dtype */
    int32_t phases;   /* enum vac_all_reduce_phases, the same on all ranks */
} vac_all_reduce_args;

void vac_all_reduce(const void *args, uint32_t thread_index, uint32_t thread_count);
int vac_all_reduce_check(const vac_all_reduce_args *args);

/* vac_all_reduce, and vac_fused_add_rms_norm of its result, with the same bits as the two:
 * x = sum over ranks of in, rounded to dtype; residual += x; out = norm(residual).
 * residual is the same on all ranks before, and so it is behind. Split over tokens. */
typedef struct vac_all_reduce_rms_norm_args {
    const vac_communicator *communicator;
    void *out;          /* [num_tokens, hidden_size] dtype, written; may be in itself (then contiguous) */
    const void *in;     /* [num_tokens, hidden_size] dtype, contiguous, read; a row must fit in a slot */
    void *residual;     /* [num_tokens, hidden_size] dtype, read and written */
    const void *weight; /* [hidden_size] weight_dtype, read; NULL: all ones */
    int64_t num_tokens;
    int64_t hidden_size;
    int64_t out_token_stride;
    int64_t residual_token_stride;
    float eps;
    int32_t weight_plus_one; /* nonzero: the factor is 1 + weight (Gemma) */
    int32_t dtype;           /* enum vac_dtype, of in, residual and out */
    int32_t weight_dtype;    /* the same as dtype, or VAC_F32 */
    int32_t phases;          /* enum vac_all_reduce_phases, the same on all ranks */
} vac_all_reduce_rms_norm_args;

void vac_all_reduce_rms_norm(const void *args, uint32_t thread_index, uint32_t thread_count);
int vac_all_reduce_rms_norm_check(const vac_all_reduce_rms_norm_args *args);

/* Rank r's rows go to out + r * out_rank_stride, rows out_row_stride bytes apart: with
 * row_bytes as the rank stride, ranks stand side by side in each row. vac_all_gather
 * writes out on every rank, vac_gather on root alone (out is not used elsewhere).
 * Any data type: all sizes are bytes. */
typedef struct vac_gather_args {
    const vac_communicator *communicator;
    void *out;      /* [num_rows, row_bytes] of each rank, written; must not overlap in */
    const void *in; /* [num_rows, row_bytes], read */
    int64_t num_rows;
    int64_t row_bytes;
    int64_t in_row_stride;   /* bytes */
    int64_t out_row_stride;  /* bytes */
    int64_t out_rank_stride; /* bytes */
    uint32_t root;           /* of vac_gather */
} vac_gather_args;

void vac_all_gather(const void *args, uint32_t thread_index, uint32_t thread_count);
void vac_gather(const void *args, uint32_t thread_index, uint32_t thread_count);
int vac_gather_check(const vac_gather_args *args);

/* The root's buffer is copied into everyone else's. */
typedef struct vac_broadcast_args {
    const vac_communicator *communicator;
    void *buffer; /* [num_bytes], read on root, written elsewhere */
    int64_t num_bytes;
    uint32_t root;
} vac_broadcast_args;

void vac_broadcast(const void *args, uint32_t thread_index, uint32_t thread_count);
int vac_broadcast_check(const vac_broadcast_args *args);

/* Returns when every rank has called it. */
typedef struct vac_rank_barrier_args {
    const vac_communicator *communicator;
} vac_rank_barrier_args;

void vac_rank_barrier(const void *args, uint32_t thread_index, uint32_t thread_count);

#ifdef __cplusplus
}
#endif
#endif
