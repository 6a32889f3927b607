"""Native functions in the place of Triton kernels that upstream's CPU platform maps to ``vllm._C``.

vLLM has the hook (``register_triton_kernel_overrides``); this file holds what
is registered there. The signatures are those of the Triton kernels.
"""

from __future__ import annotations

import torch
from vllm.triton_utils import dispatcher
from vllm.utils import cpu_triton_utils

from vllm_arm_cpu.attention import kv_cache


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slot_mapping: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int = 1,
    TOTAL_CP_RANK: int = 0,
    CP_KV_CACHE_INTERLEAVE_SIZE: int = 1,
    PAD_ID: int = -1,
    BLOCK_SIZE: int = 1024,
) -> None:
    """``slot_mapping[t]`` = cache slot of token t, for the tokens of a step.

    Shapes: query_start_loc int32 [num_reqs + 1], positions int64 [num_tokens],
    block_table int32 [>= num_reqs, blocks], slot_mapping int64 [max_num_tokens].

    Raises:
        NotImplementedError: context parallelism.
    """
    if TOTAL_CP_WORLD_SIZE != 1:
        raise NotImplementedError("context parallelism is not supported on Arm CPUs")
    kv_cache.compute_slot_mapping(query_start_loc, positions, block_table, slot_mapping, KV_CACHE_BLOCK_SIZE)


def prepare() -> None:
    """Make upstream's own registration, which follows, register our function.

    Registering twice under one name would log a warning in every process.
    """
    cpu_triton_utils._compute_slot_mapping_kernel_impl = compute_slot_mapping


_NAME = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"


def registered() -> bool:
    """Whether this process has our function in the place of the Triton kernel already."""
    return _NAME in dispatcher._registry


def register() -> None:
    """Register where upstream does not: with Triton installed it leaves its kernels in place."""
    dispatcher.register_kernels({_NAME: compute_slot_mapping})
