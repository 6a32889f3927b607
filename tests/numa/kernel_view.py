"""Where pages and threads really are: what the kernel says about a process, from outside."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PAGE = os.sysconf("SC_PAGE_SIZE")
_MOVE_PAGES = 239  # on arm64
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long

NOT_THERE = (-errno.ENOENT, -errno.EFAULT)
"""Of a page that was never touched, or is the kernel's page of zeros."""


def nodes_of_pages(pid: int, addresses: Sequence[int] | np.ndarray) -> np.ndarray:
    """``move_pages(2)`` with no target: the node of each page, negative errno where there is none."""
    pages = np.ascontiguousarray(addresses, dtype=np.uint64)
    status = np.full(pages.size, -1000, np.int32)
    arguments = [ctypes.c_long(_MOVE_PAGES), ctypes.c_long(pid), ctypes.c_ulong(pages.size)]
    arguments += [ctypes.c_void_p(pages.ctypes.data), ctypes.c_void_p(None), ctypes.c_void_p(status.ctypes.data)]
    if _syscall(*arguments, ctypes.c_long(0)) != 0:
        raise OSError(ctypes.get_errno(), "move_pages")
    return status


def nodes_of_range(pid: int, address: int, nbytes: int) -> np.ndarray:
    """The node of every page that a range lies in."""
    return nodes_of_pages(pid, np.arange(address // PAGE * PAGE, address + nbytes, PAGE, dtype=np.uint64))


@dataclass(frozen=True)
class Mapping:
    """A line of /proc/PID/numa_maps.

    Attributes:
        policy: in the kernel's words, such as ``"bind:1"``.
        file: its path or the kernel's name for it, "" for plain memory.
        pages: node -> pages of this process.
    """

    address: int
    policy: str
    file: str
    pages: dict[int, int]


def numa_maps(pid: int) -> list[Mapping]:
    """All mappings of a process but those of the kernel's own pages (vDSO)."""
    mappings, of_the_process = [], {begin for begin, _ in _ranges(pid)}
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        address, policy, *fields = line.split()
        if int(address, 16) not in of_the_process:
            continue
        named = dict(field.partition("=")[::2] for field in fields)
        pages = {int(name[1:]): int(value) for name, value in named.items() if re.fullmatch(r"N\d+", name)}
        mappings.append(Mapping(int(address, 16), policy, named.get("file", ""), pages))
    return mappings


def _ranges(pid: int) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        # Beyond the user's half there may be a page of the kernel's.
        if int(end, 16) < 1 << 56 and "[v" not in line:
            yield int(begin, 16), int(end, 16)


def anonymous_pages(pid: int) -> Counter[int]:
    """Node -> pages of a process that are its own: heap, stacks, arenas, changed data of libraries.

    Pages of files and shared memory are not counted: who read them first is nobody's fault.
    """
    nodes: Counter[int] = Counter()
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        for begin, end in _ranges(pid):
            count = (end - begin) // PAGE
            entries = np.frombuffer(os.pread(pagemap.fileno(), 8 * count, begin // PAGE * 8), np.uint64)
            present, of_file = entries >> np.uint64(63) & np.uint64(1), entries >> np.uint64(61) & np.uint64(1)
            own = np.flatnonzero((present == 1) & (of_file == 0)).astype(np.uint64)
            if own.size:
                nodes.update(nodes_of_pages(pid, np.uint64(begin) + own * np.uint64(PAGE)).tolist())
    for status in NOT_THERE:
        nodes.pop(status, None)
    return nodes


def huge_bytes(pid: int, address: int, nbytes: int) -> int:
    """Bytes in transparent huge pages of the mappings that a range lies in (/proc/PID/smaps)."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head:
            inside = int(head[1], 16) < address + nbytes and int(head[2], 16) > address
        elif inside and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) * 1024
    return total


@dataclass(frozen=True)
class Thread:
    """A thread of a process: the CPUs that it may run on, and the one where it was seen last."""

    id: int
    allowed: frozenset[int]
    last: int


def threads(pid: int) -> list[Thread]:
    """All threads of a process."""
    found = []
    for id in sorted(int(name) for name in os.listdir(f"/proc/{pid}/task")):
        fields = Path(f"/proc/{pid}/task/{id}/stat").read_text().rpartition(")")[2].split()
        found.append(Thread(id, frozenset(os.sched_getaffinity(id)), int(fields[36])))
    return found
