"""Several ranks on this machine: placement, collectives in shared memory, tokens, and the end of a rank.

The ranks are processes that vLLM starts; the rest of the engine is in this one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.integration.checkpoints import SIZES, for_three_ranks, random_model, save
from tests.integration.engine import GOLDEN, MODEL, check_golden, engine, golden_prompts, greedy
from tests.integration.quantized import make
from vllm_arm_cpu.layers import decoder
from vllm_arm_cpu.runtime import numa, topology
from vllm_arm_cpu.worker.worker import ArmCpuWorker

SHARED_MEMORY = Path("/dev/shm")
NEARLY = 0.1
"""Of a logprob: as much as rounding activations to eight bits may change."""


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
        "native_layers": sum(len(segment.layers) for segment in decoder.segments(worker.model_runner.model)),
        "native_model": worker.model_runner.plain is not None and worker.model_runner.plain.split_because is None,
    }


def module_by_module(worker: Any) -> None:
    """Let a rank run vLLM's modules from now on; runs in its process."""
    worker.model_runner.plain = None
    for segment in decoder.segments(worker.model_runner.model):
        segment._usable = lambda *_: False


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
        # A step is one native call on each rank.
        assert (entry["native_layers"], entry["native_model"]) == (4, True)
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


def assert_modules_give_the_same(llm: LLM, prompts: list[list[int]]) -> None:
    """Ranks that meet inside op lists give the bits that vLLM's modules with our collectives give."""
    parameters = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, logprobs=2, ignore_eos=True)

    def logprobs() -> list[Any]:
        llm.reset_prefix_cache()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
        return [(output.prompt_logprobs, output.outputs[0].logprobs) for output in outputs]

    native = logprobs()
    executor(llm).collective_rpc(module_by_module)
    assert str(logprobs()) == str(native)


def test_native_lists_and_modules(llm: LLM) -> None:
    """The model of the other tests; from here on module by module."""
    assert_modules_give_the_same(llm, golden_prompts("short-1", "medium"))


