/* Attention over a paged KV cache: writing the cache, planning a step, and the
 * attention itself for prefill, chunked prefill, prefix-cached, speculative
 * and plain decode.
 *
 * One layer's cache is one tensor [num_blocks, num_kv_heads, page] of the
 * element type, where a page holds one block of one KV head in a layout of
 * ours: first K, block_size * head_size elements, then V, block_size *
 * v_head_size elements. Both consist of panels 16 wide:
 *
 *   K: panel p holds tokens 16p .. 16p+15 of the block, all dimensions
 *   V: panel p holds dimensions 16p .. 16p+15, all tokens of the block
 *
 * so that scores (query x K) and output (weights x V) run on one matrix
 * product: row-major [rows, depth] x panel [depth, 16], where the depth is the
 * head size for K and the token for V. The order inside a panel depends on
 * the tier and the element type only:
 *
 *   BF16 in tier bf16_i8mm, as BFMMLA reads it: [depth/4][8][2 of 16][4 of depth].
 *     V's pairs of dimensions are in order. K's pairs of tokens are in the
 *     order 0 2 1 3 4 6 5 7, which makes two score registers zip into one operand.
 *   everything else: [depth][16].
 *
 * A cache may also store a byte per element, whatever the type of queries and output:
 *
 *   VAC_KV_INT8: K and V of a page are int8; float scales follow, first K's [block_size], then
 *     V's [block_size], one per token. element = scale * int8, where scale = largest magnitude of
 *     the token's head / 127 and int8 = round(x * (127 / largest)), nearest even, with both
 *     quotients rounded to FP32. Where the largest is below 2^-100, all of it is 0. A NaN or
 *     infinity makes the whole token's head NaN.
 *     Panels, with G = 8 in tier bf16_i8mm (as SMMLA reads them) and 4 in dotprod (SDOT):
 *       K [head_size/G][16 tokens][G], V [block_size/G][16 dimensions][G of tokens].
 *   VAC_KV_FP8_E4M3: panels as those of dtype, of E4M3 bytes (no infinity, NaN is 0x7F and 0xFF).
 *     element = k_scale (v_scale) * E4M3; x * (1 / scale) is rounded to nearest even and
 *     saturates at 448; NaN stays NaN.
 *
 * A page takes vac_kv_cache_page_size() bytes. A cache must be read in the tier that wrote
 * it. Contents of slots that were never written, NaN and infinity included, do not reach any result.
 *
 * All strides are in elements; those of a cache with a byte per element thus are in bytes.
 * head_size, v_head_size and block_size are multiples of 16. A kernel checks nothing: vac_attention_check() does.
 */
#ifndef VAC_ATTENTION_H
#define VAC_ATTENTION_H

#include "vac/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a cache stores. */
enum vac_kv_cache_format {
    VAC_KV_SAME = 0, /* elements of dtype */
    VAC_KV_INT8 = 1,
    VAC_KV_FP8_E4M3 = 2
};

/* Bytes of one block of one KV head, a multiple of 16: block_size * (head_size + v_head_size)
 * elements, and for VAC_KV_INT8 block_size * 8 bytes of scales. 0 for an unknown format or
 * dtype, or a size that is not a multiple of 16. */
size_t vac_kv_cache_page_size(int32_t format, int32_t dtype, uint32_t head_size, uint32_t v_head_size,
                              uint32_t block_size);

/* Slots for the tokens of a batch. */
typedef struct vac_slot_mapping_args {
    const int32_t *query_start_loc; /* [num_reqs + 1], first token of each request */
    const int64_t *positions;       /* [num_tokens], position in its sequence, >= 0 */
    const int32_t *block_table;     /* [num_reqs, block_table_stride] */
    int64_t *slot_mapping;          /* out [num_tokens]; -1 from query_start_loc[num_reqs] on */
    int64_t block_table_stride;
    uint32_t num_reqs;
    uint32_t num_tokens; /* with padding; at least query_start_loc[num_reqs] */
    uint32_t block_size; /* any size >= 1 */
} vac_slot_mapping_args;

/* slot = block_table[request][position / block_size] * block_size + position % block_size.
 * Split over threads by token. */
void vac_slot_mapping(const void *args, uint32_t thread_index, uint32_t thread_count);

typedef struct vac_kv_cache_write_args {
    const void *key;             /* [num_tokens, num_kv_heads, head_size] of dtype, last dimension contiguous */
    const void *value;           /* [num_tokens, num_kv_heads, v_head_size] */
    void *kv_cache;              /* in and out: the layer's cache, 16-byte aligned */
    const int64_t *slot_mapping; /* [num_tokens], block * block_size + offset; negative: the token is skipped */
    int64_t key_token_stride;
    int64_t key_head_stride;
    int64_t value_token_stride;
    int64_t value_head_stride;
    int64_t cache_block_stride; /* multiple of 8; of a byte per element, of 16 */
    int64_t cache_head_stride;  /* likewise; normally the elements of a page (bytes of vac_kv_cache_page_size()) */
    uint32_t num_tokens;
    uint32_t num_kv_heads;
    uint32_t head_size;
    uint32_t v_head_size;
    uint32_t block_size;
    int32_t dtype;        /* vac_dtype of key, value and, for VAC_KV_SAME, cache */
    int32_t cache_format; /* vac_kv_cache_format */
    float k_scale;        /* VAC_KV_FP8_E4M3 only; 0 is taken for 1 */
    float v_scale;
} vac_kv_cache_write_args;

