"""``vllm serve --tensor-parallel-size 2``: answers, and what becomes of a server that loses a rank or its engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import END_TIMEOUT, START_TIMEOUT
from tests.e2e.server import MODEL, ROOT, HttpError, Server

GOLDEN = {entry["name"]: entry for entry in json.loads((ROOT / "tests/data/golden_tokens.json").read_text())["prompts"]}

# As in workers.py, which only a process with vLLM can import.
DAMAGED_MODEL, DIES = "TEST_DAMAGED_MODEL", "the engine dies at"

# Emulated on busy cores, a rank may be late by seconds.
SETTINGS = {"VAC_LINEAR": "vac", "VAC_RANK_TIMEOUT": "8"}
# The ranks' processes import vLLM once more, beside each other.
RANKS_START_TIMEOUT = 2 * START_TIMEOUT


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("ranks"), SETTINGS, "--tensor-parallel-size", "2")
    try:
        server.start()
        server.wait_until_ready(RANKS_START_TIMEOUT)
        yield server
    finally:
        server.kill()


@pytest.fixture
def others(tmp_path: Path) -> Iterator[list[Server]]:
    """For servers of one test, which end with it."""
    servers: list[Server] = []
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture
def another(tmp_path: Path, others: list[Server]) -> Server:
    """One of two ranks that a test may ruin, ready."""
    server = Server(tmp_path, SETTINGS, "--tensor-parallel-size", "2")
    others.append(server)
    server.start()
    server.wait_until_ready(RANKS_START_TIMEOUT)
    return server


def rank_pids(server: Server) -> dict[int, int]:
    """Process of each rank, as the log has them."""
    return {int(rank): int(pid) for rank, pid in re.findall(r"Worker_TP(\d+) pid=(\d+)\)", server.log())}


def seconds_until(server: Server, report: str, since: float, timeout: float = 30) -> float:
    """Seconds from ``since`` until the log says something, a regular expression."""
    running = True
    while not re.search(report, server.log()):
        assert running and time.monotonic() - since < timeout, server.log_tail()
        # What it says last stands in the log once it has ended.
        running = server.running
        time.sleep(0.05)
    return time.monotonic() - since


def assert_over(server: Server, since: float) -> float:
    """The server ends with an error, and nothing is left; returns the seconds that took."""
    assert server.wait(END_TIMEOUT) > 0, server.log_tail()
    assert server.wait_until_gone(END_TIMEOUT) == []
    seconds = time.monotonic() - since
    assert server.leftovers() == []
    return seconds


class Client(threading.Thread):
    """Asks for a long answer, and keeps what goes wrong."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.failed: BaseException | None = None
        self._server = server
        self.start()

    def run(self) -> None:
        try:
            self._server.complete(GOLDEN["medium"]["prompt_token_ids"], 200, ignore_eos=True)
        except (OSError, HttpError) as error:
            self.failed = error


def test_completion(ranks: Server) -> None:
    """The tokens of one rank; each step one native call on each."""
    entry = GOLDEN["short-1"]
    assert ranks.complete(entry["prompt_token_ids"], 8, ignore_eos=True)["token_ids"] == entry["token_ids"][:8]
    assert ranks.log().count("4 of 4 as native op lists, 1 call a step") == 2
    assert "rank 1:" in ranks.log()


def test_rank_that_hangs(ranks: Server) -> None:
    """In the middle of an answer: the server says which rank it is, ends with an error, and leaves nothing."""
    pids = rank_pids(ranks)
    assert sorted(pids) == [0, 1]
    place = rf"\(node \d+, CPUs [\d,-]+, process {pids[1]}\)"
    # The limit of 8 seconds, and what an emulated process takes to tell.
    lose(ranks, pids[1], signal.SIGSTOP, rf"rank 1 of group tp:0 {place} did not come within 8 s", 12)


def lose(server: Server, pid: int, how: signal.Signals, report: str, seconds: float) -> None:
    """Send a rank a signal in the middle of an answer: the server says so in time, ends, and its client is told."""
    client = Client(server)
    time.sleep(2)
    begin = time.monotonic()
    os.kill(pid, how)
    reported = seconds_until(server, report, begin)
    assert reported < seconds, reported
    over = assert_over(server, begin)
    print(f"{how.name}: reported after {reported:.1f} s, over after {over:.1f} s")
    client.join(30)
    assert client.failed is not None, "the client was not told"


@pytest.mark.slow
def test_killed_rank(another: Server) -> None:
    """In the middle of an answer, by SIGKILL as by the kernel for want of memory."""
    pid = rank_pids(another)[1]
    report = rf"rank 1 \(node \d+, CPUs [\d,-]+\), process {pid}, was killed by SIGKILL: by hand, or by the kernel"
    lose(another, pid, signal.SIGKILL, report, 10)


@pytest.mark.slow
def test_killed_engine_of_a_stopped_rank(another: Server) -> None:
    """Nobody is left who could end the rank, and it cannot do so itself."""
    engine = another.engine_core()
    assert engine is not None
    os.kill(rank_pids(another)[1], signal.SIGSTOP)
    begin = time.monotonic()
    os.kill(engine, signal.SIGKILL)
    over = assert_over(another, begin)
    print(f"a killed engine of a stopped rank: over after {over:.1f} s")


@pytest.mark.slow
def test_rank_that_cannot_load(tmp_path: Path, others: list[Server]) -> None:
    """The second rank finds a file that was cut short: the server does not start, and says why and where."""
    damaged = tmp_path / "damaged"
    shutil.copytree(MODEL, damaged)
    weights = damaged / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    settings = {**SETTINGS, DAMAGED_MODEL: str(damaged)}
    arguments = ("--tensor-parallel-size", "2", "--worker-cls", "tests.e2e.workers.DamagedDisk")
    server = Server(tmp_path, settings, *arguments)
    others.append(server)
    server.start()
    begin = time.monotonic()
    seconds_until(server, "SafetensorError", begin, RANKS_START_TIMEOUT)
    begin = time.monotonic()
    report = r"Worker_TP1 pid=\d+\).* rank 1 \(node \d+, CPUs [\d,-]+\) cannot load: SafetensorError: "
    reported = seconds_until(server, report, begin)
    assert reported < 10, reported
    over = assert_over(server, begin)
    print(f"a rank that cannot load: reported after {reported:.1f} s, over after {over:.1f} s")
    # The other one fails, too, when the first is gone: the engine names the first.
    assert re.search(
        r"loading failed: rank 1 \(node \d+, CPUs [\d,-]+\), process \d+, has (ended|given up)", server.log()
    )
    assert re.findall(r"rank (\d) \(.*\) cannot load: ", server.log())[0] == "1"


@pytest.mark.slow
def test_engine_that_dies_before_it_serves(tmp_path: Path, others: list[Server]) -> None:
    """Killed by the first call after the handshake, which nobody will answer: the server does not wait for it."""
    server = Server(tmp_path, SETTINGS, "--worker-cls", "tests.e2e.workers.ShortLife")
    others.append(server)
    server.start()
    seconds_until(server, DIES, time.monotonic(), START_TIMEOUT)
    begin = float(re.findall(rf"{DIES} ([\d.]+)", server.log())[0])
    over = assert_over(server, begin)
    print(f"an engine that dies before it serves: over after {over:.1f} s")
    assert "EngineDeadError" in server.log()
