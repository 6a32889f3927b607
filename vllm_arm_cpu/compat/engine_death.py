"""Let a server whose engine has died end at once, and with an error.

vLLM's API server looks after its engine every five seconds, then stops, and
ends with status 0: whoever supervises it sees a server that was asked to end.
Who waits for the answer to a utility call when the engine dies waits for ever,
and the server does that before it begins to serve: it stays, and serves nobody.
Replaces ``watchdog_loop`` and ``terminate_if_errored`` where they are called,
``serve_http`` where the server is started, and ``_call_utility_async`` of the
client. Can go once vLLM ends with an error, and fails calls to an engine that
is dead.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

WATCH_SECONDS = 5.0
"""As vLLM's; only for clients that do not tell when they have stopped receiving."""

_died = False
"""Whether this process has found an engine dead."""

_call = AsyncMPClient._call_utility_async


async def call_utility(self: AsyncMPClient, method: str, *args: Any, engine: Any) -> Any:
    """As vLLM's, but the end of what receives answers is an answer, too.

    Raises:
        EngineDeadError: the engine has died meanwhile.
    """
    global _died
    self._ensure_output_queue_task()
    receiving = self.resources.output_queue_task
    call = asyncio.ensure_future(_call(self, method, *args, engine=engine))
    try:
        await asyncio.wait({call, receiving}, return_when=asyncio.FIRST_COMPLETED)
        if call.done():
            return call.result()
    finally:
        # It is done, or nobody wants to know any more.
        call.cancel()
    _died = True
    raise EngineDeadError()


def died() -> bool:
    """Whether this process has found an engine dead: it is on its way out, if not gone."""
    return _died


async def watchdog_loop(server: Any, engine: Any) -> None:
    """As vLLM's, but told by the task that receives tokens: it ends with the engine."""
    from vllm.entrypoints.launchers import launcher

    while True:
        launcher.terminate_if_errored(server, engine)
        receiving = getattr(engine, "output_handler", None)
        if receiving is None or receiving.done():
            await asyncio.sleep(WATCH_SECONDS)
        else:
            await asyncio.wait({receiving}, timeout=WATCH_SECONDS)


def apply() -> None:
    """Replace them in a process that has loaded vLLM's HTTP server; in others there is nothing to replace."""
    AsyncMPClient._call_utility_async = call_utility
    if "vllm.entrypoints.launchers.api_server.entry" not in sys.modules:
        return
    from vllm.entrypoints.launchers import launcher
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.serve.exception_handling.handlers import vllm_error

    if entry.serve_http.__module__ == __name__:
        return
    original_check, original_serve = launcher.terminate_if_errored, entry.serve_http

    def terminate_if_errored(server: Any, engine: Any) -> None:
        """As vLLM's."""
        global _died
        asked = server.should_exit
        original_check(server, engine)
        _died = _died or (server.should_exit and not asked)

    async def serve_http(*args: Any, **kwargs: Any) -> Any:
        """As vLLM's, but for how it ends."""
        shutdown = await original_serve(*args, **kwargs)
        if _died:
            await shutdown
            raise SystemExit(1)
        return shutdown

    launcher.terminate_if_errored = terminate_if_errored
    launcher.watchdog_loop = watchdog_loop
    vllm_error.terminate_if_errored = terminate_if_errored
    entry.serve_http = serve_http
