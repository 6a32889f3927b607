"""Experts without quantization, and gpt-oss's MXFP4 ones, against FP64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from vllm_arm_cpu.layers import experts as shared
from vllm_arm_cpu.layers import moe
from vllm_arm_cpu.layers.moe import DenseExperts, from_mxfp4

COUNT, HIDDEN, INTERMEDIATE = 6, 96, 40


def gated(x: torch.Tensor, activation: MoEActivation) -> torch.Tensor:
    """The activation in FP64; gpt-oss's has gates and what they gate in turn."""
    if activation == MoEActivation.SWIGLUOAI:
        gate, up = x[0::2].clamp(max=7.0), x[1::2].clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    gate, up = x.chunk(2)
    function = {
        MoEActivation.SILU: torch.nn.functional.silu,
        MoEActivation.GELU: torch.nn.functional.gelu,
        MoEActivation.GELU_TANH: lambda value: torch.nn.functional.gelu(value, approximate="tanh"),
    }[activation]
    return function(gate) * up


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    "activation", [MoEActivation.SILU, MoEActivation.GELU, MoEActivation.GELU_TANH, MoEActivation.SWIGLUOAI]
)
def test_experts(activation: MoEActivation, with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens and many, in pieces, all experts or one, ids of none; inputs with gaps; loaded again."""
    monkeypatch.setattr(shared, "MAX_TOKENS", 16)
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        biases: Any = (None, None)
        if with_bias:
            biases = tuple(torch.randn(COUNT, n, generator=generator).to(dtype) for n in (2 * INTERMEDIATE, HIDDEN))
        experts = DenseExperts(COUNT, HIDDEN, INTERMEDIATE, dtype, activation, biases)
        for again in range(2):
            weights = [
                torch.randn(COUNT, n, k, generator=generator).mul(2 * k**-0.5).to(dtype)
                for n, k in ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
            ]
            for expert in range(COUNT):
                for product in range(2):
                    experts.load(expert, product, weights[product][expert])
            for tokens, top_k in ((1, 2), (3, 6), (37, 3)) if not again else ((2, 2),):
                x = torch.randn(tokens, HIDDEN + 8, generator=generator).to(dtype)[:, 3 : HIDDEN + 3]
                ids = torch.stack([torch.randperm(COUNT, generator=generator)[:top_k] for _ in range(tokens)])
                if tokens == 3:
                    ids = torch.full((tokens, 1), 5)
                if tokens == 37:
                    ids[4] = -1
                    ids = ids.to(torch.int32)
                scales = torch.rand(ids.shape, generator=generator)
                got = experts(x, scales, ids, activation)
                expected = torch.zeros(x.shape, dtype=torch.float64)
                for token, expert, scale in zip(
                    torch.arange(tokens).repeat_interleave(ids.shape[1]), ids.flatten(), scales.flatten(), strict=True
                ):
                    if expert < 0:
                        continue
                    first = weights[0][expert].double() @ x[token].double()
                    first = (first if not with_bias else first + biases[0][expert].double()).to(dtype).double()
                    second = weights[1][expert].double() @ gated(first, activation).to(dtype).double()
                    second = (second if not with_bias else second + biases[1][expert].double()).to(dtype).double()
                    expected[token] += scale.double() * second
                assert got.shape == x.shape and got.dtype == dtype
                # Sums in FP32 round to another neighbour now and then; the output is rounded once.
                error = (got - expected).square().mean() / expected.square().mean()
                assert error < 4 * torch.finfo(dtype).eps ** 2 + 1e-12, (dtype, tokens)
    nothing = torch.zeros(0, 2)
    assert experts(torch.zeros(0, HIDDEN), nothing, nothing.int(), activation).shape == (0, HIDDEN)


def test_other_types_are_refused() -> None:
    experts = DenseExperts(1, 32, 32, torch.bfloat16, MoEActivation.SILU)
    with pytest.raises(TypeError, match="packed as torch"):
        experts(torch.zeros(1, 32), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), MoEActivation.SILU)


def test_mxfp4() -> None:
    """All 16 codes under small and large powers of two, exactly; the earlier value is in the lower bits."""
    values = torch.arange(256, dtype=torch.uint8).view(8, 32).repeat(1, 2)
    scales = torch.tensor([[127, 120, 130, 126]], dtype=torch.uint8).repeat(8, 1)
    got = from_mxfp4(values, scales, torch.bfloat16)
    assert got.shape == (8, 128)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.stack([values.numpy() % 16, values.numpy() // 16], axis=-1).reshape(8, 128)
    expected = magnitudes[codes % 8] * np.where(codes < 8, 1, -1)
    expected = expected * 2.0 ** (np.repeat(scales.numpy().astype(int), 32, axis=1) - 127)
    assert np.array_equal(got.double().numpy(), expected)


@pytest.mark.parametrize(
    "change,reason",
    [
        ({"activation": MoEActivation.RELU2}, "activation is relu2"),
        ({"is_act_and_mul": False}, "no gate"),
        ({"moe_parallel_config": SimpleNamespace(use_ep=True)}, "expert parallelism"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"in_dtype": torch.float64}, "float64"),
    ],
)
def test_misfits(change: dict[str, Any], reason: str) -> None:
    """What has no kernel ends the load with the reason, not with a wrong answer."""
    fitting = {
        "activation": MoEActivation.SILU,
        "is_act_and_mul": True,
        "moe_parallel_config": SimpleNamespace(use_ep=False),
        "is_lora_enabled": False,
        "in_dtype": torch.bfloat16,
    }
    assert moe.misfit(SimpleNamespace(**fitting)) is None
    assert reason in str(moe.misfit(SimpleNamespace(**{**fitting, **change})))
