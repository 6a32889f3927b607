"""One vLLM engine after another in this process: importing vLLM once is what makes that bearable."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The engine core runs in this process; tests look into it.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny-llama"
GOLDEN = json.loads((ROOT / "tests" / "data" / "golden_tokens.json").read_text())


@contextlib.contextmanager
def engine(model: Path | str = MODEL, environ: dict[str, str] | None = None, **arguments: Any) -> Iterator[LLM]:
    """An engine that is gone, threads and process group included, behind the block.

    ``environ`` is set while the engine is made: our variables are read then.
    """
    settings = {"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20, "seed": 0, "disable_log_stats": False}
    saved = {name: os.environ.get(name) for name in environ or {}}
    os.environ.update(environ or {})
    llm = None
    try:
        llm = LLM(model=str(model), **{**settings, **arguments})
        yield llm
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.unfreeze()
        cleanup_dist_env_and_memory()


def greedy(llm: LLM, prompts: list[list[int]], max_tokens: int = 48, **parameters: Any) -> list[list[int]]:
    """Greedy continuations of prompts given as token ids."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **parameters)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def golden_prompts() -> list[list[int]]:
    """Token ids of the prompts in tests/data/golden_tokens.json."""
    return [entry["prompt_token_ids"] for entry in GOLDEN["prompts"]]


def assert_golden(tokens: list[list[int]]) -> None:
    """Every continuation begins with the tokens of the FP32 reference."""
    for entry, got in zip(GOLDEN["prompts"], tokens, strict=True):
        expected = entry["token_ids"]
        assert got[: len(expected)] == expected, f"{entry['name']}: {entry['text']!r}"


def worker(llm: LLM) -> Any:
    """The worker object inside an engine of this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def metric(llm: LLM, name: str) -> float:
    """The value of one of vLLM's counters."""
    return float(sum(entry.value for entry in llm.get_metrics() if entry.name == name))
