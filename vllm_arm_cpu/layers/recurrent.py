"""Recurrent layers, such as gated delta nets and Mamba's: no kernels of ours, vLLM's are in ``vllm._C``.

With it they run as vLLM wrote them, and say so once; without it they end the
load before a weight is read, with their name.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import OlmoHybridGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from vllm_arm_cpu.platform import upstream_ops_available

logger = init_logger("vllm.arm_cpu.recurrent")

_LAYERS: dict[type[PluggableLayer], str] = {
    QwenGatedDeltaNetAttention: "gated delta net",
    OlmoHybridGatedDeltaNetAttention: "gated delta net",
    MambaMixer: "Mamba",
    MambaMixer2: "Mamba 2",
}


def _guarded(cls: type[PluggableLayer], kind: str) -> type[PluggableLayer]:
    """The class with a look for its kernels in front of everything else."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if not upstream_ops_available():
            raise ValueError(
                f"{kwargs.get('prefix') or cls.__name__}: {kind} layers have no kernel of this package, and vLLM's "
                "own are not there (vllm._C is not loaded): install vLLM's build for CPUs"
            )
        logger.warning_once("%s layers fall back to vLLM's own CPU kernels: none of this package", kind)
        cls.__init__(self, *args, **kwargs)

    return type(f"Arm{cls.__name__}", (cls,), {"__init__": __init__, "__module__": __name__, "__doc__": cls.__doc__})


def register() -> None:
    """Put the classes in the place of vLLM's."""
    for cls, kind in _LAYERS.items():
        if cls.__name__ not in op_registry_oot:
            PluggableLayer.register_oot(_guarded(cls, kind), name=cls.__name__)
