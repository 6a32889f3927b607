"""The container image: what it is made of, and that it serves under a strict runtime and ends when asked to."""

from __future__ import annotations

import json
import os
import re
import struct
import time
from pathlib import Path

import pytest

from tests.e2e.server import process_name
from tests.image.conftest import MEMORY
from tests.image.container import EMULATED, Container, ContainerServer, Image

ROOT = Path(__file__).parents[2]
COMPILERS = re.compile(
    r"(.*-)?(gcc|g\+\+|c\+\+|cc|cpp|clang|clang\+\+|tcc|ld|ld\.(bfd|gold|lld)|lld|as|make|ninja|cmake|rustc|cargo)"
    r"(-[\d.]+)?|cc1|cc1plus"
)
SIZE_LIMIT = 6.5
"""GiB: what vLLM and PyPI's torch take, and some room; the CUDA libraries that this torch wants are 2.9 of them."""

END_TIMEOUT = 150
"""Seconds to end in; emulated on busy cores that takes half a minute."""


def size(root: Path) -> int:
    """Bytes of all files, those with several names once."""
    files = (os.lstat(os.path.join(folder, name)) for folder, _, names in os.walk(root) for name in names)
    return sum({(entry.st_dev, entry.st_ino): entry.st_blocks * 512 for entry in files}.values())


def test_configuration(image: Image) -> None:
    config = image.config
    assert image.architecture == "arm64"
    assert config["Entrypoint"] == ["vllm", "serve"]
    assert not config.get("Cmd")
    assert image.user()[0] != 0
    assert list(config["Volumes"]) == ["/cache"]
    assert list(config["ExposedPorts"]) == ["8000/tcp"]
    assert config["Healthcheck"]["Test"][0] == "CMD"
    assert config.get("StopSignal") in ("SIGTERM", "15")
    # Nothing of the machine that built it.
    names = {entry.partition("=")[0] for entry in config["Env"]}
    assert names == {"PATH", "HOME", "HF_HOME", "NUMBA_CACHE_DIR", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}


def test_no_compiler(image: Image) -> None:
    folders = ("bin", "usr/bin", "usr/sbin", "usr/local/bin", "opt/venv/bin", "usr/lib/gcc")
    paths = (path for folder in folders for path in (image.root / folder).rglob("*"))
    found = [path for path in paths if COMPILERS.fullmatch(path.name)]
    # The wheels that vLLM requires bring ninja along, which compiles nothing by itself.
    assert [str(path) for path in found if path.name != "ninja"] == []
    assert not (image.root / "src").exists()
    assert list(image.root.glob("usr/include/stdlib.h")) == []


def test_size(image: Image) -> None:
    total = size(image.root) / 2**30
    packages = image.root.glob("opt/venv/lib/python3*/site-packages/*")
    largest = sorted(((size(path) / 2**30, path.name) for path in packages), reverse=True)[:4]
    parts = ", ".join(f"{name} {gib:.2f}" for gib, name in largest)
    print(f"\nimage: {total:.2f} GiB unpacked ({parts})")
    assert 1 < total < SIZE_LIMIT


def test_bytecode(image: Image) -> None:
    """What a read-only container imports is compiled already, and valid for the sources as they were copied."""
    for name in ("vllm/config", "torch/nn", "vllm_arm_cpu", "transformers"):
        (folder,) = image.root.glob(f"opt/venv/lib/python3*/site-packages/{name}")
        compiled = {path.name.partition(".")[0]: path for path in folder.glob("__pycache__/*.pyc")}
        sources = list(folder.glob("*.py"))
        assert sources
        assert {path.stem for path in sources} == set(compiled), name
        for source in sources:
            # Behind four bytes of magic: flags (0: by time), time and size of the source.
            flags, modified, length = struct.unpack("<4xIII", compiled[source.stem].read_bytes()[:16])
            status = source.stat()
            assert (flags, modified, length) == (0, int(status.st_mtime), status.st_size), source


def test_doctor(container: Container) -> None:
    """It finds nothing wrong, and honours the control group: its memory, one thread of however many cores."""
    done = container.run("vllm-arm-cpu", "doctor", "--json")
    assert done.stdout.startswith("{"), done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert done.returncode == 0
    assert report["plugin"]["steps_aside"] is None
    assert report["libvac"]["tier"] == ("bf16_i8mm" if EMULATED else report["cpu"]["tier"])
    assert [item["usable"] for item in report["preload"]] == [True, True]
    if container.limits is not None:
        assert report["topology"]["cgroup"]["memory_limit"] == MEMORY
        assert report["topology"]["cgroup"]["cpu_quota"] == 1
        assert len(report["threads"]["cpus"]) == 1


def test_only_the_volume_and_tmp_are_writable(container: Container) -> None:
    files = "/x /opt/venv/x /usr/local/x /etc/x /tmp/x /cache/x"
    script = f"for f in {files}; do (: >$f) 2>/dev/null && echo $f; done; id -u; id -G"
    done = container.run("sh", "-c", script)
    user, group = container.image.user()
    assert done.stdout.split() == ["/tmp/x", "/cache/x", str(user), str(group)]


def health(container: Container, port: int) -> int:
    """Status of the image's own health check."""
    command = container.image.config["Healthcheck"]["Test"][1:]
    asking = Container(
        container.image,
        container.cache,
        container.stage,
        environ={"HEALTHCHECK_URL": f"http://127.0.0.1:{port}/health"},
    )
    return asking.run(*command, timeout=60).returncode


def test_serves(container: Container, server: ContainerServer) -> None:
    """The tokens of the FP32 reference; the health check is for a server that answers, against one that does not."""
    golden = json.loads((ROOT / "tests/data/golden_tokens.json").read_text())["prompts"][0]
    answer = server.complete(golden["prompt_token_ids"], 16)
    assert answer["token_ids"] == golden["token_ids"][:16]
    assert health(container, server.port) == 0
    assert health(container, 9) == 1
    # Ours, with what it preloads, although the root cannot be written and nothing is permitted.
    assert "vllm-arm-cpu steps aside" not in server.log()


def test_processes_have_no_privileges(image: Image, server: ContainerServer) -> None:
    user, group = image.user()
    processes = [pid for pid in server.processes() if pid != server.pid]
    assert len(processes) >= 2
    for pid in processes:
        status = dict(re.findall(r"^(\w+):\s*(.*)$", Path(f"/proc/{pid}/status").read_text(), re.M))
        assert status["Uid"].split() == [str(user)] * 4, process_name(pid)
        assert status["Gid"].split() == [str(group)] * 4
        assert status["CapEff"] == status["CapPrm"] == "0" * 16
        assert status["NoNewPrivs"] == "1"
    # No shell stands between the runtime's signals and the server.
    assert process_name(server.first_process) not in ("sh", "bash", "dash")


def test_memory_policy(container: Container, server: ContainerServer) -> None:
    """Without CAP_SYS_NICE memory may not be bound: at most one warning, and it serves."""
    lines = [line for line in server.log().splitlines() if "WARNING" in line and re.search("mempolicy|SYS_NICE", line)]
    assert len(lines) <= 1, lines


def test_ends(server: ContainerServer) -> None:
    """SIGTERM to the first process, as ``docker stop`` sends it."""
    begin = time.monotonic()
    server.terminate()
    # unshare ends with the status of the container's first process.
    assert server.wait(END_TIMEOUT) in (0, 143), server.log_tail()
    assert server.wait_until_gone(10) == []
    print(f"\nended after {time.monotonic() - begin:.0f} s")
    with pytest.raises(OSError, match="refused"):
        server.get("/health")
