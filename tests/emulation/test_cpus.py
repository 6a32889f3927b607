"""The plugin on CPUs that are too old, barely new enough, and new, as the emulator shows them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from typing import Any

import pytest

from tests.emulation import trace

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="a real Arm machine has one CPU only"),
    pytest.mark.skipif(bool(trace.missing()), reason=trace.missing() or "complete"),
    pytest.mark.skipif(os.geteuid() != 0, reason="entering the Arm environment needs root"),
]

# What vLLM does with the plugin in its first process, then a child as it would start them.
REGISTER = """
import json, logging, os, subprocess, sys
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("vllm.arm_cpu").addHandler(handler)
import vllm_arm_cpu
platforms = [vllm_arm_cpu.register(), vllm_arm_cpu.register()]
vllm_arm_cpu.register_general()
child = "import json; from vllm_arm_cpu.runtime import preload, cpu;" \\
    "mapped = preload.mapped_libraries(); print(json.dumps([mapped.openmp, mapped.allocators]))"
done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
print(json.dumps({
    "platforms": platforms,
    "lines": lines,
    "preload": os.environ.get("LD_PRELOAD"),
    "child": json.loads(done.stdout or "null"),
    "child_errors": done.stderr,
    "child_status": done.returncode,
    "vllm_imported": "vllm" in sys.modules,
}))
"""


def on(cpu: str, *command: str, timeout: int = 240) -> subprocess.CompletedProcess[str]:
    """Run a command in the Arm environment on one CPU."""
    full = [str(trace.ROOT / "scripts" / "arm.sh"), "--cpu", cpu, "--timeout", str(timeout), *command]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "VAC_"))}
    return subprocess.run(full, capture_output=True, text=True, timeout=timeout + 30, check=False, env=environ)


def register(cpu: str, *assignments: str) -> dict[str, Any]:
    """What the plugin does on a CPU, with environment variables set."""
    done = on(cpu, "env", *assignments, "python3", "-c", REGISTER)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert not result["vllm_imported"]
    assert result["child_status"] == 0, result["child_errors"]
    assert result["child_errors"] == ""
    return result


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    if not (trace.ROOT / "build" / "site" / "vllm_arm_cpu").exists():
        pytest.skip("the package is not installed for this clone (make install)")


def test_too_old() -> None:
    """Armv8.0: no LSE, so nothing is preloaded and nothing dies; vLLM goes on without us."""
    result = register("cortex-a72")
    assert result["platforms"] == [None, None]
    assert result["lines"] == [
        "vllm-arm-cpu steps aside: this CPU is older than Armv8.2 with LSE, FP16 and dot-product instructions"
    ]
    assert result["preload"] is None
    assert result["child"] == [[], []]


def test_too_old_with_a_preload_of_the_user() -> None:
    library = "/usr/lib/aarch64-linux-gnu/libnuma.so.1"
    assert register("cortex-a72", f"LD_PRELOAD={library}")["preload"] == library


def test_doctor_on_a_cpu_that_is_too_old() -> None:
    done = on("cortex-a72", "vllm-arm-cpu", "doctor", "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["cpu"]["name"] == "Cortex-A72"
    assert report["cpu"]["tier"] == "none"
    problems = {problem["id"]: problem["message"] for problem in report["problems"]}
    assert "older than Armv8.2" in problems["cpu-old"]
    assert "older than Armv8.2" in problems["steps-aside"]
    assert not any(candidate["usable"] for candidate in report["preload"])
    assert {candidate["failed"] for candidate in report["preload"]} == {False}


@pytest.mark.parametrize("cpu", ["neoverse-n1", "neoverse-v1", "neoverse-n2"])
def test_supported(cpu: str) -> None:
    """The platform class comes back, and children find both libraries mapped."""
    result = register(cpu)
    assert result["platforms"] == ["vllm_arm_cpu.platform.ArmCpuPlatform"] * 2
    assert result["lines"] == []
    (openmp,), (allocator,) = result["child"]
    assert openmp.endswith("/vllm_arm_cpu/lib/libgomp.so.1")
    assert allocator.endswith("/vllm_arm_cpu/lib/libmimalloc.so")


def test_preload_switched_off() -> None:
    result = register("neoverse-n1", "VAC_PRELOAD=0")
    assert result["platforms"] == ["vllm_arm_cpu.platform.ArmCpuPlatform"] * 2
    assert result["preload"] is None
    assert result["child"] == [[], []]


def test_tier_above_the_cpu() -> None:
    """BF16 kernels on a CPU without BF16 would die of SIGILL: one line says why not."""
    result = register("neoverse-n1", "VAC_TIER=bf16_i8mm")
    assert result["platforms"] == [None, None]
    assert len(result["lines"]) == 1
    assert "VAC_TIER=bf16_i8mm" in result["lines"][0]


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is damaged"), ("cut", "cut off")],
    ids=["empty", "cut off"],
)
def test_damaged_preload_library(content: str, message: str) -> None:
    """A libgomp that cannot be loaded would kill every process that vLLM starts: it is tried first."""
    prepare = (
        "cp -r /src/build/site/vllm_arm_cpu /tmp/copy && mv /tmp/copy/lib/* /tmp/copy/ && cd /tmp/copy && "
        + (": >libgomp.so.1" if not content else "truncate -s 5000 libgomp.so.1")
        + ' && VAC_LIBRARY_DIR=/tmp/copy exec python3 -c "$1"'
    )
    done = on("neoverse-n1", "bash", "-c", prepare, "bash", REGISTER)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["platforms"] == ["vllm_arm_cpu.platform.ArmCpuPlatform"] * 2
    assert result["preload"] == "/tmp/copy/libmimalloc.so"
    assert result["child_status"] == 0
    assert result["child_errors"] == ""
