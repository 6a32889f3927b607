"""Decoder layers as op lists: the same tokens and bits as module by module, and by modules where they do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from vllm import LLM
from vllm.forward_context import get_forward_context

from tests.integration.checkpoints import SIZES, random_model, save
from tests.integration.engine import check_golden, engine, golden_prompts, greedy, worker
from vllm_arm_cpu.layers import decoder
from vllm_arm_cpu.layers.decoder import Segment
from vllm_arm_cpu.layers.ranks import Ranks


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with engine() as llm:
        # The model as vLLM calls it, layer by layer; test_plain_step.py has it in one call.
        worker(llm).model_runner.plain = None
        yield llm


def model_of(llm: LLM) -> Any:
    return worker(llm).model_runner.get_model()


class Operators(TorchDispatchMode):
    """Counts what goes through torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_all_layers_in_one_call(llm: LLM) -> None:
    """One segment holds the model's layers, runs in every step, and gives the golden tokens."""
    model = model_of(llm)
    (segment,) = decoder.segments(model)
    assert segment.layers == list(model.model.layers)
    assert {type(layer).__name__ for layer in segment.layers} == {"ArmLlamaDecoderLayer"}
    calls: list[int] = []
    run = segment.run
    segment.run = lambda positions, *rest: calls.append(len(positions)) or run(positions, *rest)  # type: ignore[func-returns-value,method-assign]
    try:
        check_golden(llm, "short-1", "medium")
    finally:
        del segment.run
    # A prefill of both, then steps of two tokens.
    assert calls[0] > 2
    assert calls[1:] == [2] * 19
    # Norm, QKV, rotary, cache write, attention, output; norm, gate and up, activation, down.
    (step,) = segment.steps.values()
    assert step.lengths == [10] * len(segment.layers)


def test_same_bits(llm: LLM) -> None:
    """A program in one parallel region, op by op, on one thread, and the modules one by one: the same bits."""
    (segment,) = decoder.segments(model_of(llm))
    compared = compare_ways(segment)
    try:
        greedy(llm, golden_prompts("short-1", "medium"), 3)
    finally:
        del segment.run
    assert compared[1:] == [2, 2]


def compare_ways(segment: Segment) -> list[int]:
    """Make the segment of a whole model check every step run in one parallel region against other ways to run it.

    The tokens of each step are appended to the list. ``del segment.run`` ends it.
    """
    compared: list[int] = []
    run = segment.run

    def compare(positions: Any, hidden_states: Any, residual: Any) -> Any:
        assert residual is None
        results = []
        for how in ("one region", "op by op", "layer by layer", "one thread", "modules"):
            x = hidden_states.clone()
            out = torch.full_like(x, float("nan"))
            if how == "modules":
                out, sums = x, None
                for layer in segment.layers:
                    out, sums = type(layer).__mro__[1].__call__(layer, positions, out, sums)
                results.append((how, out, sums))
                continue
            step = segment.prepared(positions, x, None, out)
            if how == "op by op":
                for i in range(len(step.program)):
                    step.program.run(i, 1)
            elif how == "layer by layer":
                start = 0
                for length in step.lengths:
                    step.program.run(start, length)
                    start += length
            else:
                step.program.run(num_threads=1 if how == "one thread" else 0)
            results.append((how, out, x))
        for how, out, sums in results[1:]:
            assert torch.equal(out, results[0][1]), how
            assert torch.equal(sums, results[0][2]), how
        assert results[0][1].abs().max() > 0
        compared.append(len(positions))
        return run(positions, hidden_states, residual)

    segment.run = compare  # type: ignore[method-assign]
    return compared


def test_nothing_through_torch(llm: LLM) -> None:
    """In a steady decode the layers take nothing from torch's dispatcher, hence no memory either."""
    (segment,) = decoder.segments(model_of(llm))
    seen: list[list[str]] = []
    run = segment.run

    def watch(*arguments: Any) -> Any:
        with Operators() as operators:
            result = run(*arguments)
        seen.append(operators.seen)
        return result

    segment.run = watch  # type: ignore[method-assign]
    try:
        greedy(llm, golden_prompts("short-1"), 8)
    finally:
        del segment.run
    # Prefill, and the first step of each of the two outputs, may make views.
    assert len(seen) == 8
    assert seen[4:] == [[]] * 4


