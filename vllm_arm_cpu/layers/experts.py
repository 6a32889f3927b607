"""Mixtures of experts as ops: the router's choice, and one list from the sorted rows to the summed outputs.

The rows of a batch are sorted by the expert that takes them, multiplied by all experts' weights in two grouped
products with the gated activation between them, and added up by token. The same ops run as a call of their own,
behind vLLM's module, and as part of a step's list (``layers/decoder.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from vllm_arm_cpu.layers.linear_tuner import Choice
from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import DTYPES, Call, as_rows, ffi, pointer, scratch
from vllm_arm_cpu.native.program import Program, Rows, Slot
from vllm_arm_cpu.runtime import memory

MAX_TOKENS = 1024
"""Tokens of one run as a call of its own: bounds the scratch memory."""

ACTIVATIONS = {
    MoEActivation.SILU: "SILU",
    MoEActivation.GELU: "GELU",
    MoEActivation.GELU_TANH: "GELU_TANH",
}

ONLY = Choice("vac", {}, {}, "only one")

_BUFFERS = ("row_index", "position", "rows", "gates", "quantized", "workspace")


@dataclass(eq=False)
class Routed:
    """The slots of a batch on its way through a layer's experts; an entry is a token and one expert that takes it.

    Attributes:
        top_k: experts that take each token.
        tokens, entries: numbers of them, ``entries = top_k * tokens``.
        ids, weights: int32 and FP32 [tokens, top_k], no gaps: the router's choice.
        buffers: what the ops leave for each other, by the names of :meth:`Experts.room`.
    """

    top_k: int
    tokens: Slot = field(default_factory=lambda: Slot("tokens"))
    entries: Slot = field(default_factory=lambda: Slot("entries"))
    ids: Slot = field(default_factory=lambda: Slot("ids"))
    weights: Slot = field(default_factory=lambda: Slot("weights"))
    buffers: dict[str, Slot] = field(default_factory=lambda: {name: Slot(name) for name in _BUFFERS})


@dataclass(eq=False)
class _Own:
    """Experts as a call of their own."""

    program: Program
    routed: Routed
    x: Slot
    x_stride: Slot
    out: Slot


class Experts(ABC):
    """Packed weights of a layer's experts, and the ops that run tokens through them.

    Args:
        num_experts: E.
        hidden: H, columns of the first product's weights, [2 I, H], and rows of the second's, [H, I].
        intermediate: I.
        sizes: bytes of one expert's packed weight in each product.
        biases: [E, 2 I] and [E, H], or None.

    Attributes:
        shapes: of an expert's weights, [N, K] by product.
        sizes: as given, in whole cache lines, so that every expert's weight is aligned.
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
        self.shapes = ((2 * intermediate, hidden), (hidden, intermediate))
        self.sizes, self.biases = tuple(_in_lines(size) for size in sizes), biases
        self.packed = [memory.allocate(size * num_experts) for size in self.sizes]
        self.nbytes = sum(packed.numel() for packed in self.packed)
        self._threads = library.load().vac_max_threads()
        self._starts = torch.empty(num_experts + 1, dtype=torch.int32)
        self._own: dict[tuple[torch.dtype, int, MoEActivation], _Own] = {}

    def load(self, expert: int, product: int, *weight: torch.Tensor | None) -> None:
        """Pack one expert's weight of the first (0) or second (1) product; of what parts, the subclass says."""
        target = pointer(self.packed[product])
        self._pack(ffi.cast("char *", target) + expert * self.sizes[product], product, *weight)

    def __call__(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: MoEActivation
    ) -> torch.Tensor:
        """x [tokens, H] of BF16, FP16 or FP32, weights and ids [tokens, k] -> [tokens, H]."""
        rows = as_rows(x)
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        weights, ids = topk_weights.float().contiguous(), topk_ids.to(torch.int32).contiguous()
        key = (x.dtype, ids.shape[1], activation)
        own = self._own.get(key)
        if own is None:
            own = self._own[key] = self._make(*key)
        for start in range(0, rows.shape[0], MAX_TOKENS):
            part = slice(start, start + MAX_TOKENS)
            self._run(own, rows[part], weights[part], ids[part], out[part])
        return out.view(x.shape)

    def _make(self, dtype: torch.dtype, top_k: int, activation: MoEActivation) -> _Own:
        own = _Own(Program(), Routed(top_k), Slot("x"), Slot("x_stride"), Slot("out"))
        self.add_to(own.program, own.routed, Rows(own.x, own.x_stride), Rows(own.out, self.hidden), dtype, activation)
        own.program.finish()
        return own

    def _run(self, own: _Own, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
        program, routed = own.program, own.routed
        room = self.room(x.shape[0], routed.top_k, x.dtype)
        address = int(ffi.cast("uintptr_t", scratch.pointer(sum(_in_lines(size) for size in room.values()))))
        for name, size in room.items():
            program.set(routed.buffers[name], address)
            address += _in_lines(size)
        program.set(routed.tokens, x.shape[0])
        program.set(routed.entries, ids.numel())
        program.set(routed.ids, ids.data_ptr())
        program.set(routed.weights, weights.data_ptr())
        program.set(own.x, x.data_ptr())
        program.set(own.x_stride, x.stride(0))
        program.set(own.out, out.data_ptr())
        program.run()

    def room(self, tokens: int, top_k: int, dtype: torch.dtype) -> dict[str, int]:
        """Bytes of the buffers that ``tokens`` tokens of ``dtype`` want, by the names in ``Routed.buffers``."""
        entries = tokens * top_k
        return {
            "row_index": 4 * entries,
            "position": 4 * entries,
            "rows": entries * self.hidden * dtype.itemsize,
            "gates": entries * 2 * self.intermediate * dtype.itemsize,
            **self._work(tokens, entries, dtype),
        }

    def add_to(
        self, program: Program, routed: Routed, x: Rows, out: Rows, dtype: torch.dtype, activation: MoEActivation
    ) -> None:
        """Append ``out = sum of the chosen experts' outputs for x``, both [tokens, H] of ``dtype``.

        Entries whose id is no expert's add nothing.
        """
        buffers, top_k = routed.buffers, routed.top_k
        program.op(
            "vac_moe_sort",
            "vac_moe_sort_args",
            num_tokens=routed.tokens,
            top_k=top_k,
            topk_ids=routed.ids,
            topk_ids_stride=top_k,
            num_experts=self.num_experts,
            expert_start=self._starts,
            row_index=buffers["row_index"],
            position=buffers["position"],
        )
        self._add_products(program, routed, x, dtype, activation)
        program.op(
            "vac_moe_combine",
            "vac_moe_combine_args",
            dtype=DTYPES[dtype],
            out_dtype=DTYPES[dtype],
            num_tokens=routed.tokens,
            top_k=top_k,
            hidden_size=self.hidden,
            topk_weights=routed.weights,
            topk_weights_stride=top_k,
            position=buffers["position"],
            rows=buffers["rows"],
            rows_stride=self.hidden,
            out=(out.base, out.offset),
            out_stride=out.stride,
        )

    @abstractmethod
    def _pack(self, target: Any, product: int, *weight: Any) -> None: ...

    @abstractmethod
    def _work(self, tokens: int, entries: int, dtype: torch.dtype) -> dict[str, int]:
        """Bytes of ``workspace`` and, if it is used, ``quantized``."""

    @abstractmethod
    def _add_products(
        self, program: Program, routed: Routed, x: Rows, dtype: torch.dtype, activation: MoEActivation
    ) -> None:
        """Append what makes ``rows`` [entries, H], in the order of the sorted entries."""


def _in_lines(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


class ExpertsMethod(FusedMoEMethodBase):
    """What runs the :class:`Experts` of a layer, quantized or not, which are its ``cpu_linear``."""

    @property
    def is_monolithic(self) -> bool:
        """The router chooses the experts."""
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


# --- the router ---------------------------------------------------------------

_route: Call | None = None


def route(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax routing: logits [tokens, E] of BF16, FP16 or FP32 -> weights FP32 and ids int32, [tokens, top_k].

    The likeliest first, of equals the lower id. vLLM's own, in torch, rounds the weights to the logits' type.
    """
    global _route
    if _route is None:
        _route = Call(("vac_moe_route", "vac_moe_route_args"))
    rows = as_rows(logits)
    weights = torch.empty((rows.shape[0], top_k), dtype=torch.float32)
    ids = torch.empty((rows.shape[0], top_k), dtype=torch.int32)
    args = _route.args[0]
    args.dtype, args.top_k = DTYPES[rows.dtype], top_k
    args.num_tokens, args.num_experts = rows.shape
    args.logits, args.logits_stride, args.renormalize = pointer(rows), rows.stride(0), renormalize
    args.topk_weights = ffi.cast("float *", weights.data_ptr())
    args.topk_ids = ffi.cast("int32_t *", ids.data_ptr())
    _route.run()
    return weights, ids


def add_route(program: Program, routed: Routed, logits: Rows, dtype: torch.dtype, router: CPURouter) -> None:
    """Append :func:`route` of logits [tokens, E] of ``dtype``."""
    args = program.op(
        "vac_moe_route",
        "vac_moe_route_args",
        dtype=DTYPES[dtype],
        num_tokens=routed.tokens,
        num_experts=router.global_num_experts,
        top_k=routed.top_k,
        renormalize=int(router.renormalize),
        topk_weights=routed.weights,
        topk_ids=routed.ids,
    )
    program.rows(args, "logits", logits, "logits_stride")


def is_softmax(router: Any) -> bool:
    """Whether a router's choice is that of :func:`route`."""
    return (
        type(router) is CPURouter
        and not router.use_grouped_topk
        and router.custom_routing_function is None
        and router.scoring_func == "softmax"
        and router.top_k <= min(library.load().VAC_MOE_MAX_TOP_K, router.global_num_experts)
    )


_upstream_routing = CPURouter._compute_routing


def compute_routing(
    self: CPURouter,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    indices_type: torch.dtype | None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As vLLM's, by our kernel where it is :func:`route`."""
    if torch.compiler.is_compiling() or router_logits.dtype not in DTYPES or not is_softmax(self):
        upstream: tuple[torch.Tensor, torch.Tensor] = _upstream_routing(
            self, hidden_states, router_logits, indices_type, **others
        )
        return upstream
    return route(router_logits, self.top_k, self.renormalize)


def misfit(runner: Any, gate: Any, world_size: int) -> str | None:
    """Why vLLM's experts, with the linear layer ``gate`` in front of their router, cannot be ops of a list, or None."""
    if type(runner) is not MoERunner:
        return f"its experts are {type(runner).__name__}"
    experts, router, config = runner.routed_experts, runner.router, runner.moe_config
    packed = experts.__dict__.get("cpu_linear")
    if not isinstance(experts.quant_method, ExpertsMethod) or not isinstance(packed, Experts):
        return "its experts do not run on this package's kernels"
    if runner.shared_experts is not None or runner.gate not in (None, gate):
        return "experts that all tokens share"
    if runner.routed_input_transform is not None or runner.routed_output_transform is not None:
        return "experts between transforms"
    if runner.routed_scaling_factor != 1.0 or experts.apply_router_weight_on_input:
        return "experts whose inputs or outputs are scaled"
    if not is_softmax(router) or router.eplb_state is not None or router.capture_fn is not None:
        return "a router other than softmax"
    if (
        config.tp_size != world_size
        or config.ep_size > 1
        or config.dp_size > 1
        or config.pcp_size > 1
        or config.is_sequence_parallel
        or config.skip_final_all_reduce
        or config.hidden_dim != packed.hidden
    ):
        return "experts that are divided in another way"
    return None


def register() -> None:
    """Let vLLM's router use our kernel."""
    CPURouter._compute_routing = compute_routing
