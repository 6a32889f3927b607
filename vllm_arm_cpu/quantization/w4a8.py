"""4-bit weights: W4A8 on our kernel or KleidiAI's, whichever is faster for a shape, or W4A16 on ours.

Covers compressed-tensors' W4A8 and W4A16 (int4 held as int8, or packed), GPTQ
and AWQ, with one scale per output channel or per group, with zero points or
without. A layer at a time is packed and its original released.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.kernels import linear as vllm_kernels
from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from vllm_arm_cpu import envs
from vllm_arm_cpu.layers import linear
from vllm_arm_cpu.layers.linear_tuner import ChoiceCache, LinearKernelError, Shape, Tuner
from vllm_arm_cpu.native import kleidiai, library
from vllm_arm_cpu.native.call import DTYPES, Call, pointer, scratch
from vllm_arm_cpu.native.program import Program
from vllm_arm_cpu.quantization import formats
from vllm_arm_cpu.quantization.packed import (
    NativeQuantizedLinear,
    ProgramOperands,
    QuantizedLinear,
    assign,
    name_of,
    release,
)
from vllm_arm_cpu.runtime import memory

ORDER = ("vac", "kleidiai")
"""The candidates, the preferred first: ours adds biases and keeps FP32 scales."""

GPTQ_ZERO_POINTS = "vac_zero_points_add"
"""Attribute of a layer whose zero points lack something: what is to be added to each word of them."""

_TYPES = (scalar_types.int4, scalar_types.uint4b8, scalar_types.uint4)
_SCALE_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass
class Int4Weight:
    """``weight[n, k] = scales[n, k // group] * (value - zero point)``.

    Attributes:
        values: int8 [N, K] of -8..7, or uint8 [N, ceil(K / 2)] of two values 0..15, even k in the low nibble.
        scales: BF16, FP16 or FP32 [N, groups].
        zero_points: int8 [N, groups] in the terms of the values; None for 8 (0 for int8 values).
        k: columns.
        group: of K that share a scale; 0 for all.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    k: int
    group: int

    @property
    def n(self) -> int:
        """Rows."""
        return int(self.values.shape[0])

    @property
    def kind(self) -> str:
        """Such as ``int4 group 128 zero points``, for tables of kernels."""
        group = f"group {self.group}" if self.group else "channel"
        return f"int4 {group}{'' if self.zero_points is None else ' zero points'}"


def pack_weight(weight: Int4Weight, packed: Any) -> None:
    """Write a weight in our kernels' layout to ``vac_int4_rhs_packed_size`` bytes.

    Raises:
        ValueError: its parts are not what ``Int4Weight`` says they are.
    """
    lib = library.load()
    values, scales, zero_points = weight.values, weight.scales, weight.zero_points
    groups = -(-weight.k // weight.group) if weight.group else 1
    width = weight.k if values.dtype == torch.int8 else -(-weight.k // 2)
    fits = values.shape[1] == width and scales.shape == (weight.n, groups)
    if not fits or (zero_points is not None and zero_points.shape != scales.shape):
        shapes = [list(part.shape) for part in (values, scales, zero_points) if part is not None]
        raise ValueError(f"an {weight.kind} weight [{weight.n}, {weight.k}] cannot have parts {shapes}")
    pack = Call(("vac_int4_rhs_pack", "vac_int4_rhs_pack_args"))
    args = pack.args[0]
    args.format = lib.VAC_INT4_S8 if values.dtype == torch.int8 else lib.VAC_INT4_NIBBLES
    args.scale_dtype = DTYPES[scales.dtype]
    args.n, args.k, args.group = weight.n, weight.k, weight.group
    args.rhs, args.rhs_stride = pointer(values), values.stride(0)
    args.scales, args.scale_stride = pointer(scales), scales.stride(0)
    if zero_points is not None:
        args.zero_points = library.ffi.cast("int8_t *", zero_points.data_ptr())
        args.zero_point_stride = zero_points.stride(0)
    args.packed = packed
    if lib.vac_int4_rhs_pack_check(args) != lib.VAC_OK:
        raise ValueError(f"the packing kernel refuses an {weight.kind} weight [{weight.n}, {weight.k}]")
    pack.run()


class Int4Linear(QuantizedLinear):
    """A 4-bit weight in the layout of our kernels.

    Args:
        weight: read here and not kept.
        name: of the layer.
        rounds_activations: W4A8, not W4A16.
    """

    def __init__(self, weight: Int4Weight, name: str, rounds_activations: bool) -> None:
        lib = library.load()
        n, k, group = weight.n, weight.k, weight.group
        has_zero_points = weight.zero_points is not None
        size = lib.vac_int4_rhs_packed_size(DTYPES[weight.scales.dtype], n, k, group, has_zero_points)
        if size == 0:
            raise LinearKernelError(f"no kernel for the linear layer {name}, {weight.kind} [{n}, {k}]")
        super().__init__(n, k, memory.allocate(size), name)
        self.group, self._scale_dtype, self._has_zero_points = group, weight.scales.dtype, has_zero_points
        self.rounds_activations = rounds_activations
        if rounds_activations:
            self._call = Call(("vac_int4_w4a8_quantize", "vac_int4_gemm_args"), ("vac_int4_w4a8", 0))
            self._workspace_size = lib.vac_int4_w4a8_workspace_size
        else:
            self._call = Call(("vac_int4_w4a16", "vac_int4_gemm_args"))
            self._workspace_size = lib.vac_int4_w4a16_workspace_size
        self._self_quantized = lib.VAC_INT4_SELF_QUANTIZED_ROWS
        self._args = self._call.args[0]
        self._args.scale_dtype, self._args.has_zero_points = DTYPES[weight.scales.dtype], has_zero_points
        self._args.n, self._args.k, self._args.group = n, k, group
        self._args.rhs, self._args.out_stride = pointer(self.packed), n
        self.load(weight)

    def load(self, weight: Int4Weight) -> None:
        """Pack other values of the same shape and kind over these.

        Raises:
            ValueError: another shape, group or type of scales.
        """
        mine = (self.n, self.k, self.group, self._scale_dtype, self._has_zero_points)
        theirs = (weight.n, weight.k, weight.group, weight.scales.dtype, weight.zero_points is not None)
        if mine != theirs:
            raise ValueError(f"an int4 weight {mine} cannot be replaced by {theirs}")
        pack_weight(weight, pointer(self.packed))

    def dequantize(self) -> torch.Tensor:
        """The weight FP32 [N, K], as the kernels have it."""
        out = torch.empty((self.n, self.k))
        unpack = Call(("vac_int4_rhs_unpack", "vac_int4_rhs_unpack_args"))
        args = unpack.args[0]
        args.scale_dtype, args.has_zero_points = DTYPES[self._scale_dtype], self._has_zero_points
        args.n, args.k, args.group = self.n, self.k, self.group
        args.packed, args.out, args.out_stride = (
            pointer(self.packed),
            library.ffi.cast("float *", out.data_ptr()),
            self.k,
        )
        unpack.run()
        return out

    def _set(self, dtype: int, out_dtype: int, lhs_stride: int, bias: torch.Tensor | None) -> None:
        args = self._args
        args.dtype, args.out_dtype, args.lhs_stride = dtype, out_dtype, lhs_stride
        args.bias = pointer(bias)
        if bias is not None:
            args.bias_dtype = DTYPES[bias.dtype]

    def _multiply(self, m: int, lhs: Any, out: Any) -> None:
        args = self._args
        args.m, args.lhs, args.out = m, lhs, out
        args.workspace = scratch.pointer(self._scratch_size(m, self._bytes))
        if self.rounds_activations and m <= self._self_quantized:
            args.lhs_quantized = 0
            self._call.run(first=1)
        else:
            args.lhs_quantized = 1
            self._call.run()

    def _bytes(self, m: int) -> int:
        return int(self._workspace_size(m, self.n, self.k, self.group, 0, self._threads))

    def program_workspace(self, rows: int) -> int:
        """The quantized rows are in it."""
        return self._bytes(rows)

    def add_ops(self, program: Program, given: ProgramOperands) -> None:
        """Append quantization, if there is any, and product."""
        names = ("vac_int4_w4a8_quantize", "vac_int4_w4a8") if self.rounds_activations else ("vac_int4_w4a16",)
        for name in names:
            args = program.op(
                name, "vac_int4_gemm_args", m=given.rows, bias=given.bias, workspace=given.workspace, lhs_quantized=1
            )
            args.dtype, args.out_dtype = DTYPES[given.dtype], DTYPES[given.out_dtype]
            args.bias_dtype = DTYPES[torch.float32 if given.bias is None else given.bias.dtype]
            args.scale_dtype, args.has_zero_points = DTYPES[self._scale_dtype], self._has_zero_points
            args.n, args.k, args.group, args.rhs = self.n, self.k, self.group, pointer(self.packed)
            program.rows(args, "lhs", given.x, "lhs_stride")
            program.rows(args, "out", given.out, "out_stride")
        program.keep(self.packed)


class KleidiAILinear(QuantizedLinear):
    """A 4-bit weight in the layout of KleidiAI's kernels, which our driver runs.

    Args:
        weight: without zero points; read here and not kept.
        name: of the layer, which has no bias.
    """

    def __init__(self, weight: Int4Weight, name: str) -> None:
        lib = library.load()
        n, k, group = weight.n, weight.k, weight.group
        super().__init__(n, k, memory.allocate(lib.vac_int4_kai_rhs_packed_size(n, k, group)), name)
        self.group = group
        self._call = Call(("vac_int4_kai_lhs_pack", "vac_int4_kai_args"), ("vac_int4_kai", 0))
        self._self_quantized = lib.VAC_INT4_SELF_QUANTIZED_ROWS
        self._args = self._call.args[0]
        self._args.kai = kleidiai.table()
        self._args.n, self._args.k, self._args.group = n, k, group
        self._args.rhs, self._args.out_stride = pointer(self.packed), n
        self.load(weight)

    def load(self, weight: Int4Weight) -> None:
        """Pack other values of the same shape over these.

        Raises:
            ValueError: another shape or group, or zero points.
        """
        mine, theirs = (self.n, self.k, self.group), (weight.n, weight.k, weight.group)
        if mine != theirs or weight.zero_points is not None:
            raise ValueError(f"an int4 weight {mine} cannot be replaced by {theirs}")
        values = weight.values
        if values.dtype == torch.int8:
            values = formats.nibbles_of_int8(values)
        values = values.contiguous()
        scales = weight.scales.to(torch.bfloat16 if self.group else torch.float32).contiguous()
        pack = Call(("vac_int4_kai_rhs_pack", "vac_int4_kai_rhs_pack_args"))
        args = pack.args[0]
        args.kai = kleidiai.table()
        args.n, args.k, args.group = self.n, self.k, self.group
        args.rhs, args.scales = library.ffi.cast("uint8_t *", values.data_ptr()), pointer(scales)
        args.packed = pointer(self.packed)
        pack.run()

    def _set(self, dtype: int, out_dtype: int, lhs_stride: int, bias: torch.Tensor | None) -> None:
        if bias is not None:
            raise ValueError("KleidiAI's kernels take no bias after the weight was packed")
        self._args.dtype, self._args.out_dtype, self._args.lhs_stride = dtype, out_dtype, lhs_stride

    def _multiply(self, m: int, lhs: Any, out: Any) -> None:
        args = self._args
        args.m, args.lhs, args.out = m, lhs, out
        args.workspace = scratch.pointer(self._scratch_size(m, self._bytes))
        args.lhs_packed = m > self._self_quantized
        self._call.run(first=0 if args.lhs_packed else 1)

    def _bytes(self, m: int) -> int:
        return int(library.load().vac_int4_kai_workspace_size(m, self.n, self.k, self.group, self._threads))

    def program_workspace(self, rows: int) -> int:
        """The packed activations are in it."""
        return self._bytes(rows)

    def add_ops(self, program: Program, given: ProgramOperands) -> None:
        """Append the packing of the activations and the product.

        Raises:
            ValueError: a bias.
        """
        if given.bias is not None:
            raise ValueError("KleidiAI's kernels take no bias after the weight was packed")
        for name in ("vac_int4_kai_lhs_pack", "vac_int4_kai"):
            args = program.op(name, "vac_int4_kai_args", m=given.rows, workspace=given.workspace, lhs_packed=1)
            args.kai = kleidiai.table()
            args.dtype, args.out_dtype = DTYPES[given.dtype], DTYPES[given.out_dtype]
            args.n, args.k, args.group, args.rhs = self.n, self.k, self.group, pointer(self.packed)
            program.rows(args, "lhs", given.x, "lhs_stride")
            program.rows(args, "out", given.out, "out_stride")
            program.keep(args.kai)
        program.keep(self.packed)


def refusals(weight: Int4Weight, has_bias: bool) -> dict[str, str]:
    """Candidate -> why it does not take a weight."""
    reasons = {}
    if envs.VAC_INT4 == "w4a16":
        reasons["kleidiai"] = "it rounds activations (VAC_INT4=w4a16)"
    elif has_bias:
        reasons["kleidiai"] = "the layer has a bias"
    else:
        reason = kleidiai.refusal(
            weight.n,
            weight.k,
            weight.group,
            scale_dtype=_SCALE_DTYPES[weight.scales.dtype],
            zero_points=weight.zero_points is not None,
        )
        if reason is not None:
            reasons["kleidiai"] = reason
    return reasons


def make(candidate: str, weight: Int4Weight, name: str) -> Int4Linear | KleidiAILinear:
    """One of the candidates; the weight is not needed afterwards."""
    if candidate == "kleidiai":
        return KleidiAILinear(weight, name)
    return Int4Linear(weight, name, envs.VAC_INT4 == "w4a8")


def _runner(candidate: str, weight: Int4Weight, dtype: torch.dtype) -> Callable[[int], None]:
    """A call that multiplies m rows by the weight, for measuring."""
    made = make(candidate, weight, "measured")
    # Not torch's generator: measuring must not change what is sampled later.
    generator = torch.Generator().manual_seed(0)
    inputs: dict[int, torch.Tensor] = {}

    def run(m: int) -> None:
        if m not in inputs:
            inputs[m] = torch.randn(m, weight.k, generator=generator).to(dtype)
        made(inputs[m], None, None)

    return run


@functools.lru_cache
def _tuner(mode: str, cache_directory: str, num_threads: int) -> Tuner:
    cache = ChoiceCache(Path(cache_directory), linear.environment(num_threads))
    return Tuner(ORDER, mode, cache, setting="VAC_INT4_KERNEL")


class ArmInt4LinearKernel(MPLinearKernel):
    """vLLM's interface to linear layers with 4-bit weights on our kernels."""

    @classmethod
    def get_min_capability(cls) -> int:
        """A GPU's, which means nothing here."""
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Whether the kernels take a layer, and why not."""
        lib = library.load()
        k = c.partition_weight_shape[0]
        group = _group(c.group_size, k)
        if c.weight_type not in _TYPES:
            return False, f"weights are {c.weight_type}, not of 4 bits"
        if c.act_type not in DTYPES:
            return False, f"activations are {c.act_type}, not BF16, FP16 or FP32"
        if group and (group % 32 != 0 or group > lib.VAC_INT4_MAX_GROUP):
            return False, f"groups of {group} are no multiple of 32 up to {lib.VAC_INT4_MAX_GROUP}"
        if not group and envs.VAC_INT4 == "w4a8" and k > lib.VAC_INT4_MAX_K_PER_CHANNEL:
            return False, f"{k} input features with one scale are more than {lib.VAC_INT4_MAX_K_PER_CHANNEL}"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Choose the kernel, pack the weight, release the parameters; or pack again what a reload brought.

        Raises:
            LinearKernelError: VAC_INT4_KERNEL forces a kernel that does not take the weight.
        """
        made = layer.__dict__.get("cpu_linear")
        if isinstance(made, (Int4Linear, KleidiAILinear)):
            made.load(self._weight(layer))
        else:
            self._assign(layer, self._weight(layer))
        release(layer, self._values_name(layer), self.w_q_name, self.w_s_name, self.w_zp_name or "")

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias``; vLLM hands the bias to one rank only."""
        result: torch.Tensor = layer.cpu_linear(x, None, bias)
        return result

    def _assign(self, layer: torch.nn.Module, weight: Int4Weight) -> None:
        name = name_of(layer)
        shape = Shape(weight.kind + (" w4a16" if envs.VAC_INT4 == "w4a16" else ""), weight.n, weight.k)
        tuner = _tuner(envs.VAC_INT4_KERNEL, envs.VAC_CACHE_DIR, library.load().vac_max_threads())
        refused = refusals(weight, getattr(layer, "bias", None) is not None)
        runner = functools.partial(_runner, weight=weight, dtype=self.config.act_type)
        choice = tuner.choose(name, shape, refused, runner)
        made = make(choice.winner, weight, name)
        assign(layer, made, shape, choice, NativeQuantizedLinear(made, self.config.act_type))

    def _values_name(self, layer: torch.nn.Module) -> str:
        # The parameter of compressed-tensors' W4A8 is the checkpoint's; vLLM gives it another name besides.
        return "weight" if "weight" in layer._parameters else self.w_q_name

    def _weight(self, layer: torch.nn.Module) -> Int4Weight:
        values, scales = getattr(layer, self._values_name(layer)), getattr(layer, self.w_s_name)
        k, n = self.config.partition_weight_shape
        # The parameters of each format say which dimension is which.
        if values.dtype == torch.int32:
            nibbles = formats.nibbles_along_k(values.data, k_dim=values.input_dim)
        else:
            nibbles = values.data
        rows = scales.data if scales.output_dim == 0 else scales.data.t()
        zero_points = None
        # vLLM knows no GPTQ with zero points; the type of its weights says that it has some.
        if self.config.weight_type == scalar_types.uint4 and self.w_zp_name is not None:
            words = getattr(layer, self.w_zp_name)
            add = getattr(layer, GPTQ_ZERO_POINTS, 0)
            zero_points = formats.zero_points(words.data, n_dim=words.output_dim, add=add)[:n]
        return Int4Weight(nibbles, rows.contiguous(), zero_points, k, _group(self.config.group_size, k))


def _group(group_size: int, k: int) -> int:
    """vLLM's group size as ours: 0 for a whole row."""
    return 0 if group_size == -1 or group_size >= k else group_size


def register() -> None:
    """Put the kernel in front of vLLM's, less those that cannot run here; calling it again changes nothing."""
    kernels = vllm_kernels._POSSIBLE_KERNELS[PlatformEnum.CPU]
    if ArmInt4LinearKernel in kernels:
        return
    kernels.insert(0, ArmInt4LinearKernel)
    # It takes every layer, and fails at the first token where vLLM was built without its operator, as on Arm.
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        kernels[:] = [kernel for kernel in kernels if kernel.__name__ != "CPUWNA16LinearKernel"]
