"""Rotary position embedding on our kernel."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from vllm_arm_cpu.native.call import DTYPES, Call, pointer
from vllm_arm_cpu.native.library import ffi
from vllm_arm_cpu.native.program import Program, Rows, Slot

_call: Call | None = None


def rotate(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
) -> None:
    """Rotate query and key in place.

    positions: int64 [tokens]; query, key: [tokens, heads * head_size] or
    [tokens, heads, head_size], rows at any stride; cos_sin_cache:
    [positions, rotary_dim] of their dtype or FP32.
    """
    global _call
    if _call is None:
        _call = Call(("vac_rotary", "vac_rotary_args"))
    args = _call.args[0]
    num_tokens = positions.shape[0]
    args.positions = ffi.cast("int64_t *", positions.data_ptr())
    args.query, args.key = pointer(query), pointer(key)
    args.cos_sin_cache = pointer(cos_sin_cache)
    args.num_tokens = num_tokens
    args.num_heads = query.shape[-1] // head_size if query.dim() == 2 else query.shape[1]
    args.query_token_stride = query.stride(0)
    args.query_head_stride = head_size if query.dim() == 2 else query.stride(1)
    if key is not None:
        args.num_kv_heads = key.shape[-1] // head_size if key.dim() == 2 else key.shape[1]
        args.key_token_stride = key.stride(0)
        args.key_head_stride = head_size if key.dim() == 2 else key.stride(1)
    args.max_position, args.rot_dim = cos_sin_cache.shape
    args.is_neox_style = is_neox_style
    args.dtype, args.cache_dtype = DTYPES[query.dtype], DTYPES[cos_sin_cache.dtype]
    _call.run()


def _fp32_cache(layer: RotaryEmbedding) -> torch.Tensor:
    """The cosines and sines in FP32 where they can be had again.

    vLLM rounds them to the model's dtype, which costs BF16 models accuracy at
    long positions. Classes that do more to the cache keep theirs.
    """
    kept = layer.__dict__.get("_vac_cos_sin_cache")
    if kept is None:
        kept = layer.cos_sin_cache
        if kept.dtype != torch.float32:
            exact = layer._compute_cos_sin_cache()
            if exact.shape == kept.shape and torch.equal(exact.to(kept.dtype), kept):
                kept = exact.to(torch.float32).contiguous()
        layer.__dict__["_vac_cos_sin_cache"] = kept
    return kept


def _rows_ok(tensor: torch.Tensor) -> bool:
    return tensor.dim() in (2, 3) and tensor.stride(-1) == 1 and tensor.dtype in DTYPES


def forward_cpu(
    self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Query and key, rotated in place."""
    if torch.compiler.is_compiling():
        # Making the FP32 table cannot be traced.
        traced: tuple[torch.Tensor, torch.Tensor | None] = self.forward_native(positions, query, key)
        return traced
    cache = _fp32_cache(self)
    usable = (
        positions.dim() == 1
        and positions.is_contiguous()
        and positions.dtype == torch.int64
        and _rows_ok(query)
        and (key is None or (_rows_ok(key) and key.dtype == query.dtype))
        and cache.dtype in (torch.float32, query.dtype)
    )
    if not usable:
        native: tuple[torch.Tensor, torch.Tensor | None] = self.forward_native(positions, query, key)
        return native
    rotate(positions, query, key, self.head_size, cache, self.is_neox_style)
    return query, key


def not_native(module: Any, dtype: torch.dtype) -> str | None:
    """Why a rotary embedding cannot be an op of a program over ``dtype``, or None."""
    if getattr(getattr(module, "_forward_method", None), "__func__", None) is not forward_cpu:
        return f"its rotary embedding is {type(module).__name__}"
    if _fp32_cache(module).dtype not in (torch.float32, dtype):
        return f"its rotary table is {_fp32_cache(module).dtype}"
    return None


def add_rotary(
    program: Program,
    module: Any,
    dtype: torch.dtype,
    tokens: Slot,
    positions: Slot,
    query: Rows,
    key: Rows,
    heads: tuple[int, int],
) -> None:
    """Append the rotation of query [tokens, heads[0] * head_size] and key [tokens, heads[1] * head_size] to a program.

    positions: address of int64 [tokens].
    """
    table = _fp32_cache(module)
    args = program.op("vac_rotary", "vac_rotary_args", num_tokens=tokens, positions=positions, cos_sin_cache=table)
    program.rows(args, "query", query, "query_token_stride")
    program.rows(args, "key", key, "key_token_stride")
    args.num_heads, args.num_kv_heads = heads
    args.query_head_stride = args.key_head_stride = module.head_size
    args.max_position, args.rot_dim = table.shape
    args.is_neox_style = module.is_neox_style
    args.dtype, args.cache_dtype = DTYPES[dtype], DTYPES[table.dtype]


def register() -> None:
    """Replace ``RotaryEmbedding.forward_cpu``.

    vLLM's registry replaces one class by name, while the scaled variants
    (Llama 3, YaRN, ...) inherit this method; so the method is replaced.
    """
    RotaryEmbedding.forward_cpu = forward_cpu
