"""Sample one token each way, with a region of interest around vLLM's sampler (aarch64, under the cost plugin).

    run_sampler.py ours | upstream

The sampler objects are vLLM's own, with our patches or without; what they are given
is what the model runner gives them: for one request, or for some with drafted tokens. Prints a
JSON line per region, and whether the same seed gave the same tokens each time.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
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

DRAFT_VOCAB, NUM_DRAFTS = 128256, 3
NUCLEUS = {"temperature": 0.8, "top_p": 0.9}
DRAFTED: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "greedy, 1 request": (1, False, {"temperature": 0}),
    "greedy, 8 requests": (8, False, {"temperature": 0}),
    "temperature, 1 request": (1, False, {"temperature": 0.8}),
    "top-p 0.9, 1 request": (1, False, NUCLEUS),
    "top-p 0.9, 8 requests": (8, False, NUCLEUS),
    "top-p 0.9, draft model's probabilities, 1 request": (1, True, NUCLEUS),
    "top-p 0.9, draft model's probabilities, 8 requests": (8, True, NUCLEUS),
}
"""Requests, whether drafts were sampled, and parameters; three drafts a request, the last of which is always wrong."""


def prepare_drafts(num_reqs: int, with_probs: bool, case: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """What vLLM's rejection sampler takes: metadata of drafts, their probabilities or None, logits, and metadata.

    The target likes one token of each row, with a probability of 0.7 at temperature 1.
    """
    import torch
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    generator = torch.Generator().manual_seed(2)
    rows = num_reqs * (NUM_DRAFTS + 1)
    logits = torch.randn(rows, DRAFT_VOCAB, generator=generator) * 2.5
    liked = torch.randint(0, DRAFT_VOCAB, (rows,), generator=generator)
    logits[torch.arange(rows), liked] = logits.logsumexp(-1) + 0.85
    places = torch.arange(rows).view(num_reqs, NUM_DRAFTS + 1)
    drafts = liked[places[:, :NUM_DRAFTS]]
    drafts[:, -1] = (drafts[:, -1] + 1) % DRAFT_VOCAB
    metadata = SpecDecodeMetadata.make_dummy(drafts.tolist(), torch.device("cpu"))
    metadata.target_logits_indices = places[:, :NUM_DRAFTS].reshape(-1).to(torch.int32)
    metadata.bonus_logits_indices = places[:, NUM_DRAFTS].to(torch.int32)
    probs = None
    if with_probs:
        noise = torch.randn(rows, DRAFT_VOCAB, generator=generator) / 2
        probs = (logits + noise)[metadata.target_logits_indices].softmax(-1)
    params = SamplingParams(**case)
    is_greedy = params.temperature == 0
    return (
        metadata,
        probs,
        logits,
        SamplingMetadata(
            temperature=None if is_greedy else torch.full((num_reqs,), params.temperature),
            all_greedy=is_greedy,
            all_random=not is_greedy,
            top_p=torch.full((num_reqs,), params.top_p) if params.top_p < 1 else None,
            top_k=None,
            generators={},
            max_num_logprobs=None,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=torch.zeros(num_reqs),
            presence_penalties=torch.zeros(num_reqs),
            repetition_penalties=torch.ones(num_reqs),
            output_token_ids=[[] for _ in range(num_reqs)],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
            spec_token_ids=drafts.tolist(),
        ),
    )


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
    current_platform.register_triton_kernel_overrides()
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    torch.set_num_threads(1)
    sampler = Sampler()
    rejection_sampler = RejectionSampler(sampler)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 2.5
    with torch.inference_mode():
        for name, case in CASES.items():
            metadata = prepare(case)
            measure(name, f"one token of {VOCAB:,}", logits, lambda fresh, given=metadata: sampler(fresh, given))
        for name, case in DRAFTED.items():
            drafts, probs, rows, metadata = prepare_drafts(*case)
            measure(
                name,
                f"{NUM_DRAFTS} drafts a request, {DRAFT_VOCAB:,} tokens",
                rows,
                lambda fresh, given=(drafts, probs), metadata=metadata: rejection_sampler(*given, fresh, metadata),
            )


def measure(name: str, kind: str, logits: Any, sample: Callable[[Any], Any]) -> None:
    """Sample three times from the same logits and seed: the first calls make what later ones keep, the last counts."""
    import torch

    tokens = []
    for index in range(3):
        fresh = logits.clone()
        torch.manual_seed(5)
        with roi() if index == 2 else nullcontext():
            tokens.append(sample(fresh).sampled_token_ids)
    repeatable = torch.equal(tokens[0], tokens[1]) and torch.equal(tokens[1], tokens[2])
    print(json.dumps({"case": name, "kind": kind, "repeatable": repeatable}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
