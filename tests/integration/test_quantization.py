"""Quantized checkpoints in the engine: on our kernels, as exact as their format is; what cannot be is refused.

The reference is Hugging Face transformers in FP32 with the weights that the
format's formula gives, and activations rounded as the scheme says.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2Config
from vllm import LLM, SamplingParams
from vllm.model_executor import parameter
from vllm.model_executor.kernels import linear as vllm_kernels
from vllm.platforms import PlatformEnum

from tests.integration.checkpoints import SIZES, random_model, save
from tests.integration.engine import GOLDEN, MODEL, ROOT, check_golden, engine, golden_prompts, greedy, score, worker
from tests.integration.quantized import dequantized, layers, make
from tests.integration.test_decoder import compare_ways
from tests.integration.test_linear import copy_of
from vllm_arm_cpu import quantization
from vllm_arm_cpu.compat import int4_parameters
from vllm_arm_cpu.layers import decoder
from vllm_arm_cpu.platform import upstream_ops_available
from vllm_arm_cpu.quantization import formats, packed
from vllm_arm_cpu.quantization.w4a8 import ArmInt4LinearKernel, Int4Linear, Int4Weight, KleidiAILinear
from vllm_arm_cpu.quantization.w8a8 import Activations, ArmInt8LinearKernel, Int8Head, Int8Linear, round_weight
from vllm_arm_cpu.worker import warmup

MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
OURS, KLEIDIAI, W4A16 = {"VAC_INT4_KERNEL": "vac"}, {"VAC_INT4_KERNEL": "kleidiai"}, {"VAC_INT4": "w4a16"}
MIB = 1 << 20
SHORT, LONG = 192, GOLDEN["perplexity"]["window"]
"""Tokens that a perplexity is taken of: a hundred take several seconds under emulation."""

# Scheme, environment, class of the linear layers, how activations are rounded, what the perplexity may be above BF16's.
CASES = [
    ("w8a8", {}, Int8Linear, "symmetric", 0.02),
    ("w8a8-static-asymmetric", {}, Int8Linear, "static", 0.04),
    ("w4a8-group32", OURS, Int4Linear, "symmetric", 0.08),
    ("w4a8-packed-group128", KLEIDIAI, KleidiAILinear, "asymmetric", 0.15),
    ("w4a16-asymmetric-group64", W4A16, Int4Linear, "none", 0.10),
    ("gptq-asymmetric-group128", {}, Int4Linear, "symmetric", 0.15),
    ("awq-group128", {}, Int4Linear, "symmetric", 0.15),
]
MORE_CASES = [
    ("w8a8-asymmetric", {}, Int8Linear, "asymmetric", 0.02),
    ("w8a8-static", {}, Int8Linear, "static", 0.04),
    ("w4a8-channel", OURS, Int4Linear, "symmetric", 0.30),
    ("w4a8-channel", KLEIDIAI, KleidiAILinear, "asymmetric", 0.30),
    ("w4a8-group64", OURS, Int4Linear, "symmetric", 0.12),
    ("w4a8-group128", OURS, Int4Linear, "symmetric", 0.15),
    ("w4a8-packed-group32", OURS, Int4Linear, "symmetric", 0.08),
    ("w4a8-packed-channel", OURS, Int4Linear, "symmetric", 0.30),
    ("w4a16-group32", W4A16, Int4Linear, "none", 0.08),
    ("w4a16-channel", OURS, Int4Linear, "symmetric", 0.30),
    ("w4a16-asymmetric-channel", {}, Int4Linear, "symmetric", 0.30),
    ("gptq-group32", OURS, Int4Linear, "symmetric", 0.08),
    ("gptq-channel", OURS, Int4Linear, "symmetric", 0.30),
    ("gptq-asymmetric-channel", W4A16, Int4Linear, "none", 0.30),
    ("awq-group32", W4A16, Int4Linear, "none", 0.08),
]


def model_of(llm: LLM) -> Any:
    return worker(llm).model_runner.get_model()


def linears(llm: LLM) -> dict[str, Any]:
    """Layer -> what multiplies by its weight, for the layers between embedding and lm_head."""
    found = {name: module.cpu_linear for name, module in model_of(llm).named_modules() if hasattr(module, "cpu_linear")}
    return {name: made for name, made in found.items() if name.endswith("_proj")}


@functools.cache
def text(tokens: int) -> list[int]:
    """The beginning of the held-out text behind one BOS."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer((MODEL / "heldout.txt").read_text(), add_special_tokens=False)["input_ids"]
    return [tokenizer.bos_token_id, *ids[: tokens - 1]]


