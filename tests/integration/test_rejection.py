"""Rejection sampling of drafts in vLLM's own class, and what stands in for its Triton kernels."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from tests.integration.test_sampler import logits_of, metadata_of
from vllm_arm_cpu import compat
from vllm_arm_cpu.compat import speculative_kernels
from vllm_arm_cpu.sampling import rejection

Kernels = speculative_kernels


@pytest.fixture(scope="module", autouse=True)
def _patched() -> None:
    compat.apply()
    current_platform.register_triton_kernel_overrides()


def ends_of(num_drafts: list[int]) -> torch.Tensor:
    return torch.tensor(list(accumulate(num_drafts)), dtype=torch.int32)


def metadata(temperature: list[float], seeds: dict[int, int] | None = None, **filters: Any) -> SamplingMetadata:
    made = metadata_of(len(temperature), [], seeds or {}, **filters)
    made.temperature = torch.tensor(temperature)
    made.all_greedy, made.all_random = not any(temperature), all(temperature)
    return made


class Batch:
    """Drafts of requests, of which some are right, with all that ``rejection_sample`` takes."""

    def __init__(self, num_drafts: list[int], vocab: int = 2053, draft_probs: bool = False, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.num_drafts, rows = num_drafts, sum(num_drafts)
        self.logits = torch.randn(rows, vocab, generator=generator) * 6
        self.draft_probs = None
        if draft_probs:
            self.draft_probs = (self.logits + torch.randn(rows, vocab, generator=generator) / 2).softmax(-1)
        self.drafts = torch.multinomial(self.logits.softmax(-1), 1, generator=generator).view(-1).to(torch.int32)
        likeliest = torch.rand(rows, generator=generator) < 0.6
        self.drafts = torch.where(likeliest, self.logits.argmax(-1), self.drafts).to(torch.int32)
        self.drafts[torch.rand(rows, generator=generator) < 0.1] = -1
        self.bonus = torch.randint(0, vocab, (len(num_drafts), 1), generator=generator)

    def sample(self, sampling_metadata: SamplingMetadata, function: Any = None, **arguments: Any) -> torch.Tensor:
        function = function or rejection_sampler.rejection_sample
        result: torch.Tensor = function(
            self.drafts,
            self.num_drafts,
            max(self.num_drafts),
            ends_of(self.num_drafts),
            self.draft_probs,
            self.logits.clone(),
            self.bonus,
            sampling_metadata,
            **arguments,
        )
        assert result.shape == (len(self.num_drafts), max(self.num_drafts) + 1)
        assert result.dtype == torch.int32
        return result

    def part(self, requests: list[int]) -> Batch:
        """These requests by themselves, in this order."""
        made = object.__new__(Batch)
        ends = ends_of(self.num_drafts).tolist()
        rows = [row for i in requests for row in range(ends[i] - self.num_drafts[i], ends[i])]
        made.num_drafts = [self.num_drafts[i] for i in requests]
        made.logits, made.drafts, made.bonus = self.logits[rows], self.drafts[rows], self.bonus[requests]
        made.draft_probs = None if self.draft_probs is None else self.draft_probs[rows]
        return made


NUM_DRAFTS = [3, 0, 5, 1, 2, 4, 0, 3]
MIXED = [0.8, 1.0, 0.0, 0.7, 0.0, 1.3, 0.0, 1.0]


@pytest.mark.parametrize("draft_probs", [False, True])
@pytest.mark.parametrize("temperature", [[0.0] * 8, [1.0] * 8, MIXED], ids=["greedy", "random", "mixed"])
@pytest.mark.parametrize("synthetic", [False, True])
def test_accepts_what_vllm_accepts(temperature: list[float], draft_probs: bool, synthetic: bool) -> None:
    """Tokens are those of vLLM's function from the same numbers, but for the ones in rejected drafts' places."""
    rates = {"synthetic_mode": True, "synthetic_conditional_rates": torch.tensor([0.9, 0.7, 0.6, 0.5, 0.5])}
    accepted = rejected = 0
    for seed in range(6):
        batch = Batch(NUM_DRAFTS, draft_probs=draft_probs, seed=seed)
        results = []
        for function in (rejection.upstream_rejection_sample, rejection.rejection_sample):
            torch.manual_seed(seed)
            results.append(batch.sample(metadata(temperature), function, **(rates if synthetic else {})))
        theirs, ours = results
        assert torch.equal(theirs >= 0, ours >= 0)
        count = (ours >= 0).sum(1)
        for request, drafts in enumerate(NUM_DRAFTS):
            last = int(count[request]) - 1
            assert torch.equal(ours[request, :last], theirs[request, :last])
            # A bonus token, or what a greedy request has instead of a draft, is known.
            if last == drafts or temperature[request] == 0:
                assert ours[request, last] == theirs[request, last]
            accepted += last
            rejected += last < drafts
    assert accepted > 10
    assert rejected > 10


@pytest.mark.parametrize("draft_probs", [False, True])
def test_seeds_fix_tokens(draft_probs: bool) -> None:
    """Alone, in a batch, in another order, on other threads: a request with a generator gets the same tokens."""
    batch = Batch(NUM_DRAFTS, draft_probs=draft_probs)
    seeds = {0: 3, 2: 4, 4: 5, 5: 6, 6: 7}
    temperature = [0.8, 1.0, 1.0, 0.7, 0.9, 1.3, 1.0, 1.0]
    together = batch.sample(metadata(temperature, seeds))
    for order in ([5, 4, 1, 2, 0, 6], *([request] for request in seeds if NUM_DRAFTS[request])):
        part = batch.part(order)
        own = {place: seeds[request] for place, request in enumerate(order) if request in seeds}
        result = part.sample(metadata([temperature[request] for request in order], own))
        width = result.shape[1]
        for place in own:
            assert torch.equal(result[place], together[order[place], :width])
            assert (together[order[place], width:] == -1).all()
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        again = batch.sample(metadata(temperature, seeds))
        torch.set_num_threads(before)
        assert all(torch.equal(again[request], together[request]) for request in seeds)
    # Other seeds, other tokens; and those without a seed differ each time.
    others = [batch.sample(metadata(temperature, {request: 100 + i for request in seeds})) for i in range(8)]
    assert any(not torch.equal(other, together) for other in others)


def test_a_request_without_drafts_draws_nothing() -> None:
    batch = Batch(NUM_DRAFTS)
    sampling_metadata = metadata([1.0] * 8, {0: 3, 1: 4})
    before = [generator.get_state() for generator in sampling_metadata.generators.values()]
    tokens = batch.sample(sampling_metadata)
    after = [generator.get_state() for generator in sampling_metadata.generators.values()]
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert tokens[1].tolist() == [int(batch.bonus[1]), -1, -1, -1, -1, -1]


@pytest.mark.parametrize("temperature", [[0.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
def test_no_drafts_at_all(temperature: list[float]) -> None:
    """Rows that are not there are no reason to leave a request out."""
    batch = Batch([0, 0])
    assert batch.sample(metadata(temperature)).tolist() == batch.bonus.tolist()


def test_what_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise in FP64, FLy, and parameters of a later version."""
    calls: list[dict[str, Any]] = []
    batch, sampling_metadata = Batch([2, 1]), metadata([1.0, 1.0])
    expected = batch.sample(sampling_metadata, use_fp64_gumbel=True)
    assert ((expected == -1) | (expected >= 0)).all()

    def upstream(*arguments: Any, **others: Any) -> torch.Tensor:
        calls.append(others)
        return expected

    monkeypatch.setattr(rejection, "upstream_rejection_sample", upstream)
    off = {"fly_window_size": None, "fly_entropy_threshold": None, "fly_entropy_top_k": 3}
    fly = {"fly_window_size": 4, "fly_entropy_threshold": 0.5, "fly_entropy_top_k": 3}
    batch.sample(sampling_metadata, **off)
    assert calls == []
    for arguments in ({"use_fp64_gumbel": True}, fly, {"unheard_of": 1}):
        assert batch.sample(sampling_metadata, **arguments) is expected
        assert calls[-1].items() >= arguments.items()
    with pytest.raises(ValueError, match="1 synthetic acceptance rates for up to 2 drafts"):
        batch.sample(sampling_metadata, synthetic_mode=True, synthetic_conditional_rates=torch.ones(1))


