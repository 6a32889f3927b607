"""Int4 linear layers: packing, W4A8 and W4A16 of our own, KleidiAI's kernels, against exact integers and FP64."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.kernels.support import DTYPES, Guarded, decode, encode, ffi, guarded, kernel, lib, pointer, run
from vllm_arm_cpu.native import kleidiai

UNIT = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-24}
STORAGE = {"f32": np.float32, "f16": np.uint16, "bf16": np.uint16}


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Encoded values as plain bits, so that NaN patterns survive comparison and copying."""
    return encode(values, dtype).view(STORAGE[dtype])


def loaded(bits: np.ndarray, dtype: str) -> np.ndarray:
    """FP64 values of :func:`stored` bits."""
    return decode(bits.view(np.float16) if dtype == "f16" else bits, dtype).astype(np.float64)


def rows_with_stride(bits: np.ndarray, stride: int, at_end: bool) -> tuple[Guarded, np.ndarray]:
    """Guarded memory that holds rows ``stride`` elements apart, the last one without its padding."""
    m, n = bits.shape
    memory = Guarded(max((m - 1) * stride + n, 0), bits.dtype, at_end)
    view = np.lib.stride_tricks.as_strided(memory.array, (m, n), (stride * bits.itemsize, bits.itemsize))
    view[...] = bits
    return memory, view


def run_list(names: list[str], args: object, num_threads: int) -> None:
    """Run ops on the same arguments, one after the other, a barrier between them."""
    ops = ffi.new("vac_op[]", len(names))
    for i, name in enumerate(names):
        ops[i].kernel, ops[i].args, ops[i].flags = kernel(name), args, lib.VAC_OP_BARRIER_AFTER
    assert lib.vac_execute(ops, len(names), num_threads) == 0