/* Writes tokens into their slots, in any order; other slots keep their bits.
 * A slot given twice holds one of its tokens. Threads share the work by KV
 * head and, where there are more threads than heads, by groups of 16 slots. */
void vac_kv_cache_write(const void *args, uint32_t thread_index, uint32_t thread_count);

typedef struct vac_kv_cache_read_args {
    const void *kv_cache;        /* the layer's cache, as vac_kv_cache_write left it */
    const int64_t *slot_mapping; /* [num_tokens]; negative: the token is skipped */
    float *key;                  /* out [num_tokens, num_kv_heads, head_size] FP32, contiguous, or NULL */
    float *value;                /* out [num_tokens, num_kv_heads, v_head_size] FP32, contiguous, or NULL */
    int64_t cache_block_stride;
    int64_t cache_head_stride;
    uint32_t num_tokens;
    uint32_t num_kv_heads;
    uint32_t head_size;
    uint32_t v_head_size;
    uint32_t block_size;
    int32_t dtype;
    int32_t cache_format; /* vac_kv_cache_format */
    float k_scale;        /* VAC_KV_FP8_E4M3 only; 0 is taken for 1 */
    float v_scale;
} vac_kv_cache_read_args;

/* Gathers tokens from their slots as FP32 values, for tests and for moving a cache to another
 * layout. An element at a time: not for a step. Split over threads by token. */
void vac_kv_cache_read(const void *args, uint32_t thread_index, uint32_t thread_count);

/* The batch, as far as the division of work depends on it. */
typedef struct vac_attention_plan_args {
    const int32_t *query_start_loc; /* [num_reqs + 1] */
    const int32_t *seq_lens; /* [num_reqs], keys in the cache: this step's tokens included, or another sequence's */
    const uint8_t *request_causal; /* [num_reqs], overrides causal, or NULL */
    uint32_t num_reqs;
    uint32_t num_heads;
    uint32_t num_kv_heads;
    int32_t causal;
    int32_t sliding_window;       /* <= 0: off */
    int32_t sliding_window_ahead; /* likewise */
    uint32_t num_threads;         /* the team that is expected, >= 1 */
} vac_attention_plan_args;

/* Bytes of the plan buffer of a batch of num_reqs requests, at most. */
size_t vac_attention_plan_size(uint32_t num_reqs, uint32_t num_threads);

/* Divides a step's attention into tasks of about equal cost: (request, KV
 * heads, rows, KV range), where the rows of a KV head are (query, query head of
 * its group) pairs. Heads are divided first, then rows at multiples of 32, then,
 * where work is still short, the KV range at multiples of 128 tokens (flash
 * decoding); a longer range is never divided for num_threads = 1.
 *
 * Called once per step, on one thread, in front of all layers that share the
 * arguments. A plan made with another window or causal flag than the layer's
 * still gives right results, only less evenly divided work.
 *
 * plan: int32, 8-byte aligned, plan_bytes >= vac_attention_plan_size(). Returns
 * VAC_OK or VAC_INVALID_ARGUMENT (a null pointer, no heads, heads not a
 * multiple of KV heads, no threads, decreasing query_start_loc, a causal request with
 * more queries than keys, a buffer too small). */
int vac_attention_plan(const vac_attention_plan_args *args, int32_t *plan, size_t plan_bytes);

/* A plan begins with a header of 16 int32: [0] number of tasks, [1] num_threads,
 * [2] rows of partial results, [3] groups of split tasks. The order in which tasks are
 * picked follows: task numbers, longest first; then at int32 [4] the tasks, 12 int32 each. */
enum vac_attention_task {
    VAC_TASK_REQUEST = 0,
    VAC_TASK_KV_HEAD_BEGIN = 1,
    VAC_TASK_KV_HEAD_END = 2,
    VAC_TASK_ROW_BEGIN = 3, /* rows of one KV head: query * group + head in group */
    VAC_TASK_ROW_END = 4,
    VAC_TASK_KV_BEGIN = 5, /* key positions */
    VAC_TASK_KV_END = 6,
    VAC_TASK_GROUP = 7,       /* -1, or the group of tasks whose results are merged */
    VAC_TASK_PARTIAL_ROW = 8, /* where this task's partial result lies */
    VAC_TASK_SPLIT = 9,       /* which of the group's ranges */
    VAC_TASK_NUM_SPLITS = 10,
    VAC_TASK_COST = 11, /* float bits, in row * token units */
    VAC_TASK_SIZE = 12
};

/* Bytes of the workspace for teams planned with up to num_threads threads. The
 * caller zeroes it once, when it is allocated; every vac_attention leaves it ready for
 * the next one, of any shape. 64-byte aligned. Ops that run at the same time
 * (no barrier between them) need a workspace each. */
size_t vac_attention_workspace_size(uint32_t head_size, uint32_t v_head_size, uint32_t num_threads);

