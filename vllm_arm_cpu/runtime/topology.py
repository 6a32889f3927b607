"""Which CPUs, cores, NUMA nodes, caches and limits this process lives with.

Read from /sys, /proc and the cgroup file systems; nothing is assumed about
numbering, and every file may be missing.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_arm_cpu.envs import parse_cpu_list


@dataclass(frozen=True)
class Node:
    """A NUMA node. Memory-only nodes have no CPUs; some nodes have no memory.

    Attributes:
        cpus: its online CPUs, ascending.
        memory_total, memory_free: bytes.
        memory_available: bytes, free or holding file pages that can be dropped.
        distances: node id -> distance as the firmware states it, 10 = local.
    """

    id: int
    cpus: tuple[int, ...]
    memory_total: int
    memory_free: int
    memory_available: int
    distances: Mapping[int, int]


@dataclass(frozen=True)
class Cache:
    """A cache of the first online CPU: ``"L1d"``, ``"L1i"``, ``"L2"``, ``"L3"``; size in bytes."""

    name: str
    size: int
    shared_by: int


@dataclass(frozen=True)
class Cgroup:
    """Limits of the process's control group and all groups above it, as far as visible.

    Attributes:
        version: 1 or 2 (that of the memory controller), 0 without cgroups.
        cpuset: CPUs of the group, None when not limited.
        cpu_quota: CPU time per time: 1.5 is one and a half CPUs. None: no limit.
        memory_limit, memory_available: bytes, None when not limited. Available is
            what is left under the tightest group, file pages counted as free.
    """

    version: int = 0
    cpuset: tuple[int, ...] | None = None
    cpu_quota: float | None = None
    memory_limit: int | None = None
    memory_available: int | None = None


@dataclass(frozen=True)
class Topology:
    """The machine as one process sees it.

    Attributes:
        cpus: online logical CPUs, ascending.
        siblings: CPU -> online CPUs of the same physical core, itself included.
        nodes: at least one, ascending by id; every online CPU is in one of them.
        affinity: CPUs in this thread's affinity mask.
        mems_allowed: NUMA nodes whose memory may be used.
        root: where it was read.

    Memory figures of the fields are those of the moment of reading; the
    methods ask again.
    """

    cpus: tuple[int, ...]
    siblings: Mapping[int, tuple[int, ...]]
    nodes: tuple[Node, ...]
    caches: tuple[Cache, ...]
    affinity: tuple[int, ...]
    mems_allowed: tuple[int, ...]
    cgroup: Cgroup
    root: Path = Path("/")

    @property
    def allowed(self) -> tuple[int, ...]:
        """CPUs that threads of this process may run on, ascending; never empty."""
        allowed = set(self.cpus) & set(self.affinity)
        if self.cgroup.cpuset is not None:
            # A cgroup file that contradicts the mask belongs to another namespace: the mask is the kernel's word.
            allowed = allowed & set(self.cgroup.cpuset) or allowed
        return tuple(sorted(allowed or self.affinity or self.cpus))

    @property
    def thread_limit(self) -> int | None:
        """Threads that the cgroup's CPU quota keeps busy, rounded up; None without quota."""
        return None if self.cgroup.cpu_quota is None else max(1, math.ceil(self.cgroup.cpu_quota))

    def memory_bytes(self, nodes: Iterable[int] | None = None) -> int:
        """Bytes of memory on the nodes (default: all allowed), or the cgroup's limit when that is less.

        0 when the kernel tells nothing.
        """
        wanted = set(self.mems_allowed if nodes is None else nodes)
        total = sum(node.memory_total for node in self.nodes if node.id in wanted)
        limit = self.cgroup.memory_limit
        return total if limit is None else min(total, limit)

    def available_memory_bytes(self, nodes: Iterable[int] | None = None) -> int:
        """Bytes that can be allocated now on the nodes (default: all allowed) without swapping.

        The smaller of what the nodes have and what the cgroup leaves, read at
        every call; 0 when the kernel tells nothing.
        """
        wanted = set(self.mems_allowed if nodes is None else nodes)
        available = sum(node.memory_available for node in _nodes(self.root, self.cpus) if node.id in wanted)
        limit = _cgroup(self.root).memory_available
        return available if limit is None else min(available, limit)

    def node_of(self, cpu: int) -> int:
        """Id of the node that a CPU belongs to (the first node for an unknown CPU)."""
        return next((node.id for node in self.nodes if cpu in node.cpus), self.nodes[0].id)

    def cores(self, cpus: Iterable[int]) -> list[tuple[int, ...]]:
        """Group CPUs by physical core; cores ascending by their lowest CPU in ``cpus``."""
        groups: dict[int, list[int]] = {}
        for cpu in sorted(set(cpus)):
            groups.setdefault(min(self.siblings.get(cpu, (cpu,))), []).append(cpu)
        return sorted(tuple(group) for group in groups.values())


