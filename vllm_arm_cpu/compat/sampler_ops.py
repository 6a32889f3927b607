"""Greedy and random sampling on our kernels.

Replaces ``Sampler.greedy_sample`` and ``TopKTopPSampler.forward_cpu``: both
call ``torch.ops._C`` on any CPU platform, without a hook, and fail where
``vllm._C`` is missing. Can go once vLLM dispatches them through the platform.
"""

from __future__ import annotations

from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from vllm_arm_cpu.sampling import sampler


def apply() -> None:
    """Replace the two methods."""
    Sampler.greedy_sample = staticmethod(sampler.greedy_sample)
    TopKTopPSampler.forward_cpu = sampler.top_k_top_p_sample
