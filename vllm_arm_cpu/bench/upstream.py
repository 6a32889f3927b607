"""vLLM's own Arm CPU kernels on the benchmark's cases, for comparison: vLLM 0.32, torch 2.13."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Peer:
    """A prepared case: what to call, and how far its result is from an FP32 reference, relative."""

    call: Callable[[], object]
    relative_error: Callable[[], float] = lambda: math.nan


def load() -> dict[str, Callable[[], Peer]]:
    """Name -> function that prepares the case; empty where torch or vLLM's compiled ops do not load."""
    try:
        import torch
    except ImportError:
        return {}
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return {}
    try:
        # The library alone: importing vllm takes long and is not needed.
        torch.ops.load_library(str(Path(spec.origin).parent / "_C.abi3.so"))
    except OSError:
        return {}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return _cases(torch, torch.ops._C)


def _cases(torch: Any, ops: Any) -> dict[str, Callable[[], Peer]]:
    bf16 = torch.bfloat16

    def compared(call: Callable[[], object], result: Callable[[], Any], reference: Any) -> Peer:
        return Peer(call, lambda: float((result().float() - reference).norm() / reference.norm()))

    def filled_cache(tokens: int, heads: int, dim: int, block: int) -> tuple[Any, ...]:
        blocks = -(-tokens // block)
        kv = torch.zeros(blocks + 1, heads, block, 2 * dim, dtype=bf16)
        key, value = kv.view(blocks + 1, heads, block * 2, dim).chunk(2, dim=2)
        k, v = torch.randn(2, tokens, heads, dim, dtype=bf16)

        def write() -> None:
            ops.cpu_attn_reshape_and_cache(k, v, key, value, torch.arange(tokens), "neon", 1.0, 1.0, "auto")

        return k, v, key, value, blocks, write

    def cache_write(tokens: int) -> Peer:
        return Peer(filled_cache(tokens, 8, 128, 128)[-1])

    def attention(q_len: int, ctx: int, kv_heads: int = 8, dim: int = 128) -> Peer:
        heads = 32
        k, v, key, value, blocks, write = filled_cache(ctx, kv_heads, dim, 128)
        write()
        q = torch.randn(q_len, heads, dim, dtype=bf16)
        out = torch.empty_like(q)
        start, lens = torch.tensor([0, q_len], dtype=torch.int32), torch.tensor([ctx], dtype=torch.int32)
        table = torch.arange(blocks, dtype=torch.int32)[None]

        def call() -> None:
            plan = ops.get_scheduler_metadata(
                *(1, heads, kv_heads, dim, lens, bf16, start, True, -1, "neon", True, None, "auto")
            )
            ops.cpu_attention_with_kv_cache(
                *(q, key, value, out, start, lens, dim**-0.5, True, None, -1, table, 0.0, plan),
                *(None, None, 1.0, 1.0, "auto"),
            )

        wide_k, wide_v = (t.float().repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), wide_k) / math.sqrt(dim)
        hidden = torch.arange(ctx)[None] > (ctx - q_len + torch.arange(q_len))[:, None]
        scores.masked_fill_(hidden, -math.inf)
        return compared(call, lambda: out, torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide_v))

    def dense(m: int, n: int = 1024, k: int = 1024) -> Peer:
        w, x, out = torch.randn(n, k, dtype=bf16), torch.randn(m, k, dtype=bf16), torch.empty(m, n, dtype=bf16)
        handle = torch.tensor(ops.create_onednn_mm_handler(w.t(), 128))
        return compared(lambda: ops.onednn_mm(out, x, None, handle), lambda: out, x.float() @ w.float().t())

    def w8a8(m: int, n: int = 1024, k: int = 1024) -> Peer:
        w, scale = torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n, 1) * 0.01
        handle = torch.tensor(ops.create_onednn_scaled_mm_handler(w.t(), scale, bf16, True, False, 128))
        x, xq, xs = torch.randn(m, k, dtype=bf16), torch.empty(m, k, dtype=torch.int8), torch.empty(m, 1)
        out = torch.empty(m, n, dtype=bf16)

        def call() -> None:
            ops.dynamic_scaled_int8_quant(xq, x, xs, None)
            ops.onednn_scaled_mm(out, xq, xs, None, None, None, handle)

        return compared(call, lambda: out, x.float() @ (w.float() * scale).t())

    def w4a8(m: int, group: int | None = None, n: int = 1024, k: int = 1024) -> Peer:
        q, size = torch.randint(0, 16, (n, k), dtype=torch.uint8), group or k
        scale = torch.rand(n, k // size) * 0.01
        scale = scale if group is None else scale.to(bf16)
        packed = torch.ops.aten._dyn_quant_pack_4bit_weight(q[:, 1::2] << 4 | q[:, ::2], scale, None, size, k, n)
        multiply = torch.ops.aten._dyn_quant_matmul_4bit
        x, results = torch.randn(m, k, dtype=bf16), []

        def call() -> None:
            # As vLLM calls it: weights in groups take FP32 activations.
            if group is None:
                results.append(multiply(x, packed, size, k, n))
            else:
                results.append(multiply(x.float(), packed, size, k, n).to(bf16))

        w = ((q.float() - 8).view(n, k // size, size) * scale.float()[..., None]).view(n, k)
        return compared(call, lambda: results[-1], x.float() @ w.t())

    return {
        "attn_q1_ctx512": lambda: attention(1, 512),
        "attn_q1_ctx4096": lambda: attention(1, 4096),
        "attn_q64_ctx256": lambda: attention(64, 256),
        "attn_q128_ctx128": lambda: attention(128, 128),
        "attn_q1_ctx512_d64": lambda: attention(1, 512, dim=64),
        "attn_q1_ctx512_mha": lambda: attention(1, 512, kv_heads=32),
        "attn_q1_ctx512_mqa": lambda: attention(1, 512, kv_heads=1),
        "attn_q64_ctx256_d64": lambda: attention(64, 256, dim=64),
        "attn_q64_ctx256_mha": lambda: attention(64, 256, kv_heads=32),
        "attn_q64_ctx256_mqa": lambda: attention(64, 256, kv_heads=1),
        "cache_write_64": lambda: cache_write(64),
        "cache_write_1": lambda: cache_write(1),
        **{f"bf16_m{m}": (lambda m=m: dense(m)) for m in (1, 2, 4, 8, 16, 64, 256)},
        "bf16_m1_n4096_k14336": lambda: dense(1, 4096, 14336),
        "bf16_m1_lm_head": lambda: dense(1, 128256, 4096),
        "bf16_m1_lm_head_32nd": lambda: dense(1, 128256 // 32, 4096),
        **{f"w8a8_m{m}": (lambda m=m: w8a8(m)) for m in (1, 4, 8, 16, 64, 256)},
        **{f"w4a8_m{m}": (lambda m=m: w4a8(m)) for m in (1, 16, 64)},
        **{
            f"w4a8_g{group}_m{m}": (lambda m=m, group=group: w4a8(m, group)) for group in (32, 128) for m in (1, 16, 64)
        },
    }
