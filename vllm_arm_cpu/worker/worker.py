"""The worker that runs the model on Arm cores.

World size 1 lives in the EngineCore process. What differs from vLLM's CPU
worker: threads are pinned here and not through environment variables that
libgomp read long ago, nothing needs ``vllm._C``, and bad settings end before
a weight is loaded.
"""

from __future__ import annotations

# Replaces torch's accelerator functions by no-ops; before anything else of vLLM's worker.
import vllm.v1.worker.cpu.shm  # noqa: F401  # isort: skip

import contextlib
import gc
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.mem_utils import format_gib
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment

from vllm_arm_cpu import compat, layers, quantization
from vllm_arm_cpu.compat import checkpoint_pages, gloo_device, torch_threads
from vllm_arm_cpu.envs import format_cpu_list
from vllm_arm_cpu.executor.plan import is_foreign, plan_engine, plan_machine
from vllm_arm_cpu.layers import decoder
from vllm_arm_cpu.native import library
from vllm_arm_cpu.runtime import frontend, memory, numa, preload, threads, topology
from vllm_arm_cpu.worker import warmup
from vllm_arm_cpu.worker.model_runner import ArmCpuModelRunner

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.arm_cpu.worker")

_SHARE_OF_AVAILABLE = 0.9
"""How much of the free memory is taken when less is free than asked for."""


