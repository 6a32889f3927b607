"""A shared memory segment for the ranks of a group, and the watch over the processes that share it.

The memory has no name: a memfd of the first rank, which the others open through
/proc. It is gone with the last process that maps it, however that ended.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_arm_cpu.native import library

ffi = library.ffi


class RankLostError(RuntimeError):
    """A rank of the group has died or hangs; the message says which."""


@dataclass(frozen=True)
class _Identity:
    """What tells whether two processes can share memory, and who they are."""

    machine: str
    pid_namespace: int
    pid: int
    place: str
    descriptor: int = -1
    inode: tuple[int, int] = (0, 0)


class Segment:
    """One rank's view of the group's segment; made by all ranks together.

    Args:
        name: of the group, for messages.
        exchange: takes an object from every rank and returns all of them in the
            order of ranks; called by all ranks alike.
        slot_bytes: longer messages pass in pieces.
        timeout: seconds that a rank waits for another one that lives but does not come; that of a process that has
            ended is noticed at once.
        place: where this rank is, for messages of the others.

    Raises:
        OSError: the ranks are not on one machine, or the kernel refuses; on all ranks alike.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        world_size: int,
        slot_bytes: int,
        exchange: Callable[[Any], list[Any]],
        timeout: int,
        place: str,
    ) -> None:
        self._lib = library.load()
        self.name, self.rank, self.world_size = name, rank, world_size
        self.slot_bytes, self._timeout = slot_bytes, timeout
        size = int(self._lib.vac_segment_size(world_size, slot_bytes))
        descriptor, error = -1, None
        try:
            if size == 0:
                raise OSError(f"groups of {world_size} ranks have no shared memory")
            if rank == 0:
                descriptor = _create(size)
                self._map(descriptor, size)
                self._lib.vac_segment_create(self.pointer, world_size, slot_bytes)
        except OSError as caught:
            error = caught
        try:
            identities: list[_Identity] = exchange(_identity(place, descriptor))
            self.pids = [identity.pid for identity in identities]
            self._places = [identity.place for identity in identities]
            if rank != 0 and error is None:
                try:
                    self._open(identities, size)
                except OSError as caught:
                    error = caught
            if error is None:
                self.communicator = ffi.new("vac_communicator *")
                self.communicator.segment, self.communicator.rank = self.pointer, rank
                self.communicator.timeout_ms = timeout * 1000
                # The first to touch these pages: they come from this rank's node.
                self._lib.vac_segment_join(self.communicator)
            # Nobody goes on before all have joined, or all have given up.
            errors = [text for text in exchange(None if error is None else str(error)) if text is not None]
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        if errors:
            raise OSError(errors[0])
        self._watch = _Watch(self)

    def check(self) -> None:
        """Raise when a rank is lost; asked after every collective.

        Raises:
            RankLostError: the message names the rank, its process and what is known.
        """
        state = int(self._lib.vac_segment_state(self.pointer))
        if state:
            loss, rank = state & 255, state >> 8
            what = "has ended" if loss == self._lib.VAC_LOSS_DIED else f"did not come within {self._timeout} s"
            who = f"rank {rank} of group {self.name} ({self._places[rank]}, process {self.pids[rank]})"
            raise RankLostError(f"{who} {what}")

    def lose(self, rank: int) -> None:
        """Say that a rank's process has ended."""
        self._lib.vac_segment_abort(self.pointer, self._lib.VAC_LOSS_DIED, rank)

    def close(self) -> None:
        """End the watch; the memory goes with the process."""
        self._watch.close()

    def _map(self, descriptor: int, size: int) -> None:
        self._mapping = mmap.mmap(descriptor, size)
        self.pointer = ffi.cast("void *", ctypes.addressof(ctypes.c_char.from_buffer(self._mapping)))

    def _open(self, identities: list[_Identity], size: int) -> None:
        own, first = identities[self.rank], identities[0]
        if first.descriptor < 0:
            raise OSError("rank 0 could not make a segment")
        if (own.machine, own.pid_namespace) != (first.machine, first.pid_namespace):
            raise OSError("the ranks are not on one machine, or not in one container")
        descriptor = os.open(f"/proc/{first.pid}/fd/{first.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != first.inode:
                raise OSError(f"process {first.pid} is another one here")
            self._map(descriptor, size)
        finally:
            os.close(descriptor)


class _Watch:
    """A thread that waits for the other ranks' processes to end."""

    def __init__(self, segment: Segment) -> None:
        self._stop_reader, self._stop_writer = os.pipe2(os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._stop_reader, select.POLLIN)
        self._ranks: dict[int, int] = {}
        for rank, pid in enumerate(segment.pids):
            if rank == segment.rank:
                continue
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                segment.lose(rank)
                continue
            except OSError:
                # A kernel before 5.3: the time limit alone is left.
                continue
            self._ranks[descriptor] = rank
            self._poll.register(descriptor, select.POLLIN)
        self._thread = threading.Thread(target=self._run, args=(segment,), name="vac-rank-watch", daemon=True)
        self._thread.start()

    def _run(self, segment: Segment) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._stop_reader:
                    return
                segment.lose(self._ranks[descriptor])
                self._poll.unregister(descriptor)

    def close(self) -> None:
        if self._thread.is_alive():
            os.write(self._stop_writer, b"x")
            self._thread.join(5)
        for descriptor in (*self._ranks, self._stop_reader, self._stop_writer):
            os.close(descriptor)


def _create(size: int) -> int:
    descriptor = os.memfd_create("vllm-arm-cpu", os.MFD_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _identity(place: str, descriptor: int) -> _Identity:
    boot = Path("/proc/sys/kernel/random/boot_id")
    status = os.fstat(descriptor) if descriptor >= 0 else None
    return _Identity(
        boot.read_text().strip() if boot.exists() else os.uname().nodename,
        os.stat("/proc/self/ns/pid").st_ino,
        os.getpid(),
        place,
        descriptor,
        (status.st_dev, status.st_ino) if status else (0, 0),
    )
