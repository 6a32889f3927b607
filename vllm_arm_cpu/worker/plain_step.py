"""A short way through a step of an ordinary decoder-only model.

vLLM's model runner serves speculative decoding, LoRA, images, pipelines and
more with one function, whose hundreds of small tensor operations take longer
than a small model. Where nothing of that is configured, a step needs little:
the model's inputs from the requests' state, which one native call fills in,
and a plan of the attention. Everything before (the requests' state) and behind
(sampling) stays vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm import envs as vllm_envs
from vllm import forward_context
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.v1.kv_cache_interface import AttentionSpec, CrossAttentionSpec, EncoderOnlyAttentionSpec
from vllm.v1.worker.block_table import SlotMappingMode
from vllm.v1.worker.gpu_model_runner import ExecuteModelState

from vllm_arm_cpu import envs
from vllm_arm_cpu.attention.backend import ArmAttentionMetadata, ArmAttentionMetadataBuilder
from vllm_arm_cpu.layers import whole_model
from vllm_arm_cpu.layers.whole_model import WholeModel
from vllm_arm_cpu.native import library

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import SamplerOutput

ffi = library.ffi


def obstacle(runner: Any) -> str | None:
    """What a runner has to do that the short way does not know of, or None; known once its KV cache is there."""
    config, model_config, parallel = runner.vllm_config, runner.model_config, runner.parallel_config
    batch = runner.input_batch
    there = {
        "VAC_DECODER=0": not envs.VAC_DECODER,
        "speculative decoding": runner.speculative_config is not None,
        "LoRA": runner.lora_config is not None,
        "pooling": runner.is_pooling_model,
        "inputs other than text": runner.supports_mm_inputs or runner.enable_prompt_embeds,
        "an encoder": model_config.is_encoder_decoder,
        "positions of several dimensions": runner.uses_mrope,
        "parallelism other than of tensors": parallel.world_size_across_dp != parallel.tensor_parallel_size
        or parallel.enable_dbo,
        "asynchronous scheduling": runner.use_async_scheduling,
        "expert load balancing": runner.eplb_state is not None,
        "connectors": config.kv_transfer_config is not None or config.ec_transfer_config is not None,
        "compilation": config.compilation_config.mode not in (None, CompilationMode.NONE),
        "statistics": forward_context.track_batchsize
        or vllm_envs.VLLM_COMPUTE_NANS_IN_LOGITS
        or config.observability_config.cudagraph_metrics
        or config.observability_config.enable_layerwise_nvtx_tracing,
        "hidden states of inner layers": runner.use_aux_hidden_state_outputs,
        "look-back tokens": runner.lookback_token_ids is not None,
        "attention that depends on the request": runner.is_mm_prefix_lm or model_config.rswa_window is not None,
        "layers that skip tokens": runner.cache_config.kv_sharing_fast_prefill or runner.cache_config.use_replayssm,
        "no KV cache": not runner.kv_cache_config.kv_cache_groups,
        # Upstream's CPU runner makes both sides of a buffer one tensor.
        "buffers of two devices": any(
            buffer.gpu is not buffer.cpu
            for buffer in (runner.input_ids, runner.query_start_loc, runner.discard_request_mask)
        ),
        "tokens of another type": (batch.token_ids_cpu.dtype, batch.num_computed_tokens_cpu.dtype)
        != (np.int32, np.int32)
        or batch.num_tokens_no_spec.dtype != np.int32,
    }
    for index, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        there["other caches"] = (
            there.get("other caches", False)
            or not isinstance(spec, AttentionSpec)
            or isinstance(spec, (CrossAttentionSpec, EncoderOnlyAttentionSpec))
            or batch.block_table[index].slot_mapping_mode != SlotMappingMode.TOKEN_TO_KV_SLOT
            or any(
                type(part.get_metadata_builder(0)) is not ArmAttentionMetadataBuilder
                or part.kernel_block_size is not None
                for part in runner.attn_groups[index]
            )
        )
    return next((name for name, found in there.items() if found), None)


@dataclass(frozen=True)
class _Group:
    """The layers that share a plan, and the metadata that they are given: the same object in every step."""

    builder: ArmAttentionMetadataBuilder
    metadata: ArmAttentionMetadata


class PlainStep:
    """The short way; for a runner without an :func:`obstacle`.

    Attributes:
        split_because: why the model is more than one native call, or None.
    """

    def __init__(self, runner: Any) -> None:
        self._runner, self._batch = runner, runner.input_batch
        self._lib = library.load()
        self._scheduled = np.ones(runner.max_num_reqs, dtype=np.int32)
        self._num_incomplete = 0
        self._slices: tuple[int, torch.Tensor | None, torch.Tensor | None] = (0, None, None)
        batch = self._batch
        self._groups: list[_Group] = []
        by_layer: dict[str, ArmAttentionMetadata] = {}
        slots: dict[str, torch.Tensor] = {}
        tables = [batch.block_table[index] for index in range(len(runner.kv_cache_config.kv_cache_groups))]
        native = ffi.new("vac_step_group[]", len(tables))
        for index, table in enumerate(tables):
            blocks, slot_mapping = table.block_table.cpu, table.slot_mapping.gpu
            native[index].block_table = ffi.cast("int32_t *", blocks.data_ptr())
            native[index].block_table_stride = blocks.stride(0)
            native[index].slot_mapping = ffi.cast("int64_t *", slot_mapping.data_ptr())
            native[index].block_size = table.block_size
            for part in runner.attn_groups[index]:
                metadata = ArmAttentionMetadata(
                    num_actual_tokens=0,
                    max_query_len=0,
                    max_seq_len=0,
                    query_start_loc=runner.query_start_loc.cpu,
                    seq_lens=runner.seq_lens,
                    block_table=blocks,
                    slot_mapping=slot_mapping,
                    causal=True,
                    request_causal=None,
                    plan=torch.empty(0, dtype=torch.int32),
                )
                self._groups.append(_Group(part.get_metadata_builder(0), metadata))
                by_layer.update(dict.fromkeys(part.layer_names, metadata))
                slots.update(dict.fromkeys(part.layer_names, slot_mapping))
        compilation = runner.compilation_config
        self._context = ForwardContext(
            no_compile_layers=compilation.static_forward_context,
            all_moe_layers=compilation.static_all_moe_layers if compilation.fast_moe_cold_start else None,
            attn_metadata=by_layer,
            slot_mapping=slots,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
        )
        self._slots = slots
        model = runner.get_model()
        self.split_because = whole_model.misfit(model)
        self._whole = WholeModel(model) if self.split_because is None else None
        self._args = self._input_args(native, len(tables))
        self._append = self._append_args()
        self._keep = native

    def _input_args(self, groups: Any, num_groups: int) -> Any:
        runner, batch = self._runner, self._batch
        args = ffi.new("vac_step_inputs_args *")
        args.num_computed_tokens = ffi.cast("int32_t *", batch.num_computed_tokens_cpu.ctypes.data)
        args.num_known_tokens = ffi.cast("int32_t *", batch.num_tokens_no_spec.ctypes.data)
        args.token_ids = ffi.cast("int32_t *", batch.token_ids_cpu.ctypes.data)
        args.token_ids_stride = batch.token_ids_cpu.shape[1]
        args.groups, args.num_groups = groups, num_groups
        args.max_tokens = runner.max_num_tokens
        args.input_ids = ffi.cast("int32_t *", runner.input_ids.cpu.data_ptr())
        args.positions = ffi.cast("int64_t *", runner.positions.data_ptr())
        args.query_start_loc = ffi.cast("int32_t *", runner.query_start_loc.cpu.data_ptr())
        args.seq_lens = ffi.cast("int32_t *", runner.seq_lens.data_ptr())
        args.incomplete = ffi.cast("uint8_t *", runner.discard_request_mask.cpu.data_ptr())
        return args

    def _append_args(self) -> Any:
        args, batch = ffi.new("vac_step_append_args *"), self._batch
        for name in ("incomplete", "token_ids_stride"):
            setattr(args, name, getattr(self._args, name))
        args.token_ids = ffi.cast("int32_t *", batch.token_ids_cpu.ctypes.data)
        args.is_token_id = ffi.cast("uint8_t *", batch.is_token_ids.ctypes.data)
        args.num_known_tokens = ffi.cast("int32_t *", batch.num_tokens_no_spec.ctypes.data)
        return args

    def takes(self, scheduler_output: SchedulerOutput) -> bool:
        """Whether the step has tokens, for the batch that the buffers belong to."""
        return bool(scheduler_output.total_num_scheduled_tokens) and self._runner.input_batch is self._batch

    def run(self, scheduler_output: SchedulerOutput) -> None:
        """The model's forward and its logits, left where ``sample_tokens`` finds them.

        Raises:
            RuntimeError: a step was run and not sampled, or is beyond the model's length (bugs, not bad input).
        """
        runner, batch = self._runner, self._batch
        if runner.execute_model_state is not None:
            raise RuntimeError("sample_tokens() must be called between two steps")
        runner._update_states(scheduler_output)
        num_reqs, num_tokens = batch.num_reqs, scheduler_output.total_num_scheduled_tokens
        args = self._args
        args.num_reqs = num_reqs
        if num_tokens == num_reqs:
            args.num_scheduled_tokens = ffi.NULL
        else:
            counts = scheduler_output.num_scheduled_tokens
            self._scheduled[:num_reqs] = [counts[request] for request in batch.req_ids]
            args.num_scheduled_tokens = ffi.cast("int32_t *", self._scheduled.ctypes.data)
        if self._lib.vac_step_inputs(args) != 0 or args.num_tokens != num_tokens:
            raise RuntimeError(f"a step of {num_tokens} tokens for {num_reqs} requests does not fit its batch")
        self._num_incomplete = args.num_incomplete
        for group in self._groups:
            metadata = group.metadata
            metadata.num_actual_tokens = num_tokens
            metadata.max_query_len, metadata.max_seq_len = args.max_query_len, args.max_seq_len
            metadata.plan = group.builder.plan(num_reqs, metadata.query_start_loc, metadata.seq_lens)
        if self._slices[0] != num_tokens:
            self._slices = (num_tokens, runner.input_ids.cpu[:num_tokens], runner.positions[:num_tokens])
        _, input_ids, positions = self._slices
        self._context.moe_layer_index = 0
        logits = None
        if self._whole is not None and self._whole.usable():
            hidden_states, logits = self._whole.run(
                self._context.attn_metadata, input_ids, positions, with_logits=num_tokens == num_reqs
            )
        else:
            with override_forward_context(self._context):
                hidden_states = runner._model_forward(
                    input_ids=input_ids, positions=positions, intermediate_tensors=None, inputs_embeds=None
                )
        sampled_from = hidden_states
        if num_tokens != num_reqs:
            sampled_from = hidden_states[runner.query_start_loc.cpu[1 : num_reqs + 1] - 1]
        if logits is None:
            logits = runner.model.compute_logits(sampled_from)
        runner.execute_model_state = ExecuteModelState(
            scheduler_output, logits, None, None, hidden_states, sampled_from, None, None, None, self._slots
        )
        runner.kv_connector_output = None

    def bookkeep(self, sampler_output: SamplerOutput) -> tuple[Any, ...] | None:
        """Put sampled tokens into the requests' state, what vLLM's ``_bookkeeping_sync`` does and returns.

        None, and nothing done, where there is more to do: logprobs, or requests whose prompt is not yet done.
        """
        runner, batch, sampled = self._runner, self._batch, sampler_output.sampled_token_ids
        if (
            self._num_incomplete
            or runner.num_prompt_logprobs
            or sampler_output.logprobs_tensors is not None
            or sampled.shape != (batch.num_reqs, 1)
            or runner.input_batch is not batch
        ):
            return None
        if sampled.dtype != torch.int64 or not sampled.is_contiguous():
            sampled = sampled.long().contiguous()
        args = self._append
        args.sampled, args.num_reqs = ffi.cast("int64_t *", sampled.data_ptr()), batch.num_reqs
        if self._lib.vac_step_append(args) != 0:
            raise RuntimeError(f"sampled tokens exceed the model's length of {runner.max_model_len}")
        tokens: list[list[int]] = sampled.tolist()
        request_ids = batch.req_ids
        for request_id, token in zip(request_ids, tokens, strict=True):
            runner.requests[request_id].output_token_ids.append(token[0])
        return {}, None, None, tokens, {}, request_ids.copy(), batch.req_id_to_index.copy(), []
