"""Norms, rotary embedding, gated activations, embedding, addition and row copies."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tests.kernels.support import DTYPES, Guarded, decode, encode, ffi, guarded, kernel, lib, pointer, run

THREADS = [1, 2, 3, 8]
# Half a unit in the last place, relative: 24, 11 and 8 bits of significand.
ROUNDOFF = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
# Columns: below, at and beyond a vector, an unrolled step, a thread's unit.
SIZES = [1, 7, 8, 33, 64, 100, 129, 256]


# Relative error of an activation before its rounding.
ACTIVATION_ERROR = {"f32": 2.0**-20, "f16": 2.0**-15, "bf16": 2.0**-13}


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> np.ndarray:
    """Random values in storage format."""
    return encode(rng.standard_normal(shape).astype(np.float32) * np.float32(scale), dtype)


def strided(values: np.ndarray, padding: int, at_end: bool) -> tuple[Guarded, np.ndarray, int]:
    """Rows of ``values`` with ``padding`` elements between them (none after the last), and the row stride.

    The padding holds NaN: a kernel that reads it into a result is found out, and
    :func:`check_padding` finds one that writes it.
    """
    rows, columns = values.shape
    stride = columns + padding
    memory = Guarded((rows - 1) * stride + columns, values.dtype, at_end)
    memory.array.view(np.uint8)[...] = 0xFF
    view = np.lib.stride_tricks.as_strided(
        memory.array, (rows, columns), (stride * values.itemsize, values.itemsize), writeable=True
    )
    view[...] = values
    return memory, view, stride


def check_padding(memory: Guarded, columns: int, stride: int) -> None:
    memory.check()
    flat = memory.array.view(np.uint8)
    size = memory.array.itemsize
    mask = np.arange(memory.array.size) % stride >= columns
    assert (flat.reshape(-1, size)[mask] == 0xFF).all(), "padding between rows was written"


def assert_close(stored: np.ndarray, expected: np.ndarray, dtype: str, absolute: float = 1e-6) -> None:
    """One rounding of ``dtype`` plus a few of FP32."""
    tolerance = (ROUNDOFF[dtype] * 1.05 + 2.0**-20) * np.abs(expected) + absolute
    if dtype == "f16":
        tolerance = tolerance + 2.0**-24
    error = np.abs(decode(stored, dtype).astype(np.float64) - expected)
    assert (error <= tolerance).all(), f"error {error.max()} at {np.unravel_index(error.argmax(), error.shape)}"


def rms_norm_reference(x: np.ndarray, weight: np.ndarray | None, eps: float, plus_one: bool) -> np.ndarray:
    x = x.astype(np.float64)
    out = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    if weight is None:
        return out
    return out * (weight.astype(np.float64) + plus_one)


WEIGHTS = ["none", "same", "f32"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_kind", WEIGHTS)
@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm(dtype: str, weight_kind: str, plus_one: bool) -> None:
    rng = np.random.default_rng(1)
    for case, (size, rows) in enumerate(itertools.product(SIZES, [1, 5])):
        at_end, in_place, threads = bool(case % 2), case % 3 == 0, THREADS[case % 4]
        weight_dtype = "f32" if weight_kind == "f32" else dtype
        weight = None if weight_kind == "none" else guarded(random(rng, (size,), weight_dtype), at_end)
        values = random(rng, (rows, size), dtype, 3.0)
        x, view, stride = strided(values, case % 5, at_end)
        out, out_view, out_stride = (x, view, stride) if in_place else strided(np.zeros_like(values), 3, at_end)
        args = ffi.new("vac_rms_norm_args *")
        args.out, args.x = pointer(out.array), pointer(x.array)
        args.weight = pointer(None if weight is None else weight.array)
        args.num_tokens, args.num_heads, args.hidden_size = rows, 1, size
        args.x_token_stride, args.out_token_stride = stride, out_stride
        args.eps, args.weight_plus_one = 1e-5, plus_one
        args.dtype, args.weight_dtype = DTYPES[dtype], DTYPES[weight_dtype]
        run(kernel("rms_norm"), args, threads)
        decoded = None if weight is None else decode(weight.array, weight_dtype)
        assert_close(out_view, rms_norm_reference(decode(values, dtype), decoded, 1e-5, plus_one), dtype)
        check_padding(out, size, out_stride)
        if not in_place:
            assert (view == values).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", THREADS)
def test_rms_norm_of_heads_in_place(dtype: str, threads: int) -> None:
    """Query heads inside a wider QKV row: token and head strides differ, in place."""
    rng = np.random.default_rng(2)
    tokens, heads, head_size, head_stride, token_stride = 3, 5, 40, 44, 5 * 44 + 19
    memory = guarded(random(rng, ((tokens - 1) * token_stride + (heads - 1) * head_stride + head_size,), dtype))
    before = memory.array.copy()
    index = (
        np.arange(tokens)[:, None, None] * token_stride + np.arange(heads)[:, None] * head_stride + np.arange(head_size)
    )
    weight = random(rng, (head_size,), dtype)
    args = ffi.new("vac_rms_norm_args *")
    args.out = args.x = pointer(memory.array)
    args.weight = pointer(weight)
    args.num_tokens, args.num_heads, args.hidden_size = tokens, heads, head_size
    args.x_token_stride = args.out_token_stride = token_stride
    args.x_head_stride = args.out_head_stride = head_stride
    args.eps, args.dtype, args.weight_dtype = 1e-6, DTYPES[dtype], DTYPES[dtype]
    run(kernel("rms_norm"), args, threads)
    expected = rms_norm_reference(decode(before, dtype)[index], decode(weight, dtype), 1e-6, False)
    assert_close(memory.array[index], expected, dtype)
    untouched = np.ones(memory.array.size, bool)
    untouched[index] = False
    assert (memory.array[untouched] == before[untouched]).all()
    memory.check()


def test_rms_norm_of_odd_values() -> None:
    """NaN and inf as in torch: a NaN spoils its row, inf turns its own element into NaN and the rest into 0."""
    for dtype in DTYPES:
        values = np.ones((3, 9), np.float32)
        values[0, 3], values[1, 4] = np.nan, np.inf
        values[2] = 0.0
        x = encode(values, dtype)
        args = ffi.new("vac_rms_norm_args *")
        args.out = args.x = pointer(x)
        args.num_tokens, args.num_heads, args.hidden_size = 3, 1, 9
        args.x_token_stride = args.out_token_stride = 9
        args.eps, args.dtype = 1e-5, DTYPES[dtype]
        run(kernel("rms_norm"), args)
        out = decode(x, dtype)
        assert np.isnan(out[0]).all()
        assert np.isnan(out[1, 4])
        assert (np.delete(out[1], 4) == 0).all()
        assert (out[2] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_kind", WEIGHTS)
@pytest.mark.parametrize("plus_one", [False, True])
def test_fused_add_rms_norm(dtype: str, weight_kind: str, plus_one: bool) -> None:
    rng = np.random.default_rng(3)
    for case, (size, rows) in enumerate(itertools.product(SIZES, [1, 5])):
        at_end, in_place, threads = bool(case % 2), case % 3 == 0, THREADS[case % 4]
        weight_dtype = "f32" if weight_kind == "f32" else dtype
        weight = None if weight_kind == "none" else guarded(random(rng, (size,), weight_dtype), at_end)
        values, added = random(rng, (rows, size), dtype), random(rng, (rows, size), dtype, 5.0)
        x, view, stride = strided(values, case % 5, at_end)
        residual, residual_view, residual_stride = strided(added, 1, at_end)
        out, out_view, out_stride = (x, view, stride) if in_place else strided(np.zeros_like(values), 3, at_end)
        args = ffi.new("vac_fused_add_rms_norm_args *")
        args.out, args.x, args.residual = pointer(out.array), pointer(x.array), pointer(residual.array)
        args.weight = pointer(None if weight is None else weight.array)
        args.num_tokens, args.hidden_size = rows, size
        args.x_token_stride, args.residual_token_stride, args.out_token_stride = stride, residual_stride, out_stride
        args.eps, args.weight_plus_one = 1e-5, plus_one
        args.dtype, args.weight_dtype = DTYPES[dtype], DTYPES[weight_dtype]
        run(kernel("fused_add_rms_norm"), args, threads)
        total = decode(values, dtype) + decode(added, dtype)
        decoded = None if weight is None else decode(weight.array, weight_dtype)
        assert (residual_view == encode(total, dtype)).all()
        assert_close(out_view, rms_norm_reference(total, decoded, 1e-5, plus_one), dtype)
        check_padding(out, size, out_stride)
        check_padding(residual, size, residual_stride)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_is_f32", [False, True])
@pytest.mark.parametrize("neox", [False, True])
def test_rotary(dtype: str, cache_is_f32: bool, neox: bool) -> None:
    rng = np.random.default_rng(4)
    cache_dtype = "f32" if cache_is_f32 else dtype
    grid = itertools.product([(2, 2), (16, 20), (64, 64), (80, 96), (26, 30)], [(1, 1, 1), (3, 4, 2), (2, 5, 0)])
    for case, ((rot_dim, head_size), (tokens, heads, kv_heads)) in enumerate(grid):
        max_position, half = 11, rot_dim // 2
        cache = guarded(random(rng, (max_position, rot_dim), cache_dtype), bool(case % 2))
        positions = guarded(rng.integers(0, max_position, tokens), bool(case % 2))
        if tokens == 3:
            positions.array[1] = [-1, max_position][case % 2]
        head_stride, slack = head_size + case % 3, case % 4
        tensors = []
        for count in (heads, kv_heads):
            stride = count * head_stride + slack
            if count == 0:
                tensors.append((None, None, None, 0))
                continue
            elements = (tokens - 1) * stride + (count - 1) * head_stride + head_size
            memory = guarded(random(rng, (elements,), dtype), bool(case % 2))
            index = (
                np.arange(tokens)[:, None, None] * stride + np.arange(count)[:, None] * head_stride + np.arange(rot_dim)
            )
            tensors.append((memory, memory.array.copy(), index, stride))
        args = ffi.new("vac_rotary_args *")
        args.query = pointer(tensors[0][0].array)
        args.key = pointer(tensors[1][0].array if kv_heads else None)
        args.positions, args.cos_sin_cache = ffi.cast("int64_t *", pointer(positions.array)), pointer(cache.array)
        args.num_tokens, args.num_heads, args.num_kv_heads = tokens, heads, kv_heads
        args.rot_dim, args.max_position = rot_dim, max_position
        args.query_token_stride, args.key_token_stride = tensors[0][3], tensors[1][3]
        args.query_head_stride = args.key_head_stride = head_stride
        args.is_neox_style, args.dtype, args.cache_dtype = neox, DTYPES[dtype], DTYPES[cache_dtype]
        run(kernel("rotary"), args, THREADS[case % 4])
        valid = (positions.array >= 0) & (positions.array < max_position)
        rows = decode(cache.array, cache_dtype).astype(np.float64)[np.where(valid, positions.array, 0)][:, None, :]
        cosine, sine = rows[..., :half], rows[..., half:]
        first, second = (slice(0, half), slice(half, None)) if neox else (slice(0, None, 2), slice(1, None, 2))
        for memory, before, index, _ in tensors:
            if memory is None:
                continue
            x = decode(before, dtype)[index].astype(np.float64)
            expected = x.copy()
            expected[valid, :, first] = (x[..., first] * cosine - x[..., second] * sine)[valid]
            expected[valid, :, second] = (x[..., second] * cosine + x[..., first] * sine)[valid]
            assert_close(memory.array[index], expected, dtype)
            untouched = np.ones(memory.array.size, bool)
            untouched[index] = False
            assert (memory.array[untouched] == before[untouched]).all()
            assert (memory.array[index][~valid] == before[index][~valid]).all()
            memory.check()


def activation_reference(x: np.ndarray, activation: int) -> np.ndarray:
    x = x.astype(np.float64)
    if activation == lib.VAC_ACTIVATION_SILU:
        return x / (1 + np.exp(-x))
    if activation == lib.VAC_ACTIVATION_GELU:
        return x * 0.5 * np.vectorize(math.erfc)(-x / math.sqrt(2))
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def run_activation(
    x: np.ndarray,
    out: np.ndarray,
    shape: tuple[int, int],
    strides: tuple[int, int],
    which: tuple[int, str],
    threads: int,
) -> None:
    args = ffi.new("vac_silu_and_mul_args *")
    args.out, args.x = pointer(out), pointer(x)
    args.num_tokens, args.d = shape
    args.x_token_stride, args.out_token_stride = strides
    args.activation, args.dtype = which[0], DTYPES[which[1]]
    run(kernel("silu_and_mul"), args, threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [0, 1, 2])
def test_silu_and_mul(dtype: str, activation: int) -> None:
    rng = np.random.default_rng(5)
    for case, (d, tokens) in enumerate(itertools.product(SIZES, [1, 3])):
        at_end, threads = bool(case % 2), THREADS[(case // 2) % 4]
        values = random(rng, (tokens, 2 * d), dtype, 3.0)
        x, view, stride = strided(values, case % 3, at_end)
        in_place = case % 4 == 3
        out, out_view, out_stride = (x, view[:, :d], stride) if in_place else strided(values[:, :d] * 0, 5, at_end)
        run_activation(x.array, out.array, (tokens, d), (stride, out_stride), (activation, dtype), threads)
        decoded = decode(values, dtype).astype(np.float64)
        expected = activation_reference(decoded[:, :d], activation) * decoded[:, d:]
        tolerance = (ROUNDOFF[dtype] + 1.1 * ACTIVATION_ERROR[dtype]) * np.abs(expected) + 1e-6
        assert (np.abs(decode(out_view, dtype) - expected) <= tolerance).all()
        if in_place:
            assert (view[:, d:] == values[:, d:]).all()
            x.check()
        else:
            check_padding(out, d, out_stride)
            assert (view == values).all()


@pytest.mark.parametrize("activation", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_is_accurate_over_its_range(dtype: str, activation: int) -> None:
    """Relative error along the curve. What GELU loses far out is that of exp(-x^2 / 2) and is bounded separately."""
    x = encode(np.linspace(-12 if activation else -80, 90, 4001, dtype=np.float32), dtype)
    both = np.concatenate([x, encode(np.ones(x.size, np.float32), dtype)])
    out = np.empty_like(x)
    run_activation(both, out, (1, x.size), (0, 0), (activation, dtype), 2)
    values = decode(x, dtype)
    expected = activation_reference(values, activation)
    relative = ACTIVATION_ERROR[dtype]
    if activation:
        # The exponent is rounded to FP32: 2^-24 of it; tanh's reference itself cancels below -5.
        relative = np.where(values < -4, relative + 2.0**-19 + 2.0**-22 * np.minimum(values**2, 200), relative)
    tolerance = (ROUNDOFF[dtype] + relative) * np.abs(expected) + (1e-13 if activation == 2 else 1e-36)
    if dtype == "f16":
        tolerance = tolerance + 2.0**-24
    assert (np.abs(decode(out, dtype) - expected) <= tolerance).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [0, 1, 2])
def test_activation_of_large_and_odd_values(dtype: str, activation: int) -> None:
    largest = 65504.0 if dtype == "f16" else 3.3e38
    x = np.float32([-np.inf, -largest, -1e4, -89.5, 0.0, -0.0, 89.5, 1e4, largest, np.inf, np.nan])
    values = encode(np.concatenate([x, np.ones_like(x)]), dtype)
    out = np.empty(x.size, values.dtype)
    run_activation(values, out, (1, x.size), (0, 0), (activation, dtype), 1)
    result = decode(out, dtype)
    stored = decode(values[: x.size], dtype)
    assert (result[:4] == 0).all()
    assert np.signbit(result[:4]).all()
    assert (result[4:6] == 0).all()
    assert (np.signbit(result[4:6]) == [False, True]).all()
    np.testing.assert_allclose(result[6:9], stored[6:9], rtol=2 * ROUNDOFF[dtype] + ACTIVATION_ERROR[dtype])
    assert result[9] == np.inf
    assert np.isnan(result[10])


def test_exponential_of_silu_f32() -> None:
    """exp(-x) recovered from SiLU's value: relative error below 2^-20."""
    x = np.linspace(-80, -20, 5003, dtype=np.float32)
    both, out = np.concatenate([x, np.ones_like(x)]), np.empty_like(x)
    run_activation(both, out, (1, x.size), (0, 0), (0, "f32"), 1)
    expected = activation_reference(x, 0)
    assert np.abs(out / expected - 1).max() < 2.0**-20


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids_are_int64", [False, True])
def test_embedding(dtype: str, ids_are_int64: bool) -> None:
    rng = np.random.default_rng(6)
    for case, (hidden, tokens) in enumerate(itertools.product(SIZES, [1, 7])):
        start, end = 10, 23
        values = random(rng, (end - start, hidden), dtype)
        table, _, row_stride = strided(values, case % 4, bool(case % 2))
        ids = guarded(rng.integers(0, 30, tokens).astype(np.int64 if ids_are_int64 else np.int32), bool(case % 2))
        ids.array[0] = [start, end - 1, end, -1, start - 1][case % 5]
        out, out_view, out_stride = strided(random(rng, (tokens, hidden), dtype), 2, bool(case % 2))
        args = ffi.new("vac_embedding_args *")
        args.out, args.ids, args.table = pointer(out.array), pointer(ids.array), pointer(table.array)
        args.num_tokens, args.hidden_size, args.vocab_start, args.vocab_end = tokens, hidden, start, end
        args.table_row_stride, args.out_token_stride = row_stride, out_stride
        args.ids_are_int64, args.dtype = ids_are_int64, DTYPES[dtype]
        run(kernel("embedding"), args, THREADS[case % 4])
        ours = (ids.array >= start) & (ids.array < end)
        expected = np.where(ours[:, None], values[np.where(ours, ids.array - start, 0)], values.dtype.type(0))
        assert (out_view == expected).all()
        check_padding(out, hidden, out_stride)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_rows(dtype: str) -> None:
    rng = np.random.default_rng(7)
    for case, (columns, count) in enumerate(itertools.product(SIZES, [1, 6])):
        values = random(rng, (5, columns), dtype)
        x, _, stride = strided(values, case % 4, bool(case % 2))
        index = guarded(rng.integers(-2, 7, count), bool(case % 2))
        out, out_view, out_stride = strided(random(rng, (count, columns), dtype), 2, bool(case % 2))
        args = ffi.new("vac_copy_rows_args *")
        args.out, args.x, args.index = pointer(out.array), pointer(x.array), ffi.cast("int64_t *", pointer(index.array))
        args.num_indices, args.num_rows, args.num_columns = count, 5, columns
        args.x_row_stride, args.out_row_stride, args.dtype = stride, out_stride, DTYPES[dtype]
        run(kernel("copy_rows"), args, THREADS[case % 4])
        valid = (index.array >= 0) & (index.array < 5)
        expected = np.where(valid[:, None], values[np.where(valid, index.array, 0)], values.dtype.type(0))
        assert (out_view == expected).all()
        check_padding(out, columns, out_stride)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add(dtype: str) -> None:
    """The exact sum in FP32, rounded once; every rounding case of BF16 is among the values."""
    rng = np.random.default_rng(8)
    for case, (columns, rows) in enumerate(itertools.product(SIZES, [1, 4])):
        left, right = (
            random(rng, (rows, columns), dtype),
            random(rng, (rows, columns), dtype, 2.0 ** rng.integers(-9, 9)),
        )
        a, a_view, a_stride = strided(left, case % 3, bool(case % 2))
        b, _, b_stride = strided(right, 1, bool(case % 2))
        out, out_view, out_stride = (a, a_view, a_stride) if case % 3 == 1 else strided(left * 0, 2, bool(case % 2))
        args = ffi.new("vac_add_args *")
        args.out, args.a, args.b = pointer(out.array), pointer(a.array), pointer(b.array)
        args.num_rows, args.num_columns = rows, columns
        args.out_row_stride, args.a_row_stride, args.b_row_stride = out_stride, a_stride, b_stride
        args.dtype = DTYPES[dtype]
        run(kernel("add"), args, THREADS[case % 4])
        assert (out_view == encode(decode(left, dtype) + decode(right, dtype), dtype)).all()
        check_padding(out, columns, out_stride)


