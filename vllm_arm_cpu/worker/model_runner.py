"""The model runner: vLLM's, on Arm cores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.logger import init_logger
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_arm_cpu.layers import decoder
from vllm_arm_cpu.runtime import memory
from vllm_arm_cpu.worker.plain_step import PlainStep, obstacle

logger = init_logger("vllm.arm_cpu.model_runner")


class ArmCpuModelRunner(CPUModelRunner):
    """vLLM's CPU model runner, less the work that our kernels make needless.

    Attributes:
        plain: the short way through a step, where the configuration allows it.
    """

    plain: PlainStep | None = None
    intermediate_tensors: Any

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the KV cache; only then it is known what a step has to do."""
        super().initialize_kv_cache(*args, **kwargs)
        self._make_room_for_stage_before()
        reason = obstacle(self)
        self.plain = PlainStep(self) if reason is None else None
        way = f"vLLM's way, because of {reason}"
        if self.plain is not None:
            split = self.plain.split_because
            way = "the short way, the model in " + ("one call" if split is None else f"several calls: {split}")
        logger.info("steps: %s", way)

    def _make_room_for_stage_before(self) -> None:
        """The buffers into which what an earlier stage of a pipeline sends is copied.

        Upstream makes them in its first dummy run, which there is none of without compilation.
        """
        if not get_pp_group().is_first_rank and self.intermediate_tensors is None:
            self.intermediate_tensors = self.get_model().make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """Run the model for a step, the short way where it can go."""
        if self.plain is not None and self.plain.takes(scheduler_output):
            return self.plain.run(scheduler_output)
        return super().execute_model(scheduler_output, intermediate_tensors)

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """Sample; a batch that wants the likeliest tokens and nothing else needs one kernel."""
        wanted = self.input_batch.sampling_metadata
        if (
            self.plain is None
            or not wanted.all_greedy
            or wanted.max_num_logprobs is not None
            or wanted.logprob_token_ids
            or logits.dtype != torch.float32
        ):
            return super()._sample(logits, spec_decode_metadata)
        logits = self.sampler.apply_logits_processors(logits, wanted, False)
        return SamplerOutput(self.sampler.greedy_sample(logits).unsqueeze(-1), logprobs_tensors=None)

    def _bookkeeping_sync(self, scheduler_output: Any, sampler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Put sampled tokens into the requests' state."""
        done = self.plain.bookkeep(sampler_output) if self.plain is not None else None
        if done is None:
            done = super()._bookkeeping_sync(scheduler_output, sampler_output, *args, **kwargs)
        return done

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
