"""Experts with 8- and 4-bit weights (see ``layers/experts.py``): the classes here hold them, and load those of 8 bits;
``moe_int4.py`` loads those of 4.
"""

from __future__ import annotations

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
from vllm_arm_cpu.layers.activation import add_activation, add_activation_int8
from vllm_arm_cpu.layers.experts import ACTIVATIONS, ONLY, Experts, ExpertsMethod, Routed
from vllm_arm_cpu.layers.linear_tuner import Shape
from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import DTYPES, Call, ffi
from vllm_arm_cpu.native.program import Program, Rows
from vllm_arm_cpu.quantization.packed import assign, release
from vllm_arm_cpu.quantization.w4a8 import Int4Weight, pack_weight


class Int8Experts(Experts):
    """Experts with INT8 weights [N, K], a scale per output channel; activations are rounded per token."""

    def __init__(self, num_experts: int, hidden: int, intermediate: int, biases: Any = (None, None)) -> None:
        lib = library.load()
        sizes = (
            lib.vac_int8_gemm_rhs_packed_size(2 * intermediate, hidden),
            lib.vac_int8_gemm_rhs_packed_size(hidden, intermediate),
        )
        super().__init__(num_experts, hidden, intermediate, sizes, biases)

    def _pack(self, target: Any, product: int, *weight: Any) -> None:
        values, scales = weight[0], weight[1].float().contiguous()
        pack = Call(("vac_int8_gemm_rhs_pack", "vac_int8_gemm_rhs_pack_args"))
        args = pack.args[0]
        args.n, args.k = values.shape
        args.rhs, args.rhs_stride = ffi.cast("int8_t *", values.data_ptr()), values.stride(0)
        args.scales, args.packed = ffi.cast("float *", scales.data_ptr()), target
        pack.run()

    def _work(self, tokens: int, entries: int, dtype: torch.dtype) -> dict[str, int]:
        lib, hidden, intermediate = library.load(), self.hidden, self.intermediate
        grouped = lib.vac_int8_grouped_gemm_workspace_size
        return {
            # The rows of the second product's input take the place of the first one's.
            "quantized": max(lib.vac_int8_rows_size(tokens, hidden), lib.vac_int8_rows_size(entries, intermediate)),
            "workspace": max(
                grouped(entries, 2 * intermediate, hidden, self._threads),
                lib.vac_silu_and_mul_int8_workspace_size(intermediate, self._threads),
                grouped(entries, hidden, intermediate, self._threads),
            ),
        }

    def _add_products(
        self, program: Program, routed: Routed, x: Rows, dtype: torch.dtype, activation: MoEActivation
    ) -> None:
        lib, code, buffers = library.load(), DTYPES[dtype], routed.buffers
        quantized, workspace = buffers["quantized"], buffers["workspace"]
        quantization = ffi.new("vac_int8_quantization *", {"mode": lib.VAC_INT8_DYNAMIC_SYMMETRIC})[0]
        name = "vac_int8_quantize_rows"
        args = program.op(name, f"{name}_args", dtype=code, m=routed.tokens, k=self.hidden, rows=quantized)
        args.quantization = quantization
        program.rows(args, "x", x, "x_stride")

        def product(index: int, **fields: Any) -> None:
            n, k = self.shapes[index]
            args = program.op(
                "vac_int8_grouped_gemm",
                "vac_int8_grouped_gemm_args",
                out_dtype=code,
                n=n,
                k=k,
                num_experts=self.num_experts,
                num_rows=routed.entries,
                expert_start=self._starts,
                rhs=self.packed[index],
                rhs_expert_stride=self.sizes[index],
                out_stride=n,
                rows=quantized,
                workspace=workspace,
            )
            program.fill(args, **fields)
            bias = self.biases[index]
            if bias is not None:
                program.fill(args, bias=bias, bias_dtype=DTYPES[bias.dtype], bias_stride=bias.stride(0))

        gates = Rows(buffers["gates"], 2 * self.intermediate)
        product(0, num_rows_read=routed.tokens, row_index=buffers["row_index"], out=gates.base)
        add_activation_int8(
            program,
            ACTIVATIONS[activation],
            dtype,
            routed.entries,
            gates,
            self.intermediate,
            quantized,
            quantization,
            workspace,
        )
        product(1, num_rows_read=routed.entries, out=buffers["rows"])


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
        shapes = ((2 * intermediate, hidden), (hidden, intermediate))
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
        self._gemm = "vac_int4_w4a8" if self.rounds_activations else "vac_int4_w4a16"

    def _pack(self, target: Any, product: int, *weight: Any) -> None:
        values, scales, *rest = weight
        (n, k), zero_points = self.shapes[product], rest[0] if rest else None
        if values.shape[0] != n or (zero_points is not None) != self.zero_points:
            raise ValueError(f"an expert's weight [{n}, {k}] cannot be one of {values.shape[0]} rows")
        scales = scales.to(self.scale_dtype).contiguous()
        pack_weight(Int4Weight(values, scales, zero_points, k, self.groups[product]), target)

    def _work(self, tokens: int, entries: int, dtype: torch.dtype) -> dict[str, int]:
        size = getattr(library.load(), f"{self._gemm}_workspace_size")
        # Bytes for rows of the product's own, and for those of its inputs: the larger number covers both.
        return {
            "workspace": max(
                size(entries, n, k, group, self.num_experts, self._threads)
                for (n, k), group in zip(self.shapes, self.groups, strict=True)
            )
        }

    def _add_products(
        self, program: Program, routed: Routed, x: Rows, dtype: torch.dtype, activation: MoEActivation
    ) -> None:
        code, buffers = DTYPES[dtype], routed.buffers

        def product(index: int, **fields: Any) -> None:
            (n, k), bias = self.shapes[index], self.biases[index]
            if bias is not None:
                bias = bias.contiguous()
                fields |= {"bias": bias, "bias_dtype": DTYPES[bias.dtype]}
            for kernel in ("vac_int4_w4a8_quantize", self._gemm) if self.rounds_activations else (self._gemm,):
                program.op(
                    kernel,
                    "vac_int4_gemm_args",
                    dtype=code,
                    out_dtype=code,
                    n=n,
                    k=k,
                    group=self.groups[index],
                    scale_dtype=DTYPES[self.scale_dtype],
                    has_zero_points=self.zero_points,
                    lhs_quantized=1,
                    num_experts=self.num_experts,
                    num_rows=routed.entries,
                    expert_start=self._starts,
                    rhs=self.packed[index],
                    rhs_expert_stride=self.sizes[index],
                    out_stride=n,
                    workspace=buffers["workspace"],
                    **fields,
                )

        gates = Rows(buffers["gates"], 2 * self.intermediate)
        product(
            0,
            m=routed.tokens,
            lhs=(x.base, x.offset),
            lhs_stride=x.stride,
            row_index=buffers["row_index"],
            out=gates.base,
        )
        add_activation(program, ACTIVATIONS[activation], dtype, routed.entries, gates, self.intermediate)
        product(1, m=routed.entries, lhs=gates.base, lhs_stride=gates.stride, out=buffers["rows"])


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
