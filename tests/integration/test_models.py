"""Every architecture of the zoo in the real engine, against Hugging Face transformers in FP32 with the same weights."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope

from tests.integration.engine import engine, prompt_logprobs, token_logprobs, worker
from tests.integration.zoo import SIZES, ZOO, Entry, make
from vllm_arm_cpu.attention.backend import ArmAttentionImpl
from vllm_arm_cpu.layers import decoder, recurrent, rotary
from vllm_arm_cpu.layers.linear import PackedLinear
from vllm_arm_cpu.layers.moe import DenseExperts
from vllm_arm_cpu.layers.ranks import Ranks
from vllm_arm_cpu.platform import upstream_ops_available

NEW_TOKENS = 6
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "skip_tokenizer_init": True, "max_num_batched_tokens": 64}


def prompts() -> list[list[int]]:
    """Random token ids: one of a block's length, one short, one that is prefilled in pieces and exceeds windows."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in (16, 5, 80)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if entry.slow else []) for name, entry in ZOO.items()]
)
def test_against_transformers(name: str, tmp_path: Path) -> None:
    """The model runs on the path that the table says, and finds every token as likely as FP32 does."""
    entry = ZOO[name]
    reference = make(name, tmp_path)
    if entry.needs_upstream and not upstream_ops_available():
        pytest.skip("needs vllm._C; test_refused has what happens without")
    with engine(tmp_path, **SETTINGS) as llm:
        check_path(llm, entry)
        compare(llm, reference, name)


