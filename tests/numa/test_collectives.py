"""Collectives of ranks on their nodes: right, and the same bits everywhere, whoever comes late."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.numa import bodies, kernel_view
from tests.numa.machines import Machine
from tests.numa.ranks import Ranks

PART = 65536
SIZES = [1, 63, 130, 4097]
LARGEST = 1 << 20


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_mixed_calls(world_size: int, machine: Machine, start_ranks: Callable[[int], Ranks]) -> None:
    cpus = sum(len(node.cpus) for node in machine.nodes)
    if world_size > cpus:
        pytest.skip(f"{world_size} ranks need as many CPUs, this machine has {cpus}")
    ranks = start_ranks(world_size)
    found = ranks.call(bodies.mixed_calls, SIZES, [LARGEST], timeout=500)
    assert len({digest for digest, _ in found}) == 1
    region = PART + 2 * bodies.COLLECTIVES_SLOT
    for rank, (_, address) in enumerate(found):
        for owner in range(world_size):
            nodes = kernel_view.nodes_of_range(ranks.pids[rank], address + PART + owner * region, region)
            # What a rank has never read is not in its page table; its own region is all there.
            there = nodes[nodes >= 0].tolist()
            assert set(there) == {ranks.home(owner)}
            assert owner != rank or len(there) == region // kernel_view.PAGE
