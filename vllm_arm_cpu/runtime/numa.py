"""How the ranks of an engine, or several engines, divide a machine: nodes, cores, memory.

A rank works on the cores and in the memory of one NUMA node, so that only
partial sums cross between nodes. There may be several ranks on a node (more
ranks than nodes) and nodes without one (fewer).
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from vllm_arm_cpu import envs
from vllm_arm_cpu.envs import format_cpu_list
from vllm_arm_cpu.runtime import frontend, memory, threads
from vllm_arm_cpu.runtime.threads import ThreadPlan
from vllm_arm_cpu.runtime.topology import Topology

MAX_RANKS = 16
"""As many as the collectives serve (``VAC_MAX_RANKS``)."""

_PR_SET_PDEATHSIG = 1
_LOCAL_DISTANCE, _UNKNOWN_DISTANCE = 10, 255


@dataclass(frozen=True)
class RankPlan:
    """Where one rank runs and what memory it has.

    Attributes:
        rank: counted over all engines on the machine.
        threads: its compute threads.
        memory_nodes: its pages come from these nodes alone; empty: from where
            its threads first touch them.
        memory_share: its part of these nodes' memory (of all memory when there are none).
        reasons: one line for each decision that was not the obvious one.
    """

    rank: int
    threads: ThreadPlan
    memory_nodes: tuple[int, ...] = ()
    memory_share: float = 1.0
    reasons: tuple[str, ...] = ()

    @property
    def node(self) -> int:
        """The node of its first core."""
        return self.threads.nodes[0]


def plan_ranks(topology: Topology, num_ranks: int, environ: Mapping[str, str] | None = None) -> tuple[RankPlan, ...]:
    """Divide the machine among ``num_ranks`` processes.

    Nodes are chosen so that the poorest rank has most cores, then so that they
    are near each other; neighbouring ranks are on neighbouring nodes. One rank
    alone has the whole machine, as :func:`frontend.plan_threads` cuts it.

    Args:
        environ: where VAC_BIND and VAC_THREADS are read; the process's by default.

    Raises:
        EnvError: VAC_BIND or VAC_THREADS does not fit the machine or the number of ranks.
        ValueError: more ranks than cores that the process may use.
    """
    bind = envs.get("VAC_BIND", environ)
    if num_ranks == 1:
        return (RankPlan(0, frontend.plan_threads(topology, environ)),)
    topology = frontend.for_compute(topology, environ, num_ranks)
    if isinstance(bind, tuple):
        plans = [threads.plan_threads(topology, environ, rank=r, num_ranks=num_ranks) for r in range(num_ranks)]
    else:
        places = _places(topology, num_ranks)
        plans = [
            threads.plan_threads(topology, environ, node, part, rank, num_ranks)
            for rank, (node, part) in enumerate(places)
        ]
    homes = [_memory_nodes(topology, plan) for plan in plans]
    # Threads that go where they like touch memory where they like.
    bound = bind != "none" and len(topology.nodes) > 1
    ranks = []
    for rank, (plan, home) in enumerate(zip(plans, homes, strict=True)):
        share = 1 / sum(1 for other in homes if set(other) & set(home))
        reasons = []
        if not set(home) & set(plan.nodes):
            reasons.append(f"node {plan.nodes[0]} has no memory to use: memory of node {home[0]}")
        ranks.append(RankPlan(rank, plan, home if bound else (), share, tuple(reasons)))
    return tuple(ranks)


def propose(topology: Topology) -> int:
    """Number of ranks that the machine suggests: nodes with memory and at least half the cores of the largest."""
    cores = {node: count for node, count in _usable_nodes(topology).items() if _has_memory(topology, node)}
    most = max(cores.values(), default=0)
    return max(1, min(MAX_RANKS, sum(1 for count in cores.values() if 2 * count >= most)))


def picture(topology: Topology, plans: Sequence[RankPlan]) -> list[tuple[str, str]]:
    """A row for each node: its name, and its cores with the ranks on them, for people."""
    rows = []
    for node in topology.nodes:
        size = f"{node.memory_total / 2**30:.0f} GiB" if node.memory_total else "no memory"
        here = [(plan.rank, _on(topology, plan, node.id)) for plan in plans]
        groups = [f"rank {rank}: {format_cpu_list(cpus)}" for rank, cpus in here if cpus]
        taken = {cpu for plan in plans for cpu in plan.threads.cpus}
        idle = [core for core in topology.cores(set(node.cpus) & set(topology.allowed)) if not taken & set(core)]
        if idle:
            groups.append(f"idle: {format_cpu_list([cpu for core in idle for cpu in core])}")
        if not node.cpus:
            groups.append("no CPUs")
        elif not set(node.cpus) & set(topology.allowed):
            groups.append("not for this process")
        distances = " ".join(str(node.distances.get(other.id, "?")) for other in topology.nodes)
        rows.append((f"node {node.id}", f"[ {' | '.join(groups)} ]  {size}, distances {distances}"))
    return rows


@contextmanager
def environment_of(plan: RankPlan, environ: MutableMapping[str, str] | None = None) -> Iterator[int]:
    """Start a rank's process inside this block: it is born with its cores, memory and OpenMP environment.

    The calling thread has the rank's affinity mask and memory policy for that
    time, and what it starts inherits them, across exec too.

    Yields:
        0, or the errno with which the kernel refused the memory policy: then pages come
        from the node of the thread that first touches them.
    """
    environ = os.environ if environ is None else environ
    names = (*threads.OMP_VARIABLES, "GOMP_CPU_AFFINITY", envs.THREAD_PLAN, envs.RANK_PLAN, envs.RANK_PARENT)
    saved = {name: environ.get(name) for name in names}
    affinity, policy, refused = os.sched_getaffinity(0), None, 0
    try:
        threads.export(plan.threads, environ)
        environ[envs.RANK_PLAN] = _encode(plan)
        if threading.current_thread() is threading.main_thread():
            environ[envs.RANK_PARENT] = str(os.getpid())
        if plan.threads.pin:
            os.sched_setaffinity(0, plan.threads.cpus)
        if plan.memory_nodes:
            try:
                policy = memory.get_policy()
                memory.set_policy(memory.MemoryPolicy.bind(plan.memory_nodes))
            except OSError as error:
                policy, refused = None, error.errno or -1
        yield refused
    finally:
        if policy is not None:
            memory.set_policy(policy)
        os.sched_setaffinity(0, affinity)
        for name, value in saved.items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value


def inherited(environ: Mapping[str, str] | None = None) -> RankPlan | None:
    """The plan of this process's rank, if it was started as one."""
    environ = os.environ if environ is None else environ
    plan = threads.inherited(environ)
    try:
        rank, nodes, share = environ.get(envs.RANK_PLAN, "").split(";")
        home = tuple(int(node) for node in nodes.split(",")) if nodes else ()
        return None if plan is None else RankPlan(int(rank), plan, home, float(share))
    except ValueError:
        return None


