"""Int4 linear cases: one call on one thread, with packed weights; activations and results are BF16.

``CASES`` maps a case's name to a function that prepares buffers and returns
``(call, bytes_read)``: ``call()`` quantizes the activations and multiplies,
``bytes_read`` is what it must read from memory: the packed weight and lhs, each once.

``w4a8_own_*`` are our kernels, ``w4a8_kai_*`` KleidiAI's under our driver (where
torch's library has them); the plain names are ours, which the model has ahead in
every case. A shape without N and K is 1024 x 1024.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vllm_arm_cpu.native import kleidiai, library

Case = tuple[Callable[[], None], int]
BF16 = 2


def _address(array: np.ndarray) -> object:
    return library.ffi.cast("void *", array.ctypes.data)


def _aligned(nbytes: int) -> np.ndarray:
    buffer = np.zeros(nbytes + 64, np.uint8)
    return buffer[-buffer.ctypes.data % 64 :][:nbytes]


def _activations(m: int, k: int) -> np.ndarray:
    # Bits of values in [1, 2): speed does not depend on them.
    return np.random.default_rng(0).integers(0x3F80, 0x3FFF, (m, k)).astype(np.uint16)


def _nibbles(n: int, k: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (n, k // 2)).astype(np.uint8)


def kai(m: int, group: int = 0, n: int = 1024, k: int = 1024) -> Case:
    """A linear layer on KleidiAI's kernels."""
    lib, ffi = library.load(), library.ffi
    functions = kleidiai.table()
    weight, lhs = _nibbles(n, k), _activations(m, k)
    scales = np.full((n, k // group), 0x3C00, np.uint16) if group else np.full(n, 0.01, np.float32)
    packed = _aligned(lib.vac_int4_kai_rhs_packed_size(n, k, group))
    pack = ffi.new("vac_int4_kai_rhs_pack_args *")
    pack.kai, pack.n, pack.k, pack.group = functions, n, k, group
    pack.rhs, pack.scales, pack.packed = ffi.cast("uint8_t *", weight.ctypes.data), _address(scales), _address(packed)
    lib.vac_int4_kai_rhs_pack(pack, 0, 1)
    workspace = _aligned(lib.vac_int4_kai_workspace_size(m, n, k, group, 1))
    out = np.zeros((m, n), np.uint16)
    args = ffi.new("vac_int4_kai_args *")
    args.kai, args.dtype, args.out_dtype = functions, BF16, BF16
    args.lhs_packed = m > lib.VAC_INT4_SELF_QUANTIZED_ROWS
    args.m, args.n, args.k, args.group = m, n, k, group
    args.lhs, args.lhs_stride, args.rhs = _address(lhs), k, _address(packed)
    args.out, args.out_stride, args.workspace = _address(out), n, _address(workspace)
    keep = (lhs, packed, workspace, out, args)

    def call() -> None:
        if keep[-1].lhs_packed:
            lib.vac_int4_kai_lhs_pack(keep[-1], 0, 1)
        lib.vac_int4_kai(keep[-1], 0, 1)

    return call, packed.nbytes + lhs.nbytes


def _packed(experts: int, group: int, n: int, k: int) -> tuple[np.ndarray, int, int]:
    """The same weight for each expert, its size and the scales' type."""
    lib, ffi = library.load(), library.ffi
    groups = k // group if group else 1
    weight = _nibbles(n, k)
    scales = np.full((n, groups), 0x3C00, np.uint16) if group else np.full((n, 1), 0.01, np.float32)
    scale_dtype = BF16 if group else 0
    size = lib.vac_int4_rhs_packed_size(scale_dtype, n, k, group, 0)
    packed = _aligned(experts * size)
    pack = ffi.new("vac_int4_rhs_pack_args *")
    pack.format, pack.scale_dtype, pack.n, pack.k, pack.group = lib.VAC_INT4_NIBBLES, scale_dtype, n, k, group
    pack.rhs, pack.rhs_stride, pack.packed = _address(weight), k // 2, _address(packed)
    pack.scales, pack.scale_stride = _address(scales), groups
    lib.vac_int4_rhs_pack(pack, 0, 1)
    for expert in range(1, experts):
        packed[expert * size : (expert + 1) * size] = packed[:size]
    return packed, size, scale_dtype


def own(m: int, group: int = 0, n: int = 1024, k: int = 1024, kind: str = "w4a8", top_k: int = 0) -> Case:
    """A linear layer on our kernels; ``kind`` is "w4a8" or "w4a16".

    With ``top_k`` it is one of 32 experts' layers: row i goes to experts i, i + 1, ..., i + top_k - 1.
    """
    lib, ffi = library.load(), library.ffi
    experts = 32 if top_k else 0
    packed, size, scale_dtype = _packed(max(experts, 1), group, n, k)
    lhs = _activations(m, k)
    pairs = sorted(((row + i) % experts, row) for row in range(m) for i in range(top_k))
    counts = np.bincount([expert for expert, _ in pairs], minlength=experts) if top_k else np.zeros(1, np.int64)
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    index = np.array([row for _, row in pairs], np.int32)
    rows = len(pairs) if top_k else m
    workspace = _aligned(getattr(lib, f"vac_int4_{kind}_workspace_size")(m, n, k, group, experts, 1))
    out = np.zeros((rows, n), np.uint16)
    args = ffi.new("vac_int4_gemm_args *")
    args.dtype, args.out_dtype, args.scale_dtype = BF16, BF16, scale_dtype
    args.lhs_quantized = m > lib.VAC_INT4_SELF_QUANTIZED_ROWS
    args.m, args.n, args.k, args.group = m, n, k, group
    args.lhs, args.lhs_stride, args.rhs = _address(lhs), k, _address(packed)
    args.out, args.out_stride, args.workspace = _address(out), n, _address(workspace)
    args.num_experts, args.num_rows, args.rhs_expert_stride = experts, rows, size
    args.row_index = ffi.cast("int32_t *", index.ctypes.data)
    args.expert_start = ffi.cast("int32_t *", start.ctypes.data)
    keep = (lhs, packed, workspace, out, start, index, args)
    run = getattr(lib, f"vac_int4_{kind}")

    def call() -> None:
        if kind == "w4a8" and keep[-1].lhs_quantized:
            lib.vac_int4_w4a8_quantize(keep[-1], 0, 1)
        run(keep[-1], 0, 1)

    used = int(np.count_nonzero(counts)) if top_k else 1
    return call, used * size + lhs.nbytes


_SHAPES: dict[str, tuple[int, int, int, int]] = {}
"""The part of a name behind ``w4a8_``: m, group, n, k."""
for _group in (0, 128, 32):
    for _m in (1, 2, 4, 8, 16, 64):
        _SHAPES[f"g{_group}_m{_m}" if _group else f"m{_m}"] = (_m, _group, 1024, 1024)
# Layers of Llama 3.1 8B: qkv, o, gate and up, down.
for _n, _k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
    _SHAPES[f"m1_n{_n}_k{_k}"] = (1, 0, _n, _k)
_SHAPES["g128_m1_n4096_k4096"] = (1, 128, 4096, 4096)
_SHAPES["m16_n4096_k4096"] = (16, 0, 4096, 4096)

CASES: dict[str, Callable[[], Case]] = {}
for _name, _shape in _SHAPES.items():
    CASES[f"w4a8_{_name}"] = CASES[f"w4a8_own_{_name}"] = lambda _shape=_shape: own(*_shape)
for _name, _shape in _SHAPES.items():
    CASES[f"w4a16_{_name}"] = lambda _shape=_shape: own(*_shape, kind="w4a16")
# Gate and up of Qwen3-30B-A3B's experts, 8 of which take each token.
for _m in (1, 16):
    CASES[f"w4a8_moe_g128_m{_m}"] = lambda _m=_m: own(_m, 128, 1536, 2048, top_k=8)
if kleidiai.library_path() is not None:
    for _name, _shape in _SHAPES.items():
        CASES[f"w4a8_kai_{_name}"] = lambda _shape=_shape: kai(*_shape)
