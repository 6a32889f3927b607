"""Processes that are the ranks of a group: started by test_numa.py, forked from a server that has run no region yet.

A forked child of a process with OpenMP threads hangs in its first region, so
ranks come from multiprocessing's fork server.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.kernels.support import DTYPES, Guarded, decode, encode, ffi, guarded, kernel, lib, pointer, run

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_PART = 65536
_POOL_SIZE = (1 << 20) + 4096


class Segment:
    """A segment as one process maps it, with guard pages before and behind it."""

    def __init__(self, path: str, world_size: int, slot_bytes: int) -> None:
        self.world_size, self.slot_bytes = world_size, -(-slot_bytes // _PART) * _PART
        self.size = lib.vac_segment_size(world_size, slot_bytes)
        reserved = _libc.mmap(None, self.size + 2 * _PART, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.address = reserved + _PART
        descriptor = os.open(path, os.O_RDWR)
        protection, fixed = mmap.PROT_READ | mmap.PROT_WRITE, 0x10
        mapped = _libc.mmap(self.address, self.size, protection, mmap.MAP_SHARED | fixed, descriptor, 0)
        assert mapped == self.address, ctypes.get_errno()
        os.close(descriptor)
        self.pointer = ffi.cast("void *", self.address)

    def forbid_writes_to_peers(self, rank: int) -> None:
        """Make the slots of all other ranks read-only: a write there ends the process."""
        region = _PART + 2 * self.slot_bytes
        for peer in set(range(self.world_size)) - {rank}:
            slots = self.address + _PART + peer * region + _PART
            assert _libc.mprotect(slots, 2 * self.slot_bytes, mmap.PROT_READ) == 0


class Rank:
    """One rank in its own process: the communicator, and calls of the kernels on guarded memory."""

    def __init__(self, segment: Segment, rank: int, timeout_ms: int = 0) -> None:
        self.segment, self.rank, self.world_size = segment, rank, segment.world_size
        self.communicator = ffi.new("vac_communicator *")
        self.communicator.segment, self.communicator.rank = segment.pointer, rank
        self.communicator.timeout_ms = timeout_ms
        assert lib.vac_segment_join(self.communicator) == 0
        segment.forbid_writes_to_peers(rank)
        self.pool = np.random.default_rng(7).standard_normal(_POOL_SIZE).astype(np.float32)

    @property
    def state(self) -> int:
        return int(lib.vac_segment_state(self.segment.pointer))

    def values(self, rank: int, count: int, salt: int, dtype: str) -> np.ndarray:
        """What a rank contributes to call number ``salt``, in storage format: every rank can tell."""
        start = (rank * 389 + salt * 97) % 4096
        return encode(self.pool[start : start + count] * np.float32(1 + rank), dtype)

    def all_reduce(
        self, count: int, dtype: str, phases: int, salt: int, threads: int, in_place: bool, at_end: bool
    ) -> bytes:
        """Bytes of the result, which is compared with the sum in rank order first."""
        memory = guarded(self.values(self.rank, count, salt, dtype), at_end)
        out = memory if in_place else Guarded(count, memory.dtype, at_end)
        args = ffi.new("vac_all_reduce_args *")
        args.communicator, args.out = self.communicator, pointer(out.array)
        args.num_rows, args.row_size = (count // 5, 5) if count % 5 == 0 else (1, count)
        setattr(args, "in", pointer(memory.array))
        args.dtype, args.phases = DTYPES[dtype], phases
        assert lib.vac_all_reduce_check(args) == 0
        run(kernel("all_reduce"), args, threads)
        expected = decode(self.values(0, count, salt, dtype), dtype).copy()
        for rank in range(1, self.world_size):
            expected += decode(self.values(rank, count, salt, dtype), dtype)
        result = out.array.copy()
        assert (result.view(np.uint8) == encode(expected, dtype).view(np.uint8)).all(), "not the sum in rank order"
        if not in_place:
            assert (memory.array.view(np.uint8) == self.values(self.rank, count, salt, dtype).view(np.uint8)).all()
        memory.check()
        out.check()
        return result.tobytes()

    def all_reduce_rms_norm(
        self, tokens: int, size: int, dtype: str, phases: int, salt: int, threads: int, in_place: bool, plus_one: bool
    ) -> bytes:
        """Bytes of the result and the residual, which have to be those of the two kernels one after the other."""
        count = tokens * size
        weight_dtype = "f32" if salt % 2 else dtype
        weight = guarded(self.values(0, size, salt + 1, weight_dtype), True)
        wide = size + (0 if in_place else 3)
        start = encode(np.resize(self.pool[: size * 3 + 1], (tokens, wide)), dtype)
        memory = guarded(self.values(self.rank, count, salt, dtype), True)
        residual = guarded(start.reshape(-1)[: max(0, start.size - (wide - size))], True)
        out = memory if in_place else Guarded(residual.array.size, memory.dtype, True)
        args = ffi.new("vac_all_reduce_rms_norm_args *")
        args.communicator, args.out, args.residual = self.communicator, pointer(out.array), pointer(residual.array)
        setattr(args, "in", pointer(memory.array))
        args.weight, args.weight_plus_one, args.eps = pointer(weight.array), plus_one, 1e-5
        args.num_tokens, args.hidden_size, args.out_token_stride = tokens, size, wide
        args.residual_token_stride, args.phases = wide, phases
        args.dtype, args.weight_dtype = DTYPES[dtype], DTYPES[weight_dtype]
        assert lib.vac_all_reduce_rms_norm_check(args) == 0
        run(kernel("all_reduce_rms_norm"), args, threads)

        total = decode(self.values(0, count, salt, dtype), dtype).copy()
        for rank in range(1, self.world_size):
            total += decode(self.values(rank, count, salt, dtype), dtype)
        expected = guarded(encode(total, dtype))
        expected_residual = guarded(start.reshape(-1)[: residual.array.size])
        norm = ffi.new("vac_fused_add_rms_norm_args *")
        norm.out = norm.x = pointer(expected.array)
        norm.residual, norm.weight = pointer(expected_residual.array), args.weight
        norm.num_tokens, norm.hidden_size, norm.eps = tokens, size, args.eps
        norm.x_token_stride, norm.out_token_stride, norm.residual_token_stride = size, size, wide
        norm.weight_plus_one, norm.dtype, norm.weight_dtype = plus_one, args.dtype, args.weight_dtype
        run(kernel("fused_add_rms_norm"), norm, 1)
        assert (residual.array.view(np.uint8) == expected_residual.array.view(np.uint8)).all(), "not the residual"
        for token in range(tokens):
            row = out.array[token * wide : token * wide + size]
            assert (row == expected.array[token * size : (token + 1) * size]).all(), "not the norm"
        for buffer in (memory, residual, out, weight):
            buffer.check()
        return out.array.tobytes() + residual.array.tobytes()

    def gather(
        self, rows: int, row_bytes: int, salt: int, threads: int, root: int | None, padding: int, side_by_side: bool
    ) -> bytes:
        """All-gather, or gather to ``root``. Rows lie ``padding`` bytes apart in both arrays."""
        world = self.world_size
        inputs = [np.random.default_rng([rank, salt]).bytes(max(1, rows * row_bytes)) for rank in range(world)]
        matrices = [np.frombuffer(data, np.uint8)[: rows * row_bytes].reshape(rows, row_bytes) for data in inputs]
        mine = np.full((rows, row_bytes + padding), 0xEE, np.uint8)
        mine[:, :row_bytes] = matrices[self.rank]
        memory = guarded(mine.reshape(-1)[: max(0, mine.size - padding)])
        out_columns = (world * row_bytes if side_by_side else row_bytes) + padding
        out_rows = rows if side_by_side else world * rows
        out = Guarded(max(0, out_rows * out_columns - padding), np.uint8)
        args = ffi.new("vac_gather_args *")
        args.communicator, args.num_rows, args.row_bytes = self.communicator, rows, row_bytes
        setattr(args, "in", pointer(memory.array))
        receives = root is None or root == self.rank
        args.out = pointer(out.array) if receives else ffi.NULL
        args.in_row_stride, args.out_row_stride = row_bytes + padding, out_columns
        args.out_rank_stride, args.root = row_bytes if side_by_side else rows * out_columns, root or 0
        assert lib.vac_gather_check(args) == 0
        run(kernel("all_gather" if root is None else "gather"), args, threads)
        memory.check()
        out.check()
        expected = np.full((out_rows, out_columns), Guarded.FILL, np.uint8)
        if receives:
            wide = np.concatenate(matrices, axis=1 if side_by_side else 0)
            expected[:, : wide.shape[1]] = wide
        result = out.array.copy()
        assert (result == expected.reshape(-1)[: result.size]).all(), "not the rows of all ranks"
        return result.tobytes() if root is None else b""

    def broadcast(self, num_bytes: int, salt: int, threads: int, root: int) -> bytes:
        expected = np.frombuffer(np.random.default_rng([salt]).bytes(num_bytes), np.uint8)
        memory = guarded(expected if self.rank == root else np.zeros(num_bytes, np.uint8))
        args = ffi.new("vac_broadcast_args *")
        args.communicator, args.buffer = self.communicator, pointer(memory.array)
        args.num_bytes, args.root = num_bytes, root
        assert lib.vac_broadcast_check(args) == 0
        run(kernel("broadcast"), args, threads)
        memory.check()
        assert (memory.array == expected).all(), "not the root's bytes"
        return memory.array.tobytes()

    def barrier(self, threads: int) -> None:
        args = ffi.new("vac_rank_barrier_args *")
        args.communicator = self.communicator
        run(kernel("rank_barrier"), args, threads)


@dataclass
class Group:
    """The processes of a running group, as their parent sees them."""

    processes: list[Any]
    connections: list[Any]
    segment: Segment
    joined: Any  # its semaphore has a name only as long as this object lives

    def results(self, ranks: Sequence[int], timeout: float) -> list[Any]:
        """What the ranks' bodies returned; fails when one does not within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        found = []
        for rank in ranks:
            connection = self.connections[rank]
            assert connection.poll(max(0.1, deadline - time.monotonic())), f"rank {rank} has not ended"
            kind, value = connection.recv()
            assert kind == "result", f"rank {rank}: {value}"
            found.append(value)
        return found

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def context() -> Any:
    """The fork server's context; its processes do not spin at the end of a region."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["tests.kernels.numa_ranks"])
    return found


def start(world_size: int, slot_bytes: int, body: Callable[..., Any], *arguments: Any, timeout_ms: int = 0) -> Group:
    """Start a group; every rank runs ``body(rank, *arguments)``."""
    descriptor = os.memfd_create("vac-test")
    os.ftruncate(descriptor, lib.vac_segment_size(world_size, slot_bytes))
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    segment = Segment(path, world_size, slot_bytes)
    assert lib.vac_segment_create(segment.pointer, world_size, slot_bytes) == 0
    where = context()
    joined = where.Barrier(world_size)
    processes, connections = [], []
    for rank in range(world_size):
        ours, theirs = where.Pipe()
        process = where.Process(
            target=_main, args=(path, world_size, slot_bytes, rank, timeout_ms, joined, theirs, body, arguments)
        )
        process.start()
        theirs.close()
        processes.append(process)
        connections.append(ours)
    return Group(processes, connections, segment, joined)


def _main(
    path: str,
    world_size: int,
    slot_bytes: int,
    rank: int,
    timeout_ms: int,
    joined: Any,
    connection: Any,
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    signal.alarm(150)
    segment = Segment(path, world_size, slot_bytes)
    try:
        member = Rank(segment, rank, timeout_ms)
        joined.wait(60)
        connection.send(("result", body(member, *arguments)))
    except BaseException as error:
        # The others would wait for this rank.
        lib.vac_segment_abort(segment.pointer, lib.VAC_LOSS_DIED, rank)
        connection.send(("error", repr(error)))


# --- bodies -----------------------------------------------------------------


def mixed_calls(
    member: Rank, seed: int, sizes: Sequence[int], large: Sequence[int], norms: Sequence[tuple[int, int, str]]
) -> str:
    """All kernels in a random order that is the same on all ranks, with delays that are not; a digest of the results.

    norms: (tokens, hidden size, dtype) of all-reduces with a norm behind them.

    Teams have another size on every rank and in every call.
    """
    plan = random.Random(seed)
    own = random.Random(seed * 100 + member.rank)
    digest = hashlib.sha256()
    calls = [(size, dtype, phases) for size in sizes for dtype in DTYPES for phases in (0, 1, 2)]
    calls += [(size, plan.choice(list(DTYPES)), phases) for size in large for phases in (1, 2)]
    plan.shuffle(calls)
    for salt, (size, dtype, phases) in enumerate(calls):
        in_place, at_end = plan.random() < 0.5, plan.random() < 0.5
        other, root = plan.random(), plan.randrange(member.world_size)
        rows, row_bytes = plan.choice([(1, 8), (3, 100), (2, 40000), (7, 1), (0, 5)])
        padding = plan.choice([0, 3])
        side_by_side = plan.random() < 0.5
        if own.random() < 0.15:
            time.sleep(own.random() * 0.004)
        threads = own.choice([1, 1, 2, 3])
        digest.update(member.all_reduce(size, dtype, phases, salt, threads, in_place, at_end))
        if other < 0.1:
            digest.update(member.gather(rows, row_bytes, salt, threads, None, padding, side_by_side))
        elif other < 0.2:
            digest.update(member.gather(rows, row_bytes, salt, threads, root, padding, side_by_side))
        elif other < 0.3:
            digest.update(member.broadcast(row_bytes * 3 + 1, salt, threads, root))
        elif other < 0.35:
            member.barrier(threads)
        assert member.state == 0
    for salt, (tokens, size, dtype) in enumerate(norms):
        for phases in (0, 1, 2):
            in_place, plus_one, threads = plan.random() < 0.5, plan.random() < 0.3, own.choice([1, 2, 3])
            digest.update(member.all_reduce_rms_norm(tokens, size, dtype, phases, salt, threads, in_place, plus_one))
            assert member.state == 0
    return digest.hexdigest()


def special_values(member: Rank) -> list[list[int]]:
    """Bits of sums with NaN, infinities and overflow, in every dtype, by one phase and by two."""
    rows = np.zeros((4, 200), np.float32)
    rows[0, :6] = [np.nan, np.inf, np.inf, 3.0e38, 60000.0, -0.0]
    rows[1, :6] = [1.0, -np.inf, 1.0, 3.0e38, 60000.0, -0.0]
    found = []
    for dtype in DTYPES:
        for phases in (1, 2):
            with np.errstate(over="ignore"):
                memory = guarded(encode(rows[member.rank], dtype))
            args = ffi.new("vac_all_reduce_args *")
            args.communicator, args.out, args.num_rows, args.row_size = (
                member.communicator,
                pointer(memory.array),
                2,
                100,
            )
            setattr(args, "in", pointer(memory.array))
            args.dtype, args.phases = DTYPES[dtype], phases
            run(kernel("all_reduce"), args, 2)
            found.append(decode(memory.array, dtype)[:6].view(np.uint32).tolist())
    return found


def wait_for_late_rank(member: Rank, late: int, seconds: float, threads: int) -> float:
    """Processor time that this rank's process spends while one rank comes late."""
    member.barrier(threads)
    if member.rank == late:
        time.sleep(seconds)
    before = time.process_time()
    member.barrier(threads)
    return time.process_time() - before


def until_lost(member: Rank, lost: int, threads: int) -> tuple[int, float]:
    """Meet until a rank is lost, which takes no part after three rounds: the state, and the seconds of the last."""
    begin = time.monotonic()
    for round in range(1000):
        if member.rank == lost and round == 3:
            time.sleep(100)
        begin = time.monotonic()
        member.barrier(threads)
        if member.state:
            break
    end = time.monotonic() - begin
    # Later calls return at once, whatever they are.
    begin = time.monotonic()
    member.barrier(threads)
    args = ffi.new("vac_all_reduce_args *")
    memory = guarded(np.zeros(1000, np.float32))
    args.communicator, args.out, args.num_rows, args.row_size = member.communicator, pointer(memory.array), 1, 1000
    setattr(args, "in", pointer(memory.array))
    run(kernel("all_reduce"), args, threads)
    assert time.monotonic() - begin < 1
    return member.state, end
