"""Attention and cache-write cases for the benchmark: numpy and cffi only, one thread.

A case prepares its buffers and returns ``(call, bytes_read)``. ``call()`` does everything a step does
for one layer, planning included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_arm_cpu.native import library

Prepared = tuple[Callable[[], None], int]

NUM_HEADS = 32
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


@dataclass(frozen=True)
class Layer:
    """What a layer's attention is; upstream's cases have the defaults."""

    num_kv_heads: int = 8
    head_size: int = 128
    dtype: str = "bf16"
    cache_format: str = "SAME"
    block_size: int = 128

    @property
    def format(self) -> int:
        return int(getattr(library.load(), f"VAC_KV_{self.cache_format}"))

    def page_bytes(self) -> int:
        sizes = (self.head_size, self.head_size, self.block_size)
        return int(library.load().vac_kv_cache_page_size(self.format, DTYPES[self.dtype][0], *sizes))

    def cache(self, num_tokens: int) -> np.ndarray:
        return _aligned(-(-num_tokens // self.block_size) * self.num_kv_heads * self.page_bytes())

    def token_bytes(self) -> int:
        """Bytes of one token in the cache."""
        return self.num_kv_heads * self.page_bytes() // self.block_size

    def set(self, args: object) -> None:
        """The fields that writing and attention have in common."""
        element = np.dtype(DTYPES[self.dtype][1]).itemsize if self.cache_format == "SAME" else 1
        args.cache_head_stride = self.page_bytes() // element
        args.cache_block_stride = self.num_kv_heads * args.cache_head_stride
        args.num_kv_heads, args.block_size = self.num_kv_heads, self.block_size
        args.head_size = args.v_head_size = self.head_size
        args.dtype, args.cache_format = DTYPES[self.dtype][0], self.format


BASE = Layer()


def _cache_write(num_tokens: int, layer: Layer, cache: np.ndarray) -> tuple[object, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    key, value = _normal(rng, layer.dtype, 2, num_tokens, layer.num_kv_heads, layer.head_size)
    slots = np.arange(num_tokens, dtype=np.int64)
    args = ffi.new("vac_kv_cache_write_args *")
    args.key, args.value, args.kv_cache = _pointer(key), _pointer(value), _pointer(cache)
    args.slot_mapping = _pointer(slots, "int64_t *")
    args.key_token_stride = args.value_token_stride = layer.num_kv_heads * layer.head_size
    args.key_head_stride = args.value_head_stride = layer.head_size
    args.num_tokens = num_tokens
    layer.set(args)
    return args, [key, value, slots]


def cache_write(num_tokens: int, layer: Layer = BASE) -> Prepared:
    lib = library.load()
    cache = layer.cache(num_tokens)
    args, keep = _cache_write(num_tokens, layer, cache)

    def call() -> None:
        lib.vac_kv_cache_write(args, 0, 1)

    call.keep = (cache, keep)
    return call, keep[0].nbytes + keep[1].nbytes


def attention(query_len: int, seq_len: int, layer: Layer = BASE) -> Prepared:
    lib = library.load()
    rng = np.random.default_rng(1)
    cache = layer.cache(seq_len)
    write_args, written = _cache_write(seq_len, layer, cache)
    lib.vac_kv_cache_write(write_args, 0, 1)
    query = _normal(rng, layer.dtype, query_len, NUM_HEADS, layer.head_size)
    output = np.empty_like(query)
    num_blocks = -(-seq_len // layer.block_size)
    block_table = np.arange(num_blocks, dtype=np.int32)
    starts, lengths = np.array([0, query_len], np.int32), np.array([seq_len], np.int32)
    workspace = _aligned(lib.vac_attention_workspace_size(layer.head_size, layer.head_size, 1))
    plan_size = lib.vac_attention_plan_size(1, 1)
    plan = _aligned(plan_size)

    batch = ffi.new("vac_attention_plan_args *")
    batch.query_start_loc, batch.seq_lens = _pointer(starts, "int32_t *"), _pointer(lengths, "int32_t *")
    batch.num_reqs = batch.num_threads = batch.causal = 1
    batch.num_heads, batch.num_kv_heads = NUM_HEADS, layer.num_kv_heads

    args = ffi.new("vac_attention_args *")
    args.query, args.output, args.kv_cache = _pointer(query), _pointer(output), _pointer(cache)
    args.block_table = _pointer(block_table, "int32_t *")
    args.query_start_loc, args.seq_lens = batch.query_start_loc, batch.seq_lens
    args.plan, args.workspace = _pointer(plan, "int32_t *"), _pointer(workspace)
    args.query_token_stride = args.output_token_stride = NUM_HEADS * layer.head_size
    args.query_head_stride = args.output_head_stride = layer.head_size
    args.block_table_stride = num_blocks
    args.num_heads, args.causal, args.scale = NUM_HEADS, 1, layer.head_size**-0.5
    layer.set(args)
    plan_pointer = _pointer(plan, "int32_t *")

    def call() -> None:
        lib.vac_attention_plan(batch, plan_pointer, plan_size)
        lib.vac_attention(args, 0, 1)

    keep = (cache, written, query, output, block_table, starts, lengths, workspace, plan)
    call.keep = keep
    return call, query.nbytes + seq_len * layer.token_bytes()


D64, MHA, MQA = Layer(head_size=64), Layer(num_kv_heads=32), Layer(num_kv_heads=1)
F16, F32 = Layer(dtype="f16"), Layer(dtype="f32")
INT8, FP8 = Layer(cache_format="INT8"), Layer(cache_format="FP8_E4M3")
B16, INT8_B16 = Layer(block_size=16), Layer(block_size=16, cache_format="INT8")
B32 = Layer(block_size=32)

CASES: dict[str, Callable[[], Prepared]] = {
    "attn_q1_ctx512": lambda: attention(1, 512),
    "attn_q1_ctx4096": lambda: attention(1, 4096),
    "attn_q64_ctx256": lambda: attention(64, 256),
    "attn_q128_ctx128": lambda: attention(128, 128),
    "attn_q1_ctx512_d64": lambda: attention(1, 512, D64),
    "attn_q64_ctx256_d64": lambda: attention(64, 256, D64),
    "attn_q1_ctx512_mha": lambda: attention(1, 512, MHA),
    "attn_q64_ctx256_mha": lambda: attention(64, 256, MHA),
    "attn_q1_ctx512_mqa": lambda: attention(1, 512, MQA),
    "attn_q64_ctx256_mqa": lambda: attention(64, 256, MQA),
    "attn_q1_ctx4096_b16": lambda: attention(1, 4096, B16),
    "attn_q64_ctx256_b16": lambda: attention(64, 256, B16),
    "attn_q1_ctx4096_b32": lambda: attention(1, 4096, B32),
    "attn_q64_ctx256_b32": lambda: attention(64, 256, B32),
    "attn_q1_ctx512_f16": lambda: attention(1, 512, F16),
    "attn_q64_ctx256_f16": lambda: attention(64, 256, F16),
    "attn_q1_ctx512_f32": lambda: attention(1, 512, F32),
    "attn_q64_ctx256_f32": lambda: attention(64, 256, F32),
    "attn_q1_ctx4096_int8": lambda: attention(1, 4096, INT8),
    "attn_q1_ctx4096_int8_b16": lambda: attention(1, 4096, INT8_B16),
    "attn_q64_ctx256_int8": lambda: attention(64, 256, INT8),
    "attn_q1_ctx4096_fp8": lambda: attention(1, 4096, FP8),
    "attn_q64_ctx256_fp8": lambda: attention(64, 256, FP8),
    "cache_write_64": lambda: cache_write(64),
    "cache_write_1": lambda: cache_write(1),
    "cache_write_64_b16": lambda: cache_write(64, B16),
    "cache_write_64_int8": lambda: cache_write(64, INT8),
    "cache_write_1_int8": lambda: cache_write(1, INT8),
    "cache_write_64_fp8": lambda: cache_write(64, FP8),
}
