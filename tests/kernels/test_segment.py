"""vllm_arm_cpu.executor.segment: processes make a segment together, and notice when one of them ends."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernels import numa_ranks
from tests.kernels.support import ffi, kernel, run
from vllm_arm_cpu.executor import segment as module
from vllm_arm_cpu.executor.segment import RankLostError, Segment


def rank_main(rank: int, world_size: int, connection: Any, foreign: int | None) -> None:
    """Make the segment, meet until a rank is lost or the parent says that it is enough."""
    signal.alarm(100)

    def exchange(value: Any) -> list[Any]:
        connection.send(value)
        values: list[Any] = connection.recv()
        return values

    if rank == foreign:
        identity = module._identity
        module._identity = lambda place, descriptor: identity(place, descriptor).__class__(
            "elsewhere", 0, os.getpid(), place
        )
    try:
        segment = Segment("tp:0", rank, world_size, 100_000, exchange, 3, f"node {rank}")
    except OSError as error:
        connection.send(f"OSError: {error}")
        return
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:vllm-arm-cpu" in line]
    connection.send((segment.pids, len(maps)))
    args = ffi.new("vac_rank_barrier_args *", {"communicator": segment.communicator})
    try:
        for _ in range(100_000):
            run(kernel("rank_barrier"), args, 2)
            segment.check()
    except RankLostError as error:
        connection.send(f"RankLostError: {error}")
    segment.close()


class Group:
    def __init__(self, world_size: int, foreign: int | None = None) -> None:
        context = numa_ranks.context()
        self.processes, self.connections = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(rank, world_size, theirs, foreign))
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def pass_on(self) -> list[Any]:
        """One exchange: everybody's value to everybody."""
        values = self.receive(range(len(self.connections)))
        for connection in self.connections:
            connection.send(values)
        return values

    def receive(self, ranks: Any, timeout: float = 60) -> list[Any]:
        found = []
        for rank in ranks:
            assert self.connections[rank].poll(timeout), f"rank {rank} says nothing"
            found.append(self.connections[rank].recv())
        return found

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    started: list[Group] = []
    yield started
    for group in started:
        group.end()


def test_made_together_and_lost_together(groups: list[Group]) -> None:
    shared_before = set(os.listdir("/dev/shm"))
    group = Group(3)
    groups.append(group)
    identities = group.pass_on()
    path = f"/proc/{identities[0].pid}/fd/{identities[0].descriptor}"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert group.pass_on() == [None] * 3
    pids = [process.pid for process in group.processes]
    for found_pids, mappings in group.receive(range(3)):
        assert found_pids == pids
        assert mappings == 1
    # The memory has no name.
    assert not [name for name in set(os.listdir("/dev/shm")) - shared_before if "vllm" in name]
    time.sleep(1)
    assert not any(connection.poll() for connection in group.connections)
    begin = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    lost = group.receive([0, 2], 20)
    assert time.monotonic() - begin < 5
    assert lost == [f"RankLostError: rank 1 of group tp:0 (node 1, process {pids[1]}) has ended"] * 2


def test_stopped_rank(groups: list[Group]) -> None:
    """A rank that lives and does not come: the others say which it is as soon as the time limit is over."""
    group = Group(3)
    groups.append(group)
    group.pass_on()
    group.pass_on()
    pids = [pid for found_pids, _ in group.receive(range(3))[:1] for pid in found_pids]
    begin = time.monotonic()
    os.kill(pids[2], signal.SIGSTOP)
    lost = group.receive([0, 1], 20)
    assert 2.5 < time.monotonic() - begin < 8
    assert lost == [f"RankLostError: rank 2 of group tp:0 (node 2, process {pids[2]}) did not come within 3 s"] * 2


@pytest.mark.parametrize("foreign", [0, 1])
def test_ranks_of_two_machines(groups: list[Group], foreign: int) -> None:
    """All give up, with one reason, and can go on with another transport."""
    group = Group(2, foreign)
    groups.append(group)
    group.pass_on()
    reasons = [reason for reason in group.pass_on() if reason]
    assert reasons
    assert group.receive(range(2)) == [f"OSError: {reasons[0]}"] * 2
    expected = "rank 0 could not make a segment" if foreign == 0 else "not on one machine"
    assert expected in reasons[0]
