"""What the server's processes are made of: libraries, threads, environment; read from /proc, never assumed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.e2e.conftest import USER_LIBRARY
from tests.e2e.server import Server, process_environ
from vllm_arm_cpu.envs import parse_cpu_list
from vllm_arm_cpu.runtime import frontend, preload, topology

LIBRARIES = Path(preload.__file__).resolve().parents[1] / "lib"
OUR_LIBGOMP = str(LIBRARIES / "libgomp.so.1")
OUR_MIMALLOC = str(LIBRARIES / "libmimalloc.so")


def engine_core(server: Server) -> int:
    pid = server.engine_core()
    assert pid is not None
    return pid


def cpus_of_threads(pid: int) -> dict[int, set[int]]:
    """CPUs that each thread of a process may run on."""
    found = {}
    for task in (Path("/proc") / str(pid) / "task").iterdir():
        fields = dict(line.partition(":")[::2] for line in (task / "status").read_text().splitlines())
        found[int(task.name)] = set(parse_cpu_list(fields["Cpus_allowed_list"].strip()))
    return found


def test_one_process_for_one_rank(servers: tuple[Server, Server]) -> None:
    """The worker lives in the EngineCore: beside it there is the API server, and Python's resource tracker."""
    for server in servers:
        pids = server.processes()
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in pids}
        trackers = [pid for pid, command in commands.items() if "resource_tracker" in command]
        assert set(pids) - set(trackers) == {server.pid, engine_core(server)}, commands


def test_engine_core_maps_our_libraries(servers: tuple[Server, Server]) -> None:
    """One OpenMP runtime for torch and us, and one allocator, both ours: no libgomp of torch's, no tcmalloc."""
    for server in servers:
        mapped = preload.mapped_libraries(engine_core(server))
        assert mapped.allocators == (OUR_MIMALLOC,)
        assert mapped.openmp[0] == OUR_LIBGOMP
        # Wheels such as sentencepiece's bring a copy under a name of its own, which nobody else is linked to.
        private = re.compile(r"/(\w+)\.libs/libgomp-[0-9a-f]+\.so\.[0-9.]+$")
        others = [private.search(path) for path in mapped.openmp[1:]]
        assert all(match and match[1] != "torch" for match in others), mapped.openmp


def test_every_child_is_preloaded(servers: tuple[Server, Server]) -> None:
    for server in servers:
        for pid in server.processes():
            if pid != server.pid:
                assert preload.mapped_libraries(pid).allocators == (OUR_MIMALLOC,)
                assert preload.not_mapped(pid=pid) == []


def test_preload_as_most_users_have_it(server: Server) -> None:
    assert process_environ(server.pid).get("LD_PRELOAD", "") == ""
    assert process_environ(engine_core(server))["LD_PRELOAD"] == f"{OUR_MIMALLOC}:{OUR_LIBGOMP}"


def test_a_preload_of_the_user_is_kept(servers: tuple[Server, Server]) -> None:
    """Behind ours, and really loaded."""
    server = servers[1]
    if not process_environ(server.pid).get("LD_PRELOAD"):
        pytest.skip(f"{USER_LIBRARY} is not installed here")
    pid = engine_core(server)
    assert process_environ(pid)["LD_PRELOAD"] == f"{OUR_MIMALLOC}:{OUR_LIBGOMP}:{USER_LIBRARY}"
    assert os.path.realpath(USER_LIBRARY) in Path(f"/proc/{pid}/maps").read_text()


def test_no_complaints_about_the_preload(servers: tuple[Server, Server]) -> None:
    for server in servers:
        log = server.log()
        assert "cannot be preloaded" not in log
        assert "not preloaded into this process" not in log
        assert "tcmalloc" not in log


def test_threads_stay_where_they_may_run(servers: tuple[Server, Server]) -> None:
    """Within this process's mask: compute threads pinned one to a CPU, all others free to go where there is room."""
    allowed = os.sched_getaffinity(0)
    for server in servers:
        pid = engine_core(server)
        cpus = cpus_of_threads(pid)
        computing = allowed - set(frontend.reserved(topology.read(), process_environ(server.pid)))
        assert all(mask <= allowed for mask in cpus.values())
        # The first compute thread runs the model and starts helpers that inherit its mask: it is not pinned.
        assert cpus[pid] == computing
        if len(computing) > 1:
            helpers = [mask for mask in cpus.values() if mask in (allowed, computing)]
            pinned = [mask for mask in cpus.values() if len(mask) == 1]
            assert len(pinned) == len(computing) - 1
            assert set().union(*pinned) == computing - {min(computing)}
            assert len(pinned) + len(helpers) == len(cpus)


def test_api_server_keeps_off_the_cores_that_compute(servers: tuple[Server, Server]) -> None:
    """All of its threads, where a core is set aside; without one it goes where there is room."""
    allowed = os.sched_getaffinity(0)
    for server in servers:
        apart = set(frontend.reserved(topology.read(), process_environ(server.pid)))
        masks = list(cpus_of_threads(server.pid).values())
        assert all(mask == (apart or allowed) for mask in masks), masks
        assert ("API server: on CPUs" in server.log()) == bool(apart)
    if len(allowed) > 1:
        assert frontend.reserved(topology.read(), process_environ(servers[1].pid)) == (max(allowed),)


def test_process_groups_share_a_thread(servers: tuple[Server, Server]) -> None:
    """Each would wake up a hundred times a second, and there are a dozen groups of the one rank."""
    for server in servers:
        tasks = Path(f"/proc/{engine_core(server)}/task").iterdir()
        names = [(task / "comm").read_text().strip() for task in tasks]
        assert names.count("gloo_tcp_loop") <= 1, names


def test_threads_are_told_in_the_log(server: Server) -> None:
    (line,) = [line for line in server.log().splitlines() if "threads: " in line and " on CPUs " in line]
    apart = frontend.reserved(topology.read(), process_environ(server.pid))
    assert f"threads: {len(os.sched_getaffinity(0)) - len(apart)} on CPUs" in line


def test_shared_memory_is_small(servers: tuple[Server, Server]) -> None:
    """World size 1 exchanges nothing through shared memory."""
    assert sum(file.stat().st_size for file in Path("/dev/shm").iterdir()) < 1 << 20
