"""vLLM's CPU attention operators, as its tests call them, on our kernels.

The tests write a cache, plan a batch and attend through three functions of
``vllm._custom_ops``. :func:`install` puts ours in their place; attention goes
through the backend's own ``ArmAttentionImpl``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_arm_cpu.attention import backend
from vllm_arm_cpu.attention import kv_cache as cache
from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import Call

ffi = library.ffi

PLANNED_THREADS = 16
"""For plans that may split the keys of a request: the more threads, the more is split. Any team can follow them."""

_merged: dict[tuple[int, int], torch.Tensor] = {}


def _pages(key_cache: torch.Tensor, value_cache: torch.Tensor, *, new: bool = False) -> torch.Tensor:
    """The cache as we lay it out, [blocks, kv_heads, block_size, 2 * head_size].

    Where the two are halves of one tensor, as in the engine, it is that tensor's
    memory; else memory of its own, kept until :func:`forget`.
    """
    blocks, num_kv_heads, block_size, head_size = key_cache.shape
    shape = (blocks, num_kv_heads, block_size, 2 * head_size)
    half = block_size * head_size
    if value_cache.data_ptr() == key_cache.data_ptr() + half * key_cache.element_size():
        assert key_cache.stride(1) == 2 * half
        strides = (key_cache.stride(0), key_cache.stride(1), 2 * head_size, 1)
        return key_cache.as_strided(shape, strides)
    name = (key_cache.data_ptr(), value_cache.data_ptr())
    if new:
        _merged[name] = torch.empty(shape, dtype=key_cache.dtype)
    return _merged[name]


def cpu_attn_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    isa: str,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    """Write keys and values [tokens, kv_heads, head_size] into their slots; ``isa`` is upstream's affair."""
    call = Call(("vac_kv_cache_write", "vac_kv_cache_write_args"))
    (args,) = call.args
    pages = _pages(key_cache, value_cache, new=True)
    cache.set_cache(args, pages, key.shape[2], value.shape[2], key.dtype, kv_cache_dtype)
    cache.set_write(args, key, value, slot_mapping, key.shape[0])
    args.k_scale, args.v_scale = k_scale, v_scale
    call.run()


def cpu_attn_get_scheduler_metadata(
    num_reqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    seq_lens: torch.Tensor,
    dtype: torch.dtype,
    query_start_loc: torch.Tensor,
    causal: bool,
    sliding_window_size: int,
    isa: str,
    enable_kv_split: bool,
    dynamic_causal: torch.Tensor | None = None,
    kv_cache_dtype: str = "auto",
) -> torch.Tensor:
    """The batch's plan. One thread's never splits the keys of a request."""
    lib = library.load()
    args = ffi.new("vac_attention_plan_args *")
    causal_bytes = None if dynamic_causal is None else dynamic_causal.to(torch.uint8).contiguous()
    args.query_start_loc = ffi.cast("int32_t *", query_start_loc.data_ptr())
    args.seq_lens = ffi.cast("int32_t *", seq_lens.data_ptr())
    args.request_causal = ffi.NULL if causal_bytes is None else ffi.cast("uint8_t *", causal_bytes.data_ptr())
    args.num_reqs, args.num_heads, args.num_kv_heads, args.causal = num_reqs, num_heads, num_kv_heads, causal
    args.sliding_window = args.sliding_window_ahead = sliding_window_size
    args.num_threads = PLANNED_THREADS if enable_kv_split else 1
    plan = torch.empty(lib.vac_attention_plan_size(num_reqs, args.num_threads) // 4, dtype=torch.int32)
    assert lib.vac_attention_plan(args, ffi.cast("int32_t *", plan.data_ptr()), plan.numel() * 4) == 0
    return plan


def cpu_attention_with_kv_cache(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int,
    block_table: torch.Tensor,
    softcap: float,
    scheduler_metadata: torch.Tensor,
    s_aux: torch.Tensor | None,
    dynamic_causal: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    """Attend, through the backend's layer, to what the cache holds."""
    lib = library.load()
    head_size, num_threads = query.shape[2], lib.vac_max_threads()
    # The layer's workspace is for its own team; these plans are for a larger one.
    size = lib.vac_attention_workspace_size(head_size, head_size, max(PLANNED_THREADS, num_threads))
    workspace = backend._workspaces.get((head_size, head_size, num_threads))
    if workspace is None or workspace.numel() < size + 64:
        backend._workspaces[head_size, head_size, num_threads] = torch.zeros(size + 64, dtype=torch.uint8)
    layer = backend.ArmAttentionImpl(
        num_heads=query.shape[1],
        head_size=head_size,
        scale=scale,
        num_kv_heads=key_cache.shape[1],
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.tolist(),
        sliding_window=sliding_window if sliding_window > 0 else None,
        kv_cache_dtype=kv_cache_dtype,
        logits_soft_cap=softcap,
        sinks=s_aux,
    )
    metadata = backend.ArmAttentionMetadata(
        num_actual_tokens=query.shape[0],
        max_query_len=int((query_start_loc[1:] - query_start_loc[:-1]).max()),
        max_seq_len=int(seq_lens.max()),
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=block_table,
        slot_mapping=torch.empty(0, dtype=torch.int64),
        causal=causal,
        request_causal=None if dynamic_causal is None else dynamic_causal.to(torch.uint8).contiguous(),
        plan=scheduler_metadata,
    )
    scales = SimpleNamespace(_k_scale_float=k_scale, _v_scale_float=v_scale)
    # A row that is not written must not look right.
    output.fill_(torch.nan)
    layer.forward(scales, query, None, None, _pages(key_cache, value_cache), metadata, output)
    assert lib.vac_attention_check(layer._attend.args[0]) == 0


class _EveryFormat:
    """The platform, but for what the tests ask before they use an FP8 cache: upstream has one on x86 only."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def get_cpu_architecture(self) -> Any:
        from vllm.platforms import CpuArchEnum

        return CpuArchEnum.X86


def install() -> None:
    """Put the three functions into ``vllm._custom_ops``, before a test module imports them from there."""
    import vllm._custom_ops as ops

    for function in (cpu_attn_reshape_and_cache, cpu_attn_get_scheduler_metadata, cpu_attention_with_kv_cache):
        assert callable(getattr(ops, function.__name__)), "vLLM has no such operator any more"
        setattr(ops, function.__name__, function)


def prepare(item: pytest.Item) -> None:
    """What a test module needs beyond :func:`install`, once it is imported."""
    module = getattr(item, "module", None)
    if getattr(module, "cpu_attention_with_kv_cache", None) is cpu_attention_with_kv_cache:
        from vllm.platforms import current_platform

        module.current_platform = _EveryFormat(current_platform)


def forget() -> None:
    """Let go of caches that :func:`_pages` made."""
    _merged.clear()
