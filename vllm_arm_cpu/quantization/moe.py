"""Experts with 8- and 4-bit weights: one parallel region from the sorted rows to the summed outputs.

The classes here hold and run them, and load those of 8 bits; ``moe_int4.py`` loads those of 4.

vLLM's router says which experts take each token; here the rows are sorted by
expert, rounded once, multiplied by all experts' weights in two grouped
products with the gated activation between them, and added up by token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w8a8_int8 as upstream_w8a8,
)

from vllm_arm_cpu import envs
from vllm_arm_cpu.layers.linear_tuner import Choice, Shape
from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import DTYPES, Call, as_rows, ffi, pointer, scratch
from vllm_arm_cpu.quantization.packed import assign, release
from vllm_arm_cpu.quantization.w4a8 import Int4Weight, pack_weight
from vllm_arm_cpu.runtime import memory

MAX_TOKENS = 1024
"""Tokens of one run of the kernels: bounds the scratch memory."""

ACTIVATIONS = {
    MoEActivation.SILU: "SILU",
    MoEActivation.GELU: "GELU",
    MoEActivation.GELU_TANH: "GELU_TANH",
}

ONLY = Choice("vac", {}, {}, "only one")


class Experts(ABC):
    """Packed weights of a layer's experts, and the call that runs tokens through them.

    Args:
        num_experts: E.
        hidden: H, columns of the first product's weights, [2 I, H], and rows of the second's, [H, I].
        intermediate: I.
        sizes: bytes of one expert's packed weight in each product.
        biases: [E, 2 I] and [E, H], or None.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        sizes: tuple[int, int],
        biases: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> None:
        self.num_experts, self.hidden, self.intermediate = num_experts, hidden, intermediate
        self.sizes, self.biases = sizes, biases
        self.packed = [memory.allocate(size * num_experts) for size in sizes]
        self.nbytes = sum(packed.numel() for packed in self.packed)
        self._threads = library.load().vac_max_threads()
        self._starts = torch.empty(num_experts + 1, dtype=torch.int32)

    def load(self, expert: int, product: int, *weight: torch.Tensor | None) -> None:
        """Pack one expert's weight of the first (0) or second (1) product; of what parts, the subclass says."""
        target = pointer(self.packed[product])
        self._pack(ffi.cast("char *", target) + expert * self.sizes[product], product, *weight)

    def __call__(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: MoEActivation
    ) -> torch.Tensor:
        """x [tokens, H] of BF16, FP16 or FP32, weights and ids [tokens, k] -> [tokens, H]."""
        rows = as_rows(x)
        out = torch.empty_like(rows)
        weights = as_rows(topk_weights.float())
        ids = as_rows(topk_ids if topk_ids.dtype in (torch.int32, torch.int64) else topk_ids.to(torch.int32))
        code = self._activation_code(activation)
        for start in range(0, rows.shape[0], MAX_TOKENS):
            part = slice(start, start + MAX_TOKENS)
            self._run(rows[part], weights[part], ids[part], code, out[part])
        return out.view(x.shape)

    def _activation_code(self, activation: MoEActivation) -> int:
        """The kernels' name of an activation."""
        return int(getattr(library.load(), f"VAC_ACTIVATION_{ACTIVATIONS[activation]}"))

    @abstractmethod
    def _pack(self, target: Any, product: int, *weight: Any) -> None: ...

    @abstractmethod
    def _run(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, activation: int, out: torch.Tensor
    ) -> None: ...

    def _set_sort(self, args: Any, ids: torch.Tensor, row_index: torch.Tensor, position: torch.Tensor) -> None:
        args.topk_ids, args.ids_are_int64 = pointer(ids), ids.dtype == torch.int64
        args.num_tokens, args.top_k = ids.shape
        args.topk_ids_stride, args.num_experts = ids.stride(0), self.num_experts
        args.expert_start = _int32(self._starts)
        args.row_index, args.position = _int32(row_index), _int32(position)

    def _set_combine(
        self, args: Any, weights: torch.Tensor, position: torch.Tensor, rows: torch.Tensor, out: torch.Tensor
    ) -> None:
        args.dtype, args.out_dtype = DTYPES[rows.dtype], DTYPES[out.dtype]
        args.num_tokens, args.top_k = weights.shape
        args.hidden_size = self.hidden
        args.topk_weights = ffi.cast("float *", weights.data_ptr())
        args.topk_weights_stride, args.position = weights.stride(0), _int32(position)
        args.rows, args.rows_stride = pointer(rows), rows.stride(0)
        args.out, args.out_stride = pointer(out), out.stride(0)


def _int32(tensor: torch.Tensor) -> Any:
    return ffi.cast("int32_t *", tensor.data_ptr())


