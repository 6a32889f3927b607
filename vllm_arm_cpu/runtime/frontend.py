"""Cores for what is not the model: HTTP, tokenization and detokenization in the API server's process.

A step ends when the slowest compute thread ends. Where the API server takes
one of their cores for a millisecond, all others wait for it; so on machines
with many cores it gets one of its own, and stays there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path

from vllm_arm_cpu import envs
from vllm_arm_cpu.envs import EnvError, format_cpu_list, parse_cpu_list
from vllm_arm_cpu.runtime import threads, topology
from vllm_arm_cpu.runtime.threads import ThreadPlan
from vllm_arm_cpu.runtime.topology import Topology

MANY_CORES = 16
"""From so many on, one is set aside: 6 % of the arithmetic at most, which decoding, bound by memory, does not miss."""


def read(environ: Mapping[str, str] | None = None) -> Topology:
    """The machine with all CPUs that this process could use before :func:`enter`."""
    text = (os.environ if environ is None else environ).get(envs.AFFINITY, "")
    return topology.read(affinity=parse_cpu_list(text) if text else None)


def reserved(machine: Topology, environ: Mapping[str, str] | None = None, num_ranks: int = 1) -> tuple[int, ...]:
    """CPUs that compute threads leave to the API server: all of some cores, the last ones; often none.

    VAC_FRONTEND_CORES says how many. By itself it is one core of MANY_CORES or
    more, unless VAC_THREADS or VAC_BIND say what computes, the cgroup's quota
    keeps fewer threads busy than there are cores, or several ranks wait for each
    other: one of them would have a core less.

    Raises:
        EnvError: no core would be left to compute on.
    """
    wanted: int | None = envs.get("VAC_FRONTEND_CORES", environ)
    bind, count = envs.get("VAC_BIND", environ), envs.get("VAC_THREADS", environ)
    # A list is the user's word on which CPUs compute.
    if isinstance(bind, tuple):
        return ()
    cores = machine.cores(machine.allowed)
    if wanted is None:
        limit = machine.thread_limit
        chosen = count is not None or bind == "none" or (limit is not None and limit < len(cores))
        wanted = 1 if len(cores) >= MANY_CORES and not chosen and num_ranks == 1 else 0
    if wanted >= len(cores):
        raise EnvError("VAC_FRONTEND_CORES", str(wanted), f"auto, or 0 to {len(cores) - 1}: one core has to compute")
    return tuple(sorted(cpu for core in cores[len(cores) - wanted :] for cpu in core))


def for_compute(machine: Topology, environ: Mapping[str, str] | None = None, num_ranks: int = 1) -> Topology:
    """The machine without what is :func:`reserved`: what the ranks' threads are planned on."""
    apart = set(reserved(machine, environ, num_ranks))
    if not apart:
        return machine
    return replace(
        machine,
        cpus=tuple(cpu for cpu in machine.cpus if cpu not in apart),
        affinity=tuple(cpu for cpu in machine.allowed if cpu not in apart),
    )


def plan_threads(machine: Topology, environ: Mapping[str, str] | None = None) -> ThreadPlan:
    """As ``threads.plan_threads``, on what :func:`for_compute` leaves; the reasons say so."""
    plan = threads.plan_threads(for_compute(machine, environ), environ)
    apart = reserved(machine, environ)
    if not apart:
        return plan
    return replace(plan, reasons=(*plan.reasons, f"CPUs {format_cpu_list(apart)} left to the API server"))


def cpus(machine: Topology, plans: Sequence[ThreadPlan]) -> tuple[int, ...]:
    """CPUs on whose cores no thread of any rank computes, ascending; all that are allowed where there are none."""
    if not all(plan.pin for plan in plans):
        return machine.allowed
    computing = {sibling for plan in plans for cpu in plan.cpus for sibling in machine.siblings.get(cpu, (cpu,))}
    return tuple(cpu for cpu in machine.allowed if cpu not in computing) or machine.allowed


def enter(
    machine: Topology,
    plans: Sequence[ThreadPlan],
    processes: int = 1,
    environ: MutableMapping[str, str] | None = None,
    set_num_threads: Callable[[int], object] | None = None,
    root: str | Path = "/",
) -> tuple[int, ...] | None:
    """Keep this process's threads off the cores that compute; its children find the way back by :func:`leave`.

    Args:
        plans: where the ranks of all engines on the machine compute.
        processes: how many API servers there are. With fewer cores than that they go where there is room.
        set_num_threads: ``torch.set_num_threads``. A team of a thread for each of the machine's cores, on one, would
            spin for each other.
        root: where /proc is looked up.

    Returns:
        The CPUs, or None if nothing was changed.
    """
    environ = os.environ if environ is None else environ
    free = cpus(machine, plans)
    cores = len(machine.cores(free))
    if free == machine.allowed or cores < processes:
        return None
    environ[envs.AFFINITY] = format_cpu_list(machine.allowed)
    _bind(free, root)
    if set_num_threads is not None:
        set_num_threads(cores)
    return free


def leave(environ: MutableMapping[str, str] | None = None, root: str | Path = "/") -> None:
    """Undo :func:`enter`, also one of the parent process: its mask was inherited, and is not this process's."""
    environ = os.environ if environ is None else environ
    text = environ.pop(envs.AFFINITY, "")
    if text:
        _bind(parse_cpu_list(text), root)


def _bind(wanted: Sequence[int], root: str | Path) -> None:
    for entry in os.listdir(Path(root) / "proc/self/task"):
        # A thread may end meanwhile, and a cgroup may have become smaller.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(entry), wanted)
