"""Let a server whose engine has died end with an error.

vLLM's API server notices that its engine is gone, stops, and ends with status 0:
whoever supervises it sees a server that was asked to end. Replaces
``terminate_if_errored`` where it is called, to remember that this was why, and
``serve_http`` where the server is started. Can go once vLLM ends with an error.
"""

from __future__ import annotations

import sys
from typing import Any

_died = False


def apply() -> None:
    """Replace them in a process that has loaded vLLM's HTTP server; in others there is nothing to replace."""
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
    vllm_error.terminate_if_errored = terminate_if_errored
    entry.serve_http = serve_http
