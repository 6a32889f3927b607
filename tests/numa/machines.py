"""The emulated NUMA machines: what the emulator is told, and what tests on them expect to find.

Imported on the host, too: standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """CPUs are consecutive; one distance for each node, 10 to itself."""

    cpus: tuple[int, ...]
    mebibytes: int
    distances: tuple[int, ...]


@dataclass(frozen=True)
class Machine:
    """Nodes are numbered from 0."""

    nodes: tuple[Node, ...]

    def node_of(self, cpu: int) -> int:
        """Number of the node that a CPU belongs to."""
        return next(id for id, node in enumerate(self.nodes) if cpu in node.cpus)


MACHINES = {
    "two": Machine((Node((0, 1), 1024, (10, 40)), Node((2, 3), 1024, (40, 10)))),
    # Two sockets of two nodes, whose numbers do not follow each other: 0 and 2 are neighbours, 1 and 3.
    "four": Machine(
        (
            Node((0, 1), 1024, (10, 24, 12, 22)),
            Node((2, 3), 1024, (24, 10, 22, 12)),
            Node((4, 5), 1024, (12, 22, 10, 24)),
            Node((6, 7), 1024, (22, 12, 24, 10)),
        )
    ),
}
