"""Recurrent layers: Qwen's gated delta nets on our kernels; Mamba's and others on vLLM's, which are in ``vllm._C``.

Where those are needed and missing, the load ends before a weight is read, with
the layer's name; where they are there, it is said once.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import OlmoHybridGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import DTYPES, Call, pointer
from vllm_arm_cpu.platform import upstream_ops_available

logger = init_logger("vllm.arm_cpu.recurrent")
ffi = library.ffi

MAX_KEY_SIZE = 256

_UPSTREAM: dict[type[PluggableLayer], str] = {
    OlmoHybridGatedDeltaNetAttention: "OLMo's gated delta net",
    MambaMixer: "Mamba",
    MambaMixer2: "Mamba 2",
}


def _need_upstream(name: str, kind: str, reason: str = "no kernel of this package") -> None:
    """Say that vLLM's kernels serve a layer, or end if they are not there."""
    if not upstream_ops_available():
        raise ValueError(
            f"{name}: {kind} layers: {reason}, and vLLM's own kernels are not there (vllm._C is not loaded): "
            "install vLLM's build for CPUs"
        )
    logger.warning_once("%s layers fall back to vLLM's own CPU kernels: %s", kind, reason)


def misfit(layer: Any) -> str | None:
    """Why a gated delta net that was made has no kernel of ours, or None."""
    if layer.num_spec:
        return "speculative decoding has no kernel of this package"
    if is_conv_state_dim_first():
        return "the convolution's state has channels first"
    if layer.head_k_dim % 8 or layer.head_v_dim % 8 or layer.head_k_dim > MAX_KEY_SIZE:
        return f"heads of {layer.head_k_dim} and {layer.head_v_dim} are no multiples of 8 up to {MAX_KEY_SIZE}"
    if not 2 <= layer.conv_kernel_size <= 4 or layer.activation != "silu":
        return f"a convolution of {layer.conv_kernel_size} with {layer.activation}"
    if any(dtype not in DTYPES for dtype in layer.get_state_dtype()):
        return f"states are {layer.get_state_dtype()}"
    return None


class DeltaNet:
    """The kernels between a layer's projections: convolution, directions and gates, recurrence; one parallel region.

    Args:
        layer: vLLM's, once it is made.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.k_heads, self.v_heads = layer.num_k_heads // layer.tp_size, layer.num_v_heads // layer.tp_size
        self.k_dim, self.v_dim, self.width = layer.head_k_dim, layer.head_v_dim, layer.conv_kernel_size
        self.keys = self.k_heads * self.k_dim
        self.channels = 2 * self.keys + self.v_heads * self.v_dim
        self._made_of: tuple[Any, ...] = ()
        self._call = Call(
            ("vac_causal_conv", "vac_causal_conv_args"),
            ("vac_delta_inputs", "vac_delta_inputs_args"),
            ("vac_gated_delta", "vac_gated_delta_args"),
        )
        conv, inputs, delta = self._call.args
        conv.channels, conv.width = self.channels, self.width
        inputs.num_k_heads, inputs.num_v_heads, inputs.k_dim = self.k_heads, self.v_heads, self.k_dim
        delta.num_k_heads, delta.num_v_heads = self.k_heads, self.v_heads
        delta.k_dim, delta.v_dim = self.k_dim, self.v_dim

    def _take_parameters(self) -> None:
        """In FP32, as the kernels read them; again when they were loaded again."""
        layer = self._layer
        weight = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", layer.conv1d.weight)
        sources = (weight, layer.conv1d.bias, layer.A_log, layer.dt_bias)
        made_of = tuple((source.data_ptr(), source._version) for source in sources if source is not None)
        if made_of == self._made_of:
            return
        conv, inputs, _ = self._call.args
        self._weight = weight.detach().float().view(self.channels, self.width).t().contiguous()
        self._bias = None if layer.conv1d.bias is None else layer.conv1d.bias.detach().float().contiguous()
        self._rate = -layer.A_log.detach().float().exp()
        self._dt_bias = layer.dt_bias.detach().float().contiguous()
        conv.weight, conv.bias = _floats(self._weight), _floats(self._bias)
        inputs.rate, inputs.dt_bias = _floats(self._rate), _floats(self._dt_bias)
        self._made_of = made_of

    def __call__(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        requests: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Fill ``out`` and go on in the caches.

        mixed_qkv: [tokens, channels]; a, b: [tokens, v heads]; out: [tokens, v heads, v_dim], of one dtype, rows at any
        stride; caches: convolution [slots, width - 1, channels] of that dtype, states [slots, v heads, v_dim, k_dim];
        requests: query_start_loc int32 [n + 1], slots int32 [n], has_state bool [n].
        """
        self._take_parameters()
        tokens, dtype = mixed_qkv.shape[0], mixed_qkv.dtype
        conv_cache, states = caches
        if conv_cache.dtype != dtype:
            raise TypeError(f"the convolution's state is {conv_cache.dtype}, its input {dtype}")
        convolved = torch.empty((tokens, self.channels), dtype=dtype)
        directions = torch.empty((tokens, self.k_heads, 2, self.k_dim))
        gates = torch.empty((tokens, self.v_heads, 2))
        conv, inputs, delta = self._call.args
        starts, slots, has_state = (tensor.contiguous() for tensor in requests)
        for args in (conv, delta):
            args.requests.num_requests = slots.shape[0]
            args.requests.query_start_loc = ffi.cast("int32_t *", starts.data_ptr())
            args.requests.slots = ffi.cast("int32_t *", slots.data_ptr())
            args.requests.has_state = ffi.cast("uint8_t *", has_state.data_ptr())
        conv.dtype = inputs.dtype = delta.dtype = DTYPES[dtype]
        conv.x, conv.x_stride = pointer(mixed_qkv), mixed_qkv.stride(0)
        conv.out, conv.out_stride = pointer(convolved), self.channels
        conv.state = pointer(conv_cache)
        conv.state_slot_stride, conv.state_row_stride = conv_cache.stride(0), conv_cache.stride(1)
        inputs.num_tokens = tokens
        inputs.x, inputs.x_stride = pointer(convolved), self.channels
        inputs.a, inputs.a_stride, inputs.b, inputs.b_stride = pointer(a), a.stride(0), pointer(b), b.stride(0)
        inputs.directions = delta.directions = _floats(directions)
        inputs.gates = delta.gates = _floats(gates)
        delta.state_dtype = DTYPES[states.dtype]
        delta.value = ffi.cast("char *", convolved.data_ptr()) + 2 * self.keys * dtype.itemsize
        delta.value_stride = self.channels
        delta.out, delta.out_stride = pointer(out), out.stride(0)
        delta.state, delta.state_slot_stride = pointer(states), states.stride(0)
        self._call.run()


