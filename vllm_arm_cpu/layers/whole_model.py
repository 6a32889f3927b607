"""A model of Llama's family from token ids to logits as one native call.

Where all of a model's layers are one segment (see ``layers/decoder.py``) and
the embedding, the last norm and lm_head have kernels, these become the first
and the last ops of the same list.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models import llama, mixtral, qwen2, qwen3, qwen3_moe

from vllm_arm_cpu.layers import decoder, norm
from vllm_arm_cpu.layers.decoder import Hooks, NativeLinear, Segment, Step, forward_of, same_code
from vllm_arm_cpu.layers.embedding import ArmLogitsProcessor
from vllm_arm_cpu.layers.linear import PackedLinear, PackOnFirstUse
from vllm_arm_cpu.layers.ranks import Ranks
from vllm_arm_cpu.native.call import DTYPES
from vllm_arm_cpu.native.program import Rows, Slot

_MODELS = (
    llama.LlamaForCausalLM,
    mixtral.MixtralForCausalLM,
    qwen2.Qwen2ForCausalLM,
    qwen3.Qwen3ForCausalLM,
    qwen3_moe.Qwen3MoeForCausalLM,
)


def misfit(model: Any) -> str | None:
    """Why a loaded model cannot be one call, or None."""
    inner = getattr(model, "model", None)
    segments = decoder.segments(model)
    if len(segments) != 1 or segments[0].parent is not inner or segments[0].layers != list(inner.layers):
        return "not all layers are one op list"
    if segments[0].fresh:
        return "outputs are kept for longer than a step"
    if not same_code(forward_of(model), tuple(known.forward for known in _MODELS)) or not same_code(
        type(model).compute_logits, tuple(known.compute_logits for known in _MODELS)
    ):
        return f"{type(model).__name__} is not of Llama's family"
    embedding, head, processor = inner.embed_tokens, model.lm_head, model.logits_processor
    dtype = segments[0].buffers.dtype
    if not same_code(type(inner).embed_input_ids, (llama.LlamaModel.embed_input_ids,)):
        return "its embedding is not only looked up"
    plain = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)
    if (
        type(embedding) is not VocabParallelEmbedding
        or type(embedding.quant_method) is not UnquantizedEmbeddingMethod
        or not _divided(embedding, segments[0].ranks)
        or (not isinstance(embedding.cpu_linear, PackedLinear) and embedding.weight.dtype != dtype)
    ):
        return "its embedding is quantized, or divided in another way"
    if (
        type(head) not in (ParallelLMHead, VocabParallelEmbedding)
        or type(head.quant_method) not in plain
        or not _divided(head, segments[0].ranks)
        or _native_head(head) is None
    ):
        return "its lm_head does not run on this package's kernels"
    if (
        type(processor) is not ArmLogitsProcessor
        or processor.soft_cap is not None
        or processor.scale != 1.0
        or processor.logits_as_input
        or processor.head_dtype not in (None, dtype, torch.float32)
    ):
        return "its logits are scaled or capped"
    return norm.not_native(inner.norm, dtype)


def _divided(embedding: Any, ranks: Ranks) -> bool:
    """Whether each rank holds a part of the vocabulary, without tokens that LoRA adds."""
    return bool(embedding.tp_size == ranks.world_size and embedding.shard_indices.num_added_elements_padded == 0)


def _native_head(head: Any) -> NativeLinear | None:
    linear = head.__dict__.get("cpu_linear")
    if isinstance(linear, PackOnFirstUse):
        linear = linear.pack()
    if isinstance(linear, PackedLinear):
        return linear
    # One in INT8 (VAC_LM_HEAD) has it as a quantized layer does.
    native: NativeLinear | None = getattr(linear, "native_linear", None)
    return native


class _ModelStep(Step):
    """The layers between an embedding and a norm, and lm_head behind them."""

    last_output = "hidden"

    def __init__(self, model: Any, segment: Segment, metadata: dict[str, Any]) -> None:
        self._model = model
        self.ids, self.shard, self.logits = Slot("input_ids"), Slot("shard"), Slot("logits")
        self.without_logits = 0
        super().__init__(segment.layers, False, metadata, segment.buffers, segment.ranks)

    def _begin(self) -> None:
        embedding = self._model.model.embed_tokens
        size = self._model.model.norm.weight.shape[0]
        self.buffers.want("x", size)
        out, tokens = Rows(self.slots["x"], size), self.slots["tokens"]
        # Ids of other ranks' parts give rows of zeros.
        first = embedding.shard_indices.org_vocab_start_index
        if isinstance(embedding.cpu_linear, PackedLinear):
            embedding.cpu_linear.add_embedding_to(self.program, tokens, self.ids, out, first)
        else:
            table = embedding.weight.data
            args = self.program.op("vac_embedding", "vac_embedding_args", ids=self.ids, num_tokens=tokens, table=table)
            args.ids_are_int64, args.hidden_size, args.table_row_stride = 0, size, table.stride(0)
            args.vocab_start, args.vocab_end, args.dtype = first, first + table.shape[0], DTYPES[table.dtype]
            self.program.rows(args, "out", out, "out_token_stride")
        self.ranks.add_all_reduce(self.program, self.buffers.dtype, tokens, size, self.slots["x"])

    def _end(self, size: int) -> None:
        module, slots, head = self._model.model.norm, self.slots, _native_head(self._model.lm_head)
        assert head is not None
        hidden, out, residual = (Rows(slots[name], size) for name in ("hidden", "out", "residual"))
        self._add_sum_and_norm(module, hidden, residual, out)
        self.without_logits = self.program.pending
        self.buffers.want_bytes("workspace", head.program_workspace)
        logits = Rows(self.logits if self.ranks.world_size == 1 else self.shard, head.n)
        head.add_to(self.program, slots["tokens"], out, logits, None, slots["workspace"], torch.float32)
        if self.ranks.world_size > 1:
            self.ranks.add_all_gather(self.program, slots["tokens"], head.n, logits, self.logits)


class WholeModel:
    """Runs a model without a :func:`misfit`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        (self._segment,) = decoder.segments(model)
        self._hooks = Hooks([model])
        self._size: int = model.model.norm.weight.shape[0]
        self._vocab: int = model.logits_processor.org_vocab_size
        head = _native_head(model.lm_head)
        assert head is not None
        self._ranks = self._segment.ranks
        self._shard_columns: int = head.n
        self._columns = self._shard_columns * self._ranks.world_size
        # This rank's logits, before all ranks' stand side by side; not for one rank.
        self._shard = torch.empty(0, dtype=torch.float32)
        self._logits = [torch.empty((0, self._columns), dtype=torch.float32)] * 2
        self._views = list(self._logits)
        self._turn = 0

    def usable(self) -> bool:
        """Whether nobody wants to see what lies between the model's modules."""
        return not getattr(self._model.model, "aux_hidden_state_layers", None) and not self._hooks.found()

    def run(
        self, metadata: dict[str, Any], input_ids: torch.Tensor, positions: torch.Tensor, with_logits: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [tokens, hidden], and FP32 logits [tokens, vocab] if wanted.

        metadata: of the attention layers by name; input_ids: int32 [tokens]; positions: int64 [tokens].
        What is returned is whole until the step after the next one.
        """
        segment, tokens = self._segment, input_ids.shape[0]
        step = segment.step("model", lambda: _ModelStep(self._model, segment, metadata))
        assert isinstance(step, _ModelStep)
        buffers, program, slots = segment.buffers, step.program, step.slots
        buffers.reserve(tokens)
        out = segment.output(tokens, self._size, buffers.dtype)
        x = buffers.addresses["x"]
        program.set(step.ids, input_ids.data_ptr())
        for name, value in (("x", x), ("residual", x), ("x_stride", self._size), ("residual_stride", self._size)):
            program.set(slots[name], value)
        step.prepare_layers(metadata, tokens, positions, out)
        if not with_logits:
            program.run(0, step.without_logits)
            self._ranks.check()
            return out, None
        logits = self._room(tokens)
        program.set(step.logits, logits.data_ptr())
        if self._ranks.world_size > 1:
            if self._shard.numel() < tokens * self._shard_columns:
                self._shard = torch.empty(self._logits[self._turn].shape[0] * self._shard_columns)
            program.set(step.shard, self._shard.data_ptr())
        program.run()
        self._ranks.check()
        return out, logits

    def _room(self, rows: int) -> torch.Tensor:
        self._turn ^= 1
        turn = self._turn
        if self._views[turn].shape[0] != rows or not rows:
            if self._logits[turn].shape[0] < rows:
                self._logits[turn] = torch.empty((1 << (rows - 1).bit_length(), self._columns), dtype=torch.float32)
            self._views[turn] = self._logits[turn][:rows, : self._vocab]
        return self._views[turn]
