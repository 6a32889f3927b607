"""Argmax, softmax, Gumbel sampling, the mask of min-p, top-k and top-p, allowed tokens, penalties and logprobs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.support import DTYPES, Guarded, decode, encode, ffi, guarded, kernel, lib, pointer

THREADS = [1, 2, 3, 8]
# Around a vector, a block, a piece of a row (2048) and several of them.
VOCABS = [1, 3, 8, 31, 64, 100, 2047, 2048, 2049, 6200]
INF = np.inf


def run_ops(names: list[str], args: object, num_threads: int) -> None:
    """Run ops one after the other, with a barrier between them."""
    ops = ffi.new("vac_op[]", len(names))
    for op, name in zip(ops, names, strict=True):
        op.kernel, op.args, op.flags = kernel(name), args, lib.VAC_OP_BARRIER_AFTER
    assert lib.vac_execute(ops, len(names), num_threads) == 0


def rows_of(values: np.ndarray, padding: int, at_end: bool) -> tuple[Guarded, np.ndarray, int]:
    """Rows with ``padding`` elements (of all-ones bits) between them, and the row stride."""
    rows, columns = values.shape
    stride = columns + padding
    memory = Guarded((rows - 1) * stride + columns, values.dtype, at_end)
    memory.array.view(np.uint8)[...] = 0xFF
    view = np.lib.stride_tricks.as_strided(
        memory.array, (rows, columns), (stride * values.itemsize, values.itemsize), writeable=True
    )
    view[...] = values
    return memory, view, stride


def check_padding(memory: Guarded, columns: int, stride: int) -> None:
    memory.check()
    outside = np.arange(memory.array.size) % stride >= columns
    assert (memory.array.view(np.uint8).reshape(memory.array.size, -1)[outside] == 0xFF).all()


def argmax(values: np.ndarray, dtype: str, threads: int, padding: int = 0, at_end: bool = True) -> np.ndarray:
    """Token ids from the kernels; ``values`` are in storage format."""
    memory, _, stride = rows_of(values, padding, at_end)
    out = Guarded(len(values), np.int64, at_end)
    workspace = Guarded(lib.vac_argmax_workspace_size(*values.shape), np.uint8)
    args = ffi.new("vac_argmax_args *")
    args.out, args.logits = ffi.cast("int64_t *", pointer(out.array)), pointer(memory.array)
    args.workspace = pointer(workspace.array)
    args.num_reqs, args.vocab_size = values.shape
    args.row_stride, args.dtype = stride, DTYPES[dtype]
    run_ops(["argmax_partial", "argmax_merge"], args, threads)
    out.check()
    memory.check()
    return out.array.copy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", THREADS)
def test_argmax(dtype: str, threads: int) -> None:
    rng = np.random.default_rng(1)
    for case, vocab in enumerate(VOCABS):
        for rows in (1, 5):
            values = encode(rng.standard_normal((rows, vocab)).astype(np.float32), dtype)
            expected = decode(values, dtype).argmax(-1)
            assert (argmax(values, dtype, threads, case % 3, bool(case % 2)) == expected).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_of_ties_and_odd_values(dtype: str) -> None:
    """The first of equal ones, the first NaN; infinities; numpy's argmax has the same rules."""
    rng = np.random.default_rng(2)
    for vocab in (7, 64, 5000):
        values = rng.integers(-3, 4, (12, vocab)).astype(np.float32)
        values[1] = -INF
        values[2, -1] = INF
        values[3, vocab // 2] = np.nan
        values[4, [vocab // 3, vocab - 1]] = np.nan
        values[5, 0] = -np.nan
        values[6] = np.where(np.arange(vocab) % 2, 0.0, -0.0)
        values[7] = -INF
        values[7, -1] = -1e30 if dtype != "f16" else -6e4
        values[8] = np.nan
        values[9, : vocab - 1] = np.minimum(values[9, : vocab - 1], 0)
        values[9, -1] = 1.0
        stored = encode(values, dtype)
        for threads in THREADS:
            assert (argmax(stored, dtype, threads) == decode(stored, dtype).argmax(-1)).all()


def softmax(logits: np.ndarray, temperature: np.ndarray | None = None) -> np.ndarray:
    x = logits.astype(np.float64)
    if temperature is not None:
        x = x / temperature[:, None].astype(np.float64)
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("in_place", [False, True])
def test_softmax_rows(threads: int, in_place: bool) -> None:
    rng = np.random.default_rng(3)
    for case, vocab in enumerate(VOCABS):
        rows = 1 + case % 4
        values = (rng.standard_normal((rows, vocab)) * 8).astype(np.float32)
        values[:, 1::5] = -INF
        temperature = None if case % 2 else rng.uniform(0.3, 2.0, rows).astype(np.float32)
        if temperature is not None and rows > 1:
            temperature[1] = 0.0
        memory, view, stride = rows_of(values, case % 3, bool(case % 2))
        probs, probs_view, probs_stride = (
            (memory, view, stride) if in_place else rows_of(np.zeros_like(values), 2, bool(case % 2))
        )
        args = ffi.new("vac_softmax_rows_args *")
        args.probs = ffi.cast("float *", pointer(probs.array))
        args.logits = ffi.cast("float *", pointer(memory.array))
        args.temperature = ffi.cast("float *", pointer(temperature))
        args.num_reqs, args.vocab_size = rows, vocab
        args.logits_row_stride, args.probs_row_stride = stride, probs_stride
        run_ops(["softmax_rows"], args, threads)
        check_padding(probs, vocab, probs_stride)
        usual = np.ones(rows, bool) if temperature is None else temperature > 0
        expected = softmax(values[usual], None if temperature is None else temperature[usual])
        # The argument of exp is rounded to FP32: 2^-24 of up to 87 / temperature.
        np.testing.assert_allclose(probs_view[usual], expected, rtol=3e-5, atol=1e-30)
        assert (probs_view[usual][:, 1::5] == 0).all()
        for row in np.flatnonzero(~usual):
            assert probs_view[row].sum() == 1
            assert probs_view[row].argmax() == values[row].argmax()


def test_softmax_of_odd_rows() -> None:
    values = np.zeros((4, 21), np.float32)
    values[0, 3], values[1, 4], values[2] = np.nan, INF, -INF
    values[3, 5:] = -INF
    args = ffi.new("vac_softmax_rows_args *")
    args.probs = args.logits = ffi.cast("float *", pointer(values))
    args.num_reqs, args.vocab_size = values.shape
    args.logits_row_stride = args.probs_row_stride = 21
    run_ops(["softmax_rows"], args, 2)
    assert np.isnan(values[:3]).all()
    np.testing.assert_allclose(values[3], [0.2] * 5 + [0] * 16, rtol=1e-6)


def philox(counter: list[np.ndarray], seed: int) -> list[np.ndarray]:
    """Philox4x32-10 as published (Salmon et al., SC'11), vectorised over counters."""
    c = [np.asarray(word, np.uint64) for word in counter]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (second >> np.uint64(32)) ^ c[1] ^ np.uint64(key[0]),
            second & low,
            (first >> np.uint64(32)) ^ c[3] ^ np.uint64(key[1]),
            first & low,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_philox_reference_against_published_vectors() -> None:
    """Known answers of Random123's philox4x32-10."""
    ones = 0xFFFFFFFF
    assert [int(word) for word in philox([0, 0, 0, 0], 0)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    full = philox([ones] * 4, 0xFFFFFFFFFFFFFFFF)
    assert [int(word) for word in full] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def gumbel_noise(vocab: int, seed: int, offset: int) -> np.ndarray:
    i = np.arange(vocab)
    words = philox([4 * (i // 16) + i % 4, i * 0, i * 0 + (offset & 0xFFFFFFFF), i * 0 + (offset >> 32)], seed)
    word = np.stack(words)[(i // 4) % 4, i].astype(np.float64)
    return -np.log(-np.log1p(-(word + 0.5) * 2.0**-32))


def gumbel_argmax(
    values: np.ndarray,
    seed: np.ndarray,
    offset: np.ndarray,
    threads: int = 1,
    temperature: np.ndarray | None = None,
    padding: int = 0,
) -> np.ndarray:
    memory, _, stride = rows_of(values, padding, True)
    out = Guarded(len(values), np.int64)
    workspace = Guarded(lib.vac_gumbel_argmax_workspace_size(*values.shape), np.uint8)
    args = ffi.new("vac_gumbel_argmax_args *")
    args.out = ffi.cast("int64_t *", pointer(out.array))
    args.logits = ffi.cast("float *", pointer(memory.array))
    args.temperature = ffi.cast("float *", pointer(temperature))
    args.seed, args.offset = ffi.cast("uint64_t *", pointer(seed)), ffi.cast("uint64_t *", pointer(offset))
    args.workspace = pointer(workspace.array)
    args.num_reqs, args.vocab_size = values.shape
    args.row_stride = stride
    run_ops(["gumbel_argmax_partial", "gumbel_argmax_merge"], args, threads)
    out.check()
    return out.array.copy()


@pytest.mark.parametrize("masked", [False, True])
def test_gumbel_argmax_against_reference(masked: bool) -> None:
    """The documented noise in FP64 gives the same tokens, on any number of threads."""
    rng = np.random.default_rng(4)
    for case, vocab in enumerate(VOCABS):
        rows = 6
        values = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
        if masked:
            values[rng.random(values.shape) < 0.9] = -INF
            values[:, rng.integers(vocab)] = 1.0
        seed, offset = rng.integers(0, 2**64, (2, rows), np.uint64)
        temperature = rng.uniform(0.2, 3.0, rows).astype(np.float32) if case % 2 else None
        scaled = values.astype(np.float64) / (1.0 if temperature is None else temperature[:, None])
        scores = scaled + np.stack([gumbel_noise(vocab, int(s), int(o)) for s, o in zip(seed, offset, strict=True)])
        results = [gumbel_argmax(values, seed, offset, n, temperature, case % 3) for n in THREADS]
        for result in results:
            assert (result == results[0]).all()
        chosen = scores[np.arange(rows), results[0]]
        assert (chosen >= scores.max(-1) - 1e-4).all()
        assert (results[0] == scores.argmax(-1)).mean() > 0.9 or vocab > 2000


def test_gumbel_argmax_follows_the_distribution() -> None:
    """Chi-square over 16,384 draws with distinct seeds, then with distinct offsets of one seed."""
    draws, vocab = 16384, 24
    rng = np.random.default_rng(5)
    logits = rng.standard_normal(vocab).astype(np.float32) * 1.5
    logits[5] = -INF
    temperature = np.full(draws, 1.3, np.float32)
    values = np.broadcast_to(logits, (draws, vocab)).copy()
    probs = softmax(logits[None], temperature[:1])[0]
    counter = np.arange(draws, dtype=np.uint64)
    for seed, offset in ((counter, counter * 0), (counter * 0 + np.uint64(77), counter)):
        counts = np.bincount(gumbel_argmax(values, seed, offset, 2, temperature), minlength=vocab)
        assert counts[5] == 0
        expected = probs * draws
        used = expected > 5
        statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
        # Mean n, standard deviation sqrt(2 n): beyond five of those is no chance.
        degrees = used.sum() - 1
        assert statistic < degrees + 5 * np.sqrt(2 * degrees)
        assert counts[~used].sum() <= 5 * max(1.0, expected[~used].sum()) + 5


def test_gumbel_argmax_greedy_and_odd_rows() -> None:
    rng = np.random.default_rng(6)
    vocab = 4500
    values = rng.integers(-4, 5, (7, vocab)).astype(np.float32)
    values[1, [3000, 4000]] = np.nan
    values[2, [2500, 4100]] = INF
    values[3] = -INF
    values[4] = -INF
    values[4, 4444] = -50.0
    seed = offset = np.arange(7, dtype=np.uint64)
    greedy = np.zeros(7, np.float32)
    for threads in THREADS:
        assert (gumbel_argmax(values, seed, offset, threads, greedy) == values.argmax(-1)).all()
        sampled = gumbel_argmax(values, seed, offset, threads)
        assert sampled[1] == 3000
        assert sampled[2] == 2500
        assert sampled[3] == 0
        assert sampled[4] == 4444
        assert ((sampled >= 0) & (sampled < vocab)).all()


def mask(
    values: np.ndarray,
    k: object,
    p: object,
    threads: int = 1,
    padding: int = 0,
    slots: int = 0,
    min_p: object = None,
) -> np.ndarray:
    rows, vocab = values.shape
    memory, view, stride = rows_of(values, padding, True)
    k_array = None if k is None else np.broadcast_to(np.asarray(k, np.int32), rows).copy()
    p_array = None if p is None else np.broadcast_to(np.asarray(p, np.float32), rows).copy()
    min_p_array = None if min_p is None else np.broadcast_to(np.asarray(min_p, np.float32), rows).copy()
    slots = slots or threads
    workspace = Guarded(lib.vac_top_k_top_p_mask_workspace_size(vocab, slots), np.uint8)
    args = ffi.new("vac_top_k_top_p_mask_args *")
    args.logits = ffi.cast("float *", pointer(memory.array))
    args.k, args.p = ffi.cast("int32_t *", pointer(k_array)), ffi.cast("float *", pointer(p_array))
    args.min_p = ffi.cast("float *", pointer(min_p_array))
    args.workspace = pointer(workspace.array)
    args.num_reqs, args.vocab_size, args.row_stride, args.num_workspaces = rows, vocab, stride, slots
    run_ops(["top_k_top_p_mask"], args, threads)
    check_padding(memory, vocab, stride)
    return view.copy()


def mask_reference(row: np.ndarray, k: int, p: float) -> tuple[np.ndarray, float]:
    """vLLM's sorting algorithm in FP64, and how near the closest cumulative sum comes to 1 - p."""
    vocab = row.size
    out = row.copy()
    order = np.argsort(row, kind="stable")
    ordered = row[order].copy()
    if 0 < k < vocab:
        ordered[ordered < ordered[vocab - k]] = -INF
    margin = INF
    if p < 1.0 and np.isfinite(ordered[-1]):
        limit = float(np.float32(1.0) - np.float32(p))
        total = np.cumsum(softmax(ordered[None])[0])
        masked = total <= limit
        masked[-1] = False
        if vocab > 1:
            margin = np.abs(total[:-1] - limit).min()
        ordered[masked] = -INF
    out[order] = ordered
    return out, margin


def check_mask(values: np.ndarray, k: np.ndarray, p: np.ndarray, result: np.ndarray) -> int:
    """Compare with the reference wherever FP32 sums decide as FP64 ones do; returns the rows compared."""
    compared = 0
    for row in range(len(values)):
        expected, margin = mask_reference(values[row], int(k[row]), float(p[row]))
        kept = result[row] != -INF
        assert (result[row][kept] == values[row][kept]).all()
        if margin > 1e-6:
            assert kept.sum() == (expected != -INF).sum(), (row, k[row], p[row])
            assert (result[row] == expected).all()
            compared += 1
        else:
            assert abs(int(kept.sum()) - int((expected != -INF).sum())) <= 2 + int(4e-6 * values.shape[1])
    return compared


@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
@pytest.mark.parametrize("vocab", [1, 2, 31, 64, 65, 1000, 5003])
def test_top_k_top_p(vocab: int, scale: float) -> None:
    rng = np.random.default_rng(vocab)
    k = np.array([0, 1, 2, 5, 20, 33, 77, 400, vocab - 1, vocab, vocab + 5, -1], np.int32)
    p = np.array([1.0, 0.0, 0.01, 0.5, 0.9, 0.95, 0.999, 1.5, -0.5], np.float32)
    k, p = (grid.ravel() for grid in np.meshgrid(k, p))
    values = (rng.standard_normal((k.size, vocab)) * scale).astype(np.float32)
    threads = THREADS[vocab % 4]
    result = mask(values, k, p, threads, vocab % 3)
    assert check_mask(values, k, p, result) > 0.6 * k.size


def test_top_k_top_p_with_ties() -> None:
    """Few distinct values: ties at both thresholds, signed zeros among them."""
    rng = np.random.default_rng(8)
    for vocab in (40, 300, 3000):
        k = rng.integers(0, vocab, 40).astype(np.int32)
        p = rng.uniform(0.05, 1.05, 40).astype(np.float32)
        values = rng.integers(-3, 3, (40, vocab)).astype(np.float32)
        values[(values == 0) & (rng.random(values.shape) < 0.5)] = -0.0
        values[5] = 1.25
        values[6] = -0.0
        result = mask(values, k, p, 2)
        assert check_mask(values, k, p, result) > 20


def test_top_k_top_p_of_peaked_and_already_masked_rows() -> None:
    rng = np.random.default_rng(9)
    vocab = 4000
    values = rng.standard_normal((24, vocab)).astype(np.float32)
    values[:, 17] += 40.0
    values[8:16] = np.where(rng.random((8, vocab)) < 0.995, -INF, values[8:16])
    values[16:, ::3] *= 1e30
    k = np.resize(np.array([0, 1, 3, 50, 1000, 3999, 0, 7], np.int32), 24)
    p = np.resize(np.array([0.9, 1.0, 0.3, 0.99, 0.8, 0.5, 0.9999, 1.0], np.float32), 24)
    check_mask(values, k, p, mask(values, k, p, 3))


def test_top_k_or_top_p_alone_and_off() -> None:
    rng = np.random.default_rng(10)
    values = rng.standard_normal((5, 900)).astype(np.float32)
    k, p = np.array([3, 0, 1, 900, 20]), np.array([0.3, 1.0, 0.9, np.nan, 0.5])
    assert (mask(values, None, None) == values).all()
    assert check_mask(values, k, np.ones(5), mask(values, k, None)) == 5
    check_mask(values, k * 0, p, mask(values, None, p))
    # More threads than workspaces, and more workspaces than rows.
    assert (mask(values, k, p, 8, 0, 2) == mask(values, k, p, 1)).all()
    assert (mask(values, k, p, 2, 0, 9) == mask(values, k, p, 1)).all()


def test_top_k_top_p_of_odd_rows() -> None:
    """NaN leaves a row alone; with +inf, and where nothing is finite, top-p masks nothing."""
    rng = np.random.default_rng(11)
    values = rng.standard_normal((4, 333)).astype(np.float32)
    values[0, 200], values[1, 100], values[2] = np.nan, INF, -INF
    values[3, 3:] = -INF
    result = mask(values, 5, 0.5)
    np.testing.assert_array_equal(result[0], values[0])
    expected, _ = mask_reference(values[1], 5, 1.0)
    assert (result[1] == expected).all()
    assert (result[2] == -INF).all()
    assert np.isfinite(result[3, :3]).any()
    assert (result[3, 3:] == -INF).all()
    only_p = mask(values, None, 0.5)
    assert (only_p[1] == values[1]).all()


def test_real_vocabulary() -> None:
    """One row of a real size, k and p as generation configs have them, then sampling from it."""
    rng = np.random.default_rng(12)
    values = (rng.standard_normal((2, 151936)) * 2.5).astype(np.float32)
    k, p = np.array([20, 0]), np.array([0.95, 0.9])
    result = mask(values, k, p, 2)
    assert check_mask(values, k, p, result) > 0
    assert (result != -INF).sum(-1)[0] <= 20
    seeds = np.array([1, 2], np.uint64)
    tokens = gumbel_argmax(result, seeds, seeds, 2)
    assert (result[[0, 1], tokens] != -INF).all()
    assert (argmax(values, "f32", 2) == values.argmax(-1)).all()


@pytest.mark.parametrize("kind", ["flat", "normal", "peaked", "ties", "masked"])
def test_top_p_of_large_rows(kind: str) -> None:
    """Rows that are large enough for the threshold to be guessed from a sample, also where the guess fails."""
    rng = np.random.default_rng(13)
    p = np.array([0.02, 0.5, 0.9, 0.95, 0.99, 0.9999], np.float32)
    shape = (p.size, 16384 + 77)
    values = rng.standard_normal(shape).astype(np.float32)
    if kind == "flat":
        values *= 1e-3
    elif kind == "normal":
        values *= np.float32(3.0)
    elif kind == "peaked":
        values[:, 1234] = 12.0
        values[:, ::16] -= 8.0  # what the sample sees is unlike the rest
    elif kind == "ties":
        values = np.round(values * 2)
    else:
        values[rng.random(shape) < 0.98] = -INF
    compared = check_mask(values, p * 0, p, mask(values, None, p, 2))
    assert compared >= (2 if kind == "flat" else 3)


def min_p_reference(row: np.ndarray, min_p: float) -> tuple[np.ndarray, float]:
    """What min-p leaves, in FP64, and how near the closest logit comes to its bound."""
    if not np.isfinite(row.max()) or not min_p >= np.finfo(np.float32).tiny:
        return row.copy(), INF
    distance = row.astype(np.float64) - row.max() - np.log(min(float(min_p), 1.0))
    below = row.max() > row
    margin = np.abs(distance[below & np.isfinite(distance)]).min(initial=INF)
    return np.where(below & (distance < 0), -INF, row).astype(np.float32), margin


@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
@pytest.mark.parametrize("vocab", [1, 2, 31, 64, 65, 1000, 5003])
def test_min_p(vocab: int, scale: float) -> None:
    """Alone and in front of top-k and top-p, which then choose among what it left."""
    rng = np.random.default_rng(vocab + 1)
    min_p = np.array([0.0, 1e-30, 1e-4, 0.02, 0.1, 0.5, 0.99, 1.0, np.nan], np.float32)
    k = np.array([0, 1, 5, 33, 400], np.int32)
    p = np.array([1.0, 0.3, 0.95], np.float32)
    min_p, k, p = (grid.ravel() for grid in np.meshgrid(min_p, k, p))
    values = (rng.standard_normal((k.size, vocab)) * scale).astype(np.float32)
    result = mask(values, k, p, THREADS[vocab % 4], vocab % 3, min_p=min_p)
    alone = mask(values, None, None, 2, min_p=min_p)
    compared = 0
    for row in range(len(values)):
        left, margin = min_p_reference(values[row], min_p[row])
        # Half a unit of FP32 in the bound, and the error of the logarithm.
        if margin < 1e-5 + 2e-7 * float(np.abs(values[row]).max()):
            continue
        assert (alone[row] == left).all(), min_p[row]
        expected, margin = mask_reference(left, int(k[row]), float(p[row]))
        if margin > 1e-6:
            assert (result[row] == expected).all(), (min_p[row], k[row], p[row])
            compared += 1
    assert compared > (0.4 if scale < 1 else 0.6) * k.size


def test_min_p_of_odd_rows() -> None:
    """NaN and +inf leave a row alone; of -inf nothing else is made; ties of the largest all stay."""
    rng = np.random.default_rng(14)
    values = rng.standard_normal((5, 333)).astype(np.float32)
    values[0, 200], values[1, 100], values[2] = np.nan, INF, -INF
    values[3, 3:] = -INF
    values[4, [7, 99, 300]] = 9.0
    result = mask(values, None, None, 2, min_p=1.0)
    np.testing.assert_array_equal(result[:3], values[:3])
    assert (result[3] != -INF).sum() == 1
    assert np.flatnonzero(result[4] != -INF).tolist() == [7, 99, 300]


@pytest.mark.parametrize("threads", THREADS)
def test_fill_masked(threads: int) -> None:
    """No byte of 16 set, some, all; NaN among what is replaced; nothing around the rows is touched."""
    rng = np.random.default_rng(21)
    for case, vocab in enumerate([*VOCABS, 16, 17, 4097]):
        rows = 1 + case % 3
        values = rng.standard_normal((rows, vocab)).astype(np.float32)
        mask = (rng.random((rows, vocab)) < 0.3).astype(np.uint8) * np.uint8(255 if case % 2 else 1)
        mask[:, vocab // 4 : vocab // 2] = 0
        mask[:, 3 * vocab // 4 :] = 1
        values[mask != 0] = np.where(rng.random((mask != 0).sum()) < 0.1, np.nan, 1.0)
        memory, view, stride = rows_of(values, case % 3, bool(case % 2))
        masks, _, mask_stride = rows_of(mask, case % 2, bool(case % 2))
        args = ffi.new("vac_fill_masked_args *")
        args.logits = ffi.cast("float *", pointer(memory.array))
        args.mask = ffi.cast("uint8_t *", pointer(masks.array))
        args.num_reqs, args.vocab_size = rows, vocab
        args.row_stride, args.mask_row_stride = stride, mask_stride
        run_ops(["fill_masked"], args, threads)
        check_padding(memory, vocab, stride)
        np.testing.assert_array_equal(view, np.where(mask != 0, -INF, values))


def penalties(
    values: np.ndarray,
    factors: np.ndarray,
    prompt: np.ndarray,
    output: list[list[int]],
    threads: int = 1,
    padding: int = 0,
    max_tokens: int | None = None,
) -> np.ndarray:
    """Logits after the kernel; factors [rows, 3]: repetition, frequency, presence."""
    rows, vocab = values.shape
    memory, view, stride = rows_of(values, padding, True)
    repetition, frequency, presence = (guarded(factors[:, i].astype(np.float32)) for i in range(3))
    ids = guarded(prompt.astype(np.int64))
    flat = guarded(np.array([token for tokens in output for token in tokens], np.int32))
    start = guarded(np.cumsum([0, *map(len, output)]).astype(np.int64))
    if max_tokens is None:
        max_tokens = prompt.shape[1] + max(map(len, output))
    workspace = Guarded(lib.vac_penalties_workspace_size(max_tokens, threads), np.uint8)
    args = ffi.new("vac_penalties_args *")
    args.logits = ffi.cast("float *", pointer(memory.array))
    args.repetition = ffi.cast("float *", pointer(repetition.array))
    args.frequency = ffi.cast("float *", pointer(frequency.array))
    args.presence = ffi.cast("float *", pointer(presence.array))
    args.prompt = ffi.cast("int64_t *", pointer(ids.array))
    args.output = ffi.cast("int32_t *", pointer(flat.array))
    args.output_start = ffi.cast("int64_t *", pointer(start.array))
    args.workspace = pointer(workspace.array)
    args.num_reqs, args.vocab_size, args.row_stride = rows, vocab, stride
    args.num_prompt = args.prompt_stride = prompt.shape[1]
    args.max_tokens, args.num_workspaces = max_tokens, threads
    run_ops(["penalties"], args, threads)
    check_padding(memory, vocab, stride)
    workspace.check()
    return view.copy()


def penalties_reference(
    values: np.ndarray, factors: np.ndarray, prompt: np.ndarray, output: list[list[int]]
) -> np.ndarray:
    """vLLM's operations over the whole vocabulary, each rounded to FP32."""
    out, one = values.copy(), np.float32(1)
    vocab = values.shape[1]
    for row, (repetition, frequency, presence) in enumerate(factors.astype(np.float32)):
        tokens = np.array([token for token in output[row] if 0 <= token < vocab], np.int64)
        count = np.bincount(tokens, minlength=vocab)
        seen = count > 0
        seen[[token for token in prompt[row] if 0 <= token < vocab]] = True
        x = out[row]
        with np.errstate(over="ignore"):
            x *= np.where(seen, np.where(x > 0, one / repetition, repetition), one)
        x -= frequency * count.astype(np.float32)
        x -= presence * (count > 0).astype(np.float32)
    return out


@pytest.mark.parametrize("vocab", [1, 2, 7, 64, 1001, 5003])
@pytest.mark.parametrize("tokens", [0, 1, 5, 63, 700])
def test_penalties(vocab: int, tokens: int) -> None:
    """Bit by bit what vLLM's dense operations give; repeated, foreign and missing ids among the tokens."""
    rng = np.random.default_rng(15 + tokens)
    grid = np.meshgrid([1.0, 1.1, 0.7], [0.0, 0.3, -0.2], [0.0, 0.5, -0.1])
    factors = np.stack([axis.ravel() for axis in grid], 1)
    rows = len(factors)
    values = (rng.standard_normal((rows, vocab)) * 4).astype(np.float32)
    values[rng.random(values.shape) < 0.05] = -INF
    prompt = rng.integers(0, vocab + 1, (rows, tokens))  # `vocab` is vLLM's padding
    output = [rng.integers(-1, vocab, rng.integers(0, tokens + 1)).tolist() for _ in range(rows)]
    output[3] = []
    expected = penalties_reference(values, factors, prompt, output)
    for threads in THREADS:
        result = penalties(values, factors, prompt, output, threads, (vocab + threads) % 3)
        np.testing.assert_array_equal(result, expected)


def test_penalties_of_odd_logits() -> None:
    """NaN stays, infinities keep their sign, and a row with more tokens than there is room for stays as it is."""
    values = np.array([[np.nan, INF, -INF, 0.0, -0.0, 1e-45, 3e38, -3e38]], np.float32)
    factors, prompt = np.array([[2.0, 0.5, 0.25]]), np.arange(8)[None]
    output = [[0, 1, 2, 3, 4, 5, 6, 7, 7, 7]]
    result = penalties(values, factors, prompt, output)
    np.testing.assert_array_equal(result, penalties_reference(values, factors, prompt, output))
    np.testing.assert_array_equal(penalties(values, factors, prompt, output, max_tokens=17), values)
    # Tokens whose hashes collide, at the fullest that the table can be.
    vocab = 1 << 20
    values = np.random.default_rng(16).standard_normal((1, vocab)).astype(np.float32)
    output = [[(i * 4096) % vocab for i in range(512)]]
    result = penalties(values, factors, prompt, output)
    np.testing.assert_array_equal(result, penalties_reference(values, factors, prompt, output))


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_softmax(dtype: str) -> None:
    rng = np.random.default_rng(17)
    for case, vocab in enumerate(VOCABS):
        rows = 1 + case % 5
        stored = encode((rng.standard_normal((rows, vocab)) * 8).astype(np.float32), dtype)
        memory, _, stride = rows_of(stored, case % 3, bool(case % 2))
        out, view, out_stride = rows_of(np.zeros((rows, vocab), np.float32), 1 + case % 2, bool(case % 2))
        args = ffi.new("vac_log_softmax_rows_args *")
        args.out, args.logits = ffi.cast("float *", pointer(out.array)), pointer(memory.array)
        args.num_reqs, args.vocab_size = rows, vocab
        args.logits_row_stride, args.out_row_stride, args.dtype = stride, out_stride, DTYPES[dtype]
        run_ops(["log_softmax_rows"], args, THREADS[case % 4])
        check_padding(out, vocab, out_stride)
        x = decode(stored, dtype).astype(np.float64)
        x -= x.max(-1, keepdims=True)
        expected = x - np.log(np.exp(x).sum(-1, keepdims=True))
        np.testing.assert_allclose(view, expected, rtol=3e-7, atol=2e-6)


def test_log_softmax_of_odd_rows() -> None:
    values = np.random.default_rng(18).standard_normal((4, 70)).astype(np.float32)
    values[0, 3], values[1, 4], values[2] = np.nan, INF, -INF
    values[3, 5:] = -INF
    out = guarded(np.zeros_like(values))
    args = ffi.new("vac_log_softmax_rows_args *")
    args.out, args.logits = ffi.cast("float *", pointer(out.array)), pointer(values)
    args.num_reqs, args.vocab_size = values.shape
    args.logits_row_stride = args.out_row_stride = 70
    run_ops(["log_softmax_rows"], args, 2)
    assert np.isnan(out.array[:3]).all()
    assert (out.array[3, 5:] == -INF).all()
    np.testing.assert_allclose(np.exp(out.array[3, :5]).sum(), 1, rtol=1e-6)


def top_logprobs(
    values: np.ndarray, tokens: np.ndarray, num_top: int, threads: int = 1, padding: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, logprobs and ranks from the kernel."""
    rows, vocab = values.shape
    memory, _, stride = rows_of(values, padding, True)
    out_tokens, out_ranks = Guarded((rows, 1 + num_top), np.int32), Guarded(rows, np.int64)
    out_logprobs, workspace = (
        Guarded((rows, 1 + num_top), np.float32),
        Guarded(lib.vac_top_logprobs_workspace_size(vocab, threads), np.uint8),
    )
    ids = guarded(tokens.astype(np.int64))
    args = ffi.new("vac_top_logprobs_args *")
    args.out_tokens = ffi.cast("int32_t *", pointer(out_tokens.array))
    args.out_logprobs = ffi.cast("float *", pointer(out_logprobs.array))
    args.out_ranks = ffi.cast("int64_t *", pointer(out_ranks.array))
    args.logprobs = ffi.cast("float *", pointer(memory.array))
    args.tokens, args.workspace = ffi.cast("int64_t *", pointer(ids.array)), pointer(workspace.array)
    args.num_reqs, args.vocab_size, args.row_stride = rows, vocab, stride
    args.num_top, args.num_workspaces = num_top, threads
    run_ops(["top_logprobs"], args, threads)
    for guard in (memory, out_tokens, out_logprobs, out_ranks, workspace):
        guard.check()
    return out_tokens.array.copy(), out_logprobs.array.copy(), out_ranks.array.copy()


@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "masked", "nan"])
@pytest.mark.parametrize("vocab", [1, 2, 64, 65, 1000, 5003])
def test_top_logprobs(vocab: int, kind: str) -> None:
    """The likeliest in order, the lower token first among equal ones, however many are asked for."""
    rng = np.random.default_rng(19 + vocab)
    rows = 5
    values = rng.standard_normal((rows, vocab)).astype(np.float32) - 5
    if kind == "ties":
        values = np.round(values * 2)
    elif kind == "equal":
        values[:] = -1.5
    elif kind == "masked":
        values[rng.random(values.shape) < 0.97] = -INF
    elif kind == "nan":
        values[1:, vocab // 2] = np.nan
    tokens = rng.integers(0, vocab, rows)
    order = np.argsort(-np.where(np.isnan(values), INF, values), axis=-1, kind="stable")
    for case, num_top in enumerate(sorted({0, 1, min(5, vocab), min(20, vocab), min(333, vocab), vocab})):
        ids, logprobs, ranks = top_logprobs(values, tokens, num_top, THREADS[case % 4], case % 3)
        own = np.take_along_axis(values, tokens[:, None], -1)
        assert (ids[:, 0] == tokens).all()
        np.testing.assert_array_equal(logprobs[:, :1], own)
        assert (ranks == (values >= own).sum(-1)).all()
        assert (ids[:, 1:] == order[:, :num_top]).all()
        np.testing.assert_array_equal(logprobs[:, 1:], np.take_along_axis(values, order[:, :num_top], -1))


def test_top_logprobs_of_a_real_vocabulary_and_a_foreign_token() -> None:
    values = np.random.default_rng(20).standard_normal((2, 151936)).astype(np.float32)
    ids, logprobs, ranks = top_logprobs(values, np.array([151936, -1]), 20, 2)
    assert (ids[:, 1:] == np.argsort(-values, axis=-1, kind="stable")[:, :20]).all()
    assert np.isnan(logprobs[:, 0]).all()
    assert (ranks == 0).all()


def test_no_rows_and_unknown_dtype_write_nothing() -> None:
    for name in (
        "argmax",
        "softmax_rows",
        "gumbel_argmax",
        "top_k_top_p_mask",
        "fill_masked",
        "penalties",
        "log_softmax_rows",
        "top_logprobs",
    ):
        args = ffi.new(f"vac_{name}_args *")
        ops = [name] if hasattr(lib, f"vac_{name}") else [f"{name}_partial", f"{name}_merge"]
        run_ops(ops, args, 3)
        args.vocab_size = 10
        run_ops(ops, args, 3)
    out = guarded(np.array([-7], np.int64))
    args = ffi.new("vac_argmax_args *")
    args.out = ffi.cast("int64_t *", pointer(out.array))
    args.num_reqs, args.vocab_size, args.dtype = 1, 5, 9
    run_ops(["argmax_partial", "argmax_merge"], args, 2)
    assert out.array[0] == -7
