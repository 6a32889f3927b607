"""vllm_arm_cpu.doctor and cli: what is found wrong, how it is told, exit status."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit import machines
from vllm_arm_cpu import cli, doctor
from vllm_arm_cpu.runtime import cpu, memory, preload

TORCH = {
    "onednn": "3.12.0",
    "acl": True,
    "kleidiai": {"library": "/torch/lib/libtorch_cpu.so", "missing": [], "features": ["dotprod"], "error": None},
    "openmp": ["/lib/libgomp.so.1"],
    "openmp_lse": {"/lib/libgomp.so.1": True},
    "allocators": ["/lib/libmimalloc.so"],
}
LIBVAC = {"version": "0.1.0", "tier": "bf16_i8mm"}
FEATURES = "fp asimd atomics fphp asimdhp asimddp asimdfhm bf16 i8mm"


class EntryPoint:
    name = "arm_cpu"
    value = "vllm_arm_cpu:register"


class Healthy:
    """A Graviton4 on which all is well, until a test changes something."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = machines.write(machines.graviton4(), root)
        (root / "dev/shm").mkdir(parents=True)
        self.features(FEATURES)
        self.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
        self.environ = {"VAC_LIBRARY_DIR": str(root)}
        self.write("libmimalloc.so", "")
        self.write("libgomp.so.1", "")
        self.answers: dict[str, dict[str, Any]] = {"_torch_report": dict(TORCH), "_libvac_report": dict(LIBVAC)}
        self.child_environ: Mapping[str, str] = {}
        self.patch = monkeypatch
        self.shm = memory.SharedMemory(1 << 30, 1 << 30)
        detect = cpu.detect
        monkeypatch.setattr(cpu, "detect", lambda root: detect(root, machine="aarch64"))
        monkeypatch.setattr(preload, "probe_libraries", lambda paths, environ: "")
        monkeypatch.setattr(memory, "mempolicy_error", lambda: 0)
        monkeypatch.setattr(memory, "read_shared_memory", lambda root: self.shm)
        monkeypatch.setattr(doctor, "_version", lambda *names: "1.0")
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [EntryPoint])
        monkeypatch.setattr("vllm_arm_cpu.check_environment", lambda: None, raising=False)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def features(self, names: str) -> None:
        self.write("proc/cpuinfo", f"Features\t: {names}")

    def ask(self, function: str, environ: Mapping[str, str]) -> dict[str, Any]:
        self.child_environ = environ
        return self.answers[function]

    def collect(self) -> dict[str, Any]:
        return doctor.collect(self.root, self.environ, self.ask)

    def problems(self) -> dict[str, dict[str, str]]:
        return {item["id"]: item for item in self.collect()["problems"]}

    def notes(self) -> dict[str, dict[str, str]]:
        report = self.collect()
        assert not report["problems"]
        return {item["id"]: item for item in report["notes"]}


@pytest.fixture
def healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Healthy:
    return Healthy(tmp_path, monkeypatch)


def test_nothing_is_wrong(healthy: Healthy) -> None:
    report = healthy.collect()
    assert report["problems"] == []
    assert report["notes"] == []
    assert report["cpu"]["name"] == "Neoverse V2"
    assert report["cpu"]["tier"] == "bf16_i8mm"
    # One core is the API server's.
    assert report["threads"]["cpus"] == tuple(range(95))
    assert [item["usable"] for item in report["preload"]] == [True, True]
    # What is asked about libraries is asked under the conditions of vLLM's processes.
    assert healthy.child_environ["LD_PRELOAD"].endswith("libgomp.so.1")
    assert "LD_PRELOAD" not in healthy.environ
    text = doctor.render(report)
    for part in ("Neoverse V2", "95 on CPUs 0-94, pinned", "LSE atomics", "0.1.0, tier bf16_i8mm", "Nothing is wrong."):
        assert part in text


def test_json_round_trip(healthy: Healthy) -> None:
    assert json.loads(json.dumps(healthy.collect()))["cpu"]["part"] == 0xD4F


