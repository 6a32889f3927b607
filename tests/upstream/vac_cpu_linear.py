"""vLLM's oneDNN linear operators, as its tests call them, on our GEMMs.

BF16 weights go through the layers' own ``PackedLinear``. INT8 products are of
activations that a test has rounded itself, with scales and zero points that no
rounding of ours gives: they are laid out as the rows that
``vac_int8_quantize_rows`` writes (``vac/quant_int8.h``) and multiplied by
``vac_int8_gemm``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_arm_cpu.layers.linear_candidates import PackedLinear
from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import DTYPES, Call, pointer, scratch
from vllm_arm_cpu.quantization.w8a8 import Activations, Int8Linear

ffi = library.ffi


def create_onednn_mm(weight: torch.Tensor, primitive_cache_size: int = 128) -> PackedLinear:
    """The handler of a weight [K, N]; the size of oneDNN's cache is its own affair."""
    return PackedLinear(weight.t())


def onednn_mm(handler: PackedLinear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight + bias``: [M, K] -> [M, N]."""
    return handler(x, None, bias)


@dataclass
class ScaledHandler:
    """An INT8 weight and the dtype of what it is multiplied to."""

    linear: Int8Linear
    out_dtype: torch.dtype


def create_onednn_scaled_mm(
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    output_type: torch.dtype,
    dynamic_quant: bool,
    use_azp: bool,
    primitive_cache_size: int = 128,
) -> ScaledHandler:
    """The handler of an INT8 weight [K, N] with one scale or N of them."""
    linear = Int8Linear(weight.t(), weight_scales.flatten(), Activations(), "linear")
    return ScaledHandler(linear, output_type)


def rows_of(values: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None) -> torch.Tensor:
    """INT8 [M, K], one scale or M of them, and as many zero points or none, as a buffer of quantized rows."""
    lib = library.load()
    m, k = values.shape
    bf16_tier = lib.vac_tier() == lib.VAC_TIER_BF16_I8MM
    padded, pair = -(-m // 16) * 16, lib.vac_int8_row_pair_stride(k)
    rows = torch.zeros(lib.vac_int8_rows_size(m, k), dtype=torch.uint8)
    rows[: 4 * padded].view(torch.float32)[:m] = scales.flatten()
    if zero_points is not None:
        rows[4 * padded : 8 * padded].view(torch.int32)[:m] = zero_points.flatten()
    pairs, width = -(-m // 2), -(-k // 64) * 64
    even = torch.zeros((2 * pairs, width), dtype=torch.int8)
    even[:m, :k] = values
    even = even.view(pairs, 2, width // 8, 8).transpose(1, 2) if bf16_tier else even.view(pairs, 2, width)
    content = rows[8 * padded :].view(torch.int8)
    content.as_strided((pairs, 2 * width), (pair, 1)).copy_(even.reshape(pairs, 2 * width))
    return rows


def onednn_scaled_mm(
    handler: ScaledHandler,
    x: torch.Tensor,
    output: torch.Tensor,
    input_scale: torch.Tensor | None,
    input_zp: torch.Tensor | None,
    input_zp_adj: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """``output = input_scale * (x - input_zp) @ (scales * weight) + bias``; our kernel has its own sums of columns."""
    assert input_scale is not None
    assert output.dtype == handler.out_dtype
    lib, linear = library.load(), handler.linear
    rows = rows_of(x, input_scale, input_zp)
    call = Call(("vac_int8_gemm", "vac_int8_gemm_args"))
    (args,) = call.args
    args.out_dtype, args.m, args.n, args.k = DTYPES[output.dtype], x.shape[0], linear.n, linear.k
    args.rows, args.rhs = pointer(rows), pointer(linear.packed)
    args.bias = pointer(bias)
    if bias is not None:
        args.bias_dtype = DTYPES[bias.dtype]
    args.out, args.out_stride = pointer(output), output.stride(0)
    size = lib.vac_int8_gemm_workspace_size(args.m, args.n, args.k, lib.vac_max_threads())
    args.workspace = scratch.pointer(size)
    assert lib.vac_int8_gemm_check(args) == 0
    call.run()
    return output


def install() -> None:
    """Put the four functions into ``vllm._custom_ops``."""
    import vllm._custom_ops as ops

    for function in (create_onednn_mm, onednn_mm, create_onednn_scaled_mm, onednn_scaled_mm):
        assert callable(getattr(ops, function.__name__)), "vLLM has no such operator any more"
        setattr(ops, function.__name__, function)
