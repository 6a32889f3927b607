"""The executor of several ranks on one machine: vLLM's, with every rank born on its NUMA node.

vLLM starts a process for each rank and talks to it through shared-memory queues;
that stays. What differs is where a rank runs: cores, memory policy and OpenMP
environment are set before its process exists, so that everything it allocates
is on its node. Upstream binds threads through variables and memory with vllm._C.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.v1.executor import multiproc_executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, UnreadyWorkerProcHandle, WorkerProc

from vllm_arm_cpu.compat import queue_wait
from vllm_arm_cpu.envs import format_cpu_list
from vllm_arm_cpu.executor.plan import plan_engine
from vllm_arm_cpu.runtime import frontend, numa, topology
from vllm_arm_cpu.runtime.numa import RankPlan

logger = init_logger("vllm.arm_cpu.executor")

_GRACE_SECONDS = 1.0
"""For ranks to end by themselves once one of them has failed: nothing that they could still do is of use."""

_FIRST_END_SECONDS = 1.0
"""For a rank that cannot load to be gone, so that it can be said how it ended."""


class NumaExecutor(MultiprocExecutor):
    """``MultiprocExecutor`` whose ranks are placed by :mod:`vllm_arm_cpu.runtime.numa`."""

    def _init_executor(self) -> None:
        frontend.leave()
        self.machine = topology.read()
        self.plans = plan_engine(self.parallel_config, self.machine)
        for row in numa.picture(self.machine, self.plans):
            logger.info("ranks: %s %s", *row)
        for plan in self.plans:
            for reason in (*plan.threads.reasons, *plan.reasons):
                logger.info("rank %d: %s", plan.rank, reason)
        queue_wait.apply()
        # The name that upstream's method looks up; its own manager binds nodes by number and
        # refuses more ranks than nodes.
        manager, wait = multiproc_executor.OMPProcessManager, WorkerProc.wait_for_ready
        multiproc_executor.OMPProcessManager = lambda config: _Births(self.plans)
        WorkerProc.wait_for_ready = staticmethod(lambda handles: self._wait_for_ready(wait, handles))
        self._watch = _Watch(self)
        try:
            super()._init_executor()
        finally:
            multiproc_executor.OMPProcessManager = manager
            WorkerProc.wait_for_ready = staticmethod(wait)

    def _wait_for_ready(
        self, wait: Callable[[list[UnreadyWorkerProcHandle]], Any], handles: list[UnreadyWorkerProcHandle]
    ) -> Any:
        """As vLLM's ``wait``, which does not say who is not.

        Raises:
            RuntimeError: a rank has ended or failed; names it, its place and, where it is known, how.
        """
        for handle in handles:
            handle.ready_pipe.__class__ = _ReadyPipe
        try:
            return wait(handles)
        except Exception as error:
            lost = [handle for handle in handles if getattr(handle.ready_pipe, "lost", False)]
            if not lost:
                raise
            # The process itself may take longer.
            self._watch.ended.wait(_FIRST_END_SECONDS)
            who = f"{self.describe(lost[0].rank)}, process {lost[0].proc.pid}"
            first = self._watch.first or f"{who}, has given up; its own message stands above"
            raise RuntimeError(f"loading failed: {first}") from error

    def shutdown(self) -> None:
        """As vLLM's; of an engine that has failed, it is said first which rank ended by itself."""
        if self._is_failing() and not getattr(self, "shutting_down", False):
            # vLLM's monitor may have seen it before our watch. Once the others are told to end, too, it is too late to
            # know who was the first.
            self._watch.look()
        super().shutdown()

    def _is_failing(self) -> bool:
        """Whether it ends for a failure: vLLM's monitor saw a rank end, or an error is on its way."""
        return self.is_failed or isinstance(sys.exc_info()[1], Exception)

    def _ensure_worker_termination(self, worker_procs: list[BaseProcess]) -> None:
        """As vLLM's where all is well; ranks of an engine that has failed are not waited for.

        Their own end may take seconds, or never come: a rank that loads does not hear that it should end, one that
        hangs does not listen, and one that is stopped cannot.
        """
        if not self._is_failing():
            MultiprocExecutor._ensure_worker_termination(worker_procs)
            return
        # What ends from here on is no news.
        self.shutting_down = True
        for process in worker_procs:
            # At once: this process may be ended, too, and nobody else would find it.
            if process.is_alive() and _is_stopped(process.pid):
                logger.error("%s, process %s, is stopped: killing it", process.name, process.pid)
                process.kill()
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in worker_procs:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in worker_procs:
            if process.is_alive():
                logger.error("%s, process %s, does not end: killing it", process.name, process.pid)
                process.kill()
        for process in worker_procs:
            process.join(_GRACE_SECONDS)

    def describe(self, rank: int) -> str:
        """A rank's name for messages: where it is."""
        plan = self.plans[rank % len(self.plans)]
        return f"rank {rank} (node {plan.node}, CPUs {format_cpu_list(plan.threads.cpus)})"


