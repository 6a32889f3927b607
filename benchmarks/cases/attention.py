"""Attention and cache-write cases for the benchmark: numpy and cffi only, one thread.

A case prepares its buffers and returns ``(call, bytes_read)``. ``call()`` does everything a step does
for one layer, planning included.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vllm_arm_cpu.native import library

Prepared = tuple[Callable[[], None], int]

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 128
ffi = library.ffi


# VAC_F32, VAC_F16, VAC_BF16 and what numpy stores them in.
DTYPES = {"f32": (0, np.float32), "f16": (1, np.float16), "bf16": (2, np.uint16)}


def _normal(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    values = rng.standard_normal(shape, dtype=np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else values.astype(DTYPES[dtype][1])


def _aligned(size: int) -> np.ndarray:
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def _pointer(array: np.ndarray, kind: str = "void *") -> object:
    return ffi.cast(kind, array.ctypes.data)


def _cache_write(num_tokens: int, dtype: str, cache: np.ndarray) -> tuple[object, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    key, value = _normal(rng, dtype, 2, num_tokens, NUM_KV_HEADS, HEAD_SIZE)
    slots = np.arange(num_tokens, dtype=np.int64)
    args = ffi.new("vac_kv_cache_write_args *")
    args.key, args.value, args.kv_cache = _pointer(key), _pointer(value), _pointer(cache)
    args.slot_mapping = _pointer(slots, "int64_t *")
    args.key_token_stride = args.value_token_stride = NUM_KV_HEADS * HEAD_SIZE
    args.key_head_stride = args.value_head_stride = HEAD_SIZE
    args.cache_head_stride = 2 * BLOCK_SIZE * HEAD_SIZE
    args.cache_block_stride = NUM_KV_HEADS * args.cache_head_stride
    args.num_tokens, args.num_kv_heads, args.block_size = num_tokens, NUM_KV_HEADS, BLOCK_SIZE
    args.head_size = args.v_head_size = HEAD_SIZE
    args.dtype = DTYPES[dtype][0]
    return args, [key, value, slots]


def _cache(num_tokens: int, dtype: str) -> np.ndarray:
    pages = -(-num_tokens // BLOCK_SIZE) * NUM_KV_HEADS
    return _aligned(pages * 2 * BLOCK_SIZE * HEAD_SIZE * np.dtype(DTYPES[dtype][1]).itemsize)


def cache_write(num_tokens: int, dtype: str = "bf16") -> Prepared:
    lib = library.load()
    cache = _cache(num_tokens, dtype)
    args, keep = _cache_write(num_tokens, dtype, cache)

    def call() -> None:
        lib.vac_kv_cache_write(args, 0, 1)

    call.keep = (cache, keep)  # type: ignore[attr-defined]
    return call, 2 * keep[0].nbytes


def attention(query_len: int, seq_len: int, dtype: str = "bf16") -> Prepared:
    lib = library.load()
    rng = np.random.default_rng(1)
    cache = _cache(seq_len, dtype)
    write_args, written = _cache_write(seq_len, dtype, cache)
    lib.vac_kv_cache_write(write_args, 0, 1)
    query = _normal(rng, dtype, query_len, NUM_HEADS, HEAD_SIZE)
    output = np.empty_like(query)
    num_blocks = -(-seq_len // BLOCK_SIZE)
    block_table = np.arange(num_blocks, dtype=np.int32)
    starts, lengths = np.array([0, query_len], np.int32), np.array([seq_len], np.int32)
    workspace = _aligned(lib.vac_attention_workspace_size(HEAD_SIZE, HEAD_SIZE, 1))
    plan_size = lib.vac_attention_plan_size(1, 1)
    plan = _aligned(plan_size)

    batch = ffi.new("vac_attention_plan_args *")
    batch.query_start_loc, batch.seq_lens = _pointer(starts, "int32_t *"), _pointer(lengths, "int32_t *")
    batch.num_reqs = batch.num_threads = batch.causal = 1
    batch.num_heads, batch.num_kv_heads = NUM_HEADS, NUM_KV_HEADS

    args = ffi.new("vac_attention_args *")
    args.query, args.output, args.kv_cache = _pointer(query), _pointer(output), _pointer(cache)
    args.block_table = _pointer(block_table, "int32_t *")
    args.query_start_loc, args.seq_lens = batch.query_start_loc, batch.seq_lens
    args.plan, args.workspace = _pointer(plan, "int32_t *"), _pointer(workspace)
    args.query_token_stride = args.output_token_stride = NUM_HEADS * HEAD_SIZE
    args.query_head_stride = args.output_head_stride = HEAD_SIZE
    args.cache_head_stride, args.cache_block_stride = write_args.cache_head_stride, write_args.cache_block_stride
    args.block_table_stride = num_blocks
    args.num_heads, args.num_kv_heads, args.block_size = NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE
    args.head_size = args.v_head_size = HEAD_SIZE
    args.causal, args.dtype, args.scale = 1, DTYPES[dtype][0], HEAD_SIZE**-0.5
    plan_pointer = _pointer(plan, "int32_t *")

    def call() -> None:
        lib.vac_attention_plan(batch, plan_pointer, plan_size)
        lib.vac_attention(args, 0, 1)

    keep = (cache, written, query, output, block_table, starts, lengths, workspace, plan)
    call.keep = keep  # type: ignore[attr-defined]
    return call, query.nbytes + written[0].nbytes + written[1].nbytes


CASES: dict[str, Callable[[], Prepared]] = {
    "attn_q1_ctx512": lambda: attention(1, 512),
    "attn_q1_ctx4096": lambda: attention(1, 4096),
    "attn_q64_ctx256": lambda: attention(64, 256),
    "attn_q128_ctx128": lambda: attention(128, 128),
    "attn_q1_ctx512_f16": lambda: attention(1, 512, "f16"),
    "attn_q64_ctx256_f16": lambda: attention(64, 256, "f16"),
    "attn_q1_ctx512_f32": lambda: attention(1, 512, "f32"),
    "attn_q64_ctx256_f32": lambda: attention(64, 256, "f32"),
    "cache_write_64": lambda: cache_write(64),
    "cache_write_1": lambda: cache_write(1),
}
