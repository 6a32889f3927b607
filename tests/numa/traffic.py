"""Asks the emulator (traffic_plugin.c) which CPU loaded and stored how many bytes of which page."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.kernels.support import ffi, lib
from tests.numa import kernel_view
from tests.numa.ranks import Member, Ranks

PAGE = 4096
PART = 65536
"""Of a segment: its head, and what each rank's region begins with."""

# As in traffic_plugin.c.
WINDOW = 0x5E00_0000_0000
VIEW = 1 << 32
VIEWS = 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]


@dataclass(frozen=True)
class Access:
    """What one process (view) has loaded from and stored to a page.

    Attributes:
        cpus: from where, a bit for each.
        loaded, stored: bytes, however often.
        loaded_once, stored_once: different bytes.
    """

    view: int
    page: int
    cpus: int
    loaded: int
    stored: int
    loaded_once: int
    stored_once: int


def show(address: int, nbytes: int, view: int) -> int:
    """Map shared memory that is mapped already once more, at its place in the window; returns the address."""
    place = WINDOW + view * VIEW
    may_move, fixed = 1, 2
    mapped = _libc.mremap(address, 0, nbytes, may_move | fixed, place)
    assert mapped == place, os.strerror(ctypes.get_errno())
    return place


class Counter:
    """The plugin's commands; one in a process, which no test's rank is."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._control = WINDOW + VIEWS * VIEW
        fixed = 0x10
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
        mapped = _libc.mmap(self._control, PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        assert mapped == self._control, os.strerror(ctypes.get_errno())
        # Which of the emulator's CPUs is which of the kernel's.
        own = os.sched_getaffinity(0)
        for cpu in own:
            os.sched_setaffinity(0, {cpu})
            self._command(64 * (cpu + 1))
        os.sched_setaffinity(0, own)

    def forget(self) -> None:
        """Start counting from zero."""
        self._command(0)

    def read(self) -> list[Access]:
        """What was counted since."""
        self._output.unlink(missing_ok=True)
        self._command(8)
        deadline = time.monotonic() + 10
        while not (self._output.exists() and self._output.read_text().endswith("end\n")):
            assert time.monotonic() < deadline, "the emulator does not count (boot.py --count-traffic)"
            time.sleep(0.05)
        lines = self._output.read_text().splitlines()[:-1]
        return [Access(*map(int, line.split())) for line in lines]

    def _command(self, offset: int) -> None:
        ctypes.c_uint64.from_address(self._control + offset).value = 1


def open_view(member: Member, slot_bytes: int) -> tuple[int, int]:
    """Show the emulator the segment as this rank sees it. Returns where the segment itself is mapped, and its size.

    Collectives on ``member.kept["communicator"]`` are counted.
    """
    segment = member.segment(slot_bytes)
    address = int(ffi.cast("uintptr_t", segment.pointer))
    size = int(lib.vac_segment_size(member.world_size, slot_bytes))
    communicator = ffi.new("vac_communicator *")
    communicator.segment = ffi.cast("void *", show(address, size, member.rank))
    communicator.rank = member.rank
    member.kept["communicator"] = communicator
    return address, size


class Watched:
    """Ranks whose segment is counted.

    Attributes:
        home: the node of each page of the segment, as its owner's page table says.
    """

    def __init__(self, ranks: Ranks, counter: Counter, slot_bytes: int) -> None:
        self.ranks, self.counter = ranks, counter
        self.world_size = len(ranks.plans)
        views = ranks.call(open_view, slot_bytes)
        size = views[0][1]
        self.region = (size - PART) // self.world_size
        self.home = np.full(size // PAGE, -1)
        for owner, (address, _) in enumerate(views):
            begin = PART + owner * self.region
            pages = slice(begin // PAGE, (begin + self.region) // PAGE)
            self.home[pages] = kernel_view.nodes_of_range(ranks.pids[owner], address + begin, self.region)

    def owner(self, page: int) -> tuple[int, bool]:
        """The rank whose region a page is in, and whether it is one of its slots."""
        owner, offset = divmod(page * PAGE - PART, self.region)
        return owner, owner >= 0 and offset >= PART

    def count(self, function: Callable[..., Any], *arguments: Any) -> list[Access]:
        """What the ranks access while they run a function together; results are compared."""
        self.counter.forget()
        results = self.ranks.call(function, *arguments)
        accesses = self.counter.read()
        assert all(np.array_equal(result, results[0]) for result in results)
        for access in accesses:
            # The right processes were counted, on their own CPUs.
            own = sum(1 << cpu for cpu in self.ranks.plans[access.view].threads.cpus)
            assert access.cpus and access.cpus & ~own == 0, access
        return accesses

    def crossed(self, accesses: list[Access]) -> tuple[int, int]:
        """Bytes of slots that were loaded from a page on another node: each once, and in all."""
        slots = [access for access in accesses if self.owner(access.page)[1]]
        assert all(self.home[access.page] >= 0 for access in slots)
        far = [a for a in slots if self.ranks.plans[a.view].node != self.home[a.page]]
        return sum(a.loaded_once for a in far), sum(a.loaded for a in far)
