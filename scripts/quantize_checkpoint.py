#!/usr/bin/env python3
"""Writes quantized copies of a Llama-like checkpoint in the formats that are published on the Hugging Face hub.

    python3 scripts/quantize_checkpoint.py examples/tiny-llama /tmp/tiny-w4a8 --scheme w4a8-packed-group32

compressed-tensors checkpoints are written by that library's own compressors. GPTQ and AWQ ones are packed here, as
AutoGPTQ and AutoAWQ lay them out. Values are rounded to the nearest; the scale of a group is the one of a few that
gives the smallest squared error. Good for tests and trials, not a substitute for a quantizer that looks at data:
only static activation scales come from a text that is run through the model. Needs torch, safetensors and
compressed-tensors, static scales transformers, too; all are there where vLLM is installed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

IGNORED = ("lm_head",)
"""What stays in the checkpoint's dtype among the linear layers, as in published checkpoints."""

QUANTIZED = re.compile(r"^model\.layers\.\d+\.(?!.*mlp\.gate\.).*\.weight$")
"""Names of weights that are quantized if they are matrices: a router (``mlp.gate``) is not, nor what is no layer's."""

CLIPPED = tuple(1 - 0.05 * step for step in range(5))
"""Shares of a group's largest value that are tried as the end of the range of four-bit values."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column (of eight) that AutoAWQ's GEMM layout holds in each nibble of a word, from the lowest."""

