"""``vllm serve --tensor-parallel-size 2``: answers, and what becomes of the server when a rank hangs."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import END_TIMEOUT, START_TIMEOUT
from tests.e2e.server import ROOT, HttpError, Server

GOLDEN = {entry["name"]: entry for entry in json.loads((ROOT / "tests/data/golden_tokens.json").read_text())["prompts"]}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("ranks"), {"VAC_LINEAR": "vac"}, "--tensor-parallel-size", "2")
    try:
        server.start()
        # The ranks' processes import vLLM once more, beside each other.
        server.wait_until_ready(START_TIMEOUT * 2)
        yield server
    finally:
        server.kill()


def rank_pids(server: Server) -> dict[int, int]:
    """Process of each rank, as the log has them."""
    return {int(rank): int(pid) for rank, pid in re.findall(r"Worker_TP(\d+) pid=(\d+)\)", server.log())}


def test_completion(ranks: Server) -> None:
    """The tokens of one rank; each step one native call on each."""
    entry = GOLDEN["short-1"]
    assert ranks.complete(entry["prompt_token_ids"], 8, ignore_eos=True)["token_ids"] == entry["token_ids"][:8]
    assert ranks.log().count("4 of 4 as native op lists, 1 call a step") == 2
    assert "rank 1:" in ranks.log()


def test_rank_that_hangs(ranks: Server) -> None:
    """The server says which rank it is within ten seconds, ends with an error, and leaves nothing."""
    pids = rank_pids(ranks)
    assert sorted(pids) == [0, 1]
    before = len(ranks.log())
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            ranks.complete(GOLDEN["medium"]["prompt_token_ids"], 200, ignore_eos=True)
        except (OSError, HttpError) as error:
            failed.append(error)

    client = threading.Thread(target=ask)
    client.start()
    time.sleep(2)
    begin = time.monotonic()
    os.kill(pids[1], signal.SIGSTOP)
    report = rf"rank 1 of group tp:0 \(node \d+, CPUs [\d,-]+, process {pids[1]}\) did not come within 8 s"
    while not re.search(report, ranks.log()[before:]):
        assert time.monotonic() - begin < 15, ranks.log_tail()
        time.sleep(0.1)
    reported = time.monotonic() - begin
    # The limit of 8 seconds, and what an emulated process takes to tell.
    assert reported < 12, reported
    assert ranks.wait(END_TIMEOUT) != 0
    assert ranks.wait_until_gone(END_TIMEOUT) == []
    client.join(30)
    assert failed, "the client was not told"
    assert ranks.leftovers() == []
