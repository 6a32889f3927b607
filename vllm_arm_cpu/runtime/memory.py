"""Memory of the process: huge-page arenas, and what the kernel permits and has.

Everything but :func:`allocate` does with the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_arm_cpu import envs

if TYPE_CHECKING:
    import torch

# Where the kernel does not say: the size of a huge page with 4 KiB base pages, and of
# the contiguous-PTE block with 64 KiB ones.
_HUGE_PAGE = 2 << 20
_arena_nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class HugePages:
    """State of the kernel's huge pages.

    Attributes:
        page_size: bytes of a base page: 4 KiB, or 64 KiB on some Arm kernels.
        transparent: ``"always"``, ``"madvise"``, ``"never"``, or ``""`` where the kernel has none.
        transparent_size: bytes of a transparent huge page, 0 when unknown.
        sized: bytes -> mode of the kernel's further sizes (multi-size THP).
        pools: bytes -> reserved pages (hugetlbfs).
    """

    page_size: int
    transparent: str
    transparent_size: int
    sized: Mapping[int, str]
    pools: Mapping[int, int]


@dataclass(frozen=True)
class SharedMemory:
    """Size and free space of /dev/shm in bytes."""

    total: int
    available: int


def read_huge_pages(root: str | Path = "/") -> HugePages:
    """Ask the kernel; missing files give empty fields."""
    mm = Path(root) / "sys/kernel/mm"
    thp = mm / "transparent_hugepage"
    size = _text(thp / "hpage_pmd_size")
    sized, pools = {}, {}
    for path in sorted(thp.glob("hugepages-*kB")):
        sized[_kib(path)] = _selected(path / "enabled")
    for path in sorted((mm / "hugepages").glob("hugepages-*kB")):
        count = _text(path / "nr_hugepages")
        pools[_kib(path)] = int(count) if count.isdecimal() else 0
    return HugePages(mmap.PAGESIZE, _selected(thp / "enabled"), int(size) if size.isdecimal() else 0, sized, pools)


def read_shared_memory(root: str | Path = "/") -> SharedMemory | None:
    """Size of /dev/shm, None when there is none."""
    try:
        stat = os.statvfs(Path(root) / "dev/shm")
    except OSError:
        return None
    return SharedMemory(stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail)


def allocate(nbytes: int) -> torch.Tensor:
    """Zeroed memory for weights or KV cache, as a tensor of ``nbytes`` uint8.

    Begins at a huge-page boundary when it is large enough to hold a huge page
    (64 bytes otherwise), with huge pages asked for unless VAC_HUGE_PAGES=0. A
    page is taken from the node of the thread that first writes to it, or from
    those of :func:`bind_arenas`. Freed with the last tensor that views it.

    Raises:
        ValueError: a negative size.
        MemoryError: the kernel has not that much address space or memory left.
    """
    import torch

    if nbytes < 0:
        raise ValueError(f"cannot allocate {nbytes} bytes")
    if nbytes < _HUGE_PAGE:
        return torch.zeros(nbytes, dtype=torch.uint8)
    mapping, start = map_aligned(nbytes)
    # frombuffer() holds a reference: the mapping lives as long as the tensor.
    return torch.frombuffer(mapping, dtype=torch.uint8)[start : start + nbytes]


def bind_arenas(nodes: Iterable[int]) -> None:
    """Let the pages of all later arenas come from these nodes alone; none: from anywhere again.

    A kernel that refuses leaves them to first touch.
    """
    global _arena_nodes
    _arena_nodes = tuple(nodes)


def map_aligned(nbytes: int) -> tuple[mmap.mmap, int]:
    """Map zeroed memory with huge pages as in :func:`allocate`.

    Returns:
        The mapping, and the offset in it from which ``nbytes`` begin at a huge-page boundary.

    Raises:
        MemoryError: the kernel has not that much address space or memory left.
    """
    # The kernel aligns mappings to base pages only; what is cut off is never touched, so it costs address space alone.
    whole = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
    try:
        mapping = mmap.mmap(-1, whole + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"cannot map {nbytes} bytes: {error}") from error
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    start = -address % _HUGE_PAGE
    if _arena_nodes:
        # All of it: a policy that ends behind nbytes would divide the mapping there, and the last huge page with it.
        with contextlib.suppress(OSError):
            bind_range(address, len(mapping), _arena_nodes)
    if envs.VAC_HUGE_PAGES:
        # The last, partial huge page counts: it lies within the mapping.
        advise_huge_pages(address + start, whole)
    return mapping, start


def mempolicy_error() -> int:
    """0 when this process may set its memory policy, else the errno.

    EPERM: a container without CAP_SYS_NICE. ENOSYS: a kernel without NUMA.
    The policy in force is read and set again, so nothing changes.
    """
    try:
        set_policy(get_policy())
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0


@dataclass(frozen=True)
class MemoryPolicy:
    """Where new pages of a thread come from; kept across fork and exec.

    Attributes:
        mode: the kernel's MPOL_*, flags included: 0 is the default, the node
            that the thread runs on.
        nodes: what the mode refers to.
    """

    mode: int = 0
    nodes: tuple[int, ...] = ()

    @classmethod
    def bind(cls, nodes: Iterable[int]) -> MemoryPolicy:
        """These nodes and no others, even if they are full."""
        return cls(2, tuple(sorted(nodes)))


def get_policy() -> MemoryPolicy:
    """The calling thread's memory policy.

    Raises:
        OSError: a kernel without NUMA.
    """
    mode, mask = ctypes.c_int(0), _node_mask(())
    _policy_call("get_mempolicy", ctypes.byref(mode), mask, _MASK_BITS, None, 0)
    nodes = tuple(node for node in range(_MASK_BITS) if mask[node // 64] >> (node % 64) & 1)
    return MemoryPolicy(mode.value, nodes)


def set_policy(policy: MemoryPolicy) -> None:
    """Set the calling thread's memory policy; threads and processes that it starts inherit it.

    Raises:
        OSError: EPERM where a container forbids it, EINVAL for nodes that have
            no memory or may not be used, ENOSYS for a kernel without NUMA.
    """
    # The default policy is refused when it comes with a mask.
    mask, bits = (_node_mask(policy.nodes), _MASK_BITS) if policy.nodes else (None, 0)
    _policy_call("set_mempolicy", policy.mode, mask, bits)


def bind_range(address: int, nbytes: int, nodes: Iterable[int]) -> None:
    """Let the pages of mapped memory come from the nodes alone; pages that exist stay where they are.

    Args:
        address: a page's beginning.

    Raises:
        OSError: as :func:`set_policy`.
    """
    policy = MemoryPolicy.bind(nodes)
    _policy_call("mbind", address, nbytes, policy.mode, _node_mask(policy.nodes), _MASK_BITS, 0)


# Kernels have at most 1024 nodes, and refuse a mask shorter than theirs or longer than a page.
_MASK_BITS = 1 << 12
_POLICY_CALLS = {
    "aarch64": {"mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237},
    "x86_64": {"mbind": 237, "get_mempolicy": 239, "set_mempolicy": 238},
}


def _node_mask(nodes: Iterable[int]) -> Any:
    mask = (ctypes.c_uint64 * (_MASK_BITS // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << (node % 64)
    return mask


def _policy_call(name: str, *arguments: Any) -> None:
    number = _POLICY_CALLS.get(os.uname().machine, {}).get(name)
    if number is None:
        raise OSError(errno.ENOSYS, f"{name} on {os.uname().machine}")
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    # As many registers as the kernel looks at, whatever a call needs.
    wide = [
        ctypes.c_long(value) if isinstance(value, int) else ctypes.c_void_p(value) if value is None else value
        for value in arguments
    ]
    if syscall(ctypes.c_long(number), *wide) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def advise_huge_pages(address: int, nbytes: int) -> bool:
    """Ask for transparent huge pages for the whole pages inside a range.

    Args:
        address: of the first byte of mapped memory.

    Returns:
        False when the kernel refuses or the range holds no whole page: the
        memory stays usable, with small pages.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length <= 0:
        return False
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(start, length, mmap.MADV_HUGEPAGE) == 0)


def _selected(path: Path) -> str:
    match = re.search(r"\[(\w+)\]", _text(path))
    return match.group(1) if match else ""


def _kib(path: Path) -> int:
    return int(re.sub(r"\D", "", path.name) or 0) * 1024


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