def perplexity(llm: LLM, tokens: int) -> float:
    """Of the held-out text's beginning, which is prefilled in pieces."""
    found = score(llm, text(tokens))
    return math.exp(-sum(found) / len(found))


@functools.cache
def bf16_perplexity(tokens: int) -> float:
    """What the BF16 checkpoint has in this engine."""
    with small_engine(MODEL) as llm:
        return perplexity(llm, tokens)


def small_engine(model: Path, environ: dict[str, str] | None = None, **arguments: Any) -> Any:
    settings = {"max_num_batched_tokens": 96, "max_model_len": LONG + 1, "dtype": "bfloat16"}
    return engine(model, environ, **(settings | arguments))


class Reference:
    """Transformers in FP32 with a quantized checkpoint's weights.

    Args:
        rounding: of activations, see ``rounded``.
        model: what the checkpoint was made of, changed here; None for the embedded one.
    """

    def __init__(self, directory: Path, rounding: str, model: Any = None) -> None:
        self.model = model or AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        parts = layers(directory)
        for layer, weight in dequantized(directory).items():
            module = self.model.get_submodule(layer)
            module.weight.data.copy_(torch.from_numpy(weight))
            module.register_forward_pre_hook(functools.partial(_round_inputs, rounding, parts[layer]))

    @torch.no_grad()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Of what follows each token: FP32 [len(tokens), vocabulary]."""
        logits: torch.Tensor = self.model(torch.tensor([tokens])).logits[0]
        return logits.log_softmax(-1)

    def perplexity(self, tokens: int) -> float:
        found = self.logprobs(text(tokens)[:-1])[range(tokens - 1), text(tokens)[1:]]
        return math.exp(-float(found.mean()))


def _round_inputs(
    rounding: str, parts: dict[str, torch.Tensor], module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    return rounded(inputs[0], rounding, parts)


def rounded(x: torch.Tensor, rounding: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """Activations as they are rounded: ``none``, ``symmetric`` or ``asymmetric`` per token, or ``static``.

    parts: a layer's tensors in the checkpoint, its static scale among them.
    """
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    if rounding == "none":
        return x
    if rounding == "static":
        scale, zero = parts["input_scale"].float(), parts.get("input_zero_point", torch.zeros(1)).float()
    elif rounding == "symmetric":
        scale, zero = torch.maximum(-low, high) / 127, torch.zeros(1)
    else:
        scale = (high - low) / 255
        zero = -128 - (low / scale).round()
    return ((x / scale + zero).round().clamp(-128, 127) - zero) * scale


def check_layers(llm: LLM, directory: Path, kind: type, rounding: str, blocks: int = 4) -> None:
    """Every linear layer is of our class, holds its weight only there, and computes what the formula says."""
    made = linears(llm)
    assert len(made) == 4 * blocks
    assert {type(linear) for linear in made.values()} == {kind}
    assert not [name for name, p in model_of(llm).named_parameters() if "_proj." in name and p.numel() > 2]
    weights, parts = dequantized(directory), layers(directory)
    for name, linear in made.items():
        block, _, last = name.rpartition(".")
        originals = [f"{block}.{part}" for part in MERGED.get(last, (last,))]
        weight = torch.from_numpy(np.concatenate([weights[part] for part in originals]))
        x = torch.randn(20, linear.k, generator=torch.Generator().manual_seed(linear.n))
        expected = rounded(x, rounding, parts[originals[0]]).double() @ weight.T
        error = linear.run(x, None, torch.float32) - expected
        # Values in the middle go either way; vLLM rounds GPTQ's and AWQ's FP16 scales to the model's BF16.
        assert error.square().mean() < 1e-5 * expected.square().mean(), name


@pytest.mark.parametrize("scheme,environ,kind,rounding,allowed", CASES)
def test_scheme(
    scheme: str,
    environ: dict[str, str],
    kind: type,
    rounding: str,
    allowed: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each layer is exact, the text is hardly less likely than in BF16, and tokens come one by one, by native lists."""
    plain = bf16_perplexity(SHORT)
    directory = make(scheme, tmp_path / scheme)
    prompt = golden_prompts("short-1")[0]
    tables = capture_tables(monkeypatch)
    with small_engine(directory, environ) as llm:
        assert tables[-1] == NATIVE
        check_layers(llm, directory, kind, rounding)
        check_native_steps(llm, kind, rounding)
        got = perplexity(llm, SHORT)
        print(f"{scheme} {environ}: perplexity of {SHORT} tokens {got:.3f}, BF16 {plain:.3f} ({got / plain - 1:+.2%})")
        assert got < (1 + allowed) * plain
        (tokens,) = greedy(llm, [prompt], 8)
    likely = Reference(directory, rounding).logprobs([*prompt, *tokens])[len(prompt) - 1 : -1]
    behind = likely.amax(-1) - likely[range(len(tokens)), tokens]
    assert behind.max() < 0.25, "a token that the reference finds unlikely was chosen"


