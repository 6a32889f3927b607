"""vllm_arm_cpu.runtime.preload: what is chosen, how it is tried, and what is really mapped."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.unit import machines
from vllm_arm_cpu import envs
from vllm_arm_cpu.runtime import preload
from vllm_arm_cpu.runtime.cpu import CpuInfo

V2 = CpuInfo("aarch64", 0x41, 0xD4F, "Neoverse V2", ("lse", "fp16", "dotprod", "fhm", "bf16", "i8mm"), "bf16_i8mm")
A72 = CpuInfo("aarch64", 0x41, 0xD08, "Cortex-A72", (), "none")
X86 = CpuInfo("x86_64", None, None, "unknown", (), "none")

needs_processes = pytest.mark.skipif(
    not machines.can_start_processes(), reason="the emulator cannot start processes here"
)


class Probe:
    """Stands in for the probe process: says which paths fail, and remembers what it was asked."""

    def __init__(self, *bad: str) -> None:
        self.bad = bad
        self.asked: list[list[str]] = []

    def __call__(self, paths: Sequence[str], environ: Mapping[str, str]) -> str:
        self.asked.append([os.path.basename(path) for path in paths])
        return next((f"{name} is broken" for name in self.bad if any(path.endswith(name) for path in paths)), "")


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    """A library directory with both files."""
    for name in ("libmimalloc.so", "libgomp.so.1"):
        (tmp_path / name).write_bytes(b"")
    return tmp_path


def environment(libraries: Path, **more: str) -> dict[str, str]:
    return {"VAC_LIBRARY_DIR": str(libraries), **more}


def state(candidates: Sequence[preload.Candidate]) -> dict[str, bool]:
    return {item.name: item.usable for item in candidates}


def test_both_are_put_in_front(libraries: Path) -> None:
    environ = environment(libraries, LD_PRELOAD="/a/first.so /b/second.so")
    candidates = preload.install(environ, V2, Probe())
    assert state(candidates) == {"mimalloc": True, "libgomp": True}
    assert environ["LD_PRELOAD"] == f"{libraries}/libmimalloc.so:{libraries}/libgomp.so.1:/a/first.so /b/second.so"


def test_without_an_ld_preload(libraries: Path) -> None:
    environ = environment(libraries)
    preload.install(environ, V2, Probe())
    assert environ["LD_PRELOAD"] == f"{libraries}/libmimalloc.so:{libraries}/libgomp.so.1"
    assert environ[envs.USER_PRELOAD] == ""


def test_again_changes_nothing_and_tries_nothing(libraries: Path) -> None:
    environ = environment(libraries, LD_PRELOAD="/a/first.so")
    preload.install(environ, V2, Probe())
    before = dict(environ)
    probe = Probe()
    assert state(preload.install(environ, V2, probe)) == {"mimalloc": True, "libgomp": True}
    assert environ == before
    assert probe.asked == []
    assert environ[envs.USER_PRELOAD] == "/a/first.so"


def test_a_changed_file_is_tried_again(libraries: Path) -> None:
    environ = environment(libraries)
    preload.install(environ, V2, Probe())
    (libraries / "libgomp.so.1").write_bytes(b"new")
    probe = Probe("libgomp.so.1")
    assert state(preload.plan_preload(environ, V2, probe)) == {"mimalloc": True, "libgomp": False}
    assert probe.asked == [["libgomp.so.1"]]


@pytest.mark.parametrize("stored", ["", "[]", "{", '{"/x": 1}', '{"/x": []}'])
def test_a_damaged_memory_of_probes_is_ignored(stored: str, libraries: Path) -> None:
    probe = Probe()
    preload.plan_preload(environment(libraries, **{envs.PRELOAD_PROBE: stored}), V2, probe)
    assert probe.asked == [["libmimalloc.so", "libgomp.so.1"]]


def test_the_culprit_is_found(libraries: Path) -> None:
    environ = environment(libraries)
    probe = Probe("libmimalloc.so")
    mimalloc, libgomp = preload.install(environ, V2, probe)
    assert (mimalloc.usable, mimalloc.reason, mimalloc.failed) == (False, "libmimalloc.so is broken", True)
    assert libgomp.usable
    assert environ["LD_PRELOAD"] == libgomp.path
    assert probe.asked == [["libmimalloc.so", "libgomp.so.1"], ["libmimalloc.so"], ["libgomp.so.1"]]
    # Children know it already.
    assert state(preload.install(environ, V2, quiet := Probe())) == {"mimalloc": False, "libgomp": True}
    assert quiet.asked == []


def test_only_together_they_fail(libraries: Path) -> None:
    def probe(paths: Sequence[str], environ: Mapping[str, str]) -> str:
        return "they fight" if len(paths) > 1 else ""

    candidates = preload.plan_preload(environment(libraries), V2, probe)
    assert state(candidates) == {"mimalloc": False, "libgomp": True}
    assert candidates[0].reason == "they fight"


@pytest.mark.parametrize("info", [A72, X86])
def test_nothing_below_the_lowest_tier(info: CpuInfo, libraries: Path) -> None:
    environ = environment(libraries)
    probe = Probe()
    candidates = preload.install(environ, info, probe)
    assert state(candidates) == {"mimalloc": False, "libgomp": False}
    assert not any(item.failed for item in candidates)
    assert all(item.reason for item in candidates)
    assert "LD_PRELOAD" not in environ
    assert probe.asked == []


def test_switched_off(libraries: Path) -> None:
    environ = environment(libraries, VAC_PRELOAD="0", LD_PRELOAD="/a.so")
    candidates = preload.install(environ, V2, Probe())
    assert {item.reason for item in candidates} == {"VAC_PRELOAD=0"}
    assert environ["LD_PRELOAD"] == "/a.so"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("/usr/lib/libtcmalloc_minimal.so.4", {"mimalloc": False, "libgomp": True}),
        ("libjemalloc.so.2", {"mimalloc": False, "libgomp": True}),
        ("/opt/libmimalloc-secure.so.2", {"mimalloc": False, "libgomp": True}),
        ("/opt/libgomp.so.1", {"mimalloc": True, "libgomp": False}),
        ("/opt/libgomp-24e2ab19.so.1.0.0", {"mimalloc": True, "libgomp": False}),
        ("libomp.so:libtcmalloc.so", {"mimalloc": False, "libgomp": False}),
        ("/opt/notlibgomp.so", {"mimalloc": True, "libgomp": True}),
    ],
)
def test_never_a_second_one(entry: str, expected: dict[str, bool], libraries: Path) -> None:
    environ = environment(libraries, LD_PRELOAD=entry)
    candidates = preload.install(environ, V2, Probe())
    assert state(candidates) == expected
    for item in candidates:
        assert item.usable or (item.reason.startswith("LD_PRELOAD already has ") and not item.failed)
    assert environ["LD_PRELOAD"].endswith(entry)


def test_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "PACKAGE_LIBRARY_DIR", tmp_path)
    probe = Probe()
    candidates = preload.plan_preload({}, V2, probe)
    assert all(item.failed and "does not exist" in item.reason for item in candidates)
    assert probe.asked == []


def test_a_path_that_ld_preload_cannot_hold(tmp_path: Path) -> None:
    directory = tmp_path / "with space"
    directory.mkdir()
    for name in ("libmimalloc.so", "libgomp.so.1"):
        (directory / name).write_bytes(b"")
    environ = environment(directory)
    candidates = preload.install(environ, V2, Probe())
    assert all(item.failed and "space or colon" in item.reason for item in candidates)
    assert "LD_PRELOAD" not in environ


def test_upstreams_tcmalloc_is_taken_out(libraries: Path) -> None:
    environ = environment(libraries, LD_PRELOAD="/a.so")
    preload.install(environ, V2, Probe())
    ours = environ["LD_PRELOAD"]
    tcmalloc = "/site/vllm/libs/libtcmalloc_minimal-1f2.so.4"
    environ["LD_PRELOAD"] = f"{tcmalloc}:{ours}"
    assert tcmalloc in str(preload.after_platform_config(environ))
    assert environ["LD_PRELOAD"] == ours
    assert preload.after_platform_config(environ) is None


def test_the_users_tcmalloc_stays(libraries: Path) -> None:
    environ = environment(libraries, LD_PRELOAD="/usr/lib/libtcmalloc.so")
    preload.install(environ, V2, Probe())
    before = environ["LD_PRELOAD"]
    assert preload.after_platform_config(environ) is None
    assert environ["LD_PRELOAD"] == before


@pytest.mark.parametrize("environ", [{}, {"LD_PRELOAD": "/x/libtcmalloc.so:/y.so"}])
def test_upstreams_tcmalloc_stays_without_ours(environ: dict[str, str]) -> None:
    before = dict(environ)
    assert preload.after_platform_config(environ) is None
    assert environ == before


def test_mapped_libraries(tmp_path: Path) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/maps").write_text(
        "7f00-7f01 r-xp 00000000 08:01 12 /opt/my libs/libgomp.so.1\n"
        "7f01-7f02 rw-p 00000000 08:01 12 /opt/my libs/libgomp.so.1\n"
        "7f02-7f03 r--p 00000000 08:01 13 /opt/libjemalloc.so.2\n"
        "7f03-7f04 r-xp 00000000 08:01 14 /opt/libmimalloc.so (deleted)\n"
        "7f04-7f05 rw-p 00000000 00:00 0 \n"
        "7f05-7f06 r-xp 00000000 00:00 0 [vdso]\n"
    )
    found = preload.mapped_libraries(7, tmp_path)
    assert found.openmp == ("/opt/my libs/libgomp.so.1",)
    assert found.allocators == ("/opt/libjemalloc.so.2", "/opt/libmimalloc.so (deleted)")
    with pytest.raises(FileNotFoundError):
        preload.mapped_libraries(8, tmp_path)


# --- the dynamic linker for real ----------------------------------------------


def shared_object(path: Path, needed: str = "") -> str:
    """Write the smallest library that ld.so accepts, for this machine; ``needed`` is a DT_NEEDED entry."""
    machine = {"aarch64": 183, "x86_64": 62}[os.uname().machine]
    strings = b"\0" + needed.encode() + b"\0"
    # One segment: headers, dynamic section, strings, one null symbol, a hash table of one bucket.
    dynamic_at, strings_at, symbols_at, hash_at = 0x200, 0x300, 0x380, 0x3C0
    entries = [(5, strings_at), (6, symbols_at), (10, len(strings)), (11, 24), (4, hash_at)]  # STRTAB ... HASH
    entries += [(1, 1)] if needed else []  # NEEDED
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in [*entries, (0, 0)])
    image = bytearray(0x400)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    image[:64] = ident + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    image[64:120] = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, len(image), len(image), 0x10000)  # LOAD, R+X
    image[120:176] = struct.pack(
        "<IIQQQQQQ", 2, 4, dynamic_at, dynamic_at, dynamic_at, len(dynamic), len(dynamic), 8
    )  # DYNAMIC
    for at, data in ((dynamic_at, dynamic), (strings_at, strings), (hash_at, struct.pack("<IIII", 1, 1, 0, 0))):
        image[at : at + len(data)] = data
    path.write_bytes(image)
    return str(path)


@needs_processes
def test_a_good_library_passes(tmp_path: Path) -> None:
    path = shared_object(tmp_path / "libmimalloc.so")
    assert preload.probe_libraries([path], os.environ) == ""


@needs_processes
def test_a_symbolic_link_passes(tmp_path: Path) -> None:
    shared_object(tmp_path / "libgomp.so.1.0.0")
    (tmp_path / "libgomp.so.1").symlink_to("libgomp.so.1.0.0")
    assert preload.probe_libraries([str(tmp_path / "libgomp.so.1")], os.environ) == ""


@needs_processes
def test_a_missing_dependency_kills_only_the_probe(tmp_path: Path) -> None:
    path = shared_object(tmp_path / "libmimalloc.so", needed="libnothere.so.9")
    assert "libnothere.so.9" in preload.probe_libraries([path], os.environ)


@needs_processes
@pytest.mark.parametrize("content", [None, b"", b"not a library\n", b"\x7fELF\x02\x01\x01" + bytes(57)])
def test_what_the_linker_only_grumbles_about_fails(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "libmimalloc.so"
    if content is not None:
        path.write_bytes(content)
    assert "libmimalloc.so" in preload.probe_libraries([str(path)], os.environ)


def test_a_probe_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert "could not be run" in preload.probe_libraries(["/x.so"], {})


@needs_processes
def test_children_have_it_mapped(tmp_path: Path) -> None:
    for name in ("libmimalloc.so", "libgomp.so.1"):
        shared_object(tmp_path / name)
    environ = {**os.environ, **environment(tmp_path)}
    environ.pop("LD_PRELOAD", None)
    candidates = preload.install(environ, V2)
    assert state(candidates) == {"mimalloc": True, "libgomp": True}
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "print('up', flush=True); input()"],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        assert preload.not_mapped(candidates, child.pid) == []
        # This process was started before.
        assert preload.not_mapped(candidates) == list(candidates)
        child.communicate(b"\n")


# --- atomics ------------------------------------------------------------------

LSE = [0xB8E00041, 0x38200041, 0xF820005F, 0xF8203041, 0x78206041]  # LDADDAL, LDADDB, STADD, LDSET, LDUMAXH
LSE += [
    0xF8E083E1,
    0x38208041,
    0x88A07C41,
    0x08E0FC41,
    0x4860FC82,
    0x08207C82,
]  # SWPAL, SWPB, CAS, CASALB, CASPAL, CASP
EXCLUSIVE = [0x885F7C20, 0x085FFC20, 0xC85FFC20, 0xC87F8440, 0x887F0440]  # LDXR, LDAXRB, LDAXR, LDAXP, LDXP
OTHERS = [
    0x88007C41,
    0xC8208861,
    0xC8DFFC20,
    0xC89FFC20,
    0xF8BFC020,
    0xC8DF7C20,
]  # STXR, STLXP, LDAR, STLR, LDAPR, LDLAR
OTHERS += [0xF8626820, 0x3DC00020, 0xF9000420, 0xA94007E0, 0xF8401020, 0xF9800000]  # LDR, LDR q, STR, LDP, LDUR, PRFM


def aarch64_library(path: Path, words: Sequence[int], sections: bool = True) -> Path:
    """Write an ELF file with ``words`` as code and constants that look like LDXR beside it."""
    code = struct.pack(f"<{len(words)}I", *words)
    data = struct.pack("<I", EXCLUSIVE[0]) * 3
    code_at = 64 + 56
    data_at = code_at + len(code)
    headers_at = data_at + len(data)
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack(
        "<HHIQQQIHHHHHH", 3, 183, 1, 0, 64, headers_at if sections else 0, 0, 64, 56, 1, 64, 3 if sections else 0, 0
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, code_at, 0, 0, len(code) + len(data), len(code) + len(data), 4)
    table = bytes(64)
    for flags, at, size in ((6, code_at, len(code)), (2, data_at, len(data))):
        table += struct.pack("<IIQQQQIIQQ", 0, 1, flags, 0, at, size, 0, 0, 4, 0)
    path.write_bytes(header + segment + code + data + (table if sections else b""))
    return path


def test_atomics_are_told_apart(tmp_path: Path) -> None:
    path = aarch64_library(tmp_path / "lib.so", [*LSE, *EXCLUSIVE, *OTHERS])
    assert preload.count_atomics(path) == preload.Atomics(len(LSE), len(EXCLUSIVE))
    assert preload.has_lse_atomics(path)


def test_every_encoding_by_itself(tmp_path: Path) -> None:
    for words, expected in ((LSE, (1, 0)), (EXCLUSIVE, (0, 1)), (OTHERS, (0, 0))):
        for word in words:
            found = preload.count_atomics(aarch64_library(tmp_path / "lib.so", [word]))
            assert (found.lse, found.exclusive) == expected, hex(word)


def test_without_section_headers(tmp_path: Path) -> None:
    path = aarch64_library(tmp_path / "lib.so", LSE, sections=False)
    assert preload.count_atomics(path) == preload.Atomics(len(LSE), 3)


def test_no_lse(tmp_path: Path) -> None:
    assert not preload.has_lse_atomics(aarch64_library(tmp_path / "lib.so", EXCLUSIVE))


@pytest.mark.parametrize("content", [b"", b"text", b"\x7fELF\x01\x01" + bytes(60), b"\x7fELF\x02\x01" + bytes(60)])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not an aarch64 ELF file"):
        preload.count_atomics(path)


def test_the_package_s_own_libraries() -> None:
    directory = Path(os.environ.get("VAC_LIBRARY_DIR") or preload.PACKAGE_LIBRARY_DIR)
    if not (directory / "libgomp.so.1").exists():
        pytest.skip("not built here")
    found = preload.count_atomics(directory / "libgomp.so.1")
    assert found.lse > 0
    assert found.exclusive == 0
