"""Experts chosen, rows sorted by expert, and outputs added up by token."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.support import DTYPES, Guarded, decode, encode, ffi, guarded, kernel, lib, run

THREADS = [1, 2, 3, 8]
ROUNDOFF = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


CODES = {"f32": lib.VAC_F32, "f16": lib.VAC_F16, "bf16": lib.VAC_BF16}


def route(logits: np.ndarray, dtype: str, top_k: int, renormalize: bool, case: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and ids [tokens, top_k] of encoded logits."""
    tokens, experts = logits.shape
    at_end = bool(case % 2)
    padded = np.concatenate([logits, encode(np.full((tokens, 5), 99.0, dtype=np.float32), dtype)], axis=1)
    memory = {
        "logits": guarded(padded.reshape(-1)[: max(padded.size - 5, 0)], at_end),
        "topk_weights": guarded(np.full(tokens * top_k, -9, dtype=np.float32), at_end),
        "topk_ids": guarded(np.full(tokens * top_k, -9, dtype=np.int32), at_end),
    }
    args = ffi.new("vac_moe_route_args *")
    args.dtype, args.num_tokens, args.num_experts, args.top_k = CODES[dtype], tokens, experts, top_k
    args.logits = ffi.cast("void *", memory["logits"].array.ctypes.data)
    args.logits_stride, args.renormalize = experts + 5, renormalize
    args.topk_weights = ffi.cast("float *", memory["topk_weights"].array.ctypes.data)
    args.topk_ids = ffi.cast("int32_t *", memory["topk_ids"].array.ctypes.data)
    assert lib.vac_moe_route_check(args) == lib.VAC_OK
    run(kernel("moe_route"), args, THREADS[case % 4])
    for part in memory.values():
        part.check()
    shape = (tokens, top_k)
    return memory["topk_weights"].array.reshape(shape).copy(), memory["topk_ids"].array.reshape(shape).copy()


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_route(dtype: str, renormalize: bool) -> None:
    """The largest logits in falling order, ties by id, and their softmax in FP64."""
    rng = np.random.default_rng(9)
    shapes = [(1, 1, 1), (1, 128, 8), (3, 8, 2), (7, 60, 4), (19, 31, 31), (5, 257, 64), (0, 4, 2), (67, 64, 6)]
    for case, (tokens, experts, top_k) in enumerate(shapes):
        # BF16 has many equal logits here.
        stored = encode((3 * rng.standard_normal((tokens, experts))).astype(np.float32), dtype)
        weights, ids = route(stored, dtype, top_k, renormalize, case)
        logits = decode(stored, dtype).reshape(tokens, experts).astype(np.float64)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
        assert np.array_equal(ids, order)
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        chosen = np.take_along_axis(exponentials, order, axis=1)
        expected = chosen / (chosen if renormalize else exponentials).sum(axis=1, keepdims=True)
        assert np.allclose(weights, expected, rtol=2e-6, atol=0)


def test_route_of_special_values() -> None:
    """NaN and infinities: ids are always different experts."""
    logits = np.zeros((6, 20), dtype=np.float32)
    logits[0, 3] = np.nan
    logits[1] = np.nan
    logits[2] = -np.inf
    logits[3, 5:] = -np.inf
    logits[4, 7] = np.inf
    logits[5, 2], logits[5, 9] = 200, 100
    for renormalize in (False, True):
        weights, ids = route(logits, "f32", 8, renormalize, 1)
        assert all(len(set(row)) == 8 and min(row) >= 0 and max(row) < 20 for row in ids.tolist())
        assert ids[0].tolist() == [0, 1, 2, 4, 5, 6, 7, 8]
        assert ids[1].tolist() == ids[2].tolist() == ids[3].tolist() == list(range(8))
        assert np.isnan(weights[:3]).all()
        assert np.allclose(weights[3], [0.2] * 5 + [0] * 3)
        assert ids[4, 0] == 7 and np.isnan(weights[4, 0])
        assert ids[5, :2].tolist() == [2, 9] and weights[5].tolist() == [1] + [0] * 7


