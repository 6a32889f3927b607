"""Decoder layers as native op lists: a step through all layers of a model is one call.

Once the weights are packed, :func:`install` looks at every decoder layer. One
whose forwards are those of Llama's family, and whose parts all have kernels,
no longer runs its modules: consecutive layers become one :class:`Program`,
which the first of them runs and whose result the others hand on. Everything
else, such as a layer with LoRA, runs as vLLM wrote it. Tensor-parallel ranks meet inside
the list, where a row-parallel layer's partial results are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch.utils.hooks import RemovableHandle
from vllm.config import CompilationMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.models import gemma3, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe

from vllm_arm_cpu import envs
from vllm_arm_cpu.attention.backend import ArmAttentionImpl, ArmAttentionMetadata
from vllm_arm_cpu.layers import activation, experts, norm, rotary
from vllm_arm_cpu.layers.experts import Routed
from vllm_arm_cpu.layers.linear_candidates import PackedLinear
from vllm_arm_cpu.layers.ranks import Ranks
from vllm_arm_cpu.native.call import DTYPES
from vllm_arm_cpu.native.library import ffi
from vllm_arm_cpu.native.program import Program, Rows, Slot

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_INSTALLED = "_vac_segment"


class NativeLinear(Protocol):
    """What multiplies by a layer's weight inside a program.

    A quantized layer offers one by having it as its attribute ``native_linear``.

    Attributes:
        n, k: shape of the weight.
        dtype: of what goes in and comes out.
        quantization: ``vac_int8_quantization`` of its input, where whoever makes that may write it as quantized rows,
            see :class:`NativeInt8Linear`; else None.
    """

    n: int
    k: int
    dtype: torch.dtype

    @property
    def quantization(self) -> Any: ...

    def program_workspace(self, rows: int) -> int:
        """Bytes of workspace that its ops want for so many rows and fewer."""

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
        """Append the ops for ``out = x @ weight.T + bias``; the last one has a barrier behind it.

        out_dtype: of out, if it is not ``dtype``: FP32.
        """


class NativeInt8Linear(NativeLinear, Protocol):
    """One with a ``quantization``."""

    def quantized_size(self, rows: int) -> int:
        """Bytes of so many quantized rows of its input."""

    def add_quantized_to(
        self, program: Program, rows: Slot, quantized: Slot, out: Rows, bias: torch.Tensor | None, workspace: Slot
    ) -> None:
        """As ``add_to``, of rows that were quantized by its ``quantization``."""


# --- which layers fit ---------------------------------------------------------

# Layers whose parts are normalised once more before they are added to the residual.
_SANDWICHES = (gemma3.Gemma3DecoderLayer.forward,)
_LAYERS = (
    *_SANDWICHES,
    llama.LlamaDecoderLayer.forward,
    qwen2.Qwen2DecoderLayer.forward,
    qwen3.Qwen3DecoderLayer.forward,
    mistral.MistralDecoderLayer.forward,
    mixtral.MixtralDecoderLayer.forward,
    qwen3_moe.Qwen3MoeDecoderLayer.forward,
)
_ATTENTIONS = (
    gemma3.Gemma3Attention.forward,
    llama.LlamaAttention.forward,
    qwen2.Qwen2Attention.forward,
    qwen3.Qwen3Attention.forward,
    mistral.MistralAttention.forward,
    mixtral.MixtralAttention.forward,
    qwen3_moe.Qwen3MoeAttention.forward,
)
_MLPS = (
    gemma3.Gemma3MLP.forward,
    llama.LlamaMLP.forward,
    qwen2.Qwen2MLP.forward,
    mistral.MistralMLP.forward,
    qwen3_moe.Qwen3MoeMLP.forward,
)
# A linear layer whose output goes to a router, and experts.
_MIXTURES = (mixtral.MixtralMoE.forward, qwen3_moe.Qwen3MoeSparseMoeBlock.forward)
# Loops in which nothing stands between two layers but what EAGLE takes out.
_MODELS = (
    gemma3.Gemma3Model.forward,
    llama.LlamaModel.forward,
    qwen2.Qwen2Model.forward,
    mistral.MistralModel.forward,
    mixtral.MixtralModel.forward,
    qwen3_moe.Qwen3MoeModel.forward,
)


def same_code(function: Any, known: tuple[Any, ...]) -> bool:
    """Whether a forward does what one of the known ones does: many models have it word for word."""
    if not isinstance(function, FunctionType):
        return False
    code = function.__code__
    return any(
        code is other.__code__
        or (
            (code.co_code, code.co_names, code.co_consts, code.co_varnames, code.co_freevars)
            == (
                other.__code__.co_code,
                other.__code__.co_names,
                other.__code__.co_consts,
                other.__code__.co_varnames,
                other.__code__.co_freevars,
            )
            and not code.co_freevars
        )
        for other in known
    )


def forward_of(module: Any) -> Any:
    """The forward of a module's class; None for a module with one of its own."""
    return None if "forward" in module.__dict__ else type(module).forward


