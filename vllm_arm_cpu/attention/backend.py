"""vLLM's attention backend on our kernels.

The metadata builder plans a step once, natively; all layers share the plan.
A layer's forward is one op list: write the step's keys and values into the
cache, then attend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec, KVCacheLayout, KVQuantMode

from vllm_arm_cpu.attention import DEFAULT_BLOCK_SIZE
from vllm_arm_cpu.attention import kv_cache as cache
from vllm_arm_cpu.native import library
from vllm_arm_cpu.native.call import DTYPES, Call, KernelError, pointer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

ffi = library.ffi
logger = init_logger("vllm.arm_cpu.attention")

HEAD_SIZE_MULTIPLE = 16
_OWN_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_ENCODER_TYPES = (AttentionType.ENCODER_ONLY, AttentionType.ENCODER)


class ArmAttentionBackend(AttentionBackend):
    """What the backend supports, and its parts."""

    # One op list writes the cache and attends.
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(cache.FORMATS)

    @staticmethod
    def get_name() -> str:
        """A member of vLLM's backend enum: layers look it up by this name."""
        return "CPU_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any multiple of 16 tokens."""
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Ours whatever the platform's default is: vLLM 0.33 chooses the size here, after the platform did."""
        return DEFAULT_BLOCK_SIZE

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Any multiple of 16."""
        return head_size % HEAD_SIZE_MULTIPLE == 0

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Heads outside, the tokens of a block inside."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """All that vLLM has: decoder and encoder self-attention, and a decoder's attention to an encoder."""
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *_ENCODER_TYPES)

    @classmethod
    def unsupported_reason(cls, config: AttentionSelectorConfig) -> str | None:
        """Why a layer is not ours, naming what is asked and what is allowed, or None."""
        if config.use_mla or config.use_sparse:
            return "multi-head latent and sparse attention have no kernel of ours"
        if not cls.supports_attn_type(config.attn_type):
            return f"{config.attn_type} attention has no kernel of ours"
        if not cls.supports_head_size(config.head_size):
            return f"head size {config.head_size} is not a multiple of {HEAD_SIZE_MULTIPLE}"
        if config.dtype not in DTYPES:
            return f"{config.dtype} is none of {', '.join(map(str, DTYPES))}"
        asked = config.kv_cache_dtype or "auto"
        if asked not in cache.FORMATS or _OWN_TYPES.get(asked, config.dtype) != config.dtype:
            return (
                f"--kv-cache-dtype {asked} with a {config.dtype} model (supported: auto, the model's own type, "
                "int8, fp8_e4m3)"
            )
        if config.block_size is not None and config.block_size % 16 != 0:
            return f"block size {config.block_size} is not a multiple of 16"
        if config.use_mm_prefix:
            return "bidirectional multimodal prefixes have no kernel of ours"
        return None

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """INT8 keeps its scales beside the block: what a token and head take, in bytes."""
        if spec.state_content_bytes is not None or spec.kv_quant_mode != KVQuantMode.INT8_PER_TOKEN_HEAD:
            return spec
        return replace(spec, state_content_bytes=spec.head_size + spec.head_size_v + cache.SCALE_BYTES)

    @staticmethod
    def get_impl_cls() -> type[ArmAttentionImpl]:
        return ArmAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[ArmAttentionMetadataBuilder]:
        return ArmAttentionMetadataBuilder


