"""Let SIGTERM end a server that is loading, and an engine end by itself.

Replaces two functions where ``vllm.v1.engine.utils`` knows them. Its
``zmq_socket_ctx`` swallows the KeyboardInterrupt that SIGTERM becomes while the
first process waits for the engine, which then loads on for nobody. Its
``shutdown`` gives engines no time before they are killed (``--shutdown-timeout``
is 0, and only ROCm is excepted), so that semaphores stay in /dev/shm; and it
sends SIGTERM to an engine that is ending after an error, which dies of it with
its ranks still to be killed. Can go once vLLM passes the interrupt on and waits
for engines on every platform.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from vllm.v1.engine import utils

from vllm_arm_cpu.compat import engine_death

ENDING = 5.0
"""Seconds for an engine that has failed to end its ranks and itself, before it is asked to."""

GRACE = 15.0
"""Seconds for an engine to end after SIGTERM; requests are aborted at once."""

_zmq_socket_ctx = utils.zmq_socket_ctx
_shutdown = utils.shutdown


@contextlib.contextmanager
def zmq_socket_ctx(*args: Any, **kwargs: Any) -> Iterator[Any]:
    """As vLLM's, but an interrupt goes on when the socket is closed."""
    interrupt: KeyboardInterrupt | None = None
    with _zmq_socket_ctx(*args, **kwargs) as socket:
        try:
            yield socket
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def shutdown(procs: list[Any], timeout: float | None = None) -> None:
    """As vLLM's, with some time where it gives none, and for an engine that ends already."""
    if engine_death.died():
        deadline = time.monotonic() + ENDING
        for process in procs:
            process.join(max(0.0, deadline - time.monotonic()))
    _shutdown(procs, timeout=GRACE if timeout == 0 else timeout)


def apply() -> None:
    """Replace both in the process that starts engines; called while it makes its configuration."""
    utils.zmq_socket_ctx = zmq_socket_ctx
    utils.shutdown = shutdown