def test_outputs_in_turn(llm: LLM) -> None:
    """What one step returned is not touched by the next one."""
    (segment,) = decoder.segments(model_of(llm))
    outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
    run = segment.run

    def watch(*arguments: Any) -> Any:
        if outputs:
            # Whole until now: the sampler and the final norm, which is in place, are done with it.
            outputs[-1][1].copy_(outputs[-1][0])
        result = run(*arguments)
        if outputs:
            before, copy = outputs[-1]
            assert before.data_ptr() != result[0].data_ptr()
            assert torch.equal(before, copy)
        outputs.append((result[0], result[0].clone()))
        return result

    segment.run = watch  # type: ignore[method-assign]
    try:
        greedy(llm, golden_prompts("short-1"), 5)
    finally:
        del segment.run
    assert len(outputs) == 5


def test_modules_where_they_are_wanted(llm: LLM) -> None:
    """Hooks see their module's input, EAGLE its hidden states: the modules run, with the same tokens."""
    model = model_of(llm)
    (segment,) = decoder.segments(model)
    expected = greedy(llm, golden_prompts("short-1"), 4)
    inputs: list[torch.Size] = []
    hook = model.model.layers[1].mlp.register_forward_hook(lambda _, args, __: inputs.append(args[0].shape))
    try:
        assert greedy(llm, golden_prompts("short-1"), 4) == expected
    finally:
        hook.remove()
    assert len(inputs) == 4
    assert segment.result is None
    assert greedy(llm, golden_prompts("short-1"), 4) == expected
    assert len(inputs) == 4
    assert segment.result is not None

    taken: list[int] = []
    forward = model.model._maybe_add_hidden_state
    model.model.aux_hidden_state_layers = (1,)
    # As EAGLE's tap, but the model still returns what the runner expects.
    model.model._maybe_add_hidden_state = lambda aux, index, *_: taken.append(index) or aux  # type: ignore[func-returns-value]
    try:
        assert greedy(llm, golden_prompts("short-1"), 4) == expected
    finally:
        model.model.aux_hidden_state_layers = ()
        model.model._maybe_add_hidden_state = forward
    assert segment.result is None
    assert len(taken) == 4 * (1 + len(segment.layers))


def test_misfits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer's parts must not be."""
    layer = model_of(llm).model.layers[0]
    ranks = decoder.segments(model_of(llm))[0].ranks
    assert decoder.misfit(layer, torch.bfloat16, ranks) is None

    def reason(target: Any, name: str, value: Any) -> str | None:
        with monkeypatch.context() as patch:
            patch.setitem(target.__dict__, name, value)
            return decoder.misfit(layer, torch.bfloat16, ranks)

    attention, mlp = layer.self_attn, layer.mlp
    assert "divided" in str(reason(attention.o_proj, "tp_size", 2))
    assert "others sum" in str(reason(mlp.down_proj, "reduce_results", False))
    assert "kernels" in str(reason(mlp.down_proj, "cpu_linear", torch.nn.functional.linear))
    assert "bias" in str(reason(mlp.down_proj, "return_bias", False))
    assert "attention" in str(reason(attention.attn, "kv_sharing_target_layer_name", "model.layers.0.self_attn.attn"))
    assert "MLP" in str(reason(mlp, "forward", lambda x: x))
    assert "family" in str(reason(layer, "forward", lambda *_: None))
    assert "part of its input" in str(reason(layer.input_layernorm, "variance_size_override", 8))
    assert decoder.misfit(layer, torch.float32, ranks) == "linear layers of several types"


