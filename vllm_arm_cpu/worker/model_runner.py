"""The model runner: vLLM's, on Arm cores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_arm_cpu.layers import decoder
from vllm_arm_cpu.runtime import memory


class ArmCpuModelRunner(CPUModelRunner):
    """vLLM's CPU model runner, less the work that our kernels make needless."""

    def initialize_kv_cache_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Allocate the KV cache in a huge-page arena whose pages are touched when first used."""
        with _zeros_from_arena():
            tensors = super().initialize_kv_cache_tensors(*args, **kwargs)
        decoder.forget(self.get_model())
        return tensors

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        """Nothing to do: our attention never reads a slot that was not written.

        Upstream zeroes new blocks because its kernels multiply the unused
        slots of a block by zero, and what lies there may be NaN.
        """


@contextlib.contextmanager
def _zeros_from_arena() -> Iterator[None]:
    """Serve large one-dimensional int8 ``torch.zeros`` from ``memory.allocate``.

    vLLM makes the whole cache with one such call, which writes every page: on
    one thread, on that thread's node, and for tens of gigabytes. Fresh
    anonymous memory is zero anyway.
    """
    original = torch.zeros

    def zeros(*size: Any, **kwargs: Any) -> torch.Tensor:
        if len(size) == 1 and isinstance(size[0], int) and kwargs.get("dtype") == torch.int8:
            return memory.allocate(size[0]).view(torch.int8)
        return original(*size, **kwargs)

    torch.zeros = zeros
    try:
        yield
    finally:
        torch.zeros = original
