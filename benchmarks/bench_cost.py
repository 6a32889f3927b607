"""Model the cost of our kernels and of upstream's on the same cases, and print one table.

    bench_cost.py --root ROOT --site SITE --venv VENV --output FILE [--no-peer] [CASE...]

Under emulation the figures are modelled cycles and instructions (see
cost/armcost.py). The output is a JSON object, case -> {"neoverse-v2": cycles,
"neoverse-n2": ..., "neoverse-v1": ..., "instructions": n, "bytes_read": n,
"peer": {the same keys}}.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "cost"))

import armcost  # noqa: E402

DEFAULT_CASES = (
    *("attn_q1_ctx512", "attn_q1_ctx4096", "attn_q64_ctx256", "attn_q128_ctx128", "cache_write_64", "cache_write_1"),
    *("attn_q1_ctx512_d64", "attn_q1_ctx512_mha", "attn_q1_ctx512_mqa"),
    *("attn_q1_ctx4096_b16", "attn_q64_ctx256_b16", "cache_write_64_b16"),
    *(
        "attn_q1_ctx4096_int8",
        "attn_q1_ctx4096_int8_b16",
        "attn_q64_ctx256_int8",
        "attn_q1_ctx4096_fp8",
        "cache_write_64_int8",
        "cache_write_1_int8",
    ),
    *("attn_q64_ctx256_d64", "attn_q64_ctx256_mha", "attn_q64_ctx256_mqa"),
    *("bf16_m1", "bf16_m4", "bf16_m16", "bf16_m64", "bf16_m256", "bf16_m1_n4096_k14336", "bf16_m1_lm_head_32nd"),
    *("w8a8_m1", "w8a8_m4", "w8a8_m8", "w8a8_m16", "w8a8_m64", "w8a8_m256"),
    *("w4a8_m1", "w4a8_m16", "w4a8_m64", "w4a8_g128_m1", "w4a8_g128_m16", "w4a8_g128_m64"),
    *("w4a8_g32_m1", "w4a8_g32_m16", "w4a8_g32_m64"),
)
# A look-alike of Neoverse V2 and N2: 128-bit SVE.
QEMU_CPU = "max,sve128=on,sme=off"


def measure(command: list[str], root: str, environ: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Case -> figures, for a command that runs one region and prints one JSON line per case."""
    printed, regions = armcost.run(command, root, env=os.environ | {"QEMU_CPU": QEMU_CPU} | environ)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(lines) == len(regions), f"{len(lines)} results of {len(regions)} regions"
    figures = {}
    for line, region in zip(lines, regions, strict=True):
        report = armcost.report(region, armcost.MCPUS)
        name = line.pop("case")
        cycles = {core: round(value["simulated"]) for core, value in report["mcpu"].items()}
        figures[name] = cycles | {"instructions": report["instructions"]} | line
    return figures


def list_cases(command: list[str], environ: dict[str, str]) -> list[str]:
    """Names of the cases of one side."""
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=os.environ | environ).stdout
    names: list[str] = json.loads(printed)
    return names


def build_shim(directory: str, root: str) -> str:
    """The library that lets vLLM's ops load beside the torch on PyPI; nothing that is measured calls it."""
    source, library = Path(directory) / "shim.c", Path(directory) / "shim.so"
    source.write_text("#include <stdlib.h>\nvoid sbgemm_(void) { abort(); }\n")
    command = ["clang-19", "--target=aarch64-linux-gnu", f"--sysroot={root}", "-fuse-ld=lld", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    return str(library)


def table(results: dict[str, dict[str, Any]]) -> str:
    """A line per case: cycles of ours and the peer's per core, the ratio, instructions and bytes."""
    cores = [core for core in ("neoverse-v2", "neoverse-n2", "neoverse-v1")]
    head = f"{'case':24s}" + "".join(
        f"{core[9:].upper() + ' cycles':>13s}{'upstream':>12s}{'ratio':>7s}" for core in cores
    )
    lines = [head + f"{'instructions':>14s}{'bytes read':>12s}"]
    for name, ours in results.items():
        line = f"{name:24s}"
        for core in cores:
            peer = ours.get("peer", {}).get(core)
            line += f"{ours[core]:13,d}" + (f"{peer:12,d}{peer / ours[core]:6.2f}x" if peer else f"{'':19s}")
        lines.append(line + f"{ours['instructions']:14,d}{ours['bytes_read']:12,d}")
    return "\n".join(lines)


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """The same as the documents have it."""
    cores = ("neoverse-v2", "neoverse-n2", "neoverse-v1")
    names = " | ".join(f"{core[9:].upper()} | upstream | " for core in cores)
    lines = [f"| case | {names} | instructions | bytes read |", "|---" * (3 + 3 * len(cores)) + "|"]
    for name, ours in results.items():
        cells = [f"`{name}`"]
        for core in cores:
            peer = ours.get("peer", {}).get(core)
            cells += [f"**{ours[core]:,}**", *((f"{peer:,}", f"{peer / ours[core]:.2f}x") if peer else ("", ""))]
        lines.append("| " + " | ".join([*cells, f"{ours['instructions']:,}", f"{ours['bytes_read']:,}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="the Arm root file system")
    parser.add_argument("--site", required=True, help="where our wheel is installed")
    parser.add_argument("--packages", required=True, help="the Arm root's site-packages, with numpy, torch and vllm")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--markdown", action="store_true", help="print the table as the documents have it")
    parser.add_argument("--no-peer", action="store_true", help="leave upstream out")
    parser.add_argument("cases", nargs="*", metavar="CASE")
    args = parser.parse_args()

    python, script = f"{args.root}/usr/bin/python3", str(HERE / "run_cases.py")
    paths = {"PYTHONPATH": f"{args.site}:{args.packages}", "PYTHONSAFEPATH": "1"}
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(2) as pool:
        upstream = paths | {"UPSTREAM_SHIM": build_shim(directory, args.root)}
        known = list_cases(["qemu-aarch64", "-L", args.root, python, script, "ours"], paths)
        unknown = set(args.cases) - set(known)
        if unknown:
            sys.exit(f"bench-cost: unknown cases {sorted(unknown)}; known: {', '.join(known)}")
        cases = [case for case in args.cases or DEFAULT_CASES if case in known]
        ours = pool.submit(measure, [python, script, "ours", *cases], args.root, paths)
        peer = None
        if not args.no_peer:
            shared = set(list_cases(["qemu-aarch64", "-L", args.root, python, script, "upstream"], upstream))
            peers = [case for case in cases if case in shared]
            peer = pool.submit(measure, [python, script, "upstream", *peers], args.root, upstream)
        results = ours.result()
        for name, figures in (peer.result() if peer else {}).items():
            results[name]["peer"] = {"bytes_read": results[name]["bytes_read"]} | figures
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(results) if args.markdown else table(results))


if __name__ == "__main__":
    main()