@pytest.mark.parametrize("filters", ["none", "k", "p", "both"])
def test_constraints_are_vllms(filters: str) -> None:
    vocab = 32003
    chosen: dict[str, torch.Tensor] = {}
    if filters in ("k", "both"):
        chosen["top_k"] = torch.tensor([20, 5, vocab, 3, 50, 7, 1, 9], dtype=torch.int32)
    if filters in ("p", "both"):
        chosen["top_p"] = torch.tensor([0.9, 0.8, 0.95, 1.0, 0.5, 0.3, 0.7, 0.99])
    sampling_metadata = metadata(MIXED, **chosen)
    logits, ends = logits_of(sum(NUM_DRAFTS), vocab, 3), ends_of(NUM_DRAFTS)
    # Top-p on sums of thousands of probabilities may round to another side: their order differs.
    expected = rejection.upstream_constraints(logits.double(), ends, sampling_metadata)
    own = logits.clone()
    result = rejection_sampler.apply_sampling_constraints(own, ends, sampling_metadata)
    assert result is own
    kept, expected_kept = result > -torch.inf, expected > -torch.inf
    assert (kept.sum(1) - expected_kept.sum(1)).abs().max() <= (2 if "top_p" in chosen else 0)
    both = kept & expected_kept
    torch.testing.assert_close(result[both].double(), expected[both], rtol=1e-6, atol=0)
    greedy = metadata([0.0] * 8)
    assert torch.equal(rejection_sampler.apply_sampling_constraints(logits.clone(), ends, greedy), logits)
    half = rejection_sampler.apply_sampling_constraints(logits.half(), ends, metadata(MIXED))
    assert half.dtype == torch.float16


