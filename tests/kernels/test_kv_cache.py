"""Writing the paged KV cache, in the documented layout, and finding its slots."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.support import DTYPES, Guarded, decode, encode, ffi, guarded, kernel, lib, pointer, run
from tests.kernels.test_attention import FORMATS, quantize, read_cache

STORAGE = {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16}


def bfmmla(dtype: str) -> bool:
    return dtype == "bf16" and lib.vac_tier() == lib.VAC_TIER_BF16_I8MM


def unpack(pages: np.ndarray, head_size: int, v_head_size: int, block_size: int, dtype: str) -> tuple:
    """Pages [..., page] as K [..., block_size, head_size] and V [..., block_size, v_head_size]."""
    lead = pages.shape[:-1]
    k, v = np.split(pages, [block_size * head_size], axis=-1)
    if bfmmla(dtype):
        # [panel, depth/4, column pair, 2, 4]; K's pairs of tokens are in the order 0 2 1 3 4 6 5 7.
        k = k.reshape(*lead, block_size // 16, head_size // 4, 8, 2, 4)[..., [0, 2, 1, 3, 4, 6, 5, 7], :, :]
        k = np.moveaxis(k, -4, -2).reshape(*lead, block_size, head_size)
        v = v.reshape(*lead, v_head_size // 16, block_size // 4, 8, 2, 4)
        v = np.moveaxis(v, [-4, -1], [-5, -4]).reshape(*lead, block_size, v_head_size)
    else:
        k = np.swapaxes(k.reshape(*lead, block_size // 16, head_size, 16), -1, -2).reshape(*lead, block_size, head_size)
        v = np.swapaxes(v.reshape(*lead, v_head_size // 16, block_size, 16), -2, -3)
        v = v.reshape(*lead, block_size, v_head_size)
    return k, v


SLOTS = {
    "prefill": lambda rng, size: np.arange(16, 16 + 37),
    "one": lambda rng, size: np.array([size - 3]),
    "padded": lambda rng, size: np.concatenate([[5, -1, 6, 7, -1], np.full(3, -1)]),
    "any order": lambda rng, size: rng.permutation(size)[:45],
    "backwards": lambda rng, size: np.arange(40, 3, -1),
    "runs": lambda rng, size: np.concatenate([np.arange(64, 75), [3], np.arange(20, 30), [2, 1, 0], np.arange(4, 12)]),
    "none": lambda rng, size: np.zeros(0, np.int64),
}


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(
    "num_kv_heads, head_size, v_head_size, block_size", [(1, 64, 64, 16), (2, 48, 80, 32), (5, 128, 16, 48)]
)
@pytest.mark.parametrize("slots", SLOTS)
def test_write(dtype: str, num_kv_heads: int, head_size: int, v_head_size: int, block_size: int, slots: str) -> None:
    rng = np.random.default_rng(0)
    num_blocks = 96 // block_size
    slot_mapping = SLOTS[slots](rng, num_blocks * block_size).astype(np.int64)
    num_tokens = len(slot_mapping)
    page = block_size * (head_size + v_head_size)
    limit = np.iinfo(STORAGE[dtype]).max
    before = rng.integers(0, limit, (num_blocks, num_kv_heads, page), STORAGE[dtype])
    for num_threads in (1, 3, 8):
        at_end = num_threads % 2 == 1
        cache = guarded(before, at_end)
        # Tokens and heads lie further apart than needed.
        key = guarded(rng.integers(0, limit, (num_tokens, num_kv_heads + 1, head_size), STORAGE[dtype]), at_end)
        value = guarded(rng.integers(0, limit, (num_tokens, num_kv_heads, v_head_size + 16), STORAGE[dtype]), at_end)
        args = ffi.new("vac_kv_cache_write_args *")
        args.key, args.value, args.kv_cache = (pointer(m.array) for m in (key, value, cache))
        args.slot_mapping = ffi.cast("int64_t *", slot_mapping.ctypes.data)
        args.key_token_stride, args.key_head_stride = (num_kv_heads + 1) * head_size, head_size
        args.value_token_stride = num_kv_heads * (v_head_size + 16)
        args.value_head_stride = v_head_size + 16
        args.cache_block_stride, args.cache_head_stride = num_kv_heads * page, page
        args.num_tokens, args.num_kv_heads, args.block_size = num_tokens, num_kv_heads, block_size
        args.head_size, args.v_head_size, args.dtype = head_size, v_head_size, DTYPES[dtype]
        run(kernel("kv_cache_write"), args, num_threads)
        for memory in (key, value, cache):
            memory.check()
        expected_k, expected_v = (a.copy() for a in unpack(before, head_size, v_head_size, block_size, dtype))
        written = slot_mapping >= 0
        block, offset = slot_mapping[written] // block_size, slot_mapping[written] % block_size
        expected_k[block, :, offset] = key.array[written, :num_kv_heads]
        expected_v[block, :, offset] = value.array[written, :, :v_head_size]
        k, v = unpack(cache.array, head_size, v_head_size, block_size, dtype)
        assert np.array_equal(k, expected_k) and np.array_equal(v, expected_v)


def e4m3(x: np.ndarray) -> np.ndarray:
    """FP32 values rounded to E4M3: 3 bits of mantissa, steps of 2^-9 at least, at most 448."""
    magnitude = np.minimum(np.abs(x), np.float32(448))
    step = np.maximum(np.frexp(np.where(np.isnan(x), 1, magnitude))[1] - 4, -9)
    return np.copysign(np.ldexp(np.rint(np.ldexp(magnitude, -step)), step), x)


@pytest.mark.parametrize("cache_format", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(
    "num_kv_heads, head_size, v_head_size, block_size", [(1, 64, 64, 16), (2, 48, 80, 32), (5, 128, 16, 48)]
)
def test_write_quantized(
    cache_format: str, dtype: str, num_kv_heads: int, head_size: int, v_head_size: int, block_size: int
) -> None:
    """What is read back is what the formula gives, to the bit; other slots keep their bytes."""
    rng = np.random.default_rng(0)
    num_blocks = 96 // block_size
    page = lib.vac_kv_cache_page_size(FORMATS[cache_format], DTYPES[dtype], head_size, v_head_size, block_size)
    assert page == block_size * (head_size + v_head_size + (8 if cache_format == "int8" else 0))
    k_scale, v_scale = (0.0, 0.0) if cache_format == "int8" else (0.75, 0.0)
    every = np.arange(num_blocks * block_size)
    for num_threads, slots in enumerate(("prefill", "padded", "any order", "runs", "none"), 1):
        slot_mapping = SLOTS[slots](rng, len(every)).astype(np.int64)
        num_tokens, at_end = len(slot_mapping), num_threads % 2 == 1
        before = rng.integers(0, 127, (num_blocks, num_kv_heads, page), np.uint8)
        cache = guarded(before, at_end)
        tensors = []
        for size in (head_size, v_head_size):
            x = rng.standard_normal((num_tokens, num_kv_heads, size)) * 2.0 ** rng.uniform(-12, 10, (num_tokens, 1, 1))
            x[rng.random(x.shape) < 0.1] = 0
            x[rng.random(x.shape[:2]) < 0.1] = 0
            tensors.append(guarded(encode(x, dtype), at_end))
        args = ffi.new("vac_kv_cache_write_args *")
        args.key, args.value, args.kv_cache = (pointer(m.array) for m in (*tensors, cache))
        args.slot_mapping = ffi.cast("int64_t *", slot_mapping.ctypes.data)
        args.key_token_stride, args.key_head_stride = num_kv_heads * head_size, head_size
        args.value_token_stride, args.value_head_stride = num_kv_heads * v_head_size, v_head_size
        args.cache_block_stride, args.cache_head_stride = num_kv_heads * page, page
        args.num_tokens, args.num_kv_heads, args.block_size = num_tokens, num_kv_heads, block_size
        args.head_size, args.v_head_size, args.dtype = head_size, v_head_size, DTYPES[dtype]
        args.cache_format, args.k_scale, args.v_scale = FORMATS[cache_format], k_scale, v_scale
        run(kernel("kv_cache_write"), args, num_threads)
        for memory in (*tensors, cache):
            memory.check()
        shape = (num_kv_heads, head_size, v_head_size, block_size, dtype, cache_format, k_scale, v_scale)
        old, new = (read_cache(pages, every, *shape, num_threads) for pages in (before, cache.array))
        written = slot_mapping >= 0
        for x, scale, expected, actual in zip(tensors, (k_scale, v_scale), old, new, strict=True):
            values = decode(x.array[written], dtype)
            if cache_format == "int8":
                codes, scales = quantize(values) if len(values) else (values, values[..., 0])
                quantized = codes.astype(np.float32) * scales[..., None]
            else:
                scale = np.float32(scale or 1)
                quantized = e4m3(values * (np.float32(1) / scale)) * scale
            expected[slot_mapping[written]] = quantized
            assert np.array_equal(actual, expected)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_every_e4m3(dtype: str) -> None:
    """Each code is read as itself and written as itself; what lies between or beyond is rounded."""
    codes = np.arange(256, dtype=np.uint8)
    exact = np.where(codes & 0x78, (8 + (codes & 7)) * 2.0 ** ((codes >> 3 & 15) - 10.0), (codes & 7) * 2.0**-9)
    exact = np.where(codes & 0x7F == 0x7F, np.nan, np.where(codes & 0x80, -exact, exact))
    between = np.sort(np.concatenate([exact[:127], (exact[:126] + exact[1:127]) / 2, [460, 480, 3e4, np.inf]]))
    x = np.concatenate([exact, between, -between, [np.nan]])
    x = np.pad(x, (0, -len(x) % 16)).reshape(1, 1, -1)
    size = x.shape[-1]
    stored = encode(x, dtype)
    cache = np.zeros((1, 1, 16 * 2 * size), np.uint8)
    slots = np.array([3], np.int64)
    args = ffi.new("vac_kv_cache_write_args *")
    args.key, args.value, args.kv_cache = pointer(stored), pointer(stored), pointer(cache)
    args.slot_mapping = ffi.cast("int64_t *", slots.ctypes.data)
    args.cache_block_stride = args.cache_head_stride = cache.size
    args.num_tokens, args.num_kv_heads, args.block_size = 1, 1, 16
    args.head_size, args.v_head_size, args.dtype = size, size, DTYPES[dtype]
    args.cache_format = FORMATS["fp8"]
    run(kernel("kv_cache_write"), args)
    for actual in read_cache(cache, slots, 1, size, size, 16, dtype, "fp8"):
        assert np.array_equal(actual, e4m3(decode(stored, dtype)), equal_nan=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_int8_of_bad_data(bad: float) -> None:
    """A token's head with a NaN or an infinity is NaN as a whole."""
    x = encode(np.ones((2, 2, 16)), "bf16")
    x[1, 0, 5] = encode(np.array([bad]), "bf16")[0]
    page = lib.vac_kv_cache_page_size(FORMATS["int8"], DTYPES["bf16"], 16, 16, 16)
    cache, slots = np.zeros((1, 2, page), np.uint8), np.arange(2, dtype=np.int64)
    args = ffi.new("vac_kv_cache_write_args *")
    args.key, args.value, args.kv_cache = pointer(x), pointer(x), pointer(cache)
    args.slot_mapping = ffi.cast("int64_t *", slots.ctypes.data)
    args.key_token_stride = args.value_token_stride = 32
    args.key_head_stride = args.value_head_stride = 16
    args.cache_block_stride, args.cache_head_stride = 2 * page, page
    args.num_tokens, args.num_kv_heads, args.block_size = 2, 2, 16
    args.head_size, args.v_head_size, args.dtype = 16, 16, DTYPES["bf16"]
    args.cache_format = FORMATS["int8"]
    run(kernel("kv_cache_write"), args)
    for actual in read_cache(cache, slots, 2, 16, 16, 16, "bf16", "int8"):
        assert np.isnan(actual[1, 0]).all()
        assert np.allclose(np.delete(actual.reshape(4, 16), 2, axis=0), 1, rtol=2.0**-23, atol=0)


