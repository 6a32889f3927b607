"""One polling thread for all process groups of a single rank, instead of one for each.

Replaces ``ProcessGroupGloo`` where ``torch.distributed.distributed_c10d``
makes groups, while vLLM makes its dozen: each group gets a gloo device of its
own, whose thread wakes up a hundred times a second to look for messages. A
group of one rank has none, and an idle engine spends more than 1 % of a core on
that. Can go once torch shares a default device, or vLLM makes no groups for one
rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.distributed import distributed_c10d


@contextlib.contextmanager
def shared(world_size: int) -> Iterator[None]:
    """Groups that are made inside share a device, where there is one rank and torch has gloo."""
    original: Any = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if world_size != 1 or original is None:
        yield
        return
    device = original.create_default_device()

    class OneDeviceGroup(original):
        """A gloo group on the shared device; torch asks for its type, so a function would not do."""

        def __init__(self, store: Any, rank: int, size: int, timeout: Any, **others: Any) -> None:
            options = original._Options()
            options._devices = [device]
            options._timeout = timeout
            # torch 2.14 has one more, by its name.
            for name, value in others.items():
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OneDeviceGroup
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = original
