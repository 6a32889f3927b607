"""The Arm CPU platform: vLLM's CPU platform with our worker, attention and defaults.

It keeps ``_enum = CPU``: vLLM has many branches on ``is_cpu()``, and all of
them are right for us.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform

from vllm_arm_cpu import envs
from vllm_arm_cpu.attention import DEFAULT_BLOCK_SIZE
from vllm_arm_cpu.executor import plan
from vllm_arm_cpu.runtime import frontend, numa, preload, topology

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger("vllm.arm_cpu.platform")

WORKER_CLASS = "vllm_arm_cpu.worker.worker.ArmCpuWorker"
ATTENTION_BACKEND = "vllm_arm_cpu.attention.backend.ArmAttentionBackend"
OFFLOADING_CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector")


def upstream_ops_available() -> bool:
    """Whether vLLM's compiled CPU ops (``vllm._C``) are loaded in this process."""
    import torch

    return hasattr(torch.ops._C, "cpu_attention_with_kv_cache")


def offloading_setting(vllm_config: VllmConfig) -> str | None:
    """What asks for a second KV cache in main memory, or None."""
    size, transfer = vllm_config.cache_config.kv_offloading_size, vllm_config.kv_transfer_config
    if size is not None:
        return f"--kv-offloading-size {size}"
    connector = None if transfer is None else transfer.kv_connector
    return f"--kv-transfer-config with {connector}" if connector in OFFLOADING_CONNECTORS else None


