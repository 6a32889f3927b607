"""The short way through a step gives what vLLM's gives, and stays out of what it does not know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.integration.engine import engine, golden_prompts, worker
from tests.integration.test_decoder import Operators
from vllm_arm_cpu.layers import decoder, whole_model
from vllm_arm_cpu.worker.plain_step import obstacle

MAX_LEN = 128


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # A budget that cuts prompts into pieces, which are mixed with decodes.
    with engine(max_num_batched_tokens=24, max_num_seqs=4, max_model_len=MAX_LEN, enable_prefix_caching=False) as llm:
        yield llm


def outputs(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[Any]:
    """Tokens, logprobs and the prompt's logprobs of each request."""
    results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [(result.outputs[0].token_ids, result.outputs[0].logprobs, result.prompt_logprobs) for result in results]


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "random": {"temperature": 1.0, "seed": 3, "top_p": 0.9, "top_k": 20},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "prompt logprobs": {"temperature": 0, "prompt_logprobs": 1},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "min_tokens": 3, "logit_bias": {7: 2.0}},
}


def test_as_vllm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of request, alone and all in one batch, with more requests than fit at once."""
    runner = worker(llm).model_runner
    plain = runner.plain
    assert plain is not None
    assert plain.split_because is None
    upstream_steps: list[int] = []
    execute_model = GPUModelRunner.execute_model
    monkeypatch.setattr(GPUModelRunner, "execute_model", lambda *args: upstream_steps.append(1) or execute_model(*args))
    prompts = golden_prompts("short-1", "medium", "short-3", "chat")
    prompts.append(prompts[0])
    assert sum(map(len, prompts)) > 2 * 24
    params = [SamplingParams(max_tokens=6 + i, ignore_eos=True, **kind) for i, kind in enumerate(CASES.values())]
    short_way = outputs(llm, prompts, params)
    # An idle step, after the last request, has no tokens.
    assert len(upstream_steps) <= 1
    upstream_steps.clear()
    runner.plain = None
    try:
        expected = outputs(llm, prompts, params)
    finally:
        runner.plain = plain
    assert len(upstream_steps) > 10
    assert short_way == expected
    assert [len(tokens) for tokens, _, _ in expected] == [6, 7, 8, 9, 10]


def test_one_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A steady decode is one native call without anything of torch; a hook brings the modules back."""
    runner = worker(llm).model_runner
    whole, model = runner.plain._whole, runner.get_model()
    seen: list[list[str]] = []
    run = whole.run

    def watch(*args: Any, **kwargs: Any) -> Any:
        with Operators() as operators:
            result = run(*args, **kwargs)
        seen.append(operators.seen)
        return result

    monkeypatch.setattr(whole, "run", watch)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = outputs(llm, golden_prompts("short-1"), params)
    assert len(seen) >= 8
    assert seen[-4:] == [[]] * 4
    shapes: list[torch.Size] = []
    hook = model.model.norm.register_forward_hook(lambda _, args, __: shapes.append(args[0].shape))
    seen.clear()
    try:
        assert outputs(llm, golden_prompts("short-1"), params) == expected
    finally:
        hook.remove()
    assert shapes[-1] == (1, 256)
    assert seen == []
    assert outputs(llm, golden_prompts("short-1"), params) == expected
    assert len(seen) >= 8


def test_model_misfits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model's ends must not be."""
    model = worker(llm).model_runner.get_model()
    assert whole_model.misfit(model) is None
    for target, name, value, reason in (
        (model, "forward", print, "family"),
        (model.logits_processor, "scale", 2.0, "scaled"),
        (model.lm_head, "tp_size", 2, "lm_head"),
        (model.model.embed_tokens, "quant_method", object(), "embedding"),
        (model.model.norm, "pass_weight", False, "norm"),
        (decoder.segments(model)[0], "fresh", True, "kept"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(target.__dict__, name, value)
            assert reason in str(whole_model.misfit(model))


def test_up_to_the_model_length(llm: LLM) -> None:
    """A request ends with the last token that the model's length allows."""
    prompt = (golden_prompts("long")[0] * 2)[: MAX_LEN - 3]
    ((tokens, _, _),) = outputs(llm, [prompt], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert len(tokens) == 3


def test_obstacles(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the short way does not know of sends a runner vLLM's way."""
    runner = worker(llm).model_runner
    assert obstacle(runner) is None
    for name, value, reason in (
        ("lora_config", object(), "LoRA"),
        ("speculative_config", object(), "speculative decoding"),
        ("use_async_scheduling", True, "asynchronous scheduling"),
        ("uses_mrope", True, "positions of several dimensions"),
        ("use_aux_hidden_state_outputs", True, "hidden states of inner layers"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(runner, name, value)
            assert obstacle(runner) == reason
    monkeypatch.setenv("VAC_DECODER", "0")
    assert obstacle(runner) == "VAC_DECODER=0"
    monkeypatch.undo()
    part = runner.attn_groups[0][0]
    monkeypatch.setattr(part, "kernel_block_size", 8)
    assert obstacle(runner) == "other caches"
