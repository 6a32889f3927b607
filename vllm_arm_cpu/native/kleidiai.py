"""KleidiAI's int4 kernels, found inside torch's ``libtorch_cpu.so``.

torch exports them with default visibility, but promises nothing about them: every
function is looked up here before any is used, and what it says of its own tile
and layout must be what ``csrc/quant/int4_layout.h`` reckons with. torch itself is
not imported.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cffi

from vllm_arm_cpu.native import library
from vllm_arm_cpu.runtime import cpu

# (name of a kernel, m_step, mr, what it needs beyond dotprod)
_MATMUL_CX_F32 = (
    ("matmul_clamp_f32_qai8dxp1x8_qsi4cxp8x8_1x8x32_neon_dotprod", 1, 1),
    ("matmul_clamp_f32_qai8dxp4x8_qsi4cxp8x8_8x8x32_neon_i8mm", 8, 4),
)
_MATMUL_CX_BF16 = (
    ("matmul_clamp_bf16_qai8dxp1x8_qsi4cxp8x8_1x8_neon_dotprod", 1, 1),
    ("matmul_clamp_bf16_qai8dxp4x8_qsi4cxp8x8_8x8_neon_i8mm", 8, 4),
)
_MATMUL_C32_F32 = (
    ("matmul_clamp_f32_qai8dxp1x8_qsi4c32p8x8_1x8x32_neon_dotprod", 1, 1),
    ("matmul_clamp_f32_qai8dxp4x8_qsi4c32p8x8_4x8x32_neon_i8mm", 4, 4),
)
_MATMULS = (*_MATMUL_CX_F32, *_MATMUL_CX_BF16, *_MATMUL_C32_F32)
_LHS_PACKS = ("lhs_quant_pack_qai8dxp_f32", "lhs_quant_pack_qai8dxp_bf16_neon")
_RHS_PACK_CX = "rhs_pack_nxk_qsi4cxp_qs4cxs1s0"
_RHS_PACK_C32 = "rhs_pack_nxk_qsi4c32p_qsu4c32s1s0"
# Of every kernel; the packed forms follow from them.
_NR, _KR, _SR, _N_STEP = 8, 16, 2, 8
_SCALE_BF16 = 0x0213  # the only type of scales per block


class KleidiAIError(RuntimeError):
    """KleidiAI's kernels cannot be used; the message says why."""


@dataclass(frozen=True)
class Status:
    """What was found.

    Attributes:
        library: path of libtorch_cpu.so, None where torch is not installed.
        missing: symbols that it lacks.
        features: the CPU's features that kernels are chosen by, out of ``("dotprod", "i8mm", "bf16")``.
        error: why the kernels cannot be used; None when they can.
    """

    library: str | None
    missing: tuple[str, ...]
    features: tuple[str, ...]
    error: str | None

    @property
    def usable(self) -> bool:
        """Whether :func:`table` gives a table."""
        return self.error is None


def status() -> Status:
    """Look for the kernels; never raises."""
    return _bind()[0]


def table() -> Any:
    """The ``vac_kai_int4 *`` for ``args.kai``; it lives as long as the process.

    Raises:
        KleidiAIError: the kernels cannot be used.
    """
    found, functions = _bind()
    if found.error is not None:
        raise KleidiAIError(found.error)
    return functions


def refusal(n: int, k: int, group: int, *, scale_dtype: str = "", zero_points: bool = False) -> str | None:
    """Why KleidiAI cannot take a weight, None if it can.

    Args:
        n, k: rows and columns of the weight.
        group: k that share a scale; 0 for a scale per row.
        scale_dtype: "f32", "f16" or "bf16", where the caller wants them used as they are.
        zero_points: whether the weight has zero points other than 8.
    """
    if zero_points:
        return "zero points"
    if n <= 0 or k <= 0:
        return f"an empty weight ({n} x {k})"
    if group == 0:
        if k % 2:
            return f"an odd number of columns ({k})"
        # A scale per row is packed as FP32, whatever it was.
        return None
    if group < 0 or group % 32 or k % group:
        return f"groups of {group} in rows of {k}: must be a multiple of 32 that divides them"
    if scale_dtype not in ("", "bf16"):
        return f"scales of groups in {scale_dtype}: only bf16"
    return None


def library_path() -> Path | None:
    """Where torch keeps libtorch_cpu.so, without importing torch; None where it does not."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "lib" / "libtorch_cpu.so"
    return path if path.is_file() else None


def _declarations() -> str:
    """Prototypes of all functions that are called or asked, after KleidiAI's headers."""
    lines = []
    for name, _, _ in _MATMULS:
        lines += [f"size_t kai_get_{what}_{name}(void);" for what in ("m_step", "n_step", "mr", "nr", "kr", "sr")]
        lines.append(f"size_t kai_get_lhs_packed_offset_{name}(size_t m_idx, size_t k);")
        block = ", size_t bl" if "c32p" in name else ""
        lines.append(f"size_t kai_get_rhs_packed_offset_{name}(size_t n_idx, size_t k{block});")
        out = "float" if "c32p" in name else "void"
        lines.append(
            f"void kai_run_{name}(size_t m, size_t n, size_t k{block}, const void *lhs_packed, const void *rhs_packed, "
            f"{out} *dst, size_t dst_stride_row, size_t dst_stride_col, float scalar_min, float scalar_max);"
        )
    for name in _LHS_PACKS:
        lines.append(
            f"void kai_run_{name}(size_t m, size_t k, size_t mr, size_t kr, size_t sr, size_t m_idx_start, "
            "const void *lhs, size_t lhs_stride, void *lhs_packed);"
        )
    sizes = "size_t n, size_t k, size_t nr, size_t kr, size_t sr"
    lines += [
        f"size_t kai_get_rhs_packed_size_{_RHS_PACK_CX}({sizes});",
        f"void kai_run_{_RHS_PACK_CX}(size_t num_groups, {sizes}, const uint8_t *rhs, const float *bias, "
        "const float *scale, void *packed, size_t extra_bytes, const void *params);",
        f"size_t kai_get_rhs_packed_size_{_RHS_PACK_C32}({sizes}, size_t bl, uint32_t scale_dt);",
        f"void kai_run_{_RHS_PACK_C32}(size_t num_groups, {sizes}, size_t bl, const uint8_t *rhs, size_t rhs_stride, "
        "const float *bias, const void *scale, size_t scale_stride, void *packed, size_t extra_bytes, "
        "const void *params);",
    ]
    return "\n".join(lines)


