"""Which CPU each compute thread runs on, and how libgomp's threads get there.

libgomp reads OMP_* once, when it is loaded. So there are two ways to place the
same plan:

* a process that is about to be started: ``export()`` writes the variables into
  the environment that it inherits, and libgomp binds its threads by itself,
  also those it creates later (it ends surplus threads after a smaller team and
  makes new ones for the next larger team);
* the process itself, libgomp already loaded: ``apply()`` pins the threads of
  the running pool one by one.

``apply()`` finds out which of the two it is. It belongs in the thread that
runs the model: libgomp keeps a pool for each thread that opens regions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_arm_cpu import envs
from vllm_arm_cpu.envs import EnvError, format_cpu_list, parse_cpu_list
from vllm_arm_cpu.runtime import preload
from vllm_arm_cpu.runtime.topology import Topology

# What libgomp is told through the environment, and nothing else: GOMP_CPU_AFFINITY would
# compete with OMP_PLACES.
OMP_VARIABLES = ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES")


@dataclass(frozen=True)
class ThreadPlan:
    """Where the compute threads run.

    Attributes:
        cpus: thread i runs on ``cpus[i]``; never empty.
        nodes: NUMA nodes of these CPUs, ascending.
        pin: False when the threads are not to be pinned (VAC_BIND=none);
            then only the number of ``cpus`` counts.
        reasons: one line for each decision that was not the obvious one.
    """

    cpus: tuple[int, ...]
    nodes: tuple[int, ...]
    pin: bool = True
    reasons: tuple[str, ...] = ()

    @property
    def num_threads(self) -> int:
        return len(self.cpus)


def plan_threads(
    topology: Topology,
    environ: Mapping[str, str] | None = None,
    node: int | None = None,
    part: tuple[int, int] = (0, 1),
    rank: int = 0,
    num_ranks: int = 1,
) -> ThreadPlan:
    """Choose one CPU per physical core among those that the process may use.

    Args:
        environ: where VAC_THREADS and VAC_BIND are read; the process's by default.
        node: NUMA node to stay on. None: all nodes. If the process may use no
            CPU of it, the nearest node with such CPUs takes its place.
        part: index and number of equal parts of the node's cores, where several
            ranks share it.
        rank, num_ranks: which of the processes that divide the machine this is:
            VAC_BIND has a list for each, and each gets its part of the cgroup's
            CPU quota. VAC_THREADS is the number for each.

    Raises:
        EnvError: VAC_BIND or VAC_THREADS asks for CPUs that the process may not
            use, or VAC_BIND has another number of lists than there are ranks.
    """
    bind = _bind_of(rank, num_ranks, environ)
    threads: int | None = envs.get("VAC_THREADS", environ)
    reasons: list[str] = []
    allowed = topology.allowed
    if isinstance(bind, tuple):
        if not set(bind) <= set(allowed):
            raise EnvError("VAC_BIND", format_cpu_list(bind), f"auto, none, or CPUs among {format_cpu_list(allowed)}")
        reasons.append(f"VAC_BIND={format_cpu_list(bind)}")
        candidates = bind
    else:
        candidates = allowed
        if len(allowed) < len(topology.cpus):
            reasons.append(f"CPUs {format_cpu_list(allowed)} of {len(topology.cpus)} by affinity mask or cgroup")
    if num_ranks == 1 or not isinstance(bind, tuple):
        candidates = _part_of(topology, _on_node(topology, candidates, node, reasons), part)
    # An explicit list is used as it stands; otherwise the first thread of each core comes first and its
    # SMT siblings only serve a VAC_THREADS that is larger than the number of cores.
    ordered, cores = (candidates, len(candidates)) if isinstance(bind, tuple) else _by_core(topology, candidates)
    count = _count(topology, threads, ordered, cores, num_ranks, reasons)
    cpus = ordered if isinstance(bind, tuple) else _compact(topology, ordered, count)
    cpus = tuple(cpus[:count])
    if bind == "none":
        reasons.append("VAC_BIND=none: threads are not pinned")
    return ThreadPlan(cpus, _nodes_of(topology, cpus), bind != "none", tuple(reasons))


def export(plan: ThreadPlan, environ: MutableMapping[str, str]) -> None:
    """Write the plan into the environment of processes that are still to be started.

    A user's own OMP_NUM_THREADS, OMP_PLACES and GOMP_CPU_AFFINITY are replaced
    (vLLM sets some of them by itself, so they tell nothing about the user);
    with VAC_BIND=none those about places stay as they are.
    """
    environ["OMP_NUM_THREADS"] = str(plan.num_threads)
    if plan.pin:
        environ.pop("GOMP_CPU_AFFINITY", None)
        environ["OMP_PROC_BIND"] = "close"
        environ["OMP_PLACES"] = ",".join(f"{{{cpu}}}" for cpu in plan.cpus)
    environ[envs.THREAD_PLAN] = _encode(plan)


def inherited(environ: Mapping[str, str] | None = None) -> ThreadPlan | None:
    """The plan that a parent process exported, or None.

    Child processes must use this and not plan again: they inherit the affinity
    mask of the thread that started them, which may be pinned to one CPU already.
    """
    text = (os.environ if environ is None else environ).get(envs.THREAD_PLAN, "")
    try:
        cpus, nodes, pin = text.split(";")
        order = tuple(int(cpu) for cpu in cpus.split(","))
        return ThreadPlan(order, parse_cpu_list(nodes), pin == "1", ("planned by the parent process",))
    except ValueError:
        return None


def apply(
    plan: ThreadPlan,
    set_num_threads: Callable[[int], object] | None = None,
    pin: Callable[[Sequence[int]], object] | None = None,
    root: str | Path = "/",
) -> ThreadPlan:
    """Put the calling thread's OpenMP team where the plan says.

    Args:
        set_num_threads: ``torch.set_num_threads``; called first.
        pin: is given the CPU of each thread by thread index, and runs a region
            that pins them. Default: :func:`pin_openmp_threads`.
        root: where /proc is looked up.

    Returns:
        The plan with a reason line that says how it was applied.

    Raises:
        OSError: the kernel refuses a CPU of the plan.
        RuntimeError: no libgomp is loaded.
    """
    if set_num_threads is not None:
        set_num_threads(plan.num_threads)
    if not plan.pin:
        return plan
    if started_with(plan, root):
        return replace(plan, reasons=(*plan.reasons, "libgomp was started with these places"))
    # Thread 0 is the caller. Whatever it starts later inherits its mask (helper threads, and team members that
    # libgomp has to make again), so it gets all of the plan's CPUs: pinned, it would pile them up on one.
    os.sched_setaffinity(0, plan.cpus)
    (pin or pin_openmp_threads)(plan.cpus)
    os.sched_setaffinity(0, plan.cpus)
    return replace(plan, reasons=(*plan.reasons, "threads pinned in the running process"))


def started_with(plan: ThreadPlan, root: str | Path = "/") -> bool:
    """Whether this process's libgomp read the plan when it was loaded.

    ``os.environ`` cannot tell: after a fork, or in the process that exported,
    it holds variables that libgomp has never seen. The kernel's copy can.
    """
    try:
        entries = (Path(root) / "proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    start = dict(entry.decode(errors="replace").partition("=")[::2] for entry in entries)
    wanted: dict[str, str] = {}
    export(plan, wanted)
    return all(start.get(name) == wanted.get(name) for name in OMP_VARIABLES)


def pin_openmp_threads(cpus: Sequence[int]) -> None:
    """Run one region of ``len(cpus)`` threads on the loaded libgomp; thread i pins itself to ``cpus[i]``.

    Raises:
        OSError: the kernel refuses a CPU.
        RuntimeError: no libgomp is loaded yet, or the team came out smaller.
    """
    import ctypes

    libgomp = _loaded_libgomp()
    failures: list[OSError] = []
    pinned: set[int] = set()

    def body(_: object) -> None:
        index = libgomp.omp_get_thread_num()
        try:
            os.sched_setaffinity(0, {cpus[index]})
            pinned.add(index)
        except OSError as error:
            failures.append(error)

    body_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    libgomp.GOMP_parallel.argtypes = [body_type, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    libgomp.GOMP_parallel.restype = None
    libgomp.GOMP_parallel(body_type(body), None, len(cpus), 0)
    if failures:
        raise failures[0]
    if len(pinned) != len(cpus):
        raise RuntimeError(f"libgomp gave {len(pinned)} of {len(cpus)} threads (OMP_THREAD_LIMIT or OMP_DYNAMIC set?)")


def _loaded_libgomp() -> Any:
    import ctypes

    # Only one that is loaded already: a second runtime would have threads of its own.
    # Some torch wheels carry a libgomp with a name of their own.
    for name in ("libgomp.so.1", *preload.mapped_libraries().openmp):
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        except OSError:
            continue
    raise RuntimeError("no libgomp is loaded in this process: import torch first")


def _bind_of(rank: int, num_ranks: int, environ: Mapping[str, str] | None) -> str | tuple[int, ...]:
    """VAC_BIND for one rank."""
    bind = envs.get("VAC_BIND", environ)
    if isinstance(bind, str):
        return bind
    lists = bind if isinstance(bind[0], tuple) else (bind,)
    if len(lists) != num_ranks:
        allowed = f"auto, none, or {num_ranks} lists of CPUs with | between them, one for each rank"
        raise EnvError("VAC_BIND", "|".join(map(format_cpu_list, lists)), allowed)
    return tuple(lists[rank])


def _part_of(topology: Topology, cpus: Sequence[int], part: tuple[int, int]) -> tuple[int, ...]:
    """Part ``part[0]`` of ``part[1]`` of the cores that the CPUs belong to."""
    index, count = part
    if count == 1:
        return tuple(cpus)
    cores = topology.cores(cpus)
    return tuple(cpu for core in cores[len(cores) * index // count : len(cores) * (index + 1) // count] for cpu in core)


def _on_node(topology: Topology, cpus: Sequence[int], node: int | None, reasons: list[str]) -> tuple[int, ...]:
    if node is None:
        return tuple(cpus)
    here = tuple(cpu for cpu in cpus if topology.node_of(cpu) == node)
    if here:
        return here
    distances: Mapping[int, int] = next((entry.distances for entry in topology.nodes if entry.id == node), {})
    usable = {topology.node_of(cpu) for cpu in cpus}
    nearest = min(usable, key=lambda other: (distances.get(other, 255), other))
    reasons.append(f"no usable CPU on node {node}: node {nearest} instead")
    return tuple(cpu for cpu in cpus if topology.node_of(cpu) == nearest)


def _by_core(topology: Topology, cpus: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """CPUs with the first of every physical core before all second ones; and the number of cores."""
    cores = topology.cores(cpus)
    depth = max(len(core) for core in cores)
    return tuple(core[i] for i in range(depth) for core in cores if i < len(core)), len(cores)


def _count(
    topology: Topology, threads: int | None, cpus: Sequence[int], cores: int, num_ranks: int, reasons: list[str]
) -> int:
    limit = topology.thread_limit
    if limit is not None:
        limit = max(1, limit // num_ranks)
    if threads is not None:
        if threads > len(cpus):
            allowed = f"auto, or 1 to {len(cpus)} (CPUs {format_cpu_list(list(cpus))})"
            raise EnvError("VAC_THREADS", str(threads), allowed)
        reasons.append(f"VAC_THREADS={threads}")
        if limit is not None and threads > limit:
            reasons.append(f"more threads than the cgroup's CPU quota of {topology.cgroup.cpu_quota:g} keeps busy")
        return threads
    if limit is not None and limit < cores:
        reasons.append(f"{limit} of {cores} cores because of the cgroup's CPU quota of {topology.cgroup.cpu_quota:g}")
        return limit
    return cores


def _compact(topology: Topology, cpus: Sequence[int], count: int) -> tuple[int, ...]:
    """The same CPUs, reordered so that the first ``count`` lie on as few nodes as possible, node by node."""
    chosen = tuple(cpus)
    cores = len(topology.cores(cpus))
    # More threads than cores need every core and some siblings; there is nothing to save.
    if count < cores:
        by_node: dict[int, list[int]] = {}
        for cpu in chosen[:cores]:
            by_node.setdefault(topology.node_of(cpu), []).append(cpu)
        fitting = [node for node, members in sorted(by_node.items()) if len(members) >= count]
        order = sorted(by_node, key=lambda node: (node not in fitting, -len(by_node[node]) if not fitting else node))
        chosen = tuple(cpu for node in order for cpu in by_node[node])
    # Neighbouring threads work on neighbouring data: keep each node's threads together.
    head = sorted(chosen[:count], key=lambda cpu: (topology.node_of(cpu), chosen.index(cpu)))
    return (*head, *chosen[count:])


def _nodes_of(topology: Topology, cpus: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({topology.node_of(cpu) for cpu in cpus}))


def _encode(plan: ThreadPlan) -> str:
    cpus, nodes = ",".join(map(str, plan.cpus)), ",".join(map(str, plan.nodes))
    return f"{cpus};{nodes};{'1' if plan.pin else '0'}"
