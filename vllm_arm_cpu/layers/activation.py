"""Gated activations (SwiGLU, GeGLU) on our kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import FastGELU, GeluAndMul, NewGELU, QuickGELU, SiluAndMul

from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import DTYPES, Call, as_rows, pointer
from vllm_arm_cpu.native.program import Program, Rows, Slot

_call: Call | None = None


def activation_and_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    """``activation(x[..., :d]) * x[..., d:]``: x [..., 2 d] -> [..., d].

    activation: "SILU", "GELU" (erf) or "GELU_TANH".
    """
    global _call
    if _call is None:
        _call = Call(("vac_silu_and_mul", "vac_silu_and_mul_args"))
    rows = as_rows(x)
    d = rows.shape[1] // 2
    out = torch.empty((*x.shape[:-1], d), dtype=x.dtype)
    args = _call.args[0]
    args.out, args.x = pointer(out), pointer(rows)
    args.num_tokens, args.d = rows.shape[0], d
    args.x_token_stride, args.out_token_stride = rows.stride(0), d
    args.activation = getattr(library.load(), f"VAC_ACTIVATION_{activation}")
    args.dtype = DTYPES[x.dtype]
    _call.run()
    return out


def _uses_torch(x: torch.Tensor) -> bool:
    return torch.compiler.is_compiling() or x.dtype not in DTYPES


class ArmSiluAndMul(SiluAndMul):
    """vLLM's SwiGLU activation on our kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(x[..., :d]) * x[..., d:]``."""
        if _uses_torch(x):
            return self.forward_native(x)
        return activation_and_mul(x, "SILU")


class ArmGeluAndMul(GeluAndMul):
    """vLLM's GeGLU activation on our kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``gelu(x[..., :d]) * x[..., d:]``, exact or by tanh as configured."""
        if _uses_torch(x):
            return self.forward_native(x)
        return activation_and_mul(x, "GELU_TANH" if self.approximate == "tanh" else "GELU")


class _WithoutOperator(CustomOp):
    """Activations that vLLM computes with torch on Arm, but only after it has found an operator in ``vllm._C``."""

    def __init__(self) -> None:
        CustomOp.__init__(self)


class ArmNewGELU(_WithoutOperator, NewGELU):
    """GPT-2's GELU."""


class ArmFastGELU(_WithoutOperator, FastGELU):
    """The same by another formula."""


class ArmQuickGELU(_WithoutOperator, QuickGELU):
    """CLIP's GELU."""


def kind(module: Any) -> str | None:
    """The ``vac_activation`` of a gated activation layer, without its prefix; None where there is none."""
    if type(module) is ArmSiluAndMul:
        return "SILU"
    if type(module) is ArmGeluAndMul:
        return "GELU_TANH" if module.approximate == "tanh" else "GELU"
    return None


def add_activation(program: Program, activation: str, dtype: torch.dtype, tokens: Slot, x: Rows, d: int) -> None:
    """Append ``x[:, :d] = activation(x[:, :d]) * x[:, d:]`` to a program: x [tokens, 2 d]."""
    args = program.op("vac_silu_and_mul", "vac_silu_and_mul_args", num_tokens=tokens, d=d)
    program.rows(args, "x", x, "x_token_stride")
    program.rows(args, "out", x, "out_token_stride")
    args.activation, args.dtype = getattr(library.load(), f"VAC_ACTIVATION_{activation}"), DTYPES[dtype]


@functools.cache
def int8_workspace(d: int) -> Callable[[int], int]:
    """Number of rows -> bytes of workspace of :func:`add_activation_int8`; the same function for the same ``d``."""
    nbytes = int(library.load().vac_silu_and_mul_int8_workspace_size(d, library.load().vac_max_threads()))
    return lambda rows: nbytes


def add_activation_int8(
    program: Program,
    activation: str,
    dtype: torch.dtype,
    tokens: Slot,
    x: Rows,
    d: int,
    rows: Slot,
    quantization: Any,
    workspace: Slot,
) -> None:
    """Append what :func:`add_activation` does, its result quantized to ``rows`` as the INT8 GEMM wants it.

    quantization: ``vac_int8_quantization``. x is left as it is.
    """
    for kernel in ("vac_silu_and_mul_int8", "vac_silu_and_mul_int8_finish"):
        args = program.op(kernel, "vac_silu_and_mul_int8_args", num_tokens=tokens, d=d, rows=rows, workspace=workspace)
        args.quantization = quantization
        args.activation, args.dtype = getattr(library.load(), f"VAC_ACTIVATION_{activation}"), DTYPES[dtype]
        program.rows(args, "x", x, "x_token_stride")


def register() -> None:
    """Put the classes in the place of vLLM's."""
    for cls in (ArmSiluAndMul, ArmGeluAndMul, ArmNewGELU, ArmFastGELU, ArmQuickGELU):
        name = cls.__name__.removeprefix("Arm")
        if name not in op_registry_oot:
            CustomOp.register_oot(cls, name=name)
