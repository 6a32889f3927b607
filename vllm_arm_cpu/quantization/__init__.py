"""Layers with integer weights on our kernels: W8A8 in ``w8a8.py``, 4-bit weights in ``w4a8.py``.

vLLM keeps lists of kernels for quantized linear layers and takes the first that
can run a layer; ours go in front. Formats that vLLM refuses, or converts
wastefully, come through ``gptq.py``, ``awq.py`` and ``compat/awq_layout.py``.
"""

from __future__ import annotations


def register() -> None:
    """Put our kernels in front of vLLM's for the CPU; calling it again changes nothing."""
    from vllm_arm_cpu.quantization import w4a8, w8a8

    for module in (w8a8, w4a8):
        module.register()


def register_configs() -> None:
    """Register the quantization methods that vLLM asks for while it reads a model's configuration."""
    from vllm_arm_cpu.quantization import awq, gptq

    for module in (gptq, awq):
        module.register()
