"""Linear layer cases: one call of ``vac_gemm`` on one thread, with packed weights.

``CASES`` maps a case's name to a function that prepares buffers and returns
``(call, bytes_read)``: ``call()`` runs the kernel once, ``bytes_read`` is what
it must read from memory: the packed weight and lhs, each once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vllm_arm_cpu.native import library

Case = tuple[Callable[[], None], int]
DTYPES = {"f32": (0, np.float32), "f16": (1, np.uint16), "bf16": (2, np.uint16)}


def linear(dtype: str, m: int, n: int = 1024, k: int = 1024, options: str = "") -> Case:
    """A linear layer of the given size; ``options`` may name "bias", "residual" and "f32_out"."""
    lib, ffi = library.load(), library.ffi
    code, storage = DTYPES[dtype]
    rng = np.random.default_rng(0)

    def operand(rows: int, columns: int) -> np.ndarray:
        # Bits of a value in [1, 2) whatever the type; a tile of them is enough, speed does not depend on values.
        one = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}[dtype]
        tile = (one + rng.integers(0, 64, (min(rows, 64), columns))).astype(np.uint32 if dtype == "f32" else np.uint16)
        return np.ascontiguousarray(np.resize(tile, (rows, columns))).view(storage)

    def address(array: np.ndarray) -> object:
        return ffi.cast("void *", array.ctypes.data)

    lhs, weight = operand(m, k), operand(n, k)
    packed = np.empty(lib.vac_gemm_rhs_packed_size(code, n, k) + 64, np.uint8)
    packed = packed[-packed.ctypes.data % 64 :]
    pack = ffi.new("vac_gemm_rhs_pack_args *")
    pack.dtype, pack.n, pack.k, pack.rhs, pack.rhs_stride = code, n, k, address(weight), k
    pack.packed = address(packed)
    lib.vac_gemm_rhs_pack(pack, 0, 1)
    workspace = np.empty(lib.vac_gemm_workspace_size(code, m, n, k, 1), np.uint8)
    out_dtype = "f32" if "f32_out" in options else dtype
    out, residual = (np.zeros((m, n), DTYPES[out_dtype][1]) for _ in range(2))
    bias = np.zeros(n, storage)

    args = ffi.new("vac_gemm_args *")
    args.dtype, args.out_dtype, args.bias_dtype = code, DTYPES[out_dtype][0], code
    args.m, args.n, args.k = m, n, k
    args.lhs, args.lhs_stride, args.rhs = address(lhs), k, address(packed)
    args.out, args.out_stride, args.workspace = address(out), n, address(workspace)
    if "bias" in options:
        args.bias = address(bias)
    if "residual" in options:
        args.residual, args.residual_stride = address(residual), n
    keep = (lhs, packed, workspace, out, residual, bias, args)

    def call() -> None:
        lib.vac_gemm(keep[-1], 0, 1)

    return call, (n + m) * k * storage().itemsize


CASES: dict[str, Callable[[], Case]] = {
    "bf16_m1": lambda: linear("bf16", 1),
    "bf16_m4": lambda: linear("bf16", 4),
    "bf16_m16": lambda: linear("bf16", 16),
    "bf16_m64": lambda: linear("bf16", 64),
    "bf16_m256": lambda: linear("bf16", 256),
    "bf16_m1_n4096_k14336": lambda: linear("bf16", 1, 4096, 14336),
    "bf16_m1_lm_head": lambda: linear("bf16", 1, 128256, 4096, "f32_out"),
    # One 32nd of the head above, for modelling under emulation: cycles and bytes are proportional to N.
    "bf16_m1_lm_head_32nd": lambda: linear("bf16", 1, 128256 // 32, 4096, "f32_out"),
    "bf16_m2": lambda: linear("bf16", 2),
    "bf16_m8": lambda: linear("bf16", 8),
    "bf16_m64_n256_k4096": lambda: linear("bf16", 64, 256, 4096),
    "bf16_m64_bias_residual": lambda: linear("bf16", 64, options="bias residual"),
    "f16_m1": lambda: linear("f16", 1),
    "f16_m16": lambda: linear("f16", 16),
    "f16_m64": lambda: linear("f16", 64),
    "f32_m1": lambda: linear("f32", 1),
    "f32_m16": lambda: linear("f32", 16),
    "f32_m64": lambda: linear("f32", 64),
}