class ArmCpuWorker(CPUWorker):
    """vLLM's worker interface on Arm cores.

    Raises:
        ValueError: more memory is asked for than the machine or its cgroup
            has left; the message names the flag.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
        **kwargs: Any,
    ) -> None:
        # Before the model is built, in the process that builds it.
        model_config = vllm_config.model_config
        layers.register(with_states=model_config.is_hybrid or model_config.is_attention_free)
        quantization.register()
        compat.apply()
        # A rank of several was told by the executor: its own affinity mask shows its cores only.
        inherited = numa.inherited()
        if inherited is None:
            frontend.leave()
        else:
            numa.end_with_parent()
        self.topology = topology.read()
        self._affinity = os.sched_getaffinity(0)
        parallel_config = vllm_config.parallel_config
        plans = plan_engine(parallel_config, self.topology) if inherited is None else ()
        self._ranks_here = max(1, parallel_config.local_world_size)
        if is_foreign(parallel_config):
            # vLLM counts those of other machines, too.
            self._ranks_here = len(plan_machine(parallel_config, self.topology))
        self.plan = inherited or plans[local_rank % len(plans)]
        if inherited is None and self.plan.memory_nodes:
            # An engine of one rank beside others: nobody could set this before its process began.
            with contextlib.suppress(OSError):
                memory.set_policy(memory.MemoryPolicy.bind(self.plan.memory_nodes))
        memory.bind_arenas(self.plan.memory_nodes)
        # CPUWorker's constructor calls into vllm._C; its base class does not.
        Worker.__init__(self, vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=is_driver_worker)
        self.parallel_config.disable_custom_all_reduce = True
        self._check_memory()

    def _check_memory(self) -> None:
        """Refuse before loading what could not be allocated afterwards."""
        total, available = self._memory()
        cache_config = self.vllm_config.cache_config
        self.requested_cpu_memory = math.ceil(total * cache_config.gpu_memory_utilization)
        kv_cache_bytes = cache_config.kv_cache_memory_bytes
        if kv_cache_bytes is not None:
            if kv_cache_bytes > available:
                raise ValueError(
                    f"a KV cache of {format_gib(kv_cache_bytes)} GiB does not fit: {format_gib(available)} of "
                    f"{format_gib(total)} GiB are free. Decrease --kv-cache-memory-bytes or VLLM_CPU_KVCACHE_SPACE."
                )
        elif self.requested_cpu_memory > available:
            # The flag's default suits a GPU that nobody else uses; a server's memory is shared.
            limit = int(available * _SHARE_OF_AVAILABLE)
            logger.warning(
                "--gpu-memory-utilization %s means %s GiB of main memory on a CPU, but %s of %s GiB are free: using %s",
                cache_config.gpu_memory_utilization,
                *map(format_gib, (self.requested_cpu_memory, available, total, limit)),
            )
            self.requested_cpu_memory = limit

    def _memory(self) -> tuple[int, int]:
        """Bytes that this rank may count on, and how many of them are free."""
        nodes, share = self.plan.memory_nodes or None, self.plan.memory_share
        total, available = self.topology.memory_bytes(nodes), self.topology.available_memory_bytes(nodes)
        # The cgroup's limit is one for all ranks, wherever they are.
        everywhere, left = self.topology.memory_bytes(), self.topology.available_memory_bytes()
        ranks = self._ranks_here
        return min(int(total * share), everywhere // ranks), min(int(available * share), left // ranks)

    def init_device(self) -> None:
        """Pin threads, join the process group, build the model runner."""
        self.device = torch.device("cpu")
        self._warn_if_not_preloaded()
        self._pin_threads()
        init_method = self.distributed_init_method
        # Names the shared-memory segment of upstream's tensor-parallel ranks.
        os.environ["VLLM_DIST_IDENT"] = init_method.removeprefix("file://").replace("/", "_").split(":")[-1]
        with gloo_device.shared(self.parallel_config.world_size_across_dp):
            init_worker_distributed_environment(
                self.vllm_config,
                self.rank,
                self.distributed_init_method,
                self.local_rank,
                current_platform.dist_backend,
            )
        set_random_seed(self.model_config.seed)
        self.model_runner = ArmCpuModelRunner(self.vllm_config, self.device)

    def _pin_threads(self) -> None:
        lib = library.load()

        def pin(cpus: Sequence[int]) -> None:
            bound = lib.vac_pin_threads(library.ffi.new("int32_t[]", list(cpus)), len(cpus))
            if bound < 0:
                raise OSError(-bound, f"cannot bind threads to CPUs {list(cpus)}: {os.strerror(-bound)}")
            if bound < len(cpus):
                logger.warning("threads: the OpenMP team has %d threads, %d were planned", bound, len(cpus))

        plan = threads.apply(self.plan.threads, torch_threads.fix, pin)
        logger.info("threads: %d on CPUs %s (%s)", plan.num_threads, list(plan.cpus), "; ".join(plan.reasons))

    def shutdown(self) -> None:
        """End the worker; the thread that ran it may use all of its CPUs again.

        An engine inside the user's own process must not leave it bound: the
        next one would find no other CPUs. A rank's process ends and its memory
        with it: it does not give back piece by piece, which takes seconds.
        """
        if numa.inherited() is not None and hasattr(self, "model_runner"):
            del self.model_runner
        super().shutdown()
        os.sched_setaffinity(0, self._affinity)

    def _warn_if_not_preloaded(self) -> None:
        missing = preload.not_mapped()
        if missing:
            logger.warning(
                "%s not preloaded into this process (an engine inside the user's own process starts too late for "
                "it): run with LD_PRELOAD=%s for full speed",
                " and ".join(candidate.name for candidate in missing),
                ":".join(str(candidate.path) for candidate in missing),
            )

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the weights, each into the form that its kernel reads."""
        try:
            with checkpoint_pages.released_once_read():
                super().load_model(load_dummy_weights=load_dummy_weights)
            warmup.after_load(self.model_runner.get_model(), self.vllm_config)
        except Exception as error:
            if numa.inherited() is not None:
                # The executor knows who, not why.
                where = f"node {self.plan.node}, CPUs {format_cpu_list(self.plan.threads.cpus)}"
                logger.error("rank %d (%s) cannot load: %s: %s", self.rank, where, type(error).__name__, error)
            raise

    def reload_weights(
        self, weights_iterator: Any = None, weights_path: str | None = None, is_checkpoint_format: bool = True
    ) -> None:
        """Other weights for the same model, packed again in place.

        Raises:
            ValueError: weights that are not in the checkpoint's format, where the layers are packed.
        """
        if not is_checkpoint_format:
            warmup.refuse_unpacked_reload(self.model_runner.get_model())
        with checkpoint_pages.released_once_read():
            super().reload_weights(weights_iterator, weights_path, is_checkpoint_format)
        decoder.forget(self.model_runner.get_model())

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the model for a step, without looking after a pipeline and a profiler that are not there."""
        plain = self.model_runner.plain
        if plain is not None and self.profiler is None and plain.takes(scheduler_output):
            with torch.inference_mode():
                return plain.run(scheduler_output)
        return super().execute_model(scheduler_output)

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache: what was asked for, or the rest of the share."""
        if self._should_warm_up_model():
            self.model_runner.warming_up_model()
        _, available = self._memory()
        explicit = self.cache_config.kv_cache_memory_bytes
        if explicit is not None:
            if explicit > available:
                raise ValueError(
                    f"a KV cache of {format_gib(explicit)} GiB does not fit beside the model: "
                    f"{format_gib(available)} GiB are free. Decrease --kv-cache-memory-bytes or "
                    "VLLM_CPU_KVCACHE_SPACE."
                )
            logger.info("KV cache: %s GiB, as asked for", format_gib(explicit))
            return int(explicit)
        consumed = topology.resident_bytes()
        size = self.requested_cpu_memory - consumed
        if size <= 0 or size > available:
            raise ValueError(
                f"no room for a KV cache: the model takes {format_gib(consumed)} GiB of the "
                f"{format_gib(self.requested_cpu_memory)} GiB that --gpu-memory-utilization allows, and "
                f"{format_gib(available)} GiB are free."
            )
        logger.info("KV cache: %s GiB, what --gpu-memory-utilization leaves", format_gib(size))
        return int(size)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up, then keep the garbage collector away from what lives as long as the engine."""
        times = super().compile_or_warm_up_model()
        gc.collect()
        gc.freeze()
        return times