def end_with_parent(environ: Mapping[str, str] | None = None) -> bool:
    """Let the kernel kill this rank's process when the engine's dies, also while it is stopped or hangs.

    vLLM's ranks notice by themselves, which those cannot. The kernel means the
    thread that has started the process, so it is left alone where that was
    another than the main one.

    Returns:
        Whether that was so.
    """
    environ = os.environ if environ is None else environ
    parent = environ.get(envs.RANK_PARENT)
    if parent != str(os.getppid()):
        return False
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if parent != str(os.getppid()):
        # It has died meanwhile.
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def _encode(plan: RankPlan) -> str:
    return f"{plan.rank};{','.join(map(str, plan.memory_nodes))};{plan.memory_share}"


def _on(topology: Topology, plan: RankPlan, node: int) -> list[int]:
    return [cpu for cpu in plan.threads.cpus if topology.node_of(cpu) == node]


def _usable_nodes(topology: Topology) -> dict[int, int]:
    """Nodes with CPUs that the process may use, and the number of their cores."""
    counts: dict[int, int] = {}
    for core in topology.cores(topology.allowed):
        node = topology.node_of(core[0])
        counts[node] = counts.get(node, 0) + 1
    return counts


def _has_memory(topology: Topology, node: int) -> bool:
    total = {entry.id: entry.memory_total for entry in topology.nodes}
    # A kernel that tells no sizes at all is believed to have memory everywhere.
    return node in topology.mems_allowed and (total.get(node, 0) > 0 or not any(total.values()))


def _distance(topology: Topology, one: int, other: int) -> int:
    if one == other:
        return _LOCAL_DISTANCE
    distances: Mapping[int, int] = next((node.distances for node in topology.nodes if node.id == one), {})
    return distances.get(other, _UNKNOWN_DISTANCE)


def _places(topology: Topology, num_ranks: int) -> list[tuple[int, tuple[int, int]]]:
    """Node of each rank, and its part of the node's cores."""
    cores = _usable_nodes(topology)
    total = sum(cores.values())
    if num_ranks > total:
        raise ValueError(
            f"{num_ranks} ranks need {num_ranks} cores, but this process may use {total} "
            f"(CPUs {format_cpu_list(topology.allowed)}): decrease --tensor-parallel-size or --pipeline-parallel-size"
        )
    if num_ranks <= len(cores):
        return [(node, (0, 1)) for node in _in_a_row(topology, _choose_nodes(topology, cores, num_ranks))]
    # Always to the node where the ranks would then have most cores.
    counts = dict.fromkeys(cores, 0)
    for _ in range(num_ranks):
        node = max(counts, key=lambda node: (cores[node] / (counts[node] + 1), -node))
        counts[node] += 1
    order = _in_a_row(topology, [node for node, count in counts.items() if count])
    return [(node, (i, counts[node])) for node in order for i in range(counts[node])]


def _choose_nodes(topology: Topology, cores: Mapping[int, int], count: int) -> tuple[int, ...]:
    most = max(cores.values())

    def badness(nodes: tuple[int, ...]) -> tuple[int, int, int, tuple[int, ...]]:
        bare = sum(1 for node in nodes if not _has_memory(topology, node))
        # Eighths: one core more or less is no reason to go far.
        fewest = 8 * min(cores[node] for node in nodes) // most
        span = sum(_distance(topology, a, b) for a in nodes for b in nodes)
        return bare, -fewest, span, nodes

    return min(itertools.combinations(sorted(cores), count), key=badness)


def _in_a_row(topology: Topology, nodes: Sequence[int]) -> list[int]:
    """From the first node always on to the nearest that is left: the ranks of an engine are neighbours."""
    left = sorted(nodes)
    row = [left.pop(0)]
    while left:
        nearest = min(left, key=lambda node: (_distance(topology, row[-1], node), node))
        left.remove(nearest)
        row.append(nearest)
    return row


def _memory_nodes(topology: Topology, plan: ThreadPlan) -> tuple[int, ...]:
    """The nodes of the plan's cores that have memory, or the nearest one that has."""
    own = tuple(node for node in plan.nodes if _has_memory(topology, node))
    if own:
        return own
    # Memory without CPUs is a device's (Grace Hopper's GPU memory): only where there is no other.
    with_cpus = {node.id for node in topology.nodes if node.cpus}
    others = [node.id for node in topology.nodes if _has_memory(topology, node.id)]
    key = lambda node: (node not in with_cpus, _distance(topology, plan.nodes[0], node), node)  # noqa: E731
    return (min(others, key=key),) if others else plan.nodes