@pytest.mark.parametrize("case", ["switched off", pytest.param("traced", marks=pytest.mark.slow)])
def test_fallback(case: str) -> None:
    """Without op lists: module by module, or traced by torch.compile."""
    arguments: dict[str, Any] = {"environ": {"VAC_DECODER": "0"}}
    if case == "traced":
        arguments = {"compilation_config": {"mode": "DYNAMO_TRACE_ONCE", "backend": "eager"}}
    with engine(**arguments) as llm:
        assert decoder.segments(model_of(llm)) == []
        check_golden(llm, "short-1", "medium", max_tokens=16)


# Two KV cache groups: the first layer sees 32 tokens, the second all.
WINDOW: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
MODELS = {
    "qwen2": Qwen2Config(**{**SIZES, "tie_word_embeddings": True}),
    "qwen3": Qwen3Config(**{**SIZES, "hidden_size": 128}, head_dim=64),
    "llama": LlamaConfig(**SIZES, **WINDOW),
    "gemma3": Gemma3TextConfig(**SIZES, **WINDOW, head_dim=64, query_pre_attn_scalar=64),
    "mistral": MistralConfig(**SIZES, sliding_window=32),
    # Two layers in three have experts.
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, head_dim=64, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=96, mlp_only_layers=[1]
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3", "llama", "gemma3", "qwen3-moe"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "mistral", "mixtral")),
    ],
)
def test_other_models(name: str, tmp_path: Path) -> None:
    """Biases, norms by head and behind parts, sliding windows, experts: every step has the bits of the modules."""
    directory = save(random_model(MODELS[name]), tmp_path / name)
    with engine(directory, skip_tokenizer_init=True, max_num_batched_tokens=64) as llm:
        worker(llm).model_runner.plain = None
        (segment,) = decoder.segments(model_of(llm))
        assert len(segment.layers) == SIZES["num_hidden_layers"]
        steps = compare_with_modules(segment)
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(2, 512, (n,), generator=generator).tolist() for n in (16, 5, 90)]
        greedy(llm, prompts, 4)
        # Prefill in pieces, mixed with decodes.
        assert len(steps) >= 5
        assert max(steps) == 64
        (step,) = segment.steps.values()
        assert len(step.groups) == (2 if name in ("llama", "gemma3") else 1)
        if name == "qwen3-moe":
            check_misfits(segment.layers[0])


def check_misfits(layer: Any) -> None:
    """Experts that are not only chosen by softmax and added up stay vLLM's modules."""
    runner, gate = layer.mlp.experts, layer.mlp.gate
    changes = [
        (runner, "routed_scaling_factor", 2.5, "scaled"),
        (runner, "routed_output_transform", torch.nn.Identity(), "transforms"),
        (runner, "_shared_experts", torch.nn.Identity(), "share"),
        (runner.routed_experts, "apply_router_weight_on_input", True, "scaled"),
        (runner.router, "scoring_func", "sigmoid", "softmax"),
        (runner.router, "use_grouped_topk", True, "softmax"),
        (runner.router, "custom_routing_function", print, "softmax"),
        (runner.router, "capture_fn", print, "softmax"),
        (gate, "out_dtype", torch.float32, "logits"),
        (gate, "forward", print, "logits"),
    ]
    assert decoder.misfit(layer, torch.bfloat16, Ranks()) is None
    for owner, name, value, word in changes:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value)
            assert word in str(decoder.misfit(layer, torch.bfloat16, Ranks())), name
    assert decoder.misfit(layer, torch.bfloat16, Ranks()) is None


def compare_with_modules(segment: Segment) -> list[int]:
    """Make the segment check every step against its modules; the tokens of each step are appended to the list."""
    steps: list[int] = []
    run = segment.run

    def compare(positions: Any, hidden_states: Any, residual: Any) -> Any:
        out, sums = hidden_states.clone(), residual
        for layer in segment.layers:
            out, sums = type(layer).__mro__[1].__call__(layer, positions, out, sums)
        result = run(positions, hidden_states, residual)
        assert isinstance(get_forward_context().attn_metadata, dict)
        assert torch.equal(result[0], out)
        assert torch.equal(result[1], sums)
        steps.append(len(positions))
        return result

    segment.run = compare  # type: ignore[method-assign]
    return steps
