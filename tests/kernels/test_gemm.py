"""Linear layers: packed weights, GEMV and GEMM against an FP64 product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.kernels.support import (
    DTYPES,
    Guarded,
    decode,
    encode,
    ffi,
    guarded,
    kernel,
    lib,
    pointer,
    run,
)

# Unit roundoff: BF16 has 8 significant bits, F16 11, FP32 24.
UNIT = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-24}
STORAGE = {"f32": np.float32, "f16": np.uint16, "bf16": np.uint16}


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Encoded values as plain bits, so that NaN patterns survive comparison and copying."""
    return encode(values, dtype).view(STORAGE[dtype])


def loaded(bits: np.ndarray, dtype: str) -> np.ndarray:
    """FP64 values of :func:`stored` bits."""
    return decode(bits.view(np.float16) if dtype == "f16" else bits, dtype).astype(np.float64)


def pack(weight: np.ndarray, dtype: str, num_threads: int = 1, at_end: bool = True) -> Guarded:
    """Pack a weight whose rows lie ``weight.strides`` apart; returns the guarded packed form."""
    n, k = weight.shape
    packed = Guarded(lib.vac_gemm_rhs_packed_size(DTYPES[dtype], n, k), np.uint8, at_end)
    args = ffi.new("vac_gemm_rhs_pack_args *")
    args.dtype, args.n, args.k = DTYPES[dtype], n, k
    args.rhs, args.rhs_stride = pointer(weight), weight.strides[0] // weight.itemsize
    args.packed = pointer(packed.array)
    run(kernel("gemm_rhs_pack"), args, num_threads)
    packed.check()
    return packed


def rows_with_stride(bits: np.ndarray, stride: int, at_end: bool) -> tuple[Guarded, np.ndarray]:
    """Guarded memory that holds rows ``stride`` elements apart, the last one without its padding."""
    m, n = bits.shape
    memory = Guarded((m - 1) * stride + n, bits.dtype, at_end)
    view = np.lib.stride_tricks.as_strided(memory.array, (m, n), (stride * bits.itemsize, bits.itemsize))
    view[...] = bits
    return memory, view


@dataclass
class Problem:
    """One linear layer and its operands as stored bits."""

    dtype: str
    weight: np.ndarray
    lhs: np.ndarray
    bias: np.ndarray | None = None
    bias_dtype: str = "f32"
    residual: np.ndarray | None = None
    out_dtype: str = ""

    def __post_init__(self) -> None:
        self.out_dtype = self.out_dtype or self.dtype

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        """The FP64 result and the error that FP32 sums and the final rounding may leave."""
        lhs, weight = loaded(self.lhs, self.dtype), loaded(self.weight, self.dtype)
        exact, size = lhs @ weight.T, np.abs(lhs) @ np.abs(weight).T
        for bits, dtype in ((self.bias, self.bias_dtype), (self.residual, self.out_dtype)):
            if bits is not None:
                exact = exact + loaded(bits, dtype)
                size = size + np.abs(loaded(bits, dtype))
        # k roundings of the sums and two additions, each up to one unit of FP32 in what was summed so far (BFMMLA
        # rounds to odd: a whole unit), then one rounding to out. Subnormals may be flushed.
        steps = self.lhs.shape[1] + 2
        tolerance = steps * (2.0**-23 * size + 2.0**-126) + UNIT[self.out_dtype] * np.abs(exact) * (1 + 2.0**-8)
        if self.out_dtype == "f16":
            tolerance = tolerance + 2.0**-25  # half a unit of its subnormals
        return exact, tolerance

    def run(
        self,
        packed: np.ndarray,
        num_threads: int = 1,
        at_end: bool = True,
        extra: int = 0,
        in_place: bool = False,
        workspace_threads: int = 0,
    ) -> np.ndarray:
        """Run the kernel with every operand guarded and rows ``extra`` elements apart; returns out's bits."""
        (m, k), n = self.lhs.shape, self.weight.shape[0]
        out_bits = np.full((m, n), 0x55, STORAGE[self.out_dtype])
        lhs_memory, lhs = rows_with_stride(self.lhs, k + extra, at_end)
        out_memory, out = rows_with_stride(out_bits, n + extra, at_end)
        lhs_before, gaps = lhs_memory.array.copy(), out_memory.array.copy()
        size = lib.vac_gemm_workspace_size(DTYPES[self.dtype], m, n, k, workspace_threads or num_threads)
        workspace = Guarded(size, np.uint8, at_end)
        args = ffi.new("vac_gemm_args *")
        args.dtype, args.out_dtype, args.bias_dtype = (
            DTYPES[name] for name in (self.dtype, self.out_dtype, self.bias_dtype)
        )
        args.m, args.n, args.k = m, n, k
        args.lhs, args.lhs_stride = pointer(lhs), k + extra
        args.rhs = pointer(packed)
        bias = None if self.bias is None else guarded(self.bias, at_end)
        args.bias = pointer(None if bias is None else bias.array)
        residual_memory = None
        if self.residual is not None:
            if in_place:
                out[...] = self.residual
                args.residual, args.residual_stride = pointer(out), n + extra
            else:
                residual_memory, residual = rows_with_stride(self.residual, n + extra, at_end)
                args.residual, args.residual_stride = pointer(residual), n + extra
        args.out, args.out_stride = pointer(out), n + extra
        args.workspace = pointer(workspace.array)
        assert lib.vac_gemm_check(args) == lib.VAC_OK
        run(kernel("gemm"), args, num_threads)
        for memory in (lhs_memory, out_memory, workspace, residual_memory, bias):
            if memory is not None:
                memory.check()
        assert (lhs_memory.array.view(np.uint8) == lhs_before.view(np.uint8)).all()
        result = out.copy()
        # What lies between the rows of out is not ours.
        out[...] = 0x55
        assert (out_memory.array.view(np.uint8) == gaps.view(np.uint8)).all()
        return result

    def check(self, bits: np.ndarray) -> None:
        """Assert that out is within the tolerance everywhere."""
        exact, tolerance = self.reference()
        error = np.abs(loaded(bits, self.out_dtype) - exact)
        assert (error <= tolerance).all(), (float((error / tolerance).max()), np.argwhere(error > tolerance)[:4])


