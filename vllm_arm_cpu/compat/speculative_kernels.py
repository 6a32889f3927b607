"""Speculative decoding: tensor operations in the place of vLLM's Triton kernels.

vLLM has the hook (``register_triton_kernel_overrides``), and its CPU platform
maps these kernels to ``vllm._C``, through functions whose names are here. Where
that is loaded they are replaced, too: with vLLM 0.32's operators an EAGLE
head's drafts were never accepted in random sampling, and seeds had no effect.
Can go once vLLM has an implementation that needs no compiled operators and
passes ``test_features.py``. What each computes
is said by the Triton kernel of its name in ``vllm/v1/sample/rejection_sampler.py``
and ``vllm/v1/spec_decode/utils.py``; unnamed arguments are of no use here.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.utils import cpu_triton_utils


def _starts(ends: torch.Tensor) -> list[tuple[int, int]]:
    """First and last + 1 of each request's tokens, from their cumulative counts."""
    last = ends.tolist()
    return list(zip([0, *last[:-1]], last, strict=True))


def rejection_greedy_sample(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_argmax: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    is_greedy: torch.Tensor | None,
    max_spec_len: int,
    uniform_probs: Any = None,
    synthetic_conditional_rates: Any = None,
    SYNTHETIC_MODE: bool = False,
) -> None:
    """The target's tokens as far as the drafts are the same, and one more; output [requests, max_spec_len + 1]."""
    if SYNTHETIC_MODE:
        raise NotImplementedError("synthetic acceptance rates are not supported on Arm CPUs")
    for request, (begin, end) in enumerate(_starts(cu_num_draft_tokens)):
        if is_greedy is not None and not is_greedy[request]:
            continue
        target = target_argmax[begin:end].to(output_token_ids.dtype)
        wrong = (draft_token_ids[begin:end] != target).nonzero()
        if len(wrong):
            count = int(wrong[0]) + 1
            output_token_ids[request, :count] = target[:count]
        else:
            output_token_ids[request, : end - begin] = target
            output_token_ids[request, end - begin] = bonus_token_ids.view(-1)[request]


