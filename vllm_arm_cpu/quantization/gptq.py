"""GPTQ checkpoints with zero points and with experts, which vLLM refuses: it has no kernels for them here, we do.

Everything else about GPTQ is vLLM's. The class is registered through vLLM's own
hook in the place of its configuration class, before a model's configuration is
read.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization import _CUSTOMIZED_METHOD_TO_QUANT_CONFIG, register_quantization_config
from vllm.model_executor.layers.quantization.auto_gptq import (
    AutoGPTQConfig,
    AutoGPTQLinearMethod,
    get_moe_quant_method,
)
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_linear_quant_method
from vllm.scalar_type import scalar_types

from vllm_arm_cpu.quantization import formats
from vllm_arm_cpu.quantization.moe_int4 import ArmGPTQMoEMethod
from vllm_arm_cpu.quantization.w4a8 import GPTQ_ZERO_POINTS

_NAMES = ("auto_gptq", "gptq", "gptq_marlin")
"""What vLLM calls the method: one class for all three."""


class ArmGPTQConfig(AutoGPTQConfig):
    """vLLM's configuration of GPTQ, less its restriction to symmetric weights."""

    TYPE_MAP = AutoGPTQConfig.TYPE_MAP | {(4, False): scalar_types.uint4}

    def __init__(
        self,
        weight_bits: int,
        group_size: int,
        desc_act: bool,
        is_sym: bool,
        lm_head_quantized: bool,
        dynamic: dict[str, dict[str, int | bool]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # vLLM's constructor refuses activation order, before it is known which layer has it.
        super().__init__(weight_bits, group_size, False, is_sym, lm_head_quantized, {}, *args, **kwargs)
        self.desc_act, self.dynamic = desc_act, dynamic

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Our methods for linear layers and experts, vLLM's for everything else.

        Raises:
            ValueError: a layer whose columns are in the order of activations; the message names it.
        """
        if isinstance(layer, RoutedExperts):
            method = get_moe_quant_method(self, layer, prefix, ArmGPTQMoEMethod)
        else:
            method = get_linear_quant_method(self, layer, prefix, ArmGPTQLinearMethod)
        if isinstance(method, (ArmGPTQLinearMethod, ArmGPTQMoEMethod)):
            # With the rules for this layer.
            config = method.quant_config
            if config.desc_act and config.group_size != -1:
                raise ValueError(
                    f"the layer {prefix} of the GPTQ checkpoint has desc_act=true with groups of "
                    f"{config.group_size}: its groups are scattered over the input features, which is not supported. "
                    "Use a checkpoint with desc_act=false, or quantize the model again with that; desc_act=true is "
                    "served where group_size is -1"
                )
        return method


@register_weight_loader_v2_supported_method
class ArmGPTQLinearMethod(AutoGPTQLinearMethod):
    """vLLM's method for GPTQ's linear layers, with zero points or without."""

    def __init__(self, quant_config: AutoGPTQConfig) -> None:
        # vLLM's constructor checks what a kernel for GPUs supports; here the kernel itself says what it does not take.
        LinearMethodBase.__init__(self)
        self.quant_config = quant_config
        self.quant_type = quant_config.quant_type
        self.input_dtype = None

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Register the parameters of the checkpoint."""
        super().create_weights(layer, *args, **kwargs)
        # The first version of the format stores zero points less one.
        second_version = self.quant_config.full_config.get("checkpoint_format") == "gptq_v2"
        setattr(layer, GPTQ_ZERO_POINTS, 0 if second_version else formats.GPTQ_ONE)


def register() -> None:
    """Put the configuration in the place of vLLM's; calling it again changes nothing."""
    for name in _NAMES:
        if name not in _CUSTOMIZED_METHOD_TO_QUANT_CONFIG:
            register_quantization_config(name)(ArmGPTQConfig)