@pytest.mark.parametrize(
    "name,environ,rounding",
    [("w4a8", OURS, "symmetric"), ("w4a16", W4A16, "none"), ("w4a16-asymmetric", {}, "symmetric")],
)
def test_llmcompressor(name: str, environ: dict[str, str], rounding: str) -> None:
    """Checkpoints that LLM Compressor wrote (its script is in scripts/) are what their format's formula says."""
    directory = ROOT / "tests" / "data" / "llmcompressor" / name
    config = AutoConfig.from_pretrained(directory)
    assert config.quantization_config.pop("quant_method") == "compressed-tensors"
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plain = {
        key: value.float() for key, value in load_file(directory / "model.safetensors").items() if "_proj" not in key
    }
    assert not model.load_state_dict(plain, strict=False).unexpected_keys
    prompt = torch.randint(2, 128, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    with small_engine(directory, environ, skip_tokenizer_init=True, max_model_len=128) as llm:
        check_layers(llm, directory, Int4Linear, rounding, blocks=1)
        got = score(llm, prompt)
    expected = Reference(directory, rounding, model).logprobs(prompt)[range(63), prompt[1:]]
    difference = (torch.tensor(got) - expected).abs()
    print(
        f"{name}: logprobs differ by {float(difference.mean()):.4f} on average, {float(difference.max()):.4f} at most"
    )
    # BF16 between the layers: a few times 2^-9 of logits of a few units. Where activations are rounded to 8 bits, it
    # moves one of them by a whole step now and then.
    assert difference.max() < 0.1 and difference.mean() < (0.02 if rounding == "none" else 0.03)


def check_native_steps(llm: LLM, kind: type, rounding: str) -> None:
    """The model is one native call, and its layers give the bits of their modules: prefill in pieces, decode, both."""
    runner = worker(llm).model_runner
    (segment,) = decoder.segments(model_of(llm))
    assert len(segment.layers) == 4
    plain = runner.plain
    assert plain.split_because is None
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(2, 2048, (n,), generator=generator).tolist() for n in (5, 110)]
    llm.reset_prefix_cache()
    expected = greedy(llm, prompts, 3)
    llm.reset_prefix_cache()
    steps = compare_ways(segment)
    runner.plain = None
    try:
        assert greedy(llm, prompts, 3) == expected
    finally:
        runner.plain = plain
        del segment.run
    # The second prompt's rest beside a token of the first one.
    assert steps[0] == 96 and 1 < steps[1] < 96 and steps[-1] <= 2
    # Norms and the activation hand INT8 rows over, attention's output has an op of its own; so have all four inputs of
    # the W4A8 layers. The activation is in two parts.
    ops = {Int8Linear: 10 + 1 + 1, Int4Linear: 10 if rounding == "none" else 10 + 4, KleidiAILinear: 10 + 4}[kind]
    assert {tuple(step.lengths) for step in segment.steps.values()} == {(ops,) * 4}


