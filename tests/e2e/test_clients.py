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


def function(name: str, schema: dict[str, Any]) -> Any:
    # Without "strict", arguments may be anything.
    return {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}}


TOOLS = [
    function("journey", SCHEMA),
    function(
        "leave",
        {
            "type": "object",
            "properties": {"reason": {"enum": ["rain", "snow"]}},
            "required": ["reason"],
            "additionalProperties": False,
        },
    ),
]


def unlike_a_story() -> dict[str, int]:
    """A bias against white space, which JSON in a tool call may have anywhere, and for an end as soon as there may be.

    A model as small as ours would write white space, or call after call, until it has no tokens left.
    """
    vocabulary = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    bias = {
        str(token): -100
        for text, token in vocabulary.items()
        if text[0] in "ĠĊčĉ" and not any(map(str.isalnum, text[1:]))
    }
    return bias | {str(vocabulary["<|eos|>"]): 100}


UNLIKE_A_STORY = unlike_a_story()


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


@pytest.mark.parametrize(
    "choice, stream",
    [
        ("required", True),
        ("named", False),
        pytest.param("required", False, marks=pytest.mark.slow),
        pytest.param("named", True, marks=pytest.mark.slow),
    ],
)
def test_openai_tool_calls(client: openai.OpenAI, choice: str, stream: bool) -> None:
    """Functions are called by their schema, whatever the model would rather say."""
    named = {"type": "function", "function": {"name": "journey"}}
    request: Any = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "Plan a journey."}],
        "tools": TOOLS,
        "tool_choice": named if choice == "named" else choice,
        "max_tokens": 80,
        "temperature": 0,
        "logit_bias": UNLIKE_A_STORY,
    }
    if stream:
        calls, reason = streamed_calls(client.chat.completions.create(**request, stream=True))
    else:
        (answer,) = client.chat.completions.create(**request).choices
        assert answer.message.tool_calls and not answer.message.content
        calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls]
        assert all(call.id for call in answer.message.tool_calls)
        reason = answer.finish_reason
    (call,) = calls
    assert reason == ("stop" if choice == "named" else "tool_calls")
    assert call[0] == "journey" or (choice == "required" and call[0] == "leave")
    arguments = json.loads(call[1])
    if call[0] == "journey":
        assert arguments.keys() == {"city", "days"}
        assert arguments["city"] in ("Oslo", "Rome") and arguments["days"] in (1, 2, 3)
    else:
        assert arguments.keys() == {"reason"} and arguments["reason"] in ("rain", "snow")


def streamed_calls(stream: Any) -> tuple[list[tuple[str, str]], str | None]:
    """Names and arguments, put together from their pieces, and why the answer ends."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    reason, pieces = None, 0
    for chunk in stream:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            assert not choice.delta.content
            for call in choice.delta.tool_calls or []:
                pieces += 1
                names[call.index] = names.get(call.index, "") + (call.function.name or "")
                arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    assert pieces > 2
    return [(names[index], arguments[index]) for index in sorted(names)], reason


def test_openai_tools_unused(client: openai.OpenAI) -> None:
    """A model that may call a function and does not answers as ever, with a function's result in the conversation."""
    call = {"id": "one", "type": "function", "function": {"name": "leave", "arguments": '{"reason": "rain"}'}}
    messages: Any = [
        {"role": "user", "content": "Who was Babylon?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "one", "content": "It rains."},
    ]
    (answer,) = client.chat.completions.create(
        model=MODEL_NAME, messages=messages, tools=TOOLS, tool_choice="auto", max_tokens=12, temperature=0
    ).choices
    assert answer.message.content and not answer.message.tool_calls
    assert answer.finish_reason in ("stop", "length")


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
