"""What kernel tests share: bit formats, guard pages and running ops.

Kernel tests need numpy and cffi only: neither torch nor vLLM is imported, so
a test process starts in seconds under emulation.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np

from vllm_arm_cpu.native import library

ffi = library.ffi
lib = library.load()
PAGE = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round float values to BF16 (nearest even); returns their uint16 bit patterns."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """The float32 values of BF16 bit patterns."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


DTYPES = {"f32": 0, "f16": 1, "bf16": 2}
# Unit roundoff of each type: half a unit in the last place, relative.
ROUNDOFF = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as an array of the storage type of ``dtype`` ("f32", "f16", "bf16")."""
    if dtype == "bf16":
        return to_bf16(values)
    return np.ascontiguousarray(values, dtype=np.float16 if dtype == "f16" else np.float32)


def decode(stored: np.ndarray, dtype: str) -> np.ndarray:
    """The float32 values of an array made by :func:`encode`."""
    return from_bf16(stored) if dtype == "bf16" else stored.astype(np.float32)


class Guarded:
    """Memory that ends at an unmapped page, so that one byte too far is a SIGSEGV.

    The array lies flush against the guard page behind it (``at_end``) or right
    behind the guard page before it. Bytes left between are filled with a
    pattern that :meth:`check` looks at.
    """

    FILL = 0xA5

    def __init__(self, shape: Sequence[int] | int, dtype: np.dtype | type, at_end: bool = True) -> None:
        self.dtype = np.dtype(dtype)
        count = int(np.prod(shape))
        self.nbytes = count * self.dtype.itemsize
        body = max(PAGE, -(-self.nbytes // PAGE) * PAGE)
        self._map = mmap.mmap(-1, body + 2 * PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        ctypes.memset(base, self.FILL, body + 2 * PAGE)
        for guard in (base, base + PAGE + body):
            if _libc.mprotect(guard, PAGE, 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
        self._body = np.frombuffer(self._map, np.uint8, body, PAGE)
        self._offset = body - self.nbytes if at_end else 0
        self.array = self._body[self._offset : self._offset + self.nbytes].view(self.dtype).reshape(shape)
        # Numpy may not touch the guard pages: nothing above reads them.
        self._keep = base

    def check(self) -> None:
        """Assert that nothing between the array and its guard pages was written."""
        assert (self._body[: self._offset] == self.FILL).all(), "bytes before the array were written"
        assert (self._body[self._offset + self.nbytes :] == self.FILL).all(), "bytes after the array were written"


def guarded(values: np.ndarray, at_end: bool = True) -> Guarded:
    """A guarded copy of ``values``."""
    memory = Guarded(values.shape, values.dtype, at_end)
    memory.array[...] = values
    return memory


def pointer(array: np.ndarray | None, offset_bytes: int = 0) -> object:
    """``void *`` to an array's first element (NULL for None)."""
    return ffi.NULL if array is None else ffi.cast("void *", array.ctypes.data + offset_bytes)


def run(kernel: object, args: object, num_threads: int = 1) -> None:
    """Run one op through ``vac_execute`` on ``num_threads`` threads."""
    ops = ffi.new("vac_op[1]")
    ops[0].kernel = kernel
    ops[0].args = args
    assert lib.vac_execute(ops, 1, num_threads) == 0


def kernel(name: str) -> object:
    """Address of the exported kernel ``vac_<name>``, for an op list."""
    return ffi.addressof(lib, f"vac_{name}")
