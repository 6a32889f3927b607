"""Let an idle end of vLLM's queue between processes sleep instead of spinning for a second.

Replaces the constructor of ``SpinCondition`` where
``vllm.distributed.device_communicators.shm_broadcast`` knows it. A reader there
calls sched_yield() for a whole second after each message before it waits for a
notification: in decoding, for ever. That is a core less for the compute
threads, which are on all of them, and every one of their barriers waits for the
thread that lost its core (upstream leaves a core per rank unused for it). Can go
once the time is a setting.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.device_communicators import shm_broadcast

BUSY_SECONDS = 0.0002
"""Longer than the gap between two messages of a step, shorter than a step."""

_init = shm_broadcast.SpinCondition.__init__


def init(self: Any, *args: Any, **kwargs: Any) -> None:
    """As vLLM's, with a short spin."""
    _init(self, *args, **kwargs)
    self.busy_loop_s = min(self.busy_loop_s, BUSY_SECONDS)


def apply() -> None:
    """Replace it in a process that is about to make or open queues."""
    shm_broadcast.SpinCondition.__init__ = init
