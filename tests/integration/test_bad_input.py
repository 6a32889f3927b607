"""What cannot work is refused before a weight is loaded, by name, value and what is allowed.

The checkpoints here have no weights: a refusal that came later would be about
those. Whatever was refused, the process is as good as before.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.integration.checkpoints import llama_config_only
from tests.integration.engine import check_golden, engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that is wrong with it is that the weights are missing."""
    return llama_config_only(tmp_path_factory.mktemp("checkpoint"))


def refusal(model: Path, environ: dict[str, str] | None = None, **arguments: Any) -> str:
    """The message with which an engine is refused."""
    with (
        pytest.raises((ValueError, RuntimeError)) as refused,
        engine(model, environ, skip_tokenizer_init=True, **arguments),
    ):
        pass
    return str(refused.value)


def test_weights_are_looked_for_last(checkpoint: Path) -> None:
    """Without anything else wrong the checkpoint is refused for its missing weights."""
    assert "Cannot find any model weights" in refusal(checkpoint)


def test_head_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM's own kernels are installed, they take what ours do not."""
    monkeypatch.setattr("vllm_arm_cpu.platform.upstream_ops_available", lambda: False)
    message = refusal(llama_config_only(tmp_path, hidden_size=160, head_dim=40))
    assert "head size 40" in message
    assert "multiple of 16" in message


def test_block_size(checkpoint: Path) -> None:
    message = refusal(checkpoint, block_size=24)
    assert "--block-size 24" in message
    assert "multiple of 16" in message


def test_longer_than_the_model(checkpoint: Path) -> None:
    """vLLM's own check, which must not be lost."""
    message = refusal(checkpoint, max_model_len=100_000)
    assert "max_model_len" in message
    assert "100000" in message
    assert "512" in message


def test_kv_cache_larger_than_memory(checkpoint: Path) -> None:
    message = refusal(checkpoint, kv_cache_memory_bytes=1 << 40)
    assert "1024.0 GiB does not fit" in message
    assert "--kv-cache-memory-bytes" in message


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("VAC_THREADS", "lots", "auto, or a number from 1"),
        ("VAC_THREADS", "4000", "auto, or 1 to "),
        ("VAC_BIND", "999", "auto, none, or CPUs among "),
        ("VAC_BIND", "first", "auto, none, or a list of CPUs"),
        ("VAC_LINEAR", "nonsense", "auto, vac"),
        ("VAC_HUGE_PAGES", "big", "1 or 0"),
    ],
)
def test_settings(checkpoint: Path, name: str, value: str, allowed: str) -> None:
    message = refusal(checkpoint, {name: value})
    assert f"{name}='{value}' cannot be used; allowed: {allowed}" in message
    assert name not in os.environ


def test_kv_cache_type(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_arm_cpu.platform.upstream_ops_available", lambda: False)
    message = refusal(checkpoint, kv_cache_dtype="fp8_e5m2")
    assert "--kv-cache-dtype fp8_e5m2" in message
    assert "auto, the model's own type, int8, fp8_e4m3" in message


def test_a_good_engine_after_all_of_these() -> None:
    """Nothing is left behind by the refused ones: no process group, no threads, no memory."""
    with engine() as llm:
        check_golden(llm, "short-1")
