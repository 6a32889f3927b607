"""Two servers on one machine, started together and shared by all tests here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server

START_TIMEOUT = 900
"""Seconds until two servers that start at once must be ready; emulated on two cores they need some 5 minutes."""

END_TIMEOUT = 150
"""Until one that was asked to end has: seconds on a real machine, half a minute and more emulated on busy cores."""

USER_LIBRARY = "/usr/lib/aarch64-linux-gnu/libnuma.so.1"
"""Stands for whatever a user preloads: any library that does nothing by itself."""

# A model as small as ours would write white space until it has no tokens left.
DENSE_JSON = ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
TOOLS += ["--chat-template", str(Path(__file__).parent / "tools.jinja")]


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """The first as most users start it; the second with an LD_PRELOAD, a core for the API server, dense JSON and tools.

    The first one's KV cache is so small that all of it is used soon: nothing grows for that reason later.
    """
    environ = {name: "" for name in ("LD_PRELOAD", "VAC_PRELOAD") if name in os.environ}
    library = USER_LIBRARY if Path(USER_LIBRARY).exists() else ""
    # On many cores it gets one in any case.
    frontend = {"VAC_FRONTEND_CORES": "1"} if len(os.sched_getaffinity(0)) > 1 else {}
    pair = (
        Server(tmp_path_factory.mktemp("a"), environ, "--kv-cache-memory-bytes", str(8 << 20)),
        Server(tmp_path_factory.mktemp("b"), {**environ, **frontend, "LD_PRELOAD": library}, *DENSE_JSON, *TOOLS),
    )
    try:
        for server in pair:
            server.start()
        for server in pair:
            seconds = server.wait_until_ready(START_TIMEOUT)
            print(f"server on port {server.port}: ready after {seconds:.0f} s")
        yield pair
    finally:
        for server in pair:
            server.kill()


@pytest.fixture(scope="session")
def server(servers: tuple[Server, Server]) -> Server:
    """The first of the two."""
    return servers[0]
