"""INT8 linears: quantized rows, packed weights, products and the fused producers, against exact integers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.kernels.support import (
    DTYPES,
    Guarded,
    decode,
    encode,
    ffi,
    from_bf16,
    guarded,
    kernel,
    lib,
    pointer,
    run,
    to_bf16,
)

STORAGE = {"f32": np.float32, "f16": np.uint16, "bf16": np.uint16}
UNIT = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-24}
MODES = {"symmetric": 0, "asymmetric": 1, "static": 2}
SMMLA = lib.vac_tier() == lib.VAC_TIER_BF16_I8MM
F32 = np.float32


def up(value: int, step: int) -> int:
    return -(-value // step) * step


def padded(k: int) -> int:
    return up(max(k, 1), 64)


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Encoded values as plain bits, so that NaN patterns survive comparison and copying."""
    return encode(values, dtype).view(STORAGE[dtype])


def loaded(bits: np.ndarray, dtype: str) -> np.ndarray:
    """FP32 values of :func:`stored` bits."""
    return decode(bits.view(np.float16) if dtype == "f16" else bits, dtype)


def strided(bits: np.ndarray, stride: int, at_end: bool) -> tuple[Guarded, np.ndarray]:
    """Guarded memory that holds rows ``stride`` elements apart, the last one without its padding."""
    m, n = bits.shape
    memory = Guarded(max((m - 1) * stride + n, 1), bits.dtype, at_end)
    view = np.lib.stride_tricks.as_strided(memory.array, (m, n), (stride * bits.itemsize, bits.itemsize))
    view[...] = bits
    return memory, view