class ArmCpuPlatform(CpuPlatform):
    """Platform for aarch64 servers; see the module's head."""

    # For the functions that vLLM compiles by themselves (logprobs, random
    # sampling, vocabulary shards): inductor would call g++ in the middle of a request.
    simple_compile_backend = "eager"

    # Upstream's CPU platform refuses Ray, for want of a name.
    ray_device_key = plan.RAY_RESOURCE

    @classmethod
    def import_kernels(cls) -> None:
        """Load ``vllm._C`` if the installed vLLM has it; nothing of ours needs it."""
        if envs.VAC_BLOCK_UPSTREAM_OPS:
            return
        try:
            import vllm._C  # noqa: F401
        except ImportError as error:
            logger.debug("vllm._C is not available: %s", error)

    @classmethod
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        """What must be in place before the command line is parsed, or a configuration made."""
        from vllm_arm_cpu.compat import kv_cache_dtype

        super().pre_register_and_update(parser)
        cls.import_kernels()
        if not upstream_ops_available():
            # The only kernel for latents is there; without it our own attend over heads made from them.
            os.environ.setdefault("VLLM_MLA_DISABLE", "1")
        kv_cache_dtype.apply(parser)
        if parser is None:
            from vllm_arm_cpu import quantization

            quantization.register_configs()
        elif envs.VAC_TP == "auto":
            parser.set_defaults(tensor_parallel_size=numa.propose(topology.read()))

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Defaults that apply where the user did not choose."""
        from vllm.config import CompilationMode

        super().apply_config_platform_defaults(vllm_config)
        # Our layers are native calls already; compiling what is left between
        # them would need g++ on the serving machine and minutes at start.
        if vllm_config.compilation_config.mode is None:
            vllm_config.compilation_config.mode = CompilationMode.NONE

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Adjust vLLM's configuration; runs in the first process, before any worker.

        Raises:
            ValueError: a block size that the attention kernels cannot use, or a
                VAC_* variable that means nothing here.
        """
        from vllm_arm_cpu.compat import engine_death, engine_shutdown, frontend_cores

        engine_death.apply()
        engine_shutdown.apply()
        frontend_cores.apply()
        # Settings that cannot be used must end here, not in a worker minutes later.
        for error in envs.errors():
            raise error
        parallel_config = vllm_config.parallel_config
        # vLLM comes here again in an engine's process, once its threads are bound to CPUs: the machine cannot be
        # planned from there.
        if multiprocessing.parent_process() is None:
            plan.remember_engines(parallel_config)
            plan.plan_engine(parallel_config, frontend.read())
        cache_config = vllm_config.cache_config
        offloading = offloading_setting(vllm_config)
        if offloading is not None:
            raise ValueError(
                f"{offloading} means nothing on a CPU: the KV cache is in main memory already. Leave it out, and set "
                "--kv-cache-memory-bytes for a larger cache"
            )
        single_process = parallel_config.distributed_executor_backend == "uni"
        use_mla = vllm_config.model_config is not None and vllm_config.model_config.use_mla
        if not use_mla and vllm_config.model_config is not None and vllm_config.model_config.is_deepseek_mla:
            logger.warning_once(
                "latent attention (MLA) runs as attention over whole heads: the KV cache keeps keys and values of all "
                "heads, many times what latents would take"
            )
        default_block_size = not cache_config.user_specified_block_size and not use_mla
        if parallel_config.worker_cls == "auto":
            parallel_config.worker_cls = WORKER_CLASS

        custom_ops = list(vllm_config.compilation_config.custom_ops)

        super().check_and_update_config(vllm_config)

        # Upstream enables three GELU ops by name on Arm, and then warns of those
        # that the model does not have.
        vllm_config.compilation_config.custom_ops = custom_ops
        # Upstream moves a single worker into a process of its own, to give it
        # an OpenMP environment; ours sets its threads up itself, and saves the
        # queue between two processes in every step.
        if single_process:
            parallel_config.distributed_executor_backend = "uni"
        # Ranks of one machine each have a NUMA node, or a part of one.
        parallel_config.distributed_executor_backend = (
            plan.executor_backend(parallel_config) or parallel_config.distributed_executor_backend
        )
        if default_block_size:
            cache_config.block_size = DEFAULT_BLOCK_SIZE
        elif not use_mla and cache_config.block_size % 16 != 0:
            raise ValueError(
                f"--block-size {cache_config.block_size} is not supported on Arm CPUs: use a multiple of 16"
            )
        # Upstream adds torch's libgomp and its own tcmalloc; two allocators or
        # two OpenMP runtimes in one process must not be.
        preload.after_platform_config(os.environ)

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        """Our backend where it has a kernel, upstream's where that is available.

        Raises:
            ValueError: neither has one; the message says what is supported.
        """
        from vllm_arm_cpu.attention.backend import ArmAttentionBackend

        reason = ArmAttentionBackend.unsupported_reason(attn_selector_config)
        if reason is None:
            return ATTENTION_BACKEND
        if not upstream_ops_available():
            raise ValueError(f"no attention kernel for this model on Arm CPUs: {reason}")
        logger.warning_once("attention falls back to vLLM's own CPU kernels: %s", reason)
        return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))

    @classmethod
    def get_punica_wrapper(cls) -> str:
        """LoRA products that leave rows without an adapter alone."""
        return "vllm_arm_cpu.layers.lora.ArmPunicaWrapper"

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Native implementations in the place of Triton kernels, once in a process.

        Registering looks through the names of all modules, and stumbles over llvmlite's, which n-gram drafts import:
        the next engine in the process would not start.
        """
        from vllm.triton_utils import HAS_TRITON

        from vllm_arm_cpu.compat import speculative_kernels, triton_kernels

        if triton_kernels.registered():
            return
        triton_kernels.prepare()
        speculative_kernels.prepare()
        super().register_triton_kernel_overrides()
        if HAS_TRITON:
            triton_kernels.register()

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Collectives in shared memory, gloo for what they do not have."""
        return "vllm_arm_cpu.executor.communicator.ArmCpuCommunicator"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """The core's name, such as ``Arm Neoverse-V2``; shown in logs and benchmarks."""
        from vllm_arm_cpu.runtime import cpu

        return cpu.detect().name

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """KV caches of several layers per group are supported, as upstream's platform says."""