@pytest.mark.parametrize("draft_probs", [False, True])
def test_tokens_follow_the_targets_distribution(draft_probs: bool) -> None:
    """Chi-square of 16,384 requests through temperature and top-k: the first token is the target's, however drafted."""
    draws, vocab, top_k = 16384, 40, 12
    torch.manual_seed(11)
    target, draft = logits_of(2, vocab, 12)
    batch = Batch([1] * draws, vocab)
    probs = ((target + draft) / 3).softmax(0)
    batch.drafts = torch.multinomial(probs, draws, replacement=True).to(torch.int32)
    batch.draft_probs = probs.expand(draws, vocab).contiguous() if draft_probs else None
    sampling_metadata = metadata([1.4] * draws, top_k=torch.full((draws,), top_k, dtype=torch.int32))
    batch.logits = rejection_sampler.apply_sampling_constraints(
        target.expand(draws, vocab).clone(), ends_of(batch.num_drafts), sampling_metadata
    )
    tokens = batch.sample(sampling_metadata)
    counts = torch.bincount(tokens[:, 0], minlength=vocab).double()
    scaled = target.double() / 1.4
    scaled[scaled < scaled.topk(top_k).values[-1]] = -torch.inf
    expected = scaled.softmax(0) * draws
    assert counts[expected == 0].sum() == 0
    used = expected > 5
    assert used.sum() > 8
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    degrees = int(used.sum()) - 1
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5
    accepted = (tokens[:, 1] >= 0).sum()
    assert 0.05 * draws < accepted < 0.95 * draws


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_logprobs", [None, 2])
def test_the_class_gives_what_vllms_gives(dtype: torch.dtype, mode: Any, num_logprobs: int | None) -> None:
    """Rows of logits are taken out as rows, with the same tokens and logprobs, and the logits stay as they are."""
    batch = Batch(NUM_DRAFTS)
    ends = ends_of(NUM_DRAFTS) + torch.arange(1, 9)
    drafts = SpecDecodeMetadata.make_dummy(
        [ids.tolist() for ids in batch.drafts.split(NUM_DRAFTS)], torch.device("cpu")
    )
    drafts.bonus_logits_indices = (ends - 1).to(torch.int32)
    is_bonus = torch.zeros(int(ends[-1]), dtype=torch.bool)
    is_bonus[ends - 1] = True
    drafts.target_logits_indices = (~is_bonus).nonzero().view(-1).to(torch.int32)
    logits = logits_of(int(ends[-1]), 2053, 4).to(dtype)
    logits[~is_bonus] = batch.logits.to(dtype)
    sampler = rejection_sampler.RejectionSampler(Sampler(logprobs_mode=mode))
    greedy = metadata([0.0] * 8)
    greedy.max_num_logprobs = num_logprobs
    results = []
    for forward in (rejection.upstream_forward, type(sampler).forward):
        given = logits.clone()
        results.append(forward(sampler, drafts, None, given, greedy))
        assert torch.equal(given, logits)
    theirs, ours = results
    assert torch.equal(theirs.sampled_token_ids, ours.sampled_token_ids)
    assert type(ours.sampled_token_ids) is torch.Tensor
    assert (theirs.logprobs_tensors is None) == (ours.logprobs_tensors is None) == (num_logprobs is None)
    if num_logprobs is not None:
        assert torch.equal(theirs.logprobs_tensors.logprobs, ours.logprobs_tensors.logprobs)
        assert torch.equal(theirs.logprobs_tensors.logprob_token_ids, ours.logprobs_tensors.logprob_token_ids)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("synthetic", [False, True])
