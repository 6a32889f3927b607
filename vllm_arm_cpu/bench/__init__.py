"""``vllm-arm-cpu bench``: wall time of our kernels on this machine, vLLM's own beside them.

A case is one call on one thread. Where vLLM's compiled CPU ops load, they are
timed on the same shapes in the same run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm_arm_cpu.bench import cases

Case = tuple[Callable[[], object], int]
"""What to call, and the bytes that a call must read from memory."""


def all_cases() -> dict[str, Callable[[], Case]]:
    """Name -> function that prepares the case, from every file in ``bench/cases``."""
    found: dict[str, Callable[[], Case]] = {}
    for module in pkgutil.iter_modules(cases.__path__):
        found |= importlib.import_module(f"{cases.__name__}.{module.name}").CASES
    return found


def median_microseconds(call: Callable[[], object], seconds: float = 0.5) -> float:
    """Median wall time of a call, over as many as fit into the given time, at least 5."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def measure(names: Sequence[str], seconds: float) -> dict[str, dict[str, Any]]:
    """Case -> microseconds, bytes read and, where vLLM's ops load, upstream's microseconds."""
    from vllm_arm_cpu.bench import upstream

    known = all_cases()
    peers = upstream.load()
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        call, bytes_read = known[name]()
        results[name] = {"microseconds": median_microseconds(call, seconds), "bytes_read": bytes_read}
        if name in peers:
            results[name]["upstream_microseconds"] = median_microseconds(peers[name]().call, seconds)
    return results


def table(results: dict[str, dict[str, Any]]) -> str:
    """A line per case."""
    lines = [f"{'case':28s}{'us':>12s}{'GB/s':>8s}{'upstream us':>13s}{'ratio':>8s}"]
    for name, result in results.items():
        ours, peer = result["microseconds"], result.get("upstream_microseconds")
        line = f"{name:28s}{ours:12.1f}{result['bytes_read'] / ours / 1e3:8.1f}"
        lines.append(line + (f"{peer:13.1f}{peer / ours:7.2f}x" if peer else ""))
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(prog="vllm-arm-cpu bench", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--list", action="store_true", help="list the cases")
    parser.add_argument("--seconds", type=float, default=0.5, help="time per case (default: %(default)s)")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all but the largest")
    options = parser.parse_args(argv)
    known = all_cases()
    unknown = [name for name in options.cases if name not in known]
    if unknown:
        parser.error(f"unknown cases {', '.join(unknown)}; --list shows what there is")
    if options.list:
        print("\n".join(known))
        return 0
    # The whole lm_head takes two gigabytes; its 32nd is in the list.
    names = options.cases or [name for name in known if not name.endswith("_lm_head")]
    results = measure(names, options.seconds)
    print(json.dumps(results, indent=1) if options.json else table(results))
    return 0