def rejection_random_sample(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    recovered_token_ids: torch.Tensor,
    uniform_probs: torch.Tensor,
    is_greedy: torch.Tensor,
    max_spec_len: int,
    vocab_size: int,
    synthetic_conditional_rates: Any = None,
    NO_DRAFT_PROBS: bool = False,
    SYNTHETIC_MODE: bool = False,
) -> None:
    """Drafts as far as they are accepted (Leviathan et al., 2023), then a recovered token or one more."""
    if SYNTHETIC_MODE:
        raise NotImplementedError("synthetic acceptance rates are not supported on Arm CPUs")
    drafts = draft_token_ids.to(torch.int64)
    known = drafts.clamp(min=0).unsqueeze(1)
    target = target_probs.gather(1, known).squeeze(1)
    if NO_DRAFT_PROBS or draft_probs is None:
        draft = torch.ones_like(target)
    else:
        draft = draft_probs.gather(1, known).squeeze(1)
    accepted = (drafts >= 0) & (draft > 0) & (target / draft >= uniform_probs)
    for request, (begin, end) in enumerate(_starts(cu_num_draft_tokens)):
        if is_greedy[request]:
            continue
        row = output_token_ids[request]
        wrong = (~accepted[begin:end]).nonzero()
        count = int(wrong[0]) if len(wrong) else end - begin
        row[:count] = draft_token_ids[begin : begin + count].to(row.dtype)
        row[count] = recovered_token_ids[begin + count] if len(wrong) else bonus_token_ids.view(-1)[request]


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: Any = None,
) -> None:
    """Each request's value for each of its tokens, one value replaced."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    expanded = values.repeat_interleave(counts)
    output[: len(expanded)] = expanded.to(output.dtype)


def sample_recovered_tokens(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    inv_q: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: Any = None,
    NO_DRAFT_PROBS: bool = False,
    USE_FP64_GUMBEL: bool = False,
) -> None:
    """For every draft a token of what the target has more of than the draft, by the largest ``p / q``."""
    counts = torch.diff(cu_num_draft_tokens, prepend=cu_num_draft_tokens.new_zeros(1))
    request = torch.arange(len(counts)).repeat_interleave(counts)
    if NO_DRAFT_PROBS or draft_probs is None:
        rest = target_probs.scatter(1, draft_token_ids.to(torch.int64).clamp(min=0).unsqueeze(1), 0.0)
    else:
        rest = (target_probs - draft_probs).clamp(min=0.0)
    chosen = (rest * inv_q[request]).argmax(dim=1)
    output_token_ids[: len(chosen)] = chosen.to(output_token_ids.dtype)


def eagle_step_slot_mapping_metadata(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    stride: int,
    seq_lens: torch.Tensor,
    out_clamped_positions: torch.Tensor,
    out_slot_mapping: torch.Tensor,
    block_size: int,
    max_model_len: int,
    n_blocks_per_req: int,
    PAD_ID: int,
    batch_size: int | None = None,
) -> None:
    """The next position of each request, its slot and its length; what is beyond the model's length has no slot."""
    count = positions.shape[0] if batch_size is None else batch_size
    following = positions[:count] + 1
    beyond = following >= max_model_len
    clamped = following.masked_fill(beyond, 0)
    blocks = (clamped // block_size).clamp(max=n_blocks_per_req - 1)
    slots = block_table[:count].gather(1, blocks.unsqueeze(1)).squeeze(1).to(torch.int64) * block_size
    slots = (slots + clamped % block_size).masked_fill(beyond, PAD_ID)
    out_clamped_positions[:count] = clamped
    out_slot_mapping[:count] = slots
    out_slot_mapping[count:] = PAD_ID
    lengths = (seq_lens[:count] + 1).masked_fill(beyond, 1)
    seq_lens[:count] = lengths.clamp(max=max_model_len)


def eagle_prepare_inputs_padded(
    cu_num_draft_tokens: torch.Tensor,
    valid_sampled_tokens_count: torch.Tensor,
    query_start_loc_gpu: torch.Tensor,
    token_indices_to_sample: torch.Tensor,
    num_rejected_tokens_gpu: torch.Tensor,
    num_reqs: int,
) -> None:
    """Which token of each request to draft from, and how many of its drafts were rejected."""
    ends = cu_num_draft_tokens[:num_reqs]
    drafts = torch.diff(ends, prepend=ends.new_zeros(1))
    rejected = torch.where(drafts > 0, drafts + 1 - valid_sampled_tokens_count[:num_reqs], 0)
    token_indices_to_sample[:num_reqs] = query_start_loc_gpu[1 : num_reqs + 1] - 1 - rejected
    num_rejected_tokens_gpu[:num_reqs] = rejected


def eagle_prepare_next_token_padded(
    sampled_token_ids: torch.Tensor,
    discard_request_mask: torch.Tensor,
    backup_next_token_ids: torch.Tensor,
    next_token_ids: torch.Tensor,
    valid_sampled_tokens_count: torch.Tensor,
    vocab_size: int,
    num_sampled_tokens_per_req: int,
    num_reqs: int,
    stride: Any = None,
    BLOCK_SIZE_TOKENS: Any = None,
) -> None:
    """The last token that was accepted, or the backup, and how many were; 0 for discarded requests."""
    tokens = sampled_token_ids[:num_reqs, :num_sampled_tokens_per_req]
    discarded = discard_request_mask[:num_reqs].bool()
    valid = (tokens != -1) & (tokens < vocab_size) & ~discarded.unsqueeze(1)
    place = torch.where(valid, torch.arange(tokens.shape[1]), -1).amax(dim=1)
    last = tokens.gather(1, place.clamp(min=0).unsqueeze(1)).squeeze(1)
    backup = backup_next_token_ids[:num_reqs].to(last.dtype)
    next_token_ids[:num_reqs] = torch.where(place >= 0, last, backup).to(next_token_ids.dtype)
    valid_sampled_tokens_count[:num_reqs] = valid.sum(dim=1).to(valid_sampled_tokens_count.dtype)


def copy_and_expand_eagle_inputs(
    target_token_ids_ptr: torch.Tensor,
    target_positions_ptr: torch.Tensor,
    next_token_ids_ptr: torch.Tensor,
    out_input_ids_ptr: torch.Tensor,
    out_positions_ptr: torch.Tensor,
    out_is_rejected_token_mask_ptr: torch.Tensor,
    out_is_masked_token_mask_ptr: torch.Tensor,
    out_new_token_indices_ptr: torch.Tensor,
    out_hidden_state_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    query_end_loc_ptr: torch.Tensor,
    padding_token_id: int,
    parallel_drafting_token_id: int,
    total_input_tokens: int,
    num_padding_slots_per_request: int,
    shift_input_ids: bool,
    BLOCK_SIZE_TOKENS: Any = None,
    BLOCK_SIZE_REQS: Any = None,
) -> None:
    """A drafter's inputs: each request's valid tokens, the new one, drafts to fill in, room for what was rejected."""
    starts, added = query_start_loc_ptr.tolist(), num_padding_slots_per_request
    for request, last in enumerate(query_end_loc_ptr.tolist()):
        begin, end, first = starts[request], starts[request + 1], int(shift_input_ids)
        valid = last - begin + 1 - first
        place = begin + request * (added - first)
        new, rejected = place + valid, place + valid + added
        stop = rejected + end - last - 1
        out_input_ids_ptr[place:new] = target_token_ids_ptr[begin + first : begin + first + valid]
        out_input_ids_ptr[new] = next_token_ids_ptr[request]
        out_input_ids_ptr[new + 1 : rejected] = parallel_drafting_token_id
        out_input_ids_ptr[rejected:stop] = padding_token_id
        start = int(target_positions_ptr[begin])
        out_positions_ptr[place:rejected] = torch.arange(start, start + valid + added)
        out_positions_ptr[rejected:stop] = 0
        out_is_rejected_token_mask_ptr[place:rejected] = False
        out_is_rejected_token_mask_ptr[rejected:stop] = True
        out_is_masked_token_mask_ptr[place:stop] = False
        out_is_masked_token_mask_ptr[new + 1 : rejected] = True
        out_new_token_indices_ptr[request * added : (request + 1) * added] = torch.arange(new, rejected)
        if shift_input_ids:
            out_hidden_state_mapping_ptr[begin:end] = torch.arange(place, place + end - begin)


KERNELS = {
    "_rejection_greedy_sample_kernel_impl": rejection_greedy_sample,
    "_rejection_random_sample_kernel_impl": rejection_random_sample,
    "_expand_kernel_impl": expand,
    "_sample_recovered_tokens_kernel_impl": sample_recovered_tokens,
    "_eagle_step_slot_mapping_metadata_kernel_impl": eagle_step_slot_mapping_metadata,
    "_eagle_prepare_inputs_padded_kernel_impl": eagle_prepare_inputs_padded,
    "_eagle_prepare_next_token_padded_kernel_impl": eagle_prepare_next_token_padded,
    "_copy_and_expand_eagle_inputs_kernel_impl": copy_and_expand_eagle_inputs,
}


def prepare() -> None:
    """Make upstream's registration, which follows, register these functions."""
    for name, function in KERNELS.items():
        setattr(cpu_triton_utils, name, function)
