"""Preload mimalloc and the libgomp with LSE atomics into the processes that vLLM starts.

A library in LD_PRELOAD that cannot be loaded kills every program that starts
with it, so each is tried in a probe process first. What is mapped in the end
is read back from /proc, never assumed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_arm_cpu import envs
from vllm_arm_cpu.runtime import cpu

PACKAGE_LIBRARY_DIR = Path(__file__).resolve().parent.parent / "lib"
_LIBRARIES = {"mimalloc": "libmimalloc.so", "libgomp": "libgomp.so.1"}

# Base names begin like this. The sanitizers count: they replace malloc as well.
_OPENMP = ("libgomp", "libomp", "libiomp")
_SANITIZERS = ("libasan", "libhwasan", "libtsan", "liblsan")
_ALLOCATORS = ("libmimalloc", "libtcmalloc", "libjemalloc", "libtbbmalloc", "libsnmalloc", "libhoard", *_SANITIZERS)


@dataclass(frozen=True)
class Candidate:
    """One library and whether it is to be preloaded.

    Attributes:
        name: ``"mimalloc"`` or ``"libgomp"``.
        usable: it is in LD_PRELOAD after :func:`install`.
        reason: why not, or what was found.
        failed: it ought to be usable here and is not: worth a warning.
    """

    name: str
    path: str
    usable: bool
    reason: str
    failed: bool = False


@dataclass(frozen=True)
class Mapped:
    """OpenMP runtimes and allocators that are mapped in a process, by path; no allocator means the C library's."""

    openmp: tuple[str, ...]
    allocators: tuple[str, ...]


@dataclass(frozen=True)
class Atomics:
    """How many atomic instructions a library holds: LSE ones, and exclusive loads (LDXR and relatives)."""

    lse: int
    exclusive: int


def plan_preload(
    environ: Mapping[str, str] | None = None,
    info: cpu.CpuInfo | None = None,
    probe: Callable[[Sequence[str], Mapping[str, str]], str] | None = None,
) -> list[Candidate]:
    """Decide about every library; starts at most three short probe processes, none when they were tried before.

    Args:
        environ: environment that children will inherit; the process's by default.
        info: the CPU, detected by default.
        probe: tries to preload paths and returns what went wrong, or "";
            :func:`probe_libraries` by default.

    Raises:
        EnvError: VAC_PRELOAD or VAC_LIBRARY_DIR cannot be used.
    """
    environ = os.environ if environ is None else environ
    info = info or cpu.detect()
    enabled = envs.get("VAC_PRELOAD", environ)
    candidates = []
    for name, filename in _LIBRARIES.items():
        path = _find(filename, environ)
        reason, failed = ("VAC_PRELOAD=0", False) if not enabled else _objection(name, path, info, environ)
        candidates.append(Candidate(name, path, not reason, reason, failed))
    return _try(candidates, environ, probe or probe_libraries)


def install(
    environ: MutableMapping[str, str] | None = None,
    info: cpu.CpuInfo | None = None,
    probe: Callable[[Sequence[str], Mapping[str, str]], str] | None = None,
) -> list[Candidate]:
    """Put the usable libraries in front of LD_PRELOAD; the user's own entries stay, in their order.

    Doing it again, or in a child process, changes nothing.

    Returns:
        All candidates, also those that are not used, with their reasons.
    """
    environ = os.environ if environ is None else environ
    candidates = plan_preload(environ, info, probe)
    before = environ.get("LD_PRELOAD", "")
    # The first process of the tree knows what the user wrote; the others inherit it.
    environ.setdefault(envs.USER_PRELOAD, before)
    known = json.dumps(_results(candidates, environ), separators=(",", ":"))
    if known != "{}":
        environ[envs.PRELOAD_PROBE] = known
    present = set(_entries(before))
    ours = [item.path for item in candidates if item.usable and item.path not in present]
    if ours:
        environ["LD_PRELOAD"] = ":".join([*ours, before] if before else ours)
    return candidates


def after_platform_config(environ: MutableMapping[str, str] | None = None) -> str | None:
    """Take out the tcmalloc that vLLM's CPU platform prepends when our mimalloc is there already.

    ``CpuPlatform.check_and_update_config`` only looks for "libtcmalloc" in
    LD_PRELOAD. Two allocators in one process would share the symbols between
    them. One that the user set stays.

    Returns:
        One line about what was taken out, or None.
    """
    environ = os.environ if environ is None else environ
    entries = _entries(environ.get("LD_PRELOAD", ""))
    ours = _find(_LIBRARIES["mimalloc"], environ)
    users = set(_entries(environ.get(envs.USER_PRELOAD, "")))
    surplus = [entry for entry in entries if _is(entry, ("libtcmalloc",)) and entry not in users]
    if ours not in entries or not surplus:
        return None
    environ["LD_PRELOAD"] = ":".join(entry for entry in entries if entry not in surplus)
    return f"{', '.join(surplus)} is not preloaded: mimalloc is"