@pytest.mark.parametrize(
    ("environ", "id", "message", "fix"),
    [
        ({"VLLM_TARGET_DEVICE": "cpu"}, "target-device", "VLLM_TARGET_DEVICE=cpu", "unset VLLM_TARGET_DEVICE"),
        ({"VAC_THREADS": "x"}, "env-invalid", "VAC_THREADS='x'", "unset VAC_THREADS"),
        ({"VAC_BIND": "500"}, "env-invalid", "CPUs among 0-95", "unset VAC_BIND"),
        ({"VAC_TREADS": "4"}, "env-unknown", "did you mean VAC_THREADS?", "unset VAC_TREADS"),
        ({"VLLM_PLUGINS": "lora"}, "plugins-filter", "leaves out arm_cpu", "export VLLM_PLUGINS=lora,arm_cpu"),
        ({"VLLM_PLUGINS": ""}, "plugins-filter", "leaves out arm_cpu", "export VLLM_PLUGINS=arm_cpu"),
        (
            {"LD_PRELOAD": "/a/libgomp.so.1:/b/libomp.so"},
            "preload-twice",
            "several OpenMP runtimes: /a/libgomp.so.1, /b/libomp.so",
            "export LD_PRELOAD=/a/libgomp.so.1",
        ),
        ({"LD_PRELOAD": "libtcmalloc.so libjemalloc.so"}, "preload-twice", "several allocators", "export LD_PRELOAD="),
    ],
)
def test_environment(environ: dict[str, str], id: str, message: str, fix: str, healthy: Healthy) -> None:
    healthy.environ.update(environ)
    found = healthy.problems()
    assert list(found) == [id]
    assert message in found[id]["message"]
    assert fix in found[id]["fix"]


def test_plugin_among_others(healthy: Healthy) -> None:
    healthy.environ["VLLM_PLUGINS"] = "lora,arm_cpu"
    assert healthy.problems() == {}


def test_not_installed(healthy: Healthy) -> None:
    healthy.patch.setattr("importlib.metadata.entry_points", lambda group: [])
    assert "not-installed" in healthy.problems()


@pytest.mark.parametrize(
    ("reason", "fix"),
    [("vLLM 0.40.0 is not supported", "pip install"), ("switched off by VAC_PLUGIN=0", "unset VAC_PLUGIN")],
)
def test_stepping_aside(reason: str, fix: str, healthy: Healthy) -> None:
    healthy.patch.setattr("vllm_arm_cpu.check_environment", lambda: reason, raising=False)
    found = healthy.problems()["steps-aside"]
    assert reason in found["message"]
    assert fix in found["fix"]


@pytest.mark.parametrize(
    ("shm", "id"),
    [
        (None, "shm-small"),
        (memory.SharedMemory(32 << 20, 32 << 20), "shm-small"),
        (memory.SharedMemory(1 << 30, 1 << 20), "shm-full"),
        (memory.SharedMemory(64 << 20, 60 << 20), None),
    ],
)
def test_shared_memory(shm: memory.SharedMemory | None, id: str | None, healthy: Healthy) -> None:
    healthy.patch.setattr(memory, "read_shared_memory", lambda root: shm)
    assert list(healthy.problems()) == ([id] if id else [])


def test_two_openmp_runtimes(healthy: Healthy) -> None:
    healthy.answers["_torch_report"]["openmp"] = ["/lib/libgomp.so.1", "/lib/libomp.so"]
    assert "/lib/libgomp.so.1, /lib/libomp.so" in healthy.problems()["openmp-twice"]["message"]


def test_old_libgomp_is_a_note(healthy: Healthy) -> None:
    healthy.answers["_torch_report"]["openmp_lse"] = {"/torch/libgomp.so.1": False}
    assert "no LSE atomics" in healthy.notes()["openmp-slow"]["message"]


def test_preload_that_fails(healthy: Healthy) -> None:
    healthy.patch.setattr(preload, "probe_libraries", lambda paths, environ: "libatomic.so.1: cannot open")
    found = healthy.problems()
    assert "libatomic.so.1" in found["preload"]["message"]
    assert "not preloaded: libatomic.so.1" in doctor.render(healthy.collect())


def test_preload_switched_off_is_no_fault(healthy: Healthy) -> None:
    healthy.environ["VAC_PRELOAD"] = "0"
    assert healthy.problems() == {}


def test_broken_libraries(healthy: Healthy) -> None:
    healthy.answers["_libvac_report"] = {"error": "the process died of SIGBUS"}
    healthy.answers["_torch_report"] = {"error": "No module named 'torch'"}
    found = healthy.problems()
    assert "SIGBUS" in found["libvac"]["message"]
    assert "No module named" in found["torch"]["message"]
    doctor.render(healthy.collect())


def test_memory_policy(healthy: Healthy) -> None:
    healthy.patch.setattr(memory, "mempolicy_error", lambda: errno.EPERM)
    assert "SYS_NICE" in healthy.notes()["mempolicy"]["fix"]
    machines.write(machines.kunpeng920(), healthy.root)
    assert "mempolicy" in healthy.problems()


def test_no_huge_pages(healthy: Healthy) -> None:
    healthy.write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]")
    assert "echo madvise" in healthy.notes()["huge-pages"]["fix"]
    healthy.environ["VAC_HUGE_PAGES"] = "0"
    assert healthy.notes() == {}


