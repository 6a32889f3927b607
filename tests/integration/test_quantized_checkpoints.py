"""What scripts/quantize_checkpoint.py writes is of the published formats, and a good copy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.integration.quantized import MODEL, dequantize, dequantized, layers, make, script

SCHEMES = script().SCHEMES
ERROR = {-1: 0.02, 128: 0.013, 64: 0.011, 32: 0.0085}
"""Squared error of four-bit weights over their sum of squares that is allowed, by group size; normal weights."""


def weight(n: int = 64, k: int = 256) -> torch.Tensor:
    """Normal, BF16; with groups whose values are all positive, all negative, or 0."""
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    values[0].abs_()
    values[1] = -values[1].abs()
    values[2] = 0
    return values


@pytest.mark.parametrize("name", SCHEMES)
def test_layer(name: str) -> None:
    """By formula, a weight is as close to the original as bits and groups allow; the format's library agrees."""
    scheme, original = SCHEMES[name], weight()
    parts = script().quantize_layer("proj", original, scheme, (-1.5, 3.0))
    values = dequantize(scheme.method, parts)
    allowed = 5e-5 if scheme.bits == 8 else ERROR[scheme.group_size]
    error = values - original.double().numpy()
    assert np.square(error).sum() < allowed * np.square(original.double().numpy()).sum()
    assert not values[2].any()

    if scheme.method == "compressed-tensors":
        config = script()._compressed_tensors_config(scheme)
        decompress = BaseCompressor.get_value_from_registry(config.format).decompress
        exact = parts | {"weight_scale": parts["weight_scale"].double()}
        assert np.array_equal(decompress(exact, config.config_groups["group_0"])["weight"].numpy(), values)
    elif scheme.method == "awq":
        converter = AutoAWQConverter(group_size=scheme.group_size)
        converted = converter.process({f"proj.{part}": tensor for part, tensor in parts.items()})
        exact = {part.removeprefix("proj."): tensor for part, tensor in converted.items()}
        exact["weight_scale"] = exact["weight_scale"].double()
        group = converter.create_config().config_groups["config_group_0"]
        decompress = BaseCompressor.get_value_from_registry("pack-quantized").decompress
        assert np.array_equal(decompress(exact, group)["weight"].numpy(), values)
    else:
        # Symmetric: the zero point is 8, stored as 7.
        assert not scheme.symmetric or set(parts["qzeros"].unique().tolist()) == {0x77777777}
        groups = np.arange(256) // (256 if scheme.group_size < 0 else scheme.group_size)
        assert np.array_equal(parts["g_idx"].numpy(), groups) != scheme.desc_act


def test_static_activations() -> None:
    low, high = -1.5, 3.0
    symmetric = script().quantize_layer("proj", weight(), SCHEMES["w8a8-static"], (low, high))
    assert float(symmetric["input_scale"]) == pytest.approx(high / 127.5, rel=2**-8)
    assert "input_zero_point" not in symmetric
    other = script().quantize_layer("proj", weight(), SCHEMES["w8a8-static-asymmetric"], (low, high))
    scale, zero = float(other["input_scale"]), int(other["input_zero_point"])
    assert scale == pytest.approx((high - low) / 255, rel=2**-8)
    assert (-128 - zero) * scale == pytest.approx(low, abs=scale)
    assert (127 - zero) * scale == pytest.approx(high, abs=scale)


@pytest.mark.parametrize("name", ["w8a8-static-asymmetric", "w4a16-asymmetric-group32"])
def test_transformers_reads_them(name: str, tmp_path: Path) -> None:
    """Through Hugging Face transformers, which asks compressed-tensors; as a user would check a checkpoint."""
    directory = make(name, tmp_path / name)
    content = json.loads((directory / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(content)
    assert content["quant_method"] == "compressed-tensors" and config.ignore[0] == "lm_head"
    assert config.format == ("pack-quantized" if SCHEMES[name].packed else "int-quantized")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    weights = dequantized(directory)
    assert len(weights) == 4 * 7
    ids = torch.arange(5, 400, 7)[None]
    with torch.no_grad():
        got = model(ids).logits[0].double()
        for layer, values in weights.items():
            plain.get_submodule(layer).weight.copy_(torch.from_numpy(values))
        expected = plain(ids).logits[0].double()
    # The library rounds activations, too, where the scheme says so.
    allowed = 1e-8 if SCHEMES[name].activations == "none" else 5e-3
    assert (got - expected).square().mean() < allowed * expected.square().mean()


def test_gptq_checkpoint(tmp_path: Path) -> None:
    directory = make("gptq-group128", tmp_path / "gptq")
    config = json.loads((directory / "config.json").read_text())
    assert config["dtype"] == "float16"
    wanted = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
    assert wanted.items() <= config["quantization_config"].items()
    original = load_file(MODEL / "model.safetensors")
    tensors = load_file(directory / "model.safetensors")
    assert {name for name in original if "proj" not in name} == {name for name in tensors if "proj" not in name}
    assert all(set(parts) == {"qweight", "qzeros", "scales", "g_idx"} for parts in layers(directory).values())
    for layer, values in dequantized(directory).items():
        expected = original[f"{layer}.weight"].double().numpy()
        assert np.square(values - expected).sum() < 0.02 * np.square(expected).sum(), layer


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"proj: groups of 32 do not divide its 48 input features"):
        script().quantize_layer("proj", weight(8, 48), SCHEMES["w4a16-group32"])
    with pytest.raises(ValueError, match=r"w8a8-static has static activation scales: they need a text"):
        script().quantize_checkpoint(MODEL, tmp_path / "x", "w8a8-static")
