"""How layers call kernels: pointers, argument structs, scratch memory.

A layer keeps its :class:`Call`: the argument struct is made once, a call sets
the few fields that change and runs the list in one parallel region.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_arm_cpu.native import library

ffi = library.ffi

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""``vac_dtype`` of each element type that kernels take."""


class KernelError(RuntimeError):
    """A kernel refused its arguments; the message names it."""


def pointer(tensor: torch.Tensor | None) -> Any:
    """``void *`` to a tensor's first element; NULL for None."""
    return ffi.NULL if tensor is None else ffi.cast("void *", tensor.data_ptr())


class Call:
    """A list of ops with their argument structs, made once and run many times.

    Args:
        ops: (kernel, struct type) pairs in the order of execution, such as
            ``("vac_rms_norm", "vac_rms_norm_args")``; in the struct's place the
            index of an earlier op whose struct is this one's, too. A barrier
            stands between any two.

    Attributes:
        args: the argument structs, in the same order; fields are set between runs.
    """

    def __init__(self, *ops: tuple[str, str | int]) -> None:
        lib = library.load()
        self.args: list[Any] = []
        for _, struct in ops:
            self.args.append(self.args[struct] if isinstance(struct, int) else ffi.new(f"{struct} *"))
        self._ops = ffi.new("vac_op[]", len(ops))
        self._count = len(ops)
        self._names = [name for name, _ in ops]
        self._execute = lib.vac_execute
        for i, (name, _) in enumerate(ops):
            self._ops[i].kernel = ffi.addressof(lib, name)
            self._ops[i].args = self.args[i]
            self._ops[i].flags = lib.VAC_OP_BARRIER_AFTER

    def run(self, num_threads: int = 0, first: int = 0) -> None:
        """Run the list from op ``first`` on, on ``num_threads`` threads (0: all of the OpenMP team)."""
        if self._execute(self._ops + first, self._count - first, num_threads) != 0:
            raise KernelError(f"this CPU cannot run {', '.join(self._names)}")


class Scratch:
    """Scratch memory that calls of one thread share; it grows and is never zeroed."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def pointer(self, num_bytes: int) -> Any:
        """Pointer to at least ``num_bytes`` bytes, valid until the next larger request."""
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return ffi.cast("void *", self._buffer.data_ptr())


scratch = Scratch()
"""The engine's thread has one; ops that run at the same time must not share it."""


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as [rows, columns] with unit column stride, copied only if it must be."""
    if tensor.dim() != 2:
        tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()
