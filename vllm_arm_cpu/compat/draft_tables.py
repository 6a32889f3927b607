"""A drafter's own embedding and lm_head, compared with its target's although the weights are packed.

Wraps ``SpecDecodeBaseProposer._maybe_share_embeddings`` and ``_maybe_share_lm_head``: they let a drafter (EAGLE,
EAGLE-3) use the target's table where its own has the same values, and look at ``weight`` for that. Of a packed weight
that is an empty placeholder, and one is like the other: a head with a vocabulary of its own would get the target's
lm_head, and all of its drafts would be wrong. Can go once vLLM compares in the loader, or does not compare at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from vllm_arm_cpu.layers.linear_candidates import PackedLinear

original_embeddings = SpecDecodeBaseProposer._maybe_share_embeddings
original_lm_head = SpecDecodeBaseProposer._maybe_share_lm_head


def share_embeddings(self: Any, target_language_model: torch.nn.Module) -> None:
    """As vLLM's, on the values."""
    inner = getattr(target_language_model, "model", None)
    layers = [getattr(model, "embed_tokens", None) for model in (inner, getattr(self.model, "model", None))]
    with shown(*layers):
        original_embeddings(self, target_language_model)


def share_lm_head(self: Any, target_language_model: torch.nn.Module) -> None:
    """As vLLM's, on the values."""
    with shown(*(getattr(model, "lm_head", None) for model in (target_language_model, self.model))):
        original_lm_head(self, target_language_model)


@contextlib.contextmanager
def shown(*layers: Any) -> Iterator[None]:
    """Let layers have a weight to look at: their packed one unpacked, or where that cannot be, one like no other."""
    hidden = [layer for layer in layers if layer is not None and getattr(layer, "weight", torch.ones(1)).numel() == 0]
    placeholders = [layer.weight for layer in hidden]
    try:
        for layer in hidden:
            layer.weight = torch.nn.Parameter(_values(layer), requires_grad=False)
        yield
    finally:
        for layer, weight in zip(hidden, placeholders, strict=True):
            layer.weight = weight


def _values(layer: Any) -> torch.Tensor:
    linear = layer.cpu_linear
    if isinstance(linear, PackedLinear):
        return linear.embedding(torch.arange(linear.n))
    return torch.full((1, layer.embedding_dim), torch.nan)


def apply() -> None:
    """Replace the two methods."""
    SpecDecodeBaseProposer._maybe_share_embeddings = share_embeddings
    SpecDecodeBaseProposer._maybe_share_lm_head = share_lm_head
