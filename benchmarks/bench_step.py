"""Count the instructions of a decode step of the whole engine process, ours and vLLM's own, and print one table.

    bench_step.py --root ROOT --site SITE --packages PACKAGES --output FILE [--weights KIND ...] [--sides SIDE ...]
        [--top N] [--async-scheduling]

Two tiny Llama models that differ in their number of layers run in an engine inside one process, on one thread; a
layer's share is the difference between the two, the fixed share what is left. Instructions are told apart by the
library and symbol they lie in. Upstream runs eagerly and, where a compiler is found, as it does by default: compiled
by inductor. --weights bf16 w8a8 w4a8 moe: models of each kind (moe: BF16 with experts); the sides of all but bf16 are
named ``ours_w8a8`` and so on. The output is a JSON object: side -> sequences -> {"fixed": n, "per_layer": n,
"per_layer_outside_gemv": n, "families": {name: {"fixed": n, "per_layer": n}}}; each also has the figures of one
sequence at its top.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "cost"))

import armcost  # noqa: E402
from bench_cost import QEMU_CPU, build_shim  # noqa: E402

# Files, the first that fits, and what runs in them.
FAMILIES = (
    (r"/libvac\.so", "our kernels"),
    (r"/python3[^/]*$", "Python interpreter"),
    (r"/libtorch_python\.so", "torch's Python bindings"),
    (r"/vllm/_C[^/]*$", "vLLM's compiled ops"),
    (r"/(torchinductor|torch_compile_cache)/", "compiled by inductor"),
    (r"/torch/", "torch"),
    (r"/libgomp", "OpenMP runtime"),
    (r"/(_cffi_backend|libffi|_ctypes)[^/]*$", "cffi"),
    (r"/(libc|libm|ld-linux|libpthread|libmimalloc)[^/]*$", "C library"),
    (r"/numpy/", "numpy"),
)
SIDES = ("ours", "upstream_eager", "upstream_default")
GEMV = "GEMV"
# Symbols (or, for our own, source files) of kernels that multiply by a weight.
# What rounds activations for a product is none of it, whatever file it lies in.
GEMV_SYMBOLS = re.compile(
    r"^(?!int4_.*(quantize|lhs_pack)).*(gemm|gemv|brgemm|arm_compute::cpu::kernels|^int4_(w4a8|w4a16|kai)\.tier\.cc)",
    re.I,
)


class Symbols:
    """Names of addresses in one ELF file, by file offset: source file, where that is known, and function."""

    def __init__(self, path: str) -> None:
        self._segments: list[tuple[int, int, int]] = []
        found: dict[int, str] = {}
        file = ""
        printed = subprocess.run(["readelf", "-lsWC", path], capture_output=True, text=True).stdout
        for line in printed.splitlines():
            fields = line.split(None, 7)
            if fields[:1] == ["LOAD"]:
                offset, address, _, size = (int(field, 16) for field in fields[1:5])
                self._segments.append((offset, address, size))
            elif len(fields) == 8 and fields[3] in ("FILE", "FUNC", "NOTYPE", "IFUNC") and fields[6] != "UND":
                # A file's local symbols follow its name; all global ones come last.
                if fields[3] == "FILE":
                    file = fields[7]
                elif not fields[7].startswith("$"):
                    local = fields[4] == "LOCAL"
                    found.setdefault(int(fields[1], 16), f"{file}: {fields[7]}" if local else fields[7])
        self._addresses = sorted(found)
        self._names = [found[address] for address in self._addresses]

    def name(self, file_offset: int) -> str:
        """The symbol at or in front of an offset."""
        address = next((a + file_offset - o for o, a, size in self._segments if o <= file_offset < o + size), 0)
        index = bisect.bisect_right(self._addresses, address) - 1
        return self._names[index] if index >= 0 else ""


class Places:
    """What a process's addresses belong to."""

    def __init__(self, mappings: list[list[Any]], root: str) -> None:
        self._mappings = sorted(mappings)
        self._root = root
        self._symbols: dict[str, Symbols] = {}

    def find(self, pc: int) -> tuple[str, str]:
        """(family, symbol) of an address."""
        index = bisect.bisect_right(self._mappings, pc, key=lambda mapping: mapping[0]) - 1
        begin, end, offset, path = self._mappings[index] if index >= 0 else (0, 0, 0, "")
        if not begin <= pc < end or not path or path.startswith("["):
            # oneDNN's kernels are made at run time; cffi's callbacks are not on this path.
            return GEMV, "(made at run time)"
        if path not in self._symbols:
            inside = Path(self._root + path)
            self._symbols[path] = Symbols(str(inside if inside.exists() else path))
        symbol = self._symbols[path].name(pc - begin + offset)
        family = next((name for pattern, name in FAMILIES if re.search(pattern, path)), "other")
        if family in ("our kernels", "vLLM's compiled ops", "torch") and GEMV_SYMBOLS.search(symbol):
            family = GEMV
        return family, symbol


