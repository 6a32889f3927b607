"""vllm_arm_cpu.runtime.numa and executor.plan: how ranks divide real machines."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit import machines
from tests.unit.machines import cpus
from vllm_arm_cpu import envs
from vllm_arm_cpu.envs import EnvError
from vllm_arm_cpu.executor import plan as engine_plan
from vllm_arm_cpu.runtime import memory, numa, threads, topology
from vllm_arm_cpu.runtime.numa import RankPlan
from vllm_arm_cpu.runtime.topology import Topology


def read(machine: machines.Machine, tmp_path: Path) -> Topology:
    return topology.read(machines.write(machine, tmp_path))


def plan(machine: machines.Machine, tmp_path: Path, num_ranks: int, **environ: str) -> list[RankPlan]:
    return list(numa.plan_ranks(read(machine, tmp_path), num_ranks, environ))


def grace_with_gpu_memory() -> machines.Machine:
    """A GPU whose memory is a node, and full of it."""
    machine = machines.grace(2, gpu_nodes=1)
    assert machine.nodes is not None
    for node in machine.nodes.values():
        node.memory = node.memory or 96 * machines.GIB
    return machine


@pytest.mark.parametrize("name", machines.ALL)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_ranks_share_nothing(name: str, num_ranks: int, tmp_path: Path) -> None:
    found = read(machines.ALL[name](), tmp_path)
    if num_ranks > len(found.cores(found.allowed)):
        with pytest.raises(ValueError, match=r"ranks need .* cores"):
            numa.plan_ranks(found, num_ranks, {})
        return
    plans = numa.plan_ranks(found, num_ranks, {})
    assert [entry.rank for entry in plans] == list(range(num_ranks))
    taken = [cpu for entry in plans for cpu in entry.threads.cpus]
    assert len(taken) == len(set(taken)) == len(found.cores(taken))
    assert set(taken) <= set(found.allowed)
    assert all(entry.threads.cpus for entry in plans)
    for node in found.nodes:
        assert sum(entry.memory_share for entry in plans if node.id in entry.memory_nodes) < 1.001
    if num_ranks > 1:
        assert all(len(entry.threads.nodes) == 1 for entry in plans)


@pytest.mark.parametrize(
    ("name", "num_ranks", "expected", "memory_nodes"),
    [
        ("graviton4", 2, ["0-47", "48-95"], [(), ()]),
        ("graviton4_two_sockets", 2, ["0-95", "96-191"], [(0,), (1,)]),
        ("graviton4_two_sockets", 4, ["0-47", "48-95", "96-143", "144-191"], [(0,), (0,), (1,), (1,)]),
        ("grace", 2, ["0-35", "36-71"], [(0,), (0,)]),
        ("dual_grace", 2, ["0-71", "72-143"], [(0,), (1,)]),
        ("altra_two_sockets", 2, ["0-79", "80-159"], [(0,), (1,)]),
        ("altra_two_sockets", 3, ["0-39", "40-79", "80-159"], [(0,), (0,), (1,)]),
        ("kunpeng920", 2, ["0-47", "48-95"], [(0,), (1,)]),
        ("kunpeng920", 4, ["0-47", "48-95", "96-143", "144-191"], [(0,), (1,), (2,), (3,)]),
        ("smt2", 2, ["0-15", "16-31"], [(0,), (1,)]),
        ("small_cgroup", 2, ["5", "17,90"], [(), ()]),
        ("small_cgroup", 3, ["5", "17", "90"], [(), (), ()]),
        ("quota", 2, ["0", "48"], [(), ()]),
        ("node_without_memory", 2, ["0-79", "80-159"], [(0,), (0,)]),
        ("offline_cores", 2, ["0,2,4,6", "8,10,12,14"], [(0,), (2,)]),
        ("without_numa", 2, ["0-3", "4-7"], [(), ()]),
    ],
)
def test_plans_of_machines(
    name: str, num_ranks: int, expected: list[str], memory_nodes: list[tuple[int, ...]], tmp_path: Path
) -> None:
    plans = plan(machines.ALL[name](), tmp_path, num_ranks)
    assert [entry.threads.cpus for entry in plans] == [cpus(text) for text in expected]
    assert [entry.memory_nodes for entry in plans] == memory_nodes


def test_shares_of_memory(tmp_path: Path) -> None:
    assert [entry.memory_share for entry in plan(machines.altra_two_sockets(), tmp_path, 3)] == [0.5, 0.5, 1.0]
    plans = plan(machines.node_without_memory(), tmp_path, 2)
    assert [entry.memory_share for entry in plans] == [0.5, 0.5]
    assert plans[1].reasons == ("node 1 has no memory to use: memory of node 0",)


def test_fewer_ranks_than_nodes_are_near_each_other(tmp_path: Path) -> None:
    machine = machines.kunpeng920()
    machine.affinity = range(48, 192)
    # Nodes 2 and 3 are one socket (distance 12); 1 and 2 are not.
    assert [entry.node for entry in plan(machine, tmp_path, 2)] == [2, 3]


def test_a_node_with_few_usable_cores_is_left_out(tmp_path: Path) -> None:
    machine = machines.kunpeng920()
    machine.affinity = [0, 1, *range(48, 192)]
    assert [entry.node for entry in plan(machine, tmp_path, 2)] == [2, 3]
    assert [entry.node for entry in plan(machine, tmp_path, 3)] == [1, 2, 3]


def test_nodes_without_memory_come_last(tmp_path: Path) -> None:
    machine = machines.kunpeng920()
    assert machine.nodes is not None
    machine.nodes[1].memory = 0
    assert [entry.node for entry in plan(machine, tmp_path, 2)] == [2, 3]


def test_memory_of_a_device_is_not_taken(tmp_path: Path) -> None:
    machine = grace_with_gpu_memory()
    assert [entry.memory_nodes for entry in plan(machine, tmp_path, 2)] == [(0,), (1,)]
    assert machine.nodes is not None
    machine.nodes[1].memory = 0
    # Node 3 has memory, too, but no CPUs.
    assert [entry.memory_nodes for entry in plan(machine, tmp_path / "2", 2)] == [(0,), (0,)]


def test_mems_of_the_cgroup(tmp_path: Path) -> None:
    machine = machines.altra_two_sockets()
    machine.mems_allowed = [1]
    assert [entry.memory_nodes for entry in plan(machine, tmp_path, 2)] == [(1,), (1,)]


def test_neighbouring_ranks_are_on_neighbouring_nodes(tmp_path: Path) -> None:
    """Firmware that numbers nodes across sockets: 0 and 2 are one socket."""
    machine = machines.kunpeng920()
    assert machine.nodes is not None
    rows = [[10, 20, 12, 22], [20, 10, 22, 12], [12, 22, 10, 24], [22, 12, 24, 10]]
    for id, row in enumerate(rows):
        machine.nodes[id].distances = row
    assert [entry.node for entry in plan(machine, tmp_path, 4)] == [0, 2, 1, 3]
    assert [entry.node for entry in plan(machine, tmp_path, 2)] == [0, 2]


def test_bind_by_hand(tmp_path: Path) -> None:
    plans = plan(machines.altra_two_sockets(), tmp_path, 2, VAC_BIND="4-7|80,82")
    assert [entry.threads.cpus for entry in plans] == [(4, 5, 6, 7), (80, 82)]
    assert [entry.memory_nodes for entry in plans] == [(0,), (1,)]
    # A rank over two nodes has the memory of both.
    plans = plan(machines.altra_two_sockets(), tmp_path / "2", 2, VAC_BIND="79,80|0-3")
    assert [entry.memory_nodes for entry in plans] == [(0, 1), (0,)]
    assert [entry.memory_share for entry in plans] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("num_ranks", "bind", "allowed"),
    [
        (2, "0-31", "2 lists of CPUs"),
        (2, "0-3|4-7|8-11", "2 lists of CPUs"),
        (1, "0-3|4-7", "1 lists of CPUs"),
        (2, "0-31|160-170", "CPUs among 0-159"),
        (2, "0-31|31-40", "without a CPU in common"),
        (2, "0-31|", "without a CPU in common"),
    ],
)
def test_bind_that_does_not_fit(num_ranks: int, bind: str, allowed: str, tmp_path: Path) -> None:
    with pytest.raises(EnvError) as error:
        plan(machines.altra_two_sockets(), tmp_path, num_ranks, VAC_BIND=bind)
    assert "VAC_BIND" in str(error.value) and allowed in str(error.value)


def test_not_pinned(tmp_path: Path) -> None:
    plans = plan(machines.altra_two_sockets(), tmp_path, 2, VAC_BIND="none")
    assert [entry.threads.num_threads for entry in plans] == [80, 80]
    assert not any(entry.threads.pin or entry.memory_nodes for entry in plans)


def test_threads_for_each_rank(tmp_path: Path) -> None:
    plans = plan(machines.altra_two_sockets(), tmp_path, 2, VAC_THREADS="3")
    assert [entry.threads.cpus for entry in plans] == [(0, 1, 2), (80, 81, 82)]
    with pytest.raises(EnvError, match="VAC_THREADS"):
        plan(machines.altra_two_sockets(), tmp_path / "2", 2, VAC_THREADS="81")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("graviton4", 1),
        ("graviton4_two_sockets", 2),
        ("grace", 1),
        ("dual_grace", 2),
        ("altra_two_sockets", 2),
        ("kunpeng920", 4),
        ("node_without_memory", 1),
        ("small_cgroup", 1),
        ("without_numa", 1),
    ],
)
def test_proposal(name: str, expected: int, tmp_path: Path) -> None:
    assert numa.propose(read(machines.ALL[name](), tmp_path)) == expected


def test_proposal_leaves_out_a_node_with_few_cores(tmp_path: Path) -> None:
    machine = machines.kunpeng920()
    machine.affinity = [0, 1, *range(48, 192)]
    assert numa.propose(read(machine, tmp_path)) == 3


def test_picture(tmp_path: Path) -> None:
    machine = machines.kunpeng920()
    machine.affinity = [*range(100), *range(144, 192)]
    found = read(machine, tmp_path)
    assert numa.picture(found, numa.plan_ranks(found, 2, {"VAC_THREADS": "40"})) == [
        ("node 0", "[ rank 0: 0-39 | idle: 40-47 ]  64 GiB, distances 10 12 20 22"),
        ("node 1", "[ rank 1: 48-87 | idle: 88-95 ]  64 GiB, distances 12 10 22 24"),
        ("node 2", "[ idle: 96-99 ]  64 GiB, distances 20 22 10 12"),
        ("node 3", "[ idle: 144-191 ]  64 GiB, distances 22 24 12 10"),
    ]
    found = read(machines.grace(1, gpu_nodes=1), tmp_path / "2")
    assert numa.picture(found, numa.plan_ranks(found, 1, {}))[1] == (
        "node 1",
        "[ no CPUs ]  no memory, distances 80 10",
    )


def test_a_process_is_born_with_its_plan() -> None:
    """Affinity and environment of a child that was started inside the block, and nothing left behind it."""
    allowed = os.sched_getaffinity(0)
    cpu = max(allowed)
    entry = RankPlan(3, threads.ThreadPlan((cpu,), (0,)), (), 0.25)
    before = dict(os.environ)
    code = (
        "import os; from vllm_arm_cpu.runtime import numa; plan = numa.inherited();"
        "print(sorted(os.sched_getaffinity(0)), os.environ['OMP_PLACES'], plan.rank, plan.memory_share)"
    )
    if not machines.can_start_processes():
        pytest.skip("this Python cannot start itself here")
    with numa.environment_of(entry) as refused:
        assert refused == 0
        assert numa.inherited() == RankPlan(
            3, threads.ThreadPlan((cpu,), (0,), reasons=("planned by the parent process",)), (), 0.25
        )
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == f"[{cpu}] {{{cpu}}} 3 0.25"
    assert os.sched_getaffinity(0) == allowed
    assert dict(os.environ) == before
    assert numa.inherited() is None


PARENT = """
import os, subprocess, sys, threading
from vllm_arm_cpu.runtime import numa, threads
CHILD = "import os, signal; from vllm_arm_cpu.runtime import numa;"
CHILD += "print(os.getpid(), numa.end_with_parent(), flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
plan = numa.RankPlan(0, threads.ThreadPlan(tuple(os.sched_getaffinity(0)), (0,)))
def start():
    with numa.environment_of(plan):
        subprocess.Popen([sys.executable, "-c", CHILD])
