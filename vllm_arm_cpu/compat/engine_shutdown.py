"""Let SIGTERM end a server that is loading, and an engine end by itself.

Replaces two functions where ``vllm.v1.engine.utils`` knows them. Its
``zmq_socket_ctx`` swallows the KeyboardInterrupt that SIGTERM becomes while the
first process waits for the engine, which then loads on for nobody. Its
``shutdown`` gives engines no time before they are killed (``--shutdown-timeout``
is 0, and only ROCm is excepted), so that semaphores stay in /dev/shm. Can go
once vLLM passes the interrupt on and waits for engines on every platform.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from vllm.v1.engine import utils

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
    """As vLLM's, with some time where it gives none."""
    _shutdown(procs, timeout=GRACE if timeout == 0 else timeout)


def apply() -> None:
    """Replace both in the process that starts engines; called while it makes its configuration."""
    utils.zmq_socket_ctx = zmq_socket_ctx
    utils.shutdown = shutdown
