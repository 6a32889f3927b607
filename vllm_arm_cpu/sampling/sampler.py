"""Greedy and random sampling on our kernels, in the place of vLLM's sampler methods."""

from __future__ import annotations

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import DTYPES, Call, as_rows, pointer, scratch

ffi = library.ffi
_argmax: Call | None = None
_mask: Call | None = None
_gumbel: Call | None = None


def greedy_sample(logits: torch.Tensor) -> torch.Tensor:
    """Index of the largest logit of each row, the first on a tie.

    logits: [requests, vocab] of FP32, FP16 or BF16 -> int64 [requests].
    """
    global _argmax
    if _argmax is None:
        _argmax = Call(("vac_argmax_partial", "vac_argmax_args"), ("vac_argmax_merge", "vac_argmax_args"))
    logits = as_rows(logits)
    num_reqs, vocab = logits.shape
    out = torch.empty(num_reqs, dtype=torch.int64)
    if num_reqs == 0:
        return out
    workspace = scratch.pointer(library.load().vac_argmax_workspace_size(num_reqs, vocab))
    for args in _argmax.args:
        args.out = ffi.cast("int64_t *", out.data_ptr())
        args.logits, args.workspace = pointer(logits), workspace
        args.num_reqs, args.vocab_size, args.row_stride = num_reqs, vocab, logits.stride(0)
        args.dtype = DTYPES[logits.dtype]
    _argmax.run()
    return out


def mask_top_k_top_p(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> None:
    """Set what top-k and top-p exclude to -inf, in place.

    logits: FP32 [requests, vocab]; k: int32 [requests] or None; p: FP32 [requests] or None.
    """
    if k is None and p is None:
        return
    global _mask
    if _mask is None:
        _mask = Call(("vac_top_k_top_p_mask", "vac_top_k_top_p_mask_args"))
    lib = library.load()
    num_reqs, vocab = logits.shape
    k = None if k is None else k.to(torch.int32).contiguous()
    p = None if p is None else p.to(torch.float32).contiguous()
    rows_at_once = max(1, min(num_reqs, lib.vac_max_threads()))
    args = _mask.args[0]
    args.logits = ffi.cast("float *", logits.data_ptr())
    args.k = ffi.NULL if k is None else ffi.cast("int32_t *", k.data_ptr())
    args.p = ffi.NULL if p is None else ffi.cast("float *", p.data_ptr())
    args.num_reqs, args.vocab_size, args.row_stride = num_reqs, vocab, logits.stride(0)
    args.num_workspaces = rows_at_once
    args.workspace = scratch.pointer(lib.vac_top_k_top_p_mask_workspace_size(vocab, rows_at_once))
    _mask.run()


def gumbel_sample(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """One token a row from ``softmax(logits)``: FP32 [requests, vocab], int64 seeds [requests] -> int64 [requests]."""
    global _gumbel
    if _gumbel is None:
        _gumbel = Call(
            ("vac_gumbel_argmax_partial", "vac_gumbel_argmax_args"),
            ("vac_gumbel_argmax_merge", "vac_gumbel_argmax_args"),
        )
    num_reqs, vocab = logits.shape
    out = torch.empty(num_reqs, dtype=torch.int64)
    if num_reqs == 0:
        return out
    # A fresh seed for every row and step: the offset need not move.
    offset = torch.zeros(num_reqs, dtype=torch.int64)
    workspace = scratch.pointer(library.load().vac_gumbel_argmax_workspace_size(num_reqs, vocab))
    for args in _gumbel.args:
        args.out = ffi.cast("int64_t *", out.data_ptr())
        args.logits = ffi.cast("float *", logits.data_ptr())
        args.temperature = ffi.NULL
        args.seed = ffi.cast("uint64_t *", seeds.data_ptr())
        args.offset = ffi.cast("uint64_t *", offset.data_ptr())
        args.workspace = workspace
        args.num_reqs, args.vocab_size, args.row_stride = num_reqs, vocab, logits.stride(0)
    _gumbel.run()
    return out


def top_k_top_p_sample(
    self: TopKTopPSampler,
    logits: torch.Tensor,
    generators: dict[int, torch.Generator],
    k: torch.Tensor | None,
    p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Filter and sample: ``TopKTopPSampler.forward_cpu``.

    logits: [requests, vocab], scaled by temperature already. Rows with a
    generator of their own draw their seed from it, so a request's seed fixes
    its tokens whatever else is in the batch. Returns token ids int64
    [requests] and, in the processed modes, the filtered logits or logprobs.
    """
    if self.use_fp64_gumbel:
        native: tuple[torch.Tensor, torch.Tensor | None] = self.forward_native(logits, generators, k, p)
        return native
    rows = as_rows(logits.to(torch.float32))
    mask_top_k_top_p(rows, k, p)
    processed = None
    if self.logprobs_mode in PROCESSED_LOGPROBS_MODES:
        processed = rows if self.logprobs_mode == "processed_logits" else rows.log_softmax(dim=-1)
    seeds = torch.empty(rows.shape[0], dtype=torch.int64).random_()
    for i, generator in generators.items():
        seeds[i : i + 1].random_(generator=generator)
    return gumbel_sample(rows, seeds), processed
