"""How 4-bit weights lie in checkpoints: words taken apart and put together, value by value."""

from __future__ import annotations

import pytest

# Where the sources are tested on x86-64 there is no torch; the same tests run again on Arm.
torch = pytest.importorskip("torch")

from vllm_arm_cpu.quantization import formats  # noqa: E402

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column that AutoAWQ packs into each nibble."""


def random_values(*shape: int) -> torch.Tensor:
    return torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(sum(shape)))


def words(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32 words of eight neighbours in the last dimension."""
    eight = values.reshape(*values.shape[:-1], -1, 8)[..., list(order)]
    word = (eight << (4 * torch.arange(8))).sum(-1)
    return (word - ((word >> 31) << 32)).to(torch.int32)


def pairs(values: torch.Tensor) -> torch.Tensor:
    """What the packing kernel reads: uint8, even k low."""
    return (values[:, 0::2] + 16 * values[:, 1::2]).to(torch.uint8)


@pytest.mark.parametrize("n,k", [(1, 8), (7, 32), (40, 136)])
def test_words_along_k(n: int, k: int) -> None:
    values = random_values(n, k)
    assert torch.equal(formats.nibbles_along_k(words(values), k_dim=1), pairs(values))
    assert torch.equal(formats.nibbles_along_k(words(values).t().contiguous(), k_dim=0), pairs(values))


@pytest.mark.parametrize("chunk", [1, 4096, 32 << 20])
@pytest.mark.parametrize("n,k", [(8, 8), (24, 40), (64, 1000)])
def test_awq(n: int, k: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of any size; zero points in the order of columns."""
    monkeypatch.setattr(formats, "_CHUNK_BYTES", chunk)
    values = random_values(n, k)
    converted = formats.awq_along_k(words(values.t(), AWQ_ORDER))
    assert converted.dtype == torch.int32 and converted.shape == (n, k // 8)
    assert torch.equal(formats.nibbles_along_k(converted, k_dim=1), pairs(values))
    along_n = formats.awq_along_n(words(values.t(), AWQ_ORDER))
    assert torch.equal(along_n, words(values.t()).t())
    assert torch.equal(formats.zero_points(along_n, n_dim=0), values.to(torch.int8))


def test_awq_refuses_odd_sizes() -> None:
    with pytest.raises(ValueError, match="12 input features are no multiple of 8"):
        formats.awq_along_k(torch.zeros(12, 2, dtype=torch.int32))


@pytest.mark.parametrize("n_dim", [0, 1])
def test_zero_points(n_dim: int) -> None:
    values = random_values(24, 5)
    stored = words(values.t()) if n_dim == 1 else words(values.t()).t().contiguous()
    got = formats.zero_points(stored, n_dim)
    assert got.dtype == torch.int8 and got.shape == (24, 5) and got.is_contiguous()
    assert torch.equal(got, values.to(torch.int8))


def test_zero_points_that_are_stored_less_one() -> None:
    """One is taken from the word as a whole: a zero point of 0 borrows from the next."""
    values = random_values(16, 3)
    values[3] = values[7] = values[12] = 0
    stored = words(values.t()).long() - formats.GPTQ_ONE
    stored = (stored + 2**31) % 2**32 - 2**31
    got = formats.zero_points(stored.to(torch.int32), n_dim=1, add=formats.GPTQ_ONE)
    assert torch.equal(got, values.to(torch.int8))


@pytest.mark.parametrize("n,k", [(1, 2), (9, 34), (300, 64)])
def test_int8(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_CHUNK_BYTES", 1000)
    values = random_values(n, k)
    assert torch.equal(formats.nibbles_of_int8((values - 8).to(torch.int8)), pairs(values))
