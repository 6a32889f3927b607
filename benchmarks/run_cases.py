"""Run benchmark cases once each, with a region of interest around the call (aarch64, under the cost plugin).

    run_cases.py ours | upstream CASE...      no CASE: list the names

Prints a JSON line per case: its name, and the bytes that it must read (ours) or
the relative error of its result (upstream).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cost"))

from roi import roi

from vllm_arm_cpu import bench
from vllm_arm_cpu.bench import upstream


def main(side: str, names: list[str]) -> None:
    if side == "upstream" and os.environ.get("UPSTREAM_SHIM"):
        ctypes.CDLL(os.environ["UPSTREAM_SHIM"], mode=ctypes.RTLD_GLOBAL)
    known = bench.all_cases() if side == "ours" else upstream.load()
    if not names:
        print(json.dumps(sorted(known)))
        return
    for name in names:
        if side == "ours":
            call, bytes_read = known[name]()
            result: dict[str, object] = {"bytes_read": bytes_read}
        else:
            peer = known[name]()
            call = peer.call
        call()
        with roi():
            call()
        if side == "upstream":
            result = {"relative_error": peer.relative_error()}
        print(json.dumps({"case": name} | result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