def native_linear(layer: Any) -> NativeLinear | None:
    """What multiplies by the layer's weight as an op, or None."""
    offered: NativeLinear | None = layer.__dict__.get("native_linear")
    if offered is not None:
        return offered
    kernel = layer.__dict__.get("cpu_linear")
    return kernel if isinstance(kernel, PackedLinear) and type(layer.quant_method) is UnquantizedLinearMethod else None


def _linear_misfit(layer: Any, kind: Any, dtype: torch.dtype, ranks: Ranks) -> str | None:
    if type(layer) is not kind:
        return f"{type(layer).__name__} instead of {kind.__name__}"
    if layer.tp_size != ranks.world_size:
        return "a linear layer that is not divided over the ranks"
    if kind is RowParallelLinear and not (layer.input_is_parallel and layer.reduce_results):
        return "partial results that others sum"
    if not layer.return_bias or (layer.skip_bias_add and layer.bias is not None):
        return "a linear layer that leaves its bias to others"
    linear = native_linear(layer)
    if linear is None:
        return "a linear layer that does not run on this package's kernels"
    if linear.dtype != dtype or (layer.bias is not None and layer.bias.dtype not in (dtype, torch.float32)):
        return "linear layers of several types"
    return None


def _mlp_of(layer: Any) -> Any:
    """What stands behind a layer's second norm; Mixtral calls it by another name."""
    return getattr(layer, "mlp", None) or getattr(layer, "block_sparse_moe", None)


def _is_sandwich(layer: Any) -> bool:
    return same_code(forward_of(layer), _SANDWICHES)


def _is_mixture(mlp: Any) -> bool:
    return same_code(forward_of(mlp), _MIXTURES)


def _mlp_misfit(mlp: Any, dtype: torch.dtype, ranks: Ranks) -> str | None:
    if _is_mixture(mlp):
        gate = mlp.gate
        native = native_linear(gate)
        usual = type(gate) is GateLinear and "forward" not in gate.__dict__ and gate.out_dtype is None
        if not usual or native is None or native.dtype != dtype:
            return "its router's logits are not of a linear layer on this package's kernels"
        if gate.bias is not None:
            return "its router has a bias"
        return experts.misfit(mlp.experts, gate, ranks.world_size)
    if not same_code(forward_of(mlp), _MLPS):
        return f"its MLP is {type(mlp).__name__}"
    if getattr(mlp, "expert_gate", None) is not None:
        return "an MLP with a gate"
    return (
        _linear_misfit(mlp.gate_up_proj, MergedColumnParallelLinear, dtype, ranks)
        or _linear_misfit(mlp.down_proj, RowParallelLinear, dtype, ranks)
        or (None if activation.kind(mlp.act_fn) else f"its activation is {type(mlp.act_fn).__name__}")
    )


def _attention_misfit(attn: Any, dtype: torch.dtype) -> str | None:
    if type(attn) is not Attention or type(attn.impl) is not ArmAttentionImpl:
        return f"its attention is {type(attn).__name__} on {type(attn.impl).__name__}"
    if attn.attn_type != "decoder" or attn.kv_sharing_target_layer_name is not None or attn.query_quant is not None:
        return "attention other than over its own tokens"
    if attn.head_size_v != attn.head_size:
        return "values of another size than keys"
    return None


