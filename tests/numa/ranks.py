"""Ranks as the executor starts them: processes born with the cores, memory policy and environment of their plan.

The parent sends functions to be run; what a rank keeps lives on between calls.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from vllm_arm_cpu.executor.segment import Segment
from vllm_arm_cpu.runtime import memory, numa
from vllm_arm_cpu.runtime.numa import RankPlan


@dataclass
class Member:
    """A rank, in its own process.

    Attributes:
        kept: whatever functions want to find again.
    """

    rank: int
    world_size: int
    plan: RankPlan
    connection: Any
    kept: dict[str, Any] = field(default_factory=dict)

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks; all ranks call it."""
        self.connection.send(("exchange", value))
        values: list[Any] = self.connection.recv()
        return values

    def segment(self, slot_bytes: int) -> Segment:
        """The group's shared segment, made by the first call with this size."""
        key = f"segment {slot_bytes}"
        if key not in self.kept:
            # Whole machines are emulated: a rank may come late.
            self.kept[key] = Segment(
                "tp:0", self.rank, self.world_size, slot_bytes, self.exchange, 300, f"node {self.plan.node}"
            )
        made: Segment = self.kept[key]
        return made


class Ranks:
    """The processes, as their parent sees them."""

    def __init__(self, plans: Sequence[RankPlan]) -> None:
        self.plans = tuple(plans)
        self.processes, self.connections = [], []
        for plan in self.plans:
            ours, theirs = multiprocessing.Pipe()
            # Not from multiprocessing: its children import the parent's program, which is pytest here.
            program = f"from tests.numa.ranks import serve; serve({len(self.plans)}, {theirs.fileno()})"
            with numa.environment_of(plan) as refused:
                assert refused == 0, f"the kernel refuses the memory policy: {os.strerror(refused)}"
                process = subprocess.Popen([sys.executable, "-c", program], pass_fds=[theirs.fileno()])
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def home(self, rank: int) -> int:
        """The one node that a rank's memory is to come from."""
        (node,) = self.plans[rank].memory_nodes
        return node

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float = 300) -> list[Any]:
        """Run ``function(member, *arguments)`` in all ranks; what they return, in the order of ranks.

        The first call waits for the processes to import what they need, too: eight at once, on two real cores.
        """
        deadline = time.monotonic() + timeout
        for connection in self.connections:
            connection.send((function, arguments))
        while True:
            replies = []
            for rank, connection in enumerate(self.connections):
                assert connection.poll(max(0.1, deadline - time.monotonic())), f"rank {rank} has not answered"
                try:
                    kind, value = connection.recv()
                except EOFError:
                    raise AssertionError(f"rank {rank} has ended: {self.processes[rank].wait(10)}") from None
                assert kind != "error", f"rank {rank}: {value}"
                replies.append((kind, value))
            kinds = {kind for kind, _ in replies}
            assert len(kinds) == 1, f"ranks do not do the same: {replies}"
            values = [value for _, value in replies]
            if kinds == {"result"}:
                return values
            for connection in self.connections:
                connection.send(values)

    def end(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.wait()


def serve(world_size: int, descriptor: int) -> None:
    """A rank's program: do what the parent sends, until it ends."""
    connection = Connection(descriptor)
    plan = numa.inherited()
    assert plan is not None, "no plan in the environment"
    # As the worker does it.
    memory.bind_arenas(plan.memory_nodes)
    member = Member(plan.rank, world_size, plan, connection)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("result", function(member, *arguments)))
        except BaseException:
            connection.send(("error", traceback.format_exc()))
