"""Fake /sys and /proc trees of real machines, written into a folder of the test.

Numbering, distances and cache sizes are those that the machines' firmware
reports; only the files that the package reads are made.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_arm_cpu.envs import format_cpu_list, parse_cpu_list

GIB = 1 << 30


@dataclass
class FakeNode:
    cpus: Sequence[int]
    memory: int = 256 * GIB
    distances: Sequence[int] = ()


@dataclass
class Machine:
    """What :func:`write` turns into files; every test changes what it needs.

    ``cores`` lists the CPUs of each physical core. ``nodes`` is None for a
    kernel without NUMA. ``groups`` maps a cgroup directory, relative to the
    root, to its files.
    """

    cores: Sequence[Sequence[int]]
    nodes: dict[int, FakeNode] | None
    midr: int = 0x410FD4F0
    caches: Sequence[tuple[str, str, str, int]] = (("1", "Data", "64K", 1), ("2", "Unified", "2048K", 1))
    offline: Sequence[int] = ()
    affinity: Sequence[int] | None = None
    mems_allowed: Sequence[int] | None = None
    membership: str = "0::/\n"
    mountinfo: str = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    groups: dict[str, dict[str, str]] = field(default_factory=dict)


def graviton4() -> Machine:
    """One socket of 96 Neoverse V2, one node."""
    return Machine(_cores(96), {0: FakeNode(range(96), 768 * GIB, [10])})


def graviton4_two_sockets() -> Machine:
    """The 48xlarge sizes: 192 cores, two nodes."""
    nodes = {0: FakeNode(range(96), 768 * GIB, [10, 20]), 1: FakeNode(range(96, 192), 768 * GIB, [20, 10])}
    return Machine(_cores(192), nodes)


def grace(sockets: int = 1, gpu_nodes: int = 8) -> Machine:
    """72 cores a socket; each GPU's memory shows as nodes without CPUs, mostly empty."""
    count = sockets + gpu_nodes * sockets
    nodes = {}
    for id in range(count):
        distances = [10 if other == id else 40 if other < sockets and id < sockets else 80 for other in range(count)]
        cpus = range(72 * id, 72 * (id + 1)) if id < sockets else ()
        nodes[id] = FakeNode(cpus, 480 * GIB if id < sockets else 0, distances)
    caches = [("1", "Data", "64K", 1), ("2", "Unified", "1024K", 1), ("3", "Unified", "116736K", 72)]
    return Machine(_cores(72 * sockets), nodes, caches=caches)


def altra_two_sockets() -> Machine:
    """2 x 80 Neoverse N1."""
    nodes = {0: FakeNode(range(80), distances=[10, 20]), 1: FakeNode(range(80, 160), distances=[20, 10])}
    return Machine(_cores(160), nodes, midr=0x413FD0C1)


def kunpeng920() -> Machine:
    """4 nodes of 48 TSV110 cores on two sockets."""
    distances = [[10, 12, 20, 22], [12, 10, 22, 24], [20, 22, 10, 12], [22, 24, 12, 10]]
    nodes = {id: FakeNode(range(48 * id, 48 * id + 48), 64 * GIB, distances[id]) for id in range(4)}
    return Machine(_cores(192), nodes, midr=0x481FD010)


def smt2() -> Machine:
    """Two nodes of 16 cores with two threads each; siblings are n and n + 32."""
    cores = [(core, core + 32) for core in range(32)]
    nodes = {
        0: FakeNode([*range(16), *range(32, 48)], distances=[10, 20]),
        1: FakeNode([*range(16, 32), *range(48, 64)], distances=[20, 10]),
    }
    return Machine(cores, nodes, midr=0x480FD020)


def small_cgroup() -> Machine:
    """Graviton4, in a container that may use three cores that are not neighbours."""
    machine = graviton4()
    machine.affinity = [5, 17, 90]
    machine.groups = {"sys/fs/cgroup": {"cpuset.cpus.effective": "5,17,90\n", "memory.max": "max\n"}}
    return machine


def quota(text: str) -> Machine:
    """Graviton4 with a CPU quota, ``cpu.max`` as given."""
    machine = graviton4()
    machine.groups = {"sys/fs/cgroup": {"cpu.max": f"{text}\n"}}
    return machine


