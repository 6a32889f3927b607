"""vllm_arm_cpu.runtime.threads: plans for real machines, and how they are applied."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit import machines
from tests.unit.machines import cpus
from vllm_arm_cpu.envs import THREAD_PLAN, EnvError
from vllm_arm_cpu.runtime import threads, topology
from vllm_arm_cpu.runtime.threads import ThreadPlan

PROJECT = Path(__file__).parents[2]


def plan(machine: machines.Machine, tmp_path: Path, node: int | None = None, **environ: str) -> ThreadPlan:
    return threads.plan_threads(topology.read(machines.write(machine, tmp_path)), environ, node)


@pytest.mark.parametrize("name", machines.ALL)
@pytest.mark.parametrize("node", [None, 0, 1, 2, 3, 7])
def test_never_empty_one_per_core(name: str, node: int | None, tmp_path: Path) -> None:
    found = topology.read(machines.write(machines.ALL[name](), tmp_path))
    result = threads.plan_threads(found, {}, node)
    assert result.cpus
    assert set(result.cpus) <= set(found.allowed)
    assert len(found.cores(result.cpus)) == len(result.cpus) == len(set(result.cpus))
    assert result.nodes == tuple(sorted({found.node_of(cpu) for cpu in result.cpus}))


@pytest.mark.parametrize(
    ("name", "expected", "nodes"),
    [
        ("graviton4", "0-95", (0,)),
        ("graviton4_two_sockets", "0-191", (0, 1)),
        ("grace", "0-71", (0,)),
        ("dual_grace", "0-143", (0, 1)),
        ("altra_two_sockets", "0-159", (0, 1)),
        ("kunpeng920", "0-191", (0, 1, 2, 3)),
        ("smt2", "0-31", (0, 1)),
        ("small_cgroup", "5,17,90", (0,)),
        ("quota", "0-2", (0,)),
        ("node_without_memory", "0-159", (0, 1)),
        ("offline_cores", "0,2,4,6,8,10,12,14", (0, 2)),
        ("without_numa", "0-7", (0,)),
    ],
)
def test_default_plan(name: str, expected: str, nodes: tuple[int, ...], tmp_path: Path) -> None:
    result = plan(machines.ALL[name](), tmp_path)
    assert result.cpus == cpus(expected)
    assert result.nodes == nodes
    assert result.pin


def test_one_node(tmp_path: Path) -> None:
    assert plan(machines.kunpeng920(), tmp_path, node=2).cpus == cpus("96-143")


def test_taskset_onto_the_other_node(tmp_path: Path) -> None:
    # vLLM issue 43240: node 0 was taken although the mask allows node 1 only, and no thread was left.
    machine = machines.altra_two_sockets()
    machine.affinity = range(80, 160)
    result = plan(machine, tmp_path, node=0)
    assert result.cpus == cpus("80-159")
    assert result.nodes == (1,)
    assert any("no usable CPU on node 0: node 1 instead" in reason for reason in result.reasons)


def test_nearest_node_takes_the_place(tmp_path: Path) -> None:
    machine = machines.kunpeng920()
    machine.affinity = range(48, 144)
    assert plan(machine, tmp_path, node=3).nodes == (2,)
    assert plan(machine, tmp_path, node=0).nodes == (1,)


def test_memory_only_node(tmp_path: Path) -> None:
    assert plan(machines.grace(), tmp_path, node=5).cpus == cpus("0-71")


def test_smt_siblings_in_the_mask_only(tmp_path: Path) -> None:
    machine = machines.smt2()
    machine.affinity = [33, 2, 34, 60]
    assert plan(machine, tmp_path).cpus == (2, 33, 60)


def test_quota_is_a_reason(tmp_path: Path) -> None:
    result = plan(machines.quota("250000 100000"), tmp_path)
    assert result.num_threads == 3
    assert any("quota of 2.5" in reason for reason in result.reasons)


def test_quota_larger_than_the_mask(tmp_path: Path) -> None:
    machine = machines.quota("9000000 100000")
    machine.affinity = [1, 2]
    assert plan(machine, tmp_path).cpus == (1, 2)


def test_fewer_threads_stay_on_one_node(tmp_path: Path) -> None:
    machine = machines.altra_two_sockets()
    machine.affinity = [*range(4), *range(80, 160)]
    assert plan(machine, tmp_path, VAC_THREADS="40").cpus == cpus("80-119")
    assert plan(machine, tmp_path, VAC_THREADS="3").cpus == (0, 1, 2)
    assert plan(machine, tmp_path, VAC_THREADS="82").cpus == (0, 1, *range(80, 160))


def test_more_threads_than_cores(tmp_path: Path) -> None:
    result = plan(machines.smt2(), tmp_path, VAC_THREADS="34")
    assert sorted(result.cpus) == [*range(32), 32, 33]


def test_explicit_threads_beat_the_quota(tmp_path: Path) -> None:
    result = plan(machines.quota("200000 100000"), tmp_path, VAC_THREADS="8")
    assert result.num_threads == 8
    assert any("more threads than the cgroup's CPU quota" in reason for reason in result.reasons)


def test_bind_keeps_its_order(tmp_path: Path) -> None:
    result = plan(machines.graviton4(), tmp_path, VAC_BIND="40-42,7")
    assert result.cpus == (40, 41, 42, 7)
    assert result.pin


def test_bind_and_threads(tmp_path: Path) -> None:
    assert plan(machines.graviton4(), tmp_path, VAC_BIND="40-47", VAC_THREADS="2").cpus == (40, 41)


def test_bind_and_node(tmp_path: Path) -> None:
    assert plan(machines.kunpeng920(), tmp_path, node=1, VAC_BIND="40-60").cpus == cpus("48-60")
    assert plan(machines.kunpeng920(), tmp_path, node=3, VAC_BIND="40-60").cpus == cpus("40-47")


def test_bind_none(tmp_path: Path) -> None:
    result = plan(machines.graviton4(), tmp_path, VAC_BIND="none", VAC_THREADS="4")
    assert result.num_threads == 4
    assert not result.pin


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"VAC_BIND": "0-3"}, r"VAC_BIND='0-3' cannot be used; allowed: auto, none, or CPUs among 5,17,90"),
        ({"VAC_BIND": "5,500"}, r"VAC_BIND='5,500' .* 5,17,90"),
        ({"VAC_THREADS": "4"}, r"VAC_THREADS='4' .* 1 to 3 \(CPUs 5,17,90\)"),
        ({"VAC_BIND": "5,17", "VAC_THREADS": "3"}, r"VAC_THREADS='3' .* 1 to 2 \(CPUs 5,17\)"),
        ({"VAC_THREADS": "many"}, "VAC_THREADS='many'"),
    ],
)
def test_what_is_not_allowed_is_named(environ: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=message):
        plan(machines.small_cgroup(), tmp_path, **environ)


def test_export_and_inherit() -> None:
    made = ThreadPlan((5, 17, 90), (0, 1))
    environ = {"GOMP_CPU_AFFINITY": "0", "OMP_NUM_THREADS": "1"}
    threads.export(made, environ)
    assert environ["OMP_NUM_THREADS"] == "3"
    assert environ["OMP_PLACES"] == "{5},{17},{90}"
    assert environ["OMP_PROC_BIND"] == "close"
    assert "GOMP_CPU_AFFINITY" not in environ
    found = threads.inherited(environ)
    assert found is not None
    assert (found.cpus, found.nodes, found.pin) == ((5, 17, 90), (0, 1), True)


def test_export_without_pinning() -> None:
    environ = {"OMP_PLACES": "cores"}
    threads.export(ThreadPlan((1, 2), (0,), pin=False), environ)
    assert environ["OMP_PLACES"] == "cores"
    assert "OMP_PROC_BIND" not in environ
    found = threads.inherited(environ)
    assert found is not None
    assert not found.pin


@pytest.mark.parametrize("text", ["", "x", "1;2", "a;0;1", ";0;1"])
def test_damaged_plan_is_not_inherited(text: str) -> None:
    assert threads.inherited({THREAD_PLAN: text}) is None


def test_started_with_asks_the_kernel(tmp_path: Path) -> None:
    made = ThreadPlan((0, 1), (0,))
    (tmp_path / "proc/self").mkdir(parents=True)
    environ: dict[str, str] = {}
    threads.export(made, environ)
    (tmp_path / "proc/self/environ").write_bytes(b"\0".join(f"{k}={v}".encode() for k, v in environ.items()))
    assert threads.started_with(made, tmp_path)
    assert not threads.started_with(ThreadPlan((0, 2), (0,)), tmp_path)
    assert not threads.started_with(made, tmp_path / "nothing")


def test_apply_calls_what_it_is_given(tmp_path: Path) -> None:
    mask = tuple(sorted(os.sched_getaffinity(0)))
    calls: list[object] = []

    def pin(order: Sequence[int]) -> None:
        calls.append(tuple(order))
        # As a region would: thread 0 is the caller.
        os.sched_setaffinity(0, {order[0]})

    try:
        result = threads.apply(ThreadPlan(mask, (0,)), calls.append, pin, tmp_path)
        assert calls == [len(mask), mask]
        assert os.sched_getaffinity(0) == set(mask), "later threads must not inherit one CPU"
        assert "pinned in the running process" in result.reasons[-1]
    finally:
        os.sched_setaffinity(0, mask)


def test_apply_without_pinning(tmp_path: Path) -> None:
    calls: list[object] = []
    threads.apply(ThreadPlan((0,), (0,), pin=False), calls.append, calls.append, tmp_path)
    assert calls == [1]


def _libgomp() -> bool:
    try:
        ctypes.CDLL("libgomp.so.1")
    except OSError:
        return False
    return True


# Prints the affinity of each thread of a team, as its members see it.
SHOW = """
import ctypes, os, sys
from vllm_arm_cpu.runtime import threads
gomp = ctypes.CDLL("libgomp.so.1")
plan = threads.ThreadPlan(tuple(int(cpu) for cpu in sys.argv[1].split(",")), (0,))
print(threads.apply(plan, gomp.omp_set_num_threads).reasons[-1])
seen = {}
body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
    lambda _: seen.__setitem__(gomp.omp_get_thread_num(), sorted(os.sched_getaffinity(0))))
