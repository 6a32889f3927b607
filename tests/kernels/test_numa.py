"""Collectives over a shared segment: ranks are processes, as in the engine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.kernels import numa_ranks
from tests.kernels.support import DTYPES, decode, encode, ffi, guarded, kernel, lib, pointer, run

SMALL = [1, 2, 63, 64, 65, 130, 1000, 4097]
SLOT = 1 << 16
# Rows of odd lengths, one token and none, more than a slot holds, a row as large as the slot.
NORMS = [
    (1, 256, "bf16"),
    (1, 4099, "bf16"),
    (3, 100, "f32"),
    (7, 77, "f16"),
    (0, 64, "bf16"),
    (37, 2048, "bf16"),
    (5, 16384, "f32"),
]


@pytest.fixture(scope="module", autouse=True)
def quiet_teams() -> Iterator[None]:
    """Threads of the ranks' teams sleep between regions: there are many more of them than cores here."""
    saved = os.environ.get("OMP_WAIT_POLICY")
    os.environ["OMP_WAIT_POLICY"] = "passive"
    yield
    if saved is None:
        del os.environ["OMP_WAIT_POLICY"]
    else:
        os.environ["OMP_WAIT_POLICY"] = saved


@pytest.mark.parametrize(
    ("world_size", "sizes", "large"),
    [
        (2, SMALL, [40_000, 1_000_001]),
        (3, SMALL, [70_003, 1 << 20]),
        (4, SMALL, [33_000]),
        (5, [1, 3, 127, 128, 4097], [100_000]),
        (8, [1, 7, 500, 4097], [40_000]),
        (16, [1, 1000], []),
    ],
)
def test_mixed_calls(world_size: int, sizes: list[int], large: list[int]) -> None:
    """Each rank compares with the sum in rank order; here: all have the same bits."""
    group = numa_ranks.start(world_size, SLOT, numa_ranks.mixed_calls, world_size, sizes, large, NORMS)
    try:
        digests = group.results(range(world_size), 120)
    finally:
        group.end()
    assert len(set(digests)) == 1


