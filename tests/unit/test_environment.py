"""What the environments and the image are made from: versions, locks, pinned bases."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import vllm_arm_cpu

ROOT = Path(__file__).parents[2]
COMMON = (ROOT / "scripts" / "common.sh").read_text()
LOCKS = {
    version: (requirements, vllm, kind)
    for version, requirements, vllm, kind in re.findall(
        r"^([\d.]+)\) REQUIREMENTS_LOCK=(\S+) VLLM_LOCK=(\S+) VLLM_FROM=(\S+) ;;", COMMON, re.M
    )
}


def environment(version: str) -> subprocess.CompletedProcess[str]:
    """Asks for the environment's folder."""
    environ = {**os.environ, "VLLM": version, "VAC_ENV_CACHE": "/nowhere"}
    return subprocess.run([ROOT / "scripts/env.sh", "path"], env=environ, capture_output=True, text=True)


def test_versions_are_those_that_the_package_serves() -> None:
    low, high = vllm_arm_cpu.TESTED_VLLM
    releases = sorted(tuple(map(int, version.split("."))) for version in LOCKS)
    assert releases[0] == low
    assert low <= releases[-1] < high
    assert len(releases) == high[1] - low[1]


def test_each_version_has_an_environment() -> None:
    folders = {environment(version).stdout for version in LOCKS}
    assert len(folders) == len(LOCKS)
    assert all(folder.startswith("/nowhere/") for folder in folders)


def test_unknown_version() -> None:
    done = environment("0.1")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "VLLM=0.1" in done.stderr
    assert "docs/maintaining.md" in done.stderr


def test_default_is_the_same_everywhere() -> None:
    (in_make,) = re.findall(r"^VLLM \?= (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    (in_scripts,) = re.findall(r'^VLLM="\$\{VLLM:-(\S+)\}"$', COMMON, re.M)
    assert in_make == in_scripts
    # The image is made of it, and of wheels only.
    assert LOCKS[in_make][2] == "wheel"


@pytest.mark.parametrize("version", sorted(LOCKS))
def test_locks(version: str) -> None:
    """vLLM's lock names this version; both have a hash for all that they name."""
    requirements, vllm, kind = LOCKS[version]
    assert kind in ("wheel", "source")
    text = (ROOT / "requirements" / vllm).read_text()
    assert re.search(rf"^vllm(-cpu)?=={re.escape(version)}\.\d+ \\$", text, re.M)
    for lock in (text, (ROOT / "requirements" / requirements).read_text()):
        packages = re.split(r"^(?=[a-z0-9])", lock, flags=re.M)[1:]
        assert packages
        assert [package for package in packages if "--hash=sha256:" not in package] == []


def test_bases_of_the_image_are_pinned() -> None:
    """By a tag that is never moved, or a digest."""
    bases = re.findall(r"^ARG (?:BUILD_)?BASE=(\S+)$", (ROOT / "docker/Dockerfile").read_text(), re.M)
    assert len(bases) == 2
    assert all(re.search(r":\w+-\d{8}(-slim)?$|@sha256:[0-9a-f]{64}$", base) for base in bases)


def test_the_image_has_no_scripts_of_its_own_for_what_the_environment_installs() -> None:
    """`make env` and the image install Python packages through the same script."""
    sources = [path for path in (ROOT / "docker").iterdir() if path.suffix in (".sh", "")]
    env = ROOT / "scripts/env.sh"
    assert "install_vllm.sh" in (ROOT / "docker/Dockerfile").read_text()
    assert "install_vllm.sh" in env.read_text()
    for path in (*sources, env):
        assert not re.search(r"\bpip install\b", path.read_text()), path
