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
from vllm.model_executor.models import registry
from vllm.outputs import RequestOutput

# What a model class can do is asked in a process of its own, for the sake of GPUs: a minute under emulation.
registry._run_in_subprocess = lambda function: function()

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny-llama"
GOLDEN = json.loads((ROOT / "tests" / "data" / "golden_tokens.json").read_text())


@contextlib.contextmanager
def engine(model: Path | str = MODEL, environ: dict[str, str] | None = None, **arguments: Any) -> Iterator[LLM]:
    """An engine that is gone, threads and process group included, behind the block.

    ``environ`` is set while the engine is made: our variables are read then.
    Linear layers run on our kernels unless it says otherwise: which kernel is
    fastest under emulation means nothing. A rank on busy cores may be late by
    seconds.
    """
    environ = {"VAC_LINEAR": "vac", "VAC_RANK_TIMEOUT": "8"} | (environ or {})
    settings = {"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20, "seed": 0, "disable_log_stats": False}
    saved = {name: os.environ.get(name) for name in environ}
    os.environ.update(environ)
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


def greedy(llm: LLM, prompts: list[list[int]], max_tokens: int = 20, **parameters: Any) -> list[list[int]]:
    """Greedy continuations of prompts given as token ids.

    A step takes a good part of a second under emulation: ask for more than 20
    tokens only where it matters.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **parameters)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def prompt_logprobs(output: RequestOutput) -> list[float]:
    """Of a prompt's tokens but the first, where they were asked for."""
    tokens, entries = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
    return [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]


def token_logprobs(output: RequestOutput) -> list[float]:
    """Of the tokens behind a prompt, where they were asked for."""
    made = output.outputs[0]
    return [entry[token].logprob for token, entry in zip(made.token_ids, made.logprobs, strict=True)]


def score(llm: LLM, prompt: list[int]) -> list[float]:
    """The logprobs of a prompt's tokens but the first."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    return prompt_logprobs(llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0])


def golden(*names: str) -> list[dict[str, Any]]:
    """The entries of tests/data/golden_tokens.json of these names, all without one."""
    return [entry for entry in GOLDEN["prompts"] if not names or entry["name"] in names]


def golden_prompts(*names: str) -> list[list[int]]:
    """Token ids of the golden prompts of these names, all without one."""
    return [entry["prompt_token_ids"] for entry in golden(*names)]


def check_golden(llm: LLM, *names: str, max_tokens: int = 20) -> None:
    """Generate greedily for the golden prompts of these names (all without one), in one batch.

    Every continuation must have the tokens of the FP32 reference, as far as both go.
    """
    tokens = greedy(llm, golden_prompts(*names), max_tokens)
    for entry, got in zip(golden(*names), tokens, strict=True):
        common = min(len(got), len(entry["token_ids"]))
        assert common >= 16
        assert got[:common] == entry["token_ids"][:common], f"{entry['name']}: {entry['text']!r}"


def worker(llm: LLM) -> Any:
    """The worker object inside an engine of this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def metric(llm: LLM, name: str) -> float:
    """The value of one of vLLM's counters."""
    return float(sum(entry.value for entry in llm.get_metrics() if entry.name == name))