def sort_args(ids: np.ndarray, experts: int, at_end: bool) -> tuple[object, dict[str, Guarded]]:
    tokens, top_k = ids.shape
    stride = top_k + 3
    padded = np.full((tokens, stride), -7, dtype=ids.dtype)
    padded[:, :top_k] = ids
    memory = {
        "topk_ids": guarded(padded.reshape(-1)[: max((tokens - 1) * stride + top_k, 0) if tokens else 0], at_end),
        "expert_start": guarded(np.full(experts + 1, -9, dtype=np.int32), at_end),
        "row_index": guarded(np.full(tokens * top_k, -9, dtype=np.int32), at_end),
        "position": guarded(np.full(tokens * top_k, -9, dtype=np.int32), at_end),
    }
    args = ffi.new("vac_moe_sort_args *")
    args.topk_ids = ffi.cast("void *", memory["topk_ids"].array.ctypes.data)
    args.ids_are_int64 = ids.dtype == np.int64
    args.num_tokens, args.top_k, args.topk_ids_stride, args.num_experts = tokens, top_k, stride, experts
    for name in ("expert_start", "row_index", "position"):
        setattr(args, name, ffi.cast("int32_t *", memory[name].array.ctypes.data))
    return args, memory


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    "tokens,top_k,experts", [(0, 2, 4), (1, 1, 1), (1, 8, 128), (5, 2, 3), (67, 4, 17), (300, 6, 8)]
)
def test_sort(tokens: int, top_k: int, experts: int, dtype: type) -> None:
    """A stable order by expert; ids that are none have no row."""
    rng = np.random.default_rng(tokens)
    for case, threads in enumerate(THREADS):
        ids = rng.integers(-1 if case % 2 else 0, experts + case % 2, (tokens, top_k)).astype(dtype)
        args, memory = sort_args(ids, experts, bool(case % 2))
        assert lib.vac_moe_sort_check(args) == lib.VAC_OK
        run(kernel("moe_sort"), args, threads)
        flat = ids.reshape(-1)
        entries = np.flatnonzero((flat >= 0) & (flat < experts))
        order = entries[np.argsort(flat[entries], kind="stable")]
        expected = np.full(flat.size, -1, dtype=np.int32)
        expected[order] = np.arange(order.size)
        start = np.concatenate([[0], np.cumsum(np.bincount(flat[entries], minlength=experts))])
        assert np.array_equal(memory["expert_start"].array, start)
        assert np.array_equal(memory["row_index"].array[: order.size], order // top_k)
        assert (memory["row_index"].array[order.size :] == -9).all()
        assert np.array_equal(memory["position"].array, expected)
        for part in memory.values():
            part.check()


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_combine(dtype: str, out_dtype: str) -> None:
    """The weighted sum in FP32, rounded once; strides; entries without a row."""
    rng = np.random.default_rng(3)
    shapes = [(1, 1, 1), (1, 8, 257), (3, 2, 64), (7, 3, 100), (19, 4, 31), (2, 0, 9)]
    for case, (tokens, top_k, hidden) in enumerate(shapes):
        at_end, threads = bool(case % 2), THREADS[case % 4]
        rows = encode(rng.standard_normal((max(tokens * top_k, 1), hidden + 5)).astype(np.float32), dtype)
        weights = rng.random((tokens, top_k + 2)).astype(np.float32)
        position = rng.permutation(tokens * top_k).astype(np.int32)
        if case == 3:
            position[4] = position[6] = position[7] = position[8] = -1
        out_size = (tokens - 1) * (hidden + 3) + hidden
        out = guarded(np.full(out_size, 0xFFFFFFFF if out_dtype == "f32" else 0xFFFF, dtype=_bits(out_dtype)), at_end)
        memory = {
            "rows": guarded(rows.reshape(-1)[: rows.size - 5], at_end),
            "topk_weights": guarded(weights.reshape(-1)[: weights.size - 2], at_end),
            "position": guarded(position, at_end),
        }
        args = ffi.new("vac_moe_combine_args *")
        args.dtype, args.out_dtype = CODES[dtype], CODES[out_dtype]
        args.num_tokens, args.top_k, args.hidden_size = tokens, top_k, hidden
        args.topk_weights = ffi.cast("float *", memory["topk_weights"].array.ctypes.data)
        args.topk_weights_stride, args.rows_stride, args.out_stride = top_k + 2, hidden + 5, hidden + 3
        args.position = ffi.cast("int32_t *", memory["position"].array.ctypes.data)
        args.rows = ffi.cast("void *", memory["rows"].array.ctypes.data)
        args.out = ffi.cast("void *", out.array.ctypes.data)
        assert lib.vac_moe_combine_check(args) == lib.VAC_OK
        run(kernel("moe_combine"), args, threads)
        exact = np.zeros((tokens, hidden))
        bound = np.zeros((tokens, hidden))
        values = decode(rows, dtype)[:, :hidden].astype(np.float64)
        for t in range(tokens):
            for j in range(top_k):
                if position[t * top_k + j] >= 0:
                    term = weights[t, j].astype(np.float64) * values[position[t * top_k + j]]
                    exact[t] += term
                    bound[t] += np.abs(term)
        flat = out.array
        for t in range(tokens):
            stored = flat[t * (hidden + 3) : t * (hidden + 3) + hidden].view(encode(np.zeros(1), out_dtype).dtype)
            got = decode(stored, out_dtype).astype(np.float64)
            allowed = ROUNDOFF[out_dtype] * 1.01 * np.abs(exact[t]) + (top_k + 1) * 2.0**-24 * bound[t] + 2.0**-25
            assert (np.abs(got - exact[t]) <= allowed).all()
            gap = flat[t * (hidden + 3) + hidden : (t + 1) * (hidden + 3)].view(np.uint8)
            assert (gap == 0xFF).all(), "padding between rows was written"
        for part in (out, *memory.values()):
            part.check()


def _bits(dtype: str) -> type:
    return np.uint32 if dtype == "f32" else np.uint16


def test_checks() -> None:
    route = ffi.new("vac_moe_route_args *")
    some = np.zeros(8, dtype=np.float32)
    route.num_tokens, route.num_experts, route.top_k, route.logits_stride = 1, 8, 8, 8
    route.logits, route.topk_weights = ffi.cast("void *", some.ctypes.data), ffi.cast("float *", some.ctypes.data)
    route.topk_ids = ffi.cast("int32_t *", some.ctypes.data)
    assert lib.vac_moe_route_check(route) == lib.VAC_OK
    bad = {"dtype": 9, "top_k": 9, "logits_stride": 7, "logits": ffi.NULL, "topk_weights": ffi.NULL}
    for name, value in [*bad.items(), ("top_k", 0), ("topk_ids", ffi.NULL)]:
        old = getattr(route, name)
        setattr(route, name, value)
        assert lib.vac_moe_route_check(route) == lib.VAC_INVALID_ARGUMENT, name
        setattr(route, name, old)
    route.num_experts = route.logits_stride = route.top_k = lib.VAC_MOE_MAX_TOP_K + 1
    assert lib.vac_moe_route_check(route) == lib.VAC_INVALID_ARGUMENT
    args, memory = sort_args(np.zeros((2, 2), dtype=np.int32), 3, True)
    assert lib.vac_moe_sort_check(args) == lib.VAC_OK
    bad = {"topk_ids_stride": 1, "expert_start": ffi.NULL, "row_index": ffi.NULL, "num_tokens": 1 << 31}
    for name, value in bad.items():
        old = getattr(args, name)
        setattr(args, name, value)
        assert lib.vac_moe_sort_check(args) == lib.VAC_INVALID_ARGUMENT, name
        setattr(args, name, old)
    combine = ffi.new("vac_moe_combine_args *")
    weights = np.zeros(8, dtype=np.float32)
    combine.num_tokens, combine.top_k, combine.hidden_size = 1, 1, 4
    combine.topk_weights_stride, combine.rows_stride, combine.out_stride = 1, 4, 4
    combine.topk_weights = ffi.cast("float *", weights.ctypes.data)
    combine.rows = combine.out = ffi.cast("void *", weights.ctypes.data)
    combine.position = ffi.cast("int32_t *", weights.ctypes.data)
    assert lib.vac_moe_combine_check(combine) == lib.VAC_OK
    for name, value in (("dtype", 7), ("out_dtype", -1), ("rows_stride", 3), ("out_stride", 3), ("out", ffi.NULL)):
        old = getattr(combine, name)
        setattr(combine, name, value)
        assert lib.vac_moe_combine_check(combine) == lib.VAC_INVALID_ARGUMENT, name
        setattr(combine, name, old)
    assert len(memory) == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_oai(dtype: str) -> None:
    """gpt-oss's activation in FP64, rounded once; beyond the limits, in place, with gaps, NaN and infinities."""
    rng = np.random.default_rng(5)
    alpha, limit = 1.702, 7.0
    for case, (num_rows, d) in enumerate([(1, 1), (1, 257), (3, 64), (7, 100), (19, 31), (0, 8)]):
        at_end, threads, in_place = bool(case % 2), THREADS[case % 4], case in (2, 3)
        stride = 2 * d + 3
        values = encode((6 * rng.standard_normal((max(num_rows, 1), stride))).astype(np.float32), dtype)
        if case == 3:
            special = encode(np.array([np.nan, np.inf, -np.inf, 1e4, -1e4], dtype=np.float32), dtype)
            values[0, :5], values[1, d : d + 5] = special, special
        x = guarded(values.reshape(-1)[: values.size - 3], at_end)
        out_stride = stride if in_place else d + 5
        size = (num_rows - 1) * out_stride + d if num_rows else 0
        out = x if in_place else guarded(np.full(size, 0x55, dtype=_bits(dtype)), at_end)
        before = out.array[:out_stride].copy()
        args = ffi.new("vac_moe_swiglu_oai_args *")
        args.dtype, args.num_rows, args.d = DTYPES[dtype], num_rows, d
        args.x, args.x_stride = ffi.cast("void *", x.array.ctypes.data), stride
        args.out, args.out_stride = ffi.cast("void *", out.array.ctypes.data), out_stride
        args.alpha, args.limit = alpha, limit
        assert lib.vac_moe_swiglu_oai_check(args) == lib.VAC_OK
        run(kernel("moe_swiglu_oai"), args, threads)
        x.check()
        out.check()
        for row in range(num_rows):
            exact = decode(values[row], dtype).astype(np.float64)
            gate, up = np.minimum(exact[:d], limit), np.clip(exact[d : 2 * d], -limit, limit)
            with np.errstate(all="ignore"):
                sigmoid = 1 / (1 + np.exp(-alpha * gate))
                expected = (up + 1) * np.where(np.isneginf(gate), 0, gate * sigmoid)
            bits = out.array[row * out_stride : row * out_stride + d].view(values.dtype)
            got = decode(bits, dtype).astype(np.float64)
            assert np.array_equal(np.isnan(got), np.isnan(expected))
            # The exponential's error is one rounding of the type at most; FP32's own on top.
            good = np.abs(got - expected) <= 2 * ROUNDOFF[dtype] * np.abs(expected) + 2.0**-22 * 60
            assert (good | np.isnan(expected)).all(), (dtype, num_rows, d, row)
            if not in_place and row + 1 < num_rows:
                assert (out.array[row * out_stride + d : (row + 1) * out_stride] == before[d:]).all()


def test_swiglu_oai_refuses() -> None:
    """Strides that are too small, and a limit that is none."""
    args = ffi.new("vac_moe_swiglu_oai_args *")
    args.dtype, args.d, args.x_stride, args.out_stride, args.limit = DTYPES["f32"], 4, 8, 4, 1
    assert lib.vac_moe_swiglu_oai_check(args) == lib.VAC_OK
    for name, value in (("x_stride", 7), ("out_stride", 3), ("limit", 0), ("dtype", 9), ("num_rows", 1)):
        before = getattr(args, name)
        setattr(args, name, value)
        assert lib.vac_moe_swiglu_oai_check(args) == lib.VAC_INVALID_ARGUMENT, name
        setattr(args, name, before)
