"""Speculative decoding: native and tensor operations in the place of vLLM's Triton kernels.

vLLM has the hook (``register_triton_kernel_overrides``), and its CPU platform
maps these kernels to ``vllm._C``, through functions whose names are here. Where
that is loaded they are replaced, too: with vLLM 0.32's operators an EAGLE
head's drafts were never accepted in random sampling, seeds had no effect, and
synthetic acceptance is refused. Can go once vLLM has an implementation that needs
no compiled operators and passes ``test_features.py``. What each computes
is said by the Triton kernel of its name in ``vllm/v1/sample/rejection_sampler.py``
and ``vllm/v1/spec_decode/utils.py``; unnamed arguments are of no use here.

An engine's own rejection sampling goes another way (``sampler_ops``); the kernels of it
that are here serve what calls them directly, noise in FP64 among it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.utils import cpu_triton_utils

from vllm_arm_cpu.sampling import rejection


def rejection_greedy_sample(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_argmax: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    is_greedy: torch.Tensor | None,
    max_spec_len: int,
    uniform_probs: torch.Tensor | None = None,
    synthetic_conditional_rates: torch.Tensor | None = None,
    SYNTHETIC_MODE: bool = False,
) -> None:
    """The target's tokens as far as the drafts are the same, and one more; output int32 [requests, drafts + 1]."""
    rejection.walk_greedy(
        output_token_ids,
        cu_num_draft_tokens,
        draft_token_ids,
        target_argmax,
        bonus_token_ids,
        is_greedy,
        uniform_probs,
        synthetic_conditional_rates if SYNTHETIC_MODE else None,
    )


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
    synthetic_conditional_rates: torch.Tensor | None = None,
    NO_DRAFT_PROBS: bool = False,
    SYNTHETIC_MODE: bool = False,
) -> None:
    """Drafts as far as they are accepted, then a recovered token or one more; output int32 [requests, drafts + 1]."""
    rejection.walk_random(
        output_token_ids,
        cu_num_draft_tokens,
        draft_token_ids,
        None if NO_DRAFT_PROBS else draft_probs,
        target_probs,
        bonus_token_ids,
        recovered_token_ids,
        uniform_probs,
        is_greedy,
        synthetic_conditional_rates if SYNTHETIC_MODE else None,
    )


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: Any = None,
) -> None:
    """Each request's value for each of its tokens, one value replaced."""
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    expanded = values[rejection.requests_of_rows(cu_num_tokens)]
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
    if NO_DRAFT_PROBS or draft_probs is None:
        # Padding (-1) takes nothing out.
        drafts = draft_token_ids.to(torch.int64).view(-1, 1)
        kept = torch.where(drafts < 0, target_probs[:, :1], 0.0)
        rest = target_probs.scatter(1, drafts.clamp(min=0), kept)
    else:
        rest = (target_probs - draft_probs).clamp(min=0.0)
    chosen = (rest * inv_q[rejection.requests_of_rows(cu_num_draft_tokens)]).argmax(dim=1)
    output_token_ids.view(-1)[: len(chosen)] = chosen.to(output_token_ids.dtype)


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
    num_reqs, added, first = len(query_end_loc_ptr), num_padding_slots_per_request, int(shift_input_ids)
    requests = torch.arange(num_reqs)
    starts = query_start_loc_ptr[: num_reqs + 1].to(torch.int64)
    counts = torch.diff(starts)
    begins = starts[:-1]
    valid = query_end_loc_ptr - begins + 1 - first
    # Each request's outputs lie behind those of the request before it.
    places = begins + requests * (added - first)
    request = requests.repeat_interleave(counts + (added - first))
    begin = int(begins[0]) if num_reqs else 0
    out = slice(begin, begin + len(request))
    place = torch.arange(out.start, out.stop) - places[request]
    past = place - valid[request]
    is_new, is_rejected = (past >= 0) & (past < added), past >= added
    source = (begins[request] + first + place).clamp_(max=total_input_tokens - 1)
    ids = target_token_ids_ptr[source].to(out_input_ids_ptr.dtype)
    ids = torch.where(past == 0, next_token_ids_ptr[request].to(ids.dtype), ids)
    ids.masked_fill_(is_new & (past > 0), parallel_drafting_token_id)
    out_input_ids_ptr[out] = ids.masked_fill_(is_rejected, padding_token_id)
    positions = target_positions_ptr[begins][request] + place
    out_positions_ptr[out] = positions.masked_fill_(is_rejected, 0).to(out_positions_ptr.dtype)
    out_is_rejected_token_mask_ptr[out] = is_rejected
    out_is_masked_token_mask_ptr[out] = is_new & (past > 0)
    new = (places + valid).unsqueeze(1) + torch.arange(added)
    out_new_token_indices_ptr[: num_reqs * added] = new.view(-1).to(out_new_token_indices_ptr.dtype)
    if shift_input_ids:
        inputs = torch.arange(begin, begin + int(counts.sum()))
        mapped = inputs + requests.repeat_interleave(counts) * (added - 1)
        out_hidden_state_mapping_ptr[begin : begin + len(inputs)] = mapped.to(out_hidden_state_mapping_ptr.dtype)


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