@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if entry.needs_upstream])
def test_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``vllm._C`` the load ends with the first layer that needs it."""
    monkeypatch.setattr(recurrent, "upstream_ops_available", lambda: False)
    make(name, tmp_path)
    refusal = rf"layers\.\d+\.\w+: {ZOO[name].needs_upstream} layers: .*vllm\._C is not loaded"
    with pytest.raises(ValueError, match=refusal), engine(tmp_path, **SETTINGS):
        pass


def check_path(llm: LLM, entry: Entry) -> None:
    """Decoder layers, linears, experts and attention are where the entry says."""
    model = worker(llm).model_runner.get_model()
    (layers,) = (
        list(child) for child in model.modules() if isinstance(child, torch.nn.ModuleList) and layers_of(child)
    )
    assert len(layers) == model.config.num_hidden_layers
    in_lists = [layer for segment in decoder.segments(model) for layer in segment.layers]
    if entry.modules_because is None:
        assert in_lists == layers
    else:
        assert in_lists == []
        reasons = {str(decoder.misfit(layer, torch.bfloat16, Ranks())) for layer in layers}
        assert all(entry.modules_because in reason for reason in reasons), reasons
    for path, module in model.named_modules():
        # vLLM's latent attention wants one weight as it is.
        kept = "conv1d" in path or getattr(module, "_cpu_skip_gemm_dispatch", False)
        if isinstance(module, LinearBase) and not kept:
            assert isinstance(module.cpu_linear, PackedLinear), path
        if isinstance(module, Attention):
            assert type(module.impl) is ArmAttentionImpl, path
    nets = [
        module._vac_net for module in model.modules() if isinstance(module, recurrent.ArmQwenGatedDeltaNetAttention)
    ]
    assert bool(nets) == bool(entry.recurrent) and None not in nets
    experts = [module.cpu_linear for module in model.modules() if hasattr(module, "w2_weight")]
    assert {type(made) for made in experts} == ({DenseExperts} if entry.experts else set())


def layers_of(modules: torch.nn.ModuleList) -> bool:
    """Whether these are a model's decoder layers, not a layer's experts or projections."""
    return any(hasattr(module, "input_layernorm") for module in modules)


def compare(llm: LLM, reference: PreTrainedModel, name: str) -> None:
    """Logprobs of every token of the prompts and of what follows, and which tokens are chosen.

    What may differ: both round to BF16 what lies between their modules, at
    other places. The measure of that is the reference itself with the output
    of every module rounded; the engine must be as near to FP32 as that, up to
    a factor of 2 for a draw of the same distribution at another point.
    """
    params = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts()], params, use_tqdm=False)
    noisy = rounding_between_modules(reference)
    errors, noise, chosen, sure = [], [], [], []
    for prompt, output in zip(prompts(), outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert len(tokens) == NEW_TOKENS
        ids = prompt + tokens
        got = prompt_logprobs(output) + token_logprobs(output)
        exact, rounded = logprobs(reference, ids[:-1]), logprobs(noisy, ids[:-1])
        place = (torch.arange(len(ids) - 1), torch.tensor(ids[1:]))
        errors.append(torch.tensor(got) - exact[place])
        noise.append(rounded[place] - exact[place])
        assert 0.8 < float(exact.std(-1).mean()) < 5, "logits that are all alike, or far apart, compare nothing"
        best = exact[len(prompt) - 1 :].topk(2)
        chosen += (best.indices[:, 0] == torch.tensor(tokens)).tolist()
        sure += (best.values[:, 0] - best.values[:, 1]).tolist()
    engine_median, noise_median = (torch.cat(part).abs().median().item() for part in (errors, noise))
    # After another expert was taken nearly all is different: the nearest four fifths are judged.
    share = 0.8 if ZOO[name].experts else 1.0
    engine_rms, noise_rms = (root_mean_square(torch.cat(part), share) for part in (errors, noise))
    differing = [margin for same, margin in zip(chosen, sure, strict=True) if not same]
    print(
        f"{name}: logprobs are off FP32's by {engine_rms:.4f} rms, {engine_median:.4f} in the median; rounding alone "
        f"{noise_rms:.4f}, {noise_median:.4f}; {len(differing)} of {len(chosen)} tokens differ, FP32's leading by "
        f"{', '.join(f'{margin:.3f}' for margin in differing) or 'nothing'}"
    )
    assert engine_median < 2 * noise_median
    assert engine_rms < 2 * noise_rms
    assert noise_rms < 0.3
    # Where another token is chosen, FP32 was not sure: the difference of two logits that are each off by the bound
    # above is off by four times its square root of 2 once in 16000 draws.
    if not ZOO[name].experts:
        assert all(margin < 4 * math.sqrt(2) * 2 * noise_rms for margin in differing)
    assert len(differing) <= len(chosen) // 8


def root_mean_square(differences: torch.Tensor, share: float) -> float:
    """Of the smallest ``share`` of the differences."""
    kept = differences.abs().sort().values[: math.ceil(share * len(differences))]
    return kept.square().mean().sqrt().item()


def rounding_between_modules(model: PreTrainedModel) -> PreTrainedModel:
    """The model in FP32 whose modules give BF16 numbers."""

    def rounded(_module: Any, _inputs: Any, output: Any) -> Any:
        return output.bfloat16().float() if isinstance(output, torch.Tensor) and output.is_floating_point() else output

    noisy = copy.deepcopy(model)
    for module in noisy.modules():
        if module is not noisy:
            module.register_forward_hook(rounded)
    return noisy


@torch.no_grad()
def logprobs(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """FP32 [len(ids), vocab] of what follows each of the ids."""
    # oneDNN compiles a kernel for every shape, which takes longer under emulation than the products.
    with torch.backends.mkldnn.flags(enabled=False):
        return model(torch.tensor([ids])).logits[0].float().log_softmax(dim=-1)


@pytest.mark.parametrize("max_model_len", [64, 128])
def test_long_rotary_factors(max_model_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi's tables, the one for models as long as they were trained and the one for longer ones, as vLLM has them."""
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len))
    monkeypatch.setattr(phi3_long_rope_scaled_rope, "get_current_vllm_config", lambda: config)
    short, long = ([1 + slope * i for i in range(24)] for slope in (0.05, 0.5))
    made = phi3_long_rope_scaled_rope.Phi3LongRoPEScaledRotaryEmbedding(
        64, 48, 128, 64, 10000.0, True, torch.float32, short, long
    )
    assert type(made).forward is rotary.forward_long and rotary.not_native(made, torch.bfloat16) is None
    assert made.use_long_rope == (max_model_len == 128)
    positions = torch.tensor([0, 1, 17, max_model_len - 1])
    query, key = (torch.randn(4, heads * 64, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2))
    expected = rotary._upstream_forward_long(made, positions, query, key)
    got = made(positions, query.clone(), key.clone())
    for ours, upstreams in zip(got, expected, strict=True):
        assert torch.allclose(ours, upstreams, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "gpt-oss", "gemma3"])
def test_reference_is_what_it_should_be(name: str, tmp_path: Path) -> None:
    """The parts that these models are here for are there, and are not neutral."""
    model = make(name, tmp_path)
    parameters = dict(model.named_parameters())
    wanted = {
        "qwen2.5": "self_attn.q_proj.bias",
        "qwen3": "self_attn.q_norm.weight",
        "gpt-oss": "self_attn.sinks",
        "gemma3": "pre_feedforward_layernorm.weight",
    }[name]
    found = [parameter for path, parameter in parameters.items() if path.endswith(wanted)]
    assert len(found) == model.config.num_hidden_layers
    assert all(parameter.std() > 0.1 for parameter in found)