if sys.argv[1] == "main":
    start()
else:
    threading.Thread(target=start).start()
os.read(0, 1)
"""


def test_stopped_rank_ends_with_its_parent() -> None:
    """One that hears nothing any more; not one that a thread has started, which may end before the process does."""
    if not machines.can_start_processes():
        pytest.skip("this Python cannot start itself here")
    for thread, ends in (("main", True), ("other", False)):
        command = [sys.executable, "-c", PARENT, thread]
        parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        pid, told = parent.stdout.readline().split()
        assert told == str(ends)
        stat = Path(f"/proc/{pid}/stat")
        try:
            assert wait_for(stat, "T", 60)
            parent.kill()
            parent.wait()
            assert wait_for(stat, "Z", 5 if ends else 0.5) == ends
        finally:
            if state(stat) == "T":
                os.kill(int(pid), signal.SIGKILL)


def wait_for(stat: Path, wanted: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while (found := state(stat)) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return found == wanted


def state(stat: Path) -> str:
    """A process's state letter; one that is gone is as good as a zombie."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_memory_policy_is_set_for_the_birth_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[memory.MemoryPolicy] = []
    monkeypatch.setattr(memory, "get_policy", lambda: memory.MemoryPolicy(3, (0, 1)))
    monkeypatch.setattr(memory, "set_policy", calls.append)
    entry = RankPlan(0, threads.ThreadPlan(tuple(os.sched_getaffinity(0)), (0,)), (1,))
    with numa.environment_of(entry, {}):
        assert calls == [memory.MemoryPolicy(2, (1,))]
    assert calls[1:] == [memory.MemoryPolicy(3, (0, 1))]


