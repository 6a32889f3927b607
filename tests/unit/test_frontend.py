"""vllm_arm_cpu.runtime.frontend: which cores the API server gets, and how its process gets there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit import machines
from tests.unit.machines import cpus
from vllm_arm_cpu import envs
from vllm_arm_cpu.envs import EnvError
from vllm_arm_cpu.runtime import frontend, numa, threads, topology
from vllm_arm_cpu.runtime.topology import Topology

PROJECT = Path(__file__).parents[2]


def machine(name: str, tmp_path: Path) -> Topology:
    return topology.read(machines.write(machines.ALL[name](), tmp_path))


@pytest.mark.parametrize(
    ("name", "apart", "compute"),
    [
        ("graviton4", "95", "0-94"),
        ("graviton4_two_sockets", "191", "0-190"),
        ("grace", "71", "0-70"),
        ("kunpeng920", "191", "0-190"),
        # Both threads of the core.
        ("smt2", "31,63", "0-30"),
    ],
)
def test_one_core_of_many(name: str, apart: str, compute: str, tmp_path: Path) -> None:
    found = machine(name, tmp_path)
    assert frontend.reserved(found, {}) == cpus(apart)
    plan = frontend.plan_threads(found, {})
    assert plan.cpus == cpus(compute)
    assert plan.reasons == (f"CPUs {apart} left to the API server",)
    assert frontend.cpus(found, [plan]) == cpus(apart)


@pytest.mark.parametrize("name", ["small_cgroup", "offline_cores", "without_numa"])
def test_none_of_few(name: str, tmp_path: Path) -> None:
    """Where a core is a good part of all, the API server goes where there is room."""
    found = machine(name, tmp_path)
    assert frontend.reserved(found, {}) == ()
    assert frontend.for_compute(found, {}) is found
    assert frontend.plan_threads(found, {}) == threads.plan_threads(found, {})
    assert frontend.cpus(found, [threads.plan_threads(found, {})]) == found.allowed


@pytest.mark.parametrize("name", machines.ALL)
@pytest.mark.parametrize("cores", ["auto", "0", "1", "2"])
def test_nothing_computes_where_the_frontend_is(name: str, cores: str, tmp_path: Path) -> None:
    found, environ = machine(name, tmp_path), {"VAC_FRONTEND_CORES": cores}
    plan = frontend.plan_threads(found, environ)
    free = frontend.cpus(found, [plan])
    assert plan.cpus
    assert set(free) <= set(found.allowed)
    if cores in "12":
        assert len(found.cores(frontend.reserved(found, environ))) == int(cores)
    if free != found.allowed:
        siblings = {sibling for cpu in plan.cpus for sibling in found.siblings[cpu]}
        assert not siblings & set(free)
    # Ranks on nodes of their own are planned on the same CPUs.
    for node in found.nodes:
        if node.cpus:
            rank = threads.plan_threads(frontend.for_compute(found, environ), environ, node.id)
            assert not set(rank.cpus) & set(frontend.reserved(found, environ))


@pytest.mark.parametrize(
    ("environ", "apart", "free"),
    [
        ({"VAC_FRONTEND_CORES": "0"}, (), "0-95"),
        ({"VAC_FRONTEND_CORES": "4"}, cpus("92-95"), "92-95"),
        ({"VAC_THREADS": "96"}, (), "0-95"),
        # What the user's own choice leaves is the API server's.
        ({"VAC_THREADS": "90"}, (), "90-95"),
        ({"VAC_BIND": "8-95"}, (), "0-7"),
        ({"VAC_BIND": "0-95"}, (), "0-95"),
        ({"VAC_BIND": "8-95", "VAC_FRONTEND_CORES": "2"}, (), "0-7"),
        ({"VAC_BIND": "none"}, (), "0-95"),
        ({"VAC_THREADS": "90", "VAC_FRONTEND_CORES": "2"}, cpus("94-95"), "90-95"),
    ],
)
def test_settings(environ: dict[str, str], apart: tuple[int, ...], free: str, tmp_path: Path) -> None:
    found = machine("graviton4", tmp_path)
    assert frontend.reserved(found, environ) == apart
    assert frontend.cpus(found, [frontend.plan_threads(found, environ)]) == cpus(free)


def test_a_quota_leaves_cores_by_itself(tmp_path: Path) -> None:
    found = machine("quota", tmp_path)
    assert frontend.reserved(found, {}) == ()
    assert frontend.plan_threads(found, {}).cpus == cpus("0-2")
    assert frontend.cpus(found, [frontend.plan_threads(found, {})]) == cpus("3-95")


def test_impossible_settings_are_named(tmp_path: Path) -> None:
    found = machine("small_cgroup", tmp_path)
    with pytest.raises(EnvError, match=r"VAC_FRONTEND_CORES='3'.* 0 to 2: one core has to compute"):
        frontend.plan_threads(found, {"VAC_FRONTEND_CORES": "3"})
    with pytest.raises(EnvError, match=r"VAC_THREADS='3'.* 1 to 2 \(CPUs 5,17\)"):
        frontend.plan_threads(found, {"VAC_FRONTEND_CORES": "1", "VAC_THREADS": "3"})
    with pytest.raises(EnvError, match="VAC_FRONTEND_CORES='some'"):
        frontend.reserved(found, {"VAC_FRONTEND_CORES": "some"})


def test_more_api_servers_than_cores_stay_free(tmp_path: Path) -> None:
    found, environ = machine("graviton4", tmp_path), {}
    assert frontend.enter(found, [frontend.plan_threads(found, environ)], 2, environ) is None
    assert environ == {}


def test_several_ranks(tmp_path: Path) -> None:
    """They have equal numbers of cores; what the user sets apart is nobody's."""
    found = machine("graviton4", tmp_path)
    plans = [plan.threads for plan in numa.plan_ranks(found, 2, {})]
    assert [plan.num_threads for plan in plans] == [48, 48]
    assert frontend.cpus(found, plans) == found.allowed
    plans = [plan.threads for plan in numa.plan_ranks(found, 2, {"VAC_FRONTEND_CORES": "2"})]
    assert frontend.cpus(found, plans) == cpus("94-95")
    plans = [plan.threads for plan in numa.plan_ranks(found, 2, {"VAC_BIND": "0-39|40-79"})]
    assert frontend.cpus(found, plans) == cpus("80-95")