def not_mapped(candidates: Sequence[Candidate] | None = None, pid: int | str = "self") -> list[Candidate]:
    """Usable libraries that a process has not mapped: it was started before :func:`install`.

    Args:
        candidates: what :func:`install` returned; planned anew by default
            (without probing when the environment holds the results).

    Raises:
        OSError: there is no such process, or it belongs to someone else.
    """
    mapped = mapped_libraries(pid)
    paths = {os.path.realpath(path) for path in (*mapped.openmp, *mapped.allocators)}
    candidates = plan_preload() if candidates is None else candidates
    return [item for item in candidates if item.usable and os.path.realpath(item.path) not in paths]


def mapped_libraries(pid: int | str = "self", root: str | Path = "/") -> Mapped:
    """Read which OpenMP runtimes and allocators a process has mapped.

    Raises:
        OSError: there is no such process, or it belongs to someone else.
    """
    # Not only mappings that can execute: under emulation those of another process are not, from the kernel's view.
    found: dict[str, None] = {}
    text = (Path(root) / "proc" / str(pid) / "maps").read_text(errors="replace")
    for line in text.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            found[fields[5]] = None
    return Mapped(
        tuple(path for path in found if _is(path, _OPENMP)), tuple(path for path in found if _is(path, _ALLOCATORS))
    )


def preloaded(environ: Mapping[str, str]) -> Mapped:
    """OpenMP runtimes and allocators named in LD_PRELOAD, without looking whether they exist."""
    entries = _entries(environ.get("LD_PRELOAD", ""))
    return Mapped(
        tuple(entry for entry in entries if _is(entry, _OPENMP)),
        tuple(entry for entry in entries if _is(entry, _ALLOCATORS)),
    )


def has_lse_atomics(path: str | Path) -> bool:
    """Whether an aarch64 library holds LSE atomics (some builds choose between both kinds at run time).

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not an aarch64 ELF file.
    """
    return count_atomics(path).lse > 0


def count_atomics(path: str | Path) -> Atomics:
    """Decode the executable sections of an aarch64 ELF file and count atomic instructions.

    Encodings: Arm Architecture Reference Manual, "Loads and stores".

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not an aarch64 ELF file.
    """
    lse = exclusive = 0
    for code in _code(Path(path).read_bytes()):
        # Both families lie in a quarter of the encoding space; this sieve costs one pass.
        for word in [word for word in code if word & 0x0A000000 == 0x08000000]:
            if (
                word & 0x3F208C00 == 0x38200000  # LDADD, LDCLR, LDEOR, LDSET, LDSMAX, LDSMIN, LDUMAX, LDUMIN
                or word & 0x3F20FC00 == 0x38208000  # SWP
                or word & 0x3FA07C00 == 0x08A07C00  # CAS
                or word & 0xBFA07C00 == 0x08207C00  # CASP
            ):
                lse += 1
            elif word & 0x3FE00000 == 0x08400000 or word & 0xBFE00000 == 0x88600000:  # LDXR, LDAXR; LDXP, LDAXP
                exclusive += 1
    return Atomics(lse, exclusive)


def probe_libraries(paths: Sequence[str], environ: Mapping[str, str]) -> str:
    """Start a Python with the paths preloaded and ask it what it has mapped.

    Returns:
        "" when all of them are mapped, else one line that says what went wrong.
    """
    # -I -S: neither site-packages nor PYTHON* variables, so that it takes some 10 ms.
    command = [sys.executable or "/proc/self/exe", "-I", "-S", "-c", "print(open('/proc/self/maps').read())"]
    environment = {**environ, "LD_PRELOAD": ":".join(paths)}
    try:
        # Emulated processes take a second to start, loaded machines several.
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the probe process could not be run: {error}"
    complaint = _last_line(done.stderr)
    if done.returncode != 0:
        return complaint or f"the probe process ended with status {done.returncode}"
    real = {line.split(maxsplit=5)[5] for line in done.stdout.splitlines() if len(line.split(maxsplit=5)) == 6}
    for path in paths:
        # The dynamic linker only grumbles about a missing or foreign file and goes on without it.
        if os.path.realpath(path) not in real:
            return complaint or f"{path} was not mapped by the probe process"
    return ""