def measure(
    side: str, kind: str, root: str, environ: dict[str, str], top: int, options: list[str]
) -> dict[int, dict[str, Any]]:
    """Sequences -> figures of one side with one kind of weights."""
    with tempfile.TemporaryDirectory() as directory:
        command = [f"{root}/usr/bin/python3", str(HERE / "run_steps.py"), side, directory, kind, *options]
        if side == "upstream_default":
            environ = environ | compile_natively(Path(directory))
        settings = {
            "QEMU_CPU": QEMU_CPU,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            "HOME": directory,
            "VAC_LINEAR": "vac",
            "VAC_INT4_KERNEL": "vac",
            "VAC_THREADS": "1",
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("VAC_")}
        printed, regions = armcost.run(command, root, env=inherited | settings | environ)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    places = Places(lines.pop()["mappings"], root)
    assert len(lines) == len(regions), f"{len(lines)} results of {len(regions)} regions"
    families: dict[tuple[int, int], Counter[str]] = {}
    symbols: dict[tuple[int, int], Counter[tuple[str, str]]] = {}
    for line, region in zip(lines, regions, strict=True):
        counts: Counter[tuple[str, str]] = Counter()
        for count, pc, ops in region:
            counts[places.find(pc)] += count * len(ops) / line["steps"]
        key = (line["sequences"], line["layers"])
        symbols[key] = counts
        families[key] = Counter()
        for (family, _), count in counts.items():
            families[key][family] += count
    result = {}
    for sequences in sorted({key[0] for key in families}):
        few, many = sorted(layers for s, layers in families if s == sequences)
        small, large = families[sequences, few], families[sequences, many]
        split = {name: _split(small[name], large[name], few, many) for name in sorted({*small, *large})}
        total = _split(small.total(), large.total(), few, many)
        result[sequences] = {
            **total,
            "per_layer_outside_gemv": total["per_layer"] - split.get(GEMV, {"per_layer": 0})["per_layer"],
            "families": split,
        }
        if top:
            few_symbols, many_symbols = symbols[sequences, few], symbols[sequences, many]
            each = {name: _split(few_symbols[name], many_symbols[name], few, many) for name in many_symbols}
            for share in ("fixed", "per_layer"):
                print(f"{side} {kind}, {sequences} sequences, {share}:")
                for (family, symbol), value in sorted(each.items(), key=lambda item: -item[1][share])[:top]:
                    print(f"  {value[share]:12,d}  {family}: {symbol[:110]}")
    return result


def compiler() -> str | None:
    """The native compiler of Arm code, None where it or the headers of this Python are missing."""
    return shutil.which("aarch64-linux-gnu-g++") if Path(sysconfig.get_path("include"), "Python.h").exists() else None


