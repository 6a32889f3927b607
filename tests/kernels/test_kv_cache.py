"""Writing the paged KV cache, in the documented layout, and finding its slots."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.support import DTYPES, Guarded, ffi, guarded, kernel, lib, pointer, run

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
    for num_threads in (1, 2, 3, 8):
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
