"""Linear layers inside the engine: each kernel gives the same tokens, weights can be replaced, graphs traced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from tests.integration.engine import MODEL, check_golden, engine, golden_prompts, greedy, score, worker
from vllm_arm_cpu.layers import linear as linear_layers
from vllm_arm_cpu.layers.linear import PackedLinear
from vllm_arm_cpu.platform import upstream_ops_available
from vllm_arm_cpu.worker import warmup

FEW = ("short-1", "medium")
"""Golden prompts for tests in which the tokens are not the point; steps are slow under emulation."""


def model_of(llm: Any) -> Any:
    return worker(llm).model_runner.get_model()


def kernels(llm: Any) -> dict[str, Any]:
    """Layer -> what multiplies by its weight."""
    return {name: module.cpu_linear for name, module in model_of(llm).named_modules() if hasattr(module, "cpu_linear")}


def copy_of(model: Path, directory: Path, change: Any) -> Path:
    """A checkpoint beside ``model``, its tensors put through ``change(name, tensor)``."""
    directory.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(model / "model.safetensors")
    save_file({name: change(name, tensor) for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def test_auto_measures_once_and_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(warmup.logger, "info", messages.append)
    environ = {"VAC_LINEAR": "auto", "VAC_CACHE_DIR": str(tmp_path / "tuning")}
    with engine(environ=environ) as llm:
        check_golden(llm, *FEW)
        first = {
            name: module.vac_choice[1] for name, module in model_of(llm).named_modules() if "vac_choice" in vars(module)
        }
    tables = [message for message in messages if message.startswith("linear layers")]
    assert len(tables) == 1
    assert "bfloat16 [256, 512]" in tables[0]
    assert ("not onednn: this vLLM's compiled operators" in tables[0]) != upstream_ops_available()
    assert {len(choice.times) for choice in first.values()} == ({2, 3} if upstream_ops_available() else {2})
    assert {choice.source for choice in first.values()} == {"measured"}
    entries = json.loads((tmp_path / "tuning" / "linear.json").read_text())["choices"]
    # QKV, gate and up, lm_head; output and down have one shape. Not one measurement per layer.
    assert len({key.rsplit(" | ", 1)[1] for key in entries}) == 4
    assert all("Neoverse V2" in key and "bf16_i8mm" in key and torch.__version__ in key for key in entries)

    linear_layers._tuner.cache_clear()  # as a new process
    with engine(environ=environ) as llm:
        second = {
            name: module.vac_choice[1] for name, module in model_of(llm).named_modules() if "vac_choice" in vars(module)
        }
        assert {choice.source for choice in second.values()} == {"cache"}
        assert {name: c.winner for name, c in second.items()} == {name: c.winner for name, c in first.items()}


@pytest.mark.parametrize("kernel", ["vac", "onednn", "torch"])
def test_forced(kernel: str) -> None:
    if kernel == "onednn" and not upstream_ops_available():
        pytest.skip("this vLLM's compiled operators (vllm._C) are not loaded")
    with engine(environ={"VAC_LINEAR": kernel}) as llm:
        expected = {"vac": "PackedLinear", "onednn": "OneDnnLinear", "torch": "builtin_function_or_method"}[kernel]
        assert {type(linear).__name__ for linear in kernels(llm).values()} == {expected}
        # Rows of a tied table are looked up: with oneDNN it stays beside the packed copy. All else is in memory once.
        kept = {name for name, parameter in model_of(llm).named_parameters() if parameter.ndim == 2}
        assert len(kept) == {"vac": 0, "onednn": 1, "torch": 17}[kernel]
        check_golden(llm)


def test_forced_kernel_that_is_not_there() -> None:
    message = r"VAC_LINEAR=onednn cannot run the linear layer model\..*vllm\._C"
    environ = {"VAC_LINEAR": "onednn", "VAC_BLOCK_UPSTREAM_OPS": "1"}
    with pytest.raises(ValueError, match=message), engine(environ=environ):
        pass


def test_tied_embeddings_share_one_copy() -> None:
    with engine(environ={"VAC_LINEAR": "vac"}) as llm:
        model = model_of(llm)
        assert model.lm_head.cpu_linear is model.model.embed_tokens.cpu_linear
        assert all(p.numel() == 0 for name, p in model.named_parameters() if "proj" in name or "embed" in name)
        table = load_file(MODEL / "model.safetensors")["model.embed_tokens.weight"]
        ids = torch.tensor([0, 2047, 5, 5, 1023])
        assert torch.equal(model.model.embed_tokens(ids), table[ids])

        # Logits are the kernel's FP32 sums.
        hidden = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        logits = model.compute_logits(hidden)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), hidden.double() @ table.double().T, rtol=2e-6, atol=2e-5)


class Doubled(UnquantizedLinearMethod):
    """As other packages derive theirs: it reads the weight."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        whole: torch.Tensor = super().apply(layer, x, bias)
        return whole + torch.nn.functional.linear(x, layer.weight, bias)