def capture_tables(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said of models that are loaded from now on."""
    tables: list[str] = []
    monkeypatch.setattr(warmup.logger, "info", tables.append)
    return tables


NATIVE = "decoder layers: 4 of 4 as native op lists, 1 call a step"


@pytest.mark.slow
@pytest.mark.parametrize("scheme,environ,kind,rounding,allowed", CASES + MORE_CASES)
def test_perplexity(
    scheme: str, environ: dict[str, str], kind: type, rounding: str, allowed: float, tmp_path: Path
) -> None:
    """The figures of docs/quantization.md: as perplexed as the reference of the same scheme, which rounds alike."""
    plain = bf16_perplexity(LONG)
    directory = make(scheme, tmp_path / scheme)
    with small_engine(directory, environ) as llm:
        check_layers(llm, directory, kind, rounding)
        check_native_steps(llm, kind, rounding)
        got = perplexity(llm, LONG)
    exact = Reference(directory, rounding).perplexity(LONG)
    setting = " ".join(f"{name}={value}" for name, value in environ.items())
    print(f"\n| {scheme} | {setting} | {got:.3f} | {got / plain - 1:+.2%} | {exact:.3f} |  BF16 {plain:.3f}")
    assert got == pytest.approx(exact, rel=0.015)
    assert got < (1 + allowed) * plain


def test_int8_beside_upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own INT8 layers, which truncate activations, are farther from the reference than ours, which round."""
    if not upstream_ops_available():
        pytest.skip("this vLLM's compiled operators (vllm._C) are not loaded")
    directory = make("w8a8", tmp_path / "w8a8")
    reference = Reference(directory, "symmetric")
    prompt = text(64)
    expected = reference.logprobs(prompt)[:-1]

    def distance(llm: LLM) -> float:
        """Of the logprobs of the prompt's tokens, root mean square."""
        got = score(llm, prompt)
        return float((torch.tensor(got) - expected[range(len(got)), prompt[1:]]).square().mean().sqrt())

    with small_engine(directory) as llm:
        assert {type(module.scheme.kernel) for module in quantized(llm)} == {ArmInt8LinearKernel}
        ours = distance(llm)
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "ArmInt8LinearKernel")
    with small_engine(directory) as llm:
        assert {type(module.scheme.kernel).__name__ for module in quantized(llm)} == {"CPUInt8ScaledMMLinearKernel"}
        theirs = distance(llm)
    print(f"w8a8: logprobs differ from the FP32 reference's by {ours:.4f} with ours, {theirs:.4f} with upstream's")
    assert ours < theirs


def quantized(llm: LLM) -> list[Any]:
    """The layers that have a scheme of compressed-tensors."""
    return [module for module in model_of(llm).modules() if getattr(module, "scheme", None) is not None]


