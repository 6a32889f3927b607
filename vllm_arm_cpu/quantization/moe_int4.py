"""Experts of checkpoints with 4-bit weights: compressed-tensors, GPTQ and AWQ, repacked for our grouped kernels.

The classes load what vLLM's classes of the same formats load, an expert's
tensors by their names in the checkpoint, and then turn one expert after the
other into our layout.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQMoEMethod
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a8_int8 as upstream_w4a8,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as upstream_wna16,
)

from vllm_arm_cpu.layers.experts import Experts
from vllm_arm_cpu.native import library
from vllm_arm_cpu.quantization import formats
from vllm_arm_cpu.quantization.moe import ArmMoEMethod, Int4Experts


class _ArmInt4MoEMethod(ArmMoEMethod):
    """What the formats share.

    Attributes:
        group_size: of input columns with one scale; -1 for all.
        zero_points: whether weights have some.
    """

    group_size = -1
    zero_points = False

    def _check_int4(self, layer_name: str, bits: int) -> None:
        """Say what is not supported before weights are read."""
        self._check(self.moe, layer_name)
        sizes = (self.moe.hidden_dim, self.moe.intermediate_size_per_partition)
        most = library.load().VAC_INT4_MAX_GROUP
        reason = None
        if bits != 4:
            reason = f"weights are of {bits} bits, not of 4"
        elif self.group_size != -1 and (self.group_size % 32 != 0 or not 0 < self.group_size <= most):
            reason = f"groups of {self.group_size} are no multiple of 32 up to {most}"
        elif self.group_size != -1 and any(k % self.group_size != 0 for k in sizes):
            reason = f"groups of {self.group_size} do not divide {sizes[0]} and {sizes[1]} input features"
        elif any(size % 8 != 0 for size in sizes):
            reason = f"sizes of {sizes[0]} and {sizes[1]} are no multiples of 8"
        if reason is not None:
            raise ValueError(f"the int4 experts of {layer_name}: {reason}")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the weights, release the parameters; or pack again what a reload brought."""
        group = 0 if self.group_size == -1 else self.group_size
        scale_dtype = getattr(layer, f"w13_{self.PARTS[1]}").dtype

        def make(num_experts: int, hidden: int, intermediate: int, biases: Any) -> Experts:
            return Int4Experts(num_experts, hidden, intermediate, group, scale_dtype, biases, self.zero_points)

        kind = f"int4 {f'group {group}' if group else 'channel'}{' zero points' if self.zero_points else ''}"
        self._pack(layer, make, kind)


class ArmWNA16MoEMethod(_ArmInt4MoEMethod, upstream_wna16.CompressedTensorsWNA16MoEMethod):
    """Experts of compressed-tensors' ``pack-quantized``: eight values in a word along K."""

    PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")

    def __init__(self, weight_quant: Any, input_quant: Any, moe: FusedMoEConfig, layer_name: str | None = None) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        self.weight_quant, self.input_quant = weight_quant, input_quant
        self.symmetric, self.num_bits, self.strategy = (
            weight_quant.symmetric,
            weight_quant.num_bits,
            weight_quant.strategy,
        )
        self.zero_points = not self.symmetric
        self.packed_factor = Fraction(32, self.num_bits)
        self.group_size = -1 if weight_quant.group_size is None else weight_quant.group_size

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Register the parameters of the checkpoint."""
        self._check_int4(layer.layer_name, self.num_bits)
        super().create_weights(layer, *args, **kwargs)

    def _weight(self, layer: torch.nn.Module, name: str, expert: int) -> tuple[torch.Tensor | None, ...]:
        words, scales = (getattr(layer, f"{name}_{part}").data[expert] for part in self.PARTS[:2])
        zero_points = None
        if self.zero_points:
            zero_points = formats.zero_points(getattr(layer, f"{name}_weight_zero_point").data[expert], n_dim=0)
        return formats.nibbles_along_k(words, k_dim=1), scales, zero_points


class ArmW4A8MoEMethod(_ArmInt4MoEMethod, upstream_w4a8.CompressedTensorsW4A8Int8MoEMethod):
    """Experts of compressed-tensors' W4A8: int4 held in a byte, or packed."""

    def __init__(self, weight_quant: Any, input_quant: Any, moe: FusedMoEConfig, layer_name: str | None = None) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        self.weight_quant, self.input_quant, self.static_input_scales = weight_quant, input_quant, False
        self.has_bias = moe.has_bias
        self.group_size = -1 if weight_quant.group_size is None else weight_quant.group_size
        self._packed: ArmWNA16MoEMethod | None = None

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Register the parameters of the checkpoint."""
        self._check_int4(layer.layer_name, self.weight_quant.num_bits)
        scheme = layer.quant_config.get_scheme_dict(layer, f"{layer.layer_name}.0.{layer.ckpt_down_proj_name}")
        # vLLM does not look at the format, and would find no tensor of these names in such a checkpoint.
        if scheme is not None and scheme.get("format") == "pack-quantized":
            self._packed = ArmWNA16MoEMethod(self.weight_quant, self.input_quant, self.moe)
            self._packed.create_weights(layer, *args, **kwargs)
        else:
            super().create_weights(layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the weights, release the parameters; or pack again what a reload brought."""
        if self._packed is not None:
            self._packed.process_weights_after_loading(layer)
        else:
            super().process_weights_after_loading(layer)


