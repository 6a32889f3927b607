"""INT8 linear cases: quantization of BF16 activations and the product, on one thread, with packed weights.

``CASES`` maps a case's name to a function that prepares buffers and returns
``(call, bytes_read)``: ``call()`` runs the kernels once, ``bytes_read`` is what
they must read from memory: the packed weight and the activations, each once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vllm_arm_cpu.native import library

Case = tuple[Callable[[], None], int]
MODES = {"symmetric": 0, "asymmetric": 1, "static": 2}
OUT_DTYPES = {"f32": (0, np.float32), "bf16": (2, np.uint16)}
BF16 = 2


def address(array: np.ndarray) -> object:
    """``void *`` to an array's first element."""
    return library.ffi.cast("void *", array.ctypes.data)


def aligned(size: int) -> np.ndarray:
    """Bytes that begin at a cache line."""
    memory = np.zeros(size + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:size]


def bf16(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Bits of normally distributed values."""
    values = rng.standard_normal((rows, columns), dtype=np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def pack(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """A packed weight of uniform integers, which repeat: speed does not depend on them."""
    lib, ffi = library.load(), library.ffi
    weight = np.resize(rng.integers(-127, 128, (min(n, 64), k), dtype=np.int8), (n, k))
    scales = rng.uniform(0.001, 0.01, n).astype(np.float32)
    packed = aligned(lib.vac_int8_gemm_rhs_packed_size(n, k))
    args = ffi.new("vac_int8_gemm_rhs_pack_args *")
    args.n, args.k, args.rhs_stride = n, k, k
    args.rhs, args.scales = ffi.cast("int8_t *", weight.ctypes.data), ffi.cast("float *", scales.ctypes.data)
    args.packed = address(packed)
    lib.vac_int8_gemm_rhs_pack(args, 0, 1)
    return packed


def linear(m: int, n: int = 1024, k: int = 1024, mode: str = "symmetric", out_dtype: str = "bf16") -> Case:
    """A linear layer of the given size on BF16 activations."""
    lib, ffi = library.load(), library.ffi
    rng = np.random.default_rng(0)
    x, packed = bf16(rng, m, k), pack(rng, n, k)
    rows = aligned(lib.vac_int8_rows_size(m, k))
    out = np.zeros((m, n), OUT_DTYPES[out_dtype][1])
    workspace = aligned(lib.vac_int8_gemm_workspace_size(m, n, k, 1))

    quantize = ffi.new("vac_int8_quantize_rows_args *")
    quantize.quantization.mode, quantize.quantization.scale = MODES[mode], 0.03
    quantize.dtype, quantize.m, quantize.k = BF16, m, k
    quantize.x, quantize.x_stride, quantize.rows = address(x), k, address(rows)
    gemm = ffi.new("vac_int8_gemm_args *")
    gemm.out_dtype, gemm.m, gemm.n, gemm.k = OUT_DTYPES[out_dtype][0], m, n, k
    gemm.rows, gemm.rhs, gemm.out, gemm.out_stride = address(rows), address(packed), address(out), n
    gemm.workspace = address(workspace)
    inside = m <= lib.VAC_INT8_GEMM_QUANTIZE_ROWS
    if inside:
        gemm.quantize = quantize
    keep = (x, packed, rows, out, workspace, quantize, gemm)

    def call() -> None:
        if not inside:
            lib.vac_int8_quantize_rows(keep[-2], 0, 1)
        lib.vac_int8_gemm(keep[-1], 0, 1)

    return call, n * k + 2 * m * k


def grouped(num_tokens: int, num_experts: int, top_k: int, n: int, k: int) -> Case:
    """One of the linears of a mixture of experts, tokens spread evenly over the experts."""
    lib, ffi = library.load(), library.ffi
    rng = np.random.default_rng(0)
    x, packed = bf16(rng, num_tokens, k), pack(rng, num_experts * n, k)
    stride = lib.vac_int8_gemm_rhs_packed_size(n, k)
    weights = aligned(num_experts * stride)
    weights[...] = np.resize(packed, weights.size)
    num_rows = num_tokens * top_k
    expert = np.sort(np.arange(num_rows) % num_experts)
    starts = np.searchsorted(expert, np.arange(num_experts + 1)).astype(np.int32)
    index = (np.arange(num_rows) * 7 % num_tokens).astype(np.int32)
    rows = aligned(lib.vac_int8_rows_size(num_tokens, k))
    out = np.zeros((num_rows, n), np.uint16)
    workspace = aligned(lib.vac_int8_grouped_gemm_workspace_size(num_rows, n, k, 1))

    quantize = ffi.new("vac_int8_quantize_rows_args *")
    quantize.dtype, quantize.m, quantize.k = BF16, num_tokens, k
    quantize.x, quantize.x_stride, quantize.rows = address(x), k, address(rows)
    gemm = ffi.new("vac_int8_grouped_gemm_args *")
    gemm.out_dtype, gemm.num_experts, gemm.num_rows, gemm.num_rows_read = BF16, num_experts, num_rows, num_tokens
    gemm.n, gemm.k, gemm.rows = n, k, address(rows)
    gemm.row_index = ffi.cast("int32_t *", index.ctypes.data)
    gemm.expert_start = ffi.cast("int32_t *", starts.ctypes.data)
    gemm.rhs, gemm.rhs_expert_stride = address(weights), stride
    gemm.out, gemm.out_stride, gemm.workspace = address(out), n, address(workspace)
    keep = (x, weights, index, starts, rows, out, workspace, quantize, gemm)

    def call() -> None:
        lib.vac_int8_quantize_rows(keep[-2], 0, 1)
        lib.vac_int8_grouped_gemm(keep[-1], 0, 1)

    used = len(np.unique(expert))
    return call, used * n * k + 2 * num_tokens * k


def rms_norm(num_tokens: int, hidden_size: int) -> Case:
    """RMSNorm with a residual, quantized."""
    lib, ffi = library.load(), library.ffi
    rng = np.random.default_rng(0)
    x, residual, weight = (bf16(rng, rows, hidden_size) for rows in (num_tokens, num_tokens, 1))
    rows = aligned(lib.vac_int8_rows_size(num_tokens, hidden_size))
    workspace = aligned(lib.vac_rms_norm_int8_workspace_size(hidden_size, 1))
    args = ffi.new("vac_rms_norm_int8_args *")
    args.rows, args.x, args.residual, args.weight = address(rows), address(x), address(residual), address(weight)
    args.num_tokens, args.hidden_size, args.eps = num_tokens, hidden_size, 1e-6
    args.x_token_stride = args.residual_token_stride = hidden_size
    args.dtype = args.weight_dtype = BF16
    args.workspace = address(workspace)
    keep = (x, residual, weight, rows, workspace, args)
    return lambda: lib.vac_rms_norm_int8(keep[-1], 0, 1), 4 * x.size + 2 * hidden_size


def silu_and_mul(num_tokens: int, d: int) -> Case:
    """SiLU and product, quantized."""
    lib, ffi = library.load(), library.ffi
    x = bf16(np.random.default_rng(0), num_tokens, 2 * d)
    rows = aligned(lib.vac_int8_rows_size(num_tokens, d))
    workspace = aligned(lib.vac_silu_and_mul_int8_workspace_size(d, 1))
    args = ffi.new("vac_silu_and_mul_int8_args *")
    args.rows, args.x, args.x_token_stride = address(rows), address(x), 2 * d
    args.num_tokens, args.d, args.dtype = num_tokens, d, BF16
    args.workspace = address(workspace)
    keep = (x, rows, workspace, args)

    def call() -> None:
        lib.vac_silu_and_mul_int8(keep[-1], 0, 1)
        lib.vac_silu_and_mul_int8_finish(keep[-1], 0, 1)

    return call, 2 * x.size


CASES: dict[str, Callable[[], Case]] = {
    "w8a8_m1": lambda: linear(1),
    "w8a8_m2": lambda: linear(2),
    "w8a8_m4": lambda: linear(4),
    "w8a8_m8": lambda: linear(8),
    "w8a8_m16": lambda: linear(16),
    "w8a8_m64": lambda: linear(64),
    "w8a8_m256": lambda: linear(256),
    "w8a8_m1_asymmetric": lambda: linear(1, mode="asymmetric"),
    "w8a8_m1_static": lambda: linear(1, mode="static"),
    "w8a8_m64_asymmetric": lambda: linear(64, mode="asymmetric"),
    # The linears of Llama 3.1 8B: QKV, attention output, gate and up, down.
    "w8a8_m1_n6144_k4096": lambda: linear(1, 6144, 4096),
    "w8a8_m1_n4096_k4096": lambda: linear(1, 4096, 4096),
    "w8a8_m1_n28672_k4096": lambda: linear(1, 28672, 4096),
    "w8a8_m1_n4096_k14336": lambda: linear(1, 4096, 14336),
    "w8a8_m16_n4096_k4096": lambda: linear(16, 4096, 4096),
    "w8a8_m1_lm_head": lambda: linear(1, 128256, 4096, out_dtype="f32"),
    # One 32nd of the head above, for modelling under emulation: cycles and bytes are proportional to N.
    "w8a8_m1_lm_head_32nd": lambda: linear(1, 128256 // 32, 4096, out_dtype="f32"),
    # One token and many on 8 of 128 experts (hidden 2048, intermediate 768).
    "w8a8_moe_m1": lambda: grouped(1, 8, 8, 1536, 2048),
    "w8a8_moe_m64": lambda: grouped(64, 32, 8, 256, 2048),
    "rms_norm_int8_1x4096": lambda: rms_norm(1, 4096),
    "rms_norm_int8_64x4096": lambda: rms_norm(64, 4096),
    "silu_and_mul_int8_1x14336": lambda: silu_and_mul(1, 14336),
    "silu_and_mul_int8_16x14336": lambda: silu_and_mul(16, 14336),
}