def _objection(name: str, path: str, info: cpu.CpuInfo, environ: Mapping[str, str]) -> tuple[str, bool]:
    """Why a library is not to be preloaded, and whether that is a fault; ("", False) when nothing speaks against it."""
    if info.machine != "aarch64":
        return f"this machine is {info.machine}", False
    if info.tier == "none" or "lse" not in info.features:
        return f"this CPU ({info.name}) has no LSE atomics or is otherwise below Armv8.2 with dot product", False
    kinds = _ALLOCATORS if name == "mimalloc" else _OPENMP
    others = [entry for entry in _entries(environ.get("LD_PRELOAD", "")) if _is(entry, kinds) and entry != path]
    if others:
        return f"LD_PRELOAD already has {others[0]}", False
    if not os.path.isfile(path):
        return f"{path} does not exist: reinstall vllm-arm-cpu from its aarch64 wheel", True
    if any(character in path for character in " :\t\n"):
        return f"{path}: LD_PRELOAD cannot hold a path with a space or colon", True
    return "", False


def _try(
    candidates: list[Candidate],
    environ: Mapping[str, str],
    probe: Callable[[Sequence[str], Mapping[str, str]], str],
) -> list[Candidate]:
    """Probe what is still usable and not known: all together first, one by one only to find the culprit."""
    known = _known(environ)
    verdicts: dict[str, str] = {}
    untried = []
    for item in candidates:
        if item.usable:
            result = known.get(item.path)
            if result is not None and result[0] == _fingerprint(item.path):
                verdicts[item.path] = result[1]
            else:
                untried.append(item.path)
    if untried:
        together = probe(untried, environ)
        for path in untried:
            verdicts[path] = "" if not together else together if len(untried) == 1 else probe([path], environ)
        if together and not any(verdicts[path] for path in untried):
            # Each works, both together do not: keep the allocator out, it is the one that others can replace.
            verdicts[untried[0]] = together
    return [
        replace(item, usable=not verdicts[item.path], reason=verdicts[item.path], failed=bool(verdicts[item.path]))
        if item.usable
        else item
        for item in candidates
    ]


def _results(candidates: Sequence[Candidate], environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Probe results to hand on: path -> [fingerprint, what went wrong]."""
    results = {path: list(result) for path, result in _known(environ).items()}
    for item in candidates:
        if item.usable or (item.failed and os.path.isfile(item.path)):
            results[item.path] = [_fingerprint(item.path), "" if item.usable else item.reason]
    return results


def _known(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    try:
        stored = json.loads(environ.get(envs.PRELOAD_PROBE, "{}"))
        return {str(path): (str(result[0]), str(result[1])) for path, result in stored.items()}
    except (ValueError, AttributeError, LookupError, TypeError):
        return {}


def _fingerprint(path: str) -> str:
    try:
        stat = os.stat(path)
    except OSError:
        return ""
    return f"{stat.st_mtime_ns}-{stat.st_size}-{stat.st_ino}"


def _find(filename: str, environ: Mapping[str, str]) -> str:
    directory = envs.get("VAC_LIBRARY_DIR", environ)
    if directory and os.path.isfile(os.path.join(directory, filename)):
        return os.path.join(os.path.abspath(directory), filename)
    return str(PACKAGE_LIBRARY_DIR / filename)


def _entries(text: str) -> list[str]:
    """Entries of LD_PRELOAD: the dynamic linker splits at spaces and colons."""
    return [entry for entry in text.replace(":", " ").split(" ") if entry]


def _is(path: str, kinds: tuple[str, ...]) -> bool:
    return os.path.basename(path).startswith(kinds)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _code(data: bytes) -> list[array[int]]:
    """Executable parts of an aarch64 ELF file as 32-bit words."""

    def number(offset: int, size: int) -> int:
        return int.from_bytes(data[offset : offset + size], "little")

    # 64-bit, little-endian, machine 183.
    if data[:6] != b"\x7fELF\x02\x01" or number(18, 2) != 183:
        raise ValueError("not an aarch64 ELF file")
    ranges = []
    table, size, count = number(40, 8), number(58, 2), number(60, 2)
    for base in range(table, table + size * count, size or 1):
        if number(base + 4, 4) == 1 and number(base + 8, 8) & 4:  # SHT_PROGBITS, SHF_EXECINSTR
            ranges.append((number(base + 24, 8), number(base + 32, 8)))
    if not ranges:
        # Without section headers constants count, too: an executable segment often holds them.
        table, size, count = number(32, 8), number(54, 2), number(56, 2)
        for base in range(table, table + size * count, size or 1):
            if number(base, 4) == 1 and number(base + 4, 4) & 1:  # PT_LOAD, PF_X
                ranges.append((number(base + 8, 8), number(base + 32, 8)))
    parts = []
    for offset, length in ranges:
        words = array("I")
        chunk = data[offset : offset + length]
        words.frombytes(chunk[: len(chunk) // 4 * 4])
        if sys.byteorder == "big":
            words.byteswap()
        parts.append(words)
    return parts