def test_bf16_rounding_of_odd_values() -> None:
    """Ties go to even, overflow to infinity; NaN with any payload stays NaN; both tiers alike."""
    # a + b in FP32: 1 + half a unit (tie), with an odd last bit (tie), just above a tie; the largest value twice.
    a = np.uint16([0x3F80, 0x3F81, 0x3F80, 0x7F7F, 0xFF7F, 0x7F80, 0x7F81, 0xFFFF, 0x7FFF, 0x0001, 0x8000])
    b = np.uint16([0x3B80, 0x3B80, 0x3B81, 0x7F7F, 0xFF7F, 0xFF80, 0x0000, 0x0000, 0x0000, 0x0000, 0x8000])
    expected = [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0xFF80, None, None, None, None, 0x0001, 0x8000]
    out = np.zeros_like(a)
    args = ffi.new("vac_add_args *")
    args.out, args.a, args.b = pointer(out), pointer(a), pointer(b)
    args.num_rows, args.num_columns, args.dtype = 1, a.size, DTYPES["bf16"]
    run(kernel("add"), args)
    for got, wanted in zip(out.tolist(), expected, strict=True):
        assert (got & 0x7FFF) > 0x7F80 if wanted is None else got == wanted


def test_misaligned_pointers() -> None:
    """Data at any even address, FP32 included."""
    rng = np.random.default_rng(9)
    for dtype in DTYPES:
        values = random(rng, (2, 50), dtype)
        buffer = np.zeros(values.nbytes + 2, np.uint8)
        buffer[2:] = np.frombuffer(values.tobytes(), np.uint8)
        args = ffi.new("vac_rms_norm_args *")
        args.out = args.x = pointer(buffer, 2)
        args.num_tokens, args.num_heads, args.hidden_size = 2, 1, 50
        args.x_token_stride = args.out_token_stride = 50
        args.eps, args.dtype = 1e-5, DTYPES[dtype]
        run(kernel("rms_norm"), args, 2)
        result = np.frombuffer(buffer[2:].tobytes(), values.dtype).reshape(2, 50)
        assert_close(result, rms_norm_reference(decode(values, dtype), None, 1e-5, False), dtype)


def test_no_rows_and_unknown_dtype_write_nothing() -> None:
    x = np.ones(16, np.float32)
    for name in ("rms_norm", "fused_add_rms_norm", "rotary", "silu_and_mul", "embedding", "add", "copy_rows"):
        args = ffi.new(f"vac_{name}_args *")
        run(kernel(name), args, 3)
        args.dtype = 7
        for field, _ in ffi.typeof(f"vac_{name}_args").fields:
            if field in ("out", "x", "a", "b", "residual", "query", "table"):
                setattr(args, field, pointer(x))
            if field.startswith("num_") or field in ("hidden_size", "d"):
                setattr(args, field, 1)
        run(kernel(name), args, 3)
        assert (x == 1).all()
