"""Rejection sampling of drafted tokens: statistics of rows, acceptance, and tokens in the place of rejected drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.support import Guarded, ffi, guarded, lib, pointer
from tests.kernels.test_sampling import INF, THREADS, VOCABS, check_padding, gumbel_noise, rows_of, run_ops, softmax

STATISTICS = ["softmax_stats_partial", "softmax_stats_merge"]
RECOVERED = ["recovered_tokens_partial", "recovered_tokens_merge"]


def typed(ctype: str, array: np.ndarray | None) -> object:
    return ffi.cast(ctype, pointer(array))


def statistics(
    values: np.ndarray, threads: int = 1, padding: int = 0, at_end: bool = True, argmax: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """[rows, 2] of maximum and sum, and the argmax of each row, from the kernels."""
    rows, vocab = values.shape
    memory, _, stride = rows_of(values, padding, at_end)
    out, best = Guarded((rows, 2), np.float32, at_end), guarded(np.full(rows, -7, np.int64), at_end)
    workspace = Guarded(lib.vac_softmax_stats_workspace_size(rows, vocab), np.uint8)
    args = ffi.new("vac_softmax_stats_args *")
    args.out, args.argmax = typed("vac_softmax_stat *", out.array), typed("int64_t *", best.array if argmax else None)
    args.logits, args.workspace = typed("float *", memory.array), pointer(workspace.array)
    args.num_rows, args.vocab_size, args.row_stride = rows, vocab, stride
    run_ops(STATISTICS, args, threads)
    for guard in (out, best, workspace):
        guard.check()
    check_padding(memory, vocab, stride)
    return out.array.copy(), best.array.copy()


@pytest.mark.parametrize("threads", THREADS)
def test_statistics(threads: int) -> None:
    rng = np.random.default_rng(1)
    for case, vocab in enumerate(VOCABS):
        rows = 1 + case % 5
        values = (rng.standard_normal((rows, vocab)) * 5).astype(np.float32)
        if case % 2:
            values[rng.random(values.shape) < 0.95] = -INF
            values[:, rng.integers(vocab)] = 1.0
        elif vocab > 64:
            # Blocks that are too far below to count.
            values[:, 64:] -= 1000
        found, argmax = statistics(values, threads, case % 3, bool(case % 2))
        assert (found[:, 0] == values.max(-1)).all()
        expected = np.exp(values.astype(np.float64) - values.max(-1, keepdims=True)).sum(-1)
        np.testing.assert_allclose(found[:, 1], expected, rtol=2.0**-20)
        assert (argmax == values.argmax(-1)).all()
        one, untouched = statistics(values, 1, argmax=False)
        np.testing.assert_array_equal(found, one)
        assert (untouched == -7).all()


def test_statistics_of_odd_rows() -> None:
    """No sum where there are no probabilities; the argmax has numpy's rules."""
    rng = np.random.default_rng(2)
    for vocab in (7, 64, 5000):
        values = rng.integers(-3, 4, (9, vocab)).astype(np.float32)
        values[1] = -INF
        values[2, -1] = INF
        values[3, vocab // 2] = np.nan
        values[4, [vocab // 3, vocab - 1]] = np.nan
        values[5] = np.where(np.arange(vocab) % 2, 0.0, -0.0)
        values[6] = -INF
        values[6, -1] = -1e30
        values[7] = np.nan
        values[8, [0, vocab - 1]] = INF, np.nan
        for threads in THREADS:
            found, argmax = statistics(values, threads)
            assert (argmax == values.argmax(-1)).all()
            np.testing.assert_array_equal(found[:, 0], values.max(-1))
            assert np.isnan(found[[1, 2, 3, 4, 7, 8], 1]).all()
            assert found[6, 1] == 1
            assert found[5, 1] == vocab


class Batch:
    """Drafts of some requests with the target's logits, and what else decides what becomes of them."""

    def __init__(self, rng: np.random.Generator, num_drafts: list[int], vocab: int, draft_probs: bool) -> None:
        self.num_drafts, self.vocab = num_drafts, vocab
        self.ends = np.cumsum(num_drafts).astype(np.int32)
        rows = int(self.ends[-1])
        self.logits = (rng.standard_normal((rows, vocab)) * 2).astype(np.float32)
        self.probs = softmax(self.logits)
        self.draft_probs = None
        if draft_probs:
            noise = rng.standard_normal((rows, vocab)) * 0.5
            self.draft_probs = softmax(self.logits + noise.astype(np.float32)).astype(np.float32)
        self.draft_ids = (self.logits + rng.gumbel(size=(rows, vocab))).argmax(-1)
        self.argmax = self.logits.argmax(-1).astype(np.int64) if rows else np.zeros(0, np.int64)
        self.bonus = rng.integers(0, vocab, len(num_drafts)).astype(np.int32)
        self.greedy = rng.random(len(num_drafts)) < 0.4
        self.draft_ids = np.where(rng.random(rows) < 0.5, self.argmax, self.draft_ids).astype(np.int32)
        self.draft_ids[rng.random(rows) < 0.1] = -1
        self.draft_ids[rng.random(rows) < 0.05] = vocab
        self.uniform = rng.random(rows)
        self.rates = rng.random(max(num_drafts)).astype(np.float32)
        self.recovered = rng.integers(0, vocab, rows).astype(np.int32)
        # FP32 must decide as FP64 does.
        self.uniform = np.where(np.abs(self.ratio() - self.uniform) < 1e-4, self.uniform * 0.9, self.uniform)

    def ratio(self) -> np.ndarray:
        """p / q of each draft; 0 for one that does not exist."""
        index = np.arange(len(self.draft_ids)), self.draft_ids.clip(0, self.vocab - 1)
        ratio = self.probs[index] / (1.0 if self.draft_probs is None else self.draft_probs[index])
        return np.where((self.draft_ids >= 0) & (self.draft_ids < self.vocab), ratio, 0.0)

    def expected(self, greedy: np.ndarray, synthetic: bool, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens with -1 where none is known, and the rejected rows, by the definition."""
        out, rejected = np.full((len(self.num_drafts), width), -1), np.full(len(self.num_drafts), -1)
        exists, ratio = (self.draft_ids >= 0) & (self.draft_ids < self.vocab), self.ratio()
        for request, (end, count) in enumerate(zip(self.ends, self.num_drafts, strict=True)):
            out[request, count] = self.bonus[request]
            for place in range(count):
                row = end - count + place
                out[request, place] = self.draft_ids[row]
                if synthetic:
                    accepted = exists[row] and self.uniform[row] < self.rates[place]
                elif greedy[request]:
                    accepted = self.draft_ids[row] == self.argmax[row]
                else:
                    accepted = exists[row] and ratio[row] >= self.uniform[row]
                if not accepted:
                    out[request, place:] = -1
                    out[request, place] = self.argmax[row] if greedy[request] else self.recovered[row]
                    rejected[request] = -1 if greedy[request] else row
                    break
        return out, rejected


def sample(
    batch: Batch,
    threads: int = 1,
    padding: int = 0,
    at_end: bool = True,
    probabilities: bool = False,
    recovered: bool = True,
    **changed: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and rejected rows from the kernel; ``changed`` fields of the arguments are NULL or arrays."""
    num_reqs, width = len(batch.num_drafts), max(batch.num_drafts) + 1
    out_memory, out, out_stride = rows_of(np.full((num_reqs, width), -1, np.int32), padding, at_end)
    target = batch.probs.astype(np.float32) if probabilities else batch.logits
    rejected = Guarded(num_reqs, np.int32, at_end)
    arrays: dict[str, tuple[str, np.ndarray | None]] = {
        "cu_num_draft_tokens": ("int32_t *", batch.ends),
        "draft_token_ids": ("int32_t *", batch.draft_ids),
        "bonus_token_ids": ("int32_t *", batch.bonus),
        "target_argmax": ("int64_t *", batch.argmax),
        "is_greedy": ("uint8_t *", batch.greedy.astype(np.uint8)),
        "target": ("float *", target),
        "stats": ("vac_softmax_stat *", None if probabilities else statistics(batch.logits)[0]),
        "draft_probs": ("float *", batch.draft_probs),
        "uniform": ("double *", batch.uniform),
        "synthetic_rates": ("float *", None),
        "recovered_token_ids": ("int32_t *", batch.recovered if recovered else None),
    }
    args = ffi.new("vac_rejection_sample_args *")
    guards = [out_memory, rejected]
    for name, (ctype, array) in arrays.items():
        array = changed.get(name, array)
        stride = batch.vocab
        if array is not None and name in ("target", "draft_probs"):
            memory, _, stride = rows_of(array, padding, at_end)
        else:
            memory = None if array is None else guarded(array, at_end)
        guards += [] if memory is None else [memory]
        setattr(args, name, typed(ctype, None if memory is None else memory.array))
        if name == "target":
            args.target_row_stride = stride
        elif name == "draft_probs":
            args.draft_row_stride = stride
    args.out, args.rejected = typed("int32_t *", out_memory.array), typed("int32_t *", rejected.array)
    args.num_reqs, args.vocab_size, args.out_row_stride = num_reqs, batch.vocab, out_stride
    run_ops(["rejection_sample"], args, threads)
    for guard in guards:
        guard.check()
    check_padding(out_memory, width, out_stride)
    return out.copy(), rejected.array.copy()


GRIDS = [[3], [1, 1], [0, 5, 2, 0, 1, 4, 3], [2] * 13]


@pytest.mark.parametrize("draft_probs", [False, True])
@pytest.mark.parametrize("threads", THREADS)
def test_acceptance(threads: int, draft_probs: bool) -> None:
    """Random, mixed and greedy batches, with logits or probabilities: what the definition says, and nothing else."""
    rng = np.random.default_rng(3)
    accepted = rejections = 0
    for case, (num_drafts, vocab) in enumerate([(drafts, vocab) for drafts in GRIDS for vocab in (1, 101, 2053)]):
        batch = Batch(rng, num_drafts, vocab, draft_probs)
        width, everyone = max(num_drafts) + 1, np.ones(len(num_drafts), bool)
        layout = {"threads": threads, "padding": case % 3, "at_end": bool(case % 2), "probabilities": case % 3 == 1}
        for greedy in (batch.greedy, ~everyone):
            result = sample(batch, is_greedy=greedy.astype(np.uint8), **layout)
            expected = batch.expected(greedy, False, width)
            np.testing.assert_array_equal(result[0], expected[0])
            np.testing.assert_array_equal(result[1], expected[1])
            rejections += int((result[1] >= 0).sum())
            accepted += int((result[0] == batch.bonus[:, None]).any(-1).sum())
            # Left for what samples in the rejected draft's place.
            left, rejected = sample(batch, recovered=False, is_greedy=greedy.astype(np.uint8), **layout)
            for request in np.flatnonzero(rejected >= 0):
                place = rejected[request] - (batch.ends[request] - num_drafts[request])
                assert left[request, place] == -1
                left[request, place] = expected[0][request, place]
            np.testing.assert_array_equal(left, expected[0])
            # Without what one kind of request needs, that kind is left out.
            for name, kind in (("target_argmax", greedy), ("target", ~greedy)):
                part, part_rejected = sample(batch, **layout, **{name: None, "is_greedy": greedy.astype(np.uint8)})
                np.testing.assert_array_equal(part, np.where(kind[:, None], -1, expected[0]))
                np.testing.assert_array_equal(part_rejected, np.where(kind, -1, expected[1]))
        nobody = sample(batch, **layout, is_greedy=None, target=None, stats=None, uniform=None)[0]
        np.testing.assert_array_equal(nobody, batch.expected(everyone, False, width)[0])
    assert accepted > 20
    assert rejections > 20


@pytest.mark.parametrize("threads", THREADS)
def test_synthetic_acceptance(threads: int) -> None:
    """Rates decide instead of tokens; a draft that does not exist is rejected all the same."""
    rng = np.random.default_rng(4)
    for case, num_drafts in enumerate(GRIDS):
        batch = Batch(rng, num_drafts, 101, False)
        for rates in (batch.rates, np.zeros_like(batch.rates), np.ones_like(batch.rates)):
            batch.rates = rates
            for greedy in (batch.greedy, np.ones(len(num_drafts), bool)):
                expected = batch.expected(greedy, True, max(num_drafts) + 1)
                result = sample(
                    batch, threads, case % 3, synthetic_rates=rates, stats=None, is_greedy=greedy.astype(np.uint8)
                )
                np.testing.assert_array_equal(result[0], expected[0])
                np.testing.assert_array_equal(result[1], expected[1])


def test_what_is_never_accepted() -> None:
    """A draft of probability 0 or NaN of either model, even where the random number is 0."""
    batch = Batch(np.random.default_rng(5), [1] * 7, 50, True)
    assert batch.draft_probs is not None
    batch.draft_ids[:] = np.arange(7)
    batch.uniform[:] = 0
    batch.logits[0, 0] = -INF
    batch.logits[1, 9] = np.nan
    batch.logits[2, 9] = INF
    batch.logits[3] = -INF
    batch.draft_probs[4, 4] = 0
    batch.draft_probs[5, 5] = np.nan
    for draft_probs in (batch.draft_probs, None):
        tokens, rejected = sample(batch, is_greedy=np.zeros(7, np.uint8), draft_probs=draft_probs)
        last = 6 if draft_probs is not None else 4
        np.testing.assert_array_equal(rejected[:last], np.arange(last))
        assert (rejected[last:] == -1).all()
        assert (tokens[:last, 0] == batch.recovered[:last]).all()
        assert (tokens[last:, 0] == np.arange(last, 7)).all()


def recovered(
    batch: Batch, rejected: np.ndarray, seed: np.ndarray, threads: int = 1, padding: int = 0, at_end: bool = True
) -> np.ndarray:
    """[requests, drafts + 1] from the kernels: -1 but for the rejected drafts' places."""
    num_reqs, width = len(batch.num_drafts), max(batch.num_drafts) + 1
    out_memory, out, out_stride = rows_of(np.full((num_reqs, width), -1, np.int32), padding, at_end)
    logits, _, logits_stride = rows_of(batch.logits, padding, at_end)
    draft, draft_stride = None, 0
    if batch.draft_probs is not None:
        draft, _, draft_stride = rows_of(batch.draft_probs, 2 - padding, at_end)
    found = guarded(statistics(batch.logits)[0])
    given = [guarded(array, at_end) for array in (rejected.astype(np.int32), batch.ends, batch.draft_ids, seed)]
    workspace = Guarded(lib.vac_recovered_tokens_workspace_size(num_reqs, batch.vocab), np.uint8)
    args = ffi.new("vac_recovered_tokens_args *")
    args.out = typed("int32_t *", out_memory.array)
    args.rejected, args.cu_num_draft_tokens, args.draft_token_ids = (typed("int32_t *", g.array) for g in given[:3])
    args.logits, args.stats = typed("float *", logits.array), typed("vac_softmax_stat *", found.array)
    args.draft_probs = typed("float *", None if draft is None else draft.array)
    args.seed, args.workspace = typed("uint64_t *", given[3].array), pointer(workspace.array)
    args.num_reqs, args.vocab_size, args.out_row_stride = num_reqs, batch.vocab, out_stride
    args.logits_row_stride, args.draft_row_stride = logits_stride, draft_stride
    run_ops(RECOVERED, args, threads)
    for guard in (logits, workspace, found, *given, *([] if draft is None else [draft])):
        guard.check()
    check_padding(out_memory, width, out_stride)
    return out.copy()


def weights_of(batch: Batch, row: int) -> np.ndarray:
    """The weights of a rejected draft's successor in FP64."""
    probs = softmax(batch.logits[row : row + 1])[0]
    if batch.draft_probs is not None:
        return np.maximum(probs - batch.draft_probs[row].astype(np.float64), 0)
    if 0 <= batch.draft_ids[row] < batch.vocab:
        probs[batch.draft_ids[row]] = 0
    return probs


@pytest.mark.parametrize("draft_probs", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_recovered_tokens(draft_probs: bool, masked: bool) -> None:
    """The documented noise in FP64 gives the same tokens, on any number of threads."""
    rng = np.random.default_rng(6)
    same = total = 0
    for case, (num_drafts, vocab) in enumerate([(drafts, vocab) for drafts in GRIDS for vocab in (2, 67, 6203)]):
        batch = Batch(rng, num_drafts, vocab, draft_probs)
        if masked:
            batch.logits[rng.random(batch.logits.shape) < 0.9] = -INF
            batch.logits[:, rng.integers(vocab, size=2)] = 0.5
        begins = batch.ends - num_drafts
        place = rng.integers(0, np.maximum(num_drafts, 1))
        rejected = np.where((rng.random(len(num_drafts)) < 0.7) & (np.array(num_drafts) > 0), begins + place, -1)
        seed = rng.integers(0, 2**64, len(num_drafts), np.uint64)
        results = [recovered(batch, rejected, seed, n, case % 3, bool(case % 2)) for n in THREADS]
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])
        written = np.zeros(results[0].shape, bool)
        for request in np.flatnonzero(rejected >= 0):
            row = rejected[request]
            written[request, row - begins[request]] = True
            token = results[0][request, row - begins[request]]
            weights, probs = weights_of(batch, row), softmax(batch.logits[row : row + 1])[0]
            if not (weights > 0).any():
                assert token == batch.logits[row].argmax()
                continue
            with np.errstate(divide="ignore"):
                scores = np.log(weights) + gumbel_noise(vocab, int(seed[request]), 0)
            # A small difference of two probabilities has few bits left.
            best = int(scores.argmax())
            lost = sum(probs[i] / weights[i] for i in (token, best)) * 2.0**-20
            assert scores[token] >= scores[best] - 1e-4 - lost
            same += token == best
            total += 1
        assert (results[0][~written] == -1).all()
    assert total > 30
    assert same > 0.9 * total


def test_recovered_tokens_of_a_real_vocabulary() -> None:
    """One row keeps several threads busy, and gives what one thread gives."""
    rng = np.random.default_rng(7)
    vocab, row = 128256, 1
    seed = rng.integers(0, 2**64, 1, np.uint64)
    noise = gumbel_noise(vocab, int(seed[0]), 0)
    for draft_probs in (False, True):
        batch = Batch(rng, [2], vocab, draft_probs)
        tokens = {int(recovered(batch, np.array([row]), seed, threads)[0, row]) for threads in THREADS}
        assert len(tokens) == 1
        with np.errstate(divide="ignore"):
            scores = np.log(weights_of(batch, row)) + noise
        assert scores[tokens.pop()] > scores.max() - 1e-3


def test_recovered_tokens_of_odd_rows() -> None:
    """Where nothing is left, what the target likes best; never what it excludes."""
    vocab = 4500
    batch = Batch(np.random.default_rng(8), [1] * 8, vocab, True)
    assert batch.draft_probs is not None
    batch.draft_ids[:] = 17
    batch.draft_probs[0] = softmax(batch.logits[:1])[0] + 1e-6  # the draft has more of everything
    batch.draft_probs[1] = np.nan
    batch.draft_probs[2] = np.inf
    batch.logits[3, [3000, 4000]] = np.nan
    batch.logits[4, [2500, 4100]] = INF
    batch.logits[5] = -INF
    batch.logits[6] = -INF
    batch.logits[6, 17] = 3.0
    batch.draft_probs[6] = 0
    batch.draft_probs[6, 17] = 1
    seed, rejected = np.arange(8, dtype=np.uint64), np.arange(8)
    for threads in THREADS:
        tokens = recovered(batch, rejected, seed, threads)[:, 0]
        assert (tokens[:7] == batch.logits[:7].argmax(-1)).all()
        assert 0 <= tokens[7] < vocab
    batch.draft_probs = None
    batch.logits[7, 17] = np.nan
    for threads in THREADS:
        tokens = recovered(batch, rejected, seed, threads)[:, 0]
        assert (tokens[:3] != 17).all()
        assert (tokens[3:7] == batch.logits[3:7].argmax(-1)).all()
        # The only NaN is the draft's own.
        assert tokens[7] != 17
        assert 0 <= tokens[7] < vocab


@pytest.mark.parametrize("draft_probs", [False, True])
def test_tokens_follow_the_targets_distribution(draft_probs: bool) -> None:
    """Chi-square of 16,384 requests: whatever is drafted, first and second tokens are the target's."""
    draws, vocab = 16384, 23
    rng = np.random.default_rng(9)
    target = (rng.standard_normal((2, vocab)) * 1.2).astype(np.float32)
    target[:, 5] = -INF
    draft = softmax((rng.standard_normal((2, vocab)) * 1.2).astype(np.float32)).astype(np.float32)
    batch = Batch(rng, [2] * draws, vocab, False)
    batch.logits = np.tile(target, (draws, 1))
    batch.probs = softmax(batch.logits)
    batch.draft_probs = np.tile(draft, (draws, 1)) if draft_probs else None
    batch.draft_ids = np.empty((draws, 2), np.int32)
    for place in range(2):
        probs = draft[place].astype(np.float64)
        batch.draft_ids[:, place] = rng.choice(vocab, draws, p=probs / probs.sum())
    batch.draft_ids = batch.draft_ids.reshape(-1)
    batch.uniform = rng.random(2 * draws)
    seed = rng.integers(0, 2**64, draws, np.uint64)
    tokens, rejected = sample(batch, 2, recovered=False, is_greedy=np.zeros(draws, np.uint8))
    replaced = recovered(batch, rejected, seed, 2)
    assert ((tokens == -1) | (replaced == -1)).all()
    tokens = np.maximum(tokens, replaced)
    assert 0.1 * draws < (rejected >= 0).sum() < draws
    for place, found in ((0, tokens[:, 0]), (1, tokens[tokens[:, 1] >= 0, 1])):
        counts = np.bincount(found, minlength=vocab)
        expected = softmax(target[place : place + 1])[0] * len(found)
        used = expected > 5
        assert used.sum() > 10
        assert counts[5] == 0
        statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
        # Mean n, standard deviation sqrt(2 n): beyond five of those is no chance.
        degrees = used.sum() - 1
        assert statistic < degrees + 5 * np.sqrt(2 * degrees)


def test_no_requests_write_nothing() -> None:
    for names in (STATISTICS, RECOVERED, ["rejection_sample"]):
        args = ffi.new(f"vac_{names[0].removesuffix('_partial')}_args *")
        run_ops(names, args, 3)
        args.vocab_size = 10
        run_ops(names, args, 3)
