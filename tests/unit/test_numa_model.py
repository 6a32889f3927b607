"""benchmarks/numa_model.py: bytes and times that can be checked by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).parents[2] / "benchmarks" / "numa_model.py"
_SPEC = importlib.util.spec_from_file_location("numa_model", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
numa_model = importlib.util.module_from_spec(_SPEC)
sys.modules["numa_model"] = numa_model
_SPEC.loader.exec_module(numa_model)


def test_bytes_that_cross() -> None:
    """Counted slice by slice, as the kernel reads them."""
    for ranks in range(2, 17):
        message = 5040 * ranks
        one = sum(message for reader in range(ranks) for owner in range(ranks) if reader != owner)
        slices = sum(message // ranks for reader in range(ranks) for owner in range(ranks) if reader != owner)
        assert numa_model.crossing(message, ranks, 1) == one
        assert numa_model.crossing(message, ranks, 2) == 2 * slices


def test_bytes_of_arclight() -> None:
    """Counted node by node: slices of FP32 parts and where their sum goes, then the whole input of all but node 0."""
    for nodes in (2, 3, 4, 8):
        message = 2 * 40 * nodes
        size = 2 * message
        slices = [(reader, owner) for reader in range(nodes) for owner in range(nodes) if reader != owner]
        crossed = len(slices) * size // nodes + sum(size // nodes for node in range(nodes) if node != 0)
        crossed += sum(size for node in range(nodes) if node != 0)
        assert numa_model.arclight_crossing(message, nodes) == crossed
    # On one node there is no difference.
    model, machine = numa_model.Model(), numa_model.Machine()
    assert numa_model.arclight_seconds(model, machine, 1) == numa_model.token_seconds(model, machine, 1)


def test_weights() -> None:
    """Qwen3-4B has 4.02 billion weights without norms."""
    model = numa_model.Model(bits=8)
    assert model.layers * model.layer_bytes + model.head_bytes == pytest.approx(4.02e9, rel=0.005)


def test_one_node_is_weights_and_fixed_work() -> None:
    machine = numa_model.Machine(local=100e9, efficiency=1.0, layer=0.0)
    model = numa_model.Model()
    seconds = numa_model.token_seconds(model, machine, 1)
    assert seconds == pytest.approx((model.layers * model.layer_bytes + model.head_bytes) / 100e9)
    # Waits and bytes are all that keeps four nodes from being four times as fast.
    waits = 73 * numa_model.all_reduce_seconds(machine, 5120, 4)
    assert numa_model.token_seconds(model, machine, 4) - waits == pytest.approx(seconds / 4, rel=0.01)


@pytest.mark.parametrize(("message", "ranks", "phases"), [(5120, 4, 1), (21845, 4, 1), (21846, 4, 2), (1 << 30, 2, 1)])
def test_choice_of_phases(message: int, ranks: int, phases: int) -> None:
    assert numa_model.phases_of(message, ranks) == phases
