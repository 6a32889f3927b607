"""Hundreds of requests of all kinds, many given up midway: none is lost, nothing is left behind, no memory grows."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import MODEL_NAME, ROOT, Server
from tests.e2e.test_http import GOLDEN, complete, counter

pytestmark = pytest.mark.slow

COUNT = int(os.environ.get("VAC_TEST_SOAK_REQUESTS", "500"))
WARMUP = 150
"""Requests until whatever is allocated once has been: buffers of the largest batch, every block of the KV cache."""
CONCURRENCY = 16
GIVEN_UP = 0.15
GROWTH = 0.01
"""Of the resident memory, from the warmup to the end."""
VOCAB = 2048


@dataclass(frozen=True)
class Request:
    """A completion.

    Attributes:
        body: of the HTTP request.
        events: close the connection after so many streamed pieces; None: read to the end.
        seconds: close it after so long, without streaming; None: wait for the answer.
    """

    body: dict[str, Any]
    events: int | None = None
    seconds: float | None = None

    @property
    def is_given_up(self) -> bool:
        return self.events is not None or self.seconds is not None


def sampling(rng: random.Random) -> dict[str, Any]:
    """Parameters of one of the ways to choose a token."""
    seed = rng.randrange(1 << 30)
    return rng.choice(
        [
            {"temperature": 0},
            {"temperature": 0, "logprobs": rng.randrange(1, 5)},
            {"temperature": 0, "repetition_penalty": 1.2},
            {"temperature": 0, "logit_bias": {str(rng.randrange(VOCAB)): rng.uniform(-5, 5) for _ in range(4)}},
            {"temperature": 0.8, "seed": seed},
            {"temperature": 1.0, "top_p": 0.95, "top_k": 20},
            {"temperature": 0.7, "top_p": 0.9, "seed": seed},
            {"temperature": 1.2, "min_p": 0.05, "top_k": 50, "seed": seed},
            {"temperature": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.3, "min_p": 0.1},
            {"temperature": 0.9, "allowed_token_ids": list(range(100, 400))},
        ]
    )


def request(rng: random.Random) -> Request:
    """A random one: half of them streamed, some with a prefix that others share, most short: a token takes a tenth of
    a second under emulation."""
    prompt = [rng.randrange(3, VOCAB) for _ in range(1 + int(min(rng.expovariate(1 / 3), 60)))]
    if rng.random() < 0.15:
        prompt = rng.choice(GOLDEN)["prompt_token_ids"][:16] + prompt
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": 1 + int(min(rng.expovariate(1 / 2), 30)),
        "ignore_eos": rng.random() < 0.8,
        "return_token_ids": True,
        "stream": rng.random() < 0.5,
        **sampling(rng),
    }
    if rng.random() >= GIVEN_UP:
        return Request(body)
    # Long enough not to be done before it is given up.
    body |= {"max_tokens": 100, "ignore_eos": True}
    if body["stream"]:
        return Request(body, events=rng.randrange(4))
    return Request(body, seconds=rng.uniform(0.05, 1.0))


def send(server: Server, request: Request) -> str:
    """Send a request and check its answer; returns its finish reason, or ``"given up"``.

    Raises:
        AssertionError: it was not answered in full.
        OSError: there was no answer in time.
    """
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    try:
        body = json.dumps(request.body)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        if request.seconds is not None:
            time.sleep(request.seconds)
            _hang_up(connection)
            return "given up"
        response = connection.getresponse()
        assert response.status == 200, response.read()[:500]
        tokens: list[int] = []
        reason = None
        if request.body["stream"]:
            events, done = 0, False
            while line := response.readline():
                if events == request.events:
                    _hang_up(connection)
                    return "given up"
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    done = True
                    break
                choice = json.loads(line[6:])["choices"][0]
                tokens += choice.get("token_ids") or []
                reason = choice["finish_reason"] or reason
                events += 1
            assert done, f"the stream ended after {events} events"
        else:
            choice = json.loads(response.read())["choices"][0]
            tokens, reason = choice["token_ids"], choice["finish_reason"]
    finally:
        connection.close()
    wanted = request.body["max_tokens"]
    if request.body["ignore_eos"] or reason == "length":
        assert (reason, len(tokens)) == ("length", wanted), f"{reason} after {len(tokens)} of {wanted}"
    else:
        assert reason == "stop", reason
        assert 1 <= len(tokens) <= wanted
    allowed = request.body.get("allowed_token_ids")
    assert allowed is None or set(tokens) <= {*allowed, 0, 1, 2}
    return str(reason)


def _hang_up(connection: http.client.HTTPConnection) -> None:
    """Close the connection at once, also where a response still refers to it."""
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)


def load(server: Server) -> tuple[float, float, float]:
    """Requests that run and that wait, and the share of the KV cache in use."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    running, waiting, usage = (counter(server, name) for name in names)
    return running, waiting, usage