def test_stand_ins_walk_as_the_whole_does(synthetic: bool, dtype: torch.dtype) -> None:
    """vLLM's function on the stand-ins for its kernels, with tensors of other types; each leaves the others' rows."""
    batch = Batch(NUM_DRAFTS, draft_probs=True)
    ends, rows = ends_of(NUM_DRAFTS), sum(NUM_DRAFTS)
    is_greedy = torch.tensor(MIXED) == 0
    uniform, rates = torch.rand(rows, dtype=torch.float64), torch.tensor([0.9, 0.7, 0.6, 0.5, 0.5])
    recovered = torch.arange(rows) + 1000
    outputs = torch.full((2, 8, 6), -1, dtype=torch.int32)
    common = [ends.to(dtype), batch.drafts.to(dtype)]
    Kernels.rejection_greedy_sample(
        outputs[0], *common, batch.logits.argmax(-1), batch.bonus, is_greedy, 5, uniform, rates, synthetic
    )
    Kernels.rejection_random_sample(
        outputs[1],
        *common,
        batch.draft_probs,
        batch.logits.softmax(-1),
        batch.bonus,
        recovered.to(dtype),
        uniform,
        is_greedy,
        5,
        2053,
        synthetic_conditional_rates=rates,
        SYNTHETIC_MODE=synthetic,
    )
    assert (outputs[0][~is_greedy] == -1).all()
    assert (outputs[1][is_greedy] == -1).all()
    result = outputs.amax(0)
    begin = 0
    for request, count in enumerate(NUM_DRAFTS):
        tokens = []
        for row in range(begin, begin + count):
            draft, likeliest = int(batch.drafts[row]), int(batch.logits[row].argmax())
            assert batch.draft_probs is not None
            if synthetic:
                accepted = draft >= 0 and uniform[row] < rates[row - begin]
            elif is_greedy[request]:
                accepted = draft == likeliest
            else:
                ratio = batch.logits[row].softmax(-1)[draft] / batch.draft_probs[row, draft]
                accepted = draft >= 0 and bool(ratio >= uniform[row])
            tokens.append(draft if accepted else likeliest if is_greedy[request] else int(recovered[row]))
            if not accepted:
                break
        else:
            tokens.append(int(batch.bonus[request]))
        assert result[request].tolist() == tokens + [-1] * (6 - len(tokens))
        begin += count


