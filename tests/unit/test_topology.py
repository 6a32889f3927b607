"""vllm_arm_cpu.runtime.topology and memory: real machines as fake trees."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from tests.unit import machines
from tests.unit.machines import GIB, cpus
from vllm_arm_cpu.runtime import memory, topology

V1_MOUNTS = "".join(
    f"3{i} 23 0:2{i} {{group}} /sys/fs/cgroup/{names} rw - cgroup cgroup rw,{names}\n"
    for i, names in enumerate(("cpu,cpuacct", "cpuset", "memory"))
)


def read(machine: machines.Machine, tmp_path: Path) -> topology.Topology:
    return topology.read(machines.write(machine, tmp_path))


@pytest.mark.parametrize("name", machines.ALL)
def test_every_machine_is_consistent(name: str, tmp_path: Path) -> None:
    found = read(machines.ALL[name](), tmp_path)
    assert found.cpus
    assert found.allowed
    assert set(found.allowed) <= set(found.cpus)
    members = [cpu for node in found.nodes for cpu in node.cpus]
    assert sorted(members) == list(found.cpus), "every online CPU is in one node"
    assert all(cpu in found.siblings[cpu] for cpu in found.cpus)
    assert found.memory_bytes() > 0
    assert found.available_memory_bytes() > 0


def test_grace_gpu_nodes_have_no_cpus(tmp_path: Path) -> None:
    found = read(machines.grace(2), tmp_path)
    assert [len(node.cpus) for node in found.nodes] == [72, 72] + [0] * 16
    assert found.nodes[0].distances[1] == 40
    assert found.nodes[0].distances[2] == 80
    assert found.memory_bytes() == 960 * GIB
    assert [(cache.name, cache.size, cache.shared_by) for cache in found.caches] == [
        ("L1d", 64 << 10, 1),
        ("L2", 1 << 20, 1),
        ("L3", 114 << 20, 72),
    ]


def test_kunpeng_distances(tmp_path: Path) -> None:
    found = read(machines.kunpeng920(), tmp_path)
    assert [node.distances for node in found.nodes][1] == {0: 12, 1: 10, 2: 22, 3: 24}
    assert found.node_of(191) == 3


def test_smt_siblings(tmp_path: Path) -> None:
    found = read(machines.smt2(), tmp_path)
    assert found.siblings[33] == (1, 33)
    assert len(found.cores(found.cpus)) == 32
    assert found.cores([33, 2, 1, 40]) == [(1, 33), (2,), (40,)]


def test_offline_and_sparse(tmp_path: Path) -> None:
    found = read(machines.offline_cores(), tmp_path)
    assert found.cpus == tuple(range(0, 16, 2))
    assert [(node.id, node.cpus) for node in found.nodes] == [(0, (0, 2, 4, 6)), (2, (8, 10, 12, 14))]
    assert found.nodes[1].distances == {0: 20, 2: 10}


def test_offline_siblings_do_not_count(tmp_path: Path) -> None:
    machine = machines.smt2()
    machine.offline = range(32, 64)
    assert read(machine, tmp_path).siblings[3] == (3,)


def test_kernel_without_numa(tmp_path: Path) -> None:
    found = read(machines.without_numa(), tmp_path)
    assert [(node.id, node.cpus) for node in found.nodes] == [(0, cpus("0-7"))]
    assert found.memory_bytes() == 16 * GIB
    assert found.available_memory_bytes() == 8 * GIB


def test_memory_of_a_node(tmp_path: Path) -> None:
    node = read(machines.graviton4(), tmp_path).nodes[0]
    assert (node.memory_total, node.memory_free, node.memory_available) == (768 * GIB, 192 * GIB, 288 * GIB)


def test_node_without_memory(tmp_path: Path) -> None:
    found = read(machines.node_without_memory(), tmp_path)
    assert found.nodes[1].memory_total == 0
    assert found.memory_bytes([1]) == 0


def test_mems_allowed_limits_memory(tmp_path: Path) -> None:
    machine = machines.kunpeng920()
    machine.mems_allowed = [1]
    found = read(machine, tmp_path)
    assert found.mems_allowed == (1,)
    assert found.memory_bytes() == 64 * GIB
    assert found.memory_bytes([0, 1]) == 128 * GIB


def test_cpu_in_no_node(tmp_path: Path) -> None:
    machine = machines.altra_two_sockets()
    assert machine.nodes is not None
    machine.nodes[0].cpus = range(79)
    assert 79 in read(machine, tmp_path).nodes[0].cpus


def test_affinity_and_cpuset_meet(tmp_path: Path) -> None:
    machine = machines.graviton4()
    machine.affinity = range(10, 20)
    machine.groups = {"sys/fs/cgroup": {"cpuset.cpus.effective": "0-14"}}
    assert read(machine, tmp_path).allowed == cpus("10-14")


def test_contradicting_cpuset_loses_to_the_mask(tmp_path: Path) -> None:
    machine = machines.graviton4()
    machine.affinity = [3]
    machine.groups = {"sys/fs/cgroup": {"cpuset.cpus.effective": "8-9"}}
    assert read(machine, tmp_path).allowed == (3,)


@pytest.mark.parametrize(
    ("text", "quota", "limit"),
    [
        ("max 100000", None, None),
        ("250000 100000", 2.5, 3),
        ("50000 100000", 0.5, 1),
        ("400000 100000", 4.0, 4),
        ("nonsense", None, None),
        ("100 0", None, None),
        ("", None, None),
    ],
)
def test_quota(text: str, quota: float | None, limit: int | None, tmp_path: Path) -> None:
    found = read(machines.quota(text), tmp_path)
    assert found.cgroup.cpu_quota == quota
    assert found.thread_limit == limit


def test_limits_of_parent_groups(tmp_path: Path) -> None:
    machine = machines.graviton4()
    machine.membership = "0::/system.slice/vllm.service\n"
    stat = f"anon 1\ninactive_file {2 * GIB}\n"
    machine.groups = {
        "sys/fs/cgroup": {},
        "sys/fs/cgroup/system.slice": {
            "cpu.max": "800000 100000",
            "cpuset.cpus.effective": "0-15",
            "memory.max": str(40 * GIB),
            "memory.current": str(20 * GIB),
            "memory.stat": stat,
        },
        "sys/fs/cgroup/system.slice/vllm.service": {
            "cpu.max": "max 100000",
            "memory.max": str(64 * GIB),
            "memory.current": str(4 * GIB),
        },
    }
    found = read(machine, tmp_path)
    assert found.cgroup == topology.Cgroup(2, cpus("0-15"), 8.0, 40 * GIB, 22 * GIB)
    assert found.memory_bytes() == 40 * GIB
    assert found.available_memory_bytes() == 22 * GIB


def test_available_memory_is_read_anew(tmp_path: Path) -> None:
    machine = machines.graviton4()
    group = {"memory.max": str(8 * GIB), "memory.current": str(GIB)}
    machine.groups = {"sys/fs/cgroup": group}
    found = read(machine, tmp_path)
    assert found.available_memory_bytes() == 7 * GIB
    (tmp_path / "sys/fs/cgroup/memory.current").write_text(str(9 * GIB))
    assert found.available_memory_bytes() == 0


def test_container_sees_a_part_of_the_hierarchy(tmp_path: Path) -> None:
    machine = machines.graviton4()
    machine.membership = "0::/docker/abc/inner\n"
    machine.mountinfo = "30 23 0:26 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup rw\n"
    machine.groups = {"sys/fs/cgroup/inner": {"cpu.max": "300000 100000"}}
    assert read(machine, tmp_path).thread_limit == 3


def test_path_outside_the_namespace(tmp_path: Path) -> None:
    machine = machines.quota("200000 100000")
    machine.membership = "0::/../../elsewhere\n"
    assert read(machine, tmp_path).thread_limit == 2


@pytest.mark.parametrize("group", ["/", "/docker/abc"])
def test_version_1(group: str, tmp_path: Path) -> None:
    machine = machines.graviton4()
    machine.membership = "4:memory:/docker/abc\n3:cpuset:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n"
    machine.mountinfo = V1_MOUNTS.format(group=group)
    inner = "" if group != "/" else "/docker/abc"
    machine.groups = {
        f"sys/fs/cgroup/cpu,cpuacct{inner}": {"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"},
        f"sys/fs/cgroup/cpuset{inner}": {"cpuset.cpus": "4-7"},
        f"sys/fs/cgroup/memory{inner}": {
            "memory.limit_in_bytes": str(10 * GIB),
            "memory.usage_in_bytes": str(3 * GIB),
            "memory.stat": f"total_inactive_file {GIB}\n",
        },
    }
    found = read(machine, tmp_path)
    assert found.cgroup == topology.Cgroup(1, cpus("4-7"), 1.5, 10 * GIB, 8 * GIB)
    assert found.allowed == cpus("4-7")


def test_version_1_without_limits(tmp_path: Path) -> None:
    machine = machines.graviton4()
    machine.membership = "4:memory:/\n2:cpu,cpuacct:/\n"
    machine.mountinfo = V1_MOUNTS.format(group="/")
    machine.groups = {
        "sys/fs/cgroup/cpu,cpuacct": {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"},
        "sys/fs/cgroup/memory": {"memory.limit_in_bytes": "9223372036854771712"},
    }
    assert read(machine, tmp_path).cgroup == topology.Cgroup(1)


def test_nothing_to_read(tmp_path: Path) -> None:
    found = topology.read(tmp_path)
    assert found.cpus == found.allowed == (0,)
    assert found.nodes[0].cpus == (0,)
    assert found.cgroup == topology.Cgroup()
    assert found.caches == ()
    assert found.memory_bytes() == found.available_memory_bytes() == 0


def test_this_machine() -> None:
    found = topology.read()
    assert set(found.allowed) <= os.sched_getaffinity(0)
    assert found.available_memory_bytes() > 0
    assert topology.resident_bytes() > 1 << 20


def test_resident_bytes(tmp_path: Path) -> None:
    assert topology.resident_bytes(machines.write(machines.without_numa(), tmp_path)) == 2 << 20
    assert topology.resident_bytes(tmp_path / "nothing") == 0


def test_huge_pages(tmp_path: Path) -> None:
    mm = tmp_path / "sys/kernel/mm"
    (mm / "transparent_hugepage/hugepages-2048kB").mkdir(parents=True)
    (mm / "hugepages/hugepages-2048kB").mkdir(parents=True)
    (mm / "transparent_hugepage/enabled").write_text("always [madvise] never\n")
    (mm / "transparent_hugepage/hpage_pmd_size").write_text("536870912\n")
    (mm / "transparent_hugepage/hugepages-2048kB/enabled").write_text("always inherit madvise [never]\n")
    (mm / "hugepages/hugepages-2048kB/nr_hugepages").write_text("7\n")
    found = memory.read_huge_pages(tmp_path)
    assert (found.transparent, found.transparent_size) == ("madvise", 512 << 20)
    assert found.sized == {2 << 20: "never"}
    assert found.pools == {2 << 20: 7}
    assert memory.read_huge_pages(tmp_path / "nothing").transparent == ""


def test_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    found = memory.read_shared_memory(tmp_path)
    assert found is not None
    assert found.total >= found.available > 0
    assert memory.read_shared_memory(tmp_path / "nothing") is None


def test_mempolicy_is_answered() -> None:
    assert memory.mempolicy_error() >= 0


def test_advise_huge_pages_takes_whole_pages_only() -> None:
    assert memory.advise_huge_pages(4096 * 7 + 1, 100) is False


@pytest.mark.parametrize("huge_pages", ["0", "1"])
@pytest.mark.parametrize("nbytes", [1, 2 << 20, (5 << 20) + 3])
def test_map_aligned(nbytes: int, huge_pages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAC_HUGE_PAGES", huge_pages)
    mapping, start = memory.map_aligned(nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    assert (address + start) % (2 << 20) == 0
    assert start + nbytes <= len(mapping)
    mapping[start + nbytes - 1] = 7
    assert mapping[start] in (0, 7)


@pytest.mark.parametrize("nbytes", [2 << 20, (2 << 20) + 1, 5_000_000])
def test_last_huge_page_is_whole(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies in the mapping wherever that begins, and no policy or advice ends inside it."""
    ranges = {}
    monkeypatch.setattr(memory, "_arena_nodes", (0,))
    monkeypatch.setattr(memory, "bind_range", lambda address, length, nodes: ranges.update(bound=(address, length)))
    monkeypatch.setattr(memory, "advise_huge_pages", lambda address, length: ranges.update(advised=(address, length)))
    for _ in range(8):
        mapping, start = memory.map_aligned(nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        whole = -(-nbytes // (2 << 20)) * (2 << 20)
        assert start + whole <= len(mapping)
        assert ranges == {"bound": (address, len(mapping)), "advised": (address + start, whole)}


def test_more_than_the_address_space() -> None:
    with pytest.raises(MemoryError, match="cannot map"):
        memory.map_aligned(1 << 60)
    with pytest.raises(MemoryError, match="cannot map"):
        memory.map_aligned(1 << 70)
