"""Greedy and random sampling on our kernels, in the place of vLLM's sampler methods."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.penalties import apply_all_penalties as upstream_penalties
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import DTYPES, Call, as_rows, pointer, scratch

ffi = library.ffi
_argmax: Call | None = None
_mask: Call | None = None
_gumbel: Call | None = None
_fill: Call | None = None
_penalties: Call | None = None
_log_softmax: Call | None = None
_top: Call | None = None

upstream_sample = Sampler.sample
upstream_processors = Sampler.apply_logits_processors
upstream_min_p = MinPLogitsProcessor.apply
upstream_compute_logprobs = Sampler.compute_logprobs
upstream_gather_logprobs = Sampler.gather_logprobs


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


def mask_top_k_top_p(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, min_p: torch.Tensor | None = None
) -> None:
    """Set what min-p, then top-k and top-p exclude to -inf, in place.

    logits: FP32 [requests, vocab]; k: int32 [requests] or None; p, min_p: FP32 [requests] or None.
    """
    if k is None and p is None and min_p is None:
        return
    global _mask
    if _mask is None:
        _mask = Call(("vac_top_k_top_p_mask", "vac_top_k_top_p_mask_args"))
    lib = library.load()
    num_reqs, vocab = logits.shape
    k = None if k is None else k.to(torch.int32).contiguous()
    p = None if p is None else p.to(torch.float32).contiguous()
    min_p = None if min_p is None else min_p.to(torch.float32).contiguous()
    rows_at_once = max(1, min(num_reqs, lib.vac_max_threads()))
    args = _mask.args[0]
    args.logits = ffi.cast("float *", logits.data_ptr())
    args.k = ffi.NULL if k is None else ffi.cast("int32_t *", k.data_ptr())
    args.p = ffi.NULL if p is None else ffi.cast("float *", p.data_ptr())
    args.min_p = ffi.NULL if min_p is None else ffi.cast("float *", min_p.data_ptr())
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
    With ``self.min_p``, which :func:`sample` sets, min-p is applied first.
    """
    if self.use_fp64_gumbel:
        native: tuple[torch.Tensor, torch.Tensor | None] = self.forward_native(logits, generators, k, p)
        return native
    rows = as_rows(logits.to(torch.float32))
    mask_top_k_top_p(rows, k, p, getattr(self, "min_p", None))
    processed = None
    if self.logprobs_mode in PROCESSED_LOGPROBS_MODES:
        processed = rows if self.logprobs_mode == "processed_logits" else rows.log_softmax(dim=-1)
    seeds = torch.empty(rows.shape[0], dtype=torch.int64).random_()
    for i, generator in generators.items():
        seeds[i : i + 1].random_(generator=generator)
    return gumbel_sample(rows, seeds), processed


