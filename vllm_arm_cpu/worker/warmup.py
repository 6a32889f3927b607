"""What is done once between loading the weights and the first request."""

from __future__ import annotations

import torch
from vllm.logger import init_logger

from vllm_arm_cpu.layers import linear

logger = init_logger("vllm.arm_cpu.warmup")


def after_load(model: torch.nn.Module) -> None:
    """Say which kernels serve the model's linear layers; each was chosen when its weight was packed."""
    summary = linear.summary(model)
    if summary is not None:
        logger.info(summary)


def refuse_unpacked_reload(model: torch.nn.Module) -> None:
    """End a reload that would copy into parameters that are packed and released.

    Raises:
        ValueError: the model has such layers.
    """
    packed = linear.released(model)
    if packed:
        raise ValueError(
            f"reload_weights(is_checkpoint_format=False) cannot fill {packed[0]} and {len(packed) - 1} more layers: "
            "their weights are packed. Pass the checkpoint's weights, which are packed again, or set VAC_LINEAR=torch"
        )