def test_padding_takes_nothing_out_of_the_target() -> None:
    """A draft of -1 is no token 0."""
    probs = torch.full((2, 50), 0.01)
    probs[:, 0] = 0.9
    out = torch.empty(2, dtype=torch.int32)
    drafts = torch.tensor([-1, 0], dtype=torch.int32)
    Kernels.sample_recovered_tokens(out, ends_of([2]), drafts, None, probs, torch.ones(1, 50), 50, NO_DRAFT_PROBS=True)
    assert out[0] == 0
    assert out[1] != 0


def expanded(given: SimpleNamespace, shift: bool, added: int) -> dict[str, torch.Tensor]:
    """Inputs of a drafter that fills in drafts at once, request by request, by the definition of vLLM's kernel."""
    outputs = {name: tensor.clone() for name, tensor in given.outputs.items()}
    first, starts = int(shift), given.starts.tolist()
    for request, last in enumerate(given.ends.tolist()):
        begin, end = starts[request], starts[request + 1]
        valid = last - begin + 1 - first
        place = begin + request * (added - first)
        for j in range(valid + added + end - last - 1):
            out, past = place + j, j - valid
            is_rejected = past >= added
            token = given.tokens[begin + first + j] if past < 0 else given.next[request] if past == 0 else 77
            outputs["ids"][out] = 88 if is_rejected else token
            outputs["positions"][out] = 0 if is_rejected else given.positions[begin] + j
            outputs["rejected"][out] = is_rejected
            outputs["masked"][out] = 0 < past < added
            if 0 <= past < added:
                outputs["new"][request * added + past] = out
        if shift:
            outputs["mapping"][begin:end] = torch.arange(place, place + end - begin)
    return outputs


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("added", [1, 4])
def test_inputs_of_parallel_drafting(shift: bool, added: int) -> None:
    generator = torch.Generator().manual_seed(9)
    for lengths in ([1], [7], [3, 1, 9, 2], [1, 1, 1, 40, 5]):
        total, num_reqs = sum(lengths), len(lengths)
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        rejected = torch.tensor([int(torch.randint(0, length, (1,), generator=generator)) for length in lengths])
        size = total + num_reqs * added + 3
        given = SimpleNamespace(
            starts=starts,
            ends=(starts[1:] - 1 - rejected).to(torch.int32),
            tokens=torch.randint(0, 50, (total,), generator=generator, dtype=torch.int32),
            next=torch.randint(0, 50, (num_reqs,), generator=generator, dtype=torch.int32),
            positions=torch.cat([torch.arange(length) + 5 * i for i, length in enumerate(lengths)]),
            outputs={
                "ids": torch.full((size,), -9, dtype=torch.int32),
                "positions": torch.full((size,), -9),
                "rejected": torch.zeros(size, dtype=torch.bool),
                "masked": torch.zeros(size, dtype=torch.bool),
                "new": torch.full((num_reqs * added + 2,), -9, dtype=torch.int32),
                "mapping": torch.full((total + 2,), -9, dtype=torch.int32),
            },
        )
        expected = expanded(given, shift, added)
        Kernels.copy_and_expand_eagle_inputs(
            given.tokens,
            given.positions,
            given.next,
            *given.outputs.values(),
            starts,
            given.ends,
            88,
            77,
            total,
            added,
            shift,
        )
        for name, tensor in given.outputs.items():
            assert torch.equal(tensor, expected[name]), name
