"""AWQ checkpoints with experts, for which vLLM has no kernel on Arm; everything else about AWQ is vLLM's.

Registered through vLLM's own hook in the place of its configuration class,
before a model's configuration is read.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization import _CUSTOMIZED_METHOD_TO_QUANT_CONFIG, register_quantization_config
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from vllm_arm_cpu.quantization.moe_int4 import ArmAWQMoEMethod

_NAMES = ("awq", "auto_awq", "awq_marlin")
"""What vLLM calls the method: one class for all three."""


class ArmAWQConfig(AutoAWQConfig):
    """vLLM's configuration of AWQ, with our experts."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Our method for experts, vLLM's for everything else."""
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        if is_layer_skipped(prefix, self.modules_to_not_convert, match_mode="substring"):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        return ArmAWQMoEMethod(self, layer.moe_config)


def register() -> None:
    """Put the configuration in the place of vLLM's; calling it again changes nothing."""
    for name in _NAMES:
        if name not in _CUSTOMIZED_METHOD_TO_QUANT_CONFIG:
            register_quantization_config(name)(ArmAWQConfig)
