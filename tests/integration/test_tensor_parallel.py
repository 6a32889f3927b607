"""Two ranks on this machine: placement, collectives in shared memory, tokens, and the end of a rank.

The ranks are processes that vLLM starts; the rest of the engine is in this one.
Three ranks are not tried: the embedded model has two KV heads, and vLLM wants
the number of attention heads divisible by the number of ranks.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.integration.engine import check_golden, engine
from vllm_arm_cpu.runtime import numa, topology

SHARED_MEMORY = Path("/dev/shm")


def facts(worker: Any) -> dict[str, Any]:
    """What a rank says of itself; runs in its process."""
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    communicator = get_tp_group().device_communicator
    rank = worker.rank
    # Shapes and places that the model does not use.
    rows = torch.arange(12, dtype=torch.float32).reshape(2, 3, 2) + 100 * rank
    gathered = communicator.all_gather(rows, 1)
    on_one = communicator.gather(rows, 1, 0)
    sent = communicator.broadcast(torch.full((5,), rank + 7), 1)
    integers = communicator.all_reduce(torch.tensor([rank + 1, 10]))
    big = communicator.all_reduce(torch.full((70_001,), 1.5 + rank, dtype=torch.bfloat16))
    return {
        "rank": rank,
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "places": os.environ["OMP_PLACES"],
        "applied": worker.plan.threads.cpus,
        "communicator": type(communicator).__name__,
        "shared": communicator.segment is not None,
        "segment_pids": communicator.segment.pids,
        "mapped": [
            line.split()[-2:] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:vllm-arm" in line
        ],
        "gathered": gathered.tolist(),
        "on_one": None if on_one is None else on_one.tolist(),
        "sent": sent.tolist(),
        "integers": integers.tolist(),
        "big": sorted(set(big.tolist())),
        "heads": worker.model_runner.model.model.layers[0].self_attn.num_heads,
        "vocabulary": worker.model_runner.model.lm_head.num_embeddings_per_partition,
    }


@pytest.fixture(scope="module")
def shared_memory_before() -> frozenset[str]:
    return frozenset(os.listdir(SHARED_MEMORY))


@pytest.fixture(scope="module")
def llm(shared_memory_before: frozenset[str]) -> Iterator[LLM]:
    with engine(tensor_parallel_size=2) as engine_of_two:
        yield engine_of_two


def test_as_many_ranks_as_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """VAC_TP=auto is the default of the command line, no more."""
    monkeypatch.setattr(numa, "propose", lambda machine: 4)
    for value, expected in (("auto", 4), ("", 1)):
        monkeypatch.setenv("VAC_TP", value)
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        assert parser.parse_args([]).tensor_parallel_size == expected
        assert parser.parse_args(["--tensor-parallel-size", "2"]).tensor_parallel_size == 2


def executor(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor


def test_ranks(llm: LLM) -> None:
    """Each is where the plan says, and they exchange data in shared memory."""
    assert type(executor(llm)).__name__ == "NumaExecutor"
    found = executor(llm).collective_rpc(facts)
    plans = executor(llm).plans
    assert [entry["rank"] for entry in found] == [0, 1]
    for entry, plan in zip(found, plans, strict=True):
        assert tuple(entry["applied"]) == plan.threads.cpus
        assert entry["affinity"] == sorted(plan.threads.cpus)
        assert entry["places"] == ",".join(f"{{{cpu}}}" for cpu in plan.threads.cpus)
        assert entry["threads"] == plan.threads.num_threads
        assert (entry["communicator"], entry["shared"]) == ("ArmCpuCommunicator", True)
        assert entry["segment_pids"] == [other["pid"] for other in found]
        assert entry["mapped"], "no segment is mapped"
    # Cores of the two have nothing in common, unless there is only one.
    if len(topology.read().allowed) > 1:
        assert not set(found[0]["affinity"]) & set(found[1]["affinity"])

    mine = [[[value + 100 * rank for value in row] for row in ((0, 1), (2, 3), (4, 5))] for rank in (0, 1)]
    assert found[0]["gathered"] == found[1]["gathered"]
    assert found[0]["gathered"][0] == mine[0] + mine[1]
    assert found[0]["on_one"] is None
    assert len(found[1]["on_one"]) == 4 and found[1]["on_one"][2] == mine[1]
    assert found[0]["sent"] == found[1]["sent"] == [8] * 5
    assert found[0]["integers"] == found[1]["integers"] == [3, 20]
    assert found[0]["big"] == found[1]["big"] == [4.0]
    # Every rank has its part of heads and vocabulary.
    config = llm.llm_engine.model_config.hf_config
    assert [entry["heads"] * 2 for entry in found] == [config.num_attention_heads] * 2
    assert all(entry["vocabulary"] * 2 < config.vocab_size + 256 for entry in found)


def test_golden_tokens(llm: LLM) -> None:
    """As one rank gives them."""
    check_golden(llm, "short-1", "medium", max_tokens=16)


def test_killed_rank(llm: LLM, shared_memory_before: frozenset[str], capfd: pytest.CaptureFixture[str]) -> None:
    """The engine ends with the rank, its place and the reason, and leaves neither process nor shared memory."""
    pids = [worker.proc.pid for worker in executor(llm).workers]
    begin = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    while not executor(llm).is_failed or any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() - begin < 30
        time.sleep(0.2)
    seconds = time.monotonic() - begin
    assert seconds < 30, f"{seconds:.1f} s"
    print(f"ended after {seconds:.1f} s")
    with pytest.raises(RuntimeError):
        executor(llm).collective_rpc("check_health")
    error = capfd.readouterr()
    said = error.out + error.err
    place = executor(llm).describe(1)
    assert f"{place}, process {pids[1]}, was killed by SIGKILL" in said
    assert "node 0" in place
    # Queues and semaphores of this process itself go with the engine.
    ours = [name for name in os.listdir(SHARED_MEMORY) if name not in shared_memory_before]
    assert not [name for name in ours if "vllm-arm" in name]
