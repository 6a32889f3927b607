"""Paged attention: every kind of step against an FP64 reference, and the plan that divides it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.kernels.support import DTYPES, ROUNDOFF, Guarded, decode, encode, ffi, guarded, kernel, lib, pointer, run

STORAGE = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
FORMATS = {"same": lib.VAC_KV_SAME, "int8": lib.VAC_KV_INT8, "fp8": lib.VAC_KV_FP8_E4M3}
NAN = {"f32": np.float32(np.nan), "f16": np.float16(np.nan), "bf16": np.uint16(0x7FC0)}
INF = {"f32": np.float32(np.inf), "f16": np.float16(np.inf), "bf16": np.uint16(0x7F80)}


@dataclass(frozen=True)
class Batch:
    """One step: requests as (query_len, seq_len), and the layer's attributes."""

    requests: Sequence[tuple[int, int]] = ((1, 37), (5, 70), (33, 33))
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    v_head_size: int = 64
    block_size: int = 16
    dtype: str = "bf16"
    causal: bool = True
    request_causal: Sequence[int] | None = None
    window: int = 0
    ahead: int = 0
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    scale: float | None = None
    score_range: float = 1.0
    seed: int = 0
    cache_format: str = "same"
    k_scale: float = 0.0
    v_scale: float = 0.0

    @property
    def int8(self) -> bool:
        return self.cache_format == "int8"