def compile_natively(directory: Path) -> dict[str, str]:
    """Environment with which inductor, emulated, starts this machine's cross compiler."""
    found = compiler()
    assert found is not None
    wrapper = directory / "g++"
    # It asks for the machine it runs on, which is the emulated one.
    wrapper.write_text(
        "#!/bin/bash\n"
        f'exec {found} "${{@/%-march=native/-march=armv8.2-a+fp16+bf16+i8mm}}" -idirafter "$VAC_PYTHON_HEADERS"\n'
    )
    wrapper.chmod(0o755)
    return {
        "CXX": str(wrapper),
        # The same Python release; between 64-bit Linux machines its headers differ in nothing that kernels use.
        "VAC_PYTHON_HEADERS": sysconfig.get_path("include"),
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "torchinductor"),
        "VLLM_CACHE_ROOT": str(directory / "vllm"),
        # Without processes of its own for compiling and for trying vector instructions: each would import torch.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }


def _split(small: float, large: float, few: int, many: int) -> dict[str, int]:
    per_layer = (large - small) / (many - few)
    return {"fixed": round(small - few * per_layer), "per_layer": round(per_layer)}


def table(results: dict[str, dict[int, dict[str, Any]]]) -> str:
    """Instructions of a step in thousands: a line per family and share, a column per side and number of sequences."""
    columns = [(side, sequences) for side in results for sequences in results[side]]
    names = sorted({name for side, sequences in columns for name in results[side][sequences]["families"]})
    lines = [f"{'thousand instructions':36s}" + "".join(f"{f'{side} x{count}':>20s}" for side, count in columns)]

    def line(name: str, values: list[int]) -> str:
        return f"{name:36s}" + "".join(f"{value / 1e3:20,.1f}" for value in values)

    lines.append(line("fixed", [results[s][n]["fixed"] for s, n in columns]))
    lines.append(line("per layer", [results[s][n]["per_layer"] for s, n in columns]))
    lines.append(line("per layer, outside GEMV", [results[s][n]["per_layer_outside_gemv"] for s, n in columns]))
    for share in ("fixed", "per_layer"):
        for name in names:
            values = [results[s][n]["families"].get(name, {share: 0})[share] for s, n in columns]
            lines.append(line(f"  {share.replace('_', ' ')}: {name}", values))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="the Arm root file system")
    parser.add_argument("--site", required=True, help="where our wheel is installed")
    parser.add_argument("--packages", required=True, help="the Arm root's site-packages, with numpy, torch and vllm")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--weights", nargs="+", choices=("bf16", "w8a8", "w4a8", "moe"), default=["bf16"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="default: all that can run")
    parser.add_argument("--top", type=int, default=0, help="also print the N symbols with most instructions")
    parser.add_argument("--async-scheduling", action="store_true", help="with what is off by default")
    args = parser.parse_args()
    options = ["--async-scheduling"] if args.async_scheduling else []
    sides = args.sides or [side for side in SIDES if side != "upstream_default" or compiler()]

    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(2) as pool:
        safe = {"PYTHONSAFEPATH": "1"}
        ours = safe | {"PYTHONPATH": f"{args.site}:{args.packages}"}
        # Without our wheel on the path; the target keeps vLLM from taking the alias for a build without CPU ops.
        peer = safe | {
            "PYTHONPATH": args.packages,
            "UPSTREAM_SHIM": build_shim(directory, args.root),
            "VLLM_TARGET_DEVICE": "cpu",
        }
        runs = {}
        for kind in args.weights:
            suffix = "" if kind == "bf16" else f"_{kind}"
            for side in sides:
                environ = ours if side == "ours" else peer
                runs[f"{side}{suffix}"] = pool.submit(measure, side, kind, args.root, environ, args.top, options)
        results = {side: run.result() for side, run in runs.items()}
    written = {
        side: {key: value for key, value in figures[1].items() if key != "families"} | {"sequences": figures}
        for side, figures in results.items()
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(written, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
