"""W8A8: 8-bit weights with a scale per output channel, activations rounded to 8 bits, exact integer sums.

The kernels round activations to nearest even, per token or by the checkpoint's
scale, and write the model's dtype: one parallel region for each layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.kernels import linear as vllm_kernels
from vllm.model_executor.kernels.linear import Int8ScaledMMLinearKernel, Int8ScaledMMLinearLayerConfig
from vllm.platforms import PlatformEnum

from vllm_arm_cpu.layers.linear_tuner import Choice, Shape
from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import DTYPES, Call, as_rows, pointer, scratch
from vllm_arm_cpu.native.program import Program, Rows, Slot
from vllm_arm_cpu.quantization.packed import (
    NativeQuantizedLinear,
    ProgramOperands,
    QuantizedLinear,
    assign,
    name_of,
    release,
)
from vllm_arm_cpu.runtime import memory

ONLY = Choice("vac", {}, {}, "only one")
"""There is one kernel for these layers."""

_ROUNDED_ROWS = 4096
"""Rows of a weight that are rounded at a time."""


@dataclass(frozen=True)
class Activations:
    """How activations are rounded.

    Attributes:
        symmetric: without zero points, where there is no scale.
        scale: of all tokens; None: each token has its own.
        zero_point: with a scale, -128 to 127.
    """

    symmetric: bool = True
    scale: float | None = None
    zero_point: int = 0


class Int8Linear(QuantizedLinear):
    """A weight in the layout of the INT8 GEMM.

    Args:
        values: int8 [N, K]; read here and not kept.
        scales: FP32 [N], or [1].
        activations: how its inputs are rounded.
        name: of the layer.
    """

    def __init__(self, values: torch.Tensor, scales: torch.Tensor, activations: Activations, name: str) -> None:
        lib = library.load()
        n, k = values.shape
        super().__init__(n, k, memory.allocate(lib.vac_int8_gemm_rhs_packed_size(n, k)), name)
        self._self_quantized = lib.VAC_INT8_GEMM_QUANTIZE_ROWS
        self._call = Call(
            ("vac_int8_quantize_rows", "vac_int8_quantize_rows_args"), ("vac_int8_gemm", "vac_int8_gemm_args")
        )
        self._quantize, self._gemm = self._call.args
        self._quantize.k = self._gemm.k = k
        self._gemm.n = self._gemm.out_stride = n
        self._gemm.rhs = pointer(self.packed)
        self.load(values, scales, activations)

    def load(self, values: torch.Tensor, scales: torch.Tensor, activations: Activations) -> None:
        """Pack other values of the same shape over these.

        Raises:
            ValueError: another shape, or a static scale that is no positive number.
        """
        if values.shape != (self.n, self.k) or scales.numel() not in (1, self.n):
            raise ValueError(
                f"an int8 weight [{self.n}, {self.k}] cannot be replaced by {list(values.shape)} with "
                f"{scales.numel()} scales"
            )
        lib = library.load()
        quantization = self._quantize.quantization
        if activations.scale is not None:
            if not (math.isfinite(activations.scale) and activations.scale >= 2.0**-126):
                raise ValueError(f"the static scale of activations is {activations.scale}, not a positive number")
            quantization.mode = lib.VAC_INT8_STATIC
            quantization.scale, quantization.zero_point = activations.scale, activations.zero_point
        elif activations.symmetric:
            quantization.mode = lib.VAC_INT8_DYNAMIC_SYMMETRIC
        else:
            quantization.mode = lib.VAC_INT8_DYNAMIC_ASYMMETRIC
        self.activations = activations
        values, scales = as_rows(values), scales.float().contiguous()
        pack = Call(("vac_int8_gemm_rhs_pack", "vac_int8_gemm_rhs_pack_args"))
        args = pack.args[0]
        args.n, args.k = self.n, self.k
        args.rhs, args.rhs_stride = library.ffi.cast("int8_t *", values.data_ptr()), values.stride(0)
        args.scales, args.one_scale = library.ffi.cast("float *", scales.data_ptr()), scales.numel() == 1
        args.packed = pointer(self.packed)
        pack.run()

    @property
    def quantization(self) -> Any:
        """``vac_int8_quantization`` of inputs."""
        return self._quantize.quantization

    def _workspace(self) -> int:
        """Bytes of workspace of the product, for any number of rows: it does not grow beyond a few hundred."""
        return int(library.load().vac_int8_gemm_workspace_size(1 << 16, self.n, self.k, self._threads)) + 63 & ~63

    def program_workspace(self, rows: int) -> int:
        """The product's, and the quantized rows behind it."""
        return self._workspace() + self.quantized_size(rows)

    def quantized_size(self, rows: int) -> int:
        """Bytes of so many quantized rows."""
        return int(library.load().vac_int8_rows_size(rows, self.k))

    def add_ops(self, program: Program, given: ProgramOperands) -> None:
        """Append quantization and product."""
        quantized = (given.workspace, self._workspace())
        args = program.op("vac_int8_quantize_rows", "vac_int8_quantize_rows_args", m=given.rows, rows=quantized)
        args.quantization, args.dtype, args.k = self.quantization, DTYPES[given.dtype], self.k
        program.rows(args, "x", given.x, "x_stride")
        self.add_product(program, given.rows, quantized, given.out, given.out_dtype, given.bias, given.workspace)

    def add_product(
        self,
        program: Program,
        rows: Slot,
        quantized: Slot | tuple[Slot, int],
        out: Rows,
        out_dtype: torch.dtype,
        bias: torch.Tensor | None,
        workspace: Slot,
    ) -> None:
        """Append the product of quantized rows."""
        args = program.op("vac_int8_gemm", "vac_int8_gemm_args", m=rows, rows=quantized, bias=bias, workspace=workspace)
        args.out_dtype, args.bias_dtype = DTYPES[out_dtype], DTYPES[torch.float32 if bias is None else bias.dtype]
        args.n, args.k, args.rhs = self.n, self.k, pointer(self.packed)
        program.keep(self.packed)
        program.rows(args, "out", out, "out_stride")

    def _set(self, dtype: int, out_dtype: int, lhs_stride: int, bias: torch.Tensor | None) -> None:
        self._quantize.dtype, self._quantize.x_stride = dtype, lhs_stride
        self._gemm.out_dtype = out_dtype
        self._gemm.bias = pointer(bias)
        if bias is not None:
            self._gemm.bias_dtype = DTYPES[bias.dtype]

    def _multiply(self, m: int, lhs: Any, out: Any) -> None:
        lib, quantize, gemm = library.load(), self._quantize, self._gemm
        rows_bytes = lib.vac_int8_rows_size(m, self.k)
        # Behind the rows: the buffer is aligned, and sizes are multiples of its alignment.
        buffer = scratch.pointer(self._scratch_size(m, self._bytes))
        quantize.m = gemm.m = m
        quantize.x, gemm.out = lhs, out
        quantize.rows = gemm.rows = buffer
        gemm.workspace = library.ffi.cast("char *", buffer) + rows_bytes
        if m <= self._self_quantized:
            gemm.quantize = quantize
            self._call.run(first=1)
        else:
            gemm.quantize = library.ffi.NULL
            self._call.run()

    def _bytes(self, m: int) -> int:
        lib = library.load()
        workspace = lib.vac_int8_gemm_workspace_size(m, self.n, self.k, self._threads)
        return int(lib.vac_int8_rows_size(m, self.k) + workspace)