def test_refused_memory_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(policy: memory.MemoryPolicy) -> None:
        raise OSError(errno.EPERM, "set_mempolicy")

    monkeypatch.setattr(memory, "get_policy", memory.MemoryPolicy)
    monkeypatch.setattr(memory, "set_policy", refuse)
    entry = RankPlan(0, threads.ThreadPlan(tuple(os.sched_getaffinity(0)), (0,)), (0,))
    with numa.environment_of(entry, {}) as refused:
        assert refused == errno.EPERM


def test_policy_of_this_process() -> None:
    """Set, read back, set back, where the kernel lets us."""
    error = memory.mempolicy_error()
    if error:
        pytest.skip(f"no memory policies here: {os.strerror(error)}")
    before = memory.get_policy()
    node = topology.read().mems_allowed[0]
    try:
        memory.set_policy(memory.MemoryPolicy.bind([node]))
        assert memory.get_policy() == memory.MemoryPolicy(2, (node,))
        with pytest.raises(OSError, match="set_mempolicy") as refused:
            memory.set_policy(memory.MemoryPolicy.bind([1000]))
        assert refused.value.errno == errno.EINVAL
    finally:
        memory.set_policy(before)
    assert memory.get_policy() == before


def config(**changes: object) -> SimpleNamespace:
    defaults = {"local_world_size": 1, "data_parallel_size_local": 1, "data_parallel_rank_local": None, "nnodes": 1}
    defaults["assigned_physical_gpu_ids"] = None
    return SimpleNamespace(**{**defaults, "distributed_executor_backend": "mp", **changes})