def test_special_values() -> None:
    group = numa_ranks.start(2, SLOT, numa_ranks.special_values)
    try:
        first, second = group.results(range(2), 60)
    finally:
        group.end()
    assert first == second
    for dtype, one, two in zip(DTYPES, first[::2], first[1::2], strict=True):
        assert one == two
        values = np.array(one, np.uint32).view(np.float32)
        assert np.isnan(values[:2]).all()
        assert np.isposinf(values[2:4]).all()
        assert (
            np.isposinf(values[4])
            if dtype == "f16"
            else values[4] == decode(encode(np.float32([120000]), dtype), dtype)
        )
        assert values[5] == 0 and np.signbit(values[5])


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_one_rank(threads: int) -> None:
    """A group of one: the sum is the input, the gathered rows are its own."""
    memory = np.zeros(lib.vac_segment_size(1, 100) + 65536, np.uint8)
    segment = ffi.cast("void *", -(-memory.ctypes.data // 65536) * 65536)
    assert lib.vac_segment_create(segment, 1, 100) == 0
    communicator = ffi.new("vac_communicator *", {"segment": segment})
    assert lib.vac_segment_join(communicator) == 0
    for dtype in DTYPES:
        for phases in (0, 1, 2):
            values = encode(np.random.default_rng(1).standard_normal(70_001).astype(np.float32), dtype)
            source = guarded(values)
            args = ffi.new("vac_all_reduce_args *")
            args.communicator, args.out, args.num_rows, args.row_size = (
                communicator,
                pointer(source.array),
                1,
                values.size,
            )
            setattr(args, "in", pointer(source.array))
            args.dtype, args.phases = DTYPES[dtype], phases
            run(kernel("all_reduce"), args, threads)
            assert (source.array == values).all()
            source.check()
    assert lib.vac_segment_state(segment) == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_waiting_does_not_burn_cores(threads: int) -> None:
    group = numa_ranks.start(3, SLOT, numa_ranks.wait_for_late_rank, 1, 2.0, threads)
    try:
        spent = group.results(range(3), 60)
    finally:
        group.end()
    # Waking every 50 ms to look for lost ranks, emulated, is a few percent of a core.
    assert max(spent) < 0.5


def test_killed_rank() -> None:
    """Survivors return as soon as anyone says that the rank is lost."""
    group = numa_ranks.start(3, SLOT, numa_ranks.until_lost, 1, 2)
    try:
        time.sleep(2)
        assert not any(group.connections[rank].poll() for rank in (0, 2))
        group.processes[1].kill()
        lib.vac_segment_abort(group.segment.pointer, lib.VAC_LOSS_DIED, 1)
        begin = time.monotonic()
        found = group.results([0, 2], 10)
        assert time.monotonic() - begin < 3
    finally:
        group.end()
    assert [state for state, _ in found] == [lib.VAC_LOSS_DIED | 1 << 8] * 2
    # The first to say it counts.
    lib.vac_segment_abort(group.segment.pointer, lib.VAC_LOSS_TIMEOUT, 2)
    assert lib.vac_segment_state(group.segment.pointer) == lib.VAC_LOSS_DIED | 1 << 8


def test_hanging_rank() -> None:
    """A wait longer than the limit ends the group and names the rank."""
    group = numa_ranks.start(3, SLOT, numa_ranks.until_lost, 2, 2, timeout_ms=1500)
    try:
        found = group.results([0, 1], 30)
    finally:
        group.end()
    assert [state for state, _ in found] == [lib.VAC_LOSS_TIMEOUT | 2 << 8] * 2
    assert all(1.0 < seconds < 10 for _, seconds in found)


def test_sizes_and_checks() -> None:
    assert lib.vac_segment_size(0, 100) == lib.vac_segment_size(17, 100) == lib.vac_segment_size(2, 0) == 0
    # No more than the slots, their rounding to pages and a page of control for each rank.
    assert lib.vac_segment_size(4, 1 << 20) == (1 + 4) * 65536 + 4 * 2 * (1 << 20)
    memory = np.zeros(lib.vac_segment_size(2, 1) + 65536, np.uint8)
    segment = ffi.cast("void *", -(-memory.ctypes.data // 65536) * 65536)
    communicator = ffi.new("vac_communicator *", {"segment": segment})
    assert lib.vac_segment_join(communicator) == lib.VAC_INVALID_ARGUMENT  # not made yet
    assert lib.vac_segment_create(segment, 17, 1) == lib.VAC_INVALID_ARGUMENT
    assert lib.vac_segment_create(segment, 2, 1) == 0
    assert lib.vac_segment_join(communicator) == 0
    buffer = ffi.new("char[]", 64)
    reduce = {"communicator": communicator, "out": buffer, "in": buffer, "num_rows": 2, "row_size": 4}
    reduce["dtype"] = lib.VAC_BF16
    assert lib.vac_all_reduce_check(ffi.new("vac_all_reduce_args *", reduce)) == 0
    for change in (
        {"dtype": 3},
        {"num_rows": -1},
        {"row_size": -1},
        {"phases": 3},
        {"in": ffi.NULL},
        {"communicator": ffi.NULL},
    ):
        args = ffi.new("vac_all_reduce_args *", {**reduce, **change})
        assert lib.vac_all_reduce_check(args) == lib.VAC_INVALID_ARGUMENT
    fused = {**reduce, "residual": buffer, "num_tokens": 2, "hidden_size": 4}
    fused |= {"out_token_stride": 4, "residual_token_stride": 4}
    del fused["num_rows"], fused["row_size"]
    assert lib.vac_all_reduce_rms_norm_check(ffi.new("vac_all_reduce_rms_norm_args *", fused)) == 0
    weight = {"weight": buffer, "weight_dtype": lib.VAC_F16}
    for change in ({"hidden_size": 40_000}, {"residual": ffi.NULL}, {"out_token_stride": 3}, {"phases": -1}, weight):
        args = ffi.new("vac_all_reduce_rms_norm_args *", {**fused, **change})
        assert lib.vac_all_reduce_rms_norm_check(args) == lib.VAC_INVALID_ARGUMENT
    rows = {"communicator": communicator, "out": buffer, "in": buffer, "num_rows": 2, "row_bytes": 8}
    rows |= {"in_row_stride": 8, "out_row_stride": 16, "out_rank_stride": 8}
    assert lib.vac_gather_check(ffi.new("vac_gather_args *", rows)) == 0
    for change in ({"root": 2}, {"row_bytes": -1}, {"in_row_stride": 7}, {"out_row_stride": 4}, {"in": ffi.NULL}):
        args = ffi.new("vac_gather_args *", {**rows, **change})
        assert lib.vac_gather_check(args) == lib.VAC_INVALID_ARGUMENT
    broadcast = {"communicator": communicator, "buffer": buffer, "num_bytes": 8, "root": 1}
    assert lib.vac_broadcast_check(ffi.new("vac_broadcast_args *", broadcast)) == 0
    for change in ({"root": 2}, {"num_bytes": -1}, {"buffer": ffi.NULL}):
        args = ffi.new("vac_broadcast_args *", {**broadcast, **change})
        assert lib.vac_broadcast_check(args) == lib.VAC_INVALID_ARGUMENT
    communicator.rank = 2
    assert lib.vac_segment_join(communicator) == lib.VAC_INVALID_ARGUMENT