CALIBRATION_TOKENS = 1024


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint is quantized.

    Attributes:
        method: ``compressed-tensors``, ``gptq`` or ``awq``.
        bits: of a weight: 4 or 8.
        group_size: values of K that share a scale; -1 for one scale for each output channel.
        symmetric: whether weights have no zero points.
        activations: ``none``, ``dynamic`` (one scale for each token) or ``static`` (one for all).
        activations_symmetric: whether activations have no zero points.
        packed: eight int4 values in an int32 (compressed-tensors' ``pack-quantized``), not one in an int8.
        desc_act: GPTQ's order of columns by activation: groups are scattered over K.
    """

    method: str
    bits: int
    group_size: int = -1
    symmetric: bool = True
    activations: str = "none"
    activations_symmetric: bool = True
    packed: bool = False
    desc_act: bool = False


def _schemes() -> dict[str, Scheme]:
    schemes = {
        "w8a8": Scheme("compressed-tensors", 8, activations="dynamic"),
        "w8a8-asymmetric": Scheme("compressed-tensors", 8, activations="dynamic", activations_symmetric=False),
        "w8a8-static": Scheme("compressed-tensors", 8, activations="static"),
        "w8a8-static-asymmetric": Scheme("compressed-tensors", 8, activations="static", activations_symmetric=False),
        "gptq-desc-act": Scheme("gptq", 4, 128, desc_act=True),
    }
    for suffix, size in (("channel", -1), ("group32", 32), ("group64", 64), ("group128", 128)):
        schemes[f"w4a8-{suffix}"] = Scheme("compressed-tensors", 4, size, activations="dynamic")
        schemes[f"w4a8-packed-{suffix}"] = Scheme("compressed-tensors", 4, size, activations="dynamic", packed=True)
        schemes[f"w4a16-{suffix}"] = Scheme("compressed-tensors", 4, size, packed=True)
        schemes[f"w4a16-asymmetric-{suffix}"] = Scheme("compressed-tensors", 4, size, symmetric=False, packed=True)
        schemes[f"gptq-{suffix}"] = Scheme("gptq", 4, size)
        schemes[f"gptq-asymmetric-{suffix}"] = Scheme("gptq", 4, size, symmetric=False)
        if size > 0:
            schemes[f"awq-{suffix}"] = Scheme("awq", 4, size, symmetric=False)
    return dict(sorted(schemes.items()))


SCHEMES = _schemes()
"""Name on the command line -> scheme."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="folder of the checkpoint (config.json, *.safetensors)")
    parser.add_argument("destination", type=Path, help="folder to write; made if it is not there")
    parser.add_argument("--scheme", required=True, choices=SCHEMES, metavar="SCHEME", help=", ".join(SCHEMES))
    parser.add_argument("--text", type=Path, help="text for static activation scales; the source's heldout.txt")
    args = parser.parse_args()
    text = args.text or args.source / "heldout.txt"
    quantize_checkpoint(args.source, args.destination, args.scheme, text.read_text() if text.is_file() else None)


def quantize_checkpoint(source: Path, destination: Path, scheme_name: str, text: str | None = None) -> Path:
    """Write ``source`` quantized by one of ``SCHEMES`` into ``destination``, and return that.

    Args:
        text: run through the model for static activation scales, its first ``CALIBRATION_TOKENS``; else not needed.

    Raises:
        ValueError: a weight that the group size does not divide, or static scales without a text.
    """
    scheme = SCHEMES[scheme_name]
    ranges: dict[str, tuple[float, float]] = {}
    if scheme.activations == "static":
        if not text:
            raise ValueError(f"{scheme_name} has static activation scales: they need a text to run through the model")
        ranges = activation_ranges(source, text)
    destination.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != "model.safetensors.index.json":
            shutil.copy(file, destination / file.name)
    # Published GPTQ and AWQ checkpoints are FP16.
    dtype = {"gptq": torch.float16, "awq": torch.float16}.get(scheme.method)
    index: dict[str, str] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in _tensors(file):
            if tensor.dim() == 2 and QUANTIZED.match(name):
                layer = name.removesuffix(".weight")
                parts = quantize_layer(layer, tensor, scheme, ranges.get(layer))
                tensors |= {f"{layer}.{part}": value.contiguous() for part, value in parts.items()}
            else:
                tensors[name] = tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
        save_file(tensors, destination / file.name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file.name)
    if len(set(index.values())) > 1:
        content = {"metadata": {}, "weight_map": dict(sorted(index.items()))}
        (destination / "model.safetensors.index.json").write_text(json.dumps(content, indent=1))
    _write_config(destination / "config.json", scheme, dtype)
    return destination


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118, not a dict
            yield name, tensors.get_tensor(name)


def quantize_layer(
    name: str, weight: torch.Tensor, scheme: Scheme, activation_range: tuple[float, float] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors that stand for one linear layer's weight [N, K] in the checkpoint.

    Raises:
        ValueError: the group size does not divide K.
    """
    k = weight.shape[1]
    if scheme.group_size > 0 and k % scheme.group_size != 0:
        raise ValueError(f"{name}: groups of {scheme.group_size} do not divide its {k} input features")
    dtype = torch.float16 if scheme.method in ("gptq", "awq") else weight.dtype
    scales, zeros = choose_scales(weight.float(), scheme, dtype)
    if scheme.method == "compressed-tensors":
        return _compressed_tensors(weight, scheme, scales, zeros, activation_range)
    order = torch.arange(k)
    if scheme.desc_act:
        # By data in truth: any order that scatters the groups does for a test.
        order = torch.randperm(k, generator=torch.Generator().manual_seed(0))
        scales, zeros = choose_scales(weight.float()[:, order], scheme, dtype)
    group = k if scheme.group_size < 0 else scheme.group_size
    groups = torch.empty(k, dtype=torch.int32)
    groups[order] = torch.arange(k, dtype=torch.int32) // group
    columns = groups.long()
    values = torch.round(weight.float() / scales[:, columns].float()) + zeros[:, columns] + 8
    values = values.clamp(0, 15).to(torch.int32)
    pack = pack_gptq if scheme.method == "gptq" else pack_awq
    return pack(values, scales, (zeros + 8).to(torch.int32), groups)


def choose_scales(weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [N, K / group] of ``dtype`` and int8; ``weight ~ (value - zero) * scale``, value signed.

    weight: FP32 [N, K].
    """
    n, k = weight.shape
    group = k if scheme.group_size < 0 else scheme.group_size
    blocks = weight.view(n, k // group, group)
    # Zero lies in the range: otherwise a group of one sign has no zero point of eight or four bits.
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    first, last = -(1 << (scheme.bits - 1)), (1 << (scheme.bits - 1)) - 1
    best_error = torch.full(low.shape, torch.inf)
    best_scale, best_zero = torch.ones(low.shape), torch.zeros(low.shape)
    for share in CLIPPED if scheme.bits == 4 else (1.0,):
        if scheme.symmetric:
            scale = torch.maximum(-low, high) * share / (last + 0.5)
        else:
            scale = (high - low) * share / (last - first)
        # What is stored is what values are rounded by. A group of zeros has any scale.
        scale = scale.to(dtype).float()
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        zero = torch.zeros_like(scale) if scheme.symmetric else (first - low * share / scale).round().clamp(first, last)
        values = (torch.round(blocks / scale[..., None]) + zero[..., None]).clamp(first, last)
        error = ((values - zero[..., None]) * scale[..., None] - blocks).square().sum(-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)
    return best_scale.to(dtype), best_zero.to(torch.int8)


def _compressed_tensors(
    weight: torch.Tensor,
    scheme: Scheme,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    activation_range: tuple[float, float] | None,
) -> dict[str, torch.Tensor]:
    from compressed_tensors.compressors import BaseCompressor

    group = next(iter(_compressed_tensors_config(scheme).config_groups.values()))
    compressor = BaseCompressor.get_value_from_registry(group.format)
    state = {"weight": weight.float(), "weight_scale": scales.float(), "weight_zero_point": zeros}
    parts = compressor.compress(state, group)
    parts["weight_scale"] = scales
    if scheme.activations == "static":
        assert activation_range is not None
        low, high = activation_range
        if scheme.activations_symmetric:
            scale = max(-low, high) / 127.5
        else:
            scale = (high - low) / 255
            parts["input_zero_point"] = torch.tensor([round(-128 - low / scale)]).clamp(-128, 127).to(torch.int8)
        parts["input_scale"] = torch.tensor([scale], dtype=scales.dtype)
    return parts


def pack_gptq(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor
) -> dict[str, torch.Tensor]:
    """AutoGPTQ's layout: values 0..15 int32 [N, K], eight neighbours along K in a word.

    scales, zeros [N, G]; groups int32 [K]. Zero points are stored less one, eight neighbours along N in a word; one is
    taken from the word as a whole, as GPTQModel does, so that a zero point of 0 borrows.
    """
    shifts = 4 * torch.arange(8)
    words = (values.t().reshape(-1, 8, values.shape[0]) << shifts[None, :, None]).sum(1)
    zero_words = ((zeros.t().reshape(zeros.shape[1], -1, 8) << shifts).sum(-1) - 0x11111111) & 0xFFFFFFFF
    return {"qweight": _int32(words), "qzeros": _int32(zero_words), "scales": scales.t(), "g_idx": groups}


def pack_awq(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor
) -> dict[str, torch.Tensor]:
    """AutoAWQ's GEMM layout: values 0..15 int32 [N, K], eight neighbours along N in a word, in ``AWQ_ORDER``.

    scales, zeros [N, G]; zero points as they are, packed as the values.
    """

    def words(matrix: torch.Tensor) -> torch.Tensor:
        eight = matrix.t().reshape(matrix.shape[1], -1, 8)[:, :, list(AWQ_ORDER)]
        return _int32((eight << 4 * torch.arange(8)).sum(-1))

    return {"qweight": words(values), "qzeros": words(zeros), "scales": scales.t()}


def _int32(words: torch.Tensor) -> torch.Tensor:
    """Words 0..2^32 - 1 of int64 as the int32 of the same bits."""
    return (words - ((words >> 31) << 32)).to(torch.int32)


@torch.no_grad()
def activation_ranges(source: Path, text: str) -> dict[str, tuple[float, float]]:
    """Smallest and largest input value of every linear layer while the model reads a text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ranges: dict[str, tuple[float, float]] = {}

    def watch(name: str) -> Any:
        def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            low, high = (float(value) for value in inputs[0].aminmax())
            old = ranges.get(name, (0.0, 0.0))
            ranges[name] = min(low, old[0]), max(high, old[1])

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(watch(name))
    tokens = AutoTokenizer.from_pretrained(source)(text)["input_ids"][:CALIBRATION_TOKENS]
    for window in torch.tensor(tokens).split(256):
        model(window[None])
    return ranges


def _compressed_tensors_config(scheme: Scheme) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    layout = "pack-quantized" if scheme.packed else "int-quantized"
    weights = QuantizationArgs(
        num_bits=scheme.bits,
        type="int",
        symmetric=scheme.symmetric,
        strategy="channel" if scheme.group_size < 0 else "group",
        group_size=None if scheme.group_size < 0 else scheme.group_size,
    )
    activations = None
    if scheme.activations != "none":
        dynamic = scheme.activations == "dynamic"
        activations = QuantizationArgs(
            num_bits=8,
            type="int",
            symmetric=scheme.activations_symmetric,
            strategy="token" if dynamic else "tensor",
            dynamic=dynamic,
        )
    group = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations, format=layout)
    return QuantizationConfig(
        config_groups={"group_0": group},
        format=layout,
        quantization_status="compressed",
        ignore=[*IGNORED, "re:.*mlp\\.gate$"],
    )


def _write_config(path: Path, scheme: Scheme, dtype: torch.dtype | None) -> None:
    if scheme.method == "compressed-tensors":
        from compressed_tensors.compressors import ModelCompressor

        ModelCompressor(quantization_config=_compressed_tensors_config(scheme)).update_config(str(path.parent))
        return
    config = json.loads(path.read_text())
    if scheme.method == "gptq":
        quantization = {
            "bits": scheme.bits,
            "group_size": scheme.group_size,
            "damp_percent": 0.01,
            "desc_act": scheme.desc_act,
            "static_groups": False,
            "sym": scheme.symmetric,
            "true_sequential": True,
            "checkpoint_format": "gptq",
            "quant_method": "gptq",
        }
        (path.parent / "quantize_config.json").write_text(json.dumps(quantization, indent=2))
    else:
        quantization = {
            "bits": scheme.bits,
            "group_size": scheme.group_size,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": not scheme.symmetric,
        }
    config |= {"dtype": str(dtype).removeprefix("torch."), "quantization_config": quantization}
    path.write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main()
