"""Quantized checkpoints in the engine: on our kernels, as exact as their format is, and what cannot be is refused.

The reference is Hugging Face transformers in FP32 with the weights that the
format's formula gives, and activations rounded as the scheme says.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams

from tests.integration.engine import GOLDEN, MODEL, engine, golden_prompts, greedy, worker
from tests.integration.quantized import dequantized, layers, make
from vllm_arm_cpu.quantization.w4a8 import Int4Linear, KleidiAILinear
from vllm_arm_cpu.quantization.w8a8 import Int8Linear

WINDOW = GOLDEN["perplexity"]["window"]
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
OURS = {"VAC_INT4_KERNEL": "vac"}

slow = pytest.mark.slow
# Scheme, environment, class of the linear layers, how activations are rounded, what the perplexity may be above BF16's.
CASES = [
    pytest.param("w8a8", {}, Int8Linear, "symmetric", 0.02),
    pytest.param("w8a8-static-asymmetric", {}, Int8Linear, "static", 0.03),
    pytest.param("w4a8-group32", OURS, Int4Linear, "symmetric", 0.08),
    pytest.param("w4a8-packed-group128", {"VAC_INT4_KERNEL": "kleidiai"}, KleidiAILinear, "asymmetric", 0.15),
    pytest.param("w4a16-asymmetric-group64", OURS | {"VAC_INT4": "w4a16"}, Int4Linear, "none", 0.10),
    pytest.param("gptq-asymmetric-group128", OURS, Int4Linear, "symmetric", 0.15),
    pytest.param("awq-group128", OURS, Int4Linear, "symmetric", 0.15),
    pytest.param("w8a8-asymmetric", {}, Int8Linear, "asymmetric", 0.02, marks=slow),
    pytest.param("w8a8-static", {}, Int8Linear, "static", 0.03, marks=slow),
    pytest.param("w4a8-channel", OURS, Int4Linear, "symmetric", 0.30, marks=slow),
    pytest.param("w4a8-channel", {"VAC_INT4_KERNEL": "kleidiai"}, KleidiAILinear, "asymmetric", 0.30, marks=slow),
    pytest.param("w4a8-group64", OURS, Int4Linear, "symmetric", 0.12, marks=slow),
    pytest.param("w4a8-group128", OURS, Int4Linear, "symmetric", 0.15, marks=slow),
    pytest.param("w4a8-packed-group32", OURS, Int4Linear, "symmetric", 0.08, marks=slow),
    pytest.param("w4a8-packed-channel", OURS, Int4Linear, "symmetric", 0.30, marks=slow),
    pytest.param("w4a16-group32", OURS | {"VAC_INT4": "w4a16"}, Int4Linear, "none", 0.08, marks=slow),
    pytest.param("w4a16-channel", OURS, Int4Linear, "symmetric", 0.30, marks=slow),
    pytest.param("w4a16-asymmetric-channel", OURS, Int4Linear, "symmetric", 0.30, marks=slow),
    pytest.param("gptq-group32", OURS, Int4Linear, "symmetric", 0.08, marks=slow),
    pytest.param("gptq-channel", OURS, Int4Linear, "symmetric", 0.30, marks=slow),
    pytest.param("gptq-asymmetric-channel", OURS | {"VAC_INT4": "w4a16"}, Int4Linear, "none", 0.30, marks=slow),
    pytest.param("awq-group32", OURS | {"VAC_INT4": "w4a16"}, Int4Linear, "none", 0.08, marks=slow),
]


def model_of(llm: LLM) -> Any:
    return worker(llm).model_runner.get_model()


def linears(llm: LLM) -> dict[str, Any]:
    """Layer -> what multiplies by its weight, for the layers between embedding and lm_head."""
    found = {name: module.cpu_linear for name, module in model_of(llm).named_modules() if hasattr(module, "cpu_linear")}
    return {name: made for name, made in found.items() if name.endswith("_proj")}


@functools.cache
def window() -> list[int]:
    """The beginning of the held-out text behind one BOS."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokens = tokenizer((MODEL / "heldout.txt").read_text(), add_special_tokens=False)["input_ids"]
    return [tokenizer.bos_token_id, *tokens[: WINDOW - 1]]


