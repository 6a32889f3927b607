"""vLLM's layers on our kernels: one file per layer, each with its own ``register()``."""

from __future__ import annotations


def register(with_states: bool = False) -> None:
    """Replace vLLM's layer classes by ours; calling it again changes nothing.

    Args:
        with_states: the model has recurrent layers, whose modules take a while to import.
    """
    from vllm_arm_cpu.layers import activation, embedding, experts, moe, norm, rotary

    for module in (activation, embedding, experts, moe, norm, rotary):
        module.register()
    if with_states:
        from vllm_arm_cpu.layers import recurrent

        recurrent.register()