def make(
    dtype: str,
    m: int,
    n: int,
    k: int,
    weight: np.ndarray | None = None,
    out_dtype: str = "",
    bias_dtype: str = "",
    residual: bool = False,
) -> Problem:
    """Random operands; ``weight`` gives that operand's bits instead."""
    rng = np.random.default_rng([m, n, k])
    if weight is None:
        weight = stored(rng.standard_normal((n, k)), dtype)
    problem = Problem(dtype, weight, stored(rng.standard_normal((m, k)), dtype), out_dtype=out_dtype)
    if bias_dtype:
        problem.bias_dtype = bias_dtype
        problem.bias = stored(rng.standard_normal(n), bias_dtype)
    if residual:
        problem.residual = stored(rng.standard_normal((m, n)), problem.out_dtype)
    return problem


TYPES = ["bf16", "f16", "f32"]
# Row counts around every tile height, and every tail.
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 19, 20, 33, 65]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("at_end", [True, False])
def test_k_tails(dtype: str, at_end: bool) -> None:
    for k in (1, 2, 3, 4, 5, 7, 8, 9, 31, 127, 130):
        _memory, weight = rows_with_stride(make(dtype, 1, 19, k).weight, k + 3, at_end)
        packed = pack(weight, dtype, at_end=at_end)
        for m in (1, 2, 3, 4, 5, 13):
            problem = make(dtype, m, 19, k, weight)
            problem.check(problem.run(packed.array, at_end=at_end, extra=1))


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_and_columns(dtype: str) -> None:
    for n in (1, 2, 7, 8, 9, 17, 31, 37, 71):
        weight = make(dtype, 1, n, 22).weight
        packed = pack(weight, dtype)
        for m in ROWS if n in (9, 37) else (1, 3, 6, 14):
            problem = make(dtype, m, n, 22, weight)
            problem.check(problem.run(packed.array, at_end=m % 2 == 0, extra=m % 3))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("m", [1, 4, 14])
