"""RMSNorm, with and without the residual sum, on our kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import DTYPES, Call, pointer
from vllm_arm_cpu.native.program import Program, Rows, Slot

_norm: Call | None = None
_fused: Call | None = None


def _calls() -> tuple[Call, Call]:
    global _norm, _fused
    if _norm is None or _fused is None:
        _norm = Call(("vac_rms_norm", "vac_rms_norm_args"))
        _fused = Call(("vac_fused_add_rms_norm", "vac_fused_add_rms_norm_args"))
    return _norm, _fused


def supported(x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether the kernels take these dtypes and strides."""
    if x.dtype not in DTYPES or x.dim() < 2 or x.dim() > 3 or x.stride(-1) != 1:
        return False
    return weight is None or weight.dtype in (x.dtype, torch.float32)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, plus_one: bool = False) -> torch.Tensor:
    """``x * rsqrt(mean(x^2) + eps) * weight`` over the last dimension.

    x: [tokens, hidden] or [tokens, heads, head_size] of FP32, FP16 or BF16;
    weight: [last dimension] of x's dtype or FP32, or None. ``plus_one`` is
    Gemma's ``1 + weight``.
    """
    call, _ = _calls()
    out = torch.empty(x.shape, dtype=x.dtype)
    args: Any = call.args[0]
    args.out, args.x, args.weight = pointer(out), pointer(x), pointer(weight)
    heads = 1 if x.dim() == 2 else x.shape[1]
    args.num_tokens, args.num_heads, args.hidden_size = x.shape[0], heads, x.shape[-1]
    args.x_token_stride, args.out_token_stride = x.stride(0), out.stride(0)
    args.x_head_stride, args.out_head_stride = (0, 0) if x.dim() == 2 else (x.stride(1), out.stride(1))
    args.eps, args.weight_plus_one = eps, plus_one
    args.dtype, args.weight_dtype = DTYPES[x.dtype], DTYPES[x.dtype if weight is None else weight.dtype]
    call.run()
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, plus_one: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual += x; x = norm(residual)``, both in place and returned.

    x, residual: [tokens, hidden] of one dtype. The norm is taken of the FP32
    sum, before it is rounded into the residual.
    """
    _, call = _calls()
    args: Any = call.args[0]
    args.out = args.x = pointer(x)
    args.residual, args.weight = pointer(residual), pointer(weight)
    args.num_tokens, args.hidden_size = x.shape
    args.x_token_stride = args.out_token_stride = x.stride(0)
    args.residual_token_stride = residual.stride(0)
    args.eps, args.weight_plus_one = eps, plus_one
    args.dtype, args.weight_dtype = DTYPES[x.dtype], DTYPES[x.dtype if weight is None else weight.dtype]
    call.run()
    return x, residual


def _can_fuse(x: torch.Tensor, residual: torch.Tensor) -> bool:
    return bool(x.dim() == 2 and residual.dtype == x.dtype and residual.stride(-1) == 1 and x.shape == residual.shape)


class ArmRMSNorm(RMSNorm):
    """vLLM's RMSNorm on our kernels."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The norm of x, or of x + residual with the sum."""
        passes_weight = self.pass_weight if residual is None else self.pass_weight_add
        weight = self.weight.data if passes_weight else None
        if torch.compiler.is_compiling() or self.variance_size_override is not None or not supported(x, weight):
            return self.forward_native(x, residual)
        if residual is None:
            return rms_norm(x, weight, self.variance_epsilon)
        if _can_fuse(x, residual):
            return fused_add_rms_norm(x, residual, weight, self.variance_epsilon)
        return self.forward_native(x, residual)