def sample(
    self: Sampler,
    logits: torch.Tensor,
    sampling_metadata: SamplingMetadata,
    logprobs_mode_override: Any = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``Sampler.sample``, with min-p left to the kernel of top-k and top-p where nothing comes between them.

    That saves reading and writing the logits once more. Arguments and results are vLLM's.
    """
    processors = sampling_metadata.logitsprocs.argmax_invariant
    last: Any = processors[-1] if processors else None
    filters = self.topk_topp_sampler
    is_fused = type(last) is MinPLogitsProcessor and bool(last.min_p_count) and not filters.use_fp64_gumbel
    if is_fused:
        filters.min_p, last.is_fused = last.min_p.view(-1), True
    try:
        sampled: tuple[torch.Tensor, torch.Tensor | None]
        sampled = upstream_sample(self, logits, sampling_metadata, logprobs_mode_override)
        return sampled
    finally:
        if is_fused:
            filters.min_p, last.is_fused = None, False


def apply_min_p(self: MinPLogitsProcessor, logits: torch.Tensor) -> torch.Tensor:
    """``MinPLogitsProcessor.apply``: mask in place what is less likely than min-p times the likeliest token."""
    if not self.min_p_count or getattr(self, "is_fused", False):
        return logits
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        return upstream_min_p(self, logits)
    mask_top_k_top_p(logits, None, None, self.min_p.view(-1))
    return logits


def fill_masked(logits: torch.Tensor, mask: torch.Tensor) -> None:
    """Set FP32 logits [requests, vocab] to -inf in place where a bool mask of the same shape says so."""
    global _fill
    if _fill is None:
        _fill = Call(("vac_fill_masked", "vac_fill_masked_args"))
    args = _fill.args[0]
    args.logits, args.mask = ffi.cast("float *", logits.data_ptr()), ffi.cast("uint8_t *", mask.data_ptr())
    args.num_reqs, args.vocab_size = logits.shape
    args.row_stride, args.mask_row_stride = logits.stride(0), mask.stride(0)
    _fill.run()


def apply_logits_processors(
    self: Sampler, logits: torch.Tensor, sampling_metadata: SamplingMetadata, predict_bonus_token: bool
) -> torch.Tensor:
    """``Sampler.apply_logits_processors``, its mask of allowed tokens by a kernel. Arguments and result are vLLM's."""
    mask = sampling_metadata.allowed_token_ids_mask
    is_native = (
        mask is not None
        and logits.dtype == torch.float32
        and mask.shape == logits.shape
        and mask.stride(1) == logits.stride(1) == 1
    )
    if mask is not None and is_native:
        # It is the first thing that vLLM's function does.
        fill_masked(logits, mask)
        sampling_metadata.allowed_token_ids_mask = None
    try:
        processed: torch.Tensor = upstream_processors(self, logits, sampling_metadata, predict_bonus_token)
        return processed
    finally:
        sampling_metadata.allowed_token_ids_mask = mask


def apply_all_penalties(
    logits: torch.Tensor,
    prompt_token_ids: torch.Tensor,
    presence_penalties: torch.Tensor,
    frequency_penalties: torch.Tensor,
    repetition_penalties: torch.Tensor,
    output_token_ids: list[list[int]],
) -> torch.Tensor:
    """Penalize tokens that were there before, in place: vLLM's function, in the time that their number takes.

    logits: [requests, vocab]; prompt_token_ids: int64 [requests, tokens], padded with ids beyond
    the vocabulary; penalties: FP32 [requests]; output_token_ids: a list for each request, -1 where
    a token is not known yet. Returns the logits, bit by bit as vLLM computes them.
    """
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or prompt_token_ids.dtype != torch.int64:
        return upstream_penalties(
            logits, prompt_token_ids, presence_penalties, frequency_penalties, repetition_penalties, output_token_ids
        )
    global _penalties
    if _penalties is None:
        _penalties = Call(("vac_penalties", "vac_penalties_args"))
    lib = library.load()
    num_reqs, vocab = logits.shape
    starts, longest = [0], 0
    for tokens in output_token_ids:
        starts.append(starts[-1] + len(tokens))
        longest = max(longest, len(tokens))
    output = ffi.new("int32_t[]", list(chain.from_iterable(output_token_ids)))
    output_start = ffi.new("int64_t[]", starts)
    penalties = [
        values.to(torch.float32).contiguous()
        for values in (repetition_penalties, frequency_penalties, presence_penalties)
    ]
    prompt = as_rows(prompt_token_ids)
    args = _penalties.args[0]
    args.logits = ffi.cast("float *", logits.data_ptr())
    args.repetition, args.frequency, args.presence = (ffi.cast("float *", values.data_ptr()) for values in penalties)
    args.prompt = ffi.cast("int64_t *", prompt.data_ptr())
    args.output, args.output_start = output, output_start
    args.num_reqs, args.vocab_size, args.row_stride = num_reqs, vocab, logits.stride(0)
    args.num_prompt, args.prompt_stride = prompt.shape[1], prompt.stride(0)
    args.max_tokens = args.num_prompt + longest
    args.num_workspaces = max(1, min(num_reqs, lib.vac_max_threads()))
    args.workspace = scratch.pointer(lib.vac_penalties_workspace_size(args.max_tokens, args.num_workspaces))
    _penalties.run()
    return logits


def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """``Sampler.compute_logprobs``: log-softmax of [tokens, vocab] in FP32, FP16 or BF16, as FP32."""
    if logits.dim() != 2 or logits.dtype not in DTYPES:
        return upstream_compute_logprobs(logits)
    global _log_softmax
    if _log_softmax is None:
        _log_softmax = Call(("vac_log_softmax_rows", "vac_log_softmax_rows_args"))
    logits = as_rows(logits)
    out = torch.empty(logits.shape, dtype=torch.float32)
    args = _log_softmax.args[0]
    args.out, args.logits = ffi.cast("float *", out.data_ptr()), pointer(logits)
    args.num_reqs, args.vocab_size = logits.shape
    args.logits_row_stride, args.out_row_stride = logits.stride(0), out.stride(0)
    args.dtype = DTYPES[logits.dtype]
    _log_softmax.run()
    return out


def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
    """``Sampler.gather_logprobs``: of each row the given token's logprob and rank, and the largest.

    logprobs: FP32 [tokens, vocab]; token_ids: int64 [tokens]. Columns of the result are the
    given token, then the ``num_logprobs`` likeliest; of equal ones the lower token comes first.
    """
    num_rows, vocab = logprobs.shape
    if logprobs.dtype != torch.float32 or token_ids.dtype != torch.int64 or num_logprobs > vocab:
        return upstream_gather_logprobs(logprobs, num_logprobs, token_ids)
    global _top
    if _top is None:
        _top = Call(("vac_top_logprobs", "vac_top_logprobs_args"))
    lib = library.load()
    logprobs, token_ids = as_rows(logprobs), token_ids.contiguous()
    tokens = torch.empty(num_rows, num_logprobs + 1, dtype=torch.int32)
    values = torch.empty(num_rows, num_logprobs + 1, dtype=torch.float32)
    ranks = torch.empty(num_rows, dtype=torch.int64)
    args = _top.args[0]
    args.out_tokens, args.out_logprobs = (
        ffi.cast("int32_t *", tokens.data_ptr()),
        ffi.cast("float *", values.data_ptr()),
    )
    args.out_ranks = ffi.cast("int64_t *", ranks.data_ptr())
    args.logprobs, args.tokens = ffi.cast("float *", logprobs.data_ptr()), ffi.cast("int64_t *", token_ids.data_ptr())
    args.num_reqs, args.vocab_size, args.row_stride = num_rows, vocab, logprobs.stride(0)
    args.num_top = num_logprobs
    args.num_workspaces = max(1, min(num_rows, lib.vac_max_threads()))
    args.workspace = scratch.pointer(lib.vac_top_logprobs_workspace_size(vocab, args.num_workspaces))
    _top.run()
    return LogprobsTensors(tokens, values, ranks)