def test_read_of_elements() -> None:
    rng = np.random.default_rng(3)
    for dtype in ("bf16", "f16", "f32"):
        pages = rng.integers(0, 0x3F00, (3, 2, 16 * (32 + 48)), np.uint16).astype(STORAGE[dtype])
        slots = np.array([5, 47, -1, 20], np.int64)
        k, v = unpack(pages, 32, 48, 16, dtype)
        read = read_cache(pages, slots, 2, 32, 48, 16, dtype, "same")
        for actual, stored in zip(read, (k, v), strict=True):
            chosen = stored[slots[slots >= 0] // 16, :, slots[slots >= 0] % 16]
            if dtype != "bf16":
                chosen = chosen.view(np.float16 if dtype == "f16" else np.float32)
            assert np.array_equal(actual[slots >= 0], decode(chosen, dtype))


def test_page_size_refuses() -> None:
    size = lib.vac_kv_cache_page_size
    assert size(FORMATS["same"], DTYPES["bf16"], 128, 64, 16) == 16 * 192 * 2
    assert size(FORMATS["same"], DTYPES["f32"], 128, 64, 16) == 16 * 192 * 4
    assert size(9, DTYPES["bf16"], 128, 64, 16) == size(1, 9, 128, 64, 16) == size(1, 2, 128, 64, 24) == 0


@pytest.mark.parametrize("block_size", [1, 16, 48, 128])
@pytest.mark.parametrize("num_threads", [1, 3, 8])
def test_slot_mapping(block_size: int, num_threads: int) -> None:
    rng = np.random.default_rng(1)
    query_lens = np.array([1, 0, 17, 1, 5, 0])
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    num_tokens, padded = int(starts[-1]), int(starts[-1]) + 5
    positions = np.concatenate([np.arange(n) + rng.integers(0, 300) for n in query_lens] + [np.full(5, 7)])
    positions = guarded(positions.astype(np.int64))
    table = guarded(rng.integers(0, 1 << 20, (len(query_lens), 330 // block_size + 3), np.int32))
    result = Guarded(padded, np.int64, at_end=num_threads != 3)
    args = ffi.new("vac_slot_mapping_args *")
    args.query_start_loc = ffi.cast("int32_t *", starts.ctypes.data)
    args.positions = ffi.cast("int64_t *", positions.array.ctypes.data)
    args.block_table = ffi.cast("int32_t *", table.array.ctypes.data)
    args.slot_mapping = ffi.cast("int64_t *", result.array.ctypes.data)
    args.block_table_stride, args.num_reqs = table.array.shape[1], len(query_lens)
    args.num_tokens, args.block_size = padded, block_size
    run(kernel("slot_mapping"), args, num_threads)
    result.check()
    request = np.repeat(np.arange(len(query_lens)), query_lens)
    at = positions.array[:num_tokens]
    expected = table.array[request, at // block_size].astype(np.int64) * block_size + at % block_size
    assert np.array_equal(result.array, np.concatenate([expected, np.full(5, -1)]))
