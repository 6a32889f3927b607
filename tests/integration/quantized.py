"""Quantized copies of the embedded checkpoint, made on the spot, and what their tensors mean by formula."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny-llama"

CALIBRATION_CHARACTERS = 3000
"""Length of the text, from the end of the held-out one, that static activation scales are taken from."""


@functools.cache
def script() -> ModuleType:
    """scripts/quantize_checkpoint.py, which is no package's."""
    spec = importlib.util.spec_from_file_location("quantize_checkpoint", ROOT / "scripts" / "quantize_checkpoint.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look themselves up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def make(scheme: str, directory: Path, source: Path = MODEL) -> Path:
    """A copy of ``source`` quantized by a scheme of the script."""
    text = (MODEL / "heldout.txt").read_text()[-CALIBRATION_CHARACTERS:]
    return Path(script().quantize_checkpoint(source, directory, scheme, text))


def layers(directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Quantized layer -> its tensors in the checkpoint by their last name."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        layer, _, part = name.rpartition(".")
        found.setdefault(layer, {})[part] = tensor
    return {layer: parts for layer, parts in found.items() if {"weight_scale", "scales"} & set(parts)}


def dequantized(directory: Path) -> dict[str, np.ndarray]:
    """Quantized layer -> weight FP64 [N, K], see ``dequantize``."""
    method = json.loads((directory / "config.json").read_text())["quantization_config"]["quant_method"]
    return {layer: dequantize(method, parts) for layer, parts in layers(directory).items()}


def dequantize(method: str, parts: dict[str, torch.Tensor]) -> np.ndarray:
    """A layer's weight FP64 [N, K], value by value as the documents of the format have it.

    method: ``compressed-tensors``, ``gptq`` or ``awq``.
    """
    return {"compressed-tensors": _compressed_tensors, "gptq": _gptq, "awq": _awq}[method](parts)


def nibbles(words: np.ndarray) -> np.ndarray:
    """The eight values of each int32, the lowest first: [..., 8]."""
    return (words.view(np.uint32)[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).astype(np.int64)


def _compressed_tensors(parts: dict[str, torch.Tensor]) -> np.ndarray:
    scales = parts["weight_scale"].double().numpy()
    zeros = np.zeros_like(scales)
    if "weight_packed" in parts:
        n, k = parts["weight_shape"].tolist()
        values = nibbles(parts["weight_packed"].numpy()).reshape(n, k) - 8
        if "weight_zero_point" in parts:
            zeros = np.moveaxis(nibbles(parts["weight_zero_point"].numpy()), -1, 1).reshape(scales.shape) - 8
    else:
        values = parts["weight"].numpy().astype(np.int64)
    repeat = values.shape[1] // scales.shape[1]
    return (values - zeros.repeat(repeat, 1)) * scales.repeat(repeat, 1)


def _gptq(parts: dict[str, torch.Tensor]) -> np.ndarray:
    words = parts["qweight"].numpy()
    k, n = words.shape[0] * 8, words.shape[1]
    values = np.moveaxis(nibbles(words), -1, 1).reshape(k, n)
    # As a whole the word is stored less one in each nibble.
    zeros = nibbles(parts["qzeros"].numpy().view(np.uint32) + np.uint32(0x11111111)).reshape(-1, n)
    groups = parts["g_idx"].numpy()
    return ((values - zeros[groups]) * parts["scales"].double().numpy()[groups]).T


def _awq(parts: dict[str, torch.Tensor]) -> np.ndarray:
    def columns(words: torch.Tensor) -> np.ndarray:
        # Nibble i of a word is column 0, 2, 4, 6, 1, 3, 5, 7 of its eight.
        return nibbles(words.numpy())[..., [0, 4, 1, 5, 2, 6, 3, 7]].reshape(words.shape[0], -1)

    values, zeros = columns(parts["qweight"]), columns(parts["qzeros"])
    repeat = len(values) // len(zeros)
    return ((values - zeros.repeat(repeat, 0)) * parts["scales"].double().numpy().repeat(repeat, 0)).T