IN_A_PROCESS = """
import os, subprocess, sys, threading
from vllm_arm_cpu.runtime import frontend, topology

allowed = os.sched_getaffinity(0)
go = threading.Event()
helper = threading.Thread(target=go.wait)
helper.start()
counts = []
machine = topology.read()
plan = frontend.plan_threads(machine)
free = frontend.enter(machine, [plan], set_num_threads=counts.append)
masks = {frozenset(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
assert free and masks == {frozenset(free)}, (free, masks)
assert counts == [len(machine.cores(free))]
assert not set(free) & set(frontend.plan_threads(machine).cpus)
# Another engine of this process is planned as the first one was.
assert topology.read().allowed == free
assert frontend.read().allowed == machine.allowed
assert frontend.plan_threads(frontend.read()) == frontend.plan_threads(machine)
# A child, such as an engine that is started later, plans on all CPUs.
child = "import os; from vllm_arm_cpu.runtime import frontend as f; f.leave(); print(len(os.sched_getaffinity(0)))"
printed = subprocess.run([sys.executable, "-c", child], check=True, stdout=subprocess.PIPE, text=True).stdout
assert int(printed) == len(allowed), printed
frontend.leave()
masks = {frozenset(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
assert masks == {frozenset(allowed)}, masks
frontend.leave()
go.set()
print("done")
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: there is nothing to set apart")
@pytest.mark.skipif(not machines.can_start_processes(), reason="this Python cannot start itself here")
def test_a_process_goes_there_and_back() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("VAC_")}
    environ |= {"VAC_FRONTEND_CORES": "1", "PYTHONPATH": f"{PROJECT}:{os.environ.get('PYTHONPATH', '')}"}
    assert envs.AFFINITY not in environ
    result = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS], env=environ, capture_output=True, text=True, timeout=120
    )
    assert result.stdout == "done\n", result.stderr