@dataclass
class Weight:
    """An int4 weight: values 0 .. 15, scales as stored, zero points (8 where there are none)."""

    values: np.ndarray
    scales: np.ndarray
    scale_dtype: str
    group: int
    zero_points: np.ndarray | None = None

    @property
    def k_group(self) -> int:
        k = self.values.shape[1]
        return k if self.group == 0 or self.group >= k else self.group

    def over_k(self, per_group: np.ndarray) -> np.ndarray:
        """One value per k of what there is one of per group."""
        return np.repeat(per_group, max(self.k_group, 1), axis=1)[:, : self.values.shape[1]]

    def integers(self) -> np.ndarray:
        """Value less zero point."""
        zero = 8 if self.zero_points is None else self.over_k(self.zero_points.astype(np.int64))
        return self.values.astype(np.int64) - zero

    def dequantized(self) -> np.ndarray:
        """FP64 weight."""
        return self.integers() * self.over_k(loaded(self.scales, self.scale_dtype))

    def source(self, layout: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Values and zero points as the packer takes them: "s8", "u8" or "nibbles"."""
        n, k = self.values.shape
        if layout == "s8":
            zero = None if self.zero_points is None else (self.zero_points - 8).astype(np.int8)
            return (self.values.astype(np.int8) - 8).astype(np.int8).view(np.uint8), zero
        zero = None if self.zero_points is None else self.zero_points.astype(np.int8)
        if layout == "u8":
            return self.values.astype(np.uint8), zero
        padded = np.zeros((n, k + k % 2), np.uint8)
        padded[:, :k] = self.values
        return padded[:, ::2] | padded[:, 1::2] << 4, zero

    def packed(self, layout: str = "nibbles", num_threads: int = 1, at_end: bool = True, extra: int = 0) -> Guarded:
        """The packed form, every buffer guarded and rows ``extra`` elements apart."""
        n, k = self.values.shape
        bits, zero = self.source(layout)
        scale_dtype = DTYPES[self.scale_dtype]
        packed = Guarded(
            lib.vac_int4_rhs_packed_size(scale_dtype, n, k, self.group, zero is not None), np.uint8, at_end
        )
        _rhs, view = rows_with_stride(bits, bits.shape[1] + extra, at_end)
        _scales, scale_view = rows_with_stride(self.scales, self.scales.shape[1] + extra, at_end)
        args = ffi.new("vac_int4_rhs_pack_args *")
        args.format = {"s8": lib.VAC_INT4_S8, "u8": lib.VAC_INT4_U8, "nibbles": lib.VAC_INT4_NIBBLES}[layout]
        args.scale_dtype, args.n, args.k, args.group = scale_dtype, n, k, self.group
        args.rhs, args.rhs_stride = pointer(view), bits.shape[1] + extra
        args.scales, args.scale_stride = pointer(scale_view), self.scales.shape[1] + extra
        if zero is not None:
            _zero, zero_view = rows_with_stride(zero, zero.shape[1] + extra, at_end)
            args.zero_points = ffi.cast("int8_t *", zero_view.ctypes.data)
            args.zero_point_stride = zero.shape[1] + extra
        args.packed = pointer(packed.array)
        assert lib.vac_int4_rhs_pack_check(args) == lib.VAC_OK
        run(kernel("int4_rhs_pack"), args, num_threads)
        packed.check()
        return packed


def make_weight(
    n: int, k: int, group: int = 0, scale_dtype: str = "f32", zero_points: bool = False, seed: int = 0
) -> Weight:
    rng = np.random.default_rng([n, k, group, seed])
    groups = 1 if group == 0 or group >= k else -(-k // group)
    scales = stored(rng.uniform(0.5, 1.5, (n, groups)) / 8, scale_dtype)
    zero = rng.integers(0, 17, (n, groups)).astype(np.int64) if zero_points else None
    return Weight(rng.integers(0, 16, (n, k)).astype(np.uint8), scales, scale_dtype, group, zero)


def quantized(lhs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 activations and their scales, as vac/quant_int4.h says, from FP64 values of the storage type."""
    largest = np.abs(lhs).max(axis=1, initial=0.0).astype(np.float32)
    zero = largest < np.float32(2.0**-118)
    inverse = np.where(zero, np.float32(0), np.float32(127) / np.where(zero, np.float32(1), largest))
    scale = np.where(zero, np.float32(0), largest * np.float32(1 / 127))
    return np.rint(lhs * inverse.astype(np.float64)[:, None]).astype(np.int64), scale.astype(np.float64)


@dataclass
class Problem:
    """Activations as stored bits and one weight, or one per expert."""

    dtype: str
    lhs: np.ndarray
    weights: list[Weight]
    out_dtype: str = ""
    bias: np.ndarray | None = None  # [n] or [experts, n]
    bias_dtype: str = "f32"
    row_index: np.ndarray | None = None
    expert_start: np.ndarray | None = None
    packed: list[Guarded] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.out_dtype = self.out_dtype or self.dtype

    def rows(self) -> list[tuple[int, np.ndarray]]:
        """(expert, rows of lhs), for each part of out."""
        if self.expert_start is None:
            return [(0, np.arange(len(self.lhs)))]
        index = np.arange(self.expert_start[-1]) if self.row_index is None else self.row_index
        ends = zip(self.expert_start, self.expert_start[1:], strict=False)
        return [(e, index[begin:end]) for e, (begin, end) in enumerate(ends)]

    def reference(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """The FP64 result of the quantized operands, and what FP32 sums and the last rounding may leave."""
        lhs = loaded(self.lhs, self.dtype)
        exact, size = [], []
        for expert, index in self.rows():
            weight = self.weights[expert]
            w = weight.dequantized()
            if kind == "w4a8":
                q, scale = quantized(lhs[index])
                part, part_size = (q @ w.T) * scale[:, None], (np.abs(q) @ np.abs(w).T) * scale[:, None]
                steps = weight.scales.shape[1] + 4
            else:
                part, part_size = lhs[index] @ w.T, np.abs(lhs[index]) @ np.abs(w).T
                # BFMMLA rounds to odd: a whole unit each time.
                steps = 2 * (lhs.shape[1] + 4)
            if self.bias is not None:
                bias = loaded(self.bias if self.expert_start is None else self.bias[expert], self.bias_dtype)
                part, part_size = part + bias, part_size + np.abs(bias)
            exact.append(part)
            size.append(steps * 2.0**-24 * part_size)
        result, tolerance = np.concatenate(exact), np.concatenate(size)
        tolerance = tolerance + UNIT[self.out_dtype] * np.abs(result) * (1 + 2.0**-8) + 2.0**-126
        if self.out_dtype == "f16":
            tolerance = tolerance + 2.0**-25
        return result, tolerance

    def run(self, kind: str = "w4a8", num_threads: int = 1, at_end: bool = True, extra: int = 0) -> np.ndarray:
        """Run the kernels with every operand guarded and rows ``extra`` elements apart; returns out's bits."""
        (m, k), n = self.lhs.shape, self.weights[0].values.shape[0]
        experts = 0 if self.expert_start is None else len(self.weights)
        num_rows = m if self.expert_start is None else int(self.expert_start[-1])
        first = self.weights[0]
        if not self.packed:
            if experts:
                size = lib.vac_int4_rhs_packed_size(
                    DTYPES[first.scale_dtype], n, k, first.group, first.zero_points is not None
                )
                whole = Guarded((experts, size + 64), np.uint8)
                for e, weight in enumerate(self.weights):
                    whole.array[e, :size] = weight.packed().array
                self.packed = [whole]
            else:
                self.packed = [first.packed()]
        lhs_memory, lhs = rows_with_stride(self.lhs, k + extra, at_end)
        before = lhs_memory.array.copy()
        out_memory, out = rows_with_stride(np.full((num_rows, n), 0x55, STORAGE[self.out_dtype]), n + extra, at_end)
        gaps = out_memory.array.copy()
        size = getattr(lib, f"vac_int4_{kind}_workspace_size")(m, n, k, first.group, experts, num_threads)
        workspace = Guarded(size, np.uint8, at_end)
        args = ffi.new("vac_int4_gemm_args *")
        args.dtype, args.out_dtype, args.bias_dtype, args.scale_dtype = (
            DTYPES[name] for name in (self.dtype, self.out_dtype, self.bias_dtype, first.scale_dtype)
        )
        args.has_zero_points = first.zero_points is not None
        args.lhs_quantized = m > lib.VAC_INT4_SELF_QUANTIZED_ROWS
        args.m, args.n, args.k, args.group = m, n, k, first.group
        args.lhs, args.lhs_stride = pointer(lhs), k + extra
        args.rhs = pointer(self.packed[0].array)
        bias = None if self.bias is None else guarded(self.bias, at_end)
        args.bias = pointer(None if bias is None else bias.array)
        args.out, args.out_stride, args.workspace = pointer(out), n + extra, pointer(workspace.array)
        args.num_experts, args.num_rows = experts, num_rows
        if experts:
            args.rhs_expert_stride = self.packed[0].array.strides[0]
            starts = guarded(self.expert_start.astype(np.int32), at_end)
            args.expert_start = ffi.cast("int32_t *", starts.array.ctypes.data)
            if self.row_index is not None:
                index = guarded(self.row_index.astype(np.int32), at_end)
                args.row_index = ffi.cast("int32_t *", index.array.ctypes.data)
        assert getattr(lib, f"vac_int4_{kind}_check")(args) == lib.VAC_OK
        ops = ["int4_w4a8_quantize"] if kind == "w4a8" and args.lhs_quantized else []
        run_list([*ops, f"int4_{kind}"], args, num_threads)
        for memory in (lhs_memory, out_memory, workspace, bias, self.packed[0]):
            if memory is not None:
                memory.check()
        assert (lhs_memory.array.view(np.uint8) == before.view(np.uint8)).all()
        result = out.copy()
        # What lies between the rows of out is not ours.
        out[...] = 0x55
        assert (out_memory.array.view(np.uint8) == gaps.view(np.uint8)).all()
        return result

    def check(self, bits: np.ndarray, kind: str = "w4a8") -> None:
        """Assert that out is within the tolerance everywhere."""
        exact, tolerance = self.reference(kind)
        error = np.abs(loaded(bits, self.out_dtype) - exact)
        assert (error <= tolerance).all(), (float((error / tolerance).max()), np.argwhere(error > tolerance)[:4])


def make(weight: Weight, m: int, dtype: str = "bf16", out_dtype: str = "", bias_dtype: str = "") -> Problem:
    n, k = weight.values.shape
    rng = np.random.default_rng([m, n, k])
    problem = Problem(dtype, stored(rng.standard_normal((m, k)), dtype), [weight], out_dtype)
    if bias_dtype:
        problem.bias_dtype, problem.bias = bias_dtype, stored(rng.standard_normal(n), bias_dtype)
    return problem


KINDS = ["w4a8", "w4a16"]
# Row counts around every tile height, and every tail.
ROWS = [*range(1, 18), 19, 20, 23, 33]


@pytest.mark.parametrize("layout", ["s8", "u8", "nibbles"])
@pytest.mark.parametrize("zero_points", [False, True])
def test_packing_round_trip(layout: str, zero_points: bool) -> None:
    """What is packed comes back as scale * (value - zero point), bit for bit, from any team."""
    for n, k, group, scale_dtype in (
        (1, 1, 0, "f32"),
        (9, 33, 32, "bf16"),
        (17, 75, 0, "f16"),
        (24, 160, 64, "f16"),
        (13, 130, 128, "f32"),
        (8, 48, 64, "bf16"),
    ):
        weight = make_weight(n, k, group, scale_dtype, zero_points)
        packed = weight.packed(layout, at_end=n % 2 == 0, extra=n % 3)
        for num_threads in (2, 5):
            assert (weight.packed(layout, num_threads).array == packed.array).all()
        assert packed.array.size % 64 == 0
        out_memory, out = rows_with_stride(np.zeros((n, k), np.float32), k + 1, True)
        args = ffi.new("vac_int4_rhs_unpack_args *")
        args.scale_dtype, args.has_zero_points = DTYPES[scale_dtype], zero_points
        args.n, args.k, args.group, args.packed = n, k, group, pointer(packed.array)
        args.out, args.out_stride = ffi.cast("float *", out.ctypes.data), k + 1
        run(kernel("int4_rhs_unpack"), args, 3)
        out_memory.check()
        assert (out == weight.dequantized().astype(np.float32)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("group", [0, 32, 96])
def test_rows(kind: str, zero_points: bool, group: int) -> None:
    """Every tile height; columns and K that fill no panel and no group."""
    for n, k in ((19, 161), (8, 64), (37, 200)):
        weight = make_weight(n, k, group, "bf16" if k == 161 else "f32", zero_points)
        packed = weight.packed()
        for m in ROWS if n == 19 else (1, 2, 4, 18):
            problem = make(weight, m)
            problem.packed = [packed]
            problem.check(problem.run(kind, at_end=m % 2 == 0, extra=m % 3), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_k_tails(kind: str) -> None:
    for k in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63):
        for group in (0, 32):
            weight = make_weight(11, k, group, "f16", True)
            packed = weight.packed()
            for m in (1, 3):
                problem = make(weight, m)
                problem.packed = [packed]
                problem.check(problem.run(kind, at_end=k % 2 == 0, extra=1), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_dtypes_and_bias(kind: str, dtype: str) -> None:
    for scale_dtype, group in (("f32", 0), ("bf16", 0), ("bf16", 64), ("f16", 64)):
        weight = make_weight(21, 136, group, scale_dtype)
        packed = weight.packed()
        for out_dtype in ("bf16", "f16", "f32"):
            for m, bias_dtype in ((1, ""), (1, "f32"), (3, "bf16"), (17, "f16")):
                problem = make(weight, m, dtype, out_dtype, bias_dtype)
                problem.packed = [packed]
                problem.check(problem.run(kind, extra=1), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_k_rows_and_panels(kind: str) -> None:
    """K, M and N beyond one block each."""
    for m, n, k, group in (
        (18, 9, 4133, 0),
        (20, 11, 4240, 128),
        (3, 9, 2100, 1024),
        (101, 9, 96, 32),
        (17, 270, 4112, 0),
        (18, 10, 4224, 2048),
    ):
        weight = make_weight(n, k, group, zero_points=True)
        problem = make(weight, m, bias_dtype="f32")
        bits = problem.run(kind)
        problem.check(bits, kind)
        assert (problem.run(kind, num_threads=3) == bits).all()


@pytest.mark.parametrize("group", [0, 32])
def test_bits_do_not_depend_on_threads_or_rows(group: int) -> None:
    """A row of out has the same bits for any team, any M and any place of the row."""
    most = 35
    weight = make_weight(77, 320, group, "bf16", True)
    packed = weight.packed()
    whole = make(weight, most)
    whole.packed = [packed]
    expected = whole.run()
    whole.check(expected)
    for num_threads in (2, 3, 8, 13):
        for m in (1, 2, 3, 17, most):
            part = Problem("bf16", whole.lhs[:m], [weight], packed=[packed])
            assert (part.run(num_threads=num_threads) == expected[:m]).all(), (num_threads, m)
    for first, m in ((7, 1), (2, 2), (5, 4), (1, 16), (3, 20)):
        part = Problem("bf16", whole.lhs[first : first + m], [weight], packed=[packed])
        assert (part.run() == expected[first : first + m]).all(), (first, m)


def test_integer_sums_are_exact() -> None:
    """Largest values everywhere: sums of a group and of a row as they are, nothing lost in FP32."""
    for group, k in ((0, 65536), (2048, 4096)):
        values = np.zeros((8, k), np.uint8)
        values[1::2] = 15
        scales = np.ones((8, -(-k // group) if group else 1), np.float32)
        for zero in (0, 16):
            weight = Weight(values, scales, "f32", group, np.full(scales.shape, zero))
            packed = weight.packed()
            for m in (1, 2, 3):
                # 127 is a row's largest magnitude, so its scale is 1 and its values stand for themselves.
                lhs = np.full((m, k), 127.0)
                lhs[-1, ::2] = -127.0
                problem = Problem("f32", stored(lhs, "f32"), [weight], packed=[packed])
                result = problem.run()
                exact = (lhs.astype(np.int64) @ weight.integers().T).astype(np.float32)
                assert (np.abs(result - exact) <= np.abs(exact) * 2.0**-22).all()
                small = np.abs(exact) < 2**22
                assert (result[small] == exact[small]).all()


@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("m", [1, 2, 6, 18])
def test_rows_of_zeros_and_special_values(group: int, m: int) -> None:
    weight = make_weight(11, 70, group, zero_points=True)
    for dtype in ("bf16", "f32"):
        problem = make(weight, m, dtype, "f32", "f32")
        plain = loaded(problem.run(), "f32")
        row = m - 1
        for value in (np.nan, np.inf, -np.inf):
            lhs = loaded(make(weight, m, dtype).lhs, dtype)
            lhs[row, 65] = value
            problem.lhs = stored(lhs, dtype)
            result = problem.run()
            assert np.isnan(result[row]).all()
            assert (result[:row] == plain[:row]).all()
        for value in (0.0, 2.0**-120):
            lhs = loaded(make(weight, m, dtype).lhs, dtype)
            lhs[row] = value
            problem.lhs = stored(lhs, dtype)
            result = problem.run()
            assert (result[row] == problem.bias).all()
            assert (result[:row] == plain[:row]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [3, 8, 19])
def test_special_values_stay_in_their_row(kind: str, m: int) -> None:
    weight = make_weight(11, 70, 32)
    problem = make(weight, m, out_dtype="f32")
    plain = problem.run(kind)
    others = np.arange(m) != 2
    for value in (np.nan, np.inf):
        lhs = loaded(make(weight, m).lhs, "bf16")
        lhs[2, 3] = value
        problem.lhs = stored(lhs, "bf16")
        result = problem.run(kind)
        # An infinity is one still where the weight is widened, and NaN where rows are made of integers.
        assert not np.isfinite(result[2][weight.integers()[:, 3] != 0]).any()
        assert not np.isnan(value) or np.isnan(result[2]).all()
        assert (result[others] == plain[others]).all()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("group", [0, 32])
def test_w4a16_of_few_rows_keeps_small_activations(dtype: str, group: int) -> None:
    """Exact down to 2^-14 of a row's largest (FP16: 2^-11), which itself counts for nothing here: its weight is 0."""
    k, magnitudes = 96, 14 if dtype == "bf16" else 11
    for m in (1, 2, 3, 4, 8, 9, 16):
        weight = make_weight(19, k, group, "f32")
        weight.values[:, 5] = 8
        problem = make(weight, m, dtype, "f32", "f32")
        rng = np.random.default_rng(m)
        # 8 significant bits, by powers of two.
        lhs = rng.integers(128, 256, (m, k)) * rng.choice([-1.0, 1.0], (m, k)) * 2.0 ** -rng.integers(0, magnitudes, k)
        lhs[:, 5] = 255.0
        for size in (1.0, 2.0**-10 if dtype == "f16" else 2.0**-80):
            problem.lhs = stored(lhs * size, dtype)
            problem.check(problem.run("w4a16"), "w4a16")


@pytest.mark.parametrize("m", [1, 4, 8, 10])
def test_w4a16_rows_of_zeros_and_of_tiny_values(m: int) -> None:
    weight = make_weight(11, 70, 32, zero_points=True)
    problem = make(weight, m, "bf16", "f32", "f32")
    lhs = loaded(problem.lhs, "bf16")
    lhs[-1] = 0.0
    problem.lhs = stored(lhs, "bf16")
    assert (problem.run("w4a16")[-1] == problem.bias).all()
    # What is below 2^-126 counts for nothing, and 2^-126 for itself or for nothing.
    problem.bias = np.zeros_like(problem.bias)
    lhs[-1] = 2.0**-126
    problem.lhs = stored(lhs, "bf16")
    result = loaded(problem.run("w4a16"), "f32")[-1]
    assert (np.abs(result) <= 2.0**-124 * np.abs(weight.dequantized()).sum(1)).all()
    lhs[-1] = 2.0**-100
    problem.lhs = stored(lhs, "bf16")
    problem.check(problem.run("w4a16"), "w4a16")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [0, 32])
def test_experts(kind: str, group: int) -> None:
    """Rows sorted by expert, gathered from lhs; experts without rows, with one, with many."""
    rng = np.random.default_rng(1)
    n, k, m = 27, 100, 40
    for counts, gathered in (([3, 0, 1, 7, 1], True), ([0, 20, 0, 37], True), ([1, 1, 1, 1], True), ([5, 8], False)):
        weights = [make_weight(n, k, group, "bf16", True, seed=e) for e in range(len(counts))]
        start = np.concatenate([[0], np.cumsum(counts)])
        for source_rows in (1, m):
            if source_rows == 1 and not gathered:
                continue
            problem = Problem("bf16", stored(rng.standard_normal((source_rows, k)), "bf16"), weights)
            problem.expert_start = start
            problem.row_index = rng.integers(0, source_rows, start[-1]) if gathered else None
            problem.bias_dtype = "bf16"
            problem.bias = stored(rng.standard_normal((len(counts), n)), "bf16")
            bits = problem.run(kind)
            problem.check(bits, kind)
            for num_threads in (2, 3, 8):
                assert (problem.run(kind, num_threads, extra=1) == bits).all()


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_one_token_keep_all_threads_busy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight threads share the columns of two experts evenly, though no expert is a multiple of a thread's share."""
    n, k, num_threads, chosen = 200, 96, 8, (1, 4)
    weights = [make_weight(n, k, 32, seed=e) for e in range(6)]
    problem = Problem("bf16", stored(np.random.default_rng(3).standard_normal((1, k)), "bf16"), weights, "f32")
    problem.expert_start = np.cumsum([0, *(e in chosen for e in range(6))])
    problem.row_index = np.zeros(2, np.int64)
    written = []

    def run_list_by_thread(names: list[str], args: object, _num_threads: int) -> None:
        out = np.frombuffer(ffi.buffer(args.out, 2 * n * 4), np.uint32)
        for name in names:
            for thread in range(num_threads):
                before = out.copy()
                getattr(lib, f"vac_{name}")(args, thread, num_threads)
                written.append(int((out != before).sum()))

    monkeypatch.setattr(f"{__name__}.run_list", run_list_by_thread)
    problem.check(problem.run(kind, num_threads), kind)
    assert sum(written) == 2 * n
    assert min(written[-num_threads:]) >= 48, "6 panels of 8 columns; 50 panels are shared by 8 threads"


def test_experts_beyond_a_gathered_block() -> None:
    n, k = 9, 33000
    weights = [make_weight(n, k, seed=e) for e in range(2)]
    rng = np.random.default_rng(2)
    problem = Problem("bf16", stored(rng.standard_normal((21, k)), "bf16"), weights)
    problem.expert_start = np.array([0, 2, 21])
    problem.row_index = rng.permutation(21)
    bits = problem.run()
    problem.check(bits)
    assert (problem.run(num_threads=2) == bits).all()


@pytest.mark.parametrize("kind", KINDS)
def test_no_work_and_empty_k(kind: str) -> None:
    weight = make_weight(10, 0)
    for m in (1, 3, 18):
        problem = make(weight, m, bias_dtype="f32")
        problem.check(problem.run(kind), kind)
    args = ffi.new("vac_int4_gemm_args *")
    for m, n, experts in ((0, 8, 0), (4, 0, 0), (4, 8, 3)):
        args.m, args.n, args.k, args.num_experts = m, n, 32, experts
        run(kernel(f"int4_{kind}"), args, 2)


def test_check_names_bad_arguments() -> None:
    buffer = np.zeros(64, np.float32)
    starts = np.zeros(3, np.int32)

    def check(kind: str = "w4a8", **fields: object) -> int:
        args = ffi.new("vac_int4_gemm_args *")
        args.dtype = args.out_dtype = args.bias_dtype = lib.VAC_BF16
        args.m, args.n, args.k, args.lhs_stride, args.out_stride, args.group = 2, 4, 64, 64, 4, 32
        args.lhs = args.rhs = args.out = args.workspace = pointer(buffer)
        for name, value in fields.items():
            setattr(args, name, value)
        return int(getattr(lib, f"vac_int4_{kind}_check")(args))

    experts = {
        "num_experts": 2,
        "rhs_expert_stride": 4096,
        "num_rows": 2,
        "expert_start": ffi.cast("int32_t *", starts.ctypes.data),
    }
    for kind in KINDS:
        assert check(kind) == lib.VAC_OK
        assert check(kind, m=0, out=ffi.NULL, lhs=ffi.NULL) == lib.VAC_OK
        assert check(kind, **experts) == lib.VAC_OK
        for bad in (
            {"dtype": 7},
            {"out_dtype": -1},
            {"scale_dtype": 3},
            {"group": 33},
            {"k": 8192, "lhs_stride": 8192, "group": 4096},
            {"lhs_stride": 63},
            {"out_stride": 3},
            {"lhs": ffi.NULL},
            {"rhs": ffi.NULL},
            {"out": ffi.NULL},
            {"workspace": ffi.NULL},
            {"bias": pointer(buffer), "bias_dtype": 9},
            experts | {"expert_start": ffi.NULL},
            experts | {"rhs_expert_stride": 64},
            experts | {"num_rows": 3},
        ):
            assert check(kind, **bad) == lib.VAC_INVALID_ARGUMENT, bad
    assert check(m=3) == lib.VAC_INVALID_ARGUMENT
    assert check(m=3, lhs_quantized=1) == lib.VAC_OK
    assert check(k=65537, lhs_stride=65537, group=0) == lib.VAC_INVALID_ARGUMENT
    assert check("w4a16", m=3, k=65537, lhs_stride=65537, group=0) == lib.VAC_OK
    assert lib.vac_int4_rhs_packed_size(7, 8, 64, 0, 0) == 0
    assert lib.vac_int4_rhs_packed_size(0, 8, 64, 40, 0) == 0

    def pack_check(**fields: object) -> int:
        args = ffi.new("vac_int4_rhs_pack_args *")
        args.format, args.n, args.k, args.group, args.rhs_stride, args.scale_stride = 2, 4, 64, 32, 32, 2
        args.rhs = args.scales = args.packed = pointer(buffer)
        for name, value in fields.items():
            setattr(args, name, value)
        return int(lib.vac_int4_rhs_pack_check(args))

    assert pack_check() == lib.VAC_OK
    for bad in ({"format": 3}, {"scale_dtype": 5}, {"rhs_stride": 31}, {"scale_stride": 1}, {"packed": ffi.NULL}):
        assert pack_check(**bad) == lib.VAC_INVALID_ARGUMENT, bad


def test_error_of_quantization() -> None:
    """W4A8 on Gaussian data loses less than 1 % against the unquantized activations."""
    weight = make_weight(64, 512, 128, "bf16")
    problem = make(weight, 8)
    exact = loaded(problem.lhs, "bf16") @ weight.dequantized().T
    result = loaded(problem.run(), "bf16")
    assert np.linalg.norm(result - exact) < 0.01 * np.linalg.norm(exact)


# --- KleidiAI -------------------------------------------------------------------


def kai_pack(weight: Weight, bias: np.ndarray | None, num_threads: int = 1) -> Guarded:
    n, k = weight.values.shape
    packed = Guarded(lib.vac_int4_kai_rhs_packed_size(n, k, weight.group), np.uint8)
    nibbles, scales = guarded(weight.source("nibbles")[0]), guarded(weight.scales)
    args = ffi.new("vac_int4_kai_rhs_pack_args *")
    args.kai, args.n, args.k, args.group = kleidiai.table(), n, k, weight.group
    args.rhs, args.scales = ffi.cast("uint8_t *", nibbles.array.ctypes.data), pointer(scales.array)
    memory = None if bias is None else guarded(bias)
    if memory is not None:
        args.bias = ffi.cast("float *", memory.array.ctypes.data)
    args.packed = pointer(packed.array)
    assert lib.vac_int4_kai_rhs_pack_check(args) == lib.VAC_OK
    run(kernel("int4_kai_rhs_pack"), args, num_threads)
    packed.check()
    return packed


def kai_activations(workspace: np.ndarray, m: int, k: int, mr: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int8 activations, zero points and scales out of the packed form."""
    wide = -(-k // 32) * 32
    base = workspace[-workspace.ctypes.data % 64 :]
    q, zero, scale = np.zeros((m, k), np.int64), np.zeros(m, np.int64), np.zeros(m)
    for row in range(m):
        tile = base[row // mr * mr * (wide + 8) :][: mr * (wide + 8)]
        values = tile[: mr * wide].view(np.int8).reshape(wide // 8, mr, 8)[:, row % mr]
        q[row] = values.reshape(-1)[:k]
        # The zero point is stored negated.
        zero[row] = -tile[mr * wide :][: mr * 4].view(np.int32)[row % mr]
        scale[row] = tile[mr * (wide + 4) :].view(np.float32)[row % mr]
    return q, zero, scale


def kai_run(problem: Problem, packed: Guarded, num_threads: int = 1, at_end: bool = True, extra: int = 0) -> np.ndarray:
    """Run the driver and check the result against the activations that it quantized."""
    weight = problem.weights[0]
    (m, k), n = problem.lhs.shape, weight.values.shape[0]
    lhs_memory, lhs = rows_with_stride(problem.lhs, k + extra, at_end)
    out_memory, out = rows_with_stride(np.full((m, n), 0x55, STORAGE[problem.out_dtype]), n + extra, at_end)
    gaps = out_memory.array.copy()
    workspace = Guarded(lib.vac_int4_kai_workspace_size(m, n, k, weight.group, num_threads), np.uint8, at_end)
    args = ffi.new("vac_int4_kai_args *")
    args.kai = kleidiai.table()
    args.dtype, args.out_dtype = DTYPES[problem.dtype], DTYPES[problem.out_dtype]
    args.m, args.n, args.k, args.group = m, n, k, weight.group
    args.lhs, args.lhs_stride, args.rhs = pointer(lhs), k + extra, pointer(packed.array)
    args.out, args.out_stride, args.workspace = pointer(out), n + extra, pointer(workspace.array)
    results = []
    for shared in (True, False) if m <= lib.VAC_INT4_SELF_QUANTIZED_ROWS else (True,):
        args.lhs_packed = shared
        assert lib.vac_int4_kai_check(args) == lib.VAC_OK
        run_list([*(["int4_kai_lhs_pack"] if shared else []), "int4_kai"], args, num_threads)
        for memory in (lhs_memory, out_memory, workspace, packed):
            memory.check()
        results.append(out.copy())
        if shared:
            i8mm = args.kai.matmul_cx_f32[1] != ffi.NULL
            q, zero, scale = kai_activations(workspace.array, m, k, 4 if m > 1 and i8mm else 1)
        out[...] = 0x55
        assert (out_memory.array.view(np.uint8) == gaps.view(np.uint8)).all()
    assert all((result == results[0]).all() for result in results)
    # The activations are what was given, to half a step (and what clamping at the ends leaves).
    values = loaded(problem.lhs, problem.dtype)
    assert (np.abs((q - zero[:, None]) * scale[:, None] - values) <= 1.01 * scale[:, None]).all()
    w = weight.dequantized()
    exact = ((q - zero[:, None]) @ w.T) * scale[:, None]
    size = ((np.abs(q) + np.abs(zero)[:, None]) @ np.abs(w).T) * scale[:, None]
    if problem.bias is not None:
        exact, size = exact + problem.bias, size + np.abs(problem.bias)
    tolerance = 2.0**-20 * size + UNIT[problem.out_dtype] * np.abs(exact) * 1.01
    error = np.abs(loaded(results[0], problem.out_dtype) - exact)
    assert (error <= tolerance).all(), float((error / tolerance).max())
    return results[0]


def test_kleidiai_is_there() -> None:
    found = kleidiai.status()
    assert found.usable, found.error
    assert found.missing == ()
    assert found.features == (("dotprod", "i8mm", "bf16") if lib.vac_tier() == lib.VAC_TIER_BF16_I8MM else ("dotprod",))


@pytest.mark.parametrize("group", [0, 32, 64])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_kleidiai(dtype: str, group: int) -> None:
    for n, k in ((19, 64), (8, 192), (37, 320)):
        weight = make_weight(n, k, group, "bf16" if group else "f32")
        bias = np.random.default_rng(n).standard_normal(n).astype(np.float32) if n == 37 else None
        packed = kai_pack(weight, bias)
        assert (kai_pack(weight, bias, 3).array == packed.array).all()
        for out_dtype in ("bf16", "f16", "f32"):
            for m in (1, 2, 3, 5, 13) if n == 19 else (1, 4, 9):
                problem = make(weight, m, dtype, out_dtype)
                problem.bias = bias
                kai_run(problem, packed, at_end=m % 2 == 0, extra=m % 3)


def test_kleidiai_odd_k_of_bf16() -> None:
    """KleidiAI's BF16 packer takes multiples of 8 only; the rest goes through FP32."""
    for k in (2, 30, 34, 100):
        weight = make_weight(11, k)
        packed = kai_pack(weight, None)
        for m in (1, 3):
            kai_run(make(weight, m), packed)


@pytest.mark.parametrize("group", [0, 32])
def test_kleidiai_blocks_and_threads(group: int) -> None:
    """Many rows and columns, and a long K; any team gives the same bits."""
    for m, n, k in ((75, 203, 96), (20, 75, 2048)):
        weight = make_weight(n, k, group, "bf16" if group else "f32")
        packed = kai_pack(weight, None)
        problem = make(weight, m)
        expected = kai_run(problem, packed)
        for num_threads in (2, 3, 8):
            assert (kai_run(problem, packed, num_threads) == expected).all()


def test_kleidiai_refuses_bad_arguments() -> None:
    assert lib.vac_int4_kai_rhs_packed_size(8, 33, 0) == 0
    assert lib.vac_int4_kai_rhs_packed_size(8, 96, 64) == 0
    assert lib.vac_int4_kai_rhs_packed_size(8, 96, 48) == 0
    buffer = np.zeros(64, np.float32)

    def check(**fields: object) -> int:
        args = ffi.new("vac_int4_kai_args *")
        args.kai, args.m, args.n, args.k, args.group = kleidiai.table(), 1, 8, 64, 32
        args.lhs_stride, args.out_stride = 64, 8
        args.lhs = args.rhs = args.out = args.workspace = pointer(buffer)
        for name, value in fields.items():
            setattr(args, name, value)
        return int(lib.vac_int4_kai_check(args))

    assert check() == lib.VAC_OK
    for bad in (
        {"kai": ffi.NULL},
        {"kai": ffi.new("vac_kai_int4 *")},
        {"k": 65, "lhs_stride": 65, "group": 0},
        {"group": 48},
        {"lhs_stride": 63},
        {"out_stride": 7},
        {"dtype": 4},
        {"out": ffi.NULL},
        {"m": 3},
    ):
        assert check(**bad) == lib.VAC_INVALID_ARGUMENT, bad
