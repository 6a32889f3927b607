"""Keep an API server's process off the cores that compute.

Wraps ``AsyncMPClient.__init__`` and ``shutdown``: every API server makes one
such client, and when it is made the engines have been started and must
not inherit what this process is bound to. Nothing tells a platform of either
moment. Can go once one is told.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.engine.core_client import AsyncMPClient

from vllm_arm_cpu.envs import format_cpu_list
from vllm_arm_cpu.executor.plan import is_foreign, plan_machine
from vllm_arm_cpu.runtime import frontend

logger = init_logger("vllm.arm_cpu.frontend")

_init = AsyncMPClient.__init__
_shutdown = AsyncMPClient.shutdown


def init(self: AsyncMPClient, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
    """As vLLM's; then this process's threads go where none computes."""
    import torch

    _init(self, vllm_config, *args, **kwargs)
    if is_foreign(vllm_config.parallel_config):
        return  # Ray may put ranks on any core of this machine
    machine = frontend.read()
    plans = [plan.threads for plan in plan_machine(vllm_config.parallel_config, machine)]
    found = frontend.enter(machine, plans, self.client_count, set_num_threads=torch.set_num_threads)
    if found is not None:
        logger.info("API server: on CPUs %s, apart from compute threads", format_cpu_list(found))


def shutdown(self: AsyncMPClient, *args: Any, **kwargs: Any) -> None:
    """As vLLM's; a user's own process may use all of its CPUs again."""
    try:
        _shutdown(self, *args, **kwargs)
    finally:
        frontend.leave()


def apply() -> None:
    """Replace both in the process that makes clients; called while it makes its configuration."""
    AsyncMPClient.__init__ = init
    AsyncMPClient.shutdown = shutdown