@pytest.mark.parametrize("method", [UnquantizedLinearMethod, Doubled])
def test_methods_of_others_find_the_weight(
    method: type[UnquantizedLinearMethod], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only layers that vLLM's own method multiplies are packed."""
    from vllm_arm_cpu import compat

    compat.apply()
    monkeypatch.setenv("VAC_LINEAR", "vac")
    weight, x = torch.randn(48, 64).to(torch.bfloat16), torch.randn(3, 64).to(torch.bfloat16)
    layer = torch.nn.Module()
    layer.prefix = "layer"
    with set_current_vllm_config(VllmConfig()):
        layer.quant_method = method()
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    layer.quant_method.process_weights_after_loading(layer)
    packed = method is UnquantizedLinearMethod
    assert isinstance(layer.cpu_linear, PackedLinear) == packed
    assert (layer.weight.numel() == 0) == packed
    exact = (x.double() @ weight.double().T) * (1 if packed else 2)
    torch.testing.assert_close(layer.quant_method.apply(layer, x).double(), exact, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_inputs(dtype: torch.dtype) -> None:
    """Strided, misaligned, empty and three-dimensional inputs against FP64; bias in the kernel."""
    generator = torch.Generator().manual_seed(0)
    n, k = 131, 67
    weight = torch.randn(n, 2 * k, generator=generator).to(dtype)[:, :k]
    bias = torch.randn(n, generator=generator).to(dtype)
    linear = PackedLinear(weight)
    unit = torch.finfo(dtype).eps / 2

    def check(x: torch.Tensor, out: torch.Tensor, unit: float) -> None:
        exact = x.double() @ weight.double().T + bias.double()
        bound = x.abs().double() @ weight.abs().double().T + bias.abs().double()
        assert out.shape == (*x.shape[:-1], n)
        assert ((out.double() - exact).abs() <= 2 * unit * exact.abs() + 2 * k * 2**-24 * bound).all()

    for m in (0, 1, 3, 17):
        x = torch.randn(m, 3 * k, generator=generator).to(dtype)
        for view in (x[:, 1 : k + 1], x[:, :k].contiguous(), x[:, ::3]):
            check(view, linear(view, None, bias), unit)
            logits = linear.logits(view, bias)
            assert logits.dtype == torch.float32
            check(view, logits, 2.0**-24)
    x = torch.randn(2, 3, k, generator=generator).to(dtype)
    check(x, linear(x, None, bias), unit)
    with pytest.raises(TypeError, match=r"\[131, 67\]"):
        linear(x.double(), None, bias)

    weight = torch.randn(n, k, generator=generator).to(dtype)
    linear.load(weight)
    check(x, linear(x, None, bias), unit)
    with pytest.raises(ValueError, match="cannot be replaced"):
        linear.load(weight[:, 1:])


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    """A random Llama with biases everywhere, untied, its sizes no multiples of a tile; and its FP32 reference."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=515,
        hidden_size=192,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.1)
    directory = tmp_path_factory.mktemp("biased")
    model = model.to(torch.bfloat16)
    model.save_pretrained(directory)
    return directory, model.float().eval()


@pytest.mark.parametrize("kernel", ["vac", "torch"])
def test_biases_and_untied_head(biased: tuple[Path, LlamaForCausalLM], kernel: str) -> None:
    directory, reference = biased
    prompt = list(range(3, 500, 11))
    with engine(directory, {"VAC_LINEAR": kernel}, skip_tokenizer_init=True) as llm:
        model = model_of(llm)
        if kernel == "vac":
            # The table is looked up as it was loaded; only lm_head is packed.
            assert model.model.embed_tokens.weight.shape == (576, 192)
            assert not isinstance(model.model.embed_tokens.cpu_linear, PackedLinear)
            assert isinstance(model.lm_head.cpu_linear, PackedLinear)
            assert model.lm_head.weight.numel() == 0
        got = score(llm, prompt)
    with torch.no_grad():
        exact = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = exact[range(len(prompt) - 1), prompt[1:]]
    assert (torch.tensor(got) - expected).abs().mean() < 0.03
    assert (torch.tensor(got) - expected).abs().max() < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["vac", "torch"])
def test_reload(tmp_path: Path, kernel: str) -> None:
    """Other weights are packed in place of the old ones, the tied lm_head's among them."""
    generator = torch.Generator().manual_seed(5)

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator) * (0.5 * tensor.float().std())
        return (tensor.float() + noise).to(tensor.dtype) if tensor.ndim == 2 else tensor

    other = copy_of(MODEL, tmp_path / "other", change)
    environ = {"VAC_LINEAR": kernel}
    with engine(other, environ) as llm:
        expected = greedy(llm, golden_prompts(*FEW), 12)
    with engine(environ=environ) as llm:
        before = kernels(llm)
        assert greedy(llm, golden_prompts(*FEW), 12) != expected
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        llm.reset_prefix_cache()
        assert greedy(llm, golden_prompts(*FEW), 12) == expected
        after = kernels(llm)
        assert all(after[name] is before[name] for name in before), "packed in place"

        original = load_file(MODEL / "model.safetensors")
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(original.items())})
        llm.reset_prefix_cache()
        check_golden(llm, *FEW)
        if kernel == "torch":
            return

        # What cannot work says so, and nothing is lost.
        with pytest.raises(ValueError, match=r"is_checkpoint_format=False.*packed"):
            llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": iter(original.items()), "is_checkpoint_format": False}
            )
        with pytest.raises(RuntimeError, match=r"the weight of .* is packed .*reload_weights"):
            llm.collective_rpc(lambda self: self.model_runner.get_model().load_weights(original.items()))
        llm.reset_prefix_cache()
        check_golden(llm, *FEW)