typedef struct vac_attention_args {
    const void *query;              /* [num_tokens, num_heads, head_size] of dtype, last dimension contiguous */
    void *output;                   /* out [num_tokens, num_heads, v_head_size] of dtype, likewise */
    const void *kv_cache;           /* the layer's cache, as vac_kv_cache_write left it */
    const int32_t *block_table;     /* [num_reqs, block_table_stride], block numbers */
    const int32_t *query_start_loc; /* [num_reqs + 1] */
    const int32_t *seq_lens;        /* [num_reqs] */
    const uint8_t *request_causal;  /* [num_reqs], overrides causal, or NULL */
    const float *alibi_slopes;      /* [num_heads] or NULL: slope * (key position - query position) is added */
    const float *sinks;             /* [num_heads] or NULL: a logit that takes weight but has no value */
    const int32_t *plan;            /* of vac_attention_plan() for this batch */
    void *workspace;                /* in and out: vac_attention_workspace_size() bytes */
    int64_t query_token_stride;
    int64_t query_head_stride;
    int64_t output_token_stride;
    int64_t output_head_stride;
    int64_t cache_block_stride; /* multiple of 8; of a byte per element, of 16 */
    int64_t cache_head_stride;  /* likewise */
    int64_t block_table_stride;
    uint32_t num_heads; /* a multiple of num_kv_heads */
    uint32_t num_kv_heads;
    uint32_t head_size;
    uint32_t v_head_size;
    uint32_t block_size;
    int32_t sliding_window;       /* W: a query sees keys at positions > its own - W; <= 0: all */
    int32_t sliding_window_ahead; /* W: and at positions < its own + W; <= 0: all that causal allows */
    int32_t causal;               /* 0: a query also sees the keys behind it */
    int32_t dtype;                /* vac_dtype of query, output and, for VAC_KV_SAME, cache */
    float scale;                  /* of the scores, applied in FP32 */
    float softcap;                /* 0: off; else logits become softcap * tanh(logit / softcap) */
    int32_t cache_format;         /* vac_kv_cache_format */
    float k_scale;                /* VAC_KV_FP8_E4M3 only, as given to vac_kv_cache_write; 0 is taken for 1 */
    float v_scale;
} vac_attention_args;

/* output = softmax(mask(softcap(scale * query x key) + alibi)) x value.
 *
 * Request r's queries are the last query_start_loc[r+1] - query_start_loc[r] of
 * its seq_lens[r] tokens (of a request that is not causal there may be more queries than keys, as
 * in cross attention: the first then have negative positions); query head h reads KV head h / (num_heads /
 * num_kv_heads). A row that sees no key gives 0. NaN or infinity in visible data gives what IEEE arithmetic gives in
 * the rows that see it; from a value (not a key) of a written slot it may also reach up to three neighbouring rows,
 * which take it times 0. Logits have to stay below 2^20 in magnitude.
 *
 * Scores, softmax and sums are FP32; queries are not rounded. Weights are FP32 in tier
 * dotprod and for FP32; rounded to FP16 for FP16; cut to BF16 for BF16 in tier
 * bf16_i8mm, where their sum is over the cut ones. Output is rounded to nearest
 * (BF16 in tier bf16_i8mm: a tie away from 0, else to even).
 *
 * With VAC_KV_INT8 products are exact integers. Queries are quantized as K is, a scale for each
 * row. A weight times its token's V scale is rounded to a multiple of the largest
 * V scale of the chunk (256 or 512 keys) / 65280 (tier dotprod: / 32512), weights being relative to the
 * row's largest of the chunk. A NaN from a value may reach the 32 rows of its tile.
 *
 * Any team size works; threads beyond the planned ones have nothing to do. The
 * order of summation depends on the plan (its KV ranges) and not on the team or
 * on which thread took which task: the same plan gives the same bits.
 *
 * Algorithm: online softmax (Milakov and Gimelshein 2018) in tiles (Dao et al.
 * 2022), KV ranges merged by whichever task ends last (flash decoding). The
 * running maximum is rounded up to a power of two, so that rescaling is exact. */
void vac_attention(const void *args, uint32_t thread_index, uint32_t thread_count);

/* VAC_OK, or VAC_INVALID_ARGUMENT for sizes and strides that the kernels do not
 * take, or VAC_UNSUPPORTED for an unknown dtype or cache format. Reads no buffer. */
int vac_attention_check(const vac_attention_args *args);

typedef struct vac_exp_f32_args {
    const float *input; /* [size] */
    float *output;      /* out [size]; may be the input */
    uint64_t size;
    int32_t dtype; /* the polynomial that attention over this vac_dtype uses */
} vac_exp_f32_args;

/* e^x as attention computes it, for x <= 0: relative error below 2^-13 for BF16,
 * 2^-17 for F16, 2^-19 for F32 (of which 2^-22 near 0: an FP32 exponent has no more)
 * while the result is normal; 0 from there down to -infinity; NaN for NaN. */
void vac_exp_f32(const void *args, uint32_t thread_index, uint32_t thread_count);

#ifdef __cplusplus
}
#endif
#endif