def perplexity(llm: LLM) -> float:
    """Of the window; it is prefilled in pieces."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    output = llm.generate([{"prompt_token_ids": window()}], params, use_tqdm=False)[0]
    logprobs = [entry[token].logprob for token, entry in zip(window()[1:], output.prompt_logprobs[1:], strict=True)]
    return math.exp(-sum(logprobs) / len(logprobs))


class Reference:
    """Transformers in FP32 with a quantized checkpoint's weights.

    Args:
        rounding: of activations: ``none``, ``symmetric`` or ``asymmetric`` per token, or ``static``, by the checkpoint.
    """

    def __init__(self, directory: Path, rounding: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        parts = layers(directory)
        for layer, weight in dequantized(directory).items():
            module = self.model.get_submodule(layer)
            module.weight.data.copy_(torch.from_numpy(weight))
            if rounding != "none":
                module.register_forward_pre_hook(functools.partial(_rounded, rounding, parts[layer]))

    @torch.no_grad()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Of what follows each token: FP32 [len(tokens), vocabulary]."""
        logits: torch.Tensor = self.model(torch.tensor([tokens])).logits[0]
        return logits.log_softmax(-1)

    def perplexity(self) -> float:
        found = self.logprobs(window()[:-1])[range(WINDOW - 1), window()[1:]]
        return math.exp(-float(found.mean()))


def _rounded(
    rounding: str, parts: dict[str, torch.Tensor], module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    x = inputs[0]
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    if rounding == "static":
        scale, zero = parts["input_scale"].float(), parts.get("input_zero_point", torch.zeros(1)).float()
    elif rounding == "symmetric":
        scale, zero = torch.maximum(-low, high) / 127, torch.zeros(1)
    else:
        scale = (high - low) / 255
        zero = -128 - (low / scale).round()
    return (((x / scale + zero).round().clamp(-128, 127) - zero) * scale,)


@pytest.fixture(scope="module")
def plain() -> float:
    """The perplexity of the BF16 checkpoint in this engine."""
    with engine(max_num_batched_tokens=128, max_model_len=WINDOW + 1) as llm:
        return perplexity(llm)


def merged_weight(weights: dict[str, np.ndarray], name: str) -> torch.Tensor:
    """The weight of one of vLLM's layers, which may be several of the checkpoint's."""
    block, _, last = name.rpartition(".")
    return torch.from_numpy(np.concatenate([weights[f"{block}.{part}"] for part in MERGED.get(last, (last,))]))


@pytest.mark.parametrize("scheme,environ,kind,rounding,allowed", CASES)
def test_accuracy(
    scheme: str, environ: dict[str, str], kind: type, rounding: str, allowed: float, tmp_path: Path, plain: float
) -> None:
    """On our kernel, with the checkpoint's weights exactly, and as perplexed as the reference of the same scheme."""
    directory = make(scheme, tmp_path / scheme)
    reference = Reference(directory, rounding)
    settings = {"max_num_batched_tokens": 128, "max_model_len": WINDOW + 1, "dtype": "bfloat16"}
    with engine(directory, environ, **settings) as llm:
        made = linears(llm)
        assert len(made) == 4 * 4
        assert {type(linear) for linear in made.values()} == {kind}
        assert not [name for name, p in model_of(llm).named_parameters() if "_proj." in name and p.numel() > 1]
        weights = dequantized(directory)
        for name, linear in made.items():
            # Scales are of the model's dtype.
            expected = merged_weight(weights, name).float()
            if rounding != "static":
                # Ones and zeros are rounded to themselves.
                got = linear.run(torch.eye(linear.k), None, torch.float32).t()
                # vLLM holds scales in the model's dtype; GPTQ's and AWQ's are FP16.
                rtol = 2**-8 if scheme.startswith(("gptq", "awq")) else 1e-5
                assert torch.allclose(got, expected, rtol=rtol, atol=1e-7), name
        got, exact = perplexity(llm), reference.perplexity()
        print(f"{scheme} {environ}: perplexity {got:.3f} ({got / plain - 1:+.2%}), reference {exact:.3f}")
        assert got == pytest.approx(exact, rel=0.01)
        assert got < (1 + allowed) * plain

        prompt = golden_prompts("short-1")[0]
        (tokens,) = greedy(llm, [prompt], 8)
        likely = reference.logprobs([*prompt, *tokens])[len(prompt) - 1 : -1]
        behind = likely.amax(-1) - likely[range(len(tokens)), tokens]
        assert behind.max() < 0.25, "a token that the reference finds unlikely was chosen"
