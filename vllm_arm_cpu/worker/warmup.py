"""What is done once between loading the weights and the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

from vllm_arm_cpu.layers import decoder, linear

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.arm_cpu.warmup")


def after_load(model: torch.nn.Module, config: VllmConfig) -> None:
    """Put decoder layers on their op lists, and say what serves the model.

    The kernel of each linear layer was chosen when its weight was packed.
    """
    for summary in (linear.summary(model), decoder.install(model, config)):
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
