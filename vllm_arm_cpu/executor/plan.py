"""Which ranks of the machine's plan belong to an engine; nothing of vLLM's is imported here."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from vllm_arm_cpu import envs
from vllm_arm_cpu.runtime import numa, topology
from vllm_arm_cpu.runtime.numa import RankPlan

if TYPE_CHECKING:
    from vllm.config.parallel import ParallelConfig

EXECUTOR_CLASS = "vllm_arm_cpu.executor.executor.NumaExecutor"


def plan_machine(parallel_config: ParallelConfig, machine: topology.Topology) -> tuple[RankPlan, ...]:
    """Plans of the ranks of all engines on this machine; errors as in :func:`plan_engine`."""
    if parallel_config.distributed_executor_backend not in (None, "mp", "uni", EXECUTOR_CLASS):
        # Ray and other launchers put ranks where they like: what else is on this machine is not known.
        return numa.plan_ranks(machine, 1)
    engines = max(parallel_config.data_parallel_size_local, int(os.environ.get(envs.LOCAL_ENGINES, "1")), 1)
    index = parallel_config.data_parallel_rank_local or 0
    return numa.plan_ranks(machine, max(engines, index + 1) * parallel_config.local_world_size)


def plan_engine(parallel_config: ParallelConfig, machine: topology.Topology) -> tuple[RankPlan, ...]:
    """Plans of an engine's ranks on this machine.

    Data-parallel engines on the same machine divide it: each gets the next
    ranks of one common plan. Under another launcher than vLLM's own processes
    (Ray), a rank has the machine to itself.

    Raises:
        EnvError: VAC_BIND or VAC_THREADS does not fit.
        ValueError: more ranks than cores.
    """
    plans, per_engine = plan_machine(parallel_config, machine), parallel_config.local_world_size
    index = parallel_config.data_parallel_rank_local or 0
    return plans[index * per_engine : (index + 1) * per_engine] if len(plans) >= per_engine else plans


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
