"""Turn AWQ's words of eight columns into words of eight k without eight times the layer's memory.

Replaces ``_convert_awq_to_standard_format`` of vLLM's AWQ, which is called for
each layer before its kernel is and expands a layer to int32 values, twice.
Ours hands on the layout of compressed-tensors, which every kernel for the CPU
takes, too. Can go once vLLM hands the layer to the kernel as it was loaded, or
converts it in pieces.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.quantization import auto_awq
from vllm.model_executor.parameter import PackedvLLMParameter

from vllm_arm_cpu.layers import linear
from vllm_arm_cpu.quantization import formats


def convert(layer: torch.nn.Module, w_q_name: str, w_zp_name: str | None, size_bits: int) -> None:
    """Replace the layer's weight int32 [K, N / 8] by [N, K / 8], its zero points [G, N / 8] by [N / 8, G].

    Raises:
        ValueError: weights that are not of four bits.
    """
    name = getattr(layer, "prefix", "") or type(layer).__name__
    if size_bits != 4:
        raise ValueError(f"the AWQ layer {name} has weights of {size_bits} bits; only 4 are supported")
    for parameter_name, packed_dim in ((w_q_name, 1), (w_zp_name, 0)):
        if parameter_name is None:
            continue
        old = getattr(layer, parameter_name)
        reorder = formats.awq_along_k if parameter_name == w_q_name else formats.awq_along_n
        new = PackedvLLMParameter(
            data=reorder(old.data),
            input_dim=1,
            output_dim=0,
            packed_dim=packed_dim,
            packed_factor=8,
            weight_loader=old.weight_loader,
        )
        linear.release(old, name)
        setattr(layer, parameter_name, new)


def apply() -> None:
    """Put ours in the place of vLLM's."""
    auto_awq._convert_awq_to_standard_format = convert
