"""vLLM's layers on our kernels: one file per layer, each with its own ``register()``."""

from __future__ import annotations


def register() -> None:
    """Replace vLLM's layer classes by ours; calling it again changes nothing."""
    from vllm_arm_cpu.layers import activation, embedding, moe, norm, recurrent, rotary

    for module in (activation, embedding, moe, norm, recurrent, rotary):
        module.register()
