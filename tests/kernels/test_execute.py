"""The driver: op lists, barriers and teams of any size."""

import errno
import os

import numpy as np
import pytest

from tests.kernels.support import ffi, lib


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_barrier_orders_ops(num_threads: int) -> None:
    """Each op adds its thread's share; behind a barrier every thread sees all of them."""
    rounds = 50
    seen = np.zeros((rounds, num_threads), np.int64)
    total = np.zeros(num_threads, np.int64)

    @ffi.callback("void(void *, uint32_t, uint32_t)")
    def add(args: object, index: int, count: int) -> None:
        total[index] += 1

    @ffi.callback("void(void *, uint32_t, uint32_t)")
    def look(args: object, index: int, count: int) -> None:
        seen[int(ffi.cast("intptr_t", args)), index] = total[:count].sum()

    ops = ffi.new("vac_op[]", 2 * rounds)
    for i in range(rounds):
        ops[2 * i].kernel, ops[2 * i].flags = add, lib.VAC_OP_BARRIER_AFTER
        ops[2 * i + 1].kernel, ops[2 * i + 1].args = look, ffi.cast("void *", i)
        ops[2 * i + 1].flags = lib.VAC_OP_BARRIER_AFTER
    assert lib.vac_execute(ops, 2 * rounds, num_threads) == 0
    team = int((total > 0).sum())
    assert (seen[:, :team] == team * (1 + np.arange(rounds))[:, None]).all()


def test_tier_can_be_lowered_never_raised() -> None:
    best = lib.vac_cpu_tier()
    assert lib.vac_tier() == best
    assert lib.vac_set_tier(best + 1) == lib.VAC_UNSUPPORTED
    assert lib.vac_set_tier(lib.VAC_TIER_NONE) == lib.VAC_UNSUPPORTED
    assert lib.vac_set_tier(lib.VAC_TIER_DOTPROD) == 0
    assert lib.vac_tier() == lib.VAC_TIER_DOTPROD
    assert lib.vac_set_tier(best) == 0


def test_pinned_threads_stay_where_they_were_bound() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    try:
        wanted = np.array([allowed[-1]] * 2, np.int32)
        assert lib.vac_pin_threads(ffi.cast("int32_t *", wanted.ctypes.data), 2) == 2
        seen = np.zeros(2, np.int32)
        lib.vac_thread_cpus(ffi.cast("int32_t *", seen.ctypes.data), 2)
        assert (seen == wanted).all()
        nowhere = np.array([4095], np.int32)
        assert lib.vac_pin_threads(ffi.cast("int32_t *", nowhere.ctypes.data), 1) == -errno.EINVAL
    finally:
        os.sched_setaffinity(0, allowed)
