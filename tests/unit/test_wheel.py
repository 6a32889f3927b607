"""The wheel passes its own check, doctored copies do not, and pip keeps it off other machines."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "vllm_arm_cpu"
TAG = "py3-none-manylinux_2_34_aarch64"

pytestmark = pytest.mark.skipif(
    shutil.which("readelf") is None, reason="readelf is not installed here (the check runs where wheels are built)"
)


def load_check() -> Callable[[Path], list[str]]:
    """``main`` of scripts/check_wheel.py, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("check_wheel", ROOT / "scripts" / "check_wheel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    check: Callable[[Path], list[str]] = module.main
    return check


check = load_check()


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The newest wheel that was built here."""
    built = sorted((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if not built:
        pytest.skip("no wheel in dist/ (make wheel)")
    return built[-1]


@pytest.fixture(scope="module")
def content(wheel: Path) -> dict[str, bytes]:
    """Files of the wheel by their path in it."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


class Doctor:
    """Writes changed copies of the wheel and says what the check finds."""

    def __init__(self, directory: Path, name: str, content: dict[str, bytes]) -> None:
        self.directory = directory
        self.name = name
        self.content = dict(content)

    def path(self, suffix: str) -> str:
        """The one path in the wheel that ends like this."""
        (path,) = (path for path in self.content if path.endswith(suffix))
        return path

    def patchelf(self, filename: str, *options: str) -> None:
        """Change one of the libraries."""
        if shutil.which("patchelf") is None:
            pytest.skip("patchelf is not installed here")
        file = self.directory / filename
        file.write_bytes(self.content[self.path(f"lib/{filename}")])
        subprocess.run(["patchelf", *options, file], check=True, capture_output=True)
        self.content[self.path(f"lib/{filename}")] = file.read_bytes()

    def problems(self) -> str:
        copy = self.directory / self.name
        with zipfile.ZipFile(copy, "w") as archive:
            for name, data in self.content.items():
                archive.writestr(name, data)
        return "\n".join(check(copy))


@pytest.fixture
def doctor(tmp_path: Path, wheel: Path, content: dict[str, bytes]) -> Doctor:
    return Doctor(tmp_path, wheel.name, content)


def test_the_wheel_is_right(wheel: Path) -> None:
    assert check(wheel) == []


def test_as_a_command(wheel: Path, tmp_path: Path) -> None:
    """The build ends with the check's exit status."""
    command = [sys.executable, str(ROOT / "scripts" / "check_wheel.py")]
    assert subprocess.run([*command, str(wheel)], check=False).returncode == 0
    renamed = tmp_path / wheel.name.replace("manylinux_2_34_aarch64", "any")
    shutil.copy(wheel, renamed)
    done = subprocess.run([*command, str(renamed)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is not tagged" in done.stderr


def test_an_unchanged_copy_is_right(doctor: Doctor) -> None:
    """What the tests below find is due to what they change."""
    assert doctor.problems() == ""


@pytest.mark.parametrize("filename", ["libvac.so", "libgomp.so.1", "libmimalloc.so"])
def test_missing_library(doctor: Doctor, filename: str) -> None:
    del doctor.content[doctor.path(f"lib/{filename}")]
    assert "native files are" in doctor.problems()


def test_surplus_library(doctor: Doctor) -> None:
    doctor.content[f"{PACKAGE}/lib/libother.so"] = doctor.content[doctor.path("lib/libvac.so")]
    assert "libother.so" in doctor.problems()


def test_missing_header(doctor: Doctor) -> None:
    del doctor.content[doctor.path("include/vac/base.h")]
    assert "headers missing: ['base.h']" in doctor.problems()


@pytest.mark.parametrize("tag", ["py3-none-manylinux_2_17_aarch64", "py3-none-any", "cp311-cp311-linux_aarch64"])
def test_other_tag_inside(doctor: Doctor, tag: str) -> None:
    name = doctor.path(".dist-info/WHEEL")
    doctor.content[name] = doctor.content[name].replace(TAG.encode(), tag.encode())
    assert f"the WHEEL file says ['{tag}']" in doctor.problems()


@pytest.mark.parametrize("tag", ["py3-none-any", "py3-none-linux_aarch64", "py3-none-manylinux_2_34_x86_64"])
def test_other_tag_in_the_name(doctor: Doctor, tag: str) -> None:
    doctor.name = doctor.name.replace(TAG, tag)
    assert f"is not tagged {TAG}" in doctor.problems()


def test_library_of_this_machine(doctor: Doctor) -> None:
    """A build that forgot to cross-compile."""
    program = Path("/bin/true").resolve()
    if platform.machine() == "aarch64" or not program.exists():
        pytest.skip("needs a program of another machine")
    doctor.content[doctor.path("lib/libvac.so")] = program.read_bytes()
    assert "libvac.so: not an aarch64 library" in doctor.problems()


def test_libgomp_without_lse(doctor: Doctor) -> None:
    """The distribution's libgomp looks the same from outside: only its code tells."""
    library = "usr/lib/aarch64-linux-gnu/libgomp.so.1"
    found = [root / library for root in (environment_root(), Path("/")) if (root / library).exists()]
    if not found:
        pytest.skip(f"no {library} here (make env)")
    doctor.content[doctor.path("lib/libgomp.so.1")] = found[0].read_bytes()
    problems = doctor.problems()
    assert "libgomp.so.1: has " in problems
    assert "load-exclusives" in problems


def test_other_soname(doctor: Doctor) -> None:
    """With another SONAME torch would load its own libgomp beside ours."""
    doctor.patchelf("libgomp.so.1", "--set-soname", "libgomp-vac.so.1")
    assert "libgomp.so.1: SONAME is ['libgomp-vac.so.1']" in doctor.problems()


def test_further_needed_library(doctor: Doctor) -> None:
    """Slim images lack libatomic: every process would die at its start."""
    doctor.patchelf("libmimalloc.so", "--add-needed", "libatomic.so.1")
    assert "libmimalloc.so: needs ['libatomic.so.1']" in doctor.problems()


def test_rpath(doctor: Doctor) -> None:
    doctor.patchelf("libvac.so", "--set-rpath", "/home/someone/build")
    assert "libvac.so: carries an RPATH" in doctor.problems()


def test_missing_entry_points(doctor: Doctor) -> None:
    name = doctor.path(".dist-info/entry_points.txt")
    doctor.content[name] = doctor.content[name].replace(b"vllm.platform_plugins", b"vllm.platforms")
    assert doctor.problems() == "no entry point in vllm.platform_plugins"


def test_notice_without_libgomp(doctor: Doctor) -> None:
    name = doctor.path("/NOTICE")
    doctor.content[name] = b"nothing\n"
    assert "NOTICE" in doctor.problems()


def test_what_the_wheel_must_not_hold(content: dict[str, bytes]) -> None:
    strays = [
        name
        for name in content
        if not name.startswith((f"{PACKAGE}/", f"{PACKAGE}-")) or "__pycache__" in name or "/tests/" in name
    ]
    assert strays == []


@pytest.mark.skipif(platform.machine() == "aarch64", reason="here the wheel can be installed")
def test_pip_refuses_it_on_other_machines(wheel: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No module named pip" in done.stderr:
        pytest.skip("pip is not installed here")
    assert done.returncode != 0
    assert "is not a supported wheel on this platform" in done.stderr


def environment_root() -> Path:
    """The Arm root that ``make env`` prepared; a path that does not exist where there is none."""
    done = subprocess.run([ROOT / "scripts" / "env.sh", "path"], capture_output=True, text=True, check=False)
    return Path(done.stdout.strip() or "/nonexistent") / "root"