class Case:
    """A batch in memory: guarded inputs and output, a filled cache, all else NaN and infinity."""

    def __init__(self, batch: Batch, at_end: bool = True) -> None:
        self.batch = b = batch
        rng = np.random.default_rng(b.seed)
        self.query_lens = np.array([q for q, _ in b.requests], np.int32)
        self.seq_lens = np.array([s for _, s in b.requests], np.int32)
        self.query_start_loc = np.concatenate([[0], np.cumsum(self.query_lens)]).astype(np.int32)
        num_tokens = int(self.query_start_loc[-1])
        self.scale = b.head_size**-0.5 if b.scale is None else b.scale
        shape = (num_tokens, b.num_heads, b.head_size)
        self.query = guarded(encode(rng.standard_normal(shape) * b.score_range, b.dtype), at_end)
        total = int(self.seq_lens.sum())
        self.keys = encode(rng.standard_normal((total, b.num_kv_heads, b.head_size)), b.dtype)
        self.values = encode(rng.standard_normal((total, b.num_kv_heads, b.v_head_size)), b.dtype)
        self.output = Guarded((num_tokens, b.num_heads, b.v_head_size), STORAGE[b.dtype], at_end)
        blocks = [-(-int(s) // b.block_size) for s in self.seq_lens]
        num_blocks = sum(blocks) + 2
        order = rng.permutation(num_blocks)
        width = max([1, *blocks])
        self.block_table = np.full((len(b.requests), width), order[-1], np.int32)
        start = 0
        for r, n in enumerate(blocks):
            self.block_table[r, :n] = order[start : start + n]
            start += n
        self.block_table = guarded(self.block_table, at_end)
        self.format = FORMATS[b.cache_format]
        page = lib.vac_kv_cache_page_size(self.format, DTYPES[b.dtype], b.head_size, b.v_head_size, b.block_size)
        storage = np.dtype(STORAGE[b.dtype] if b.cache_format == "same" else np.uint8)
        self.cache = Guarded((num_blocks, b.num_kv_heads, page // storage.itemsize), storage, at_end)
        bad = rng.integers(0, 2, self.cache.array.shape, dtype=np.uint8)
        if b.cache_format == "same":
            self.cache.array[...] = np.where(bad, NAN[b.dtype], INF[b.dtype])
        else:
            self.cache.array[...] = np.where(bad, 0x7F, rng.integers(0, 256, bad.shape, np.uint8))
        if b.int8:
            scales = self.cache.array[..., b.block_size * (b.head_size + b.v_head_size) :].view(np.float32)
            scales[...] = rng.choice(np.array([np.nan, np.inf, -np.inf, 3e38], np.float32), scales.shape)
        self.alibi = (2.0 ** -np.arange(1, b.num_heads + 1)).astype(np.float32) if b.alibi else None
        self.sinks = rng.standard_normal(b.num_heads).astype(np.float32) if b.sinks else None
        self.request_causal = None if b.request_causal is None else np.array(b.request_causal, np.uint8)
        self.write()

    def write(self, num_threads: int = 1) -> None:
        b = self.batch
        slots = [
            self.block_table.array[r, np.arange(s) // b.block_size].astype(np.int64) * b.block_size
            + np.arange(s) % b.block_size
            for r, s in enumerate(self.seq_lens)
        ]
        self.slots = np.concatenate(slots) if slots else np.zeros(0, np.int64)
        args = ffi.new("vac_kv_cache_write_args *")
        args.key, args.value, args.kv_cache = map(pointer, (self.keys, self.values, self.cache.array))
        args.slot_mapping = ffi.cast("int64_t *", self.slots.ctypes.data)
        args.key_token_stride, args.key_head_stride = b.num_kv_heads * b.head_size, b.head_size
        args.value_token_stride, args.value_head_stride = b.num_kv_heads * b.v_head_size, b.v_head_size
        args.cache_block_stride, args.cache_head_stride = self.cache.array[0].size, self.cache.array[0, 0].size
        args.num_tokens, args.num_kv_heads, args.block_size = len(self.slots), b.num_kv_heads, b.block_size
        args.head_size, args.v_head_size, args.dtype = b.head_size, b.v_head_size, DTYPES[b.dtype]
        args.cache_format, args.k_scale, args.v_scale = self.format, b.k_scale, b.v_scale
        run(kernel("kv_cache_write"), args, num_threads)
        self.read()

    def read(self) -> None:
        """What attention sees of keys and values, in FP32."""
        b = self.batch
        if b.cache_format == "same":
            self.seen_keys, self.seen_values = decode(self.keys, b.dtype), decode(self.values, b.dtype)
            return
        self.seen_keys, self.seen_values = read_cache(
            self.cache.array, self.slots, b.num_kv_heads, b.head_size, b.v_head_size, b.block_size, b.dtype,
            b.cache_format, b.k_scale, b.v_scale,
        )  # fmt: skip

    def plan(self, num_threads: int) -> np.ndarray:
        b = self.batch
        return make_plan(
            self.query_start_loc, self.seq_lens, b.num_heads, b.num_kv_heads, b.causal, b.window, num_threads,
            self.request_causal, ahead=b.ahead,
        )  # fmt: skip

    def args(self, plan: np.ndarray, workspace: np.ndarray) -> object:
        b = self.batch
        args = ffi.new("vac_attention_args *")
        args.query, args.output, args.kv_cache = (pointer(m.array) for m in (self.query, self.output, self.cache))
        args.block_table = ffi.cast("int32_t *", self.block_table.array.ctypes.data)
        args.query_start_loc = ffi.cast("int32_t *", self.query_start_loc.ctypes.data)
        args.seq_lens = ffi.cast("int32_t *", self.seq_lens.ctypes.data)
        args.request_causal = ffi.cast("uint8_t *", pointer(self.request_causal))
        args.alibi_slopes = ffi.cast("float *", pointer(self.alibi))
        args.sinks = ffi.cast("float *", pointer(self.sinks))
        args.plan = ffi.cast("int32_t *", plan.ctypes.data)
        args.workspace = pointer(workspace)
        args.query_token_stride, args.query_head_stride = b.num_heads * b.head_size, b.head_size
        args.output_token_stride, args.output_head_stride = b.num_heads * b.v_head_size, b.v_head_size
        args.cache_block_stride, args.cache_head_stride = self.cache.array[0].size, self.cache.array[0, 0].size
        args.block_table_stride = self.block_table.array.shape[1]
        args.num_heads, args.num_kv_heads, args.block_size = b.num_heads, b.num_kv_heads, b.block_size
        args.head_size, args.v_head_size = b.head_size, b.v_head_size
        args.sliding_window, args.sliding_window_ahead = b.window, b.ahead
        args.causal, args.dtype = b.causal, DTYPES[b.dtype]
        args.scale, args.softcap = self.scale, b.softcap
        args.cache_format, args.k_scale, args.v_scale = self.format, b.k_scale, b.v_scale
        return args

    def run(self, num_threads: int = 1, planned: int | None = None, workspace: np.ndarray | None = None) -> np.ndarray:
        planned = planned or num_threads
        plan = self.plan(planned)
        if workspace is None:
            workspace = make_workspace(self.batch, planned)
        self.output.array[...] = NAN[self.batch.dtype]
        args = self.args(plan, workspace)
        assert lib.vac_attention_check(args) == 0
        run(kernel("attention"), args, num_threads)
        for memory in (self.query, self.output, self.cache, self.block_table):
            memory.check()
        assert not workspace[: 128 + 4 * 4096].any(), "counters were not left at zero"
        return decode(self.output.array, self.batch.dtype)

    def logits(self, request: int, head: int) -> np.ndarray:
        """FP64 [query_len, seq_len], -inf where masked."""
        b = self.batch
        first = int(self.seq_lens[:request].sum())
        q = decode(self.query.array[self.query_start_loc[request] : self.query_start_loc[request + 1], head], b.dtype)
        kv_head = head // (b.num_heads // b.num_kv_heads)
        k = self.seen_keys[first : first + self.seq_lens[request], kv_head]
        if b.int8:
            codes, scales = quantize(q)
            q = codes * scales[..., None].astype(np.float64)
        s = q.astype(np.float64) @ k.astype(np.float64).T * np.float32(self.scale)
        if b.softcap:
            s = b.softcap * np.tanh(s / b.softcap)
        key = np.arange(self.seq_lens[request])[None]
        position = (self.seq_lens[request] - self.query_lens[request] + np.arange(self.query_lens[request]))[:, None]
        if self.alibi is not None:
            s = s + self.alibi[head].astype(np.float64) * (key - position)
        causal = b.causal if self.request_causal is None else bool(self.request_causal[request])
        seen = np.ones(s.shape, bool)
        if causal:
            seen &= key <= position
        if b.window > 0:
            seen &= key > position - b.window
        if b.ahead > 0:
            seen &= key < position + b.ahead
        return np.where(seen, s, -np.inf)

    def reference(self) -> np.ndarray:
        b = self.batch
        out = np.zeros((int(self.query_start_loc[-1]), b.num_heads, b.v_head_size))
        for r in range(len(b.requests)):
            first = int(self.seq_lens[:r].sum())
            for head in range(b.num_heads):
                s = self.logits(r, head)
                if not s.size:
                    continue
                top = s.max(axis=1, keepdims=True)
                if self.sinks is not None:
                    top = np.maximum(top, self.sinks[head])
                top = np.where(np.isneginf(top), 0, top)
                p = np.exp(s - top)
                total = p.sum(axis=1, keepdims=True)
                if self.sinks is not None:
                    total = total + np.exp(self.sinks[head] - top)
                kv_head = head // (b.num_heads // b.num_kv_heads)
                v = self.seen_values[first : first + self.seq_lens[r], kv_head].astype(np.float64)
                rows = slice(self.query_start_loc[r], self.query_start_loc[r + 1])
                out[rows, head] = np.divide(p, total, out=np.zeros_like(p), where=total > 0) @ v
        return out

    def check(self, actual: np.ndarray, expected: np.ndarray | None = None) -> None:
        """Weights and the result are rounded to the type once each; scores and sums are FP32.

        A weight's error is at most one unit in the last place for BF16 (it is cut) and spreads over values of
        about 1; FP32 has the polynomial's and the logits' error, eight roundoffs of a logit of up to ~ 8.

        With INT8, a weight has the polynomial's error of 2^-13.7 and is rounded to a 65280th (tier dotprod:
        32512th) of the largest; roundings of n weights add up like a random walk.
        """
        expected = self.reference() if expected is None else expected
        unit = ROUNDOFF[self.batch.dtype]
        assert np.isfinite(actual).all()
        error = np.abs(actual - expected)
        if self.batch.int8:
            units = 65280 if lib.vac_tier() == lib.VAC_TIER_BF16_I8MM else 32512
            largest = np.abs(self.seen_values).max(initial=0)
            longest = self.seq_lens.max(initial=0)
            rest = (2.0**-12.5 + 2 * np.sqrt(longest) / units) * largest + 2.0**-20 * self.batch.score_range
            limit = unit * np.abs(expected) * 1.01 + rest
        else:
            if self.batch.dtype == "f32":
                unit *= 16 * max(1.0, self.batch.score_range)
            limit = unit * np.abs(expected) * 1.01 + unit * 2.5
        assert (error <= limit).all(), f"worst {np.max(error / limit)} of the tolerance"


def make_plan(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    num_heads: int,
    num_kv_heads: int,
    causal: bool,
    window: int,
    num_threads: int,
    request_causal: np.ndarray | None = None,
    guard: bool = True,
    ahead: int = 0,
) -> np.ndarray:
    args = ffi.new("vac_attention_plan_args *")
    args.query_start_loc = ffi.cast("int32_t *", query_start_loc.ctypes.data)
    args.seq_lens = ffi.cast("int32_t *", seq_lens.ctypes.data)
    args.request_causal = ffi.cast("uint8_t *", pointer(request_causal))
    args.num_reqs, args.num_heads, args.num_kv_heads = len(seq_lens), num_heads, num_kv_heads
    args.causal, args.sliding_window, args.num_threads = causal, window, num_threads
    args.sliding_window_ahead = ahead
    size = lib.vac_attention_plan_size(len(seq_lens), num_threads)
    plan = Guarded(size // 4, np.int32) if guard else None
    array = np.empty(size // 4, np.int32) if plan is None else plan.array
    assert lib.vac_attention_plan(args, ffi.cast("int32_t *", array.ctypes.data), size) == 0
    if plan is None:
        return array
    plan.check()
    return plan.array


def make_workspace(batch: Batch, num_threads: int) -> np.ndarray:
    size = lib.vac_attention_workspace_size(batch.head_size, batch.v_head_size, num_threads)
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def read_cache(
    cache: np.ndarray,
    slots: np.ndarray,
    num_kv_heads: int,
    head_size: int,
    v_head_size: int,
    block_size: int,
    dtype: str,
    cache_format: str,
    k_scale: float = 0.0,
    v_scale: float = 0.0,
    num_threads: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of slots, dequantized: FP32 [num_tokens, num_kv_heads, size]."""
    key = Guarded((len(slots), num_kv_heads, head_size), np.float32)
    value = Guarded((len(slots), num_kv_heads, v_head_size), np.float32)
    args = ffi.new("vac_kv_cache_read_args *")
    args.kv_cache = pointer(cache)
    args.slot_mapping = ffi.cast("int64_t *", slots.ctypes.data)
    args.key, args.value = (ffi.cast("float *", m.array.ctypes.data) for m in (key, value))
    args.cache_block_stride, args.cache_head_stride = cache[0].size, cache[0, 0].size
    args.num_tokens, args.num_kv_heads, args.block_size = len(slots), num_kv_heads, block_size
    args.head_size, args.v_head_size, args.dtype = head_size, v_head_size, DTYPES[dtype]
    args.cache_format, args.k_scale, args.v_scale = FORMATS[cache_format], k_scale, v_scale
    run(kernel("kv_cache_read"), args, num_threads)
    key.check()
    value.check()
    return key.array, value.array


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """INT8 codes of the last dimension and its scales, as the cache stores them."""
    largest = np.abs(x).max(axis=-1).astype(np.float32)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest < 2.0**-100, np.float32(0), np.float32(127) / largest).astype(np.float64)
    scale = np.where(largest < 2.0**-100, np.float32(0), largest / np.float32(127))
    return np.rint(x.astype(np.float64) * inverse[..., None]), scale


ALL_DTYPES = pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])


@ALL_DTYPES
@pytest.mark.parametrize("num_heads, num_kv_heads", [(2, 2), (4, 2), (8, 2), (7, 1), (8, 1), (71, 1)])
def test_group_sizes(dtype: str, num_heads: int, num_kv_heads: int) -> None:
    case = Case(Batch(dtype=dtype, num_heads=num_heads, num_kv_heads=num_kv_heads), at_end=num_heads != 7)
    case.check(case.run())


@ALL_DTYPES
@pytest.mark.parametrize(
    "head_size, v_head_size",
    [(48, 48), (64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256), (16, 32), (64, 16)],
)
def test_head_sizes(dtype: str, head_size: int, v_head_size: int) -> None:
    requests = ((1, 21), (3, 40), (9, 9))
    case = Case(Batch(requests, dtype=dtype, head_size=head_size, v_head_size=v_head_size))
    case.check(case.run())


@ALL_DTYPES
@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
def test_block_sizes_and_chunks(dtype: str, block_size: int) -> None:
    """Contexts of several chunks, whose pages lie anywhere, with lengths around every boundary."""
    requests = ((1, 1040), (1, 511), (1, 513), (2, 260), (19, 270), (1, 1), (16, 16), (1, 128))
    case = Case(Batch(requests, 2, 1, 16, 32, block_size, dtype, score_range=4))
    case.check(case.run())


FEATURES: dict[str, dict[str, object]] = {
    "whole": {"causal": False},
    "mixed": {"request_causal": (1, 0, 1, 0)},
    "window": {"window": 20},
    "window of one": {"window": 1},
    "window, not causal": {"window": 20, "causal": False},
    "window on both sides": {"window": 20, "ahead": 20, "causal": False},
    "window ahead, some causal": {"ahead": 3, "request_causal": (0, 1, 0, 1)},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "scale": {"scale": 0.5},
    "negative scale": {"scale": -0.125},
    "no scale": {"scale": 0.0},
    "all": {"window": 50, "softcap": 20.0, "alibi": True, "sinks": True, "request_causal": (0, 1, 0, 1)},
}


@ALL_DTYPES
@pytest.mark.parametrize("feature", FEATURES)
def test_features(dtype: str, feature: str) -> None:
    requests = ((1, 100), (7, 30), (20, 290), (13, 13))
    batch = replace(Batch(requests, num_heads=6, dtype=dtype, head_size=32, v_head_size=16), **FEATURES[feature])
    case = Case(batch)
    expected = case.reference()
    case.check(case.run(), expected)
    case.check(case.run(num_threads=3, planned=8), expected)


@ALL_DTYPES
@pytest.mark.parametrize("num_threads, group", [(1, 1), (2, 2), (3, 4), (8, 5)])
def test_threads(dtype: str, num_threads: int, group: int) -> None:
    """Any team runs any plan, again and again in one workspace, and the plan alone decides about the bits."""
    requests = ((1, 900), (20, 300), (1, 40), (0, 0), (5, 400), (0, 33))
    batch = Batch(requests, num_heads=2 * group, dtype=dtype, head_size=16, v_head_size=16, block_size=32, sinks=True)
    case = Case(batch)
    expected = case.reference()
    workspace = make_workspace(batch, 24)
    for planned in (1, 4, 24):
        first = case.run(num_threads, planned, workspace)
        case.check(first, expected)
        again = case.run(1, planned, workspace)
        assert np.array_equal(first, again)


QUANTIZED = pytest.mark.parametrize("cache_format", ["int8", "fp8"])
SCALES = {"int8": {}, "fp8": {"k_scale": 0.75, "v_scale": 0.02}}


@QUANTIZED
@ALL_DTYPES
@pytest.mark.parametrize(
    "num_heads, num_kv_heads, head_size, v_head_size",
    [(2, 2, 48, 48), (4, 2, 80, 64), (8, 2, 128, 128), (7, 1, 16, 112), (8, 1, 192, 128), (2, 1, 512, 32)],
)
def test_quantized_cache(
    cache_format: str, dtype: str, num_heads: int, num_kv_heads: int, head_size: int, v_head_size: int
) -> None:
    requests = ((1, 37), (5, 70), (33, 33), (1, 1))
    case = Case(
        Batch(requests, num_heads, num_kv_heads, head_size, v_head_size, dtype=dtype, cache_format=cache_format),
        at_end=num_heads != 4,
    )
    case.check(case.run())


@QUANTIZED
@ALL_DTYPES
@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_quantized_cache_in_chunks(cache_format: str, dtype: str, block_size: int) -> None:
    requests = ((1, 1040), (1, 511), (1, 513), (2, 260), (19, 270), (1, 1), (16, 16), (1, 128))
    batch = Batch(requests, 2, 1, 16, 32, block_size, dtype, score_range=4, cache_format=cache_format)
    case = Case(replace(batch, **SCALES[cache_format]))
    case.check(case.run())


@QUANTIZED
@pytest.mark.parametrize("feature", FEATURES)
def test_quantized_features(cache_format: str, feature: str) -> None:
    requests = ((1, 100), (7, 30), (20, 290), (13, 13))
    batch = Batch(requests, 6, 2, 32, 16, cache_format=cache_format, dtype="f16" if cache_format == "fp8" else "bf16")
    case = Case(replace(batch, **SCALES[cache_format], **FEATURES[feature]))
    expected = case.reference()
    case.check(case.run(), expected)
    case.check(case.run(num_threads=3, planned=8), expected)


@QUANTIZED
@pytest.mark.parametrize("num_threads, group", [(1, 1), (3, 4), (8, 5)])
def test_quantized_threads(cache_format: str, num_threads: int, group: int) -> None:
    requests = ((1, 900), (20, 300), (1, 40), (0, 0), (5, 400), (0, 33))
    batch = Batch(requests, 2 * group, 2, 16, 16, 32, sinks=True, cache_format=cache_format)
    case = Case(batch)
    expected = case.reference()
    workspace = make_workspace(batch, 24)
    for planned in (1, 4, 24):
        first = case.run(num_threads, planned, workspace)
        case.check(first, expected)
        assert np.array_equal(first, case.run(1, planned, workspace))


@QUANTIZED
def test_quantized_random_batches(cache_format: str) -> None:
    """Batches at random, of shapes, lengths, and magnitudes that differ from token to token."""
    rng = np.random.default_rng(7)
    for seed in range(12):
        kv_heads, group = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 3, 4, 5, 8]))
        seq_lens = (2 ** rng.uniform(0, 9, 3)).astype(int)
        requests = tuple((int(rng.integers(1, 1 + min(n, 24))), int(n)) for n in seq_lens)
        sizes = [int(n) for n in rng.choice([16, 32, 48, 64, 96], 2)]
        case = Case(
            Batch(
                requests, kv_heads * group, kv_heads, *sizes, int(rng.choice([16, 32, 64])),
                str(rng.choice(["bf16", "f16", "f32"])), causal=bool(rng.integers(2)),
                window=int(rng.choice([0, 9, 100])), softcap=float(rng.choice([0, 5.0])), alibi=bool(rng.integers(2)),
                sinks=bool(rng.integers(2)), seed=seed, cache_format=cache_format,
            )
        )  # fmt: skip
        magnitude = 2.0 ** rng.uniform(-6, 0, (len(case.keys), kv_heads, 1))
        magnitude[rng.random(magnitude.shape) < 0.05] = 0
        for name in ("keys", "values"):
            values = decode(getattr(case, name), case.batch.dtype) * magnitude
            setattr(case, name, encode(values, case.batch.dtype))
        case.write(int(rng.integers(1, 5)))
        case.check(case.run(int(rng.integers(1, 4)), int(rng.integers(1, 9))))


@QUANTIZED
def test_quantized_chunked_prefill(cache_format: str) -> None:
    batch = Batch(((150, 150),), head_size=32, v_head_size=32, cache_format=cache_format)
    whole = Case(batch)
    expected = whole.run()
    for begin, end in ((0, 64), (64, 65), (65, 130), (130, 150)):
        part = Case(replace(batch, requests=((end - begin, end),)))
        part.keys, part.values = whole.keys[:end], whole.values[:end]
        part.write()
        assert np.array_equal(part.seen_keys, whole.seen_keys[:end])
        assert np.array_equal(part.seen_values, whole.seen_values[:end])
        part.query.array[...] = whole.query.array[begin:end]
        part.check(part.run(), expected[begin:end].astype(np.float64))


@QUANTIZED
def test_quantized_bad_data(cache_format: str) -> None:
    """A NaN in a key reaches the rows that see it, one in a value the rows of its tile at most."""
    batch = Batch(((40, 40), (3, 30)), 2, 1, 32, 32, cache_format=cache_format)
    case = Case(batch)
    expected = case.reference()
    good = case.keys.copy()
    case.keys[20, 0, 3] = NAN["bf16"]
    case.write()
    actual = case.run()
    clean = np.r_[0:20, 40:43]
    case.check(actual[clean], expected[clean])
    assert np.isnan(actual[20:40]).all()
    case.keys = good
    case.values[20, 0, 3] = NAN["bf16"]
    case.write()
    actual = case.run()
    clean = np.r_[0:16, 40:43]
    case.seen_values = np.nan_to_num(case.seen_values)
    case.check(actual[clean], expected[clean])
    assert np.isnan(actual[20:40, :, 3]).all()


def test_int8_keeps_small_weights() -> None:
    """One token takes a tenth of the weight, a thousand others the rest between them: none may be rounded off."""
    case = Case(Batch(((1, 1000),), 1, 1, 16, 16, dtype="f32", cache_format="int8", scale=1.0))
    case.query.array[...] = 1
    case.keys[...] = -np.log(9000) / 16
    case.keys[500] = -np.log(1000) / 16 + 1e-3
    case.values = np.ones_like(case.values)
    case.values[500] = -1
    case.write()
    case.check(case.run())


def test_workspace_serves_other_shapes() -> None:
    """The counters of split tasks stay at zero when head size and team change."""
    workspace = np.zeros(lib.vac_attention_workspace_size(64, 64, 16) + 64, np.uint8)
    workspace = workspace[-workspace.ctypes.data % 64 :]
    for head_size, planned in ((64, 16), (16, 3), (32, 8), (64, 16)):
        case = Case(Batch(((1, 900), (3, 400)), head_size=head_size, v_head_size=head_size, num_heads=8))
        case.check(case.run(2, planned, workspace))


@ALL_DTYPES
def test_speculative_decode(dtype: str) -> None:
    requests = tuple((q, 50 + 3 * q) for q in range(2, 17))
    case = Case(Batch(requests, num_heads=4, num_kv_heads=1, dtype=dtype, head_size=32, v_head_size=32))
    case.check(case.run())


@ALL_DTYPES
@pytest.mark.parametrize("num_threads", [1, 3, 8])
def test_cross_attention(dtype: str, num_threads: int) -> None:
    """Queries of one sequence on keys of another: fewer, as many, more than queries, and none."""
    case = Case(
        Batch(requests=[(1, 700), (4, 150), (50, 3), (1, 1), (40, 40), (5, 0), (70, 20)], dtype=dtype, causal=False)
    )
    case.check(case.run(num_threads))


@ALL_DTYPES
def test_chunked_prefill_equals_whole_prefill(dtype: str) -> None:
    whole = Case(Batch(((150, 150),), dtype=dtype, head_size=32, v_head_size=32))
    expected = whole.run()
    for begin, end in ((0, 64), (64, 65), (65, 130), (130, 150)):
        part = Case(Batch(((end - begin, end),), dtype=dtype, head_size=32, v_head_size=32))
        part.keys, part.values = whole.keys[:end], whole.values[:end]
        part.write()
        part.query.array[...] = whole.query.array[begin:end]
        part.check(part.run(), expected[begin:end].astype(np.float64))


@ALL_DTYPES
def test_scores_far_apart(dtype: str) -> None:
    """Weights down to 0, and maxima that grow from chunk to chunk."""
    case = Case(Batch(((2, 1100), (20, 280)), dtype=dtype, head_size=32, v_head_size=32, score_range=40.0))
    scale = np.linspace(0.01, 1, len(case.keys))[:, None, None]
    case.keys = encode(decode(case.keys, dtype) * scale, dtype)
    case.write()
    case.check(case.run())


@ALL_DTYPES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_data_stays_in_its_rows(dtype: str, bad: float) -> None:
    """A NaN or infinite key reaches the rows that see it, and no others."""
    case = Case(Batch(((40, 40), (3, 30)), dtype=dtype, head_size=32, v_head_size=32, num_heads=2, num_kv_heads=1))
    expected = case.reference()
    case.keys[20] = encode(np.full((1, 32), bad), dtype)
    case.write()
    actual = case.run()
    clean = np.r_[0:20, 40:43]
    case.check(actual[clean], expected[clean])
    if np.isnan(bad):
        assert np.isnan(actual[20:40]).all()


@ALL_DTYPES
def test_strides(dtype: str) -> None:
    """Query and output as slices of wider tensors; nothing beside the output is touched."""
    case = Case(Batch(dtype=dtype))
    expected = case.reference()
    b, tokens = case.batch, len(case.query.array)
    wide = np.full((tokens, b.num_heads + 3, b.head_size + 8), NAN[dtype])
    wide[:, 1:-2, :-8] = case.query.array
    out = np.full((tokens, b.num_heads + 1, b.v_head_size + 16), NAN[dtype])
    plan, workspace = case.plan(2), make_workspace(b, 2)
    args = case.args(plan, workspace)
    args.query = pointer(wide, wide[0, 0].nbytes)
    args.query_token_stride, args.query_head_stride = wide[0].size, wide[0, 0].size
    args.output, args.output_token_stride, args.output_head_stride = pointer(out), out[0].size, out[0, 0].size
    run(kernel("attention"), args, 2)
    case.check(decode(out[:, :-1, :-16], dtype), expected)
    for rest in (out[:, -1], out[:, :, -16:]):
        assert np.isnan(decode(rest, dtype)).all()


@pytest.mark.parametrize("dtype, bits", [("bf16", 13), ("f16", 17), ("f32", 19)])
def test_exp(dtype: str, bits: int) -> None:
    x = np.concatenate(
        [-np.logspace(-6, np.log10(87.3), 20000), np.linspace(-20, 0, 20001), [-88.1, -1e3, -1e30, -np.inf, np.nan]]
    ).astype(np.float32)
    source, result = guarded(x), Guarded(len(x), np.float32)
    args = ffi.new("vac_exp_f32_args *")
    args.input = ffi.cast("float *", source.array.ctypes.data)
    args.output = ffi.cast("float *", result.array.ctypes.data)
    args.size, args.dtype = len(x), DTYPES[dtype]
    run(kernel("exp_f32"), args, 3)
    result.check()
    exact = np.exp(x[:-5].astype(np.float64))
    assert np.max(np.abs(result.array[:-5] / exact - 1)) < 2.0**-bits
    assert (result.array[-5:-1] == 0).all() and np.isnan(result.array[-1])


def test_plan_covers_every_pair_once() -> None:
    """2,000 random batches: no (row, head, key) is missing or done twice, ranges of a group fit, work is even."""
    rng = np.random.default_rng(0)
    for number in range(2000):
        num_reqs, num_threads = int(rng.integers(0, 7)), int(rng.choice([1, 2, 3, 4, 8, 16, 64]))
        num_kv_heads, group = int(rng.choice([1, 2, 8])), int(rng.choice([1, 4, 7, 40]))
        seq_lens = (2 ** rng.uniform(0, rng.uniform(1, 14), num_reqs)).astype(np.int32)
        query_lens = np.where(rng.random(num_reqs) < 0.6, 1, rng.integers(0, 1 + np.minimum(seq_lens, 300)))
        window = int(rng.choice([0, 0, 100, 4000]))
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        # Guard pages take longer than the plan.
        guard = number % 8 == 0
        heads = (num_kv_heads * group, num_kv_heads)
        plan = make_plan(starts, seq_lens, *heads, True, window, num_threads, guard=guard)
        check_plan(plan, query_lens, seq_lens, num_kv_heads, group, num_threads)


def check_plan(
    plan: np.ndarray, query_lens: np.ndarray, seq_lens: np.ndarray, num_kv_heads: int, group: int, num_threads: int
) -> None:
    num_tasks = int(plan[0])
    tasks = plan[plan[4] : plan[4] + num_tasks * lib.VAC_TASK_SIZE].reshape(num_tasks, lib.VAC_TASK_SIZE)
    order = plan[16 : 16 + num_tasks]
    assert (np.bincount(order, minlength=num_tasks) == 1).all()
    assert plan[1] == num_threads and plan[2] <= 96 * num_threads and plan[3] <= 4096
    r, h0, h1, r0, r1, k0, k1, group_of, partial_row, split, splits, cost = tasks.T.astype(np.int64)
    rows, last = (query_lens * group)[r], k1 == 2**31 - 1
    assert ((h0 >= 0) & (h0 < h1) & (h1 <= num_kv_heads) & (r0 >= 0) & (r0 < r1) & (r1 <= rows)).all()
    assert ((r0 % 32 == 0) & ((r1 % 32 == 0) | (r1 == rows))).all()
    assert ((k0 >= 0) & (k0 < k1) & (k0 % 128 == 0) & (last | (k1 % 128 == 0))).all()
    check_coverage(tasks, query_lens * group, seq_lens, num_kv_heads)
    # The splits of a group come one after the other, and share its rows of partial results.
    grouped = np.flatnonzero(group_of >= 0)
    assert ((h1 - h0)[grouped] == 1).all() and ((r1 - r0)[grouped] <= 32).all()
    starts = grouped[split[grouped] == 0]
    assert len(starts) == plan[3] and (group_of[starts] == np.arange(plan[3])).all()
    assert (splits[starts].sum() if len(starts) else 0) == len(grouped)
    padded = -(-(r1 - r0) // 4) * 4
    assert (partial_row[grouped] == np.concatenate([[0], np.cumsum(padded[grouped])])[:-1]).all()
    assert padded[grouped].sum() == plan[2]
    first = np.repeat(starts, splits[starts])
    assert (split[grouped] == grouped - first).all() and (group_of[grouped] == group_of[first]).all()
    assert (padded[grouped] == padded[first]).all() and (splits[grouped] == splits[first]).all()
    if num_tasks:
        cost = tasks[order, 11].view(np.float32)
        busy = [0.0] * num_threads
        for c in cost.tolist():
            heapq.heapreplace(busy, busy[0] + c)
        # No task can be smaller than 32 rows on 128 keys (and what comes with them).
        assert max(busy) <= 1.3 * cost.sum() / num_threads + 32 * (128 + 80)


def check_coverage(tasks: np.ndarray, rows: np.ndarray, seq_lens: np.ndarray, num_kv_heads: int) -> None:
    """Marks both ends of each task in the boxes [heads, tiles of 32 rows, 128 keys], and sums along the axes."""
    for request in range(len(rows)):
        shape = np.array([num_kv_heads, -(-int(rows[request]) // 32), -(-int(seq_lens[request]) // 128)])
        ends = np.zeros(shape + 1, np.int32)
        mine = tasks[tasks[:, 0] == request]
        h = mine[:, 1:3]
        row = np.stack([mine[:, 3] // 32, -(-mine[:, 4] // 32)], axis=1)
        key = np.minimum(mine[:, 5:7] // 128, shape[2])
        for corner in itertools.product((0, 1), repeat=3):
            sign = -1 if sum(corner) % 2 else 1
            np.add.at(ends, (h[:, corner[0]], row[:, corner[1]], key[:, corner[2]]), sign)
        for axis in range(3):
            ends = np.cumsum(ends, axis=axis)
        assert (ends[:-1, :-1, :-1] == 1).all()


def test_plan_rejects() -> None:
    starts, lengths = np.array([0, 3], np.int32), np.array([5], np.int32)
    size = lib.vac_attention_plan_size(1, 4)
    plan = np.zeros(size // 4, np.int32)

    def status(nbytes: int = size, **changes: object) -> int:
        args = ffi.new("vac_attention_plan_args *")
        args.query_start_loc = ffi.cast("int32_t *", starts.ctypes.data)
        args.seq_lens = ffi.cast("int32_t *", lengths.ctypes.data)
        args.num_reqs, args.num_heads, args.num_kv_heads, args.num_threads = 1, 4, 2, 4
        for name, value in changes.items():
            setattr(args, name, value)
        return lib.vac_attention_plan(args, ffi.cast("int32_t *", plan.ctypes.data), nbytes)

    assert status(causal=1) == 0
    assert status(size - 4) == lib.VAC_INVALID_ARGUMENT
    for changes in ({"num_heads": 5}, {"num_kv_heads": 0}, {"num_threads": 0}, {"seq_lens": ffi.NULL}):
        assert status(**changes) == lib.VAC_INVALID_ARGUMENT
    lengths[0] = 2
    assert status(causal=1) == lib.VAC_INVALID_ARGUMENT
    assert status(causal=0) == 0, "more queries than keys, as in cross attention"
    lengths[0] = -1
    assert status(causal=0) == lib.VAC_INVALID_ARGUMENT


def test_check_refuses() -> None:
    case = Case(Batch())
    plan, workspace = case.plan(1), make_workspace(case.batch, 1)
    for name, value in {
        "head_size": 72, "v_head_size": 0, "block_size": 24, "num_kv_heads": 3, "cache_head_stride": 12
    }.items():  # fmt: skip
        args = case.args(plan, workspace)
        setattr(args, name, value)
        assert lib.vac_attention_check(args) == lib.VAC_INVALID_ARGUMENT, name
    args = case.args(plan, workspace)
    args.dtype = 9
    assert lib.vac_attention_check(args) == lib.VAC_UNSUPPORTED
