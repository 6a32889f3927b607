"""Inputs of a step from the requests' state, and sampled tokens back into it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vllm_arm_cpu.native import library

ffi = library.ffi
MAX_LEN, MAX_TOKENS = 40, 64


def pointer(array: np.ndarray, ctype: str) -> Any:
    return ffi.cast(f"{ctype} *", array.ctypes.data)


class State:
    """Requests and the buffers of a step; buffers are one element longer than they may be written."""

    def __init__(self, computed: list[int], known: list[int], blocks: tuple[int, ...] = (16, 5)) -> None:
        rng = np.random.default_rng(0)
        n = len(computed)
        self.computed, self.known = np.array(computed, np.int32), np.array(known, np.int32)
        self.token_ids = rng.integers(0, 1 << 20, (n, MAX_LEN), dtype=np.int32)
        self.is_token_id = np.zeros((n, MAX_LEN), np.uint8)
        self.block_sizes = blocks
        self.tables = [rng.integers(1, 1000, (n, -(-MAX_LEN // size) + 1), dtype=np.int32) for size in blocks]
        self.slots = [np.full(MAX_TOKENS + 1, -7, np.int64) for _ in blocks]
        self.input_ids, self.positions = np.full(MAX_TOKENS + 1, -7, np.int32), np.full(MAX_TOKENS + 1, -7, np.int64)
        self.starts, self.lens = np.full(n + 2, -7, np.int32), np.full(n + 1, -7, np.int32)
        self.incomplete = np.full(n + 1, 7, np.uint8)
        self.groups = ffi.new("vac_step_group[]", len(blocks))
        for group, size, table, slots in zip(self.groups, blocks, self.tables, self.slots, strict=True):
            group.block_table, group.block_table_stride = pointer(table, "int32_t"), table.shape[1]
            group.slot_mapping, group.block_size = pointer(slots, "int64_t"), size

    def run(self, scheduled: list[int] | None) -> tuple[int, Any]:
        counts = None if scheduled is None else np.array(scheduled, np.int32)
        args = ffi.new(
            "vac_step_inputs_args *",
            {
                "num_scheduled_tokens": ffi.NULL if counts is None else pointer(counts, "int32_t"),
                "num_computed_tokens": pointer(self.computed, "int32_t"),
                "num_known_tokens": pointer(self.known, "int32_t"),
                "token_ids": pointer(self.token_ids, "int32_t"),
                "token_ids_stride": MAX_LEN,
                "groups": self.groups,
                "num_groups": len(self.block_sizes),
                "num_reqs": len(self.computed),
                "max_tokens": MAX_TOKENS,
                "input_ids": pointer(self.input_ids, "int32_t"),
                "positions": pointer(self.positions, "int64_t"),
                "query_start_loc": pointer(self.starts, "int32_t"),
                "seq_lens": pointer(self.lens, "int32_t"),
                "incomplete": pointer(self.incomplete, "uint8_t"),
            },
        )
        return library.load().vac_step_inputs(args), args


@pytest.mark.parametrize(
    ("computed", "known", "scheduled"),
    [
        ([5], [6], None),
        ([0, 15, 16, 31, 39], [1, 16, 17, 32, 40], None),
        ([0], [7], [7]),
        ([0, 13, 3, 30], [5, 14, 40, 31], [5, 1, 29, 1]),
        ([4, 10], [40, 12], [17, 2]),
    ],
)
def test_inputs(computed: list[int], known: list[int], scheduled: list[int] | None) -> None:
    """Plain decodes, prefills, chunks and mixtures, over blocks of two sizes."""
    state = State(computed, known)
    status, args = state.run(scheduled)
    assert status == 0
    counts = [1] * len(computed) if scheduled is None else scheduled
    rows = [(r, first + i) for r, (first, n) in enumerate(zip(computed, counts, strict=True)) for i in range(n)]
    total, n = len(rows), len(computed)
    assert state.positions.tolist() == [p for _, p in rows] + [-7] * (MAX_TOKENS + 1 - total)
    assert state.input_ids.tolist() == [state.token_ids[r, p] for r, p in rows] + [-7] * (MAX_TOKENS + 1 - total)
    for size, table, slots in zip(state.block_sizes, state.tables, state.slots, strict=True):
        expected = [table[r, p // size] * size + p % size for r, p in rows]
        assert slots.tolist() == expected + [-7] * (MAX_TOKENS + 1 - total)
    assert state.starts.tolist() == [0, *np.cumsum(counts), -7]
    ends = [first + count for first, count in zip(computed, counts, strict=True)]
    assert state.lens.tolist() == [*ends, -7]
    incomplete = [int(end < all_) for end, all_ in zip(ends, known, strict=True)]
    assert state.incomplete.tolist() == [*incomplete, 7]
    assert (args.num_tokens, args.max_query_len, args.max_seq_len) == (total, max(counts), max(ends))
    assert args.num_incomplete == sum(incomplete)
    assert len(state.incomplete) == n + 1


@pytest.mark.parametrize(
    ("computed", "scheduled"),
    [([3], [0]), ([3, 2], [1, -1]), ([40], None), ([30], [11]), ([0, 0], [40, 25]), ([-1], None)],
)
def test_inputs_refused(computed: list[int], scheduled: list[int] | None) -> None:
    """No tokens, beyond the longest sequence, more than the buffers hold."""
    state = State(computed, computed)
    assert state.run(scheduled)[0] == library.load().VAC_INVALID_ARGUMENT
    assert state.input_ids[-1] == state.positions[-1] == -7


def append(state: State, sampled: list[int], incomplete: list[int]) -> int:
    tokens, mask = np.array(sampled, np.int64), np.array(incomplete, np.uint8)
    args = ffi.new(
        "vac_step_append_args *",
        {
            "sampled": pointer(tokens, "int64_t"),
            "incomplete": pointer(mask, "uint8_t"),
            "token_ids": pointer(state.token_ids, "int32_t"),
            "is_token_id": pointer(state.is_token_id, "uint8_t"),
            "num_known_tokens": pointer(state.known, "int32_t"),
            "token_ids_stride": MAX_LEN,
            "num_reqs": len(sampled),
        },
    )
    status: int = library.load().vac_step_append(args)
    return status


def test_append() -> None:
    """A token each behind the known ones, none where the prompt is not done."""
    state = State([0] * 3, [5, 39, 20])
    expected = state.token_ids.copy()
    expected[0, 5], expected[1, 39] = 11, 12
    assert append(state, [11, 12, 13], [0, 0, 1]) == 0
    assert np.array_equal(state.token_ids, expected)
    assert state.known.tolist() == [6, 40, 20]
    assert np.argwhere(state.is_token_id).tolist() == [[0, 5], [1, 39]]


def test_append_refused() -> None:
    """A full sequence: nothing is written at all."""
    state = State([0] * 2, [5, 40])
    before = state.token_ids.copy()
    assert append(state, [1, 2], [0, 0]) == library.load().VAC_INVALID_ARGUMENT
    assert np.array_equal(state.token_ids, before)
    assert state.known.tolist() == [5, 40]
    assert append(state, [1, 2], [0, 1]) == 0
