"""Send unquantized linear layers to our packed kernels.

Replaces ``vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm``,
which linear and embedding layers call after their weights are loaded and which
knows upstream's kernels only. There is a registry for quantized linears but
none for these. Can go once vLLM lets a platform choose the unquantized linear
kernel.
"""

from __future__ import annotations

from vllm.model_executor.layers import utils

from vllm_arm_cpu.layers import linear

_ORIGINAL = utils.dispatch_cpu_unquantized_gemm


def apply() -> None:
    """Put our dispatch in the place of upstream's."""
    utils.dispatch_cpu_unquantized_gemm = linear.prepare_linear
    linear.upstream_dispatch = _ORIGINAL