@dataclass
class Quantization:
    """A ``vac_int8_quantization``."""

    mode: str = "symmetric"
    scale: float = 0.03
    zero_point: int = 0

    def fill(self, struct: object) -> None:
        struct.mode, struct.scale, struct.zero_point = MODES[self.mode], self.scale, self.zero_point  # type: ignore[attr-defined]

    def reference(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, scale and zero point of FP32 rows: the header's formulas, products exact before they are rounded."""
        m = x.shape[0]
        zero_point = np.zeros(m, np.int32)
        with np.errstate(all="ignore"):
            bad = np.isnan(x).any(axis=1) if self.mode == "static" else ~np.isfinite(x).all(axis=1)
            clean = np.where(np.isfinite(x), x, F32(0)) if self.mode != "static" else np.nan_to_num(x, nan=0.0)
            if self.mode == "symmetric":
                largest = np.maximum(np.abs(clean).max(axis=1, initial=0), F32(2.0**-110)).astype(F32)
                scale, inverse = largest / F32(127), F32(127) / largest
            elif self.mode == "asymmetric":
                low, high = clean.min(axis=1, initial=0), clean.max(axis=1, initial=0)
                scale = np.maximum(high / F32(255) - low / F32(255), F32(2.0**-110) / F32(255)).astype(F32)
                inverse = F32(1) / scale
                zero_point = (-128 - np.rint(low / scale)).astype(np.int32)
            else:
                scale = np.full(m, self.scale, F32)
                inverse = F32(1) / scale
                zero_point[:] = self.zero_point
            q = np.rint(clean.astype(np.float64) * inverse.astype(np.float64)[:, None]) + zero_point[:, None]
            q = np.clip(q, -128, 127)
        scale = np.where(bad, F32(np.nan), scale)
        if self.mode != "static":
            zero_point = np.where(bad, 0, zero_point).astype(np.int32)
        return q.astype(np.int8), scale, zero_point


def rows_parts(buffer: np.ndarray, m: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views of a buffer of quantized rows: scales, zero points, q [m, k]."""
    m16, stride = up(m, 16), lib.vac_int8_row_pair_stride(k)
    scales = buffer[: 4 * m16].view(np.float32)[:m]
    zero_points = buffer[4 * m16 : 8 * m16].view(np.int32)[:m]
    pairs = buffer[8 * m16 :].view(np.int8)
    depth = padded(k)
    place = np.arange(k) // 8 * 16 + np.arange(k) % 8 if SMMLA else np.arange(k)
    rows = np.arange(m)
    first = rows // 2 * stride + rows % 2 * (8 if SMMLA else depth)
    return scales, zero_points, pairs[first[:, None] + place[None, :]]


def rows_of(q: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, at_end: bool = True) -> Guarded:
    """A guarded buffer of quantized rows; what the header leaves unspecified is noise."""
    m, k = q.shape
    memory = Guarded(lib.vac_int8_rows_size(m, k), np.uint8, at_end)
    memory.array[...] = np.random.default_rng(5).integers(0, 256, memory.nbytes, dtype=np.uint8)
    m16, stride = up(m, 16), lib.vac_int8_row_pair_stride(k)
    memory.array[: 4 * m16].view(np.float32)[:m] = scale
    memory.array[4 * m16 : 8 * m16].view(np.int32)[:m] = zero_point
    pairs = memory.array[8 * m16 :].view(np.int8)
    place = np.arange(k) // 8 * 16 + np.arange(k) % 8 if SMMLA else np.arange(k)
    rows = np.arange(m)
    first = rows // 2 * stride + rows % 2 * (8 if SMMLA else padded(k))
    pairs[first[:, None] + place[None, :]] = q
    return memory


def quantize_args(
    bits: np.ndarray, dtype: str, quantization: Quantization, rows: np.ndarray | None, stride: int
) -> object:
    args = ffi.new("vac_int8_quantize_rows_args *")
    quantization.fill(args.quantization)
    args.dtype = DTYPES[dtype]
    args.m, args.k = bits.shape
    args.x, args.x_stride, args.rows = pointer(bits), stride, pointer(rows)
    return args


def quantize(
    bits: np.ndarray,
    dtype: str,
    quantization: Quantization,
    num_threads: int = 1,
    at_end: bool = True,
    extra: int = 0,
) -> Guarded:
    """Run ``vac_int8_quantize_rows`` on guarded rows ``extra`` elements apart."""
    m, k = bits.shape
    source, x = strided(bits, k + extra, at_end)
    before = source.array.copy()
    rows = Guarded(lib.vac_int8_rows_size(m, k), np.uint8, at_end)
    args = quantize_args(x, dtype, quantization, rows.array, k + extra)
    assert lib.vac_int8_quantize_rows_check(args) == lib.VAC_OK
    run(kernel("int8_quantize_rows"), args, num_threads)
    rows.check()
    source.check()
    assert (source.array.view(np.uint8) == before.view(np.uint8)).all()
    return rows


def assert_rows(rows: np.ndarray, x: np.ndarray, quantization: Quantization) -> None:
    """The rows are exactly what the formulas give for FP32 values ``x``; q of a NaN row is free."""
    m, k = x.shape
    scales, zero_points, q = rows_parts(rows, m, k)
    expected, scale, zero_point = quantization.reference(x)
    np.testing.assert_array_equal(scales, scale)
    np.testing.assert_array_equal(zero_points, zero_point)
    good = ~np.isnan(scale)
    np.testing.assert_array_equal(q[good], expected[good])


def pack(
    weight: np.ndarray, scales: np.ndarray, num_threads: int = 1, at_end: bool = True, into: np.ndarray | None = None
) -> Guarded:
    """Pack a weight whose rows lie ``weight.strides[0]`` bytes apart; returns the guarded packed form."""
    n, k = weight.shape
    packed = Guarded(lib.vac_int8_gemm_rhs_packed_size(n, k), np.uint8, at_end)
    args = ffi.new("vac_int8_gemm_rhs_pack_args *")
    args.n, args.k, args.rhs_stride = n, k, weight.strides[0]
    args.rhs, args.scales = ffi.cast("int8_t *", pointer(weight)), ffi.cast("float *", pointer(scales))
    args.one_scale = scales.size == 1 and n != 1
    args.packed = pointer(packed.array)
    assert lib.vac_int8_gemm_rhs_pack_check(args) == lib.VAC_OK
    run(kernel("int8_gemm_rhs_pack"), args, num_threads)
    packed.check()
    return packed


@dataclass
class Linear:
    """A product of quantized rows and a weight, with what may be added."""

    q: np.ndarray
    weight: np.ndarray
    row_scale: np.ndarray
    column_scale: np.ndarray
    zero_point: np.ndarray
    bias: np.ndarray | None = None
    bias_dtype: str = "f32"
    residual: np.ndarray | None = None
    out_dtype: str = "f32"
    packed: Guarded | None = field(default=None, repr=False)

    def sums(self) -> np.ndarray:
        """The exact corrected sums, int64; FP64 products are exact up to 2^53."""
        q = self.q.astype(np.float64) - self.zero_point[:, None]
        return (q @ self.weight.astype(np.float64).T).astype(np.int64)

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        """Expected values before the last rounding (FP64), and how far the FP32 steps may be from them."""
        scaled = (self.sums().astype(F32) * self.row_scale[:, None].astype(F32)).astype(np.float64)
        product = scaled * self.column_scale.astype(np.float64)[None, :]
        if self.bias is None and self.residual is None:
            return product.astype(F32).astype(np.float64), np.zeros_like(product)
        bias = 0.0 if self.bias is None else loaded(self.bias, self.bias_dtype).astype(np.float64)
        residual = 0.0 if self.residual is None else loaded(self.residual, self.out_dtype).astype(np.float64)
        size = np.abs(product) + np.abs(bias) + np.abs(residual)
        return product + bias + residual, size * 2.0**-23

    def run(
        self,
        num_threads: int = 1,
        at_end: bool = True,
        extra: int = 0,
        in_place: bool = False,
        workspace_threads: int = 0,
        quantize: object = None,
    ) -> np.ndarray:
        """Run the kernel with every operand guarded and rows of out ``extra`` elements apart; returns out's bits."""
        (m, k), n = self.q.shape, self.weight.shape[0]
        if self.packed is None:
            self.packed = pack(self.weight, self.column_scale, at_end=at_end)
        rows = rows_of(self.q, self.row_scale, self.zero_point, at_end)
        memory, out = strided(np.full((m, n), 0x55, STORAGE[self.out_dtype]), n + extra, at_end)
        gaps = memory.array.copy()
        workspace = Guarded(
            lib.vac_int8_gemm_workspace_size(m, n, k, workspace_threads or num_threads), np.uint8, at_end
        )
        args = ffi.new("vac_int8_gemm_args *")
        args.out_dtype, args.bias_dtype = DTYPES[self.out_dtype], DTYPES[self.bias_dtype]
        args.m, args.n, args.k = m, n, k
        args.rows = pointer(rows.array)
        if quantize is not None:
            args.rows, args.quantize = ffi.NULL, quantize
        args.rhs = pointer(self.packed.array)
        bias = None if self.bias is None else guarded(self.bias, at_end)
        args.bias = pointer(None if bias is None else bias.array)
        residual_memory = None
        if self.residual is not None:
            if in_place:
                out[...] = self.residual
                args.residual, args.residual_stride = pointer(out), n + extra
            else:
                residual_memory, residual = strided(self.residual, n + extra, at_end)
                args.residual, args.residual_stride = pointer(residual), n + extra
        args.out, args.out_stride = pointer(out), n + extra
        args.workspace = pointer(workspace.array)
        assert lib.vac_int8_gemm_check(args) == lib.VAC_OK
        run(kernel("int8_gemm"), args, num_threads)
        for guard in (rows, memory, workspace, bias, residual_memory, self.packed):
            if guard is not None:
                guard.check()
        result = out.copy()
        # What lies between the rows of out is not ours.
        out[...] = 0x55
        assert (memory.array.view(np.uint8) == gaps.view(np.uint8)).all()
        return result

    def check(self, bits: np.ndarray) -> None:
        """Assert that out is the exact result, correctly rounded; with additions, within their rounding."""
        expected, tolerance = self.reference()
        got = loaded(bits, self.out_dtype).astype(np.float64)
        if not tolerance.any():
            np.testing.assert_array_equal(got, loaded(stored(expected.astype(F32), self.out_dtype), self.out_dtype))
            return
        tolerance = tolerance + UNIT[self.out_dtype] * np.abs(expected) * (1 + 2.0**-8)
        error = np.abs(got - expected)
        assert (error <= tolerance).all(), (float((error / tolerance).max()), np.argwhere(error > tolerance)[:4])


def make(m: int, n: int, k: int, shifted: bool = False, unit: bool = False, **options: object) -> Linear:
    """Random operands; ``unit``: all scales are 1, so that FP32 out is the integer sum."""
    rng = np.random.default_rng([m, n, k])
    q, weight = (rng.integers(-128, 128, (rows, k), dtype=np.int8) for rows in (m, n))
    row_scale, column_scale = (np.ones(s, F32) if unit else rng.uniform(1e-3, 1e-1, s).astype(F32) for s in (m, n))
    zero_point = rng.integers(-128, 128, m, dtype=np.int32) if shifted else np.zeros(m, np.int32)
    return Linear(q, weight, row_scale, column_scale, zero_point, **options)  # type: ignore[arg-type]


# Row counts around every tile height, and every tail.
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 19, 20, 24, 33]


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("mode", list(MODES))
def test_quantize_rows(dtype: str, mode: str) -> None:
    rng = np.random.default_rng(1)
    for k in (1, 2, 7, 8, 9, 31, 64, 65, 127, 200, 1031):
        for m in (1, 2, 3, 5):
            x = rng.standard_normal((m, k)) * rng.uniform(0.1, 3, (m, 1)) + rng.uniform(-2, 2, (m, 1))
            bits = stored(x.astype(F32), dtype)
            quantization = Quantization(mode, 0.0173, int(rng.integers(-128, 128)))
            rows = quantize(bits, dtype, quantization, at_end=k % 2 == 0, extra=m)
            assert_rows(rows.array, loaded(bits, dtype), quantization)


@pytest.mark.parametrize("mode", list(MODES))
def test_quantize_does_not_depend_on_threads(mode: str) -> None:
    rng = np.random.default_rng(2)
    quantization = Quantization(mode, 0.02, 3)
    for m, k in ((1, 1000), (3, 200), (5, 129), (9, 64), (17, 70)):
        bits = to_bf16(rng.standard_normal((m, k)))
        for num_threads in (1, 2, 3, 8):
            rows = quantize(bits, "bf16", quantization, num_threads)
            assert_rows(rows.array, from_bf16(bits), quantization)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("mode", list(MODES))
def test_rows_of_special_values(dtype: str, mode: str) -> None:
    """Zeros, NaN of either sign, infinities, the largest and smallest values, one sign only, ties."""
    k = 75
    rows = np.tile(np.random.default_rng(3).standard_normal(k).astype(F32), (14, 1))
    rows[0] = 0
    rows[1] = -0.0
    rows[2, 40] = np.nan
    rows[3, 74] = -np.nan
    rows[4, 5] = np.inf
    rows[5, 70] = -np.inf
    largest = {"bf16": 3.38e38, "f16": 65504, "f32": 3.4e38}[dtype]
    rows[6, ::2], rows[6, 1::2] = largest, -largest
    rows[7] *= {"bf16": 1e-38, "f16": 1e-6, "f32": 1e-42}[dtype]
    rows[8] = np.abs(rows[8])
    rows[9] = -np.abs(rows[9])
    rows[10] = np.arange(k) - 37.5
    rows[10, 0] = -127  # scale 1: the others are ties
    rows[11] = 1e-30
    rows[12, 3], rows[12, 4] = np.inf, np.nan
    bits = stored(rows, dtype)
    quantization = Quantization(mode, 0.5, -7)
    for num_threads in (1, 3):
        buffer = quantize(bits, dtype, quantization, num_threads)
        assert_rows(buffer.array, loaded(bits, dtype), quantization)
    scales, zero_points, q = rows_parts(buffer.array, *rows.shape)
    assert np.isfinite(scales[[0, 1]]).all()
    assert (q[:2] == zero_points[:2, None]).all()
    assert np.isnan(scales[[2, 3, 12]]).all()
    assert np.isnan(scales[[4, 5]]).all() == (mode != "static")
    if mode == "static":
        assert (q[4, 5], q[5, 70]) == (127, -128)
    # Through the product: NaN rows are NaN, zeros are zeros, the others finite; but the largest values overflow.
    problem = make(14, 9, k)
    problem.packed = pack(problem.weight, problem.column_scale)
    problem.q, problem.row_scale, problem.zero_point = q, scales.copy(), zero_points.copy()
    out = loaded(problem.run(), "f32")
    assert (np.isnan(out).all(axis=1) == np.isnan(scales)).all()
    assert np.isfinite(out[~np.isnan(scales) & (np.abs(rows).max(axis=1) < 1e38)]).all()
    assert (out[:2] == 0).all()


def test_quantization_rounds_to_nearest_even_and_saturates() -> None:
    x = np.array([[0.9, -0.9, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.5, 400, -127.5, -128.5, -1e30, 3.4e38]], F32)
    expected = [1, -1, 0, 2, 2, 0, -2, -2, 126, 127, 127, -128, -128, -128, 127]
    _, _, q = rows_parts(quantize(x, "f32", Quantization("static", 1.0)).array, *x.shape)
    assert q[0].tolist() == expected
    # The true maximum is 127 times the scale, whatever its sign.
    for sign in (1, -1):
        row = np.array([[0.1, sign * 3.7, -0.2]], F32)
        scales, _, q = rows_parts(quantize(row, "f32", Quantization()).array, 1, 3)
        assert q[0, 1] == sign * 127
        assert scales[0] == F32(3.7) / F32(127)


def test_pack_keeps_every_weight() -> None:
    """Panels hold every weight once and zeros else; scales and sums follow."""
    rng = np.random.default_rng(4)
    for n, k in ((1, 1), (7, 5), (8, 64), (9, 65), (17, 130), (40, 16)):
        memory, weight = strided(rng.integers(-128, 128, (n, k), dtype=np.int8), k + 3, n % 2 == 0)
        scales = rng.uniform(0.1, 1, n).astype(F32)
        packed = pack(weight, scales)
        memory.check()
        n8, depth = up(n, 8), padded(k)
        panels = packed.array[: n8 * depth].view(np.int8)
        run_length = 8 if SMMLA else 4
        natural = panels.reshape(n8 // 8, depth // run_length, 8, run_length).transpose(0, 2, 1, 3).reshape(n8, depth)
        expected = np.zeros((n8, depth), np.int8)
        expected[:n, :k] = weight
        np.testing.assert_array_equal(natural, expected)
        np.testing.assert_array_equal(packed.array[n8 * depth :][: 4 * n8].view(F32)[:n], scales)
        sums = packed.array[n8 * depth + 4 * n8 :].view(np.int32)
        np.testing.assert_array_equal(sums, expected.astype(np.int64).sum(axis=1))
        for num_threads in (2, 3, 8):
            np.testing.assert_array_equal(pack(weight, scales, num_threads).array, packed.array)
    one = pack(weight, np.array([0.25], F32))
    assert (one.array[n8 * depth :][: 4 * n8].view(F32)[:n] == 0.25).all()


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("at_end", [True, False])
def test_sums_are_exact(shifted: bool, at_end: bool) -> None:
    """With unit scales FP32 out is the integer sum itself, for every tail of M, N and K."""
    for n in (1, 7, 8, 9, 16, 25, 37, 71):
        for k in (1, 8, 15, 17, 64, 100, 129) if n in (9, 37) else (22,):
            packed = None
            for m in ROWS if k in (22, 129) else (1, 2, 4, 13):
                problem = make(m, n, k, shifted, unit=True)
                problem.weight = make(1, n, k).weight
                problem.packed = packed
                out = problem.run(at_end=at_end, extra=m % 3)
                packed = problem.packed
                assert np.abs(problem.sums()).max() < 2**24
                np.testing.assert_array_equal(out.astype(np.int64), problem.sums())


@pytest.mark.parametrize("shifted", [False, True])
def test_blocks_of_k_and_rows(shifted: bool) -> None:
    """K and M beyond one block, and more panels than wait together for their partial sums."""
    for m, n, k in ((5, 23, 4103), (14, 9, 6200), (20, 27, 2100), (23, 523, 2100), (150, 17, 2100), (270, 9, 70)):
        problem = make(m, n, k, shifted)
        bits = problem.run()
        problem.check(bits)
        np.testing.assert_array_equal(problem.run(num_threads=3), bits)


def test_largest_k_does_not_overflow() -> None:
    """The extremes of both operands at the largest K: sums of 2^31 and, corrected, of almost 2^32."""
    for k in (65536, 65537, 131072):
        rows = np.repeat(np.array([[-128], [127], [-128], [127]], np.int8), k, axis=1)
        weight = np.repeat(np.array([[-128], [127], [-1]], np.int8), k, axis=1)
        weight[2, ::2] = 1
        for m in (1, 4, 13):
            q = np.tile(rows, (4, 1))[:m]
            for zero_point in (0, 127, -128):
                problem = Linear(
                    q, weight, np.ones(m, F32), np.ones(3, F32), np.full(m, zero_point, np.int32), out_dtype="f32"
                )
                if m == 13 and k != 131072:
                    continue
                np.testing.assert_array_equal(problem.run(), problem.sums().astype(F32))
    with pytest.raises(AssertionError):
        make(1, 1, 131073).run()


@pytest.mark.parametrize("out_dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("shifted", [False, True])
def test_bias_residual_and_out_dtype(out_dtype: str, shifted: bool) -> None:
    for m in (1, 2, 4, 7, 14):
        for n in (13, 40):
            for bias_dtype in ("", "bf16", "f16", "f32"):
                for residual in (False, True):
                    problem = make(m, n, 21, shifted, out_dtype=out_dtype)
                    # Results of about 1, and f16 can hold them.
                    problem.column_scale /= 10
                    rng = np.random.default_rng(m)
                    if bias_dtype:
                        problem.bias_dtype = bias_dtype
                        problem.bias = stored(rng.standard_normal(n).astype(F32), bias_dtype)
                    if residual:
                        problem.residual = stored(rng.standard_normal((m, n)).astype(F32), out_dtype)
                    bits = problem.run(extra=2, at_end=n == 13)
                    problem.check(bits)
                    if residual:
                        same = problem.run(extra=2, in_place=True)
                        assert (same.view(np.uint8) == bits.view(np.uint8)).all()


@pytest.mark.parametrize("out_dtype", ["bf16", "f32"])
def test_bits_do_not_depend_on_threads_or_rows(out_dtype: str) -> None:
    """A row of out has the same bits for any team, any M and any place of the row, shifted rows beside it or not."""
    whole = make(65, 77, 2090, out_dtype=out_dtype)
    expected = whole.run()
    whole.check(expected)

    def part(first: int, m: int, shifted: bool = False) -> Linear:
        rows = slice(first, first + m)
        zero_point = whole.zero_point[rows].copy()
        q = whole.q[rows]
        if shifted:
            zero_point[-1] = 5
        return Linear(
            q, whole.weight, whole.row_scale[rows], whole.column_scale, zero_point, out_dtype=out_dtype,
            packed=whole.packed,
        )  # fmt: skip

    for num_threads in (2, 3, 8, 16):
        for m in (1, 3, 17, 65):
            # A team may come out smaller than the workspace was made for.
            bits = part(0, m).run(num_threads, workspace_threads=num_threads + m % 2)
            assert (bits.view(np.uint8) == expected[:m].view(np.uint8)).all(), (num_threads, m)
    for first, m in ((7, 1), (1, 2), (5, 4), (3, 5), (11, 12), (2, 14)):
        bits = part(first, m).run()
        assert (bits.view(np.uint8) == expected[first : first + m].view(np.uint8)).all(), (first, m)
        if m > 1:
            bits = part(first, m, shifted=True).run()
            assert (bits[:-1].view(np.uint8) == expected[first : first + m - 1].view(np.uint8)).all(), (first, m)


@pytest.mark.parametrize("mode", list(MODES))
def test_gemm_quantizes_by_itself(mode: str) -> None:
    """With ``quantize``, the same bits as from rows quantized before."""
    rng = np.random.default_rng(6)
    for m in (1, 2, 3, 4):
        for k in (21, 200):
            bits = to_bf16(rng.standard_normal((m, k)))
            quantization = Quantization(mode, 0.02, 9)
            rows = quantize(bits, "bf16", quantization)
            problem = make(m, 75, k, out_dtype="bf16")
            problem.row_scale, problem.zero_point, problem.q = (part.copy() for part in rows_parts(rows.array, m, k))
            expected = problem.run()
            problem.check(expected)
            source, x = strided(bits, k + 5, k == 21)
            for num_threads in (1, 3, 16):
                inner = quantize_args(x, "bf16", quantization, None, k + 5)
                np.testing.assert_array_equal(problem.run(num_threads, quantize=inner), expected)
            source.check()


def quantize_weight(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = np.abs(weight).max(axis=1) / 127
    return np.rint(weight / scale[:, None]).astype(np.int8), scale.astype(F32)


def relative_error(x: np.ndarray, weight: np.ndarray, scale: np.ndarray, exact: np.ndarray) -> float:
    """Of the whole linear, quantization of BF16 rows included, FP32 out: ||got - exact|| / ||exact||."""
    bits = to_bf16(x)
    rows = quantize(bits, "bf16", Quantization())
    problem = make(1, 1, 1)
    problem.row_scale, problem.zero_point, problem.q = rows_parts(rows.array, *x.shape)
    problem.weight, problem.column_scale = weight, scale
    got = problem.run()
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def test_accuracy() -> None:
    """Relative errors of quantized linears.

    Integer weights leave the error of the rows: steps of max|x| / 127 with the
    largest of 1024 normal values at 3.4 give 0.78 %. Weights quantized per
    channel add theirs. Rounding out to BF16 would add 0.17 % in quadrature.
    """
    rng = np.random.default_rng(7)
    x = from_bf16(to_bf16(rng.standard_normal((64, 1024))))
    weight, scale = rng.integers(-127, 128, (1024, 1024), dtype=np.int8), rng.uniform(0.001, 0.01, 1024).astype(F32)
    exact = x.astype(np.float64) @ (weight * scale[:, None].astype(np.float64)).T
    assert relative_error(x, weight, scale, exact) <= 0.008

    x = from_bf16(to_bf16(rng.standard_normal((8, 4096))))
    gaussian = rng.standard_normal((256, 4096))
    weight, scale = quantize_weight(gaussian)
    assert relative_error(x, weight, scale, x.astype(np.float64) @ gaussian.T) <= 0.013

    outliers = x.copy()
    outliers[:, rng.choice(4096, 8, replace=False)] *= 20
    outliers = from_bf16(to_bf16(outliers))
    assert relative_error(outliers, weight, scale, outliers.astype(np.float64) @ gaussian.T) <= 0.065


def grouped(
    counts: list[int],
    n: int,
    k: int,
    num_tokens: int,
    gather: bool,
    num_threads: int,
    shifted: bool = False,
    out_dtype: str = "bf16",
    bias: bool = False,
    at_end: bool = True,
) -> None:
    """``vac_int8_grouped_gemm`` has the bits of one ``vac_int8_gemm`` per expert."""
    rng = np.random.default_rng([n, k, num_tokens])
    num_rows, num_experts = sum(counts), len(counts)
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    index = rng.integers(0, num_tokens, num_rows, dtype=np.int32) if gather else np.arange(num_rows, dtype=np.int32)
    tokens = make(num_tokens, n, k, shifted)
    experts = [make(1, n, k + 1000 * e).weight[:, :k].copy() for e in range(num_experts)]
    scales = rng.uniform(1e-3, 1e-1, (num_experts, n)).astype(F32)
    biases = to_bf16(rng.standard_normal((num_experts, n)))
    size = lib.vac_int8_gemm_rhs_packed_size(n, k)
    stride = up(size, 64)
    weights = Guarded(stride * (num_experts - 1) + size, np.uint8, at_end)
    for e, weight in enumerate(experts):
        weights.array[e * stride : e * stride + size] = pack(weight, scales[e]).array
    rows = rows_of(tokens.q, tokens.row_scale, tokens.zero_point, at_end)
    memory, out = strided(np.full((num_rows, n), 0x55, STORAGE[out_dtype]), n + 1, at_end)
    workspace = Guarded(lib.vac_int8_grouped_gemm_workspace_size(num_rows, n, k, num_threads), np.uint8, at_end)
    guards = [guarded(index, at_end), guarded(start, at_end), guarded(biases, at_end)]
    args = ffi.new("vac_int8_grouped_gemm_args *")
    args.out_dtype, args.bias_dtype = DTYPES[out_dtype], lib.VAC_BF16
    args.num_experts, args.num_rows, args.num_rows_read, args.n, args.k = num_experts, num_rows, num_tokens, n, k
    args.rows, args.rhs, args.rhs_expert_stride = pointer(rows.array), pointer(weights.array), stride
    if gather:
        args.row_index = ffi.cast("int32_t *", pointer(guards[0].array))
    args.expert_start = ffi.cast("int32_t *", pointer(guards[1].array))
    if bias:
        args.bias, args.bias_stride = pointer(guards[2].array), n
    args.out, args.out_stride, args.workspace = pointer(out), n + 1, pointer(workspace.array)
    assert lib.vac_int8_grouped_gemm_check(args) == lib.VAC_OK
    run(kernel("int8_grouped_gemm"), args, num_threads)
    for guard in (rows, weights, memory, workspace, *guards):
        guard.check()
    for e in range(num_experts):
        of_expert = slice(start[e], start[e + 1])
        if counts[e] == 0:
            continue
        chosen = index[of_expert]
        dense = Linear(
            tokens.q[chosen], experts[e], tokens.row_scale[chosen], scales[e], tokens.zero_point[chosen],
            biases[e] if bias else None, "bf16", None, out_dtype,
        )  # fmt: skip
        expected = dense.run()
        dense.check(expected)
        assert (out[of_expert].view(np.uint8) == expected.view(np.uint8)).all(), e


@pytest.mark.parametrize("gather", [True, False])
def test_grouped(gather: bool) -> None:
    for num_threads in (1, 2, 3, 8):
        at_end = num_threads % 2 == 0
        grouped([1, 1, 0, 1, 1], 37, 100, 4 if not gather else 1, gather, num_threads, at_end=at_end)
        grouped([2, 1, 3, 0, 14, 5, 1], 21, 70, 26, gather, num_threads, shifted=True, at_end=at_end)
    grouped([0, 40, 13], 24, 2100, 60, gather, 3)
    grouped([300, 0, 1], 9, 70, 301, gather, 8)
    grouped([6, 3], 16, 129, 9, gather, 2, out_dtype="f32", bias=True)


def test_grouped_leaves_rows_outside_of_all_ranges_alone() -> None:
    tokens, weight = make(3, 8, 20), make(1, 8, 20)
    packed = pack(weight.weight, weight.column_scale)
    rows = rows_of(tokens.q, tokens.row_scale, tokens.zero_point)
    out, workspace = np.full((3, 8), 7, F32), np.zeros(100_000, np.uint8)
    start = np.array([1, 2], np.int32)
    args = ffi.new("vac_int8_grouped_gemm_args *")
    args.num_experts, args.num_rows, args.num_rows_read, args.n, args.k = 1, 3, 3, 8, 20
    args.rows, args.rhs, args.rhs_expert_stride = pointer(rows.array), pointer(packed.array), packed.nbytes
    args.expert_start = ffi.cast("int32_t *", pointer(start))
    args.out, args.out_stride, args.workspace = pointer(out), 8, pointer(workspace)
    assert workspace.size >= lib.vac_int8_grouped_gemm_workspace_size(3, 8, 20, 2)
    run(kernel("int8_grouped_gemm"), args, 2)
    assert (out[[0, 2]] == 7).all()
    assert (out[1] != 7).all()


@dataclass
class Norm:
    """Operands of ``vac_rms_norm_int8``."""

    m: int
    k: int
    dtype: str = "bf16"
    weight_dtype: str = "bf16"
    residual: bool = False
    normed: bool = False
    plus_one: bool = False
    weighted: bool = True


def check_norm(case: Norm, quantization: Quantization, num_threads: int, at_end: bool = True) -> None:
    """The fused kernel's rows, residual and norm have the bits of the separate kernels."""
    rng = np.random.default_rng([case.m, case.k])
    m, k, code = case.m, case.k, DTYPES[case.dtype]
    bits = stored(rng.standard_normal((m, k)).astype(F32), case.dtype)
    residual_bits = stored(rng.standard_normal((m, k)).astype(F32), case.dtype)
    weight = guarded(stored(rng.uniform(0.5, 1.5, k).astype(F32), case.weight_dtype), at_end)

    def fill(args: object) -> tuple[Guarded, Guarded]:
        memory, x = strided(bits, k + 2, at_end)
        residual_memory, residual = strided(residual_bits, k + 3, at_end)
        args.x, args.x_token_stride = pointer(x), k + 2  # type: ignore[attr-defined]
        if case.residual:
            args.residual, args.residual_token_stride = pointer(residual), k + 3  # type: ignore[attr-defined]
        args.weight = pointer(weight.array if case.weighted else None)  # type: ignore[attr-defined]
        args.num_tokens, args.hidden_size, args.eps = m, k, 1e-5  # type: ignore[attr-defined]
        args.dtype, args.weight_dtype = code, DTYPES[case.weight_dtype]  # type: ignore[attr-defined]
        args.weight_plus_one = case.plus_one  # type: ignore[attr-defined]
        return memory, residual_memory

    out = np.zeros((m, k), STORAGE[case.dtype])
    separate = ffi.new("vac_fused_add_rms_norm_args *" if case.residual else "vac_rms_norm_args *")
    keep = fill(separate)
    separate.out, separate.out_token_stride = pointer(out), k
    if not case.residual:
        separate.num_heads = 1
    run(kernel("fused_add_rms_norm" if case.residual else "rms_norm"), separate)
    expected = quantize(out, case.dtype, quantization)

    args = ffi.new("vac_rms_norm_int8_args *")
    quantization.fill(args.quantization)
    x_memory, residual_memory = fill(args)
    rows = Guarded(lib.vac_int8_rows_size(m, k), np.uint8, at_end)
    normed_memory, normed = strided(np.zeros((m, k), STORAGE[case.dtype]), k + 1, at_end)
    if case.normed:
        args.normed, args.normed_token_stride = pointer(normed), k + 1
    workspace = Guarded(lib.vac_rms_norm_int8_workspace_size(k, num_threads), np.uint8, at_end)
    args.rows, args.workspace = pointer(rows.array), pointer(workspace.array)
    assert lib.vac_rms_norm_int8_check(args) == lib.VAC_OK
    run(kernel("rms_norm_int8"), args, num_threads)
    for guard in (x_memory, residual_memory, rows, normed_memory, workspace, weight):
        guard.check()
    for got, wanted in zip(rows_parts(rows.array, m, k), rows_parts(expected.array, m, k), strict=True):
        np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(residual_memory.array.view(np.uint8), keep[1].array.view(np.uint8))
    if case.normed:
        np.testing.assert_array_equal(normed.copy().view(np.uint8), out.view(np.uint8))


@pytest.mark.parametrize("mode", list(MODES))
def test_rms_norm_int8(mode: str) -> None:
    quantization = Quantization(mode, 0.02, -3)
    for dtype in ("bf16", "f16", "f32"):
        for residual in (False, True):
            check_norm(Norm(5, 150, dtype, dtype, residual, normed=residual), quantization, 1, at_end=residual)
            check_norm(Norm(1, 70, dtype, "f32", residual, plus_one=True), quantization, 2)
            check_norm(Norm(3, 9, dtype, dtype, residual, weighted=False, normed=not residual), quantization, 1)
    for num_threads in (1, 2, 3, 8):
        for m in (1, 2, 7, 16):
            check_norm(Norm(m, 200, residual=True), quantization, num_threads, at_end=m % 2 == 0)


@pytest.mark.parametrize("mode", list(MODES))
def test_silu_and_mul_int8(mode: str) -> None:
    quantization = Quantization(mode, 0.02, 11)
    cases = [(m, d, "bf16", 0, t) for t in (1, 2, 3, 8) for m, d in ((1, 200), (2, 64), (3, 700), (7, 65), (9, 130))]
    cases += [(3, 150, dtype, activation, 2) for dtype in ("f16", "f32") for activation in (0, 1, 2)]
    cases += [(1, 1000, "f32", 0, 8), (5, 333, "f16", 0, 8), (1, 1, "bf16", 0, 3)]
    for m, d, dtype, activation, num_threads in cases:
        at_end = d % 2 == 0
        bits = stored(np.random.default_rng([m, d]).standard_normal((m, 2 * d)).astype(F32), dtype)
        if (m, d) == (3, 700):
            bits[1, 690] = stored(np.array([np.nan], F32), dtype)[0]
        out = np.zeros((m, d), STORAGE[dtype])
        separate = ffi.new("vac_silu_and_mul_args *")
        separate.out, separate.x, separate.num_tokens, separate.d = pointer(out), pointer(bits), m, d
        separate.x_token_stride, separate.out_token_stride = 2 * d, d
        separate.activation, separate.dtype = activation, DTYPES[dtype]
        run(kernel("silu_and_mul"), separate)
        expected = quantize(out, dtype, quantization)

        memory, x = strided(bits, 2 * d + 3, at_end)
        rows = Guarded(lib.vac_int8_rows_size(m, d), np.uint8, at_end)
        workspace = Guarded(lib.vac_silu_and_mul_int8_workspace_size(d, num_threads), np.uint8, at_end)
        args = ffi.new("vac_silu_and_mul_int8_args *")
        quantization.fill(args.quantization)
        args.rows, args.x, args.num_tokens, args.d = pointer(rows.array), pointer(x), m, d
        args.x_token_stride, args.activation, args.dtype = 2 * d + 3, activation, DTYPES[dtype]
        args.workspace = pointer(workspace.array)
        assert lib.vac_silu_and_mul_int8_check(args) == lib.VAC_OK
        ops = ffi.new("vac_op[2]")
        for op, name in zip(ops, ("silu_and_mul_int8", "silu_and_mul_int8_finish"), strict=True):
            op.kernel, op.args, op.flags = kernel(name), args, lib.VAC_OP_BARRIER_AFTER
        assert lib.vac_execute(ops, 2, num_threads) == 0
        for guard in (memory, rows, workspace):
            guard.check()
        got, wanted = rows_parts(rows.array, m, d), rows_parts(expected.array, m, d)
        np.testing.assert_array_equal(got[0], wanted[0])
        np.testing.assert_array_equal(got[1], wanted[1])
        good = ~np.isnan(wanted[0])
        assert good.all() == ((m, d) != (3, 700))
        np.testing.assert_array_equal(got[2][good], wanted[2][good])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_layer_in_one_list(num_threads: int) -> None:
    """Quantization and product in one region, as a layer passes them."""
    m, n, k = 7, 40, 300
    bits = to_bf16(np.random.default_rng(8).standard_normal((m, k)))
    problem = make(m, n, k, out_dtype="bf16")
    packed = pack(problem.weight, problem.column_scale)
    rows = np.zeros(lib.vac_int8_rows_size(m, k) + 16, np.uint8)
    rows = rows[-rows.ctypes.data % 16 :]
    out = np.zeros((m, n), np.uint16)
    workspace = np.zeros(lib.vac_int8_gemm_workspace_size(m, n, k, num_threads), np.uint8)
    first = quantize_args(bits, "bf16", Quantization(), rows, k)
    second = ffi.new("vac_int8_gemm_args *")
    second.out_dtype, second.m, second.n, second.k = lib.VAC_BF16, m, n, k
    second.rows, second.rhs, second.out, second.out_stride = pointer(rows), pointer(packed.array), pointer(out), n
    second.workspace = pointer(workspace)
    ops = ffi.new("vac_op[2]")
    ops[0].kernel, ops[0].args, ops[0].flags = kernel("int8_quantize_rows"), first, lib.VAC_OP_BARRIER_AFTER
    ops[1].kernel, ops[1].args = kernel("int8_gemm"), second
    assert lib.vac_execute(ops, 2, num_threads) == 0
    problem.q, problem.row_scale, problem.zero_point = Quantization().reference(from_bf16(bits))
    problem.check(out)


def test_empty_sizes() -> None:
    """K = 0 gives the bias, M = 0 and N = 0 nothing."""
    problem = make(3, 10, 0)
    problem.bias = np.arange(10, dtype=F32)
    np.testing.assert_array_equal(problem.run(), np.tile(problem.bias, (3, 1)))
    rows = quantize(np.zeros((3, 0), np.uint16), "bf16", Quantization(), 2)
    assert np.isfinite(rows_parts(rows.array, 3, 0)[0]).all()
    args = ffi.new("vac_int8_gemm_args *")
    for m, n in ((0, 8), (4, 0)):
        args.m, args.n, args.k = m, n, 4
        assert lib.vac_int8_gemm_check(args) == (lib.VAC_OK if n == 0 else lib.VAC_INVALID_ARGUMENT)
        args.out_stride = n
        assert lib.vac_int8_gemm_check(args) == lib.VAC_OK
        run(kernel("int8_gemm"), args, 2)
    assert lib.vac_int8_rows_size(0, 100) == 0
    empty = ffi.new("vac_int8_quantize_rows_args *")
    empty.k = empty.x_stride = 5
    run(kernel("int8_quantize_rows"), empty, 2)
    run(kernel("rms_norm_int8"), ffi.new("vac_rms_norm_int8_args *"), 2)
    run(kernel("silu_and_mul_int8"), ffi.new("vac_silu_and_mul_int8_args *"), 2)
    run(kernel("int8_grouped_gemm"), ffi.new("vac_int8_grouped_gemm_args *"), 2)


def test_checks_name_bad_arguments() -> None:
    buffer = np.zeros(64, np.float32)
    aligned = pointer(buffer[-buffer.ctypes.data // 4 % 4 :])
    odd = ffi.cast("void *", int(ffi.cast("size_t", aligned)) + 4)

    def rejects(kind: str, base: dict[str, object], bads: list[dict[str, object]]) -> None:
        def check(fields: dict[str, object]) -> int:
            args = ffi.new(f"vac_{kind}_args *")
            for name, value in (base | fields).items():
                target = args.quantization if name in ("mode", "scale", "zero_point") else args
                setattr(target, name, value)
            return int(getattr(lib, f"vac_{kind}_check")(args))

        assert check({}) == lib.VAC_OK
        for bad in bads:
            assert check(bad) == lib.VAC_INVALID_ARGUMENT, (kind, bad)

    static = {"mode": 2, "scale": 1.0}
    quantizations: list[dict[str, object]] = [
        {"mode": 3},
        {"mode": 2, "scale": 0.0},
        {"mode": 2, "scale": float("nan")},
        {"mode": 2, "scale": -1.0},
        {"mode": 2, "scale": float("inf")},
        static | {"zero_point": 128},
    ]
    rejects(
        "int8_quantize_rows",
        {"m": 2, "k": 4, "x_stride": 4, "x": aligned, "rows": aligned} | static,
        [*quantizations, {"dtype": 5}, {"x_stride": 3}, {"x": ffi.NULL}, {"rows": ffi.NULL}, {"rows": odd}],
    )
    int8 = ffi.cast("int8_t *", aligned)
    floats = ffi.cast("float *", aligned)
    rejects(
        "int8_gemm_rhs_pack",
        {"n": 2, "k": 4, "rhs_stride": 4, "rhs": int8, "scales": floats, "packed": aligned},
        [
            {"k": 131073, "rhs_stride": 131073},
            {"rhs_stride": 3},
            {"rhs": ffi.NULL},
            {"scales": ffi.NULL},
            {"packed": odd},
        ],
    )
    quantize = ffi.new("vac_int8_quantize_rows_args *")
    quantize.m, quantize.k, quantize.x_stride, quantize.x = 2, 4, 4, aligned
    other = ffi.new("vac_int8_quantize_rows_args *")
    other.m, other.k, other.x_stride, other.x = 5, 4, 4, aligned
    gemm = {"m": 2, "n": 4, "k": 4, "out_stride": 4}
    gemm |= {name: aligned for name in ("rows", "rhs", "out", "workspace")}
    rejects(
        "int8_gemm",
        gemm,
        [
            {"out_dtype": 3},
            {"k": 131073},
            {"out_stride": 3},
            {"rows": ffi.NULL},
            {"rows": odd},
            {"rhs": odd},
            {"workspace": ffi.NULL},
            {"bias": aligned, "bias_dtype": 4},
            {"residual": aligned, "residual_stride": 3},
            {"quantize": other},
            {"quantize": other, "m": 5},
        ],
    )
    rejects("int8_gemm", gemm | {"quantize": quantize, "rows": ffi.NULL}, [{"k": 5}])
    size = lib.vac_int8_gemm_rhs_packed_size(4, 4)
    rejects(
        "int8_grouped_gemm",
        {
            "num_experts": 1,
            "num_rows": 2,
            "num_rows_read": 2,
            "n": 4,
            "k": 4,
            "out_stride": 4,
            **{name: aligned for name in ("rows", "rhs", "out", "workspace")},
            "rhs_expert_stride": size,
            "expert_start": ffi.cast("int32_t *", aligned),
        },
        [
            {"out_dtype": 3},
            {"num_rows_read": 1},
            {"rhs_expert_stride": size - 16},
            {"rhs_expert_stride": size + 8},
            {"expert_start": ffi.NULL},
            {"bias": aligned, "bias_stride": 3},
            {"rows": odd},
        ],
    )
    rejects(
        "rms_norm_int8",
        {"num_tokens": 1, "hidden_size": 4, "x_token_stride": 4, "x": aligned, "rows": aligned, "workspace": aligned},
        [
            *quantizations,
            {"dtype": 4},
            {"weight": aligned, "weight_dtype": 1},
            {"x_token_stride": 3},
            {"residual": aligned, "residual_token_stride": 3},
            {"normed": aligned, "normed_token_stride": 3},
            {"num_tokens": -1},
            {"rows": odd},
        ],
    )
    rejects(
        "silu_and_mul_int8",
        {"num_tokens": 1, "d": 4, "x_token_stride": 8, "x": aligned, "rows": aligned, "workspace": aligned},
        [*quantizations, {"activation": 3}, {"x_token_stride": 7}, {"dtype": 9}, {"workspace": ffi.NULL}],
    )


def test_sizes_grow() -> None:
    """A buffer for the largest batch fits every smaller one."""
    for sizes in (
        [lib.vac_int8_rows_size(m, 4096) for m in range(1, 70)],
        [lib.vac_int8_gemm_workspace_size(m, 512, 4096, 4) for m in (1, 4, 5, 12, 13, 132, 133, 4096)],
        [lib.vac_int8_gemm_workspace_size(64, 640, k, 4) for k in (1, 512, 2049, 9000)],
        [lib.vac_int8_grouped_gemm_workspace_size(m, 512, 4096, 4) for m in (1, 12, 13, 100, 132, 4096)],
    ):
        assert sizes == sorted(sizes)
    assert lib.vac_int8_gemm_workspace_size(132, 512, 4096, 4) == lib.vac_int8_gemm_workspace_size(8192, 512, 4096, 4)