class NativeInt8Linear(NativeQuantizedLinear):
    """One whose input may come in quantized rows: ``NativeInt8Linear`` of ``layers/decoder.py``."""

    def __init__(self, linear: Int8Linear, dtype: torch.dtype) -> None:
        super().__init__(linear, dtype)
        self._int8 = linear

    def quantized_size(self, rows: int) -> int:
        """Bytes of so many quantized rows."""
        return self._int8.quantized_size(rows)

    def add_quantized_to(
        self, program: Program, rows: Slot, quantized: Slot, out: Rows, bias: torch.Tensor | None, workspace: Slot
    ) -> None:
        """Append the product of rows that were quantized by ``quantization``."""
        self._int8.add_product(program, rows, quantized, out, self.dtype, bias, workspace)


class Int8Head:
    """An output layer in INT8, from a weight [N, K] of the model's dtype, which is not kept.

    Called as the layer's linear, and for FP32 logits.
    """

    def __init__(self, weight: torch.Tensor, name: str) -> None:
        self._linear = Int8Linear(*round_weight(weight), Activations(), name)
        self.nbytes = self._linear.nbytes
        self.logits = self._linear.logits
        self.native_linear = NativeInt8Linear(self._linear, weight.dtype)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias``: x [..., K] -> [..., N] of x's dtype."""
        return self._linear(x, None, bias)

    def load(self, weight: torch.Tensor) -> None:
        """Round and pack another weight of the same shape."""
        self._linear.load(*round_weight(weight), Activations())

    def another(self, weight: torch.Tensor, name: str) -> Int8Head:
        """One of the same kind for another weight."""
        return Int8Head(weight, name)