def read(root: str | Path = "/", affinity: Iterable[int] | None = None) -> Topology:
    """Read the topology; never fails, what cannot be read falls back to the obvious.

    Args:
        root: where /sys and /proc are looked up.
        affinity: instead of the calling thread's affinity mask. With another
            root than ``/``, its ``/proc/self/status`` is asked.
    """
    root = Path(root)
    mask = _affinity(root) if affinity is None else tuple(sorted(set(affinity)))
    system = root / "sys/devices/system"
    cpus = _list(system / "cpu/online") or _list(system / "cpu/present") or mask or (0,)
    mask = mask or cpus
    nodes = _nodes(root, cpus)
    mems = _status_list(root, "Mems_allowed_list") or tuple(node.id for node in nodes)
    siblings, caches = _siblings(system / "cpu", cpus), _caches(system / "cpu", cpus)
    return Topology(cpus, siblings, nodes, caches, mask, mems, _cgroup(root), root)


def resident_bytes(root: str | Path = "/") -> int:
    """Bytes of main memory that this process holds now, file pages and shared memory included."""
    match = re.search(r"^VmRSS:\s*(\d+) kB$", _text(Path(root) / "proc/self/status"), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0


def _affinity(root: Path) -> tuple[int, ...]:
    if root == Path("/"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return _status_list(root, "Cpus_allowed_list")


def _status_list(root: Path, field: str) -> tuple[int, ...]:
    match = re.search(rf"^{field}:\s*(\S+)$", _text(root / "proc/self/status"), re.MULTILINE)
    return _parse(match.group(1)) if match else ()


def _siblings(directory: Path, cpus: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    online = set(cpus)
    result = {}
    for cpu in cpus:
        topology = directory / f"cpu{cpu}" / "topology"
        # core_cpus_list is the name since Linux 5.3, the other one before.
        listed = _list(topology / "core_cpus_list") or _list(topology / "thread_siblings_list")
        result[cpu] = tuple(sorted(online & set(listed) | {cpu}))
    return result


def _nodes(root: Path, cpus: tuple[int, ...]) -> tuple[Node, ...]:
    directory = root / "sys/devices/system/node"
    ids = sorted(int(path.name[4:]) for path in directory.glob("node[0-9]*") if path.name[4:].isdecimal())
    if not ids:
        total, free, available = _memory(_text(root / "proc/meminfo"))
        return (Node(0, cpus, total, free, available, {0: 10}),)
    online = set(cpus)
    # The distance file has one column per online node, in ascending order.
    nodes = []
    for id in ids:
        path = directory / f"node{id}"
        total, free, available = _memory(_text(path / "meminfo"))
        columns = _text(path / "distance").split()
        distances = {other: int(text) for other, text in zip(ids, columns, strict=False) if text.isdecimal()}
        members = tuple(sorted(online & set(_list(path / "cpulist"))))
        nodes.append(Node(id, members, total, free, available, distances or {id: 10}))
    stray = online.difference(*(node.cpus for node in nodes))
    if stray:
        # Firmware tables with holes: such CPUs go to the first node that has any.
        index = next((i for i, node in enumerate(nodes) if node.cpus), 0)
        node = nodes[index]
        nodes[index] = Node(
            node.id,
            tuple(sorted(stray.union(node.cpus))),
            node.memory_total,
            node.memory_free,
            node.memory_available,
            node.distances,
        )
    return tuple(nodes)


def _memory(text: str) -> tuple[int, int, int]:
    """Total, free and available bytes of /proc/meminfo or a node's meminfo."""
    fields = {name: int(value) * 1024 for name, value in re.findall(r"(\S+):\s+(\d+)(?: kB)?$", text, re.MULTILINE)}
    free = fields.get("MemFree", 0)
    # The kernel estimates MemAvailable for the machine only, not per node.
    available = free + fields.get("Active(file)", 0) + fields.get("Inactive(file)", 0)
    return fields.get("MemTotal", 0), free, fields.get("MemAvailable", available)


def _caches(directory: Path, cpus: tuple[int, ...]) -> tuple[Cache, ...]:
    found = []
    for path in sorted((directory / f"cpu{cpus[0]}" / "cache").glob("index*")):
        size = re.fullmatch(r"(\d+)([KMG]?)", _text(path / "size"))
        level = _text(path / "level")
        if not size or not level.isdecimal():
            continue
        kind = {"Data": "d", "Instruction": "i"}.get(_text(path / "type"), "")
        nbytes = int(size.group(1)) << {"": 0, "K": 10, "M": 20, "G": 30}[size.group(2)]
        found.append(Cache(f"L{level}{kind}", nbytes, len(_list(path / "shared_cpu_list")) or 1))
    return tuple(found)


@dataclass(frozen=True)
class _Mount:
    version: int
    controllers: frozenset[str]
    group: str  # the group at the mount point, "/" for the whole hierarchy
    point: str


def _cgroup(root: Path) -> Cgroup:
    membership = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        # Version 2 has one line with no controller names.
        membership.update(dict.fromkeys(names.split(","), path))
    mounts = _cgroup_mounts(root)

    version, levels = _levels(root, mounts, membership, "cpuset")
    files = ("cpuset.cpus.effective",) if version == 2 else ("cpuset.effective_cpus", "cpuset.cpus")
    cpuset = next((cpus for level in levels for name in files if (cpus := _list(level / name))), None)

    version, levels = _levels(root, mounts, membership, "cpu")
    quotas = [quota for level in levels if (quota := _quota(level, version)) is not None]

    version, levels = _levels(root, mounts, membership, "memory")
    memory = [limit for level in levels if (limit := _memory_limit(level, version)) is not None]
    return Cgroup(
        version,
        cpuset,
        min(quotas, default=None),
        min((limit for limit, _ in memory), default=None),
        min((available for _, available in memory), default=None),
    )


def _cgroup_mounts(root: Path) -> list[_Mount]:
    mounts = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        head, _, tail = line.partition(" - ")
        fields, kind = head.split(), tail.split()
        if len(fields) >= 5 and len(kind) >= 3 and kind[0] in ("cgroup", "cgroup2"):
            controllers = frozenset(kind[2].split(",")) if kind[0] == "cgroup" else frozenset()
            mounts.append(_Mount(2 if kind[0] == "cgroup2" else 1, controllers, fields[3], fields[4]))
    if not mounts and (root / "sys/fs/cgroup/cgroup.controllers").exists():
        mounts.append(_Mount(2, frozenset(), "/", "/sys/fs/cgroup"))
    return mounts


def _levels(root: Path, mounts: list[_Mount], membership: Mapping[str, str], controller: str) -> tuple[int, list[Path]]:
    """Hierarchy version and directories of the process's group, innermost first, up to the mount point."""
    chosen = next((mount for mount in mounts if controller in mount.controllers), None)
    chosen = chosen or next((mount for mount in mounts if mount.version == 2), None)
    if chosen is None:
        return 0, []
    path = membership.get(controller if chosen.version == 1 else "", "/")
    # Inside a container the mount may show a part of the hierarchy only, with paths still counted from its top.
    if chosen.group != "/" and (path + "/").startswith(chosen.group + "/"):
        path = path[len(chosen.group) :]
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        parts = []
    point = root / chosen.point.lstrip("/")
    levels = [point.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]
    return chosen.version, [level for level in levels if level.is_dir()]


def _quota(level: Path, version: int) -> float | None:
    if version == 2:
        quota, _, period = _text(level / "cpu.max").partition(" ")
    else:
        quota = _text(level / "cpu.cfs_quota_us")
        period = _text(level / "cpu.cfs_period_us")
    # No limit is "max" in version 2 and -1 in version 1.
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _memory_limit(level: Path, version: int) -> tuple[int, int] | None:
    """Limit and what is left of it, in bytes."""
    limit = _text(level / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
    # Version 1 writes no limit as the largest number of pages.
    if not limit.isdecimal() or int(limit) >= 1 << 60:
        return None
    used = _text(level / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
    field = "inactive_file" if version == 2 else "total_inactive_file"
    match = re.search(rf"^{field} (\d+)$", _text(level / "memory.stat"), re.MULTILINE)
    taken = (int(used) if used.isdecimal() else 0) - (int(match.group(1)) if match else 0)
    return int(limit), max(0, int(limit) - max(0, taken))


def _list(path: Path) -> tuple[int, ...]:
    return _parse(_text(path))


def _parse(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted(parse_cpu_list(text)))
    except ValueError:
        return ()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
