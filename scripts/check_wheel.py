"""Open a built wheel and fail unless its native files are what they must be.

    check_wheel.py WHEEL

Checked: the tag, the list of native files, their machine, SONAME, needed
libraries, the newest symbol versions, text relocations, executable stack, what
libvac exports, and that libgomp has LSE atomics and no load-exclusive loop.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TAG = "py3-none-manylinux_2_34_aarch64"
NEWEST = {"GLIBC": (2, 34), "GOMP": (4, 5)}
# File -> libraries it may need.
NATIVE = {
    "libvac.so": {"libgomp.so.1", "libc.so.6"},
    "libgomp.so.1": {"libc.so.6"},
    "libmimalloc.so": {"libc.so.6", "ld-linux-aarch64.so.1"},
}
HEADERS = {
    "attention.h",
    "base.h",
    "elementwise.h",
    "gemm.h",
    "moe.h",
    "numa.h",
    "quant_int4.h",
    "quant_int8.h",
    "recurrent.h",
    "sampling.h",
    "step.h",
    "threads.h",
}


def main(wheel: Path) -> list[str]:
    """Return what is wrong with the wheel."""
    problems: list[str] = []
    if not wheel.name.endswith(f"-{TAG}.whl"):
        problems.append(f"{wheel.name} is not tagged {TAG}")
    with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
        root = Path(directory)
        tags = re.findall(r"^Tag: (.*)$", next(root.glob("*.dist-info/WHEEL")).read_text(), re.M)
        if tags != [TAG]:
            problems.append(f"the WHEEL file says {tags}")
        found = {path.name: path for path in root.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"}
        if set(found) != set(NATIVE):
            problems.append(f"native files are {sorted(found)}, not {sorted(NATIVE)}")
        for name in sorted(set(found) & set(NATIVE)):
            problems += [f"{name}: {problem}" for problem in check_library(found[name])]
        headers = {path.name for path in root.glob("vllm_arm_cpu/include/vac/*.h")}
        if not headers >= HEADERS:
            problems.append(f"headers missing: {sorted(HEADERS - headers)}")
        entry_points = next(root.glob("*.dist-info/entry_points.txt")).read_text()
        for group in ("vllm.platform_plugins", "vllm.general_plugins", "console_scripts"):
            if f"[{group}]" not in entry_points:
                problems.append(f"no entry point in {group}")
        if "libgomp" not in "".join(p.read_text() for p in root.glob("*.dist-info/licenses/NOTICE")):
            problems.append("NOTICE is missing or does not name libgomp")
    return problems


def check_library(path: Path) -> list[str]:
    """Return what is wrong with one shared library."""
    problems: list[str] = []
    dynamic = readelf("-hldV", path)
    if "AArch64" not in dynamic:
        return ["not an aarch64 library"]
    soname = re.findall(r"\(SONAME\).*\[(.*)\]", dynamic)
    if soname != [path.name]:
        problems.append(f"SONAME is {soname}")
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    if not needed <= NATIVE[path.name]:
        problems.append(f"needs {sorted(needed - NATIVE[path.name])}")
    for family, version in re.findall(r"Name: ([A-Z]+)_([0-9.]+)", dynamic):
        newest = NEWEST.get(family)
        # libgomp itself defines all of its versions.
        if newest and f"LIB{family}.SO" not in path.name.upper() and tuple(map(int, version.split("."))) > newest:
            problems.append(f"needs {family}_{version}, newer than {newest}")
    if "TEXTREL" in dynamic:
        problems.append("has text relocations")
    if re.search(r"GNU_STACK.*RWE", dynamic):
        problems.append("wants an executable stack")
    if re.search(r"\((RPATH|RUNPATH)\)", dynamic):
        problems.append("carries an RPATH")
    if path.name == "libgomp.so.1":
        code = disassemble(path)
        lse = len(re.findall(r"\t(?:ldadd|cas|swp|ldset|ldclr)[a-z]*\t", code))
        exclusive = len(re.findall(r"\tld(?:a)?xr[bh]?\t", code))
        if not lse or exclusive:
            problems.append(f"has {lse} LSE atomics and {exclusive} load-exclusives")
    if path.name == "libvac.so":
        symbols = readelf("--dyn-syms", path)
        exported = re.findall(r"(?:GLOBAL|WEAK)\s+DEFAULT\s+\d+ (\S+)", symbols)
        strangers = [name for name in exported if not name.startswith("vac_")]
        if strangers:
            problems.append(f"exports {strangers}")
    return problems


def readelf(options: str, path: Path) -> str:
    return subprocess.run(["readelf", "-W", *options.split(), path], check=True, capture_output=True, text=True).stdout


def disassemble(path: Path) -> str:
    for tool in ("llvm-objdump-19", "aarch64-linux-gnu-objdump", "objdump"):
        try:
            command = [tool, "-d", "--no-show-raw-insn", path]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout
        except (FileNotFoundError, subprocess.CalledProcessError):
            continue
    raise SystemExit("no objdump that knows aarch64 was found")


if __name__ == "__main__":
    wrong = [problem for name in sys.argv[1:] for problem in main(Path(name))]
    for problem in wrong:
        print(f"wheel: {problem}", file=sys.stderr)
    raise SystemExit(bool(wrong))
