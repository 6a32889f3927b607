"""What servers cost that have nothing to do, and what two on one machine cost each other."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.e2e.server import MODEL_NAME, Server
from tests.e2e.test_http import GOLDEN

IDLE_SECONDS = 30
# Of the API server little but uvicorn's clock runs, ten times a second: a twentieth of a percent on
# a real core, near one under emulation.
IDLE_SHARE = 0.02 if "VAC_EMULATED_CPU" in os.environ else 0.01
STREAMS, TOKENS = 4, 16


def cpu_seconds(server: Server) -> dict[int, float]:
    """Processor time of each of a server's processes so far, all threads."""
    ticks = os.sysconf("SC_CLK_TCK")
    found = {}
    for pid in server.processes():
        # Behind the name: user and system time are the 14th and 15th field of the line.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[pid] = (int(fields[11]) + int(fields[12])) / ticks
    return found


def test_idle_servers_leave_the_cores_alone(servers: tuple[Server, Server]) -> None:
    """Less than 1 % of a core in half a minute: threads that have spun for work sleep, and nothing polls.

    That holds for the engine by itself under emulation, too.
    """
    # Requests of earlier tests may just have ended.
    time.sleep(5)
    before = [cpu_seconds(server) for server in servers]
    start = time.monotonic()
    time.sleep(IDLE_SECONDS)
    for server, old in zip(servers, before, strict=True):
        new = cpu_seconds(server)
        assert new.keys() == old.keys()
        used = {pid: (new[pid] - old[pid]) / (time.monotonic() - start) for pid in new}
        print(f"server on port {server.port}, idle: shares of a core by process {used}")
        assert sum(used.values()) < IDLE_SHARE, used
        assert used[server.engine_core()] < 0.005, used


class Work:
    """The same work for a server: some streams at once; counts tokens as they arrive."""

    def __init__(self, server: Server) -> None:
        self.tokens, self.seconds = 0, 0.0
        self._server, self._lock = server, threading.Lock()

    def run(self) -> None:
        start = time.monotonic()
        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(self._stream, range(STREAMS)))
        self.seconds = time.monotonic() - start

    def _stream(self, index: int) -> None:
        prompt = GOLDEN[index % len(GOLDEN)]["prompt_token_ids"][:32]
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
        for event in self._server.stream("/v1/completions", **body, return_token_ids=True):
            with self._lock:
                self.tokens += len(event["choices"][0].get("token_ids") or [])


def test_two_busy_servers_share_the_cores(servers: tuple[Server, Server]) -> None:
    """Each gets its share, and both together take no longer than twice one after the other.

    Threads that wait for each other on cores that another server's threads hold
    would make both crawl, or one wait for the other.
    """
    alone = [Work(server) for server in servers]
    for work in alone:
        work.run()
    together = [Work(server) for server in servers]
    at_first_end: list[int] = []

    def run(work: Work) -> None:
        work.run()
        with lock:
            if not at_first_end:
                at_first_end.extend(other.tokens for other in together)

    lock = threading.Lock()
    start = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, together))
    seconds = time.monotonic() - start
    print(f"alone {[work.seconds for work in alone]} s, together {seconds} s, tokens at first end {at_first_end}")
    assert all(work.tokens == STREAMS * TOKENS for work in (*alone, *together))
    # When the faster one is done, the other has more than half.
    assert min(at_first_end) > 0.5 * max(at_first_end), at_first_end
    assert seconds < 2 * sum(work.seconds for work in alone)
