"""Greedy, random and rejection sampling, min-p, penalties and logprobs on our kernels.

Replaces ``Sampler.greedy_sample`` and ``TopKTopPSampler.forward_cpu``: both
call ``torch.ops._C`` on any CPU platform, without a hook, and fail where
``vllm._C`` is missing. Can go once vLLM dispatches them through the platform.

Replaces ``MinPLogitsProcessor.apply`` (with ``Sampler.sample`` around it), the mask
of allowed tokens in ``Sampler.apply_logits_processors``, ``compute_logprobs``
and ``gather_logprobs``, and ``apply_all_penalties`` where the two samplers know
it: torch operations on the whole vocabulary, millions of instructions for each
token. Can go once vLLM lets a platform bring its own.

Replaces ``rejection_sample`` and ``apply_sampling_constraints``, which
``RejectionSampler.forward`` looks up in their module, for the same reason: they sort,
exponentiate and fill with noise a row of the vocabulary for every drafted token, and go
through Triton kernels, for which a CPU has only ``vllm._C``. ``forward`` itself gets logits
whose rows are copied as rows. Can go with the others.
"""

from __future__ import annotations

from vllm.v1.sample import rejection_sampler
from vllm.v1.sample import sampler as upstream
from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from vllm_arm_cpu.sampling import rejection, sampler


def apply() -> None:
    """Replace the functions."""
    Sampler.greedy_sample = staticmethod(sampler.greedy_sample)
    TopKTopPSampler.forward_cpu = sampler.top_k_top_p_sample
    Sampler.sample = sampler.sample
    Sampler.apply_logits_processors = sampler.apply_logits_processors
    MinPLogitsProcessor.apply = sampler.apply_min_p
    Sampler.compute_logprobs = staticmethod(sampler.compute_logprobs)
    Sampler.gather_logprobs = staticmethod(sampler.gather_logprobs)
    upstream.apply_all_penalties = sampler.apply_all_penalties
    rejection_sampler.apply_all_penalties = sampler.apply_all_penalties
    rejection_sampler.RejectionSampler.forward = rejection.forward
    rejection_sampler.rejection_sample = rejection.rejection_sample
    rejection_sampler.apply_sampling_constraints = rejection.apply_sampling_constraints