class _ReadyPipe(Connection):
    """A pipe on which a rank says that it is ready, or closes without a word."""

    lost: bool = False

    def recv(self) -> Any:
        """As always."""
        try:
            return super().recv()
        except EOFError:
            self.lost = True
            raise


class _Births:
    """Takes the place of vLLM's manager of OpenMP environments: wraps the start of each rank's process."""

    def __init__(self, plans: tuple[RankPlan, ...]) -> None:
        self._plans = plans
        self._warned = False

    @contextlib.contextmanager
    def configure_omp_envs(self, rank: int, local_rank: int) -> Iterator[None]:
        with numa.environment_of(self._plans[local_rank]) as refused:
            if refused and not self._warned and refused != errno.ENOSYS:
                self._warned = True
                logger.warning(
                    "memory cannot be bound to NUMA nodes (%s): pages come from the node of the thread that touches "
                    "them first, and from another one when that is full. In a container: --cap-add SYS_NICE",
                    os.strerror(refused),
                )
            yield


class _Watch:
    """Waits for the first rank's process to end and says which it was and why.

    vLLM's own monitor begins when all ranks are ready, and knows process names only.

    Attributes:
        first: the sentence about the first rank that ended by itself, or None.
        ended: set when there is one.
    """

    def __init__(self, executor: NumaExecutor) -> None:
        self.first: str | None = None
        self.ended = threading.Event()
        self._executor = executor
        self._processes: dict[int, BaseProcess] = {}
        # Held by whoever says it.
        self._saying = threading.Lock()
        threading.Thread(target=self._run, name="vac-rank-watch", daemon=True).start()

    def look(self) -> None:
        """Say which rank has ended, if one has and nothing was said yet."""
        with self._saying:
            ended = multiprocessing.connection.wait(list(self._processes), 0) if self.first is None else []
            if not ended:
                return
            process = self._processes[ended[0]]  # type: ignore[index]
            who = self._executor.describe(int(process.name.split("-")[1]))
            self.first = f"{who}, process {process.pid}, {_end_of(process)}"
            logger.error("%s", self.first)
            self.ended.set()

    def _run(self) -> None:
        while self.first is None and not self._is_shutting_down():
            for process in multiprocessing.active_children():
                if process.name.startswith("VllmWorker-"):
                    self._processes.setdefault(process.sentinel, process)
            # Ended ones are not active any more: those seen before are asked.
            timeout = None if len(self._processes) == len(self._executor.plans) else 0.2
            multiprocessing.connection.wait(list(self._processes), timeout)
            if not self._is_shutting_down():
                self.look()

    def _is_shutting_down(self) -> bool:
        return getattr(self._executor, "shutting_down", False)


def _is_stopped(pid: int | None) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _end_of(process: BaseProcess) -> str:
    # vLLM's monitor waits for it as well, and only one of the two is told by the kernel.
    deadline = time.monotonic() + 2
    while (code := process.exitcode) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    if code is None:
        return "has ended"
    if code >= 0:
        return f"has ended with exit code {code}; its own message stands above"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    cause = ": by hand, or by the kernel for want of memory (see dmesg)" if name == "SIGKILL" else ""
    return f"was killed by {name}{cause}"
