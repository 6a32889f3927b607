"""Send quantized experts to our kernels.

Replaces the classes that vLLM makes for W8A8, W4A8 and W4A16 experts and for
gpt-oss's MXFP4 experts. It chooses among kernels of its own inside them,
without a list that a platform could add to. Can go once there is one, as for
linear layers.
"""

from __future__ import annotations

from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a8_int8 as w4a8,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_int8 as w8a8,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as wna16,
)

from vllm_arm_cpu.layers.moe import ArmGptOssMxfp4MoEMethod
from vllm_arm_cpu.quantization import moe, moe_int4


def apply() -> None:
    """Put our classes in the place of vLLM's, which are imported when a layer is made."""
    w8a8.CompressedTensorsW8A8Int8MoEMethod = moe.ArmW8A8MoEMethod
    w4a8.CompressedTensorsW4A8Int8MoEMethod = moe_int4.ArmW4A8MoEMethod
    wna16.CompressedTensorsWNA16MoEMethod = moe_int4.ArmWNA16MoEMethod
    mxfp4.GptOssMxfp4MoEMethod = ArmGptOssMxfp4MoEMethod
