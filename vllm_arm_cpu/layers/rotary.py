"""Rotary position embedding on our kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope import Phi3LongRoPEScaledRotaryEmbedding

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


def _stored_cache(layer: Any) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """The cosines and sines that a layer takes, [positions, rotary_dim], and what computes them in FP32."""
    if not isinstance(layer, Phi3LongRoPEScaledRotaryEmbedding):
        return layer.cos_sin_cache, layer._compute_cos_sin_cache
    # Of the two tables, the short one first, a model uses the same for all sequences.
    both, short = layer.long_short_cos_sin_cache, layer.original_max_position_embeddings
    if layer.use_long_rope:
        return both[short:], functools.partial(
            layer._compute_cos_sin_cache, layer.max_position_embeddings, layer.long_factor, layer.long_mscale
        )
    return both[:short], functools.partial(layer._compute_cos_sin_cache, short, layer.short_factor, layer.short_mscale)


def _fp32_cache(layer: Any) -> torch.Tensor:
    """The cosines and sines in FP32 where they can be had again.

    vLLM rounds them to the model's dtype, which costs BF16 models accuracy at
    long positions. Classes that do more to the cache keep theirs.
    """
    kept: torch.Tensor | None = layer.__dict__.get("_vac_cos_sin_cache")
    if kept is None:
        kept, compute = _stored_cache(layer)
        if kept.dtype != torch.float32:
            exact = compute()
            if exact.shape == kept.shape and torch.equal(exact.to(kept.dtype), kept):
                kept = exact.to(torch.float32).contiguous()
        layer.__dict__["_vac_cos_sin_cache"] = kept
    return kept


def _rows_ok(tensor: torch.Tensor) -> bool:
    return tensor.dim() in (2, 3) and tensor.stride(-1) == 1 and tensor.dtype in DTYPES


def _rotated(layer: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None) -> bool:
    """Rotate query and key in place, if our kernel can."""
    if torch.compiler.is_compiling():
        # Making the FP32 table cannot be traced.
        return False
    cache = _fp32_cache(layer)
    usable = (
        positions.dim() == 1
        and positions.is_contiguous()
        and positions.dtype == torch.int64
        and _rows_ok(query)
        and (key is None or (_rows_ok(key) and key.dtype == query.dtype))
        and cache.dtype in (torch.float32, query.dtype)
    )
    if usable:
        rotate(positions, query, key, layer.head_size, cache, getattr(layer, "is_neox_style", True))
    return usable


def forward_cpu(
    self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Query and key, rotated in place."""
    if _rotated(self, positions, query, key):
        return query, key
    native: tuple[torch.Tensor, torch.Tensor | None] = self.forward_native(positions, query, key)
    return native


_upstream_forward_long = Phi3LongRoPEScaledRotaryEmbedding.forward


def forward_long(
    self: Phi3LongRoPEScaledRotaryEmbedding,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Query and key [tokens, heads * head_size], rotated in place; Phi's two tables, for short and long models."""
    if offsets is None and query.dim() == 2 and _rotated(self, positions, query, key):
        return query, key
    upstream: tuple[torch.Tensor, torch.Tensor | None] = _upstream_forward_long(self, positions, query, key, offsets)
    return upstream


def not_native(module: Any, dtype: torch.dtype) -> str | None:
    """Why a rotary embedding cannot be an op of a program over ``dtype``, or None."""
    ours = getattr(getattr(module, "_forward_method", None), "__func__", None) is forward_cpu
    if not ours and getattr(type(module), "forward", None) is not forward_long:
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
    args.is_neox_style = getattr(module, "is_neox_style", True)
    args.dtype, args.cache_dtype = DTYPES[dtype], DTYPES[table.dtype]


def register() -> None:
    """Replace ``RotaryEmbedding.forward_cpu``, and what Phi's class has instead.

    vLLM's registry replaces one class by name, while the scaled variants
    (Llama 3, YaRN, ...) inherit this method; so the method is replaced.
    """
    RotaryEmbedding.forward_cpu = forward_cpu
    Phi3LongRoPEScaledRotaryEmbedding.forward = forward_long