def node_without_memory() -> Machine:
    """Two sockets, all memory modules in the first."""
    machine = altra_two_sockets()
    assert machine.nodes is not None
    machine.nodes[1].memory = 0
    return machine


def offline_cores() -> Machine:
    """Sparse: odd cores are switched off, and node ids have a hole."""
    nodes = {0: FakeNode(range(8), distances=[10, 20]), 2: FakeNode(range(8, 16), distances=[20, 10])}
    return Machine(_cores(16), nodes, offline=range(1, 16, 2))


def without_numa() -> Machine:
    """A kernel built without NUMA: no node directory at all."""
    return Machine(_cores(8), None)


ALL: dict[str, Callable[[], Machine]] = {
    "graviton4": graviton4,
    "graviton4_two_sockets": graviton4_two_sockets,
    "grace": grace,
    "dual_grace": lambda: grace(2),
    "altra_two_sockets": altra_two_sockets,
    "kunpeng920": kunpeng920,
    "smt2": smt2,
    "small_cgroup": small_cgroup,
    "quota": lambda: quota("250000 100000"),
    "node_without_memory": node_without_memory,
    "offline_cores": offline_cores,
    "without_numa": without_numa,
}


def write(machine: Machine, root: Path) -> Path:
    """Write the files of a machine below ``root``; returns ``root``."""
    files: dict[str, str] = {}
    present = sorted(cpu for core in machine.cores for cpu in core)
    online = [cpu for cpu in present if cpu not in set(machine.offline)]
    system = "sys/devices/system"
    files[f"{system}/cpu/present"] = format_cpu_list(present)
    files[f"{system}/cpu/online"] = format_cpu_list(online)
    for core in machine.cores:
        for cpu in set(core) & set(online):
            base = f"{system}/cpu/cpu{cpu}"
            files[f"{base}/topology/thread_siblings_list"] = format_cpu_list(list(core))
            files[f"{base}/regs/identification/midr_el1"] = f"{machine.midr:#018x}"
    for index, (level, kind, size, shared) in enumerate(machine.caches):
        base = f"{system}/cpu/cpu{online[0]}/cache/index{index}"
        files[f"{base}/level"], files[f"{base}/type"], files[f"{base}/size"] = level, kind, size
        files[f"{base}/shared_cpu_list"] = f"0-{shared - 1}"
    total = 0
    for id, node in (machine.nodes or {}).items():
        base = f"{system}/node/node{id}"
        # The kernel lists a node's online CPUs only.
        files[f"{base}/cpulist"] = format_cpu_list([cpu for cpu in node.cpus if cpu in set(online)])
        files[f"{base}/distance"] = " ".join(map(str, node.distances))
        files[f"{base}/meminfo"] = "".join(f"Node {id} {line}\n" for line in _meminfo(node.memory))
        total += node.memory
    files["proc/meminfo"] = "\n".join([*_meminfo(total or 16 * GIB), f"MemAvailable: {(total or 16 * GIB) // 2048} kB"])
    affinity = online if machine.affinity is None else machine.affinity
    mems = list(machine.nodes or {0: None}) if machine.mems_allowed is None else machine.mems_allowed
    files["proc/self/status"] = (
        "Name:\tpython3\nVmRSS:\t  2048 kB\n"
        f"Cpus_allowed_list:\t{format_cpu_list(list(affinity))}\nMems_allowed_list:\t{format_cpu_list(list(mems))}\n"
    )
    files["proc/self/cgroup"], files["proc/self/mountinfo"] = machine.membership, machine.mountinfo
    for directory, contents in machine.groups.items():
        files |= {f"{directory}/{name}": text for name, text in contents.items()}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if text.endswith("\n") else text + "\n")
    return root


def cpus(text: str) -> tuple[int, ...]:
    """Shorthand for tests: ``"0-3,8"`` as a tuple."""
    return parse_cpu_list(text)


def can_start_processes() -> bool:
    """Whether this Python can start itself: not so under an emulator that runs outside its root file system."""
    try:
        return subprocess.run([sys.executable, "-I", "-S", "-c", ""], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _cores(count: int) -> list[tuple[int]]:
    return [(cpu,) for cpu in range(count)]


def _meminfo(total: int) -> list[str]:
    return [f"MemTotal: {total // 1024} kB", f"MemFree: {total // 4096} kB", f"Inactive(file): {total // 8192} kB"]
