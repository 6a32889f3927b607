"""vLLM's sampler on our kernels gives what vLLM's own functions give, and an engine's requests what they ask for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinPLogitsProcessor
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from tests.integration.engine import engine, golden_prompts, greedy, worker
from vllm_arm_cpu import compat
from vllm_arm_cpu.sampling import sampler

VOCABS = [50, 2048, 32003]


@pytest.fixture(scope="module", autouse=True)
def _patched() -> None:
    compat.apply()


def logits_of(rows: int, vocab: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def min_p_of(values: list[float]) -> MinPLogitsProcessor:
    """vLLM's processor for a batch of requests with these values."""
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=32))
    processor = MinPLogitsProcessor(config, torch.device("cpu"), False)
    added: list[Any] = [(i, SamplingParams(min_p=value), [], []) for i, value in enumerate(values)]
    processor.update_state(BatchUpdate(len(values), [], added, []))
    return processor


@pytest.mark.parametrize("vocab", VOCABS)
def test_penalties_are_vllms_bit_by_bit(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    choices = [(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (1.0, 0.4, 0.0), (1.0, 0.0, -0.6), (0.8, -0.3, 0.2), (1.1, 0.2, 0.1)]
    repetition, frequency, presence = torch.tensor(choices).T.contiguous()
    rows = len(choices)
    prompt = torch.randint(0, vocab, (rows, 90), generator=generator)
    for row in range(rows):
        prompt[row, 90 - 13 * row :] = vocab
    output = [torch.randint(-1, vocab, (21 * row,), generator=generator).tolist() for row in range(rows)]
    logits = logits_of(rows, vocab, 1)
    logits[:, 3] = -torch.inf
    expected = sampler.upstream_penalties(logits.clone(), prompt, presence, frequency, repetition, output)
    assert not torch.equal(expected, logits)
    result = sampler.apply_all_penalties(logits.clone(), prompt, presence, frequency, repetition, output)
    assert torch.equal(result, expected)
    # A view with other strides, and a type that only vLLM's function takes.
    wide = torch.zeros(rows, vocab + 5)
    wide[:, :vocab] = logits
    sampler.apply_all_penalties(wide[:, :vocab], prompt, presence, frequency, repetition, output)
    assert torch.equal(wide[:, :vocab], expected)
    assert (wide[:, vocab:] == 0).all()
    half = sampler.apply_all_penalties(logits.half(), prompt, presence, frequency, repetition, output)
    assert half.dtype == torch.float16


@pytest.mark.parametrize("vocab", VOCABS)
def test_min_p_masks_what_vllm_masks(vocab: int) -> None:
    values = [0.0, 1e-5, 0.01, 0.05, 0.1, 0.3, 0.9]
    processor = min_p_of(values)
    compared = 0
    for seed in range(8):
        logits = logits_of(len(values), vocab, seed)
        expected = sampler.upstream_min_p(processor, logits.clone())
        result = sampler.apply_min_p(processor, logits.clone())
        # Probabilities that both sides round, this near to the bound, may fall on either side of it.
        distance = logits - logits.max(-1, keepdim=True).values - torch.tensor(values).log()[:, None]
        clear = (distance.abs() > 1e-5) | torch.isinf(distance)
        assert torch.equal(result[clear], expected[clear])
        compared += int(clear.sum())
        assert (result[1:] == -torch.inf).any()
    assert compared >= 0.9999 * 8 * len(values) * vocab


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_vllms(dtype: torch.dtype) -> None:
    logits = logits_of(7, 32003, 8).to(dtype)
    expected = sampler.upstream_compute_logprobs(logits)
    logprobs = sampler.compute_logprobs(logits)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    # Torch adds up all exponentials of a row in FP32.
    exact = logits.double().log_softmax(-1)
    assert (logprobs - exact).abs().max() < 2e-6
    tokens = torch.tensor([0, 5, 32002, 7, 9, 11, 13])
    tokens[3] = logprobs[3].argmax()
    for count in (0, 1, 20):
        mine = sampler.gather_logprobs(logprobs, count, tokens)
        theirs = sampler.upstream_gather_logprobs(logprobs, count, tokens)
        assert torch.equal(mine.logprobs, theirs.logprobs)
        assert torch.equal(mine.selected_token_ranks, theirs.selected_token_ranks)
        assert mine.logprob_token_ids.dtype == theirs.logprob_token_ids.dtype
        if dtype == torch.float32:
            assert torch.equal(mine.logprob_token_ids, theirs.logprob_token_ids)


def metadata_of(rows: int, processors: list[Any], seeds: dict[int, int], **filters: Any) -> SamplingMetadata:
    return SamplingMetadata(
        temperature=torch.linspace(0.5, 1.5, rows),
        all_greedy=False,
        all_random=True,
        top_p=filters.get("top_p"),
        top_k=filters.get("top_k"),
        generators={row: torch.Generator().manual_seed(seed) for row, seed in seeds.items()},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(rows),
        presence_penalties=torch.zeros(rows),
        repetition_penalties=torch.ones(rows),
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(processors),
    )


def test_min_p_joined_with_the_other_filters_samples_the_same() -> None:
    """One kernel for all three filters, or min-p by itself in front: the same tokens from the same seeds."""
    rows, vocab = 6, 32003
    min_p = min_p_of([0.02, 0.0, 0.1, 0.3, 0.05, 0.2])
    filters = {
        "top_k": torch.tensor([20, 5, vocab, 3, 50, vocab], dtype=torch.int32),
        "top_p": torch.tensor([0.9, 0.8, 0.95, 1.0, 0.5, 1.0]),
    }
    seeds = {row: 100 + row for row in range(rows)}

    class Behind:
        """A processor that wants to see what min-p left."""

        def is_argmax_invariant(self) -> bool:
            return True

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            seen.append(int((logits == -torch.inf).sum()))
            return logits

    for chosen in ({}, {"top_k": filters["top_k"]}, {"top_p": filters["top_p"]}, filters):
        seen: list[int] = []
        logits = logits_of(rows, vocab, 2)
        joined, _ = Sampler().sample(logits.clone(), metadata_of(rows, [min_p], seeds, **chosen))
        apart, _ = Sampler().sample(logits.clone(), metadata_of(rows, [min_p, Behind()], seeds, **chosen))
        assert torch.equal(joined, apart)
        assert seen[0] > 0
        scaled = logits / torch.linspace(0.5, 1.5, rows)[:, None]
        allowed = sampler.upstream_min_p(min_p, scaled.clone()) > -torch.inf
        assert allowed[torch.arange(rows), joined].all()
    # Without min-p nothing is left behind of it.
    plain = Sampler()
    tokens, _ = plain.sample(logits.clone(), metadata_of(rows, [min_p_of([0.0] * rows)], seeds, **filters))
    assert tokens.shape == (rows,)
    assert getattr(plain.topk_topp_sampler, "min_p", None) is None


def test_min_p_follows_the_distribution() -> None:
    """Chi-square of 20,000 draws against vLLM's own mask."""
    rows, vocab = 20000, 40
    logits = logits_of(1, vocab, 3).expand(rows, vocab) / 2
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=rows))
    min_p = MinPLogitsProcessor(config, torch.device("cpu"), False)
    added: list[Any] = [(i, SamplingParams(min_p=0.1), [], []) for i in range(rows)]
    min_p.update_state(BatchUpdate(rows, [], added, []))
    metadata = metadata_of(rows, [min_p], {})
    metadata.temperature = torch.ones(rows)
    torch.manual_seed(4)
    tokens, _ = Sampler().sample(logits.clone(), metadata)
    probs = sampler.upstream_min_p(min_p_of([0.1]), logits[:1].clone()).softmax(-1)[0].double()
    counts = torch.bincount(tokens, minlength=vocab).double()
    used = probs > 0
    assert 3 < used.sum() < vocab
    assert counts[~used].sum() == 0
    expected = probs[used] * rows
    statistic = ((counts[used] - expected) ** 2 / expected).sum()
    degrees = int(used.sum()) - 1
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_allowed_tokens_are_vllms(dtype: torch.dtype) -> None:
    logits = logits_of(3, 32003, 9).to(dtype)
    mask = torch.rand(3, 32003, generator=torch.Generator().manual_seed(10)) < 0.9
    mask[1] = False
    metadata = metadata_of(3, [], {})
    metadata.allowed_token_ids_mask = mask
    expected = sampler.upstream_processors(Sampler(), logits.clone(), metadata, False)
    assert torch.equal(Sampler().apply_logits_processors(logits.clone(), metadata, False), expected)
    assert metadata.allowed_token_ids_mask is mask
    assert not torch.equal(expected, logits)


