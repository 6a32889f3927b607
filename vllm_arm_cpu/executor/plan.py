"""Which ranks of the machine's plan belong to an engine; nothing of vLLM's is imported here."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from vllm_arm_cpu import envs
from vllm_arm_cpu.runtime import numa, topology
from vllm_arm_cpu.runtime.numa import RankPlan

if TYPE_CHECKING:
    from vllm.config.parallel import ParallelConfig

EXECUTOR_CLASS = "vllm_arm_cpu.executor.executor.NumaExecutor"

RAY_RESOURCE = "GPU"
"""What Ray counts ranks by. It numbers what it hands out of its own kinds alone, and a CPU is a core."""


def plan_machine(parallel_config: ParallelConfig, machine: topology.Topology) -> tuple[RankPlan, ...]:
    """Plans of the ranks of all engines on this machine; errors as in :func:`plan_engine`."""
    if is_foreign(parallel_config):
        # Other launchers put ranks where they like. Ray knows at least how many it would put here.
        return numa.plan_ranks(machine, _ray_places())
    engines = max(parallel_config.data_parallel_size_local, int(os.environ.get(envs.LOCAL_ENGINES, "1")), 1)
    index = parallel_config.data_parallel_rank_local or 0
    return numa.plan_ranks(machine, max(engines, index + 1) * parallel_config.local_world_size)


def plan_engine(parallel_config: ParallelConfig, machine: topology.Topology) -> tuple[RankPlan, ...]:
    """Plans of an engine's ranks on this machine.

    Data-parallel engines on the same machine divide it: each gets the next
    ranks of one common plan. Under Ray each rank has the place whose number it
    was given; under any other launcher than vLLM's own processes it has the
    machine to itself.

    Raises:
        EnvError: VAC_BIND or VAC_THREADS does not fit.
        ValueError: more ranks than cores.
    """
    plans, per_engine = plan_machine(parallel_config, machine), parallel_config.local_world_size
    if is_foreign(parallel_config):
        places = parallel_config.assigned_physical_gpu_ids or []
        return tuple(plans[place] for place in places if place < len(plans)) or plans
    index = parallel_config.data_parallel_rank_local or 0
    return plans[index * per_engine : (index + 1) * per_engine] if len(plans) >= per_engine else plans


def is_foreign(parallel_config: ParallelConfig) -> bool:
    """Whether ranks are started by others than this machine's own vLLM processes: Ray, a user's launcher."""
    return parallel_config.distributed_executor_backend not in (None, "mp", "uni", EXECUTOR_CLASS)


def _ray_places() -> int:
    """How many ranks Ray may put on this machine (``ray start --num-gpus``), 1 where nobody has asked it."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return 1
    own = ray.get_runtime_context().get_node_id()
    offered: dict[str, float] = next((node["Resources"] for node in ray.nodes() if node["NodeID"] == own), {})
    return max(1, int(offered.get(RAY_RESOURCE, 1)))


def remember_engines(parallel_config: ParallelConfig, environ: MutableMapping[str, str] | None = None) -> None:
    """Tell child processes how many engines share the machine: vLLM hides it from engines of dense models."""
    environ = os.environ if environ is None else environ
    if parallel_config.data_parallel_rank_local is not None:
        return  # this is an engine's process, or the user's own launcher
    environ.pop(envs.LOCAL_ENGINES, None)
    if parallel_config.data_parallel_size_local > 1:
        environ[envs.LOCAL_ENGINES] = str(parallel_config.data_parallel_size_local)


def executor_backend(parallel_config: ParallelConfig) -> str | None:
    """Import path of the executor for a configuration, None where vLLM's choice stands."""
    one_machine = parallel_config.nnodes == 1 and parallel_config.local_world_size > 1
    return EXECUTOR_CLASS if one_machine and parallel_config.distributed_executor_backend == "mp" else None
