"""The embedded model on one rank, and on two in the memory of their nodes: the same tokens, and only sums cross."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import numa_model
from tests.numa import bodies, kernel_view
from tests.numa.ranks import Ranks
from tests.numa.tiny_llama import CHECKPOINT, Checkpoint
from tests.numa.traffic import Counter, Watched, open_view

SLOT = 1 << 16
GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_tokens.json").read_text())["prompts"]
PROMPTS = [GOLDEN[0], max(GOLDEN, key=lambda entry: len(entry["prompt_token_ids"]))]
COUNT = 16


@pytest.mark.parametrize("world_size", [1, 2])
def test_tokens(world_size: int, start_ranks: Callable[[int], Ranks]) -> None:
    """vLLM's tokens, from one rank and from two: those of the golden file, on every rank."""
    ranks = start_ranks(world_size)
    ranks.call(open_view, SLOT)
    arenas = ranks.call(bodies.load)
    for entry in PROMPTS:
        for tokens in ranks.call(bodies.generate, entry["prompt_token_ids"], COUNT):
            assert tokens == entry["token_ids"][:COUNT]
    if world_size == 1:
        return
    for rank, places in enumerate(arenas):
        for address, nbytes in places:
            nodes = kernel_view.nodes_of_range(ranks.pids[rank], address, nbytes)
            assert set(nodes[nodes >= 0].tolist()) == {ranks.home(rank)}


def test_step_crosses_sums_alone(counter: Counter, start_ranks: Callable[[int], Ranks]) -> None:
    """A decode step of the whole model: two all-reduces a layer, one of the embedding, the logits."""
    watched = Watched(start_ranks(2), counter, SLOT)
    watched.ranks.call(bodies.load)
    accesses = watched.count(bodies.step, 300, 0)
    config = Checkpoint(CHECKPOINT).config
    message, logits = 2 * config["hidden_size"], 2 * config["vocab_size"]
    sums = (2 * config["num_hidden_layers"] + 1) * numa_model.crossing(message, 2, numa_model.phases_of(message, 2))
    # The slots are used again and again: loads are counted, and those of copies overlap a little.
    _, loaded = watched.crossed(accesses)
    assert sums + logits <= loaded <= sums + logits + 500
