"""Gated delta nets: convolution, directions and gates, recurrence, against FP64 token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.support import DTYPES, Guarded, decode, encode, ffi, guarded, kernel, lib, pointer, run

THREADS = [1, 2, 3, 8]
ROUNDOFF = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


def exact(bits: np.ndarray, dtype: str) -> np.ndarray:
    return decode(bits, dtype).astype(np.float64)


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> np.ndarray:
    return encode((scale * rng.standard_normal(shape)).astype(np.float32), dtype)


def requests_of(lengths: list[int], slots: list[int], has_state: list[bool], at_end: bool) -> dict[str, Guarded]:
    return {
        "query_start_loc": guarded(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), at_end),
        "slots": guarded(np.array(slots, dtype=np.int32), at_end),
        "has_state": guarded(np.array(has_state, dtype=np.uint8), at_end),
    }


def set_requests(args: Any, memory: dict[str, Guarded]) -> None:
    args.requests.num_requests = memory["slots"].array.size
    args.requests.query_start_loc = ffi.cast("int32_t *", memory["query_start_loc"].array.ctypes.data)
    args.requests.slots = ffi.cast("int32_t *", memory["slots"].array.ctypes.data)
    args.requests.has_state = ffi.cast("uint8_t *", memory["has_state"].array.ctypes.data)


def floats(memory: Guarded) -> Any:
    return ffi.cast("float *", memory.array.ctypes.data)


# Tokens of each request, its slot, whether it has a state: decodes, prompts in one piece and continued, one left out.
BATCHES: list[tuple[list[int], list[int], list[bool]]] = [
    ([1], [0], [True]),
    ([1, 1, 1], [2, 0, 3], [True, True, False]),
    ([1, 7, 2, 4], [3, 1, 0, -1], [True, False, True, True]),
    ([33], [1], [True]),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_causal_conv(dtype: str) -> None:
    rng = np.random.default_rng(0)
    for case, (channels, width) in enumerate([(1, 2), (7, 4), (64, 3), (200, 4), (131, 4)]):
        lengths, slots, has_state = BATCHES[case % len(BATCHES)]
        at_end, with_bias, tokens, extra = bool(case % 2), case % 2 == 0, sum(lengths), 5
        memory = requests_of(lengths, slots, has_state, at_end)
        x = random(rng, (tokens, channels + extra), dtype)
        state = random(rng, (4, width - 1, channels + 3), dtype)
        weight = rng.standard_normal((width, channels)).astype(np.float32)
        bias = rng.standard_normal(channels).astype(np.float32)
        parts = {
            "x": guarded(x.reshape(-1)[: x.size - extra], at_end),
            "weight": guarded(weight.reshape(-1), at_end),
            "bias": guarded(bias, at_end),
        }
        # Padded up to a row of zeros before the first token.
        expected = np.zeros((tokens, channels))
        after = exact(state, dtype)
        begin = 0
        for length, slot, has in zip(lengths, slots, has_state, strict=True):
            if slot >= 0:
                before = after[slot, :, :channels] if has else np.zeros((width - 1, channels))
                inputs = np.concatenate([before, exact(x[begin : begin + length, :channels], dtype)])
                for t in range(length):
                    total = (inputs[t : t + width] * weight).sum(0) + (bias if with_bias else 0)
                    expected[begin + t] = total / (1 + np.exp(-total))
                after[slot, :, :channels] = inputs[-(width - 1) :]
            begin += length
        for threads in THREADS:
            held = guarded(state.reshape(-1).copy(), at_end)
            fill = np.zeros(1, state.dtype)[0]
            out = guarded(np.full((tokens - 1) * (channels + 2) + channels, fill), at_end)
            args = ffi.new("vac_causal_conv_args *")
            set_requests(args, memory)
            args.dtype, args.channels, args.width = DTYPES[dtype], channels, width
            args.x, args.x_stride = pointer(parts["x"].array), channels + extra
            args.out, args.out_stride = pointer(out.array), channels + 2
            args.weight = floats(parts["weight"])
            args.bias = floats(parts["bias"]) if with_bias else ffi.NULL
            args.state, args.state_slot_stride = pointer(held.array), (width - 1) * (channels + 3)
            args.state_row_stride = channels + 3
            assert lib.vac_causal_conv_check(args) == lib.VAC_OK
            run(kernel("causal_conv"), args, threads)
            for part in (*memory.values(), *parts.values(), held, out):
                part.check()
            whole = np.zeros(tokens * (channels + 2), state.dtype)
            whole[: out.array.size] = out.array.view(state.dtype)
            rows = whole.reshape(tokens, channels + 2)
            assert (exact(rows[:-1, channels:], dtype) == 0).all()
            got = exact(rows[:, :channels], dtype)
            # SiLU's exponential is as exact as the type; sums have FP32's error.
            assert np.allclose(got, expected, rtol=2 * ROUNDOFF[dtype] + 2.0**-20, atol=2.0**-18), (case, threads)
            states = held.array.view(state.dtype).reshape(state.shape)
            assert np.array_equal(exact(states, dtype), after), (case, threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_delta_inputs(dtype: str) -> None:
    """Unit lengths, also of a row of zeros; gates at both ends of their range."""
    rng = np.random.default_rng(1)
    for case, (tokens, k_heads, v_heads, k_dim) in enumerate(
        [(1, 1, 1, 8), (5, 2, 4, 64), (9, 3, 11, 24), (0, 1, 1, 8)]
    ):
        at_end = bool(case % 2)
        x = random(rng, (tokens + 1, 2 * k_heads * k_dim + 7), dtype)
        x[0, :k_dim] = 0
        a, b = (random(rng, (tokens + 1, v_heads + 3), dtype, 6.0) for _ in range(2))
        if case == 1:
            a[0, :4] = encode(np.array([-90, 90, -15, 19.9], dtype=np.float32), dtype)
        rate = -np.exp(rng.standard_normal(v_heads)).astype(np.float32)
        dt_bias = rng.standard_normal(v_heads).astype(np.float32)
        parts = {
            name: guarded(value.reshape(-1)[: tokens * value.shape[1]], at_end)
            for name, value in (("x", x), ("a", a), ("b", b))
        }
        parts |= {"rate": guarded(rate, at_end), "dt_bias": guarded(dt_bias, at_end)}
        values = exact(x[:tokens, : 2 * k_heads * k_dim], dtype).reshape(tokens, 2, k_heads, k_dim)
        unit = values / np.sqrt((values**2).sum(-1, keepdims=True) + 1e-6)
        unit[:, 0] /= np.sqrt(k_dim)
        time = exact(a[:tokens, :v_heads], dtype) + dt_bias
        decay = np.exp(rate.astype(np.float64) * np.logaddexp(0, time))
        size = 1 / (1 + np.exp(-exact(b[:tokens, :v_heads], dtype)))
        for threads in THREADS:
            directions = guarded(np.zeros(tokens * k_heads * 2 * k_dim, dtype=np.float32), at_end)
            gates = guarded(np.zeros(tokens * v_heads * 2, dtype=np.float32), at_end)
            args = ffi.new("vac_delta_inputs_args *")
            args.dtype, args.num_tokens, args.num_k_heads = DTYPES[dtype], tokens, k_heads
            args.num_v_heads, args.k_dim = v_heads, k_dim
            for name, value in (("x", x), ("a", a), ("b", b)):
                setattr(args, name, pointer(parts[name].array))
                setattr(args, f"{name}_stride", value.shape[1])
            args.rate, args.dt_bias = floats(parts["rate"]), floats(parts["dt_bias"])
            args.directions, args.gates = floats(directions), floats(gates)
            assert lib.vac_delta_inputs_check(args) == lib.VAC_OK
            run(kernel("delta_inputs"), args, threads)
            for part in (*parts.values(), directions, gates):
                part.check()
            got = directions.array.reshape(tokens, k_heads, 2, k_dim).transpose(0, 2, 1, 3)
            assert np.allclose(got, unit, rtol=2.0**-20, atol=1e-9)
            pairs = gates.array.reshape(tokens, v_heads, 2)
            # An exponent of up to 87 magnifies FP32's error.
            assert np.allclose(pairs[..., 0], decay, rtol=2.0**-15, atol=1e-30)
            assert np.allclose(pairs[..., 1], size, rtol=2.0**-20, atol=1e-30)


@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_delta(dtype: str, state_dtype: str) -> None:
    """Outputs and states of every request; a prompt in pieces has the bits of one in a piece."""
    rng = np.random.default_rng(2)
    shapes = [(1, 1, 8, 8), (2, 4, 64, 64), (2, 6, 16, 24), (1, 2, 256, 16)]
    for case, (k_heads, v_heads, k_dim, v_dim) in enumerate(shapes):
        lengths, slots, has_state = BATCHES[case]
        at_end, tokens = bool(case % 2), sum(lengths)
        memory = requests_of(lengths, slots, has_state, at_end)
        directions = rng.standard_normal((tokens, k_heads, 2, k_dim)).astype(np.float32)
        directions /= np.sqrt((directions**2).sum(-1, keepdims=True))
        gates = rng.uniform(0.2, 1.0, (tokens, v_heads, 2)).astype(np.float32)
        value = random(rng, (tokens, v_heads * v_dim + 9), dtype)
        state = random(rng, (4, v_heads * v_dim * k_dim + 16), state_dtype)
        parts = {
            "directions": guarded(directions.reshape(-1), at_end),
            "gates": guarded(gates.reshape(-1), at_end),
            "value": guarded(value.reshape(-1)[: value.size - 9], at_end),
        }
        after = exact(state[:, : v_heads * v_dim * k_dim], state_dtype).reshape(4, v_heads, v_dim, k_dim)
        expected = np.zeros((tokens, v_heads, v_dim))
        size = np.zeros_like(expected)
        begin = 0
        for length, slot, has in zip(lengths, slots, has_state, strict=True):
            if slot >= 0:
                for head in range(v_heads):
                    s = after[slot, head] if has else np.zeros((v_dim, k_dim))
                    for t in range(begin, begin + length):
                        query, key = directions[t, head // (v_heads // k_heads)].astype(np.float64)
                        decay, step = gates[t, head].astype(np.float64)
                        v = exact(value[t, head * v_dim : (head + 1) * v_dim], dtype)
                        s = decay * s
                        s = s + np.outer(step * (v - s @ key), key)
                        expected[t, head] = s @ query
                        size[t, head] = np.abs(s) @ np.abs(query)
                    after[slot, head] = s
            begin += length
        for threads in THREADS:
            held = guarded(state.reshape(-1).copy(), at_end)
            out = guarded(np.zeros((tokens - 1) * (v_heads * v_dim + 4) + v_heads * v_dim, value.dtype), at_end)
            args = ffi.new("vac_gated_delta_args *")
            set_requests(args, memory)
            args.dtype, args.state_dtype = DTYPES[dtype], DTYPES[state_dtype]
            args.num_k_heads, args.num_v_heads, args.k_dim, args.v_dim = k_heads, v_heads, k_dim, v_dim
            args.directions, args.gates = floats(parts["directions"]), floats(parts["gates"])
            args.value, args.value_stride = pointer(parts["value"].array), v_heads * v_dim + 9
            args.out, args.out_stride = pointer(out.array), v_heads * v_dim + 4
            args.state, args.state_slot_stride = pointer(held.array), state.shape[1]
            assert lib.vac_gated_delta_check(args) == lib.VAC_OK
            run(kernel("gated_delta"), args, threads)
            for part in (*memory.values(), *parts.values(), held, out):
                part.check()
            whole = np.zeros(tokens * (v_heads * v_dim + 4), value.dtype)
            whole[: out.array.size] = out.array.view(value.dtype)
            rows = whole.reshape(tokens, -1)
            got = exact(rows[:, : v_heads * v_dim], dtype).reshape(expected.shape)
            allowed = ROUNDOFF[dtype] * np.abs(expected) * 1.01 + 2.0**-24 * (k_dim + 8 * max(lengths)) * (size + 1)
            assert (np.abs(got - expected) <= allowed).all(), (case, threads)
            assert (exact(rows[:-1, v_heads * v_dim :], dtype) == 0).all()
            states = held.array.view(state.dtype).reshape(state.shape)
            left = exact(states[:, : v_heads * v_dim * k_dim], state_dtype).reshape(after.shape)
            assert np.allclose(left, after, rtol=ROUNDOFF[state_dtype] * 1.01, atol=2.0**-24 * (k_dim + 40) * 4)
            assert np.array_equal(
                exact(states[:, v_heads * v_dim * k_dim :], state_dtype), exact(state[:, -16:], state_dtype)
            )


def test_checks() -> None:
    """Sizes and strides that the kernels do not take."""
    conv = ffi.new("vac_causal_conv_args *")
    conv.dtype, conv.channels, conv.width = DTYPES["f32"], 4, 4
    conv.x_stride = conv.out_stride = conv.state_row_stride = 4
    delta = ffi.new("vac_gated_delta_args *")
    delta.num_k_heads, delta.num_v_heads, delta.k_dim, delta.v_dim = 1, 2, 16, 8
    delta.value_stride = delta.out_stride = 16
    delta.state_slot_stride = 256
    inputs = ffi.new("vac_delta_inputs_args *")
    inputs.num_k_heads, inputs.num_v_heads, inputs.k_dim, inputs.x_stride = 1, 2, 16, 32
    inputs.a_stride = inputs.b_stride = 2
    for args, check, wrong in (
        (conv, lib.vac_causal_conv_check, {"width": 5, "dtype": 7, "x_stride": 3, "state_row_stride": 1}),
        (
            delta,
            lib.vac_gated_delta_check,
            {"k_dim": 264, "v_dim": 4, "num_k_heads": 0, "out_stride": 15, "state_dtype": -1},
        ),
        (inputs, lib.vac_delta_inputs_check, {"k_dim": 4, "x_stride": 31, "a_stride": 1, "num_tokens": 1}),
    ):
        assert check(args) == lib.VAC_OK
        for name, value in wrong.items():
            before = getattr(args, name)
            setattr(args, name, value)
            assert check(args) == lib.VAC_INVALID_ARGUMENT, name
            setattr(args, name, before)