def test_engines_get_nodes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(machines.kunpeng920(), tmp_path)
    for variable in ("VAC_BIND", "VAC_THREADS", envs.LOCAL_ENGINES):
        monkeypatch.delenv(variable, raising=False)
    assert engine_plan.plan_engine(config(), found)[0].threads.num_threads == 191
    first = config(local_world_size=2, data_parallel_size_local=2)
    assert [entry.node for entry in engine_plan.plan_engine(first, found)] == [0, 1]
    second = config(local_world_size=2, data_parallel_size_local=2, data_parallel_rank_local=1)
    assert [entry.node for entry in engine_plan.plan_engine(second, found)] == [2, 3]
    # Engines of dense models are told that they are alone; the environment knows better.
    engine_plan.remember_engines(config(data_parallel_size_local=4))
    assert os.environ[envs.LOCAL_ENGINES] == "4"
    alone = config(data_parallel_rank_local=3)
    engine_plan.remember_engines(alone)
    assert [entry.node for entry in engine_plan.plan_engine(alone, found)] == [3]
    engine_plan.remember_engines(config())
    assert envs.LOCAL_ENGINES not in os.environ


def test_ranks_of_another_launcher(tmp_path: Path) -> None:
    """Sixteen ranks, of which nobody knows how many are on this machine."""
    found = read(machines.small_cgroup(), tmp_path)
    (only,) = engine_plan.plan_engine(config(local_world_size=16, distributed_executor_backend="ray"), found)
    assert only.threads.cpus == (5, 17, 90)


def test_ranks_of_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray was told how many ranks a machine takes, and numbers them; other engines may have the other numbers."""
    nodes = [{"NodeID": "there", "Resources": {"GPU": 8.0}}, {"NodeID": "here", "Resources": {"GPU": 4.0, "CPU": 3.0}}]
    context = SimpleNamespace(get_node_id=lambda: "here")
    ray = SimpleNamespace(is_initialized=lambda: True, nodes=lambda: nodes, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    found = read(machines.kunpeng920(), tmp_path)
    for variable in ("VAC_BIND", "VAC_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    for assigned, expected in (([1, 3], [1, 3]), ([2], [2]), (None, [0, 1, 2, 3]), ([9], [0, 1, 2, 3])):
        ranks = config(local_world_size=16, distributed_executor_backend="ray", assigned_physical_gpu_ids=assigned)
        assert [entry.node for entry in engine_plan.plan_engine(ranks, found)] == expected
    # A machine that offers nothing by that name, and a process without Ray.
    nodes[1]["Resources"] = {"CPU": 3.0}
    assert [entry.threads.num_threads for entry in engine_plan.plan_engine(ranks, found)] == [191]
    ray.is_initialized = lambda: False
    assert len(engine_plan.plan_machine(ranks, found)) == 1


def test_executor_is_for_several_ranks_of_one_machine() -> None:
    assert engine_plan.executor_backend(config()) is None
    assert engine_plan.executor_backend(config(local_world_size=2)) == engine_plan.EXECUTOR_CLASS
    assert engine_plan.executor_backend(config(local_world_size=2, nnodes=2)) is None
    assert engine_plan.executor_backend(config(local_world_size=2, distributed_executor_backend="ray")) is None
