"""Give pages back to the kernel whose contents nobody needs."""

from __future__ import annotations

import ctypes
import mmap

_MADV_DONTNEED = 4


def release(address: int, nbytes: int) -> None:
    """Drop the whole pages inside a range of private memory; the range stays mapped.

    Read again, anonymous memory is zero, and a file's is what the file holds.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0:
        # A refusal leaves the pages where they are.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED)