def test_killed_rank(
    llm: LLM,
    shared_memory_before: frozenset[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine ends with the rank, its place and the reason, and leaves neither process nor shared memory.

    Even where vLLM's monitor sees the end before our watch does, which then has nothing to say any more.
    """
    monkeypatch.setattr(executor(llm)._watch, "_is_shutting_down", lambda: True)
    pids = [worker.proc.pid for worker in executor(llm).workers]
    begin = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    while not executor(llm).is_failed or any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() - begin < 10
        time.sleep(0.2)
    seconds = time.monotonic() - begin
    assert seconds < 10, f"{seconds:.1f} s"
    assert executor(llm).is_failed
    place = executor(llm).describe(1)
    assert f"{place}, process {pids[1]}, was killed by SIGKILL" in caplog.text
    assert "node 0" in place
    # Queues and semaphores of this process itself go with the engine.
    ours = [name for name in os.listdir(SHARED_MEMORY) if name not in shared_memory_before]
    assert not [name for name in ours if "vllm-arm" in name]


@pytest.mark.parametrize(
    ("scheme", "ranks"),
    [
        ("w8a8", 2),
        *(
            pytest.param(scheme, ranks, marks=pytest.mark.slow)
            for scheme, ranks in (("w4a8-group32", 2), ("bf16", 3), ("w8a8", 3), ("w4a8-group32", 3))
        ),
    ],
)
def test_same_tokens(scheme: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one rank gives them on the same checkpoint; the unquantized ones are known.

    Of quantized checkpoints up to the first token that one rank was not sure of: a rank quantizes its part of the
    activations in front of a row-parallel layer with a scale of its own.
    """
    share_cores(monkeypatch, ranks)
    source = MODEL if ranks == 2 else for_three_ranks(MODEL, tmp_path / "larger")
    model = source if scheme == "bf16" else make(scheme, tmp_path / scheme, source)
    prompts = golden_prompts("short-1", "medium")
    if scheme == "bf16":
        expected = [entry["token_ids"][:12] for entry in GOLDEN["prompts"] if entry["name"] in ("short-1", "medium")]
    else:
        with engine(model) as alone:
            answers = alone.generate(
                [{"prompt_token_ids": ids} for ids in prompts],
                SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2),
                use_tqdm=False,
            )
        expected = [sure_tokens(answer.outputs[0]) for answer in answers]
        assert sum(map(len, expected)) >= 12, f"one rank is sure of {expected} alone"
    with engine(model, tensor_parallel_size=ranks) as llm:
        assert executor(llm).collective_rpc(native_layers) == [4] * ranks
        found = greedy(llm, prompts, 12)
        assert [tokens[: len(sure)] for tokens, sure in zip(found, expected, strict=True)] == expected


def sure_tokens(completion: Any) -> list[int]:
    """The greedy tokens before the first one whose runner-up is nearly as likely."""
    for step, entries in enumerate(completion.logprobs):
        best, second = sorted((entry.logprob for entry in entries.values()), reverse=True)[:2]
        if best - second < NEARLY:
            return list(completion.token_ids[:step])
    return list(completion.token_ids)


@pytest.mark.slow
def test_norms_behind_sums(tmp_path: Path) -> None:
    """Gemma 3's layers, which norm the ranks' sum before the residual is added."""
    config = Gemma3TextConfig(**SIZES, head_dim=64, query_pre_attn_scalar=64)
    model = save(random_model(config, plus_one=True), tmp_path / "gemma3")
    with engine(model, tensor_parallel_size=2, skip_tokenizer_init=True) as llm:
        assert executor(llm).collective_rpc(native_layers) == [config.num_hidden_layers] * 2
        assert_modules_give_the_same(llm, [list(range(2, 40)), [7, 8, 9]])


def native_layers(worker: Any) -> int:
    """Decoder layers of a rank that run as op lists; runs in its process."""
    return sum(len(segment.layers) for segment in decoder.segments(worker.model_runner.model))


def share_cores(monkeypatch: pytest.MonkeyPatch, ranks: int) -> bool:
    """Let neighbouring ranks have the same cores where there are fewer cores than ranks; whether that is so."""
    cores = len(topology.read().allowed)
    if cores >= ranks:
        return False
    plan_ranks = numa.plan_ranks

    def plan(machine: topology.Topology, num_ranks: int, environ: Any = None) -> tuple[numa.RankPlan, ...]:
        plans = plan_ranks(machine, min(num_ranks, cores), environ)
        return tuple(replace(plans[rank * len(plans) // num_ranks], rank=rank) for rank in range(num_ranks))

    monkeypatch.setattr(numa, "plan_ranks", plan)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_pipeline(tensor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages, each of one rank or of two; several batches under way at once."""
    ranks = 2 * tensor
    shared = share_cores(monkeypatch, ranks)
    with engine(pipeline_parallel_size=2, tensor_parallel_size=tensor, max_num_seqs=4) as llm:
        assert type(executor(llm)).__name__ == "NumaExecutor"
        found, plans = executor(llm).collective_rpc(stage), executor(llm).plans
        assert [entry["stage"] for entry in found] == [0] * tensor + [1] * tensor
        assert [entry["layers"] for entry in found] == [[0, 1]] * tensor + [[2, 3]] * tensor
        assert [entry["native_layers"] for entry in found] == [2] * ranks
        assert [entry["affinity"] for entry in found] == [sorted(plan.threads.cpus) for plan in plans]
        if not shared:
            cpus = [cpu for plan in plans for cpu in plan.threads.cpus]
            assert len(cpus) == len(set(cpus)), "two ranks on one CPU"
        check_golden(llm, "short-1", "medium", max_tokens=16)
        # More requests than a batch takes: both stages have work in hand.
        check_golden(llm, max_tokens=16)


def stage(worker: Any) -> dict[str, Any]:
    """What a rank of a pipeline says of itself; runs in its process."""
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.model_executor.models.utils import PPMissingLayer

    layers = worker.model_runner.model.model.layers
    return {
        "stage": get_pp_group().rank_in_group,
        "layers": [i for i, layer in enumerate(layers) if not isinstance(layer, PPMissingLayer)],
        "native_layers": native_layers(worker),
        "affinity": sorted(os.sched_getaffinity(0)),
    }


class FailingWorker(ArmCpuWorker):
    """One whose second rank cannot load the model."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Fail on rank 1."""
        if self.rank == 1:
            raise OSError("the weights of this rank cannot be read")
        super().load_model(load_dummy_weights=load_dummy_weights)


@pytest.mark.slow
def test_rank_that_cannot_load(capfd: pytest.CaptureFixture[str]) -> None:
    """The engine does not start, says which rank failed and why, and leaves nothing."""
    before = set(os.listdir(SHARED_MEMORY))
    worker = f"{FailingWorker.__module__}.{FailingWorker.__qualname__}"
    message = r"loading failed: rank 1 \(node 0, CPUs .*(has ended with exit code|has given up)"
    with pytest.raises(RuntimeError, match=message), engine(tensor_parallel_size=2, worker_cls=worker):
        pass
    captured = capfd.readouterr()
    assert "the weights of this rank cannot be read" in captured.out + captured.err
    deadline = time.monotonic() + 10
    while children := [path for path in Path("/proc").glob("[0-9]*/stat") if is_child(path)]:
        assert time.monotonic() < deadline, children
        time.sleep(0.2)
    # vLLM's queues go with this process, as in test_killed_rank.
    assert not [name for name in set(os.listdir(SHARED_MEMORY)) - before if "vllm-arm" in name]


def stuck(worker: Any) -> None:
    """Let a rank hang so that nothing in its process runs any more, and the other one meet it; runs in both."""
    import ctypes

    import torch
    from vllm.distributed.parallel_state import get_tp_group

    if worker.rank == 1:
        # A foreign function that keeps Python's lock: no thread, no signal handler has its turn.
        ctypes.PyDLL(None).pause()
    get_tp_group().device_communicator.all_reduce(torch.ones(4))


@pytest.mark.slow
def test_rank_that_is_stuck() -> None:
    """A rank that runs, and neither answers nor hears that it should end, is named and gone in good time."""
    with engine(tensor_parallel_size=2, environ={"VAC_RANK_TIMEOUT": "3"}) as llm:
        pids = [worker.proc.pid for worker in executor(llm).workers]
        begin = time.monotonic()
        message = rf"rank 1 of group tp:0 \(node 0, CPUs [\d,-]+, process {pids[1]}\) did not come within 3 s"
        try:
            with pytest.raises(RuntimeError, match=message) as failed:
                executor(llm).collective_rpc(stuck)
            raise failed.value
        except RuntimeError:
            # As EngineCore does, on its way out.
            executor(llm).shutdown()
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        assert time.monotonic() - begin < 10


def is_child(stat: Path) -> bool:
    """Whether a process of /proc is a worker that this one started and that still runs."""
    try:
        state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        return int(parent) == os.getpid() and state not in "ZX" and "VLLM" in (stat.parent / "comm").read_text()
    except OSError:
        return False
