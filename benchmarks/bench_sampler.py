"""Count the instructions of sampling in vLLM's samplers, with our kernels and without, and print a table of each kind.

    bench_sampler.py --root ROOT --site SITE --packages PACKAGES --output FILE [--no-peer]

The output is a JSON object: kind -> case -> {"ours": instructions, "upstream": instructions}.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "cost"))

import armcost  # noqa: E402
from bench_cost import QEMU_CPU, build_shim  # noqa: E402


def measure(side: str, root: str, environ: dict[str, str]) -> dict[tuple[str, str], int]:
    """(kind, case) -> instructions of one side."""
    with tempfile.TemporaryDirectory() as home:
        settings = {"QEMU_CPU": QEMU_CPU, "HOME": home, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("VAC_")}
        command = [f"{root}/usr/bin/python3", str(HERE / "run_sampler.py"), side]
        printed, regions = armcost.run(command, root, env=inherited | settings | environ)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(lines) == len(regions), f"{len(lines)} results of {len(regions)} regions"
    # Seeds have no effect on vLLM 0.32's operators for drafts.
    assert side != "ours" or all(line["repeatable"] for line in lines), lines
    return {
        (line["kind"], line["case"]): sum(count * len(ops) for count, _, ops in region)
        for line, region in zip(lines, regions, strict=True)
    }


def table(kind: str, results: dict[str, dict[str, int]]) -> str:
    """As the documents have it."""
    lines = [f"| {kind} | thousand instructions | upstream |  |", "|---|---|---|---|"]
    for name, sides in results.items():
        cells = [name, f"**{sides['ours'] / 1e3:,.0f}**"]
        if "upstream" in sides:
            cells += [f"{sides['upstream'] / 1e3:,.0f}", f"{sides['upstream'] / sides['ours']:.1f}x"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="the Arm root file system")
    parser.add_argument("--site", required=True, help="where our wheel is installed")
    parser.add_argument("--packages", required=True, help="the Arm root's site-packages, with numpy, torch and vllm")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--no-peer", action="store_true", help="leave upstream out")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(2) as pool:
        safe = {"PYTHONSAFEPATH": "1"}
        ours = safe | {"PYTHONPATH": f"{args.site}:{args.packages}"}
        # The target keeps vLLM from taking the alias for a build without CPU ops. What inductor would
        # compile with a compiler that is not there runs eagerly.
        peer = safe | {
            "PYTHONPATH": args.packages,
            "UPSTREAM_SHIM": build_shim(directory, args.root),
            "VLLM_TARGET_DEVICE": "cpu",
            "TORCHDYNAMO_DISABLE": "1",
        }
        runs = {"ours": pool.submit(measure, "ours", args.root, ours)}
        if not args.no_peer:
            runs["upstream"] = pool.submit(measure, "upstream", args.root, peer)
        sides = {side: run.result() for side, run in runs.items()}
    results: dict[str, dict[str, dict[str, int]]] = {}
    for kind, case in sides["ours"]:
        results.setdefault(kind, {})[case] = {side: counts[kind, case] for side, counts in sides.items()}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print("\n\n".join(table(kind, cases) for kind, cases in results.items()))


if __name__ == "__main__":
    main()
