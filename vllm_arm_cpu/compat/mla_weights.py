"""Give latent attention the weight of a projection that is packed.

Behind the packing of all linear layers, vLLM's latent attention takes the
weight of ``kv_b_proj`` apart, through ``get_and_maybe_dequant_weights``, which
would find the empty parameter that packing leaves. Replaces that name in
``mla_attention``. Can go once vLLM asks the layer's method for its weight.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention import mla_attention

from vllm_arm_cpu.layers.linear_candidates import PackedLinear

_ORIGINAL = mla_attention.get_and_maybe_dequant_weights


def get_and_maybe_dequant_weights(layer: Any, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As vLLM's: the layer's weight [N, K] of ``out_dtype``; read back from its packed form where it has one."""
    base = getattr(layer, "base_layer", layer)
    packed = base.__dict__.get("cpu_linear")
    if isinstance(packed, PackedLinear) and base.weight.numel() == 0:
        return packed.embedding(torch.arange(packed.n)).to(out_dtype)
    result: torch.Tensor = _ORIGINAL(layer, out_dtype)
    return result


def apply() -> None:
    """Put our function in the place of vLLM's."""
    mla_attention.get_and_maybe_dequant_weights = get_and_maybe_dequant_weights
