"""Hold int4 weights as int4 from the moment they are read.

compressed-tensors' W4A8 checkpoints store a value in a byte. vLLM keeps them so
until the layers are packed, one after the other behind the last tensor of the
checkpoint: twice the packed model in memory. Replaces the class of the scheme
by one whose parameter takes two values into a byte while it is loaded, and
which registers it under one name, not two. Can go once vLLM packs a layer when
its tensors are complete.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A8Int
from vllm.model_executor.parameter import PackedvLLMParameter

from vllm_arm_cpu.quantization import formats
from vllm_arm_cpu.quantization.w4a8 import ArmInt4LinearKernel


class NibbleParameter(PackedvLLMParameter):
    """uint8 [N, K / 2], loaded from int8 [N, K] of -8..7: 0..15, even k in the low nibble."""

    def load_column_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        """As vLLM calls it for a layer that is split by columns."""
        super().load_column_parallel_weight(formats.nibbles_of_int8(loaded_weight))

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        """As vLLM calls it for a layer that is split by rows."""
        super().load_row_parallel_weight(formats.nibbles_of_int8(loaded_weight))

    def load_merged_column_weight(self, loaded_weight: torch.Tensor, **kwargs: Any) -> None:
        """As vLLM calls it for a part of a merged layer."""
        super().load_merged_column_weight(formats.nibbles_of_int8(loaded_weight), **kwargs)

    def load_qkv_weight(self, loaded_weight: torch.Tensor, **kwargs: Any) -> None:
        """As vLLM calls it for q, k or v."""
        super().load_qkv_weight(formats.nibbles_of_int8(loaded_weight), **kwargs)


class ArmW4A8Int(CompressedTensorsW4A8Int):
    """vLLM's scheme with a weight of half the size, if our kernel takes the layer."""

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Register the parameters of the checkpoint."""
        super().create_weights(layer, *args, **kwargs)
        wide = layer.weight
        # Other layers copy what is in the checkpoint without asking the parameter.
        asks = isinstance(layer, (ColumnParallelLinear, RowParallelLinear))
        if not asks or not isinstance(self.kernel, ArmInt4LinearKernel) or wide.shape[1] % 2 != 0:
            return
        narrow = NibbleParameter(
            data=torch.empty((wide.shape[0], wide.shape[1] // 2), dtype=torch.uint8),
            input_dim=1,
            output_dim=0,
            packed_dim=1,
            packed_factor=2,
            weight_loader=wide.weight_loader,
        )
        del layer.weight_packed
        layer.register_parameter("weight", narrow)


def apply() -> None:
    """Put our scheme in the place of vLLM's."""
    compressed_tensors.CompressedTensorsW4A8Int = ArmW4A8Int
