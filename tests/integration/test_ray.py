"""Pipeline stages and engines on two Ray nodes, here on one machine; without Ray: test_tensor_parallel.py."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from tests.integration.engine import MODEL, check_golden, engine, golden
from vllm_arm_cpu.layers import decoder

pytestmark = pytest.mark.slow

# Ray's processes give each other seconds, in which an emulated Python does not even begin.
ENVIRON = {
    "RAY_worker_register_timeout_seconds": "900",
    "RAY_agent_register_timeout_ms": "900000",
    "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_gcs_rpc_server_connect_timeout_s": "300",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_raylet_client_num_connect_attempts": "100",
    "RAY_health_check_initial_delay_ms": "900000",
    "RAY_health_check_timeout_ms": "300000",
    # Workers that nobody has asked for.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # What is known here when Ray starts is known to its workers.
    "VAC_LINEAR": "vac",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
}


def facts(worker: Any) -> dict[str, Any]:
    """What a stage says of itself; runs in its process."""
    ray = sys.modules.get("ray")
    return {
        "rank": worker.rank,
        "ray node": ray.get_runtime_context().get_node_id() if ray is not None and ray.is_initialized() else "",
        "process": os.getpid(),
        "threads": worker.plan.threads.num_threads,
        "worker": type(worker.worker).__name__,
        "native layers": sum(len(segment.layers) for segment in decoder.segments(worker.model_runner.model)),
        "ranks here": worker._ranks_here,
    }


def check(llm: LLM) -> list[dict[str, Any]]:
    """Two stages with half of the layers each give the tokens of one rank; what they say of themselves."""
    found: list[dict[str, Any]] = llm.llm_engine.engine_core.engine_core.model_executor.collective_rpc(facts)
    assert [entry["rank"] for entry in found] == [0, 1]
    assert [entry["native layers"] for entry in found] == [2, 2]
    assert len({os.getpid(), *(entry["process"] for entry in found)}) == 3
    assert {entry["worker"] for entry in found} == {"ArmCpuWorker"}
    check_golden(llm, "short-1", "medium", max_tokens=16)
    return found


def executor_name(llm: LLM) -> str:
    return type(llm.llm_engine.engine_core.engine_core.model_executor).__name__


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Two Ray nodes, each with room for one rank."""
    pytest.importorskip("ray", reason="Ray is not installed; see docs/numa.md")
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    # Its workers look for packages in the driver's folder first, where there are sources only.
    monkeypatch.chdir(tmp_path)
    import ray
    from ray._private import services
    from ray.cluster_utils import Cluster

    if "VAC_EMULATED_CPU" in os.environ:
        # Ray looks for its nodes among command lines, which begin with the emulator here.
        is_raylet = services._is_raylet_process
        monkeypatch.setattr(services, "_is_raylet_process", lambda line: is_raylet(line and line[1:]))
    room: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1}
    cluster = Cluster(initialize_head=True, head_node_args={**room, "include_dashboard": False})
    try:
        # vLLM tells nodes apart by their addresses.
        cluster.add_node(**room, node_ip_address="127.0.0.2")
        ray.init(address=cluster.address)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_stages_on_two_ray_nodes(ray_cluster: Any) -> None:
    """vLLM's own executor for Ray, with our workers: one on each node, with all of its machine's cores."""
    with engine(pipeline_parallel_size=2, distributed_executor_backend="ray") as llm:
        assert executor_name(llm) == "RayExecutorV2"
        found = check(llm)
        assert len({entry["ray node"] for entry in found} - {""}) == 2
        assert [entry["ranks here"] for entry in found] == [1, 1]


async def generate_on_each(arguments: AsyncEngineArgs) -> tuple[list[Any], list[list[int]]]:
    """What the worker of each data-parallel engine says of itself, and what each answers to a golden prompt."""
    (entry,) = golden("short-1")
    parameters = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    llm = AsyncLLM.from_engine_args(arguments)
    try:
        core: Any = llm.engine_core
        places = [
            await core._call_utility_async("collective_rpc", facts, None, (), {}, engine=engine)
            for engine in core.core_engines
        ]

        async def answer(rank: int) -> list[int]:
            prompt = {"prompt_token_ids": entry["prompt_token_ids"]}
            async for output in llm.generate(prompt, parameters, f"request-{rank}", data_parallel_rank=rank):
                return list(output.outputs[0].token_ids)
            return []

        return [place for (place,) in places], list(await asyncio.gather(answer(0), answer(1)))
    finally:
        llm.shutdown()


def test_engines_on_two_ray_nodes(monkeypatch: pytest.MonkeyPatch, ray_cluster: Any) -> None:
    """Data parallelism: an engine on each node, with the tokens of one alone."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    arguments = AsyncEngineArgs(
        model=str(MODEL),
        max_model_len=512,
        kv_cache_memory_bytes=64 << 20,
        data_parallel_size=2,
        data_parallel_size_local=1,
        data_parallel_backend="ray",
    )
    found, answers = asyncio.run(generate_on_each(arguments))
    assert len({entry["ray node"] for entry in found} - {""}) == 2
    assert len({os.getpid(), *(entry["process"] for entry in found)}) == 3
    assert [entry["native layers"] for entry in found] == [4, 4]
    assert answers == [golden("short-1")[0]["token_ids"][:16]] * 2