def _floats(tensor: torch.Tensor | None) -> Any:
    return ffi.NULL if tensor is None else ffi.cast("float *", tensor.data_ptr())


class ArmQwenGatedDeltaNetAttention(QwenGatedDeltaNetAttention):
    """Qwen3-Next's and Qwen3.5's recurrent layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reason = misfit(self)
        self._vac_net = DeltaNet(self) if reason is None else None
        if reason is not None:
            _need_upstream(self.prefix, "gated delta net", reason)

    def forward_cpu(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [tokens, hidden] -> the same."""
        if self._vac_net is None:
            upstream: torch.Tensor = super().forward_cpu(hidden_states)
            return upstream
        net: DeltaNet = self._vac_net
        mixed_qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        if self.gqa_interleaved_layout:
            query, key, value, z, b, a = self.fix_query_key_value_ordering(mixed_qkvz, ba)
            mixed_qkv = torch.cat([part.flatten(1) for part in (query, key, value)], dim=-1)
        else:
            mixed_qkv, z = mixed_qkvz.split([net.channels, net.v_heads * net.v_dim], dim=-1)
            z = z.reshape(z.size(0), -1, net.v_dim)
            b, a = ba.chunk(2, dim=-1)
        out = torch.zeros((hidden_states.shape[0], net.v_heads, net.v_dim), dtype=hidden_states.dtype)
        metadata = get_forward_context().attn_metadata
        # A profiling run has none.
        if isinstance(metadata, dict):
            _attend(self, net, metadata[self.prefix], (mixed_qkv, b, a, out))
        result: torch.Tensor = self._output_projection(out, z)
        return result


def _attend(layer: Any, net: DeltaNet, metadata: Any, tensors: tuple[torch.Tensor, ...]) -> None:
    """Run the step's requests: those that decode first, as vLLM orders them, which all have a state."""
    tokens = metadata.num_actual_tokens
    if tokens == 0:
        return
    if metadata.checkpoint is not None:
        raise NotImplementedError("states of a recurrent layer in the middle of a prompt are not kept on Arm CPUs")
    count = metadata.num_decodes + metadata.num_prefills
    slots = metadata.non_spec_state_indices_tensor[:count].to(torch.int32)
    has_state = metadata.has_initial_state
    has_state = torch.ones(count, dtype=torch.bool) if has_state is None else has_state[:count]
    mixed_qkv, b, a, out = (tensor[:tokens] for tensor in tensors)
    starts = metadata.non_spec_query_start_loc[: count + 1].to(torch.int32)
    net(mixed_qkv, b, a, out, (layer.kv_cache[0], layer.kv_cache[1]), (starts, slots, has_state))


def _guarded(cls: type[PluggableLayer], kind: str) -> type[PluggableLayer]:
    """The class with a look for its kernels in front of everything else."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        _need_upstream(kwargs.get("prefix") or cls.__name__, kind)
        cls.__init__(self, *args, **kwargs)

    return type(f"Arm{cls.__name__}", (cls,), {"__init__": __init__, "__module__": __name__, "__doc__": cls.__doc__})


def register() -> None:
    """Put the classes in the place of vLLM's."""
    replaced = {cls: _guarded(cls, kind) for cls, kind in _UPSTREAM.items()}
    replaced[QwenGatedDeltaNetAttention] = ArmQwenGatedDeltaNetAttention
    for cls, ours in replaced.items():
        if cls.__name__ not in op_registry_oot:
            PluggableLayer.register_oot(ours, name=cls.__name__)
