"""What people point at a server: OpenAI's client, lm-eval's requests, ``vllm bench serve``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.server import MODEL, MODEL_NAME, ROOT, Server

GOLDEN = {entry["name"]: entry for entry in json.loads((ROOT / "tests/data/golden_tokens.json").read_text())["prompts"]}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(servers: tuple[Server, Server]) -> Server:
    """The one whose JSON has no white space."""
    return servers[1]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=240, max_retries=0)


def test_openai_completion(client: openai.OpenAI) -> None:
    entry = GOLDEN["short-1"]
    answer = client.completions.create(
        model=MODEL_NAME, prompt=entry["text"], max_tokens=len(entry["token_ids"]), temperature=0
    )
    assert answer.choices[0].text == entry["continuation"]
    assert answer.usage is not None and answer.usage.completion_tokens == len(entry["token_ids"])


def test_openai_stream(client: openai.OpenAI) -> None:
    """Given up in the middle: the connection is closed, and the server goes on."""
    messages: Any = [{"role": "user", "content": "Begin."}]
    stream = client.chat.completions.create(
        model=MODEL_NAME, messages=messages, max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    pieces = []
    for chunk in stream:
        pieces.append(chunk.choices[0].delta.content or "")
        if len(pieces) == 5:
            break
    stream.close()
    assert "".join(pieces)
    assert client.models.list().data[0].id == MODEL_NAME


def test_openai_structured_output(client: openai.OpenAI) -> None:
    """A JSON schema holds whatever the model would rather say."""
    messages: Any = [{"role": "user", "content": "Plan a journey."}]
    schema: Any = {"type": "json_schema", "json_schema": {"name": "journey", "schema": SCHEMA}}
    answer = client.chat.completions.create(
        model=MODEL_NAME, messages=messages, max_tokens=60, temperature=0, response_format=schema
    )
    journey = json.loads(answer.choices[0].message.content or "")
    assert journey["city"] in ("Oslo", "Rome") and journey["days"] in (1, 2, 3)


def test_openai_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="512"):
        client.completions.create(model=MODEL_NAME, prompt=[5] * 600, max_tokens=1)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="And", max_tokens=1)


def test_requests_of_lm_eval(server: Server) -> None:
    """lm-eval's ``local-completions`` scores a continuation by the logprobs of an echoed prompt.

    The harness itself is not installed: it wants datasets from a hub.
    """
    entry = GOLDEN["short-1"]
    tokens = entry["prompt_token_ids"] + entry["token_ids"]
    answer = server.complete(tokens, 1, echo=True, logprobs=1, seed=1234)
    logprobs = answer["logprobs"]["token_logprobs"]
    assert logprobs[0] is None and len(logprobs) == len(tokens) + 1
    likeliest = [max(top.values()) for top in answer["logprobs"]["top_logprobs"][1:]]
    # The continuation is greedy: each of its tokens is the likeliest.
    begin = len(entry["prompt_token_ids"])
    assert logprobs[begin : len(tokens)] == likeliest[begin - 1 : len(tokens) - 1]


@pytest.mark.slow
def test_vllm_bench_serve(server: Server, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
    command += ["--base-url", server.url, "--model", str(MODEL), "--served-model-name", MODEL_NAME]
    command += ["--dataset-name", "random", "--random-input-len", "16", "--random-output-len", "8"]
    command += [
        "--num-prompts",
        "6",
        "--save-result",
        "--result-dir",
        str(tmp_path),
        "--result-filename",
        "result.json",
    ]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (6, 0)
    assert result["total_output_tokens"] == 48
    assert result["mean_ttft_ms"] > 0 and result["mean_tpot_ms"] > 0