def test_head_in_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm_head is rounded when it is loaded; the table that it is tied to stays for lookups, and logits are FP32."""
    plain = bf16_perplexity(SHORT)
    with small_engine(MODEL, {"VAC_LM_HEAD": "int8"}) as llm:
        model = model_of(llm)
        table = load_file(MODEL / "model.safetensors")["model.embed_tokens.weight"]
        head = model.lm_head.cpu_linear
        assert isinstance(head, Int8Head)
        assert torch.equal(model.model.embed_tokens.weight, table)
        assert torch.equal(model.model.embed_tokens(torch.tensor([5, 0, 2047])), table[[5, 0, 2047]])
        hidden = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        logits = model.compute_logits(hidden)
        values, scales = round_weight(table)
        inputs = rounded(hidden.float(), "symmetric", {}).double()
        expected = inputs @ (values.double() * scales[:, None].double()).T
        assert logits.dtype == torch.float32
        assert (logits - expected).square().mean() < 1e-5 * expected.square().mean()
        got = perplexity(llm, SHORT)
        print(f"VAC_LM_HEAD=int8: perplexity of {SHORT} tokens {got:.3f}, BF16 {plain:.3f} ({got / plain - 1:+.2%})")
        assert got < 1.02 * plain
        check_golden(llm, "short-1", max_tokens=16)
        # The head is the last op of the model's list; the modules give the same logits.
        runner = worker(llm).model_runner
        assert runner.plain.split_because is None
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in golden_prompts("short-1", "medium")]
        results = []
        for way in (runner.plain, None):
            monkeypatch.setattr(runner, "plain", way)
            llm.reset_prefix_cache()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            results.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
        assert results[0] == results[1]


@pytest.mark.parametrize(
    "scheme,environ", [("w8a8-static-asymmetric", {}), pytest.param("w4a8-group32", OURS, marks=pytest.mark.slow)]
)
def test_native_steps_with_biases(scheme: str, environ: dict[str, str], tmp_path: Path) -> None:
    """Biases of quantized QKV layers, and a head in INT8 that is not tied: every step has the bits of the modules."""
    source = save(random_model(Qwen2Config(**(SIZES | {"vocab_size": 2048}))), tmp_path / "plain")
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (MODEL / file).exists():
            shutil.copy(MODEL / file, source / file)
    directory = make(scheme, tmp_path / "quantized", source)
    with small_engine(directory, environ | {"VAC_LM_HEAD": "int8"}, max_model_len=192) as llm:
        model = model_of(llm)
        layer = model.model.layers[0].self_attn.qkv_proj
        assert layer.bias is not None and isinstance(layer.cpu_linear, (Int8Linear, Int4Linear))
        assert isinstance(model.lm_head.cpu_linear, Int8Head)
        runner = worker(llm).model_runner
        assert runner.plain.split_because is None
        prompts = [[7, 8, 9], list(range(2, 112))]
        expected = greedy(llm, prompts, 3)
        (segment,) = decoder.segments(model)
        steps = compare_ways(segment)
        runner.plain = None
        llm.reset_prefix_cache()
        assert greedy(llm, prompts, 3) == expected
        assert max(steps) == 96 and min(steps) <= 2


@pytest.mark.slow
def test_head_in_int8_that_is_not_tied(tmp_path: Path) -> None:
    """The original is released, and a reload rounds the new weight."""
    heads = [torch.randn(2048, 256, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16) for i in range(2)]
    directories = []
    for i, head in enumerate(heads):
        directory = copy_of(MODEL, tmp_path / str(i), lambda name, tensor: tensor)
        tensors = load_file(directory / "model.safetensors") | {"lm_head.weight": head}
        save_file(tensors, directory / "model.safetensors")
        config = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": False}
        (directory / "config.json").write_text(json.dumps(config))
        directories.append(directory)
    hidden = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    with small_engine(directories[0], {"VAC_LM_HEAD": "int8"}) as llm:
        model = model_of(llm)
        made = model.lm_head.cpu_linear
        assert isinstance(made, Int8Head) and model.lm_head.weight.numel() == 0
        for i in (0, 1):
            if i == 1:
                llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directories[1])})
            expected = hidden.double() @ heads[i].double().T
            error = model.compute_logits(hidden) - expected
            assert error.square().mean() < 2e-4 * expected.square().mean()
        assert model.lm_head.cpu_linear is made


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-static", "w4a8-group32", "w4a16-asymmetric-group32", "awq-group64"])
def test_reload(scheme: str, tmp_path: Path) -> None:
    """Other quantized weights are packed in place of the old ones."""
    generator = torch.Generator().manual_seed(5)

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator) * (0.5 * tensor.float().std())
        return (tensor.float() + noise).to(tensor.dtype) if tensor.ndim == 2 else tensor

    first = make(scheme, tmp_path / "first")
    second = make(scheme, tmp_path / "second", copy_of(MODEL, tmp_path / "changed", change))
    prompts = golden_prompts("short-1")
    with small_engine(second, OURS) as llm:
        expected = greedy(llm, prompts, 12)
    with small_engine(first, OURS) as llm:
        before = linears(llm)
        assert greedy(llm, prompts, 12) != expected
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
        llm.reset_prefix_cache()
        assert greedy(llm, prompts, 12) == expected
        after = linears(llm)
        assert all(after[name] is before[name] for name in before), "packed in place"
        with pytest.raises(ValueError, match=r"is_checkpoint_format=False.*packed"):
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter([]), "is_checkpoint_format": False})


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a8-group128", "awq-group128", "gptq-group128"])
def test_int4_weights_are_in_memory_once(scheme: str, tmp_path: Path) -> None:
    """Loading takes the packed model and about a layer, also where a checkpoint has a value in a byte."""
    hidden, intermediate, vocabulary, blocks, group = 2048, 8192, 2048, 4, 128
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": vocabulary}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": blocks}
    shapes = {"mlp.gate_proj": (intermediate, hidden), "mlp.up_proj": (intermediate, hidden)}
    shapes |= {"mlp.down_proj": (hidden, intermediate), "self_attn.o_proj": (hidden, hidden)}
    shapes |= {f"self_attn.{part}_proj": (width, hidden) for part, width in (("q", hidden), ("k", 512), ("v", 512))}
    dtype = torch.bfloat16 if scheme.startswith("w4a8") else torch.float16
    ones = torch.ones(hidden, dtype=dtype)
    tensors = {"model.embed_tokens.weight": torch.zeros(vocabulary, hidden, dtype=dtype), "model.norm.weight": ones}
    generator = torch.Generator().manual_seed(0)
    for block in range(blocks):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{block}.{name}.weight"] = ones.clone()
        for name, (n, k) in shapes.items():
            parts = random_int4(scheme, n, k, group, generator)
            tensors |= {f"model.layers.{block}.{name}.{part}": tensor for part, tensor in parts.items()}
    directory = tmp_path / "model"
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    template = json.loads((make(scheme, tmp_path / "small") / "config.json").read_text())
    config |= {"quantization_config": template["quantization_config"], "dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config))

    command = [sys.executable, "-m", "tests.integration.load_memory", str(directory)]
    environ = os.environ | {"VAC_LINEAR": "vac", "VAC_INT4_KERNEL": "vac"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    got = json.loads(done.stdout.splitlines()[-1])
    # FP32 scales where they are FP16 in the checkpoint; zero points are bytes.
    scale = 2 if scheme.startswith("w4a8") else 4
    per_group = group / 2 + scale + (scheme.startswith("awq"))
    packed_bytes = sum(n * k / group * per_group for n, k in shapes.values()) * blocks + 2 * vocabulary * hidden
    layer = 2 * intermediate * hidden / group * per_group
    peak, after = got["peak_anonymous"] - got["before_anonymous"], got["after"] - got["before"]
    stored = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    print(
        f"{scheme}: checkpoint {stored / MIB:.0f} MiB, packed {packed_bytes / MIB:.0f}, its largest layer "
        f"{layer / MIB:.0f}; peak +{peak / MIB:.0f}, after loading +{after / MIB:.0f}"
    )
    assert after > 0.9 * packed_bytes
    assert after < packed_bytes + 32 * MIB
    # A layer as it was, and where its words have to be turned, once more.
    assert peak < packed_bytes + 2 * layer + 32 * MIB


def random_int4(scheme: str, n: int, k: int, group: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The tensors of one layer with values of no meaning."""

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator, dtype=torch.int64).to(torch.int32)

    groups = k // group
    if scheme.startswith("w4a8"):
        values = torch.randint(-8, 8, (n, k), generator=generator, dtype=torch.int8)
        return {"weight": values, "weight_scale": torch.full((n, groups), 1e-3, dtype=torch.bfloat16)}
    parts = {"scales": torch.full((groups, n), 1e-3, dtype=torch.float16), "qzeros": words(groups, n // 8)}
    if scheme.startswith("awq"):
        return parts | {"qweight": words(k, n // 8)}
    return parts | {"qweight": words(k // 8, n), "g_idx": (torch.arange(k) // group).to(torch.int32)}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8-group32"])
def test_traced_by_dynamo(scheme: str, tmp_path: Path) -> None:
    """A compilation mode that the user asks for sees the layers as opaque operators."""
    directory = make(scheme, tmp_path / scheme)
    prompts = golden_prompts("short-1")
    with small_engine(directory, OURS) as llm:
        expected = greedy(llm, prompts, 8)
    config = {"mode": "DYNAMO_TRACE_ONCE", "backend": "eager"}
    with small_engine(directory, OURS, compilation_config=config) as llm:
        assert llm.llm_engine.vllm_config.compilation_config.mode.name == "DYNAMO_TRACE_ONCE"
        assert greedy(llm, prompts, 8) == expected


def some_linear(name: str, n: int, k: int) -> tuple[Any, torch.Tensor]:
    """A layer of a class, with the weight FP64 [N, K] that it stands for."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-8, 8, (n, k), generator=generator, dtype=torch.int8)
    scales = (torch.rand(n, k // 32, generator=generator) + 0.5).to(torch.bfloat16)
    zero_points = torch.randint(-8, 8, (n, k // 32), generator=generator, dtype=torch.int8)
    wide = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8)
    per_row = torch.rand(n, generator=generator) + 0.5
    repeated = scales.double().repeat_interleave(32, 1)
    plain, shifted = values.double(), values.double() - zero_points.double().repeat_interleave(32, 1)
    if name == "int8":
        return Int8Linear(wide, per_row, Activations(), name), wide.double() * per_row.double()[:, None]
    if name == "w4a8":
        return Int4Linear(Int4Weight(values, scales, zero_points, k, 32), name, True), shifted * repeated
    weight = Int4Weight(values, scales, None, k, 32)
    linear = KleidiAILinear(weight, name) if name == "kleidiai" else Int4Linear(weight, name, False)
    return linear, plain * repeated


@pytest.mark.parametrize("name", ["int8", "w4a8", "w4a16", "kleidiai"])
def test_inputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strided, empty and three-dimensional inputs of each type, in blocks of rows; bias; traced; what is refused."""
    monkeypatch.setattr(packed, "MAX_ROWS", 8)
    n, k = 72, 96
    linear, weight = some_linear(name, n, k)
    generator = torch.Generator().manual_seed(1)
    bias = None if name == "kleidiai" else torch.randn(n, generator=generator)
    exact_bias = torch.zeros(n) if bias is None else bias

    def check(x: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        assert out.shape == (*x.shape[:-1], n) and out.dtype == dtype
        rounding = {"w4a16": "none", "kleidiai": "asymmetric"}.get(name, "symmetric")
        exact = rounded(x.float(), rounding, {}).double() @ weight.T + exact_bias.double()
        error = out - exact
        assert error.square().sum() <= (1e-5 + torch.finfo(dtype).eps ** 2) * exact.square().sum()

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for m in (0, 1, 2, 3, 8, 21):
            x = torch.randn(m, 2 * k, generator=generator).to(dtype)
            for view in (x[:, 1 : k + 1], x[:, :k].contiguous(), x[:, ::2]):
                check(view, linear(view, None, bias), dtype)
            check(x[:, :k], linear.logits(x[:, :k], bias), torch.float32)
        x = torch.randn(2, 5, k, generator=generator).to(dtype)
        check(x, linear(x, None, bias), dtype)
    torch._dynamo.reset()
    traced = torch.compile(lambda x: linear(x, None, bias), backend="eager", fullgraph=True)
    assert torch.equal(traced(x), linear(x, None, bias))
    assert linear(torch.zeros(1, k), None, bias).equal(exact_bias[None])
    with pytest.raises(TypeError, match=r"float64; .*\[72, 96\]"):
        linear(torch.zeros(1, k, dtype=torch.float64), None, None)
    if name == "kleidiai":
        with pytest.raises(ValueError, match="take no bias"):
            linear(x, None, torch.zeros(n))


def test_int8_activations() -> None:
    """Static scales with a zero point and dynamic ones; another shape or scale is refused."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (24, 80), generator=generator, dtype=torch.int8)
    x = torch.randn(7, 80, generator=generator)
    parts = {"input_scale": torch.tensor(0.02), "input_zero_point": torch.tensor(-35, dtype=torch.int8)}
    for activations, rounding in [
        (Activations(False, 0.02, -35), "static"),
        (Activations(False), "asymmetric"),
        (Activations(True), "symmetric"),
    ]:
        linear = Int8Linear(values, torch.tensor([0.25]), activations, "x")
        expected = rounded(x, rounding, parts).double() @ (0.25 * values.double()).T
        assert (linear(x, None) - expected).square().mean() < 1e-5 * expected.square().mean()
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"static scale of activations is .* not a positive number"):
            linear.load(values, torch.ones(24), Activations(True, scale))
    with pytest.raises(ValueError, match=r"\[24, 80\] cannot be replaced by \[24, 79\]"):
        linear.load(values[:, 1:], torch.ones(24), Activations())


@pytest.mark.parametrize("rank", [0, 1])
def test_int4_parameter_is_split_by_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two ranks takes its rows, its columns, and its part of merged layers, two values to a byte."""
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 2)
    values = torch.randint(-8, 8, (32, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int8)

    def made(n: int, k: int) -> int4_parameters.NibbleParameter:
        data = torch.zeros((n, k // 2), dtype=torch.uint8)
        dims = {"input_dim": 1, "output_dim": 0, "packed_dim": 1, "packed_factor": 2}
        return int4_parameters.NibbleParameter(data=data, weight_loader=None, **dims)

    def check(param: torch.Tensor, mine: torch.Tensor) -> None:
        assert torch.equal(param.data, formats.nibbles_of_int8(mine.contiguous()))

    by_rows = made(16, 64)
    by_rows.load_column_parallel_weight(values)
    check(by_rows, values[16 * rank : 16 * rank + 16])
    by_columns = made(32, 32)
    by_columns.load_row_parallel_weight(values)
    check(by_columns, values[:, 32 * rank : 32 * rank + 32])
    merged = made(32, 64)
    for shard in (0, 1):
        merged.load_merged_column_weight(values, shard_id=shard, shard_offset=16 * shard, shard_size=16)
    check(merged, values[16 * rank : 16 * rank + 16].repeat(2, 1))
    qkv = made(16 + 8 + 8, 64)
    for shard, offset, size in (("q", 0, 16), ("k", 16, 8), ("v", 24, 8)):
        source = values if shard == "q" else values[:16]
        qkv.load_qkv_weight(source, shard_id=shard, shard_offset=offset, shard_size=size, num_heads=1)
    mine = values[8 * rank : 8 * rank + 8]
    check(qkv, torch.cat([values[16 * rank : 16 * rank + 16], mine, mine]))


def test_kernels_are_in_front() -> None:
    """Once each, however often they are registered, and nothing behind them that fails at the first token."""
    for _ in range(2):
        quantization.register()
    int8 = vllm_kernels._POSSIBLE_INT8_KERNELS[PlatformEnum.CPU]
    int4 = vllm_kernels._POSSIBLE_KERNELS[PlatformEnum.CPU]
    assert int8[0] is ArmInt8LinearKernel and int8.count(ArmInt8LinearKernel) == 1
    assert int4[0] is ArmInt4LinearKernel and int4.count(ArmInt4LinearKernel) == 1
    assert "CPUWNA16LinearKernel" not in [kernel.__name__ for kernel in int4]


def config_only(directory: Path, **quantization: Any) -> Path:
    """The embedded model's configuration with a quantization: whoever gets as far as reading weights says so."""
    directory.mkdir()
    config = json.loads((MODEL / "config.json").read_text()) | {"quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False}


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"desc_act": True}, r"layer model\.layers\.0\.self_attn\.qkv_proj .* desc_act=true with groups of 128.* Use"),
        (
            {"dynamic": {r"+:.*\.1\..*down_proj": {"desc_act": True, "group_size": 64}}},
            r"layer model\.layers\.1\.mlp\.down_proj .* desc_act=true with groups of 64",
        ),
        ({"bits": 3}, r"bits=3, sym=True"),
        ({"bits": 8}, r"weights are uint8b128, not of 4 bits"),
        ({"group_size": 16}, r"groups of 16 are no multiple of 32 up to 2048"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Before a weight is read, with the setting's name and value."""
    directory = config_only(tmp_path / "model", **(GPTQ | changes))
    with pytest.raises(ValueError, match=message), engine(directory, skip_tokenizer_init=True):
        pass


def test_forced_kernel_that_does_not_take_a_layer(tmp_path: Path) -> None:
    directory = make("w4a16-asymmetric-group32", tmp_path / "model")
    message = r"VAC_INT4_KERNEL=kleidiai cannot run the linear layer model\.layers\.0\..*int4 group 32 zero points"
    with pytest.raises(ValueError, match=message), engine(directory, KLEIDIAI):
        pass
