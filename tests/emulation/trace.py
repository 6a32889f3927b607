"""Which instructions of a library a program executes, seen from outside by the emulator."""

from __future__ import annotations

import functools
import re
import shutil
import struct
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def arm_root() -> Path:
    """The Arm root file system that ``make env`` prepared."""
    done = subprocess.run([ROOT / "scripts" / "env.sh", "path"], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()) / "root"


def missing() -> str:
    """What this machine lacks for the tests here, or ""."""
    for tool in ("qemu-aarch64", "aarch64-linux-gnu-gcc", "readelf"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (make env)"
    return "" if (arm_root() / "usr" / "bin" / "python3").exists() else "there is no Arm environment (make env)"


@dataclass(frozen=True)
class Instruction:
    """One that was executed: its address in the library's file, and its encoding."""

    address: int
    word: int

    @property
    def kind(self) -> str:
        """``"ldadd"``, ``"lse"`` (another atomic in one instruction), ``"exclusive"`` or ``""``.

        Encodings: Arm Architecture Reference Manual, "Loads and stores".
        """
        word = self.word
        if word & 0x3F20FC00 == 0x38200000:
            return "ldadd"
        if word & 0x3F208C00 == 0x38200000 or word & 0x3F20FC00 == 0x38208000:
            return "lse"  # LDCLR, LDEOR, LDSET, LDSMAX ... and SWP
        if word & 0x3FA07C00 == 0x08A07C00 or word & 0xBFA07C00 == 0x08207C00:
            return "lse"  # CAS, CASP
        # LDXR, STXR, LDAXR, STLXR, and the pair forms; bit 23 set is LDAR and STLR.
        return "exclusive" if word & 0x3F800000 == 0x08000000 else ""


@dataclass(frozen=True)
class Library:
    """A shared library of the Arm root or of the package."""

    path: Path

    @functools.cached_property
    def content(self) -> bytes:
        return self.path.read_bytes()

    def word(self, address: int) -> int:
        """The instruction at a virtual address of the file."""
        (word,) = struct.unpack_from("<I", self.content, self._offset(address))
        return int(word)

    def function(self, name: str) -> range:
        """Addresses of an exported function."""
        pattern = rf"^\s*\d+: ([0-9a-f]+)\s+(\d+) FUNC .* {re.escape(name)}(?:@.*)?$"
        match = re.search(pattern, self._readelf("--dyn-syms"), re.M)
        assert match, f"{self.path} does not export {name}"
        return range(int(match[1], 16), int(match[1], 16) + int(match[2]))

    def function_around(self, address: int) -> range:
        """Addresses of whichever function an address lies in, exported or not."""
        for low, high in re.findall(r"pc=([0-9a-f]+)\.\.([0-9a-f]+)", self._readelf("--debug-dump=frames")):
            if int(low, 16) <= address < int(high, 16):
                return range(int(low, 16), int(high, 16))
        raise AssertionError(f"{self.path} has no unwind information for {address:#x}")

    def jump_target(self, name: str) -> int:
        """Where an exported function that is one jump, or one call, goes to."""
        for address in self.function(name)[::4]:
            word = self.word(address)
            # B and BL: a signed distance of 26 bits in words.
            if word & 0x7C000000 == 0x14000000:
                return address + (((word & 0x3FFFFFF) ^ 0x2000000) - 0x2000000) * 4
        raise AssertionError(f"{name} of {self.path} goes nowhere")

    def _offset(self, address: int) -> int:
        for offset, low, size in self._segments:
            if low <= address < low + size:
                return address - low + offset
        raise AssertionError(f"{address:#x} is not in {self.path}")

    @functools.cached_property
    def _segments(self) -> list[tuple[int, int, int]]:
        """File offset, virtual address and size of each part that is loaded."""
        rows = re.findall(
            r"^\s*LOAD\s+(0x\w+)\s+(0x\w+)\s+0x\w+\s+(0x\w+)", subprocess_text("readelf", "-lW", self.path), re.M
        )
        return [(int(offset, 16), int(low, 16), int(size, 16)) for offset, low, size in rows]

    def _readelf(self, option: str) -> str:
        return subprocess_text("readelf", "-W", option, self.path)


@dataclass(frozen=True)
class Trace:
    """What a run of a program executed of one library."""

    library: Library
    executed: Counter[Instruction]

    def kinds(self, addresses: range | None = None) -> Counter[str]:
        """How often each kind of atomic was executed, in the whole library or in a function."""
        counts: Counter[str] = Counter()
        for instruction, count in self.executed.items():
            if instruction.kind and (addresses is None or instruction.address in addresses):
                counts[instruction.kind] += count
        return counts


def build(source: Path, directory: Path) -> Path:
    """Compile a C program with OpenMP for the Arm root."""
    program = directory / source.stem
    command = ["aarch64-linux-gnu-gcc", "-O1", "-fopenmp", f"--sysroot={arm_root()}", source, "-o", program]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


def trace(program: Path, cpu: str, directory: Path, preload: Path | None = None) -> Trace:
    """Run a program that prints its mappings of libgomp, and trace what it executes there.

    Args:
        cpu: the emulator's model.
        directory: for the trace.
        preload: a libgomp for LD_PRELOAD; the Arm root's own is found without.
    """
    emulator = ["qemu-aarch64", "-cpu", cpu, "-L", str(arm_root())]
    # Waiting threads sleep: spinning would fill the trace.
    emulator += ["-E", "OMP_WAIT_POLICY=passive", "-E", "OMP_NUM_THREADS=2"]
    if preload is not None:
        emulator += ["-E", f"LD_PRELOAD={preload}"]
    untraced = _mappings(subprocess_text(*emulator, program))
    assert len(untraced) == 1, f"not one libgomp but {untraced}"
    ((path, addresses),) = untraced.items()
    log = directory / "trace"
    # One instruction to a block: the trace of blocks is a trace of instructions then.
    options = [_single_step(), "-d", "exec,nochain", "-D", str(log)]
    options += ["-dfilter", f"{addresses.start:#x}..{addresses.stop - 1:#x}"]
    traced = _mappings(subprocess_text(*emulator, *options, program))
    assert traced == untraced, "the second run has mapped libgomp elsewhere"
    library = Library(Path(path))
    counts: Counter[int] = Counter()
    with log.open(errors="replace") as lines:
        for line in lines:
            if line.startswith("Trace"):
                counts[int(line.split("[", 1)[1].split("/")[1], 16) - addresses.start] += 1
    executed = {Instruction(address, library.word(address)): count for address, count in counts.items()}
    return Trace(library, Counter(executed))


def subprocess_text(*command: str | Path) -> str:
    """Standard output of a command that must succeed."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def _mappings(maps: str) -> dict[str, range]:
    """File -> its addresses from the first mapping to the last, of lines as in /proc/self/maps."""
    found: dict[str, range] = {}
    for low, high, path in re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .* (/\S+)$", maps, re.M):
        start = found[path].start if path in found else int(low, 16)
        found[path] = range(start, int(high, 16))
    return found


@functools.cache
def _single_step() -> str:
    """The emulator's option for one instruction to a block, which was renamed in version 8.1."""
    text = subprocess.run(["qemu-aarch64", "-help"], capture_output=True, text=True, check=False).stdout
    return "-one-insn-per-tb" if "one-insn-per-tb" in text else "-singlestep"
