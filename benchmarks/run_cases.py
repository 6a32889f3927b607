"""Run our kernels on the benchmark's cases, one region a case (aarch64, numpy and cffi only).

    run_cases.py [--time] CASE...     no CASE: list the names

Prints a JSON line per case: its name, the bytes that it must read and, with
--time, the median wall time in microseconds (meaningless under emulation).
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cost"))
# Behind the installed package: the sources beside this folder have no library.
sys.path.append(str(Path(__file__).parents[1]))

from roi import roi

from benchmarks import cases


def all_cases() -> dict[str, Callable[[], tuple[Callable[[], None], int]]]:
    """The cases of every file in ``benchmarks/cases``."""
    found: dict[str, Callable[[], tuple[Callable[[], None], int]]] = {}
    for module in pkgutil.iter_modules(cases.__path__):
        found |= importlib.import_module(f"benchmarks.cases.{module.name}").CASES
    return found


def median_microseconds(call: Callable[[], None], seconds: float = 0.5) -> float:
    """Median wall time of a call, over as many as fit into the given time, at least 5."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def main(arguments: list[str]) -> None:
    known = all_cases()
    timed = "--time" in arguments
    names = [argument for argument in arguments if argument != "--time"]
    if not names:
        print(json.dumps(sorted(known)))
        return
    for name in names:
        call, bytes_read = known[name]()
        call()
        result: dict[str, object] = {"case": name, "bytes_read": bytes_read}
        if timed:
            result["microseconds"] = median_microseconds(call)
        else:
            with roi():
                call()
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
