"""How 4-bit weights lie in checkpoints, brought into what the packing kernel reads: torch only, no vLLM.

All of these pack eight values into an int32. Of a word along K the bytes hold
two values each, the one of even k in the low nibble: on a little-endian machine
that is the kernel's own layout. Words along N have to be taken apart.
"""

from __future__ import annotations

import torch

AWQ_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of a word, counted from the lowest, that holds each of its eight columns in AutoAWQ's GEMM layout."""

GPTQ_ONE = 0x11111111
"""What is missing in each word of zero points in the first version of GPTQ's format."""

_CHUNK_BYTES = 4 << 20
"""Of a layer that are taken apart at a time: what is needed besides it is a few times that."""


def nibbles_along_k(words: torch.Tensor, k_dim: int) -> torch.Tensor:
    """Values 0..15 as uint8 [N, K / 2], even k in the low nibble.

    words: int32 [N, K / 8] (``k_dim`` 1) or [K / 8, N] (``k_dim`` 0, as GPTQ has it), the lowest nibble first.
    """
    rows = words if k_dim == 1 else words.t()
    return rows.contiguous().view(torch.uint8)


def awq_along_k(words: torch.Tensor) -> torch.Tensor:
    """AWQ's words int32 [K, N / 8], eight columns each, as int32 [N, K / 8], eight k each, the lowest nibble first.

    Raises:
        ValueError: K is no multiple of 8.
    """
    k, n = words.shape[0], words.shape[1] * 8
    if k % 8 != 0:
        raise ValueError(f"{k} input features are no multiple of 8")
    out = torch.empty((n, k // 2), dtype=torch.uint8)
    rows = max(8, _CHUNK_BYTES // n // 8 * 8)
    for start in range(0, k, rows):
        values = unpack_columns(words[start : start + rows], AWQ_POSITIONS)
        pairs = values[0::2] | (values[1::2] << 4)
        out[:, start // 2 : start // 2 + pairs.shape[0]] = pairs.t()
    return out.view(torch.int32)


def unpack_columns(words: torch.Tensor, positions: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Values 0..15 as uint8 [rows, N] of words int32 [rows, N / 8]; column i of a word is at ``positions[i]``."""
    bits = words.contiguous().view(torch.uint8)
    values = torch.stack((bits & 15, bits >> 4), dim=-1).view(words.shape[0], words.shape[1], 8)
    if positions != tuple(range(8)):
        values = values[:, :, list(positions)]
    return values.reshape(words.shape[0], -1)


def zero_points(words: torch.Tensor, n_dim: int, add: int = 0) -> torch.Tensor:
    """Zero points int8 [N, groups] of words int32 [N / 8, groups] (``n_dim`` 0) or [groups, N / 8] (``n_dim`` 1).

    add: to each word as a whole, see ``GPTQ_ONE``.
    """
    rows = words if n_dim == 1 else words.t()
    if add:
        # In int32 the sum wraps, as it should.
        rows = rows + torch.tensor(add, dtype=torch.int32)
    return unpack_columns(rows).t().contiguous().view(torch.int8)


def nibbles_of_int8(values: torch.Tensor) -> torch.Tensor:
    """Values -8..7 int8 [N, K] as 0..15 in uint8 [N, K / 2], even k in the low nibble; K even."""
    n, k = values.shape
    out = torch.empty((n, k // 2), dtype=torch.uint8)
    rows = max(1, _CHUNK_BYTES // max(k, 1))
    for start in range(0, n, rows):
        unsigned = (values[start : start + rows].view(torch.uint8) & 15) ^ 8
        # Not by assignment: a reload of vLLM's counts the elements that are copied while a parameter loads.
        torch.bitwise_or(unsigned[:, 0::2], unsigned[:, 1::2] << 4, out=out[start : start + rows])
    return out


def awq_along_n(words: torch.Tensor) -> torch.Tensor:
    """AWQ's words of zero points int32 [groups, N / 8] as int32 [N / 8, groups], eight columns each, in order."""
    values = unpack_columns(words, AWQ_POSITIONS)
    pairs = values[:, 0::2] | (values[:, 1::2] << 4)
    return pairs.view(torch.int32).t().contiguous()