@functools.cache
def _bind() -> tuple[Status, Any]:
    have = cpu.detect().features
    features = tuple(name for name in ("dotprod", "i8mm", "bf16") if name in have)

    def failed(error: str, missing: tuple[str, ...] = ()) -> tuple[Status, Any]:
        return Status(str(path) if path else None, missing, features, error), None

    path = library_path()
    if "dotprod" not in features:
        return failed("this CPU has no dot product instructions")
    if path is None:
        return failed("torch's libtorch_cpu.so was not found")
    ffi = cffi.FFI()
    ffi.cdef(_declarations())
    try:
        torch_library: Any = ffi.dlopen(str(path), ffi.RTLD_NOW | ffi.RTLD_LOCAL)
    except OSError as error:
        return failed(f"{path} cannot be loaded: {error}")
    missing = tuple(name for name in dir(torch_library) if not _has(torch_library, name))
    if missing:
        return failed(f"{path} lacks {', '.join(missing)}", missing)
    try:
        lib = library.load()
    except library.LibraryError as error:
        return failed(str(error))
    # A tier below the CPU's (VAC_TIER) leaves its instructions unused.
    low = lib.vac_tier() < lib.VAC_TIER_BF16_I8MM
    features = tuple(name for name in features if name == "dotprod" or not low)
    difference = _difference(torch_library, lib, have=features)
    if difference:
        return failed(f"{path} has another KleidiAI than this package knows: {difference}")

    functions: Any = library.ffi.new("vac_kai_int4 *")

    def address(name: str) -> Any:
        return library.ffi.cast("void *", int(ffi.cast("uintptr_t", ffi.addressof(torch_library, f"kai_run_{name}"))))

    def fill(field: str, names: tuple[tuple[str, int, int], ...], count: int) -> None:
        array = getattr(functions, field)
        for i in range(count):
            array[i] = library.ffi.cast(library.ffi.typeof(array).item, address(names[i][0]))

    rows = 2 if "i8mm" in features else 1
    fill("matmul_cx_f32", _MATMUL_CX_F32, rows)
    fill("matmul_c32_f32", _MATMUL_C32_F32, rows)
    functions.lhs_pack_f32 = library.ffi.cast("vac_kai_lhs_pack", address(_LHS_PACKS[0]))
    if "bf16" in features:
        fill("matmul_cx_bf16", _MATMUL_CX_BF16, rows)
        functions.lhs_pack_bf16 = library.ffi.cast("vac_kai_lhs_pack", address(_LHS_PACKS[1]))
    functions.rhs_pack_cx = library.ffi.cast("vac_kai_rhs_pack_cx", address(_RHS_PACK_CX))
    functions.rhs_pack_c32 = library.ffi.cast("vac_kai_rhs_pack_c32", address(_RHS_PACK_C32))
    return Status(str(path), (), features, None), functions


def _has(torch_library: Any, name: str) -> bool:
    try:
        getattr(torch_library, name)
    except AttributeError:
        return False
    return True


def _difference(torch_library: Any, lib: Any, have: tuple[str, ...]) -> str | None:
    """The first property of the kernels that is not what the driver reckons with."""

    def ask(what: str, name: str, *args: int) -> int:
        return int(getattr(torch_library, f"kai_get_{what}_{name}")(*args))

    n, k, block = 24, 256, 64
    sizes = (
        (ask("rhs_packed_size", _RHS_PACK_CX, n, k, _NR, _KR, _SR), lib.vac_int4_kai_rhs_packed_size(n, k, 0)),
        (
            ask("rhs_packed_size", _RHS_PACK_C32, n, k, _NR, _KR, _SR, block, _SCALE_BF16),
            lib.vac_int4_kai_rhs_packed_size(n, k, block),
        ),
    )
    for found, expected in sizes:
        if found != expected:
            return f"a packed weight of {n} x {k} takes {found} bytes, not {expected}"
    for name, m_step, mr in _MATMULS:
        # KleidiAI computes some answers with instructions of the kernel's own kind.
        if name.endswith("i8mm") and "i8mm" not in have:
            continue
        grouped = "c32p" in name
        answers = {
            "m_step": (ask("m_step", name), m_step),
            "mr": (ask("mr", name), mr),
            "n_step": (ask("n_step", name), _N_STEP),
            "nr": (ask("nr", name), _NR),
            "kr": (ask("kr", name), _KR),
            "sr": (ask("sr", name), _SR),
            "lhs_packed_offset": (ask("lhs_packed_offset", name, 8, k), 8 * (k + 8)),
            "rhs_packed_offset": (
                ask("rhs_packed_offset", name, n, k, *([block] if grouped else [])),
                lib.vac_int4_kai_rhs_packed_size(n, k, block if grouped else 0),
            ),
        }
        for what, (found, expected) in answers.items():
            if found != expected:
                return f"{what} of {name} is {found}, not {expected}"
    return None