def tokens_of(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def contains(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[i : i + len(part)] == part for i in range(len(tokens)))


def word_within(tokenizer: Any, tokens: list[int]) -> tuple[str, list[int]]:
    """A whole word of a text, with the tokens that it has there and that vLLM takes for it."""
    for word in tokenizer.decode(tokens).split()[1:-1]:
        alone, behind = (tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word}"))
        if contains(tokens, alone):
            return word, alone
        # Behind a space a word counts only if it has as many tokens there.
        if len(behind) == len(alone) and contains(tokens, behind):
            return word, behind
    raise AssertionError("no word is tokenized in the text as it is alone")


def test_an_engine_applies_what_requests_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties, bad words, biases, minimum lengths and allowed tokens, in one batch and each alone."""
    prompt = golden_prompts("short-1")[0]
    masked_rows = 0

    with engine(max_num_seqs=16) as llm:
        plain = greedy(llm, [prompt], 16)[0]
        count = 16
        common: dict[str, Any] = {"max_tokens": count, "ignore_eos": True, "temperature": 0}
        word = plain[2]
        params = [
            SamplingParams(**common),
            SamplingParams(**common, repetition_penalty=1.8),
            SamplingParams(**common, frequency_penalty=-2.0, presence_penalty=-2.0),
            SamplingParams(**common, logit_bias={word: -100.0}),
            SamplingParams(**common, allowed_token_ids=[40, 41, 42]),
            SamplingParams(max_tokens=count, temperature=0, stop_token_ids=[plain[1]], min_tokens=6),
            SamplingParams(**(common | {"temperature": 0.9}), min_p=0.05, top_k=30, top_p=0.95, seed=11),
            SamplingParams(**(common | {"temperature": 0.9}), min_p=0.2, repetition_penalty=1.2, seed=12),
        ]
        bad, bad_ids = word_within(llm.get_tokenizer(), plain)
        params.append(SamplingParams(**common, bad_words=[bad]))

        original = sampler.apply_all_penalties
        from vllm.v1.sample import sampler as upstream

        assert upstream.apply_all_penalties is original
        native, masks = sampler.upstream_penalties, sampler.mask_top_k_top_p

        def counted_masks(logits: torch.Tensor, *args: Any) -> None:
            nonlocal masked_rows
            masked_rows += len(logits)
            masks(logits, *args)

        monkeypatch.setattr(sampler, "mask_top_k_top_p", counted_masks)
        together = tokens_of(llm, [prompt] * len(params), params)
        alone = [tokens_of(llm, [prompt], [one])[0] for one in params]
        assert together == alone
        assert masked_rows > 0

        assert together[0] == plain
        assert together[1] != plain
        assert together[2] != plain
        assert word not in together[3]
        assert set(together[4]) <= {40, 41, 42}
        assert len(together[5]) >= 6
        assert plain[1] not in together[5][:6]
        assert not contains(together[8], bad_ids)

        # The same penalties by vLLM's own function.
        monkeypatch.setattr(upstream, "apply_all_penalties", native)
        assert tokens_of(llm, [prompt] * 2, [params[1], params[2]]) == together[1:3]
        monkeypatch.setattr(upstream, "apply_all_penalties", original)
        assert worker(llm).model_runner.plain is not None


def test_a_bias_is_added_where_it_belongs() -> None:
    """vLLM's own sparse processors stay: they touch what is listed, and nothing else."""
    processor = LogitBiasLogitsProcessor(None, torch.device("cpu"), False)
    added: list[Any] = [(1, SamplingParams(logit_bias={5: 2.5, 7: -1.0}), [], [])]
    processor.update_state(BatchUpdate(2, [], added, []))
    logits = logits_of(2, 50, 6)
    expected = logits.clone()
    expected[1, 5] += 2.5
    expected[1, 7] -= 1.0
    assert torch.equal(processor.apply(logits.clone()), expected)