@dataclass
class ArmAttentionMetadata:
    """One step's batch, shared by the layers of a KV cache group.

    Attributes:
        num_actual_tokens: tokens without padding.
        query_start_loc: int32 [num_reqs + 1].
        seq_lens: int32 [num_reqs], this step's tokens included.
        block_table: int32 [num_reqs, blocks].
        slot_mapping: int64 [>= num_actual_tokens].
        request_causal: uint8 [num_reqs] where requests differ, else None.
        plan: int32, what ``vac_attention_plan`` made of the batch.
        encoder_cache: [blocks, kv_heads, block_size, 2 * head_size] for keys and
            values that do not outlive the step, or None.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool
    request_causal: torch.Tensor | None
    plan: torch.Tensor
    encoder_cache: torch.Tensor | None = None


class ArmAttentionMetadataBuilder(AttentionMetadataBuilder[ArmAttentionMetadata]):
    """Plans each step in native code."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._lib = library.load()
        self._num_threads = self._lib.vac_max_threads()
        self._plans, self._turn = [torch.empty(0, dtype=torch.int32)] * 2, 0
        self._args = ffi.new("vac_attention_plan_args *")
        self._args.num_heads = get_num_attention_heads_from_layers(
            vllm_config, layer_names
        ) or vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        self._args.num_kv_heads = kv_cache_spec.num_kv_heads
        self._args.num_threads = self._num_threads
        self._args.sliding_window = self._shared_window()
        self._encoder_only = isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)
        # Of requests that are not causal; vLLM's window then reaches as far ahead as behind.
        self._args.sliding_window_ahead = self._args.sliding_window

    def _shared_window(self) -> int:
        """The window of all layers of the group, 0 if they differ; the plan is right with any."""
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        windows = {getattr(layer.impl, "sliding_window", 0) for layer in layers.values()}
        return int(windows.pop()) if len(windows) == 1 else 0

    def plan(
        self,
        num_reqs: int,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        causal: bool = True,
        request_causal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Divide a step's attention: int32 [num_reqs + 1], int32 [num_reqs] and, where requests differ, uint8.

        The plan lies in one of two buffers that are used in turn: it is whole until the step after the next one.

        Raises:
            KernelError: a batch that the kernels refuse (a bug, not bad input).
        """
        self._turn ^= 1
        plan = self._plans[self._turn]
        size = self._lib.vac_attention_plan_size(num_reqs, self._num_threads)
        if plan.numel() * 4 < size:
            plan = self._plans[self._turn] = torch.empty(size // 2, dtype=torch.int32)
        args = self._args
        args.query_start_loc = ffi.cast("int32_t *", query_start_loc.data_ptr())
        args.seq_lens = ffi.cast("int32_t *", seq_lens.data_ptr())
        args.request_causal = ffi.NULL if request_causal is None else ffi.cast("uint8_t *", request_causal.data_ptr())
        args.num_reqs, args.causal = num_reqs, causal
        status = self._lib.vac_attention_plan(args, ffi.cast("int32_t *", plan.data_ptr()), plan.numel() * 4)
        if status != 0:
            raise KernelError(
                f"vac_attention_plan refused a batch of {num_reqs} requests: query_start_loc "
                f"{query_start_loc[: num_reqs + 1].tolist()}, seq_lens {seq_lens[:num_reqs].tolist()}"
            )
        return plan

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> ArmAttentionMetadata:
        """Plan the step's attention."""
        common = common_attn_metadata
        causal, request_causal = common.causal, None
        if isinstance(causal, torch.Tensor):
            request_causal = causal.to(torch.uint8).contiguous()
            causal = True
        # vLLM pads neither on a CPU, but says so nowhere.
        query_start_loc = common.query_start_loc[: common.num_reqs + 1]
        seq_lens = common.seq_lens[: common.num_reqs].to(torch.int32)
        block_table, slot_mapping, encoder_cache = common.block_table_tensor, common.slot_mapping, None
        if self._encoder_only:
            block_table, slot_mapping, encoder_cache = self._encoder_blocks(query_start_loc, seq_lens)
        plan = self.plan(common.num_reqs, query_start_loc, seq_lens, bool(causal), request_causal)
        return ArmAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            slot_mapping=slot_mapping,
            causal=bool(causal),
            request_causal=request_causal,
            plan=plan,
            encoder_cache=encoder_cache,
        )

    def _encoder_blocks(
        self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Block table, slots and memory for the keys and values of whole sequences, one behind the other."""
        spec = self.kv_cache_spec
        lengths = (query_start_loc[1:] - query_start_loc[:-1]).long()
        if not torch.equal(lengths, seq_lens.long()):
            raise KernelError(
                f"encoder attention over parts of sequences: queries {lengths.tolist()} of {seq_lens.tolist()} tokens"
            )
        blocks = -(-lengths // spec.block_size)
        first = torch.cumsum(blocks, 0) - blocks
        width = int(blocks.max()) if len(blocks) else 0
        block_table = (first[:, None] + torch.arange(width)).to(torch.int32)
        tokens = torch.arange(int(lengths.sum()))
        slot_mapping = tokens + (first * spec.block_size - query_start_loc[:-1]).repeat_interleave(lengths)
        shape = (spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
        return block_table, slot_mapping, _encoder_cache(int(blocks.sum()), shape, spec.dtype)


_encoder_caches: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}


def _encoder_cache(num_blocks: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory for at least so many blocks of encoder layers, which use it one after another; it grows."""
    held = _encoder_caches.get((shape, dtype))
    if held is None or held.shape[0] < num_blocks:
        held = torch.empty(num_blocks, *shape, dtype=dtype)
        _encoder_caches[shape, dtype] = held
    return held


_workspaces: dict[tuple[int, int, int], torch.Tensor] = {}


def _workspace(head_size: int, v_head_size: int, num_threads: int) -> torch.Tensor:
    """The workspace that all layers of these head sizes share, zeroed once."""
    key = (head_size, v_head_size, num_threads)
    if key not in _workspaces:
        size = library.load().vac_attention_workspace_size(head_size, v_head_size, num_threads)
        _workspaces[key] = torch.zeros(size + 64, dtype=torch.uint8)
    return _workspaces[key]


class ArmAttentionImpl(AttentionImpl):
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            raise ValueError(f"attention arguments without a kernel of ours: {', '.join(kwargs)}")
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale = float(scale)
        self.num_queries_per_kv = num_heads // num_kv_heads
        self._encoder = attn_type in _ENCODER_TYPES
        # Nothing is kept of an encoder's keys and values.
        self.kv_cache_dtype = "auto" if self._encoder else kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = sliding_window or 0
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.sinks = sinks
        self._alibi = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self._sinks_fp32: torch.Tensor | None = None
        self._attend = Call(("vac_attention", "vac_attention_args"))
        self._write_and_attend = Call(
            ("vac_kv_cache_write", "vac_kv_cache_write_args"), ("vac_attention", "vac_attention_args")
        )
        self._prepared_for: tuple[int, ...] = ()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Loaded, or loaded again: sinks and scales have new values."""
        self._prepared_for = ()

    def _prepare(self, layer: Any, kv_cache: torch.Tensor, v_head_size: int, dtype: torch.dtype) -> None:
        """Fill in what stays the same from step to step, once the cache is there."""
        lib = library.load()
        if self.sinks is not None:
            # Loaded after the layer was built.
            self._sinks_fp32 = self.sinks.to(torch.float32).contiguous()
        workspace = _workspace(self.head_size, v_head_size, lib.vac_max_threads())
        aligned = -(-workspace.data_ptr() // 64) * 64
        for args in (self._attend.args[0], *self._write_and_attend.args):
            cache.set_cache(args, kv_cache, self.head_size, v_head_size, dtype, self.kv_cache_dtype)
            # Of FP8 checkpoints; other formats do not read them.
            args.k_scale, args.v_scale = layer._k_scale_float, layer._v_scale_float
        for args in (self._attend.args[0], self._write_and_attend.args[1]):
            args.workspace = ffi.cast("void *", aligned)
            args.alibi_slopes = ffi.cast("float *", pointer(self._alibi))
            args.sinks = ffi.cast("float *", pointer(self._sinks_fp32))
            args.num_heads, args.num_kv_heads = self.num_heads, self.num_kv_heads
            args.sliding_window = self.sliding_window
            # A window reaches as far ahead as behind where causality does not end it.
            args.sliding_window_ahead = self.sliding_window
            args.scale, args.softcap = self.scale, self.logits_soft_cap
        self._prepared_for = (kv_cache.data_ptr(), *kv_cache.shape)

    def prepared(self, layer: Any, kv_cache: torch.Tensor, v_head_size: int, dtype: torch.dtype) -> tuple[Any, Any]:
        """The arguments of writing the cache and of attending, as far as they stay the same from step to step."""
        if self._prepared_for != (kv_cache.data_ptr(), *kv_cache.shape):
            self._prepare(layer, kv_cache, v_head_size, dtype)
        write, attend = self._write_and_attend.args
        return write, attend

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: ArmAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write key and value into the cache, attend, fill ``output``.

        query: [tokens, num_heads, head_size]; key, value: [tokens,
        num_kv_heads, head_size] (in cross attention, of the encoder's tokens), or None
        where the layer reads what is in the cache; kv_cache: [blocks, num_kv_heads,
        block_size, what a token takes]; output: [tokens, num_heads, v_head_size].
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("quantized attention output is not supported on Arm CPUs")
        if attn_metadata is None:
            # A profiling run without a cache.
            return output.zero_()
        if self._encoder:
            assert attn_metadata.encoder_cache is not None
            kv_cache = attn_metadata.encoder_cache
        v_head_size = output.shape[-1]
        if self._prepared_for != (kv_cache.data_ptr(), *kv_cache.shape):
            self._prepare(layer, kv_cache, v_head_size, query.dtype)
        if key is None or value is None or self.kv_sharing_target_layer_name is not None:
            call = self._attend
            args = call.args[0]
        else:
            call = self._write_and_attend
            write, args = call.args
            num_tokens = attn_metadata.num_actual_tokens
            if self.attn_type == AttentionType.ENCODER_DECODER:
                # Requests in their first step have an encoder's tokens to write; the rest wrote theirs.
                num_tokens = attn_metadata.slot_mapping.shape[0]
                if num_tokens > key.shape[0]:
                    raise KernelError(f"cross attention: {num_tokens} slots for {key.shape[0]} encoder tokens")
            cache.set_write(write, key, value, attn_metadata.slot_mapping, num_tokens)
        args.query, args.output = pointer(query), pointer(output)
        args.query_token_stride, args.query_head_stride = query.stride(0), query.stride(1)
        args.output_token_stride, args.output_head_stride = output.stride(0), output.stride(1)
        table = attn_metadata.block_table
        args.block_table, args.block_table_stride = ffi.cast("int32_t *", table.data_ptr()), table.stride(0)
        args.query_start_loc = ffi.cast("int32_t *", attn_metadata.query_start_loc.data_ptr())
        args.seq_lens = ffi.cast("int32_t *", attn_metadata.seq_lens.data_ptr())
        args.request_causal = ffi.cast("uint8_t *", pointer(attn_metadata.request_causal))
        args.causal = attn_metadata.causal
        args.plan = ffi.cast("int32_t *", attn_metadata.plan.data_ptr())
        call.run()
        return output
