"""Keep torch on the threads that the worker bound.

Replaces ``torch.set_num_threads`` and vLLM's ``set_torch_threads_for_runtime``,
which reduces torch to one thread once the model is loaded: right for a GPU
worker, wrong here, where layers without a kernel of ours run on torch. Upstream
makes an exception only when OMP_NUM_THREADS is set by the user, and warns then.
Can go once vLLM asks the platform.
"""

from __future__ import annotations

import torch
from vllm.logger import init_logger
from vllm.v1.worker import gpu_worker

logger = init_logger("vllm.arm_cpu.threads")

_set_num_threads = torch.set_num_threads


def _keep(num_threads: int) -> None:
    # Libraries call this with guesses of their own, which would undo the plan.
    logger.debug("torch.set_num_threads(%d) ignored: threads are bound", num_threads)


def fix(num_threads: int) -> None:
    """Set the number of torch's threads, which is also the OpenMP team's, for good."""
    _set_num_threads(num_threads)
    torch.set_num_threads = _keep
    gpu_worker.set_torch_threads_for_runtime = lambda: None
