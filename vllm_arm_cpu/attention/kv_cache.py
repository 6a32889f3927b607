"""The paged KV cache: slots of a step's tokens, and writing keys and values into them.

vLLM hands out one tensor [num_blocks, num_kv_heads, block_size, head_size +
v_head_size] per layer. What lies inside one (block, head) page is ours to
order: see ``csrc/include/vac/attention.h``.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import DTYPES, Call, pointer

ffi = library.ffi
_slot_mapping: Call | None = None


def compute_slot_mapping(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    """``slot_mapping[t] = block_table[r, pos // block_size] * block_size + pos % block_size``.

    query_start_loc: int32 [num_reqs + 1]; positions: int64 [num_tokens];
    block_table: int32 [>= num_reqs, blocks]; slot_mapping: int64
    [>= num_tokens], written. Tokens behind the last request get -1.
    """
    global _slot_mapping
    if _slot_mapping is None:
        _slot_mapping = Call(("vac_slot_mapping", "vac_slot_mapping_args"))
    args = _slot_mapping.args[0]
    args.query_start_loc = ffi.cast("int32_t *", query_start_loc.data_ptr())
    args.positions = ffi.cast("int64_t *", positions.data_ptr())
    args.block_table = ffi.cast("int32_t *", block_table.data_ptr())
    args.slot_mapping = ffi.cast("int64_t *", slot_mapping.data_ptr())
    args.block_table_stride = block_table.stride(0)
    args.num_reqs = query_start_loc.shape[0] - 1
    args.num_tokens = positions.shape[0]
    args.block_size = block_size
    # A few hundred tokens take less time than waking a team.
    _slot_mapping.run(1 if positions.shape[0] < 4096 else 0)


FORMATS = {
    "auto": 0,
    "bfloat16": 0,
    "float16": 0,
    "int8_per_token_head": 1,  # --kv-cache-dtype int8, by compat/kv_cache_dtype.py
    "fp8": 2,
    "fp8_e4m3": 2,
}
"""``vac_kv_cache_format`` of vLLM's ``--kv-cache-dtype`` values; 0 stores the model's own type."""

SCALE_BYTES = 8
"""INT8: two FP32 scales, K's and V's, for each token and head beside the block."""


def set_cache(
    args: Any, kv_cache: torch.Tensor, head_size: int, v_head_size: int, dtype: torch.dtype, kv_cache_dtype: str
) -> None:
    """Fill the fields about the cache of a write's or an attention's argument struct.

    kv_cache: [blocks, kv_heads, block_size, width], of the model's dtype or
    bytes; width counts what a token and head take, scales included. dtype: of
    query, key, value and output.

    Raises:
        ValueError: pages that are not contiguous, or of another size.
    """
    cache_format = FORMATS[kv_cache_dtype]
    _, _, block_size, width = kv_cache.shape
    expected = head_size + v_head_size + (SCALE_BYTES if cache_format == 1 else 0)
    if width != expected or kv_cache.stride(3) != 1 or kv_cache.stride(2) != width:
        raise ValueError(
            f"KV cache of shape {tuple(kv_cache.shape)} and strides {kv_cache.stride()} does not hold pages of "
            f"{block_size} x {expected} elements"
        )
    args.kv_cache = pointer(kv_cache)
    args.cache_block_stride, args.cache_head_stride = kv_cache.stride(0), kv_cache.stride(1)
    args.head_size, args.v_head_size, args.block_size = head_size, v_head_size, block_size
    args.dtype, args.cache_format = DTYPES[dtype], cache_format


def set_write(args: Any, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor, num_tokens: int) -> None:
    """Fill the fields about the tokens of a ``vac_kv_cache_write_args``.

    key: [tokens, kv_heads, head_size], value: [tokens, kv_heads, v_head_size],
    last dimension contiguous; slot_mapping: int64 [>= num_tokens].
    """
    args.key, args.value = pointer(key), pointer(value)
    args.key_token_stride, args.key_head_stride = key.stride(0), key.stride(1)
    args.value_token_stride, args.value_head_stride = value.stride(0), value.stride(1)
    args.slot_mapping = ffi.cast("int64_t *", slot_mapping.data_ptr())
    args.num_tokens, args.num_kv_heads = num_tokens, key.shape[1]
