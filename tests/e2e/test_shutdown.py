"""SIGTERM at the worst moments: an end in good time, and nothing left behind.

These tests end the shared servers, so they come last.
"""

from __future__ import annotations

import http.client
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import END_TIMEOUT, START_TIMEOUT
from tests.e2e.server import MODEL_NAME, Server, process_environ
from vllm_arm_cpu import envs
from vllm_arm_cpu.runtime import preload

STATUSES = (0, 143, 130, -signal.SIGTERM, -signal.SIGINT)
"""How a server may end: 0 once it serves; while it loads, as a process that was terminated or interrupted."""


def assert_ends(server: Server, timeout: float = END_TIMEOUT) -> None:
    """It ends after SIGTERM within ``timeout`` seconds, children included, and leaves nothing."""
    begin = time.monotonic()
    server.terminate()
    status = server.wait(timeout)
    assert status in STATUSES, server.log_tail()
    assert server.wait_until_gone(max(1, timeout - (time.monotonic() - begin))) == []
    assert "\n".join(server.leftovers()) == ""


@pytest.fixture
def third(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path, {"VAC_PRELOAD": "0", "LD_PRELOAD": ""})
    try:
        yield server
    finally:
        server.kill()


def test_during_load(servers: tuple[Server, Server], third: Server) -> None:
    """A third server, without preload, is ended as soon as its EngineCore exists; the others do not notice."""
    third.start()
    pid = third.wait_for_engine_core(START_TIMEOUT)
    environ = process_environ(pid)
    entries = environ.get("LD_PRELOAD", "")
    assert str(preload.PACKAGE_LIBRARY_DIR) not in entries, entries
    assert environ[envs.USER_PRELOAD] == ""
    mapped = preload.mapped_libraries(pid)
    assert not [path for path in (*mapped.openmp, *mapped.allocators) if "vllm_arm_cpu" in path]
    assert_ends(third)
    for server in servers:
        server.get("/health")


def test_during_generation(servers: tuple[Server, Server]) -> None:
    """A client in the middle of an answer, who keeps listening: he gets an end, and the other server lives on."""
    ending, living = servers
    events: list[dict[str, object]] = []
    started = threading.Event()

    def listen() -> None:
        body = {"model": MODEL_NAME, "prompt": [5, 6, 7], "max_tokens": 480, "temperature": 0, "ignore_eos": True}
        try:
            for event in ending.stream("/v1/completions", timeout=120, **body):
                events.append(event)
                if len(events) == 3:
                    started.set()
        except (OSError, http.client.HTTPException):
            # The connection may be cut: that is an end, too.
            pass

    client = threading.Thread(target=listen)
    client.start()
    assert started.wait(120), "no tokens"
    assert_ends(ending)
    client.join(60)
    assert not client.is_alive(), "the client still waits for an answer"
    assert len(events) < 480, "the answer was complete already: the test means nothing"
    living.get("/health")
    assert len(living.complete([5, 6, 7], 4, ignore_eos=True)["token_ids"]) == 4


def test_idle(servers: tuple[Server, Server]) -> None:
    """The usual end."""
    assert_ends(servers[1])