def test_bias_residual_and_out_dtype(dtype: str, m: int) -> None:
    for n in (13, 40):
        weight = make(dtype, 1, n, 21).weight
        packed = pack(weight, dtype)
        for out_dtype in {dtype, "f32"}:
            for bias_dtype in {"", dtype, "f32"}:
                for residual in (False, True):
                    problem = make(dtype, m, n, 21, weight, out_dtype, bias_dtype, residual)
                    bits = problem.run(packed.array, extra=2)
                    problem.check(bits)
                    if residual:
                        same = problem.run(packed.array, extra=2, in_place=True)
                        assert (same.view(np.uint8) == bits.view(np.uint8)).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_blocks_of_k_and_rows(dtype: str) -> None:
    """K and M beyond one block, and more panels than wait together for their partial sums."""
    for m, n, k in ((5, 23, 2055), (14, 9, 3073), (20, 27, 1030), (23, 523, 1030), (150, 9, 1031)):
        problem = make(dtype, m, n, k, bias_dtype="f32")
        packed = pack(problem.weight, dtype)
        bits = problem.run(packed.array)
        problem.check(bits)
        # Of 150 rows x 2 panels, 3 threads take a part of the rows each.
        assert (problem.run(packed.array, num_threads=3).view(np.uint8) == bits.view(np.uint8)).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_bits_do_not_depend_on_threads_or_rows(dtype: str) -> None:
    """A row of out has the same bits for any team, any M and any place of the row."""
    n, k, most = 77, 1029 if dtype == "bf16" else 517, 65
    whole = make(dtype, most, n, k)
    packed = pack(whole.weight, dtype)
    expected = whole.run(packed.array)
    whole.check(expected)
    for num_threads in (2, 3, 8, 16):
        assert (pack(whole.weight, dtype, num_threads).array == packed.array).all()
        for m in (1, 3, 17, most):
            part = make(dtype, most, n, k, whole.weight)
            part.lhs = whole.lhs[:m]
            # A team may come out smaller than the workspace was made for.
            bits = part.run(packed.array, num_threads, workspace_threads=num_threads + m % 2)
            assert (bits.view(np.uint8) == expected[:m].view(np.uint8)).all(), (num_threads, m)
    for first, m in ((7, 1), (1, 2), (5, 4), (3, 5), (11, 12), (2, 14)):
        part = make(dtype, most, n, k, whole.weight)
        part.lhs = whole.lhs[first : first + m]
        bits = part.run(packed.array)
        assert (bits.view(np.uint8) == expected[first : first + m].view(np.uint8)).all(), (first, m)


