"""A long list of ops that is made once and run every step: only what changed is written into its argument structs.

Ops are appended with their structs; a field whose value changes from step to
step (a number of tokens, an address) is bound to a :class:`Slot`. Setting a
slot writes all fields bound to it at once, and nothing if the value is the
one it had: in a steady decode a step costs one native call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import KernelError, pointer

ffi = library.ffi
_ALIGNMENT = 64


@dataclass(eq=False)
class Slot:
    """A value that changes from step to step: a count, a stride or an address; not negative.

    Attributes:
        places: (view of the arguments, where in it, what is added to the value), once the program is finished.
    """

    name: str
    value: int = -1
    places: list[tuple[Any, Any, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Rows:
    """Rows of a matrix whose address changes.

    Attributes:
        base: address of what holds the matrix.
        stride: elements from row to row.
        offset: bytes from ``base`` to the first row.
    """

    base: Slot
    stride: int | Slot
    offset: int = 0


class Program:
    """A list of ops and their arguments.

    Append with :meth:`op`, then :meth:`finish` once, then :meth:`set` and :meth:`run` as often as wanted.
    """

    def __init__(self) -> None:
        self._lib = library.load()
        self._execute = self._lib.vac_execute
        self._pending: list[tuple[str, str, Any, bool]] = []
        self._bindings: list[tuple[int, str, Slot, int]] = []
        self._index: dict[int, int] = {}
        self._keep: list[Any] = []
        self._ops: Any = None
        self._count = 0

    def op(self, kernel: str, struct: str, barrier: bool = True, **fields: Any) -> Any:
        """Append ``kernel`` with a new ``struct``; returns the struct, whose other fields may be set until the end.

        fields: numbers, tensors (their address; kept alive), None (NULL),
        slots, or (slot, bytes to add); a field of a struct inside the struct is ``"inner.field"``.
        ``barrier``: later ops read what other threads write in this one.
        """
        args = ffi.new(f"{struct} *")
        self._index[_address(args)] = len(self._pending)
        self._pending.append((kernel, struct, args, barrier))
        self.fill(args, **fields)
        return args

    def fill(self, args: Any, **fields: Any) -> None:
        """Set fields of a struct that :meth:`op` returned, as there."""
        for name, value in fields.items():
            if isinstance(value, (Slot, tuple)):
                slot, offset = value if isinstance(value, tuple) else (value, 0)
                self._bind(args, name, slot, offset)
                continue
            inner, _, last = name.rpartition(".")
            target = getattr(args, inner) if inner else args
            if value is None or isinstance(value, torch.Tensor):
                self._keep.append(value)
                value = ffi.cast(_type(ffi.typeof(args).item, name), pointer(value))
            setattr(target, last, value)

    def rows(self, args: Any, name: str, rows: Rows, stride: str) -> None:
        """Set the field ``name`` to a matrix's address, and the field ``stride`` to its stride."""
        self.fill(args, **{name: (rows.base, rows.offset), stride: rows.stride})

    def keep(self, thing: Any) -> None:
        """Keep what an argument points to for as long as the program."""
        self._keep.append(thing)

    def _bind(self, args: Any, name: str, slot: Slot, offset: int) -> None:
        self._bindings.append((self._index[_address(args)], name, slot, offset))

    def finish(self) -> None:
        """Lay the arguments out; no op can be appended any more."""
        lib = self._lib
        self._count = len(self._pending)
        starts, size = [], 0
        for _, struct, _, _ in self._pending:
            starts.append(size)
            size += -(-ffi.sizeof(struct) // _ALIGNMENT) * _ALIGNMENT
        arena: Any = np.zeros(size // 8 + _ALIGNMENT // 8, dtype=np.uint64)
        first = -arena.ctypes.data % _ALIGNMENT // 8
        arena = arena[first : first + size // 8]
        self._arena, base = arena, arena.ctypes.data
        self._ops = ffi.new("vac_op[]", self._count)
        for i, (kernel, struct, args, barrier) in enumerate(self._pending):
            address = ffi.cast("char *", base + starts[i])
            ffi.memmove(address, args, ffi.sizeof(struct))
            self._ops[i].kernel = ffi.addressof(lib, kernel)
            self._ops[i].args = address
            self._ops[i].flags = lib.VAC_OP_BARRIER_AFTER if barrier else 0
        views = {8: arena, 4: arena.view(np.uint32)}
        grouped: dict[tuple[int, int], tuple[Slot, list[int], list[int]]] = {}
        for index, name, slot, offset in self._bindings:
            struct = self._pending[index][1]
            width = ffi.sizeof(_type(ffi.typeof(struct), name))
            place = starts[index] + ffi.offsetof(struct, *name.split("."))
            _, places, offsets = grouped.setdefault((id(slot), width), (slot, [], []))
            places.append(place // width)
            offsets.append(offset)
        for (_, width), (slot, places, offsets) in grouped.items():
            view = views[width]
            added = np.array(offsets, dtype=view.dtype) if any(offsets) else None
            slot.places.append((view, np.array(places), added))
        self._pending, self._bindings, self._index = [], [], {}

    def set(self, slot: Slot, value: int) -> None:
        """Write ``value`` into every field that is bound to the slot."""
        if slot.value != value:
            for view, places, offsets in slot.places:
                view[places] = value if offsets is None else offsets + value
            slot.value = value

    def run(self, first: int = 0, count: int | None = None, num_threads: int = 0) -> None:
        """Run ``count`` ops (None: all that follow) from the one numbered ``first``, in one parallel region.

        ``num_threads`` 0: all of the OpenMP team.
        """
        count = self._count - first if count is None else count
        if self._execute(self._ops + first, count, num_threads) != 0:
            raise KernelError("this CPU cannot run the kernels")

    @property
    def pending(self) -> int:
        """Number of ops appended so far."""
        return len(self._pending)

    def __len__(self) -> int:
        return self._count


def _address(args: Any) -> int:
    return int(ffi.cast("uintptr_t", args))


def _type(struct: Any, name: str) -> Any:
    """The type of a field, or of ``inner.field``."""
    for part in name.split("."):
        struct = next(description.type for field_name, description in struct.fields if field_name == part)
    return struct
