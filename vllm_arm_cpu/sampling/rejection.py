"""Rejection sampling of drafted tokens on our kernels, in the place of vLLM's functions on whole distributions."""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import DTYPES, Call, as_rows, scratch
from vllm_arm_cpu.sampling.sampler import mask_top_k_top_p

ffi = library.ffi

upstream_forward = rejection_sampler.RejectionSampler.forward
upstream_rejection_sample = rejection_sampler.rejection_sample
upstream_constraints = rejection_sampler.apply_sampling_constraints

FLY = {"fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"}
"""Parameters of vLLM 0.33's FLy verification, which is off without a window."""


def _pointer(ctype: str, tensor: torch.Tensor | None) -> Any:
    """NULL for None only: to the kernels it says that something is not there, and an empty tensor has no address."""
    return ffi.NULL if tensor is None else ffi.cast(ctype, tensor.data_ptr() or 64)


def _int32(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of any shape as contiguous int32, itself if it is that already."""
    return tensor.to(torch.int32).contiguous()


def requests_of_rows(cu_num_draft_tokens: torch.Tensor) -> torch.Tensor:
    """The request that each drafted token belongs to: int32 [requests] -> int64 [tokens]."""
    counts = torch.diff(cu_num_draft_tokens, prepend=cu_num_draft_tokens.new_zeros(1))
    return torch.arange(len(counts)).repeat_interleave(counts)


class Rows(torch.Tensor):
    """Logits whose rows, taken by a tensor, are copied as rows; torch's indexing computes each element's address."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        plain = self.as_subclass(torch.Tensor)
        is_rows = isinstance(index, torch.Tensor) and index.dim() == 1 and index.dtype in (torch.int32, torch.int64)
        return plain.index_select(0, index) if is_rows else plain[index]


def forward(
    self: rejection_sampler.RejectionSampler,
    metadata: SpecDecodeMetadata,
    draft_probs: torch.Tensor | None,
    logits: torch.Tensor,
    sampling_metadata: SamplingMetadata,
) -> SamplerOutput:
    """``RejectionSampler.forward``, which takes the drafts' rows and the bonus tokens' out of logits [rows, vocab]."""
    output: SamplerOutput = upstream_forward(self, metadata, draft_probs, logits.as_subclass(Rows), sampling_metadata)
    return output


def apply_sampling_constraints(
    logits: torch.Tensor, cu_num_draft_tokens: torch.Tensor, sampling_metadata: SamplingMetadata
) -> torch.Tensor:
    """Temperature, top-k and top-p of each request on the rows of its drafts: vLLM's function, without sorting.

    logits: FP32 [tokens, vocab], changed in place; cu_num_draft_tokens: int32 [requests]. Returns the logits.
    """
    if sampling_metadata.all_greedy:
        return logits
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        constrained: torch.Tensor = upstream_constraints(logits, cu_num_draft_tokens, sampling_metadata)
        return constrained
    request = requests_of_rows(cu_num_draft_tokens)
    temperature = sampling_metadata.temperature[request]
    logits.div_(temperature.masked_fill_(temperature == rejection_sampler.GREEDY_TEMPERATURE, 1.0).unsqueeze(1))
    k, p = sampling_metadata.top_k, sampling_metadata.top_p
    mask_top_k_top_p(logits, None if k is None else k[request], None if p is None else p[request])
    return logits


def draw(num_draft_tokens: list[int], generators: dict[int, torch.Generator]) -> tuple[torch.Tensor, torch.Tensor]:
    """FP64 [tokens] uniform in [0, 1), and an int64 seed for each request, [requests].

    A request with a generator and drafts takes both from it, and one without drafts takes nothing.
    """
    ends = list(accumulate(num_draft_tokens))
    uniform = torch.rand(ends[-1] if ends else 0, dtype=torch.float64)
    seeds = torch.empty(len(ends), dtype=torch.int64).random_()
    for request, generator in generators.items():
        count, end = num_draft_tokens[request], ends[request]
        if count:
            uniform[end - count : end].uniform_(generator=generator)
            seeds[request : request + 1].random_(generator=generator)
    return uniform, seeds


def rejection_sample(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: SamplingMetadata,
    synthetic_mode: bool = False,
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64_gumbel: bool = False,
    **others: Any,
) -> torch.Tensor:
    """Accepted drafts of each request and one token more: vLLM's function, as one native op list.

    draft_token_ids: integers [tokens], -1 for padding; cu_num_draft_tokens: int32 [requests]; draft_probs: FP32
    [tokens, vocab] or None where drafts were not sampled; target_logits: FP32 [tokens, vocab], behind temperature and
    filters; bonus_token_ids: integers [requests, 1]; synthetic_conditional_rates: FP32 [drafts of a request]. Returns
    int32 [requests, max_spec_len + 1], -1 behind a request's last token.

    A request's generator fixes its tokens, whatever else is in the batch and on any number of threads. What has
    no kernel, noise in FP64 and FLy, is left to vLLM's function.
    """
    is_ours = (
        not use_fp64_gumbel
        and others.keys() <= FLY
        and others.get("fly_window_size") is None
        and target_logits.dtype == torch.float32
        and (draft_probs is None or draft_probs.dtype == torch.float32)
    )
    if not is_ours:
        sampled: torch.Tensor = upstream_rejection_sample(
            draft_token_ids,
            num_draft_tokens,
            max_spec_len,
            cu_num_draft_tokens,
            draft_probs,
            target_logits,
            bonus_token_ids,
            sampling_metadata,
            synthetic_mode=synthetic_mode,
            synthetic_conditional_rates=synthetic_conditional_rates,
            use_fp64_gumbel=use_fp64_gumbel,
            **others,
        )
        return sampled
    rates = synthetic_conditional_rates if synthetic_mode else None
    if rates is not None and len(rates) < max_spec_len:
        raise ValueError(f"{len(rates)} synthetic acceptance rates for up to {max_spec_len} drafts of a request")
    all_greedy, logits = sampling_metadata.all_greedy, as_rows(target_logits)
    num_reqs, num_rows = len(num_draft_tokens), len(logits)
    out = torch.full((num_reqs, max_spec_len + 1), rejection_sampler.PLACEHOLDER_TOKEN_ID, dtype=torch.int32)
    argmax = None if sampling_metadata.all_random else torch.empty(num_rows, dtype=torch.int64)
    is_greedy = None if all_greedy else sampling_metadata.temperature == rejection_sampler.GREEDY_TEMPERATURE
    uniform = seeds = stats = rejected = None
    if not all_greedy or synthetic_mode:
        uniform, seeds = draw(num_draft_tokens, sampling_metadata.generators)
    if not all_greedy:
        stats, rejected = torch.empty(num_rows, 2), torch.empty(num_reqs, dtype=torch.int32)
    drafts, ends, bonus = _int32(draft_token_ids), _int32(cu_num_draft_tokens), _int32(bonus_token_ids)
    draft_rows = None if draft_probs is None else as_rows(draft_probs)

    call = _list_of_greedy() if all_greedy else _list_of_random()
    walk = call.args[2]
    _set_requests(walk, out, ends, drafts, bonus, is_greedy)
    walk.rejected, walk.recovered_token_ids = _pointer("int32_t *", rejected), ffi.NULL
    walk.target_argmax, walk.uniform = _pointer("int64_t *", argmax), _pointer("double *", uniform)
    walk.target = _pointer("float *", None if all_greedy else logits)
    walk.stats, walk.draft_probs = _pointer("vac_softmax_stat *", stats), _pointer("float *", draft_rows)
    walk.synthetic_rates = _pointer("float *", rates)
    walk.vocab_size, walk.target_row_stride = logits.shape[1], logits.stride(0)
    walk.draft_row_stride = 0 if draft_rows is None else draft_rows.stride(0)
    if all_greedy:
        _set_argmax(call.args[0], logits, walk)
    else:
        _set_distributions(call.args[0], call.args[3], logits, walk, _pointer("uint64_t *", seeds))
    call.run()
    return out


def _set_argmax(rows: Any, logits: torch.Tensor, walk: Any) -> None:
    """The argmax of all rows, for ``walk``."""
    rows.out, rows.logits, rows.dtype = walk.target_argmax, _pointer("void *", logits), DTYPES[logits.dtype]
    (rows.num_reqs, rows.vocab_size), rows.row_stride = logits.shape, logits.stride(0)
    rows.workspace = scratch.pointer(library.load().vac_argmax_workspace_size(*logits.shape))


def _set_distributions(rows: Any, recover: Any, logits: torch.Tensor, walk: Any, seeds: Any) -> None:
    """The statistics of all rows, for ``walk``, and behind it the tokens in the place of rejected drafts.

    As vLLM does, greedy requests' rows of a mixed batch are treated as the others'.
    """
    lib = library.load()
    num_rows, vocab = logits.shape
    sizes = (
        lib.vac_softmax_stats_workspace_size(num_rows, vocab),
        lib.vac_recovered_tokens_workspace_size(walk.num_reqs, vocab),
    )
    # The two do not run at the same time.
    rows.workspace = recover.workspace = scratch.pointer(max(sizes))
    rows.out, rows.argmax, rows.logits = walk.stats, walk.target_argmax, walk.target
    rows.num_rows, rows.vocab_size, rows.row_stride = num_rows, vocab, logits.stride(0)
    recover.out, recover.rejected, recover.cu_num_draft_tokens = walk.out, walk.rejected, walk.cu_num_draft_tokens
    recover.draft_token_ids, recover.logits, recover.stats = walk.draft_token_ids, walk.target, walk.stats
    recover.draft_probs, recover.seed = walk.draft_probs, seeds
    recover.num_reqs, recover.vocab_size, recover.out_row_stride = walk.num_reqs, vocab, walk.out_row_stride
    recover.logits_row_stride, recover.draft_row_stride = logits.stride(0), walk.draft_row_stride


def walk_greedy(
    out: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_argmax: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    is_greedy: torch.Tensor | None,
    uniform: torch.Tensor | None = None,
    synthetic_rates: torch.Tensor | None = None,
) -> None:
    """Tokens of greedy requests, into their rows of int32 ``out`` [requests, drafts + 1]; others' are left as they are.

    Integers [requests], [tokens], [tokens], [requests] and bool [requests], or None where all are greedy; for synthetic
    acceptance FP64 [tokens] and FP32 [drafts].
    """
    call = _list_of_walk()
    walk = call.args[0]
    drafts, ends, bonus = _int32(draft_token_ids), _int32(cu_num_draft_tokens), _int32(bonus_token_ids)
    argmax = target_argmax.to(torch.int64).contiguous()
    is_greedy = None if is_greedy is None else is_greedy.to(torch.bool).contiguous()
    _set_requests(walk, out, ends, drafts, bonus, is_greedy)
    # Which ids exist is not known here.
    walk.vocab_size = 2**31 - 1
    walk.target_argmax = _pointer("int64_t *", argmax)
    uniform = None if uniform is None else uniform.to(torch.float64).contiguous()
    rates = None if synthetic_rates is None else synthetic_rates.to(torch.float32).contiguous()
    walk.uniform, walk.synthetic_rates = _pointer("double *", uniform), _pointer("float *", rates)
    walk.target = walk.draft_probs = walk.recovered_token_ids = ffi.NULL
    call.run()


def walk_random(
    out: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    recovered_token_ids: torch.Tensor,
    uniform: torch.Tensor,
    is_greedy: torch.Tensor,
    synthetic_rates: torch.Tensor | None = None,
) -> None:
    """Tokens of random requests, with what is to stand in a rejected draft's place; other rows are left as they are.

    As :func:`walk_greedy`; draft_probs, target_probs: FP32 [tokens, vocab]; recovered_token_ids: integers [tokens].
    """
    call = _list_of_walk()
    walk = call.args[0]
    drafts, ends, bonus = _int32(draft_token_ids), _int32(cu_num_draft_tokens), _int32(bonus_token_ids)
    recovered, uniform = _int32(recovered_token_ids), uniform.to(torch.float64).contiguous()
    target = as_rows(target_probs.to(torch.float32))
    draft = None if draft_probs is None else as_rows(draft_probs.to(torch.float32))
    rates = None if synthetic_rates is None else synthetic_rates.to(torch.float32).contiguous()
    is_greedy = is_greedy.to(torch.bool).contiguous()
    _set_requests(walk, out, ends, drafts, bonus, is_greedy)
    walk.target_argmax = ffi.NULL
    walk.target, walk.draft_probs = _pointer("float *", target), _pointer("float *", draft)
    walk.uniform, walk.synthetic_rates = _pointer("double *", uniform), _pointer("float *", rates)
    walk.recovered_token_ids = _pointer("int32_t *", recovered)
    walk.vocab_size, walk.target_row_stride = target.shape[1], target.stride(0)
    walk.draft_row_stride = 0 if draft is None else draft.stride(0)
    call.run()


def _set_requests(
    walk: Any,
    out: torch.Tensor,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    bonus: torch.Tensor,
    is_greedy: torch.Tensor | None,
) -> None:
    """What every walk through requests' drafts has; all but ``is_greedy``, which is bool, are int32."""
    walk.out, walk.num_reqs, walk.out_row_stride = _pointer("int32_t *", out), len(ends), out.stride(0)
    walk.cu_num_draft_tokens, walk.draft_token_ids = _pointer("int32_t *", ends), _pointer("int32_t *", drafts)
    walk.bonus_token_ids, walk.is_greedy = _pointer("int32_t *", bonus), _pointer("uint8_t *", is_greedy)


@functools.cache
def _list_of_greedy() -> Call:
    return Call(
        ("vac_argmax_partial", "vac_argmax_args"),
        ("vac_argmax_merge", 0),
        ("vac_rejection_sample", "vac_rejection_sample_args"),
    )


@functools.cache
def _list_of_random() -> Call:
    return Call(
        ("vac_softmax_stats_partial", "vac_softmax_stats_args"),
        ("vac_softmax_stats_merge", 0),
        ("vac_rejection_sample", "vac_rejection_sample_args"),
        ("vac_recovered_tokens_partial", "vac_recovered_tokens_args"),
        ("vac_recovered_tokens_merge", 3),
    )


@functools.cache
def _list_of_walk() -> Call:
    return Call(("vac_rejection_sample", "vac_rejection_sample_args"))
