"""The engine gives the reference's tokens, however the work is cut."""

from __future__ import annotations

import math
import os

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from tests.integration.engine import (
    GOLDEN,
    MODEL,
    check_golden,
    engine,
    golden,
    golden_prompts,
    greedy,
    metric,
    prompt_logprobs,
    token_logprobs,
    worker,
)
from vllm_arm_cpu.platform import upstream_ops_available

SOME = ("short-1", "medium", "chat")
"""Golden prompts for what need not be tried on all: prefill is slow under emulation."""


def test_defaults() -> None:
    """Our platform, worker, attention and layers serve, and give the golden tokens."""
    with engine() as llm:
        assert type(current_platform).__name__ == "ArmCpuPlatform"
        upstream_ops = os.environ.get("VAC_TEST_UPSTREAM_OPS")
        if upstream_ops is not None:
            assert upstream_ops_available() == (upstream_ops == "1"), "vllm._C is not in the state that this run is for"
        assert type(worker(llm)).__name__ == "ArmCpuWorker"
        model = worker(llm).model_runner.model
        classes = {type(module).__name__ for module in model.modules()}
        assert {"ArmRMSNorm", "ArmSiluAndMul"} <= classes
        assert not {"RMSNorm", "SiluAndMul"} & classes
        linears = [module.cpu_linear for module in model.modules() if hasattr(module, "cpu_linear")]
        assert {type(linear).__name__ for linear in linears} == {"PackedLinear"}
        context = worker(llm).model_runner.compilation_config.static_forward_context
        assert {type(layer.impl).__name__ for layer in context.values()} == {"ArmAttentionImpl"}
        # Weights are in memory once: the originals are gone, tied ones share a copy.
        assert sum(parameter.numel() for name, parameter in model.named_parameters() if "proj" in name) == 0
        assert model.lm_head.cpu_linear is model.model.embed_tokens.cpu_linear
        assert llm.llm_engine.vllm_config.cache_config.block_size == 16

        check_golden(llm, max_tokens=48)
        # Alone, too: other tile shapes than in a batch.
        check_golden(llm, "short-1")


