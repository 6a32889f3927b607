#!/usr/bin/env python3
"""Model what regions of aarch64 code cost on Neoverse cores, without one.

The QEMU plugin beside this file dumps each block executed between `hint #96`
and `hint #97` with its count, region by region. Here LLVM disassembles the
blocks, and llvm-mca gives each block's steady-state cycles on a core's
scheduling model; the sum over blocks, weighted by count, is the modelled cost
(L1-resident, no branch misses: a bound that is the same on every run).

  armcost.py [--mcpu M ...] [--top N] [--json] [--root ROOTFS] -- COMMAND ARG ...
      run an aarch64 COMMAND under qemu-aarch64 with the plugin, then report

Needs qemu-user with plugins, gcc and llvm-19.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

LLVM = "19"
MCPUS = ["neoverse-n2", "neoverse-v1", "neoverse-v2"]
CLASSES = [
    ("bfmmla", r"bfmmla"),
    ("i8mm", r"[su]?us?mmla|smmla|ummla"),
    ("dot", r"[su]dot|usdot|sudot"),
    ("bfdot", r"bfdot|bfmlal"),
    ("fma", r"f(n?m(la|ls|adu?b?|add|sub))"),
    ("fdiv", r"fdiv|fsqrt"),
    ("ld", r"ld"),
    ("st", r"st"),
    ("branch", r"b$|b\.|bl|br|ret|cbn?z|tbn?z"),
]


def read(path):
    """The blocks (count, pc, opcodes) of each region, in the order in which the regions were run."""
    regions = []
    for line in Path(path).read_text().splitlines():
        if line.startswith("region"):
            regions.append([])
            continue
        count, _n, pc, *ops = line.split()
        regions[-1].append((int(count), int(pc, 16), ops))
    return regions


def chain(blocks):
    """Join blocks that follow each other in memory and ran equally often.

    QEMU cuts a block at a page end, at a length limit and at each branch, also
    one that is hardly ever taken; costed apart, a loop body cut in two would
    lose the overlap between its halves.
    """
    start = {pc: (c, pc, ops) for c, pc, ops in blocks}

    def follows(a, b):
        return b and abs(a[0] - b[0]) <= 0.02 * max(a[0], b[0])

    prev = {}
    for b in blocks:
        n = start.get(b[1] + 4 * len(b[2]))
        if n and n[1] != b[1] and follows(b, n):
            prev[n[1]] = b[1]
    succ = {v: k for k, v in prev.items()}
    out = []
    for c, pc, ops in blocks:
        if pc in prev:
            continue
        ops, count, at = list(ops), c, pc
        while at in succ and len(ops) < 4000:
            at = succ[at]
            ops += start[at][2]
        out.append((count, pc, ops))
    return out


def disassemble(ops):
    """{opcode hex: assembly text} through one llvm-mc run."""
    ops = sorted(ops)
    text = "\n".join(" ".join("0x" + o[i : i + 2] for i in (6, 4, 2, 0)) for o in ops)
    r = subprocess.run(
        [f"llvm-mc-{LLVM}", "--disassemble", "-triple=aarch64", "-mattr=+all"],
        input=text,
        capture_output=True,
        text=True,
    )
    lines = [line.strip() for line in r.stdout.splitlines() if line.strip() and not line.strip().startswith(".text")]
    if len(lines) != len(ops):  # an undecodable word: fall back to one at a time
        out = {}
        for o in ops:
            t = " ".join("0x" + o[i : i + 2] for i in (6, 4, 2, 0))
            q = subprocess.run(
                [f"llvm-mc-{LLVM}", "--disassemble", "-triple=aarch64", "-mattr=+all"],
                input=t,
                capture_output=True,
                text=True,
            ).stdout
            ls = [line.strip() for line in q.splitlines() if line.strip() and not line.strip().startswith(".text")]
            out[o] = ls[0] if ls else "nop"
        return out
    return dict(zip(ops, lines, strict=False))


def mca(blocks, asm, mcpu):
    """Cycles per execution of each block: (throughput bound, simulated)."""
    src = []
    for i, (_c, _pc, ops) in enumerate(blocks):
        src.append(f"# LLVM-MCA-BEGIN b{i}")
        for o in ops:
            a = asm[o]
            # Calls and returns end a block like any branch; system words cost a slot.
            if re.match(r"(bl|blr|br|ret)\b", a):
                a = "b #0"
            elif re.match(r"(udf|svc|hint|brk|mrs|msr|dmb|dsb|isb)", a):
                a = "nop"
            src.append(a)
        src.append("# LLVM-MCA-END")
    r = subprocess.run(
        [
            f"llvm-mca-{LLVM}",
            "-march=aarch64",
            f"-mcpu={mcpu}",
            "-mattr=+all",
            "--json",
            "-iterations=50",
            "-skip-unsupported-instructions=lack-sched",
        ],
        input="\n".join(src),
        capture_output=True,
        text=True,
    )
    if not r.stdout:
        sys.exit(r.stderr[:2000])
    res = json.loads(r.stdout)
    out = [(0.0, 0.0)] * len(blocks)
    for reg in res["CodeRegions"]:
        s = reg["SummaryView"]
        i = int(reg["Name"][1:])
        out[i] = (s["BlockRThroughput"], s["TotalCycles"] / s["Iterations"])
    return out


def classify(text):
    m = text.split()[0]
    for name, rx in CLASSES:
        if re.match(rx, m):
            return name
    return "simd" if re.search(r"\b[vzqds]\d+\b", text) else "scalar"


def report(region, mcpus, top=0):
    """Instructions, their classes and modelled cycles of one region."""
    merged = {}
    for count, pc, ops in region:
        k = (pc, tuple(ops))
        merged[k] = merged.get(k, 0) + count
    blocks = [(c, pc, ops) for (pc, ops), c in merged.items()]
    asm = disassemble({o for _c, _p, ops in blocks for o in ops})
    insns = sum(c * len(o) for c, _p, o in blocks)
    cls = Counter()
    for c, _p, ops in blocks:
        for o in ops:
            cls[classify(asm[o])] += c
    # Blocks below 1e-5 of all instructions do not move the sum: leave them to a flat 1 IPC.
    hot = [b for b in chain(blocks) if b[0] * len(b[2]) > insns * 1e-5]
    cold = insns - sum(c * len(o) for c, _p, o in hot)
    out = {"instructions": insns, "classes": dict(cls.most_common()), "mcpu": {}}
    for m in mcpus:
        cyc = mca(hot, asm, m)
        out["mcpu"][m] = {
            "bound": sum(b[0] * t for b, (t, _s) in zip(hot, cyc, strict=False)) + cold / 4,
            "simulated": sum(b[0] * s for b, (_t, s) in zip(hot, cyc, strict=False)) + cold / 2,
        }
    if top:
        cyc = mca(hot, asm, mcpus[0])
        rows = sorted(zip(hot, cyc, strict=False), key=lambda r: -r[0][0] * r[1][1])[:top]
        out["top"] = [
            {
                "pc": hex(p),
                "count": c,
                "cycles": s,
                "share": c * s / out["mcpu"][mcpus[0]]["simulated"],
                "asm": [asm[o] for o in ops],
            }
            for (c, p, ops), (_t, s) in rows
        ]
    return out


def plugin():
    """Path of the compiled plugin; compiled when missing or older than its source."""
    src = Path(__file__).with_name("armcost_plugin.c")
    so = Path(tempfile.gettempdir()) / f"armcost-{os.getuid()}-{hashlib.sha256(src.read_bytes()).hexdigest()[:8]}.so"
    if not so.exists():
        version = subprocess.run(["qemu-aarch64", "--version"], capture_output=True, text=True, check=True).stdout
        major, minor = map(int, re.search(r"version (\d+)\.(\d+)", version).groups())
        # QEMU 9.1 changed how a plugin reads an instruction's bytes.
        api = 3 if (major, minor) >= (9, 1) else 1
        fd, partial = tempfile.mkstemp(suffix=".so", dir=so.parent)
        os.close(fd)
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", f"-DAPI={api}", "-o", partial, src], check=True)
        os.replace(partial, so)
    return so


def run(command, root, **options):
    """Run under the emulator; returns (what the command printed, its regions' blocks)."""
    fd, out = tempfile.mkstemp(suffix=".armcost")
    os.close(fd)
    try:
        prefix = ["-L", root] if root else []
        argv = ["qemu-aarch64", *prefix, "-plugin", f"{plugin()},out={out}", *command]
        printed = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, **options).stdout
        return printed, read(out)
    finally:
        os.unlink(out)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("command", nargs="+", metavar="COMMAND")
    ap.add_argument("--mcpu", nargs="+", default=MCPUS)
    ap.add_argument("--top", type=int, default=0, help="also print the N hottest blocks")
    ap.add_argument("--json", action="store_true")
    ap.add_argument("--root", help="aarch64 root file system (qemu -L)")
    a = ap.parse_args()
    printed, regions = run(a.command, a.root)
    reports = [report(region, a.mcpu, a.top) for region in regions]
    if a.json:
        print(json.dumps(reports))
        return
    print(printed, end="")
    for r in reports:
        print(f"instructions {r['instructions']:,}")
        print("classes", "  ".join(f"{k} {v:,}" for k, v in r["classes"].items()))
        for m, v in r["mcpu"].items():
            print(f"{m:12s} cycles: bound {v['bound']:,.0f}  simulated {v['simulated']:,.0f}")
        for t in r.get("top", []):
            print(f"\n{t['share']:.1%} {t['pc']} x{t['count']:,} {t['cycles']:.1f} cyc")
            print("   " + "\n   ".join(t["asm"]))


if __name__ == "__main__":
    main()