def round_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight ~ values * scales``, symmetric with one scale per row: [N, K] -> int8 [N, K], FP32 [N]."""
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    for start in range(0, weight.shape[0], _ROUNDED_ROWS):
        block = weight[start : start + _ROUNDED_ROWS].float()
        scale = block.abs().amax(1) / 127
        # Rows of padding are zeros.
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        scales[start : start + _ROUNDED_ROWS] = scale
        values[start : start + _ROUNDED_ROWS] = torch.round(block / scale[:, None]).clamp(-127, 127)
    return values, scales


class ArmInt8LinearKernel(Int8ScaledMMLinearKernel):
    """vLLM's interface to INT8 linear layers on our kernels: static or dynamic scales, with zero points or without."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Whether this platform is ours: the list is of one platform."""
        return True, None

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        """All of vLLM's variants are."""
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the weight, release the parameters; or pack again what a reload brought.

        Raises:
            ValueError: a static scale that is no positive number; the message names the layer.
        """
        weight_name, scale_name, *_ = self.layer_param_names
        values, scales, input_scale, input_zero_point, _ = self._get_layer_params(layer)
        if not self.config.is_channelwise and scales.numel() > 1:
            # A scale for each of the layers that were merged.
            scales = torch.cat([scales[i : i + 1].expand(width) for i, width in enumerate(layer.logical_widths)])
        activations = Activations(self.config.input_symmetric)
        if self.config.is_static_input_scheme:
            zero_point = 0 if self.config.input_symmetric else int(input_zero_point.flatten()[0])
            activations = Activations(self.config.input_symmetric, float(input_scale.max()), zero_point)
        try:
            made = layer.__dict__.get("cpu_linear")
            if isinstance(made, Int8Linear):
                made.load(values.data, scales.data.flatten(), activations)
            else:
                made = Int8Linear(values.data, scales.data.flatten(), activations, name_of(layer))
        except ValueError as error:
            raise ValueError(f"the linear layer {name_of(layer)}: {error}") from None
        native = NativeInt8Linear(made, layer.params_dtype)
        assign(layer, made, Shape("int8", made.n, made.k), ONLY, native)
        release(layer, weight_name, scale_name)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias``; vLLM hands the bias to one rank only."""
        result: torch.Tensor = layer.cpu_linear(x, None, bias)
        return result


def register() -> None:
    """Put the kernel in front of vLLM's; calling it again changes nothing."""
    kernels = vllm_kernels._POSSIBLE_INT8_KERNELS[PlatformEnum.CPU]
    if ArmInt8LinearKernel not in kernels:
        kernels.insert(0, ArmInt8LinearKernel)