def misfit(layer: Any, dtype: torch.dtype, ranks: Ranks) -> str | None:
    """Why a decoder layer cannot be an op list over ``dtype``, or None."""
    if not ranks.usable:
        return "the ranks do not share memory"
    if not same_code(forward_of(layer), _LAYERS):
        return f"{type(layer).__name__} is not of Llama's family"
    attention: Any = getattr(layer, "self_attn", None)
    if not same_code(forward_of(attention), _ATTENTIONS):
        return f"its attention is {type(attention).__name__}"
    if getattr(attention, "do_llama_4_scaling", False) or getattr(layer, "ada_rms_norm_t_cond", None) is not None:
        return "scaled queries or conditioned norms"
    if dtype not in DTYPES:
        return f"its type is {dtype}"
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    if _is_sandwich(layer):
        norms += [layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm]
    if _has_head_norms(attention):
        norms += [attention.q_norm, attention.k_norm]
    reasons = [
        _linear_misfit(attention.qkv_proj, QKVParallelLinear, dtype, ranks),
        _linear_misfit(attention.o_proj, RowParallelLinear, dtype, ranks),
        _mlp_misfit(_mlp_of(layer), dtype, ranks),
        *(norm.not_native(module, dtype) for module in norms),
        rotary.not_native(attention.rotary_emb, dtype),
        _attention_misfit(attention.attn, dtype),
    ]
    return next((reason for reason in reasons if reason is not None), None)


def _has_head_norms(attention: Any) -> bool:
    """Whether query and key are normalised: Qwen3 has both norms always, Qwen2 by a flag."""
    return bool(getattr(attention, "qk_norm", hasattr(attention, "q_norm")))


# --- what they become ---------------------------------------------------------


class Buffers:
    """Activations between ops, shared by all programs of a model; they grow with the largest batch and stay.

    Attributes:
        rows: of a step, for how many there is room.
        addresses: of the buffers by name. Of those of raw bytes, ops use ``workspace`` one after the other, and
            ``quantized`` is the quantized input of a linear layer.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._columns: dict[str, int] = {}
        self._sizes: dict[str, set[Callable[[int], int]]] = {"workspace": set(), "quantized": set()}
        self._tensors: dict[str, torch.Tensor] = {}
        self.rows = 0
        self.addresses: dict[str, int] = dict.fromkeys(self._sizes, 0)

    def want(self, name: str, columns: int) -> None:
        """Make room for ``name`` [rows, columns]."""
        if columns > self._columns.get(name, 0):
            self._columns[name] = columns
            self.rows = 0

    def want_bytes(self, name: str, size: Callable[[int], int]) -> None:
        """Make room for ``size(rows)`` bytes; the largest of what is wanted counts."""
        sizes = self._sizes.setdefault(name, set())
        if size not in sizes:
            sizes.add(size)
            self.rows = 0

    def reserve(self, rows: int) -> None:
        """Make room for a step of ``rows`` tokens."""
        if rows > self.rows:
            # A page that is not touched costs nothing; growing often would.
            self.rows = max(64, 1 << (rows - 1).bit_length())
            for name, columns in self._columns.items():
                self._tensors[name] = torch.empty((self.rows, columns), dtype=self.dtype)
                self.addresses[name] = self._tensors[name].data_ptr()
            for name, sizes in self._sizes.items():
                nbytes = max((size(self.rows) for size in sizes), default=0)
                self._tensors[name] = torch.empty(nbytes, dtype=torch.uint8)
                self.addresses[name] = self._tensors[name].data_ptr()

    def tensor(self, name: str) -> torch.Tensor:
        """[rows, columns]."""
        return self._tensors[name]


@dataclass(frozen=True)
class _EntryBytes:
    """Rows -> bytes of a number of 32 bits per entry."""

    top_k: int

    def __call__(self, rows: int) -> int:
        return 4 * self.top_k * rows


@dataclass(frozen=True)
class _Room:
    """Rows -> bytes of one of the buffers that a layer's experts want."""

    experts: experts.Experts
    name: str
    top_k: int
    dtype: torch.dtype

    def __call__(self, rows: int) -> int:
        return self.experts.room(rows, self.top_k, self.dtype)[self.name]