class ArmGemmaRMSNorm(GemmaRMSNorm):
    """Gemma's RMSNorm, whose factor is ``1 + weight``, on our kernels."""

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The norm of x, or of x + residual with the sum."""
        weight = self.weight.data
        if torch.compiler.is_compiling() or not supported(x, weight):
            return self.forward_native(x, residual)
        if residual is None:
            return rms_norm(x, weight, self.variance_epsilon, plus_one=True)
        if _can_fuse(x, residual):
            return fused_add_rms_norm(x, residual, weight, self.variance_epsilon, plus_one=True)
        return self.forward_native(x, residual)


def not_native(module: Any, dtype: torch.dtype) -> str | None:
    """Why a norm cannot be an op of a program over ``dtype``, or None."""
    if type(module) is ArmRMSNorm:
        if module.variance_size_override is not None or not (module.pass_weight and module.pass_weight_add):
            return "a norm over a part of its input, or without a weight"
    elif type(module) is not ArmGemmaRMSNorm:
        return f"its norm is {type(module).__name__}"
    if dtype not in DTYPES or module.weight.dtype not in (dtype, torch.float32):
        return f"a norm's weight is {module.weight.dtype}"
    return None


def set_weight(args: Any, module: Any) -> None:
    """Write what an argument struct says of a norm's weight, but for its address, and epsilon."""
    args.eps, args.weight_dtype = module.variance_epsilon, DTYPES[module.weight.dtype]
    args.weight_plus_one = isinstance(module, GemmaRMSNorm)


def add_norm(
    program: Program,
    module: Any,
    dtype: torch.dtype,
    tokens: Slot,
    x: Rows,
    out: Rows,
    heads: int = 1,
    residual: Rows | None = None,
    barrier: bool = True,
) -> None:
    """Append ``out = norm(x)`` to a program, or with a residual ``residual += x; out = norm(residual)``.

    x, out: [tokens, heads * size of the weight]; residual: [tokens, size]. ``out`` may be x.
    """
    weight = module.weight.data
    size = weight.shape[0]
    name = "vac_rms_norm" if residual is None else "vac_fused_add_rms_norm"
    args = program.op(name, f"{name}_args", barrier, num_tokens=tokens, hidden_size=size, weight=weight)
    args.dtype = DTYPES[dtype]
    set_weight(args, module)
    program.rows(args, "x", x, "x_token_stride")
    program.rows(args, "out", out, "out_token_stride")
    if residual is None:
        args.num_heads, args.x_head_stride, args.out_head_stride = heads, size, size
    else:
        program.rows(args, "residual", residual, "residual_token_stride")


@functools.cache
def _int8_workspace(size: int) -> Callable[[int], int]:
    nbytes = int(library.load().vac_rms_norm_int8_workspace_size(size, library.load().vac_max_threads()))
    return lambda rows: nbytes


def int8_workspace(module: Any) -> Callable[[int], int]:
    """Number of rows -> bytes of workspace of :func:`add_norm_int8`; the same function for norms of the same size."""
    return _int8_workspace(module.weight.shape[0])


def add_norm_int8(
    program: Program,
    module: Any,
    dtype: torch.dtype,
    tokens: Slot,
    x: Rows,
    rows: Slot,
    quantization: Any,
    workspace: Slot,
    residual: Rows | None = None,
) -> None:
    """Append what :func:`add_norm` with ``heads`` 1 does, its ``out`` quantized to ``rows`` as the INT8 GEMM wants it.

    quantization: ``vac_int8_quantization``.
    """
    weight = module.weight.data
    args = program.op(
        "vac_rms_norm_int8",
        "vac_rms_norm_int8_args",
        num_tokens=tokens,
        hidden_size=weight.shape[0],
        weight=weight,
        rows=rows,
        workspace=workspace,
    )
    args.quantization, args.dtype = quantization, DTYPES[dtype]
    set_weight(args, module)
    program.rows(args, "x", x, "x_token_stride")
    if residual is not None:
        program.rows(args, "residual", residual, "residual_token_stride")


def register() -> None:
    """Put the classes in the place of vLLM's."""
    for name, cls in (("RMSNorm", ArmRMSNorm), ("GemmaRMSNorm", ArmGemmaRMSNorm)):
        if name not in op_registry_oot:
            CustomOp.register_oot(cls, name=name)
