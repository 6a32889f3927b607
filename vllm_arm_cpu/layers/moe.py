"""Unquantized experts on our GEMM.

vLLM's own experts for CPUs need ``vllm._C`` and keep their weights in a form
for other instructions. gpt-oss's MXFP4 experts come here, too, as BF16: the
values of four bits are exact in it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod
from vllm.utils.mem_utils import format_gib

from vllm_arm_cpu.layers import linear
from vllm_arm_cpu.layers.activation import add_activation
from vllm_arm_cpu.layers.experts import ACTIVATIONS, ONLY, Experts, ExpertsMethod, Routed
from vllm_arm_cpu.layers.linear_tuner import Shape
from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import DTYPES, Call, pointer
from vllm_arm_cpu.native.program import Program, Rows, Slot
from vllm_arm_cpu.platform import upstream_ops_available
from vllm_arm_cpu.quantization.packed import assign

logger = init_logger("vllm.arm_cpu.moe")

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""gpt-oss's activation where its configuration does not say otherwise."""


class DenseExperts(Experts):
    """Experts with weights of BF16, FP16 or FP32.

    Args:
        dtype: of weights and activations.
        activation: between the products; that of gpt-oss has gates and what they gate in turn.
        alpha, limit: of gpt-oss's activation.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        dtype: torch.dtype,
        activation: MoEActivation,
        biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        alpha: float = SWIGLU_ALPHA,
        limit: float = SWIGLU_LIMIT,
    ) -> None:
        lib = library.load()
        code = DTYPES[dtype]
        sizes = (
            lib.vac_gemm_rhs_packed_size(code, 2 * intermediate, hidden),
            lib.vac_gemm_rhs_packed_size(code, hidden, intermediate),
        )
        self._in_turn = activation == MoEActivation.SWIGLUOAI
        if self._in_turn and biases[0] is not None:
            biases = (gates_first(biases[0], 1), biases[1])
        super().__init__(num_experts, hidden, intermediate, sizes, biases)
        self.dtype = dtype
        self._activation, self._alpha, self._limit = activation, alpha, limit

    def _pack(self, target: Any, product: int, *weight: torch.Tensor) -> None:
        values = gates_first(weight[0]) if product == 0 and self._in_turn else weight[0]
        pack = Call(("vac_gemm_rhs_pack", "vac_gemm_rhs_pack_args"))
        args = pack.args[0]
        args.dtype = DTYPES[self.dtype]
        args.n, args.k = values.shape
        args.rhs, args.rhs_stride, args.packed = pointer(values), values.stride(0), target
        pack.run()

    def _make(self, dtype: torch.dtype, top_k: int, activation: MoEActivation) -> Any:
        if dtype != self.dtype:
            raise TypeError(f"input is {dtype}, the experts were packed as {self.dtype}")
        return super()._make(dtype, top_k, activation)

    def _work(self, tokens: int, entries: int, dtype: torch.dtype) -> dict[str, int]:
        size = library.load().vac_gemm_workspace_size
        return {"workspace": max(size(DTYPES[dtype], entries, n, k, self._threads) for n, k in self.shapes)}

    def _add_products(
        self, program: Program, routed: Routed, x: Rows, dtype: torch.dtype, activation: MoEActivation
    ) -> None:
        code, buffers = DTYPES[dtype], routed.buffers
        program.op(
            "vac_embedding",
            "vac_embedding_args",
            dtype=code,
            hidden_size=self.hidden,
            table=(x.base, x.offset),
            table_row_stride=x.stride,
            vocab_end=routed.tokens,
            ids=buffers["row_index"],
            num_tokens=routed.entries,
            out=buffers["rows"],
            out_token_stride=self.hidden,
        )

        def product(index: int, lhs: Slot, lhs_stride: int, out: Slot) -> None:
            n, k = self.shapes[index]
            args = program.op(
                "vac_gemm_grouped",
                "vac_gemm_grouped_args",
                num_groups=self.num_experts,
                group_start=self._starts,
                rhs_group_stride=self.sizes[index],
            )
            each = {"m": routed.entries, "n": n, "k": k, "dtype": code, "out_dtype": code, "bias_dtype": code}
            each |= {"lhs": lhs, "lhs_stride": lhs_stride, "out": out, "out_stride": n, "rhs": self.packed[index]}
            bias = self.biases[index]
            if bias is not None:
                each |= {"bias": bias, "bias_dtype": DTYPES[bias.dtype]}
                args.bias_group_stride = bias.stride(0)
            program.fill(args, **{f"each.{name}": value for name, value in each.items()})
            program.fill(args, **{"each.workspace": buffers["workspace"]})

        d, gates = self.intermediate, Rows(buffers["gates"], 2 * self.intermediate)
        product(0, buffers["rows"], self.hidden, gates.base)
        if self._in_turn:
            args = program.op("vac_moe_swiglu_oai", "vac_moe_swiglu_oai_args", dtype=code, num_rows=routed.entries, d=d)
            args.alpha, args.limit = self._alpha, self._limit
            program.rows(args, "x", gates, "x_stride")
            program.rows(args, "out", gates, "out_stride")
        else:
            add_activation(program, ACTIVATIONS[self._activation], dtype, routed.entries, gates, d)
        product(1, gates.base, 2 * d, buffers["rows"])


def gates_first(weight: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Gates and what they gate in turn along ``dim`` -> all gates, then all that they gate."""
    size = weight.shape[dim]
    index = torch.cat([torch.arange(start, size, 2) for start in (0, 1)])
    return weight.index_select(dim, index)