class _GroupSlots:
    """What the layers of a KV cache group share in a step."""

    def __init__(self) -> None:
        names = ("tokens", "slot_mapping", "block_table", "block_table_stride", "query_start_loc", "seq_lens")
        self.slots = {name: Slot(name) for name in (*names, "request_causal", "causal", "plan")}

    def set(self, program: Program, metadata: ArmAttentionMetadata) -> None:
        slots, table, mask = self.slots, metadata.block_table, metadata.request_causal
        program.set(slots["tokens"], metadata.num_actual_tokens)
        program.set(slots["slot_mapping"], metadata.slot_mapping.data_ptr())
        program.set(slots["block_table"], table.data_ptr())
        program.set(slots["block_table_stride"], table.stride(0))
        program.set(slots["query_start_loc"], metadata.query_start_loc.data_ptr())
        program.set(slots["seq_lens"], metadata.seq_lens.data_ptr())
        program.set(slots["request_causal"], 0 if mask is None else mask.data_ptr())
        program.set(slots["causal"], int(metadata.causal))
        program.set(slots["plan"], metadata.plan.data_ptr())


class Step:
    """A program over consecutive layers.

    Args:
        layers: decoder layers without a misfit.
        has_residual: whether the first one is given a residual.
        metadata: of the step at hand; layers with the same metadata are of one KV cache group for good.
        ranks: over which the layers are divided.
    """

    def __init__(
        self, layers: list[Any], has_residual: bool, metadata: dict[str, Any], buffers: Buffers, ranks: Ranks
    ) -> None:
        names = ("tokens", "positions", "x", "x_stride", "residual", "residual_stride", "hidden", "qkv", "attention")
        self.slots = {
            name: Slot(name) for name in (*names, "gate_up", "out", "workspace", "quantized", "router_logits")
        }
        self.program = Program()
        self.ranks = ranks
        self.lengths: list[int] = []
        self.buffers = buffers
        self.groups: dict[int, tuple[str, _GroupSlots]] = {}
        self.routed: dict[int, Routed] = {}
        # Whether the ranks have partial results of what the last op has made.
        self._partial = False
        self._begin()
        for i, layer in enumerate(layers):
            attn = layer.self_attn.attn
            key = id(metadata[attn.layer_name])
            _, group = self.groups.setdefault(key, (attn.layer_name, _GroupSlots()))
            before = self.program.pending
            self._add_layer(layer, group, i == 0, i + 1 == len(layers), has_residual)
            self.lengths.append(self.program.pending - before)
        self._end(_linear_of(layers[0].self_attn.qkv_proj).k)
        self.program.finish()

    last_output = "out"
    """Where the last layer's output goes: a slot."""

    def _begin(self) -> None:
        """Append what comes before the layers; nothing here."""

    def _end(self, size: int) -> None:
        """Append what comes behind the layers, whose last output is [tokens, size]."""
        self._add_sum(self.slots[self.last_output], size)

    def _add_layer(self, layer: Any, group: _GroupSlots, first: bool, last: bool, has_residual: bool) -> None:
        """Append a layer's ops. ``hidden`` holds what the last linear made, and its norm."""
        program, slots, buffers = self.program, self.slots, self.buffers
        attention, mlp, tokens = layer.self_attn, _mlp_of(layer), slots["tokens"]
        qkv_proj, o_proj = attention.qkv_proj, attention.o_proj
        is_mixture, is_sandwich = _is_mixture(mlp), _is_sandwich(layer)
        in_mlp = (mlp.gate,) if is_mixture else (mlp.gate_up_proj, mlp.down_proj)
        linears = {layer: _linear_of(layer) for layer in (qkv_proj, o_proj, *in_mlp)}
        dtype, size = linears[qkv_proj].dtype, linears[qkv_proj].k
        buffers.want("hidden", size)
        for name, linear in (("qkv", qkv_proj), ("router_logits" if is_mixture else "gate_up", in_mlp[0])):
            buffers.want(name, linears[linear].n)
        buffers.want("attention", linears[o_proj].k)
        for native in linears.values():
            buffers.want_bytes("workspace", native.program_workspace)

        def matmul(linear: Any, x: Rows, out: Rows, partial: bool = False) -> None:
            bias = self.ranks.bias_of(linear) if partial else linear.bias
            linears[linear].add_to(program, tokens, x, out, bias, slots["workspace"])
            self._partial = partial

        def norm_and_matmul(module: Any, linear: Any, x: Rows, residual: Rows | None, out: Rows) -> None:
            int8 = as_int8(linears[linear])
            if int8 is None:
                self._add_sum_and_norm(module, x, residual, hidden)
                matmul(linear, hidden, out)
                return
            self._add_sum(x.base, size)
            buffers.want_bytes("quantized", int8.quantized_size)
            quantized, workspace = slots["quantized"], slots["workspace"]
            buffers.want_bytes("workspace", norm.int8_workspace(module))
            norm.add_norm_int8(
                program, module, dtype, tokens, x, quantized, int8.quantization, workspace, residual=residual
            )
            int8.add_quantized_to(program, tokens, quantized, out, linear.bias, workspace)

        def activation_and_matmul(linear: Any, x: Rows, out: Rows) -> None:
            kind = activation.kind(mlp.act_fn)
            assert kind is not None
            int8, d = as_int8(linears[linear]), linears[linear].k
            if int8 is None:
                activation.add_activation(program, kind, dtype, tokens, x, d)
                matmul(linear, x, out, partial=True)
                return
            buffers.want_bytes("quantized", int8.quantized_size)
            quantized, workspace = slots["quantized"], slots["workspace"]
            buffers.want_bytes("workspace", activation.int8_workspace(d))
            activation.add_activation_int8(program, kind, dtype, tokens, x, d, quantized, int8.quantization, workspace)
            int8.add_quantized_to(program, tokens, quantized, out, self.ranks.bias_of(linear), workspace)
            self._partial = True

        hidden = Rows(slots["hidden"], size)
        given, residual = Rows(slots["x"], slots["x_stride"]), Rows(slots["residual"], slots["residual_stride"])
        qkv = Rows(slots["qkv"], linears[qkv_proj].n)
        attended = Rows(slots["attention"], linears[o_proj].k)
        made = Rows(slots[self.last_output], size) if last else hidden

        x, added = (given, residual if has_residual else None) if first else (hidden, residual)
        norm_and_matmul(layer.input_layernorm, qkv_proj, x, added, qkv)
        self._add_attention(attention, dtype, group, qkv, attended)
        matmul(o_proj, attended, hidden, partial=True)
        before_mlp = layer.post_attention_layernorm
        if is_sandwich:
            self._add_sum_and_norm(layer.post_attention_layernorm, hidden, None, hidden)
            before_mlp = layer.pre_feedforward_layernorm
        if is_mixture:
            logits = Rows(slots["router_logits"], linears[mlp.gate].n)
            self._add_sum_and_norm(before_mlp, hidden, residual, hidden)
            matmul(mlp.gate, hidden, logits)
            self._add_experts(mlp.experts, dtype, hidden, logits, made)
            return
        gated = Rows(slots["gate_up"], linears[mlp.gate_up_proj].n)
        norm_and_matmul(before_mlp, mlp.gate_up_proj, hidden, residual, gated)
        activation_and_matmul(mlp.down_proj, gated, made)
        if is_sandwich:
            self._add_sum_and_norm(layer.post_feedforward_layernorm, made, None, made)

    def _add_experts(self, runner: Any, dtype: torch.dtype, x: Rows, logits: Rows, out: Rows) -> None:
        """Append the router's choice, and the chosen experts' outputs [tokens, hidden]; ``out`` may be x itself."""
        slots, layer, top_k = self.slots, runner.routed_experts, runner.router.top_k
        routed = self.routed.get(top_k)
        if routed is None:
            routed = self.routed[top_k] = Routed(top_k, slots["tokens"])
            routed.buffers |= {name: slots[name] for name in ("quantized", "workspace")}
        made = layer.cpu_linear
        self.buffers.want_bytes("ids", _EntryBytes(top_k))
        self.buffers.want_bytes("weights", _EntryBytes(top_k))
        for name in made.room(0, top_k, dtype):
            self.buffers.want_bytes(name, _Room(made, name, top_k, dtype))
        experts.add_route(self.program, routed, logits, dtype, runner.router)
        made.add_to(self.program, routed, x, out, dtype, layer.activation)
        self._partial = True

    def _add_sum(self, x: Slot, size: int) -> None:
        """Append the ranks' sum of [tokens, size], if they have partial results."""
        if self._partial:
            self.ranks.add_all_reduce(self.program, self.buffers.dtype, self.slots["tokens"], size, x)
            self._partial = False

    def _add_sum_and_norm(self, module: Any, x: Rows, residual: Rows | None, out: Rows) -> None:
        """Append a norm of ``x`` [tokens, size], of which ranks may have partial results, plus the residual."""
        program, dtype, tokens = self.program, self.buffers.dtype, self.slots["tokens"]
        if (
            self._partial
            and residual is not None
            and self.ranks.add_all_reduce_norm(program, module, dtype, tokens, x.base, out, residual)
        ):
            self._partial = False
            return
        self._add_sum(x.base, module.weight.shape[0])
        norm.add_norm(program, module, dtype, tokens, x, out, residual=residual)

    def _add_attention(self, attention: Any, dtype: torch.dtype, group: _GroupSlots, qkv: Rows, attended: Rows) -> None:
        program, tokens = self.program, self.slots["tokens"]
        attn = attention.attn
        heads, kv_heads, size = attn.num_heads, attn.num_kv_heads, attn.head_size
        bytes_per_head = size * dtype.itemsize
        query = qkv
        key = Rows(qkv.base, qkv.stride, heads * bytes_per_head)
        value = Rows(qkv.base, qkv.stride, (heads + kv_heads) * bytes_per_head)
        if _has_head_norms(attention):
            norm.add_norm(program, attention.q_norm, dtype, tokens, query, query, heads, barrier=False)
            norm.add_norm(program, attention.k_norm, dtype, tokens, key, key, kv_heads)
        rotary.add_rotary(
            program, attention.rotary_emb, dtype, tokens, self.slots["positions"], query, key, (heads, kv_heads)
        )
        write, attend = attn.impl.prepared(attn, attn.kv_cache, size, dtype)
        shared = group.slots
        args = program.op("vac_kv_cache_write", "vac_kv_cache_write_args")
        ffi.memmove(args, write, ffi.sizeof("vac_kv_cache_write_args"))
        args.key_head_stride = args.value_head_stride = size
        args.num_kv_heads = kv_heads
        program.rows(args, "key", key, "key_token_stride")
        program.rows(args, "value", value, "value_token_stride")
        program.fill(args, num_tokens=shared["tokens"], slot_mapping=shared["slot_mapping"])
        args = program.op("vac_attention", "vac_attention_args")
        ffi.memmove(args, attend, ffi.sizeof("vac_attention_args"))
        args.query_head_stride = args.output_head_stride = size
        program.rows(args, "query", query, "query_token_stride")
        program.rows(args, "output", attended, "output_token_stride")
        program.fill(args, **{name: slot for name, slot in shared.items() if name not in ("tokens", "slot_mapping")})

    def prepare(
        self,
        metadata: dict[str, Any],
        positions: torch.Tensor,
        x: torch.Tensor,
        residual: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write into the ops what this step's differ in.

        positions: int64 [tokens]; x, residual: [tokens, hidden], the residual is updated in place; out: written.
        """
        program, slots = self.program, self.slots
        program.set(slots["x"], x.data_ptr())
        program.set(slots["x_stride"], x.stride(0))
        program.set(slots["residual"], residual.data_ptr())
        program.set(slots["residual_stride"], residual.stride(0))
        self.prepare_layers(metadata, x.shape[0], positions, out)

    def prepare_layers(self, metadata: dict[str, Any], tokens: int, positions: torch.Tensor, out: torch.Tensor) -> None:
        """As :meth:`prepare`, but for what the layers are given."""
        program, slots, addresses = self.program, self.slots, self.buffers.addresses
        program.set(slots["tokens"], tokens)
        program.set(slots["positions"], positions.data_ptr())
        program.set(slots["out"], out.data_ptr())
        for name in ("hidden", "qkv", "attention", "gate_up", "router_logits", "workspace", "quantized"):
            program.set(slots[name], addresses.get(name, 0))
        for top_k, routed in self.routed.items():
            program.set(routed.entries, tokens * top_k)
            program.set(routed.ids, addresses["ids"])
            program.set(routed.weights, addresses["weights"])
            for name, slot in routed.buffers.items():
                program.set(slot, addresses[name])
        for layer_name, group in self.groups.values():
            group.set(program, metadata[layer_name])


def as_int8(linear: NativeLinear) -> NativeInt8Linear | None:
    """The linear if its input may be handed over in quantized rows, else None."""
    return cast(NativeInt8Linear, linear) if linear.quantization is not None else None


def _linear_of(layer: Any) -> NativeLinear:
    linear = native_linear(layer)
    assert linear is not None
    return linear


class Hooks:
    """Whether a module has a hook: it wants to see what the module is given, and nobody gives it anything here."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = modules
        self._seen = -1
        self._found = False

    def found(self) -> bool:
        """Looked up again when a hook was registered anywhere since, or there was one."""
        if self._seen != RemovableHandle.next_id or self._found:
            self._found = any(
                module._forward_hooks or module._forward_pre_hooks
                for root in self._modules
                for module in root.modules()
            )
            self._seen = RemovableHandle.next_id
        return self._found


@dataclass
class Segment:
    """Consecutive layers that run as one program, in the place of the first.

    Attributes:
        parent: the model whose loop calls the layers, if nothing else than EAGLE's taps stands between them.
        fresh: whether every step's output is a new tensor, for those who keep it longer than a step.
        result: the output of the step at hand; a layer behind the first that is given it hands it on.
    """

    layers: list[Any]
    parent: Any
    buffers: Buffers
    ranks: Ranks
    fresh: bool
    result: torch.Tensor | None = None
    steps: dict[Any, Step] = field(default_factory=dict)
    _outputs: list[torch.Tensor] = field(default_factory=list)
    _views: list[torch.Tensor] = field(default_factory=list)
    _turn: int = 0
    _cache: int = 0

    def __post_init__(self) -> None:
        self._hooks = Hooks(self.layers)

    def run(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Run all layers; None, and nothing done, for a step that is not for kernels.

        positions: int64 [tokens]; hidden_states, residual: [tokens, hidden]. As in vLLM's layers, the residual
        (without one: hidden_states) is updated in place and returned.
        """
        self.result = None
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict) or not self._usable(positions, hidden_states):
            return None
        tokens, size = hidden_states.shape
        out = self.output(tokens, size, hidden_states.dtype)
        self._step(residual is not None, metadata, positions, hidden_states, residual, out).program.run()
        self.ranks.check()
        self.result = out
        return out, hidden_states if residual is None else residual

    def prepared(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor
    ) -> Step:
        """The step that :meth:`run` would run, ready for it, with its output in ``out``."""
        metadata = get_forward_context().attn_metadata
        return self._step(residual is not None, metadata, positions, hidden_states, residual, out)

    def step(self, key: Any, make: Callable[[], Step]) -> Step:
        """The step of this kind, made when there is none yet or the KV cache has moved."""
        cache = self.layers[0].self_attn.attn.kv_cache.data_ptr()
        if cache != self._cache:
            self.steps.clear()
            self._cache = cache
        step = self.steps.get(key)
        if step is None:
            step = self.steps[key] = make()
        return step

    def _step(
        self,
        has_residual: bool,
        metadata: Any,
        positions: torch.Tensor,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        out: torch.Tensor,
    ) -> Step:
        step = self.step(has_residual, lambda: Step(self.layers, has_residual, metadata, self.buffers, self.ranks))
        self.buffers.reserve(x.shape[0])
        step.prepare(metadata, positions, x, x if residual is None else residual, out)
        return step

    def _usable(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> bool:
        if self.parent is not None and getattr(self.parent, "aux_hidden_state_layers", None):
            return False
        return (
            not self._hooks.found()
            and positions.dim() == 1
            and positions.dtype == torch.int64
            and positions.is_contiguous()
            and hidden_states.dim() == 2
            and hidden_states.stride(1) == 1
            and hidden_states.dtype == self.buffers.dtype
            and hidden_states.shape[0] > 0
        )

    def output(self, tokens: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for the output [tokens, size] of a step."""
        if self.fresh:
            return torch.empty((tokens, size), dtype=dtype)
        # Two in turn: what a step returned is whole until the step after the next one.
        if not self._outputs or self._outputs[0].shape[0] < tokens:
            rows = max(64, 1 << (tokens - 1).bit_length())
            self._outputs = [torch.empty((rows, size), dtype=dtype) for _ in range(2)]
            self._views = list(self._outputs)
        self._turn ^= 1
        if self._views[self._turn].shape[0] != tokens:
            self._views[self._turn] = self._outputs[self._turn][:tokens]
        return self._views[self._turn]


def _native_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The class of a layer that runs as part of a segment."""

    def call(self: Any, positions: Any, hidden_states: Any, residual: Any = None, **others: Any) -> Any:
        segment = self.__dict__[_INSTALLED]
        if torch.compiler.is_compiling() or any(other is not None for other in others.values()):
            segment.result = None
        elif segment.layers[0] is self:
            result = segment.run(positions, hidden_states, residual)
            if result is not None:
                return result
        elif hidden_states is segment.result and hidden_states is not None:
            return hidden_states, residual
        return cls.__call__(self, positions, hidden_states, residual, **others)

    return type(f"Arm{cls.__name__}", (cls,), {"__call__": call, "__module__": __name__, "__doc__": cls.__doc__})


# --- a loaded model -----------------------------------------------------------


def install(model: torch.nn.Module, config: VllmConfig) -> str | None:
    """Give the decoder layers that fit their programs; to be called once the weights are packed.

    Returns:
        A line that says which layers run as op lists and why others do not; None for a model without decoder layers.
    """
    lists = [
        (parent, child)
        for parent in model.modules()
        for child in parent.children()
        if isinstance(child, torch.nn.ModuleList) and any(map(_is_decoder_layer, child))
    ]
    if not lists:
        return None
    dtype = config.model_config.dtype
    everywhere = _everywhere(config)
    buffers, ranks = Buffers(dtype), Ranks()
    kept = config.model_config.runner_type == "pooling" or config.parallel_config.pipeline_parallel_size > 1
    reasons: dict[str, int] = {}
    fitting, total, calls = 0, 0, 0
    classes: dict[type, type] = {}
    for parent, layers in lists:
        reasoned = [(layer, everywhere or misfit(layer, dtype, ranks)) for layer in layers if _is_decoder_layer(layer)]
        total += len(reasoned)
        for _, reason in reasoned:
            if reason is not None:
                reasons[reason] = reasons.get(reason, 0) + 1
        plain_loop = same_code(forward_of(parent), _MODELS)
        for run in _runs(reasoned, plain_loop):
            segment = Segment(run, parent if plain_loop else None, buffers, ranks, fresh=kept or not plain_loop)
            fitting, calls = fitting + len(run), calls + 1
            for layer in run:
                cls = type(layer)
                layer.__class__ = classes.setdefault(cls, _native_class(cls))
                layer.__dict__[_INSTALLED] = segment
    line = f"decoder layers: {fitting} of {total} as native op lists"
    if fitting:
        line += f", {calls} call{'s' if calls > 1 else ''} a step"
    return line + "".join(f"; {count} not: {reason}" for reason, count in reasons.items())


def _is_decoder_layer(layer: torch.nn.Module) -> bool:
    """Whether a layer attends, or keeps a state, over what came before."""
    return hasattr(layer, "self_attn") or any(
        isinstance(module, AttentionLayerBase) and getattr(module, "attn_type", "decoder") == "decoder"
        for module in layer.modules()
    )


def segments(model: torch.nn.Module) -> list[Segment]:
    """The segments of a loaded model, in the order of its layers."""
    found = [module.__dict__[_INSTALLED] for module in model.modules() if _INSTALLED in module.__dict__]
    return list({id(segment): segment for segment in found}.values())


def forget(model: torch.nn.Module) -> None:
    """Make the programs again when they are next needed: weights or caches have moved."""
    for segment in segments(model):
        segment.steps.clear()


def _everywhere(config: VllmConfig) -> str | None:
    """Why no layer at all is to run as an op list, or None."""
    if not envs.VAC_DECODER:
        return "VAC_DECODER=0"
    if config.compilation_config.mode not in (None, CompilationMode.NONE):
        return f"compilation mode {config.compilation_config.mode.name} traces the layers"
    if config.aux_output_config.enable_return_routed_experts:
        return "the chosen experts are asked for"
    if config.kv_transfer_config is not None:
        return "a KV connector wants to see every layer"
    return None


def _runs(reasoned: list[tuple[Any, str | None]], together: bool) -> Iterator[list[Any]]:
    """Consecutive layers without a reason against them; one by one if not ``together``."""
    run: list[Any] = []
    for layer, reason in reasoned:
        if run and (reason is not None or not together):
            yield run
            run = []
        if reason is None:
            run.append(layer)
    if run:
        yield run