@pytest.mark.slow
def test_reload_of_a_head_that_is_tied_no_more(tmp_path: Path) -> None:
    """A layer that shared a packed weight gets its own when the new weights have one for it."""
    with engine(environ={"VAC_LINEAR": "vac"}) as llm:
        model = model_of(llm)
        shared = model.lm_head.cpu_linear
        head = torch.randn(2048, 256, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
        model.lm_head.weight = torch.nn.Parameter(head.clone(), requires_grad=False)
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
        assert model.model.embed_tokens.cpu_linear is shared
        assert model.lm_head.cpu_linear is not shared
        table = load_file(MODEL / "model.safetensors")["model.embed_tokens.weight"]
        ids = torch.arange(2048)
        assert torch.equal(model.model.embed_tokens(ids), table)
        assert torch.equal(model.lm_head.cpu_linear.embedding(ids), head)


@pytest.mark.slow
def test_traced_by_dynamo() -> None:
    """A compilation mode that the user asks for sees the packed linears as opaque operators."""
    config = {"mode": "DYNAMO_TRACE_ONCE", "backend": "eager"}
    with engine(environ={"VAC_LINEAR": "vac"}, compilation_config=config) as llm:
        assert llm.llm_engine.vllm_config.compilation_config.mode.name == "DYNAMO_TRACE_ONCE"
        check_golden(llm, *FEW)


@pytest.mark.slow
def test_fp32_head_of_a_bf16_model() -> None:
    """``head_dtype`` of float32 is what the kernel gives anyway."""
    with engine(environ={"VAC_LINEAR": "vac"}, hf_overrides={"head_dtype": "float32"}) as llm:
        assert model_of(llm).logits_processor.head_dtype == torch.float32
        check_golden(llm, *FEW)
