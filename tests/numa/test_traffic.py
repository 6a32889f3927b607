"""What crosses between nodes in a collective: counted by the emulator at every load and store, beside the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks import numa_model
from tests.kernels.support import encode
from tests.numa import bodies, traffic
from tests.numa.machines import Machine
from tests.numa.ranks import Ranks
from tests.numa.traffic import PAGE, PART, Watched

SLOT = 1 << 18
OVERLAP = 96
"""Bytes at its ends that one copy of the C library's may load twice."""
HIDDEN = numa_model.Model().hidden
"""Of Qwen3-4B, which docs/numa.md counts for."""


@pytest.fixture(params=[2, 4])
def watched(
    request: pytest.FixtureRequest, machine: Machine, counter: traffic.Counter, start_ranks: Callable[[int], Ranks]
) -> Watched:
    if request.param > len(machine.nodes):
        pytest.skip(f"{request.param} nodes are wanted, this machine has {len(machine.nodes)}")
    return Watched(start_ranks(request.param), counter, SLOT)


# One token of Qwen3-4B, 16 of them; odd sizes; more than a slot holds.
MESSAGES = [(HIDDEN, "bf16"), (16 * HIDDEN, "bf16"), (1, "f32"), (100_003, "f16"), (200_001, "f32")]


@pytest.mark.parametrize("phases", [1, 2])
@pytest.mark.parametrize("count, dtype", MESSAGES)
def test_all_reduce(watched: Watched, count: int, dtype: str, phases: int) -> None:
    """The plan's bytes are loaded from other nodes, each by one load; nobody stores to another's slots."""
    message = count * encode(np.zeros(1, np.float32), dtype).itemsize
    world_size, team = watched.world_size, watched.ranks.plans[0].threads.num_threads
    accesses = watched.count(bodies.all_reduce, count, dtype, phases)
    once, loaded = watched.crossed(accesses)
    planned, pieces = numa_model.crossing(message, world_size, phases), -(-message // SLOT)
    # Summands are loaded where they are added, but for the last few; sums of others are copied.
    copies = world_size * (world_size - 1) * team * pieces if phases == 2 or count % 16 else 0
    assert planned <= loaded <= planned + OVERLAP * copies
    stored: Counter[int] = Counter()
    for access in accesses:
        owner, is_slot = watched.owner(access.page)
        if is_slot:
            assert access.stored == 0 or owner == access.view, access
            assert access.loaded == 0 or owner != access.view, access
            stored[access.view] += access.stored_once
    if pieces == 1:
        assert once == planned
        # In two phases: what others add up, and the sums of the own slice.
        assert stored == Counter(dict.fromkeys(range(world_size), message))


def test_layer(watched: Watched) -> None:
    """Two all-reduces of a decoder layer, one token: the table of docs/numa.md."""
    table = {2: (20480, 20480), 4: (122880, 61440)}
    crossed = [watched.crossed(watched.count(bodies.all_reduce, HIDDEN, "bf16", 0)) for _ in range(2)]
    chosen = numa_model.phases_of(2 * HIDDEN, watched.world_size)
    assert sum(once for once, _ in crossed) == table[watched.world_size][chosen - 1]


def test_all_gather(watched: Watched) -> None:
    """Logits: each rank reads the others' parts."""
    nbytes = 9001
    once, _ = watched.crossed(watched.count(bodies.all_gather, nbytes))
    assert once == watched.world_size * (watched.world_size - 1) * nbytes


def test_flags(watched: Watched) -> None:
    """Beside the slots, a rank touches one page of a peer's region: the flags."""
    for access in watched.count(bodies.all_reduce, HIDDEN, "bf16", 2):
        owner, is_slot = watched.owner(access.page)
        if not is_slot and owner not in (access.view, -1):
            assert access.page * PAGE == PART + owner * watched.region
