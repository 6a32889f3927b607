"""Sample one token each way, with a region of interest around vLLM's sampler (aarch64, under the cost plugin).

    run_sampler.py ours | upstream

The sampler object is vLLM's own, with our patches or without; what it is given
is what the model runner gives it for one request. Prints a JSON line per region,
and whether the same seed gave the same token each time.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "cost"))

from roi import roi

VOCAB = 151936
PROMPT, OUTPUT = 1000, 200
"""Tokens that the request has behind it, for the penalties."""
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top-k 20, top-p 0.95": {"top_k": 20, "top_p": 0.95, "temperature": 0.8},
    "top-p 0.95": {"top_p": 0.95, "temperature": 0.8},
    "min-p 0.05": {"min_p": 0.05, "temperature": 0.8},
    "min-p, top-k, top-p": {"min_p": 0.05, "top_k": 20, "top_p": 0.95, "temperature": 0.8},
    "penalties, top-k, top-p": {"top_k": 20, "top_p": 0.95, "temperature": 0.8, **PENALTIES},
    "greedy, penalties": {"temperature": 0, **PENALTIES},
    "greedy, logit bias": {"temperature": 0, "logit_bias": {7: 1.0, 11: -2.0, 1000: 0.5, 150000: 3.0}},
    "greedy, min tokens": {"temperature": 0, "min_tokens": 500, "stop_token_ids": [151643, 151645]},
    "greedy, bad words": {"temperature": 0, "bad_words": [[5], [9, 10], [11, 12, 13], [14, 15]]},
    "greedy, allowed ids": {"temperature": 0, "allowed_token_ids": list(range(0, VOCAB, 3))},
    "greedy, 5 logprobs": {"temperature": 0, "logprobs": 5},
}


def prepare(case: dict[str, Any]) -> Any:
    """vLLM's metadata for one request with these parameters."""
    import torch
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import (
        LogitBiasLogitsProcessor,
        MinPLogitsProcessor,
        MinTokensLogitsProcessor,
    )
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.sample.metadata import SamplingMetadata

    bad_words = case.get("bad_words")
    params = SamplingParams(max_tokens=1000, **{name: value for name, value in case.items() if name != "bad_words"})
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, VOCAB, (1, PROMPT), generator=generator)
    output = torch.randint(0, 4000, (OUTPUT,), generator=generator).tolist()
    config, cpu = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8)), torch.device("cpu")
    kinds = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
    processors = LogitsProcessors([kind(config, cpu, False) for kind in kinds])
    for processor in processors.all:
        processor.update_state(BatchUpdate(1, [], [(0, params, prompt[0].tolist(), output)], []))
    allowed = None
    if params.allowed_token_ids:
        allowed = torch.ones(1, VOCAB, dtype=torch.bool)
        allowed[0, params.allowed_token_ids] = False
    is_greedy, penalized = params.temperature == 0, "repetition_penalty" in case
    return SamplingMetadata(
        temperature=None if is_greedy else torch.tensor([params.temperature]),
        all_greedy=is_greedy,
        all_random=not is_greedy,
        top_p=torch.tensor([params.top_p]) if params.top_p < 1 else None,
        top_k=torch.tensor([params.top_k], dtype=torch.int32) if params.top_k > 0 else None,
        generators={},
        max_num_logprobs=params.logprobs,
        no_penalties=not penalized,
        prompt_token_ids=prompt if penalized else None,
        frequency_penalties=torch.tensor([params.frequency_penalty]),
        presence_penalties=torch.tensor([params.presence_penalty]),
        repetition_penalties=torch.tensor([params.repetition_penalty]),
        output_token_ids=[output] if penalized or bad_words else [],
        allowed_token_ids_mask=allowed,
        bad_words_token_ids={0: bad_words} if bad_words else {},
        logitsprocs=processors,
    )


def main(side: str) -> None:
    if os.environ.get("UPSTREAM_SHIM"):
        ctypes.CDLL(os.environ["UPSTREAM_SHIM"], mode=ctypes.RTLD_GLOBAL)
    import torch
    from vllm.platforms import current_platform

    platform = type(current_platform).__name__
    assert platform == ("ArmCpuPlatform" if side == "ours" else "CpuPlatform"), platform
    current_platform.import_kernels()
    if side == "ours":
        from vllm_arm_cpu.compat import sampler_ops

        sampler_ops.apply()
    from vllm.v1.sample.sampler import Sampler

    torch.set_num_threads(1)
    sampler = Sampler()
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 2.5
    with torch.inference_mode():
        for name, case in CASES.items():
            metadata = prepare(case)
            tokens = []
            # Twice before: the first call makes what later ones keep.
            for index in range(3):
                fresh = logits.clone()
                torch.manual_seed(5)
                if index < 2:
                    tokens.append(sampler(fresh, metadata).sampled_token_ids)
                    continue
                with roi():
                    tokens.append(sampler(fresh, metadata).sampled_token_ids)
            print(json.dumps({"case": name, "repeatable": bool(tokens[0] == tokens[1] == tokens[2])}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
