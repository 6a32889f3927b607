"""``vllm serve`` over HTTP: the reference's tokens, and what a client may rely on."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.server import MODEL_NAME, ROOT, HttpError, Server

GOLDEN: list[dict[str, Any]] = json.loads((ROOT / "tests" / "data" / "golden_tokens.json").read_text())["prompts"]
CHAT = next(entry for entry in GOLDEN if "messages" in entry)


def complete(server: Server, entry: dict[str, Any]) -> dict[str, Any]:
    return server.complete(entry["prompt_token_ids"], len(entry["token_ids"]), ignore_eos=True)


def counter(server: Server, name: str) -> float:
    """Sum of one of vLLM's metrics over its labels."""
    values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", server.get("/metrics"), re.M)
    assert values, f"no metric {name}"
    return sum(map(float, values))


def test_health_and_models(servers: tuple[Server, Server]) -> None:
    for server in servers:
        server.get("/health")
        (model,) = json.loads(server.get("/v1/models"))["data"]
        assert model["id"] == MODEL_NAME
        assert model["max_model_len"] == 512


def test_our_platform_serves(servers: tuple[Server, Server]) -> None:
    """Our worker tells of its threads, and nothing of ours has stepped aside."""
    for server in servers:
        log = server.log()
        assert re.search(r"\[worker\.py:\d+\] threads: \d+ on CPUs", log)
        assert "steps aside" not in log
        assert "falls back" not in log


def test_golden_tokens_all_at_once(server: Server) -> None:
    """Concurrent requests are batched, and each gets what it would get alone."""
    with ThreadPoolExecutor(len(GOLDEN)) as pool:
        answers = list(pool.map(lambda entry: complete(server, entry), GOLDEN))
    for entry, answer in zip(GOLDEN, answers, strict=True):
        assert answer["token_ids"] == entry["token_ids"], entry["name"]
        assert answer["finish_reason"] == "length"


def test_golden_tokens_from_both_servers(servers: tuple[Server, Server]) -> None:
    """Two servers compute at the same time, on the same cores, without disturbing each other."""
    entry = next(entry for entry in GOLDEN if entry["name"] == "medium")
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda server: complete(server, entry), servers))
    for answer in answers:
        assert answer["token_ids"] == entry["token_ids"]
        assert answer["text"] == entry["continuation"]


def test_prompt_as_text(server: Server) -> None:
    entry = next(entry for entry in GOLDEN if entry["name"] == "short-1")
    answer = server.complete(entry["text"], len(entry["token_ids"]))
    assert answer["prompt_token_ids"] == entry["prompt_token_ids"]
    assert answer["text"] == entry["continuation"]


def test_streamed_chat(server: Server) -> None:
    """The checkpoint's chat template makes the prompt; pieces arrive as they are made and add up."""
    events = list(
        server.stream(
            "/v1/chat/completions",
            model=MODEL_NAME,
            messages=CHAT["messages"],
            max_tokens=len(CHAT["token_ids"]),
            temperature=0,
            ignore_eos=True,
            skip_special_tokens=False,
            return_token_ids=True,
            stream_options={"include_usage": True},
        )
    )
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert events[0]["prompt_token_ids"] == CHAT["prompt_token_ids"]
    assert choices[0]["delta"]["role"] == "assistant"
    pieces = [choice["delta"].get("content") or "" for choice in choices]
    assert "".join(pieces) == CHAT["continuation"]
    assert len([piece for piece in pieces if piece]) > 1
    assert [token for choice in choices for token in choice.get("token_ids") or []] == CHAT["token_ids"]
    assert choices[-1]["finish_reason"] == "length"
    usage = events[-1]["usage"]
    assert usage["prompt_tokens"] == len(CHAT["prompt_token_ids"])
    assert usage["completion_tokens"] == len(CHAT["token_ids"])


def test_logprobs(server: Server) -> None:
    """Of the chosen token and the likeliest others: sorted, below zero, the greedy choice first."""
    entry = next(entry for entry in GOLDEN if entry["name"] == "short-2")
    answer = server.complete(entry["prompt_token_ids"], 6, logprobs=3, ignore_eos=True)
    logprobs = answer["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 6
    margins = []
    for chosen, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        likeliest = sorted(top.values(), reverse=True)
        assert len(likeliest) == 3
        assert chosen == likeliest[0] < 0
        margins.append(likeliest[0] - likeliest[1])
    # BF16 leaves a few hundredths of the reference's lead.
    assert margins == pytest.approx(entry["top2_margin"][:6], abs=0.1)


def test_sampling_is_repeatable(server: Server) -> None:
    prompt = GOLDEN[0]["prompt_token_ids"]
    answers = [server.complete(prompt, 8, temperature=1.0, seed=seed)["token_ids"] for seed in (5, 5, 6)]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def test_stop_string_ends_early(server: Server) -> None:
    entry = next(entry for entry in GOLDEN if entry["name"] == "short-1")
    stop = entry["continuation"].split()[1]
    answer = server.complete(entry["prompt_token_ids"], 20, stop=[stop])
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == entry["continuation"].partition(stop)[0]


def test_metrics(server: Server) -> None:
    """vLLM's counters count; the prefix cache is found to be used."""
    entry = next(entry for entry in GOLDEN if entry["name"] == "long")
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total")
    complete(server, entry)
    before = [counter(server, name) for name in (*names, "vllm:prefix_cache_hits_total")]
    complete(server, entry)
    after = [counter(server, name) for name in (*names, "vllm:prefix_cache_hits_total")]
    gained = [new - old for old, new in zip(before, after, strict=True)]
    prompt_tokens = len(entry["prompt_token_ids"])
    assert gained[:3] == [prompt_tokens, len(entry["token_ids"]), 1]
    # Whole blocks of 16 tokens, of all but the last token, which has to be computed in any case.
    assert gained[3] == (prompt_tokens - 1) // 16 * 16


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": "And", "max_tokens": 100_000}, 400, ["100000", "512"]),
        ({"prompt": [5] * 600, "max_tokens": 1}, 400, ["600", "512"]),
        ({"prompt": "And", "max_tokens": 4, "model": "another"}, 404, ["another"]),
        ({"prompt": "And", "max_tokens": 4, "temperature": -1}, 400, ["temperature", "-1"]),
        ({"prompt": [99_999], "max_tokens": 4}, 400, ["vocab"]),
        ({"prompt": "And", "max_tokens": "many"}, 400, ["max_tokens"]),
    ],
    ids=["max_tokens", "prompt", "model", "temperature", "token", "type"],
)
def test_bad_requests(server: Server, body: dict[str, Any], status: int, words: list[str]) -> None:
    """The client is told what is wrong, and the server lives on."""
    with pytest.raises(HttpError) as refused:
        server.complete(**body)
    assert refused.value.status == status
    assert all(word in refused.value.message for word in words), refused.value.message
    server.get("/health")
