"""Every page that a rank makes is on its node, and its threads are on their cores: in the kernel's words."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.numa import bodies, kernel_view
from tests.numa.machines import Machine
from tests.numa.ranks import Ranks
from vllm_arm_cpu.runtime.topology import Topology

SLOT = 100_000
HUGE = 2 << 20


@pytest.fixture(scope="module", params=["one to a node", "two to a node"])
def ranks(request: pytest.FixtureRequest, machine: Machine, start_ranks: Callable[[int], Ranks]) -> Ranks:
    return start_ranks(len(machine.nodes) * (1 if request.param == "one to a node" else 2))


@pytest.fixture(scope="module")
def made(ranks: Ranks) -> list[dict[str, tuple[int, int]]]:
    return ranks.call(bodies.work)


def test_memory_of_a_rank(ranks: Ranks, made: list[dict[str, tuple[int, int]]]) -> None:
    """Weights, KV cache and scratch: every page exists and is on the rank's node."""
    for rank, pid in enumerate(ranks.pids):
        for name, (address, nbytes) in made[rank].items():
            nodes = kernel_view.nodes_of_range(pid, address, nbytes)
            assert set(nodes.tolist()) == {ranks.home(rank)}, f"{name} of rank {rank}"


def test_policy_of_every_mapping(ranks: Ranks, made: list[dict[str, tuple[int, int]]]) -> None:
    """/proc/PID/numa_maps: plain memory is bound to the rank's node, and is nowhere else."""
    for rank, pid in enumerate(ranks.pids):
        home = ranks.home(rank)
        plain = [mapping for mapping in kernel_view.numa_maps(pid) if not mapping.file and mapping.pages]
        for mapping in plain:
            # OpenBLAS asks for the memory of the thread's node itself: the same one.
            assert mapping.policy in (f"bind:{home}", "local") and set(mapping.pages) == {home}, mapping
        bound = sum(mapping.pages[home] for mapping in plain if mapping.policy != "local")
        assert bound * kernel_view.PAGE > sum(nbytes for _, nbytes in made[rank].values())


def test_all_private_pages(ranks: Ranks, made: list[dict[str, tuple[int, int]]]) -> None:
    """Whatever else the process has made since it began: interpreter, stacks, changed data of libraries."""
    for rank, pid in enumerate(ranks.pids):
        nodes = kernel_view.anonymous_pages(pid)
        assert set(nodes) == {ranks.home(rank)}, f"rank {rank}: {nodes}"
        named = sum(nbytes for _, nbytes in made[rank].values())
        assert nodes[ranks.home(rank)] * kernel_view.PAGE > named


def test_arenas_are_in_huge_pages(ranks: Ranks, made: list[dict[str, tuple[int, int]]]) -> None:
    """All of them, and what is left over at their end."""
    for rank, pid in enumerate(ranks.pids):
        for name in ("weight", "KV cache"):
            address, nbytes = made[rank][name]
            assert address % HUGE == 0
            assert kernel_view.huge_bytes(pid, address, nbytes) >= -(-nbytes // HUGE) * HUGE, name


def test_slots_are_on_their_owners_nodes(ranks: Ranks) -> None:
    """The shared segment, as the owner of each region has it mapped: nobody else has touched its pages first."""
    part = 65536
    for rank, (address, size) in enumerate(ranks.call(bodies.share, SLOT)):
        region = (size - part) // len(ranks.plans)
        nodes = kernel_view.nodes_of_range(ranks.pids[rank], address + part + rank * region, region)
        assert set(nodes.tolist()) == {ranks.home(rank)}


def test_bound_not_only_first_touched(ranks: Ranks, found: Topology) -> None:
    """A page comes from the rank's node even if a thread on another one touches it first."""
    far = found.nodes[-1] if ranks.home(0) != found.nodes[-1].id else found.nodes[0]
    address, nbytes = ranks.call(bodies.touch_from, far.cpus)[0]
    assert set(kernel_view.nodes_of_range(ranks.pids[0], address, nbytes).tolist()) == {ranks.home(0)}


def test_these_tests_see_misplaced_pages(ranks: Ranks, found: Topology) -> None:
    far = next(node.id for node in found.nodes if node.id != ranks.home(0))
    address, nbytes = ranks.call(bodies.misplace, far)[0]
    assert set(kernel_view.nodes_of_range(ranks.pids[0], address, nbytes).tolist()) == {far}
    assert kernel_view.anonymous_pages(ranks.pids[0])[far] >= nbytes // kernel_view.PAGE


def test_threads_are_on_their_cores(ranks: Ranks, made: list[dict[str, tuple[int, int]]]) -> None:
    """One compute thread on each core of the plan, and helpers nowhere else."""
    for rank, (pid, plan) in enumerate(zip(ranks.pids, ranks.plans, strict=True)):
        cpus = frozenset(plan.threads.cpus)
        threads = kernel_view.threads(pid)
        assert len(threads) >= len(cpus)
        for thread in threads:
            assert thread.allowed <= cpus and thread.last in cpus, f"rank {rank}: {thread}"
        assert {frozenset({cpu}) for cpu in cpus} <= {thread.allowed for thread in threads}
