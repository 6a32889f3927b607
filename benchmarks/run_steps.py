"""Run decode steps of tiny random Llama models, with a region of interest around them (aarch64, under the cost plugin).

    run_steps.py ours | upstream_eager | upstream_default SCRATCH_DIRECTORY [bf16 | w8a8 | w4a8 | moe]
        [--async-scheduling]

Prints a JSON line per region: layers and sequences of the engine, steps in
the region; and at the end one with the process's executable mappings.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "cost"))

from roi import roi

LAYERS = (2, 10)
SEQUENCES = (1, 8)
PROMPT, WARMUP, STEPS = 20, 8, 16
"""Tokens of a prompt; steps before the region, and in it: as many as a KV block has tokens, so that each
sequence gets one new block."""


# Of compressed-tensors: weights by output channel or by group, activations by token.
WEIGHTS: dict[str, dict[str, Any]] = {
    "w8a8": {"num_bits": 8, "strategy": "channel"},
    "w4a8": {"num_bits": 4, "strategy": "group", "group_size": 128},
}


def checkpoint(directory: Path, layers: int, kind: str) -> str:
    """A checkpoint without weights: the engine makes them.

    kind: ``bf16`` or one of ``WEIGHTS`` for a Llama; ``moe`` for a Qwen3-MoE whose tokens take 2 of 8 experts, each
    half as wide as the Llama's MLP.
    """
    from transformers import LlamaConfig, Qwen3MoeConfig

    path = directory / f"{kind}-{layers}"
    sizes = {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if kind == "moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64}
        Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **sizes, **experts).save_pretrained(path)
    else:
        LlamaConfig(architectures=["LlamaForCausalLM"], **sizes).save_pretrained(path)
    if kind in WEIGHTS:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization(kind)}))
    return str(path)


def quantization(kind: str) -> dict[str, Any]:
    """As a checkpoint's configuration has it."""
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"type": "int", "symmetric": True, **WEIGHTS[kind]},
                "input_activations": {
                    "type": "int",
                    "num_bits": 8,
                    "symmetric": True,
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
    }


def prepare_upstream() -> None:
    """Let vLLM's own platform run under the emulator."""
    if os.environ.get("UPSTREAM_SHIM"):
        ctypes.CDLL(os.environ["UPSTREAM_SHIM"], mode=ctypes.RTLD_GLOBAL)
    from vllm.utils import cpu_resource_utils

    # It asks lscpu, which does not run beside the emulator.
    cpu_resource_utils._get_cpu_list = cpu_resource_utils._synthesize_cpu_list


def schedule_asynchronously() -> None:
    """Turn on what vLLM's CPU platform turns off: the next step is scheduled before the last one's output is used."""
    from vllm.platforms import current_platform

    original = type(current_platform).check_and_update_config

    def check_and_update_config(config: Any) -> None:
        original(config)
        config.scheduler_config.async_scheduling = True

    type(current_platform).check_and_update_config = staticmethod(check_and_update_config)


def make_engine(model: str, eager: bool) -> Any:
    """An engine inside this process."""
    from vllm import LLM
    from vllm.model_executor.models import registry

    # vLLM looks at a model's class in a process of its own, which takes a minute under emulation.
    registry._run_in_subprocess = lambda function: function()
    return LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=eager,
        max_model_len=512,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        seed=0,
    )


def close(llm: Any) -> None:
    """End an engine so that the next one can start."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def decode(llm: Any, sequences: int) -> None:
    """Start greedy sequences, and mark STEPS of their decode steps."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=WARMUP + STEPS + 8, ignore_eos=True, detokenize=False)
    for i in range(sequences):
        prompt = [(7 * i + 3 * j) % 2000 for j in range(PROMPT)]
        engine.add_request(f"{sequences}-{i}", {"prompt_token_ids": prompt}, params)
    for _ in range(1 + WARMUP):
        engine.step()
    with roi():
        for _ in range(STEPS):
            outputs = engine.step()
            assert len(outputs) == sequences
    while engine.has_unfinished_requests():
        engine.step()


def mappings() -> list[tuple[int, int, int, str]]:
    """(begin, end, file offset, path) of everything executable; the path of code made at run time is empty."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, offset, _, _, *path = line.split(None, 5)
        if "x" in permissions:
            begin, end = (int(address, 16) for address in addresses.split("-"))
            found.append((begin, end, int(offset, 16), path[0] if path else ""))
    return found


def main(side: str, directory: Path, kind: str = "bf16", *options: str) -> None:
    if side != "ours":
        prepare_upstream()
    is_async = "--async-scheduling" in options
    if is_async:
        schedule_asynchronously()
    for layers in LAYERS:
        llm = make_engine(checkpoint(directory, layers, kind), eager=side != "upstream_default")
        from vllm.platforms import current_platform

        platform = type(current_platform).__name__
        assert platform == ("ArmCpuPlatform" if side == "ours" else "CpuPlatform"), platform
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == is_async
        for sequences in SEQUENCES:
            decode(llm, sequences)
            print(json.dumps({"layers": layers, "sequences": sequences, "steps": STEPS}), flush=True)
        close(llm)
        del llm
    print(json.dumps({"mappings": mappings()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
