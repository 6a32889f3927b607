"""What the package finds on a machine with several nodes, and how it would divide it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.numa.machines import MACHINES, Machine
from vllm_arm_cpu import doctor
from vllm_arm_cpu.runtime import memory, numa
from vllm_arm_cpu.runtime.topology import Topology

# Number of ranks -> (CPUs, node of the memory) of each.
PLANS = {
    "two": {
        2: [((0, 1), 0), ((2, 3), 1)],
        3: [((0,), 0), ((1,), 0), ((2, 3), 1)],
        4: [((0,), 0), ((1,), 0), ((2,), 1), ((3,), 1)],
    },
    "four": {
        # The nearest pair; then from each node to its nearest.
        2: [((0, 1), 0), ((4, 5), 2)],
        3: [((0, 1), 0), ((4, 5), 2), ((2, 3), 1)],
        4: [((0, 1), 0), ((4, 5), 2), ((2, 3), 1), ((6, 7), 3)],
        5: [((0,), 0), ((1,), 0), ((4, 5), 2), ((2, 3), 1), ((6, 7), 3)],
        8: [((0,), 0), ((1,), 0), ((4,), 2), ((5,), 2), ((2,), 1), ((3,), 1), ((6,), 3), ((7,), 3)],
    },
}


def test_nodes(machine: Machine, found: Topology) -> None:
    assert len(found.nodes) == len(machine.nodes)
    for id, (node, truth) in enumerate(zip(found.nodes, machine.nodes, strict=True)):
        assert node.id == id
        assert node.cpus == truth.cpus
        assert node.distances == dict(enumerate(truth.distances))
        # The kernel keeps some for itself.
        assert 0.7 * truth.mebibytes < node.memory_total / 2**20 <= truth.mebibytes
        assert 0 < node.memory_available <= node.memory_total
    assert found.allowed == tuple(cpu for node in machine.nodes for cpu in node.cpus)
    assert [len(core) for core in found.cores(found.cpus)] == [1] * len(found.cpus)
    assert found.mems_allowed == tuple(range(len(machine.nodes)))
    assert memory.mempolicy_error() == 0


def test_plans(machine: Machine, found: Topology) -> None:
    (name,) = (name for name, known in MACHINES.items() if known == machine)
    assert numa.propose(found) == len(machine.nodes)
    for num_ranks, expected in PLANS[name].items():
        plans = numa.plan_ranks(found, num_ranks, {})
        assert [(plan.threads.cpus, *plan.memory_nodes) for plan in plans] == expected
        assert all(plan.threads.pin and not plan.reasons for plan in plans)


def test_doctor(machine: Machine, found: Topology) -> None:
    """The report's picture: each node with its ranks and distances, and no word against binding memory."""

    def ask(function: str, environ: Mapping[str, str]) -> dict[str, Any]:
        # Importing torch takes minutes here, and tells nothing about nodes.
        return {"error": "not asked"} if function == "_torch_report" else getattr(doctor, function)()

    report = doctor.collect(ask=ask)
    assert report["ranks"]["count"] == len(machine.nodes)
    lines = doctor.render(report).splitlines()
    plans = numa.plan_ranks(found, len(machine.nodes), {})
    for id, node in enumerate(machine.nodes):
        (line,) = (line for line in lines if line.split()[:2] == ["node", str(id)] and "rank" in line)
        # Ranks are numbered along the row of neighbours.
        rank = next(plan.rank for plan in plans if plan.node == id)
        assert f"[ rank {rank}: {node.cpus[0]}-{node.cpus[-1]} ]" in line
        assert line.endswith("distances " + " ".join(map(str, node.distances)))
    found_ids = {item["id"] for item in report["problems"] + report["notes"]}
    assert "mempolicy" not in found_ids


def test_environment_of_leaves_the_caller_alone(found: Topology) -> None:
    """The parent has a rank's place for the time of the start only; what it starts has it for good."""
    plan = numa.plan_ranks(found, 2, {})[1]
    before = (os.sched_getaffinity(0), memory.get_policy(), dict(os.environ))
    with numa.environment_of(plan) as refused:
        assert refused == 0
        assert memory.get_policy() == memory.MemoryPolicy.bind(plan.memory_nodes)
        status = subprocess.run(["cat", "/proc/self/status", "/proc/self/numa_maps"], stdout=subprocess.PIPE, text=True)
    assert (os.sched_getaffinity(0), memory.get_policy(), dict(os.environ)) == before
    cpus = f"{plan.threads.cpus[0]}-{plan.threads.cpus[-1]}"
    assert f"Cpus_allowed_list:\t{cpus}\n" in status.stdout
    (node,) = plan.memory_nodes
    (heap,) = (line for line in status.stdout.splitlines() if " heap " in line)
    assert f" bind:{node} " in heap and f" N{node}=" in heap
    assert not any(f" N{other.id}=" in heap for other in found.nodes if other.id != node)
    assert Path("/proc/self/numa_maps").read_text().split()[1] == "default"