gomp.GOMP_parallel(body, None, 0, 0)
print([seen[i] for i in sorted(seen)])
"""


@pytest.mark.skipif(not _libgomp(), reason="no libgomp.so.1 here")
@pytest.mark.skipif(not machines.can_start_processes(), reason="the emulator cannot start processes here")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("exported", [False, True])
def test_a_real_team(exported: bool) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")]))
    for name in ("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY"):
        environ.pop(name, None)
    if exported:
        threads.export(ThreadPlan((second, first), (0,)), environ)
    done = subprocess.run(
        [sys.executable, "-c", SHOW, f"{second},{first}"], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    how, masks = done.stdout.splitlines()
    if exported:
        assert "started with these places" in how
        assert masks == f"[[{second}], [{first}]]"
    else:
        # Thread 0 keeps the whole plan; see threads.apply().
        assert "pinned in the running process" in how
        assert masks == f"[[{first}, {second}], [{first}]]"


# libgomp ends the surplus threads of a smaller team and makes new ones for the next larger.
SHRINK = """
import ctypes, os, sys
from vllm_arm_cpu.runtime import threads
gomp = ctypes.CDLL("libgomp.so.1")
def team(count):
    seen = {}
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        lambda _: seen.__setitem__(gomp.omp_get_thread_num(), sorted(os.sched_getaffinity(0))))
    gomp.GOMP_parallel(body, None, count, 0)
    return [seen[i] for i in range(count)]