def misfit(moe: FusedMoEConfig) -> str | None:
    """Why a layer's experts have no kernel of ours, or None."""
    known = (*ACTIVATIONS, MoEActivation.SWIGLUOAI)
    if moe.activation not in known:
        return f"their activation is {moe.activation.value}, not one of {', '.join(one.value for one in known)}"
    if not moe.is_act_and_mul:
        return "they have no gate"
    if moe.moe_parallel_config.use_ep:
        return "expert parallelism has no kernel of ours"
    if moe.is_lora_enabled:
        return "LoRA on experts has no kernel of ours"
    if moe.in_dtype not in DTYPES:
        return f"activations are {moe.in_dtype}, not BF16, FP16 or FP32"
    return None


class _DenseMethod(ExpertsMethod):
    """What both methods share: they make :class:`DenseExperts`."""

    def _experts(self, layer: Any, dtype: torch.dtype, hidden: int, intermediate: int) -> DenseExperts:
        """The layer's experts, of before if it is loaded again."""
        made = layer.__dict__.get("cpu_linear")
        if isinstance(made, DenseExperts):
            return made
        biases = tuple(getattr(layer, name, None) for name in ("w13_bias", "w2_bias"))
        alpha, limit = (getattr(layer, name, None) for name in ("swiglu_alpha", "swiglu_limit"))
        return DenseExperts(
            layer.w2_weight.shape[0],
            hidden,
            intermediate,
            dtype,
            self.moe.activation,
            (None if biases[0] is None else biases[0].data, None if biases[1] is None else biases[1].data),
            alpha or SWIGLU_ALPHA,
            limit or SWIGLU_LIMIT,
        )

    def _finish(self, layer: Any, experts: DenseExperts, kind: str, *packed: str) -> None:
        shape = Shape(f"{kind}, {experts.num_experts} experts", 2 * experts.intermediate, experts.hidden)
        assign(layer, experts, shape, ONLY)
        for name in packed:
            linear.release(getattr(layer, name), getattr(layer, "layer_name", "") or type(layer).__name__)


class ArmUnquantizedMoEMethod(_DenseMethod, UnquantizedFusedMoEMethod):
    """vLLM's method for experts without quantization on our kernels."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        reason = misfit(moe)
        if reason is None:
            # Not upstream's: it looks for a kernel among its own, and there may be none.
            FusedMoEMethodBase.__init__(self, moe)
            CustomOp.__init__(self)
            return
        if not upstream_ops_available():
            raise ValueError(
                f"the model's experts have no kernel: {reason}, and vLLM's own are not there (vllm._C is not loaded)"
            )
        logger.warning_once("experts fall back to vLLM's own CPU kernels: %s", reason)
        self.__class__ = UnquantizedFusedMoEMethod
        UnquantizedFusedMoEMethod.__init__(self, moe)

    def maybe_roundup_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """As they are: our kernels take any."""
        sizes: tuple[int, int] = FusedMoEMethodBase.maybe_roundup_sizes(self, *args, **kwargs)
        return sizes

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weights, release the parameters; or pack again what a reload brought."""
        first, second = layer.w13_weight, layer.w2_weight
        num_experts, hidden, intermediate = second.shape
        experts = self._experts(layer, second.dtype, hidden, intermediate)
        for expert in range(num_experts):
            experts.load(expert, 0, first.data[expert])
            experts.load(expert, 1, second.data[expert])
        self._finish(layer, experts, str(second.dtype).removeprefix("torch."), "w13_weight", "w2_weight")


class ArmGptOssMxfp4MoEMethod(_DenseMethod, GptOssMxfp4MoEMethod):
    """gpt-oss's MXFP4 experts, whose weights become BF16 (four times the memory) when they are packed."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        reason = misfit(moe)
        if reason is not None:
            raise ValueError(f"the MXFP4 experts of the model: {reason}")

    @property
    def skip_forward_padding(self) -> bool:
        return False

    @property
    def has_unpadded_output(self) -> bool:
        return False

    def maybe_roundup_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """As they are: our kernels take any."""
        sizes: tuple[int, int] = FusedMoEMethodBase.maybe_roundup_sizes(self, *args, **kwargs)
        return sizes

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weights an expert at a time, release the parameters."""
        first, second = layer.w13_weight, layer.w2_weight
        num_experts, hidden, half = second.shape
        before = sum(
            getattr(layer, name).numel() for name in ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
        )
        experts = self._experts(layer, self.moe.in_dtype, hidden, 2 * half)
        for expert in range(num_experts):
            for product, (values, scales) in enumerate(
                ((first, layer.w13_weight_scale), (second, layer.w2_weight_scale))
            ):
                experts.load(expert, product, from_mxfp4(values.data[expert], scales.data[expert], experts.dtype))
        logger.info_once(
            "MXFP4 experts run as %s: a layer's take %s GiB instead of %s",
            str(experts.dtype).removeprefix("torch."),
            format_gib(experts.nbytes),
            format_gib(before),
        )
        self._finish(layer, experts, "mxfp4 as bf16", "w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def from_mxfp4(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """MXFP4 of the Open Compute Project's specification: 32 values of E2M1 share a power of two.

    values: uint8 [N, K / 2], the earlier value in the lower bits; scales: uint8 [N, K / 32], the exponent + 127.
    Returns [N, K] of ``dtype``, exact in BF16 and FP32.
    """
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    codes = torch.stack([values & 15, values >> 4], dim=-1).flatten(-2)
    blocks = table[codes.int()].unflatten(-1, (-1, 32))
    return torch.ldexp(blocks, scales.int().unsqueeze(-1) - 127).flatten(-2).to(dtype)


def register() -> None:
    """Put the method in the place of vLLM's."""
    if "UnquantizedFusedMoEMethod" not in op_registry_oot:
        CustomOp.register_oot(ArmUnquantizedMoEMethod, name="UnquantizedFusedMoEMethod")
