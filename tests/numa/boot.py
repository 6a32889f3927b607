"""Boots Debian's arm64 kernel on an emulated machine with several NUMA nodes and runs a command on it.

    boot.py [--timeout SECONDS] [--count-traffic] [--env NAME=VALUE]... MACHINE COMMAND ARG...

MACHINE is a name of ``tests.numa.machines``. The command sees the Arm root and the project as under
``scripts/arm.sh``; what it writes there is forgotten. Its output comes over the serial console, and its exit status
is this program's.
Run by scripts/numa.sh, which prepares the kernel and says where things lie.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from tests.numa.machines import MACHINES, Machine  # noqa: E402

_STATUS = re.compile(r"numa-guest: exit status (\d+)")


def emulator_options(machine: Machine) -> list[str]:
    """What describes the machine itself: cores, nodes, memory, distances."""
    options = ["-M", "virt", "-m", f"{sum(node.mebibytes for node in machine.nodes)}M"]
    # Pointer authentication with the architecture's own cipher takes most of the emulator's time; plugins do not see
    # what SVE loads and stores.
    options += ["-cpu", "max,pauth-impdef=on,sve=off,sme=off", "-accel", "tcg,thread=multi"]
    options += ["-smp", str(sum(len(node.cpus) for node in machine.nodes))]
    for id, node in enumerate(machine.nodes):
        options += ["-object", f"memory-backend-ram,id=memory{id},size={node.mebibytes}M"]
        options += ["-numa", f"node,nodeid={id},cpus={node.cpus[0]}-{node.cpus[-1]},memdev=memory{id}"]
    for id, node in enumerate(machine.nodes):
        for other, distance in enumerate(node.distances):
            if other != id:
                options += ["-numa", f"dist,src={id},dst={other},val={distance}"]
    return options


def share(tag: str, folder: Path, read_only: bool) -> list[str]:
    """A folder that the guest mounts by its tag."""
    what = f"local,id={tag},path={folder},security_model=none,multidevs=remap" + (",readonly=on" if read_only else "")
    return ["-fsdev", what, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]


def traffic_plugin(exchange: Path) -> list[str]:
    """Options that load the counter of accesses, compiled for the installed emulator."""
    version = subprocess.run(["qemu-system-aarch64", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"version (\d+)\.(\d+)", version)
    assert found is not None, version
    # QEMU 9.1 takes plugins from version 2 of the interface on; nothing used here differs.
    api = 3 if (int(found[1]), int(found[2])) >= (9, 1) else 1
    library = exchange.parent / "traffic-plugin.so"
    source = Path(__file__).with_name("traffic_plugin.c")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", f"-DAPI={api}", "-o", library, source], check=True)
    return ["-plugin", f"{library},out={exchange / 'traffic'}"]


def main() -> int:
    """Run the command; 124 when it takes too long, 1 when the machine does not get as far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine", choices=MACHINES)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--count-traffic", action="store_true")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    machine = MACHINES[options.machine]
    kernel, root, inside = (Path(os.environ[name]) for name in ("KERNEL", "GUEST_ROOT", "INSIDE"))

    exchange = PROJECT / "build" / f"numa-{options.machine}"
    exchange.mkdir(parents=True, exist_ok=True)
    (exchange / "machine.json").write_text(json.dumps(asdict(machine)))
    exports = "".join(f"export {shlex.quote(entry)}\n" for entry in options.env)
    (exchange / "job").write_text(f"{exports}cd {shlex.quote(str(inside))}\nexec {shlex.join(options.command)}\n")

    arguments = [
        "qemu-system-aarch64",
        *emulator_options(machine),
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
    ]
    arguments += ["-serial", "stdio", "-monitor", "none", "-no-reboot"]
    arguments += share("root", root, True) + share("project", PROJECT, True) + share("exchange", exchange, False)
    arguments += ["-kernel", str(kernel / "vmlinuz"), "-initrd", str(kernel / "initrd.gz")]
    arguments += ["-append", f"console=ttyAMA0 quiet panic=-1 vac.inside={inside}"]
    if options.count_traffic:
        arguments += traffic_plugin(exchange)
    return run(arguments, options.timeout)


def run(arguments: list[str], timeout: float) -> int:
    """Run the emulator to its end or the time limit, passing on what the command prints."""
    begin = time.monotonic()
    process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    status, text, started = None, b"", False
    try:
        assert process.stdout is not None
        while select.select([process.stdout], [], [], max(0.0, begin + timeout - time.monotonic()))[0]:
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                break
            *lines, text = (text + chunk).replace(b"\r", b"").split(b"\n")
            for line in (raw.decode(errors="replace") for raw in lines):
                found = _STATUS.search(line)
                if found:
                    status = int(found[1])
                elif "numa-guest: begin" in line:
                    started = True
                    print(f"machine up after {time.monotonic() - begin:.1f} s", flush=True)
                else:
                    print(line, flush=True)
        else:
            print(f"{text.decode(errors='replace')}\nnot done after {timeout:.0f} s", flush=True)
            return 124
        process.wait(10)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    print(f"machine off after {time.monotonic() - begin:.1f} s", flush=True)
    if status is None:
        print("the machine ended before its command did" if started else "the machine did not come up", flush=True)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