def test_openmp_variables_give_way(healthy: Healthy) -> None:
    healthy.environ["OMP_NUM_THREADS"] = "1"
    assert "OMP_NUM_THREADS" in healthy.notes()["omp-variables"]["message"]


def test_no_bf16(healthy: Healthy) -> None:
    healthy.features("fp asimd atomics fphp asimdhp asimddp")
    assert list(healthy.notes()) == ["no-bf16"]


def test_old_cpu(healthy: Healthy) -> None:
    healthy.features("fp asimd")
    found = healthy.collect()
    assert [item["id"] for item in found["problems"]] == ["cpu-old"]
    assert not any(item["usable"] for item in found["preload"])


def test_other_machine(healthy: Healthy) -> None:
    healthy.patch.setattr(cpu, "detect", lambda root: cpu.CpuInfo("x86_64", None, None, "unknown", (), "none"))
    assert list(healthy.problems()) == ["machine"]


@pytest.mark.parametrize("name", machines.ALL)
def test_every_machine_renders(name: str, healthy: Healthy) -> None:
    machines.write(machines.ALL[name](), healthy.root)
    assert doctor.render(healthy.collect())


@pytest.mark.skipif(not machines.can_start_processes(), reason="the emulator cannot start processes here")
class TestChild:
    """The processes that are asked about libraries."""

    @pytest.fixture(autouse=True)
    def _function(self, tmp_path: Path) -> None:
        # Stands before the installed packages, so that the child finds it as torch.
        (tmp_path / "torch.py").write_text("import os\nprint('noise')\nexec(os.environ['TORCH'])\n")
        self.environ = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def ask(self, code: str) -> dict[str, Any]:
        return doctor._ask_child("_torch_report", {**self.environ, "TORCH": code})

    def test_crash(self) -> None:
        assert self.ask("import signal; os.kill(os.getpid(), signal.SIGSEGV)") == {
            "error": "the process died of SIGSEGV"
        }

    def test_exception(self) -> None:
        assert self.ask("raise ImportError('libcudart.so')") == {"error": "ImportError: libcudart.so"}

    def test_silent_end(self) -> None:
        assert self.ask("os._exit(0)") == {"error": "the process ended with status 0"}

    def test_timeout(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "_CHILD_TIMEOUT", 0.5)
        assert "timed out" in self.ask("import time; time.sleep(60)")["error"]


def test_exit_status_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], healthy: Healthy
) -> None:
    good = healthy.collect()
    healthy.environ["VLLM_TARGET_DEVICE"] = "cpu"
    bad = healthy.collect()
    for report, status in ((good, 0), (bad, 1)):
        monkeypatch.setattr(doctor, "collect", lambda report=report: report)
        assert cli.main(["doctor"]) == status
        capsys.readouterr()
        assert cli.main(["doctor", "--json"]) == status
        assert json.loads(capsys.readouterr().out)["cpu"]["tier"] == "bf16_i8mm"


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage:" in capsys.readouterr().err
    assert cli.main(["frobnicate"]) == 2
    assert "unknown command 'frobnicate'" in capsys.readouterr().err
    assert cli.main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0


def test_bench_is_another_module_s(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = ModuleType("vllm_arm_cpu.bench")
    module.main = lambda arguments: len(arguments)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm_arm_cpu.bench", module)
    assert cli.main(["bench", "a", "b"]) == 2


def test_bench_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def absent(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(cli.importlib, "import_module", absent)
    assert cli.main(["bench"]) == 2
    assert "bench is not part of this installation" in capsys.readouterr().err


def test_nodes_cores_and_ranks_are_drawn(healthy: Healthy) -> None:
    report = healthy.collect()
    assert report["ranks"]["count"] == 1
    assert "Nodes, cores and ranks: one rank" in doctor.render(report)
    machines.write(machines.altra_two_sockets(), healthy.root)
    text = doctor.render(healthy.collect())
    assert "Nodes, cores and ranks: vllm serve --tensor-parallel-size 2" in text
    assert "  node 1           [ rank 1: 80-159 ]  256 GiB, distances 20 10" in text
    healthy.environ["VAC_BIND"] = "0-3|4-7|80-83"
    report = healthy.collect()
    assert report["problems"] == []
    assert report["threads"]["cpus"] == (0, 1, 2, 3)
    assert "[ rank 0: 0-3 | rank 1: 4-7 | idle: 8-79 ]" in doctor.render(report)
    healthy.environ = {"VAC_LIBRARY_DIR": str(healthy.root), "VAC_THREADS": "100"}
    assert "VAC_THREADS" in healthy.collect()["ranks"]["picture"][0][1]