@pytest.mark.parametrize("dtype", TYPES)
def test_nan_and_infinity(dtype: str) -> None:
    """Special values reach exactly the elements that IEEE arithmetic says, from lhs, weight, bias and residual."""
    n, k = 21, 19
    for m in (1, 2, 4, 5, 14):
        problem = make(dtype, m, n, k, bias_dtype="f32", residual=True)
        lhs, weight = loaded(problem.lhs, dtype), loaded(problem.weight, dtype)
        assert problem.bias is not None and problem.residual is not None
        residual = loaded(problem.residual, dtype)
        weight[3, 18], weight[8, 2], weight[20, 0] = np.inf, np.nan, -np.inf
        weight[5, 4] = 0.0
        lhs[m - 1, 4] = np.inf  # times zero in column 5: NaN
        lhs[0, 18] = 1.0 if m > 1 else -1.0
        problem.bias[11], problem.bias[3] = np.nan, -np.inf
        residual[m // 2, 13] = np.inf
        problem.lhs, problem.weight = stored(lhs, dtype), stored(weight, dtype)
        problem.residual = stored(residual, dtype)
        got = loaded(problem.run(pack(problem.weight, dtype).array), dtype)
        with np.errstate(invalid="ignore"):
            exact = sum(np.multiply.outer(lhs[:, i], weight[:, i]) for i in range(k)) + problem.bias + residual
        assert (np.isnan(got) == np.isnan(exact)).all()
        assert (np.isposinf(got) == np.isposinf(exact)).all()
        assert (np.isneginf(got) == np.isneginf(exact)).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_gather_and_unpack(dtype: str, num_threads: int) -> None:
    """Any bit pattern comes back, NaNs included; ids outside the table give zeros."""
    rng = np.random.default_rng(5)
    for n, k in ((1, 1), (9, 3), (21, 18), (8, 1029), (37, 31)):
        shape = (n, k)
        weight = rng.integers(0, 2**32 if dtype == "f32" else 2**16, shape, np.uint64)
        weight = weight.astype(np.uint32 if dtype == "f32" else np.uint16)
        packed = pack(weight, dtype)
        args = ffi.new("vac_gemm_rhs_gather_rows_args *")
        args.dtype, args.n, args.k, args.packed = DTYPES[dtype], n, k, pointer(packed.array)
        for id_type, first in ((np.int32, 0), (np.int64, 0), (np.int32, 100)):
            ids = guarded((first + np.concatenate([rng.integers(0, n, 9), [-1, n, n - 1]])).astype(id_type))
            args.first_id = first
            out_memory, out = rows_with_stride(np.ones((len(ids.array), k), weight.dtype), k + 1, True)
            args.ids, args.id_bytes, args.num_rows = pointer(ids.array), ids.array.itemsize, len(ids.array)
            args.out, args.out_stride = pointer(out), k + 1
            run(kernel("gemm_rhs_gather_rows"), args, num_threads)
            out_memory.check()
            rows = ids.array - first
            valid = (rows >= 0) & (rows < n)
            assert (out[valid] == weight[rows[valid]]).all()
            assert (out[~valid] == 0).all()
        memory = Guarded(shape, weight.dtype)
        args.out, args.out_stride = pointer(memory.array), k
        run(kernel("gemm_rhs_unpack"), args, num_threads)
        memory.check()
        assert (memory.array == weight).all()


def test_no_work_and_empty_k() -> None:
    problem = make("bf16", 3, 10, 0, bias_dtype="f32", residual=True)
    problem.check(problem.run(pack(problem.weight, "bf16").array))
    problem = make("f32", 6, 10, 0, bias_dtype="f32")
    problem.check(problem.run(pack(problem.weight, "f32").array))
    args = ffi.new("vac_gemm_args *")
    for m, n in ((0, 8), (4, 0)):
        args.m, args.n, args.k = m, n, 4
        run(kernel("gemm"), args, 2)


def test_check_names_bad_arguments() -> None:
    buffer = np.zeros(64, np.float32)

    def check(**fields: object) -> int:
        args = ffi.new("vac_gemm_args *")
        args.dtype, args.out_dtype, args.bias_dtype = lib.VAC_BF16, lib.VAC_BF16, lib.VAC_BF16
        args.m, args.n, args.k, args.lhs_stride, args.out_stride = 2, 4, 4, 4, 4
        args.lhs = args.rhs = args.out = args.workspace = pointer(buffer)
        for name, value in fields.items():
            setattr(args, name, value)
        return int(lib.vac_gemm_check(args))

    assert check() == lib.VAC_OK
    assert check(out_dtype=lib.VAC_F32) == lib.VAC_OK
    assert check(m=0, out=ffi.NULL, lhs=ffi.NULL) == lib.VAC_OK
    for bad in (
        {"dtype": 7},
        {"out_dtype": lib.VAC_F16},
        {"lhs_stride": 3},
        {"out_stride": 3},
        {"lhs": ffi.NULL},
        {"out": ffi.NULL},
        {"workspace": ffi.NULL},
        {"bias": pointer(buffer), "bias_dtype": lib.VAC_F16},
        {"residual": pointer(buffer), "residual_stride": 3},
    ):
        assert check(**bad) == lib.VAC_INVALID_ARGUMENT, bad
    assert lib.vac_gemm_rhs_packed_size(9, 8, 8) == 0


def test_workspace_grows_with_every_size() -> None:
    def size(m: int, n: int, k: int, threads: int = 4) -> int:
        return int(lib.vac_gemm_workspace_size(lib.VAC_BF16, m, n, k, threads))

    for sizes in ([(m, 512, 4096) for m in (1, 4, 5, 12, 13, 132, 4096)], [(64, 640, k) for k in (1, 512, 513, 9000)]):
        found = [size(*s) for s in sizes]
        assert found == sorted(found)
    assert size(132, 512, 4096) == size(8192, 512, 4096)


@pytest.mark.parametrize("dtype", TYPES)
def test_grouped(dtype: str) -> None:
    """Groups of rows with a weight each have the bits that the plain kernel gives; groups without rows, too."""
    n, extra = 37, 3
    cases: list[tuple[list[int], int, str]] = [
        ([1], 22, ""),
        ([0, 3, 0, 5, 1], 130, dtype),
        ([17, 0, 70, 2], 31, "f32"),
        ([4, 4, 4], 600, dtype),
        ([0, 0], 8, ""),
    ]
    for case, (counts, k, bias_dtype) in enumerate(cases):
        at_end, groups, m = case % 2 == 0, len(counts), sum(counts)
        problems = [make(dtype, max(count, 1), n, k, bias_dtype=bias_dtype) for count in counts]
        rng = np.random.default_rng(case)
        for problem in problems:
            problem.weight = stored(rng.standard_normal((n, k)), dtype)
        size = -(-lib.vac_gemm_rhs_packed_size(DTYPES[dtype], n, k) // 64) * 64
        packed = Guarded(groups * size, np.uint8, at_end)
        each = [pack(problem.weight, dtype).array for problem in problems]
        for group, bits in enumerate(each):
            packed.array[group * size : group * size + bits.size] = bits
        rows = [problem.lhs[:count] for problem, count in zip(problems, counts, strict=True)]
        lhs_memory, lhs = rows_with_stride(np.concatenate([*rows, problems[0].lhs[:1]])[: max(m, 1)], k + extra, at_end)
        biases = None
        if bias_dtype:
            gap = np.zeros(2, problems[0].bias.dtype)
            biases = guarded(np.concatenate([np.concatenate([p.bias, gap]) for p in problems])[:-2], at_end)
        start = guarded(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), at_end)
        for threads in (1, 2, 3, 8):
            out_memory, out = rows_with_stride(np.full((max(m, 1), n), 0x55, STORAGE[dtype]), n + extra, at_end)
            untouched = out_memory.array.copy()
            # Room for more rows than there are.
            most = m + 9
            workspace = Guarded(lib.vac_gemm_workspace_size(DTYPES[dtype], most, n, k, threads), np.uint8, at_end)
            args = ffi.new("vac_gemm_grouped_args *")
            args.each.dtype = args.each.out_dtype = DTYPES[dtype]
            args.each.m, args.each.n, args.each.k = most, n, k
            args.each.lhs, args.each.lhs_stride = pointer(lhs), k + extra
            args.each.out, args.each.out_stride = pointer(out), n + extra
            args.each.rhs, args.each.workspace = pointer(packed.array), pointer(workspace.array)
            args.each.bias = pointer(biases.array if biases else None)
            args.each.bias_dtype = DTYPES[bias_dtype or dtype]
            args.num_groups, args.group_start = groups, ffi.cast("int32_t *", start.array.ctypes.data)
            args.rhs_group_stride, args.bias_group_stride = size, n + 2
            assert lib.vac_gemm_grouped_check(args) == lib.VAC_OK
            run(kernel("gemm_grouped"), args, threads)
            for memory in (lhs_memory, out_memory, packed, workspace, start, biases):
                if memory is not None:
                    memory.check()
            begin = 0
            for problem, bits, count in zip(problems, each, counts, strict=True):
                if count:
                    alone = Problem(dtype, problem.weight, problem.lhs[:count], problem.bias, problem.bias_dtype)
                    assert np.array_equal(out[begin : begin + count], alone.run(bits)), (case, threads)
                    alone.check(out[begin : begin + count])
                begin += count
            out[:m] = 0x55
            assert (out_memory.array == untouched).all()


def test_grouped_refuses() -> None:
    """A residual, or groups without their beginnings."""
    args = ffi.new("vac_gemm_grouped_args *")
    args.each.dtype = args.each.out_dtype = DTYPES["f32"]
    assert lib.vac_gemm_grouped_check(args) == lib.VAC_OK
    args.num_groups = 1
    assert lib.vac_gemm_grouped_check(args) == lib.VAC_INVALID_ARGUMENT
    args.num_groups, args.each.residual = 0, ffi.cast("void *", 64)
    assert lib.vac_gemm_grouped_check(args) == lib.VAC_INVALID_ARGUMENT
