"""What layers with packed integer weights have in common: the call, blocks of rows, the parameters they came from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_arm_cpu.layers import linear, linear_tuner
from vllm_arm_cpu.layers.linear_candidates import register_handle
from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import DTYPES, as_rows, ffi
from vllm_arm_cpu.native.program import Program, Rows, Slot

MAX_ROWS = 1024
"""Rows of one run of the kernels: bounds the scratch memory, and is many enough to read the weight for."""


class QuantizedLinear(ABC):
    """A packed weight [N, K] and the call that multiplies by it.

    Attributes:
        n, k: its shape.
        packed: the weight in the kernel's layout, uint8.
        nbytes: bytes of it.
        handle: the name under which traced graphs find it.
    """

    def __init__(self, n: int, k: int, packed: torch.Tensor, name: str) -> None:
        self.n, self.k = n, k
        self.packed = packed
        self.nbytes = packed.numel()
        self._threads = library.load().vac_max_threads()
        self._scratch_bytes: dict[int, int] = {}
        self.handle = register_handle(self, name)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias``: x [..., K] of BF16, FP16 or FP32 -> [..., N] of x's dtype.

        ``weight`` is vLLM's placeholder of the released original.
        """
        if torch.compiler.is_compiling():
            result: torch.Tensor = torch.ops.vac.linear(x, self.handle, bias)
            return result
        return self.run(x, bias, x.dtype)

    def logits(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """As the call, in FP32."""
        return self.run(x, bias, torch.float32)

    def run(self, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        """x [..., K] -> [..., N] of ``out_dtype``.

        Raises:
            TypeError: x is not BF16, FP16 or FP32.
        """
        if x.dtype not in DTYPES:
            raise TypeError(f"input is {x.dtype}; the quantized weight [{self.n}, {self.k}] takes BF16, FP16 and FP32")
        rows = as_rows(x)
        m, stride = rows.shape[0], rows.stride(0)
        out = torch.empty((m, self.n), dtype=out_dtype)
        self._set(DTYPES[x.dtype], DTYPES[out_dtype], stride, bias)
        lhs, result = rows.data_ptr(), out.data_ptr()
        lhs_bytes, out_bytes = stride * rows.element_size(), self.n * out.element_size()
        for start in range(0, m, MAX_ROWS):
            self._multiply(
                min(MAX_ROWS, m - start),
                ffi.cast("void *", lhs + start * lhs_bytes),
                ffi.cast("void *", result + start * out_bytes),
            )
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self.n)

    @property
    def quantization(self) -> Any:
        """``vac_int8_quantization`` of inputs that may come in quantized rows; None where they may not."""
        return None

    @abstractmethod
    def program_workspace(self, rows: int) -> int:
        """Bytes of workspace that :meth:`add_ops` wants for so many rows and fewer."""

    @abstractmethod
    def add_ops(self, program: Program, given: ProgramOperands) -> None:
        """Append the ops that multiply ``given.x`` by the weight."""

    @abstractmethod
    def _set(self, dtype: int, out_dtype: int, lhs_stride: int, bias: torch.Tensor | None) -> None:
        """Set what all blocks of rows have in common; out has no gaps."""

    @abstractmethod
    def _multiply(self, m: int, lhs: Any, out: Any) -> None:
        """Run the kernels on m rows."""

    def _scratch_size(self, m: int, size: Callable[[int], int]) -> int:
        """Bytes of scratch for m rows, by ``size`` of the power of two that is not less."""
        most = min(1 << (m - 1).bit_length(), MAX_ROWS)
        if most not in self._scratch_bytes:
            self._scratch_bytes[most] = size(most)
        return self._scratch_bytes[most]


@dataclass(frozen=True)
class ProgramOperands:
    """What a linear layer is given inside a program.

    Attributes:
        dtype: of x.
        out_dtype: of out.
        rows: how many.
        x: [rows, K].
        out: [rows, N].
        bias: [N] or None.
        workspace: as :meth:`QuantizedLinear.program_workspace` says.
    """

    dtype: torch.dtype
    out_dtype: torch.dtype
    rows: Slot
    x: Rows
    out: Rows
    bias: torch.Tensor | None
    workspace: Slot


class NativeQuantizedLinear:
    """A packed weight as the programs of a model of one dtype know it: ``NativeLinear`` of ``layers/decoder.py``."""

    def __init__(self, linear: QuantizedLinear, dtype: torch.dtype) -> None:
        self._linear = linear
        self.n, self.k, self.dtype = linear.n, linear.k, dtype

    @property
    def quantization(self) -> Any:
        """``vac_int8_quantization`` of inputs that may come in quantized rows; None where they may not."""
        return self._linear.quantization

    def program_workspace(self, rows: int) -> int:
        """Bytes of workspace that the ops want for so many rows and fewer."""
        return self._linear.program_workspace(rows)

    def add_to(
        self,
        program: Program,
        rows: Slot,
        x: Rows,
        out: Rows,
        bias: torch.Tensor | None,
        workspace: Slot,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        """Append the ops for ``out = x @ weight.T + bias``; out is of ``dtype`` as x is, or of ``out_dtype``."""
        operands = ProgramOperands(self.dtype, out_dtype or self.dtype, rows, x, out, bias, workspace)
        self._linear.add_ops(program, operands)


def name_of(layer: torch.nn.Module) -> str:
    """The layer's name in the model, for errors and graphs."""
    return getattr(layer, "prefix", "") or type(layer).__name__


def assign(
    layer: torch.nn.Module,
    made: Any,
    shape: linear_tuner.Shape,
    choice: linear_tuner.Choice,
    native: NativeQuantizedLinear | None = None,
) -> None:
    """Give a layer its packed weights (with ``nbytes``), where the table of kernels finds them, too.

    native: what multiplies by them in programs.
    """
    layer.cpu_linear, layer.vac_choice = made, (shape, choice)
    if native is not None:
        layer.native_linear = native


def release(layer: torch.nn.Module, *parameters: str) -> None:
    """Free the parameters that were packed; they stay, empty, where vLLM looks for them."""
    for parameter in parameters:
        tensor = getattr(layer, parameter, None)
        # One may be there under two names.
        if tensor is not None and tensor.numel() > 0:
            linear.release(tensor, name_of(layer))
