"""What the tests on an emulated NUMA machine share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.numa.machines import Machine, Node
from tests.numa.ranks import Ranks
from tests.numa.traffic import Counter
from vllm_arm_cpu.runtime import numa, topology
from vllm_arm_cpu.runtime.topology import Topology

EXCHANGE = Path("/run/exchange")


@pytest.fixture(scope="session")
def machine() -> Machine:
    """What the emulator was told."""
    path = EXCHANGE / "machine.json"
    assert path.exists(), "these tests run on an emulated machine: make test-numa"
    nodes = json.loads(path.read_text())["nodes"]
    return Machine(tuple(Node(tuple(n["cpus"]), n["mebibytes"], tuple(n["distances"])) for n in nodes))


@pytest.fixture(scope="session")
def found(machine: Machine) -> Topology:
    """What the package finds."""
    return topology.read()


@pytest.fixture(scope="session")
def counter() -> Counter:
    """The emulator's count of accesses."""
    return Counter(EXCHANGE / "traffic")


@pytest.fixture(scope="session")
def start_ranks(found: Topology) -> Iterator[Callable[[int], Ranks]]:
    """As many ranks as one asks for, placed as the package plans; started once, for all tests."""
    running: dict[int, Ranks] = {}

    def start(world_size: int) -> Ranks:
        if world_size not in running:
            running[world_size] = Ranks(numa.plan_ranks(found, world_size, {}))
        return running[world_size]

    yield start
    for ranks in running.values():
        ranks.end()