def test_chunked_prefill() -> None:
    """Prompts longer than the token budget are prefilled in pieces, mixed with decodes."""
    with engine(max_num_batched_tokens=48, max_num_seqs=4, enable_prefix_caching=False) as llm:
        assert max(map(len, golden_prompts("long"))) > 4 * 48
        check_golden(llm, "short-1", "short-3", "medium", "long")


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_preemption(enable_prefix_caching: bool) -> None:
    """Requests that lose their blocks to others begin again, and give the tokens and logprobs that they give alone."""
    names = ("short-1", "medium", "short-2", "chat", "longest")
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    inputs = [{"prompt_token_ids": ids} for ids in golden_prompts(*names)]
    # Their prompts fill the eight blocks that the null block leaves.
    few = {"max_model_len": 96, "num_gpu_blocks_override": 9, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    with engine(**few, enable_prefix_caching=enable_prefix_caching) as llm:
        together = llm.generate(inputs, params, use_tqdm=False)
        preempted = metric(llm, "vllm:num_preemptions")
        assert preempted > 0
        alone = [llm.generate(one, params, use_tqdm=False)[0] for one in inputs]
        assert metric(llm, "vllm:num_preemptions") == preempted
    for got, expected, reference in zip(together, alone, golden(*names), strict=True):
        tokens = list(got.outputs[0].token_ids)
        assert tokens == list(expected.outputs[0].token_ids) == reference["token_ids"][:20]
        assert len(got.prompt_logprobs) == len(got.prompt_token_ids)
        assert prompt_logprobs(got) == pytest.approx(prompt_logprobs(expected), abs=0.05)
        assert token_logprobs(got) == pytest.approx(token_logprobs(expected), abs=0.05)


def test_whole_prefill_without_prefix_cache() -> None:
    with engine(enable_chunked_prefill=False, enable_prefix_caching=False, max_num_batched_tokens=4096) as llm:
        check_golden(llm, "short-1", "long")
        assert metric(llm, "vllm:prefix_cache_hits") == 0


def test_prefix_cache_hits_and_changes_nothing() -> None:
    with engine(enable_prefix_caching=True, max_num_batched_tokens=128) as llm:
        check_golden(llm, "shared-prefix-1")
        assert metric(llm, "vllm:prefix_cache_hits") == 0
        check_golden(llm, "shared-prefix-2", "short-1")
        # The two share 181 tokens: all but the last, partial block of 16.
        assert metric(llm, "vllm:prefix_cache_hits") == 181 // 16 * 16


@pytest.mark.parametrize("num_threads", [1, 2])
def test_threads(num_threads: int) -> None:
    """The same tokens with a smaller and with a full team."""
    with engine(environ={"VAC_THREADS": str(num_threads)}) as llm:
        assert torch.get_num_threads() == num_threads
        check_golden(llm, *SOME)


@pytest.mark.parametrize("block_size", [32, 128])
def test_block_sizes(block_size: int) -> None:
    with engine(block_size=block_size) as llm:
        check_golden(llm, *SOME)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_types(dtype: str) -> None:
    with engine(dtype=dtype) as llm:
        check_golden(llm, *SOME)


def perplexity(llm: LLM) -> float:
    """Of the beginning of the held-out text, in windows behind one BOS each."""
    window, count = GOLDEN["perplexity"]["window"], GOLDEN["perplexity"]["first_windows"]
    tokenizer = llm.get_tokenizer()
    tokens = tokenizer((MODEL / "heldout.txt").read_text(), add_special_tokens=False)["input_ids"]
    assert len(tokens) == GOLDEN["perplexity"]["tokens"]
    windows = [
        {"prompt_token_ids": [tokenizer.bos_token_id, *tokens[start : start + window - 1]]}
        for start in range(0, count * (window - 1), window - 1)
    ]
    outputs = llm.generate(windows, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    logprobs = [logprob for output in outputs for logprob in prompt_logprobs(output)]
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8_e4m3"])
def test_kv_cache_types(kv_cache_dtype: str) -> None:
    """The held-out text is as likely as the FP32 reference finds it, within 1 %; a byte per element is half the memory.

    Prompts are prefilled in pieces: the later ones read what the cache keeps of the earlier.
    """
    window = GOLDEN["perplexity"]["window"]
    with engine(kv_cache_dtype=kv_cache_dtype, max_model_len=window + 1, max_num_batched_tokens=128) as llm:
        assert perplexity(llm) == pytest.approx(GOLDEN["perplexity"]["first"], rel=0.01)
        head_size, blocks = 64, llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        size = {"auto": 4 * head_size, "int8": 2 * head_size + 8, "fp8_e4m3": 2 * head_size}
        # 4 layers, 2 KV heads, 16 tokens a block.
        assert blocks == (64 << 20) // (4 * 2 * 16 * size[kv_cache_dtype])
        check_golden(llm, "short-1")


def test_sampling() -> None:
    """Seeds fix a request's tokens whatever is beside it; top-k and top-p restrict the choice."""
    prompt = golden_prompts()[0]

    def sample(llm: object, count: int, **parameters: object) -> list[list[int]]:
        params = SamplingParams(max_tokens=12, ignore_eos=True, **parameters)  # type: ignore[arg-type]
        outputs = llm.generate([{"prompt_token_ids": prompt}] * count, params, use_tqdm=False)  # type: ignore[attr-defined]
        return [list(output.outputs[0].token_ids) for output in outputs]

    with engine() as llm:
        alone = sample(llm, 1, temperature=1.0, seed=7)[0]
        assert sample(llm, 3, temperature=1.0, seed=7) == [alone] * 3
        assert len({tuple(tokens) for tokens in sample(llm, 6, temperature=1.0)}) > 1
        likeliest = greedy(llm, [prompt], 12)[0]
        assert sample(llm, 2, temperature=1.0, top_k=1) == [likeliest] * 2
        assert sample(llm, 2, temperature=1.0, top_p=1e-6) == [likeliest] * 2
        narrow = sample(llm, 8, temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, seed=1)
        assert all(0 <= token < 2048 for tokens in narrow for token in tokens)


def test_model_is_what_the_tests_think() -> None:
    """The checkpoint has the properties that make the tests above mean something."""
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 8 << 20
    longest = max(GOLDEN["prompts"], key=lambda entry: len(entry["prompt_token_ids"]))
    assert len(longest["prompt_token_ids"]) > 200
    assert all(len(entry["token_ids"]) >= 16 for entry in GOLDEN["prompts"])