def settle(server: Server, timeout: float = 60) -> None:
    """Wait until nothing runs or waits and every block of the KV cache is free."""
    deadline = time.monotonic() + timeout
    while load(server) != (0, 0, 0):
        assert time.monotonic() < deadline, f"running, waiting, KV cache in use: {load(server)}"
        time.sleep(0.5)


def resident(pid: int) -> int:
    """Bytes of a process in memory, less pages that can be written and executed.

    Those hold an emulator's translations, which grow with every path through the
    code that is taken for the first time; a server on Arm has none to speak of.
    """
    total, counts = 0, True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split(None, 2)
        if not first.endswith(":"):
            counts = not rest[0].startswith("rwx")
        elif first == "Rss:" and counts:
            total += int(rest[0]) << 10
    return total


def settled_resident(server: Server) -> dict[str, int]:
    """Resident bytes of both processes when nothing runs: the least of some seconds, for memory that is about to be
    given back."""
    settle(server)
    engine = server.engine_core()
    assert engine is not None
    samples = []
    for _ in range(4):
        time.sleep(1)
        samples.append({"API server": resident(server.pid), "EngineCore": resident(engine)})
    return {name: min(sample[name] for sample in samples) for name in samples[0]}


def test_soak(server: Server) -> None:
    assert COUNT > WARMUP
    rng = random.Random(20)
    requests = [request(rng) for _ in range(COUNT)]
    names = ("vllm:request_success_total", "vllm:num_preemptions_total")
    before = [counter(server, name) for name in names]
    outcomes: Counter[str] = Counter()
    memory, seconds = [], 0.0
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        for part in (requests[:WARMUP], requests[WARMUP:]):
            start = time.monotonic()
            # All are waited for before the first failure is told.
            futures = [pool.submit(send, server, request) for request in part]
            failures = [str(future.exception()) for future in futures if future.exception() is not None]
            assert not failures, failures[:5]
            outcomes.update(future.result() for future in futures)
            seconds += time.monotonic() - start
            memory.append(settled_resident(server))
    finished, preempted = (counter(server, name) - old for name, old in zip(names, before, strict=True))
    grown = {name: memory[1][name] / memory[0][name] - 1 for name in memory[0]}
    report = {"outcomes": outcomes, "seconds": seconds, "resident": memory, "grown": grown, "preempted": preempted}
    print(json.dumps(report))
    if (ROOT / "build").is_dir():
        (ROOT / "build" / "soak.json").write_text(json.dumps(report, indent=1) + "\n")

    given_up = sum(request.is_given_up for request in requests)
    assert outcomes["given up"] == given_up > 0.1 * COUNT
    assert outcomes.total() == COUNT
    # A request that was given up may have ended in that moment; none of the others may be missing.
    assert COUNT - given_up <= finished <= COUNT
    assert max(grown.values()) < GROWTH, grown
    entry = next(entry for entry in GOLDEN if entry["name"] == "medium")
    answer = complete(server, entry)
    assert answer["token_ids"] == entry["token_ids"]
    assert answer["text"] == entry["continuation"]
    settle(server)
    assert "Traceback" not in server.log()
