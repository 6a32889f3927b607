"""LoRA on a CPU: each adapter multiplies the rows of its own requests, in FP32.

vLLM's reference operators copy an adapter's matrices once per token, and give
rows without an adapter (index -1) those of the last slot, so that a plain
request beside one with an adapter gets wrong results.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

Groups = list[tuple[int, "slice | torch.Tensor"]]
"""(slot of an adapter, its rows); rows without an adapter are in none."""


def group_rows(indices: torch.Tensor) -> Groups:
    """Rows of each slot: indices int64 [rows], -1 for none."""
    slots, counts = torch.unique_consecutive(indices, return_counts=True)
    runs: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
        if slot >= 0:
            runs.setdefault(slot, []).append((start, start + count))
        start += count
    return [
        (slot, slice(*found[0]) if len(found) == 1 else torch.cat([torch.arange(*run) for run in found]))
        for slot, found in runs.items()
    ]


def shrink(y: torch.Tensor, x: torch.Tensor, lora_a: torch.Tensor, groups: Groups, scale: float) -> None:
    """``y[rows] = scale * x[rows] @ A.T``: y FP32 [rows, rank], x [rows, k], lora_a [slots, 1, rank, k]."""
    for slot, rows in groups:
        y[rows, : lora_a.shape[-2]] = scale * (x[rows].float() @ lora_a[slot, 0].float().T)


def expand(y: torch.Tensor, x: torch.Tensor, lora_b: torch.Tensor, groups: Groups, first: int, add: bool) -> None:
    """``y[rows, first:] += x[rows] @ B.T``, or ``=``: y [rows, n], x FP32 [rows, rank], lora_b [slots, 1, n', rank]."""
    # Adapter and model may pad the vocabulary differently.
    columns = min(lora_b.shape[-2], y.shape[1] - first)
    for slot, rows in groups:
        delta = x[rows].float() @ lora_b[slot, 0, :columns].float().T
        if add:
            delta += y[rows, first : first + columns].float()
        y[rows, first : first + columns] = delta.to(y.dtype)


class ArmPunicaWrapper(PunicaWrapperCPU):
    """vLLM's wrapper, with its products as above."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Note which rows of the step have which adapter."""
        super().update_metadata(*args, **kwargs)
        self._groups = group_rows(self.token_lora_indices)
        self._sampler_groups = group_rows(self.sampler_indices)

    def _apply_shrink(self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
        shrink(y.view(-1, y.shape[-1]), x, w_t_all, self._groups, scale)

    def _apply_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        expand(y[:, : y_offset + y_slice_size], x, w_t_all, self._groups, y_offset, add_inputs)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        """y [rows, hidden] += x [rows, rank] @ B.T."""
        expand(y, x, lora_b_stacked, self._groups, 0, add_inputs)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """y [rows, vocab] += scale * x [rows, hidden] @ A.T @ B.T.

        Raises:
            NotImplementedError: logprobs of a prompt, whose adapter changes lm_head, beside other requests.
        """
        groups = self._sampler_groups
        if x.shape[0] != self.sampler_indices.shape[0]:
            # Logprobs of one request's prompt: vLLM does not say which request's.
            used = set(self.sampler_indices.tolist())
            if len(used) == 1:
                groups = [(slot, slice(None)) for slot in used if slot >= 0]
            elif any(slot >= 0 and bool(lora_b_stacked[slot].any()) for slot in used):
                raise NotImplementedError(
                    "prompt_logprobs of a request with an adapter on lm_head, in a batch with other adapters"
                )
            else:
                return
        shrunk = torch.zeros((x.shape[0], lora_a_stacked.shape[-2]), dtype=torch.float32)
        shrink(shrunk, x, lora_a_stacked, groups, scale)
        expand(y, shrunk, lora_b_stacked, groups, 0, add=True)