class ArmGPTQMoEMethod(_ArmInt4MoEMethod, AutoGPTQMoEMethod):
    """Experts of GPTQ: eight values in a word along K, [K, N], with zero points or without."""

    PARTS = ("qweight", "scales", "qzeros")

    def __init__(self, quant_config: Any, moe: FusedMoEConfig) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        self.quant_config, self.input_dtype = quant_config, None
        self.group_size, self.zero_points = quant_config.group_size, not quant_config.is_sym
        # The first version of the format stores zero points less one.
        second_version = quant_config.full_config.get("checkpoint_format") == "gptq_v2"
        self._add = 0 if second_version else formats.GPTQ_ONE

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Register the parameters of the checkpoint."""
        self._check_int4(layer.layer_name, self.quant_config.weight_bits)
        super().create_weights(layer, *args, **kwargs)

    def _weight(self, layer: torch.nn.Module, name: str, expert: int) -> tuple[torch.Tensor | None, ...]:
        words, scales, zeros = (getattr(layer, f"{name}_{part}").data[expert] for part in self.PARTS)
        zero_points = formats.zero_points(zeros, n_dim=1, add=self._add) if self.zero_points else None
        return formats.nibbles_along_k(words, k_dim=0), scales.t(), zero_points

    def _biases(self, layer: torch.nn.Module) -> tuple[torch.Tensor | None, ...]:
        # vLLM makes them for every model, in case the checkpoint has some.
        biases = zip(("w13_bias", "w2_bias"), super()._biases(layer), strict=True)
        return tuple(bias if name in layer._loaded_expert_biases else None for name, bias in biases)


class ArmAWQMoEMethod(_ArmInt4MoEMethod, AutoAWQMoEMethod):
    """Experts of AWQ: eight values in a word along N, [K, N]."""

    PARTS = ("qweight", "scales", "qzeros")

    def __init__(self, quant_config: Any, moe: FusedMoEConfig) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        self.quant_config, self.input_dtype = quant_config, None
        self.group_size, self.zero_points = quant_config.group_size, quant_config.zero_point

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Register the parameters of the checkpoint."""
        if self.group_size == -1:
            raise ValueError(f"the int4 experts of {layer.layer_name}: AWQ with one scale per row is not supported")
        self._check_int4(layer.layer_name, self.quant_config.weight_bits)
        super().create_weights(layer, *args, **kwargs)

    def _weight(self, layer: torch.nn.Module, name: str, expert: int) -> tuple[torch.Tensor | None, ...]:
        words, scales, zeros = (getattr(layer, f"{name}_{part}").data[expert] for part in self.PARTS)
        values = formats.nibbles_along_k(formats.awq_along_k(words), k_dim=1)
        zero_points = formats.zero_points(formats.awq_along_n(zeros), n_dim=0) if self.zero_points else None
        return values, scales.t(), zero_points
