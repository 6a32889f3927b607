"""``vllm serve`` with quantized checkpoints: their configuration goes from the server's process to the engine's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import END_TIMEOUT, START_TIMEOUT
from tests.e2e.forked import ForkedServer
from tests.e2e.server import ROOT, Server
from tests.integration.quantized import make, script

GOLDEN = {entry["name"]: entry for entry in json.loads((ROOT / "tests/data/golden_tokens.json").read_text())["prompts"]}
ENVIRON = {"VAC_INT4_KERNEL": "vac", "VAC_LINEAR": "vac"}
# The kernel that each has to run on. vLLM by itself refuses the second.
SCHEMES = {"w8a8": "ArmInt8LinearKernel", "gptq-asymmetric-group32": "ArmInt4LinearKernel"}
# Everything else that the script writes, but what is refused (test_quantization.py, test_what_is_refused).
OTHERS = [name for name, scheme in script().SCHEMES.items() if name not in SCHEMES and not scheme.desc_act]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Both servers, started at once."""
    pair = {}
    for scheme in SCHEMES:
        directory: Path = tmp_path_factory.mktemp(scheme)
        pair[scheme] = Server(directory, ENVIRON, model=make(scheme, directory / "model"))
    try:
        for server in pair.values():
            server.start()
        for server in pair.values():
            server.wait_until_ready(START_TIMEOUT)
        yield pair
        # A killed server leaves its semaphores, which tests of how servers end would find.
        for server in pair.values():
            server.terminate()
        for server in pair.values():
            server.wait(END_TIMEOUT)
            assert server.wait_until_gone(END_TIMEOUT) == []
    finally:
        for server in pair.values():
            server.kill()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_completion(quantized: dict[str, Server], scheme: str) -> None:
    """Our kernel serves, and says in this text what the unquantized model says."""
    server, entry = quantized[scheme], GOLDEN["short-1"]
    assert SCHEMES[scheme] in server.log()
    answer = server.complete(entry["prompt_token_ids"], 8, ignore_eos=True)
    assert len(answer["token_ids"]) == 8
    assert answer["token_ids"][:4] == entry["token_ids"][:4]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", OTHERS)
def test_every_checkpoint(scheme: str, tmp_path: Path) -> None:
    """Served over HTTP, it says what it says in an engine of this process."""
    entry = GOLDEN["short-1"]
    model = make(scheme, tmp_path / "model")
    server = ForkedServer(tmp_path, ENVIRON, model=model)
    try:
        server.start()
        expected = in_this_process(model, entry["prompt_token_ids"])
        server.wait_until_ready(START_TIMEOUT)
        answer = server.complete(entry["prompt_token_ids"], len(expected), ignore_eos=True)
        assert answer["token_ids"] == expected
        assert ("ArmInt8LinearKernel" if scheme.startswith("w8a8") else "ArmInt4LinearKernel") in server.log()
        server.terminate()
        server.wait(END_TIMEOUT)
        assert server.wait_until_gone(END_TIMEOUT) == []
    finally:
        server.kill()


def in_this_process(model: Path, prompt: list[int]) -> list[int]:
    """Eight greedy tokens."""
    # vLLM is imported here only: the tests above need no engine.
    from tests.integration.engine import engine, greedy

    with engine(model, ENVIRON) as llm:
        return greedy(llm, [prompt], 8)[0]