threads.apply(threads.inherited() or threads.ThreadPlan(eval(sys.argv[1]), (0,)))
team(2)
print(team(4))
"""


@pytest.mark.skipif(not _libgomp(), reason="no libgomp.so.1 here")
@pytest.mark.skipif(not machines.can_start_processes(), reason="the emulator cannot start processes here")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("exported", [False, True])
def test_threads_made_anew_are_not_piled_up(exported: bool) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    order = (first, first, second, second)
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")]))
    for name in ("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY"):
        environ.pop(name, None)
    if exported:
        threads.export(ThreadPlan(order, (0,)), environ)
    done = subprocess.run(
        [sys.executable, "-c", SHRINK, repr(order)], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    masks = eval(done.stdout)
    if exported:
        assert masks == [[cpu] for cpu in order]
    else:
        # They have lost their own CPU, but not to a single one.
        assert all(mask == [first, second] for mask in masks[2:])


def test_pin_without_libgomp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.preload, "mapped_libraries", lambda: threads.preload.Mapped((), ()))
    monkeypatch.setattr(ctypes, "CDLL", _refuse)
    with pytest.raises(RuntimeError, match="no libgomp is loaded"):
        threads.pin_openmp_threads([0])


def _refuse(*_: object, **__: object) -> None:
    raise OSError("not loaded")
