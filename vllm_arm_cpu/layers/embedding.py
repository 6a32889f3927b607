"""Token embeddings, in and out: lookup in the table as loaded or in the packed form, and logits from lm_head."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from vllm_arm_cpu.layers.linear import PackedLinear, PackOnFirstUse, share_weight
from vllm_arm_cpu.native.call import DTYPES, Call, pointer

_call: Call | None = None


def embedding(self: UnquantizedEmbeddingMethod, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
    """Rows of the table: input_ int32 or int64 [...] -> [..., hidden].

    vLLM has masked ids of other vocabulary shards before it calls this.
    """
    packed = getattr(layer, "cpu_linear", None)
    if isinstance(packed, PackedLinear):
        return packed.embedding(input_)
    table = layer.weight
    if torch.compiler.is_compiling() or table.dtype not in DTYPES or table.stride(1) != 1:
        return torch.nn.functional.embedding(input_, table)
    global _call
    if _call is None:
        _call = Call(("vac_embedding", "vac_embedding_args"))
    vocab, hidden = table.shape
    ids = input_.contiguous()
    out = torch.empty((ids.numel(), hidden), dtype=table.dtype)
    args = _call.args[0]
    args.dtype = DTYPES[table.dtype]
    args.ids, args.ids_are_int64, args.num_tokens = pointer(ids), ids.dtype == torch.int64, ids.numel()
    args.table, args.table_row_stride, args.hidden_size = pointer(table), table.stride(0), hidden
    args.vocab_start, args.vocab_end = 0, vocab
    args.out, args.out_token_stride = pointer(out), hidden
    _call.run()
    return out.view(*ids.shape, hidden)


def tie_weights(
    self: UnquantizedEmbeddingMethod, layer: torch.nn.Module, embed_tokens: torch.nn.Module
) -> torch.nn.Module:
    """Let lm_head have the embedding's weight, as vLLM's does, also where the embedding is torch's own (Whisper).

    vLLM never says so of that one's weight: it is told here that lm_head's kernel will hold it.
    """
    layer.weight = embed_tokens.weight
    if isinstance(embed_tokens, torch.nn.Embedding):
        share_weight(embed_tokens)
        embed_tokens.forward = functools.partial(embedding, self, embed_tokens)
    return layer


class ArmLogitsProcessor(LogitsProcessor):
    """vLLM's logits processor; where our kernel holds lm_head, it writes FP32.

    The sampler wants FP32 in any case: that saves its pass over the logits,
    and their rounding to the model's dtype.
    """

    def _apply_head(
        self, lm_head: VocabParallelEmbedding, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None
    ) -> torch.Tensor:
        """hidden_states [..., hidden] -> logits [..., vocab of this rank]."""
        linear: Any = getattr(lm_head, "cpu_linear", None)
        # Others do not call the layer's linear.
        plain = isinstance(lm_head.quant_method, (UnquantizedEmbeddingMethod, UnquantizedLinearMethod))
        if plain and isinstance(linear, PackOnFirstUse):
            linear = linear.pack()
        exact = self.head_dtype in (None, hidden_states.dtype, torch.float32)
        if plain and exact and hasattr(linear, "logits"):
            logits: torch.Tensor = linear.logits(hidden_states, embedding_bias)
            return logits
        if self.head_dtype not in (None, hidden_states.dtype) and lm_head.weight.numel() == 0:
            raise ValueError(
                f"head_dtype={self.head_dtype} with a {hidden_states.dtype} model: the kernel that holds lm_head has "
                "no such output. VAC_LINEAR=vac gives float32, VAC_LINEAR=torch any"
            )
        logits = super()._apply_head(lm_head, hidden_states, embedding_bias)
        return logits


def register() -> None:
    """Put them in the place of vLLM's.

    vLLM's embedding method has no hook of its own; two of its methods are replaced.
    """
    UnquantizedEmbeddingMethod.embedding = embedding
    UnquantizedEmbeddingMethod.tie_weights = tie_weights
    if "LogitsProcessor" not in op_registry_oot:
        PluggableLayer.register_oot(ArmLogitsProcessor, name="LogitsProcessor")
