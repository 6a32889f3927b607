"""Quantized mixture-of-experts models on our kernels."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen3MoeConfig
from vllm import LLM
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from tests.integration.checkpoints import SIZES, random_model, save
from tests.integration.engine import engine, greedy, score, worker
from tests.integration.quantized import dequantized, make
from tests.integration.test_decoder import compare_ways
from tests.integration.test_quantization import rounded
from vllm_arm_cpu.layers import decoder
from vllm_arm_cpu.layers import experts as shared
from vllm_arm_cpu.layers.experts import Experts
from vllm_arm_cpu.quantization.moe import Int4Experts, Int8Experts

SIZE = {"num_experts": 8, "hidden": 96, "intermediate": 64}
CONFIG = Qwen3MoeConfig(
    **{**SIZES, "hidden_size": 256, "intermediate_size": 512},
    head_dim=64,
    moe_intermediate_size=128,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    decoder_sparse_step=1,
)


def some_experts(
    kind: str, biases: Any, zero_points: bool = False
) -> tuple[Experts, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Experts with random weights, and the weights FP64 of both products that they stand for."""
    generator = torch.Generator().manual_seed(0)
    count, hidden, intermediate = SIZE.values()
    if kind == "int8":
        experts: Experts = Int8Experts(count, hidden, intermediate, biases)
    else:
        experts = Int4Experts(count, hidden, intermediate, 32, torch.bfloat16, biases, zero_points)
    exact = []
    for expert in range(count):
        weights = []
        for product, (n, k) in enumerate(((2 * intermediate, hidden), (hidden, intermediate))):
            if kind == "int8":
                values = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8)
                scales = (torch.rand(n, 1, generator=generator) + 0.5) / 1500
            else:
                values = torch.randint(-8, 8, (n, k), generator=generator, dtype=torch.int8)
                scales = ((torch.rand(n, k // 32, generator=generator) + 0.5) / 100).to(torch.bfloat16)
            zeros = torch.zeros(scales.shape, dtype=torch.int8)
            if zero_points:
                zeros = torch.randint(-8, 8, scales.shape, generator=generator, dtype=torch.int8)
            experts.load(expert, product, values, scales, *([zeros] if zero_points else []))
            zeros, repeated = (part.double().repeat_interleave(k // part.shape[1], 1) for part in (zeros, scales))
            weights.append((values.double() - zeros) * repeated)
        exact.append((weights[0], weights[1]))
    return experts, exact


def reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    exact: list[tuple[torch.Tensor, torch.Tensor]],
    biases: Any,
    rounding: str,
) -> torch.Tensor:
    """Token by token in FP64; what lies between the products has x's dtype."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
            first, second = exact[expert]
            gates = rounded(x[token].float(), rounding, {}).double() @ first.T
            if biases[0] is not None:
                gates = gates + biases[0][expert].double()
            gate, up = gates.to(x.dtype).double().chunk(2)
            gated = (torch.nn.functional.silu(gate) * up).to(x.dtype)
            result = rounded(gated.float(), rounding, {}).double() @ second.T
            if biases[1] is not None:
                result = result + biases[1][expert].double()
            out[token] += weight * result.to(x.dtype).double()
    return out


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    "kind,zero_points", [("int8", False)] + [(k, z) for k in ("w4a8", "w4a16") for z in (False, True)]
)
def test_experts(kind: str, zero_points: bool, with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens and many, in pieces, all experts or one; inputs with gaps."""
    monkeypatch.setenv("VAC_INT4", "w4a16" if kind == "w4a16" else "w4a8")
    monkeypatch.setattr(shared, "MAX_TOKENS", 16)
    count, hidden, intermediate = SIZE.values()
    generator = torch.Generator().manual_seed(1)
    biases: Any = (None, None)
    if with_bias:
        biases = tuple(torch.randn(count, n, generator=generator) for n in (2 * intermediate, hidden))
    experts, exact = some_experts(kind, biases, zero_points)
    rounding = "none" if kind == "w4a16" else "symmetric"
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tokens, top_k in ((1, 2), (3, 8), (37, 3)):
            x = torch.randn(tokens, hidden + 8, generator=generator).to(dtype)[:, 3 : hidden + 3]
            ids = torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(tokens)])
            if tokens == 3:
                ids = torch.full((tokens, 1), 5)
            weights = torch.rand(ids.shape, generator=generator)
            got = experts(x, weights, ids.to(torch.int32) if tokens == 37 else ids, MoEActivation.SILU)
            expected = reference(x, weights, ids, exact, biases, rounding)
            assert got.shape == x.shape and got.dtype == dtype
            # Values in the middle go either way, at both roundings to eight bits; the gates are exact to the dtype.
            allowed = (3e-5 if rounding == "symmetric" else 1e-6) + 4 * torch.finfo(dtype).eps ** 2
            assert (got - expected).square().mean() < allowed * expected.square().mean()
    nothing = torch.zeros(0, 2)
    assert experts(torch.zeros(0, hidden), nothing, nothing.int(), MoEActivation.SILU).shape == (0, hidden)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A random Qwen3-MoE checkpoint with a tensor for each expert, and the model in FP32."""
    model = random_model(CONFIG)
    for block in model.model.layers:
        # So that rounding does not often change which experts are the likeliest.
        block.mlp.gate.weight.data *= 8
    directory = save(model, tmp_path_factory.mktemp("qwen3"))
    tensors = load_file(directory / "model.safetensors")
    split = {}
    for name, tensor in tensors.items():
        layer, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, weight in enumerate(tensor):
                for part, half in zip(("gate", "up"), weight.chunk(2), strict=True):
                    split[f"{layer}.{expert}.{part}_proj.weight"] = half.clone()
        elif last == "down_proj":
            split |= {f"{layer}.{expert}.down_proj.weight": weight.clone() for expert, weight in enumerate(tensor)}
        else:
            split[name] = tensor
    assert sum("experts.7.down_proj.weight" in name for name in split) == 2
    save_file(split, directory / "model.safetensors", metadata={"format": "pt"})
    return directory, model


def experts_of(llm: LLM) -> dict[str, Any]:
    modules = worker(llm).model_runner.get_model().named_modules()
    found = {name: getattr(module, "cpu_linear", None) for name, module in modules}
    return {name: made for name, made in found.items() if isinstance(made, Experts)}


def test_parts_that_do_not_fit_are_refused() -> None:
    """Nothing is read or written behind an expert's weight."""
    experts = Int4Experts(2, 64, 64, 32, torch.bfloat16)
    scales = torch.ones(128, 2)
    for values, zeros in (
        (torch.zeros(64, 64, dtype=torch.int8), None),
        (torch.zeros(128, 32, dtype=torch.int8), None),
        (torch.zeros(128, 64, dtype=torch.int8), torch.zeros(128, 2, dtype=torch.int8)),
    ):
        with pytest.raises(ValueError, match=r"weight \[128, 64\] cannot"):
            experts.load(0, 0, values, scales, zeros)
    with pytest.raises(ValueError, match=r"weight \[128, 64\] cannot have parts"):
        experts.load(0, 0, torch.zeros(128, 64, dtype=torch.int8), scales[:, :1])


W4A16 = {"VAC_INT4": "w4a16"}
CASES: list[tuple[str, dict[str, str], type]] = [
    ("w8a8", {}, Int8Experts),
    ("w4a8-group32", {}, Int4Experts),
    ("w4a8-packed-channel", {}, Int4Experts),
    ("w4a16-group64", W4A16, Int4Experts),
    ("w4a16-asymmetric-group32", {}, Int4Experts),
    ("gptq-group32", {}, Int4Experts),
    ("gptq-asymmetric-group128", W4A16, Int4Experts),
    ("awq-group64", {}, Int4Experts),
]
"""A kind of checkpoint, settings, and the class of its experts."""


@pytest.mark.parametrize("scheme,environ,kind", CASES)
def test_qwen3(
    scheme: str, environ: dict[str, str], kind: type, qwen3: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    """The experts' weights are the checkpoint's, and tokens as likely as they are in FP32 with these weights."""
    source, original = qwen3
    directory = make(scheme, tmp_path / scheme, source)
    weights = dequantized(directory)
    assert len(weights) == 2 * (4 + 3 * 8), "every expert is quantized, the router is not"
    prompt = torch.randint(2, 512, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    settings = {"skip_tokenizer_init": True, "dtype": "bfloat16", "max_num_batched_tokens": 64}
    rounding = "none" if environ == W4A16 else "symmetric"
    with engine(directory, {"VAC_INT4_KERNEL": "vac"} | environ, **settings) as llm:
        found = experts_of(llm)
        assert {type(experts) for experts in found.values()} == {kind} and len(found) == 2
        parameters = worker(llm).model_runner.get_model().named_parameters()
        assert not [name for name, parameter in parameters if "experts" in name and parameter.numel() > 8 * 512]
        name, experts = next(iter(found.items()))
        prefix = name.removesuffix(".routed_experts")
        exact = [
            (
                torch.from_numpy(np.concatenate([weights[f"{prefix}.{e}.{part}_proj"] for part in ("gate", "up")])),
                torch.from_numpy(weights[f"{prefix}.{e}.down_proj"]),
            )
            for e in range(8)
        ]
        x = torch.randn(5, 256, generator=torch.Generator().manual_seed(2))
        ids = torch.tensor([[0, 7], [1, 2], [3, 4], [5, 6], [7, 1]])
        got = experts(x, torch.ones(5, 2), ids, MoEActivation.SILU)
        expected = reference(x, torch.ones(5, 2), ids, exact, (None, None), rounding)
        # vLLM rounds GPTQ's and AWQ's FP16 scales to the model's BF16: 2^-9 at most of each.
        assert (got - expected).square().mean() < 1e-4 * expected.square().mean()

        likely = score(llm, prompt)
        # Steps through op lists have the bits of the modules; a whole step as one call has the tokens.
        expected_tokens = greedy(llm, [prompt[:9]], 6)
        assert len(expected_tokens[0]) == 6
        worker(llm).model_runner.plain = None
        (segment,) = decoder.segments(worker(llm).model_runner.get_model())
        compared = compare_ways(segment)
        llm.reset_prefix_cache()
        assert greedy(llm, [prompt[:9]], 6) == expected_tokens
        assert compared == [9, 1, 1, 1, 1, 1]
    with torch.no_grad():
        logprobs = with_weights(original, weights)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    difference = (torch.tensor(likely) - logprobs[range(47), prompt[1:]]).abs()
    median, largest = float(difference.median()), float(difference.max())
    print(f"{scheme}: logprobs differ from the FP32 reference's by {median:.3f} in the median, {largest:.3f} at most")
    # Each of some ten products in a row adds about 1 % by rounding its activations: 3 % of logits that spread over a
    # few units. Where a token goes to another expert after all much changes, hence the median.
    assert median < 0.1


@pytest.mark.parametrize(
    "quantization,message",
    [
        ({"quant_method": "gptq", "sym": True, "group_size": 16}, r"groups of 16 are no multiple of 32"),
        ({"quant_method": "gptq", "sym": True, "bits": 8}, r"weights are of 8 bits, not of 4"),
        ({"quant_method": "awq", "zero_point": True, "group_size": 96}, r"groups of 96 do not divide 256 and 128"),
        ({"quant_method": "awq", "zero_point": True, "group_size": -1}, r"one scale per row is not supported"),
        (
            {"quant_method": "gptq", "sym": True, "desc_act": True},
            r"desc_act=true with groups of 32.* Use a checkpoint",
        ),
    ],
)
def test_what_is_refused(quantization: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Before a weight is read, with the experts' name; attention and router are not quantized."""
    config = CONFIG.to_dict() | {"architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16"}
    config["quantization_config"] = {
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "dynamic": {r"-:.*(self_attn|mlp\.gate$)": {}},
        "modules_to_not_convert": ["self_attn", "mlp.gate"],
    } | quantization
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = r"model\.layers\.0\.mlp\.experts.*" + message
    with pytest.raises(ValueError, match=message), engine(tmp_path, skip_tokenizer_init=True):
        pass


def with_weights(model: PreTrainedModel, weights: dict[str, np.ndarray]) -> PreTrainedModel:
    """A copy of the model with the weights of a quantized checkpoint, activations as they are."""
    model = copy.deepcopy(model)
    for name, weight in weights.items():
        layer, _, part = name.rpartition(".")
        values = torch.from_numpy(weight).float()
        if ".experts." not in name:
            model.get_submodule(name).weight.data.copy_(values)
            continue
        experts, _, expert = layer.rpartition(".")
        module, width = model.get_submodule(experts), CONFIG.moe_intermediate_size
        if part == "down_proj":
            module.down_proj.data[int(expert)] = values
        else:
            start = 0 if part == "gate_proj" else width
            module.gate_up_proj.data[int(expert), start : start + width] = values
    return model
