"""How fast a model decodes on several NUMA nodes, on paper: from bandwidths, latencies and bytes.

    numa_model.py [--local 102] [--remote 24] [--efficiency 0.8] [--meeting 3] [--layer 25] ...

Defaults are Qwen3-4B in 4-bit blocks of 32 (4.5 bits a weight) on a Kunpeng 920,
whose nodes read their own memory at 102 GB/s and each other's at 22 to 26. The
published rates of two engines on that machine stand beside the model's.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

PUBLISHED = {"ArcLight": {1: 36, 2: 55, 4: 62}, "llama.cpp": {1: 32, 2: 38, 4: 42}}
"""Tokens per second in decoding on 1, 2 and 4 nodes."""

_BYTES_PER_MEETING = 32768
"""From here on a second wait costs less than reading whole buffers: as in csrc/numa."""

_ARCLIGHT_MEETINGS = 7
"""Barriers of all threads of all nodes from the end of a row-parallel layer to the begin of the next one: three around
the sum, one behind each of addition and norm, two around handing out the result."""


@dataclass(frozen=True)
class Model:
    """Shapes of a decoder; weights of all linear layers and of lm_head are read once a token."""

    layers: int = 36
    hidden: int = 2560
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    intermediate: int = 9728
    vocabulary: int = 151936
    bits: float = 4.5

    @property
    def layer_bytes(self) -> float:
        """Weights of one layer."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return (attention + 3 * self.hidden * self.intermediate) * self.bits / 8

    @property
    def head_bytes(self) -> float:
        """Weights of lm_head."""
        return self.hidden * self.vocabulary * self.bits / 8


@dataclass(frozen=True)
class Machine:
    """Bandwidths in bytes per second, times in seconds.

    Attributes:
        local: a node reads its own memory.
        remote: a node reads all others' memory.
        efficiency: share of the local bandwidth that kernels reach.
        meeting: all ranks wait for each other once.
        layer: work of a layer that no node saves another: regions, barriers, norms.
    """

    local: float = 102e9
    remote: float = 24e9
    efficiency: float = 0.8
    meeting: float = 3e-6
    layer: float = 25e-6


def crossing(message: int, ranks: int, phases: int) -> int:
    """Bytes of one all-reduce that cross between nodes, all ranks together.

    One phase: every rank reads every other's buffer. Two: every rank reads a
    slice of every other's, and then the others' sums.
    """
    return ranks * (ranks - 1) * message if phases == 1 else 2 * (ranks - 1) * message


def arclight_crossing(message: int, nodes: int) -> int:
    """Bytes that cross where ArcLight adds up what nodes have computed and gives them the next input, all together.

    As its source (version 1.0) has it: what is not split, such as the residual, lies on node 0, in FP32. A sum is
    divided among all threads, which read a slice of each node's part and write the result to node 0; then every node
    reads the normalized whole from there. Each byte counts once, however often it is read.
    """
    size = 2 * message
    read, written, handed_out = (nodes - 1) * size, (nodes - 1) * size // nodes, (nodes - 1) * size
    return read + written + handed_out


def phases_of(message: int, ranks: int) -> int:
    """What the all-reduce chooses."""
    extra = (ranks - 1) * (ranks - 2)
    return 1 if ranks <= 2 or message <= _BYTES_PER_MEETING * ranks // extra else 2


def all_reduce_seconds(machine: Machine, message: int, ranks: int, phases: int | None = None) -> float:
    """Time of one all-reduce of ``message`` bytes; ranks read at the same time."""
    if ranks == 1:
        return 0.0
    phases = phases or phases_of(message, ranks)
    return phases * machine.meeting + crossing(message, ranks, phases) / ranks / machine.remote


def token_seconds(model: Model, machine: Machine, ranks: int, sliced_head: bool = True, batch: int = 1) -> float:
    """Time of a decode step: local weights, two all-reduces a layer and one of the embedding, gathered logits."""
    bandwidth = machine.local * machine.efficiency
    message = 2 * model.hidden * batch
    weights = model.layers * model.layer_bytes / ranks / bandwidth
    head = model.head_bytes / (ranks if sliced_head else 1) / bandwidth
    sums = (2 * model.layers + 1) * all_reduce_seconds(machine, message, ranks)
    logits = 2 * model.vocabulary * batch * (ranks - 1) / ranks
    gathered = machine.meeting + logits / machine.remote if ranks > 1 and sliced_head else 0.0
    return weights + head + sums + gathered + model.layers * machine.layer


def arclight_seconds(model: Model, machine: Machine, nodes: int, batch: int = 1) -> float:
    """The same step by ArcLight's scheme: lm_head on node 0, sums through it, barriers of all nodes between ops."""
    bandwidth = machine.local * machine.efficiency
    weights = model.layers * model.layer_bytes / nodes / bandwidth
    head = model.head_bytes / bandwidth
    if nodes == 1:
        return weights + head + model.layers * machine.layer
    # Reading the input goes on in all nodes at once, as reading the parts does.
    message = 4 * model.hidden * batch
    sums = 2 * model.layers * (_ARCLIGHT_MEETINGS * machine.meeting + 2 * message / machine.remote)
    return weights + head + sums + model.layers * machine.layer


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", type=float, default=102, help="GB/s of a node's own memory")
    parser.add_argument("--remote", type=float, default=24, help="GB/s from other nodes")
    parser.add_argument("--efficiency", type=float, default=0.8, help="share of it that kernels reach")
    parser.add_argument("--meeting", type=float, default=3, help="microseconds of a wait of all ranks for each other")
    parser.add_argument("--layer", type=float, default=25, help="microseconds of a layer that are not weights")
    parser.add_argument("--batch", type=int, default=1, help="sequences in a step")
    options = parser.parse_args()
    machine = Machine(
        options.local * 1e9, options.remote * 1e9, options.efficiency, options.meeting * 1e-6, options.layer * 1e-6
    )
    model = Model()
    message = 2 * model.hidden * options.batch
    print(f"weights {(model.layers * model.layer_bytes + model.head_bytes) / 1e9:.2f} GB; a message {message} bytes\n")
    print("| nodes | bytes across per layer: one phase | two phases | chosen | ArcLight | us per all-reduce |")
    print("|---|---|---|---|---|---|")
    for ranks in (2, 3, 4, 8):
        one, two = (2 * crossing(message, ranks, phases) for phases in (1, 2))
        chosen = "one" if phases_of(message, ranks) == 1 else "two"
        theirs, time = 2 * arclight_crossing(message, ranks), all_reduce_seconds(machine, message, ranks)
        print(f"| {ranks} | {one} | {two} | {chosen} | {theirs} | {time * 1e6:.1f} |")
    names = " | ".join(f"{name}, published" for name in PUBLISHED)
    print(f"\n| nodes | model, tokens/s | with lm_head on one node | ArcLight's scheme | {names} |")
    print("|---|---|---|---|---|---|")
    for ranks in (1, 2, 4):
        ours = options.batch / token_seconds(model, machine, ranks, batch=options.batch)
        whole = options.batch / token_seconds(model, machine, ranks, sliced_head=False, batch=options.batch)
        theirs = options.batch / arclight_seconds(model, machine, ranks, options.batch)
        published = " | ".join(str(rates[ranks]) for rates in PUBLISHED.values())
        print(f"| {ranks} | {ours:.0f} | {whole:.0f} | {theirs:.0f} | {published} |")


if __name__ == "__main__":
    main()