class _Buffers:
    """Parts of one block of scratch memory, each aligned to 64 bytes."""

    def __init__(self, *sizes: int) -> None:
        offsets, total = [], 0
        for size in sizes:
            offsets.append(total)
            total += -(-size // 64) * 64
        base = ffi.cast("char *", scratch.pointer(total))
        self.parts = [base + offset for offset in offsets]


class Int8Experts(Experts):
    """Experts with INT8 weights [N, K], a scale per output channel; activations are rounded per token."""

    def __init__(self, num_experts: int, hidden: int, intermediate: int, biases: Any = (None, None)) -> None:
        lib = library.load()
        sizes = (
            lib.vac_int8_gemm_rhs_packed_size(2 * intermediate, hidden),
            lib.vac_int8_gemm_rhs_packed_size(hidden, intermediate),
        )
        # Whole cache lines, so that every expert's weight is aligned.
        super().__init__(num_experts, hidden, intermediate, tuple(-(-size // 64) * 64 for size in sizes), biases)
        self._call = Call(
            ("vac_moe_sort", "vac_moe_sort_args"),
            ("vac_int8_quantize_rows", "vac_int8_quantize_rows_args"),
            ("vac_int8_grouped_gemm", "vac_int8_grouped_gemm_args"),
            ("vac_silu_and_mul_int8", "vac_silu_and_mul_int8_args"),
            ("vac_silu_and_mul_int8_finish", 3),
            ("vac_int8_grouped_gemm", "vac_int8_grouped_gemm_args"),
            ("vac_moe_combine", "vac_moe_combine_args"),
        )
        _, quantize, first, silu, _, second, _ = self._call.args
        quantize.quantization.mode = silu.quantization.mode = lib.VAC_INT8_DYNAMIC_SYMMETRIC
        quantize.k = first.k = second.n = hidden
        silu.d = second.k = intermediate
        first.n = first.out_stride = silu.x_token_stride = 2 * intermediate
        second.out_stride = hidden
        for product, args in enumerate((first, second)):
            args.num_experts = num_experts
            args.rhs, args.rhs_expert_stride = pointer(self.packed[product]), self.sizes[product]
            args.expert_start = _int32(self._starts)
            bias = self.biases[product]
            if bias is not None:
                args.bias, args.bias_dtype, args.bias_stride = pointer(bias), DTYPES[bias.dtype], bias.stride(0)

    def _pack(self, target: Any, product: int, *weight: Any) -> None:
        values, scales = weight[0], weight[1].float().contiguous()
        pack = Call(("vac_int8_gemm_rhs_pack", "vac_int8_gemm_rhs_pack_args"))
        args = pack.args[0]
        args.n, args.k = values.shape
        args.rhs, args.rhs_stride = ffi.cast("int8_t *", values.data_ptr()), values.stride(0)
        args.scales, args.packed = ffi.cast("float *", scales.data_ptr()), target
        pack.run()

    def _run(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, activation: int, out: torch.Tensor
    ) -> None:
        lib, tokens, entries = library.load(), x.shape[0], ids.numel()
        row_index, position = torch.empty((2, entries), dtype=torch.int32)
        gates = torch.empty((entries, 2 * self.intermediate), dtype=x.dtype)
        outputs = torch.empty((entries, self.hidden), dtype=x.dtype)
        sort, quantize, first, silu, _, second, combine = self._call.args
        grouped = lib.vac_int8_grouped_gemm_workspace_size
        parts = _Buffers(
            lib.vac_int8_rows_size(tokens, self.hidden),
            grouped(entries, 2 * self.intermediate, self.hidden, self._threads),
            lib.vac_int8_rows_size(entries, self.intermediate),
            lib.vac_silu_and_mul_int8_workspace_size(self.intermediate, self._threads),
            grouped(entries, self.hidden, self.intermediate, self._threads),
        ).parts
        dtype = DTYPES[x.dtype]
        self._set_sort(sort, ids, row_index, position)
        quantize.dtype, quantize.m = dtype, tokens
        quantize.x, quantize.x_stride, quantize.rows = pointer(x), x.stride(0), parts[0]
        first.out_dtype = second.out_dtype = silu.dtype = dtype
        first.num_rows = second.num_rows = second.num_rows_read = silu.num_tokens = entries
        first.num_rows_read, first.rows, first.row_index = tokens, parts[0], _int32(row_index)
        first.out, first.workspace = pointer(gates), parts[1]
        silu.activation, silu.x, silu.rows, silu.workspace = activation, pointer(gates), parts[2], parts[3]
        second.rows, second.out, second.workspace = parts[2], pointer(outputs), parts[4]
        self._set_combine(combine, weights, position, outputs, out)
        self._call.run()


class Int4Experts(Experts):
    """Experts with 4-bit weights, a scale per output channel or group; W4A8 or W4A16.

    A weight is loaded by its values, scales and zero points, as in ``Int4Weight``.

    Args:
        group: of columns that share a scale; 0 for all.
        scale_dtype: of the scales.
        zero_points: whether there are any.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        group: int,
        scale_dtype: torch.dtype,
        biases: Any = (None, None),
        zero_points: bool = False,
    ) -> None:
        lib = library.load()
        self.shapes = shapes = ((2 * intermediate, hidden), (hidden, intermediate))
        # A group as long as a row is a row, whose products may be of different lengths.
        self.groups = tuple(0 if group == 0 or group >= k else group for _, k in shapes)
        self.scale_dtype, self.zero_points = scale_dtype, zero_points
        sizes = tuple(
            lib.vac_int4_rhs_packed_size(DTYPES[scale_dtype], n, k, self.groups[i], zero_points)
            for i, (n, k) in enumerate(shapes)
        )
        if 0 in sizes:
            raise ValueError(f"groups of {group} are no multiple of 32 up to {lib.VAC_INT4_MAX_GROUP}")
        super().__init__(num_experts, hidden, intermediate, sizes, biases)
        self.rounds_activations = envs.VAC_INT4 == "w4a8"
        gemm = "vac_int4_w4a8" if self.rounds_activations else "vac_int4_w4a16"
        self._workspace: Callable[..., int] = getattr(lib, f"{gemm}_workspace_size")
        struct = "vac_int4_gemm_args"
        if self.rounds_activations:
            self._call = Call(
                ("vac_moe_sort", "vac_moe_sort_args"),
                ("vac_int4_w4a8_quantize", struct),
                (gemm, 1),
                ("vac_silu_and_mul", "vac_silu_and_mul_args"),
                ("vac_int4_w4a8_quantize", struct),
                (gemm, 4),
                ("vac_moe_combine", "vac_moe_combine_args"),
            )
            self._args = [self._call.args[i] for i in (0, 1, 3, 4, 6)]
        else:
            self._call = Call(
                ("vac_moe_sort", "vac_moe_sort_args"),
                (gemm, struct),
                ("vac_silu_and_mul", "vac_silu_and_mul_args"),
                (gemm, struct),
                ("vac_moe_combine", "vac_moe_combine_args"),
            )
            self._args = list(self._call.args)
        _, first, silu, second, _ = self._args
        for product, args in enumerate((first, second)):
            args.n, args.k = shapes[product]
            args.group, args.scale_dtype = self.groups[product], DTYPES[scale_dtype]
            args.has_zero_points = zero_points
            args.lhs_quantized, args.num_experts = 1, num_experts
            args.rhs, args.rhs_expert_stride = pointer(self.packed[product]), self.sizes[product]
            args.expert_start = _int32(self._starts)
            args.out_stride = args.n
            bias = self.biases[product]
            if bias is not None:
                args.bias, args.bias_dtype = pointer(bias.contiguous()), DTYPES[bias.dtype]
        silu.d, silu.x_token_stride, silu.out_token_stride = intermediate, 2 * intermediate, intermediate
        first.lhs_stride, second.lhs_stride = hidden, intermediate

    def _pack(self, target: Any, product: int, *weight: Any) -> None:
        values, scales, *rest = weight
        (n, k), zero_points = self.shapes[product], rest[0] if rest else None
        if values.shape[0] != n or (zero_points is not None) != self.zero_points:
            raise ValueError(f"an expert's weight [{n}, {k}] cannot be one of {values.shape[0]} rows")
        scales = scales.to(self.scale_dtype).contiguous()
        pack_weight(Int4Weight(values, scales, zero_points, k, self.groups[product]), target)

    def _run(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, activation: int, out: torch.Tensor
    ) -> None:
        tokens, entries = x.shape[0], ids.numel()
        row_index, position = torch.empty((2, entries), dtype=torch.int32)
        gates = torch.empty((entries, 2 * self.intermediate), dtype=x.dtype)
        gated = torch.empty((entries, self.intermediate), dtype=x.dtype)
        outputs = torch.empty((entries, self.hidden), dtype=x.dtype)
        sort, first, silu, second, combine = self._args
        dtype = DTYPES[x.dtype]
        # Bytes for rows of the product's own, and for those of its inputs: the larger number covers both.
        parts = _Buffers(
            self._workspace(entries, first.n, first.k, first.group, self.num_experts, self._threads),
            self._workspace(entries, second.n, second.k, second.group, self.num_experts, self._threads),
        ).parts
        self._set_sort(sort, ids, row_index, position)
        for args, workspace in ((first, parts[0]), (second, parts[1])):
            args.dtype = args.out_dtype = dtype
            args.num_rows, args.workspace = entries, workspace
        first.m, first.lhs, first.lhs_stride = tokens, pointer(x), x.stride(0)
        first.row_index, first.out = _int32(row_index), pointer(gates)
        silu.activation, silu.dtype, silu.num_tokens = activation, dtype, entries
        silu.x, silu.out = pointer(gates), pointer(gated)
        second.m, second.lhs, second.out = entries, pointer(gated), pointer(outputs)
        self._set_combine(combine, weights, position, outputs, out)
        self._call.run()


class ExpertsMethod(FusedMoEMethodBase):
    """What runs the :class:`Experts` of a layer, quantized or not, which are its ``cpu_linear``."""

    @property
    def is_monolithic(self) -> bool:
        """vLLM's router chooses the experts."""
        return False

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """Nothing: vLLM's own kernels are not used."""

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """The weighted sum of the chosen experts' outputs; shared experts are the caller's."""
        if layer.apply_router_weight_on_input:
            x = x * topk_weights.to(x.dtype)
            topk_weights = torch.ones_like(topk_weights)
        result: torch.Tensor = layer.cpu_linear(x, topk_weights, topk_ids, layer.activation)
        return result


class ArmMoEMethod(ExpertsMethod):
    """What methods of quantized experts share; mixed into vLLM's methods of the formats, whose parameters they load.

    Attributes:
        PARTS: names of an expert's parameters behind ``w13_`` and ``w2_``, its values first; released once packed.
    """

    PARTS: tuple[str, ...] = ("weight", "weight_scale")

    def _check(self, moe: FusedMoEConfig, layer_name: str | None) -> None:
        """Say what is not supported before weights are read."""
        reason = None
        if moe.activation not in ACTIVATIONS:
            reason = f"their activation is {moe.activation}, not one of {', '.join(a.value for a in ACTIVATIONS)}"
        elif moe.moe_parallel_config.use_ep:
            reason = "expert parallelism is not supported on Arm CPUs"
        elif not moe.is_act_and_mul:
            reason = "they have no gate"
        elif moe.in_dtype not in DTYPES:
            reason = f"activations are {moe.in_dtype}, not BF16, FP16 or FP32"
        if reason is not None:
            raise ValueError(f"the quantized experts of {layer_name or 'the model'}: {reason}")

    def _pack(self, layer: torch.nn.Module, make: Callable[..., Experts], kind: str) -> None:
        """Pack every expert into ``layer.cpu_linear``, a new one of ``make(E, H, I, biases=...)`` or that of before."""
        if getattr(layer, "swiglu_limit", None) is not None:
            raise ValueError(f"the quantized experts of {layer.layer_name} clamp their gates, which is not supported")
        num_experts = getattr(layer, f"w2_{self.PARTS[0]}").shape[0]
        hidden, intermediate = self.moe.hidden_dim, self.moe.intermediate_size_per_partition
        made = layer.__dict__.get("cpu_linear")
        if not isinstance(made, Experts):
            made = make(num_experts, hidden, intermediate, biases=self._biases(layer))
        for expert in range(num_experts):
            for product, name in enumerate(("w13", "w2")):
                made.load(expert, product, *self._weight(layer, name, expert))
        assign(layer, made, Shape(f"{kind}, {num_experts} experts", 2 * intermediate, hidden), ONLY)
        for name in ("w13", "w2"):
            release(layer, *(f"{name}_{part}" for part in self.PARTS))

    def _weight(self, layer: torch.nn.Module, name: str, expert: int) -> tuple[torch.Tensor | None, ...]:
        """The parts of an expert's weight ``w13`` or ``w2`` that ``Experts.load`` takes."""
        values, scales = (getattr(layer, f"{name}_{part}").data[expert] for part in self.PARTS)
        return values, scales.view(values.shape[0], -1)

    def _biases(self, layer: torch.nn.Module) -> tuple[torch.Tensor | None, ...]:
        """Biases of both products, or None."""
        biases = (getattr(layer, name, None) for name in ("w13_bias", "w2_bias"))
        return tuple(None if bias is None else bias.data for bias in biases)


class ArmW8A8MoEMethod(ArmMoEMethod, upstream_w8a8.CompressedTensorsW8A8Int8MoEMethod):
    """compressed-tensors' W8A8 experts on our kernels."""

    def __init__(self, weight_quant: Any, input_quant: Any, moe: FusedMoEConfig, layer_name: str | None = None) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        self._check(moe, layer_name)
        self.weight_quant, self.input_quant, self.static_input_scales = weight_quant, input_quant, False
        if weight_quant.strategy != "channel" or not input_quant.symmetric:
            raise ValueError(
                f"the INT8 experts of {layer_name or 'the model'} have weights by {weight_quant.strategy} and "
                f"activations with symmetric={input_quant.symmetric}; supported: channel, and symmetric=True"
            )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the weights, release the parameters; or pack again what a reload brought."""
        self._pack(layer, Int8Experts, "int8")
